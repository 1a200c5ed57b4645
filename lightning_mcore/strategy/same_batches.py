# SPDX-License-Identifier: Apache-2.0
"""The ranks of one model copy train on the same batches, and all copies on equally many.

Tensor-, context- and pipeline-parallel ranks hold parts of one model, so each must read the same batch (context
parallelism splits it afterwards). Samplers see to it. But a dataset may shard itself by the rank in the world, or draw
a random number of its own, and the parts of the model would silently train on different rows. So the ranks of a copy
compare checksums of batches where Lightning's loops read them, and raise on all of these ranks if they differ;
``parallel/rank_watch.py`` ends the others. User code that reads a loader, perhaps on one rank, compares nothing.

A stream may have more batches for one copy than for another. So before each batch of a stream, all ranks agree that
each of them has one; where one has none, the epoch ends on all, as it does for ``data/finetuning/stream.py``.
Evaluation skips no rows: ranks with more batches continue alone. If their layers need the other ranks, as shared
experts do, a rank without further batches repeats its last batch, or in prediction its last step
(:meth:`SameBatches.predict`). The repetitions do not count.

With ``broadcast_batches=True``, the first rank of each copy reads and sends its batches to the others, with the random
states that reading left. ``strategy.py`` passes every loader through :class:`SameBatches`.
"""

