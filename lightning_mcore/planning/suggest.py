# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore plan --suggest``: the layouts of a model that fit the memory of N devices, best first.

The global batch of the file is kept. The search tries tensor parallelism within a node, pipelines with and without
interleaving, context parallelism for long sequences, expert parallelism, microbatches of a few sizes, and as little
recomputation as fits. Layouts that the rules refuse or that exceed the memory are dropped. The others are ordered by
the estimated time of a step (``step.py``), and the best ones that Megatron's own config accepts are shown. The estimate
is rough: measure the first few.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore.config.inherited_arguments import Arguments, arguments_of
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.run import RunSettings, rows_of_pairs
from lightning_mcore.config.value_checks import divisors
from lightning_mcore.planning.formats import optimizer_of
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.machines import Machine
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.plan import stage_plans
from lightning_mcore.planning.report import GIB, table_text
from lightning_mcore.planning.rules import CheckedRun, PlannedStrategy, RuleBook, check_gpt_on_layout, check_run
from lightning_mcore.planning.schedule import PipelineTimeline
from lightning_mcore.planning.signatures import fields_of
from lightning_mcore.planning.state_memory import rank_memory, state_of_rank
from lightning_mcore.planning.step import step_time, step_work
from lightning_mcore.strategy.strategy import MCoreStrategy

Kind = Literal["lightning", "llamafactory", "arguments"]

USABLE = 0.9
"""Share of a device's memory that a layout may fill; the rest is for libraries, buffers and fragments."""

_CHUNKS = (None, 2, 4)
_ROWS = (1, 2, 4)
_LEAST_TOKENS = 2048
"""The smallest number of tokens of a sequence on a context-parallel rank."""
_MOST_BUBBLE = 0.5
_MOST_TRIED = 500
"""Number of layouts to compute after one fits; those that split the model least come first, because they send least."""
_MOST_REFUSED = 100
"""Number of suggestions that Megatron's own config may refuse before the search ends."""
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
_OF_ADAM = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
_OF_OTHERS = ("use_layer_wise_distributed_optimizer", "overlap_grad_reduce")
_REPLACED = (
    *ParallelLayout.__dataclass_fields__,
    *(*_OF_ADAM, *_OF_OTHERS, "data_parallel_sharding", "overlap_p2p_comm"),
    *("microbatch_group_size_per_vp_stage", "micro_batch_size"),
)
_OF_RECOMPUTE = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("moe_layer_recompute", "distribute_saved_activations"),
)


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits."""

    strategy: Mapping[str, Any]  # arguments of ``MCoreStrategy`` to set
    recompute: Mapping[str, Any]  # fields of ``transformer`` to set
    micro_batch_size: int  # rows of a DataLoader batch, which is one microbatch
    batch_size: int  # the same as files give it: half for padded pairs
    num_microbatches: int  # ``accumulate_grad_batches``
    memory: int  # bytes of the fullest rank
    bubble: float  # share of the step during which a stage waits
    seconds: float  # estimated time of a step
    flops_rate: float  # operations of the model per second on each device

    @property
    def recomputed(self) -> str:
        """``none``, ``selective`` or ``full``."""
        return str(self.recompute.get("recompute_granularity") or "none")


def suggest(
    settings: RunSettings,
    devices: int,
    devices_per_node: int,
    machine: Machine,
    memory: float | None = None,
    backend: str | None = None,
    most: int = 10,
    progress: Callable[[int, int], None] | None = None,
) -> list[Suggestion]:
    """Return the layouts that fit, best first.

    Args:
        settings: The run; its layout is replaced, and its model, precision and global batch are kept.
        devices: Ranks of the whole run.
        devices_per_node: Devices of a node.
        machine: The devices.
        memory: Bytes of a device; None for the machine's.
        backend: Whose layers.
        most: The largest number of layouts to return.
        progress: Called with how many layouts have been tried, and how many of them fit.

    Raises:
        ValueError: The model is wrong, or no layout fits.
    """
    limit = (memory or machine.memory) * USABLE
    run = _known_run(settings, devices, backend)
    assert run.fields is not None
    assert run.batch is not None
    search = _Search(settings, run, devices_per_node, machine, limit)
    found: dict[str, Suggestion] = {}
    refused: list[str] = []
    least, tried = math.inf, 0
    for layout in sorted(_layouts(run.fields, devices, devices_per_node), key=search.likely_cost):
        if found and tried >= _MOST_TRIED:
            break
        book = RuleBook()
        on_layout = search.on_layout(book, layout)
        needed = search.state(on_layout)
        if needed > limit:
            least = min(least, needed)
            continue
        if faults := search.faults(book, on_layout):
            refused += faults[:1]
            continue
        for batch in _batches(layout, devices, run.batch, search.rows_of_one):
            if progress is not None:
                progress(tried, len(found))
            tried += 1
            one = search.best(replace(on_layout, batch=batch))
            least, key = min(least, one.memory), str(sorted(one.strategy.items(), key=str))
            if one.memory <= limit and (key not in found or found[key].seconds > one.seconds):
                found[key] = one
    if not found:
        is_refused = least == math.inf and refused
        raise ValueError(refused[0] if is_refused else _nothing(least, limit, devices, run.batch.rows))
    return search.accepted(sorted(found.values(), key=lambda one: (one.seconds, one.memory)), most)


def _known_run(settings: RunSettings, devices: int, backend: str | None) -> CheckedRun:
    """Return the run with its model, and with the rows of a step on the file's devices, or else on the given number."""
    of_node, nodes = settings.trainer.get("devices"), settings.trainer.get("num_nodes") or 1
    tried = [of_node * nodes] if isinstance(of_node, int) and of_node > 0 else []
    for count in (*tried, devices):
        run = check_run(settings, count, backend)
        if run.fields is not None and run.batch is not None:
            return replace(run, devices=devices)
    raise ValueError(run.errors[0] if run.errors else "the global batch is unknown; give data.batch_size")


