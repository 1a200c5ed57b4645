# SPDX-License-Identifier: Apache-2.0
"""The floating-point operations of one optimizer step, and an estimate of its time on a machine.

Model FLOPs are those of ``flops.training_flops_per_token``, so that ``plan`` and the ``model_tflops`` that a run
logs mean the same. Hardware FLOPs add the forward passes that backward recomputes. The cost of a part of a layer is the
difference from a model without it.

time = (compute + communication of every microbatch) / (1 - bubble) + communication once a step that is not overlapped,
of the slowest stage. It is an estimate for ranking layouts: the constants in ``machines.py`` are the shares of peak and
bandwidth that training reaches, and memory-bound layers and uneven experts are left out.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_mcore.config.flops import training_flops_per_token
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.communication import AxisVolume, forward_runs
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.machines import NARROW, Machine
from lightning_mcore.planning.model import GPTFields, stage_layers
from lightning_mcore.planning.vision import tower_flops

_RUNS = 3
"""Forward once, and backward, which costs twice as much."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def step_work(fields: GPTFields, layout: ParallelLayout, world_size: int, batch: GlobalBatch) -> StepWork:
    """Count the operations of a step."""
    trained = None if fields.adapters is None else fields.adapters.multiplications(topk=_topk(fields))
    given = {**fields.transformer, **(fields.architecture.delta_net or {})}
    per_token = training_flops_per_token(given, fields.output_size, batch.seq_length, trained)
    ranks = world_size // layout.pipeline_model_parallel_size
    widths = _widths(fields, layout)
    of_stage, slowed = list[float](), list[float]()
    for chunks in stage_layers(fields, layout):
        parts = defaultdict[str, float](float)
        for chunk in chunks:
            numbers = [*chunk.layers, *[fields.num_layers - 1] * chunk.mtp]
            for place, layer in enumerate(numbers):
                runs = forward_runs(fields, place, len(chunk.layers))
                for part, flops in _layer_flops(fields, layer, runs, batch.seq_length).items():
                    parts[part] += flops
            outputs = int(chunk.output) + chunk.mtp
            head = "embedding." if fields.tied else "output_layer."
            parts["output"] += outputs * _matrix_flops(fields, 2 * fields.hidden_size * fields.output_size, head)
            if chunk.embedding and not fields.tied:
                parts["output"] += _matrix_flops(fields, 0, "embedding.")
            parts["attention"] += chunk.mtp * _matrix_flops(fields, 4 * fields.hidden_size**2, "mtp.layers.0.eh_proj.")
        of_stage.append(sum(parts.values()) * batch.tokens / ranks)
        slow = sum(flops * (1 + NARROW / widths[part]) for part, flops in parts.items())
        slowed.append(slow * batch.tokens / ranks)
    tower, again = (flops * batch.rows for flops in tower_flops(fields))
    if fields.vision is not None:
        of_stage[0] += again / ranks
        slowed[0] += again / ranks * (1 + NARROW / fields.vision.width)
    model = per_token * batch.tokens + tower
    return StepWork(model, sum(of_stage) * ranks, tuple(of_stage), tuple(slowed), model / batch.tokens, tower)


def _widths(fields: GPTFields, layout: ParallelLayout) -> dict[str, float]:
    """Return the columns of each part's matrices on one rank; attention scores are not a weight matrix."""
    tp, etp = layout.tensor_model_parallel_size, layout.expert_tensor_size
    heads = fields.num_attention_heads * fields.kv_channels / tp
    widths = {"attention": heads, "mla_up_proj": heads, "mlp": fields.ffn_hidden_size / tp, "core_attn": math.inf}
    experts = fields.experts
    widths["moe"] = experts.width / etp if experts is not None else math.inf
    widths["shared_experts"] = experts.shared_width / tp if experts is not None and experts.shared_width else math.inf
    return {**widths, "output": fields.output_size / (1 if fields.scores else tp)}


_DOWN = (
    *("linear_proj.", "linear_qkv.", "linear_q_proj.", "linear_q_down_proj.", "linear_kv_down_proj."),
    *("linear_in.", "linear_out."),
)
_NAMES = {
    "attention": tuple(f"self_attention.{name}" for name in _DOWN),
    "mla_up_proj": ("self_attention.linear_q_up_proj.", "self_attention.linear_kv_up_proj."),
    "mlp": ("mlp.linear_",),
    "moe": ("mlp.experts.", "mlp.router."),
    "shared_experts": ("mlp.shared_experts.",),
}
"""How the names of the weights of each part of a layer begin; scores of attention have none."""


def _layer_flops(fields: GPTFields, layer: int, runs: Mapping[str, int], seq_length: int) -> dict[str, float]:
    """Return the operations of one layer for one token, by part, including recomputation."""
    parts = _parts(_hashable(one_layer(fields, layer)), seq_length)
    if fields.adapters is None:
        return {part: flops * (1 + (runs[part] - 1) / _RUNS) for part, flops in parts.items()}
    found = {}
    for part, flops in parts.items():
        forward, names = flops / _RUNS, tuple(f"decoder.layers.{layer}.{name}" for name in _NAMES.get(part, ()))
        of_weights = _matrix_flops(fields, forward, names) if names else flops
        again = forward + (2 * fields.adapters.multiplications(names, _topk(fields))[1] if names else 0)
        found[part] = of_weights + (runs[part] - 1) * again
    return found


