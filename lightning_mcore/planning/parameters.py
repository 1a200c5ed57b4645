# SPDX-License-Identifier: Apache-2.0
"""The parameters of one chunk on one rank, tensor by tensor, as Megatron's modules make them, and how many there are.

The single tensors matter to ``state_memory.py`` because the distributed optimizer pads each of them; their sums are the
parameters of a rank and of the whole model. Biases of row-parallel layers, norms, routers and gates are whole on every
tensor-parallel rank. All ranks of a stage hold as many: axes divide evenly (``config/layout.py`` refuses the rest). The
sum over ranks is more than the model has: besides what is whole on every rank, a tied embedding is on the first and on
the last stage, and multi-token prediction has an embedding of its own stage. Pure arithmetic.

Source: ``GPTModel``, ``SelfAttention``, ``MLASelfAttention``, ``MLP``, ``MoELayer``, ``SharedExpertMLP`` and
``MultiTokenPredictionLayer`` of megatron-core 0.16.1, in the order of ``named_parameters``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.model import ChunkLayers, Experts, GPTFields, LatentAttention, stage_layers


@dataclass(frozen=True)
class ParameterTensor:
    """Parameters of one kind and size.

    Args:
        name: The end of their name.
        size: Elements of one of them on this rank.
        copies: How many there are, such as one for each expert.
        expert: Whether they belong to routed experts.
        is_matrix: Whether they have two dimensions.
        is_linear: Whether they are the weight of a linear layer inside a transformer layer, which FP8 may hold.
        is_shared: Whether another stage has a copy of them: an embedding that is tied, or that predicts more tokens.
    """

    name: str
    size: int
    copies: int = 1
    expert: bool = False
    is_matrix: bool = False
    is_linear: bool = False
    is_shared: bool = False

    @property
    def elements(self) -> int:
        """Elements of all of them together."""
        return self.size * self.copies


def chunk_tensors(
    fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backend: str = "local"
) -> list[ParameterTensor]:
    """Return the parameters of a chunk on one rank.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model.
        chunk: What of the model the chunk holds.
        backend: Whose layers: ``"local"`` or ``"transformer_engine"``. With tensor parallelism the second keeps the
            compressing projections of multi-latent attention whole on every rank.
    """
    return list(_of_chunk(fields, layout, chunk, backend))


def _of_chunk(fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backend: str) -> Iterator[ParameterTensor]:
    tp, hidden = layout.tensor_model_parallel_size, fields.hidden_size
    staged = layout.pipeline_model_parallel_size > 1
    vocabulary = fields.padded_vocab_size // tp * hidden
    if chunk.embedding or chunk.mtp:
        shared = staged and (fields.tied or fields.mtp_num_layers > 0)
        yield ParameterTensor("word_embeddings.weight", vocabulary, is_matrix=True, is_shared=shared)
        if fields.learned_positions:
            yield ParameterTensor("position_embeddings.weight", fields.learned_positions * hidden, is_matrix=True)
    kinds = {is_moe: list(_of_layer(fields, layout, is_moe, backend)) for is_moe in set(fields.is_moe)}
    for layer in chunk.layers:
        yield from kinds[fields.is_moe[layer]]
    # Without multi-token prediction the final norm stands before the output layer, with it behind the last layer.
    if (fields.num_layers - 1 in chunk.layers) if fields.mtp_num_layers else chunk.output:
        yield from _norm(fields, "final_layernorm", hidden)
    for _ in range(chunk.mtp):
        for norm in ("enorm", "hnorm"):
            yield from _norm(fields, norm, hidden)
        yield _matrix("eh_proj.weight", 2 * hidden * hidden // tp)
        yield from kinds[fields.is_moe[-1]]
        yield from _norm(fields, "final_layernorm", hidden)
    if chunk.output and not (fields.tied and chunk.embedding):
        yield ParameterTensor("output_layer.weight", vocabulary, is_matrix=True, is_shared=staged and fields.tied)


def _of_layer(fields: GPTFields, layout: ParallelLayout, is_moe: bool, backend: str) -> Iterator[ParameterTensor]:
    tp = layout.tensor_model_parallel_size
    yield from _norm(fields, "input_layernorm", fields.hidden_size)
    if fields.attention is None:
        yield from _grouped_attention(fields, tp)
    else:
        yield from _latent_attention(fields, fields.attention, tp, backend)
    yield from _norm(fields, "pre_mlp_layernorm", fields.hidden_size)
    if is_moe:
        assert fields.experts is not None
        yield from _experts(fields, fields.experts, layout)
    else:
        yield from _mlp(fields, fields.ffn_hidden_size, tp)


def _grouped_attention(fields: GPTFields, tp: int) -> Iterator[ParameterTensor]:
    hidden, queries = fields.hidden_size, fields.num_attention_heads * fields.kv_channels
    rows = (2 if fields.attention_output_gate else 1) * queries + 2 * fields.num_query_groups * fields.kv_channels
    yield _matrix("linear_proj.weight", hidden * queries // tp)
    if fields.add_bias_linear:
        yield ParameterTensor("linear_proj.bias", hidden)
    yield _matrix("linear_qkv.weight", rows * hidden // tp)
    if fields.add_bias_linear or fields.add_qkv_bias:
        yield ParameterTensor("linear_qkv.bias", rows // tp)
    if fields.qk_layernorm:
        for name in ("q_layernorm", "k_layernorm"):
            yield from _norm(fields, name, fields.kv_channels)


def _latent_attention(fields: GPTFields, latent: LatentAttention, tp: int, backend: str) -> Iterator[ParameterTensor]:
    hidden, heads = fields.hidden_size, fields.num_attention_heads
    whole = 1 if backend == "transformer_engine" else tp  # who shares the compressing projections
    # Megatron counts the output of attention in heads of v_head_dim.
    yield _matrix("linear_proj.weight", hidden * heads * latent.v_head_dim // tp)
    if fields.add_bias_linear:
        yield ParameterTensor("linear_proj.bias", hidden)
    if latent.q_lora_rank is None:
        yield _matrix("linear_q_proj.weight", heads * latent.query_width * hidden // tp)
    else:
        yield _matrix("linear_q_down_proj.weight", latent.q_lora_rank * hidden // whole)
        yield _matrix("linear_q_up_proj.weight", heads * latent.query_width * latent.q_lora_rank // tp)
    yield _matrix("linear_kv_down_proj.weight", (latent.kv_lora_rank + latent.qk_pos_emb_head_dim) * hidden // whole)
    width = latent.qk_head_dim + latent.v_head_dim
    yield _matrix("linear_kv_up_proj.weight", heads * width * latent.kv_lora_rank // tp)
    if fields.qk_layernorm and latent.q_lora_rank is not None:
        yield from _norm(fields, "q_layernorm", latent.q_lora_rank)
    if fields.qk_layernorm:
        yield from _norm(fields, "kv_layernorm", latent.kv_lora_rank)


def _mlp(
    fields: GPTFields, width: int, tp: int, copies: int = 1, expert: bool = False, hidden: int | None = None
) -> Iterator[ParameterTensor]:
    hidden = hidden or fields.hidden_size
    inner = (2 if fields.gated_linear_unit else 1) * width
    yield _matrix("linear_fc1.weight", inner * hidden // tp, copies, expert)
    if fields.add_bias_linear:
        yield ParameterTensor("linear_fc1.bias", inner // tp, copies, expert)
    yield _matrix("linear_fc2.weight", hidden * width // tp, copies, expert)
    if fields.add_bias_linear:
        yield ParameterTensor("linear_fc2.bias", hidden, copies, expert)


def _experts(fields: GPTFields, experts: Experts, layout: ParallelLayout) -> Iterator[ParameterTensor]:
    tp, hidden, latent = layout.tensor_model_parallel_size, fields.hidden_size, experts.latent_width
    yield ParameterTensor("router.weight", experts.count * hidden, is_matrix=True)
    if fields.add_bias_linear:
        yield ParameterTensor("router.bias", experts.count)
    if latent is not None:
        for name in ("fc1_latent_proj", "fc2_latent_proj"):
            yield _matrix(f"{name}.weight", latent * hidden)
    here = experts.count // layout.expert_model_parallel_size
    yield from _mlp(fields, experts.width, layout.expert_tensor_size, here, True, latent)
    if experts.shared_width:
        yield from _mlp(fields, experts.shared_width, tp)
        if experts.shared_gate:
            yield ParameterTensor("gate_weight", hidden, is_matrix=True)


def _norm(fields: GPTFields, name: str, width: int) -> Iterator[ParameterTensor]:
    yield ParameterTensor(f"{name}.weight", width)
    if fields.layer_norm_has_bias:
        yield ParameterTensor(f"{name}.bias", width)


def _matrix(name: str, size: int, copies: int = 1, expert: bool = False) -> ParameterTensor:
    return ParameterTensor(name, size, copies, expert, is_matrix=True, is_linear=True)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank, in elements.

    Args:
        dense: Those outside routed experts.
        expert: Those of routed experts.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of a whole model, in elements; embedding and output layer are counted, a tied one once.

    Args:
        total: All.
        active: Those that one token meets: of the routed experts of a layer, the ``moe_router_topk`` it goes to.
    """

    total: int
    active: int


