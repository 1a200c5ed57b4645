# SPDX-License-Identifier: Apache-2.0
"""The model families of this package, each a table; ``family.py`` explains the entries."""

from dataclasses import replace
from typing import Any

from lightning_mcore.hf.config_rules import Config, Constants, Derived, Fields, Only, Same, Unused, refuse_unless
from lightning_mcore.hf.decoder_rules import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    DECODER,
    HEAD_SIZE,
    JOINED_ATTENTION,
    JOINED_MLP,
    LATENT_ROPE,
    LAYER_WINDOWS,
    MLP,
    MLP_BIAS,
    MLP_BIASES,
    MULTI_TOKEN,
    MULTI_TOKEN_LAYERS,
    ONE_DROPOUT,
    OPTIONAL_WINDOW,
    OUTSIDE,
    PARTIAL_ROPE,
    PRETRAINING_TP,
    QK_NORM,
    QKV_BIAS,
    REPEATED,
    UNROTATED_LAYERS,
    WINDOW,
    WINDOWS,
    WITHOUT_POSITIONS,
)
from lightning_mcore.hf.delta_net_families import DELTA_NETS, WITH_TOWERS
from lightning_mcore.hf.expert_rules import (
    ALL_LAYERS,
    CHOSEN_EXPERTS,
    EXPERT_SIZES,
    EXPERTS,
    GATED_SHARED_EXPERT,
    GATED_SHARED_EXPERT_WEIGHTS,
    LOCAL_EXPERTS,
    NO_ROUTER_LOSS,
    NORMALISED_ROUTER,
    NUM_EXPERTS,
    SIGMOID_EXPERT_WEIGHTS,
    SIGMOID_EXPERTS,
    SOFTMAX_ROUTER,
    SPARSE_LAYERS,
    expert_weights,
)
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.variant_families import USE_BIAS, VARIANTS
from lightning_mcore.hf.weight_rules import Rename, WeightRule

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=(*DECODER, ATTENTION_BIAS, MLP_BIAS, PRETRAINING_TP),
    layer=(*ATTENTION, *ATTENTION_BIASES, *MLP, *MLP_BIASES),
    outside=OUTSIDE,
)
"""Llama 2 and 3, and models with the same layers."""

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=(*DECODER, WINDOW),
    layer=(*ATTENTION, *MLP),
    outside=OUTSIDE,
)
"""Mistral: Llama's layers with a sliding window."""

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config=(
        *DECODER,
        WINDOW,
        LOCAL_EXPERTS,
        CHOSEN_EXPERTS,
        ALL_LAYERS,
        NORMALISED_ROUTER,
        Only(
            "router_jitter_noise", 0.0, "Megatron's noise is different; give transformer={'moe_input_jitter_eps': ...}"
        ),
        *NO_ROUTER_LOSS,
    ),
    layer=(
        *ATTENTION,
        *expert_weights("block_sparse_moe.gate", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
    ),
    outside=OUTSIDE,
)
"""Mixtral: Mistral with experts in every layer."""

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=(
        *DECODER,
        WINDOWS,
        Constants({"add_qkv_bias": True}),
        Only("use_mrope", False, is_written=False),
    ),
    layer=(*ATTENTION, QKV_BIAS, *MLP),
    outside=OUTSIDE,
)
"""Qwen2 and Qwen2.5: biases in queries, keys and values, windows in some layers."""

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    config=(
        *DECODER,
        WINDOWS,
        Same("qkv_bias", "add_qkv_bias"),
        NUM_EXPERTS,
        *EXPERT_SIZES,
        *GATED_SHARED_EXPERT,
        SPARSE_LAYERS,
        SOFTMAX_ROUTER,
        *NO_ROUTER_LOSS,
    ),
    layer=(
        *ATTENTION,
        QKV_BIAS,
        *MLP,
        *GATED_SHARED_EXPERT_WEIGHTS,
    ),
    outside=OUTSIDE,
)
"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, one of which sees every token through a gate."""

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=(*DECODER, WINDOWS, ATTENTION_BIAS, Constants({"qk_layernorm": True})),
    layer=(*ATTENTION, *ATTENTION_BIASES, *QK_NORM, *MLP),
    outside=OUTSIDE,
)
"""Qwen3: norms of queries and keys, windows in some layers."""

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=(
        *DECODER,
        OPTIONAL_WINDOW,
        ATTENTION_BIAS,
        Constants({"qk_layernorm": True}),
        LOCAL_EXPERTS,
        *EXPERT_SIZES,
        SPARSE_LAYERS,
        SOFTMAX_ROUTER,
        *NO_ROUTER_LOSS,
    ),
    layer=(*ATTENTION, *ATTENTION_BIASES, *QK_NORM, *MLP, *EXPERTS),
    outside=OUTSIDE,
)
"""Qwen3-MoE: Qwen3 with experts."""


