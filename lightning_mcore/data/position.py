# SPDX-License-Identifier: Apache-2.0
"""The position of a run in a DataLoader: recorded while it trains, restored after a resume.

Lightning counts batches, but a resumed run reads its DataLoader from the beginning: some samples are repeated, others
lost. A :class:`FollowedLoader` replaces a DataLoader's batch sampler while the trainer fits. It never changes what is
read. It records the random states from which an epoch's iterator started. In a resumed epoch it skips the indices that
have been read, without loading their samples:

* with the same number of data-parallel ranks and the same batch size, it skips the first batches of the same iteration,
  whatever the batch sampler is;
* otherwise it deals out the rest of the *global order* again. ``DistributedSampler`` gives rank ``r`` of ``n`` every
  n-th sample of one permutation, so what all ranks together have read is always a prefix of it.

``place.py`` has the position in Lightning's loops. ``strategy/resume.py`` calls both files, and decides about epochs,
ranks and checkpoints.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_mcore.data.sampling import GlobalOrderSampler
from lightning_mcore.parallel.random_state import RandomState, from_plain, put_common, take_common, to_plain


@dataclass(frozen=True)
class Moment:
    """The random states that decide what a loader reads: the common state, and its own generators' states."""

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

    Random states matter at two moments. *Opened*: the iterator is made, and torch's generator draws the workers' seed.
    *Started*: the first index is requested, and most samplers draw their permutation. Without workers this comes later,
    after user hooks that may draw random numbers too.
    """

    batches: int  # of the epoch, read by each rank
    ranks: int
    batch_size: int | None  # in samples; None if the user's own batch sampler decided
    opened: Moment | None = None
    started: Moment | None = None  # None if the order does not depend on it
    seed: int | None = None  # of a distributed sampler; None for any other


_OWN = {"_loader", "_ranks", "_on_request", "_position", "_slot", "_inner", "_opened", "_started", "_open_twice"}
_OWN |= {"_seed", "_given_seed"}


class FollowedLoader(BatchSampler):
    """Replaces a DataLoader's batch sampler, or its sampler if it has no batch sampler.

    It takes that place when it is made and gives it back in :meth:`leave`. It shows the attributes of the replaced
    sampler. ``on_request`` is called before each batch of indices is made, if that happens in step with training (no
    workers). ``position`` says where to continue; None at the beginning of an epoch.
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
        # The epoch in progress was permuted with the seed of the interrupted run.
        if position is not None and position.seed is not None and self._seed is not None:
            self._seed = sampler.seed = position.seed
        vars(loader)[self._slot] = self  # DataLoader rejects a normal assignment

    def leave(self) -> None:
        """Give the loader back its own sampler, and the sampler its own seed."""
        vars(self._loader)[self._slot] = self._inner
        if self._given_seed is not None:
            self._loader_sampler.seed = self._given_seed

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the sampler that it replaces."""
        if name == "_inner":  # not set yet, as in a copy in the making
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the sampler that it replaces, unless the attribute is its own."""
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __len__(self) -> int:
        """Return the number of batches of a full epoch, even if only part of it is left."""
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        """Begin or continue an epoch."""
        position = self._position
        if position is not None and position.opened is not None and self._opened is None:
            self._put(position.opened)
        # With workers, torch asks twice for the iterator and uses the second one; only the first call precedes the draw
        # of the workers' seeds. Persistent workers get seeds once. Source: ``_BaseDataLoaderIter.__init__`` and
        # ``_MultiProcessingDataLoaderIter._reset`` in torch.utils.data (2.13).
        workers, persistent = self._loader.num_workers > 0, self._loader.persistent_workers
        if not (workers and (self._open_twice or (persistent and self._opened is not None))):
            self._opened = self._take()
        self._open_twice = workers
        return self._indices(iter(self._inner))

    def _indices(self, indices: Iterator[Any]) -> Iterator[Any]:
        self._open_twice = False
        # Used once: the next epoch begins at its beginning.
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
        # Hooks of this run may have drawn since: the permutation is drawn from the interrupted run's state.
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
        """Whether ranks and batch size are the position's."""
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
        """Return this rank's index batches (or indices) in what is left of the global order."""
        assert position.batch_size is not None
        assert self.samples_of_batch is not None
        sampler = self._loader_sampler
        consumed = position.batches * position.ranks * position.batch_size
        order = global_order(sampler)
        rest = deal(order, consumed, sampler.num_replicas, sampler.rank, sampler.drop_last)
        read = self.remaining(position) * self.samples_of_batch * sampler.num_replicas
        if isinstance(sampler, GlobalOrderSampler) and consumed + read < len(order):
            rank_zero_info(
                f"the rest of this epoch skips {len(order) - consumed - read} more samples, because the checkpoint"
                " was taken with another global batch size"
            )
        if self._slot == "sampler":
            return rest
        return BatchSampler(rest, self.samples_of_batch, self._inner.drop_last)

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
        """Set the states of these generators, if their number fits."""
        generators = self._generators
        if len(generators) == len(states):
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def global_order(sampler: Any) -> list[Any]:
    """Return this epoch's samples in the order in which all ranks of a distributed sampler together read them."""
    if isinstance(sampler, GlobalOrderSampler):
        return list(sampler.order())
    # The same sampler as one rank of one, so that it neither skips nor pads.
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.drop_last = 1, 0, False
    whole.num_samples = whole.total_size = len(whole.dataset)
    return list(whole)


def epoch_size(sampler: Any) -> int:
    """Return the length of :func:`global_order`."""
    return sampler.epoch_size if isinstance(sampler, GlobalOrderSampler) else len(sampler.dataset)


def rank_share(size: int, consumed: int, ranks: int, drop_last: bool) -> int:
    """Return how many of the remaining samples each rank reads."""
    left = max(0, size - consumed)
    return left // ranks if drop_last else math.ceil(left / ranks)


def deal(order: list[Any], consumed: int, ranks: int, rank: int, drop_last: bool) -> list[Any]:
    """Return one rank's part of ``order`` behind the first ``consumed`` samples.

    With ``drop_last``, samples that do not fill the last turn are left out; otherwise the epoch's first samples fill
    it. Source: ``DistributedSampler.__iter__`` in torch.utils.data (2.13), which this equals for ``consumed=0``.
    """
    # Order 0 to 9, 4 consumed, 4 ranks: the rest 4 to 9 is one turn and a half. With drop_last, the ranks get [4], [5],
    # [6] and [7]; without, [4, 8], [5, 9], [6, 0] and [7, 1].
    share = rank_share(len(order), consumed, ranks, drop_last)
    rest = order[consumed:]
    filled = itertools.chain(rest, itertools.cycle(order))
    return list(itertools.islice(filled, rank, share * ranks, ranks))


def batches_in_pass(mode: str, batches: int, length: float) -> int:
    """Return how many batches one of several loaders, ``length`` batches long, has given in its current pass.

    ``mode`` is the mode of Lightning's CombinedLoader, ``batches`` the number of combined batches read. A loader of 3
    batches under ``max_size_cycle`` is 1 batch into its third pass after 7.
    """
    if batches <= length:
        return batches
    if mode != "max_size_cycle":
        return int(length)
    return (batches - 1) % int(length) + 1
