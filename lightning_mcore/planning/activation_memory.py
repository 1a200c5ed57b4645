# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that one rank holds at its peak.

Most of it is what forward keeps for backward, of every microbatch in flight (``schedule.py``), minus what is
recomputed. At its worst moment, backward needs more for a while: with the loss, the logits in 16 bits and the gradient
of the output layer; elsewhere the gradients of one feed-forward part, or a layer that is recomputed. Those of a vision
tower are in ``vision.py``.

What a part of a GPT keeps is a list of :class:`Row`: the elements that a token has in a tensor, the bytes of each, and
who shares it. A tensor that two layers keep is one row, in the layer that made it. A layer of Llama 3 8B in bf16 keeps
its 4096 channels in fp32 for the first norm: 4096 x 4 bytes of each token, shared by ``sequence``.

Rows of the torch backend are those that ``torch.autograd.graph.saved_tensors_hooks`` shows on a CPU with PyTorch 2.13
and megatron-core 0.16.1; on a GPU, RMSNorm is one kernel, which keeps its input as it is. They are listed rather than
measured again for each plan, because ``--suggest`` weighs hundreds of layouts, and because the layers of
TransformerEngine, which most runs on GPUs have, cannot be measured without one; layers with a memory are measured
(``measured.py``). With TransformerEngine, norms keep their input and one number, linear layers in FP8 keep their input
in 8 bits, and dropout keeps one byte for each element, as its documentation says. A tensor that only the gradient of a
frozen weight would need is not kept. Adapters keep their input and ``A x``, and where a layer has several, the A that
it stacks. Routed experts are assumed to be evenly loaded, and tensors that ``cpu_offloading`` would move to the host
are counted as if they stayed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

from lightning_mcore.config.lora import Trained
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.measured import SEQUENCES, kept_by_memory
from lightning_mcore.planning.model import FP32, ChunkLayers, GPTFields, part_of
from lightning_mcore.planning.schedule import in_flight
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.vision import tower_bytes

_OF_LOGITS = ("probabilities", "A x of the output layer")  # not kept with chunks
_INDEX = 8  # bytes of an int64


class Row(NamedTuple):
    """A tensor that is kept for backward. Context-parallel ranks divide every tensor; ``shared`` says who else does."""

    name: str  # its description
    width: float  # elements for each token
    element: float  # bytes of an element
    # "tensor": tensor-parallel ranks divide the width; "sequence": the tokens, with sequence parallelism; "nobody";
    # "gathered": as "sequence", but the ranks that share an expert hold all their tokens together; "expert": each of
    # these then holds a part of the width; "stacked": the width is of all tokens
    shared: str
    part: str = ""  # as ``recompute_modules`` names the part of a layer that it belongs to
    weights: tuple[str, ...] = ()  # only their gradients need it; empty where others do too
    of_rows: bool = True  # whether each row of a microbatch has its own tensor


class _LayerBytes(NamedTuple):
    """The bytes of a layer's activations on a rank."""

    whole: float  # kept for backward without recomputation
    left: float  # those of them that ``recompute_modules`` leaves
    briefly: float  # needed in its backward only, beside these


_BEHIND_NORM = tuple(
    f"self_attention.{name}.weight"
    for name in ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_in", "linear_low")
)


def layer_rows(
    fields: GPTFields, layer: int, seq_length: int, form: Formats, prefix: str = "decoder.layers"
) -> list[Row]:
    """Return the tensors that a transformer layer keeps; ``prefix`` begins the names of its weights."""
    hidden, kind = fields.hidden_size, fields.kind(layer)
    rows = [*_norm(fields, "input_layernorm", hidden, form, weights=_BEHIND_NORM)] if kind.mixer else []
    if kind.mixer == "attention":
        rows += _attention(fields, seq_length, form)
    elif kind.mixer is not None:
        rows += _memory(fields, layer, seq_length, form)
    of_mlp = () if kind.is_moe else ("mlp.linear_fc1.weight",)
    same_input = fields.architecture.layer_norms == "parallel"  # as the norm before attention, which keeps it
    if kind.has_mlp:
        rows += [*_norm(fields, "pre_mlp_layernorm", hidden, form, kind.is_moe, of_mlp)][same_input:]
        rows += _experts(fields, form) if kind.is_moe else _mlp(fields, fields.ffn_hidden_size, form, "mlp")
    if fields.architecture.layer_norms == "around":
        for name in ("self_attn_bda.norm", "mlp_bda.norm"):
            rows += list(_norm(fields, name, hidden, form))[:-1]  # nothing keeps the output
    if fields.hidden_dropout:
        rows.append(Row("dropout masks", (bool(kind.mixer) + kind.has_mlp) * hidden, form.mask, "sequence"))
    start = f"{prefix}.{layer}."
    return [*_needed(fields, form, rows, start), *_adapters(fields, form, start)]


