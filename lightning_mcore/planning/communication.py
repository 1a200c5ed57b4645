# SPDX-License-Identifier: Apache-2.0
"""The bytes that one rank sends in an optimizer step, axis by axis.

Volumes are those of ring algorithms. With n ranks and a whole tensor of S bytes, an all-gather or a reduce-scatter
sends (n - 1) / n x S, an all-reduce twice that, and an all-to-all (n - 1) / n of what the rank holds. t below are the
tokens of a microbatch on one context-parallel rank, h the hidden size, e the bytes of an activation. Recomputed forward
passes send again. Small volumes are left out: gradients of norms over tensor-parallel ranks, routing probabilities,
shapes, outputs of a vision tower.

Sources: ``tensor_parallel/layers.py`` and ``mappings.py`` (tensor and sequence parallelism: an all-reduce, or an
all-gather and a reduce-scatter, on each side of a pair of matrices, and another all-gather for the gradient of the
weight), ``moe/token_dispatcher.py``, ``pipeline_parallel/schedules.py`` and ``distributed/param_and_grad_buffer.py`` of
megatron-core 0.16.1; ``layers/core_attention.py`` here. The volumes of tensor parallelism agree with Narayanan et
al., 2021 (8 b s h (t - 1) / t elements a layer), and Korthikanti et al., 2022.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.parameters import ParameterCount, rank_parameters
from lightning_mcore.planning.vision import trained_parameters


@dataclass(frozen=True)
class Traffic:
    """The number formats and methods of communication."""

    activation_bytes: int  # bytes of one element of an activation
    gradient_bytes: int  # bytes of one element of a gradient while it is summed
    parameter_bytes: int  # bytes of one element of a parameter while it is gathered
    distributed_optimizer: bool  # whether gradients are reduce-scattered and parameters gathered, or all-reduced
    backend: str = "local"  # the layers: ``"local"`` or ``"transformer_engine"``


@dataclass
class AxisVolume:
    """The bytes that a rank sends along one axis in a step."""

    axis: str  # ``tp``, ``cp``, ``ep``, ``etp``, ``pp``, ``dp``, ``edp``, ``tower`` or ``embedding``
    group_size: int  # ranks that take part
    stride: int  # distance between neighbours in the group, in ranks
    what: str  # the collectives, as text
    each_microbatch: bool  # whether they run for every microbatch instead of once per step
    sent: float = field(default=0.0)  # bytes

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**vars(self), "sent": round(self.sent)}


def communication_volume(
    fields: GPTFields,
    layout: ParallelLayout,
    world_size: int,
    batch: GlobalBatch,
    traffic: Traffic,
    stage: int,
    parameters: ParameterCount | None = None,
) -> list[AxisVolume]:
    """Return the bytes that each rank of a pipeline stage sends in an optimizer step, without axes of one rank.

    ``parameters`` are the rank's, if they are known.
    """
    tokens = batch.micro_batch_size * batch.seq_length // layout.context_parallel_size
    stages = stage_layers(fields, layout)
    volumes = _volumes(layout, world_size, traffic)
    for index, chunk in enumerate(stages[stage]):
        sent: dict[str, float] = _of_layers(fields, layout, chunk, tokens, traffic)
        sent["tp"] += _of_ends(fields, layout, chunk, tokens, traffic)
        place, last = index * len(stages) + stage, len(stages) * len(stages[stage]) - 1
        message = tokens * fields.hidden_size * traffic.activation_bytes / _shares(layout)
        sent["pp"] = message * ((place < last) + (place > 0))
        for axis, volume in sent.items():
            volumes[axis].sent += volume * batch.num_microbatches
    parameters = parameters or rank_parameters(fields, layout, stage, traffic.backend)
    _add_gradients(volumes, fields, parameters, traffic, stage)
    trained = fields.adapters is None or "embedding.word_embeddings.weight" in fields.adapters.of
    if fields.tied and trained and len(stages) > 1 and stage in (0, len(stages) - 1):
        rows = fields.padded_vocab_size / layout.tensor_model_parallel_size
        volumes["embedding"].sent += rows * fields.hidden_size * traffic.gradient_bytes
    return [volume for volume in volumes.values() if volume.group_size > 1 and volume.sent]


def _volumes(layout: ParallelLayout, world_size: int, traffic: Traffic) -> dict[str, AxisVolume]:
    tp, cp, pp = layout.tensor_model_parallel_size, layout.context_parallel_size, layout.pipeline_model_parallel_size
    etp, ep = layout.expert_tensor_size, layout.expert_model_parallel_size
    dp, edp = layout.data_parallel_size(world_size), layout.expert_data_parallel_size(world_size)
    layers = "all-gather and reduce-scatter" if layout.sequence_parallel else "all-reduce"
    gradients = "gradients reduce-scatter, parameters all-gather"
    gradients = gradients if traffic.distributed_optimizer else "gradients all-reduce"
    rows = [
        AxisVolume("tp", tp, 1, f"{layers} of activations", True),
        AxisVolume("cp", cp, tp, "keys and values, and their gradients", True),
        AxisVolume("ep", ep, etp, "tokens to experts and back", True),
        AxisVolume("etp", etp, 1, "all-gather and reduce-scatter of experts' tokens", True),
        AxisVolume("pp", pp, world_size // pp, "activations forward, gradients back", True),
        AxisVolume("dp", dp * cp, tp, gradients, False),
        AxisVolume("edp", edp, etp * ep, f"experts' {gradients}", False),
        AxisVolume("tower", tp, 1, "vision tower's gradients all-reduce", False),
        AxisVolume("embedding", min(pp, 2), (pp - 1) * world_size // pp, "tied embedding's gradient all-reduce", False),
    ]
    return {row.axis: row for row in rows}


def _shares(layout: ParallelLayout) -> int:
    return layout.tensor_model_parallel_size if layout.sequence_parallel else 1


def _ring(size: int) -> float:
    return (size - 1) / size


def _of_layers(
    fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, tokens: int, traffic: Traffic
) -> dict[str, float]:
    """Return bytes of one microbatch through the layers of a chunk."""
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    whole = tokens * fields.hidden_size * traffic.activation_bytes * _ring(tp)
    sent = dict.fromkeys(("tp", "cp", "ep", "etp"), 0.0)
    numbers = [*chunk.layers, *[fields.num_layers - 1] * chunk.mtp]
    keys = (cp - 1) * _keys_and_values(fields, tp) * tokens * traffic.activation_bytes
    for place, layer in enumerate(numbers):
        runs = forward_runs(fields, place, len(chunk.layers))
        sent["tp"] += _pair(whole, runs["attention"], layout)
        if fields.architecture.has_delta_net(layer):
            exchanged = _exchanged(fields, tp) * tokens * traffic.activation_bytes
            sent["cp"] += (runs["attention"] + 1) * exchanged * _ring(cp)
        else:
            sent["cp"] += (runs["core_attn"] + 2) * keys
        if place < len(chunk.layers):
            sent["tp"] += _of_adapters(fields, layout, f"decoder.layers.{layer}.", runs) * whole / fields.hidden_size
        if not fields.is_moe[layer]:
            sent["tp"] += _pair(whole, runs["mlp"], layout)
            continue
        assert fields.experts is not None
        if fields.experts.shared_width:
            sent["tp"] += _pair(whole, runs["shared_experts"], layout)
        for axis, volume in _experts(fields, layout, tokens, traffic).items():
            sent[axis] += (runs["moe"] + 1) * 2 * volume
    return sent


def _of_adapters(fields: GPTFields, layout: ParallelLayout, prefix: str, runs: Mapping[str, int]) -> float:
    """Return the channels that the adapters of a layer send for each token: ``A x``, and its gradient.

    Those of routed experts send nothing: the dispatcher sums.
    """
    sent = 0
    for name, trained in fields.adapters.of.items() if fields.adapters is not None else ():
        if not name.startswith(prefix) or "linear_" not in name or ".experts.experts." in name:
            continue
        part = "attention" if ".self_attention." in name else "shared_experts" if ".shared_experts." in name else "mlp"
        part = "mla_up_proj" if name.endswith(("linear_q_up_proj.weight", "linear_kv_up_proj.weight")) else part
        is_row = name.endswith(("linear_proj.weight", "linear_out.weight", "linear_fc2.weight"))
        # One all-gather or reduce-scatter each way, or an all-reduce, which is both, one way.
        messages = runs[part] + 1 if layout.sequence_parallel else 2 * runs[part] if is_row else 2
        sent += messages * sum(pair.rank for pair in trained.pairs)
    return sent


def forward_runs(fields: GPTFields, place: int, num_layers: int) -> Mapping[str, int]:
    """Return how often each part of a layer runs forward: once, or twice if it is recomputed."""
    recompute = fields.recompute
    parts = ("attention", "core_attn", "mlp", "moe", "shared_experts", "mla_up_proj")
    if recompute.granularity == "full":
        whole = recompute.method == "uniform" or place < recompute.num_layers or place >= num_layers
        return dict.fromkeys(parts, 1 + whole)
    runs = {part: 1 + (part in recompute.modules) for part in parts}
    runs["shared_experts"] = max(runs["shared_experts"], runs["moe"])
    return runs


def _pair(whole: float, runs: int, layout: ParallelLayout) -> float:
    """Bytes of one column-parallel and one row-parallel matrix: forward runs, and backward."""
    return whole * (2 * runs + (3 if layout.sequence_parallel else 2))


def _exchanged(fields: GPTFields, tp: int) -> float:
    """Channels that gated delta nets exchange for each token: the output of the first projection, and what returns."""
    keys, values, heads = fields.architecture.delta_net_channels
    return (2 * keys + 3 * values + 2 * heads) / tp


def _keys_and_values(fields: GPTFields, tp: int) -> float:
    """Channels of keys and values that one rank holds for each token."""
    if fields.attention is not None:
        return fields.num_attention_heads * (fields.attention.query_width + fields.attention.v_head_dim) / tp
    return 2 * max(fields.num_query_groups / tp, 1) * fields.kv_channels


def _experts(fields: GPTFields, layout: ParallelLayout, tokens: int, traffic: Traffic) -> dict[str, float]:
    """Bytes of one exchange with the experts: tokens to them, or results back."""
    experts = fields.experts
    assert experts is not None
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_size
    own = tokens / layout.tensor_model_parallel_size * (experts.latent_width or fields.hidden_size)
    own *= traffic.activation_bytes
    if experts.dispatcher == "allgather":
        return {"ep": (ep - 1) * own * etp, "etp": (etp - 1) * own}
    sent = own * experts.topk * (experts.capacity_factor or 1.0 if experts.pads_to_capacity else 1.0)
    return {"ep": _ring(ep) * sent, "etp": (etp - 1) * sent}


def _of_ends(fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, tokens: int, traffic: Traffic) -> float:
    """Bytes of one microbatch through embedding, output layer and loss."""
    tp = layout.tensor_model_parallel_size
    whole = tokens * fields.hidden_size * traffic.activation_bytes * _ring(tp)
    embeddings = int(chunk.embedding) + (1 if chunk.mtp else 0)
    outputs = int(chunk.output) + chunk.mtp
    of_output = whole * (3 if layout.sequence_parallel else 2)
    of_loss = 3 * 2 * tokens * 4 * _ring(tp)  # largest logit, that of the target, the sum: each in fp32
    if fields.scores:  # each rank has the whole layer; only parts of sequences are gathered
        of_output, of_loss = 2 * whole * layout.sequence_parallel, 0
    return embeddings * 2 * whole + outputs * (of_output + of_loss)


def _add_gradients(
    volumes: Mapping[str, AxisVolume], fields: GPTFields, parameters: ParameterCount, traffic: Traffic, stage: int
) -> None:
    for axis, count in (("dp", parameters.trained_dense), ("edp", parameters.trained_expert)):
        size = volumes[axis].group_size
        bytes_each = 2 * traffic.gradient_bytes
        if traffic.distributed_optimizer:
            bytes_each = traffic.gradient_bytes + traffic.parameter_bytes
        volumes[axis].sent += count * bytes_each * _ring(size)
    if stage == 0:
        tower = volumes["tower"]
        tower.sent += trained_parameters(fields) * 2 * traffic.gradient_bytes * _ring(tower.group_size)
