# SPDX-License-Identifier: Apache-2.0
"""Evaluation: exact metrics for datasets that the ranks do not divide evenly, and names that only some ranks log.

*Repeated samples.* Lightning's distributed sampler repeats samples at the end, so that every rank has as many batches
as the others, which ranks with shared collectives (experts, gathered parameters) need. :class:`RepeatedRows` cuts them
off the batch, so that they do not count twice; a batch of only repeated samples still runs, but without logs
(:func:`without_weight`), as do the batches that :class:`~lightning_mcore.strategy.batch_counts.BatchCounts` repeats.

*Names.* A step may log a name on some batches only. :class:`EvaluationNames` makes all ranks know it before Lightning
merges. In training, a plain module does the same at the end of an epoch; with ``pipeline()``, ``pipeline.py`` does it
at each step. ``step.py`` calls this file.
"""

import contextlib
import functools
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric

from lightning_mcore.parallel.groups import process_group
from lightning_mcore.strategy.batch_counts import BatchCounts
from lightning_mcore.strategy.logs.override import log_replaced_by
from lightning_mcore.strategy.logs.reductions import NEUTRAL, reduction_name
from lightning_mcore.strategy.module import rows_of

_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_LEAVE_OUTPUTS_ASIDE = ("lightning", "pytorch_lightning", "lightning_mcore")  # packages whose hooks ignore outputs


def num_new_samples(dataloader: object, batch_idx: int) -> tuple[int, int] | None:
    """Return how many samples of a batch are not repeated, and how many it has (batches, if the dataset has these).

    None without a distributed sampler that repeats samples, or if a batch sampler of the user's forms the batches.
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
        batch_size = 1
    # 10 samples on 4 ranks: rank r has samples r, 4 + r and 8 + r. With batch_size=2, batch 1 is sample 8 on rank 0,
    # new: (1, 1); on rank 2 it would be sample 10, which does not exist: (0, 1).
    first = batch_idx * batch_size
    places = range(first, min(first + batch_size, len(sampler)))
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    return sum(place * sampler.num_replicas + sampler.rank < num_samples for place in places), len(places)


def reads_outputs(trainer: pl.Trainer) -> bool:
    """Return whether a hook on this rank may read the output of the validation or test step."""
    name = "on_test_batch_end" if trainer.testing else "on_validation_batch_end"
    hooks = [getattr(owner, name) for owner in (*trainer.callbacks, trainer.lightning_module)]  # type: ignore[attr-defined]
    # Lightning passes outputs only to these hooks; its own callbacks and ours ignore them.
    return any(hook.__module__.partition(".")[0] not in _LEAVE_OUTPUTS_ASIDE for hook in hooks)


class RepeatedRows:
    """Follows an evaluation run batch by batch and cuts off repeated samples."""

    def __init__(self) -> None:
        self._num_batches: Counter[int] = Counter()
        self._rows_per_sample: dict[int, float | None] = {}  # by dataloader; None if unknown, or if samples differ
        self.place = (0, 0)  # of the last batch that was cut, and of its dataloader
        self.whole_batch = False  # that batch has only repeated samples
        self.only_batch = False  # and this rank has no other batch
        self.rows_before = 0  # before the cut, as on other ranks; 0 if it was not cut

    def start(self) -> None:
        """Start a run over the evaluation dataloaders."""
        self._num_batches.clear()
        self._rows_per_sample.clear()
        self.place = (0, 0)
        self.whole_batch = self.only_batch = False
        self.rows_before = 0

    def cut(self, batch: Any, loaders: CombinedLoader | None, dataloader_idx: int, counts: BatchCounts) -> Any:
        """Return the next batch of a dataloader without repeated samples.

        A batch of only repeated samples is returned unchanged, and :attr:`whole_batch` is set. If several loaders are
        read in parallel, no batch is cut. If samples have different numbers of rows, or the rows of a batch cannot be
        counted, a batch is not cut either, and a warning says so.
        """
        assert loaders is not None, "evaluation runs over dataloaders"
        # Counted here, because Lightning's hooks that move a batch do not get its index.
        batch_idx = self._num_batches[dataloader_idx]
        self._num_batches[dataloader_idx] += 1
        self.place = (batch_idx, dataloader_idx)
        dataloader = loaders.flattened[dataloader_idx]
        found = num_new_samples(dataloader, batch_idx) if loaders._mode == "sequential" else None
        new, samples = (None, 1) if found is None else found
        if loaders._mode == "sequential" and counts.is_repeated(dataloader, batch_idx):
            new = 0
        self.whole_batch = new == 0
        self.only_batch = self.whole_batch and batch_idx == 0
        self.rows_before = 0
        if not new or dataloader.batch_size is None:
            return batch
        rows = _num_rows(batch)
        per_sample = None if rows is None else rows / samples  # 2 for the answers of a pair
        if self._rows_per_sample.setdefault(dataloader_idx, per_sample) != per_sample:
            self._rows_per_sample[dataloader_idx] = None
        if new == samples:
            return batch
        per_sample = self._rows_per_sample[dataloader_idx]
        if rows is None or per_sample is None or not per_sample.is_integer():
            warnings.warn(
                f"the last batch repeats {samples - new} of its {samples} samples, so that all ranks have as many"
                " batches, and these samples count twice, as under ddp: they cannot be cut off, because samples have"
                " different numbers of rows, or the batch is not made of tensors; use a batch size that divides the"
                " data, or your own sampler",
                stacklevel=2,
            )
            return batch
        new *= int(per_sample)
        self.rows_before = rows
        return rows_of(batch, rows, 0, new)


def _num_rows(batch: Any) -> int | None:
    """Return the rows of a batch; None for a batch without tensors that Lightning can find."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return None


