# SPDX-License-Identifier: Apache-2.0
"""The parameters of one chunk on one rank, tensor by tensor, as Megatron's modules create them, and their number.

The single tensors matter to ``state_memory.py`` because the distributed optimizer pads each of them; their sums are the
parameters of a rank and of the whole model. Biases of row-parallel layers, norms, routers and gates are whole on every
tensor-parallel rank. All ranks of a stage hold the same number, because axes divide evenly (``config/layout.py``
refuses other cases). The sum over ranks is larger than the model: some parameters are whole on every rank, a tied
embedding is on the first and the last stage, and multi-token prediction has an embedding on its stage. Pure arithmetic.

With adapters (``adapters.py``), those of a weight follow it, and what is not trained is marked.

Source: ``GPTModel``, ``SelfAttention``, ``MLASelfAttention``, ``MLP``, ``MoELayer``, ``SharedExpertMLP`` and
``MultiTokenPredictionLayer`` of megatron-core 0.16.1, in the order of ``named_parameters``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.lora import LoRA, Pair
from lightning_mcore.config.vision import LANGUAGE_MODEL
from lightning_mcore.planning.model import ChunkLayers, Experts, GPTFields, LatentAttention, stage_layers


@dataclass(frozen=True)
class ParameterTensor:
    """Parameters of one kind and size.

    Args:
        name: The name in a checkpoint, of a layer's without its prefix.
        size: Elements of one such parameter on this rank.
        copies: Their number, such as one for each expert.
        expert: Whether routed experts own them.
        is_matrix: Whether they have two dimensions.
        is_linear: Whether they are the weight of a linear layer inside a transformer layer, which FP8 may hold.
        is_shared: Whether another stage has a copy: a tied embedding, or the embedding of multi-token prediction.
        shape: Of a matrix: rows and columns on all ranks together.
        split: The axis of a matrix that tensor-parallel ranks share; None where each has the whole.
        is_trained: Whether they have a gradient; all do without adapters.
        bits: Of an element of weights that are quantized, lengths of blocks included; None for the others.
    """

    name: str
    size: int
    copies: int = 1
    expert: bool = False
    is_matrix: bool = False
    is_linear: bool = False
    is_shared: bool = False
    shape: tuple[int, ...] = ()
    split: int | None = None
    is_trained: bool = True
    bits: float | None = None

    @property
    def elements(self) -> int:
        """Elements of all copies together."""
        return self.size * self.copies


def chunk_tensors(
    fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backend: str = "local"
) -> list[ParameterTensor]:
    """Return the parameters of a chunk on one rank.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model.
        chunk: The part of the model that the chunk holds.
        backend: The layers: ``"local"`` or ``"transformer_engine"``. With tensor parallelism the second keeps the
            compressing projections of multi-latent attention whole on every rank.
    """
    return [
        trained
        for prefix, tensor in _of_chunk(fields, layout, chunk, backend)
        for trained in _with_adapters(fields, layout, prefix, tensor)
    ]


def whole_shapes(fields: GPTFields) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of the model by their names in a checkpoint; experts are stacked."""
    return {
        prefix + tensor.name: (tensor.copies,) * tensor.expert + (tensor.shape or (tensor.size,))
        for prefix, tensor in _of_chunk(fields, ParallelLayout(), _whole(fields), "local")
    }


