# SPDX-License-Identifier: Apache-2.0
"""Saving and evaluating at the steps at which transformers' Trainer does, where Lightning by itself does not.

What is done every n steps there is done after the last step, too, whichever number it has: a run of 700 steps with
``save_steps=500`` leaves checkpoints of steps 500 and 700. Lightning saves and validates at multiples only. And of an
evaluation before the first step (``eval_on_start``) Lightning, for which it is a check of the code, logs nothing.
``mapping.py`` says when a run has which callback, ``build.py`` makes them.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class StepCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` for every n steps, which saves at each of them and after the last step.

    Lightning's own puts off what it should save at the last batch of an epoch, where it looks at a metric, to the next
    validation; the number of the step is a metric too, by which the newest are kept, and it is always up to date.

    Args:
        every: Optimizer steps from one checkpoint to the next.
        options: Other arguments of ``ModelCheckpoint``, by name.
    """

    def __init__(self, every: int, options: dict[str, Any]) -> None:
        super().__init__(**options, every_n_train_steps=every)
        self._every = every

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take note of the step that a run goes on from: it is saved, and not again in the middle of the next one."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Save where a step has ended that is one of them, or the last."""
        due = trainer.global_step % self._every == 0 or is_last_step(trainer)
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


class StepEvaluation(Callback):
    """Evaluates after the last step of a run, and logs what comes of an evaluation before the first one."""

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics at step 0."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Let Lightning validate after the last step: it does so where a run is asked to stop."""
        if is_last_step(trainer):
            trainer.should_stop = True


def is_last_step(trainer: pl.Trainer) -> bool:
    """Whether a run has made all its optimizer steps; False where nobody knows how many there will be.

    Args:
        trainer: While it trains.
    """
    return trainer.global_step >= trainer.estimated_stepping_batches
