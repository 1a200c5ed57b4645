# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that one rank holds at its peak.

Most of it is what forward keeps for backward, of every microbatch in flight (``schedule.py``), minus what is
recomputed. At its worst moment, backward needs more for a while: with the loss, the logits in 16 bits and the gradient
of the output layer; elsewhere the gradients of one feed-forward part, or a layer that is recomputed. Those of a vision
tower are in ``vision.py``. Pure arithmetic.

What a part of a GPT keeps is listed in rows, by their size for one token (:class:`SavedTensor`). A row says how many
elements a token has in the tensor, of how many bytes, and which ranks share it. A tensor that two layers keep is one
row, in the layer that made it. The rows of the torch backend are those that
``torch.autograd.graph.saved_tensors_hooks`` shows on a CPU with PyTorch 2.13 and megatron-core 0.16.1. With
TransformerEngine, norms keep their input and one number, linear layers in FP8 keep their input in 8 bits, and dropout
keeps one byte for each element, as its documentation says; that needs a GPU and is not measured. A tensor that only the
gradient of a frozen weight would need is not kept. Adapters keep their input and ``A x``, and where a layer has several
adapters, the matrices that it stacks them in. Routed experts are assumed to be evenly loaded, and tensors that
``cpu_offloading`` would move to the host are counted as if they stayed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.model import FP32, ChunkLayers, Experts, GPTFields, LatentAttention, stage_layers
from lightning_mcore.planning.schedule import in_flight
from lightning_mcore.planning.vision import tower_bytes

