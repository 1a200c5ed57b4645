# SPDX-License-Identifier: Apache-2.0
"""What becomes of drawn settings: the verdict of validation, and one optimizer step on live ranks."""

import math
import os
import traceback
import warnings
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.distributed import DistributedDataParallelConfig
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCorePrecision, MCoreStrategy
from tests.fuzz.draw import Settings
from tests.toy import make_trainer


@dataclass(frozen=True)
class Verdict:
    """What validation says of settings.

    Args:
        accepted: Whether they may train.
        text: Why not.
        ours: Whether the refusal is a sentence of this package, and not an error of another.
    """

    accepted: bool
    text: str = ""
    ours: bool = True


def judge(settings: Settings) -> Verdict:
    """Validate settings as a Trainer does before it opens process groups; starts nothing."""
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's hints about models as small as these
            trainer = _trainer(settings, devices=settings.world_size)
            model = _model(settings)
            model.trainer = trainer
            trainer.state.fn = TrainerFn.FITTING
            trainer.strategy.connect(model)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        return Verdict(False, str(error), ours=f"{os.sep}lightning_mcore{os.sep}" in last)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return Verdict(True)


def train(batch: list[Settings]) -> list[float]:
    """Train one optimizer step with each settings on this rank; return the losses."""
    return [_train_one(settings) for settings in batch]


def _train_one(settings: Settings) -> float:
    module = _model(settings)
    steps = settings.trainer["accumulate_grad_batches"]
    length = settings.model["seq_length"]
    generator = torch.Generator().manual_seed(settings.seed)
    rows = torch.randint(32, (settings.rows * steps * settings.world_size, length + 1), generator=generator)
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    trainer = _trainer(settings, devices=settings.world_size)
    trainer.fit(module, DataLoader(samples, batch_size=settings.rows))  # type: ignore[arg-type]
    if trainer.global_step != 1:
        raise RuntimeError(f"global_step is {trainer.global_step} after one step")
    loss = float(trainer.callback_metrics["train_loss"])
    if not math.isfinite(loss):
        raise RuntimeError(f"train_loss is {loss}")
    return loss


def _model(settings: Settings) -> MCoreGPT:
    return MCoreGPT(**settings.model)


def _trainer(settings: Settings, devices: int) -> pl.Trainer:
    ddp_config = DistributedDataParallelConfig(**settings.ddp) if settings.ddp else None
    arguments = dict(settings.trainer)
    precision = MCorePrecision(arguments.pop("precision"))  # Lightning turns "16-mixed" into bf16 on a CPU
    strategy = MCoreStrategy(**settings.strategy, ddp_config=ddp_config, precision_plugin=precision)
    return make_trainer(strategy, devices=devices, plugins=[LightningEnvironment()], max_steps=1, **arguments)
