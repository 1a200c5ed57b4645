# SPDX-License-Identifier: Apache-2.0
"""Rules for sliding windows, which limit how far back a layer attends.

transformers' ``sliding_window`` counts the keys that a query sees, including its own; Megatron's ``window_size`` counts
the keys before and after it. So ``sliding_window: 4096`` is ``window_size=[4095, 0]``. Models differ in two ways, hence
four rules:

- :data:`WINDOW`: in all layers (Mistral, Mixtral, Phi-3)
- :data:`SWITCHED_WINDOW`: in all layers, if ``use_sliding_window`` is true (Qwen3-MoE)
- :data:`LAYER_WINDOWS`: in some layers, as ``layer_types`` says (Gemma 2 and 3, gpt-oss, OLMo 3)
- :data:`SWITCHED_LAYER_WINDOWS`: in some layers, if ``use_sliding_window`` is true (Qwen2, Qwen3)

``max_window_layers`` says nothing more: transformers has made ``layer_types`` from it, or does not read it.
"""

from typing import Any

from lightning_mcore.hf.config_rules import LONGEST_SEQUENCE, Config, Derived, Fields, refuse_outside, refuse_unless

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
"""The names of layers in ``layer_types``: without and with a window."""


def _read_window(config: Config) -> dict[str, Any]:
    size = config.get("sliding_window")
    if size is None:
        return {}
    refuse_outside("sliding_window", size, 1, LONGEST_SEQUENCE)
    return {"window_size": [size - 1, 0]}


def _write_window(fields: Fields) -> dict[str, Any]:
    if fields["window_attn_skip_freq"] is not None:
        raise ValueError("it has windows in some layers only, which its config cannot express")
    return {"sliding_window": _sliding_window(fields)}


def _sliding_window(fields: Fields) -> int | None:
    """Return the number of keys that a query sees in a layer with a window; None if no layer has one."""
    if fields["window_size"] is None:
        return None
    before, after = fields["window_size"]
    if before < 0 or after != 0:
        raise ValueError(f"window_size={fields['window_size']!r} cannot be expressed in its config; only (n, 0) can")
    return int(before) + 1


WINDOW = Derived(("sliding_window",), _read_window, _write_window)

SWITCHED_WINDOW = Derived(
    ("sliding_window", "use_sliding_window", "max_window_layers"),
    lambda config: _read_window(config) if config.get("use_sliding_window") else {},
    lambda fields: {**_write_window(fields), "use_sliding_window": fields["window_size"] is not None},
)


def _read_layer_windows(config: Config) -> dict[str, Any]:
    layer_types = config.get("layer_types") or ()
    for layer_type in layer_types:
        allowed = (FULL_ATTENTION, SLIDING_ATTENTION)
        refuse_unless("layer_types", layer_type, allowed, "Megatron does not have such layers")
    if SLIDING_ATTENTION not in layer_types:
        return {}
    size = config.get("sliding_window")
    if not size:
        raise ValueError(
            f"layer_types has {SLIDING_ATTENTION!r}, and sliding_window={size!r} does not give its size; give it"
        )
    window = _read_window(config)
    if FULL_ATTENTION not in layer_types:
        return window
    # Despite its name, a 1 in window_attn_skip_freq is a layer with a window
    return {**window, "window_attn_skip_freq": [int(name == SLIDING_ATTENTION) for name in layer_types]}


def _write_layer_windows(fields: Fields) -> dict[str, Any]:
    size = _sliding_window(fields)
    has_window = fields["window_attn_skip_freq"] or [size is not None] * fields["num_layers"]
    layer_types = [SLIDING_ATTENTION if flag else FULL_ATTENTION for flag in has_window]
    return {"sliding_window": size, "layer_types": layer_types}


LAYER_WINDOWS = Derived(
    ("sliding_window", "layer_types", "max_window_layers"), _read_layer_windows, _write_layer_windows
)


def _read_switched_layer_windows(config: Config) -> dict[str, Any]:
    # transformers ignores the size when the switch is off, and then layer_types contradicts it
    switch, size = config.get("use_sliding_window"), config.get("sliding_window")
    if SLIDING_ATTENTION in (config.get("layer_types") or ()) and not (switch and size):
        raise ValueError(
            f"layer_types has {SLIDING_ATTENTION!r}, and use_sliding_window={switch!r} with sliding_window={size!r} do"
            " not give its size; give both"
        )
    return _read_layer_windows(config)


SWITCHED_LAYER_WINDOWS = Derived(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    _read_switched_layer_windows,
    lambda fields: {**_write_layer_windows(fields), "use_sliding_window": fields["window_size"] is not None},
)
