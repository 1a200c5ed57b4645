# SPDX-License-Identifier: Apache-2.0
"""Who reads what: the ranks of one model copy the same batches, model copies different ones, and nothing is replaced.

``pp2-dp2`` on four ranks: ranks 0 and 2 are the stages of the first model copy, 1 and 3 those of the second.
"""

import multiprocessing
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
    get_worker_info,
)

from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import CP2, PP2, TP2, Batch, PlainNet, Samples, StagedNet, Watch, loader, make_trainer, run_fit

pytestmark = pytest.mark.distributed


def model_copies(strategy: dict[str, Any]) -> list[list[int]]:
    """Return the ranks of each model copy on four ranks: pipeline stages are far apart, other ranks neighbours."""
    return [[0, 2], [1, 3]] if strategy is PP2 else [[0, 1], [2, 3]]


# Lightning's sampler


def read_two_epochs(strategy: dict[str, Any], size: int) -> dict[str, list[list[int]]]:
    """Return the training batches of this rank, of a shuffled and of an ordered loader."""
    return {
        kind: run_fit(StagedNet(), strategy, loader(size, 2, shuffle=shuffle), max_epochs=2).batches
        for kind, shuffle in (("shuffled", True), ("ordered", False))
    }


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(PP2, id="pp2"), pytest.param(TP2, id="tp2"), pytest.param(CP2, marks=pytest.mark.thorough, id="cp2")],
)
def test_a_model_copy_reads_as_one_and_two_copies_share_the_samples(strategy: dict[str, Any]) -> None:
    ranks = run_ranks(4, read_two_epochs, strategy, 16)
    for kind in ("shuffled", "ordered"):
        copies = []
        for first, second in model_copies(strategy):
            assert ranks[first][kind] == ranks[second][kind]
            copies.append(ranks[first][kind])
        for epoch in (slice(0, 4), slice(4, 8)):
            read = [index for copy in copies for batch in copy[epoch] for index in batch]
            assert sorted(read) == list(range(16))
        assert copies[0][:4] != copies[0][4:], "the sampler did not shuffle anew"


def test_the_last_short_batch_is_read_by_all() -> None:
    ranks = run_ranks(4, read_two_epochs, PP2, 9)
    for rank in ranks:
        assert [len(batch) for batch in rank["shuffled"]] == [2, 2, 1] * 2
    read = [index for rank in ranks[:2] for batch in rank["shuffled"][:3] for index in batch]
    assert set(read) == set(range(9))
    assert len(read) == 10  # one is repeated, so that both copies take as many steps


# What the user gives is kept


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(7, -1, -1))


class Stream(IterableDataset[Batch]):
    """Samples without a length, dealt out by the user."""

    def __iter__(self) -> Iterator[Batch]:
        samples = Samples(16)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        return (samples[index] for index in range(worker, 16, workers))


def mark(_: int) -> None:
    """Be the user's own worker_init_fn."""
    random.seed(1234)


class Drawn(Samples):
    """Puts a number that python drew in a worker where the index was."""

    def __getitem__(self, index: int) -> Batch:
        return {**super().__getitem__(index), "index": torch.tensor(random.randrange(10**6))}


def read_own_loaders() -> dict[str, Any]:
    """Return what was read through loaders with parts of the user's own."""
    generator = torch.Generator().manual_seed(11)
    shuffled = partial(RandomSampler, Samples(16))
    own = {"use_distributed_sampler": False}
    batches: dict[str, Any] = {
        "sampler": run_fit(StagedNet(), PP2, loader(8, 2, sampler=Backwards()), **own).batches,
        "generator": run_fit(
            StagedNet(), PP2, loader(16, 2, sampler=shuffled(generator=generator)), max_epochs=2, **own
        ).batches,
        "shuffle": run_fit(StagedNet(), PP2, loader(16, 2, shuffle=True), max_epochs=3, **own).batches,
        "batch-sampler": run_fit(
            StagedNet(), PP2, DataLoader(Samples(8), batch_sampler=BatchSampler(Backwards(), 3, False)), **own
        ).batches,
        "iterable": run_fit(StagedNet(), PP2, DataLoader(Stream(), batch_size=4)).batches,
        "workers": run_fit(StagedNet(), PP2, loader(8, 2, num_workers=2, sampler=Backwards()), **own).batches,
        "iterable-workers": run_fit(StagedNet(), PP2, DataLoader(Stream(), batch_size=4, num_workers=2)).batches,
    }
    seed_everything(3, workers=True, verbose=False)
    drawn = DataLoader(Drawn(8), batch_size=2, num_workers=1, worker_init_fn=mark)
    batches["worker_init_fn"] = run_fit(StagedNet(), PP2, drawn).batches
    return batches


def shuffle_three_epochs(strategy: dict[str, Any]) -> list[list[int]]:
    """Return the batches of a loader that torch's common generator shuffles."""
    seed_everything(7, verbose=False)
    own = {"use_distributed_sampler": False, "max_epochs": 3}
    return run_fit(StagedNet(), strategy, loader(16, 2, shuffle=True), **own).batches


def test_an_order_that_is_drawn_does_not_depend_on_the_layout() -> None:
    [alone] = run_ranks(1, shuffle_three_epochs, {})
    assert run_ranks(2, shuffle_three_epochs, PP2) == [alone] * 2
    assert run_ranks(2, shuffle_three_epochs, TP2) == [alone] * 2