def _needed(fields: GPTFields, form: Formats, rows: Iterable[Row], prefix: str = "") -> list[Row]:
    """Return the rows without those that only gradients of frozen weights without adapters need.

    In FP8, an adapter keeps in 16 bits what a trained weight keeps in 8.
    """
    trained = None if fields.adapters is None else fields.adapters.of
    if trained is None:
        return [*rows]
    needed = []
    for row in rows:
        users = [trained[prefix + name] for name in row.weights if prefix + name in trained]
        if users and form.keeps_fp8 and row.element == form.linear_input and not any(user.is_saved for user in users):
            row = row._replace(element=form.parameter)
        if users or not row.weights:
            needed.append(row)
    return needed


def _of_weight(fields: GPTFields, name: str) -> Trained | None:
    return None if fields.adapters is None else fields.adapters.of.get(name)


def _adapters(fields: GPTFields, form: Formats, prefix: str) -> Iterator[Row]:
    """Yield what the adapters of a layer keep beside the inputs of its weights."""
    lora = None if fields.adapters is None else fields.adapters.lora
    if fields.adapters is None or lora is None:
        return
    own = {name: trained for name, trained in fields.adapters.of.items() if name.startswith(prefix) and trained.pairs}
    for name, trained in own.items():
        if name.endswith("gate_weight"):
            yield Row(f"{name}: with its adapter", math.prod(trained.shape), form.parameter, "stacked", "moe")
            continue
        is_row = any(part in name for part in ("linear_fc2", "linear_proj", "linear_out"))
        part = part_of(name.removeprefix(prefix))
        is_whole = "router" in name or "latent_proj" in name or "linear_low" in name
        whole = "sequence" if is_row or is_whole else "nobody"
        split, share, experts = whole if is_row or is_whole else "tensor", 1.0, 1
        if len(trained.shape) > 2:
            whole, experts = "gathered", fields.num_moe_experts
            share = fields.moe_router_topk / experts
        ranks, (rows, columns) = sum(pair.rank for pair in trained.pairs), trained.shape[-2:]
        yield Row(f"{name}: A x", ranks * share, form.parameter, whole, part)
        if len(trained.pairs) > experts:
            yield Row(f"{name}: every A", ranks * columns, form.parameter, "stacked", part)
        if lora.use_dora:
            yield Row(f"{name}: output before its length", rows, form.parameter, split, part)
        if lora.lora_dropout:
            inputs = "tensor" if is_row else "sequence"
            yield Row(f"{name}: input, dropped", columns, form.parameter + form.mask, inputs, part)


def rotation_rows(fields: GPTFields, form: Formats) -> Iterator[Row]:
    """Yield the cosines and sines that all layers share, and all dense microbatches; see :func:`layer_rows`."""
    if fields.rotary_channels and not fields.transformer.get("apply_rope_fusion"):
        width = 2 * fields.rotary_channels
        yield Row("cosines and sines", width, form.parameter, "nobody", of_rows=form.packed)
        if fields.architecture.window_rotary_base is not None:
            yield Row("those of windows", width, form.parameter, "nobody", of_rows=form.packed)


def embedding_rows(fields: GPTFields, form: Formats) -> Iterator[Row]:
    """Yield the tensors that the embedding keeps; arguments as in :func:`layer_rows`."""
    yield Row("tokens", 1, _INDEX, "nobody")
    if fields.hidden_dropout:
        yield Row("dropout mask", fields.hidden_size, form.mask, "sequence")
    yield from _adapters_of(fields, form, "embedding.word_embeddings.weight", "A x of the embedding", "sequence")


def _adapters_of(fields: GPTFields, form: Formats, weight: str, name: str, shared: str) -> Iterator[Row]:
    """Yield what the adapters of a weight outside the layers keep."""
    adapted = _of_weight(fields, weight)
    for pair in adapted.pairs if adapted is not None else ():
        yield Row(name, pair.rank, form.parameter, shared)


