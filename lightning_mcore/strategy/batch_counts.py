# SPDX-License-Identifier: Apache-2.0
"""Model copies that would wait for each other in a batch have equally many, or end together.

Loaders with a length must have the same one on all data-parallel ranks: always in training, where gradients are summed,
and in evaluation if layers communicate with other copies, as shared experts do.

A stream may have more batches for one copy than for another. In training, all ranks agree before each batch that each
of them has one; where one has none, the epoch ends on all, as it does for ``data/finetuning/stream.py``. Evaluation
skips no rows: ranks with more batches continue alone. If layers communicate, a rank without further batches repeats its
last batch, or in prediction its last step (:meth:`BatchCounts.predict`). The repetitions do not count. For streams of 3
batches on rank 0 and 5 on rank 1:

* training runs batches 0, 1 and 2 on both ranks,
* evaluation runs 0, 1, 2 on rank 0 and 0, 1, 2, 3, 4 on rank 1,
* with shared experts, it runs 0, 1, 2, 2, 2 on rank 0, where the last two have no weight.

``same_batches.py`` passes the loaders that Lightning's loops read through :meth:`BatchCounts.begin`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher  # private: how dataloader_iter is recognized
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_mcore.config.text import counted
from lightning_mcore.data.finetuning.stream import StreamLoader
from lightning_mcore.data.position import TrackedSampler
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.consensus import all_gather_object, all_true
from lightning_mcore.parallel.groups import copies_share_experts, process_group
from lightning_mcore.parallel.rank_process import named_ranks

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy

_END = object()


class BatchCounts:
    """Compares and follows how many batches the model copies of a run have."""

    def __init__(self, strategy: "MCoreStrategy") -> None:
        self._strategy = strategy
        self._repeated: dict[int, int] = {}  # by the id of a loader, from which batch on this rank repeats
        self.num_predicted = 0  # steps that all ranks have run, if their layers communicate
        self._ends_predicting = False
        self._repeat_step: Callable[[], object] | None = None  # the last prediction step, until no rank needs it
        self._restores = contextlib.ExitStack()

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
        """Be ready for another run."""
        # Not when a run starts: Lightning reads its first batch before the first hook
        self.num_predicted, self._ends_predicting, self._repeat_step = 0, False, None
        self._restores.close()

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of the run."""
        module = self._strategy.lightning_module
        assert module is not None
        return module.trainer

    @property
    def communicates(self) -> bool:
        """Whether layers communicate with other model copies: they share experts, or gather parameters."""
        return copies_share_experts() or self._gathers_parameters

    @property
    def _gathers_parameters(self) -> bool:
        """Whether layers gather parameters from all data-parallel ranks, as they do only while the trainer fits."""
        is_fit = self.trainer.state.fn == TrainerFn.FITTING
        return is_fit and self._strategy.gradients.data_parallel_sharding is not None

    # ---- loaders with a length

    def check_training(self) -> None:
        """Raise ``ValueError``, on all ranks, if an epoch has more batches on some ranks than on others; collective."""
        # Streams are infinite on all ranks
        numbers = dict(enumerate(all_gather_object(self.trainer.num_training_batches)))
        _check_equal("an epoch", numbers, "limit_train_batches")

    def check_evaluation(self) -> None:
        """Raise ``ValueError``, on all ranks, if ranks that communicate have unequal numbers of batches; collective.

        A stream of unknown length counts as its limit, or as infinity, on all ranks.
        """
        if not self.communicates:
            return
        limits = self.trainer._evaluation_loop.max_batches
        first = 0 if self._gathers_parameters else dist.get_process_group_ranks(process_group("experts"))[0]
        groups: dict[int, dict[int, list[Any]]] = {}  # the ranks of each, with the numbers of their loaders
        for rank, (group, numbers) in enumerate(all_gather_object((first, list(limits)))):
            groups.setdefault(group, {})[rank] = numbers
        stage = self.trainer.state.stage
        assert stage is not None
        prefix = stage.dataloader_prefix
        for ranks in groups.values():
            for index in range(len(limits)):
                name = _name(prefix, index, len(limits))
                of_loader = {rank: numbers[index] for rank, numbers in ranks.items()}
                _check_equal(f"the {name}", of_loader, f"limit_{prefix}_batches")

    # ---- streams

    def begin(self, loader: Any, inner: Iterator[Any]) -> Iterator[Any]:
        """Begin a pass of Lightning's loops over a loader; ``inner`` gives this model copy's batches."""
        kind = self._kind_of_pass(loader)
        return inner if kind is None else kind(self, loader, inner)

    def follows(self, loader: Any) -> bool:
        """Whether the copies read a loader together."""
        return self._kind_of_pass(loader) is not None

    def _kind_of_pass(self, loader: Any) -> "type[_Ended | _Evaluated | _Predicted] | None":
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
        elif stage == RunningStage.PREDICTING and self.communicates:
            loop, kind = trainer.predict_loop, _Predicted
        else:
            return None
        # With dataloader_iter, the module reads as many batches as it likes.
        return None if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher) else kind

    def ranks_without_batch(self, name: str, has_batch: bool, num_read: int) -> str:
        """Return which ranks have no batch of the loader left, in words; empty if no rank has one; collective.

        Raises ``ValueError``, on all ranks, if some of them had none from the beginning: nothing would be learnt, and
        a run that counts steps would never end.
        """
        have = all_gather_object(has_batch)
        if not any(have):
            return ""
        ended = [rank for rank, has in enumerate(have) if not has]
        which = named_ranks(ended)
        if num_read == 0:
            raise ValueError(
                f"the {name} has no batch on {which}, but has some on others; give every data-parallel rank rows to"
                " read"
            )
        return which

    # ---- batches of evaluation that repeat

    def is_repeated(self, loader: Any, batch_idx: int) -> bool:
        """Whether this rank repeats an earlier batch of a stream, because only other ranks have more."""
        return batch_idx >= self._repeated.get(id(loader), sys.maxsize)

    def repeat_from(self, loader: Any, batch_idx: int | None) -> None:
        """Set from which batch on this rank repeats; None if it does not."""
        self._repeated.pop(id(loader), None)
        if batch_idx is not None:
            self._repeated[id(loader)] = batch_idx

    # ---- steps of prediction that repeat

    def predict(self, run_step: Callable[[], Any], repeat_step: Callable[[], object]) -> Any:
        """Run a prediction step and, if it is this rank's last, ``repeat_step`` until all ranks have run theirs.

        Nothing is repeated if layers do not communicate with other model copies.
        """
        loop: Any = self.trainer.predict_loop
        # With dataloader_iter, a step that runs again would read another batch.
        if not self.communicates or isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
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
        if self._ends_predicting or not self.communicates:
            return
        self._ends_predicting = True
        while self._some_predict(False):
            assert self._repeat_step is not None  # a rank without any step is an error
            self._repeat_step()
        self._repeat_step = None

    def _some_predict(self, has_batch: bool) -> bool:
        """Return whether any rank runs another prediction step; collective.

        Raises ``ValueError``, on all ranks, if some had none from the beginning.
        """
        some = all_true(has_batch) or bool(
            self.ranks_without_batch("predict_dataloader", has_batch, self.num_predicted)
        )
        self.num_predicted += 1
        return some


