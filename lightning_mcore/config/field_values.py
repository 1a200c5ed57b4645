# SPDX-License-Identifier: Apache-2.0
"""Whether plain data fits the type of a field: what YAML can say of Megatron's configs.

Functions are given as import paths, members of an enum by name. ``layers/transformer_config.py`` checks the fields of a
model with it; ``lightning-mcore plan`` does, with types read from Megatron's source.
"""

import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union


def accepts(hint: Any, value: Any) -> bool:
    """Whether plain data can become a value of this type; a type we do not know is left to Megatron."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(accepts(argument, value) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if is_callable(hint):
        return isinstance(value, str)
    if hint is type(None):
        return value is None
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in hint.__members__
    if origin is dict:
        return isinstance(value, Mapping)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and _accepts_items(origin, arguments, value)
    if hint in (int, float):
        return isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _accepts_items(origin: Any, arguments: tuple[Any, ...], items: list[Any] | tuple[Any, ...]) -> bool:
    if origin is tuple and ... not in arguments:
        return len(items) == len(arguments) and all(map(accepts, arguments, items))
    return all(any(accepts(argument, item) for argument in arguments if argument is not ...) for item in items)


def choices_of(hint: Any) -> str:
    """Name the values of a type for an error message."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(choices_of(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if is_callable(hint):
        return "an import path such as 'torch.nn.functional.silu'"
    if hint is type(None):
        return "None"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(map(repr, hint.__members__))
    return f"a value of type {hint.__name__ if isinstance(hint, type) and not arguments else hint}"


def is_callable(hint: Any) -> bool:
    """Whether a value of this type is a function."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(typing.get_origin(choice) is Callable for choice in choices)  # also of a bare typing.Callable
