# SPDX-License-Identifier: Apache-2.0
"""Collects the tests of this folder only where TransformerEngine's Python package is on the path."""

import tests.examples.conftest  # noqa: F401  (makes the examples importable)
from lightning_mcore.te_cpu.load import is_prepared

if not is_prepared():
    collect_ignore_glob = ["test_*.py"]
