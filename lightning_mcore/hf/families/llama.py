# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, and models with the same layers."""

from lightning_mcore.hf.decoder_rules import (
    ATTENTION,
    DECODER,
    MLP,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    OUTSIDE,
    PRETRAINING_TP,
)
from lightning_mcore.hf.family import Family

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=(*DECODER, NO_ATTENTION_BIAS, NO_MLP_BIAS, PRETRAINING_TP),
    layer=(*ATTENTION, *MLP),
    outside=OUTSIDE,
)
