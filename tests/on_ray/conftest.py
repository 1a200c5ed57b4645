# SPDX-License-Identifier: Apache-2.0
"""Collects the tests of this folder only for ``make test-ray``: each starts Ray, which takes minutes."""

import os

if "TEST_RAY" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
