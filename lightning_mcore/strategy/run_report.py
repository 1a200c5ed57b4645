# SPDX-License-Identifier: Apache-2.0
"""What a run prints besides its progress: the parts of the model when it begins, and what came of it when it ends.

::

    parts of the model:
      rank 0  tp0.pp0.cp0.dp0  58.6k parameters
      ...
    20 steps, 6 s, train_loss 5.549 -> 4.981
    logs        lightning_logs/version_0
    checkpoint  lightning_logs/version_0/checkpoints/epoch=0-step=20.ckpt
    continue    trainer.fit(..., ckpt_path="lightning_logs/version_0/checkpoints/epoch=0-step=20.ckpt")
    export      lightning-mcore export lightning_logs/version_0/checkpoints/epoch=0-step=20.ckpt OUT

``lightning-mcore fit`` adds :class:`RunReport` to its callbacks.
"""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mcore.config.text import counted, human
from lightning_mcore.parallel.consensus import all_gather_object
from lightning_mcore.strategy.checkpointing import last_checkpoint, path_from_here
from lightning_mcore.strategy.strategy import MCoreStrategy

_RANKS_SHOWN = 8
_POINTS = 2000  # of the loss curve

Curve = list[tuple[int, torch.Tensor]]  # optimizer steps done, and the loss


