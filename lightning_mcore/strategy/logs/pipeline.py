# SPDX-License-Identifier: Apache-2.0
"""``self.log`` in a step that runs as a pipeline: record on the last stage, replay on every rank.

Under a schedule, the part of ``training_step`` that logs runs only on the last pipeline stage, once for each
microbatch. Calling Lightning's ``log`` there would leave rank 0 without values, and ``sync_dist`` would hang. So while
the schedule runs, ``log`` is a recorder, and afterwards every rank replays the merged values through Lightning's own
``log``. A value logged in a step then describes the complete step, whatever the layout: the mean (or sum, minimum,
maximum) over its microbatches. ``pipeline_runner.py`` drives it.

Which names any rank has logged, only the merged values tell, and reading them waits for the GPU. In training, the
replay therefore follows the optimizer step, whose kernels the GPU then runs meanwhile; the values are those from before
it. Code that looks at logged values in between (``on_before_optimizer_step`` may) has them replayed first. They are
replayed as tensors on the host, so that no progress bar or logger waits for the GPU again.

torchmetrics objects are updated on the last stage; the state of those that a step changed is sent to the other stages.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_mcore.layers.host_values import version_of
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.groups import any_of_copy, from_last_stage, process_group
from lightning_mcore.strategy.logs.evaluation import metrics_unchanged
from lightning_mcore.strategy.logs.override import log_replaced_by
from lightning_mcore.strategy.logs.reductions import NEUTRAL, Reduction, reduction_name

_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_TOKENS, _IMAGE_TOKENS = "tokens that the step reads", "tokens of images that the step reads"
_COUNTERS = ("_update_count", "_forward_cache", "_computed")  # a metric's attributes in addition to its state
_Place = tuple[str, int | None]  # a step and, if there are several, the index of the evaluation dataloader
_LOOKS = ("log", "metrics")  # methods of Lightning's collection of logged values that add to it or read it
ALREADY_MERGED = "merged by PipelineLogs"
"""A ``sync_dist_group`` for values that are equal on every rank; ``MCoreStrategy.reduce`` returns them unchanged."""


class _Name(NamedTuple):
    """A logged name, with everything that decides how its values are merged and replayed."""

    name: str
    options: dict[str, Any]
    reduction: Reduction | Literal["metric"]
    dtype: torch.dtype

    @property
    def is_synced(self) -> bool:
        """Whether model copies merge it; a metric object's state is reduced over them at the end of the epoch."""
        return bool(self.options.get("sync_dist")) or self.reduction == "metric"


_LOSS = _Name("loss that the step returns", {}, "mean", torch.float32)  # the first name of a training step


@dataclass
class _Entry:
    """One name and its values in this step."""

    name: _Name
    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class HostCopy:
    """A copy of a tensor on the host, which the host awaits only where it reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # from a GPU, to pinned memory
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the copy, but not for what the GPU was given to do later; return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


@dataclass
class _Unread:
    """The merged values of a step that are not logged yet."""

    place: _Place
    is_first: bool  # of its kind, so that all names are new, on every rank
    over_copies: bool
    packed: Tensor  # as _from_last_stage returns it
    on_host: HostCopy
    hook: str | None  # of Lightning, which ran the step
    others: dict[str, Tensor] = field(default_factory=dict)  # values to log after them
    watched: Any = None  # Lightning's collection of logged values, while it completes the step on demand

    def stop_watching(self) -> None:
        """Leave Lightning's collection as it was."""
        if self.watched is not None:
            for method in _LOOKS:
                del vars(self.watched)[method]
            self.watched = None


