# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral with experts in every layer."""

from lightning_mcore.hf.config_rules import Only, Same
from lightning_mcore.hf.decoder_rules import ATTENTION, DECODER, OUTSIDE, WINDOW
from lightning_mcore.hf.expert_rules import ALL_LAYERS, NO_ROUTER_LOSS, NORMALISED_ROUTER, expert_weights
from lightning_mcore.hf.family import Family

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config=(
        *DECODER,
        WINDOW,
        Same("num_local_experts", "num_moe_experts", others=("num_experts",), at_least=1),
        Same("num_experts_per_tok", "moe_router_topk", at_least=1),
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
