# SPDX-License-Identifier: Apache-2.0
"""The losses of a LLaMA-Factory run: a line for each in ``trainer_log.jsonl``, and a picture of them.

The file is where LLaMA-Factory's tools look for losses: ``{"step": 10, "loss": 1.25, "lr": 1e-05, "epoch": 0}`` for
training, ``{"step": 10, "eval_loss": 1.5, "epoch": 0}`` for evaluation. Rank 0 writes it, a resumed run goes on in it.
``cli/llamafactory.py`` adds the callback to the trainer.
"""

import json
import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

LOG = "trainer_log.jsonl"
PICTURE = "training_loss.png"


class LossRecord(Callback):
    """Writes down the losses of training and of evaluation.

    Args:
        folder: Where the file is written.
        picture: Whether they are drawn at the end, too.

    Attributes:
        training: Optimizer steps and their losses, at each step that is logged.
        evaluation: Optimizer steps and the losses of the evaluations there.

    Raises:
        ModuleNotFoundError: There is no matplotlib to draw with.
    """

    def __init__(self, folder: str, picture: bool = False) -> None:
        super().__init__()
        if picture:
            _require_matplotlib()
        self.training: list[tuple[int, float]] = []
        self.evaluation: list[tuple[int, float]] = []
        self._folder = folder
        self._picture = picture
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take note of the step that the run goes on from."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Write down the loss of an optimizer step, where it is logged."""
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        every = getattr(trainer, "log_every_n_steps", 0)
        loss = trainer.callback_metrics.get("train_loss")
        if not every or step % every or loss is None:
            return
        self.training.append((step, float(loss)))
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._write(trainer, {"step": step, "loss": float(loss), "lr": max(rates, default=0.0)})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write down the loss of an evaluation, that before the first step too (``eval_on_start``)."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is None:
            return
        self.evaluation.append((trainer.global_step, float(loss)))
        self._write(trainer, {"step": trainer.global_step, "eval_loss": float(loss)})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the losses."""
        if self._picture and trainer.is_global_zero:
            self._draw()

    def _write(self, trainer: pl.Trainer, line: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        os.makedirs(self._folder, exist_ok=True)
        with open(os.path.join(self._folder, LOG), "a", encoding="utf-8") as log:
            log.write(json.dumps({**line, "epoch": trainer.current_epoch}) + "\n")

    def _draw(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for name, losses in (("training", self.training), ("evaluation", self.evaluation)):
            if losses:
                axes.plot(*zip(*losses, strict=True), label=name, marker="." if len(losses) < 30 else None)
        axes.set(xlabel="optimizer step", ylabel="loss")
        axes.legend()
        figure.savefig(os.path.join(self._folder, PICTURE), dpi=120)


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plot_loss: True needs the package matplotlib; install it, or leave plot_loss out and read the losses in"
            f" {LOG}"
        ) from None
