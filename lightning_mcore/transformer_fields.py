# SPDX-License-Identifier: Apache-2.0
"""The model's part of ``TransformerConfig`` as plain data: what a user may write, checked, and the config made of it.

``TransformerConfig`` mixes what a model is (layers, heads, experts) with how it is run (parallel sizes, number
formats, schedule callbacks). A module takes the first kind as a dict of plain values, so that YAML,
``save_hyperparameters`` and safe checkpoint loading work; the second kind belongs to the strategy and to
``Trainer(precision=...)`` and is refused here, so that a setting has one home. :func:`check_transformer_fields` runs in
the module's constructor, before anything is allocated; :func:`build_transformer_config` when the model is made.
``MCoreGPT`` calls both; a module of your own may too.
"""

import difflib
import enum
import importlib
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, Union

from megatron.core import __version__
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lightning_mcore.fp8 import TRANSFORMER_FIELDS as FP8_FIELDS
from lightning_mcore.layout import ParallelLayout

DEFAULTS: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "calculate_per_token_loss": True}
"""Where we differ from Megatron: no dropout (Megatron: 0.1), and every token weighs the same, not every microbatch."""

_MEGATRON = __version__.partition("+")[0]  # 0.19 adds the commit of the folder that it runs in
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")

_OF_EACH_LAYER = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq")

_SHORT_NAMES = {
    "gelu": "torch.nn.functional.gelu",
    "silu": "torch.nn.functional.silu",
    "relu": "torch.nn.functional.relu",
    "quick_gelu": "megatron.core.activations.quick_gelu",
    "squared_relu": "megatron.core.activations.squared_relu",
}

_OF_THE_STRATEGY = {field.name for field in dataclass_fields(ParallelLayout)} | {
    "overlap_p2p_comm",
    "overlap_p2p_comm_warmup_flush",
    "deallocate_pipeline_outputs",
    "microbatch_group_size_per_vp_stage",
    "tp_comm_overlap",
}
_OF_THE_PRECISION = {"fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"} | {
    *FP8_FIELDS,
    "fp4",
    "fp4_recipe",
    "fp4_param",
}
_OF_THE_SCHEDULE = {"batch_p2p_comm", "variable_seq_lengths", "timers", "finalize_model_grads_func"} | {
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
}
OF_THE_MODULE = {
    "transformer_impl",
    "rotary_base",
    "rotary_percent",
    "position_embedding_type",
    "vocab_size",
    "yarn",
} | {
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
    "seq_length",
    "share_embeddings_and_output_weights",
    "make_vocab_size_divisible_by",
}


