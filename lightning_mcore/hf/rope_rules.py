# SPDX-License-Identifier: Apache-2.0
"""Rules for rotary position embeddings (RoPE): the config key ``rope_parameters``.

Its ``rope_theta`` is the base of the wavelengths. A ``rope_type`` other than ``default`` *stretches* them, so that a
model reads longer texts than the ``original_max_position_embeddings`` tokens that it was pretrained with. Megatron
computes some stretches itself, ``layers/variants.py`` the others, from the field ``stretch``. With ``rope_theta: 1e4``
and ``factor: 2.0``, the type ``linear`` is ``rotary_base=10000, seq_len_interpolation_factor=2.0``, and ``dynamic`` is
``rotary_base=10000, stretch={"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}``.

:data:`ROPE`, the rule of most families, comes first, then the rope types, then the rules for models that do more, and
last the readers of single values. transformers has already checked that a rope type has its keys.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from lightning_mcore.config.architecture import STRETCHES
from lightning_mcore.hf.config_rules import LONGEST_SEQUENCE, Config, Derived, Fields, refuse_outside, refuse_unless
from lightning_mcore.hf.window_rules import FULL_ATTENTION, SLIDING_ATTENTION

Rope = dict[str, Any]
"""The content of ``rope_parameters``, or of one of its two parts in :data:`ROPE_BY_LAYER_TYPE`."""

# Smallest base, and largest base or factor; beyond them, wavelengths are 0 or infinite
_SMALLEST, _LARGEST = 1e-6, 1e15


def _read_rope(config: Config) -> dict[str, Any]:
    return _rope_fields(_without_nulls(config.get("rope_parameters")), config)


def _rope_fields(rope: Rope, config: Config) -> dict[str, Any]:
    """Return the fields of ``rope``; a stretch may also depend on another key of the config."""
    name = rope["rope_type"]
    refuse_unless("rope_parameters.rope_type", name, tuple(_ROPE_TYPES), "Megatron does not have such positions")
    fields = {"rotary_base": _base(rope), **_ROPE_TYPES[name].read(rope, config)}
    _refuse_other_keys(rope)
    return fields


def _write_rope(fields: Fields) -> dict[str, Any]:
    rope: Rope = {"rope_theta": float(fields["rotary_base"]), "rope_type": "default"}
    stretches = _stretches(fields)
    if len(stretches) > 1:
        names = " and ".join(stretches)
        raise ValueError(f"it stretches positions as in {names}, but its config has one rope_type; turn one off")
    for name, keys in stretches.items():
        rope |= {"rope_type": name, **keys}
    # transformers takes the original length of `dynamic` from here, and ignores the one in rope_parameters
    if "dynamic" in stretches:
        return {"rope_parameters": rope, "max_position_embeddings": rope["original_max_position_embeddings"]}
    return {"rope_parameters": rope}


def _stretches(fields: Fields) -> dict[str, Rope]:
    """Return the keys of each stretch that the fields ask for, by rope type; a valid model has at most one."""
    kind = fields["position_embedding_type"]
    if kind not in ("rope", "yarn"):
        raise ValueError(f"position_embedding_type={kind!r} cannot be expressed in its config")
    found: dict[str, Rope] = {}
    if fields["seq_len_interpolation_factor"] is not None:
        found["linear"] = {"factor": fields["seq_len_interpolation_factor"]}
    if fields["rope_scaling"]:
        found["llama3"] = {"factor": fields["rope_scaling_factor"], **_LLAMA3}
    if kind == "yarn":
        rounded = fields["yarn"]["correction_range_round_to_int"]
        found["yarn"] = {**_yarn_keys(fields["yarn"]), **({} if rounded else {"truncate": False})}
    if fields["stretch"]:
        name = fields["stretch"]["kind"]
        found[name] = {key: fields["stretch"][key] for key in STRETCHES[name]}
    return found


ROPE = Derived(("rope_parameters",), _read_rope, _write_rope)

# ---- rope types

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# With Megatron's defaults, the scale of YaRN's rotation depends on the factor alone: 1 + 0.1 * ln(factor)
_DEFAULT_SCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}


def _read_linear(rope: Rope, config: Config) -> dict[str, Any]:
    """Gemma 3: the factor multiplies all wavelengths."""
    factor = _number(rope, "factor")
    return {} if factor == 1.0 else {"seq_len_interpolation_factor": factor}


def _read_llama3(rope: Rope, config: Config) -> dict[str, Any]:
    """Llama 3.1 and later: long wavelengths get the whole factor, short ones none of it, those in between a part."""
    factor = _number(rope, "factor")
    constants = {key: _number(rope, key, value) for key, value in _LLAMA3.items()}
    constants["original_max_position_embeddings"] = _whole(constants["original_max_position_embeddings"])
    # Megatron's rope_scaling has Llama 3.1's constants built in
    if constants == _LLAMA3:
        return {"rope_scaling": True, "rope_scaling_factor": factor}
    return {"stretch": {"kind": "llama3", "factor": factor, **constants}}


def _read_yarn(rope: Rope, config: Config) -> dict[str, Any]:
    """Qwen3, gpt-oss and OLMo 3: as in Llama 3, with other limits, and the rotated channels are scaled."""
    rounded = bool(rope.get("truncate", True))
    yarn = {**_yarn_fields(rope, config), "correction_range_round_to_int": rounded}
    return {"position_embedding_type": "yarn", "yarn": yarn}


def _yarn_fields(rope: Rope, config: Config) -> dict[str, Any]:
    """Return Megatron's settings of YaRN, which latent attention has too.

    Source: ``_compute_yarn_parameters`` (transformers 5.23); ``_yarn_get_concentration_factor`` (megatron-core).
    """
    original = _original_length(rope, at_least=1)
    factor = _factor_or_ratio(rope, config, original)
    scales = {key: _number(rope, key, 0.0) for key in _DEFAULT_SCALES}
    scales = scales if all(scales.values()) else _DEFAULT_SCALES
    _check_attention_factor(rope, factor, scales)
    return {
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": original,
        # transformers also takes 0 for the default, and uses the scales only if both are given
        "beta_fast": _number(rope, "beta_fast", 0.0) or 32.0,
        "beta_slow": _number(rope, "beta_slow", 0.0) or 1.0,
        **scales,
    }


def _check_attention_factor(rope: Rope, factor: float, scales: Mapping[str, float]) -> None:
    """Raise ValueError for an ``attention_factor`` other than the one that follows from the other keys.

    OLMo 3 writes 1.2079441541679836, which is 1 + 0.1 * ln(8) with its factor of 8.
    """
    given = rope.get("attention_factor")
    if given is None:
        return
    above, below = (1 + 0.1 * scales[key] * math.log(max(factor, 1.0)) for key in _DEFAULT_SCALES)
    if not math.isclose(_number(rope, "attention_factor"), above / below, rel_tol=1e-6):
        raise ValueError(
            f"rope_parameters.attention_factor={given!r} is not supported with rope_type='yarn' and factor={factor!r},"
            f" because Megatron computes {above / below} from the other keys; only this number is"
        )


def _yarn_keys(yarn: Mapping[str, Any]) -> Rope:
    """Return the keys for what :func:`_yarn_fields` returns."""
    same = {key: yarn[key] for key in ("original_max_position_embeddings", "beta_fast", "beta_slow")}
    scales = {key: yarn[key] for key in _DEFAULT_SCALES}
    return {"factor": yarn["rotary_scaling_factor"], **same, **({} if scales == _DEFAULT_SCALES else scales)}


def _read_dynamic(rope: Rope, config: Config) -> dict[str, Any]:
    """NTK scaling: the base grows with the length of a text that exceeds the original length."""
    # transformers does not read the original length that rope_parameters may have
    original = config["max_position_embeddings"]
    factor = _number(rope, "factor")
    return {"stretch": {"kind": "dynamic", "factor": factor, "original_max_position_embeddings": original}}


def _read_longrope(rope: Rope, config: Config) -> dict[str, Any]:
    """Phi-3 and Phi-4-mini: each wavelength has a factor for texts up to the original length and one for longer."""
    original = _original_length(rope, at_least=2)
    scale = rope.get("attention_factor")
    if scale is None:
        factor = _factor_or_ratio(rope, config, original)
        # 131072 tokens from 4096 is a factor of 32: sqrt(1 + ln 32 / ln 4096) = 1.190
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    lists = {key: [float(value) for value in rope[key]] for key in ("short_factor", "long_factor")}
    numbers = {"original_max_position_embeddings": original, "attention_factor": float(scale)}
    return {"stretch": {"kind": "longrope", **lists, **numbers}}


class _RopeType(NamedTuple):
    """The reader of a ``rope_type``, and its keys besides ``rope_type`` and ``rope_theta``."""

    read: Callable[[Rope, Config], dict[str, Any]]
    keys: tuple[str, ...]


_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor")
_ROPE_TYPES = {
    # A default may name its original length, although nothing is stretched
    "default": _RopeType(lambda rope, config: {}, ("original_max_position_embeddings",)),
    "linear": _RopeType(_read_linear, ("factor",)),
    "llama3": _RopeType(_read_llama3, STRETCHES["llama3"]),
    "yarn": _RopeType(_read_yarn, (*_YARN, *_DEFAULT_SCALES)),
    "dynamic": _RopeType(_read_dynamic, STRETCHES["dynamic"]),
    "longrope": _RopeType(_read_longrope, ("factor", *STRETCHES["longrope"])),
}

# ---- rules for models that do more than ROPE


def _read_partial(config: Config) -> dict[str, Any]:
    rope = _without_nulls(config.get("rope_parameters"))
    share = rope.pop("partial_rotary_factor", 1.0)
    refuse_outside("rope_parameters.partial_rotary_factor", share, 0.0, 1.0)
    fields = _rope_fields(rope, config)
    if share == 1.0:
        return fields
    if "yarn" in fields:
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={share!r} is not supported with rope_type='yarn', because"
            " Megatron's YaRN rotates whole heads; only 1.0 is"
        )
    return {**fields, "rotary_percent": share}


def _write_partial(fields: Fields) -> dict[str, Any]:
    keys = _write_rope(fields)
    keys["rope_parameters"]["partial_rotary_factor"] = fields["rotary_percent"]
    return keys


PARTIAL_ROPE = Derived(("rope_parameters",), _read_partial, _write_partial)
"""GLM-4, Phi-4-mini, Qwen3.5: only the first channels of each head are rotated."""


def _read_by_layer_type(config: Config) -> dict[str, Any]:
    ropes = config["rope_parameters"]
    unknown = sorted(ropes.keys() - {FULL_ATTENTION, SLIDING_ATTENTION})
    if unknown:
        given = f"rope_parameters.{unknown[0]}={ropes[unknown[0]]!r}"
        raise ValueError(f"{given} names no kind of layers; move it to full_attention")
    window, full = _without_nulls(ropes[SLIDING_ATTENTION]), _without_nulls(ropes[FULL_ATTENTION])
    kind = window["rope_type"]
    refuse_unless("rope_parameters.sliding_attention.rope_type", kind, ("default",), "only full attention is stretched")
    _refuse_other_keys(window)
    # transformers reads `truncate` next to the two parts, where the check above rejects it
    rounded = full.get("truncate", True)
    refuse_unless("rope_parameters.full_attention.truncate", rounded, (True,), "transformers does not read it there")
    return {**_rope_fields(full, config), "window_rotary_base": _base(window)}


def _write_by_layer_type(fields: Fields) -> dict[str, Any]:
    base = fields["window_rotary_base"]
    if base is None:
        raise ValueError("its layers with a window do not have rotary positions of their own")
    keys = _write_rope(fields)
    window = {"rope_theta": float(base), "rope_type": "default"}
    return {**keys, "rope_parameters": {SLIDING_ATTENTION: window, FULL_ATTENTION: keys["rope_parameters"]}}


ROPE_BY_LAYER_TYPE = Derived(("rope_parameters",), _read_by_layer_type, _write_by_layer_type)
"""Gemma 3, OLMo 3: layers with a window have their own base, and only the others are stretched."""


def _read_alpha(config: Config) -> dict[str, Any]:
    rope = _without_nulls(config.get("rope_parameters"))
    alpha = rope.pop("alpha", None)
    if rope["rope_type"] != "dynamic" or not alpha:
        return _rope_fields(rope, config)
    refuse_outside("rope_parameters.alpha", alpha, 0.0, _LARGEST)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    refuse_outside("head_dim", size, 3)  # the exponent divides by two less
    # Published configs also have keys of YaRN; transformers' compute_ntk_alpha_rope_parameters ignores them
    return {"rotary_base": _base(rope) * float(alpha) ** (size / (size - 2))}


ALPHA_ROPE = Derived(("rope_parameters",), _read_alpha, _write_rope)
"""HunYuan: ``dynamic`` with an ``alpha`` is a larger base, whatever the length; the larger base is written."""


def _read_growing(config: Config) -> dict[str, Any]:
    rope, growth = _growth(config)
    return {**_rope_fields(rope, config), "query_growth": growth}


def _growth(config: Config) -> tuple[Rope, dict[str, Any]]:
    """Return ``rope_parameters`` without the keys of ``query_growth``, and that field."""
    rope = _without_nulls(config.get("rope_parameters"))
    rope.pop("max_position_embeddings", None)  # transformers does not read it
    beta = rope.pop("llama_4_scaling_beta", None)
    refuse_outside("rope_parameters.llama_4_scaling_beta", beta, 0.0)
    return rope, {"beta": float(beta), "original_max_position_embeddings": _original_length(rope, at_least=1)}


def _with_growth(keys: dict[str, Any], fields: Fields) -> dict[str, Any]:
    growth = fields["query_growth"]
    if growth is None:
        raise ValueError("its queries do not grow with the position")
    keys["rope_parameters"]["llama_4_scaling_beta"] = growth["beta"]
    keys["rope_parameters"]["original_max_position_embeddings"] = growth["original_max_position_embeddings"]
    return keys


GROWING_ROPE = Derived(("rope_parameters",), _read_growing, lambda fields: _with_growth(_write_rope(fields), fields))
"""Ministral 3: queries are multiplied by a number that grows with their position."""


def _read_latent(config: Config) -> dict[str, Any]:
    rope = _without_nulls(config.get("rope_parameters"))
    kind = rope["rope_type"]
    refuse_unless("rope_parameters.rope_type", kind, ("default", "yarn"), "Megatron's latent attention has no others")
    fields: dict[str, Any] = {"rotary_base": _base(rope)}
    if kind == "default":
        fields |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    else:
        refuse_unless("rope_parameters.truncate", rope.get("truncate", True), (True,), "Megatron always rounds")
        fields |= {"rope_type": "yarn", **_yarn_fields(rope, config)}
        # transformers takes mscale_all_dim alone into account for the softmax, but not for the rotation
        scale = rope.get("mscale_all_dim")
        if scale and not rope.get("mscale"):
            raise ValueError(
                f"rope_parameters.mscale_all_dim={scale!r} without mscale is not supported, because Megatron scales"
                " the softmax and the rotation by the same two numbers; give both or none"
            )
    _refuse_other_keys(rope)
    return fields


def _write_latent(fields: Fields) -> dict[str, Any]:
    if not fields["multi_latent_attention"]:
        raise ValueError("it has attention without latents")
    rope: Rope = {"rope_theta": float(fields["rotary_base"]), "rope_type": "default"}
    if fields["rope_type"] == "yarn":
        rope |= {"rope_type": "yarn", **_yarn_keys(fields)}
    return {"rope_parameters": rope}


LATENT_ROPE = Derived(("rope_parameters",), _read_latent, _write_latent)
"""DeepSeek-V3, Kimi K2: Megatron's latent attention has its own rotation, set by fields of ``TransformerConfig``."""