import contextlib
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher  # private: how dataloader_iter is recognized
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_mcore.config.text import counted
from lightning_mcore.data.batches import Fact, batch_facts
from lightning_mcore.data.finetuning.stream import StreamLoader
from lightning_mcore.data.position import TrackedSampler
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.consensus import all_gather_object, all_true
from lightning_mcore.parallel.groups import copies_share_experts, model_copy_group
from lightning_mcore.parallel.random_state import RandomState, put_common, take_common

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
        self._compared: list[Any] = []  # loaders whose first batch every rank has read
        self._repeated: dict[int, int] = {}  # by the id of a loader, from which batch on this rank repeats
        self.num_predicted = 0  # steps that all ranks have run, if their layers communicate
        self._ends_predicting = False
        self._repeat_step: Callable[[], object] | None = None  # the last prediction step, until no rank needs it
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
        elif self._pass_of_stream(loader) is None:
            return loader
        kind = type(loader)
        if _MARK in vars(kind):  # read in two stages, or after a reload
            return loader
        try:
            loader.__class__ = _followed(kind, self)
        except TypeError:  # a generator, for example
            return _Wrapped(loader, self)
        self._restores.callback(setattr, loader, "__class__", kind)
        return loader

    def setup(self, trainer: pl.Trainer) -> None:
        """Check loaders for prediction before Lightning gives them its sampler.

        Source: ``UnrepeatedDistributedSampler.__init__`` of Lightning (2.6), which fails without a sentence, and only
        on ranks without a row.
        """
        connector: Any = trainer._data_connector
        prepare = connector._prepare_dataloader
        layout = self._strategy.layout
        copies = layout.data_parallel_size(self._strategy.world_size)

        def prepare_checked(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
            if mode == RunningStage.PREDICTING and isinstance(dataloader, DataLoader):
                rows = sized_len(dataloader.sampler)
                if connector._requires_distributed_sampler(dataloader) and rows and rows < copies:
                    raise ValueError(
                        f"the predict_dataloader has {counted(rows, 'row')}, fewer than the {copies} data-parallel"
                        " ranks, each of which needs one; run on at most"
                        f" {counted(rows * layout.model_parallel_size, 'rank')}, or add rows"
                    )
            return prepare(dataloader, shuffle, mode)

        self._restores.enter_context(attributes_set([connector], {"_prepare_dataloader": prepare_checked}))

    def teardown(self) -> None:
        """Give the loaders back their classes, and be ready for another run."""
        self._compared.clear()
        # Not when a run starts: Lightning reads its first batch before the first hook
        self.num_predicted, self._ends_predicting, self._repeat_step = 0, False, None
        self._restores.close()

    def begin(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass of Lightning's loops over a loader."""
        in_copy = self._begin_in_copy(loader, begin)
        kind = self._pass_of_stream(loader)
        return in_copy if kind is None else kind(self, loader, in_copy)

    def _pass_of_stream(self, loader: Any) -> "type[_Ended | _Evaluated | _Predicted] | None":
        """Return how several model copies read a stream together; None for other loaders."""
        module, layout = self._strategy.lightning_module, self._strategy.layout
        if module is None or layout.data_parallel_size(self._strategy.world_size) == 1:
            return None
        trainer, stage = module.trainer, module.trainer.state.stage
        assert stage is not None
        if ends_with_its_length(loader) or isinstance(loader, StreamLoader):  # the second does it itself
            return None
        loop: Any
        kind: type[_Ended | _Evaluated | _Predicted]
        if stage == RunningStage.TRAINING:
            loop, kind = trainer.fit_loop, _Ended
        elif stage.evaluating:
            loop, kind = trainer._evaluation_loop, _Evaluated
        elif stage == RunningStage.PREDICTING and self.runs_with_other_copies:
            loop, kind = trainer.predict_loop, _Predicted
        else:
            return None
        # With dataloader_iter, the module reads as many batches as it likes.
        return None if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher) else kind

    @property
    def _trainer(self) -> pl.Trainer:
        module = self._strategy.lightning_module
        assert module is not None
        return module.trainer

    @property
    def runs_with_other_copies(self) -> bool:
        """Whether layers communicate with other model copies: they share experts, or gather parameters."""
        return copies_share_experts() or self.gathers_parameters

    @property
    def gathers_parameters(self) -> bool:
        """Whether layers gather parameters from all data-parallel ranks, as they do only while the trainer fits."""
        is_fit = self._trainer.state.fn == TrainerFn.FITTING
        return is_fit and self._strategy.gradients.data_parallel_sharding is not None

    def is_repeated(self, loader: Any, batch_idx: int) -> bool:
        """Whether this rank repeats an earlier batch of a stream, because only other ranks have more."""
        return batch_idx >= self._repeated.get(id(loader), sys.maxsize)

    def repeat_from(self, loader: Any, batch_idx: int | None) -> None:
        """Set from which batch on this rank repeats; None if it does not."""
        self._repeated.pop(id(loader), None)
        if batch_idx is not None:
            self._repeated[id(loader)] = batch_idx

    def check_numbers(self) -> None:
        """Raise ``ValueError``, on all ranks, if an epoch has more batches on some ranks than on others; collective."""
        # Rank 0 with 4 batches would wait in its last step for rank 1, which has 3; streams are infinite on all ranks
        numbers = all_gather_object(self._trainer.num_training_batches)
        least, most = min(numbers), max(numbers)
        if least != most:
            raise ValueError(
                f"an epoch has {least} batches on rank {numbers.index(least)} and {most} on rank {numbers.index(most)},"
                " which would wait for each other; give every data-parallel rank equally many, or set"
                f" limit_train_batches={least}"
            )

    def end_epoch(self, loader: Any, has_batch: bool) -> None:
        """Say which ranks have no batch left; collective.

        Raises ``ValueError``, on all ranks, if some have none at all: nothing would be learnt, and a run that counts
        steps would never end.
        """
        name = self.name_of(loader)
        which = self.without_batch(name, has_batch, self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        if which:
            rank_zero_warn(
                f"the epoch ends on all ranks, because the {name} has no more batches on {which}; the"
                " rest of the other ranks' batches is skipped. Give all data-parallel ranks equal shares to avoid this."
            )

    @staticmethod
    def without_batch(name: str, has_batch: bool, num_read: int) -> str:
        """Return which ranks have no batch of the loader left, in words; empty if no rank has one; collective.

        Raises ``ValueError``, on all ranks, if some of them had none from the beginning.
        """
        have = all_gather_object(has_batch)
        if not any(have):
            return ""
        ended = [rank for rank, has in enumerate(have) if not has]
        which = f"rank{'s' if len(ended) > 1 else ''} {', '.join(map(str, ended[:8]))}{', ...' if ended[8:] else ''}"
        if num_read == 0:
            raise ValueError(
                f"the {name} has no batch on {which}, but has some on others; give every data-parallel rank rows to"
                " read"
            )
        return which

    def predict(self, run_step: Callable[[], Any], repeat_step: Callable[[], object]) -> Any:
        """Run a prediction step and, if it is this rank's last, ``repeat_step`` until all ranks have run theirs.

        Nothing is repeated if layers do not communicate with other model copies.
        """
        loop: Any = self._trainer.predict_loop
        # With dataloader_iter, a step that runs again would read another batch.
        if not self.runs_with_other_copies or isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            self._ends_predicting = True
            return run_step()
        self._repeat_step = None  # it holds a batch
        self._some_predict(True)
        output = run_step()
        self._repeat_step = repeat_step
        if loop.batch_progress.is_last_batch:  # now, because hooks at the end of the epoch may wait for other ranks
            self.end_predicting()
        return output

    def end_predicting(self) -> None:
        """Take part in the prediction steps of other ranks until none has any; collective, once for each run."""
        if self._ends_predicting or not self.runs_with_other_copies:
            return
        self._ends_predicting = True
        while self._some_predict(False):
            assert self._repeat_step is not None  # a rank without any step is an error
            self._repeat_step()
        self._repeat_step = None

    def end_loader_to_predict(self, loader: Any) -> None:
        """After the last loader, end the predictions."""
        loaders = self._trainer.predict_loop._combined_loader
        if loaders is not None and loaders.flattened[-1] is loader:
            self.end_predicting()

    def _some_predict(self, has_batch: bool) -> bool:
        """Return whether any rank runs another prediction step; collective.

        Raises ``ValueError``, on all ranks, if some had none from the beginning.
        """
        some = all_true(has_batch) or bool(self.without_batch("predict_dataloader", has_batch, self.num_predicted))
        self.num_predicted += 1
        return some

    def _begin_in_copy(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass that is the same on the ranks of a model copy."""
        if self._strategy.layout.model_parallel_size == 1:
            return begin()
        if not self.sends:
            return _Pass(self, loader, begin)
        if not any(other is loader for other in self._compared):
            # Every rank still reads the first batch: a dataset that shards itself by rank would lose shards otherwise.
            self._compared.append(loader)
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
        trainer = self._trainer
        assert trainer.state.stage is not None
        name = f"{trainer.state.stage.dataloader_prefix}_dataloader"
        loop: Any = trainer._active_loop
        all_of_it = loop._combined_loader.flattened if getattr(loop, "_combined_loader", None) is not None else []
        index = next((index for index, other in enumerate(all_of_it) if other is loader), 0)
        return f"{name} {index}" if len(all_of_it) > 1 else name

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

    def begin(loader: Any) -> Iterator[Any]:
        return _begin(loader, partial(kind.__iter__, loader), batches)  # type: ignore[attr-defined]

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


class _Ended(Iterator[Any]):
    """One pass over a stream that ends on all ranks where the first of them has no batch left."""

    def __init__(self, batches: SameBatches, loader: Any, inner: Iterator[Any]) -> None:
        self._batches = batches
        self._loader = loader
        self._inner = inner

    def __next__(self) -> Any:
        """Return the next batch, if every rank has one."""
        batch = next(self._inner, _END)
        # Also on a rank that has one: it must not train on a batch that another rank lacks
        if all_true(batch is not _END):
            return batch
        self._batches.end_epoch(self._loader, batch is not _END)
        raise StopIteration

    def __getstate__(self) -> dict[str, Any]:
        """Drop everything, as ``_Pass`` does."""
        return {}


class _Evaluated(Iterator[Any]):
    """One pass over a stream to evaluate on, of which every rank has a batch.

    If layers communicate with other model copies, it has as many on all ranks: one without repeats its last.
    """

    def __init__(self, batches: SameBatches, loader: Any, inner: Iterator[Any]) -> None:
        self._batches = batches
        self._loader = loader
        self._inner = inner
        self._number = 0
        self._last: Any = _END
        self._is_shared = batches.runs_with_other_copies
        batches.repeat_from(loader, None)

    def __next__(self) -> Any:
        """Return the next batch, or the last one again."""
        number, self._number = self._number, self._number + 1
        is_repeated = self._batches.is_repeated(self._loader, number)
        batch = _END if is_repeated else next(self._inner, _END)
        has_batch = batch is not _END
        # Elsewhere ranks need not wait for each other: each ends with its own last batch
        if number == 0 or self._is_shared:
            if not all_true(has_batch):
                name = self._batches.name_of(self._loader)
                if not self._batches.without_batch(name, has_batch, number):
                    raise StopIteration
            if not (has_batch or is_repeated):
                self._batches.repeat_from(self._loader, number)
            self._last = batch if has_batch else self._last
            return self._last
        if not has_batch:
            raise StopIteration
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Drop everything, as ``_Pass`` does."""
        return {}


class _Predicted(Iterator[Any]):
    """One pass over a stream to predict; at the end of the last stream, this rank takes part in others' steps."""

    def __init__(self, batches: SameBatches, loader: Any, inner: Iterator[Any]) -> None:
        self._batches = batches
        self._loader = loader
        self._inner = inner
        self._num_read = batches.num_predicted  # Lightning reads one loader after the other

    def __next__(self) -> Any:
        """Return the next batch."""
        batch = next(self._inner, _END)
        if batch is _END:
            # Lightning may have read ahead; then the last batch has its step after this
            if self._num_read == self._batches.num_predicted:
                self._batches.end_loader_to_predict(self._loader)
            raise StopIteration
        self._num_read += 1
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Drop everything, as ``_Pass`` does."""
        return {}


def ends_with_its_length(loader: Any) -> bool:
    """Return whether a loader surely yields as many batches as its length says: it reads by index, in even batches."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, TrackedSampler):
        return sampler.position_tracker.batch_size is not None
    return sampler is None or type(sampler) is BatchSampler


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
