# SPDX-License-Identifier: Apache-2.0
"""The same LightningModule around a Hugging Face model: under DDP with transformers, and split over ranks.

Run ``python examples/your_hf_module.py``, and again with ``--ddp``: the losses are the same. ``--model`` is a folder or
a model on the hub; without it, the script creates a tiny random Llama. The data are rows of different lengths, in which
random tokens repeat. At the end, the model continues one of them and is saved in Hugging Face format.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy, hf_model

Batch = dict[str, Tensor]


class FineTuning(pl.LightningModule):
    """Fine-tunes a language model.

    Args:
        path: Folder of the model, or its name on the hub.
        ddp: Whether to use the transformers model, for DDP.
    """

    def __init__(self, path: str, ddp: bool) -> None:
        super().__init__()
        self.path, self.ddp = path, ddp
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Build the model: the one line that differs."""
        if not self.ddp:
            self.model = hf_model(self, self.path)
        elif not hasattr(self, "model"):
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(self.path)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log how often the most probable token is correct, and continue the first row."""
        right = self.model(**batch).logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        counted = batch["labels"][:, 1:] >= 0
        self.log("val_right", right[counted].float().mean(), sync_dist=True)
        self.written = self.model.generate(batch["input_ids"][:1, :10], max_new_tokens=8)[0]

    def on_train_batch_end(self, *_: Any) -> None:
        """Record the loss."""
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def make_rows(number: int) -> list[Tensor]:
    """Return rows of different lengths, each a few tokens repeated."""
    generator = torch.Generator().manual_seed(number)
    pieces = [torch.randint(1, 256, (6,), generator=generator) for _ in range(number)]
    return [piece.repeat(2 + index % 3) for index, piece in enumerate(pieces)]


def collate(rows: list[Tensor]) -> Batch:
    """Pad rows on the right."""
    tokens = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def make_model(folder: Path) -> None:
    """Write a small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> FineTuning:
    """Train, validate and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of the model to start from (default: a tiny random one)")
    parser.add_argument("--output", type=Path, default=Path("outputs/your_hf_module"), help="folder for the files")
    parser.add_argument("--ddp", action="store_true", help="use the model of transformers, under DDP on one rank")
    parser.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size (2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (1)")
    parser.add_argument("--max-steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.model is None and not (options.output / "start").exists():
        make_model(options.output / "start")
    path = options.model or str(options.output / "start")
    sizes = {"tensor_model_parallel_size": options.tp, "pipeline_model_parallel_size": options.pp}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if options.ddp else options.tp * options.pp,
        strategy="ddp" if options.ddp else MCoreStrategy(**sizes),
        max_steps=options.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = FineTuning(path, options.ddp)
    trainer.fit(module, DataLoader(make_rows(160), 8, shuffle=False, collate_fn=collate))
    trainer.validate(module, DataLoader(make_rows(16), 8, collate_fn=collate), verbose=False)
    if trainer.is_global_zero:
        print("losses:", " ".join(f"{loss:.5f}" for loss in module.losses))
        print("written:", module.written.tolist())
    if not options.ddp:
        with trainer.strategy.runtime():
            module.model.save_pretrained(str(options.output / "tuned"))
    return module


if __name__ == "__main__":
    main()
