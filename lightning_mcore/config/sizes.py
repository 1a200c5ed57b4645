# SPDX-License-Identifier: Apache-2.0
"""Checks of one size against another, and the sentence that refuses it: what was given, what is allowed.

The layout (``layout``), the pipeline stages (``pipeline_split``) and the model's shape (``model_shape``) speak through
these functions, so that every refused size reads the same.
"""

from collections.abc import Iterable


def require_size(name: str, value: object, at_least: int = 1) -> None:
    """Refuse a value that is no whole number of ranks, layers or tokens.

    Raises:
        TypeError: It is not an int; a bool is not one, since ``True`` would silently mean 1.
        ValueError: It is too small.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not an int; give an int of {at_least} or more")
    if value < at_least:
        raise ValueError(f"{name}={value} is too small; choose {at_least} or more")


def require_flag(name: str, value: object, or_none: bool = False) -> None:
    """Refuse what is not a bool, or with ``or_none`` None.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool) and not (or_none and value is None):
        raise TypeError(f"{name}={value!r} is not a bool; give {'True, False or None' if or_none else 'True or False'}")


def require_divides(name: str, size: int, of: str, whole: int | None) -> None:
    """Refuse a ``size`` that does not divide ``whole``; an unknown whole (None) is not checked.

    Raises:
        ValueError: It does not divide.
    """
    if whole is not None and whole % size:
        raise ValueError(f"{name}={size} does not divide {of}={whole}; choose {choices(divisors(whole))}")


def divisors(whole: int) -> list[int]:
    """Return the sizes that divide ``whole``, ascending."""
    return [size for size in range(1, whole + 1) if whole % size == 0]


def neighbours(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` around ``value`` as choices, zero left out."""
    below = value // unit * unit
    return choices([size for size in (below, below + unit) if size])


def choices(values: Iterable[object]) -> str:
    """Return ``1, 2 or 4``; a long list keeps its first eight and its last."""
    *others, last = [str(value) for value in values]
    shown = others if len(others) <= 8 else [*others[:8], "..."]
    return f"{', '.join(shown)} or {last}" if shown else last