def _read_growing_latent(config: Config) -> dict[str, Any]:
    rope, growth = _growth(config)
    refuse_unless("rope_parameters.rope_type", rope["rope_type"], ("yarn",), "transformers would turn whole heads")
    turned, size = config["qk_rope_head_dim"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    share = rope.pop("partial_rotary_factor", turned / size)
    if int(size * share) != turned:
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={share!r} is not supported with qk_rope_head_dim={turned}, because"
            f" Megatron rotates these channels of {size}; only {turned / size} is"
        )
    return {**_read_latent({**config, "rope_parameters": rope}), "query_growth": growth}


def _write_growing_latent(fields: Fields) -> dict[str, Any]:
    keys = _with_growth(_write_latent(fields), fields)
    turned, others = fields["qk_pos_emb_head_dim"], fields["qk_head_dim"]
    keys["rope_parameters"]["partial_rotary_factor"] = turned / (others + turned)
    return keys


GROWING_LATENT_ROPE = Derived(("rope_parameters",), _read_growing_latent, _write_growing_latent)
"""Mistral 4: latent attention whose queries are multiplied by a number that grows with their position."""


def _read_unrotated(config: Config) -> dict[str, Any]:
    # Despite its name, 1 in no_rope_layers means that the layer has positions; in no_rope_freq, that it has none
    unrotated = [int(not rotated) for rotated in config.get("no_rope_layers") or ()]
    return {"no_rope_freq": unrotated[: config["num_hidden_layers"]]} if any(unrotated) else {}


