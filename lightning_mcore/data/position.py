# SPDX-License-Identifier: Apache-2.0
"""The position of a run in its data: recorded while it trains, restored after a resume.

**In a DataLoader.** Lightning counts batches, but a resumed run reads its DataLoader from the beginning: some samples
are repeated, others are lost. A :class:`FollowedLoader` takes the place of a DataLoader's batch sampler while the
trainer fits. It never changes what is read. It records the random states from which an epoch's iterator started. In a
resumed epoch it skips the indices that have been read, without loading their samples:

* on the same number of data-parallel ranks, with the same batch size, it skips the first batches of the same iteration,
  whatever the batch sampler is;
* on another number of ranks, or with another batch size, it deals out the rest of the *global order* again.
  ``DistributedSampler`` gives rank ``r`` of ``n`` every n-th sample of one permutation, so what all ranks together have
  read is always a prefix of it.

Random states matter at two moments. *Opened*: the iterator is made, and torch's generator draws the seed of the
workers. *Started*: the first index is asked for, and most samplers draw their permutation. Without workers this comes
later, after hooks of the user that may draw random numbers too.

**In Lightning's loops.** Lightning keeps four counters of epochs and of batches, and flags that tell its loops how to
restart. Their meaning depends on the hook in which a checkpoint was taken. A :class:`Place` has one meaning, and the
functions at the end of this file make the loops continue from one. No other file uses the internals of the loops.

``strategy/resume.py`` calls this file, and decides about epochs, ranks and checkpoints.
"""

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_mcore.data.sampling import GlobalOrderSampler
from lightning_mcore.parallel.random_state import RandomState, from_plain, put_common, take_common, to_plain