def output_rows(fields: GPTFields, form: Formats) -> Iterator[Row]:
    """Yield the tensors that the final norm, the output layer and the loss keep; see :func:`layer_rows`."""
    behind = ("embedding.word_embeddings.weight" if fields.tied else "output_layer.weight",)
    padded = fields.padded_vocab_size
    norm = _needed(fields, form, _norm(fields, "decoder.final_layernorm", fields.hidden_size, form, weights=behind))
    if not fields.has_logits:  # the score layer keeps a copy in fp32 of the norm's output, of whole sequences
        yield from (row for row in norm if not row.name.endswith("output"))
    if fields.encodes:
        return
    if not fields.has_logits:
        yield from _needed(fields, form, [Row("score layer input", fields.hidden_size, FP32, "nobody", weights=behind)])
        return
    yield from norm
    yield Row("probabilities", padded, FP32, "tensor")
    yield Row("labels and their mask", 1, _INDEX + 1, "nobody")
    yield from _adapters_of(fields, form, "output_layer.weight", "A x of the output layer", "nobody")


def multi_token_rows(fields: GPTFields, seq_length: int, form: Formats) -> Iterator[Row]:
    """Yield what a layer of multi-token prediction keeps beside its embedding and its loss; see :func:`layer_rows`."""
    for name in ("enorm", "hnorm"):
        yield from _norm(fields, name, fields.hidden_size, form)
    yield from layer_rows(fields, fields.num_layers - 1, seq_length, form, "mtp.layers")


def _norm(
    fields: GPTFields,
    name: str,
    width: int,
    form: Formats,
    kept_whole: bool = False,
    weights: tuple[str, ...] = (),
) -> Iterator[Row]:
    """Yield what a norm keeps, and last its output, which the linear layer behind it keeps for ``weights``."""
    fused = form.fuses_norms or fields.subtracts_mean
    kept = FP32 if fields.fp32_residual_connection or not fused else form.parameter
    yield Row(f"{name} input", width, kept, "sequence")
    if not fused:
        yield Row(f"{name} input, scaled", width, FP32, "sequence", weights=(f"{name}.weight",))
    yield Row(f"{name} statistics", 2 if fields.subtracts_mean else 1, FP32, "sequence")
    # A router reads the output too, so it is also kept unchanged.
    yield Row(f"{name} output", width, form.parameter if kept_whole else form.linear_input, "sequence", weights=weights)


def _attention(fields: GPTFields, seq_length: int, form: Formats) -> Iterator[Row]:
    heads, latent, element = fields.num_attention_heads, fields.multi_latent_attention, form.parameter
    output = heads * (fields.v_head_dim if latent else fields.kv_channels)
    yield from _latent_attention(fields, form) if latent else _grouped_attention(fields, form)
    in_pieces = form.packed or fields.window_size or (fields.architecture.attention_chunk or seq_length) < seq_length
    if not latent and form.is_local and in_pieces:
        yield Row("attention output in pieces", output, element, "tensor", "core_attn")
    if fields.architecture.attention_cap is not None:
        copied = element if element < FP32 else 0
        yield Row("attention weights", heads * seq_length, FP32 + copied, "tensor", "core_attn")
        yield Row("capped scores", heads * seq_length, element, "tensor", "core_attn")
        yield Row("mask", seq_length, 1, "nobody", "core_attn")
        yield Row("keys and values of each head", 2 * output, element, "tensor", "core_attn")
    elif fields.attention_dropout and form.is_local:
        # PyTorch's attention with dropout is not fused on a CPU: weights, mask, and the weights after dropout.
        yield Row("attention weights", 3 * heads * seq_length, element, "tensor", "core_attn")
    else:
        yield Row("attention statistics", heads, FP32, "tensor", "core_attn")
    yield Row("attention output", output, element, "tensor")
    if form.keeps_fp8 and fields.adapters is None:  # those of linear_proj read the output itself
        yield Row("attention output in 8 bits", output, form.linear_input, "tensor")
    if fields.attention_output_gate:
        behind = ("self_attention.linear_proj.weight",)
        yield Row("output gate", output, FP32, "tensor")
        yield Row("gated output", output, form.linear_input, "tensor", weights=behind)


