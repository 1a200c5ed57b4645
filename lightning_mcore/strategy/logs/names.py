# SPDX-License-Identifier: Apache-2.0
"""Names that only some model copies log in an evaluation step.

A step may log a name on some batches only (``if mask.any(): self.log(...)``). With ``sync_dist=True`` Lightning merges
each name over the data-parallel ranks at the end of the run; a rank that never logged it would not take part, and the
others would wait for it, or take the value of another name for it. So at the last batch of each dataloader the ranks
compare what they have, log what they lack with no weight, and put all into one order, for that is the order in which
they merge. The same happens at the end of an epoch of a plain module; with ``pipeline()``, ``step.py`` settles it
at each step.

The strategy calls :meth:`EvaluationNames.start`, :meth:`EvaluationNames.end_of_batch` and :func:`agree_on_names`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torchmetrics import Metric

from lightning_mcore.parallel.groups import process_group

_NOTHING = {"min": math.inf, "max": -math.inf, "mean": 0.0, "sum": 0.0}


@dataclass(frozen=True)
class _Logged:
    """A name in the results of a run, and how it was logged; ``attribute`` is that of a metric object."""

    key: str
    name: str
    attribute: str | None
    reduction: str
    prog_bar: bool
    logger: bool
    on_step: bool
    sync_dist: bool
    add_dataloader_idx: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype


class EvaluationNames:
    """Lets the data-parallel ranks agree on the names of an evaluation run, once for each dataloader."""

    def __init__(self) -> None:
        self._last_batches: list[int | None] = []

    def start(self, max_batches: Sequence[int | float], device: torch.device) -> None:
        """Begin a run; collective over the data-parallel ranks.

        A dataloader of unknown length, or without a batch on some rank, is left to Lightning: a rank that never gets to
        a last batch could not take part.

        Args:
            max_batches: Number of batches of each dataloader on this rank.
            device: Of the strategy.
        """
        group = process_group("dp")
        if group.size() == 1:
            self._last_batches = []
            return
        counted = torch.tensor([float(math.isfinite(count) and count > 0) for count in max_batches], device=device)
        dist.all_reduce(counted, op=dist.ReduceOp.MIN, group=group)
        self._last_batches = [
            int(count) - 1 if is_counted else None
            for count, is_counted in zip(max_batches, counted.bool().tolist(), strict=True)
        ]

    def end_of_batch(self, module: pl.LightningModule, batch_idx: int, dataloader_idx: int) -> None:
        """After the last batch of a dataloader, log with no weight what other ranks have logged and this one has not.

        Args:
            module: Whose step has run.
            batch_idx: Of this batch, in its dataloader.
            dataloader_idx: Of the dataloader.
        """
        if dataloader_idx >= len(self._last_batches) or self._last_batches[dataloader_idx] != batch_idx:
            return
        agree_on_names(module)


def agree_on_names(module: pl.LightningModule) -> None:
    """Log with no weight what other ranks have logged in this step and this one has not; all in one order.

    Collective over the data-parallel ranks. Values that are merged at each step (``on_step=True``) are left alone: who
    lacks one has missed that merge.
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
        if logged.key not in names and not logged.on_step:  # what is merged at each step was waited for there
            names.add(logged.key)
            _log_nothing(module, logged)
    results: Any = module.trainer._results
    in_order = sorted(results.items())
    results.clear()
    results.update(in_order)


def ends_the_epoch(trainer: pl.Trainer) -> bool:
    """Return whether this is the last batch of a training epoch, or of the run."""
    is_last_step = trainer.global_step + 1 == trainer.max_steps and not trainer.fit_loop._should_accumulate()
    return trainer.is_last_batch or is_last_step


def _log_nothing(module: pl.LightningModule, logged: _Logged) -> None:
    if logged.attribute is not None:
        metric = module.get_submodule(logged.attribute)
        assert isinstance(metric, Metric)
        value: Metric | torch.Tensor = metric
        weight = None
    else:
        value = torch.full((), _NOTHING[logged.reduction], dtype=logged.dtype, device=module.device)
        weight = torch.zeros((), dtype=logged.weight_dtype, device=module.device)
    module.log(
        logged.name,
        value,
        prog_bar=logged.prog_bar,
        logger=logged.logger,
        on_step=False,
        on_epoch=True,
        reduce_fx=logged.reduction,
        sync_dist=logged.sync_dist,
        add_dataloader_idx=logged.add_dataloader_idx,
        batch_size=weight,  # type: ignore[arg-type]  # Lightning takes a tensor too
        metric_attribute=logged.attribute,
    )


def _logged(module: pl.LightningModule) -> list[_Logged]:
    """Return the names of the current step and dataloader that are merged at the end of the run."""
    results: Any = module.trainer._results
    found = []
    for key, result in results.valid_items():
        meta = result.meta
        is_merged = meta.sync.should or not result.is_tensor
        if not is_merged or module._current_fx_name not in meta.fx:
            continue
        reduction = next(name for name in _NOTHING if getattr(meta, f"is_{name}_reduction"))
        weighted = result.is_tensor and reduction == "mean"
        found.append(
            _Logged(
                key=key,
                name=meta.name,
                attribute=meta.metric_attribute,
                reduction=reduction,
                prog_bar=meta.prog_bar,
                logger=meta.logger,
                on_step=meta.on_step,
                sync_dist=meta.sync.should,
                add_dataloader_idx=meta.add_dataloader_idx,
                dtype=result.value.dtype if result.is_tensor else torch.float32,
                weight_dtype=result.cumulated_batch_size.dtype if weighted else torch.int64,
            )
        )
    return found
