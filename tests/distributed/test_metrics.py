# SPDX-License-Identifier: Apache-2.0
"""Metrics of language models on every kind of layout, against sums over the samples of one rank.

The model is written to a checkpoint once and read on every layout, so that all of them predict the same.
"""

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, Recipe
from lightning_mcore.data.packing.best_fit import TokenSample, pack_lengths
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.layers.metrics import (
    PackingEfficiency,
    PaddingShare,
    TokenAccuracy,
    TokenLoss,
    TokenPerplexity,
    TokensSeen,
)
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

pytestmark = pytest.mark.distributed

VOCAB_SIZE = 40
ROW_LENGTH = 32
MULTIPLE = 4  # of a sub-sequence, with two context-parallel ranks
TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2-cp2": (4, {"context_parallel_size": 2}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


class Measured(MCoreGPT):
    """Counts in validation all that there is to count, and in training the tokens; keeps what went into a metric."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.share.update(batch)  # runs on every stage
        logits, inputs = self.token_logits(batch)
        losses = vocab_parallel_cross_entropy(logits.clone(), inputs.labels)
        self.loss.update(losses, inputs.loss_mask)
        self.perplexity.update(losses, inputs.loss_mask)
        self.accuracy.update(logits, inputs.labels, inputs.loss_mask)
        self.efficiency.update(batch)
        self.kept.append([value.flatten(0, 1).double() for value in (logits, inputs.labels, inputs.loss_mask)])
        for name in ("loss", "perplexity", "accuracy", "efficiency", "share"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        result = self.forward_step(batch)
        self.seen.update(batch)
        self.targets.update(result["num_tokens"])
        for name in ("seen", "targets"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return result


def build() -> Measured:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = Measured(
        VOCAB_SIZE, ROW_LENGTH, TRANSFORMER, make_vocab_size_divisible_by=16, recipe=Recipe(learning_rate=1e-3)
    )
    module.loss, module.perplexity, module.accuracy = TokenLoss(), TokenPerplexity(), TokenAccuracy(VOCAB_SIZE)
    module.efficiency, module.share = PackingEfficiency(), PaddingShare()
    module.seen, module.targets = TokensSeen(), TokensSeen()
    module.kept = []
    return module


def samples() -> list[TokenSample]:
    generator = np.random.default_rng(4)
    lengths = generator.integers(2, 25, 20)
    masks = [generator.random(length) < 0.6 for length in lengths]
    for mask in masks:
        mask[-1] = True
    return [
        TokenSample(generator.integers(0, VOCAB_SIZE, len(mask)), mask, number) for number, mask in enumerate(masks)
    ]


def rows() -> list[dict[str, Tensor]]:
    held = samples()
    packed = pack_lengths([sample.length for sample in held], ROW_LENGTH, MULTIPLE)
    return [build_row([held[index] for index in row], ROW_LENGTH, MULTIPLE) for row in packed]


def loaders() -> dict[str, DataLoader[Any]]:
    pad = functools.partial(collate_padded, multiple=MULTIPLE)
    return {
        "packed": DataLoader(rows()[:7], batch_size=2, collate_fn=collate_rows),  # type: ignore[arg-type]
        "padded": DataLoader(samples(), batch_size=3, collate_fn=pad),  # type: ignore[arg-type]
    }


def evaluate(parallel: dict[str, Any], checkpoint: str, write: bool) -> dict[str, Any]:
    """Rank function: the metrics of both kinds of batches, with random weights that are written, or read."""
    found: dict[str, Any] = {}
    for kind, data in loaders().items():
        module = build()
        trainer = make_trainer(parallel)
        if write and kind == "packed":
            trainer.validate(module, data, verbose=False)
            trainer.save_checkpoint(checkpoint, weights_only=True)
        else:
            trainer.validate(module, data, ckpt_path=checkpoint, verbose=False)
        found[kind] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if write:
            found[kind, "kept"] = [torch.cat(values) for values in zip(*module.kept, strict=True)]
    return found


def by_hand(kept: list[Tensor]) -> dict[str, float]:
    logits, labels, mask = kept[0][:, :VOCAB_SIZE], kept[1].long(), kept[2] > 0
    # the loss is over the padded vocabulary, as in training
    losses = torch.nn.functional.cross_entropy(kept[0], labels, reduction="none")[mask]
    right = (logits.argmax(-1) == labels)[mask].double().mean()
    return {"loss": float(losses.mean()), "perplexity": float(losses.mean().exp()), "accuracy": float(right)}


def fill_by_hand() -> dict[str, float]:
    packed = sum(int(row["cu_seqlens"][-1]) for row in rows()[:7]) / (7 * ROW_LENGTH)
    lengths = [sample.length for sample in samples()]
    places = 0
    for start in range(0, len(lengths), 3):
        batch = lengths[start : start + 3]
        places += len(batch) * -(-max(batch) // MULTIPLE) * MULTIPLE
    return {"packed": packed, "padded": sum(lengths) / places}


def test_every_token_counts_once_on_every_layout(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "weights")
    one = run_ranks(1, evaluate, {}, checkpoint, True)[0]
    expected = {kind: by_hand(one[kind, "kept"]) for kind in ("packed", "padded")}
    fill = fill_by_hand()

    for name, (world_size, parallel) in LAYOUTS.items():
        ranks = [one] if name == "one" else run_ranks(world_size, evaluate, parallel, checkpoint, False, timeout=120)
        for rank in ranks:
            for kind in ("packed", "padded"):
                found = rank[kind]
                for metric, value in expected[kind].items():
                    assert found[metric] == pytest.approx(value, rel=2e-6), f"{metric} of {kind} rows on {name}"
                if kind == "packed" or not name.startswith("dp2"):  # other batches are padded to other lengths
                    assert found["efficiency"] == pytest.approx(fill[kind], rel=1e-6), f"{kind} rows on {name}"
                assert found["efficiency"] + found["share"] == pytest.approx(1.0, rel=1e-6)


class SaveAt(pl.Callback):
    """Saves a checkpoint in the middle of a run."""

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def count(parallel: dict[str, Any], save_at: int, save: str, resume: str | None) -> dict[str, int]:
    """Rank function: train two epochs, or what is left of them, and return what was counted."""
    module = build()
    data = DataLoader(rows()[:8], batch_size=1, collate_fn=collate_rows)  # type: ignore[arg-type]
    trainer = make_trainer(parallel, max_epochs=2, callbacks=[SaveAt(save_at, save)])
    trainer.fit(module, data, ckpt_path=resume)
    logged = {name: int(value) for name, value in trainer.callback_metrics.items()}
    return {**logged, "own": int(module.seen.before + module.seen.since)}


def test_tokens_seen_are_those_of_all_ranks_over_epochs_and_over_resumes_on_other_layouts(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("first", "second", "third")]
    total = 2 * sum(int(row["cu_seqlens"][-1]) for row in rows()[:8])
    targets = 2 * sum(int(row["loss_mask"].sum()) for row in rows()[:8])

    runs = [
        run_ranks(4, count, LAYOUTS["dp2-cp2"][1], 3, paths[0], None, timeout=120),  # saves after 6 rows
        run_ranks(2, count, LAYOUTS["pp2"][1], 5, paths[1], paths[0], timeout=120),  # goes on, saves after 8
        run_ranks(2, count, LAYOUTS["dp2"][1], 7, paths[2], paths[1], timeout=120),
        run_ranks(1, count, {}, 9, paths[2], paths[2], timeout=120),
    ]

    for ranks in runs:
        for rank in ranks:
            assert (rank["seen"], rank["targets"]) == (total, targets)
    assert [rank["own"] for rank in runs[1]] == [total, total]
