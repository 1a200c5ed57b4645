# SPDX-License-Identifier: Apache-2.0
"""The model's part of ``TransformerConfig`` as plain data, its checks, and the config made of it.

``TransformerConfig`` mixes what a model is (layers, heads, experts) with how it is run (parallel sizes, number formats,
schedule callbacks). A module takes the first kind as a dict of plain values, so that YAML, ``save_hyperparameters`` and
safe checkpoint loading work. The second kind belongs to the strategy and to ``Trainer(precision=...)`` and is rejected
here, so that each setting has one home. :func:`check_transformer_fields` runs in the module's constructor, before
anything is allocated; :func:`build_transformer_config` runs when the model is built. ``MCoreGPT`` calls both; your own
module may do the same.
"""

import enum
import importlib
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

from megatron.core import __version__
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lightning_mcore.config.field_homes import (
    DEFAULTS,
    MODULE_FIELDS,
    REQUIRED,
    SHORT_NAMES,
    check_home,
    check_lengths,
    unknown_field,
)
from lightning_mcore.config.value_checks import accepts, choices_of, is_callable

__all__ = ["DEFAULTS", "MODULE_FIELDS", "build_transformer_config", "check_transformer_fields"]

_MEGATRON = __version__.partition("+")[0]  # 0.19 appends a commit hash

_ACTIVATIONS = ("torch.nn.functional", "megatron.core.activations", "lightning_mcore.layers.activations")
_INIT_METHODS = ("torch.nn.init",)


def check_transformer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check the model's fields of ``TransformerConfig``, by name and by value, and return them as a dict.

    A function is given as an import path such as ``"torch.nn.functional.silu"``, an activation also as ``"gelu"``,
    ``"silu"``, ``"relu"``, ``"quick_gelu"`` or ``"squared_relu"``, a member of an enum by its name. Raises TypeError
    for anything but a mapping, and ValueError if a field is unknown, has another home, has a wrong value, or is absent.
    """
    if not isinstance(fields, Mapping):
        raise TypeError(f"transformer={fields!r} is not a dict of TransformerConfig fields; give one")
    for _, sentence in field_faults(fields):
        raise ValueError(sentence)
    return dict(fields)


def field_faults(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each wrong field, and a sentence; the name is empty if a required field is absent."""
    hints = _hints(fields)
    for name, value in fields.items():
        try:
            if not isinstance(name, str):
                raise ValueError(f"transformer has the key {name!r}, which is not text; give names of fields")
            check_home(name)
            if name not in hints:
                raise ValueError(unknown_field(name, hints, _hints_of_config(latent=True), _MEGATRON))
            _check_value(name, value, hints[name])
        except ValueError as error:
            yield name, str(error)
    missing = [name for name in REQUIRED if name not in fields]
    if missing:
        yield "", f"transformer lacks {' and '.join(missing)}; give {', '.join(REQUIRED)} at least"
        return
    try:
        check_lengths(fields)
    except ValueError as error:
        yield "", str(error)


def refuse_recorded_code(path: str, fields: Mapping[str, Any]) -> None:
    """Raise ValueError if fields from a file name functions other than torch's and Megatron's for this purpose.

    Allowed are activations and init methods. Fields that a user gives may name any function, and its module is
    imported; fields from a checkpoint may not. ``path`` is for the message.
    """
    hints = _hints(fields)
    for name, value in fields.items():
        if value is None or not is_callable(hints.get(name)):
            continue
        allowed = _INIT_METHODS if "init_method" in name else _ACTIVATIONS
        if not isinstance(value, str) or not _is_function_of(allowed, SHORT_NAMES.get(value, value)):
            raise ValueError(
                f"{path} has {name}={value!r}, but a file may only name functions of {' and '.join(allowed)}; if it is"
                f" your own function, give transformer={{{name!r}: {value!r}}} yourself"
            )


def _is_function_of(modules: tuple[str, ...], path: str) -> bool:
    module, _, name = path.rpartition(".")
    if module not in modules:
        return False
    function = getattr(importlib.import_module(module), name, None)
    is_own = isinstance(function, FunctionType) and function.__module__ == module
    return not name.startswith("_") and (is_own or isinstance(function, BuiltinFunctionType))


def build_transformer_config(fields: Mapping[str, Any], owned: Mapping[str, Any]) -> TransformerConfig:
    """Build Megatron's config from checked fields, :data:`DEFAULTS`, and ``owned`` fields of the strategy."""
    if doubled := sorted(fields.keys() & owned.keys()):
        raise ValueError(f"{doubled[0]} is given in transformer and by the strategy; remove it from transformer")
    hints = _hints(fields)
    given = {name: _resolve(name, value, hints[name]) for name, value in fields.items()}
    config_class = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        try:
            return config_class(**{**DEFAULTS, **given, **owned})
        except (AssertionError, NotImplementedError, ValueError) as error:
            failed = traceback.extract_tb(error.__traceback__)[-1].line  # the condition of an assert without a message
            reason = " ".join((str(error) or failed or type(error).__name__).split())
            raise ValueError(f"megatron-core {_MEGATRON} refuses this model: {reason}") from error


def _hints(fields: Mapping[str, Any]) -> dict[str, Any]:
    return _hints_of_config(bool(fields.get("multi_latent_attention")))


@cache
def _hints_of_config(latent: bool) -> dict[str, Any]:
    hints = typing.get_type_hints(TransformerConfig)
    if latent:
        # A TransformerConfig field keeps its own hint even if the subclass repeats it.
        hints = {**typing.get_type_hints(MLATransformerConfig), **hints}
    return hints


def _check_value(name: str, value: Any, hint: Any) -> None:
    if value is None or accepts(hint, value):
        if is_callable(hint) and value is not None:
            _import(name, value)
        return
    raise ValueError(f"{name}={value!r} does not fit; choose {choices_of(hint)}")


def _resolve(name: str, value: Any, hint: Any) -> Any:
    """Turn plain data into what Megatron takes: a function, a member of an enum, a tuple."""
    if value is None:
        return None
    if is_callable(hint):
        return _import(name, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value]
    if any(typing.get_origin(choice) is tuple for choice in (hint, *typing.get_args(hint))):
        return tuple(value)
    return value


def _import(name: str, path: str) -> Callable[..., Any]:
    module, _, attribute = SHORT_NAMES.get(path, path).rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        function = None
    if not callable(function):
        short = ", ".join(SHORT_NAMES)
        raise ValueError(f"{name}={path!r} is not a function; give an import path, or for an activation one of {short}")
    return typing.cast(Callable[..., Any], function)