def rank_parameters(
    fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, backend: str = "local"
) -> ParameterCount:
    """Return how many parameters each rank of a pipeline stage holds.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model.
        pipeline_rank: The stage, from 0.
        backend: Whose layers, ``"local"`` or ``"transformer_engine"``; they differ for multi-latent attention alone.
    """
    tensors = [tensor for chunk in rank_tensors(fields, layout, pipeline_rank, backend) for tensor in chunk]
    expert = sum(tensor.elements for tensor in tensors if tensor.expert)
    return ParameterCount(dense=sum(tensor.elements for tensor in tensors) - expert, expert=expert)


def rank_tensors(
    fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, backend: str = "local"
) -> list[list[ParameterTensor]]:
    """Return the parameter tensors of each rank of a pipeline stage, chunk by chunk; arguments as above."""
    chunks = stage_layers(fields, layout)[pipeline_rank]
    return [chunk_tensors(fields, layout, chunk, backend) for chunk in chunks]


def model_parameters(fields: GPTFields) -> ModelParameters:
    """Return how many parameters the model has, on however many ranks."""
    whole = ChunkLayers(tuple(range(fields.num_layers)), embedding=True, output=True, mtp=fields.mtp_num_layers)
    tensors = chunk_tensors(fields, ParallelLayout(), whole)
    total = sum(tensor.elements for tensor in tensors)
    if fields.experts is None:
        return ModelParameters(total, total)
    idle = 1 - fields.experts.topk / fields.experts.count
    return ModelParameters(total, total - round(idle * sum(t.elements for t in tensors if t.expert)))
