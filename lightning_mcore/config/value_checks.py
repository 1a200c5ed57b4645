# SPDX-License-Identifier: Apache-2.0
"""Checks of plain data, each with a sentence that says what was given and what is allowed.

:func:`require_size` and the functions after it check sizes; layout, pipeline stages and the model's shape use them, so
all errors about sizes read alike. :func:`accepts` tells whether plain data fits the type of a field in Megatron's
configs, in the form that YAML files use: functions as import paths, enum members by name.
"""

import dataclasses
import enum
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from typing import Any, ClassVar, Literal, Self, Union

from lightning_mcore.config.text import unknown_name


def plain_values(value: Any) -> Any:
    """Return a mapping as a dict and a list of any class as a list, all the way down; other values unchanged.

    Configuration libraries have classes of their own: OmegaConf's ``[0, 1]`` is a ``ListConfig``, not a list.
    """
    if isinstance(value, Mapping):
        return {name: plain_values(part) for name, part in value.items()}
    return [plain_values(part) for part in value] if isinstance(value, MutableSequence) else value


def make_fields_plain(settings: Any) -> None:
    """Replace the values of a dataclass, which may be frozen, by their :func:`plain_values`."""
    for field in dataclasses.fields(settings):
        object.__setattr__(settings, field.name, plain_values(getattr(settings, field.name)))


def require_size(name: str, value: object, at_least: int = 1) -> None:
    """Raise TypeError or ValueError for a value that is not a whole number of ranks, layers or tokens."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not an int; give an int of {at_least} or more")
    if value < at_least:
        raise ValueError(f"{name}={value} is too small; choose {at_least} or more")


def require_flag(name: str, value: object, or_none: bool = False) -> None:
    """Raise TypeError for a value that is not a bool (or None, with ``or_none``)."""
    if not isinstance(value, bool) and not (or_none and value is None):
        raise TypeError(f"{name}={value!r} is not a bool; give {'True, False or None' if or_none else 'True or False'}")


def require_number(name: str, value: object, above: float = 0.0, at_least: float | None = None) -> None:
    """Raise TypeError or ValueError unless a value is a finite number above ``above``; with ``at_least``, not below."""
    allowed = f"above {above:g}" if at_least is None else f"of {at_least:g} or more"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is not a number; give one {allowed}")
    if not math.isfinite(value) or (value <= above if at_least is None else value < at_least):
        raise ValueError(f"{name}={value} is not a finite number {allowed}; choose one")


def require_instance(name: str, value: object, kind: type) -> None:
    """Raise TypeError for an object that is neither None nor of a class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} is not a {kind.__name__}; give one, or leave it out")


def require_file(name: str, value: object, what: str = "one in YAML") -> None:
    """Raise for a value that is neither None nor a file: TypeError if it is not a path, FileNotFoundError otherwise."""
    if value is not None and not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={value!r} is not a path; give the path of {what}")
    if value is not None and not os.path.isfile(value):
        raise FileNotFoundError(f"{name}={value!r} is not a file; give the path of {what}")


def require_choice(name: str, value: object, kind: Any, or_none: bool = False) -> None:
    """Raise ValueError for a value that is not one of the choices of ``kind``, a ``Literal`` (or None)."""
    allowed = (*typing.get_args(kind), None) if or_none else typing.get_args(kind)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose {choices(map(repr, allowed))}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The base of settings that files and hyper-parameters hold as plain data."""

    argument: ClassVar[str]  # which holds them, for errors

    @classmethod
    def of(cls, given: Self | Mapping[str, Any]) -> Self:
        """Return settings unchanged, or make them from a mapping of their fields; also the errors of the class."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"{cls.argument}={given!r} is not a {cls.__name__}; give one, or a dict of its fields")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(unknown_name(f"field of {cls.__name__}", str(key), known))
        return cls(**given)

    def plain(self) -> dict[str, Any]:
        """Return all fields as plain data; :meth:`of` reads it back."""
        return dataclasses.asdict(self)


def require_divides(name: str, size: int, of: str, whole: int | None) -> None:
    """Raise ValueError for a ``size`` that does not divide ``whole``; an unknown whole (None) is not checked."""
    if whole is not None and whole % size:
        raise ValueError(f"{name}={size} does not divide {of}={whole}; choose {choices(divisors(whole))}")


def divisors(whole: int) -> list[int]:
    """Return the sizes that divide ``whole``, ascending."""
    return [size for size in range(1, whole + 1) if whole % size == 0]


def neighbours(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` next to ``value`` as choices, without zero: ``8 or 12`` for 10 and 4."""
    below = value // unit * unit
    return choices([size for size in (below, below + unit) if size])


def choices(values: Iterable[object]) -> str:
    """Return values as text, such as ``1, 2 or 4``; for a long list, only the first eight and the last."""
    *others, last = [str(value) for value in values]
    shown = others if len(others) <= 8 else [*others[:8], "..."]
    return f"{', '.join(shown)} or {last}" if shown else last


def accepts(hint: Any, value: Any) -> bool:
    """Return whether plain data can become a value of this type; True for unknown types, which Megatron checks."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(accepts(argument, value) for argument in arguments)
    if origin is Literal:
        return value in arguments
    # A function is an import path in a file.
    if is_callable(hint):
        return isinstance(value, str)
    if hint is type(None):
        return value is None
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in hint.__members__
    if dict in (hint, origin):
        return isinstance(value, Mapping)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and _accepts_items(origin, arguments, value)
    if hint in (int, float):
        return isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _accepts_items(origin: Any, arguments: tuple[Any, ...], items: list[Any] | tuple[Any, ...]) -> bool:
    # tuple[int, int] has one type per item; tuple[int, ...] and lists have one for all.
    if origin is tuple and ... not in arguments:
        return len(items) == len(arguments) and all(map(accepts, arguments, items))
    return all(any(accepts(argument, item) for argument in arguments if argument is not ...) for item in items)


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a dict"}


def choices_of(hint: Any) -> str:
    """Return the values of a type as text for errors."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(choices_of, arguments)))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if is_callable(hint):
        return "an import path such as 'torch.nn.functional.silu'"
    if hint is type(None):
        return "None"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(map(repr, hint.__members__))
    if origin is list:
        return f"a {hint}"  # such as list[int]
    kind = dict if origin is dict else hint
    return _WORDS.get(kind) or f"a value of type {hint.__name__ if isinstance(hint, type) and not arguments else hint}"


def is_callable(hint: Any) -> bool:
    """Return whether values of this type are functions."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(typing.get_origin(choice) is Callable for choice in choices)  # includes a bare typing.Callable
