# SPDX-License-Identifier: Apache-2.0
"""Evaluation: exact metrics on sets that the data-parallel ranks do not divide, and who reads what a step returned.

Lightning's distributed sampler repeats samples at the end, so that every rank has as many batches as the others; ranks
that share collectives (experts, gathered parameters) need that. Counted twice, the repeated samples would skew a
metric. So the strategy cuts them off the batch; where a whole batch is repeated it runs, and what it logs is dropped.
"""

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric

_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_FUNCTIONS = {
    torch.mean: "mean",
    torch.sum: "sum",
    sum: "sum",
    torch.min: "min",
    min: "min",
    torch.max: "max",
    max: "max",
}
_LEAVE_OUTPUTS_ASIDE = ("lightning", "pytorch_lightning", "lightning_mcore")
_NAMES = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


def reduction_name(reduce_fx: Any) -> str | None:
    """Return which of mean, sum, min and max the ``reduce_fx`` of ``self.log`` stands for, None for anything else.

    Source: ``_Metadata`` in lightning/pytorch/trainer/connectors/logger_connector/result.py (2.6).
    """
    return _NAMES.get(reduce_fx.lower()) if isinstance(reduce_fx, str) else _FUNCTIONS.get(reduce_fx)


def num_new_rows(dataloader: object, batch_idx: int) -> int | None:
    """Return how many rows of a batch are not repeated samples.

    Args:
        dataloader: What the batch comes from.
        batch_idx: Its place in the dataloader.

    Returns:
        A number of rows, of batches where the dataset holds batches; None where no distributed sampler repeats samples.

    Source: ``DistributedSampler.__iter__`` in torch.utils.data (2.13): the repeated samples come last.
    """
    if not isinstance(dataloader, DataLoader):
        return None
    sampler, batch_size = dataloader.sampler, dataloader.batch_size
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    if batch_size is None:
        if dataloader.batch_sampler is not None:  # the user's own, which may form batches in any way
            return None
        batch_size = 1  # the sampler chooses whole batches
    first = batch_idx * batch_size
    places = range(first, min(first + batch_size, len(sampler)))
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    return sum(place * sampler.num_replicas + sampler.rank < num_samples for place in places)


def reads_outputs(trainer: pl.Trainer) -> bool:
    """Return whether a hook on this rank may read what the validation or test step returned.

    Lightning hands it to the hooks at a batch's end alone. Those of Lightning's callbacks, such as progress bars, leave
    it aside, and so do ours.
    """
    name = "on_test_batch_end" if trainer.testing else "on_validation_batch_end"
    hooks = [getattr(owner, name) for owner in (*trainer.callbacks, trainer.lightning_module)]  # type: ignore[attr-defined]
    return any(hook.__module__.partition(".")[0] not in _LEAVE_OUTPUTS_ASIDE for hook in hooks)


class RepeatedRows:
    """Follows an evaluation run batch by batch and cuts off repeated samples.

    Attributes:
        place: The number of the batch that was cut last, and that of its dataloader.
        whole_batch: Whether that batch holds repeated samples alone.
        only_batch: Whether it does and this rank has no other.
    """

    def __init__(self) -> None:
        self._num_batches: Counter[int] = Counter()
        self.place = (0, 0)
        self.whole_batch = False
        self.only_batch = False

    def start(self) -> None:
        """Begin a run over the evaluation dataloaders."""
        self._num_batches.clear()
        self.place = (0, 0)
        self.whole_batch = self.only_batch = False

    def cut(self, batch: Any, loaders: CombinedLoader | None, dataloader_idx: int) -> Any:
        """Return the next batch of a dataloader without repeated samples.

        A batch of nothing else is returned as it is; :attr:`whole_batch` says so, and :attr:`only_batch` that this rank
        has no other. Where several loaders are read side by side, each batch is left as it is.

        Args:
            batch: The batch, on the device.
            loaders: The dataloaders of the run.
            dataloader_idx: Which of them it comes from.
        """
        assert loaders is not None, "evaluation runs over dataloaders"
        batch_idx = self._num_batches[dataloader_idx]
        self._num_batches[dataloader_idx] += 1
        self.place = (batch_idx, dataloader_idx)
        dataloader = loaders.flattened[dataloader_idx]
        new = num_new_rows(dataloader, batch_idx) if loaders._mode == "sequential" else None
        self.whole_batch = new == 0
        self.only_batch = self.whole_batch and batch_idx == 0
        if not new or dataloader.batch_size is None:
            return batch
        rows = extract_batch_size(batch)
        if new >= rows:
            return batch
        return apply_to_collection(batch, Tensor, lambda t: t[:new] if t.dim() > 0 and t.shape[0] == rows else t)


@contextlib.contextmanager
def metrics_forget(metrics: Sequence[Metric]) -> Iterator[None]:
    """Undo what torchmetrics objects learn inside the ``with`` block."""
    states = [{name: _copy(value) for name, value in metric.metric_state.items()} for metric in metrics]
    counters = [(metric._update_count, metric._forward_cache) for metric in metrics]
    try:
        yield
    finally:
        for metric, state, (update_count, forward_cache) in zip(metrics, states, counters, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._forward_cache = update_count, forward_cache
            metric._computed = None  # also where it was known: the other ranks ask each other anew


def _copy(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """Return a copy that stays as it is when the metric adds to its tensor in place or appends to its list."""
    return state.clone() if isinstance(state, Tensor) else list(state)


@contextlib.contextmanager
def nothing_counts(module: pl.LightningModule, is_only_batch: bool) -> Iterator[None]:
    """Take the weight from what the module logs inside the ``with`` block, and forget what its metric objects learn.

    The names are logged all the same: a rank with nothing but repeated samples must take part when the ranks reduce.

    Args:
        module: Whose step runs.
        is_only_batch: Whether this rank has no other; what it does not reduce with others then keeps its weight, for
            there is nothing to be a mean of otherwise.
    """
    object.__setattr__(module, "log", functools.partial(_log_without_weight, module, is_only_batch))
    try:
        with metrics_forget([child for child in module.modules() if isinstance(child, Metric)]):
            yield
    finally:
        object.__delattr__(module, "log")


def _log_without_weight(
    module: pl.LightningModule, is_only_batch: bool, name: str, value: Any, *args: Any, **kwargs: Any
) -> None:
    """Log a value so that it changes no mean and no sum; a repeated sample changes no minimum or maximum."""
    options = dict(_LOG_SIGNATURE.bind(module, name, value, *args, **kwargs).arguments)
    reduction = reduction_name(options.get("reduce_fx", "mean"))
    if not isinstance(value, Metric) and (options.get("sync_dist") or not is_only_batch):
        if reduction == "sum":
            options["value"] = value * 0
        elif reduction == "mean":
            options["batch_size"] = options.get("batch_size", 1) * 0  # of the type that the other ranks reduce
    options.pop("self")
    pl.LightningModule.log(module, **options)