def _write_unrotated(fields: Fields) -> dict[str, Any]:
    unrotated = fields["no_rope_freq"] or [False] * fields["num_layers"]
    return {"no_rope_layers": [int(not flag) for flag in unrotated]}


UNROTATED_LAYERS = Derived(("no_rope_layers", "no_rope_layer_interval"), _read_unrotated, _write_unrotated)
"""SmolLM3: some layers have no rotary positions. transformers makes the list from the interval if it is missing."""

# ---- keys that no rope type has

ROPE_KEY = "rope_parameters"
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}.union(
    *(kind.keys for kind in _ROPE_TYPES.values())
)


def strange_rope_keys(rope: Any) -> list[str]:
    """Return the keys that no rope type has, such as ``rope_parameters.finetuned``, also of the parts by layer type."""
    if not isinstance(rope, dict):
        return []
    own = [f"{ROPE_KEY}.{key}" for key, value in rope.items() if key not in _ROPE_KEYS and not isinstance(value, dict)]
    return [*own, *(key for part in rope.values() for key in strange_rope_keys(part))]


def without_rope_keys(rope: Any, names: Collection[str]) -> Any:
    """Return ``rope`` without keys that have the names of :func:`strange_rope_keys`."""
    if not isinstance(rope, dict):
        return rope
    return {key: without_rope_keys(part, names) for key, part in rope.items() if f"{ROPE_KEY}.{key}" not in names}


