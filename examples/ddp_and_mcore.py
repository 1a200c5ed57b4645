# SPDX-License-Identifier: Apache-2.0
"""One module, two strategies, the same losses: ``python examples/ddp_and_mcore.py``.

``TinyGPT`` is written once. Lightning's ``"ddp"`` runs a full copy on each of two ranks. ``MCoreStrategy`` runs it with
Megatron's data parallelism and shards the optimizer state across the ranks. Both use the same seed and batches, so
their losses must agree at every step. The script prints both, and exits with an error if they differ.

``TinyGPT`` is also the shortest possible MCoreModule: ``configure_model`` builds the model with ``self.pipeline``, and
the rest is plain Lightning. ``MCoreStrategy(pipeline_model_parallel_size=2)`` would split the same class into two
stages.
"""

import argparse
import sys

# isort: split
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from lightning_mcore import MCoreModule, MCoreStrategy
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.spec import gpt_block_spec
from stdlib_text import StdlibText

TOLERANCE = 1e-5  # in fp32; both add the same numbers in a different order


class TinyGPT(MCoreModule):
    """A byte-level GPT with two layers.

    Args:
        seq_length: Tokens in a window.
    """

    def __init__(self, seq_length: int) -> None:
        super().__init__()
        self.seq_length = seq_length
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the part of the model that this rank owns: all of it, unless the strategy splits it."""
        self.model = self.pipeline(self.build_chunk)

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """Build one pipeline stage; the fields from the strategy say how the layers are split."""
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **self.megatron_fields(),
        )
        return GPTChunk(
            config,
            gpt_block_spec(config, "local", vp_stage),
            vocab_size=256,
            max_sequence_length=self.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss per token; nothing here depends on stages or ranks."""
        tokens, labels = batch["tokens"], batch["labels"]  # both [b, s]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        loss = self.model(tokens, positions, attention_mask=None, labels=labels).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an ordinary torch optimizer, which the strategy shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class LossHistory(pl.Callback):
    """Records each step's loss, averaged over the ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Read the value logged by ``self.log``."""
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def losses_under(strategy: str | Strategy, options: argparse.Namespace) -> list[float]:
    """Train a fresh TinyGPT under ``strategy`` and return the loss of every step."""
    pl.seed_everything(1, verbose=False)
    history = LossHistory()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=strategy,
        max_steps=options.max_steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = StdlibText(seq_length=64, vocab_size=256, max_bytes=options.max_bytes)
    trainer.fit(TinyGPT(data.seq_length), datamodule=data)
    return history.losses


def main() -> None:
    """Train under both strategies and compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="ranks, one process each (2)")
    parser.add_argument("--max-steps", type=int, default=10)
    parser.add_argument("--max-bytes", type=int, default=5_000_000, help="how much of the library to read (5000000)")
    options = parser.parse_args()

    ddp = losses_under("ddp", options)
    mcore = losses_under(MCoreStrategy(use_distributed_optimizer=True), options)
    furthest = max(abs(one - other) for one, other in zip(ddp, mcore, strict=True))
    rank_zero_report(ddp, mcore, furthest)
    if furthest > TOLERANCE:
        sys.exit(f"the losses differ by {furthest:.1e}, more than {TOLERANCE}")


@pl.utilities.rank_zero_only
def rank_zero_report(ddp: list[float], mcore: list[float], furthest: float) -> None:
    """Print both columns."""
    print("step         ddp       mcore")
    for step, (one, other) in enumerate(zip(ddp, mcore, strict=True), start=1):
        print(f"{step:4}  {one:10.7f}  {other:10.7f}")
    print(f"largest difference {furthest:.1e}")


if __name__ == "__main__":
    main()
