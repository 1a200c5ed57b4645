# SPDX-License-Identifier: Apache-2.0
"""How far Lightning's loops have come, and how they continue from there.

Lightning keeps four counters each for epochs and batches, and flags that tell its loops how to restart. Their meaning
depends on the hook in which a checkpoint was taken. :class:`LoopProgress` has one meaning; the functions below make the
loops continue from one. ``strategy/resume.py`` decides when to call them. No other file uses the internals of these
loops. Which samples the counted batches have is known to ``position.py``.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _Stateful  # private, but what Lightning saves a loader's state by
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loops.loop import _Loop
from torch.utils.data import DataLoader

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopProgress:
    """Epochs, batches and steps of a run; a checkpoint has the fields by these names."""

    # After 3 of 8 batches of the second epoch: epoch=1, in_epoch=True, batches=3, rewound=0. With
    # accumulate_grad_batches=2: batches=2, rewound=1, because the optimizer step of the third batch has not been taken.
    epoch: int
    in_epoch: bool  # this epoch continues; its first hooks have run
    ending: bool  # the epoch was validated after its last batch, but has not ended
    waits: bool  # the previous epoch ended except for its plateau schedulers, which follow its last hooks
    batches: int  # of this epoch on each rank, up to the last optimizer step
    rewound: int  # batches read since that step, to be read again
    stepped: int  # batches that ended with an optimizer step; Lightning numbers its logs by them

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "LoopProgress":
        """Return the progress of a trainer, at any moment at which a checkpoint may be taken."""
        # Source: ``_FitLoop`` and ``_TrainingEpochLoop`` in lightning/pytorch/loops (2.6), which count an epoch as
        # processed before its last hooks and a batch before ``on_train_batch_end``.
        loop = trainer.fit_loop.epoch_loop
        epochs: Any = trainer.fit_loop.epoch_progress.current
        batches: Any = loop.batch_progress.current
        done = batches.processed
        is_last = loop.batch_progress.is_last_batch and batches.ready <= done  # otherwise it is still to be trained on
        ended = is_last or done >= trainer.num_training_batches
        rest = 0 if ended else done % trainer.accumulate_grad_batches
        runs = epochs.started > epochs.processed  # within an epoch, before its last hooks
        # _batches_that_stepped grows only after on_train_batch_end and the validation that may follow, so a checkpoint
        # taken in one of these lacks the last step.
        not_counted = done > 0 and rest == 0 and runs and (batches.completed < done or trainer.validating)
        stepped = loop._batches_that_stepped + int(not_counted)
        if runs and ended:
            ending = batches.completed == done and trainer.validating
            return cls(epochs.started - int(ending), False, ending, False, 0, 0, stepped)
        if runs or (done > 0 and not ended):  # the second: stopped mid-epoch, but counted as complete
            epoch = epochs.processed if runs else epochs.processed - 1
            return cls(epoch, True, False, False, done - rest, rest, stepped)
        return cls(epochs.processed, False, False, epochs.completed < epochs.processed, 0, 0, stepped)

    def write(self, loops: dict[str, Any]) -> None:
        """Write it into the saved state of Lightning's fit loop, if it is within an epoch."""
        if not self.in_epoch:
            return
        # As in a checkpoint taken in on_train_batch_end: the last batch is processed, but neither completed nor counted
        # as stepped. Lightning adds 1 to both when it restarts, hence the two "- 1" below.
        epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        earlier = epochs["total"]["processed"] - epochs["current"]["processed"]
        for progress, offset in ((epochs["current"], 0), (epochs["total"], earlier)):
            finished = offset + self.epoch
            progress.update(ready=finished + 1, started=finished + 1)
            progress.update(processed=finished, completed=finished)
        total = batches["total"]["processed"] - self.rewound
        for progress, count in ((batches["current"], self.batches), (batches["total"], total)):
            progress.update(ready=count, started=count, processed=count, completed=count - 1)
        batches["is_last_batch"] = False
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = self.stepped - 1


def write_steps(loops: dict[str, Any], steps: int) -> None:
    """Write a number of optimizer steps into the saved state of Lightning's fit loop, as if this run had taken them."""
    progress = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    for counts in progress.values():
        counts.update(ready=steps, completed=steps)
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = steps


