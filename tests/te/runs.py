# SPDX-License-Identifier: Apache-2.0
"""Trainings of a tiny GPT on CPU ranks, with the layers of the torch backend or of TransformerEngine."""

import math
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_mcore import MCoreGPT, MCorePrecision, MCoreStrategy, Recipe
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_rows

VOCABULARY = 128
LENGTH = 128  # tokens of a row; blockwise needs multiples of 128 on each tensor-parallel rank

TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 512,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


class Counting(Dataset[dict[str, Tensor]]):
    """Rows that count upwards, so that there is something to learn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = (torch.arange(LENGTH + 1) * (1 + index % 3) + 7 * index) % VOCABULARY
        return {"tokens": text[:-1], "labels": text[1:]}


class Packed(Counting):
    """Rows that hold several counts, of different lengths, with padding between them."""

    def __getitem__(self, index: int) -> Any:
        samples = []
        for number, length in enumerate((37, 5 + index % 9, 50)):
            tokens = (torch.arange(length + 1) * (1 + number) + 7 * index) % VOCABULARY
            samples.append(TokenSample(tokens.numpy(), (torch.arange(length + 1) > 0).numpy(), 3 * index + number))
        return build_row(samples, LENGTH, 8)


@dataclass(frozen=True)
class Run:
    """A training.

    Args:
        impl: ``transformer_impl``.
        precision: Of the Trainer.
        fp8: Arguments of ``MCorePrecision``.
        transformer: Fields of the model that differ from ``TRANSFORMER``.
        layout: Arguments of ``MCoreStrategy``.
        steps: Optimizer steps.
        model: More arguments of ``MCoreGPT``.
        packed: Train on packed rows.
    """

    impl: str = "transformer_engine"
    precision: str = "32-true"
    fp8: dict[str, Any] = field(default_factory=dict)
    transformer: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    model: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


class Numbers(pl.Callback):
    """Keeps the loss and gradient norm of each optimizer step; the norm of a skipped one is NaN."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step > len(self.losses):
            self.losses.append(float(trainer.callback_metrics["train_loss"]))
            norm = trainer.optimizers[0].grad_norm  # type: ignore[attr-defined]
            self.norms.append(math.nan if norm is None else float(norm))


def make_trainer(run: Run, world_size: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Return the Trainer of a run."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        devices=world_size,
        strategy=MCoreStrategy(**({"micro_batch_size": 1 if run.packed else 2} | run.layout)),
        plugins=[MCorePrecision(run.precision, **run.fp8)],  # type: ignore[arg-type]
        max_steps=run.steps,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        **({"accelerator": "cpu"} | quiet | options),
    )


def make_model(run: Run) -> MCoreGPT:
    """Return the model of a run."""
    recipe = Recipe(learning_rate=1e-3, warmup_steps=0)
    fields = TRANSFORMER | run.transformer
    return MCoreGPT(VOCABULARY, LENGTH, fields, recipe=recipe, transformer_impl=run.impl, **run.model)  # type: ignore[arg-type]


def make_loader(run: Run, rows: int = 4) -> DataLoader[dict[str, Tensor]]:
    """Return the data of a run; a batch has ``rows`` rows, or one if they are packed."""
    return DataLoader(Packed(), 1, collate_fn=collate_rows) if run.packed else DataLoader(Counting(), batch_size=rows)


def train(run: Run, world_size: int = 1) -> tuple[list[float], list[float]]:
    """Train on this rank; return the losses and the gradient norms."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    numbers = Numbers()
    make_trainer(run, world_size, numbers).fit(make_model(run), make_loader(run))
    return numbers.losses, numbers.norms