class PipelineLogs:
    """Records, merges, sends and replays the logged values of one kind of step.

    With ``takes_whole_batches``, all context-parallel ranks log the same values; otherwise their own tokens'.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device, takes_whole_batches: bool = False) -> None:
        self._module = module
        self._device = device
        self._takes_whole_batches = takes_whole_batches
        self._entries: dict[str, _Entry] = {}
        self._batch: Any = None
        self._muted = False
        self._metrics = {path: child for path, child in module.named_modules() if isinstance(child, Metric)}
        self._changed: set[str] = set()
        self._known: dict[_Place, list[_Name]] = {}
        self._error: str | None = None  # of the first wrong call of log, raised in complete()
        self._unread: _Unread | None = None
        self._counted: dict[str, Any] = {}
        self._counts: dict[str, float] = {}

    @property
    def tokens(self) -> float:
        """The tokens that :meth:`count_tokens` counted for the last training step, on all model copies."""
        return self._counts.get(_TOKENS, 0.0)

    @property
    def image_tokens(self) -> float:
        """How many of them are image tokens."""
        return self._counts.get(_IMAGE_TOKENS, 0.0)

    @property
    def is_muted(self) -> bool:
        """Whether the running microbatch leaves no trace in logs."""
        return self._muted

    def count_tokens(self, tokens: Tensor | int, of_images: Tensor | None = None) -> None:
        """Count the tokens of complete sequences that the next training step reads, and how many are of images."""
        counted = {_TOKENS: tokens} | ({} if of_images is None else {_IMAGE_TOKENS: of_images})
        self._counted = {name: self._counted.get(name, 0) + number for name, number in counted.items()}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Replace ``module.log`` by the recorder inside the ``with`` block."""
        self.complete()  # the previous step, if it had no optimizer step
        self._entries, self._error = {}, None
        self._changed = set()
        with log_replaced_by(self._record, self._module):
            yield

    @contextlib.contextmanager
    def microbatch(self, batch: Any, muted: bool) -> Iterator[None]:
        """Run a microbatch inside the ``with`` block; a muted one leaves no trace in logs and metrics.

        Muted are microbatches of a chunk that is not the last, where only the code before ``self.model`` runs, and
        those that only fill up a schedule.
        """
        self._batch, self._muted = batch, muted
        try:
            with metrics_unchanged(list(self._metrics.values())) if muted else self._noticing_metrics():
                yield
        finally:
            self._batch, self._muted = None, False

    @contextlib.contextmanager
    def _noticing_metrics(self) -> Iterator[None]:
        """Record which metrics change inside the ``with`` block."""
        before = {path: _traces(metric) for path, metric in self._metrics.items()}
        yield
        after = {path: _traces(metric) for path, metric in self._metrics.items()}
        self._changed |= {path for path in before if not _are_same(before[path], after[path])}

    def add_loss(self, loss: Tensor, weight: Tensor | float) -> None:
        """Record a microbatch's loss, a float scalar ``[]``, with its weight in the loss of the step."""
        self._add(_LOSS, loss, weight)

    def finish(self, step: str, over_copies: bool) -> Tensor | None:
        """Merge the values and send them to every stage; return the loss of a training step, ``[]`` fp32.

        In evaluation they are logged now, in training by :meth:`complete`. Collective over the context- and
        pipeline-parallel ranks, with ``over_copies`` (in training) also over the data-parallel ranks.
        """
        # 1. Merge each name over the microbatches, weighted by batch_size.
        # 2. Merge over the context-parallel ranks and, in training with sync_dist=True, over the model copies (in
        #    evaluation, Lightning does it at the end). The same collective tells of new names; then merge again.
        # 3. Send from the last stage to the others, and replay on every rank.
        # Example: two microbatches log acc=0.5 (batch_size=2) and acc=1.0 (batch_size=6) on copy 0, acc=0.25 (8) twice
        # on copy 1: [0.5 * 2 + 1.0 * 6, 8, 2] + [4, 16, 2] = [11, 24, 4], so all ranks log 11 / 24 = 0.458.
        results = self._module.trainer._results
        # Lightning adds this index to the names, if there are several loaders
        place = (step, None if results is None else results.dataloader_idx)
        is_first = place not in self._known
        known = self._known.setdefault(place, [_LOSS] if over_copies else [])
        for what, counted in self._counted.items() if over_copies else ():
            share = counted / process_group("cp").size()  # every rank has counted complete sequences
            self._add(_Name(what, {"sync_dist": True}, "sum", torch.float64), share, 1.0)
        self._counted = {} if over_copies else self._counted
        # A forward pass that has never logged anything, such as that of a reference model, asks over the hosts' network
        # whether any rank has now, instead of waiting for the GPU. All ranks know the same names.
        if not known and not any_of_copy(bool(self._entries or self._changed or self._error)):
            return None
        packed = self._from_last_stage(known, over_copies, bool(self._new_names(known)) or self._error is not None)
        hook = self._module._current_fx_name
        self._unread = _Unread(place, is_first, over_copies, packed, HostCopy(packed), hook)
        loss = packed[1, 0].float() if over_copies else None
        if is_first or not over_copies:
            self.complete()
        else:
            self._complete_on_demand(self._unread)
        return loss

    def log_after(self, values: dict[str, Tensor]) -> None:
        """Log values that all ranks share, after the values of the last step."""
        if self._unread is not None:
            self._unread.others = values
        else:
            self._log_plainly(values)

    def _log_plainly(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._module.log(name, value)

    def forget(self) -> None:
        """Drop a step that is not logged yet, because the run has failed."""
        self._entries = {}
        if self._unread is not None:
            self._unread.stop_watching()
            self._unread = None

    def complete(self) -> None:
        """Log the values of the last step, if they are not logged yet; collective as :meth:`finish` is.

        Raises ``ValueError``, on all of these ranks, if a name has different options on different batches or ranks.
        """
        if self._unread is not None:
            self._complete(self._unread, may_exchange=True)

    def _complete_on_demand(self, unread: _Unread) -> None:
        """Let Lightning's collection of logged values complete this step before anything reads it or adds to it."""
        results: Any = self._module.trainer._results

        def completing(method: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._complete(unread, may_exchange=False)
                return getattr(type(results), method)(results, *args, **kwargs)

            return call

        # Set on the object, not on its class: stop_watching() deletes them, and the class's methods are back.
        vars(results).update({method: completing(method) for method in _LOOKS})
        unread.watched = results

    def _complete(self, unread: _Unread, may_exchange: bool) -> None:
        packed, on_host = unread.packed, unread.on_host.read()  # the only wait for the device
        news, *numbers = on_host.tolist()
        are_names_known, are_metrics_unchanged = news[0] == 1 and not unread.is_first, news[1] == 1
        # A hook may look on one rank only, so it cannot start a collective: it then still sees the step before.
        if not (may_exchange or (are_names_known and are_metrics_unchanged)):
            return
        self._unread = None
        unread.stop_watching()
        if not are_names_known:
            packed = self._with_new_names(unread.place, unread.over_copies)
            on_host = packed.cpu()
            numbers = on_host[1:].tolist()
        self._entries = {}
        if self._error is not None:
            raise ValueError(self._error)
        if process_group("pp").size() > 1:
            self._send_metrics(not are_metrics_unchanged)
        # Lightning reads a progress bar's values after each batch. Values of evaluation it merges over the copies, on
        # the device.
        values = on_host if unread.over_copies else packed
        with attributes_set([self._module], {"_current_fx_name": unread.hook}):
            for name, (value, weight, _), (number, weighs, count) in zip(
                self._known[unread.place], values[1:], numbers, strict=True
            ):
                if not count or name.name == _LOSS.name:
                    continue
                if name.name in (_TOKENS, _IMAGE_TOKENS):
                    self._counts[name.name] = number
                else:
                    is_mean_of_nothing = unread.over_copies and name.reduction == "mean" and weighs == 0
                    if is_mean_of_nothing and not name.options["on_epoch"]:  # it would spoil the mean of an epoch
                        value = torch.full_like(value, math.nan)
                    self._replay(name, value, weight, is_merged=unread.over_copies)
            self._log_plainly(unread.others)

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._muted:
            return
        try:
            self._read(name, value, *args, **kwargs)
        except (ValueError, MisconfigurationException) as error:
            # Raised at the end of the step on every rank, so that no rank waits for one that failed.
            self._error = self._error or str(error)

    def _read(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        bound = _LOG_SIGNATURE.bind(self._module, name, value, *args, **kwargs)
        bound.apply_defaults()
        options = {key: option for key, option in bound.arguments.items() if key not in ("self", "name", "value")}
        weight = options.pop("batch_size")
        if options.pop("sync_dist_group") is not None:
            raise ValueError(
                f"self.log({name!r}, sync_dist_group=...) is not available with pipeline(); use sync_dist=True"
            )
        if isinstance(value, Metric):
            options["metric_attribute"] = self._attribute_of(name, value, options["metric_attribute"])
            self._add(_Name(name, options, "metric", torch.float32), 0.0, 1.0)
            return
        reduction = reduction_name(options["reduce_fx"])
        if reduction is None:
            raise ValueError(
                f"self.log({name!r}, reduce_fx={options['reduce_fx']!r}) is not available; choose mean, sum, min or max"
            )
        options["reduce_fx"] = reduction
        is_double = isinstance(value, Tensor) and value.dtype == torch.float64
        dtype = torch.float64 if is_double else torch.float32
        if weight is None:
            weight = extract_batch_size(self._batch) if reduction == "mean" else 1.0
        self._add(_Name(name, options, reduction, dtype), value, weight)

    def _attribute_of(self, name: str, metric: Metric, attribute: str | None) -> str:
        found = next((path for path, child in self._metrics.items() if child is metric), attribute)
        if found is None:
            raise ValueError(
                f"self.log({name!r}, {type(metric).__name__}(...)) needs a metric that is an attribute of the module, "
                "so that every stage has it; set it in __init__ or configure_model"
            )
        return found

    def _add(self, name: _Name, value: Any, weight: Any) -> None:
        number = self._number(name.name, value)
        weight = self._number(name.name, weight)
        entry = self._entries.setdefault(name.name, _Entry(name))
        _check_same_options(entry.name, name)
        if name.reduction == "mean":
            number = torch.where(weight == 0, weight, number * weight)  # the mean of no rows is nan, and has no weight
        entry.values.append(number)
        entry.weights.append(weight)

    def _number(self, name: str, value: Any) -> Tensor:
        try:
            tensor = _on_device(value, self._device)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"self.log({name!r}, ...) takes a single number, got {type(value).__name__}") from error
        if tensor.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) takes a single number, got a tensor of shape {tuple(tensor.shape)}"
            )
        return tensor.reshape(())

    def _new_names(self, known: list[_Name]) -> list[_Name]:
        options = {name.name: name[1:3] for name in known}
        return [entry.name for entry in self._entries.values() if options.get(entry.name.name) != entry.name[1:3]]

    def _from_last_stage(self, names: list[_Name], over_copies: bool, is_news: bool) -> Tensor:
        """Return [1 + names, 3] fp64 on every stage, as the last one merges it.

        The first row is [1, 1, 0] if no rank has news and no metric has changed, otherwise less. Each other one is a
        name's merged value, weight and number of calls.
        """
        stages = process_group("pp")
        if stages.rank() == stages.size() - 1:
            packed = self._merge(names, process_group("dp_cp" if over_copies else "cp"), is_news)
            packed[0, 1].fill_(not self._changed)  # to set an item to a number would copy it to the device, and wait
        else:
            packed = torch.zeros(1 + len(names), 3, dtype=torch.float64, device=self._device)
        if stages.size() > 1:
            dist.broadcast(packed, src=dist.get_global_rank(stages, stages.size() - 1), group=stages)
        return packed

    def _with_new_names(self, place: _Place, over_copies: bool) -> Tensor:
        """Exchange names and errors between all ranks, because one has logged a new name or failed; merge again."""
        group, stages = process_group("dp_cp" if over_copies else "cp"), process_group("pp")
        known = {name.name: name for name in self._known[place]}
        if stages.rank() == stages.size() - 1:
            own = (self._new_names(self._known[place]), self._error)
            found: list[tuple[list[_Name], str | None]] = [own] * group.size()
            if group.size() > 1:
                dist.all_gather_object(found, own, group=group)
            self._error = next((error for _, error in found if error is not None), None)
            for name in (name for names, _ in found for name in names):
                try:
                    _check_same_options(known.setdefault(name.name, name), name)
                except ValueError as error:
                    self._error = self._error or str(error)
        box: list[Any] = [list(known.values()), self._error]
        if stages.size() > 1:
            source = dist.get_global_rank(stages, stages.size() - 1)
            dist.broadcast_object_list(box, src=source, group=stages, device=self._device)
        self._known[place], self._error = box
        return self._from_last_stage(self._known[place], over_copies, is_news=False)

    def _merge(self, names: list[_Name], group: dist.ProcessGroup, is_news: bool) -> Tensor:
        """Return a row that begins with the share of the ranks that have no news, and the names' merged rows."""
        knows = torch.full((1, 3), float(not is_news), dtype=torch.float64, device=self._device)
        packed = torch.cat([knows, *(self._packed(name)[None] for name in names)])
        reductions = ["sum", *(name.reduction for name in names)]
        synced = [0, *(row for row, name in enumerate(names, 1) if name.is_synced)]
        apart = [row for row, name in enumerate(names, 1) if not name.is_synced]
        for rows, ranks in ((synced, group), (apart, process_group("cp"))):
            if rows and ranks.size() > 1:
                chosen = torch.stack([packed[row] for row in rows])
                reduced = _reduced(chosen, [reductions[row] for row in rows], ranks)
                for row, values in zip(rows, reduced, strict=True):
                    packed[row] = values
        for row, reduction in enumerate(reductions):
            if reduction == "mean":
                packed[row, 0] /= packed[row, 1].clamp(min=torch.finfo(torch.float64).tiny)
        packed[0] /= group.size()
        return packed

    def _packed(self, name: _Name) -> Tensor:
        """Return this rank's value of a name (for a mean, the weighted sum), its weight and its count, [3] fp64."""
        entry = self._entries.get(name.name)
        if entry is None:
            row = torch.zeros(3, dtype=torch.float64, device=self._device)
            row[0].fill_(0.0 if name.reduction == "metric" else NEUTRAL[name.reduction])
            return row
        values = torch.stack(entry.values)
        merged = {"min": values.amin, "max": values.amax}.get(name.reduction, values.sum)()
        # All context-parallel ranks have logged the same sum, and it will be added up over them.
        if name.reduction == "sum" and self._takes_whole_batches:
            merged = merged / process_group("cp").size()
        return torch.stack([merged, torch.stack(entry.weights).sum(), torch.full_like(merged, len(values))])

    def _send_metrics(self, are_changed: bool) -> None:
        """Send the metrics that the step changed from the last stage to the others."""
        group = process_group("pp")
        is_source = group.rank() == group.size() - 1
        states = {path: _state(self._metrics[path]) for path in self._changed} if is_source else {}
        if are_changed:
            states = from_last_stage(states, self._device)
        for path, metric in self._metrics.items():
            if path not in states:
                metric._computed = None  # on every stage, or only some would compute it again
            elif not is_source:
                for name, value in states[path].items():
                    setattr(metric, name, value)

    def _replay(self, name: _Name, value: Tensor, weight: Tensor, is_merged: bool) -> None:
        options = dict(name.options)
        if name.reduction == "metric":
            metric = self._module.get_submodule(options["metric_attribute"])
            assert isinstance(metric, Metric)
            self._module.log(name.name, metric, **options)
            return
        if is_merged and options["sync_dist"]:
            options["sync_dist_group"] = ALREADY_MERGED
        batch_size: Any = weight if name.reduction == "mean" else 1
        self._module.log(name.name, value.to(name.dtype), batch_size=batch_size, **options)