class _Stream(Iterator[Any]):
    """One pass of several model copies over a stream."""

    def __init__(self, counts: BatchCounts, loader: Any, inner: Iterator[Any]) -> None:
        self._counts = counts
        self._loader = loader
        self._inner = inner

    def __getstate__(self) -> dict[str, Any]:
        """Drop everything: a pass belongs to its process, and a trainer that has one may be pickled."""
        return {}


class _Ended(_Stream):
    """A pass that ends on all ranks where the first of them has no batch left."""

    def __next__(self) -> Any:
        """Return the next batch, if every rank has one."""
        batch = next(self._inner, _END)
        has_batch = batch is not _END
        # Also on a rank that has one: it must not train on a batch that another rank lacks
        if all_true(has_batch):
            return batch
        trainer = self._counts.trainer
        name = loader_name(trainer, self._loader)
        num_read = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        which = self._counts.ranks_without_batch(name, has_batch, num_read)
        if which:
            rank_zero_warn(
                f"the epoch ends on all ranks, because the {name} has no more batches on {which}; the"
                " rest of the other ranks' batches is skipped. Give all data-parallel ranks equal shares to avoid this."
            )
        raise StopIteration


class _Evaluated(_Stream):
    """A pass to evaluate on, of which every rank has a batch.

    If layers communicate with other model copies, it has as many on all ranks: one without repeats its last.
    """

    def __init__(self, counts: BatchCounts, loader: Any, inner: Iterator[Any]) -> None:
        super().__init__(counts, loader, inner)
        self._number = 0
        self._last: Any = _END
        self._is_shared = counts.communicates
        counts.repeat_from(loader, None)

    def __next__(self) -> Any:
        """Return the next batch, or the last one again."""
        number, self._number = self._number, self._number + 1
        is_repeated = self._counts.is_repeated(self._loader, number)
        batch = _END if is_repeated else next(self._inner, _END)
        has_batch = batch is not _END
        # Elsewhere ranks need not wait for each other: each ends with its own last batch
        if number == 0 or self._is_shared:
            if not all_true(has_batch):
                name = loader_name(self._counts.trainer, self._loader)
                if not self._counts.ranks_without_batch(name, has_batch, number):
                    raise StopIteration
            if not (has_batch or is_repeated):
                self._counts.repeat_from(self._loader, number)
            self._last = batch if has_batch else self._last
            return self._last
        if not has_batch:
            raise StopIteration
        return batch


