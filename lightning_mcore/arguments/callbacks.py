# SPDX-License-Identifier: Apache-2.0
"""Save and evaluate at the same steps as transformers' Trainer, where Lightning alone would not.

transformers' Trainer saves and evaluates every n steps and also after the last step: a run of 700 steps with
``save_steps=500`` leaves checkpoints of steps 500 and 700. Lightning does so only at multiples of n. Lightning also
treats an evaluation before the first step (``eval_on_start``) as a check of the code, and logs nothing from it.
``mapping.py`` decides which callbacks a run has; ``build.py`` makes them.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class StepCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that saves every n steps and after the last step.

    At the last batch of an epoch, Lightning's own callback postpones a save that depends on a metric to the next
    validation. Here the metric is the step number, which keeps the newest checkpoints and is always up to date.

    Args:
        every: Optimizer steps between two checkpoints.
        options: Other arguments of ``ModelCheckpoint``, by name.
    """

    def __init__(self, every: int, options: dict[str, Any]) -> None:
        super().__init__(**options, every_n_train_steps=every)
        self._every = every

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the step that a run resumes from, because it is already saved."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Save after every n-th step, and after the last."""
        due = trainer.global_step % self._every == 0 or is_last_step(trainer)
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


class StepEvaluation(Callback):
    """Evaluates after the last step of a run, and logs the metrics of an evaluation before the first one."""

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics at step 0."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Ask the run to stop after the last step, so that Lightning validates."""
        if is_last_step(trainer):
            trainer.should_stop = True


def is_last_step(trainer: pl.Trainer) -> bool:
    """Return whether a run has made all its optimizer steps; False if their number is unknown.

    Args:
        trainer: The trainer, while it trains.
    """
    return trainer.global_step >= trainer.estimated_stepping_batches
