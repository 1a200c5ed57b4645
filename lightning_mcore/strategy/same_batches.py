# SPDX-License-Identifier: Apache-2.0
"""The ranks of one model copy train on the same batches.

Tensor-, context- and pipeline-parallel ranks hold parts of one model, so each must read the same batch (context
parallelism splits it afterwards). Samplers see to it. But a dataset may shard itself by the rank in the world, or draw
a random number of its own, and the parts of the model would silently train on different rows. So the ranks of a copy
compare checksums of batches where Lightning's loops read them, and raise on all of these ranks if they differ;
``parallel/rank_watch.py`` ends the others. User code that reads a loader, perhaps on one rank, compares nothing.

With ``broadcast_batches=True``, the first rank of each copy reads and sends its batches to the others, with the random
states that reading left. ``strategy.py`` passes every loader through :class:`SameBatches`; ``batch_counts.py`` sees to
it that the copies of a model have equally many batches.
"""

import contextlib
import hashlib
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_mcore.data.batches import Fact, batch_facts
from lightning_mcore.parallel.attributes import set_until_closed
from lightning_mcore.parallel.groups import model_copy_group
from lightning_mcore.parallel.random_state import RandomState, put_common, take_common
from lightning_mcore.strategy.batch_counts import BatchCounts, ends_with_its_length, loader_name

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy

# The number of batches is compared once if the loader reads by index in batches of one size, otherwise before each
# batch, because a rank without a next batch would leave the others in a collective.
FIRST_BATCHES = 3
"""Batches at the beginning of each pass over a loader whose contents are compared."""

EVERY_BATCHES = 100
"""After these, one batch in this many is compared."""

_END = object()
_MARK = "_is_followed"


