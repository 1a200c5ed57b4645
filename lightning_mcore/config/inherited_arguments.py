# SPDX-License-Identifier: Apache-2.0
"""Constructors with the arguments of another class and some of their own: ``MCorePreference`` after ``MCoreGPT``.

Each signature names all arguments, so that type checkers, editors, ``inspect.signature`` and Lightning's saved
hyper-parameters see them. What they mean, and what happens to them, is written only in the base class:
:func:`inherit_help` takes over its help, and :func:`passed_on` hands the values on. :func:`arguments_of` reads the
defaults.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

Arguments = Mapping[str, Any]
"""Defaults by name; ``...`` where there is none."""

_T = TypeVar("_T", bound=type)
_SECTION = re.compile(r"^Args:\n((?: {4,}.*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?=\w+: )", re.MULTILINE)


@cache
def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return the arguments of a function, without ``self``; of a class those of its constructor."""
    return {
        name: ... if given.default is given.empty else given.default
        for name, given in inspect.signature(function).parameters.items()
        if given.kind is not given.VAR_KEYWORD
    }


def passed_on(given: Mapping[str, Any], *own: str) -> dict[str, Any]:
    """Return the arguments in a constructor's ``locals()``, read in its first line, without the class's ``own``."""
    return {name: value for name, value in given.items() if name not in ("self", "cls", "__class__", *own)}


def inherit_help(base: type) -> Callable[[_T], _T]:
    """Return a decorator that takes over the help of arguments that a class does not explain itself from ``base``.

    jsonargparse, and so ``--help``, reads the docstrings of a constructor and of its class. The class explains its own
    arguments, and its constructor's docstring becomes the ``Args:`` section of ``base``. ``from_pretrained`` gets the
    help of the base's ``from_pretrained``, and the class's help for arguments that only the class has.
    """

    def decorator(kind: _T) -> _T:
        in_class = _help_in(vars(base)["__init__"]) | _help_in(base) | _help_in(kind)
        _explain(vars(kind)["__init__"], in_class)
        loader = vars(kind).get("from_pretrained")
        if loader is not None:
            _explain(loader.__func__, in_class | _help_in(vars(base)["from_pretrained"].__func__))
        return kind

    return decorator


def _help_in(documented: Any) -> dict[str, str]:
    """Return the ``Args:`` of a docstring: each argument's lines, with its name and indentation."""
    # "Args:\n    seed: Seed\n        of the order." gives {"seed": "    seed: Seed\n        of the order."}
    section = _SECTION.search(inspect.cleandoc(documented.__doc__ or "") + "\n")
    entries = _ENTRY.split(section[1])[1:] if section is not None else []
    return {entry.partition(":")[0]: f"    {entry.rstrip()}" for entry in entries}


def _explain(function: Any, known: Mapping[str, str]) -> None:
    """Write the help of the arguments that a function takes into its docstring."""
    lines = [known[name] for name in inspect.signature(function).parameters if name in known]
    about = inspect.cleandoc(function.__doc__ or "Take these arguments.")  # a parser needs text before "Args:"
    function.__doc__ = "\n".join([about, "", "Args:", *lines])
