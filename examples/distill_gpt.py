# SPDX-License-Identifier: Apache-2.0
"""Let a small GPT learn from a larger one, and compare it with the same GPT that learns from the text alone.

Run it with ``make demo-distill`` or ``python examples/distill_gpt.py``; ``--help`` lists the options.

1. The teacher, a byte-level GPT, learns 2 MB of Python's standard library, and is saved as a Hugging Face model.
2. Two students start from the same weights and read the same 26 kB of it in the same order, with the same optimizer.
   One learns from the next byte alone (``MCoreGPT``), the other one also from the teacher's probabilities
   (``MCoreDistillation``).
3. Teacher and students are measured on text that none of them has read.

The metrics, a plot of validation losses and the models go to ``outputs/distill_gpt``.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Subset

from lightning_mcore import (
    Distillation,
    MCoreDistillation,
    MCoreGPT,
    MCoreProgressBar,
    MCoreStrategy,
    Recipe,
    RunReport,
    SaveHFModel,
)
from run_report import draw_side_by_side
from stdlib_text import StdlibText

LENGTH = 64  # bytes of a row
LAYERS: dict[str, Any] = {
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
}
TEACHER: dict[str, Any] = {**LAYERS, "num_layers": 3, "hidden_size": 128, "ffn_hidden_size": 384}
STUDENT: dict[str, Any] = {**LAYERS, "num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 192}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about two minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="ranks, one process each (2)")
    parser.add_argument("--tp", type=int, default=1, help="tensor_model_parallel_size (1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (1)")
    parser.add_argument("--teacher-steps", type=int, default=500, help="steps of the teacher (500)")
    parser.add_argument("--max-steps", type=int, default=300, help="steps of each student (300)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, for each data-parallel rank (16)")
    parser.add_argument("--rows", type=int, default=400, help="rows of 64 bytes that the students read (400)")
    parser.add_argument("--kd-ratio", type=float, default=0.9, help="weight of the divergence (0.9)")
    parser.add_argument("--output", type=Path, default=Path("outputs/distill_gpt"), help="folder for the files")
    return parser.parse_args(arguments)


def build_trainer(options: argparse.Namespace, name: str, max_steps: int) -> pl.Trainer:
    """Build the trainer of one of the models."""
    return pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MCoreStrategy(tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp),
        max_steps=max_steps,
        max_epochs=-1,
        val_check_interval=max(max_steps // 6, 1),
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=CSVLogger(options.output, name=name, version=""),
        callbacks=[MCoreProgressBar(), RunReport(), SaveHFModel(str(options.output / f"{name}-model"))],
        enable_checkpointing=False,
        enable_model_summary=False,
    )


class FirstRows(StdlibText):
    """The text of the standard library, of which training reads the first rows only.

    Args:
        rows: Rows of training; None for all.
        batch_size: Rows per batch on each data-parallel rank.
        folder: Where the cache file is written.
    """

    def __init__(self, rows: int | None, batch_size: int, folder: Path) -> None:
        super().__init__(LENGTH, batch_size, vocab_size=256, max_bytes=2_000_000, cache_dir=str(folder))
        self.rows = rows

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the rows, shuffled."""
        rows = range(self.rows or len(self.train_windows))
        return DataLoader(Subset(self.train_windows, rows), self.batch_size, shuffle=True, drop_last=True)


def main() -> None:
    """Train the teacher and both students, measure them on text that they have not read, and plot."""
    options = parse_arguments()
    if "LOCAL_RANK" not in os.environ:  # the first process, which starts the others
        shutil.rmtree(options.output, ignore_errors=True)
    recipe = Recipe(learning_rate=3e-3, warmup_steps=20)
    pl.seed_everything(1, verbose=False)
    trainer = build_trainer(options, "teacher", options.teacher_steps)
    trainer.fit(MCoreGPT(256, LENGTH, TEACHER, recipe), datamodule=FirstRows(None, options.batch_size, options.output))
    setting = Distillation(str(options.output / "teacher-model"), kd_ratio=options.kd_ratio)
    found = {"teacher": float(trainer.callback_metrics["val_loss"])}
    for name in ("student-alone", "student-taught"):
        pl.seed_everything(2, verbose=False)
        student: MCoreGPT = (
            MCoreGPT(256, LENGTH, STUDENT, recipe)
            if name == "student-alone"
            else MCoreDistillation(256, LENGTH, STUDENT, setting, recipe)
        )
        trainer = build_trainer(options, name, options.max_steps)
        trainer.fit(student, datamodule=FirstRows(options.rows, options.batch_size, options.output))
        found[name] = float(trainer.callback_metrics["val_loss"])
    if trainer.is_global_zero:
        picture = options.output / "losses.png"
        metrics = {name: options.output / name / "metrics.csv" for name in found if name != "teacher"}
        draw_side_by_side(picture, metrics, {"val_loss": "validation loss"})
        lines = [f"{name:15} validation loss {loss:.3f}" for name, loss in found.items()]
        print("\n".join(["", *lines, f"losses: {picture}"]))


if __name__ == "__main__":
    main()
