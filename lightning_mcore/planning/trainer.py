# SPDX-License-Identifier: Apache-2.0
"""Check arguments of Lightning's ``Trainer`` by building one for the CPU, which runs nothing and is dropped.

It gets a strategy of one process and an empty cluster environment, so no rank is set and nothing is launched. Arguments
that change the process are left out (``deterministic``, ``benchmark``), and so are those with their own check.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy

_NOT_ASKED = (
    *("accelerator", "strategy", "precision", "plugins", "sync_batchnorm"),  # checked with the strategy
    *("callbacks", "logger", "profiler", "model_registry", "barebones"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    *("deterministic", "benchmark"),
)


def lightning_faults(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield Lightning's refusals: of each argument alone, or else of all together.

    Args:
        trainer: Arguments of ``Trainer`` with checked names and types.
    """
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
    """Return whether the arguments leave the number of steps unknown, however much data there is.

    Args:
        trainer: Arguments of ``Trainer``; False if Lightning refuses them.
    """
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
