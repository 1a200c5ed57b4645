# SPDX-License-Identifier: Apache-2.0
"""Steps on embeddings equal a plain loop over transformers with the whole batch, on every layout, padded and packed.

The plain loop runs in fp64, text by text, writes InfoNCE out, and knows nothing of padding, packing or ranks.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import Embedding, LoRA, MCoreEmbedding, MCoreStrategy, Recipe, SaveHFModel
from lightning_mcore.data.embedding.texts import Texts, build_texts_row, collate_padded_texts, collate_texts_rows
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.interop.export import export_checkpoint
from tests.parity.hf_training import Part, finished_gradients, on_disk
from tests.support.hf_models import VOCAB_SIZE, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import Watch, make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("embeddings")]

LENGTH, PACKED_LENGTH = 16, 88
MULTIPLE = 4  # what cp2 asks of a sequence
STEPS = 2
ADAM = {"lr": 0.1, "eps": 0.1, "weight_decay": 0.0}  # a large eps, so that tiny gradients make tiny steps
LOSS, GRADIENT = 1e-5, 2e-5  # the first absolute, the second of the greatest value of a tensor
CASES = {
    "last": Embedding(temperature=0.1),
    "mean": Embedding("mean", temperature=0.2, negatives=2, matryoshka_sizes=[32, 8]),
    "soft": Embedding(temperature=1.0),  # no query is so certain that fp32 rounds what an expert learns from it
}
QUERIES = 4
ROWS = {1: ((0, 1, 2), (3,)), 2: ((0, 1), (2, 3))}  # the queries in packed rows, for one microbatch or two

Run = tuple[str, str, bool]  # a case, a family, and whether rows are packed
BOTH: tuple[Run, ...] = (("last", "qwen2", False), ("mean", "qwen2", True))
OTHER: tuple[Run, ...] = (("last", "qwen2", True), ("mean", "qwen2", False))
LAYOUTS: dict[str, dict[Layout, tuple[Run, ...]]] = {  # each name begins with the number of ranks
    "1": {Layout(): (*BOTH, *OTHER, ("last", "llama", False))},
    "2": {
        Layout(tp=2, sp=True): BOTH,
        Layout(pp=2): BOTH,
        Layout(cp=2): (*BOTH, *OTHER),
        Layout(dp=2, distributed_optimizer=True): (*BOTH, *OTHER),
    },
    "2 more": {
        Layout(tp=2): BOTH,
        Layout(pp=2, vp=2): BOTH,
        Layout(dp=2): (*BOTH, *OTHER),
        Layout(moe=True, dp=2, ep=2): (("soft", "qwen2_moe", False), ("mean", "qwen2_moe", True)),
    },
    "4": {
        Layout(tp=2, cp=2, sp=True): (*BOTH, *OTHER),
        Layout(tp=2, pp=2, sp=True): BOTH,
        Layout(dp=2, cp=2): (*BOTH, *OTHER),
        Layout(dp=2, pp=2, distributed_optimizer=True): (BOTH[0], OTHER[1]),
    },
}


@functools.cache
def rows_of(negatives: int) -> list[Texts]:
    """Return the texts of four queries, of uneven lengths."""
    random = np.random.default_rng(3)
    found = []
    for number in range(QUERIES):
        texts = [random.integers(1, VOCAB_SIZE, random.integers(1, 8)) for _ in range(2 + negatives)]
        found.append(Texts(texts, number))
    return found


# ---- the plain loop


@dataclass(frozen=True)
class Wanted:
    """What the plain loop computes: logged values of the last step, and its gradients by the name in transformers."""

    values: dict[str, float]
    gradients: dict[str, Tensor]


def plain_vectors(model: Any, pooling: str, rows: Sequence[Texts]) -> Tensor:
    """Return the vectors of all texts, [rows, texts, h], before they are normalised."""
    found = []
    for tokens in (tokens for row in rows for tokens in row.tokens):
        states = model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
        found.append(states[-1] if pooling == "last" else states.mean(0))
    return torch.stack(found).view(len(rows), -1, found[0].numel())


def plain_losses(vectors: Tensor, setting: Embedding) -> tuple[Tensor, Tensor]:
    """Return the loss of each query, and the rank of its positive, each [rows]; InfoNCE written out."""
    losses, places = [], []
    for row in range(len(vectors)):
        loss: Any = 0
        for size in setting.matryoshka_sizes or [vectors.size(-1)]:
            cut = vectors[..., :size]
            unit = cut / cut.norm(dim=-1, keepdim=True)
            found = torch.einsum("h,kth->kt", unit[row, 0], unit[:, 1:])
            weights = torch.exp(found / setting.temperature)
            loss = loss - torch.log(weights[row, 0] / weights.sum())
        losses.append(loss)
        unit = vectors / vectors.norm(dim=-1, keepdim=True)
        found = torch.einsum("h,kth->kt", unit[row, 0], unit[:, 1:])
        places.append((found >= found[row, 0]).sum())
    return torch.stack(losses), torch.stack(places)


@functools.cache
def plain_steps(case: str, family: str, parts: int) -> Wanted:
    """Run the steps of the plain loop over all queries, whose texts are compared within each of the parts."""
    from transformers import AutoModel

    setting = CASES[case]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped products have no fp64
    model = AutoModel.from_pretrained(tiny_folder(family), dtype=torch.float64, **plain).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        vectors = plain_vectors(model, setting.pooling, rows_of(setting.negatives)).chunk(parts)
        losses, places = (torch.cat(values) for values in zip(*(plain_losses(v, setting) for v in vectors), strict=True))
        loss = losses.mean()
        loss.backward()
        if step < STEPS - 1:
            optimizer.step()
    values = {"train_loss": loss.item(), "train_accuracy": (places == 1).double().mean().item()}
    own = on_disk(family, {f"model.{name}": parameter for name, parameter in model.named_parameters()})
    return Wanted(values, own)


# ---- a run


class Data(pl.LightningDataModule):
    """The queries in ``parts`` microbatches a step, packed or padded (to ``length``, or to the longest text)."""

    def __init__(
        self, negatives: int, packed: bool, length: int | None = None, parts: int = 1, steps: int = STEPS
    ) -> None:
        super().__init__()
        self._rows, self._packed, self._length = rows_of(negatives), packed, length
        self._parts, self._steps = parts, steps

    def train_dataloader(self) -> DataLoader[Any]:
        rank, ranks = data_parallel_place(self.trainer)
        chosen: Any = ROWS[self._parts] if self._packed else range(QUERIES)
        size = len(chosen) // self._parts
        parts = [chosen[part * size :][:size][rank::ranks] for part in range(self._parts)]
        collate = self._pack if self._packed else self._pad
        return DataLoader(parts * self._steps, batch_size=None, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def _take(self, numbers: Sequence[int]) -> list[Texts]:
        return [self._rows[number] for number in numbers]

    def _pack(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        return collate_texts_rows([build_texts_row(self._take(row), PACKED_LENGTH, MULTIPLE) for row in rows])

    def _pad(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        return collate_padded_texts(self._take(numbers), MULTIPLE, self._length)


class Watched(MCoreEmbedding):
    """Keeps finished gradients."""

    gradients: list[Part]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = finished_gradients(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAM)


Seen = tuple[dict[str, float], list[Part]]


def train(layouts: dict[Layout, tuple[Run, ...]], folders: dict[str, str]) -> list[list[Seen]]:
    """Train the steps of each run on each layout, one after the other, on this rank."""
    return [[_train(layout, run, folders[run[1]]) for run in runs] for layout, runs in layouts.items()]


def _train(layout: Layout, run: Run, folder: str) -> Seen:
    case, _, packed = run
    setting = CASES[case]
    module = Watched.from_pretrained(folder, seq_length=PACKED_LENGTH, embedding=setting)
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments),
        max_steps=STEPS,
        accumulate_grad_batches=layout.pp,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    trainer.fit(module, Data(setting.negatives, packed, LENGTH if layout.moe else None, layout.pp))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.gradients


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, "1", "2"))
def test_steps_on_every_layout_are_those_of_a_plain_loop_over_the_whole_batch(name: str) -> None:
    layouts = LAYOUTS[name]
    folders = {family: str(tiny_folder(family)) for runs in layouts.values() for _, family, _ in runs}
    ranks = run_ranks(int(name[0]), train, layouts, folders, timeout=240)
    wrong: dict[str, Any] = {}
    for index, (layout, runs) in enumerate(layouts.items()):
        for number, run in enumerate(runs):
            found = dict(differences(plain_steps(*run[:2], layout.pp), [rank[index][number] for rank in ranks]))
            if found:
                wrong[f"{layout.id} {run}"] = found
    assert wrong == {}


def differences(wanted: Wanted, ranks: Sequence[Seen]) -> Iterator[tuple[str, float]]:
    """Yield what differs by more than it may; nothing may be missing."""
    seen = set()
    for values, gradients in ranks:
        for name, value in wanted.values.items():
            if not abs(values[name] - value) <= LOSS * max(1, abs(value)):
                yield name, values[name] - value
        for part in gradients:
            seen.add(part.name)
            whole = wanted.gradients[part.name]
            difference = (part.values - part.of(whole)).abs().max().item() / max(whole.abs().max().item(), 1e-30)
            if not difference <= GRADIENT:
                yield part.name, difference
    if seen != wanted.gradients.keys():
        yield f"names {seen ^ wanted.gradients.keys()}", float("nan")