@dataclass(frozen=True)
class Moment:
    """The random states that decide what a loader reads: the common one, and those of its own generators."""

    common: RandomState
    own: tuple[torch.Tensor, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return the states as numbers and tensors."""
        return {"common": to_plain(self.common), "own": list(self.own)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Moment":
        """Rebuild a moment from the result of :meth:`to_plain`."""
        return cls(from_plain(plain["common"]), tuple(plain["own"]))


@dataclass(frozen=True)
class Position:
    """Where a loader continues.

    Attributes:
        batches: Batches of the epoch that each rank has read.
        ranks: Number of data-parallel ranks that read them.
        batch_size: Samples in a batch; None if the user's own batch sampler decided.
        opened: The random states when the iterator of this epoch was made.
        started: The random states when its first index was asked for; None if the order does not depend on them.
        seed: Seed of a distributed sampler; None for any other.
    """

    batches: int
    ranks: int
    batch_size: int | None
    opened: Moment | None = None
    started: Moment | None = None
    seed: int | None = None


_OWN = {"_loader", "_ranks", "_on_request", "_position", "_slot", "_inner", "_opened", "_started", "_open_twice"}
_OWN |= {"_seed", "_given_seed"}


class FollowedLoader(BatchSampler):
    """Replaces the batch sampler of a DataLoader, or its sampler if it has no batch sampler.

    It takes that place when it is made and gives it back in :meth:`leave`. Its attributes are those of the sampler
    that it replaces.

    Args:
        loader: The loader to follow.
        ranks: Number of data-parallel ranks that read together.
        on_request: Called before each batch of indices is made, if that happens in step with training (no workers).
        position: Where to continue; None at the beginning of an epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ranks: int,
        on_request: Callable[[], None],
        position: Position | None = None,
    ) -> None:
        self._loader = loader
        self._ranks = ranks
        self._on_request = on_request
        self._position = position
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner = getattr(loader, self._slot)
        self._opened: Moment | None = None
        self._started: Moment | None = None
        self._open_twice = False
        sampler = self._loader_sampler
        self._given_seed = self._seed = sampler.seed if isinstance(sampler, DistributedSampler) else None
        if position is not None and position.seed is not None and self._seed is not None:
            self._seed = sampler.seed = position.seed
        vars(loader)[self._slot] = self  # DataLoader refuses to assign it

    def leave(self) -> None:
        """Give the loader back its own sampler, and the sampler its own seed."""
        vars(self._loader)[self._slot] = self._inner
        if self._given_seed is not None:
            self._loader_sampler.seed = self._given_seed

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the sampler that it replaces."""
        if name == "_inner":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the sampler that it replaces, unless the attribute is its own."""
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, even if only a part of it is left."""
        return len(self._inner)

    # ---- what is read

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or continue one.

        With workers, torch asks twice for the iterator and uses the second one; only the first call comes before the
        workers get their seeds. Persistent workers get seeds once.

        Source: ``_BaseDataLoaderIter.__init__`` and ``_MultiProcessingDataLoaderIter._reset`` in torch.utils.data
        (2.13).
        """
        position = self._position
        if position is not None and position.opened is not None and self._opened is None:
            self._put(position.opened)
        workers, persistent = self._loader.num_workers > 0, self._loader.persistent_workers
        if not (workers and (self._open_twice or (persistent and self._opened is not None))):
            self._opened = self._take()
        self._open_twice = workers
        return self._indices(iter(self._inner))

    def _indices(self, indices: Iterator[Any]) -> Iterator[Any]:
        self._open_twice = False
        position, self._position = self._position, None
        if position is not None and position.batches > 0 and self.reads_by_index:
            indices = self._rest(position, indices)
        else:
            if position is not None and position.started is not None:
                self._put(position.started)
            if not self._has_fixed_order:
                self._started = self._take()
        while True:
            if self._loader.num_workers == 0:
                self._on_request()
            try:
                index = next(indices)
            except StopIteration:
                return
            yield index

    def _rest(self, position: Position, indices: Iterator[Any]) -> Iterator[Any]:
        """Return the rest of an epoch; the common random state stays as it was."""
        now, self._started = take_common(), position.started
        if position.started is not None:
            self._put(position.started)
        if self.is_dealt_as(position):
            indices = itertools.islice(indices, position.batches, None)
        else:
            indices = iter(self._dealt(position))
        first = list(itertools.islice(indices, 1))  # samplers draw when their first index is asked for
        put_common(now)
        return itertools.chain(first, indices)

    def is_dealt_as(self, position: Position) -> bool:
        """Whether ranks and batch size are those of the position."""
        return (self._ranks, self.samples_of_batch) == (position.ranks, position.batch_size)

    @property
    def can_be_dealt_anew(self) -> bool:
        """Whether the loader reads a global order in turns, in batches of one size."""
        wrapped = [] if self._slot == "sampler" else [DistributedSamplerWrapper]
        kinds = (DistributedSampler, GlobalOrderSampler, *wrapped)
        return self.samples_of_batch is not None and type(self._loader_sampler) in kinds

    def remaining(self, position: Position) -> int:
        """Return how many batches each rank reads until the epoch ends, with the current ranks and batch size."""
        if self.is_dealt_as(position):
            return max(0, len(self._inner) - position.batches)
        assert position.batch_size is not None
        assert self.samples_of_batch is not None
        sampler = self._loader_sampler
        consumed = position.batches * position.ranks * position.batch_size
        samples = rank_share(epoch_size(sampler), consumed, sampler.num_replicas, sampler.drop_last)
        drops_last = isinstance(self._inner, BatchSampler) and self._inner.drop_last
        return samples // self.samples_of_batch if drops_last else math.ceil(samples / self.samples_of_batch)

    def _dealt(self, position: Position) -> Any:
        """Return the index batches (or indices) of this rank in what is left of the global order."""
        assert position.batch_size is not None
        assert self.samples_of_batch is not None
        sampler = self._loader_sampler
        consumed = position.batches * position.ranks * position.batch_size
        order = global_order(sampler)
        rest = deal(order, consumed, sampler.num_replicas, sampler.rank, sampler.drop_last)
        read = self.remaining(position) * self.samples_of_batch * sampler.num_replicas
        if isinstance(sampler, GlobalOrderSampler) and consumed + read < len(order):
            rank_zero_info(
                f"the rest of this epoch leaves out {len(order) - consumed - read} more samples, because the checkpoint"
                " was taken with another global batch"
            )
        if self._slot == "sampler":
            return rest
        return BatchSampler(rest, self.samples_of_batch, self._inner.drop_last)

    # ---- properties of the loader

    @property
    def _loader_sampler(self) -> Any:
        return self._inner if self._slot == "sampler" else getattr(self._inner, "sampler", None)

    @property
    def samples_of_batch(self) -> int | None:
        """Samples in a batch of one rank; None if the user's own batch sampler or dataset decides."""
        if isinstance(self._loader.dataset, IterableDataset):
            return None
        if self._slot == "sampler":
            return 1
        return self._inner.batch_size if type(self._inner) is BatchSampler else None

    @property
    def reads_by_index(self) -> bool:
        """Whether samples can be skipped without loading them."""
        return not isinstance(self._loader.dataset, IterableDataset)

    @property
    def _has_fixed_order(self) -> bool:
        """Whether the order depends only on the epoch."""
        fixed = type(self._loader_sampler) in (DistributedSampler, GlobalOrderSampler, SequentialSampler)
        return fixed and self.samples_of_batch is not None

    @property
    def _generators(self) -> list[torch.Generator]:
        sampler = self._loader_sampler
        wrapped = getattr(getattr(sampler, "dataset", None), "_sampler", None)
        owners = (self._loader, self._inner, sampler, wrapped)
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    # ---- its state

    def position(self, batches: int) -> Position:
        """Return where it stands when each rank has read ``batches`` of this epoch."""
        return Position(batches, self._ranks, self.samples_of_batch, self._opened, self._started, self._seed)

    def _take(self) -> Moment:
        return Moment(take_common(), self.own_states())

    def _put(self, moment: Moment) -> None:
        put_common(moment.common)
        self.put_own_states(moment.own)

    def own_states(self) -> tuple[torch.Tensor, ...]:
        """Return the states of the generators that the user gave to the loader or its sampler, each [bytes] uint8."""
        return tuple(generator.get_state() for generator in self._generators)

    def put_own_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set the states of these generators, uint8 tensors [n], if the number of states fits."""
        generators = self._generators
        if len(generators) == len(states):
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def global_order(sampler: Any) -> list[Any]:
    """Return the samples of this epoch in the order in which all ranks of a distributed sampler together read them."""
    if isinstance(sampler, GlobalOrderSampler):
        return list(sampler.order())
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.drop_last = 1, 0, False
    whole.num_samples = whole.total_size = len(whole.dataset)
    return list(whole)


def epoch_size(sampler: Any) -> int:
    """Return the number of samples in :func:`global_order`."""
    return sampler.epoch_size if isinstance(sampler, GlobalOrderSampler) else len(sampler.dataset)


def rank_share(size: int, consumed: int, ranks: int, drop_last: bool) -> int:
    """Return how many of the remaining samples each rank reads."""
    left = max(0, size - consumed)
    return left // ranks if drop_last else math.ceil(left / ranks)


def deal(order: list[Any], consumed: int, ranks: int, rank: int, drop_last: bool) -> list[Any]:
    """Return one rank's part of the rest of an order.

    Args:
        order: All samples of the epoch.
        consumed: How many of them, from the first on, have been read.
        ranks: Number of ranks that read now.
        rank: This rank.
        drop_last: Leave out samples that do not fill the last turn; otherwise the last turn is filled up with the
            first samples of the epoch.

    Source: ``DistributedSampler.__iter__`` in torch.utils.data (2.13), which this equals for ``consumed=0``.
    """
    share = rank_share(len(order), consumed, ranks, drop_last)
    rest = order[consumed:]
    filled = itertools.chain(rest, itertools.cycle(order))
    return list(itertools.islice(filled, rank, share * ranks, ranks))


def batches_in_pass(mode: str, batches: int, length: float) -> int:
    """Return how many batches one of several loaders has given in its current pass.

    Args:
        mode: Mode of Lightning's CombinedLoader.
        batches: Combined batches that have been read.
        length: Number of batches of this loader.
    """
    if batches <= length:
        return batches
    if mode != "max_size_cycle":
        return int(length)
    return (batches - 1) % int(length) + 1


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where training stands.

    Attributes:
        epoch: The epoch that continues, or begins.
        in_epoch: Whether this epoch continues; its first hooks have run.
        ending: Whether the epoch has been validated after its last batch, but has not ended.
        waits: Whether the epoch before has ended except for its plateau schedulers, which come after its last hooks.
        batches: Batches of the epoch on each rank whose optimizer step was taken.
        rewound: Batches that were read since the last optimizer step.
        stepped: Batches that ended with an optimizer step; Lightning numbers its logs by them.
    """

    epoch: int
    in_epoch: bool
    ending: bool
    waits: bool
    batches: int
    rewound: int
    stepped: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Place":
        """Return the position of a trainer, at any moment at which a checkpoint may be taken.

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
            ending = batches.completed == done and trainer.validating
            return cls(epochs.started - int(ending), False, ending, False, 0, 0, stepped)
        if runs or (done > 0 and not ended):  # the second: stopped in the middle, but counted as complete
            epoch = epochs.processed if runs else epochs.processed - 1
            return cls(epoch, True, False, False, done - rest, rest, stepped)
        return cls(epochs.processed, False, False, epochs.completed < epochs.processed, 0, 0, stepped)

    def write(self, loops: dict[str, Any]) -> None:
        """Write the position into the saved state of Lightning's fit loop, if it is in an epoch."""
        if not self.in_epoch:
            return
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