@dataclass(frozen=True)
class _Search:
    """What stays the same while layouts are tried."""

    settings: RunSettings
    run: CheckedRun  # on the layout of the settings
    devices_per_node: int
    machine: Machine
    limit: float  # bytes of a device that may be filled

    @cached_property
    def models(self) -> dict[str, GPTFields]:
        """The model with each kind of recomputation."""
        assert self.run.fields is not None
        kept = {name: value for name, value in self.run.fields.transformer.items() if name not in _OF_RECOMPUTE}
        return {
            name: replace(self.run.fields, transformer={**kept, **recompute}) for name, recompute in _RECOMPUTE.items()
        }

    @property
    def rows_of_one(self) -> int:
        """Rows that belong together: two for padded pairs."""
        return int(rows_of_pairs(self.settings.model, {**self.settings.data, "batch_size": 1})["batch_size"])

    def likely_cost(self, layout: ParallelLayout) -> float:
        """Return a number that grows with the traffic of a layout: ranks of a model, and of experts beyond a node."""
        experts = layout.expert_tensor_size * layout.expert_model_parallel_size
        return layout.model_parallel_size * max(1.0, experts / self.devices_per_node)

    def strategy(self, layout: ParallelLayout) -> dict[str, Any]:
        """Return the arguments of the strategy to set: non-default sizes, sharding and overlaps."""
        sizes = {name: value for name, value in vars(layout).items() if value != getattr(ParallelLayout(), name)}
        if layout.data_parallel_size(self.run.devices) * layout.context_parallel_size > 1:
            of_adam = optimizer_of(self.run.model).startswith("adam")  # others cannot be sharded by ranges of elements
            sizes |= dict.fromkeys(_OF_ADAM if of_adam else _OF_OTHERS, True)
        return sizes

    def on_layout(self, book: RuleBook, layout: ParallelLayout) -> CheckedRun:
        """Return the run on another layout, with the batch as it was; ``book`` gets what our own rules refuse."""
        strategy = {**self.settings.strategy, **self.chosen(layout)}
        rules = PlannedStrategy(book, strategy, self.settings.precision, self.run.device_type)
        return replace(self.run, rules=rules)

    def chosen(self, layout: ParallelLayout) -> dict[str, Any]:
        """Return the arguments of the strategy that a layout changes."""
        return _set(self.settings.strategy, self.strategy(layout), arguments_of(MCoreStrategy))

    def faults(self, book: RuleBook, run: CheckedRun) -> list[str]:
        """Return what our own rules say against a layout; ``book`` is the one that it was made with."""
        run.rules.check(run.devices)
        assert run.fields is not None
        check_gpt_on_layout(book, run.fields, run.rules)
        return book.errors

    def state(self, run: CheckedRun) -> float:
        """Return the bytes of the first and last stage without activations, a lower bound for their ranks."""
        sizes = run.sizes
        return max(state_of_rank(sizes, stage).total for stage in {0, len(sizes.stages) - 1})

    def best(self, run: CheckedRun) -> Suggestion:
        """Return a layout with the least recomputation that fits, or else with the most."""
        for name, fields in self.models.items():
            sizes = replace(run, fields=fields).sizes
            # The first stage alone is quick to compute, and is often the fullest.
            if name != "full" and rank_memory(sizes, 0).total > self.limit:
                continue
            stages, work = stage_plans(sizes), step_work(sizes)
            memory = max(stage.memory.total for stage in stages)
            if memory <= self.limit:
                break
        traffic = [stage.traffic for stage in stages]
        time = step_time(sizes, work, traffic, self.machine, self.devices_per_node)
        given, batch = self.settings.model.get("transformer") or {}, sizes.batch
        return Suggestion(
            strategy=self.chosen(sizes.layout),
            recompute=_set(given, _RECOMPUTE[name], fields_of(TransformerConfig)),
            micro_batch_size=batch.micro_batch_size,
            batch_size=batch.micro_batch_size // self.rows_of_one,
            num_microbatches=batch.num_microbatches,
            memory=memory,
            bubble=sizes.timeline.bubble,
            seconds=time.total,
            flops_rate=work.model_flops / time.total / run.devices,
        )

    def accepted(self, ordered: Sequence[Suggestion], most: int) -> list[Suggestion]:
        """Return the first suggestions that Megatron's own config accepts; ValueError if it accepts none."""
        accepted: list[Suggestion] = []
        refused: list[str] = []
        settings, given = self.settings, self.settings.model.get("transformer") or {}
        for one in ordered:
            if len(accepted) == most or len(refused) == _MOST_REFUSED:
                break
            changed = replace(
                settings,
                strategy={**settings.strategy, **one.strategy},
                model={**settings.model, "transformer": {**given, **one.recompute}},
                trainer={**settings.trainer, "accumulate_grad_batches": one.num_microbatches},
                data={**settings.data, "batch_size": one.micro_batch_size},
            )
            errors = check_run(changed, self.run.devices, self.run.backend).errors
            refused += errors[:1]
            accepted += [] if errors else [one]
        if not accepted:
            raise ValueError(refused[0])
        return accepted


