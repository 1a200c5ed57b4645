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
from functools import cache
from types import NoneType
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.value_checks import is_callable
from lightning_mcore.models.distillation import MCoreDistillation
from lightning_mcore.models.embedding import MCoreEmbedding
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.preference import MCorePreference
from lightning_mcore.models.reranker import MCoreReranker
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.models.vision_distillation import MCoreVisionDistillation


class Argument(NamedTuple):
    """One field of a dataclass or argument of a constructor."""

    hint: Any  # its type; ``typing.Any`` where it takes objects
    default: Any  # its default; ``...`` where it has none


Arguments = Mapping[str, Argument]


@cache
def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return the arguments of a function, without ``self``; of a class those of its constructor."""
    owner: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
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
    """Return the arguments of ``MCoreGPT`` and the classes that change its loss, or of their ``from_pretrained``."""
    found: dict[str, Argument] = {}
    others = (MCorePreference, MCoreDistillation, MCoreEmbedding, MCoreReranker, MCoreGPT)
    for kind in (MCoreVisionDistillation, MCoreVisionGPT) if sees else others:
        found |= arguments_of(kind.from_pretrained if pretrained else kind)
    if "distillation" in found:
        found["distillation"] = found["distillation"]._replace(default=None)  # only its own class needs it
    return found


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
    plain = (int, float, bool, str, list, dict, tuple, NoneType)
    return isinstance(hint, type) and hint not in plain and not issubclass(hint, enum.Enum)


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
    alone = {f"trainer.{name}={value!r}": {name: value} for name, value in asked.items()}
    refusals = {what: made for what, given in alone.items() if isinstance(made := _trainer(given), str)}
    if not refusals and isinstance(together := _trainer(asked), str):
        refusals = {"the arguments of the Trainer together": together}
    yield from (f"Lightning refuses {what}: {refusal}" for what, refusal in refusals.items())


def may_never_end(trainer: Mapping[str, Any]) -> bool:
    """Return whether the arguments leave the number of steps unknown, however much data there is."""
    names = ("max_steps", "max_epochs", "max_time")
    made = _trainer({name: trainer[name] for name in names if trainer.get(name) is not None})
    return not isinstance(made, str) and made.max_steps == -1 and made.max_epochs == -1


def _trainer(arguments: Mapping[str, Any]) -> pl.Trainer | str:
    """Make a trainer that does not run; return Lightning's sentences as one if it refuses the arguments."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    alone: dict[str, Any] = {"strategy": SingleDeviceStrategy("cpu"), "plugins": [LightningEnvironment()]}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logger = logging.getLogger("lightning.pytorch")  # would list the devices
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        try:
            return pl.Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **alone, **arguments})
        except (ValueError, TypeError, MisconfigurationException) as error:
            return " ".join(str(error).split()).removesuffix(".").replace(". ", "; ")