def _memory(fields: GPTFields, layer: int, seq_length: int, form: Formats) -> Iterator[Row]:
    of = None if fields.adapters is None else fields.adapters.of
    whole, left = kept_by_memory(fields, layer, seq_length, form, of)
    yield Row("a layer with a memory, without it", left, 1, "tensor")
    # Packed sequences are recomputed one after another.
    apart = form.packed and "core_attn" in fields.recomputed
    width = (whole - left) / (SEQUENCES if apart else 1)
    yield Row("its memory", width, 1, "tensor", "core_attn", of_rows=not apart)


def _grouped_attention(fields: GPTFields, form: Formats) -> Iterator[Row]:
    heads = fields.num_attention_heads + fields.num_query_groups
    element, is_copied = form.parameter, form.parameter < FP32
    queries, both = fields.num_attention_heads * fields.kv_channels, heads * fields.kv_channels
    values, kind = fields.num_query_groups * fields.kv_channels, fields.architecture.head_norms
    # The values are a view of it, which keeps the whole tensor.
    yield Row("queries, keys and values", both + values + queries * fields.attention_output_gate, element, "tensor")
    if fields.qk_layernorm:
        fused = form.fuses_norms or fields.subtracts_mean
        copied = (both, FP32) if is_copied and not fused else (queries, element)
        yield Row("queries before their norm, or both in fp32", *copied, "tensor")
        if not fused:
            of_norms = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
            yield Row("queries and keys, scaled", both, FP32, "tensor", weights=of_norms)
        yield Row("statistics of heads", heads * (2 if fields.subtracts_mean else 1), FP32, "tensor")
    if kind == "all_heads":
        yield Row("queries and keys before their norms, in fp32", both if is_copied else queries, FP32, "tensor")
        yield Row("queries and keys, normalised", both, element, "tensor")
    elif kind == "after_rotation":
        yield Row("inputs of norms, and scaled", 2 * both + heads, FP32, "tensor")
    elif kind == "unweighted":
        yield Row("inputs of norms", both + heads, FP32, "tensor")
    if fields.rotary_channels or fields.qk_layernorm:
        yield Row("queries and keys, rotated", both, element, "tensor")


def _latent_attention(fields: GPTFields, form: Formats) -> Iterator[Row]:
    heads, element = fields.num_attention_heads, form.parameter
    for name, width in (("kv", fields.kv_lora_rank), ("q", fields.q_lora_rank)):
        up = f"self_attention.linear_{name}_up_proj"
        if width is not None and fields.qk_layernorm:
            yield from _norm(fields, f"{up}.layer_norm", width, form, weights=(f"{up}.weight",))
        elif width is not None:
            yield Row(f"compressed {name}", width, form.linear_input, "sequence", weights=(f"{up}.weight",))
    rotated, wide = 4 * fields.qk_pos_emb_head_dim, heads * fields.query_width
    yield Row("cosines and sines", rotated, element, "nobody", "mla_up_proj", of_rows=form.packed)
    yield Row("queries and keys", 2 * wide, element, "tensor", "mla_up_proj")
    if form.is_local and fields.query_width >= fields.v_head_dim:  # PyTorch's fused attention makes them equal
        yield Row("values and attention output, widened", 2 * wide, element, "tensor", "core_attn")
    else:
        both = heads * (fields.qk_head_dim + fields.v_head_dim)  # the values are a part of it
        yield Row("keys and values, expanded", both, element, "tensor", "mla_up_proj")


def _mlp(
    fields: GPTFields, width: int, form: Formats, part: str, shared: str = "tensor", share: float = 1.0
) -> Iterator[Row]:
    """Yield the tensors that a feed-forward part keeps after its input; ``share`` of the tokens go through it."""
    fused, gated, tokens = fields.bias_activation_fusion, fields.gated_linear_unit, width * share
    yield Row("inner width", (2 if gated else 1) * tokens, form.parameter, shared, part)
    if gated and not fused:
        clamped, is_sigmoid = fields.activation_func_clamp_value, fields.activation_func == "gelu_sigmoid"
        kept = 2 + (clamped is not None) + is_sigmoid
        yield Row("gate, and what it opens", kept * tokens, form.parameter, shared, part)
    if shared == "expert" and not fused:
        yield Row("activation before its weight", tokens, form.parameter, shared, part)
    prefix = {"mlp": "mlp.", "moe": "mlp.experts.experts."}.get(part, f"mlp.{part}.")
    yield Row("activation", tokens, form.linear_input, shared, part, (f"{prefix}linear_fc2.weight",))


