# SPDX-License-Identifier: Apache-2.0
"""The sizes of an ``MCoreGPT`` that determine memory and parameters, and the layers of each pipeline rank.

The rest of ``planning`` takes a model as :class:`GPTFields`. Other files check whether the values are allowed
(``layers/transformer_config.py``, ``config/layout.py``); here they are not checked.

:func:`stage_layers` splits the layers, chunk by chunk, as Megatron builds them: evenly, with the embedding or the loss
counted as a layer, with a first or last stage of its own size, or as ``pipeline_model_parallel_layout`` says. Pure
arithmetic.

Source: ``get_num_layers_to_build`` and ``get_transformer_layer_offset`` of megatron-core 0.16.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from lightning_mcore.config.architecture import Architecture, needs_torch_backend
from lightning_mcore.config.flops import moe_layers
from lightning_mcore.config.layout import ModelShape, ParallelLayout
from lightning_mcore.config.lora import AdaptedModel
from lightning_mcore.config.preference import Preference
from lightning_mcore.config.vision import Vision

FP32 = 4
"""Bytes of a number in fp32."""

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-latent attention, in channels; the defaults are those of ``MLATransformerConfig`` 0.16.1."""

    q_lora_rank: int | None = 512  # compressed queries; None if they are not compressed
    kv_lora_rank: int = 512  # compressed keys and values
    qk_head_dim: int = 128  # the part of a head of queries and keys that is not rotated
    qk_pos_emb_head_dim: int = 64  # the part that is rotated; all heads share the rotated part of the keys
    v_head_dim: int = 128  # a head of values

    @property
    def query_width(self) -> int:
        """A whole head of queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True)
class Experts:
    """Sizes of the layers with experts."""

    count: int  # routed experts of a layer
    topk: int  # number of routed experts that process a token
    width: int  # inner width of a routed expert
    shared_width: int  # inner width of the shared experts together; 0 for none
    shared_gate: bool  # whether the output of the shared experts has a gate, a weight of [1, h]
    latent_width: int | None  # width that routed experts read and write; None for the hidden size
    capacity_factor: float | None  # ``moe_expert_capacity_factor``; None if no token is dropped
    pads_to_capacity: bool  # whether every expert computes on as many tokens as it may take
    dispatcher: str  # ``moe_token_dispatcher_type``
    grouped: bool  # whether TransformerEngine's grouped products compute the experts


@dataclass(frozen=True)
class Recompute:
    """What backward recomputes instead of keeping it."""

    granularity: str | None  # ``"full"``, ``"selective"`` or None
    method: str | None  # with ``"full"``: ``"uniform"`` or ``"block"``
    num_layers: int  # with ``"uniform"``, layers of a group; with ``"block"``, recomputed layers of a stage's chunk
    modules: frozenset[str]  # with ``"selective"``: the recomputed parts of a layer
    distribute: bool  # whether tensor-parallel ranks share the tensors kept of a recomputed layer


@dataclass(frozen=True)
class GPTFields:
    """The sizes of a GPT: those of ``TransformerConfig``, with its names, and those of ``MCoreGPT``."""

    vocab_size: int  # number of existing tokens
    padded_vocab_size: int  # rows of the embedding
    seq_length: int  # tokens of a sequence
    learned_positions: int  # rows of the embedding of positions; 0 with rotary positions or none
    rotary_channels: int  # channels of a head that are rotated; 0 for none
    tied: bool  # whether the output layer is the embedding's transpose
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    gated_linear_unit: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    layer_norm_has_bias: bool
    qk_layernorm: bool
    attention_output_gate: bool
    hidden_dropout: float
    attention_dropout: float
    fp32_residual_connection: bool
    mtp_num_layers: int
    attention: LatentAttention | None  # sizes of multi-latent attention; None for grouped heads
    experts: Experts | None  # sizes of the layers with experts; None for a dense model
    is_moe: tuple[bool, ...]  # for each layer, whether its feed-forward part is a mixture of experts
    recompute: Recompute  # what backward recomputes
    shape: ModelShape  # the sizes that a layout must divide, for ``ParallelLayout.validate_model``
    transformer: Mapping[str, Any]  # the given fields of ``TransformerConfig``
    architecture: Architecture = field(default_factory=Architecture)  # what Megatron's config has no field for
    scores: bool = False  # whether the output layer gives each token one score, as in a reward model, instead of logits
    adapters: AdaptedModel | None = None  # what is trained beside frozen weights; None where all are
    tower: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # shape and part, by name
    frozen: frozenset[str] = frozenset()  # parts of a vision-language model that are not trained
    vision: Vision | None = None  # the settings of the tower; None for a text-only model
    image_tokens: int = 0  # tokens of images in a row; 0 if unknown

    @property
    def output_size(self) -> int:
        """Rows of the output layer."""
        return 1 if self.scores else self.padded_vocab_size

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "GPTFields":
        """Read the arguments of ``MCoreGPT`` (those of ``from_pretrained`` must be resolved first).

        Raises ValueError for a name or a size that is unknown.
        """
        missing = [name for name in ("vocab_size", "seq_length", "transformer") if model.get(name) is None]
        given: Mapping[str, Any] = model.get("transformer") or {}
        missing += [f"transformer.{name}" for name in _REQUIRED if given.get(name) is None] if not missing else []
        if missing:
            raise ValueError(f"the model lacks {' and '.join(missing)}; give the arguments of MCoreGPT")
        multiple = int(_given_or(model, "make_vocab_size_divisible_by", 128))
        padded = -(-model["vocab_size"] // multiple) * multiple
        positions = _given_or(model, "position_embedding_type", "rope")
        heads, hidden = given["num_attention_heads"], given["hidden_size"]
        latent = _latent_attention(given)
        kv_channels = int(_given_or(given, "kv_channels", hidden // heads))
        rotated = latent.qk_pos_emb_head_dim if latent else int(kv_channels * _given_or(model, "rotary_percent", 1.0))
        normalization = _given_or(given, "normalization", "RMSNorm" if latent else "LayerNorm")
        ffn_hidden_size = int(_given_or(given, "ffn_hidden_size", 4 * hidden))
        architecture = Architecture.of(model.get("architecture"))
        sizes = SimpleNamespace(**given, delta_net_heads=architecture.delta_net_heads)
        shape = ModelShape.from_config(sizes, seq_length=model["seq_length"], vocab_size=padded)
        return cls(
            vocab_size=model["vocab_size"],
            padded_vocab_size=padded,
            seq_length=model["seq_length"],
            learned_positions=model["seq_length"] if positions == "learned_absolute" else 0,
            rotary_channels=rotated if latent or positions in ("rope", "yarn") else 0,
            tied=bool(model.get("share_embeddings_and_output_weights")),
            num_layers=given["num_layers"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=int(_given_or(given, "num_query_groups", heads)),
            kv_channels=kv_channels,
            ffn_hidden_size=ffn_hidden_size,
            gated_linear_unit=bool(given.get("gated_linear_unit")),
            add_bias_linear=bool(_given_or(given, "add_bias_linear", True)),
            add_qkv_bias=bool(given.get("add_qkv_bias")),
            layer_norm_has_bias=normalization == "LayerNorm",
            qk_layernorm=bool(given.get("qk_layernorm")) and not given.get("qk_l2_norm"),
            attention_output_gate=bool(given.get("attention_output_gate")),
            hidden_dropout=float(_given_or(given, "hidden_dropout", 0.0)),  # MCoreGPT's defaults, not Megatron's 0.1
            attention_dropout=float(_given_or(given, "attention_dropout", 0.0)),
            fp32_residual_connection=bool(given.get("fp32_residual_connection")),
            mtp_num_layers=int(given.get("mtp_num_layers") or 0),
            attention=latent,
            experts=_experts(given, ffn_hidden_size),
            is_moe=tuple(moe_layers(given)),
            recompute=_recompute(given),
            shape=shape,
            transformer=given,
            architecture=architecture,
            scores="preference" in model and Preference.of(model["preference"]).gives_scores,
        )


def backend_of(model: Mapping[str, Any], device_type: str) -> str:
    """Return the layers of a model, ``"local"`` or ``"transformer_engine"``, on GPUs with TransformerEngine."""
    choice: str = model.get("transformer_impl") or "auto"
    if choice != "auto":
        return choice
    is_local = device_type != "cuda" or needs_torch_backend(model.get("architecture"))
    return "local" if is_local else "transformer_engine"


def _given_or(values: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    value = values.get(name)
    return otherwise if value is None else value


def _latent_attention(given: Mapping[str, Any]) -> LatentAttention | None:
    if not given.get("multi_latent_attention"):
        return None
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    sizes = {name: given[name] for name in names if given.get(name) is not None}
    return LatentAttention(q_lora_rank=given.get("q_lora_rank", 512), **sizes)


def _experts(given: Mapping[str, Any], ffn_hidden_size: int) -> Experts | None:
    if given.get("num_moe_experts") is None:
        return None
    return Experts(
        count=given["num_moe_experts"],
        topk=int(_given_or(given, "moe_router_topk", 2)),
        width=int(_given_or(given, "moe_ffn_hidden_size", ffn_hidden_size)),
        shared_width=int(_given_or(given, "moe_shared_expert_intermediate_size", 0)),
        shared_gate=bool(given.get("moe_shared_expert_gate")),
        latent_width=given.get("moe_latent_size"),
        capacity_factor=given.get("moe_expert_capacity_factor"),
        pads_to_capacity=bool(given.get("moe_pad_expert_input_to_capacity")),
        dispatcher=_given_or(given, "moe_token_dispatcher_type", "allgather"),
        grouped=bool(given.get("moe_grouped_gemm")),
    )


def _recompute(given: Mapping[str, Any]) -> Recompute:
    granularity = given.get("recompute_granularity")
    modules = set(_given_or(given, "recompute_modules", ["core_attn"])) if granularity == "selective" else set()
    if given.get("moe_layer_recompute"):  # Megatron's older name for it
        granularity, modules = "selective", modules | {"moe"}
    return Recompute(
        granularity=granularity,
        method=given.get("recompute_method"),
        num_layers=int(_given_or(given, "recompute_num_layers", 1)),
        modules=frozenset(modules),
        distribute=bool(given.get("distribute_saved_activations")),
    )


@dataclass(frozen=True)
class ChunkLayers:
    """The part of the model that one virtual stage of one pipeline rank holds."""

    layers: tuple[int, ...]  # indices of its decoder layers in the whole model, from 0, in order
    embedding: bool  # whether the chunk has the embedding
    output: bool  # whether the chunk has the output layer and the loss
    mtp: int = 0  # layers of multi-token prediction; with any, it has an embedding, perhaps a copy


def stage_layers(fields: GPTFields, layout: ParallelLayout) -> list[list[ChunkLayers]]:
    """Return the chunks of every pipeline rank.

    Indexed by pipeline rank, then by virtual stage.
    """
    pp, chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    stages = layout.pipeline_stages
    if stages:
        counts = [stage.count("t") for stage in stages]
        mtp = [stage.count("m") for stage in stages]
    else:
        counts = _counts(fields, pp, chunks)
        mtp = [0] * (pp * chunks - 1) + [fields.mtp_num_layers]
    starts = [0, *accumulate(counts)]
    last = pp * chunks - 1

    def chunk(stage: int) -> ChunkLayers:
        numbers = range(starts[stage], starts[stage] + counts[stage])
        return ChunkLayers(tuple(numbers), embedding=stage == 0, output=stage == last, mtp=mtp[stage])

    return [[chunk(index * pp + rank) for index in range(chunks)] for rank in range(pp)]


def _counts(fields: GPTFields, pp: int, chunks: int) -> list[int]:
    """Return the decoder layers of every virtual stage, in the order of the layers."""
    shape = fields.shape
    first, last = shape.num_layers_in_first_pipeline_stage, shape.num_layers_in_last_pipeline_stage
    counted = (shape.account_for_embedding_in_pipeline_split, shape.account_for_loss_in_pipeline_split)
    if first is not None or last is not None:
        given = [size for size in (first, last) if size is not None]
        others = pp - len(given)
        middle = (fields.num_layers - sum(given)) // others if others else 0
        of_ranks = [middle] * pp
        if first is not None:
            of_ranks[0] = first
        if last is not None:
            of_ranks[-1] = last
    else:
        of_ranks = [(fields.num_layers + sum(counted)) // pp] * pp
    counts = [of_ranks[rank] // chunks for _ in range(chunks) for rank in range(pp)]
    counts[0] -= counted[0]
    counts[-1] -= counted[1]
    return counts
