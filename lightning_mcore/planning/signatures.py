# SPDX-License-Identifier: Apache-2.0
"""Names and defaults of a run's arguments, and Lightning's objections to those of its Trainer."""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_mcore.config.inherited_arguments import Arguments, arguments_of
from lightning_mcore.models.distillation import MCoreDistillation
from lightning_mcore.models.embedding import MCoreEmbedding
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.preference import MCorePreference
from lightning_mcore.models.reranker import MCoreReranker
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.models.vision_distillation import MCoreVisionDistillation


@cache
def fields_of(kind: type) -> Arguments:
    """Return the fields of a dataclass."""
    return {field.name: _default(field) for field in dataclasses.fields(kind)}


def of_model(pretrained: bool = False, sees: bool = False) -> Arguments:
    """Return the arguments of ``MCoreGPT`` and the classes that change its loss, or of their ``from_pretrained``."""
    others = (MCorePreference, MCoreDistillation, MCoreEmbedding, MCoreReranker, MCoreGPT)
    kinds = (MCoreVisionDistillation, MCoreVisionGPT) if sees else others
    found = {name: default for kind in kinds for name, default in _of_kind(kind, pretrained).items()}
    return {**found, "distillation": None}  # only its own class needs it


def _of_kind(kind: type[MCoreGPT], pretrained: bool) -> Arguments:
    of: Any = kind.from_pretrained if pretrained else kind
    return arguments_of(of)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else ...


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
