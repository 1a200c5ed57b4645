# SPDX-License-Identifier: Apache-2.0
"""``self.log`` in a step that runs as a pipeline: recorded on the last stage, replayed on every rank.

Under a schedule the part of ``training_step`` that logs runs on the last pipeline stage alone, once for each
microbatch. Calling Lightning's ``log`` there would leave rank 0 without values, and ``sync_dist`` would hang. So while
the schedule runs, ``log`` is replaced by a recorder. Afterwards

1. the values of one name are merged over the microbatches of the step, weighted by ``batch_size``;
2. then over the context-parallel ranks, each of which has seen a part of every sequence;
3. the last stage sends them to the other stages in one small tensor (names and options travel only when they change);
4. every rank replays them through Lightning's own ``log``.

So a value logged in a step is about the step, whatever the layout: the mean (or sum, minimum, maximum) of its
microbatches. Averaging over data-parallel ranks stays what it is in Lightning: ``sync_dist=True``.

torchmetrics objects are updated on the last stage; their state is sent to the other stages after each step.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_mcore.evaluation import metrics_forget, reduction_name
from lightning_mcore.process_groups import process_group

_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_LOSS = "loss that the step returns"


@dataclass
class _Entry:
    """One logged name: its options, how its values merge, and the values so far."""

    options: dict[str, Any]
    reduction: str
    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class StepLogs:
    """Records, merges, sends and replays what one kind of step logs.

    Args:
        module: The LightningModule whose ``log`` is recorded.
        device: Where the values are merged.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._entries: dict[str, _Entry] = {}
        self._batch: Any = None
        self._muted = False
        self._metrics = {path: child for path, child in module.named_modules() if isinstance(child, Metric)}
        self._known_schema: dict[str, list[tuple[str, dict[str, Any], str]]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Replace ``module.log`` by the recorder inside the ``with`` block."""
        self._entries = {}
        outer = vars(self._module).get("log")
        object.__setattr__(self._module, "log", self._record)
        try:
            yield
        finally:
            object.__delattr__(self._module, "log")
            if outer is not None:
                object.__setattr__(self._module, "log", outer)

    @contextlib.contextmanager
    def microbatch(self, batch: Any, muted: bool) -> Iterator[None]:
        """Say which microbatch runs; a muted run of a step leaves no trace in logs and metrics.

        Muted are runs for a chunk that is not the last, where only what stands before ``self.model`` runs, and
        microbatches that only fill up a schedule.
        """
        self._batch, self._muted = batch, muted
        try:
            with metrics_forget(list(self._metrics.values())) if muted else contextlib.nullcontext():
                yield
        finally:
            self._batch, self._muted = None, False

    def add_loss(self, loss: Tensor, weight: Tensor | float) -> None:
        """Record the loss of a microbatch with its share in the loss of the step."""
        self._add(_LOSS, {}, "mean", loss, weight)

    def finish(self, step: str) -> Tensor | None:
        """Merge the values, send them to every stage and log them; return the loss of the step if there is one.

        Collective over the context- and pipeline-parallel ranks.

        Args:
            step: Name of the step; names and options are remembered for each.
        """
        schema = [(name, entry.options, entry.reduction) for name, entry in self._entries.items()]
        packed = self._merge()
        if process_group("pp").size() > 1:
            schema, packed = self._send(step, schema, packed)
            self._send_metrics()
        self._entries = {}
        loss = None
        for (name, options, reduction), (value, weight) in zip(schema, packed, strict=True):
            if name == _LOSS:
                loss = value.float()
            else:
                self._replay(name, options, reduction, value, weight)
        return loss

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._muted:
            return
        options = dict(_LOG_SIGNATURE.bind(self._module, name, value, *args, **kwargs).arguments)
        for known in ("self", "name", "value"):
            options.pop(known)
        if options.get("sync_dist_group") is not None:
            raise ValueError(
                f"self.log({name!r}, sync_dist_group=...) is not available with pipeline(); use sync_dist=True"
            )
        if isinstance(value, Metric):
            attribute = next(path for path, child in self._metrics.items() if child is value)
            self._add(name, {**options, "metric_attribute": attribute}, "metric", 0.0, 1.0)
            return
        reduction = reduction_name(options.get("reduce_fx", "mean"))
        if reduction is None:
            raise ValueError(
                f"self.log({name!r}, reduce_fx={options['reduce_fx']!r}) is not available; choose mean, sum, min or max"
            )
        options["reduce_fx"] = reduction
        weight = options.pop("batch_size", None)
        self._add(name, options, reduction, value, extract_batch_size(self._batch) if weight is None else weight)

    def _add(self, name: str, options: dict[str, Any], reduction: str, value: Any, weight: Any) -> None:
        entry = self._entries.setdefault(name, _Entry(options, reduction))
        number = self._number(name, value)
        weight = self._number(name, weight)
        entry.values.append(number * weight if reduction == "mean" else number)
        entry.weights.append(weight)

    def _number(self, name: str, value: Any) -> Tensor:
        tensor = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach()
        if tensor.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) takes a single number, got a tensor of shape {tuple(tensor.shape)}"
            )
        return tensor.reshape(())

    def _merge(self) -> Tensor:
        """Return [names, 2]: for each name its merged value and its weight."""
        if not self._entries:
            return torch.zeros(0, 2, dtype=torch.float64, device=self._device)
        rows = []
        for entry in self._entries.values():
            values = torch.stack(entry.values)
            merged = {"min": values.amin, "max": values.amax}.get(entry.reduction, values.sum)()
            rows.append(torch.stack([merged, torch.stack(entry.weights).sum()]))
        packed = torch.stack(rows)
        self._merge_context_parallel(packed)
        mean = torch.tensor([entry.reduction == "mean" for entry in self._entries.values()], device=self._device)
        packed[:, 0] = torch.where(
            mean, packed[:, 0] / packed[:, 1].clamp(min=torch.finfo(torch.float64).tiny), packed[:, 0]
        )
        return packed

    def _merge_context_parallel(self, packed: Tensor) -> None:
        group = process_group("cp")
        if group.size() == 1:
            return
        operations = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        chosen = [operations.get(entry.reduction, dist.ReduceOp.SUM) for entry in self._entries.values()]
        for operation in dict.fromkeys(chosen):
            rows = torch.tensor([i for i, of in enumerate(chosen) if of == operation], device=self._device)
            part = packed[rows]
            dist.all_reduce(part, op=operation, group=group)
            packed[rows] = part

    def _send(
        self, step: str, schema: list[tuple[str, dict[str, Any], str]], packed: Tensor
    ) -> tuple[list[tuple[str, dict[str, Any], str]], Tensor]:
        """Broadcast from the last stage: one tensor if the names are those of the last time, else the names too."""
        group = process_group("pp")
        source = dist.get_global_rank(group, group.size() - 1)
        is_source = group.rank() == group.size() - 1
        known = self._known_schema.get(step, [])
        message = torch.zeros(1 + 2 * len(known), dtype=torch.float64, device=self._device)
        if is_source:
            if schema == known:
                message[1:] = packed.flatten()
            else:
                message[0] = 1
        dist.broadcast(message, src=source, group=group)
        if message[0] == 0:
            return known, message[1:].view(-1, 2)
        box = [schema]
        dist.broadcast_object_list(box, src=source, group=group, device=self._device)
        self._known_schema[step] = box[0]
        if not is_source:
            packed = torch.zeros(len(box[0]), 2, dtype=torch.float64, device=self._device)
        dist.broadcast(packed, src=source, group=group)
        return box[0], packed

    def _send_metrics(self) -> None:
        metrics = self._metrics
        if not metrics:
            return
        group = process_group("pp")
        names = ("_update_count", "_forward_cache", "_computed")
        box = [{p: (m.metric_state, {n: getattr(m, n) for n in names}) for p, m in metrics.items()}]
        source = dist.get_global_rank(group, group.size() - 1)
        dist.broadcast_object_list(box, src=source, group=group, device=self._device)
        if group.rank() == group.size() - 1:
            return
        for path, (state, counters) in box[0].items():
            for name, value in {**state, **counters}.items():
                setattr(metrics[path], name, value)
            metrics[path].to(self._device)

    def _replay(self, name: str, options: dict[str, Any], reduction: str, value: Tensor, weight: Tensor) -> None:
        if reduction == "metric":
            metric = self._module.get_submodule(options["metric_attribute"])
            assert isinstance(metric, Metric)
            self._module.log(name, metric, **options)
            return
        batch_size: Any = weight.float() if reduction == "mean" else 1
        self._module.log(name, value.float(), batch_size=batch_size, **options)