Shared = Literal["sequence", "tensor", "expert", "gathered", "nobody", "stacked", "stacked rows"]
_INDEX = 8  # bytes of an int64
_PROJECTION = ("self_attention.linear_proj.weight",)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is kept for backward.

    Context-parallel ranks divide every tensor. Tensor-parallel ranks divide it by its width (``shared`` is
    ``"tensor"``), by its tokens under sequence parallelism (``"sequence"``), or not (``"nobody"``). ``"gathered"`` is
    as ``"sequence"``, but the ranks that share an expert hold all their tokens together; with ``"expert"``, each then
    holds a part of the width. ``"stacked"`` is of ``width`` in all, for any number of tokens, and of ``"stacked rows"``
    each tensor-parallel rank has a part.
    """

    name: str  # its description
    width: float  # elements for each token
    element: float  # bytes of an element
    shared: Shared  # how tensor-parallel ranks divide it
    of_rows: bool = True  # whether each row of a microbatch has its own tensor
    part: str = ""  # as ``recompute_modules`` names the part of a layer that it belongs to
    weights: tuple[str, ...] = ()  # only their gradients need it; empty where others do too


@dataclass(frozen=True)
class NumberFormat:
    """The number format of activations."""

    element: int  # bytes of an activation: 4 or 2
    backend: str = "local"  # ``"local"`` or ``"transformer_engine"``
    fp8: bool = False  # whether linear layers of TransformerEngine keep their inputs in 8 bits
    packed: bool = False  # whether rows hold several sequences each, and are joined to one

    @property
    def is_local(self) -> bool:
        """Whether the layers are plain PyTorch."""
        return self.backend == "local"

    @property
    def linear_input(self) -> int:
        """Bytes of an element of the input that a linear layer keeps."""
        return 1 if self.fp8 else self.element

    @property
    def mask(self) -> int:
        """Bytes that dropout keeps for an element."""
        return self.element if self.is_local else 1


def layer_rows(
    fields: GPTFields, is_moe: bool, seq_length: int, form: NumberFormat, layer: int | None = None
) -> list[SavedTensor]:
    """Return the tensors that a transformer layer keeps."""
    rows = [*_norm(fields, "input_layernorm", fields.hidden_size, form, weights=_BEHIND_NORM)]
    if layer is not None and fields.architecture.has_delta_net(layer):
        rows += _delta_net(fields, form)
    else:
        rows += _attention(fields, seq_length, form)
    of_mlp = () if is_moe else ("mlp.linear_fc1.weight",)
    rows += _norm(fields, "pre_mlp_layernorm", fields.hidden_size, form, is_moe, weights=of_mlp)
    if is_moe:
        assert fields.experts is not None
        rows += _experts(fields, fields.experts, form)
    else:
        rows += _mlp(fields, fields.ffn_hidden_size, form, "mlp")
    if fields.architecture.layer_norms == "around":
        for name in ("self_attn_bda.norm", "mlp_bda.norm"):
            *kept, _ = _norm(fields, name, fields.hidden_size, form)  # nothing keeps the output
            rows += kept
    if fields.hidden_dropout:
        rows.append(SavedTensor("dropout masks", 2 * fields.hidden_size, form.mask, "sequence"))
    return [*_needed(fields, rows, f"decoder.layers.{layer}."), *_adapters(fields, form, f"decoder.layers.{layer}.")]


def _needed(fields: GPTFields, rows: list[SavedTensor], prefix: str) -> list[SavedTensor]:
    """Return the rows without those that only gradients of frozen weights without adapters need."""
    if fields.adapters is None:
        return rows
    trained = fields.adapters.of
    return [row for row in rows if not row.weights or any(prefix + name in trained for name in row.weights)]


def _adapters(fields: GPTFields, form: NumberFormat, prefix: str) -> Iterator[SavedTensor]:
    """Yield what the adapters of a layer keep beside the inputs of its weights."""
    lora = fields.adapters.lora if fields.adapters is not None else None
    if fields.adapters is None or lora is None:
        return
    for name, trained in fields.adapters.of.items():
        if not name.startswith(prefix) or not trained.pairs:
            continue
        if name.endswith("gate_weight"):
            yield SavedTensor(
                f"{name}: with its adapter", math.prod(trained.shape), form.element, "stacked", part="moe"
            )
            continue
        is_row = any(part in name for part in ("linear_fc2", "linear_proj", "linear_out"))
        part = next((part for part, start in _PARTS.items() if name.startswith(prefix + start)), "")
        whole: Shared = "sequence" if is_row or "router" in name else "nobody"
        split: Shared = whole if is_row else "tensor"
        share, experts = 1.0, len(trained.shape) > 2
        if experts:
            assert fields.experts is not None
            share, whole = fields.experts.topk / fields.experts.count, "gathered"
        ranks, (rows, columns) = sum(pair.rank for pair in trained.pairs), trained.shape[-2:]
        yield SavedTensor(f"{name}: A x", ranks * share, form.element, whole, part=part)
        several = len(trained.pairs) > (fields.experts.count if experts and fields.experts else 1)
        if several:
            yield SavedTensor(f"{name}: every A", ranks * columns, form.element, "stacked", part=part)
            yield SavedTensor(f"{name}: every B", ranks * rows, form.element, "stacked rows", part=part)
        if lora.use_dora:
            yield SavedTensor(f"{name}: output before its length", rows, form.element, split, part=part)
        if lora.lora_dropout:
            inputs: Shared = "tensor" if is_row else "sequence"
            yield SavedTensor(f"{name}: input, dropped", columns, form.element + form.mask, inputs, part=part)


def embedding_rows(fields: GPTFields, form: NumberFormat) -> list[SavedTensor]:
    """Return the tensors that the embedding keeps; arguments as in :func:`layer_rows`."""
    rows = [SavedTensor("tokens", 1, _INDEX, "nobody")]
    if fields.hidden_dropout:
        rows.append(SavedTensor("dropout mask", fields.hidden_size, form.mask, "sequence"))
    adapted = fields.adapters.of.get("embedding.word_embeddings.weight") if fields.adapters is not None else None
    for pair in adapted.pairs if adapted is not None else ():
        rows.append(SavedTensor("A x of the embedding", pair.rank, form.element, "sequence"))
    return rows


def output_rows(fields: GPTFields, form: NumberFormat) -> list[SavedTensor]:
    """Return the tensors that the final norm, the output layer and the loss keep; see :func:`layer_rows`."""
    output = "embedding.word_embeddings.weight" if fields.tied else "output_layer.weight"
    norm = list(_norm(fields, "decoder.final_layernorm", fields.hidden_size, form, weights=(output,)))
    if fields.scores:  # the score layer keeps a copy in fp32 of the norm's output, of whole sequences
        of_score = SavedTensor("score layer input", fields.hidden_size, FP32, "nobody", weights=(output,))
        return _needed(fields, [*norm[:-1], of_score], "")
    rows = [
        *norm,
        SavedTensor("probabilities", fields.padded_vocab_size, FP32, "tensor"),
        SavedTensor("labels and their mask", 1, _INDEX + 1, "nobody"),
    ]
    adapted = fields.adapters.of.get("output_layer.weight") if fields.adapters is not None else None
    for pair in adapted.pairs if adapted is not None else ():
        rows.append(SavedTensor("A x of the output layer", pair.rank, form.element, "nobody"))
        if fields.vocab_size != fields.padded_vocab_size:
            padded = pair.rank * fields.padded_vocab_size
            rows.append(SavedTensor("B of the output layer, padded", padded, form.element, "stacked rows"))
    return _needed(fields, rows, "")


def multi_token_rows(fields: GPTFields, seq_length: int, form: NumberFormat) -> list[SavedTensor]:
    """Return the tensors of a layer of multi-token prediction, its embedding and its loss; see :func:`layer_rows`."""
    norms = [row for name in ("enorm", "hnorm") for row in _norm(fields, name, fields.hidden_size, form)]
    return [
        *embedding_rows(fields, form),
        *norms,
        *layer_rows(fields, fields.is_moe[-1], seq_length, form),
        *output_rows(fields, form),
    ]


_ATTENTION = "self_attention."
_BEHIND_NORM = tuple(
    f"{_ATTENTION}{name}.weight"
    for name in ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_in")
)
_PARTS = {
    "moe": "mlp.experts.",
    "shared_experts": "mlp.shared_experts.",
    "mlp": "mlp.linear_",
    "mla_up_proj": f"{_ATTENTION}linear_kv_up_proj.",
}
"""How the names of weights begin that belong to a part which can be recomputed."""


def _norm(
    fields: GPTFields,
    name: str,
    width: int,
    form: NumberFormat,
    kept_whole: bool = False,
    shared: Shared = "sequence",
    weights: tuple[str, ...] = (),
) -> Iterator[SavedTensor]:
    """Yield what a norm keeps, and its output, which the linear layer behind it keeps for ``weights``."""
    fused = not form.is_local or fields.layer_norm_has_bias
    kept = FP32 if fields.fp32_residual_connection or not fused else form.element
    yield SavedTensor(f"{name} input", width, kept, shared)
    if not fused:
        yield SavedTensor(f"{name} input, scaled", width, FP32, shared, weights=(f"{name}.weight",))
    yield SavedTensor(f"{name} statistics", 2 if fields.layer_norm_has_bias else 1, FP32, shared)
    # A router reads the output too, so it is also kept unchanged.
    kept = form.element if kept_whole else form.linear_input
    yield SavedTensor(f"{name} output", width, kept, shared, weights=weights)


def _attention(fields: GPTFields, seq_length: int, form: NumberFormat) -> Iterator[SavedTensor]:
    if fields.attention is None:
        yield from _grouped_attention(fields, form)
        output = fields.num_attention_heads * fields.kv_channels
        if form.is_local and (form.packed or fields.transformer.get("window_size")):
            yield SavedTensor("attention output in pieces", output, form.element, "tensor", part="core_attn")
    else:
        yield from _latent_attention(fields, fields.attention, form)
        output = fields.num_attention_heads * fields.attention.v_head_dim
    heads = fields.num_attention_heads
    if fields.architecture.attention_cap is not None:
        scores, copied = heads * seq_length, form.element if form.element < FP32 else 0
        yield SavedTensor("attention weights", scores, FP32 + copied, "tensor", part="core_attn")
        yield SavedTensor("capped scores", scores, form.element, "tensor", part="core_attn")
        yield SavedTensor("mask", seq_length, 1, "nobody", part="core_attn")
        yield SavedTensor("keys and values of each head", 2 * output, form.element, "tensor", part="core_attn")
    elif fields.attention_dropout and form.is_local:
        # PyTorch's attention with dropout is not fused on a CPU: weights, mask, and the weights after dropout.
        yield SavedTensor("attention weights", 3 * heads * seq_length, form.element, "tensor", part="core_attn")
    else:
        yield SavedTensor("attention statistics", heads, FP32, "tensor", part="core_attn")
    yield SavedTensor("attention output", output, form.element, "tensor")
    if form.fp8:
        yield SavedTensor("attention output in 8 bits", output, form.linear_input, "tensor")
    if fields.attention_output_gate:
        yield SavedTensor("output gate", output, FP32, "tensor")
        yield SavedTensor("gated output", output, form.linear_input, "tensor", weights=_PROJECTION)


def _delta_net(fields: GPTFields, form: NumberFormat) -> Iterator[SavedTensor]:
    sizes = fields.architecture.delta_net
    assert sizes is not None
    keys, values, heads = fields.architecture.delta_net_channels
    repeated, chunk = heads * sizes["linear_key_head_dim"], 64  # tokens
    mixed, is_copied = 2 * keys + values, form.element < FP32
    # In fp32 queries and keys are views of all that the convolution gives, and gates of all that the projection gives.
    normalised = 2 * keys if is_copied else mixed
    gates = values if is_copied else mixed + values + 2 * heads
    yield SavedTensor("convolution and its output", 2 * mixed, form.element, "tensor")
    yield SavedTensor("before their norm, and gates", normalised + gates, FP32, "tensor")
    yield SavedTensor("queries, keys and values", 2 * repeated + values, FP32, "tensor")
    yield SavedTensor("decays and steps", 5 * heads, FP32, "tensor")
    memories = repeated * sizes["linear_value_head_dim"] / chunk
    yield SavedTensor("scores within chunks", 5 * heads * chunk, FP32, "tensor", part="core_attn")
    yield SavedTensor("what is written and read", 4 * repeated + 2 * values, FP32, "tensor", part="core_attn")
    yield SavedTensor("memories, and their decays", memories + 5 * heads, FP32, "tensor", part="core_attn")
    yield SavedTensor("output before its norm", 2 * values, FP32, "tensor")
    yield SavedTensor("output, normalised", 2 * values, form.element, "tensor")
    behind = ("self_attention.linear_out.weight",)
    yield SavedTensor("output through its gate", values, form.linear_input, "tensor", weights=behind)


def _grouped_attention(fields: GPTFields, form: NumberFormat) -> Iterator[SavedTensor]:
    queries, keys = fields.num_attention_heads * fields.kv_channels, fields.num_query_groups * fields.kv_channels
    gates = queries if fields.attention_output_gate else 0
    # The values are a view of it, which keeps the whole tensor.
    yield SavedTensor("queries, keys and values", queries + 2 * keys + gates, form.element, "tensor")
    if fields.qk_layernorm:
        yield from _head_norms(fields, queries, keys, form)
    if fields.architecture.head_norms == "all_heads":
        width = queries if form.element == FP32 else queries + keys
        yield SavedTensor("queries and keys before their norms, in fp32", width, FP32, "tensor")
        yield SavedTensor("queries and keys, normalised", queries + keys, form.element, "tensor")
    elif fields.architecture.head_norms == "after_rotation":
        heads = fields.num_attention_heads + fields.num_query_groups
        yield SavedTensor("inputs of norms, and scaled", 2 * (queries + keys) + heads, FP32, "tensor")
    if fields.rotary_channels and not fields.transformer.get("apply_rope_fusion"):
        yield SavedTensor("cosines and sines", 4 * fields.rotary_channels, form.element, "nobody", form.packed)
    if fields.rotary_channels or fields.qk_layernorm:
        yield SavedTensor("queries and keys, rotated", queries + keys, form.element, "tensor")


def _head_norms(fields: GPTFields, queries: int, keys: int, form: NumberFormat) -> Iterator[SavedTensor]:
    heads = fields.num_attention_heads + fields.num_query_groups
    fused = not form.is_local or fields.layer_norm_has_bias
    if not fused and form.element < FP32:
        yield SavedTensor("queries and keys in fp32", queries + keys, FP32, "tensor")
    else:
        yield SavedTensor("queries before their norm", queries, form.element, "tensor")
    if not fused:
        of_norms = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
        yield SavedTensor("queries and keys, scaled", queries + keys, FP32, "tensor", weights=of_norms)
    yield SavedTensor("statistics of heads", heads * (2 if fields.layer_norm_has_bias else 1), FP32, "tensor")


def _latent_attention(fields: GPTFields, latent: LatentAttention, form: NumberFormat) -> Iterator[SavedTensor]:
    heads = fields.num_attention_heads
    compressed = {"kv": latent.kv_lora_rank}
    if latent.q_lora_rank is not None:
        compressed["q"] = latent.q_lora_rank
    for name, width in compressed.items():
        behind = (f"{_ATTENTION}linear_{name}_up_proj.weight",)
        if fields.qk_layernorm:
            yield from _norm(fields, f"{_ATTENTION}linear_{name}_up_proj.layer_norm", width, form, weights=behind)
        else:
            yield SavedTensor(f"compressed {name}", width, form.linear_input, "sequence", weights=behind)
    rotated = 4 * latent.qk_pos_emb_head_dim
    yield SavedTensor("cosines and sines", rotated, form.element, "nobody", form.packed, "mla_up_proj")
    wide = heads * latent.query_width
    yield SavedTensor("queries and keys", 2 * wide, form.element, "tensor", part="mla_up_proj")
    # PyTorch's fused attention needs values as wide as keys.
    padded = wide if form.is_local and latent.query_width > latent.v_head_dim else heads * latent.v_head_dim
    if form.is_local and padded == wide:
        yield SavedTensor("values, widened", wide, form.element, "tensor", part="core_attn")
        yield SavedTensor("attention output, widened", wide, form.element, "tensor", part="core_attn")
    else:
        both = heads * (latent.qk_head_dim + latent.v_head_dim)  # the values are a part of it
        yield SavedTensor("keys and values, expanded", both, form.element, "tensor", part="mla_up_proj")


def _mlp(
    fields: GPTFields, width: int, form: NumberFormat, part: str, shared: Shared = "tensor", share: float = 1.0
) -> Iterator[SavedTensor]:
    """Yield the tensors that a feed-forward part keeps after its input; ``share`` of the tokens go through it."""
    fused = bool(fields.transformer.get("bias_activation_fusion"))
    inner = 2 if fields.gated_linear_unit else 1
    yield SavedTensor("inner width", inner * width * share, form.element, shared, part=part)
    if fields.gated_linear_unit and not fused:
        given = fields.transformer
        more = (given.get("activation_func_clamp_value") is not None) + (given.get("activation_func") == "gelu_sigmoid")
        yield SavedTensor("gate, and what it opens", (2 + more) * width * share, form.element, shared, part=part)
    weighed = shared == "expert" and not fused
    if weighed:
        yield SavedTensor("activation before its weight", width * share, form.element, shared, part=part)
    prefix = {"mlp": "mlp.", "moe": "mlp.experts.experts."}.get(part, f"mlp.{part}.")
    behind = (f"{prefix}linear_fc2.weight",)
    yield SavedTensor("activation", width * share, form.linear_input, shared, part=part, weights=behind)


def _experts(fields: GPTFields, experts: Experts, form: NumberFormat) -> Iterator[SavedTensor]:
    hidden, share = experts.latent_width or fields.hidden_size, float(experts.topk)
    if experts.capacity_factor is not None:
        share *= experts.capacity_factor if experts.pads_to_capacity else min(1.0, experts.capacity_factor)
    # Scores in fp32, the map as bytes, and for each choice its index, position and weight.
    scores = 2 * FP32 + 1
    yield SavedTensor("routing", experts.count * scores + experts.topk * (3 * _INDEX + FP32), 1, "sequence", part="moe")
    behind = ("mlp.experts.experts.linear_fc1.weight",)
    yield SavedTensor("input of experts", hidden * share, form.linear_input, "gathered", part="moe", weights=behind)
    yield from _mlp(fields, experts.width, form, "moe", "expert", share)
    if experts.latent_width:
        yield SavedTensor("output of experts", hidden, form.element, "sequence", part="moe")
    if experts.shared_width:
        yield from _mlp(fields, experts.shared_width, form, "shared_experts")
        if experts.shared_gate:
            yield SavedTensor("shared output before its gate", fields.hidden_size, form.element, "sequence", part="moe")


@dataclass(frozen=True)
class ActivationSetting:
    """The settings that activations depend on, besides model and layout."""

    micro_batch_size: int  # rows of a microbatch
    num_microbatches: int  # microbatches of a step on one data-parallel rank
    seq_length: int  # tokens of a row
    form: NumberFormat  # the number format of activations
    group_size: int | None = None  # ``microbatch_group_size_per_vp_stage``; None is the pipeline size

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, before any rank takes its share."""
        return self.micro_batch_size * self.seq_length