class EndOfRestart(Checkpoint):
    """Lets a loop that resumed within an epoch end the epoch like any other.

    To hooks, the loop is restarting until its first epoch is over, as under any strategy. After the hooks come the
    schedulers. Lightning does not step them in a loop that is restarting, because it has no metrics then. Here the
    metrics are known, so the restart ends in between: in the last of all hooks, that of the last checkpoint callback.

    Source: ``_FitLoop.on_advance_end`` in lightning/pytorch/loops/fit_loop.py (2.6).
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the restart."""
        trainer.fit_loop._restarting = False
        self.detach(trainer)

    @classmethod
    def attach(cls, trainer: pl.Trainer) -> None:
        """Add this callback as the last one, for one epoch."""
        trainer.callbacks = [*trainer.callbacks, cls()]  # type: ignore[attr-defined]

    @classmethod
    def detach(cls, trainer: pl.Trainer) -> None:
        """Remove this callback, if the trainer has it."""
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, cls)]  # type: ignore[attr-defined]


def restore_metrics(fit: Any, metrics: Mapping[str, Any]) -> None:
    """Restore the metrics that monitors and plateau schedulers look up."""
    fit.trainer._logger_connector._callback_metrics.update(metrics)


def step_plateaus(fit: Any) -> None:
    """Step the plateau schedulers, as Lightning does after the last hooks of an epoch.

    Source: ``_FitLoop.on_advance_end`` (2.6), where the epoch is not counted as completed yet.
    """
    progress = fit.epoch_progress.current
    progress.completed -= 1
    fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    progress.completed += 1


