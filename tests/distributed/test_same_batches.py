# SPDX-License-Identifier: Apache-2.0
"""The ranks of one model copy train on the same batches, or the run ends in one sentence on all of them."""

import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from lightning_mcore import PreemptionCheckpoint, data_shard
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import CP2, PP2, TP2, Batch, PlainNet, Samples, StagedNet, Watch, loader, make_trainer

pytestmark = pytest.mark.distributed

REMEDY = "use lightning_mcore.data_shard(trainer) instead, and seed its random numbers"


class Shard(IterableDataset[Batch]):
    """The samples ``first``, ``first + step``, ... of 16."""

    def __init__(self, first: int, step: int, size: int = 16) -> None:
        self.range = range(first, size, step)

    def __iter__(self) -> Iterator[Batch]:
        samples = Samples(16)
        worker = get_worker_info()
        mine = self.range if worker is None else self.range[worker.id :: worker.num_workers]
        return (samples[index] for index in mine)


def by_rank(workers: int = 0) -> DataLoader[Batch]:
    """Return a loader whose dataset shards itself by the rank in the world."""
    return DataLoader(Shard(dist.get_rank(), dist.get_world_size()), batch_size=2, num_workers=workers)


def by_index() -> DataLoader[Batch]:
    """Return a loader whose map-style dataset looks at the rank."""

    class Looking(Samples):
        def __getitem__(self, index: int) -> Batch:
            return {**super().__getitem__(index), "y": torch.full((4, 1), float(dist.get_rank()))}

    return DataLoader(Looking(8), batch_size=2)


def drawn() -> DataLoader[Batch]:
    """Return a loader that draws from a generator which no seed reaches."""
    own = random.Random(os.getpid())
    return loader(8, 2, collate_fn=lambda rows: {**default_collate(rows), "noise": own.random()})


def other_structure() -> DataLoader[Batch]:
    """Return a loader whose batches have one more entry on rank 1."""
    more = {"more": "text"} if dist.get_rank() == 1 else {}
    return loader(8, 2, collate_fn=lambda rows: {**default_collate(rows), **more})


def other_dtype() -> DataLoader[Batch]:
    """Return a loader whose batches are in another dtype on rank 1."""
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    return loader(8, 2, collate_fn=lambda rows: {**default_collate(rows), "x": default_collate(rows)["x"].to(dtype)})


class Row:
    """A batch entry of an unknown class."""

    def __init__(self, number: int) -> None:
        self.number = number


def other_object() -> DataLoader[Batch]:
    """Return a loader whose batches hold an object that differs."""
    return loader(8, 2, collate_fn=lambda rows: {**default_collate(rows), "row": {"of": [Row(dist.get_rank())]}})


def shorter() -> DataLoader[Batch]:
    """Return a loader of fewer batches on rank 1; each of them is the same."""
    return loader(8 - 2 * dist.get_rank(), 2)


def stream_ends() -> DataLoader[Batch]:
    """Return a loader without a length that ends one batch earlier on rank 1; it is past the first batches."""
    return DataLoader(Shard(0, 1, 16 - 2 * dist.get_rank()), batch_size=2)


class Uneven(BatchSampler):
    """A batch sampler of the user's own, whose length is a guess."""

    def __init__(self) -> None:
        self.count = 5 - dist.get_rank()

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5], [6, 7], [1, 2]][: self.count])


def guessed_length() -> DataLoader[Batch]:
    """Return a loader that gives fewer batches than its length says."""
    return DataLoader(Samples(8), batch_sampler=Uneven())


def generator() -> Any:
    """Return a generator, which is no DataLoader and has no length."""
    return iter(DataLoader(Shard(dist.get_rank(), 2), batch_size=2))


def empty() -> DataLoader[Batch]:
    """Return a loader of no batches on rank 1."""
    return loader(8 * (1 - dist.get_rank()), 2)


Make = Callable[[], Any]
DIFFERENCES: dict[str, tuple[Make, str]] = {
    "by rank": (by_rank, "gives batch 0 with different contents: ['x'] is float32 [2, 4, 4] "),
    "map-style by rank": (by_index, "gives batch 0 with different contents: ['y'] is float32 [2, 4, 1] "),
    "drawn": (drawn, "gives batch 0 with different contents: ['noise'] is 0."),
    "structure": (
        other_structure,
        "different contents: nothing at its end on rank 0, and 'text' at ['more'] on rank 1",
    ),
    "dtype": (other_dtype, "gives batch 0 with different contents: ['x'] is float32 [2, 4, 4] "),
    "object": (other_object, "different contents: ['row']['of'][0].number is 0 on rank 0, and 1 on rank 1"),
    "length": (shorter, "_dataloader has 4 batches on rank 0, and the "),
    "stream": (stream_ends, "gives batch 7 on rank 0, and the "),
    "guessed length": (guessed_length, "gives batch 4 on rank 0, and the "),
    "generator": (generator, "gives batch 0 with different contents: ['x'] is float32 [2, 4, 4] "),
    "empty": (empty, "_dataloader has 4 batches on rank 0, and the "),
}