def _nothing(least: float, limit: float, devices: int, rows: int) -> str:
    if least == math.inf:
        return (
            f"no layout of {devices} devices divides the model and a global batch of {rows} rows; choose another number"
            " of devices or another batch"
        )
    return (
        f"no layout of {devices} devices fits: the smallest needs {least / GIB:.1f} GiB on a device, of which"
        f" {limit / GIB:.1f} GiB may be filled; give more devices or memory, or a smaller seq_length"
    )


def _layouts(fields: GPTFields, devices: int, devices_per_node: int) -> Iterator[ParallelLayout]:
    """Yield every layout that divides devices and model."""
    experts = fields.num_moe_experts or 1
    sizes = [size for size in divisors(devices) if size <= max(fields.num_layers, experts, devices_per_node)]
    of_tp = [size for size in sizes if devices_per_node % size == 0]
    of_pp = [size for size in sizes if size <= fields.num_layers]
    of_cp = [size for size in sizes if size == 1 or fields.seq_length // size >= _LEAST_TOKENS]
    of_ep = [size for size in sizes if experts % size == 0]
    for tp, pp, cp, ep, chunks in product(of_tp, of_pp, of_cp, of_ep, _CHUNKS):
        if devices % (tp * pp * cp) or devices % (ep * pp):
            continue
        with contextlib.suppress(ValueError):
            layout = ParallelLayout(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=chunks,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=1 if ep > 1 and tp > 1 else None,
                sequence_parallel=tp > 1,
            )
            layout.validate_world(devices)
            layout.validate_model(fields.shape)
            yield layout


def _batches(layout: ParallelLayout, devices: int, batch: GlobalBatch, rows_of_one: int) -> Iterator[GlobalBatch]:
    """Yield ways to read the global batch in microbatches of whole pairs, which a batch has of one row else."""
    dp = layout.data_parallel_size(devices)
    for rows in _ROWS:
        count, rest = divmod(batch.rows, dp * rows)
        if rest or not count or rows % rows_of_one:
            continue
        with contextlib.suppress(ValueError):
            layout.validate_microbatches(count)
            if PipelineTimeline.of(layout, count).formula <= _MOST_BUBBLE:
                yield replace(batch, micro_batch_size=rows, num_microbatches=count, data_parallel_size=dp)


def _set(given: Mapping[str, Any], chosen: Mapping[str, Any], known: Arguments) -> dict[str, Any]:
    """Return what is chosen, and the defaults of settings that the file changes and the suggestion does not keep."""
    gone = {*_REPLACED, *_OF_RECOMPUTE}
    if not chosen.get("sequence_parallel"):
        gone |= {"tp_comm_overlap", "tp_comm_overlap_cfg"}
    if chosen.get("pipeline_model_parallel_size") is None or not chosen.get("overlap_grad_reduce"):
        gone |= {"align_grad_reduce"}
    defaults = {name: known[name] for name in given if name in gone and name not in chosen}
    return {name: default for name, default in defaults.items() if given[name] != default} | dict(chosen)


def suggestion_text(
    found: Sequence[Suggestion], machine: Machine, memory: float | None, devices: int, kind: Kind = "lightning"
) -> str:
    """Return the layouts as a table, and the lines that set the best one."""
    names = {"tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "cp": "context"}
    names |= {"ep": "expert_model", "etp": "expert_tensor"}
    shown = [short for short, name in names.items() if any(f"{name}_parallel_size" in one.strategy for one in found)]
    rows = []
    for place, one in enumerate(found, 1):
        sizes = [str(one.strategy.get(f"{names[short]}_parallel_size") or 1) for short in shown]
        rows.append(
            [
                *(str(place), *sizes, str(one.micro_batch_size), str(one.num_microbatches), one.recomputed),
                *(f"{one.memory / GIB:.1f}", f"{one.bubble:.0%}", f"{one.seconds:.3g}", f"{one.flops_rate / 1e12:.0f}"),
            ]
        )
    columns = ["", *shown, "rows", "microb.", "recompute", "GiB", "bubble", "s a step", "TFLOP/s"]
    limit = (memory or machine.memory) / GIB
    title = f"layouts of {devices} x {machine.name.upper()} that fit {limit:.1f} GiB, best first (estimated)"
    return "\n".join(
        [table_text(title, columns, rows), "", "the first one, to paste into the file:", "", *_lines(found[0], kind)]
    )


def _lines(one: Suggestion, kind: Kind) -> list[str]:
    """Return the settings of a layout as lines of a file of that kind."""
    import yaml

    if kind == "lightning":
        strategy = {"class_path": "lightning_mcore.MCoreStrategy", "init_args": dict(one.strategy)}
        shown: dict[str, Any] = {
            "trainer": {"accumulate_grad_batches": one.num_microbatches, "strategy": strategy},
            **({"model": {"init_args": {"transformer": dict(one.recompute)}}} if one.recompute else {}),
            "data": {"init_args": {"batch_size": one.batch_size}},
        }
    else:  # these files do not have micro_batch_size
        shown = {name: value for name, value in {**one.strategy, **one.recompute}.items() if name != "micro_batch_size"}
        shown |= {"per_device_train_batch_size": one.batch_size, "gradient_accumulation_steps": one.num_microbatches}
    lines: str = yaml.safe_dump(shown, sort_keys=False)
    return lines.replace("transformer:", "transformer:  # beside its other fields").splitlines()
