# SPDX-License-Identifier: Apache-2.0
"""What a sharded checkpoint says of itself, in JSON, so that it can be read without the code that wrote it.

``strategy/checkpointing.py`` puts :func:`describe` into every checkpoint, beside the tensors, and before anything of
one is read :func:`check_model` compares it with the run that asks. The entries are listed in :func:`describe`; names,
shapes and checksums are added where the files are written.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import lightning
import lightning.pytorch as pl
import megatron.core
import torch
from torch.optim import Adam, Optimizer

from lightning_mcore.config.layout import ParallelLayout

_PLAIN = (bool, int, float, str, type(None))


def describe(
    module: pl.LightningModule,
    layout: ParallelLayout,
    world_size: int,
    precision: str,
    use_distributed_optimizer: bool,
    config: Any,
    optimizers: Sequence[Optimizer],
) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without its tensors and files.

    Args:
        module: The LightningModule.
        layout: How the run is split.
        world_size: Number of ranks.
        precision: As in ``Trainer(precision=)``.
        use_distributed_optimizer: Whether the optimizer's state is sharded over data-parallel ranks.
        config: The model's TransformerConfig; None for a plain module.
        optimizers: The user's optimizers whose state is in it; empty for weights alone.

    Returns:
        ``versions``, ``layout``, ``world_size``, ``precision``, ``use_distributed_optimizer``, ``global_step``,
        ``epoch``, ``saved_at`` (ISO 8601, UTC), ``model`` (class, vocabulary size, plain fields of the config) and
        ``contents``.
    """
    trainer = module._trainer  # None where a checkpoint is made of no run
    return {
        "versions": {
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "megatron-core": megatron.core.__version__.partition("+")[0],
            "lightning_mcore": version("lightning-mcore"),
        },
        "layout": dataclasses.asdict(layout),
        "world_size": world_size,
        "precision": precision,
        "use_distributed_optimizer": use_distributed_optimizer,
        "global_step": trainer.global_step if trainer is not None else 0,
        "epoch": trainer.current_epoch if trainer is not None else 0,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "class": f"{type(module).__module__}.{type(module).__qualname__}",
            "vocab_size": _vocabulary(module),
            "config": _plain_fields(config),
        },
        "contents": {
            "weights": True,
            "optimizer": bool(optimizers),
            "optimizer_class": type(optimizers[0]).__name__ if optimizers else None,
        },
    }


def check_model(path: str, manifest: Mapping[str, Any], module: pl.LightningModule) -> None:
    """Refuse a checkpoint of another vocabulary, which shapes may not show: embeddings are padded.

    Raises:
        ValueError: The vocabularies differ in size.
    """
    saved, own = manifest.get("model", {}).get("vocab_size"), _vocabulary(module)
    if saved is not None and own is not None and saved != own:
        raise ValueError(
            f"{path} was written by a model with vocab_size={saved}, and this one has vocab_size={own}; make it with"
            f" vocab_size={saved}"
        )


def check_optimizer(path: str, manifest: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Refuse the state of an optimizer of another kind.

    Raises:
        ValueError: The checkpoint has the state of another optimizer.
    """
    contents = manifest.get("contents", {})
    saved, own = contents.get("optimizer_class"), [type(optimizer).__name__ for optimizer in optimizers]
    if saved not in own and not (_is_adam(saved) and any(isinstance(optimizer, Adam) for optimizer in optimizers)):
        raise ValueError(
            f"{path} holds the state of {saved}, and configure_optimizers returned {' and '.join(own)}; return"
            f" {saved}, or start from its weights alone: self.load_weights(path) in configure_model"
        )


def _is_adam(name: str | None) -> bool:
    return name in ("Adam", "AdamW", "FusedAdam")


def _vocabulary(module: pl.LightningModule) -> int | None:
    size = getattr(module, "vocab_size", None)
    return size if isinstance(size, int) else None


def _plain_fields(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if _plain(getattr(config, field.name)) is not None
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; None where it has no such form."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
        return list(value)
    return getattr(value, "__name__", None)  # an activation function
