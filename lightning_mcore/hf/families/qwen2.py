# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: biases in queries, keys and values, windows in some layers."""

from lightning_mcore.hf.config_rules import Constants, Only
from lightning_mcore.hf.decoder_rules import ATTENTION, DECODER, MLP, OUTSIDE, QKV_BIAS, WINDOWS
from lightning_mcore.hf.family import Family

FAMILY = Family(
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