def _experts(fields: GPTFields, form: Formats) -> Iterator[Row]:
    hidden, share, capacity = fields.hidden_size, float(fields.moe_router_topk), fields.moe_expert_capacity_factor
    if capacity is not None:
        share *= capacity if fields.moe_pad_expert_input_to_capacity else min(1.0, capacity)
    # Scores in fp32, the map as bytes, and for each choice its index, position and weight.
    routing = fields.num_moe_experts * (2 * FP32 + 1) + fields.moe_router_topk * (3 * _INDEX + FP32)
    behind, read = ("mlp.experts.experts.linear_fc1.weight",), (fields.moe_latent_size or hidden) * share
    yield Row("routing", routing, 1, "sequence", "moe")
    yield Row("input of experts", read, form.linear_input, "gathered", "moe", behind)
    yield from _mlp(fields, fields.moe_ffn_hidden_size, form, "moe", "expert", share)
    if fields.moe_latent_size:
        last = ("mlp.fc2_latent_proj.weight",)
        yield Row("output of experts", fields.moe_latent_size, form.parameter, "sequence", "moe", last)
    if fields.moe_shared_expert_intermediate_size:
        yield from _mlp(fields, fields.moe_shared_expert_intermediate_size, form, "shared_experts")
        if fields.moe_shared_expert_gate:
            yield Row("shared output before its gate", hidden, form.parameter, "sequence", "moe")


