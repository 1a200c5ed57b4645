# SPDX-License-Identifier: Apache-2.0
"""Train a plain LightningModule with Megatron's data parallelism: ``python examples/plain_lightning.py``.

``ByteModel`` could come from any project: it has plain torch layers and an ordinary ``training_step``. Under
``MCoreStrategy`` with all sizes at 1, each rank has a copy of it. Megatron's data parallelism reduces the gradients in
buckets, and its distributed optimizer shards the optimizer state across the ranks. Only the Trainer's argument changes;
``--strategy ddp`` runs the same module under Lightning's own strategy.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mcore import MCoreStrategy
from stdlib_text import StdlibText


class ByteModel(pl.LightningModule):
    """Predicts the next byte with a recurrent network.

    Args:
        hidden_size: Width of the network.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(self, hidden_size: int = 128, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, hidden_size)
        self.recurrent = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, 256] of the bytes [b, s]."""
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.head(hidden)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy of a batch, a mean over its bytes."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the mean cross entropy over the validation windows."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of a batch, a mean over its bytes."""
        return nn.functional.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW on all weights."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main() -> None:
    """Train, then validate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["mcore", "ddp"], default="mcore")
    parser.add_argument("--devices", type=int, default=2, help="ranks, one process each (2)")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--max-bytes", type=int, default=5_000_000, help="how much of the library to read (5000000)")
    options = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MCoreStrategy(use_distributed_optimizer=True) if options.strategy == "mcore" else "ddp",
        max_epochs=1,
        limit_train_batches=options.max_steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    data = StdlibText(seq_length=64, batch_size=16, vocab_size=256, max_bytes=options.max_bytes)
    trainer.fit(ByteModel(), datamodule=data)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["val_loss"]
        print(f"val_loss {loss:.2f} after {trainer.global_step} steps under {options.strategy}")


if __name__ == "__main__":
    main()
