# SPDX-License-Identifier: Apache-2.0
"""GLM-4-MoE (GLM-4.5 and 4.6): a part of each head rotated, experts as in DeepSeek-V3, multi-token prediction."""

from lightning_mcore.hf.config_rules import Same
from lightning_mcore.hf.decoder_rules import (
    ATTENTION,
    HEAD_SIZE,
    MLP,
    MULTI_TOKEN,
    MULTI_TOKEN_LAYERS,
    OUTSIDE,
    QK_NORM,
    QKV_BIAS,
    REPEATED,
    WITHOUT_POSITIONS,
)
from lightning_mcore.hf.expert_rules import SIGMOID_EXPERT_WEIGHTS, SIGMOID_EXPERTS
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.rope_rules import PARTIAL_ROPE

FAMILY = Family(
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