@dataclass(frozen=True)
class Activations:
    """Counts the bytes of activations on one rank."""

    run: Sizes

    def peak(self, pipeline_rank: int) -> int:
        """Return the bytes that a rank of a pipeline stage holds at its peak; see :func:`in_flight`."""
        run = self.run
        chunks = [self._chunk(chunk) for chunk in run.stages[pipeline_rank]]
        kept = [of_chunk for of_chunk, _ in chunks]
        moments = in_flight(run.timeline, pipeline_rank)
        shared = 0.0 if run.formats.packed else self._weigh(rotation_rows(run.fields, run.formats))
        return round(shared + max(float(sum(map(mul, counts, kept))) + chunks[index][1] for counts, index in moments))

    def _chunk(self, chunk: ChunkLayers) -> tuple[float, float]:
        """Return the bytes that forward keeps of a microbatch, and those that backward's worst moment takes beside."""
        run, fields, form = self.run, self.run.fields, self.run.formats
        kept, in_layers = self._layers(chunk)
        if form.packed and fields.recompute_granularity != "full":  # each microbatch has its own
            kept += self._weigh(rotation_rows(fields, form))
        kept += self._weigh(embedding_rows(fields, form)) if chunk.embedding else 0.0
        output = self._output if chunk.output else 0.0
        output += self._multi_token_bytes() * chunk.mtp
        # A GPU frees a sent output at once, a CPU in the backward pass.
        sent = not form.on_gpu and not chunk.output
        kept += output + (self._hidden if sent else 0.0)
        # A teacher's hidden states: received in one tensor with the student's, sent in one, and kept for the loss.
        taught, in_teacher = self._of_teacher(chunk)
        kept += taught * ((not chunk.embedding) + sent + chunk.output)
        # Pairs of hidden states: their difference in fp32, or both; while compared, also the teacher's as they were
        compared = self._states(0 if fields.teacher is None else fields.teacher.hidden_size, FP32)
        kept += chunk.pairs * compared * (1 if fields.hidden_loss == "mse" else 2)
        of_teacher = sum(each.is_teacher for each in chunk.kept)
        in_pairs = of_teacher * taught + 2 * compared if chunk.pairs else 0.0
        # States that travel are kept with what is received, and once more with what is sent
        width = fields.width_of(chunk.received) + (fields.width_of(chunk.sent) if sent else 0)
        kept += self._states(width)
        rows = run.batch.micro_batch_size * chunk.embedding
        of_tower, of_worst = tower_bytes(fields, run.layout, rows, form.parameter)
        at_output = self._at_output() if chunk.output else 0.0
        beside = max(at_output, in_layers - output, of_worst - kept, in_teacher - kept, in_pairs - output, 0.0)
        return kept + of_tower, beside

    def left(self, chunk: ChunkLayers, done: int) -> float:
        """Return the bytes while backward goes through a layer of a chunk, with ``done`` layers behind it."""
        kept, in_layers = self._layers(chunk)
        return kept * (1 - done / len(chunk.layers)) + in_layers

    def _layers(self, chunk: ChunkLayers) -> tuple[float, float]:
        """Return the bytes that the layers of a chunk keep, and those that backward needs beside in the worst one."""
        fields = self.run.fields
        # Layers with the same parts are alike; adapters may differ
        alike = {fields.kind(layer) if fields.adapters is None else layer: layer for layer in chunk.layers}
        known = {key: self._layer(layer) for key, layer in alike.items()}
        return self._recomputed([known[fields.kind(n) if fields.adapters is None else n] for n in chunk.layers])

    def _of_teacher(self, chunk: ChunkLayers) -> tuple[float, float]:
        """Return the bytes of a teacher's hidden states between two layers, and those that one of its layers needs.

        Or one of the blocks of its vision tower, if that is more.
        """
        run, taught = self.run, self.run.fields.teacher
        if taught is None:
            return 0.0, 0.0
        teacher = Activations(replace(run, fields=taught))
        rows = run.batch.micro_batch_size * chunk.embedding
        _, in_tower = tower_bytes(taught, run.layout, rows, run.formats.parameter)
        return teacher._hidden, max(teacher._in_layer(any(taught.is_moe)), in_tower)

    def _states(self, width: int, element: int | None = None) -> float:
        """Return the bytes of hidden states between two layers; ``element`` None is a number's of this run."""
        return self._weigh([Row("hidden states", width, element or self.run.formats.parameter, "sequence")])

    @property
    def _hidden(self) -> float:
        """Bytes of this model's hidden states between two layers."""
        return self._states(self.run.fields.hidden_size)

    def _multi_token_bytes(self) -> float:
        """Return the bytes that a layer of multi-token prediction keeps."""
        fields, form = self.run.fields, self.run.formats
        ends = self._weigh(embedding_rows(fields, form)) + self._output
        if fields.recompute_granularity == "full" and fields.recompute_method == "uniform":
            return ends + 2 * self._hidden
        return ends + self._weigh(self._left(multi_token_rows(fields, self.run.batch.seq_length, form)))

    def _layer(self, layer: int) -> _LayerBytes:
        """Return what is known of a layer."""
        rows = layer_rows(self.run.fields, layer, self.run.batch.seq_length, self.run.formats)
        adapted = _of_weight(self.run.fields, f"decoder.layers.{layer}.mlp.linear_fc1.weight")
        briefly = self._in_layer(self.run.fields.is_moe[layer], adapted is None or adapted.is_saved)
        return _LayerBytes(self._weigh(rows), self._weigh(self._left(rows)), briefly)

    def _left(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows that ``recompute_modules`` leaves."""
        recomputed = self.run.fields.recomputed
        return (row for row in rows if row.part not in recomputed)

    def _recomputed(self, layers: Sequence[_LayerBytes]) -> tuple[float, float]:
        """Return the bytes that the layers of a chunk keep, and those that backward needs beside in the worst one."""
        fields, layout, size = self.run.fields, self.run.layout, self.run.fields.recompute_num_layers
        if not layers or fields.recompute_granularity not in ("selective", "full"):
            return sum(layer.whole for layer in layers), max((layer.briefly for layer in layers), default=0.0)
        if fields.recompute_granularity == "selective":
            return sum(layer.left for layer in layers), max(one.whole - one.left + one.briefly for one in layers)
        shared = fields.distribute_saved_activations and not layout.sequence_parallel
        hidden = self._hidden / (layout.tensor_model_parallel_size if shared else 1)
        if fields.recompute_method == "block":
            # The kept layers come after the recomputed ones, and are freed by then.
            kept = sum(layer.whole for layer in layers[size:])
            again = max(layer.whole + layer.briefly for layer in layers[:size]) - kept
            return len(layers[:size]) * hidden + kept, max([again, *(layer.briefly for layer in layers[size:])])
        groups = [layers[at : at + size] for at in range(0, len(layers), size)]
        worst = max(sum(one.whole for one in group) + max(one.briefly for one in group) for group in groups)
        return len(groups) * hidden, worst

    @property
    def _output(self) -> float:
        """Bytes that the final norm, the output layer and the loss keep."""
        rows = [*output_rows(self.run.fields, self.run.formats)]
        # Logits are made again; kept are losses and logarithms of sums. With a teacher, the loss is always our own.
        if self.run.tokens_of_loss is not None or self.run.fields.teacher is not None:
            rows = [row for row in rows if row.name not in _OF_LOGITS]
            rows.append(Row("losses and log-sums", 2 * FP32, 1, "nobody"))
        return self._weigh(rows)

    def _at_output(self) -> float:
        """Return the bytes that the loss needs briefly: its copy of the logits, then the output layer's gradients."""
        run, fields = self.run, self.run.fields
        element, hidden = run.formats.parameter, fields.hidden_size
        if not fields.has_logits:
            return float(run.tokens * hidden * FP32)  # the gradient of the score layer's input, or of pooling's
        columns = fields.padded_vocab_size // run.layout.tensor_model_parallel_size
        adapted = _of_weight(fields, "output_layer.weight")
        is_trained = fields.adapters is None or (adapted is not None and adapted.is_saved)
        has_adapters = adapted is not None and bool(adapted.pairs)
        of_input, of_weight = run.tokens * hidden * element, columns * hidden * element * is_trained  # gradients
        logits = (run.tokens_of_loss or run.tokens) * columns
        if run.tokens_of_loss is None and fields.teacher is None:
            # What adapters add, and the sum
            copies = 2 if has_adapters else int(element < FP32 or fields.cross_entropy_loss_fusion)
            # By then 16-bit gradients have replaced fp32 probabilities.
            return float(max(copies * logits * element, of_weight + of_input - logits * (FP32 - element)))
        # A 16-bit gradient of the chunks before this one is already in the fp32 buffer, if there is one.
        before = 0 if element < run.formats.gradient or run.tokens_of_loss is None else of_weight
        probabilities = logits * (FP32 + (element if element < FP32 else 0))
        at_loss = logits * element * (3 if has_adapters else 1) + probabilities + before
        at_product = logits * element + of_weight + before
        at_sum = of_weight + 2 * before  # autograd makes a new sum
        if fields.teacher is None:
            return float(max(at_loss, at_product, at_sum) + of_input)
        # The divergence has the logits of both, and copies. Its gradient waits for that of the loss.
        at_divergence = logits * (2 * element + fields.copies_of_logits * FP32) + before
        return float(max(at_loss + 2 * logits * element, at_divergence, at_product, at_sum) + of_input)

    def _in_layer(self, is_moe: bool, is_trained: bool = True) -> float:
        """Return the bytes that a feed-forward part needs briefly: its gradients in backward, or what experts copy."""
        fields, element = self.run.fields, self.run.formats.parameter
        inner, kind = (2 if fields.gated_linear_unit else 1) * fields.ffn_hidden_size, "tensor"
        if is_moe:
            of_tokens = (fields.moe_latent_size or fields.hidden_size) * fields.moe_router_topk
            inner, kind = self._copies_of_tokens * of_tokens, "gathered"
        # With sequence parallelism, the gradient of the first matrix's input is not scattered yet, and the input of a
        # trained matrix is gathered again.
        whole = "sequence" if is_moe else "nobody"
        rows = [Row("input and its gradient", (1 + is_trained) * fields.hidden_size, element, whole)]
        rows += [
            Row("residual's gradient", fields.hidden_size, element, "sequence"),
            Row("inner", inner, element, kind),
        ]
        return self._weigh(rows)

    @property
    def _copies_of_tokens(self) -> int:
        """How often the tokens of routed experts are there at once, beside those that are kept."""
        fields, ranks = self.run.fields, self.run.layout.expert_model_parallel_size
        is_sorted = fields.moe_token_dispatcher_type == "alltoall" and fields.num_moe_experts > ranks
        if not (self.run.formats.is_local and is_sorted):
            return 2
        # At the end of the experts' forward: as they were sent, as they were received and not yet sorted by expert, and
        # the experts' outputs, one by one and joined. 4096 tokens of 2048 channels, topk 8, bf16: 4 x 128 MiB.
        return 3 + (ranks > 1)

    def _weigh(self, rows: Iterable[Row]) -> float:
        """Return the bytes of tensors on this rank."""
        run, layout, total = self.run, self.run.layout, 0.0
        tp, etp, ep = layout.tensor_model_parallel_size, layout.expert_tensor_size, layout.expert_model_parallel_size
        split = tp if layout.sequence_parallel else 1
        ranks = {"tensor": tp, "sequence": split, "gathered": split / etp, "expert": split, "nobody": 1}
        for row in rows:
            if row.shared == "stacked":
                total += row.width * row.element / (ep if row.part == "moe" else 1)
            else:
                tokens = run.tokens if row.of_rows else run.tokens / run.batch.micro_batch_size
                total += row.width * row.element * tokens / ranks[row.shared]
        return total