def _on_device(value: Any, device: torch.device) -> Tensor:
    """Return a number as an fp64 tensor; a kernel writes host numbers, because a copy would wait for the GPU."""
    if isinstance(value, int | float):
        return torch.full((), value, dtype=torch.float64, device=device)
    return torch.as_tensor(value, dtype=torch.float64, device=device).detach()


def _state(metric: Metric) -> dict[str, Any]:
    return {**metric.metric_state, **{name: getattr(metric, name) for name in _COUNTERS}}


def _traces(metric: Metric) -> list[Any]:
    """Return values that differ if the metric has changed, without copying its state.

    A count of updates would miss ``reset()`` followed by an update in the same step.
    """
    traces: list[Any] = []
    for value in _state(metric).values():
        if isinstance(value, list):  # a list state grows, or is emptied and grows
            traces += [len(value), value[-1] if value else None]
        else:
            traces += [value, version_of(value) if isinstance(value, Tensor) else None]
    return traces


def _are_same(before: list[Any], after: list[Any]) -> bool:
    """Compare numbers by value and everything else by identity."""
    return all(a is b or (type(a) is int and a == b) for a, b in zip(before, after, strict=True))


def _check_same_options(first: _Name, second: _Name) -> None:
    if first[1:3] != second[1:3]:
        different = [key for key, option in first.options.items() if second.options.get(key) != option]
        raise ValueError(
            f"self.log({first.name!r}, ...) was called with different arguments on another batch or rank:"
            f" {', '.join(different) or 'a number and a metric'}; give one name the same arguments everywhere"
        )


def _reduced(rows: Tensor, reductions: list[str], group: dist.ProcessGroup) -> Tensor:
    """Return [rows, 3] over the ranks of a group: values by their reduction, weights and counts summed."""
    # Row by row: a list of rows as an index is copied to the device, and the copy waits for it.
    result = rows.clone()
    extremes = {of: [row for row, reduction in enumerate(reductions) if reduction == of] for of in ("min", "max")}
    for row in extremes["min"] + extremes["max"]:
        result[row, 0].zero_()
    dist.all_reduce(result, group=group)
    for of, operation in (("min", dist.ReduceOp.MIN), ("max", dist.ReduceOp.MAX)):
        if extremes[of]:
            values = torch.stack([rows[row, 0] for row in extremes[of]])
            dist.all_reduce(values, op=operation, group=group)
            for row, value in zip(extremes[of], values, strict=True):
                result[row, 0] = value
    return result
