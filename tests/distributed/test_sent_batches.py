# SPDX-License-Identifier: Apache-2.0
"""One rank of each model copy reads the batches and sends them, and training is the same as if every rank read."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_mcore import data_shard
from tests.distributed.test_same_batches import Shard, by_rank
from tests.support.ranks import on_ranks
from tests.support.sentences import refuses
from tests.support.toy import CP2, PP2, TP2, Batch, Samples, StagedNet, Watch, fill, make_trainer, weights

pytestmark = pytest.mark.distributed

SENT = {"broadcast_batches": True}


class Drawing(Samples):
    """Augments each sample from the three common generators, and counts the samples that this rank reads."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.reads = 0

    def __getitem__(self, index: int) -> Batch:
        self.reads += 1
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + random.random() + float(np.random.rand()) + torch.rand(())}


class Stream(IterableDataset[Batch]):
    """The samples of one data-parallel rank, each with numbers drawn while it is read."""

    def __init__(self, rank: int, size: int) -> None:
        self.shard, self.samples, self.reads = Shard(rank, size), Drawing(16), 0

    def __iter__(self) -> Iterator[Batch]:
        for index in self.shard.range:
            self.reads += 1
            yield self.samples[index]


class Streaming(StagedNet):
    """Trains on a stream."""

    def train_dataloader(self) -> DataLoader[Batch]:
        self.data = DataLoader(Stream(*data_shard(self.trainer)), batch_size=2)
        return self.data


def train(strategy: dict[str, Any], kind: str, workers: int = 0, **trainer: Any) -> dict[str, Any]:
    """Train two epochs of 4 batches, each with a validation, and return what this rank has seen."""
    ckpt_path, callbacks = trainer.pop("ckpt_path", None), [trainer.pop("callback", pl.Callback())]
    pl.seed_everything(3, verbose=False)
    watch = Watch()
    module = fill(Streaming() if kind == "stream" else StagedNet(), 5)
    runs = make_trainer(strategy, **{"max_epochs": 2, "callbacks": [watch, *callbacks], **trainer})
    data, held = Drawing(16), Drawing(6)
    loaders = [] if kind == "stream" else [DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)]
    runs.fit(module, *loaders, val_dataloaders=DataLoader(held, batch_size=2), ckpt_path=ckpt_path)
    return {
        "batches": watch.seen.batches,
        "losses": watch.seen.losses,
        "weights": weights(module),
        "reads": module.data.dataset.reads if isinstance(module, Streaming) else data.reads,
        "held": held.reads,
        "random": torch.rand(3),
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare losses and weights bit for bit, what was read, and the random state afterwards."""
    assert (one["batches"], one["losses"]) == (other["batches"], other["losses"])
    assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    assert one["losses"]
    assert one["weights"].keys() == other["weights"].keys()
    assert torch.equal(one["random"], other["random"])


@pytest.mark.parametrize(
    ("strategy", "kind", "workers"),
    [
        pytest.param(TP2, "index", 0, id="tp2"),
        pytest.param(TP2, "index", 1, id="tp2-workers"),
        pytest.param(PP2, "index", 0, id="pp2", marks=pytest.mark.thorough),
        pytest.param(PP2, "stream", 0, id="pp2-stream"),
        pytest.param(CP2, "index", 0, id="cp2", marks=pytest.mark.thorough),
    ],
)
@on_ranks(4, timeout=120)
def test_training_on_sent_batches_equals_training_on_read_ones(
    strategy: dict[str, Any], kind: str, workers: int
) -> None:
    sent, read = train({**strategy, **SENT}, kind, workers), train(strategy, kind, workers)
    assert_same(sent, read)
    assert sent["batches"][0] != sent["batches"][4] or kind == "stream"
    if workers == 0:  # otherwise the workers count
        reader = dist.get_rank() in ((0, 1) if strategy == PP2 else (0, 2))
        # In two epochs 16 training samples and 6 held back, or the first batch of each.
        assert (read["reads"], read["held"]) == (16, 6)
        assert (sent["reads"], sent["held"]) == ((16, 6) if reader else (2, 2))


class SaveAfter(pl.Callback):
    """Saves a checkpoint after one batch of the second epoch."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, self.batch):
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("kind", "first", "then", "accumulate"),
    [
        pytest.param("index", SENT, SENT, 2, id="sent"),
        pytest.param("stream", SENT, SENT, 1, id="sent-stream", marks=pytest.mark.thorough),
        pytest.param("index", SENT, {}, 2, id="sent then read", marks=pytest.mark.thorough),
        pytest.param("stream", SENT, {}, 2, id="sent then read-stream"),
        pytest.param("stream", {}, SENT, 1, id="read then sent-stream"),
    ],
)
@on_ranks(4, timeout=240)
def test_a_run_resumes_exactly(
    tmp_path: Path, kind: str, first: dict[str, Any], then: dict[str, Any], accumulate: int
) -> None:
    """A run goes on with batch 2 of the second epoch, under other settings.

    With ``accumulate=2`` the checkpoint is taken in the middle of a window, so batch 2 is read again.
    """
    path, settings = tmp_path / "saved.ckpt", {"accumulate_grad_batches": accumulate}
    whole = train({**TP2, **first}, kind, callback=SaveAfter(path, accumulate), **settings)
    rest = train({**TP2, **then}, kind, ckpt_path=path, **settings)
    assert_same(rest, {**whole, "batches": whole["batches"][6:], "losses": whole["losses"][-(2 // accumulate) :]})


def of_a_class_within() -> DataLoader[Batch]:
    """Return a loader whose batches hold an object that pickle does not know."""

    class Within:
        pass

    return DataLoader(Samples(8), batch_size=2, collate_fn=lambda rows: {**default_collate(rows), "own": Within()})


@on_ranks(2)
def test_a_dataset_sharded_by_the_rank_in_the_world_is_refused() -> None:
    with refuses(ValueError, "the train_dataloader gives batch 0 with different contents"):
        make_trainer({**TP2, **SENT}, use_distributed_sampler=False).fit(StagedNet(), by_rank())


@on_ranks(2)
def test_a_batch_that_cannot_be_sent_is_refused_on_every_rank() -> None:
    trainer = make_trainer({**TP2, **SENT}, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="broadcast_batches=True pickles each batch, and one of train_dataloader"):
        trainer.fit(StagedNet(), of_a_class_within())