class _Predicted(_Stream):
    """A pass to predict; at the end of the last stream, this rank takes part in others' steps."""

    def __init__(self, counts: BatchCounts, loader: Any, inner: Iterator[Any]) -> None:
        super().__init__(counts, loader, inner)
        self._num_read = counts.num_predicted  # Lightning reads one loader after the other

    def __next__(self) -> Any:
        """Return the next batch."""
        batch = next(self._inner, _END)
        if batch is not _END:
            self._num_read += 1
            return batch
        loaders = self._counts.trainer.predict_loop._combined_loader
        is_last = loaders is not None and loaders.flattened[-1] is self._loader
        # Lightning may have read ahead; then the last batch has its step after this
        if is_last and self._num_read == self._counts.num_predicted:
            self._counts.end_predicting()
        raise StopIteration


def ends_with_its_length(loader: Any) -> bool:
    """Return whether a loader surely yields as many batches as its length says: it reads by index, in even batches."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, TrackedSampler):
        return sampler.position_tracker.batch_size is not None
    return sampler is None or type(sampler) is BatchSampler


def loader_name(trainer: pl.Trainer, loader: object) -> str:
    """Return how a user knows a loader, such as ``val_dataloader 1``."""
    assert trainer.state.stage is not None
    loop: Any = trainer._active_loop
    all_of_it = loop._combined_loader.flattened if getattr(loop, "_combined_loader", None) is not None else []
    index = next((index for index, other in enumerate(all_of_it) if other is loader), 0)
    return _name(trainer.state.stage.dataloader_prefix, index, len(all_of_it))


def _name(prefix: str | None, index: int, number: int) -> str:
    return f"{prefix}_dataloader {index}" if number > 1 else f"{prefix}_dataloader"


def _check_equal(what: str, numbers: Mapping[int, float], limit: str) -> None:
    """Raise ``ValueError`` unless all ranks have the same number of batches; ``limit`` is the Trainer's argument."""
    most, least = max(numbers, key=numbers.__getitem__), min(numbers, key=numbers.__getitem__)
    if numbers[most] != numbers[least]:
        raise ValueError(
            f"{what} has {numbers[most]} batches on rank {most} and {numbers[least]} on rank {least}, but these ranks"
            " communicate in every batch; give every data-parallel rank equally many, or set"
            f" {limit}={numbers[least]}"
        )