@contextlib.contextmanager
def metrics_unchanged(metrics: Sequence[Metric]) -> Iterator[None]:
    """Undo updates of torchmetrics objects inside the ``with`` block."""
    states = [{name: _copy(value) for name, value in metric.metric_state.items()} for metric in metrics]
    counters = [(metric._update_count, metric._forward_cache) for metric in metrics]
    try:
        yield
    finally:
        for metric, state, (update_count, forward_cache) in zip(metrics, states, counters, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._forward_cache = update_count, forward_cache
            metric._computed = None  # even if it was computed: the other ranks compute it again, together


def _copy(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """Return a copy that does not change when the metric updates its tensor in place or appends to its list."""
    return state.clone() if isinstance(state, Tensor) else list(state)


@contextlib.contextmanager
def without_weight(module: pl.LightningModule, is_only_batch: bool) -> Iterator[None]:
    """Log with weight zero inside the ``with`` block, and undo updates of metric objects.

    The names are still logged, because a rank with only repeated samples must take part when the ranks reduce. On the
    only batch of a rank, values that are not reduced over ranks keep their weight: a mean needs at least one.
    """
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    function = functools.partial(_log_without_weight, module, is_only_batch)
    with log_replaced_by(function, module), metrics_unchanged(metrics):
        yield


def _log_without_weight(
    module: pl.LightningModule, is_only_batch: bool, name: str, value: Any, *args: Any, **kwargs: Any
) -> None:
    """Log a value so that it changes no mean or sum; a minimum or maximum ignores repeated samples anyway."""
    options = dict(_LOG_SIGNATURE.bind(module, name, value, *args, **kwargs).arguments)
    reduction = reduction_name(options.get("reduce_fx", "mean"))
    if not isinstance(value, Metric) and (options.get("sync_dist") or not is_only_batch):
        if reduction == "sum":
            options["value"] = value * 0
        elif reduction == "mean":
            weight = options.get("batch_size")
            options["batch_size"] = 0 if weight is None else weight * 0  # zero of the type that other ranks reduce
    options.pop("self")
    pl.LightningModule.log(module, **options)


@dataclass(frozen=True)
class _Logged:
    """A name in the results of a run, and the other arguments of ``log`` that it was logged with."""

    key: str
    options: dict[str, Any]
    on_step: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype


class EvaluationNames:
    """Makes the data-parallel ranks agree on the names that an evaluation run logs, once for each dataloader."""

    def __init__(self) -> None:
        # With sync_dist=True, Lightning merges each name over the ranks at the end of the run. If only rank 0 has
        # logged "rare", it would wait, or merge "rare" with rank 1's next name.
        self._last_batches: list[int | None] = []

    def start(self, loop: Any, device: torch.device) -> None:
        """Start a run of Lightning's evaluation loop; collective over the data-parallel ranks.

        A dataloader of unknown length, or without a batch on some rank, is left to Lightning, because a rank that never
        reaches a last batch could not take part.
        """
        group = process_group("dp")
        if group.size() == 1:
            self._last_batches = []
            return
        loaders = loop._combined_loader.flattened if loop._is_sequential else []
        # With limit_val_batches, a stream of unknown length has a number of batches too, and may end before it.
        max_batches = [
            count if sized_len(loader) is not None else math.inf
            for count, loader in zip(loop.max_batches, loaders, strict=bool(loaders))
        ]
        counted = torch.tensor([float(math.isfinite(count) and count > 0) for count in max_batches], device=device)
        dist.all_reduce(counted, op=dist.ReduceOp.MIN, group=group)
        self._last_batches = [
            int(count) - 1 if is_counted else None
            for count, is_counted in zip(max_batches, counted.bool().tolist(), strict=True)
        ]

    def end_of_batch(self, module: pl.LightningModule, batch_idx: int, dataloader_idx: int) -> None:
        """After the last batch of a dataloader, log with weight zero the names that only other ranks have logged."""
        if dataloader_idx >= len(self._last_batches) or self._last_batches[dataloader_idx] != batch_idx:
            return
        agree_on_names(module)


def agree_on_names(module: pl.LightningModule) -> None:
    """Log with weight zero the names that only other ranks have logged, and sort all names; collective.

    Names with ``on_step=True`` are merged at each step, so they are left alone.
    """
    group = process_group("dp")
    if group.size() == 1:
        return
    own = _logged(module)
    found: list[list[_Logged]] = [[]] * group.size()
    dist.all_gather_object(found, own, group=group)
    if all(logged == own for logged in found):
        return
    names = {logged.key for logged in own}
    for logged in (logged for others in found for logged in others):
        if logged.key not in names and not logged.on_step:
            names.add(logged.key)
            _log_nothing(module, logged)
    results: Any = module.trainer._results
    in_order = sorted(results.items())
    results.clear()
    results.update(in_order)


def _log_nothing(module: pl.LightningModule, logged: _Logged) -> None:
    options = logged.options
    value: Any
    weight: Any = None
    if options["metric_attribute"] is not None:
        value = module.get_submodule(options["metric_attribute"])
    else:
        value = torch.full((), NEUTRAL[options["reduce_fx"]], dtype=logged.dtype, device=module.device)
        weight = torch.zeros((), dtype=logged.weight_dtype, device=module.device)
    module.log(value=value, on_step=False, on_epoch=True, batch_size=weight, **options)


def _logged(module: pl.LightningModule) -> list[_Logged]:
    """Return the names of the current step and dataloader that are merged at the end of the run."""
    results: Any = module.trainer._results
    found = []
    for key, result in results.valid_items():
        meta = result.meta
        is_merged = meta.sync.should or not result.is_tensor
        if not is_merged or module._current_fx_name not in meta.fx:
            continue
        reduction = next(name for name in NEUTRAL if getattr(meta, f"is_{name}_reduction"))
        same = {name: getattr(meta, name) for name in ("name", "prog_bar", "logger", "add_dataloader_idx")}
        options = {**same, "metric_attribute": meta.metric_attribute, "reduce_fx": reduction}
        dtype = result.value.dtype if result.is_tensor else torch.float32
        weighted = result.is_tensor and reduction == "mean"
        weight_dtype = result.cumulated_batch_size.dtype if weighted else torch.int64
        found.append(_Logged(key, {**options, "sync_dist": meta.sync.should}, meta.on_step, dtype, weight_dtype))
    return found