class EndOfRestart(Checkpoint):
    """Lets a loop that resumed within an epoch end that epoch like any other.

    To hooks, the loop is restarting until its first epoch is over, as under any strategy. The schedulers follow the
    hooks. Lightning does not step them in a restarting loop, because it has no metrics then; here the metrics are
    known. So the restart ends in between, in the very last hook, which the last checkpoint callback has.

    Source: ``_FitLoop.on_advance_end`` in lightning/pytorch/loops/fit_loop.py (2.6).
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the restart."""
        trainer.fit_loop._restarting = False
        self.detach(trainer)

    @classmethod
    def attach(cls, trainer: pl.Trainer) -> None:
        """Add this callback for one epoch. As a ``Checkpoint`` at the end of the list it runs last."""
        trainer.callbacks = [*trainer.callbacks, cls()]  # type: ignore[attr-defined]

    @classmethod
    def detach(cls, trainer: pl.Trainer) -> None:
        """Remove this callback, if present."""
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, cls)]  # type: ignore[attr-defined]


def restore_metrics(fit: Any, metrics: Mapping[str, Any]) -> None:
    """Restore the metrics that monitors and plateau schedulers look up."""
    fit.trainer._logger_connector._callback_metrics.update(metrics)


def step_plateaus(fit: Any) -> None:
    """Step the plateau schedulers, as Lightning does after an epoch's last hooks."""
    progress = fit.epoch_progress.current
    # Source: ``_FitLoop.on_advance_end`` (2.6), where the epoch is not counted as completed yet.
    progress.completed -= 1
    fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    progress.completed += 1


def begin_epoch(fit: Any, progress: LoopProgress, makes_iterator: bool) -> None:
    """Let Lightning begin an epoch, at ``on_train_start``, as if it had run the earlier ones in this process.

    ``makes_iterator``: the epoch gets a new iterator instead of the one made in advance.
    """
    # Source: ``_FitLoop.on_advance_start`` and ``_TrainingEpochLoop.on_run_start`` (2.6): a restarting loop skips the
    # hooks of the epoch's start and makes no iterator. So every trace of a restart is removed.
    epochs, batches = fit.epoch_progress, fit.epoch_loop.batch_progress
    earlier = epochs.total.processed - epochs.current.processed
    for counters, number in ((epochs.current, progress.epoch), (epochs.total, earlier + progress.epoch)):
        counters.ready = counters.started = counters.processed = counters.completed = number
    batches.total.completed = batches.total.processed
    fit.epoch_loop._batches_that_stepped = progress.stepped
    # The base class's setter: _FitLoop's own turns False into True in a run that counts steps (max_steps).
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
        loop.reset_restart_stage()
        loop._loaded_from_state_dict = False
    if makes_iterator:
        fit._resuming_from_checkpoint = False


def load_loaders(fit: Any, chosen: Sequence[bool]) -> None:
    """Load the saved state of the ``chosen`` loaders, if Lightning has not; others must be unread."""
    # Source: ``Trainer.estimated_stepping_batches`` (2.6) sets the loaders up before the loops are restored, and
    # ``_FitLoop.setup_data`` loads their states only when it sets them up, and only in the middle of an epoch.
    combined, fetcher = fit._combined_loader, fit._data_fetcher
    combined._load_state_dicts(fit._combined_loader_states_to_load)
    fit._combined_loader_states_to_load = []
    if all(chosen):
        iter(fetcher)
        return
    iterators = _iterators_side_by_side(fetcher)
    for index, (loader, is_chosen) in enumerate(zip(combined.flattened, chosen, strict=True)):
        if is_chosen:
            iterators[index] = iter(loader)


def end_pass(fit: Any) -> None:
    """Let loaders reach the end of the epoch that their loaded states belong to.

    If Lightning knows the number of batches, a state is from before the last one, which is read again. Many loaders
    treat a loaded state as the beginning of the next pass, and forget it only with the first batch of that pass.
    """
    # A loader of 6 batches, of which limit_train_batches=4 are read, was saved before its fourth: next() reads that
    # one. The next epoch begins with batch 0, or with batch 4 if the loader continues across epochs.
    if fit._data_fetcher.length is None:
        return
    iterators = fit._combined_loader._iterator.iterators
    for loader, iterator in zip(fit._combined_loader.flattened, iterators, strict=True):
        if isinstance(loader, _Stateful) and not getattr(loader, "counts_trained_batches", False):
            next(iterator, None)


