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
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_mcore import data_shard
from tests.distributed.test_same_batches import CP2, PP2, REMEDY, TP2, Shard, by_rank
from tests.support.ranks import run_ranks
from tests.support.toy import Batch, Samples, StagedNet, Watch, fill, make_trainer, weights

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


def sent_and_read(*run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    strategy, *others = run
    return train({**strategy, **SENT}, *others), train(strategy, *others)


@pytest.mark.parametrize(
    ("strategy", "kind", "workers"),
    [(TP2, "index", 0), (TP2, "index", 1), (PP2, "index", 0), (PP2, "stream", 0), (CP2, "index", 0)],
    ids=["tp2", "tp2-workers", "pp2", "pp2-stream", "cp2"],
)
def test_training_on_sent_batches_equals_training_on_read_ones(
    strategy: dict[str, Any], kind: str, workers: int
) -> None:
    for rank, (sent, read) in enumerate(run_ranks(4, sent_and_read, strategy, kind, workers, timeout=120)):
        assert_same(sent, read)
        assert sent["batches"][0] != sent["batches"][4] or kind == "stream"
        if workers == 0:  # otherwise the workers count
            reader = rank in ((0, 1) if strategy is PP2 else (0, 2))
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


def interrupted(path: Path, kind: str, first: Any, then: Any, accumulate: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run that saves, and one that goes on from there under other settings, with batch 2 of the second epoch.

    With ``accumulate=2`` the checkpoint is taken in the middle of a window, so batch 2 is read again.
    """
    settings = {"accumulate_grad_batches": accumulate}
    save = SaveAfter(path, 1 if accumulate == 1 else 2)
    return train(first, kind, callback=save, **settings), train(then, kind, ckpt_path=path, **settings)


@pytest.mark.parametrize(
    ("kind", "first", "then", "accumulate"),
    [
        ("index", SENT, SENT, 2),
        ("stream", SENT, SENT, 1),
        ("index", SENT, {}, 2),
        ("stream", SENT, {}, 2),
        ("stream", {}, SENT, 1),
    ],
    ids=["sent", "sent-stream", "sent then read", "sent then read-stream", "read then sent-stream"],
)
def test_a_run_resumes_exactly(
    tmp_path: Path, kind: str, first: dict[str, Any], then: dict[str, Any], accumulate: int
) -> None:
    run = ({**TP2, **first}, {**TP2, **then}, accumulate)
    for whole, rest in run_ranks(4, interrupted, tmp_path / "saved.ckpt", kind, *run, timeout=240):
        steps = 2 // accumulate
        assert_same(rest, {**whole, "batches": whole["batches"][6:], "losses": whole["losses"][-steps:]})


def of_a_class_within() -> DataLoader[Batch]:
    """Return a loader whose batches hold an object that pickle does not know."""

    class Within:
        pass

    return DataLoader(Samples(8), batch_size=2, collate_fn=lambda rows: {**default_collate(rows), "own": Within()})


def refusal(make: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        make_trainer({**TP2, **SENT}, use_distributed_sampler=False).fit(StagedNet(), make())
    return str(error.value)


def test_a_dataset_sharded_by_the_rank_in_the_world_is_refused() -> None:
    for text in run_ranks(2, refusal, by_rank):
        assert "the train_dataloader gives batch 0 with different contents: ['x'] is float32 [2, 4, 4] " in text
        assert text.endswith(REMEDY)


def test_a_batch_that_cannot_be_sent_is_refused_on_every_rank() -> None:
    for text in run_ranks(2, refusal, of_a_class_within):
        assert text.startswith(
            "broadcast_batches=True pickles each batch, and one of train_dataloader cannot be pickled: "
        )
