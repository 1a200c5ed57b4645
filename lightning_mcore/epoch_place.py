# SPDX-License-Identifier: Apache-2.0
"""Where a run of Lightning stands, read from its loops and written into them.

Lightning keeps four counters of epochs and of batches, and some flags that tell its loops how to restart. What they say
depends on the hook in which a checkpoint was taken. A :class:`Place` says it in one way, and the functions here make
the loops go on from one. ``exact_resume.py`` calls them; nothing else knows the loops' inside.
"""

import logging
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where training stands.

    Attributes:
        epoch: The epoch that goes on, or begins.
        in_epoch: Whether it goes on, and its first hooks have run.
        batches: Batches of it on each rank whose optimizer step was taken.
        rewound: Batches that were read since then.
        stepped: Batches that ended with an optimizer step, by which Lightning numbers what it logs.
    """

    epoch: int
    in_epoch: bool
    batches: int
    rewound: int
    stepped: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Place":
        """Return where a trainer stands, at any moment at which a checkpoint may be taken.

        Source: ``_FitLoop`` and ``_TrainingEpochLoop`` in lightning/pytorch/loops (2.6), which count an epoch as
        processed before its last hooks and a batch before ``on_train_batch_end``.
        """
        loop = trainer.fit_loop.epoch_loop
        epochs: Any = trainer.fit_loop.epoch_progress.current
        batches: Any = loop.batch_progress.current
        done = batches.processed
        ended = loop.batch_progress.is_last_batch or done >= trainer.num_training_batches
        rest = 0 if ended else done % trainer.accumulate_grad_batches
        runs = epochs.started > epochs.processed
        not_counted = done > 0 and rest == 0 and runs and (batches.completed < done or trainer.validating)
        stepped = loop._batches_that_stepped + int(not_counted)
        if runs and ended:
            return cls(epochs.started, False, 0, 0, stepped)
        if runs or (done > 0 and not ended):  # the second: stopped in the middle, and counted as if it were whole
            return cls(epochs.processed if runs else epochs.processed - 1, True, done - rest, rest, stepped)
        return cls(epochs.processed, False, 0, 0, stepped)

    def write(self, loops: dict[str, Any]) -> None:
        """Make the saved state of Lightning's fit loop say it."""
        epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        in_epoch = int(self.in_epoch)
        earlier = epochs["total"]["processed"] - epochs["current"]["processed"]
        for progress, offset in ((epochs["current"], 0), (epochs["total"], earlier)):
            finished = offset + self.epoch
            progress.update(ready=finished + in_epoch, started=finished + in_epoch)
            progress.update(processed=finished, completed=finished)
        total = batches["total"]["processed"] - self.rewound
        for progress, count in ((batches["current"], self.batches), (batches["total"], total)):
            progress.update(ready=count, started=count, processed=count, completed=count - in_epoch)
        batches["is_last_batch"] = False
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = self.stepped - in_epoch


def begin_epoch(fit: Any, makes_iterator: bool) -> None:
    """Let Lightning begin an epoch as if it had run those before in this process.

    Args:
        fit: The fit loop, which has read its counters.
        makes_iterator: Whether the epoch gets an iterator of its own, and not the one made in advance.

    Source: ``_FitLoop.on_advance_start`` and ``_TrainingEpochLoop.on_run_start`` (2.6): a loop that is restarting skips
    the hooks of the epoch's start, and makes no iterator.
    """
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
        loop.reset_restart_stage()
        loop._loaded_from_state_dict = False
    if makes_iterator:
        fit._resuming_from_checkpoint = False


def read_over(fetcher: Any, batches: int) -> None:
    """Read batches and throw them away, as the way to a place that has no index."""
    _log.info("reading %d batches again, which the run before has seen, because the data has no index", batches)
    for number in range(batches):
        try:
            next(fetcher)
        except StopIteration:
            raise ValueError(
                f"the data ended after {number} batches, of which the checkpoint says that {batches} had been read in"
                " its epoch; resume with the data of the run that saved it"
            ) from None
    fetcher.fetched = 0  # Lightning will add the batches that count
    if fetcher.length is not None:
        fetcher.done = False


def move_on(fit: Any, batches: int, length: int, remaining: int) -> None:
    """Let the loops count the batches of now in an epoch that began with others.

    The epoch keeps the length that it has on the ranks of now, and ends when what is left has been read.

    Args:
        fit: The fit loop, at ``on_train_start``.
        batches: Batches of the epoch that were read, as they were then.
        length: Batches of a whole epoch now.
        remaining: Batches that are left now.
    """
    cut_off = length - min(length, fit.max_batches)  # by limit_train_batches
    first = int(fit.max_batches - max(0, remaining - cut_off))
    for progress in (fit.epoch_loop.batch_progress.total, fit.epoch_loop.batch_progress.current):
        moved = progress.processed + first - batches
        progress.ready = progress.started = progress.processed = moved
        progress.completed = moved - 1
