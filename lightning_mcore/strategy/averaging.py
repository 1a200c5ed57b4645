# SPDX-License-Identifier: Apache-2.0
"""Lightning's callbacks that keep a second copy of the weights: where they are right, and where they are refused.

``WeightAveraging`` (with ``EMAWeightAveraging``) copies the module when a run begins, reads its parameters after every
step, swaps both for validation and puts the average into each checkpoint. ``StochasticWeightAveraging`` copies the
module before ``configure_model`` and reads it after each epoch. A module that builds its model with ``pipeline()`` has
no parameters yet when they copy it, or holds process groups, which cannot be copied; the sharded optimizer saves
shards, in which an average has no place, and may leave parameters scattered after a step. There the callbacks would do
nothing, fail late or write a wrong checkpoint, so the strategy calls :func:`check_averaging` when the trainer meets the
module.
"""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_mcore.strategy.module import MCoreModule


def check_averaging(module: pl.LightningModule, distributed: bool) -> None:
    """Refuse a callback that averages weights where it cannot.

    Args:
        module: The user's module, attached to its trainer.
        distributed: Whether the optimizer state is sharded.

    Raises:
        ValueError: There is such a callback.
    """
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging) and isinstance(module, MCoreModule):
            raise ValueError(
                f"{name} copies the whole module before its model is built, so that it is not available for an"
                " MCoreModule; average saved checkpoints after the run, or use a plain LightningModule"
            )
        if isinstance(callback, WeightAveraging) and distributed:
            raise ValueError(
                f"{name} writes its average into one-file checkpoints and reads parameters after every step, and"
                " use_distributed_optimizer=True writes shards and may leave parameters scattered; set it to False"
            )
