# SPDX-License-Identifier: Apache-2.0
"""Rules that map the keys of a Hugging Face config to Megatron settings, and back.

A family (``family.py``) is a list of such rules. Each rule owns some keys: it maps them, ignores them because they do
not change the numbers, or rejects them. A key without a rule is an error, so no key that changes the numbers is ever
ignored.

*Fields* are settings under this package's names: the fields of ``TransformerConfig``, and ``MCoreGPT`` arguments such
as ``vocab_size`` and ``rotary_base``. Rules read a config in which transformers has already filled in all defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Config = Mapping[str, Any]
Fields = Mapping[str, Any]

LONGEST_SEQUENCE = 1 << 40
"""A sequence length, in tokens, that no model reaches."""

_LONGEST_VALUE = 80

LARGEST_SIZE = 1 << 24
"""A size that no model reaches; a larger value in a config is damaged, and would allocate all memory."""


class ConfigRule(Protocol):
    """The interface of a rule; your own class may implement it."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The Hugging Face config keys that the rule owns."""
        ...

    def read(self, config: Config) -> dict[str, Any]:
        """Return the fields that the keys set.

        Args:
            config: The Hugging Face config.

        Raises:
            ValueError: A value is not supported; the message lists the supported values.
        """
        ...

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return the Hugging Face keys.

        Args:
            fields: All fields of a model, with defaults.

        Raises:
            ValueError: The family has no key for a value; the message names the field.
        """
        ...


@dataclass(frozen=True)
class Same:
    """A key and a field with the same value.

    ``Same("num_hidden_layers", "num_layers", at_least=1)`` reads ``num_hidden_layers: 32`` as ``num_layers=32``, writes
    it back under the same key, and rejects 0, 1.5 and "32".

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
        """The key, under all its names."""
        return (self.key, *self.others)

    def read(self, config: Config) -> dict[str, Any]:
        """Return the field; an empty dict if the config has no value, so that the default applies."""
        self.check(config)
        # The first of its names that has a value: older configs use other names, and null means the default
        value = next((config[key] for key in self.keys if config.get(key) is not None), None)
        return {} if value is None else {self.field: value}

    def check(self, config: Config) -> None:
        """Check the range, in a config that may be incomplete.

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
    """Fields that every model of the family has; unlike with :class:`Preset`, other values cannot be exported.

    Args:
        fields: The values by field name.
    """

    def write(self, fields: Fields) -> dict[str, Any]:
        """Raise ValueError for other values, because the config has no key for them."""
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
        why: Why other values are not supported, as a clause for the error message.
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
        """Raise ValueError for another value."""
        refuse_unless(self.key, config.get(self.key, self.value), (self.value,), self.why)
        return {}

    def write(self, fields: Fields) -> dict[str, Any]:
        """Return the key."""
        return {self.key: self.value} if self.is_written else {}


@dataclass(frozen=True)
class Unused:
    """Keys that do not change what a model with given weights computes.

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
        keys: Keys that the functions handle.
        read: Turns the config into fields. A field that it omits keeps its default.
        write: Turns fields, with defaults, into keys; also into a key without a rule, such as
            ``max_position_embeddings``. The message of its ValueError follows "the model is not one of 'llama':", so
            "it" is the model.
    """

    keys: tuple[str, ...]
    read: Callable[[Config], dict[str, Any]] = field(repr=False)
    write: Callable[[Fields], dict[str, Any]] = field(repr=False)


def refuse_outside(key: str, value: Any, least: float, most: float = LARGEST_SIZE) -> None:
    """Raise ValueError unless the value is a number in a range: a whole number if ``least`` is an int."""
    kind = int if isinstance(least, int) else (int, float)
    # bool is a subclass of int, and `true` is not a size; NaN fails the comparison
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{key}={shortened(value)} is not supported; only {what} from {least} to {most} are")


def shortened(value: Any) -> str:
    """Return the ``repr`` of a value, shortened to fit an error message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def refuse_unless(key: str, value: Any, allowed: tuple[Any, ...], why: str) -> None:
    """Raise ValueError unless the value is allowed."""
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ValueError(f"{key}={shortened(value)} is not supported, because {why}; only {choices} is")
