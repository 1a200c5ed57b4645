# SPDX-License-Identifier: Apache-2.0
"""The bytes that one rank sends in an optimizer step, axis by axis.

Volumes are those of ring algorithms. With n ranks and a whole tensor of S bytes, an all-gather or a reduce-scatter
sends (n - 1) / n x S, an all-reduce twice that, and an all-to-all (n - 1) / n of what the rank holds. Recomputed
forward passes send again. Small volumes are left out: gradients of norms over tensor-parallel ranks, routing
probabilities, shapes, outputs of a vision tower.

Sources: ``tensor_parallel/layers.py`` and ``mappings.py`` (tensor and sequence parallelism: an all-reduce, or an
all-gather and a reduce-scatter, on each side of a pair of matrices, and another all-gather for the gradient of the
weight), ``moe/token_dispatcher.py``, ``pipeline_parallel/schedules.py`` and ``distributed/param_and_grad_buffer.py`` of
megatron-core 0.16.1; ``layers/core_attention.py`` here. The volumes of tensor parallelism agree with Narayanan et
al., 2021 (8 b s h (t - 1) / t elements a layer), and Korthikanti et al., 2022.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lightning_mcore.config.architecture import Mixer
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.formats import WHOLLY, Formats
from lightning_mcore.planning.model import FP32, ChunkLayers, GPTFields, part_of, stage_layers
from lightning_mcore.planning.parameters import count_of
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.vision import trained_parameters


@dataclass
class AxisVolume:
    """The bytes that a rank sends along one axis in a step."""

    axis: str  # ``tp``, ``cp``, ``ep``, ``etp``, ``pp``, ``dp``, ``edp``, ``tower`` or ``embedding``
    group_size: int  # ranks that take part
    stride: int  # distance between neighbours in the group, in ranks
    what: str  # the collectives, as text
    each_microbatch: bool  # whether they run for every microbatch instead of once per step
    sent: float = field(default=0.0)  # bytes


def communication_volume(run: Sizes, stage: int) -> list[AxisVolume]:
    """Return the bytes that each rank of a pipeline stage sends in an optimizer step, without axes of one rank."""
    fields, layout, formats, stages = run.fields, run.layout, run.formats, run.stages
    volumes, tokens = _volumes(layout, run.world_size, formats), run.tokens * run.batch.num_microbatches
    of_token, of_fp32 = tokens * formats.parameter, FP32 / formats.parameter
    passing = [(fields, chunk, 1) for chunk in stages[stage]]  # a teacher has no backward pass
    if fields.teacher is not None:
        passing += [(fields.teacher, chunk, 0) for chunk in stage_layers(fields.teacher, layout)[stage]]
    for model, chunk, backward in passing:
        of_model = model, layout, chunk, backward
        for axis, channels in [*_of_layers(*of_model, of_fp32), *_of_ends(*of_model)]:
            volumes[axis].sent += channels * of_token
    for index, chunk in enumerate(stages[stage]):
        if fields.has_logits:  # of the loss: largest logit, that of the target, the sum, each in fp32
            of_loss = 3 * 2 * 4 * _ring(layout.tensor_model_parallel_size)
            volumes["tp"].sent += (chunk.output + chunk.mtp) * of_loss * tokens
        place, last = index * len(stages) + stage, len(stages) * len(stages[stage]) - 1
        # In one message: both models' hidden states, the distance of those that are compared, and those that travel
        size = fields.hidden_size + (0 if fields.teacher is None else fields.teacher.hidden_size)
        size += bool(fields.layer_pairs)
        sizes = (place < last) * (size + fields.width_of(chunk.sent))
        sizes += (place > 0) * (size + fields.width_of(chunk.received))  # gradients, the way back
        volumes["pp"].sent += sizes * of_token / _shares(layout)
    parameters = count_of(run.tensors(stage))
    bytes_each = formats.gradient + (formats.gathered if formats.distributed else formats.gradient)
    bytes_each += formats.parameter if formats.layer_wise else 0
    if formats.sharding:  # in each microbatch gradients, and shared parameters for forward and again for backward
        microbatches = run.batch.num_microbatches
        gathers = 2 * microbatches if formats.sharding == WHOLLY else 1
        bytes_each = microbatches * formats.gradient + gathers * formats.parameter
    for axis, count in (("dp", parameters.trained_dense), ("edp", parameters.trained_expert)):
        volumes[axis].sent += count * bytes_each * _ring(volumes[axis].group_size)
    if stage == 0:
        ring = _ring(layout.tensor_model_parallel_size)
        volumes["tower"].sent += trained_parameters(fields) * 2 * formats.gradient * ring
    trained = fields.adapters is None or "embedding.word_embeddings.weight" in fields.adapters.of
    if fields.tied and trained and len(stages) > 1 and stage in (0, len(stages) - 1):
        rows = fields.padded_vocab_size / layout.tensor_model_parallel_size
        volumes["embedding"].sent += rows * fields.hidden_size * formats.gradient
    return [volume for volume in volumes.values() if volume.group_size > 1 and volume.sent]


def _volumes(layout: ParallelLayout, world_size: int, formats: Formats) -> dict[str, AxisVolume]:
    tp, cp, pp = layout.tensor_model_parallel_size, layout.context_parallel_size, layout.pipeline_model_parallel_size
    etp, ep = layout.expert_tensor_size, layout.expert_model_parallel_size
    dp, edp = layout.data_parallel_size(world_size), layout.expert_data_parallel_size(world_size)
    layers = "all-gather and reduce-scatter" if layout.sequence_parallel else "all-reduce"
    gradients = "gradients reduce-scatter, parameters all-gather"
    gradients = gradients if formats.distributed or formats.sharding else "gradients all-reduce"
    gradients += ", parameters broadcast" if formats.layer_wise else ""
    of_split = ", if every row is split" if layout.hybrid_context_parallel else ""
    rows = [
        AxisVolume("tp", tp, 1, f"{layers} of activations", True),
        AxisVolume("cp", cp, tp, f"keys and values, and their gradients{of_split}", True),
        AxisVolume("ep", ep, etp, "tokens to experts and back", True),
        AxisVolume("etp", etp, 1, "all-gather and reduce-scatter of experts' tokens", True),
        AxisVolume("pp", pp, world_size // pp, "activations forward, gradients back", True),
        AxisVolume("dp", dp * cp, tp, gradients, bool(formats.sharding)),
        AxisVolume("edp", edp, etp * ep, f"experts' {gradients}", bool(formats.sharding)),
        AxisVolume("tower", tp, 1, "vision tower's gradients all-reduce", False),
        AxisVolume("embedding", min(pp, 2), (pp - 1) * world_size // pp, "tied embedding's gradient all-reduce", False),
    ]
    return {row.axis: row for row in rows}


def _shares(layout: ParallelLayout) -> int:
    return layout.tensor_model_parallel_size if layout.sequence_parallel else 1


def _ring(size: int) -> float:
    return (size - 1) / size


def _of_layers(
    fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backward: int, of_fp32: float
) -> Iterator[tuple[str, float]]:
    """Yield axes, and the channels that a rank sends along them for each token through the layers of a chunk.

    ``backward`` is 0 without a backward pass; ``of_fp32`` is the size of a number in fp32, in channels.
    """
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    # One column-parallel and one row-parallel matrix: forward runs, and backward.
    pair, back = 2 * fields.hidden_size * _ring(tp), backward * (1.5 if layout.sequence_parallel else 1)
    for place, layer in enumerate([*chunk.layers, *[fields.num_layers - 1] * chunk.mtp]):
        runs = forward_runs(fields, place, len(chunk.layers))
        mixer, has_mlp, is_moe, _ = fields.kind(layer)
        yield "tp", pair * (runs["attention"] + back) * (mixer is not None)
        if mixer == "attention":
            yield "cp", (runs["core_attn"] + 2 * backward) * (cp - 1) * _keys_and_values(fields, tp)
        for axis, channels in _of_memories(fields, layout, mixer, of_fp32):
            yield axis, (runs["attention"] + backward) * channels
        if place < len(chunk.layers):
            yield "tp", _of_adapters(fields, layout, f"decoder.layers.{layer}.", runs) * _ring(tp)
        if not is_moe:
            yield "tp", pair * (runs["mlp"] + back) * has_mlp
            continue
        if fields.moe_shared_expert_intermediate_size:
            yield "tp", pair * (runs["shared_experts"] + back)
        for axis, channels in _of_experts(fields, layout):
            yield axis, (runs["moe"] + backward) * 2 * channels


def _of_memories(
    fields: GPTFields, layout: ParallelLayout, mixer: Mixer | None, of_fp32: float
) -> Iterator[tuple[str, float]]:
    """Yield axes and channels of one pass through a layer with a memory; none for other layers.

    Over CP, the output of the first projection goes, and the values return.
    """
    tp, cp, architecture = layout.tensor_model_parallel_size, layout.context_parallel_size, fields.architecture
    if mixer == "delta_net":
        keys, values, heads = architecture.delta_net_channels
        yield "cp", (2 * keys + 3 * values + 2 * heads) / tp * _ring(cp)
    elif mixer == "kimi_delta":
        heads, size = architecture.kimi_delta_heads
        yield "cp", heads * (6 * size + 1) / tp * _ring(cp)
        # Decays and gates begin as size channels each: an all-gather or reduce-scatter in each pass, or an all-reduce
        # in backward.
        yield "tp", 2 * size * _ring(tp)
    elif mixer == "mamba":
        values, vectors, heads = architecture.mamba_channels
        yield "cp", (3 * values + 2 * vectors + heads) / tp * _ring(cp)
        yield from _of_groups(fields, tp, cp, of_fp32)


def _of_groups(fields: GPTFields, tp: int, cp: int, of_fp32: float) -> Iterator[tuple[str, float]]:
    """Yield what ranks gather if they do not divide the groups of a Mamba 2 layer: B, C and the sums of the norm."""
    assert fields.architecture.mamba is not None
    groups, (_, vectors, _) = fields.architecture.mamba["mamba_num_groups"], fields.architecture.mamba_channels
    if groups % (tp * cp) == 0:
        return
    # TP=2, CP=2 and one group of 128 rows: a rank has 64 numbers of B and C and a sum for each token of both CP ranks.
    # It gathers 128 and 2 over CP, then 256 and 4 over TP.
    whole = cp * (2 * vectors + math.lcm(groups, tp * cp) * of_fp32)
    yield from (("cp", whole / tp * _ring(cp)), ("tp", whole * _ring(tp)))


_SENDING_NOTHING = (".experts.experts.", ".linear_low.")


def _of_adapters(fields: GPTFields, layout: ParallelLayout, prefix: str, runs: Mapping[str, int]) -> float:
    """Return the channels that the adapters of a layer send for each token: ``A x``, and its gradient.

    Those of routed experts send nothing, because the dispatcher sums. Nor do those of matrices that ranks have whole.
    """
    sent = 0
    for name, trained in fields.adapters.of.items() if fields.adapters is not None else ():
        if not name.startswith(prefix) or "linear_" not in name or any(other in name for other in _SENDING_NOTHING):
            continue
        part = part_of(name.removeprefix(prefix))
        is_row = name.endswith(("linear_proj.weight", "linear_out.weight", "linear_fc2.weight"))
        # One all-gather or reduce-scatter each way, or an all-reduce, which is both, one way.
        messages = runs[part] + 1 if layout.sequence_parallel else 2 * runs[part] if is_row else 2
        sent += messages * sum(pair.rank for pair in trained.pairs)
    return sent


def forward_runs(fields: GPTFields, place: int, num_layers: int) -> Mapping[str, int]:
    """Return how often each part of a layer runs forward: once, or twice if it is recomputed."""
    parts = ("attention", "core_attn", "mlp", "moe", "shared_experts", "mla_up_proj")
    if fields.recompute_granularity == "full":
        is_late = fields.recompute_num_layers <= place < num_layers
        return dict.fromkeys(parts, 2 if fields.recompute_method == "uniform" or not is_late else 1)
    return {part: 1 + (part in fields.recomputed) for part in parts}


def _keys_and_values(fields: GPTFields, tp: int) -> float:
    """Channels of keys and values that one rank holds for each token."""
    if fields.multi_latent_attention:
        return float(fields.num_attention_heads * (fields.query_width + fields.v_head_dim) / tp)
    return float(2 * max(fields.num_query_groups / tp, 1) * fields.kv_channels)


def _of_experts(fields: GPTFields, layout: ParallelLayout) -> Iterator[tuple[str, float]]:
    """Yield axes and channels of one exchange with the experts: tokens to them, or results back."""
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_size
    own = (fields.moe_latent_size or fields.hidden_size) / layout.tensor_model_parallel_size
    if fields.moe_token_dispatcher_type == "allgather":
        yield from (("ep", (ep - 1) * own * etp), ("etp", (etp - 1) * own))
        return
    capacity = fields.moe_expert_capacity_factor if fields.moe_pad_expert_input_to_capacity else None
    sent = own * fields.moe_router_topk * (capacity or 1.0)
    yield from (("ep", _ring(ep) * sent), ("etp", (etp - 1) * sent))


def _of_ends(
    fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backward: int
) -> Iterator[tuple[str, float]]:
    """Yield axes and channels of a token through embedding and output layer."""
    whole, shares = fields.hidden_size * _ring(layout.tensor_model_parallel_size), layout.sequence_parallel
    # The embeddings' sum: a reduce-scatter, and an all-gather in backward; or an all-reduce, which is both
    yield "tp", (chunk.embedding + (chunk.mtp > 0)) * (1 + backward if shares else 2) * whole
    # Without logits, each rank has the whole output layer, or none; only parts of sequences are gathered
    yield "tp", (chunk.output + chunk.mtp) * (shares + backward * (2 if fields.has_logits else shares)) * whole
