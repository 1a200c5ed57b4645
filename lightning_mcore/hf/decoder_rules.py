# SPDX-License-Identifier: Apache-2.0
"""Rules that most families share: those of a decoder as Llama has it, and of its variants.

A family (``families/``) puts its tables together from these. Names of weights on Megatron's side are those of
checkpoints, in which a norm in front of a projection belongs to that projection.
"""

from collections.abc import Mapping
from typing import Any

from lightning_mcore.hf.config_rules import ConfigRule, Constants, Derived, Only, Same, Unused, refuse_unless
from lightning_mcore.hf.weight_rules import QueryKeyValue, Rename, Rows, Vocabulary, WeightRule

# ---- configs


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions: plain, stretched evenly, as in Llama 3, or as in YaRN."""
    rope = dict(config.get("rope_parameters") or {})
    kind = rope.pop("rope_type", "default")
    fields: dict[str, Any] = {"rotary_base": _whole(rope.pop("rope_theta", 10000.0))}
    percent = rope.pop("partial_rotary_factor", 1.0)
    if percent != 1.0:
        fields["rotary_percent"] = percent
    factor = rope.pop("factor", None)
    if kind == "linear":
        fields["seq_len_interpolation_factor"] = factor
    elif kind == "llama3":
        refuse_unless("rope_parameters.low_freq_factor", rope.pop("low_freq_factor", 1.0), (1.0,), _LLAMA3)
        refuse_unless("rope_parameters.high_freq_factor", rope.pop("high_freq_factor", 4.0), (4.0,), _LLAMA3)
        original = rope.pop("original_max_position_embeddings", 8192)
        refuse_unless("rope_parameters.original_max_position_embeddings", original, (8192,), _LLAMA3)
        fields |= {"rope_scaling": True, "rope_scaling_factor": float(factor or 8.0)}
    else:
        refuse_unless("rope_parameters.rope_type", kind, ("default",), "Megatron has no such positions")
    for key, value in rope.items():
        if value is not None and not (kind == "default" and key == "original_max_position_embeddings"):
            raise ValueError(f"rope_parameters.{key}={value!r} is not supported with rope_type={kind!r}; remove it")
    return fields


_LLAMA3 = "Megatron has Llama 3's own value built in"


def _write_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["position_embedding_type"] != "rope":
        raise ValueError(f"position_embedding_type={fields['position_embedding_type']!r} has no place in it")
    rope: dict[str, Any] = {"rope_theta": float(fields["rotary_base"]), "rope_type": "default"}
    if fields["rotary_percent"] != 1.0:
        rope["partial_rotary_factor"] = fields["rotary_percent"]
    if fields["seq_len_interpolation_factor"] is not None:
        rope |= {"rope_type": "linear", "factor": fields["seq_len_interpolation_factor"]}
    if fields["rope_scaling"]:
        rope |= {"rope_type": "llama3", "factor": fields["rope_scaling_factor"]}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_parameters": rope}


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


ROPE = Derived(("rope_parameters",), _read_rope, _write_rope)

SIZES: tuple[ConfigRule, ...] = (
    Same("vocab_size", "vocab_size"),
    Same("num_hidden_layers", "num_layers"),
    Same("hidden_size", "hidden_size"),
    Same("intermediate_size", "ffn_hidden_size"),
    Same("num_attention_heads", "num_attention_heads"),
    Same("num_key_value_heads", "num_query_groups"),
)

DECODER: tuple[ConfigRule, ...] = (
    *SIZES,
    Same("rms_norm_eps", "layernorm_epsilon"),
    Same("attention_dropout", "attention_dropout"),
    Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
    Only("hidden_act", "silu"),
    Constants(
        {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
        }
    ),
    ROPE,
)
"""Sizes, RMSNorm, gated SiLU without biases, rotary positions."""

HEAD_DIM = Same("head_dim", "kv_channels")

NO_ATTENTION_BIAS = Only(
    "attention_bias", False, "Megatron has biases in all projections of attention and MLP, or none"
)

PRETRAINING_TP = Unused(("pretraining_tp",))

# ---- weights

OUTSIDE: tuple[WeightRule, ...] = (
    Vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Rename("decoder.final_layernorm.weight", "model.norm.weight"),
    Vocabulary("output_layer.weight", "lm_head.weight"),
)

ATTENTION: tuple[WeightRule, ...] = (
    Rename("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    QueryKeyValue(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    Rename("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

QKV_BIAS = QueryKeyValue(
    "self_attention.linear_qkv.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
)

QK_NORM: tuple[WeightRule, ...] = (
    Rename("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Rename("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

MLP: tuple[WeightRule, ...] = (
    Rename("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    Rows("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Rename("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
