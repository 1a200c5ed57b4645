# SPDX-License-Identifier: Apache-2.0
"""Rules that map the keys of a Hugging Face config to settings of Megatron, and back.

A family (``family.py``) is a list of such rules. Each rule is responsible for some keys: it maps them, ignores them
because they do not change the numbers, or refuses them. Keys without a rule are refused, so a key that changes the
numbers is never ignored.

*Fields* are settings by their names in this package: the fields of ``TransformerConfig``, and arguments of
``MCoreGPT`` such as ``vocab_size`` and ``rotary_base``. Rules read a config in which transformers has filled in all
defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Config = Mapping[str, Any]
Fields = Mapping[str, Any]

LONGEST_SEQUENCE = 1 << 40
"""A sequence length, in tokens, beyond that of any model."""

_LONGEST_VALUE = 80  # characters of a value in an error

LARGEST_SIZE = 1 << 24
"""A size beyond that of any model; a larger value in a config is damaged, and would take all memory."""


class ConfigRule(Protocol):
    """The interface of a rule; your own class may implement it."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the Hugging Face config that the rule is responsible for."""
        ...

    def read(self, config: Config) -> dict[str, Any]:
        """Return fields.

        Args:
            config: The Hugging Face config.

        Raises:
            ValueError: A value is not supported; the message says which values are.
        """
        ...

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return keys of the Hugging Face config.

        Args:
            fields: All fields of a model, with defaults.

        Raises:
            ValueError: The family has no key for a value; the message names it.
        """
        ...


@dataclass(frozen=True)
class Same:
    """A key and a field with the same value.

    Args:
        key: The key in the Hugging Face config.
        field: The name of the field.
        others: The names of the key in other releases of transformers.
        at_least: The smallest allowed value, an int if only whole numbers are allowed; None to allow any value.
        at_most: The largest allowed value.
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
        """Return the field; an empty dict without a value, so that the default applies."""
        self.check(config)
        value = next((config[key] for key in self.keys if config.get(key) is not None), None)
        return {} if value is None else {self.field: value}

    def check(self, config: Config) -> None:
        """Refuse a value that is out of range, in a config that may be incomplete.

        Raises:
            ValueError: The value is out of range, or not a number.
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
    """Initial values of fields that do not change the model's numbers; the user may change them.

    Args:
        fields: The values by field name.
    """

    fields: dict[str, Any]
    keys: tuple[str, ...] = ()

    def read(self, config: Config) -> dict[str, Any]:
        """Return the fields."""
        return dict(self.fields)

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return an empty dict."""
        return {}


@dataclass(frozen=True)
class Constants(Preset):
    """Fields that the whole family has in common.

    Args:
        fields: The values by field name.
    """

    def write(self, fields: Fields) -> dict[str, Any]:
        """Refuse other values, because the config has no key for them."""
        for name, value in self.fields.items():
            if fields[name] != value:
                raise ValueError(
                    f"{name}={fields[name]!r} cannot be expressed in its config, which always means {value!r}"
                )
        return {}


@dataclass(frozen=True)
class Only:
    """A key that is supported with one value only.

    Args:
        key: The key in the Hugging Face config.
        value: The value, which is also the default.
        why: Why other values are not supported, as a clause.
        is_written: Whether to write the key; False if transformers does not know it.
    """

    key: str
    value: Any
    why: str = "Megatron's model does not have this"
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
    """Keys that do not change the numbers of a model whose weights are given.

    Args:
        keys: The keys in the Hugging Face config.
    """

    keys: tuple[str, ...]

    def read(self, config: Config) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return an empty dict."""
        return {}


@dataclass(frozen=True)
class Derived:
    """Keys and fields that two functions translate.

    Args:
        keys: Keys that the two functions handle.
        read: Turns the config into fields.
        write: Turns fields into keys.
    """

    keys: tuple[str, ...]
    read: Callable[[Config], dict[str, Any]] = field(repr=False)
    write: Callable[[Fields], dict[str, Any]] = field(repr=False)


def refuse_outside(key: str, value: Any, least: float, most: float = LARGEST_SIZE) -> None:
    """Refuse a value of a key that is not a number in a range, or not a whole number if ``least`` is an int.

    Raises:
        ValueError: The value is not such a number.
    """
    kind = int if isinstance(least, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{key}={shortened(value)} is not supported; only {what} from {least} to {most} are")


def shortened(value: Any) -> str:
    """Return the ``repr`` of a value, cut if it is too long for a sentence."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def refuse_unless(key: str, value: Any, allowed: tuple[Any, ...], why: str) -> None:
    """Refuse a value of a key that is not one of those allowed.

    Raises:
        ValueError: The value is not one of those allowed.
    """
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ValueError(f"{key}={shortened(value)} is not supported, because {why}; only {choices} is")
