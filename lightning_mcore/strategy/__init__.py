# SPDX-License-Identifier: Apache-2.0
"""``MCoreStrategy``, ``MCorePrecision`` and ``MCoreModule`` run a LightningModule on megatron-core."""

import lightning

from lightning_mcore.parallel.megatron_import import import_megatron

LIGHTNING = "2.6"
"""The minor release of Lightning that this package is tested with."""


def check_lightning() -> None:
    """Raise ``ImportError`` for another minor release of Lightning, because this package uses private names of it."""
    if not lightning.__version__.startswith(f"{LIGHTNING}."):
        following = f"2.{int(LIGHTNING.split('.')[1]) + 1}"
        raise ImportError(
            f"lightning {lightning.__version__} is installed, and lightning_mcore works with {LIGHTNING}; install it:"
            f' pip install "lightning>={LIGHTNING},<{following}"'
        )


check_lightning()
import_megatron()

from lightning_mcore.strategy.strategy import MCoreStrategy  # noqa: E402 - a name that is missing is not the first error

__all__ = ["MCoreStrategy"]
