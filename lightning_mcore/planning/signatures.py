# SPDX-License-Identifier: Apache-2.0
"""Names, types and defaults of the arguments that a run is made of, as far as plain data can fit them."""

import contextlib
import dataclasses
import enum
import inspect
import logging
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.value_checks import is_callable
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.preference import MCorePreference
from lightning_mcore.models.vision import MCoreVisionGPT

_PLAIN = (int, float, bool, str, list, dict, tuple, NoneType)


@dataclass(frozen=True)
class Argument:
    """One field of a dataclass or argument of a constructor."""

    hint: Any  # its type; ``typing.Any`` where it takes objects
    default: Any  # its default; ``...`` where it has none


Arguments = Mapping[str, Argument]


@cache
def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return the arguments of a function, without ``self``; of a class those of its constructor."""
    owner: Any = function
    if isinstance(function, type):
        owner = function.__init__  # type: ignore[misc]
    hints = typing.get_type_hints(owner)
    return {
        name: Argument(_plain(hints.get(name, Any)), ... if given.default is given.empty else given.default)
        for name, given in inspect.signature(owner).parameters.items()
        if name != "self" and given.kind is not given.VAR_KEYWORD
    }


@cache
def fields_of(kind: type) -> Arguments:
    """Return the fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {field.name: Argument(_plain(hints[field.name]), _default(field)) for field in dataclasses.fields(kind)}


def of_trainer() -> Arguments:
    """Return the arguments of Lightning's ``Trainer``."""
    return arguments_of(inspect.unwrap(pl.Trainer.__init__))


def of_model(pretrained: bool = False, sees: bool = False) -> Arguments:
    """Return the arguments of ``MCoreGPT`` and ``MCorePreference``, or of their ``from_pretrained``."""
    kinds = (MCoreVisionGPT,) if sees else (MCorePreference, MCoreGPT)
    return {
        name: argument
        for kind in kinds
        for name, argument in arguments_of(kind.from_pretrained if pretrained else kind).items()
    }


def of_transformer(latent: bool = False) -> Arguments:
    """Return the fields of ``TransformerConfig``, with ``latent`` those of ``MLATransformerConfig``."""
    fields = fields_of(TransformerConfig)
    return {**fields_of(MLATransformerConfig), **fields} if latent else fields


def of_config(name: str) -> Arguments:
    """Return the fields of ``ddp_config``, ``optimizer_config`` or ``communication``."""
    kinds = {"ddp_config": DistributedDataParallelConfig, "optimizer_config": OptimizerConfig}
    return fields_of(kinds.get(name, CommunicationOptions))


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else ...


def _plain(hint: Any) -> Any:
    """Return a type as it is if plain data can have it, else ``Any``."""
    return Any if _takes_objects(hint) else hint


def _takes_objects(hint: Any) -> bool:
    if is_callable(hint) or typing.get_origin(hint) is typing.Literal:
        return False
    if kinds := typing.get_args(hint):
        return any(_takes_objects(kind) for kind in kinds)
    return isinstance(hint, type) and hint not in _PLAIN and not issubclass(hint, enum.Enum)


_NOT_ASKED = (
    *("accelerator", "strategy", "precision", "plugins", "sync_batchnorm"),  # checked with the strategy
    *("callbacks", "logger", "profiler", "model_registry", "barebones"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    *("deterministic", "benchmark"),
)


def lightning_faults(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield Lightning's refusals: of each argument alone, or else of all together."""
    asked = {name: value for name, value in trainer.items() if name not in _NOT_ASKED}
    if trainer.get("accelerator") != "cpu":
        asked.pop("devices", None)  # the machine of the run decides
    alone = [(f"trainer.{name}={value!r}", _refusal({name: value})) for name, value in asked.items()]
    if not any(refusal for _, refusal in alone):
        alone = [("the arguments of the Trainer together", _refusal(asked))]
    for what, refusal in alone:
        if refusal is not None:
            yield f"Lightning refuses {what}: {refusal}"


def may_never_end(trainer: Mapping[str, Any]) -> bool:
    """Return whether the arguments leave the number of steps unknown, however much data there is."""
    names = ("max_steps", "max_epochs", "max_time")
    try:
        made = _trainer({name: trainer[name] for name in names if trainer.get(name) is not None})
    except (ValueError, TypeError, MisconfigurationException):
        return False
    return made.max_steps == -1 and made.max_epochs == -1


def _refusal(arguments: Mapping[str, Any]) -> str | None:
    """Return Lightning's sentences as one; None if it refuses nothing."""
    try:
        _trainer(arguments)
    except (ValueError, TypeError, MisconfigurationException) as error:
        return " ".join(str(error).split()).removesuffix(".").replace(". ", "; ")
    return None


def _trainer(arguments: Mapping[str, Any]) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    alone: dict[str, Any] = {"strategy": SingleDeviceStrategy("cpu"), "plugins": [LightningEnvironment()]}
    with warnings.catch_warnings(), _without_messages():
        warnings.simplefilter("ignore")
        return pl.Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **alone, **arguments})


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Keep Lightning from listing the devices of a trainer that does not run."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
