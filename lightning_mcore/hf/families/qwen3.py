# SPDX-License-Identifier: Apache-2.0
"""Qwen3: norms of queries and keys, windows in some layers."""

from lightning_mcore.hf.config_rules import Constants
from lightning_mcore.hf.decoder_rules import ATTENTION, DECODER, MLP, NO_ATTENTION_BIAS, OUTSIDE, QK_NORM, WINDOWS
from lightning_mcore.hf.family import Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=(*DECODER, WINDOWS, NO_ATTENTION_BIAS, Constants({"qk_layernorm": True})),
    layer=(*ATTENTION, *QK_NORM, *MLP),
    outside=OUTSIDE,
)
