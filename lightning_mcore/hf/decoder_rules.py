# SPDX-License-Identifier: Apache-2.0
"""Rules that most families share, for a decoder like Llama's and its variants.

``families.py`` combines its rows from these. Weights have Megatron's checkpoint names, where a norm before a projection
belongs to that projection.

Rotary positions (``rope_parameters``) are plain or stretched: evenly (``linear``), as in Llama 3 (``llama3``), as in
YaRN (``yarn``), with the length (``dynamic``), or by lists of factors (``longrope``). Latent attention has its own
rotation and fields, and supports only plain and YaRN positions.

Readers of positions pop each key that they use from a copy of ``rope_parameters``; whatever is left is an error
(:func:`_refuse_rest`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.weight_rules import JoinedQueryKeyValue, QueryKeyValue, Rename, Rows, Vocabulary, WeightRule

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NO_SUCH = "Megatron does not have such positions"
_FASTEST, _SLOWEST = 32.0, 1.0  # defaults of YaRN

_SMALLEST, _LARGEST = 1e-6, 1e15  # limits of bases and factors; beyond them, wavelengths are 0 or infinite

Rope = dict[str, Any]


def _read(config: Config) -> dict[str, Any]:
    return _read_plain_or_stretched(_parameters(config), config)


def _read_partial(config: Config) -> dict[str, Any]:
    rope = _parameters(config)
    share = rope.pop("partial_rotary_factor", 1.0)
    refuse_outside("rope_parameters.partial_rotary_factor", share, 0.0, 1.0)
    fields = _read_plain_or_stretched(rope, config)
    if share == 1.0:
        return fields
    if "yarn" in fields:
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={share!r} is not supported with rope_type='yarn', because"
            " Megatron's YaRN rotates whole heads; only 1.0 is"
        )
    return fields | {"rotary_percent": share}


def _read_plain_or_stretched(rope: Rope, config: Config) -> dict[str, Any]:
    kind = rope.pop("rope_type")
    kinds = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
    refuse_unless("rope_parameters.rope_type", kind, kinds, _NO_SUCH)
    fields: dict[str, Any] = {"rotary_base": _base(rope)}
    if kind == "linear":
        factor = _factor(rope, kind)
        fields |= {"seq_len_interpolation_factor": factor} if factor != 1.0 else {}
    elif kind == "llama3":
        constants = {key: _number(rope, key, value) for key, value in _LLAMA3.items()}
        factor = _factor(rope, kind)
        # Megatron's built-in Llama 3 stretch has these constants only; layers/variants.py computes any other
        if constants == _LLAMA3:
            fields |= {"rope_scaling": True, "rope_scaling_factor": factor}
        else:
            fields["stretch"] = {"kind": kind, "factor": factor, **constants}
    elif kind == "dynamic":
        original = config["max_position_embeddings"]
        fields["stretch"] = {"kind": kind, "factor": _factor(rope, kind), "original_max_position_embeddings": original}
        rope.pop("original_max_position_embeddings", None)  # transformers does not read it
    elif kind == "longrope":
        fields["stretch"] = {"kind": kind, **_read_longrope(rope, config)}
    elif kind == "yarn":
        yarn = _read_yarn(rope, config)
        fields |= {"position_embedding_type": "yarn", "yarn": {**yarn, **_read_mscale(rope)}}
        fields["yarn"]["correction_range_round_to_int"] = bool(rope.pop("truncate", True))
    _refuse_rest(kind, rope)
    return fields


def _read_longrope(rope: Rope, config: Config) -> dict[str, Any]:
    """Pop and return the two lists of factors, with the scale of the rotation that follows from them."""
    original = rope.pop("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    refuse_outside("rope_parameters.original_max_position_embeddings", original, 2, LONGEST_SEQUENCE)
    factor, scale = rope.pop("factor", None), rope.pop("attention_factor", None)
    if scale is None:
        factor = config["max_position_embeddings"] / original if factor is None else factor
        # 131072 tokens from 4096 is a factor of 32: sqrt(1 + ln 32 / ln 4096) = 1.190
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    lists = {key: [float(value) for value in rope.pop(key)] for key in ("short_factor", "long_factor")}
    return {**lists, "original_max_position_embeddings": original, "attention_factor": float(scale)}


def _read_latent(config: Config) -> dict[str, Any]:
    rope = _parameters(config)
    kind = rope.pop("rope_type")
    refuse_unless("rope_parameters.rope_type", kind, ("default", "yarn"), "Megatron's latent attention has no others")
    fields: dict[str, Any] = {"rotary_base": _base(rope)}
    if kind == "default":
        fields |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    else:
        refuse_unless("rope_parameters.truncate", rope.pop("truncate", True), (True,), "Megatron always rounds")
        scale = rope.get("mscale_all_dim")
        fields |= {"rope_type": "yarn", **_read_yarn(rope, config), **_read_mscale(rope)}
        # transformers takes mscale_all_dim alone into account for the softmax, but not for the rotation
        if scale and not fields["mscale_all_dim"]:
            raise ValueError(
                f"rope_parameters.mscale_all_dim={scale!r} without mscale is not supported, because Megatron scales"
                " the softmax and the rotation by the same two numbers; give both or none"
            )
    _refuse_rest(kind, rope)
    return fields


def _parameters(config: Config) -> Rope:
    """Return ``rope_parameters``, with the current names of its keys."""
    rope = {key: value for key, value in (config.get("rope_parameters") or {}).items() if value is not None}
    # `type` is the old name of rope_type; rope_type wins if both are there
    old = rope.pop("type", "default")
    return {"rope_type": old, **rope}


def _refuse_rest(kind: str, rope: Rope) -> None:
    if kind == "default":  # only the length that the model was trained with; nothing is stretched
        rope.pop("original_max_position_embeddings", None)
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    for key, value in rope.items():
        raise ValueError(f"rope_parameters.{key}={value!r} is not supported with rope_type={kind!r}; remove it")


def _read_yarn(rope: Rope, config: Config) -> dict[str, Any]:
    """Pop and return the keys that say which wavelengths are stretched, and by how much."""
    original = rope.pop("original_max_position_embeddings", None)
    refuse_outside("rope_parameters.original_max_position_embeddings", original, 1, LONGEST_SEQUENCE)
    if rope.get("factor") is None:
        rope["factor"] = config["max_position_embeddings"] / original
    return {
        "rotary_scaling_factor": _number(rope, "factor", 1.0),
        "original_max_position_embeddings": original,
        "beta_fast": _number(rope, "beta_fast", 0.0) or _FASTEST,
        "beta_slow": _number(rope, "beta_slow", 0.0) or _SLOWEST,
    }


def _read_mscale(rope: Rope) -> dict[str, float]:
    """Pop and return the scales of the rotation; transformers uses the two numbers only if both are given.

    Source: ``_compute_yarn_parameters`` (transformers 5.23); ``_yarn_get_concentration_factor`` (megatron-core).
    """
    scale, of_all = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    return {"mscale": scale, "mscale_all_dim": of_all} if scale and of_all else _UNSCALED


_UNSCALED = {"mscale": 1.0, "mscale_all_dim": 0.0}


def _write(fields: Fields) -> dict[str, Any]:
    rope: Rope = {"rope_theta": float(fields["rotary_base"]), "rope_type": "default"}
    kind = fields["position_embedding_type"]
    if kind == "yarn":
        yarn = dict(fields["yarn"])
        rounded = yarn.pop("correction_range_round_to_int")
        rope |= _write_yarn(yarn) | ({} if rounded else {"truncate": False})
    elif kind != "rope":
        raise ValueError(f"position_embedding_type={kind!r} cannot be expressed in its config")
    if fields["seq_len_interpolation_factor"] is not None:
        rope |= {"rope_type": "linear", "factor": fields["seq_len_interpolation_factor"]}
    stretch = dict(fields["stretch"] or {})
    if stretch:
        rope |= {"rope_type": stretch.pop("kind"), **stretch}
    # transformers takes the original length of `dynamic` from max_position_embeddings, not from rope_parameters
    if rope["rope_type"] == "dynamic":
        return {"rope_parameters": rope, "max_position_embeddings": stretch["original_max_position_embeddings"]}
    if fields["rope_scaling"]:
        rope |= {"rope_type": "llama3", "factor": fields["rope_scaling_factor"], **_LLAMA3}
    return {"rope_parameters": rope}


def _write_partial(fields: Fields) -> dict[str, Any]:
    keys = _write(fields)
    rope = keys["rope_parameters"]
    return {**keys, "rope_parameters": {**rope, "partial_rotary_factor": fields["rotary_percent"]}}


def _write_latent(fields: Fields) -> dict[str, Any]:
    if not fields["multi_latent_attention"]:
        raise ValueError("it has attention without latents")
    rope: Rope = {"rope_theta": float(fields["rotary_base"]), "rope_type": "default"}
    if fields["rope_type"] == "yarn":
        names = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", *_UNSCALED)
        rope |= _write_yarn({name: fields[name] for name in names})
    return {"rope_parameters": rope}


def _write_yarn(yarn: Mapping[str, Any]) -> Rope:
    rope = {"rope_type": "yarn", "factor": yarn["rotary_scaling_factor"]}
    rope |= {key: yarn[key] for key in ("original_max_position_embeddings", "beta_fast", "beta_slow")}
    scales = {key: yarn[key] for key in _UNSCALED}
    return rope if scales == _UNSCALED else rope | scales


def _base(rope: Rope) -> int | float:
    value: float = rope.pop("rope_theta", 10000.0)
    refuse_outside("rope_parameters.rope_theta", value, _SMALLEST, _LARGEST)
    return int(value) if float(value).is_integer() else value


def _factor(rope: Rope, kind: str) -> float:
    if "factor" not in rope:
        raise ValueError(f"rope_parameters has rope_type={kind!r} without a factor; add it")
    return _number(rope, "factor", 1.0)


def _number(rope: Rope, key: str, default: float) -> float:
    """Pop and return a number, which must not be negative."""
    value = rope.pop(key, default)
    refuse_outside(f"rope_parameters.{key}", value, 0.0, _LARGEST)
    return float(value)


ROPE = Derived(("rope_parameters",), _read, _write)

PARTIAL_ROPE = Derived(("rope_parameters",), _read_partial, _write_partial)


def _read_by_window(config: Config) -> dict[str, Any]:
    ropes = config["rope_parameters"]
    for key in sorted(ropes.keys() - {"full_attention", "sliding_attention"}):
        raise ValueError(f"rope_parameters.{key}={ropes[key]!r} names no kind of layers; move it to full_attention")
    window = _parameters({"rope_parameters": ropes["sliding_attention"]})
    kind = window.pop("rope_type")
    refuse_unless("rope_parameters.sliding_attention.rope_type", kind, ("default",), "only full attention is stretched")
    rounds = ropes["full_attention"].get("truncate", True)
    refuse_unless("rope_parameters.full_attention.truncate", rounds, (True,), "transformers does not read it there")
    fields = _read({**config, "rope_parameters": ropes["full_attention"]})
    fields["window_rotary_base"] = _base(window)
    _refuse_rest("default", window)
    return fields


def _write_by_window(fields: Fields) -> dict[str, Any]:
    base = fields["window_rotary_base"]
    if base is None:
        raise ValueError("its layers with a window do not have rotary positions of their own")
    window = {"rope_theta": float(base), "rope_type": "default"}
    return {"rope_parameters": {"sliding_attention": window, "full_attention": _write(fields)["rope_parameters"]}}


ROPE_BY_WINDOW = Derived(("rope_parameters",), _read_by_window, _write_by_window)


def _read_alpha(config: Config) -> dict[str, Any]:
    rope = _parameters(config)
    # HunYuan's `dynamic` with an alpha does not depend on the length: it is a larger base.
    if rope["rope_type"] != "dynamic" or not rope.get("alpha"):
        rope.pop("alpha", None)
        return _read({**config, "rope_parameters": rope})
    alpha, size = _number(rope, "alpha", 1.0), config.get("head_dim")
    size = size or config["hidden_size"] // config["num_attention_heads"]
    refuse_outside("head_dim", size, 3)  # the exponent divides by two less
    return {"rotary_base": _base(rope) * alpha ** (size / (size - 2))}


# The stretched base is written, without ``alpha``
ALPHA_ROPE = Derived(("rope_parameters",), _read_alpha, _write)


def _read_growing(config: Config) -> dict[str, Any]:
    rope = _parameters(config)
    rope.pop("max_position_embeddings", None)  # transformers does not read it
    refuse_outside("rope_parameters.llama_4_scaling_beta", rope.get("llama_4_scaling_beta"), 0.0)
    length = rope.get("original_max_position_embeddings")
    refuse_outside("rope_parameters.original_max_position_embeddings", length, 1, LONGEST_SEQUENCE)
    growth = {"beta": float(rope.pop("llama_4_scaling_beta")), "original_max_position_embeddings": length}
    return _read({**config, "rope_parameters": rope}) | {"query_growth": growth}


def _write_growing(fields: Fields) -> dict[str, Any]:
    growth = fields["query_growth"]
    if growth is None:
        raise ValueError("its queries do not grow with the position")
    keys = _write(fields)
    own = {**growth, "llama_4_scaling_beta": growth["beta"]}
    del own["beta"]
    return {**keys, "rope_parameters": {**keys["rope_parameters"], **own}}


GROWING_ROPE = Derived(("rope_parameters",), _read_growing, _write_growing)

LATENT_ROPE = Derived(("rope_parameters",), _read_latent, _write_latent)


MOST_LAYERS = 10_000

SIZES: tuple[ConfigRule, ...] = (
    Same("vocab_size", "vocab_size", at_least=1),
    Same("num_hidden_layers", "num_layers", at_least=1, at_most=MOST_LAYERS),
    Same("hidden_size", "hidden_size", at_least=1),
    Same("intermediate_size", "ffn_hidden_size", at_least=1),
    Same("num_attention_heads", "num_attention_heads", at_least=1),
    Same("num_key_value_heads", "num_query_groups", at_least=1),
)

WITHOUT_ACTIVATION: tuple[ConfigRule, ...] = (
    *SIZES,
    Same("rms_norm_eps", "layernorm_epsilon", at_least=0.0),
    Same("attention_dropout", "attention_dropout"),
    Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
    Constants({"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}),
)

WITHOUT_POSITIONS: tuple[ConfigRule, ...] = (
    *WITHOUT_ACTIVATION,
    Only("hidden_act", "silu"),
    Constants({"activation_func": "silu"}),
)

HEAD_SIZE = Same("head_dim", "kv_channels", at_least=1)

DECODER: tuple[ConfigRule, ...] = (*WITHOUT_POSITIONS, ROPE, HEAD_SIZE)


def _read_attention_bias(config: Config) -> dict[str, Any]:
    return {"add_qkv_bias": True, "attention_output_bias": True} if config.get("attention_bias") else {}


def _write_attention_bias(fields: Fields) -> dict[str, Any]:
    if fields["add_qkv_bias"] != fields["attention_output_bias"]:
        raise ValueError("some of the projections of attention have biases, but in its config either all or none do")
    return {"attention_bias": fields["add_qkv_bias"]}


ATTENTION_BIAS = Derived(("attention_bias",), _read_attention_bias, _write_attention_bias)

MLP_BIAS = Same("mlp_bias", "mlp_bias")


def _read_dropout(config: Config) -> dict[str, Any]:
    share = config.get("resid_pdrop", 0.0)
    refuse_unless("embd_pdrop", config.get("embd_pdrop", share), (share,), "Megatron has one dropout for both")
    return {"hidden_dropout": share}


ONE_DROPOUT = Derived(
    ("resid_pdrop", "embd_pdrop"),
    _read_dropout,
    lambda fields: dict.fromkeys(("resid_pdrop", "embd_pdrop"), fields["hidden_dropout"]),
)

PRETRAINING_TP = Unused(("pretraining_tp",))

# ---- windows: transformers counts the keys that a query sees including its own, Megatron only those before it

_FULL, _WINDOWED = "full_attention", "sliding_attention"


def _read_window(config: Config) -> dict[str, Any]:
    size = config.get("sliding_window")
    if size is None:
        return {}
    refuse_outside("sliding_window", size, 1, LONGEST_SEQUENCE)
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
    # transformers ignores the size when the switch is off, and then layer_types contradicts it
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

OPTIONAL_WINDOW = Derived(
    ("sliding_window", "use_sliding_window", "max_window_layers"), _read_optional_window, _write_optional_window
)

# Without ``layer_types``, transformers derives them from ``max_window_layers``
WINDOWS = Derived(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), _read_windows, _write_windows
)


def _read_layer_windows(config: Config) -> dict[str, Any]:
    # These configs have no switch, so it counts as on
    return _read_windows({**config, "use_sliding_window": True})


def _write_layer_windows(fields: Fields) -> dict[str, Any]:
    keys = _write_windows(fields)
    return {key: keys[key] for key in ("sliding_window", "layer_types")}


LAYER_WINDOWS = Derived(
    ("sliding_window", "layer_types", "max_window_layers"), _read_layer_windows, _write_layer_windows
)


def _read_unrotated(config: Config) -> dict[str, Any]:
    # The names are opposite: 1 in no_rope_layers means that the layer has positions
    unrotated = [int(not rotated) for rotated in config.get("no_rope_layers") or ()]
    return {"no_rope_freq": unrotated[: config["num_hidden_layers"]]} if any(unrotated) else {}


def _write_unrotated(fields: Fields) -> dict[str, Any]:
    unrotated = fields["no_rope_freq"] or [False] * fields["num_layers"]
    return {"no_rope_layers": [int(not flag) for flag in unrotated]}


UNROTATED_LAYERS = Derived(("no_rope_layers", "no_rope_layer_interval"), _read_unrotated, _write_unrotated)


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

# Checkpoints repeat the embedding and the output layer in each of those layers
REPEATED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def outside(prefix: str = "model.") -> tuple[WeightRule, ...]:
    """Return the rules of weights outside layers; ``prefix`` starts all Hugging Face names but the output layer's."""
    return (
        Vocabulary("embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight"),
        Rename("decoder.final_layernorm.weight", f"{prefix}norm.weight"),
        Vocabulary("output_layer.weight", "lm_head.weight"),
    )


