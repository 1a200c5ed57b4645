# SPDX-License-Identifier: Apache-2.0
"""How the keys of a Hugging Face config become settings of Megatron, and the other way.

A family (``family.py``) is a list of such rules. Each answers for some keys: it maps them, knows that they change no
number, or refuses them. What no rule answers for is refused, so that no key that changes the numbers is passed over.

*Fields* are settings by the name they have here: those of ``TransformerConfig``, and the arguments of ``MCoreGPT`` such
as ``vocab_size`` and ``rotary_base``. Rules read a config as transformers has completed it, with all defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Config = Mapping[str, Any]
Fields = Mapping[str, Any]

LONGEST_SEQUENCE = 1 << 40
"""More tokens than any model was made for."""

_LONGEST_VALUE = 80  # characters of a value in an error

LARGEST_SIZE = 1 << 24
"""Larger than any size of any model; what is beyond it in a config is damage, and would take all memory."""


class ConfigRule(Protocol):
    """What a rule answers. A class of your own may be one."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the Hugging Face config that it answers for."""
        ...

    def read(self, config: Config) -> dict[str, Any]:
        """Return fields.

        Args:
            config: The Hugging Face config.

        Raises:
            ValueError: A value is not supported; says which and what is.
        """
        ...

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return keys of the Hugging Face config.

        Args:
            fields: All fields of a model, with defaults.

        Raises:
            ValueError: The family has no key for a value; says which.
        """
        ...


@dataclass(frozen=True)
class Same:
    """One key, one field, one value.

    Args:
        key: Of the Hugging Face config.
        field: Its name here.
        others: What other releases of transformers call the key.
        at_least: The smallest value that makes sense, an int where only whole numbers do; None where any value may.
        at_most: The largest number that a model may be built of.
    """

    key: str
    field: str
    others: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: int = LARGEST_SIZE

    @property
    def keys(self) -> tuple[str, ...]:
        """The key, by all its names."""
        return (self.key, *self.others)

    def read(self, config: Config) -> dict[str, Any]:
        """Return the field; None stays away, so that the default holds."""
        self.check(config)
        value = next((config[key] for key in self.keys if config.get(key) is not None), None)
        return {} if value is None else {self.field: value}

    def check(self, config: Config) -> None:
        """Refuse a number that is out of its range, in a config that need not be complete.

        Raises:
            ValueError: It is, or it is not a number.
        """
        if self.at_least is not None:
            for key in self.keys:
                if config.get(key) is not None:
                    refuse_outside(key, config[key], self.at_least, self.at_most)

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return the key."""
        return {self.key: fields[self.field]}


@dataclass(frozen=True)
class Preset:
    """Fields to start from that change no number of the model, so that a user may have others.

    Args:
        fields: By name.
    """

    fields: dict[str, Any]
    keys: tuple[str, ...] = ()

    def read(self, config: Config) -> dict[str, Any]:
        """Return the fields."""
        return dict(self.fields)

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return nothing."""
        return {}


@dataclass(frozen=True)
class Constants(Preset):
    """Fields that the whole family has in common.

    Args:
        fields: By name.
    """

    def write(self, fields: Fields) -> dict[str, Any]:
        """Refuse other values; there is no key for them."""
        for name, value in self.fields.items():
            if fields[name] != value:
                raise ValueError(f"{name}={fields[name]!r} has no place in it, which always has {value!r}")
        return {}


@dataclass(frozen=True)
class Only:
    """A key with one value that is supported.

    Args:
        key: Of the Hugging Face config.
        value: The value; a config without the key is taken to have it.
        why: What another value would need, as the end of a sentence.
        is_written: Whether a config is to have it; not where transformers does not know the key.
    """

    key: str
    value: Any
    why: str = "Megatron's model has no such thing"
    is_written: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """The key."""
        return (self.key,)

    def read(self, config: Config) -> dict[str, Any]:
        """Refuse another value."""
        refuse_unless(self.key, config.get(self.key, self.value), (self.value,), self.why)
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return the key."""
        return {self.key: self.value} if self.is_written else {}


@dataclass(frozen=True)
class Unused:
    """Keys that change no number of a model whose weights are given.

    Args:
        keys: Of the Hugging Face config.
    """

    keys: tuple[str, ...]

    def read(self, config: Config) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return nothing."""
        return {}


@dataclass(frozen=True)
class Derived:
    """Keys and fields that belong together in some other way.

    Args:
        keys: Keys that the two functions know.
        read: Turns the config into fields.
        write: Turns fields into keys.
    """

    keys: tuple[str, ...]
    read: Callable[[Config], dict[str, Any]] = field(repr=False)
    write: Callable[[Fields], dict[str, Any]] = field(repr=False)


def refuse_outside(key: str, value: Any, least: float, most: float = LARGEST_SIZE) -> None:
    """Refuse a value of a key that is not a number in a range; a whole one where ``least`` is an int.

    Raises:
        ValueError: It is not.
    """
    kind = int if isinstance(least, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{key}={shortened(value)} is not supported; only {what} from {least} to {most} are")


def shortened(value: Any) -> str:
    """Return a value as Python writes it, cut where it is too long for a sentence."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def refuse_unless(key: str, value: Any, allowed: tuple[Any, ...], why: str) -> None:
    """Refuse a value of a key.

    Raises:
        ValueError: It is none of those allowed.
    """
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ValueError(f"{key}={shortened(value)} is not supported, for {why}; only {choices} is")
