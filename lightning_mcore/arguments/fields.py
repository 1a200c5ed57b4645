# SPDX-License-Identifier: Apache-2.0
"""Declare a field of an argument class, and check that its value has its type.

transformers' ``HfArgumentParser`` checks types and choices only on the command line. It stores the values of a file or
a dict unchecked. :func:`check_types` therefore runs in ``__post_init__``, so that a wrong value raises wherever it
comes from. The error names the field, the value and what is allowed. Nothing is converted.
"""

import dataclasses
import enum
import types
from collections.abc import Collection
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_mcore.arguments.documents import read_yaml
from lightning_mcore.config.value_checks import accepts, choices_of


def option(help: str, default: Any = None) -> Any:
    """Declare a field with its help text on the command line."""
    return dataclasses.field(default=default, metadata={"help": help})


def flag(help: str, default: bool | None = None) -> Any:
    """Declare a yes-or-no field; its name alone means yes, and None keeps the checkpoint's or Megatron's value."""
    metadata: dict[str, Any] = {"help": help}
    # HfArgumentParser adds these two only to fields of type bool, not to ``bool | None``.
    if default is None:
        metadata |= {"nargs": "?", "const": True}
    return dataclasses.field(default=default, metadata=metadata)


def check_types(arguments: Any, may_be_none: Collection[str] = ()) -> None:
    """Check every value of a dataclass against the type of its field; fields in ``may_be_none`` may be None."""
    hints = get_type_hints(type(arguments))
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if field.init and not (value is None and field.name in may_be_none):
            check_type(field.name, value, hints[field.name])


_SECRETS = ("token", "api_key", "secret", "webhook_url")


def shown(name: str, value: Any) -> str:
    """Return a value as errors show it; a secret, such as ``hub_token``, becomes ``...``."""
    return "..." if name.endswith(_SECRETS) and value else repr(value)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Check one value against a type from ``typing.get_type_hints``; the errors of :func:`check_types`."""
    hint = _with_values(hint)
    if accepts(hint, value):
        return
    # ``int | None`` has only the choice None, so its error is about the type.
    choices = _choices(hint)
    if any(choice is not None for choice in choices):
        written = " (YAML reads an unquoted no as False)" if value is False and "no" in choices else ""
        raise ValueError(f"{name}={shown(name, value)}{written} is not available; choose {_listed(choices)}")
    raise TypeError(
        f"{name}={shown(name, value)} is of type {type(value).__name__}{_at_yaml(value, hint)}; give {choices_of(hint)}"
    )


_YES, _NO = ("1", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no")


def take_words(name: str, words: list[str], hint: Any) -> Any:
    """Take an option's value from the words after it, as transformers' ``HfArgumentParser`` does, and remove its words.

    A yes-or-no option may stand alone, which means yes. Text stays text where the type allows it. Other values are
    YAML, so ``1e-5`` is a number and ``{"a": 1}`` a dict. Raises ValueError if a value is missing or is not YAML.
    """
    try:
        return _taken(words, _with_values(hint))
    except ValueError as error:
        raise ValueError(f"--{name}: {error}; give --{name} VALUE") from error


def _taken(words: list[str], hint: Any) -> Any:
    """Return the value that words begin with, and remove its words."""
    # A value ends at the next option.
    end = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    is_flag, is_list = accepts(hint, True), hint is not Any and accepts(hint, [""])
    count = end if is_list else min(end, 1)
    if is_flag and count == 1 and hint is not Any and not (_means(words[0]) or accepts(hint, "") or _choices(hint)):
        count = 0  # the word is another argument
    if not count:
        if is_flag:
            return True
        raise ValueError("it needs a value")
    taken, words[:count] = words[:count], []
    return taken if count > 1 else _value_of(taken[0], hint)


def _means(word: str) -> bool:
    return word.lower() in _YES + _NO


def _value_of(word: str, hint: Any) -> Any:
    if hint is Any:
        return read_yaml(word, word)
    # Choices come before yes and no: "no" is a choice of ``save_strategy``, and not False.
    if word in _choices(hint):
        return word
    if accepts(hint, True) and _means(word):
        return word.lower() in _YES
    is_dict = word.startswith("{") and accepts(hint, {})
    return word if accepts(hint, "") and not is_dict else read_yaml(word, word)


def _at_yaml(value: Any, hint: Any) -> str:
    """Return the end of an error that says why YAML read a number as text; empty if the value is not a number."""
    if not (isinstance(value, str) and accepts(hint, 0.5) and _is_number(value)):
        return ""
    if "e" in value.lower():
        return f", because YAML reads numbers such as 1e-5 as text; write {float(value):.1e}, with a point"
    return "; write it without quotes"


def _with_values(hint: Any) -> Any:
    """Return a type with the values of an enumeration in its place, because files and words have the values."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = list(get_args(hint))
        # transformers' ``IntervalStrategy | str`` means a member or its value, not any text.
        if any(map(_is_enum, kinds)):
            kinds = [kind for kind in kinds if kind is not str]
        return Union[tuple(map(_with_values, kinds))]  # noqa: UP007 - its types are known only here
    if get_origin(hint) is list:
        return types.GenericAlias(list, (_with_values(get_args(hint)[0]),))
    return Literal[tuple(member.value for member in hint)] if _is_enum(hint) else hint


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _choices(hint: Any) -> list[Any]:
    """Return the choices of a ``Literal``; an empty list for other types."""
    if get_origin(hint) in (Union, types.UnionType):
        return [choice for argument in get_args(hint) for choice in _choices(argument)]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [None] if hint is type(None) else []


def _listed(choices: list[Any]) -> str:
    *others, last = [repr(choice) for choice in choices]
    return f"{', '.join(others)} or {last}" if others else last


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