@dataclass(frozen=True)
class _ChunkBytes:
    """Bytes of one microbatch in one chunk."""

    kept: float  # bytes that forward keeps for backward
    output: float  # bytes kept after the last layer: final norm, logits, loss
    at_output: float  # bytes that the worst moment of the loss takes beside ``kept``
    in_layers: float  # bytes that the worst moment of a layer's backward takes beside ``kept``, minus ``output``
    in_tower: float  # bytes that the worst moment of the vision tower takes beside ``kept``, minus what layers keep

    @property
    def beside(self) -> float:
        """Bytes that backward of this chunk needs beside the kept ones."""
        return max(self.at_output, self.in_layers - self.output, self.in_tower, 0.0)


def activation_memory(fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, setting: ActivationSetting) -> int:
    """Return the bytes of activations that a rank of a pipeline stage holds at its peak."""
    meter = _Meter(fields, layout, setting)
    chunks = [meter.chunk(chunk) for chunk in stage_layers(fields, layout)[pipeline_rank]]
    moments = in_flight(layout, pipeline_rank, setting.num_microbatches, setting.group_size)
    peak = max(
        sum(count * chunk.kept for count, chunk in zip(counts, chunks, strict=True)) + chunks[index].beside
        for counts, index in moments
    )
    return round(peak)