def begin_pass(fit: Any, states: Sequence[Any]) -> None:
    """Open the loaders that keep their own state at the first batch of an epoch; the others are already there.

    torchdata's loader saved its state at the beginning of the pass. Any other loader saved it before the last batch of
    the previous pass, so that batch is read again. A state of None means that the loader had read nothing before this
    pass, so it needs no state.

    Raises ValueError as :func:`load_loaders` does if one of several loaders has already begun.
    """
    combined, fetcher = fit._combined_loader, fit._data_fetcher
    stateful = [index for index, loader in enumerate(combined.flattened) if isinstance(loader, _Stateful)]
    loaded = {index: state for index, state in zip(stateful, states, strict=True) if state is not None}
    for index, state in loaded.items():
        loader = combined.flattened[index]
        loader.load_state_dict(state)
        if not isinstance(loader, DataLoader):
            next(iter(loader), None)
    if len(loaded) == len(combined.flattened):
        iter(fetcher)
    elif loaded:
        iterators = _iterators_side_by_side(fetcher)
        for index in loaded:
            iterators[index] = iter(combined.flattened[index])


def skip_batches(fetcher: Any, batches: int) -> None:
    """Read and drop batches, to reach a place in data that has no index; raises ValueError if it ends before that."""
    _log.info(
        "reading and dropping %d batches that the interrupted run has used, because the data has no index", batches
    )
    for number in range(batches):
        try:
            next(fetcher)
        except StopIteration:
            raise ValueError(
                f"the data ended after {number} batches, but {batches} batches of the epoch had been read when the"
                " checkpoint was saved; resume with the data of the run that saved it"
            ) from None
    fetcher.fetched = 0  # Lightning adds the skipped batches itself (on_run_start)
    if fetcher.length is not None:
        fetcher.done = False


def skip_batches_of(fetcher: Any, batches: int, chosen: Sequence[bool]) -> None:
    """Read and drop batches of the ``chosen`` loaders; the others are where they should be."""
    for iterator, is_chosen in zip(_iterators_side_by_side(fetcher), chosen, strict=True):
        for _ in range(batches if is_chosen else 0):
            next(iterator)


def _iterators_side_by_side(fetcher: Any) -> list[Any]:
    """Return the iterators of loaders; ValueError without a length, when Lightning has read a batch of all of them."""
    if fetcher.length is None:
        raise ValueError(
            "a dataloader with its own state cannot resume together with one that has none, because the dataloaders"
            " have no length; give all of them __len__, or state_dict and load_state_dict"
        )
    iterators: list[Any] = fetcher.combined_loader._iterator.iterators
    return iterators


def recount_batches(fit: Any, batches: int, length: int, remaining: int) -> None:
    """Recount the batches of an epoch that began with another number of ranks or another batch size.

    ``batches`` were read, in batches of the interrupted run; a full epoch has ``length`` and ``remaining`` are left, in
    batches of this run. The epoch keeps the length that it has on the current ranks, and ends when its rest has been
    read.
    """
    # After 4 of 8 batches on 2 ranks, now on 4: length=4, remaining=2, so 2 of 4 batches count as done (first=2).
    cut_off = length - min(length, fit.max_batches)  # by limit_train_batches
    first = int(fit.max_batches - max(0, remaining - cut_off))
    for progress in (fit.epoch_loop.batch_progress.total, fit.epoch_loop.batch_progress.current):
        moved = progress.processed + first - batches
        progress.ready = progress.started = progress.processed = moved
        progress.completed = moved - 1


def batches_in_pass(mode: str, batches: int, length: int | None) -> int:
    """Return how many batches one of several loaders has yielded in its current pass.

    ``mode`` is the mode of Lightning's CombinedLoader, ``batches`` the number of combined batches read, ``length`` the
    loader's batches, if known. A loader of 3 batches under ``max_size_cycle`` is 1 batch into its third pass after 7.
    """
    if not length or batches <= length:
        return batches
    return (batches - 1) % length + 1 if mode == "max_size_cycle" else length