def test_the_sampler_workers_and_generator_of_the_user_are_kept() -> None:
    ranks = run_ranks(2, read_own_loaders, timeout=120)
    for kind, batches in ranks[0].items():
        assert ranks[1][kind] == batches, kind
    read = ranks[0]
    assert read["sampler"] == read["workers"] == [[7, 6], [5, 4], [3, 2], [1, 0]]
    assert read["batch-sampler"] == [[7, 6, 5], [4, 3, 2], [1, 0]]
    expected = RandomSampler(Samples(16), generator=torch.Generator().manual_seed(11))
    order = [*islice(expected, 16), *islice(expected, 16)]
    assert read["generator"] == [order[start : start + 2] for start in range(0, 32, 2)]
    assert read["iterable"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert read["iterable-workers"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    draw = random.Random(1234)
    assert [index for batch in read["worker_init_fn"] for index in batch] == [draw.randrange(10**6) for _ in range(8)]
    epochs = [tuple(chain.from_iterable(read["shuffle"][start : start + 8])) for start in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert len(set(epochs)) == 3


# Random numbers in a dataset


class Noisy(Samples):
    """Draws from every generator that an augmentation may use; the draws stand where the index was."""

    def __getitem__(self, index: int) -> Batch:
        draws = [random.randrange(10**6), int(numpy.random.randint(10**6)), int(torch.randint(10**6, ()))]
        return {**super().__getitem__(index), "index": torch.tensor(draws)}


class Dropping(StagedNet):
    """Draws different random numbers on its two stages: in the model, before it and after it."""

    def configure_model(self) -> None:
        super().configure_model()
        torch.rand(3 + dist.get_rank())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        predictions = self.predictions(batch)
        noise = torch.rand(()) + random.random() + numpy.random.rand()  # on the last stage alone
        loss = (predictions.float() - batch["y"]).square().mean() * noise
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        predictions = self.predictions(batch)
        self.log("val_loss", predictions.mean() * torch.rand(()) * random.random() * numpy.random.rand())


class WatchValidation(Watch):
    """Keeps the draws of validation batches too."""

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Batch, *_: Any) -> None:
        self.seen.batches.append(batch["index"].tolist())


def draw(strategy: dict[str, Any], num_workers: int, seeded: bool) -> list[Any]:
    """Return what the dataset drew in training and validation, over two epochs, on this rank."""
    if seeded:
        seed_everything(5, workers=True, verbose=False)
    else:
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(1000 + dist.get_rank())
    watch = WatchValidation()
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[watch], accumulate_grad_batches=2)
    data = [DataLoader(Noisy(8), batch_size=2, num_workers=num_workers) for _ in range(2)]
    trainer.fit(Dropping() if strategy else PlainNet(), *data)
    return watch.seen.batches


@pytest.mark.parametrize(
    ("strategy", "num_workers", "seeded"),
    [
        pytest.param(PP2, 2, False, id="pp2-workers-unseeded"),
        pytest.param(PP2, 0, True, id="pp2-main-process-seeded"),
        pytest.param(TP2, 2, True, id="tp2-workers-seeded"),
        pytest.param(TP2, 0, False, id="tp2-main-process-unseeded"),
        pytest.param(PP2, 2, True, marks=pytest.mark.thorough, id="pp2-workers-seeded"),
        pytest.param(PP2, 0, False, marks=pytest.mark.thorough, id="pp2-main-process-unseeded"),
        pytest.param(TP2, 2, False, marks=pytest.mark.thorough, id="tp2-workers-unseeded"),
        pytest.param(TP2, 0, True, marks=pytest.mark.thorough, id="tp2-main-process-seeded"),
    ],
)
def test_a_dataset_draws_the_same_on_every_rank_of_a_model_copy(
    strategy: dict[str, Any], num_workers: int, seeded: bool
) -> None:
    ranks = run_ranks(4, draw, strategy, num_workers, seeded, timeout=120)
    copies = [[ranks[rank] for rank in copy] for copy in model_copies(strategy)]
    for first, second in copies:
        assert first == second
        assert len({str(batch) for batch in first}) == len(first) == 8
    if num_workers or not seeded:  # in the main process a common seed is Lightning's promise of common numbers
        assert copies[0][0] != copies[1][0]


# Workers that are no copies of the process that trains


class OwnLoaders(StagedNet):
    """Makes its own loaders, whose collate function is a method of it, so that the module travels to the workers."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        self.collated = 0

    def collate(self, rows: list[Any]) -> Batch:
        self.collated += 1
        assert get_worker_info() is None or self._trainer is None
        return default_collate(rows)

    def own_loader(self, size: int, shuffle: bool) -> DataLoader[Batch]:
        workers = {"num_workers": 1, "multiprocessing_context": "forkserver"} if self.workers else {}
        return loader(size, 2, shuffle=shuffle, collate_fn=self.collate, **workers)

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.own_loader(12, True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.own_loader(8, False)


@on_ranks(1, timeout=120)
def test_workers_of_a_fork_server_read_as_the_process_that_trains(tmp_path: Any) -> None:
    strategy = {"use_distributed_optimizer": True}
    multiprocessing.set_forkserver_preload(["tests.support.economy", "tests.support.toy"])

    def fit(workers: int, **arguments: Any) -> tuple[list[list[int]], float]:
        seed_everything(3)
        watch, path = Watch(), arguments.pop("ckpt_path", None)
        saves = pl.callbacks.ModelCheckpoint(f"{tmp_path}/{workers}", "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [watch, *([saves] if path is None else [])]
        trainer = make_trainer(strategy, callbacks=callbacks, enable_checkpointing=path is None, **arguments)
        trainer.fit(OwnLoaders(workers), ckpt_path=path)
        return watch.seen.batches, float(trainer.callback_metrics["val_loss"])

    found = {workers: fit(workers) for workers in (0, 1)}
    read = {**found, "resumed": fit(1, ckpt_path=f"{tmp_path}/1/step=2.ckpt")}
    (batches, loss), resumed = read[0], read["resumed"]
    assert len(batches) == 6
    assert read[1] == (batches, loss)
    assert resumed == (batches[2:], loss)