@dataclass(frozen=True)
class _Meter:
    """Counts the bytes of the tensors of one microbatch on one rank."""

    fields: GPTFields
    layout: ParallelLayout
    setting: ActivationSetting

    @property
    def hidden(self) -> float:
        """Bytes of the hidden states between two layers."""
        return self._weigh(
            [SavedTensor("hidden states", self.fields.hidden_size, self.setting.form.element, "sequence")]
        )

    def chunk(self, chunk: ChunkLayers) -> _ChunkBytes:
        """Return the bytes of a microbatch in a chunk."""
        fields, form = self.fields, self.setting.form
        kinds: dict[int, Any] = {layer: layer for layer in chunk.layers}
        if fields.adapters is None:  # then layers with the same parts are alike
            kinds = {layer: (fields.is_moe[layer], fields.architecture.has_delta_net(layer)) for layer in kinds}
        alike = {kind: layer for layer, kind in kinds.items()}
        layers = {kind: self._layer(fields.is_moe[layer], layer) for kind, layer in alike.items()}
        kept, again = self._recomputed([layers[kind] for kind in kinds.values()])
        kept += self._weigh(embedding_rows(fields, form)) if chunk.embedding else 0.0
        output = self._weigh(output_rows(fields, form)) if chunk.output else 0.0
        output += self._multi_token_bytes() * chunk.mtp
        # A GPU frees a sent output at once, a CPU in the backward pass.
        sent = self.hidden if form.is_local and not chunk.output else 0.0
        has_experts = any(fields.is_moe[layer] for layer in chunk.layers)
        tower = tower_bytes(fields, self.layout, self.setting.micro_batch_size, form.element)
        of_tower, beside = tower if chunk.embedding else (0.0, 0.0)
        kept += output + sent
        return _ChunkBytes(
            kept=kept + of_tower,
            output=output,
            at_output=self._at_output() if chunk.output else 0.0,
            in_layers=again + self._in_layer(has_experts),
            in_tower=beside - kept,
        )

    def _multi_token_bytes(self) -> float:
        """Return the bytes that a layer of multi-token prediction keeps."""
        fields, setting = self.fields, self.setting
        rows = multi_token_rows(fields, setting.seq_length, setting.form)
        if fields.recompute.granularity == "full" and fields.recompute.method == "uniform":
            rows = [*embedding_rows(fields, setting.form), *output_rows(fields, setting.form)]
            return 2 * self.hidden + self._weigh(rows)
        return self._weigh(row for row in rows if not self._is_recomputed(row))

    def _layer(self, is_moe: bool, layer: int) -> tuple[float, float]:
        """Return the bytes that a layer keeps, and the bytes that it keeps if all of it is recomputed."""
        rows = layer_rows(self.fields, is_moe, self.setting.seq_length, self.setting.form, layer)
        return self._weigh(rows), self._weigh(row for row in rows if not self._is_recomputed(row))

    def _is_recomputed(self, row: SavedTensor) -> bool:
        modules = self.fields.recompute.modules
        return row.part in modules or (row.part == "shared_experts" and "moe" in modules)

    def _recomputed(self, layers: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return the bytes that the layers of a chunk keep, and those needed again while one is recomputed."""
        recompute = self.fields.recompute
        if not layers:
            return 0.0, 0.0
        if recompute.granularity == "selective":
            return sum(left for _, left in layers), max(whole - left for whole, left in layers)
        if recompute.granularity != "full":
            return sum(whole for whole, _ in layers), 0.0
        tp = self.layout.tensor_model_parallel_size
        shared = recompute.distribute and not self.layout.sequence_parallel
        hidden = self.hidden / (tp if shared else 1)
        if recompute.method == "block":
            again, rest = layers[: recompute.num_layers], layers[recompute.num_layers :]
            whole = sum(layer for layer, _ in rest)
            # The kept layers come after the recomputed ones, and are freed by then.
            return len(again) * hidden + whole, max(layer for layer, _ in again) - whole
        groups = [layers[at : at + recompute.num_layers] for at in range(0, len(layers), recompute.num_layers)]
        return len(groups) * hidden, max(sum(layer for layer, _ in group) for group in groups)

    def _at_output(self) -> float:
        """Return the bytes that the loss needs briefly: its copy of the logits, then the output layer's gradient."""
        fields, element = self.fields, self.setting.form.element
        if fields.scores:
            return self._tokens * fields.hidden_size * FP32  # the gradient of the score layer's input
        rows = fields.padded_vocab_size / self.layout.tensor_model_parallel_size
        halves = element < FP32
        copied = halves or bool(fields.transformer.get("cross_entropy_loss_fusion"))
        logits = self._tokens * rows * element if copied else 0.0
        adapted = None if fields.adapters is None else fields.adapters.of.get("output_layer.weight")
        if adapted is not None and adapted.pairs:  # what they add, and the sum
            logits = max(logits, 2 * self._tokens * rows * element)
        # Whole sequences, and the gradient of the matrix; by then 16-bit gradients have replaced fp32 probabilities.
        trained = fields.adapters is None or (adapted is not None and adapted.is_saved)
        gradient = rows * fields.hidden_size * element * trained + self._tokens * fields.hidden_size * element
        freed = self._tokens * rows * (FP32 - element) if halves else 0.0
        return max(logits, gradient - freed)

    def _in_layer(self, is_moe: bool) -> float:
        """Return the bytes that backward of a feed-forward part needs briefly: gradients of inner and outer width."""
        fields, form = self.fields, self.setting.form
        rows = [SavedTensor("gradients", 3 * fields.hidden_size, form.element, "sequence")]
        inner = 2 if fields.gated_linear_unit else 1
        if is_moe and fields.experts is not None:
            outer = 2 * fields.hidden_size * fields.experts.topk
            rows.append(SavedTensor("gradients of experts", outer, form.element, "gathered"))
        else:
            rows.append(SavedTensor("inner gradients", inner * fields.ffn_hidden_size, form.element, "tensor"))
        return self._weigh(rows)

    @property
    def _tokens(self) -> float:
        """Tokens of a microbatch on this context-parallel rank."""
        return self.setting.tokens / self.layout.context_parallel_size

    def _weigh(self, rows: Iterable[SavedTensor]) -> float:
        """Return the bytes of tensors on this rank."""
        layout = self.layout
        tp, etp = layout.tensor_model_parallel_size, layout.expert_tensor_size
        sequences = 1 / (tp if layout.sequence_parallel else 1)
        share = {
            "tensor": 1 / tp,
            "sequence": sequences,
            "gathered": sequences * etp,
            "expert": sequences,
            "nobody": 1.0,
        }
        total = 0.0
        for row in rows:
            if row.shared in ("stacked", "stacked rows"):
                of_expert = row.part == "moe"
                ranks = layout.expert_model_parallel_size if of_expert else 1
                ranks *= (etp if of_expert else tp) if row.shared == "stacked rows" else 1
                total += row.width * row.element / ranks
                continue
            tokens = self._tokens if row.of_rows else self._tokens / self.setting.micro_batch_size
            total += row.width * row.element * tokens * share[row.shared]
        return total
