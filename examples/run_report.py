# SPDX-License-Identifier: Apache-2.0
"""What a run prints and plots: the layout at the start, the progress, and a loss curve and sample text at the end.

These are ordinary Lightning callbacks, used by the scripts and the YAML files alike. All they know about the strategy
is that a model may be split: whatever needs the whole model (generating text) is called on every rank, and only rank 0
prints and writes.
"""

import csv
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib
import torch.distributed as dist
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_mcore.hf import export_model

matplotlib.use("Agg")  # plots to files; needs no display
from matplotlib import pyplot

Curve = list[tuple[int, float]]


class StepBar(TQDMProgressBar):
    """Lightning's progress bar, with the loss and the speed in readable numbers.

    Args:
        refresh_rate: Number of steps between updates.
    """

    def __init__(self, refresh_rate: int = 5) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the text after the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        speed = metrics.pop("tokens_per_second", None)
        losses = {name: f"{value:.2f}" for name, value in metrics.items()}
        return losses | ({} if speed is None else {"tokens/s": f"{speed:,.0f}"})


class LayoutTable(pl.Callback):
    """Prints each rank's parallel coordinates, and how much of the model it holds."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect a line from every rank and print them on rank 0."""
        layout = getattr(trainer.strategy, "layout", None)
        place = str(layout.coordinates(trainer.global_rank, trainer.world_size)) if layout else "a whole replica"
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        lines = [f"  rank {trainer.global_rank}  {place}  {parameters / 1e6:6.2f} M parameters"]
        if dist.is_initialized():
            lines = _gather(lines[0])
        title = layout.describe(trainer.world_size) if layout else type(trainer.strategy).__name__
        _print(trainer, f"layout: {_count(trainer.world_size)}, {title}", *lines)


class LossCurve(pl.Callback):
    """Plots training and validation loss over the optimizer steps, from the file of ``CSVLogger``.

    Args:
        file: Image file to write; its suffix selects the format.
    """

    def __init__(self, file: str = "outputs/pretrain_gpt/loss.png") -> None:
        self.file = Path(file)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reject a trainer without the logger whose file is plotted.

        Raises:
            ValueError: There is no ``CSVLogger``.
        """
        if not _csv_loggers(trainer):
            raise ValueError("LossCurve reads what a CSVLogger writes; give the Trainer logger=CSVLogger(...)")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plot on rank 0."""
        if not trainer.is_global_zero:
            return
        logger = _csv_loggers(trainer)[0]
        logger.save()
        metrics = Path(logger.log_dir) / "metrics.csv"
        train, val = read_curve(metrics, "train_loss"), read_curve(metrics, "val_loss")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draw_losses(self.file, train, val, trainer.strategy)
        validated = f", val_loss {val[-1][1]:.2f}" if val else ""
        _print(
            trainer,
            f"\ntrain_loss {train[0][1]:.2f} -> {train[-1][1]:.2f} in {train[-1][0]} steps{validated}",
            f"metrics:    {metrics}",
            f"loss curve: {self.file}",
        )


