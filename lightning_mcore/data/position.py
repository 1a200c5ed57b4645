# SPDX-License-Identifier: Apache-2.0
"""The position of a run in a DataLoader: recorded while it trains, restored after a resume.

A resumed run would begin its epoch again: some samples would be repeated, others lost. So while a trainer fits, a
:class:`PositionTracker` replaces the loader's batch sampler by a :class:`TrackedSampler`, which takes part in each
*pass*, an iteration over the loader. In a resumed pass it skips what has been read, without loading the samples. With
the same number of data-parallel ranks and the same batch size, it skips the first batches, whatever the batch sampler
is. Otherwise it deals out the rest of the global order again (``global_order.py``). 45 samples, interrupted twice::

    ranks x batch size   Lightning's batches   samples consumed   position at the end
    2 x 2                0, 1, 2               12                 batches=3
    4 x 2                1                     12 + 8 = 20        batches=2, offset=20 - 2 * 8 = 4

A full pass on 4 ranks has 6 batches (0 to 5) of 8 samples. The 33 samples that are left make 5, which Lightning
numbers 1 to 5 so that the pass ends as usual. After batch 1 it counts 2 batches, which stand for 16 samples, but 20
were consumed. The offset makes up the difference.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Generator, Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_mcore.data.global_order import deal, global_length, global_order, rank_share
from lightning_mcore.data.sampling import GlobalOrderSampler
from lightning_mcore.parallel.random_state import RandomState, from_plain, put_common, take_common, to_plain


@dataclass(frozen=True)
class LoaderRandomState:
    """All random states that decide what a loader reads: the common state, and its own generators' states."""

    common: RandomState
    own: tuple[Tensor, ...]  # of the generators that the user gave to the loader or its samplers, each [bytes] uint8

    def to_plain(self) -> dict[str, Any]:
        """Return the states as numbers and tensors."""
        return {"common": to_plain(self.common), "own": list(self.own)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LoaderRandomState":
        """Rebuild the result of :meth:`to_plain`."""
        return cls(from_plain(plain["common"]), tuple(plain["own"]))


@dataclass(frozen=True)
class Position:
    """Where a loader continues.

    A pass draws random numbers at two moments. *Opened*: the iterator is made, and torch's generator draws the workers'
    seed. *Started*: the first index is requested, and most samplers draw their permutation. Without workers this comes
    later, after user hooks that may draw random numbers too.
    """

    batches: int  # of the pass, read by each rank
    ranks: int
    batch_size: int | None  # in samples; None if the user's own batch sampler or dataset decides
    opened: LoaderRandomState | None = None
    started: LoaderRandomState | None = None  # None if the order does not depend on it
    seed: int | None = None  # of a distributed sampler; None for any other
    own: tuple[Tensor, ...] = ()  # states of the loader's own generators when the position was taken
    offset: int = 0  # samples consumed in addition to the counted batches (fewer if negative); older files lack it

    @property
    def is_at_start(self) -> bool:
        """Whether nothing of the pass has been read."""
        return self.batches == 0 and self.offset == 0

    @property
    def consumed(self) -> int:
        """Samples of the global order that all ranks together have read."""
        assert self.batch_size is not None
        return self.batches * self.ranks * self.batch_size + self.offset

    def to_plain(self) -> dict[str, Any]:
        """Return the position as numbers and tensors."""
        opened = self.opened.to_plain() if self.opened is not None else None
        started = self.started.to_plain() if self.started is not None else None
        return {**vars(self), "opened": opened, "started": started, "own": list(self.own)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Position":
        """Rebuild the result of :meth:`to_plain`."""
        opened = LoaderRandomState.from_plain(plain["opened"]) if plain["opened"] is not None else None
        started = LoaderRandomState.from_plain(plain["started"]) if plain["started"] is not None else None
        return cls(**{**plain, "opened": opened, "started": started, "own": tuple(plain["own"])})


def wrapped_sampler(sampler: Any) -> Any:
    """Return the user's sampler inside Lightning's distributed one; None if ``sampler`` is any other."""
    dataset: Any = sampler.dataset if isinstance(sampler, DistributedSamplerWrapper) else None
    return None if dataset is None else dataset._sampler


def index_sampler(loader: Any) -> Any:
    """Return the sampler of a loader's single indices; None if the user's own batch sampler or loader has none."""
    batches = getattr(loader, "batch_sampler", None)  # None with batch_size=None
    return getattr(loader if batches is None else batches, "sampler", None)


class PositionTracker:
    """Tracks the passes over one DataLoader until :meth:`detach`; the first one continues at ``resume_at``.

    ``strategy/resume.py`` makes one for each training loader. It counts the batches, and checks that
    :meth:`has_same_batches` or :meth:`can_deal` accepts ``resume_at``. A resumed pass sets the common random state back
    when it is opened and started, so ``resume.py`` restores that after both. It also reads and drops the batches of an
    ``IterableDataset``, which has no index to skip to. If this process loads the samples itself (no workers),
    ``on_request`` is called before each batch of indices, because the dataset may draw random numbers. ``seeds`` has
    the interrupted run's seed of a distributed sampler by this run's, for loaders of later epochs, without
    ``resume_at``; a loader with ``resume_at`` adds its own.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ranks: int,
        on_request: Callable[[], None],
        resume_at: Position | None = None,
        seeds: dict[int, int] | None = None,
    ) -> None:
        self._loader = loader
        self._ranks = ranks
        self._on_request = on_request
        self._resume_at = resume_at  # None once the resumed pass has started
        self._offset = 0
        self._opened: LoaderRandomState | None = None
        self._started: LoaderRandomState | None = None
        self._second_call_follows = False
        # With batch_size=None a loader has no batch sampler: each index of its sampler makes a batch.
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._replaced: Any = getattr(loader, self._slot)
        self._seed_of_pass: int | None = None  # once detached
        self._users_seed = self._seed
        # The interrupted run has permuted this pass with its own seed, and would have permuted the later ones.
        seeds = {} if seeds is None else seeds
        if self._users_seed is not None:
            if resume_at is not None and resume_at.seed is not None:
                seeds[self._users_seed] = resume_at.seed
            self._index_sampler.seed = seeds.get(self._users_seed, self._users_seed)
        vars(loader)[self._slot] = TrackedSampler(self, self._replaced)  # DataLoader rejects a normal assignment

    def detach(self, others: Iterable["PositionTracker"] = ()) -> None:
        """Give the loader back its own sampler, and the sampler its own seed once none of ``others`` has it."""
        vars(self._loader)[self._slot] = self._replaced
        self._seed_of_pass = self._seed  # for a checkpoint that is saved after the run
        sharing = [other for other in others if other._index_sampler is self._index_sampler]
        for other in sharing:
            other._users_seed = self._users_seed
        if self._users_seed is not None and not sharing:
            self._index_sampler.seed = self._users_seed

    def open_pass(self) -> Iterator[Any]:
        """Return the index batches of a pass, or of its rest, when torch makes the loader's iterator."""
        is_first_call = self._opened is None
        if self._resume_at is not None and is_first_call:
            self._put(self._resume_at.opened)
        # With workers, torch calls this twice in a pass: it drops the first result, draws the workers' seed, and uses
        # the second. The state before the first call is the one to remember. Persistent workers keep the seed of the
        # first pass. Source: ``_BaseDataLoaderIter.__init__`` and ``_MultiProcessingDataLoaderIter._reset`` in
        # torch.utils.data (2.13).
        keeps_seed = self._loader.persistent_workers and not is_first_call
        if not self._second_call_follows and not keeps_seed:
            self._opened = self._take()
        self._second_call_follows = self._loader.num_workers > 0
        # iter() is called now, because a user's sampler may draw its order in it. _start_pass() is a generator: its
        # body runs when the first index is requested.
        return self._start_pass(iter(self._replaced))

    def _start_pass(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield the index batches of an opened pass."""
        self._second_call_follows = False
        resume_at = self._resume_at
        self._resume_at = None
        self._offset = 0
        common = take_common()  # of this run, in which hooks may have drawn random numbers since the pass was opened
        if resume_at is not None:
            self._put(resume_at.started)
        if not self._has_fixed_order:
            self._started = self._take()
        if resume_at is not None and not resume_at.is_at_start and self.reads_by_index:
            indices = self._skip(indices, resume_at)
            # Skipping has drawn what the interrupted run drew here, which the loader's own generators keep. The common
            # state is this run's again.
            put_common(common)
        while True:
            if self._loader.num_workers == 0:
                self._on_request()
            try:
                index = next(indices)
            except StopIteration:
                return
            yield index

    def _skip(self, indices: Iterator[Any], position: Position) -> Iterator[Any]:
        """Return the rest of a pass behind a position, once its permutation is drawn."""
        if self.has_same_batches(position):
            rest = itertools.islice(indices, position.batches, None)
        else:
            rest = iter(self._deal(position))
        first = list(itertools.islice(rest, 1))  # samplers draw when their first index is requested
        return itertools.chain(first, rest)

    def _deal(self, position: Position) -> Any:
        """Return this rank's index batches (or indices) in the rest of the global order."""
        assert self.batch_size is not None
        sampler = self._index_sampler
        batch_on_all_ranks = self._ranks * self.batch_size
        remaining = self.remaining(position)
        # In the file's example 12 samples are consumed, and 5 of 6 batches remain, so Lightning counts 1, of 8 samples.
        self._offset = position.consumed - (len(self._replaced) - remaining) * batch_on_all_ranks
        order = global_order(sampler)
        if isinstance(sampler, GlobalOrderSampler):
            skipped = len(order) - position.consumed - remaining * batch_on_all_ranks
            if skipped > 0:  # "more", because this sampler leaves out some samples of every epoch
                rank_zero_info(
                    f"the rest of this epoch skips {skipped} more samples, because the checkpoint was taken with"
                    " another global batch size"
                )
            order = sampler.evened_out(order, position.consumed)
        rest = deal(order, position.consumed, self._ranks, sampler.rank, sampler.drop_last)
        return self._in_batches(map(int, rest) if isinstance(order, np.ndarray) else rest)

    def _in_batches(self, indices: Iterable[Any]) -> Any:
        """Return indices in batches, with or without a short last one; or as they are if each makes a batch."""
        if self._slot == "sampler":
            return indices
        return BatchSampler(indices, self._replaced.batch_size, self._replaced.drop_last)

    def current_position(self, batches: int) -> Position:
        """Return the position after ``batches`` of this pass on each rank."""
        if self._resume_at is not None:  # nothing has been read since the resume
            return replace(self._resume_at, opened=self._opened or self._resume_at.opened)
        return Position(
            batches=batches,
            ranks=self._ranks,
            batch_size=self.batch_size,
            opened=self._opened,
            started=self._started,
            seed=self._seed,
            own=self._own_states(),
            offset=self._offset,
        )

    def has_same_batches(self, position: Position) -> bool:
        """Whether the batches counted for the position are the first ones of a pass here."""
        return position.offset == 0 and (position.ranks, position.batch_size) == (self._ranks, self.batch_size)

    def can_deal(self, position: Position) -> bool:
        """Whether this loader can deal out the rest of the position's global order, in batches of one size."""
        # Exactly these classes, because a subclass may order its samples in any way.
        kinds: list[type] = [DistributedSampler, GlobalOrderSampler]
        # Lightning's wrapper draws the order of the sampler inside it in iter(). Without a batch sampler around it,
        # open_pass() has called that, and global_order() would draw another one.
        if self._slot == "batch_sampler":
            kinds.append(DistributedSamplerWrapper)
        had_global_order = position.seed is not None and position.batch_size is not None
        return had_global_order and type(self._index_sampler) in kinds and self.batch_size is not None

    def remaining(self, position: Position) -> int:
        """Return how many batches each rank reads until the pass ends, with this run's ranks and batch size."""
        if self.has_same_batches(position):
            return max(0, len(self._replaced) - position.batches)
        sampler = self._index_sampler
        share = rank_share(global_length(sampler), position.consumed, self._ranks, sampler.drop_last)
        return len(self._in_batches(range(share)))

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of one rank; None if the user's own batch sampler or dataset decides."""
        if not self.reads_by_index:
            return None
        if self._slot == "sampler":
            return 1
        return self._replaced.batch_size if type(self._replaced) is BatchSampler else None

    @property
    def reads_by_index(self) -> bool:
        """Whether samples can be skipped without loading them."""
        return not isinstance(self._loader.dataset, IterableDataset)

    @property
    def _index_sampler(self) -> Any:
        """The sampler of single indices; None if the user's own batch sampler has no such attribute."""
        return self._replaced if self._slot == "sampler" else getattr(self._replaced, "sampler", None)

    @property
    def _seed(self) -> int | None:
        """The seed of a distributed sampler or a subclass; None for any other."""
        if self._seed_of_pass is not None:
            return self._seed_of_pass
        sampler = self._index_sampler
        return sampler.seed if isinstance(sampler, DistributedSampler) else None

    @property
    def _has_fixed_order(self) -> bool:
        """Whether the order depends only on the seed and the epoch."""
        fixed = type(self._index_sampler) in (DistributedSampler, GlobalOrderSampler, SequentialSampler)
        return fixed and self.batch_size is not None

    def _take(self) -> LoaderRandomState:
        return LoaderRandomState(take_common(), self._own_states())

    def _put(self, state: LoaderRandomState | None) -> None:
        if state is not None:
            put_common(state.common)
            self.put_own_states(state.own)

    def _own_states(self) -> tuple[Tensor, ...]:
        return tuple(generator.get_state() for generator in self._generators)

    def put_own_states(self, states: Sequence[Tensor]) -> None:
        """Restore the states of the loader's own generators; warn if there are more or fewer than were saved."""
        generators = self._generators
        if len(generators) != len(states):
            rank_zero_warn(
                f"a train dataloader has {len(generators)} random generators of its own, but had {len(states)} in the"
                " run that saved the checkpoint, so its order may differ; resume with the dataloaders of that run"
            )
            return
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    @property
    def _generators(self) -> list[Generator]:
        """The generators of the loader and its samplers, each once."""
        owners = (self._loader, self._replaced, self._index_sampler, wrapped_sampler(self._index_sampler))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(generator): generator for generator in found if isinstance(generator, Generator)}.values())


class TrackedSampler(BatchSampler):
    """Replaces a loader's batch sampler, or its sampler if it has no batch sampler.

    Every attribute except these two is the replaced sampler's, for Lightning, which calls ``set_epoch``, and for hooks
    that use their own sampler. It is a ``BatchSampler`` for code that asks for one, without ``super().__init__``, which
    would set attributes that hide the replaced sampler's.
    """

    position_tracker: PositionTracker
    replaced_sampler: Any

    def __init__(self, tracker: PositionTracker, replaced: Any) -> None:
        vars(self).update(position_tracker=tracker, replaced_sampler=replaced)  # __setattr__ is the replaced sampler's

    def __iter__(self) -> Iterator[Any]:
        """Begin or continue an epoch."""
        return self.position_tracker.open_pass()

    def __len__(self) -> int:
        """Return the number of batches of a full epoch, even if only part of it is left."""
        return len(self.replaced_sampler)

    def __getattr__(self, name: str) -> Any:
        if name in ("position_tracker", "replaced_sampler"):  # not set yet, as in a copy in the making
            raise AttributeError(name)
        return getattr(self.replaced_sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.replaced_sampler, name, value)
