# SPDX-License-Identifier: Apache-2.0
"""StableLM, a family that the package lacks: LayerNorm with biases, and rotary positions on part of each head."""

from lightning_mcore.hf import Constants, Family, Only, Rename, Same
from lightning_mcore.hf.decoder_rules import ATTENTION, MLP, OUTSIDE, QKV_BIAS, SIZES
from lightning_mcore.hf.rope_rules import PARTIAL_ROPE

FAMILY = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    config=(
        *SIZES,
        PARTIAL_ROPE,
        Same("layer_norm_eps", "layernorm_epsilon"),
        Same("use_qkv_bias", "add_qkv_bias"),
        *(Same(name, name) for name in ("attention_dropout", "hidden_dropout")),
        Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
        Only("hidden_act", "silu"),
        *(Only(name, False) for name in ("qk_layernorm", "use_parallel_residual")),
        Constants({"normalization": "LayerNorm", "add_bias_linear": False}),
        Constants({"gated_linear_unit": True, "activation_func": "silu"}),
    ),
    layer=(
        *ATTENTION,
        QKV_BIAS,
        *MLP,
        Rename("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
        Rename("mlp.linear_fc1.layer_norm_bias", "post_attention_layernorm.bias"),
    ),
    outside=(*OUTSIDE, Rename("decoder.final_layernorm.bias", "model.norm.bias")),
)