# ---- single values


def _without_nulls(given: Mapping[str, Any] | None) -> Rope:
    """Return a copy that always has ``rope_type``, which older configs call ``type``."""
    rope = {key: value for key, value in (given or {}).items() if value is not None}
    old_name = rope.pop("type", "default")
    return {"rope_type": old_name, **rope}


def _base(rope: Rope) -> float:
    base = rope.get("rope_theta", 10000.0)
    refuse_outside("rope_parameters.rope_theta", base, _SMALLEST, _LARGEST)
    return _whole(base)


def _factor_or_ratio(rope: Rope, config: Config, original: int) -> float:
    """Return ``factor``; without it, the ratio of the longest length to the original one."""
    if "factor" in rope:
        return _number(rope, "factor")
    return float(config["max_position_embeddings"] / original)


def _original_length(rope: Rope, at_least: int) -> int:
    length: Any = rope.get("original_max_position_embeddings")
    refuse_outside("rope_parameters.original_max_position_embeddings", length, at_least, LONGEST_SEQUENCE)
    return int(length)


def _number(rope: Rope, key: str, default: float | None = None) -> float:
    """Return a number, which must not be negative; None as the default requires the key."""
    value = rope.get(key, default)
    if value is None:
        raise ValueError(f"rope_parameters has rope_type={rope['rope_type']!r} without a {key}; add it")
    refuse_outside(f"rope_parameters.{key}", value, 0.0, _LARGEST)
    return float(value)


def _whole(value: float) -> float:
    """Return 8192.0 as the int 8192, and 0.5 as it is."""
    return int(value) if float(value).is_integer() else value


def _refuse_other_keys(rope: Rope) -> None:
    """Raise ValueError for a key that the rope type does not have; rotating whole heads is the default."""
    kind = rope["rope_type"]
    for key, value in rope.items():
        is_default = key == "partial_rotary_factor" and value == 1.0
        if key not in ("rope_type", "rope_theta", *_ROPE_TYPES[kind].keys) and not is_default:
            raise ValueError(f"rope_parameters.{key}={value!r} is not supported with rope_type={kind!r}; remove it")