def begin_epoch(fit: Any, place: Place, makes_iterator: bool) -> None:
    """Let Lightning begin an epoch as if it had run the earlier ones in this process.

    Args:
        fit: The fit loop, at ``on_train_start``.
        place: Where training begins.
        makes_iterator: Whether the epoch gets a new iterator instead of the one made in advance.

    Source: ``_FitLoop.on_advance_start`` and ``_TrainingEpochLoop.on_run_start`` (2.6): a loop that is restarting skips
    the hooks of the epoch's start, and makes no iterator.
    """
    epochs, batches = fit.epoch_progress, fit.epoch_loop.batch_progress
    earlier = epochs.total.processed - epochs.current.processed
    for progress, number in ((epochs.current, place.epoch), (epochs.total, earlier + place.epoch)):
        progress.ready = progress.started = progress.processed = progress.completed = number
    batches.total.completed = batches.total.processed
    fit.epoch_loop._batches_that_stepped = place.stepped
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
        loop.reset_restart_stage()
        loop._loaded_from_state_dict = False
    if makes_iterator:
        fit._resuming_from_checkpoint = False


def load_loaders(fit: Any) -> None:
    """Load the saved state of loaders that keep their own, if Lightning has not done so.

    Source: ``Trainer.estimated_stepping_batches`` (2.6) sets the loaders up before the loops are restored, and
    ``_FitLoop.setup_data`` loads their states when it sets them up.
    """
    fit._combined_loader._load_state_dicts(fit._combined_loader_states_to_load)
    fit._combined_loader_states_to_load = []
    iter(fit._data_fetcher)


def skip_batches(fetcher: Any, batches: int) -> None:
    """Read batches and drop them, to reach a position in data that has no index."""
    _log.info("reading %d batches that the interrupted run has seen, because the data has no index", batches)
    for number in range(batches):
        try:
            next(fetcher)
        except StopIteration:
            raise ValueError(
                f"the data ended after {number} batches, but {batches} batches of the epoch had been read when the"
                " checkpoint was saved; resume with the data of the run that saved it"
            ) from None
    fetcher.fetched = 0  # Lightning will add the batches that count
    if fetcher.length is not None:
        fetcher.done = False


def skip_batches_of(fetcher: Any, batches: int, chosen: Sequence[bool]) -> None:
    """Read and drop batches of some of several loaders; the others are where they should be.

    Raises:
        ValueError: The loaders have no length, so Lightning has read a batch of all of them already.
    """
    if fetcher.length is None:
        raise ValueError(
            "a dataloader that keeps its own state and one without an index and a length cannot resume together in the"
            " middle of an epoch; give both state_dict and load_state_dict, or resume from the end of an epoch"
        )
    for iterator, is_chosen in zip(fetcher.combined_loader._iterator.iterators, chosen, strict=True):
        for _ in range(batches if is_chosen else 0):
            next(iterator)


def recount_batches(fit: Any, batches: int, length: int, remaining: int) -> None:
    """Recount the batches of an epoch that began with another number of ranks or another batch size.

    The epoch keeps the length that it has on the current ranks, and ends when its rest has been read.

    Args:
        fit: The fit loop, at ``on_train_start``.
        batches: Batches that were read, counted as in the interrupted run.
        length: Batches of a whole epoch in this run.
        remaining: Batches that are left in this run.
    """
    cut_off = length - min(length, fit.max_batches)  # by limit_train_batches
    first = int(fit.max_batches - max(0, remaining - cut_off))
    for progress in (fit.epoch_loop.batch_progress.total, fit.epoch_loop.batch_progress.current):
        moved = progress.processed + first - batches
        progress.ready = progress.started = progress.processed = moved
        progress.completed = moved - 1
