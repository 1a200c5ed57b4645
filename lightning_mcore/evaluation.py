# SPDX-License-Identifier: Apache-2.0
"""Exact metrics on evaluation sets that the data-parallel ranks do not divide.

Lightning's distributed sampler repeats samples at the end, so that every rank has as many batches as the others; ranks
that share collectives (experts, gathered parameters) need that. Counted twice, the repeated samples would skew a
metric. So the strategy cuts them off the batch; where a whole batch is repeated it runs, and what it logs is dropped.
"""

import contextlib
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric

_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_COUNTERS = ("_update_count", "_computed", "_forward_cache")


def num_new_rows(dataloader: object, batch_idx: int) -> int | None:
    """Return how many rows of a batch are not repeated samples.

    Args:
        dataloader: What the batch comes from.
        batch_idx: Its place in the dataloader.

    Returns:
        A number of rows; None where no distributed sampler repeats samples.

    Source: ``DistributedSampler.__iter__`` in torch.utils.data (2.13): the repeated samples come last.
    """
    if not isinstance(dataloader, DataLoader) or dataloader.batch_size is None:
        return None
    sampler = dataloader.sampler
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    first = batch_idx * dataloader.batch_size
    places = range(first, min(first + dataloader.batch_size, len(sampler)))
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    return sum(place * sampler.num_replicas + sampler.rank < num_samples for place in places)


class RepeatedRows:
    """Follows an evaluation run batch by batch and cuts off repeated samples."""

    def __init__(self) -> None:
        self._num_batches: Counter[int] = Counter()
        self.whole_batch = False
        self.only_batch = False

    def start(self) -> None:
        """Begin a run over the evaluation dataloaders."""
        self._num_batches.clear()
        self.whole_batch = self.only_batch = False

    def cut(self, batch: Any, dataloader: object, dataloader_idx: int) -> Any:
        """Return the next batch of a dataloader without repeated samples.

        A batch of nothing else is returned as it is; :attr:`whole_batch` says so, and :attr:`only_batch` that this rank
        has no other.
        """
        batch_idx = self._num_batches[dataloader_idx]
        self._num_batches[dataloader_idx] += 1
        new = num_new_rows(dataloader, batch_idx)
        self.whole_batch = new == 0
        self.only_batch = self.whole_batch and batch_idx == 0
        if not new:
            return batch
        rows = extract_batch_size(batch)
        if new >= rows:
            return batch
        return apply_to_collection(batch, Tensor, lambda t: t[:new] if t.dim() > 0 and t.shape[0] == rows else t)


@contextlib.contextmanager
def nothing_counts(module: pl.LightningModule, is_only_batch: bool) -> Iterator[None]:
    """Take the weight from what the module logs inside the ``with`` block, and forget what its metric objects learn.

    The names are logged all the same: a rank with nothing but repeated samples must take part when the ranks reduce.

    Args:
        module: Whose step runs.
        is_only_batch: Whether this rank has no other; what it does not reduce with others then keeps its weight, for
            there is nothing to be a mean of otherwise.
    """
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    saved = [copy.deepcopy({**m.metric_state, **{n: getattr(m, n) for n in _COUNTERS}}) for m in metrics]
    object.__setattr__(module, "log", functools.partial(_log_without_weight, module, is_only_batch))
    try:
        yield
    finally:
        object.__delattr__(module, "log")
        for metric, state in zip(metrics, saved, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)


def _log_without_weight(
    module: pl.LightningModule, is_only_batch: bool, name: str, value: Any, *args: Any, **kwargs: Any
) -> None:
    """Log a value so that it changes no mean and no sum; a repeated sample changes no minimum or maximum."""
    options = dict(_LOG_SIGNATURE.bind(module, name, value, *args, **kwargs).arguments)
    reduction = str(options.get("reduce_fx", "mean"))
    if not isinstance(value, Metric) and (options.get("sync_dist") or not is_only_batch):
        if reduction == "sum":
            options["value"] = value * 0
        elif reduction in ("mean", "avg"):
            options["batch_size"] = options.get("batch_size", 1) * 0  # of the type that the other ranks reduce
    options.pop("self")
    pl.LightningModule.log(module, **options)