class SameBatches:
    """Follows the loaders of a run; with ``sends``, one rank of each model copy reads for the others.

    ``data/finetuning/stream.py`` reads ``sends``, because the ranks that read agree on each batch.
    """

    def __init__(self, strategy: "MCoreStrategy", sends: bool = False) -> None:
        self._strategy = strategy
        self.sends = sends
        self.counts = BatchCounts(strategy)
        # The loaders whose first batch every rank has read, by id
        self._compared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._restores = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Drop the loaders of this process."""
        return {"strategy": self._strategy, "sends": self.sends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without the loaders of the other process."""
        self.__init__(**state)  # type: ignore[misc]

    def follow(self, loader: Any) -> Any:
        """Let Lightning's loops compare what they read from a loader; collective over the model copy.

        Returns the loader itself if its class can be extended, otherwise an iterable in its place. Raises
        ``ValueError`` if the ranks of a copy have loaders of different lengths.
        """
        if self._strategy.layout.model_parallel_size > 1:
            length = sized_len(loader)
            self.compare(f"{self.name_of(loader)} has {'no known number of' if length is None else length} batches", [])
        elif not self.counts.follows(loader):
            return loader
        kind = type(loader)
        if _MARK in vars(kind):  # read in two stages, or after a reload
            return loader
        try:
            set_until_closed(self._restores, loader, "__class__", _followed(kind, self))
        except TypeError:  # a generator, for example
            return _Wrapped(loader, self)
        return loader

    def teardown(self) -> None:
        """Give the loaders back their classes, and be ready for another run."""
        self._compared.clear()
        self._restores.close()
        self.counts.teardown()

    def begin(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass of Lightning's loops over a loader."""
        return self.counts.begin(loader, self._begin_in_copy(loader, begin))

    def _begin_in_copy(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass that is the same on the ranks of a model copy."""
        if self._strategy.layout.model_parallel_size == 1:
            return begin()
        if not self.sends:
            return _Pass(self, loader, begin)
        if self._compared.get(id(loader)) is not loader:
            # Every rank still reads the first batch: a dataset that shards itself by rank would lose shards otherwise.
            self._compared[id(loader)] = loader
            return _Sent(self, loader, _Pass(self, loader, begin))
        return _Sent(self, loader, None, begin() if self.reads else None)

    @property
    def reads(self) -> bool:
        """Whether this rank reads for the others, if batches are sent."""
        return model_copy_group().rank() == 0

    @property
    def only_receives(self) -> bool:
        """Whether this rank gets its batches from another one."""
        return self.sends and self._strategy.layout.model_parallel_size > 1 and not self.reads

    def from_reader(self, value: Any) -> Any:
        """Return what the reading rank has; collective over the model copy if batches are sent."""
        if not self.sends or self._strategy.layout.model_parallel_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=model_copy_group(), group_src=0)
        return box[0]

    def send(self, loader: Any, read: Callable[[], Any]) -> Any:
        """Return the batch that the reading rank reads, or ``_END``; collective over the model copy."""
        message: tuple[str, Any, RandomState | None]
        if not self.reads:
            self._strategy.resume.batch_is_read(loader)
            message = ("", None, None)
        elif (batch := read()) is _END:
            message = ("end", None, take_common())
        else:
            # Pickled on a GPU, a tensor would arrive on the reader's device.
            message = ("batch", move_data_to_device(batch, "cpu"), take_common())
        try:
            kind, sent, state = self.from_reader(message)
        except (TypeError, AttributeError, pickle.PicklingError) as error:  # on the reader, before sending
            kind, sent, state = self.from_reader(("error", str(error), None))
        if kind == "error":
            raise ValueError(
                f"broadcast_batches=True pickles each batch, and one of {self.name_of(loader)} cannot be pickled:"
                f" {sent}; remove the option, or return tensors and plain values from collate_fn"
            )
        if self.reads:
            return batch
        put_common(state)
        return _END if kind == "end" else sent

    def name_of(self, loader: object) -> str:
        """Return how a user knows a loader, such as ``val_dataloader 1``."""
        return loader_name(self.counts.trainer, loader)

    def compare(self, moment: str, facts: list[Fact]) -> None:
        """Compare what the ranks of a model copy have reached and read; ``ValueError`` on all of them if it differs.

        ``moment`` names the loader and the batch, such as ``train_dataloader gives batch 3``; ``facts`` are the leaves
        of the batch, or empty.
        """
        group = model_copy_group()
        # The minimum of number and -number tells whether all are equal: 5 and 7 give (5, -7). The shift leaves 63 bits.
        number = int.from_bytes(hashlib.blake2b(repr((moment, facts)).encode(), digest_size=8).digest()) >> 1
        bounds = torch.tensor([number, -number], device="cpu")
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
        if bounds[0] == -bounds[1]:
            return
        read: list[Any] = [None] * group.size()
        dist.all_gather_object(read, (moment, facts), group=group)
        other = next(index for index, seen in enumerate(read) if seen != read[0])
        first, second = (dist.get_global_rank(group, index) for index in (0, other))
        raise ValueError(
            f"ranks {first} and {second} hold parts of one model copy and must read the same batches, but"
            f" {_difference(read[0], read[other], first, second)}; if the dataset or its sampler uses the global"
            " rank, use lightning_mcore.data_shard(trainer) instead, and seed its random numbers"
        )


def _followed(kind: type, batches: SameBatches) -> Any:
    """Return a subclass of a loader's class, from which Lightning's loops read what all ranks have compared."""
    # Weakly: Python's inspect module (3.12) caches classes, which would keep the run and its model in memory
    followed = weakref.proxy(batches)

    def begin(loader: Any) -> Iterator[Any]:
        return _begin(loader, partial(kind.__iter__, loader), followed)  # type: ignore[attr-defined]

    def pickled(loader: Any, protocol: Any) -> Any:
        reduced: Any = kind.__reduce_ex__(loader, protocol)  # type: ignore[call-arg] # the subclass exists only here
        function, (_, *rest), *more = reduced
        return function, (kind, *rest), *more

    return type(kind.__name__, (kind,), {"__iter__": begin, "__reduce_ex__": pickled, _MARK: True})


def _begin(loader: Any, begin: Callable[[], Iterator[Any]], batches: SameBatches) -> Iterator[Any]:
    """Begin a pass over a loader, followed only in Lightning's loops, which run on all ranks."""
    # Frame 0 is this function, 1 is __iter__, and 2 called iter(loader).
    is_of_a_loop = sys._getframe(2).f_globals["__name__"] == CombinedLoader.__module__
    return batches.begin(loader, begin) if is_of_a_loop else begin()


class _Wrapped:
    """Replaces an iterable whose class cannot be extended."""

    def __init__(self, loader: Iterable[Any], batches: SameBatches) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        return _begin(self, self._loader.__iter__, self._batches)

    def __len__(self) -> int:
        """Return its length, if it has one."""
        return len(self._loader)  # type: ignore[arg-type]


class _Pass(Iterator[Any]):
    """One pass over a loader, whose batches are compared."""

    def __init__(self, batches: SameBatches, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches
        self._loader = loader
        self._number = 0
        self._is_counted = ends_with_its_length(loader)
        length = f" of {sized_len(loader)} batches" if self._is_counted else ""
        batches.compare(f"{batches.name_of(loader)} begins a pass{length}", [])
        self.inner = begin()

    def __next__(self) -> Any:
        """Return the next batch, which the other ranks of the model copy have read too."""
        number, self._number = self._number, self._number + 1
        batch = next(self.inner, _END)
        shows_contents = number < FIRST_BATCHES or number % EVERY_BATCHES == 0
        if batch is _END:
            if not self._is_counted:
                self._batches.compare(f"{self._batches.name_of(self._loader)} ends after {number} batches", [])
            raise StopIteration
        if shows_contents or not self._is_counted:
            facts = batch_facts(batch) if shows_contents else []
            self._batches.compare(f"{self._batches.name_of(self._loader)} gives batch {number}", facts)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Drop everything: a pass belongs to its process, and a trainer that has one may be pickled."""
        return {}


class _Sent(Iterator[Any]):
    """One pass over a loader that one rank of each model copy reads for the others.

    ``compared`` is a pass on every rank, for the loader's very first batch. ``inner`` reads on the reading rank.
    """

    def __init__(
        self, batches: SameBatches, loader: Any, compared: _Pass | None, inner: Iterator[Any] | None = None
    ) -> None:
        self._batches = batches
        self._loader = loader
        self._compared = compared
        self._inner = inner

    def __next__(self) -> Any:
        """Return the next batch: the first as every rank has read it, the others as they were sent."""
        if self._compared is not None:
            whole, self._compared = self._compared, None
            first = next(whole)
            if self._batches.reads:
                self._inner = whole.inner
            elif getattr(self._loader, "persistent_workers", False):
                self._loader._iterator = None  # ends its workers
            return first
        batch = self._batches.send(self._loader, partial(next, self._inner, _END))
        if batch is _END:
            raise StopIteration
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Drop everything, as ``_Pass`` does."""
        return {}


def _difference(first: tuple[str, list[Fact]], second: tuple[str, list[Fact]], rank: int, other: int) -> str:
    """Return what differs between two ranks, in words."""
    (moment, facts), (other_moment, other_facts) = first, second
    if moment != other_moment:
        return f"the {moment} on rank {rank}, and the {other_moment} on rank {other}"
    pairs = zip([*facts, ("", "nothing")], [*other_facts, ("", "nothing")], strict=False)
    (path, what), (other_path, other_what) = next(pair for pair in pairs if pair[0] != pair[1])
    differs = f"the {moment} with different contents"
    if path == other_path:
        return f"{differs}: {path or 'it'} is {what} on rank {rank}, and {other_what} on rank {other}"
    end = "its end"
    return f"{differs}: {what} at {path or end} on rank {rank}, and {other_what} at {other_path or end} on rank {other}"
