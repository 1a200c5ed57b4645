# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, and models with the same layers."""

from lightning_mcore.hf.config_rules import Only
from lightning_mcore.hf.decoder_rules import (
    ATTENTION,
    DECODER,
    HEAD_DIM,
    MLP,
    NO_ATTENTION_BIAS,
    OUTSIDE,
    PRETRAINING_TP,
)
from lightning_mcore.hf.family import Family

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=(
        *DECODER,
        HEAD_DIM,
        NO_ATTENTION_BIAS,
        Only("mlp_bias", False, "Megatron has biases in all projections of attention and MLP, or none"),
        PRETRAINING_TP,
    ),
    layer=(*ATTENTION, *MLP),
    outside=OUTSIDE,
)
