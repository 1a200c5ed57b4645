# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, one of which sees every token through a gate."""

from lightning_mcore.hf.config_rules import Constants, Same
from lightning_mcore.hf.decoder_rules import ATTENTION, DECODER, MLP, OUTSIDE, QKV_BIAS, WINDOWS
from lightning_mcore.hf.expert_rules import (
    EXPERT_SIZES,
    EXPERTS,
    NO_ROUTER_LOSS,
    SOFTMAX_ROUTER,
    SPARSE_LAYERS,
    shared_expert_weights,
)
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.weight_rules import Rename

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    config=(
        *DECODER,
        WINDOWS,
        Same("qkv_bias", "add_qkv_bias"),
        Same("num_experts", "num_moe_experts", others=("num_local_experts",), at_least=1),
        *EXPERT_SIZES,
        Same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", at_least=1),
        Constants({"moe_shared_expert_gate": True}),
        SPARSE_LAYERS,
        SOFTMAX_ROUTER,
        *NO_ROUTER_LOSS,
    ),
    layer=(
        *ATTENTION,
        QKV_BIAS,
        *MLP,
        *EXPERTS,
        *shared_expert_weights("mlp.shared_expert"),
        Rename("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ),
    outside=OUTSIDE,
)
