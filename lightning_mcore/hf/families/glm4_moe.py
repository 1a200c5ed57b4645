# SPDX-License-Identifier: Apache-2.0
"""GLM-4-MoE (GLM-4.5 and 4.6): a share of each head rotated, experts as in DeepSeek-V3, multi-token prediction."""

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
from lightning_mcore.hf.expert_rules import (
    EXPERT_BIAS,
    EXPERT_SIZES,
    EXPERTS,
    FIRST_DENSE,
    NO_ROUTER_LOSS,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    shared_expert_weights,
)
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
        Same("n_routed_experts", "num_moe_experts", others=("num_local_experts",), at_least=1),
        *EXPERT_SIZES,
        SHARED_EXPERTS,
        FIRST_DENSE,
        *SIGMOID_ROUTER,
        *NO_ROUTER_LOSS,
        MULTI_TOKEN_LAYERS,
    ),
    layer=(
        *ATTENTION,
        QKV_BIAS,
        *QK_NORM,
        *MLP,
        *EXPERTS,
        EXPERT_BIAS,
        *shared_expert_weights("mlp.shared_experts"),
    ),
    outside=OUTSIDE,
    multi_token=MULTI_TOKEN,
    repeated=REPEATED,
)
