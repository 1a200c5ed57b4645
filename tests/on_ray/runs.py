# SPDX-License-Identifier: Apache-2.0
"""One small training, as Ray's workers run it and as Lightning's launcher does: ``python -m tests.on_ray.runs FOLDER``.

:func:`train` leaves in its folder what it saw, a file for each rank and start, and the weights of the end. A file
``settings.json`` there holds the :class:`Course`.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_mcore import MCoreCheckpointIO, MCoreStrategy
from lightning_mcore.data.sampling import training_loader
from tests.support.toy import Batch, Samples, StagedNet, make_trainer, weights

PARITY = {"rtol": 1e-5, "atol": 1e-6}
"""The tolerance between layouts in fp32 on the CPU, as in ``tests/parity``."""


@dataclasses.dataclass
class Course:
    """What to train, and what goes wrong.

    Args:
        folder: Where the results lie.
        layout: Arguments of ``MCoreStrategy``.
        sizes: ``accumulate_grad_batches`` by number of workers; JSON makes the numbers texts.
        epochs: Epochs of 32 samples.
        every: Steps between two reports; None for epochs.
        asynchronous: Whether checkpoints are written beside training.
        seconds: Pause after each step.
        dies: At this step rank 1 kills itself, once.
    """

    folder: str
    layout: dict[str, int]
    sizes: dict[str, int]
    epochs: int = 2
    every: int | None = 3
    asynchronous: bool = False
    seconds: float = 0.0
    dies: int | None = None


class Data(pl.LightningDataModule):
    """32 samples in the order of the package."""

    def train_dataloader(self) -> DataLoader[Batch]:
        return training_loader(self.trainer, Samples(32), 2, seed=7)


class Diary(pl.Callback):
    """Writes the samples and the loss of each step of this rank into a file of this start."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.lines: list[dict[str, Any]] = []
        self.samples: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.path = Path(self.course.folder, f"diary-{time.time():.3f}-{trainer.world_size}-{trainer.global_rank}.json")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, *_: Any) -> None:
        self.samples += batch["index"].tolist()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        loss = float(trainer.callback_metrics["train_loss"])
        step = {"step": trainer.global_step, "world": trainer.world_size, "samples": self.samples, "loss": loss}
        self.lines.append(step)
        self.samples = []
        half = self.path.with_suffix(".half")
        half.write_text(json.dumps(self.lines))
        half.replace(self.path)  # whole whenever it is read
        time.sleep(self.course.seconds)
        mark = Path(self.course.folder, "died")
        if trainer.global_rank == 1 and trainer.global_step == self.course.dies and not mark.exists():
            mark.touch()
            while not any(file.stat().st_size for file in Path(self.course.folder).rglob("checkpoint_manager*.json")):
                time.sleep(0.5)  # Ray's controller takes reports at its own pace
            os.kill(os.getpid(), signal.SIGKILL)


def fit(course: Course, world: int, ckpt_path: str | None = None, prepare: Any = None, **arguments: Any) -> float:
    """Train, leave the results, and return the last loss."""
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    module = StagedNet()
    strategy = MCoreStrategy(**course.layout, checkpoint_io=MCoreCheckpointIO(async_save=course.asynchronous))
    callbacks = [Diary(course), *arguments.pop("callbacks", [])]
    trainer = make_trainer(
        strategy,
        callbacks=callbacks,
        max_epochs=course.epochs,
        accumulate_grad_batches=course.sizes[str(world)],
        **arguments,
    )
    if prepare is not None:
        trainer = prepare(trainer)
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
    torch.save(weights(module), Path(course.folder, f"weights-{trainer.world_size}-{trainer.global_rank}.pt"))
    return float(trainer.callback_metrics["train_loss"])


def train(config: dict[str, Any]) -> float:
    """Train in a worker of Ray, as a user writes it."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment

    from lightning_mcore.ray import RayReport, checkpoint_to_resume, prepare_trainer

    course, context = Course(**config), ray.train.get_context()
    return fit(
        course,
        context.get_world_size(),
        checkpoint_to_resume(),
        prepare_trainer,
        devices=context.get_local_world_size(),
        num_nodes=context.get_world_size() // context.get_local_world_size(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayReport(every_n_train_steps=course.every)],
    )


if __name__ == "__main__":
    given = Course(**json.loads(Path(sys.argv[1], "settings.json").read_text()))
    ((world, _),) = given.sizes.items()
    fit(given, int(world), devices=int(world), plugins=[])
