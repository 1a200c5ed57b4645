# SPDX-License-Identifier: Apache-2.0
"""The floating-point operations of one optimizer step, and an estimate of its time on a machine.

Model FLOPs are those of ``flops.training_flops_per_token``, so that ``plan`` and the ``model_tflops`` that a run
logs mean the same. Hardware FLOPs add the forward passes that backward recomputes.

time = (compute + communication of every microbatch) / (1 - bubble) + communication once a step that is not overlapped,
of the slowest stage. It is an estimate for ranking layouts: the constants in ``machines.py`` are the shares of peak and
bandwidth that training reaches, and memory-bound layers and uneven experts are left out.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_mcore.config.flops import layer_flops, training_flops_per_token
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.communication import AxisVolume, forward_runs
from lightning_mcore.planning.machines import NARROW, Machine
from lightning_mcore.planning.model import WEIGHTS_OF_PARTS, ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.vision import tower_flops

_BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class StepWork:
    """Operations of one optimizer step."""

    model_flops: float  # operations of the model, over all ranks
    hardware_flops: float  # the same, including recomputation
    hardware_flops_of_rank: tuple[float, ...]  # of one rank of each pipeline stage
    slowed_flops_of_rank: tuple[float, ...]  # the same, narrow matrices as wide work that takes as long
    flops_per_token: float  # operations of the model for one token
    tower_flops: float = 0.0  # those of the model's operations that its vision tower takes


def step_work(run: Sizes) -> StepWork:
    """Count the operations of a step."""
    fields, layout, batch, in_chunks = run.fields, run.layout, run.batch, run.tokens_of_loss is not None
    trained = None if fields.adapters is None else fields.adapters.multiplications(topk=fields.moe_router_topk)
    given = {**fields.transformer, **fields.architecture.sizes}
    per_token = training_flops_per_token(given, fields.output_size, batch.seq_length, trained)
    of_layers, widths = layer_flops(given, batch.seq_length), _widths(fields, layout)
    ranks = run.world_size // layout.pipeline_model_parallel_size
    of_stage, slowed = list[float](), list[float]()
    teacher = _forward_flops(fields.teacher, layout, batch.seq_length, in_chunks)
    for chunks, taught in zip(run.stages, teacher, strict=True):
        parts = _stage_flops(fields, of_layers, chunks, in_chunks)
        parts["projections"] *= 1 if layout.sequence_parallel else layout.tensor_model_parallel_size  # on every rank
        of_stage.append((sum(parts.values()) + taught) * batch.tokens / ranks)
        slow = sum(flops * (1 + NARROW / widths[part]) for part, flops in parts.items()) + taught
        slowed.append(slow * batch.tokens / ranks)
    tower, again = (flops * batch.rows for flops in tower_flops(fields))
    if fields.vision is not None:
        of_stage[0] += again / ranks
        slowed[0] += again / ranks * (1 + NARROW / fields.vision.width)
    if fields.teacher is not None and fields.teacher.vision is not None:
        forward = tower_flops(fields.teacher)[0] * batch.rows / ranks
        of_stage[0] += forward
        slowed[0] += forward * (1 + NARROW / fields.teacher.vision.width)
    model = per_token * batch.tokens + tower
    return StepWork(model, sum(of_stage) * ranks, tuple(of_stage), tuple(slowed), model / batch.tokens, tower)


def _widths(fields: GPTFields, layout: ParallelLayout) -> dict[str, float]:
    """Return the columns of each part's matrices on one rank; attention scores are not a weight matrix."""
    tp, heads = layout.tensor_model_parallel_size, fields.num_attention_heads * fields.kv_channels
    return {
        "attention": heads / tp,
        "mla_up_proj": heads / tp,
        "core_attn": math.inf,
        "mlp": fields.ffn_hidden_size / tp,
        "moe": fields.moe_ffn_hidden_size / layout.expert_tensor_size,
        "shared_experts": fields.moe_shared_expert_intermediate_size / tp or math.inf,
        "projections": fields.projected_width or math.inf,
        "output": fields.output_size / (tp if fields.has_logits else 1) or math.inf,
    }


