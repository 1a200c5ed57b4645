# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3 with experts."""

from lightning_mcore.hf.config_rules import Constants, Same
from lightning_mcore.hf.decoder_rules import (
    ATTENTION,
    DECODER,
    MLP,
    NO_ATTENTION_BIAS,
    OPTIONAL_WINDOW,
    OUTSIDE,
    QK_NORM,
)
from lightning_mcore.hf.expert_rules import EXPERT_SIZES, EXPERTS, NO_ROUTER_LOSS, SOFTMAX_ROUTER, SPARSE_LAYERS
from lightning_mcore.hf.family import Family

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=(
        *DECODER,
        OPTIONAL_WINDOW,
        NO_ATTENTION_BIAS,
        Constants({"qk_layernorm": True}),
        Same("num_local_experts", "num_moe_experts", others=("num_experts",), at_least=1),
        *EXPERT_SIZES,
        SPARSE_LAYERS,
        SOFTMAX_ROUTER,
        *NO_ROUTER_LOSS,
    ),
    layer=(*ATTENTION, *QK_NORM, *MLP, *EXPERTS),
    outside=OUTSIDE,
)