def check(name: str, strategy: dict[str, Any], run: str, first_of_copy: int = 0) -> None:
    """Expect on this rank that a run over a loader which differs between the ranks of a copy is refused."""
    make, difference = DIFFERENCES[name]
    data = make()
    trainer, module = make_trainer(strategy, use_distributed_sampler=False), StagedNet()
    runs: dict[str, Callable[[], Any]] = {
        "fit": lambda: trainer.fit(module, data),
        "val in fit": lambda: trainer.fit(module, loader(8, 2), [loader(4, 2), data]),
    }
    with pytest.raises((ValueError, RuntimeError)) as error:
        runs.get(run, lambda: getattr(trainer, run)(module, data))()
    text, prefix = str(error.value), {"fit": "train", "validate": "val", "val in fit": "val"}.get(run, run)
    ranks = f"ranks {first_of_copy} and {first_of_copy + 1}"
    assert text.startswith(f"{ranks} hold parts of one model copy and must read the same batches, but the ")
    assert f"the {prefix}_dataloader" in text
    assert difference in text
    assert text.endswith(REMEDY)


@pytest.mark.parametrize("name", list(DIFFERENCES))
@on_ranks(2)
def test_a_difference_ends_training_on_every_rank(name: str) -> None:
    check(name, TP2, "fit")


@pytest.mark.parametrize("run", ["validate", "test", "predict", "val in fit"])
@pytest.mark.parametrize("name", ["by rank", "stream", "length"])
@on_ranks(2)
def test_a_difference_ends_an_evaluation_on_every_rank(run: str, name: str) -> None:
    check(name, TP2, run)


@pytest.mark.parametrize("strategy", [PP2, CP2], ids=["pp2", "cp2"])
@on_ranks(2)
def test_stages_and_parts_of_a_sequence_read_the_same_batches(strategy: dict[str, Any]) -> None:
    check("by rank", strategy, "fit")