class RunReport(pl.Callback):
    """Print each rank's part of the model, and at the end the loss, the last checkpoint and the next commands.

    Args:
        folder: Where ``loss.png``, the loss over the optimizer steps, and the sample text are written, if given. The
            plot needs matplotlib.
        prompt: Text that the trained model continues at the end, if given. Needs a data module with ``encode`` (text to
            token ids) and ``decode``, and a model with ``generate``, such as :class:`MCoreGPT`.
        max_new_tokens: Tokens to generate.
        temperature: Below 1, likely tokens become even likelier.
        top_k: Sample from the k likeliest tokens.
        loss: Name under which the module logs the loss of training.
        val_loss: Name under which it logs the loss of validation.
        command: The command line of this run, for the advice on how to continue it; None for a Python script.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore import RunReport
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[RunReport(folder="runs/gpt", prompt="Once upon a time")])
    """

    def __init__(
        self,
        folder: str | None = None,
        prompt: str | None = None,
        max_new_tokens: int = 120,
        temperature: float = 0.7,
        top_k: int = 40,
        loss: str = "train_loss",
        val_loss: str = "val_loss",
        command: list[str] | None = None,
    ) -> None:
        self.folder = Path(folder) if folder is not None else None
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.loss = loss
        self.val_loss = val_loss
        self.command = command
        self._curve: Curve = []
        self._val_curve: Curve = []
        self._every = 1  # steps between two points of the curve
        self._first_step: int | None = None  # None until a step is trained
        self._began = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reject a prompt that nothing can encode.

        Raises:
            ValueError: There is a prompt, but the data module or the model cannot use it.
        """
        self._first_step = None
        if self.prompt is None or stage != "fit":
            return
        data: Any = getattr(trainer, "datamodule", None)
        if not (hasattr(data, "encode") and hasattr(data, "decode") and hasattr(pl_module, "generate")):
            raise ValueError(
                "RunReport(prompt=...) needs a data module with encode and decode, and a model with generate; give"
                " these, or no prompt"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print each rank's place and part of the model; every rank contributes a line."""
        self._curve, self._val_curve, self._every = [], [], 1
        self._first_step, self._began = trainer.global_step, time.monotonic()
        strategy = trainer.strategy
        if not isinstance(strategy, MCoreStrategy) or strategy.layout.model_parallel_size == 1:
            return
        own = sum(parameter.numel() for parameter in pl_module.parameters())
        place = strategy.layout.coordinates(trainer.global_rank, trainer.world_size)
        lines = all_gather_object(f"  rank {trainer.global_rank}  {place}  {human(own)} parameters")
        hidden = len(lines) - _RANKS_SHOWN
        if hidden > 0:
            lines = [*lines[:_RANKS_SHOWN], f"  and {hidden} more"]
        _say(trainer, "parts of the model:", *lines)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss of the step; it stays on the device, so that nothing waits."""
        if (trainer.global_step - 1) % self._every == 0:
            self._keep_loss(trainer)
        if len(self._curve) == _POINTS:  # 2,000 points at every step become 1,000 at every second one
            self._curve = self._curve[::2]
            self._every *= 2

    def _keep_loss(self, trainer: pl.Trainer) -> None:
        """Add the loss of the last step to the curve, unless it is there."""
        loss = trainer.callback_metrics.get(self.loss)
        if loss is not None and trainer.global_step > (self._curve[-1][0] if self._curve else self._first_step or 0):
            self._curve.append((trainer.global_step, loss.detach().clone()))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the loss of a validation during training."""
        loss = trainer.callback_metrics.get(self.val_loss)
        if loss is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._val_curve.append((trainer.global_step, loss.detach().clone()))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Keep the last loss; continue the prompt, on every rank, because each holds a part of the model."""
        self._keep_loss(trainer)
        if self.prompt is None:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        _say(trainer, "", f"generating {self.max_new_tokens} tokens ...")
        tokens = pl_module.generate(
            data.encode(self.prompt), self.max_new_tokens, temperature=self.temperature, top_k=self.top_k
        )
        if trainer.is_global_zero:
            text = data.decode(tokens)
            _say(trainer, *(f"  | {line}" for line in text.splitlines()))
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "sample.txt").write_text(text, encoding="utf-8")
                _say(trainer, f"sample      {self.folder / 'sample.txt'}")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the loss, the last checkpoint and the next commands; by now every save is complete."""
        if not trainer.is_global_zero:
            return
        if self._first_step is None:
            done = f"the checkpoint is already at step {trainer.global_step:,}" if trainer.global_step else "no data"
            _say(trainer, "", f"0 steps, because there was nothing to do: {done}; see max_steps and max_epochs")
            return
        steps, seconds = trainer.global_step - self._first_step, time.monotonic() - self._began
        facts = [counted(steps, "step"), f"{seconds:,.0f} s"]
        if self._curve:
            first, last = (human(float(loss)) for _, loss in (self._curve[0], self._curve[-1]))
            facts.append(f"{self.loss} {first} -> {last}")
        if self._val_curve:
            facts.append(f"{self.val_loss} {human(float(self._val_curve[-1][1]))}")
        lines = ["", ", ".join(facts)]
        if self._curve and self.folder is not None:
            lines.append(f"loss curve  {self._draw(self.folder)}")
        # Not trainer.log_dir, which is collective, and this is rank 0 alone.
        folders = [folder for logger in trainer.loggers if (folder := getattr(logger, "log_dir", None))]
        lines += [f"logs        {path_from_here(str(folder))}" for folder in folders]
        path = last_checkpoint(trainer)
        if path is not None:
            lines.append(f"checkpoint  {path}")
            lines.append(f"continue    {self._continue(path, trainer)}")
            lines += _exports(path, pl_module)
        elif trainer.checkpoint_callback is not None:
            monitor = getattr(trainer.checkpoint_callback, "monitor", None)
            is_absent = monitor is not None and monitor not in trainer.callback_metrics
            lines.append(f"checkpoint  none{f': {monitor} was never logged' if is_absent else ' was saved'}")
        _say(trainer, *lines)

    def _continue(self, path: str, trainer: pl.Trainer) -> str:
        if self.command is None:
            return f'trainer.fit(..., ckpt_path="{path}")'
        # With the same command the run would end at once.
        words = without_option(self.command, "--ckpt_path")
        for name, limit in (("--trainer.max_steps", trainer.max_steps), ("--trainer.max_epochs", trainer.max_epochs)):
            if limit is not None and limit > 0:
                words = [*without_option(words, name), name, str(2 * limit)]
        return shlex.join([*words, "--ckpt_path", path])

    def _draw(self, folder: Path) -> Path:
        """Plot the losses to a file and return its path."""
        import matplotlib

        matplotlib.use("Agg")  # plots to files; needs no display
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
        for name, curve, marker in ((self.loss, self._curve, ""), (self.val_loss, self._val_curve, "o")):
            if curve:
                losses = [float(loss) for _, loss in curve]
                steps = [step for step, _ in curve]
                axes.plot(steps, losses, linewidth=1, marker=marker, label=f"{name}, last {losses[-1]:.3f}")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "loss.png")
        pyplot.close(figure)
        return folder / "loss.png"


def _exports(path: str, module: pl.LightningModule) -> list[str]:
    """Return the commands that export a checkpoint; none for a module that does not say how its model is exported."""
    parts: Any = module.modules()
    for part in parts:
        if hasattr(part, "export_options"):
            given = part.export_options()
            folders = ["OUT"] if len(given) == 1 else [written.upper() for written in given]
            return [
                f"{written:<11} {shlex.join(['lightning-mcore', 'export', path, folder, *options])}"
                for folder, (written, options) in zip(folders, given.items(), strict=True)
            ]
    return []


def without_option(words: Sequence[str], name: str) -> list[str]:
    """Return a command line without ``--name value`` and ``--name=value``."""
    return [
        word for before, word in zip(["", *words], words, strict=False) if name not in (before, word.partition("=")[0])
    ]


def _say(trainer: pl.Trainer, *lines: str) -> None:
    if trainer.is_global_zero:
        print(*lines, sep="\n", flush=True)
