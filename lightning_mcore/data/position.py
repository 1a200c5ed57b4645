# SPDX-License-Identifier: Apache-2.0
"""Where a training DataLoader stands in its epoch: followed while it is read, taken up again after a resume.

Lightning counts batches, but a resumed run reads its DataLoader from the beginning: samples are repeated and others are
lost. Here a :class:`FollowedLoader` stands between a DataLoader and its batch sampler while the trainer fits. It never
changes what is read. It remembers the random states from which an epoch's iterator came, and in a resumed epoch it
passes over the indices that have been read, so that no skipped sample is loaded:

* on as many data-parallel ranks, with the same batch size, the first batches of the same iteration, whatever the batch
  sampler is;
* on another number of ranks, or with another batch size, what is left of the *global order* is dealt out anew.
  ``DistributedSampler`` gives rank ``r`` of ``n`` every n-th sample of one permutation, so what all ranks have read
  together is always a prefix of it.

Random states are wanted at two moments. *Opened*: the iterator is made, and torch's generator draws the seed of the
workers. *Started*: the first index is asked for, and most samplers draw their permutation; without workers that is
later, after hooks of the user that may draw too.

``strategy/resume.py`` calls this file and knows of epochs, ranks and checkpoints.
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
    """The random states that decide what a loader reads: the common one, and generators of its own."""

    common: RandomState
    own: tuple[torch.Tensor, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return it as numbers and tensors."""
        return {"common": to_plain(self.common), "own": list(self.own)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Moment":
        """Return what :meth:`to_plain` was given."""
        return cls(from_plain(plain["common"]), tuple(plain["own"]))


@dataclass(frozen=True)
class Position:
    """Where a loader goes on.

    Attributes:
        batches: Batches of the epoch that each rank has read.
        ranks: Data-parallel ranks that read them.
        batch_size: Samples in a batch; None where the user's own batch sampler decided.
        opened: When the iterator of this epoch was made.
        started: When its first index was asked for; None where the order does not depend on random states.
        seed: Of a distributed sampler; None of any other.
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
    """Stands in for the batch sampler of a DataLoader, or for its sampler where there is none.

    It takes its place at construction and leaves it at :meth:`leave`. Attributes are those of what it stands for.

    Args:
        loader: The loader to follow.
        ranks: Data-parallel ranks that read with it.
        on_request: Called before each index batch is made, where that happens in step with training (without workers).
        position: Where to go on; None at the beginning of an epoch.
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
        vars(loader)[self._slot] = self  # the loader refuses an assignment, for its arguments would not fit any more

    def leave(self) -> None:
        """Give the loader back what it had."""
        vars(self._loader)[self._slot] = self._inner
        if self._given_seed is not None:
            self._loader_sampler.seed = self._given_seed

    def __getattr__(self, name: str) -> Any:
        """Answer as what it stands for."""
        if name == "_inner":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change what it stands for, unless the attribute is its own."""
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __len__(self) -> int:
        """Return the batches of a whole epoch, also where only a part of it is left."""
        return len(self._inner)

    # ---- what is read

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on in one.

        With workers torch asks twice for the iterator that it then uses; only the first time precedes their seeds.
        Persistent workers are seeded once.

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
        """Return what is left of an epoch, and leave the common random state as it was."""
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
        """Whether the samples of a batch, over all ranks, are as many as they were."""
        return (self._ranks, self.samples_of_batch) == (position.ranks, position.batch_size)

    @property
    def can_be_dealt_anew(self) -> bool:
        """Whether it reads a global order in turns, in batches of one size."""
        wrapped = [] if self._slot == "sampler" else [DistributedSamplerWrapper]
        kinds = (DistributedSampler, GlobalOrderSampler, *wrapped)
        return self.samples_of_batch is not None and type(self._loader_sampler) in kinds

    def remaining(self, position: Position) -> int:
        """Return how many batches each rank reads until the epoch ends, on the ranks and with the batch size of now."""
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
                f"the rest of this epoch leaves out {len(order) - consumed - read} samples more, for the global batch"
                " is not the one that the checkpoint was taken with"
            )
        if self._slot == "sampler":
            return rest
        return BatchSampler(rest, self.samples_of_batch, self._inner.drop_last)

    # ---- what is known of the loader

    @property
    def _loader_sampler(self) -> Any:
        return self._inner if self._slot == "sampler" else getattr(self._inner, "sampler", None)

    @property
    def samples_of_batch(self) -> int | None:
        """Samples of one batch of one rank; None where the user's own batch sampler or dataset decides."""
        if isinstance(self._loader.dataset, IterableDataset):
            return None
        if self._slot == "sampler":
            return 1
        return self._inner.batch_size if type(self._inner) is BatchSampler else None

    @property
    def reads_by_index(self) -> bool:
        """Whether samples can be passed over without being loaded."""
        return not isinstance(self._loader.dataset, IterableDataset)

    @property
    def _has_fixed_order(self) -> bool:
        """Whether the order follows from the epoch alone."""
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
        """Return the states of generators that the loader or its sampler was given."""
        return tuple(generator.get_state() for generator in self._generators)

    def put_own_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set them, if there are as many."""
        generators = self._generators
        if len(generators) == len(states):
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def global_order(sampler: Any) -> list[Any]:
    """Return the samples of this epoch in the order in which all ranks of a distributed sampler read them together."""
    if isinstance(sampler, GlobalOrderSampler):
        return list(sampler.order())
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.drop_last = 1, 0, False
    whole.num_samples = whole.total_size = len(whole.dataset)
    return list(whole)


def epoch_size(sampler: Any) -> int:
    """Return how many samples there are in :func:`global_order`."""
    return sampler.epoch_size if isinstance(sampler, GlobalOrderSampler) else len(sampler.dataset)


def rank_share(size: int, consumed: int, ranks: int, drop_last: bool) -> int:
    """Return how many samples each rank reads of what is left."""
    left = max(0, size - consumed)
    return left // ranks if drop_last else math.ceil(left / ranks)


def deal(order: list[Any], consumed: int, ranks: int, rank: int, drop_last: bool) -> list[Any]:
    """Return one rank's samples of what is left of an order.

    Args:
        order: All samples of the epoch.
        consumed: How many of them, from the first on, have been read.
        ranks: How many ranks read now.
        rank: Which of them this is.
        drop_last: Whether a rest that does not fill the last turn is left out; otherwise it is filled up with the
            epoch's first samples.

    Source: ``DistributedSampler.__iter__`` in torch.utils.data (2.13), which this equals for ``consumed=0``.
    """
    share = rank_share(len(order), consumed, ranks, drop_last)
    rest = order[consumed:]
    filled = itertools.chain(rest, itertools.cycle(order))
    return list(itertools.islice(filled, rank, share * ranks, ranks))


def batches_in_pass(mode: str, batches: int, length: float) -> int:
    """Return how many batches one of several loaders has given in its present pass.

    Args:
        mode: Of Lightning's CombinedLoader.
        batches: Combined batches that were read.
        length: Batches of this loader.
    """
    if batches <= length:
        return batches
    if mode != "max_size_cycle":
        return int(length)
    return (batches - 1) % int(length) + 1
