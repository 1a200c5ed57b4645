# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and R1: latent attention, a sigmoid router with a bias, shared experts, multi-token prediction."""

from typing import Any

from lightning_mcore.hf.config_rules import Config, Constants, Derived, Only, Same, Unused, refuse_unless
from lightning_mcore.hf.decoder_rules import (
    MLP,
    MULTI_TOKEN,
    MULTI_TOKEN_LAYERS,
    NO_ATTENTION_BIAS,
    OUTSIDE,
    PRETRAINING_TP,
    REPEATED,
    WITHOUT_POSITIONS,
)
from lightning_mcore.hf.expert_rules import SIGMOID_EXPERT_WEIGHTS, SIGMOID_EXPERTS
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.rope_rules import LATENT_ROPE
from lightning_mcore.hf.weight_rules import Rename, WeightRule


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

_ONE_EPSILON = Only(
    "rms_norm_eps",
    1e-6,
    "transformers always has this value in the norms of latents, and Megatron has one value for all norms",
    is_written=False,  # the rule of all decoders writes the value of the model, and write_config reads it back
)

_ATTENTION: tuple[WeightRule, ...] = (
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

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=(
        Constants({"multi_latent_attention": True, "qk_layernorm": True}),
        *WITHOUT_POSITIONS,
        _ONE_EPSILON,
        LATENT_ROPE,
        NO_ATTENTION_BIAS,
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
    layer=(*_ATTENTION, *MLP, *SIGMOID_EXPERT_WEIGHTS),
    outside=OUTSIDE,
    multi_token=MULTI_TOKEN,
    repeated=REPEATED,
)
