# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama's layers with a sliding window."""

from lightning_mcore.hf.decoder_rules import ATTENTION, DECODER, MLP, OUTSIDE, WINDOW
from lightning_mcore.hf.family import Family

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=(*DECODER, WINDOW),
    layer=(*ATTENTION, *MLP),
    outside=OUTSIDE,
)
