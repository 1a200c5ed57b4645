# SPDX-License-Identifier: Apache-2.0
"""``python -m lightning_mcore.cli``, the same as ``lightning-mcore``."""

import sys

from lightning_mcore.cli import console

sys.exit(console())
