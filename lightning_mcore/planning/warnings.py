# SPDX-License-Identifier: Apache-2.0
"""What a run may do and should not: settings that idle, waste or will not fit. A sentence each, with what to change."""

from collections.abc import Mapping, Sequence

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.rules import CheckedRun
from lightning_mcore.planning.state_memory import RankMemory

GIB = 2**30
_BUBBLE = 0.20
_MUCH_STATE = 0.25
"""Share of the memory at which optimizer state that every replica holds is worth a word."""


def run_warnings(
    run: CheckedRun,
    sizes: Mapping[str, int],
    bubble: float,
    memory: Sequence[RankMemory],
    limit: float | None,
    devices_per_node: int,
) -> list[str]:
    """Return the warnings of a run that can be worked out.

    Args:
        run: The run after its checks.
        sizes: Ranks along each axis.
        bubble: Share of the step in which a stage waits.
        memory: Of one rank of each stage.
        limit: Memory of a device in bytes; None where it is not known.
        devices_per_node: Devices of a node.
    """
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
                f"{name}=True does nothing: data-parallel times context-parallel size is 1, so that there is nobody to"
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
            f"tensor_model_parallel_size={tp} reaches over nodes of {devices_per_node} devices, and its collectives"
            f" wait for the network in every layer; choose {devices_per_node} or less"
        )
    if tp > 1 and not layout.sequence_parallel:
        found.append(
            f"sequence_parallel=False with tensor_model_parallel_size={tp} keeps activations between the matrices on"
            " every rank; set sequence_parallel=True, which costs nothing"
        )
    if layout.expert_model_parallel_size > 1 and experts > devices_per_node:
        found.append(
            f"the {experts} ranks that share experts reach over nodes of {devices_per_node} devices, and every layer"
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
