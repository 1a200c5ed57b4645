# SPDX-License-Identifier: Apache-2.0
"""Plan a run before anything runs: grid, batch, stages, memory, communication, FLOPs, warnings and errors.

:func:`make_plan` takes a run as plain data (``config/run.py``). It opens no process group and needs no memory for a
model: one layer of each kind is built on the meta device (``built.py``). All ranks of a pipeline stage hold the same,
so 16,384 devices cost no more time than 8. ``lightning-mcore plan`` prints the plan; ``live.plan_of`` makes one from a
Trainer and a module.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.run import RunSettings
from lightning_mcore.planning.communication import AxisVolume, communication_volume
from lightning_mcore.planning.formats import optimizer_of
from lightning_mcore.planning.grid import RankGrid
from lightning_mcore.planning.machines import Machine
from lightning_mcore.planning.model import ChunkLayers
from lightning_mcore.planning.parameters import ModelParameters, ParameterCount, count_of, model_parameters
from lightning_mcore.planning.rules import CheckedRun, check_run
from lightning_mcore.planning.schedule import PipelineTimeline
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.state_memory import RankMemory, rank_memory
from lightning_mcore.planning.step import StepTime, StepWork, step_time, step_work

GIB = 2**30
_BUBBLE = 0.20
_MUCH_STATE = 0.25
"""Share of the memory at which optimizer state that every replica holds causes a warning."""


def _plain(part: Any) -> Any:
    """Return a part of a plan as plain data, with its total."""
    if part is None or hasattr(part, "to_dict"):
        return part and part.to_dict()
    return {**asdict(part), **({"total": part.total} if hasattr(part, "total") else {})}


@dataclass(frozen=True)
class StagePlan:
    """What one rank of a pipeline stage holds and sends; the other ranks of the stage hold and send the same."""

    stage: int  # the index of the stage, from 0
    first_rank: int  # the first of its ranks
    chunks: tuple[ChunkLayers, ...]  # the layers of its chunks
    parameters: ParameterCount  # number of parameters
    memory: RankMemory  # in bytes
    traffic: tuple[AxisVolume, ...]  # the bytes sent in a step

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "stage": self.stage,
            "first_rank": self.first_rank,
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "parameters": _plain(self.parameters),
            "memory_bytes": _plain(self.memory),
            "communication": [{**vars(volume), "sent": round(volume.sent)} for volume in self.traffic],
        }


@dataclass(frozen=True)
class Plan(CheckedRun):
    """A checked run with what was computed of it; parts that are unknown because of errors are None or empty."""

    devices_per_node: int = 8
    machine: Machine | None = None  # the device for times and memory
    memory_limit: float | None = None  # memory of a device, in bytes
    parameters: ModelParameters | None = None  # of the whole model
    stages: tuple[StagePlan, ...] = ()  # the plan of each pipeline stage
    grid: RankGrid | None = None  # the ranks along every axis
    timeline: PipelineTimeline | None = None  # the pipeline schedule
    work: StepWork | None = None  # the operations of a step
    time: StepTime | None = None  # estimated seconds of a step on the machine
    warnings: tuple[str, ...] = ()  # sentences about settings that should be changed

    @property
    def precision(self) -> str:
        """Name of the number format, with the FP8 recipe."""
        fp8 = self.rules.fp8
        kind = "FP8" if fp8 is None or fp8.fp4_recipe is None else "FP4"
        return self.rules.precision_name + (f" with {kind} ({fp8.recipe})" if fp8 is not None else "")

    @property
    def fullest(self) -> StagePlan | None:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.memory.total, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        timeline, machine = self.timeline, self.machine
        return {
            **{name: getattr(self, name) for name in ("devices", "devices_per_node", "device_type")},
            "device": machine.name if machine is not None else None,
            "memory_limit_bytes": self.memory_limit,
            "precision": self.precision,
            "backend": self.backend,
            **{name: _plain(getattr(self, name)) for name in ("layout", "grid", "batch", "parameters")},
            "stages": [stage.to_dict() for stage in self.stages],
            "pipeline": {"bubble": timeline.bubble, "formula": timeline.formula} if timeline is not None else None,
            "flops": _plain(self.work),
            "estimated_seconds": _plain(self.time),
            **{name: list(getattr(self, name)) for name in ("warnings", "errors", "assumptions")},
        }


def make_plan(
    settings: RunSettings,
    devices: int,
    devices_per_node: int = 8,
    machine: Machine | None = None,
    memory_limit: float | None = None,
    backend: str | None = None,
) -> Plan:
    """Plan a run.

    Args:
        settings: The run.
        devices: Ranks of the whole run.
        devices_per_node: Devices of a node.
        machine: The machine for times, and for the memory of a device if ``memory_limit`` is None.
        memory_limit: Bytes of a device.
        backend: ``"local"`` or ``"transformer_engine"``; None derives it from the model and the accelerator.

    Raises:
        ValueError: There are no devices. Faults of the run are in the plan's ``errors``.
    """
    run = check_run(settings, devices, backend)
    plan = new_plan(run, devices_per_node, machine, memory_limit)
    try:
        if run.fields is not None:
            plan = replace(plan, parameters=model_parameters(run.fields))
        if run.is_computable:
            sizes = run.sizes
            stages, work = stage_plans(sizes), step_work(sizes)
            traffic = [stage.traffic for stage in stages]
            time = None if machine is None else step_time(sizes, work, traffic, machine, devices_per_node)
            plan = with_stages(replace(plan, work=work, time=time), stages)
    except (ValueError, TypeError, ArithmeticError, LookupError):
        if not run.errors:  # the sizes of a refused run may be inconsistent
            raise
    return plan


def new_plan(run: CheckedRun, devices_per_node: int, machine: Machine | None, memory_limit: float | None) -> Plan:
    """Return the plan of a run of which nothing is computed yet."""
    limit = machine.memory if memory_limit is None and machine is not None else memory_limit
    return Plan(**vars(run), devices_per_node=devices_per_node, machine=machine, memory_limit=limit)


def with_stages(plan: Plan, stages: Sequence[StagePlan]) -> Plan:
    """Return a plan with its stages, and with what follows from them."""
    layout, batch = plan.layout, plan.batch
    assert layout is not None
    assert batch is not None
    grid = RankGrid(layout, plan.devices)
    timeline = PipelineTimeline.of(layout, batch.num_microbatches, plan.rules.group_size)
    plan = replace(plan, stages=tuple(stages), grid=grid, timeline=timeline)
    warnings = [
        *_of_pipeline(timeline),
        *_of_overlaps(plan, layout, grid.sizes),
        *_of_layout(layout, plan.devices_per_node),
        *_of_memory(plan, grid.sizes),
    ]
    return replace(plan, warnings=tuple(warnings))


def stage_plans(run: Sizes) -> list[StagePlan]:
    """Compute what one rank of each pipeline stage holds and sends."""
    plans = []
    for stage, chunks in enumerate(run.stages):
        first, parameters = stage * run.world_size // len(run.stages), count_of(run.tensors(stage))
        memory, traffic = rank_memory(run, stage), communication_volume(run, stage)
        plans.append(StagePlan(stage, first, tuple(chunks), parameters, memory, tuple(traffic)))
    return plans


def _of_pipeline(timeline: PipelineTimeline) -> Iterator[str]:
    if timeline.bubble > _BUBBLE:
        count = timeline.num_microbatches
        change = f"raise accumulate_grad_batches or lower micro_batch_size for {2 * count} microbatches or more"
        if timeline.num_chunks == 1:
            change += ", or interleave with virtual_pipeline_model_parallel_size"
        yield f"the pipeline waits {timeline.bubble:.0%} of each step with {count} microbatches; {change}"


def _of_overlaps(plan: Plan, layout: ParallelLayout, sizes: Mapping[str, int]) -> Iterator[str]:
    rules, communication, replicas = plan.rules, plan.rules.communication, sizes["dp"] * sizes["cp"]
    has_experts = plan.fields is not None and plan.fields.num_moe_experts is not None
    idle = replicas == 1 and (sizes["edp"] == 1 or not has_experts)
    for name in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"):
        if rules.resolved(name) and idle:
            yield (
                f"{name}=True does nothing: data-parallel times context-parallel size is 1, so there are no ranks to"
                " share with; leave it out"
            )
    if layout.num_chunks > 1 and not rules.resolved("overlap_p2p_comm"):
        yield "overlap_p2p_comm=False leaves the stages waiting while they send; leave it out"
    if communication is not None and communication.batch_p2p_comm is not None and sizes["pp"] == 1:
        yield "batch_p2p_comm does nothing with pipeline_model_parallel_size=1; leave it out"
    if replicas > 1 and not rules.resolved("overlap_grad_reduce") and plan.device_type == "cuda":
        yield (
            f"gradients of {replicas} ranks are summed after backward, while nothing else runs; set"
            " overlap_grad_reduce=True"
        )


def _of_layout(layout: ParallelLayout, devices_per_node: int) -> Iterator[str]:
    tp, experts = layout.tensor_model_parallel_size, layout.expert_tensor_size * layout.expert_model_parallel_size
    if tp > devices_per_node:
        yield (
            f"tensor_model_parallel_size={tp} spans nodes of {devices_per_node} devices, and its collectives"
            f" wait for the network in every layer; choose {devices_per_node} or less"
        )
    if tp > 1 and not layout.sequence_parallel:
        yield (
            f"sequence_parallel=False with tensor_model_parallel_size={tp} keeps all activations between matrix"
            " multiplications on every rank; set sequence_parallel=True, which shards them without changing results"
        )
    if layout.expert_model_parallel_size > 1 and experts > devices_per_node:
        yield (
            f"the {experts} ranks that share experts span nodes of {devices_per_node} devices, and every layer"
            " with experts sends tokens over the network"
        )


def _of_memory(plan: Plan, sizes: Mapping[str, int]) -> Iterator[str]:
    most, limit = plan.fullest, plan.memory_limit
    assert most is not None
    needed, state, replicas = most.memory.total, most.memory.optimizer, sizes["dp"] * sizes["cp"]
    if limit is not None and needed > limit:
        yield (
            f"a rank of stage {most.stage} needs {needed / GIB:.1f} GiB and a device has {limit / GIB:.1f} GiB; raise"
            " the parallel sizes, recompute activations or lower micro_batch_size (--suggest lists layouts that fit)"
        )
    much = max(GIB, _MUCH_STATE * (limit if limit is not None else needed))
    is_sharded = plan.rules.distributed or plan.rules.resolved("use_layer_wise_distributed_optimizer")
    if not is_sharded and replicas > 1 and state > much:
        of_muon = optimizer_of(plan.model) == "muonwithadamw"
        yield (
            f"every one of {replicas} replicas holds {state / GIB:.1f} GiB of optimizer state; set"
            f" use_{'layer_wise_' if of_muon else ''}distributed_optimizer=True"
        )