def check_transformer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check the model's fields of ``TransformerConfig``, by name and by value, and return them as a dict.

    Args:
        fields: Plain values by field name. Functions are given as an import path such as
            ``"torch.nn.functional.silu"``, activations also as ``"gelu"``, ``"silu"``, ``"relu"``, ``"quick_gelu"`` or
            ``"squared_relu"``; members of an enum by name.

    Returns:
        The same names and values.

    Raises:
        TypeError: It is not a mapping from names.
        ValueError: A field is unknown, has another home, has a value of the wrong kind, or a required one is absent.
    """
    if not isinstance(fields, Mapping):
        raise TypeError(f"transformer={fields!r} is not a dict of TransformerConfig fields")
    hints = _hints(fields)
    for name, value in fields.items():
        _check_home(name, hints)
        _check_value(name, value, hints[name])
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ValueError(f"transformer lacks {' and '.join(missing)}; give {', '.join(_REQUIRED)} at least")
    _check_lengths(fields)
    return dict(fields)


def _check_lengths(fields: Mapping[str, Any]) -> None:
    """Refuse a list with an entry for each layer that has more or fewer; Megatron finds out late, or not at all."""
    for name in _OF_EACH_LAYER:
        given = fields.get(name)
        if isinstance(given, list | tuple) and len(given) != fields["num_layers"]:
            raise ValueError(
                f"{name} has {len(given)} entries and num_layers is {fields['num_layers']}; give one for each layer"
            )


def build_transformer_config(fields: Mapping[str, Any], owned: Mapping[str, Any]) -> TransformerConfig:
    """Make Megatron's config of the model's fields, our :data:`DEFAULTS` and what strategy and precision own.

    Args:
        fields: What :func:`check_transformer_fields` returned; with ``multi_latent_attention`` the fields of
            ``MLATransformerConfig`` too.
        owned: ``MCoreModule.megatron_fields()`` and other values from outside the dict.

    Returns:
        A ``TransformerConfig``, or an ``MLATransformerConfig``.

    Raises:
        ValueError: A field is in both, or Megatron finds that the values contradict each other.
    """
    if doubled := sorted(fields.keys() & owned.keys()):
        raise ValueError(f"{doubled[0]} is given in transformer and by the strategy; remove it from transformer")
    hints = _hints(fields)
    given = {name: _resolve(name, value, hints[name]) for name, value in fields.items()}
    config_class = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # Megatron's own default causes it
        try:
            return config_class(**{**DEFAULTS, **given, **owned})
        except (AssertionError, NotImplementedError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"megatron-core {_MEGATRON} refuses this model: {reason}") from error


def _hints(fields: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(TransformerConfig)
    if fields.get("multi_latent_attention"):
        hints = {**typing.get_type_hints(MLATransformerConfig), **hints}
    return hints


def _check_home(name: str, hints: Mapping[str, Any]) -> None:
    """Refuse a name that Megatron does not have, or that is set elsewhere."""
    if name in OF_THE_MODULE:
        raise ValueError(f"{name} is an argument of the module, not a field of transformer; move it one level up")
    if name in _OF_THE_STRATEGY:
        raise ValueError(f"{name} belongs to the strategy, not to the model; set it in MCoreStrategy({name}=...)")
    if name in _OF_THE_PRECISION:
        raise ValueError(f"{name} belongs to the precision, not to the model; set it through Trainer(precision=...)")
    if name in _OF_THE_SCHEDULE or name.startswith("_"):
        raise ValueError(f"{name} is filled in by the strategy while it runs the model; remove it from transformer")
    if name not in hints:
        raise ValueError(_unknown(name, hints))


def _unknown(name: str, hints: Mapping[str, Any]) -> str:
    if name in typing.get_type_hints(MLATransformerConfig):
        return f"{name} is a field of multi-latent attention; set multi_latent_attention=True or remove it"
    close = difflib.get_close_matches(name, hints, n=1)
    suggestion = f"did you mean {close[0]}?" if close else "see TransformerConfig for those there are"
    return f"TransformerConfig of megatron-core {_MEGATRON} has no field {name}; {suggestion}"


def _check_value(name: str, value: Any, hint: Any) -> None:
    if value is None or _accepts(hint, value):
        if _is_callable(hint) and value is not None:
            _import(name, value)
        return
    raise ValueError(f"{name}={value!r} does not fit; choose {_choices(hint)}")


def _accepts(hint: Any, value: Any) -> bool:
    """Whether plain data can become a value of this type; a type we do not know is left to Megatron."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_accepts(argument, value) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if _is_callable(hint):
        return isinstance(value, str)
    if hint is type(None):
        return value is None
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in hint.__members__
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(any(_accepts(a, item) for a in arguments) for item in value)
    if hint in (int, float):
        return isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _choices(hint: Any) -> str:
    """Name the values of a type for an error message."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_choices(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if _is_callable(hint):
        return "an import path such as 'torch.nn.functional.silu'"
    if hint is type(None):
        return "None"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(map(repr, hint.__members__))
    return f"a value of type {hint.__name__ if isinstance(hint, type) and not arguments else hint}"


def _resolve(name: str, value: Any, hint: Any) -> Any:
    """Turn plain data into what Megatron wants: a function, a member of an enum, a tuple, a float."""
    if value is None:
        return None
    if _is_callable(hint):
        return _import(name, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value]
    if any(typing.get_origin(choice) is tuple for choice in (hint, *typing.get_args(hint))):
        return tuple(value)
    return value


def _is_callable(hint: Any) -> bool:
    choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(typing.get_origin(choice) is Callable for choice in choices)  # also of a bare typing.Callable


def _import(name: str, path: str) -> Callable[..., Any]:
    module, _, attribute = _SHORT_NAMES.get(path, path).rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        function = None
    if not callable(function):
        short = ", ".join(_SHORT_NAMES)
        raise ValueError(f"{name}={path!r} names no function; give an import path, or for an activation one of {short}")
    return typing.cast(Callable[..., Any], function)
