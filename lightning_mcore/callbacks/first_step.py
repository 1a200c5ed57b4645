# SPDX-License-Identifier: Apache-2.0
"""A callback that measures how long a run takes to finish its first step."""

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info


class TimeToFirstStep(pl.Callback):
    """Measures the time from the construction of this callback to the end of the first optimizer step.

    The loggers get ``first_step/before_fit`` (from construction to ``fit``, such as data preparation),
    ``first_step/setup`` (process groups, the model, reading a checkpoint, sanity checks), ``first_step/step`` and their
    sum, ``first_step/total``, in seconds on rank 0. It also prints them in one line.

    Examples:
        >>> from lightning_mcore.callbacks import TimeToFirstStep
        >>> callback = TimeToFirstStep()
    """

    def __init__(self) -> None:
        self._times = [time.monotonic()]
        self._first_step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Note when the run begins."""
        if stage == "fit" and len(self._times) == 1:
            self._times.append(time.monotonic())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note when training begins."""
        if len(self._times) == 2:
            self._first_step = trainer.global_step
            self._times.append(time.monotonic())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Report after the first step."""
        if len(self._times) != 3 or trainer.global_step == self._first_step:
            return
        self._times.append(time.monotonic())
        parts = [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)]
        values = dict(zip(("before_fit", "setup", "step"), parts, strict=True), total=sum(parts))
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                named = {f"first_step/{name}": value for name, value in values.items()}
                logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        rank_zero_info(
            f"first step after {values['total']:.1f} s: {values['before_fit']:.1f} s before fit,"
            f" {values['setup']:.1f} s of setup, {values['step']:.1f} s in the step"
        )