def _read_latents(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    refuse_unless("num_key_value_heads", config.get("num_key_value_heads", heads), (heads,), "each head has its own")
    turned = config["qk_rope_head_dim"]
    for key, size in (("head_dim", turned), ("qk_head_dim", config["qk_nope_head_dim"] + turned)):
        refuse_unless(key, config.get(key, size), (size,), "it follows from qk_nope_head_dim and qk_rope_head_dim")
    return {"q_lora_rank": config.get("q_lora_rank")}  # None matters: Megatron's default is a number


_LATENTS = Derived(
    ("q_lora_rank", "head_dim", "qk_head_dim"), _read_latents, lambda fields: {"q_lora_rank": fields["q_lora_rank"]}
)

_EPSILON_OF_LATENTS = 1e-6


def _read_epsilon(config: Config) -> dict[str, Any]:
    return {"latent_epsilon": _EPSILON_OF_LATENTS} if config.get("rms_norm_eps") != _EPSILON_OF_LATENTS else {}


_LATENT_EPSILON = Derived((), _read_epsilon, lambda fields: {})
"""transformers always has one epsilon in the norms of latents; ``rms_norm_eps`` is that of the others."""

_LATENT_ATTENTION: tuple[WeightRule, ...] = (
    Rename("input_layernorm.weight", "input_layernorm.weight"),
    Rename("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    Rename("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    Rename("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    Rename("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    Rename("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    Rename("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    Rename("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    Rename("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=(
        Constants({"multi_latent_attention": True, "qk_layernorm": True}),
        *WITHOUT_POSITIONS,
        _LATENT_EPSILON,
        LATENT_ROPE,
        Only("attention_bias", False, "Megatron's latent attention has none"),
        PRETRAINING_TP,
        _LATENTS,
        Same("kv_lora_rank", "kv_lora_rank", at_least=1),
        Same("qk_nope_head_dim", "qk_head_dim", at_least=1),
        Same("qk_rope_head_dim", "qk_pos_emb_head_dim", at_least=1),
        Same("v_head_dim", "v_head_dim", at_least=1),
        Only("rope_interleave", True, "Megatron rotates neighbouring channels of latent attention"),
        *SIGMOID_EXPERTS,
        Only("scoring_func", "sigmoid", is_written=False),
        Only("topk_method", "noaux_tc", is_written=False),
        Only("moe_layer_freq", 1, is_written=False),
        Unused(("aux_loss_alpha", "ep_size", "seq_aux")),
        MULTI_TOKEN_LAYERS,
    ),
    layer=(*_LATENT_ATTENTION, *MLP, *SIGMOID_EXPERT_WEIGHTS),
    outside=OUTSIDE,
    multi_token=MULTI_TOKEN,
    repeated=REPEATED,
)
"""DeepSeek-V3 and R1: latent attention, a sigmoid router with a bias, shared experts, multi-token prediction."""

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    config=(
        *WITHOUT_POSITIONS,
        PARTIAL_ROPE,
        HEAD_SIZE,
        Same("attention_bias", "add_qkv_bias"),
        Same("use_qk_norm", "qk_layernorm"),
        *SIGMOID_EXPERTS,
        MULTI_TOKEN_LAYERS,
    ),
    layer=(
        *ATTENTION,
        QKV_BIAS,
        *QK_NORM,
        *MLP,
        *SIGMOID_EXPERT_WEIGHTS,
    ),
    outside=OUTSIDE,
    multi_token=MULTI_TOKEN,
    repeated=REPEATED,
)
"""GLM-4-MoE (GLM-4.5 and 4.6): a part of each head rotated, experts as in DeepSeek-V3, multi-token prediction."""

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", config_class="deepseek_v3")
"""Kimi K2: DeepSeek-V3 under another name, which transformers does not know."""

MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    config=(*DECODER, LAYER_WINDOWS),
    layer=(*ATTENTION, *MLP),
    outside=OUTSIDE,
)
"""Ministral: Mistral with windows in some layers."""

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    config=(*DECODER, WINDOWS, UNROTATED_LAYERS, ATTENTION_BIAS, MLP_BIAS, PRETRAINING_TP),
    layer=(*ATTENTION, *ATTENTION_BIASES, *MLP, *MLP_BIASES),
    outside=OUTSIDE,
)
"""SmolLM3: Llama with layers that have no positions."""

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    config=(
        *DECODER,
        Same("attention_bias", "add_qkv_bias"),
        Same("attention_out_bias", "attention_output_bias"),
        Same("residual_dropout", "hidden_dropout"),
        MLP_BIAS,
        PRETRAINING_TP,
    ),
    layer=(*ATTENTION, *ATTENTION_BIASES, *MLP, *MLP_BIASES),
    outside=OUTSIDE,
)
"""Seed-OSS: biases in queries, keys and values; its dropout also acts on the embedding here."""


def _write_original(fields: Fields) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    return {key: fields["stretch"][key]} if fields["stretch"] else {}


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    config=(
        *WITHOUT_POSITIONS,
        PARTIAL_ROPE,
        HEAD_SIZE,
        WINDOW,
        ONE_DROPOUT,
        Derived(("original_max_position_embeddings",), lambda config: {}, _write_original),  # beside rope_parameters
    ),
    layer=(*JOINED_ATTENTION, *JOINED_MLP),
    outside=OUTSIDE,
)
"""Phi-3, Phi-4 and Phi-4-mini: joined projections; Phi-4-mini rotates a part of each head."""

GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    config=(
        *WITHOUT_POSITIONS,
        PARTIAL_ROPE,
        HEAD_SIZE,
        Constants({"rotary_interleaved": True}),
        Same("attention_bias", "add_qkv_bias"),
    ),
    layer=(*ATTENTION, QKV_BIAS, *JOINED_MLP),
    outside=OUTSIDE,
)
"""GLM-4 of 2024 and GLM-Edge: neighbouring channels of a part of each head rotated."""

ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    config=(*DECODER, Constants({"rotary_interleaved": True}), USE_BIAS),
    layer=(*ATTENTION, *ATTENTION_BIASES, *MLP, *MLP_BIASES),
    outside=OUTSIDE,
)
"""ERNIE 4.5, dense: Llama with neighbouring channels rotated."""

DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    config=(*DECODER, LAYER_WINDOWS, ATTENTION_BIAS, Constants({"qk_layernorm": True}), *SIGMOID_EXPERTS),
    layer=(*ATTENTION, *ATTENTION_BIASES, *QK_NORM, *MLP, *SIGMOID_EXPERT_WEIGHTS),
    outside=OUTSIDE,
)
"""dots.llm1: Qwen3's attention with experts as in DeepSeek-V3."""

FAMILIES = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, DEEPSEEK_V3, GLM4_MOE),
        *(KIMI_K2, MINISTRAL, SMOLLM3, SEED_OSS, PHI3, GLM, ERNIE4_5, DOTS1),
        *VARIANTS,
        *DELTA_NETS,
    )
} | WITH_TOWERS
"""All of them, by the ``model_type`` of their ``config.json``."""
