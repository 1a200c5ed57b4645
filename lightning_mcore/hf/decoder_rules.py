# SPDX-License-Identifier: Apache-2.0
"""Rules that most families share, for a decoder like Llama's and its variants.

A family (``families.py``) combines its tables from these. Weights have Megatron's names in checkpoints, where a norm
before a projection belongs to that projection.
"""

from typing import Any

from lightning_mcore.hf.config_rules import (
    LONGEST_SEQUENCE,
    Config,
    ConfigRule,
    Constants,
    Derived,
    Fields,
    Only,
    Same,
    Unused,
    refuse_outside,
    refuse_unless,
)
from lightning_mcore.hf.rope_rules import ROPE
from lightning_mcore.hf.weight_rules import QueryKeyValue, Rename, Rows, Vocabulary, WeightRule

# ---- configs

MOST_LAYERS = 10_000

SIZES: tuple[ConfigRule, ...] = (
    Same("vocab_size", "vocab_size", at_least=1),
    Same("num_hidden_layers", "num_layers", at_least=1, at_most=MOST_LAYERS),
    Same("hidden_size", "hidden_size", at_least=1),
    Same("intermediate_size", "ffn_hidden_size", at_least=1),
    Same("num_attention_heads", "num_attention_heads", at_least=1),
    Same("num_key_value_heads", "num_query_groups", at_least=1),
)

WITHOUT_POSITIONS: tuple[ConfigRule, ...] = (
    *SIZES,
    Same("rms_norm_eps", "layernorm_epsilon", at_least=0.0),
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
)
"""Sizes, RMSNorm, and gated SiLU without biases."""

HEAD_SIZE = Same("head_dim", "kv_channels", at_least=1)

DECODER: tuple[ConfigRule, ...] = (*WITHOUT_POSITIONS, ROPE, HEAD_SIZE)
"""The same, with rotary positions of whole heads."""

_ALL_OR_NONE = (
    "Megatron has biases in all projections of attention and MLP, in queries, keys and values only, or in none"
)

NO_ATTENTION_BIAS = Only("attention_bias", False, _ALL_OR_NONE)

NO_MLP_BIAS = Only("mlp_bias", False, _ALL_OR_NONE)

PRETRAINING_TP = Unused(("pretraining_tp",))

# ---- windows: transformers counts the keys that a query sees including its own, Megatron only those before it

_FULL, _WINDOWED = "full_attention", "sliding_attention"


def _read_window(config: Config) -> dict[str, Any]:
    size = config.get("sliding_window")
    if size is None:
        return {}
    refuse_outside("sliding_window", size, 1, LONGEST_SEQUENCE)  # a query sees itself
    return {"window_size": [size - 1, 0]}


def _write_window(fields: Fields) -> dict[str, Any]:
    if fields["window_attn_skip_freq"] is not None:
        raise ValueError("it has windows in some layers only, which its config cannot express")
    return {"sliding_window": _keys_seen(fields)}


def _keys_seen(fields: Fields) -> int | None:
    if fields["window_size"] is None:
        return None
    back, ahead = fields["window_size"]
    if back < 0 or ahead not in (0, -1):
        raise ValueError(f"window_size={fields['window_size']!r} cannot be expressed in its config; only (n, 0) can")
    return int(back) + 1


def _read_optional_window(config: Config) -> dict[str, Any]:
    return _read_window(config) if config.get("use_sliding_window") else {}


def _write_optional_window(fields: Fields) -> dict[str, Any]:
    return {**_write_window(fields), "use_sliding_window": fields["window_size"] is not None}


def _read_windows(config: Config) -> dict[str, Any]:
    kinds = config.get("layer_types") or ()
    for kind in kinds:
        refuse_unless("layer_types", kind, (_FULL, _WINDOWED), "Megatron does not have such layers")
    windowed = [int(kind == _WINDOWED) for kind in kinds]
    if not any(windowed):
        return {}
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        raise ValueError(
            f"layer_types has {_WINDOWED!r}, and use_sliding_window={config.get('use_sliding_window')!r} with"
            f" sliding_window={config.get('sliding_window')!r} do not give its size; give both"
        )
    return _read_window(config) | ({} if all(windowed) else {"window_attn_skip_freq": windowed})


def _write_windows(fields: Fields) -> dict[str, Any]:
    size = _keys_seen(fields)
    flags = fields["window_attn_skip_freq"] or [size is not None] * fields["num_layers"]
    kinds = [_WINDOWED if flag else _FULL for flag in flags]
    return {"sliding_window": size, "use_sliding_window": size is not None, "layer_types": kinds}


WINDOW = Derived(("sliding_window",), _read_window, _write_window)
"""All layers have a window, or none."""

OPTIONAL_WINDOW = Derived(
    ("sliding_window", "use_sliding_window", "max_window_layers"), _read_optional_window, _write_optional_window
)
"""The same with a switch; that model does not read ``max_window_layers``."""

WINDOWS = Derived(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), _read_windows, _write_windows
)
"""The kind of a layer decides whether it has a window; without kinds, transformers derives them from
``max_window_layers``."""

# ---- layers for multi-token prediction


def _read_multi_token(config: Config) -> dict[str, Any]:
    layers = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
    if layers:
        refuse_outside("num_nextn_predict_layers", layers, 0, MOST_LAYERS)
    return {"mtp_num_layers": layers} if layers else {}


MULTI_TOKEN_LAYERS = Derived(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    _read_multi_token,
    lambda fields: {"num_nextn_predict_layers": fields["mtp_num_layers"] or 0},
)

MULTI_TOKEN: tuple[WeightRule, ...] = (
    Rename("enorm.weight", "enorm.weight"),
    Rename("hnorm.weight", "hnorm.weight"),
    Rename("eh_proj.weight", "eh_proj.weight"),
    Rename("final_layernorm.weight", "shared_head.norm.weight"),
)

REPEATED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Checkpoints repeat the embedding and the output layer in each of those layers."""

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