def _matrix_flops(fields: GPTFields, forward: float, names: str | tuple[str, ...]) -> float:
    """Operations for one token with matrices whose names begin so, and with their adapters, forward and backward."""
    if fields.adapters is None:
        return _RUNS * forward
    saved, added = fields.adapters.multiplications(names, _topk(fields))
    return _RUNS * (forward + 2 * added) - forward + 2 * saved


def _topk(fields: GPTFields) -> int:
    return fields.experts.topk if fields.experts is not None else 0


def one_layer(fields: GPTFields, layer: int) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` of a model with only one layer of this one."""
    given = {**fields.transformer, "num_layers": 1, "mtp_num_layers": None}
    skip = given.get("window_attn_skip_freq")
    if skip is not None:
        given["window_attn_skip_freq"] = [int((layer + 1) % skip != 0) if isinstance(skip, int) else skip[layer]]
    given["moe_layer_freq"] = [int(fields.is_moe[layer])]
    if fields.architecture.has_delta_net(layer):
        given |= {**(fields.architecture.delta_net or {}), "linear_attention_freq": [1]}
    return given


def _hashable(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    names = ("window_size", "window_attn_skip_freq", "moe_layer_freq", "linear_attention_freq")
    kept = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    plain = {n: v for n, v in kept.items() if n in names or isinstance(v, int | float | None)}
    return tuple(sorted(plain.items()))


@lru_cache(maxsize=64)
def _parts(items: tuple[tuple[str, Any], ...], seq_length: int) -> dict[str, float]:
    """Return forward and backward operations for one token, by part of the layer."""
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in items}

    def flops(length: int, **changes: Any) -> float:
        return training_flops_per_token({**fields, **changes}, 0, length)

    whole = flops(seq_length)
    core = whole - flops(0)
    shared = whole - flops(seq_length, moe_shared_expert_intermediate_size=0)
    if fields["moe_layer_freq"] == [1] and fields.get("num_moe_experts") is not None:
        nothing = {"moe_router_topk": 0, "moe_shared_expert_intermediate_size": 0, "num_moe_experts": 0}
        mlp, moe = 0.0, whole - flops(seq_length, **nothing) - shared
    else:
        mlp, moe = whole - flops(seq_length, ffn_hidden_size=0), 0.0
    up = 0.0
    if fields.get("multi_latent_attention"):
        up = _latent_up_projections(fields)
    attention = whole - core - mlp - moe - shared - up
    return {
        "attention": attention,
        "core_attn": core,
        "mlp": mlp,
        "moe": moe,
        "shared_experts": shared,
        "mla_up_proj": up,
    }


def _latent_up_projections(fields: Mapping[str, Any]) -> float:
    heads = fields["num_attention_heads"]
    plain, rotated = fields.get("qk_head_dim", 128), fields.get("qk_pos_emb_head_dim", 64)
    keys = fields.get("kv_lora_rank", 512) * heads * (plain + fields.get("v_head_dim", 128))
    queries = (fields.get("q_lora_rank", 512) or 0) * heads * (plain + rotated)
    return float(_RUNS * 2 * (keys + queries))


@dataclass(frozen=True)
class Overlaps:
    """The communication that overlaps with computation."""

    gradients: bool = False  # ``overlap_grad_reduce``: during the backward pass of the last microbatch
    parameters: bool = False  # ``overlap_param_gather``: during the forward pass of the first microbatch
    stages: bool = False  # ``overlap_p2p_comm``
    tensor: bool = False  # ``tp_comm_overlap``; half of it is assumed to be hidden


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

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**vars(self), "total": self.total}


def step_time(
    flops_of_rank: Sequence[float],
    traffic_of_rank: Sequence[Sequence[AxisVolume]],
    num_microbatches: int,
    bubble: float,
    machine: Machine,
    number_format: str,
    devices_per_node: int,
    overlaps: Overlaps,
) -> StepTime:
    """Estimate the time of a step."""
    of_stages = []
    for flops, volumes in zip(flops_of_rank, traffic_of_rank, strict=True):
        compute = flops / machine.speed(number_format)
        each = once = 0.0
        for volume in volumes:
            seconds = volume.sent / machine.link(volume.stride, volume.group_size, devices_per_node)
            if not volume.each_microbatch:
                once += seconds
            elif not (volume.axis == "pp" and overlaps.stages):
                each += seconds * (0.5 if volume.axis == "tp" and overlaps.tensor else 1.0)
        hidden = overlaps.gradients * _BACKWARD_SHARE + overlaps.parameters * (1 - _BACKWARD_SHARE)
        once = max(0.0, once - hidden * compute / num_microbatches)
        waiting = (compute + each) * bubble / (1 - bubble)
        of_stages.append(StepTime(compute, each, once, waiting))
    return max(of_stages, key=lambda stage: stage.total)
