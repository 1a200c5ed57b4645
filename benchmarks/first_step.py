# SPDX-License-Identifier: Apache-2.0
"""A training script that records when each phase ends; ``benchmarks/startup.py`` runs it.

    python benchmarks/first_step.py mcore|ddp FILE

Rank 0 writes a JSON object to the file: for each phase, in order, the seconds from the start of the first process to
the end of the phase. With ``"ddp"``, the model is a plain torch model of the same size.
"""

import os
import time

import psutil

_BEGAN = float(os.environ.setdefault("FIRST_STEP_BEGAN", repr(psutil.Process().create_time())))
_REACHED: dict[str, float] = {}


def reached(phase: str) -> None:
    """Record the end of a phase."""
    _REACHED.setdefault(phase, time.time() - _BEGAN)


import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

VOCAB_SIZE, LENGTH, HIDDEN, RANKS = 512, 64, 64, 4


class Marks(pl.Callback):
    """Records the phases of the first step."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        reached("ranks and groups")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reached("model and optimizer")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        reached("first batch")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        reached("first step")


class Plain(pl.LightningModule):
    """A plain torch Transformer for ``"ddp"``."""

    def configure_model(self) -> None:
        layer = torch.nn.TransformerEncoderLayer(HIDDEN, 2, 4 * HIDDEN, batch_first=True)
        self.inner = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding, self.output = torch.nn.Embedding(VOCAB_SIZE, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB_SIZE)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.output(self.inner(self.embedding(batch["tokens"])))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main(kind: str, file: str) -> None:
    """Train one step on four ranks."""
    strategy: Any = "ddp"
    model: pl.LightningModule = Plain()
    if kind == "mcore":
        from lightning_mcore import MCoreGPT, MCoreStrategy

        strategy = MCoreStrategy(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        model = MCoreGPT(VOCAB_SIZE, LENGTH, {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 2})
    reached("imports")
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=1,
        callbacks=[Marks()],
        enable_model_summary=False,
        **quiet,
    )
    tokens = torch.randint(VOCAB_SIZE, (RANKS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in TensorDataset(tokens).tensors[0]]
    trainer.fit(model, DataLoader(rows, batch_size=1))  # type: ignore[arg-type] # a list is a dataset
    if trainer.is_global_zero:
        Path(file).write_text(json.dumps(_REACHED))


if __name__ == "__main__":
    main(*sys.argv[1:])