OUTSIDE = outside()

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

OUTPUT_BIAS = Rename("self_attention.linear_proj.bias", "self_attn.o_proj.bias")

ATTENTION_BIASES: tuple[WeightRule, ...] = (QKV_BIAS, OUTPUT_BIAS)

MLP_BIASES: tuple[WeightRule, ...] = (
    Rows("mlp.linear_fc1.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias")),
    Rename("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
)

QK_NORM: tuple[WeightRule, ...] = (
    Rename("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Rename("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

JOINED_ATTENTION: tuple[WeightRule, ...] = (
    Rename("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    JoinedQueryKeyValue("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight"),
    Rename("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

JOINED_MLP: tuple[WeightRule, ...] = (
    Rename("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    Rename("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"),
    Rename("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)

MLP: tuple[WeightRule, ...] = (
    Rename("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    Rows("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Rename("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)


Part = ConfigRule | WeightRule | tuple[Any, ...]


def family(model_type: str, name: str, *parts: Part) -> Family:
    """Return a family of decoders whose weights outside layers have the usual names.

    ``name`` is the transformers class without ``ForCausalLM``; the order of ``parts`` does not matter.
    """
    rules = list(_flat(parts))
    layer = tuple(rule for rule in rules if hasattr(rule, "megatron"))
    config = tuple(rule for rule in rules if not hasattr(rule, "megatron"))
    return Family(model_type, f"{name}ForCausalLM", config, layer, OUTSIDE)


def _flat(parts: tuple[Any, ...]) -> Iterator[Any]:
    for part in parts:
        yield from _flat(part) if isinstance(part, tuple) else (part,)


def with_multi_token(model_type: str, name: str, *parts: Part) -> Family:
    """Return a :func:`family` that has multi-token prediction layers."""
    return replace(family(model_type, name, MULTI_TOKEN_LAYERS, *parts), multi_token=MULTI_TOKEN, repeated=REPEATED)
