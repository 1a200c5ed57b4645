# SPDX-License-Identifier: Apache-2.0
"""``MCoreStrategy``, ``MCorePrecision`` and ``MCoreModule``: what runs a LightningModule on megatron-core."""

from lightning_mcore.strategy.strategy import MCoreStrategy

__all__ = ["MCoreStrategy"]
