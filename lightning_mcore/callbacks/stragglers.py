# SPDX-License-Identifier: Apache-2.0
"""A callback that finds ranks which compute more slowly than others."""

import logging
import statistics
from typing import Any

import lightning.pytorch as pl
from torch.profiler import profile

from lightning_mcore.callbacks.chosen_steps import place_of
from lightning_mcore.config.value_checks import require_size
from lightning_mcore.parallel.consensus import all_gather_object

_log = logging.getLogger(__name__)


class StragglerMonitor(pl.Callback):
    """Compares the ranks' compute time in a step, excluding the time they wait for each other, and names slow ranks.

    All ranks end a step together, so its duration does not show who is slow. This callback profiles one optimizer step
    in ``every_n_steps`` and adds up the time of this rank's own kernels (on a GPU) or operations (on a CPU), without
    communication. Ranks of one pipeline stage do the same work, and are compared with their median. Rank 0 logs a
    warning for each that exceeds ``threshold``::

        step 500: rank3-tp1.pp0.cp0.dp1 computes for 1.92 s, 1.6 times the median of its stage

    The profiled step is slower, and all others cost nothing.

    Args:
        every_n_steps: Optimizer steps between two measurements; the first measures step ``every_n_steps``.
        threshold: Highest accepted ratio of a rank's time to the median.

    Raises:
        TypeError: ``every_n_steps`` is not an int.
        ValueError: ``every_n_steps`` is below 1, or ``threshold`` is not above 1.

    Examples:
        >>> from lightning_mcore.callbacks import StragglerMonitor
        >>> callback = StragglerMonitor(every_n_steps=500)
    """

    def __init__(self, every_n_steps: int = 500, threshold: float = 1.2) -> None:
        require_size("every_n_steps", every_n_steps)
        if not threshold > 1:
            raise ValueError(f"threshold={threshold} would name ranks that are not slow; choose a number above 1")
        self.every_n_steps = every_n_steps
        self.threshold = threshold
        self.seconds: list[float] = []
        """Of the last measurement, by rank."""
        self._profile: profile | None = None
        self._step = 0  # that is profiled

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Begin if the step is due."""
        step = trainer.global_step
        if self._profile is None and step and step % self.every_n_steps == 0:
            self._profile, self._step = profile(acc_events=True), step
            self._profile.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Compare the ranks after the step; collective over the world."""
        if self._profile is None or trainer.global_step == self._step:
            return
        profiled, self._profile = self._profile, None
        profiled.stop()
        strategy: Any = trainer.strategy
        layout = getattr(strategy, "layout", None)
        rank, ranks = trainer.global_rank, trainer.world_size
        stage = layout.coordinates(rank, ranks).pipeline_model_parallel_rank if layout is not None else 0
        measured = all_gather_object((stage, _own_seconds(profiled)))
        self.seconds = [seconds for _, seconds in measured]
        for rank, (stage, seconds) in enumerate(measured):
            median = statistics.median_low([other for its_stage, other in measured if its_stage == stage])
            if seconds > self.threshold * median and trainer.is_global_zero:
                _log.warning(
                    f"step {self._step}: {place_of(trainer, rank)} computes for {seconds:.2f} s,"
                    f" {seconds / median:.1f} times the median of its stage"
                )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop a profile."""
        profiled, self._profile = self._profile, None
        if profiled is not None:
            profiled.stop()


def _own_seconds(profiled: profile) -> float:
    """Return the time of kernels, or without any of operations, that do not communicate."""
    averages = profiled.key_averages()
    kernels = sum(event.self_device_time_total for event in averages if not event.key.startswith("nccl"))
    # Only torch's own operations: those around them wait for communication.
    operations = sum(event.self_cpu_time_total for event in averages if event.key.startswith("aten::"))
    return float(kernels or operations) / 1e6  # from microseconds