def _stage_flops(
    fields: GPTFields, of_layers: Sequence[Mapping[str, float]], chunks: Sequence[ChunkLayers], in_chunks: bool
) -> dict[str, float]:
    """Return the operations of a stage for one token, by part, including recomputation."""
    parts = defaultdict[str, float](float)
    for chunk in chunks:
        for place, layer in enumerate([*chunk.layers, *[fields.num_layers - 1] * chunk.mtp]):
            runs = forward_runs(fields, place, len(chunk.layers))
            for part, forward in of_layers[layer].items():
                names = tuple(f"decoder.layers.{layer}.{name}" for name in WEIGHTS_OF_PARTS.get(part, ()))
                parts[part] += _passes(fields, forward, names, runs[part])
        head = ("embedding." if fields.tied else "output_layer.",)
        output = _passes(fields, 2 * fields.hidden_size * fields.output_size, head, 2 if in_chunks else 1)
        parts["output"] += (int(chunk.output) + chunk.mtp) * output
        if chunk.embedding and not fields.tied:
            parts["output"] += _passes(fields, 0, ("embedding.",))
        parts["projections"] += chunk.pairs * 3 * 2 * fields.hidden_size * fields.projected_width
        parts["attention"] += chunk.mtp * _passes(fields, 4 * fields.hidden_size**2, ("mtp.layers.0.eh_proj.",))
    return parts


def _forward_flops(teacher: GPTFields | None, layout: ParallelLayout, seq_length: int, in_chunks: bool) -> list[float]:
    """Return the operations of a teacher's forward pass for one token, for each stage; in chunks, logits twice."""
    if teacher is None:
        return [0.0] * layout.pipeline_model_parallel_size
    of_layers = layer_flops({**teacher.transformer, **teacher.architecture.sizes}, seq_length)
    output = 2.0 * teacher.hidden_size * teacher.output_size * (2 if in_chunks else 1)
    return [
        sum(sum(sum(of_layers[layer].values()) for layer in chunk.layers) + chunk.output * output for chunk in chunks)
        for chunks in stage_layers(teacher, layout)
    ]


def _passes(fields: GPTFields, forward: float, names: tuple[str, ...], runs: int = 1) -> float:
    """Return the operations of so many forward passes and of backward, which costs twice as much.

    ``names`` begin those of the weights. With frozen ones, there are only their inputs' gradients, and the adapters.
    """
    if fields.adapters is None or not names:
        return (2 + runs) * forward
    saved, added = fields.adapters.multiplications(names, fields.moe_router_topk)
    return (2 + runs) * (forward + 2 * added) - forward + 2 * saved


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest stage."""

    compute: float  # matrix products, including recomputation
    each_microbatch: float  # communication of every microbatch
    once: float  # communication of gradients and parameters that is not hidden
    bubble: float  # waiting for other stages

    @property
    def total(self) -> float:
        """The sum of all four."""
        return self.compute + self.each_microbatch + self.once + self.bubble


def step_time(
    run: Sizes, work: StepWork, traffic: Sequence[Sequence[AxisVolume]], machine: Machine, devices_per_node: int
) -> StepTime:
    """Estimate the time of a step; ``traffic`` is what a rank of each stage sends."""
    of_stages, on, bubble = [], run.overlaps, run.timeline.bubble
    hidden = ("overlap_grad_reduce" in on) * _BACKWARD_SHARE + ("overlap_param_gather" in on) * (1 - _BACKWARD_SHARE)
    for flops, volumes in zip(work.slowed_flops_of_rank, traffic, strict=True):
        compute = flops / machine.speed(run.formats.compute)
        each = once = shared = 0.0
        for volume in volumes:
            seconds = volume.sent / machine.link(volume.stride, volume.group_size, devices_per_node)
            if not volume.each_microbatch:
                once += seconds
            elif volume.axis in ("dp", "edp"):  # of shared parameters, while layers before and behind compute
                shared += seconds
            elif not (volume.axis == "pp" and "overlap_p2p_comm" in on):
                each += seconds * (0.5 if volume.axis == "tp" and "tp_comm_overlap" in on else 1.0)
        once = max(0.0, once - hidden * compute / run.batch.num_microbatches) + max(0.0, shared - compute)
        of_stages.append(StepTime(compute, each, once, (compute + each) * bubble / (1 - bubble)))
    return max(of_stages, key=lambda stage: stage.total)