@on_ranks(4)
def test_every_model_copy_is_told() -> None:
    check("by rank", TP2, "fit", first_of_copy=dist.get_rank() // 2 * 2)


class Late(Samples):
    """The sample 202 differs between the ranks: the batch 101 of two samples, which is compared only if all are."""

    def __init__(self, wrong: int) -> None:
        super().__init__(128)
        self.wrong = wrong

    def __len__(self) -> int:
        return 404

    def __getitem__(self, index: int) -> Batch:
        other = dist.get_rank() if index >= self.wrong else 0
        return {**super().__getitem__(index % 128), "index": torch.tensor(index + 1000 * other)}


@pytest.mark.parametrize(("wrong", "found"), [(4, 2), (6, 100)])
@on_ranks(2)
def test_the_first_batches_are_compared_and_every_hundredth(wrong: int, found: int) -> None:
    trainer = make_trainer(TP2, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="model copy") as error:
        trainer.validate(StagedNet(), DataLoader(Late(wrong), batch_size=2), verbose=False)
    assert f"val_dataloader gives batch {found} with different contents" in str(error.value)


class ReadsOnOneRank(pl.Callback):
    """Looks at a batch on rank 0 alone, as callbacks that draw pictures do."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.seen.append(next(iter(trainer.val_dataloaders))["index"].tolist())  # type: ignore[arg-type]


class Sharding(StagedNet):
    """Shards its data by the data-parallel rank."""

    def train_dataloader(self) -> DataLoader[Batch]:
        shard = data_shard(self.trainer)
        return DataLoader(Shard(shard.rank, shard.size), batch_size=2, num_workers=1)


class ShardingPlain(PlainNet):
    """The same of a plain module."""

    train_dataloader = Sharding.train_dataloader


def train_by_shards(module: Any, strategy: Any) -> dict[str, Any]:
    """Train on shards; return what was read, and what became of the loaders."""
    reads, watch, values = ReadsOnOneRank(), Watch(), DataLoader(Samples(4), batch_size=2)
    trainer = make_trainer(strategy, callbacks=[reads, watch], limit_train_batches=2)
    trainer.fit(module(), val_dataloaders=values)
    kept: Any = trainer.val_dataloaders
    return {
        "batches": watch.seen.batches,
        "seen": reads.seen,
        "class": type(kept),
        "is kept": kept.dataset is values.dataset,
    }


@pytest.mark.parametrize(
    ("module", "strategy", "copies"),
    [(Sharding, TP2, 2), (Sharding, PP2, 2), (ShardingPlain, {}, 4), (ShardingPlain, "ddp", 4)],
    ids=["tp2", "pp2", "plain", "ddp"],
)
def test_a_dataset_sharded_by_the_data_parallel_rank_is_read_once(module: Any, strategy: Any, copies: int) -> None:
    ranks = run_ranks(4, train_by_shards, module, strategy)
    by_copy = {0: [0, 1, 2, 3], 1: [0, 0, 1, 1], 2: [0, 1, 0, 1]}[0 if copies == 4 else 2 if strategy is PP2 else 1]
    for rank, seen in enumerate(ranks):
        mine = list(range(by_copy[rank], 16, copies))[:4]
        assert [index for batch in seen["batches"] for index in batch] == mine
        assert seen["seen"] == ([[0, 2] if copies == 2 else [0]] if rank == 0 else [])
        assert seen["class"] is DataLoader
        assert seen["is kept"]


class KeepsTheClass(pl.Callback):
    """Keeps the class of the loader that a run reads, as caches of classes do."""

    def __init__(self) -> None:
        self.kept: list[type] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept.append(type(trainer.train_dataloader))


@on_ranks(2)
def test_a_cache_of_classes_does_not_keep_a_model() -> None:
    keeps, module = KeepsTheClass(), StagedNet()
    make_trainer(TP2, callbacks=[keeps], max_steps=1).fit(module, loader(8, 2))
    ended, kept = weakref.ref(module), keeps.kept[0]
    del module, keeps  # Lightning gives the callback the module's log()
    gc.collect()
    assert kept is not DataLoader
    assert ended() is None


def test_one_process_reads_all_of_the_data() -> None:
    assert data_shard(pl.Trainer(accelerator="cpu", devices=1, logger=False)) == (0, 1)


class Reloaded(pl.LightningDataModule):
    """Makes new loaders and datasets for every epoch, and follows which of the datasets still exist."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()

    def train_dataloader(self) -> Any:
        made = DataLoader(self.make(), batch_size=2)
        self.made.add(made.dataset)
        return made

    val_dataloader = train_dataloader


class CountDatasets(pl.Callback):
    """Counts the data module's datasets at the end of each epoch."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        gc.collect()
        self.numbers.append(len(trainer.datamodule.made))  # type: ignore[attr-defined]


@on_ranks(2)
def test_a_reloaded_loader_replaces_the_one_of_the_last_epoch(tmp_path: Path) -> None:
    """Else the workers and the datasets of all epochs would stay until the run ends."""
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, partial(Samples, 4)),
        ({"broadcast_batches": True}, partial(Samples, 4)),
        ({}, partial(Shard, 0, 1, 4)),
    ]
    for more, make in cases:
        count, preemption = CountDatasets(), PreemptionCheckpoint(dirpath=tmp_path)
        trainer = make_trainer(
            PP2 | more,
            callbacks=[count, preemption],
            enable_checkpointing=True,
            max_epochs=5,
            reload_dataloaders_every_n_epochs=1,
        )
        pl.seed_everything(1, workers=True, verbose=False)
        trainer.fit(StagedNet(), datamodule=Reloaded(make))
        assert count.numbers == [2] * 5, count.numbers


class Reseeded(pl.LightningDataModule):
    """Makes a loader for every epoch, around one sampler or around one whose seed is that of the epoch."""

    def __init__(self, seed: int, has_one: bool) -> None:
        super().__init__()
        self.has_one = has_one
        self.sampler = DistributedSampler(Samples(8), 1, 0, seed=seed)

    def train_dataloader(self) -> Any:
        if not self.has_one:
            assert self.trainer is not None
            self.sampler = DistributedSampler(Samples(8), 1, 0, seed=10 * self.trainer.current_epoch)
        return DataLoader(Samples(8), batch_size=2, sampler=self.sampler)


class SaveAt(pl.Callback):
    """Notes all batches, and saves after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self.seen: list[list[int]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.seen.append(batch["index"].tolist())
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@on_ranks(1)
def test_a_resumed_run_that_reloads_reads_later_epochs_with_the_seeds_of_the_interrupted_run(tmp_path: Path) -> None:
    for has_one, seed in ((True, 7), (False, 1)):
        path = tmp_path / str(has_one)
        whole, rest = SaveAt(6, path), SaveAt(-1, path)
        for look, own, resumed in ((whole, 1, None), (rest, seed, path)):
            data = Reseeded(own, has_one)
            trainer = make_trainer({}, callbacks=[look], max_epochs=4, reload_dataloaders_every_n_epochs=1)
            trainer.fit(PlainNet(), datamodule=data, ckpt_path=resumed)
            assert data.sampler.seed == (own if has_one else 30)
        assert rest.seen == whole.seen[6:], (rest.seen, whole.seen)


@on_ranks(1)
def test_a_loader_that_a_reload_returns_again_is_tracked_once() -> None:
    data, seen = loader(8, 2, shuffle=True), []
    sampler = data.batch_sampler

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.append(data.batch_sampler.replaced_sampler is sampler)  # type: ignore[union-attr]

    own = {"use_distributed_sampler": False, "reload_dataloaders_every_n_epochs": 1}
    make_trainer({}, callbacks=[Look()], max_epochs=3, **own).fit(PlainNet(), data)
    assert seen == [True] * 3
    assert data.batch_sampler is sampler
