# SPDX-License-Identifier: Apache-2.0
"""``python -m lightning_mcore.checkpoint``, the same as ``lightning-mcore checkpoint``."""

import sys

from lightning_mcore.checkpoint.commands import main

sys.exit(main())