def _with_adapters(
    fields: GPTFields, layout: ParallelLayout, prefix: str, tensor: ParameterTensor
) -> Iterator[ParameterTensor]:
    """Yield a tensor, and the adapters that are on it."""
    if fields.adapters is None:
        _, part = fields.tower.get(prefix + tensor.name, ((), LANGUAGE_MODEL))
        yield replace(tensor, is_trained=part not in fields.frozen) if fields.frozen else tensor
        return
    own = fields.adapters.of.get(prefix + tensor.name)
    is_saved = own is not None and own.is_saved
    is_quantized = tensor.is_linear and prefix.startswith("decoder.") and not is_saved
    yield replace(tensor, is_trained=is_saved, bits=_bits(fields.adapters.lora) if is_quantized else None)
    pairs = own.pairs if own is not None else ()
    if not tensor.expert:
        for pair in pairs:
            yield from _pair(pair, layout.tensor_model_parallel_size, tensor)
        return
    # Experts may differ in rank by a pattern; the rank with most adapters counts.
    of_ranks: dict[int, list[Pair]] = {}
    for pair in pairs:
        of_ranks.setdefault(pair.expert // tensor.copies, []).append(pair)
    most = max(of_ranks.values(), key=lambda of_rank: sum(pair.rank for pair in of_rank), default=[])
    for pair in most:
        yield from _pair(pair, layout.expert_tensor_size, tensor)


def _bits(lora: LoRA | None) -> float | None:
    """Return the bits of an element in blocks of 64, whose lengths have 32 bits, or 8 in blocks of 256."""
    if lora is None or lora.quantization is None:
        return None
    return 4 + (8 / 64 + 32 / 64 / 256 if lora.double_quantization else 32 / 64)


def _pair(pair: Pair, ranks: int, tensor: ParameterTensor) -> Iterator[ParameterTensor]:
    """Yield A, B, and with DoRA the lengths, as tensor-parallel ranks share them."""
    axis_of_a = 0 if pair.looks_up else 1  # of the weight
    of_a, of_b = (ranks if tensor.split == axis else 1 for axis in (axis_of_a, 1 - axis_of_a))
    if pair.has_a:
        yield ParameterTensor("lora_A", pair.rank * pair.columns // of_a, expert=tensor.expert, is_matrix=True)
    yield ParameterTensor("lora_B", pair.rows * pair.rank // of_b, expert=tensor.expert, is_matrix=True)
    if pair.has_lengths:
        yield ParameterTensor("lora_magnitude_vector", pair.rows // of_b)


_Placed = Iterator[tuple[str, ParameterTensor]]  # a prefix of the name, and the tensor


def _of_chunk(fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backend: str) -> _Placed:
    tp, hidden = layout.tensor_model_parallel_size, fields.hidden_size
    staged = layout.pipeline_model_parallel_size > 1
    whole = (fields.padded_vocab_size, hidden)
    vocabulary = fields.padded_vocab_size // tp * hidden
    if chunk.embedding or chunk.mtp:
        shared = staged and (fields.tied or fields.mtp_num_layers > 0)
        yield (
            "embedding.",
            ParameterTensor(
                "word_embeddings.weight", vocabulary, is_matrix=True, is_shared=shared, shape=whole, split=0
            ),
        )
        if fields.learned_positions:
            size = fields.learned_positions * hidden
            yield "embedding.", ParameterTensor("position_embeddings.weight", size, is_matrix=True)
    mixers = [fields.architecture.has_delta_net(layer) for layer in range(fields.num_layers)]
    kinds = {
        kind: list(_of_layer(fields, layout, *kind, backend)) for kind in set(zip(fields.is_moe, mixers, strict=True))
    }
    for layer in chunk.layers:
        yield from ((f"decoder.layers.{layer}.", tensor) for tensor in kinds[fields.is_moe[layer], mixers[layer]])
    # Without multi-token prediction the final norm comes before the output layer, with it after the last layer.
    if (fields.num_layers - 1 in chunk.layers) if fields.mtp_num_layers else chunk.output:
        yield from (("decoder.", tensor) for tensor in _norm(fields, "final_layernorm.", hidden))
    for ahead in range(chunk.mtp):
        prefix = f"mtp.layers.{ahead}."
        for norm in ("enorm.", "hnorm."):
            yield from ((prefix, tensor) for tensor in _norm(fields, norm, hidden))
        yield prefix, _matrix("eh_proj.weight", (hidden, 2 * hidden), tp, 0)
        yield from ((f"{prefix}transformer_layer.", tensor) for tensor in kinds[fields.is_moe[-1], mixers[-1]])
        yield from ((prefix, tensor) for tensor in _norm(fields, "final_layernorm.", hidden))
    if chunk.output and fields.scores:
        yield "", ParameterTensor("output_layer.weight", hidden, is_matrix=True, shape=(1, hidden))
    elif chunk.output and not (fields.tied and chunk.embedding):
        name, shared = (
            "embedding.word_embeddings.weight" if fields.tied else "output_layer.weight",
            staged and fields.tied,
        )
        yield "", ParameterTensor(name, vocabulary, is_matrix=True, is_shared=shared, shape=whole, split=0)
    for name, (shape, _) in fields.tower.items() if chunk.embedding else ():
        yield "", ParameterTensor(name, prod(shape), is_matrix=len(shape) == 2, shape=shape)


def _of_layer(
    fields: GPTFields, layout: ParallelLayout, is_moe: bool, has_delta_net: bool, backend: str
) -> Iterator[ParameterTensor]:
    tp, norms = layout.tensor_model_parallel_size, fields.architecture.layer_norms
    if has_delta_net:
        if norms != "after":
            yield from _norm(fields, "input_layernorm.", fields.hidden_size)
        yield from _delta_net(fields, tp)
    elif fields.attention is None:
        if norms != "after":
            yield from _norm(fields, "self_attention.linear_qkv.layer_norm_", fields.hidden_size)
        yield from _grouped_attention(fields, tp)
    else:
        yield from _norm(fields, "input_layernorm.", fields.hidden_size)
        yield from _latent_attention(fields, fields.attention, tp, backend)
    if fields.transformer.get("softmax_type") == "learnable":
        yield ParameterTensor("self_attention.core_attention.softmax_offset", fields.num_attention_heads // tp)
    if norms != "before":
        yield from _norm(fields, "self_attn_bda.norm.", fields.hidden_size)
    if norms != "after":
        name = "pre_mlp_layernorm." if is_moe else "mlp.linear_fc1.layer_norm_"
        yield from _norm(fields, name, fields.hidden_size)
    if is_moe:
        assert fields.experts is not None
        yield from _experts(fields, fields.experts, layout)
    else:
        has_bias = fields.add_bias_linear or fields.architecture.mlp_bias
        yield from _mlp(replace(fields, add_bias_linear=has_bias), "mlp.", fields.ffn_hidden_size, tp)
    if norms != "before":
        yield from _norm(fields, "mlp_bda.norm.", fields.hidden_size)


def _grouped_attention(fields: GPTFields, tp: int) -> Iterator[ParameterTensor]:
    hidden, queries = fields.hidden_size, fields.num_attention_heads * fields.kv_channels
    rows = (2 if fields.attention_output_gate else 1) * queries + 2 * fields.num_query_groups * fields.kv_channels
    if fields.architecture.head_norms == "after_rotation":
        for name in ("q_layernorm", "k_layernorm"):
            yield from _norm(fields, f"self_attention.core_attention.{name}.", fields.kv_channels)
    yield _matrix("self_attention.linear_proj.weight", (hidden, queries), tp, 1)
    if fields.add_bias_linear or fields.architecture.attention_output_bias:
        yield ParameterTensor("self_attention.linear_proj.bias", hidden)
    yield _matrix("self_attention.linear_qkv.weight", (rows, hidden), tp, 0)
    if fields.add_bias_linear or fields.add_qkv_bias:
        yield ParameterTensor("self_attention.linear_qkv.bias", rows // tp)
    if fields.qk_layernorm:
        for name in ("q_layernorm", "k_layernorm"):
            yield from _norm(fields, f"self_attention.{name}.", fields.kv_channels)
    if fields.architecture.head_norms == "all_heads":
        for name, heads in (("q_layernorm", fields.num_attention_heads), ("k_layernorm", fields.num_query_groups)):
            yield ParameterTensor(f"self_attention.{name}.weight", heads * fields.kv_channels // tp)


def _delta_net(fields: GPTFields, tp: int) -> Iterator[ParameterTensor]:
    sizes, hidden = fields.architecture.delta_net, fields.hidden_size
    assert sizes is not None
    keys, values, heads = fields.architecture.delta_net_channels
    mixed, kernel = 2 * keys + values, sizes["linear_conv_kernel_dim"]
    yield _matrix("self_attention.linear_in.weight", (mixed + values + 2 * heads, hidden), tp, 0)
    yield ParameterTensor("self_attention.conv1d.weight", mixed * kernel // tp, shape=(mixed, 1, kernel))
    yield ParameterTensor("self_attention.A_log.weight", heads // tp)
    yield ParameterTensor("self_attention.dt_bias.weight", heads // tp)
    yield ParameterTensor("self_attention.out_norm.weight", sizes["linear_value_head_dim"])
    yield _matrix("self_attention.linear_out.weight", (hidden, values), tp, 1)


def _latent_attention(fields: GPTFields, latent: LatentAttention, tp: int, backend: str) -> Iterator[ParameterTensor]:
    hidden, heads, queries, keys = (
        fields.hidden_size,
        fields.num_attention_heads,
        latent.q_lora_rank,
        latent.kv_lora_rank,
    )
    whole = 1 if backend == "transformer_engine" else tp  # ranks that share the compressing projections
    # Megatron counts the output of attention in heads of v_head_dim.
    yield _matrix("self_attention.linear_proj.weight", (hidden, heads * latent.v_head_dim), tp, 1)
    if fields.add_bias_linear:
        yield ParameterTensor("self_attention.linear_proj.bias", hidden)
    if queries is None:
        yield _matrix("self_attention.linear_q_proj.weight", (heads * latent.query_width, hidden), tp, 0)
    else:
        yield _matrix("self_attention.linear_q_down_proj.weight", (queries, hidden), whole, 0)
        yield _matrix("self_attention.linear_q_up_proj.weight", (heads * latent.query_width, queries), tp, 0)
    compressed = (keys + latent.qk_pos_emb_head_dim, hidden)
    yield _matrix("self_attention.linear_kv_down_proj.weight", compressed, whole, 0)
    width = latent.qk_head_dim + latent.v_head_dim
    yield _matrix("self_attention.linear_kv_up_proj.weight", (heads * width, keys), tp, 0)
    if fields.qk_layernorm and queries is not None:
        yield from _norm(fields, "self_attention.linear_q_up_proj.layer_norm_", queries)
    if fields.qk_layernorm:
        yield from _norm(fields, "self_attention.linear_kv_up_proj.layer_norm_", keys)


def _mlp(
    fields: GPTFields,
    prefix: str,
    width: int,
    tp: int,
    copies: int = 1,
    expert: bool = False,
    hidden: int | None = None,
) -> Iterator[ParameterTensor]:
    hidden = hidden or fields.hidden_size
    inner = (2 if fields.gated_linear_unit else 1) * width
    yield _matrix(f"{prefix}linear_fc1.weight", (inner, hidden), tp, 0, copies, expert)
    if fields.add_bias_linear:
        yield ParameterTensor(f"{prefix}linear_fc1.bias", inner // tp, copies, expert)
    yield _matrix(f"{prefix}linear_fc2.weight", (hidden, width), tp, 1, copies, expert)
    if fields.add_bias_linear:
        yield ParameterTensor(f"{prefix}linear_fc2.bias", hidden, copies, expert)


def _experts(fields: GPTFields, experts: Experts, layout: ParallelLayout) -> Iterator[ParameterTensor]:
    tp, hidden, latent = layout.tensor_model_parallel_size, fields.hidden_size, experts.latent_width
    biased = replace(fields, add_bias_linear=fields.add_bias_linear or fields.architecture.expert_bias)
    yield ParameterTensor("mlp.router.weight", experts.count * hidden, is_matrix=True, shape=(experts.count, hidden))
    if biased.add_bias_linear:
        yield ParameterTensor("mlp.router.bias", experts.count)
    if latent is not None:
        for name, shape in (("fc1_latent_proj", (latent, hidden)), ("fc2_latent_proj", (hidden, latent))):
            yield _matrix(f"mlp.{name}.weight", shape)
    here = experts.count // layout.expert_model_parallel_size
    yield from _mlp(biased, "mlp.experts.experts.", experts.width, layout.expert_tensor_size, here, True, latent)
    if experts.shared_width:
        yield from _mlp(fields, "mlp.shared_experts.", experts.shared_width, tp)
        if experts.shared_gate:
            yield ParameterTensor("mlp.shared_experts.gate_weight", hidden, is_matrix=True, shape=(1, hidden))


def _norm(fields: GPTFields, stem: str, width: int) -> Iterator[ParameterTensor]:
    yield ParameterTensor(f"{stem}weight", width)
    if fields.layer_norm_has_bias:
        yield ParameterTensor(f"{stem}bias", width)


def _matrix(
    name: str,
    shape: tuple[int, int],
    ranks: int = 1,
    split: int | None = None,
    copies: int = 1,
    expert: bool = False,
) -> ParameterTensor:
    """Return a weight of a linear layer; ``ranks`` share it along ``split``."""
    size = shape[0] * shape[1] // ranks
    axis = split if ranks > 1 else None
    return ParameterTensor(name, size, copies, expert, is_matrix=True, is_linear=True, shape=shape, split=axis)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank, in elements.

    Args:
        dense: Parameters outside routed experts.
        expert: Parameters of routed experts.
        trained_dense: Of ``dense``, those that have a gradient.
        trained_expert: Of ``expert``, likewise.
    """

    dense: int
    expert: int
    trained_dense: int
    trained_expert: int

    @property
    def total(self) -> int:
        """All that the rank holds."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of a whole model, in elements; embedding and output layer are counted, a tied one once.

    Args:
        total: All, adapters included.
        active: Parameters that one token uses: of a layer's routed experts, only ``moe_router_topk``.
        trained: Those that have a gradient; without adapters all.
    """

    total: int
    active: int
    trained: int


def rank_parameters(
    fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, backend: str = "local"
) -> ParameterCount:
    """Return how many parameters each rank of a pipeline stage holds.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model.
        pipeline_rank: The stage, from 0.
        backend: The layers, ``"local"`` or ``"transformer_engine"``; they differ only for multi-latent attention.
    """
    tensors = [tensor for chunk in rank_tensors(fields, layout, pipeline_rank, backend) for tensor in chunk]
    dense, expert = ([tensor for tensor in tensors if tensor.expert is kind] for kind in (False, True))
    trained = [sum(tensor.elements for tensor in kind if tensor.is_trained) for kind in (dense, expert)]
    return ParameterCount(sum(tensor.elements for tensor in dense), sum(tensor.elements for tensor in expert), *trained)


def rank_tensors(
    fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, backend: str = "local"
) -> list[list[ParameterTensor]]:
    """Return the parameter tensors of each rank of a pipeline stage, chunk by chunk; arguments as above."""
    chunks = stage_layers(fields, layout)[pipeline_rank]
    return [chunk_tensors(fields, layout, chunk, backend) for chunk in chunks]


def model_parameters(fields: GPTFields) -> ModelParameters:
    """Return the number of parameters of the model, which does not depend on the ranks."""
    tensors = chunk_tensors(fields, ParallelLayout(), _whole(fields))
    total = sum(tensor.elements for tensor in tensors)
    trained = sum(tensor.elements for tensor in tensors if tensor.is_trained)
    idle = 0 if fields.experts is None else 1 - fields.experts.topk / fields.experts.count
    return ModelParameters(total, total - round(idle * sum(t.elements for t in tensors if t.expert)), trained)


def _whole(fields: GPTFields) -> ChunkLayers:
    return ChunkLayers(tuple(range(fields.num_layers)), embedding=True, output=True, mtp=fields.mtp_num_layers)
