# SPDX-License-Identifier: Apache-2.0
"""Plan a run before anything runs: grid, batch, stages, memory, communication, FLOPs, warnings and errors.

:func:`make_plan` takes a run as plain data (``config/run.py``). It opens no process group and needs no memory for a
model: one layer of each kind is built on the meta device (``built.py``). All ranks of a pipeline stage hold the same,
so 16,384 devices cost no more time than 8. ``lightning-mcore plan`` prints the plan; ``live.plan_of`` makes one from a
Trainer and a module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.run import RunSettings
from lightning_mcore.planning.communication import AxisVolume, Traffic, communication_volume
from lightning_mcore.planning.grid import GlobalBatch, RankGrid
from lightning_mcore.planning.machines import Machine
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.parameters import (
    ModelParameters,
    ParameterCount,
    Tensors,
    count_of,
    model_parameters,
    rank_tensors,
)
from lightning_mcore.planning.rules import CheckedRun, check_run
from lightning_mcore.planning.schedule import PipelineTimeline
from lightning_mcore.planning.state_memory import RankMemory, optimizer_of, rank_memory
from lightning_mcore.planning.step import Overlaps, StepTime, StepWork, step_time, step_work

_PARAMETER_BYTES = {"32-true": 4}
_GRADIENT_BYTES = {"bf16-true": 2, "16-true": 2}


@dataclass(frozen=True)
class StagePlan:
    """What one rank of a pipeline stage holds and sends; the other ranks of the stage hold and send the same.

    Args:
        stage: The index of the stage, from 0.
        first_rank: The first of its ranks.
        chunks: The layers of its chunks.
        parameters: Number of parameters.
        memory: Memory in bytes.
        traffic: The bytes sent in a step.
    """

    stage: int
    first_rank: int
    chunks: tuple[ChunkLayers, ...]
    parameters: ParameterCount
    memory: RankMemory
    traffic: tuple[AxisVolume, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "stage": self.stage,
            "first_rank": self.first_rank,
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "parameters": {**asdict(self.parameters), "total": self.parameters.total},
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
            "communication": [volume.to_dict() for volume in self.traffic],
        }


@dataclass(frozen=True)
class Plan:
    """The plan of a run. Parts that are unknown because of errors are None.

    Args:
        devices: Ranks of the run.
        devices_per_node: Devices of a node.
        device_type: ``"cuda"`` or ``"cpu"``.
        machine: The device for times and memory.
        memory_limit: Memory of a device, in bytes.
        precision: Name of the number format, with the FP8 recipe.
        backend: The layers: ``"local"`` or ``"transformer_engine"``.
        layout: The parallel sizes.
        grid: The ranks along every axis.
        batch: The rows and tokens of a step.
        fields: The model.
        parameters: Number of parameters of the whole model.
        stages: The plan of each pipeline stage.
        timeline: The pipeline schedule.
        work: The operations of a step.
        time: Estimated seconds of a step on the machine.
        warnings: Sentences about settings that should be changed.
        errors: Sentences about settings for which the run would be refused.
        assumptions: Values that were assumed because the settings do not give them.
    """

    devices: int
    devices_per_node: int
    device_type: str
    machine: Machine | None
    memory_limit: float | None
    precision: str
    backend: str
    layout: ParallelLayout | None
    grid: RankGrid | None
    batch: GlobalBatch | None
    fields: GPTFields | None
    parameters: ModelParameters | None
    stages: tuple[StagePlan, ...]
    timeline: PipelineTimeline | None
    work: StepWork | None
    time: StepTime | None
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def fullest(self) -> StagePlan | None:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.memory.total, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        timeline, machine = self.timeline, self.machine
        plain = {name: getattr(self, name) for name in ("devices", "devices_per_node", "device_type")}

        def of(part: Any) -> dict[str, Any] | None:
            if part is None:
                return None
            made: dict[str, Any] = part.to_dict() if hasattr(part, "to_dict") else asdict(part)
            return made

        return {
            **plain,
            "device": machine.name if machine is not None else None,
            "memory_limit_bytes": self.memory_limit,
            "precision": self.precision,
            "backend": self.backend,
            **{name: of(getattr(self, name)) for name in ("layout", "grid", "batch", "parameters")},
            "stages": [stage.to_dict() for stage in self.stages],
            "pipeline": {"bubble": timeline.bubble, "formula": timeline.formula} if timeline is not None else None,
            "flops": of(self.work),
            "estimated_seconds": of(self.time),
            **{name: list(getattr(self, name)) for name in ("warnings", "errors", "assumptions")},
        }


def make_plan(
    settings: RunSettings,
    devices: int,
    devices_per_node: int = 8,
    machine: Machine | None = None,
    memory_limit: float | None = None,
    backend: str | None = None,
    ask_others: bool = True,
) -> Plan:
    """Plan a run.

    Args:
        settings: The run.
        devices: Ranks of the whole run.
        devices_per_node: Devices of a node.
        machine: The machine for times, and for the memory of a device if ``memory_limit`` is None.
        memory_limit: Bytes of a device.
        backend: ``"local"`` or ``"transformer_engine"``; None derives it from the model and the accelerator.
        ask_others: Whether to check with Megatron and Lightning too, as in ``rules.check_run``.

    Raises:
        ValueError: There are no devices. Faults of the run are in the plan's ``errors``.
    """
    run = check_run(settings, devices, backend, ask_others)
    limit = memory_limit if memory_limit is not None else machine.memory if machine is not None else None
    known: dict[str, Any] = {}
    try:
        known["parameters"] = model_parameters(run.fields) if run.fields is not None else None
        if run.is_computable:
            known |= _computed(run, settings, devices, devices_per_node, machine, limit)
    except (ValueError, TypeError, ArithmeticError, LookupError):
        if not run.errors:  # the sizes of a refused run may be inconsistent
            raise
    return plan_of_run(run, devices, devices_per_node, machine, limit, known)


def plan_of_run(
    run: CheckedRun,
    devices: int,
    devices_per_node: int,
    machine: Machine | None,
    limit: float | None,
    known: Mapping[str, Any],
) -> Plan:
    """Return the plan of a checked run, with what else is ``known`` of it."""
    rules = run.rules
    kind = "FP8" if rules.fp8 is None or rules.fp8.fp4_recipe is None else "FP4"
    recipe = f" with {kind} ({rules.fp8.recipe})" if rules.fp8 is not None and rules.fp8.is_on else ""
    nothing = dict.fromkeys(("parameters", "grid", "timeline", "work", "time"))
    return Plan(
        devices=devices,
        devices_per_node=devices_per_node,
        device_type=run.device_type,
        machine=machine,
        memory_limit=limit,
        precision=rules.precision_name + recipe,
        backend=run.backend,
        layout=rules.layout,
        batch=run.batch,
        fields=run.fields,
        errors=run.errors,
        **{**nothing, "stages": (), "warnings": (), "assumptions": run.assumptions, **known},
    )


def _computed(
    run: CheckedRun,
    settings: RunSettings,
    devices: int,
    devices_per_node: int,
    machine: Machine | None,
    limit: float | None,
) -> dict[str, Any]:
    layout, fields, batch = run.sizes
    rules, grid = run.rules, RankGrid(layout, devices)
    timeline = PipelineTimeline.of(
        layout, batch.num_microbatches, rules.strategy.get("microbatch_group_size_per_vp_stage")
    )
    stages = stage_plans(run, settings, devices)
    work = step_work(fields, layout, devices, batch)
    time = None
    if machine is not None:
        time = step_time(
            work.slowed_flops_of_rank,
            [stage.traffic for stage in stages],
            batch.num_microbatches,
            timeline.bubble,
            machine,
            number_format(run),
            devices_per_node,
            Overlaps(
                gradients=bool(rules.resolved("overlap_grad_reduce")),
                parameters=bool(rules.resolved("overlap_param_gather")),
                stages=rules.overlap_p2p_comm,
                tensor=bool(rules.strategy.get("tp_comm_overlap")),
            ),
        )
    memory = [stage.memory for stage in stages]
    warnings = run_warnings(run, grid.sizes, timeline.bubble, memory, limit, devices_per_node)
    return {
        **{"grid": grid, "timeline": timeline, "work": work, "time": time},
        **{"stages": tuple(stages), "warnings": tuple(warnings)},
    }


def number_format(run: CheckedRun) -> str:
    """Return the format of the matrix products: ``"fp8"``, ``"bf16"`` (also for fp16) or ``"fp32"``."""
    if run.rules.fp8 is not None and run.rules.fp8.is_on:
        return "fp8"
    return "fp32" if run.rules.precision_name == "32-true" else "bf16"


def stage_plans(run: CheckedRun, settings: RunSettings, devices: int) -> list[StagePlan]:
    """Compute what one rank of each pipeline stage holds and sends."""
    layout, fields, batch = run.sizes
    name = run.rules.precision_name
    width = _PARAMETER_BYTES.get(name, 2)
    traffic = Traffic(
        activation_bytes=width,
        gradient_bytes=_GRADIENT_BYTES.get(name, 4),
        parameter_bytes=1 if run.rules.fp8 is not None and run.rules.fp8.fp8_param else width,
        distributed_optimizer=bool(run.rules.resolved("use_distributed_optimizer")),
        backend=run.backend,
    )
    plans = []
    for stage, chunks in enumerate(stage_layers(fields, layout)):
        tensors = rank_tensors(fields, layout, stage, run.backend)
        parameters = count_of(tensors)
        memory = stage_memory(run, settings, devices, stage, tensors)
        volumes = communication_volume(fields, layout, devices, batch, traffic, stage, parameters)
        first = stage * devices // layout.pipeline_model_parallel_size
        plans.append(StagePlan(stage, first, tuple(chunks), parameters, memory, tuple(volumes)))
    return plans


def stage_memory(
    run: CheckedRun, settings: RunSettings, devices: int, stage: int, tensors: Tensors | None = None
) -> RankMemory:
    """Compute what one rank of a pipeline stage holds; ``tensors`` are its parameters, if they are known."""
    layout, fields, batch = run.sizes
    return rank_memory(
        fields,
        layout,
        stage,
        world_size=devices,
        precision=run.rules.precision,
        strategy=run.rules.all_strategy,
        optimizer=optimizer_of(run.model),
        micro_batch_size=batch.micro_batch_size,
        num_microbatches=batch.num_microbatches,
        seq_length=batch.seq_length,
        packed=bool(settings.data.get("packing")),
        backend=run.backend,
        tensors=tensors,
    )


GIB = 2**30
_BUBBLE = 0.20
_MUCH_STATE = 0.25
"""Share of the memory at which optimizer state that every replica holds causes a warning."""


def run_warnings(
    run: CheckedRun,
    sizes: Mapping[str, int],
    bubble: float,
    memory: Sequence[RankMemory],
    limit: float | None,
    devices_per_node: int,
) -> list[str]:
    """Return the warnings of a run that follow from its settings."""
    assert run.rules.layout is not None
    layout = run.rules.layout
    return [
        *_of_pipeline(run, layout, bubble),
        *_of_overlaps(run, sizes),
        *_of_layout(layout, devices_per_node),
        *_of_memory(run, sizes, memory, limit),
    ]


def _of_pipeline(run: CheckedRun, layout: ParallelLayout, bubble: float) -> list[str]:
    assert run.batch is not None
    if bubble <= _BUBBLE:
        return []
    more = run.batch.num_microbatches * 2
    change = f"raise accumulate_grad_batches or lower micro_batch_size for {more} microbatches or more"
    if layout.num_chunks == 1:
        change += ", or interleave with virtual_pipeline_model_parallel_size"
    return [f"the pipeline waits {bubble:.0%} of each step with {run.batch.num_microbatches} microbatches; {change}"]


def _of_overlaps(run: CheckedRun, sizes: Mapping[str, int]) -> list[str]:
    rules, found = run.rules, []
    replicas, edp = sizes["dp"] * sizes["cp"], sizes["edp"]
    idle = replicas == 1 and (edp == 1 or run.fields is None or run.fields.experts is None)
    for name in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"):
        if rules.resolved(name) and idle:
            found.append(
                f"{name}=True does nothing: data-parallel times context-parallel size is 1, so there are no ranks to"
                " share with; leave it out"
            )
    communication = rules.communication
    interleaved = rules.layout is not None and rules.layout.num_chunks > 1
    if interleaved and not rules.overlap_p2p_comm:
        found.append("overlap_p2p_comm=False leaves the stages waiting while they send; leave it out")
    if communication is not None and communication.batch_p2p_comm is not None and sizes["pp"] == 1:
        found.append("batch_p2p_comm does nothing with pipeline_model_parallel_size=1; leave it out")
    if replicas > 1 and not rules.resolved("overlap_grad_reduce") and run.device_type == "cuda":
        found.append(
            f"gradients of {replicas} ranks are summed after backward, while nothing else runs; set"
            " overlap_grad_reduce=True"
        )
    return found


def _of_layout(layout: ParallelLayout, devices_per_node: int) -> list[str]:
    found = []
    tp, experts = layout.tensor_model_parallel_size, layout.expert_tensor_size * layout.expert_model_parallel_size
    if tp > devices_per_node:
        found.append(
            f"tensor_model_parallel_size={tp} spans nodes of {devices_per_node} devices, and its collectives"
            f" wait for the network in every layer; choose {devices_per_node} or less"
        )
    if tp > 1 and not layout.sequence_parallel:
        found.append(
            f"sequence_parallel=False with tensor_model_parallel_size={tp} keeps activations between the matrices on"
            " every rank; set sequence_parallel=True, which computes the same"
        )
    if layout.expert_model_parallel_size > 1 and experts > devices_per_node:
        found.append(
            f"the {experts} ranks that share experts span nodes of {devices_per_node} devices, and every layer"
            " with experts sends tokens over the network"
        )
    return found


def _of_memory(
    run: CheckedRun, sizes: Mapping[str, int], memory: Sequence[RankMemory], limit: float | None
) -> list[str]:
    most = max(memory, key=lambda stage: stage.total)
    stage = list(memory).index(most)
    found = []
    if limit is not None and most.total > limit:
        found.append(
            f"a rank of stage {stage} needs {most.total / GIB:.1f} GiB and a device has {limit / GIB:.1f} GiB; raise"
            " the parallel sizes, recompute activations or lower micro_batch_size (--suggest lists layouts that fit)"
        )
    replicas = sizes["dp"] * sizes["cp"]
    much = max(GIB, _MUCH_STATE * (limit if limit is not None else most.total))
    if not run.rules.resolved("use_distributed_optimizer") and replicas > 1 and most.optimizer > much:
        found.append(
            f"every one of {replicas} replicas holds {most.optimizer / GIB:.1f} GiB of optimizer state; set"
            " use_distributed_optimizer=True"
        )
    return found