class TextSample(pl.Callback):
    """Lets the trained model continue a prompt; needs a data module with ``encode`` and ``decode``.

    Args:
        file: File to write the prompt and its continuation to.
        prompt: What the text starts with.
        max_new_tokens: Tokens to generate.
        temperature: Below 1, likely tokens become even likelier.
        top_k: Sample from the k likeliest tokens.
    """

    def __init__(
        self,
        file: str = "outputs/pretrain_gpt/sample.txt",
        prompt: str = "import os\n\n\ndef ",
        max_new_tokens: int = 120,
        temperature: float = 0.7,
        top_k: int = 40,
    ) -> None:
        self.file = Path(file)
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Generate on every rank, because each holds a part of the model; print and write on rank 0."""
        data: Any = trainer.datamodule
        _print(trainer, f"\ngenerating {self.max_new_tokens} tokens ...")
        tokens = pl_module.generate(
            data.encode(self.prompt), self.max_new_tokens, temperature=self.temperature, top_k=self.top_k
        )
        if not trainer.is_global_zero:
            return
        text = data.decode(tokens)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(text, encoding="utf-8")
        _print(trainer, *(f"  | {line}" for line in text.splitlines()), f"sample:     {self.file}")


class InTransformers(pl.Callback):
    """Writes the trained model in Hugging Face format, and continues a prompt with it in ``transformers``.

    The printed text is sampled as in :class:`TextSample`. Both models then generate greedily, and must agree. Needs a
    data module with ``encode``, ``decode`` and ``save_tokenizer``.

    Args:
        folder: Folder for the model; that of an earlier run is replaced.
        prompt: What the text starts with.
        max_new_tokens: Tokens to generate; fewer if the sequence would be too long.
    """

    def __init__(
        self, folder: str = "outputs/pretrain_gpt/hf", prompt: str = "import os\n\n\ndef ", max_new_tokens: int = 60
    ) -> None:
        self.folder = Path(folder)
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write and generate on every rank; load, print and compare on rank 0."""
        data: Any = trainer.datamodule
        export_model(pl_module, str(self.folder), replace=True)
        prompt = data.encode(self.prompt)
        count = min(self.max_new_tokens, pl_module.seq_length - len(prompt))
        ours = pl_module.generate(prompt, count, temperature=0)
        if not trainer.is_global_zero:
            return
        data.save_tokenizer(self.folder)
        theirs, text = continue_with_transformers(self.folder, self.prompt, count)
        same = sum(1 for _ in takewhile(bool, map(eq, ours[len(prompt) :], theirs)))
        _print(
            trainer,
            "\ntransformers, with the exported model:",
            *(f"  | {line}" for line in text.splitlines()),
            f"most probable tokens: {same} of {count} are the same in transformers and here",
            f"model:      {self.folder}",
        )


def continue_with_transformers(folder: Path, prompt: str, count: int) -> tuple[list[int], str]:
    """Return the ``count`` most probable tokens after a prompt, and a sampled text, from the model in a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    best = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0].tolist()
    drawn = model.generate(**inputs, max_new_tokens=count, do_sample=True, temperature=0.7, top_k=40)[0].tolist()
    return best[inputs["input_ids"].shape[1] :], tokenizer.decode(drawn)


def read_curve(metrics: Path, name: str) -> Curve:
    """Return ``(optimizer steps done, value)`` of every row of the CSV file that has the metric ``name``."""
    with metrics.open(newline="", encoding="utf-8") as rows:
        return [(int(row["step"]) + 1, float(row[name])) for row in csv.DictReader(rows) if row.get(name)]


def draw_losses(file: Path, train: Curve, val: Curve, strategy: Any) -> None:
    """Plot both curves to ``file``."""
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1, label=f"training, last {train[-1][1]:.2f}")
    if val:
        axes.plot(*zip(*val, strict=True), color="tab:orange", marker="o", label=f"validation, last {val[-1][1]:.2f}")
    layout = getattr(strategy, "layout", None)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    subtitle = f"{_count(ranks)}, {layout.describe(ranks) if layout else type(strategy).__name__}"
    axes.set_title(f"GPT on the Python standard library\n{subtitle}", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross entropy per token [nats]")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def draw_side_by_side(file: Path, metrics: dict[str, Path], names: dict[str, str]) -> None:
    """Plot metrics of several runs in one image.

    Args:
        file: Image file to write; its suffix selects the format.
        metrics: The CSV file of each run, by run name.
        names: The label of each metric, by metric name; each has its own axes.
    """
    figure, all_axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 4.5), dpi=120, squeeze=False)
    for axes, (name, label) in zip(all_axes[0], names.items(), strict=True):
        for run, rows in metrics.items():
            axes.plot(*zip(*read_curve(rows, name), strict=True), linewidth=1, label=run)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _csv_loggers(trainer: pl.Trainer) -> list[CSVLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]


def _count(ranks: int) -> str:
    return f"{ranks} rank" + ("" if ranks == 1 else "s")


def _gather(line: str) -> list[str]:
    lines = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    return lines


def _print(trainer: pl.Trainer, *lines: str) -> None:
    if trainer.is_global_zero:
        print(*lines, sep="\n", flush=True)
