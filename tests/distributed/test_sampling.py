# SPDX-License-Identifier: Apache-2.0
"""The samples of a run: one list, whatever the ranks, also across a resume on other ranks.

The claim is about what training consumes, in the order of the global batches: three epochs over a dataset that no
global batch divides, with workers and without, on 1, 2 and 4 data-parallel ranks and on layouts that split the model.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_mcore.data.sampling import training_loader
from tests.support.ranks import run_ranks
from tests.support.toy import PP2, PlainNet, Samples, StagedNet, make_trainer

pytestmark = pytest.mark.distributed

SIZE, GLOBAL_BATCH, EPOCHS = 45, 8, 3


class Data(pl.LightningDataModule):
    """Samples, dealt out for the trainer that asks."""

    def __init__(self, batch_size: int, num_workers: int, costs: bool = False) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.costs = np.random.default_rng(2).uniform(1, 10, SIZE) if costs else None

    def train_dataloader(self) -> DataLoader[Any]:
        more: dict[str, Any] = {"seed": 11, "num_workers": self.num_workers, "costs": self.costs}
        return training_loader(self.trainer, Samples(SIZE), self.batch_size, **more)


class Ids(pl.Callback):
    """Collects the samples of every batch, and saves after one of them."""

    def __init__(self, save_after: int | None, path: str) -> None:
        self.batches: list[list[int]] = []
        self.save_after = save_after
        self.path = path

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch["index"].tolist())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if len(self.batches) == self.save_after:
            trainer.save_checkpoint(self.path)


@dataclass(frozen=True)
class Reading:
    """A run that reads; the global batch is always the same.

    Args:
        ranks: Of the world.
        batch_size: Of a data-parallel rank.
        strategy: Sizes of the layout.
        num_workers: Of the loader.
        save_after: Batches after which a checkpoint is taken.
        costs: Whether samples are dealt out by cost.
    """

    ranks: int
    batch_size: int
    strategy: Any = None
    num_workers: int = 0
    save_after: int | None = None
    costs: bool = False

    @property
    def copies(self) -> int:
        """Data-parallel ranks."""
        split = 1
        for size in (self.strategy or {}).values():
            split *= size
        return self.ranks // split

    def run(self, path: str, resume: bool) -> list[list[int]]:
        """Return the batches of this rank."""
        ids = Ids(self.save_after, path)
        accumulate = GLOBAL_BATCH // (self.batch_size * self.copies)
        module = StagedNet() if self.strategy else PlainNet()
        trainer = make_trainer(
            self.strategy or {}, callbacks=[ids], max_epochs=EPOCHS, accumulate_grad_batches=accumulate
        )
        data = Data(self.batch_size, self.num_workers, self.costs)
        trainer.fit(module, datamodule=data, ckpt_path=path if resume else None)
        return ids.batches


RUNS = {
    "dp1": Reading(1, 2),
    "dp2": Reading(2, 2),
    "dp4": Reading(4, 2),
    "dp2, other batches": Reading(2, 4),
    "dp2, workers": Reading(2, 4, num_workers=1),
    "pp2": Reading(2, 4, PP2),
    "pp2, dp2": Reading(4, 4, PP2),
    "dp2 by cost": Reading(2, 2, costs=True),
    "dp4 by cost": Reading(4, 1, costs=True),
}
RESUMED = {  # (until a checkpoint, from there)
    "dp2 to dp4": (Reading(2, 2, save_after=12), Reading(4, 2)),
    "dp4 to dp1": (Reading(4, 2, save_after=7), Reading(1, 4)),
    "dp1, between two steps, to dp2": (Reading(1, 2, save_after=8), Reading(2, 4)),
    "dp4 to dp2 by cost": (Reading(4, 1, save_after=14, costs=True), Reading(2, 2, costs=True)),
}


def read(runs: dict[str, Reading], folder: str, resume: bool = False) -> dict[str, list[list[int]]]:
    """Run each; a name is also that of its checkpoint."""
    return {name: run.run(f"{folder}/{name}.ckpt", resume) for name, run in runs.items()}


def in_order(copies: list[list[list[int]]]) -> list[int]:
    """Return what all data-parallel ranks read together, in the order in which it was dealt out."""
    assert len({len(batches) for batches in copies}) == 1
    return [index for turn in zip(*copies, strict=True) for dealt in zip(*turn, strict=True) for index in dealt]


def first_of_each_copy(run: Reading, ranks: list[list[list[int]]]) -> list[list[list[int]]]:
    """Return the batches of one rank of each model copy; the others have read the same."""
    copies = ranks[: run.copies]  # data-parallel ranks are next to each other where nothing but stages is split
    assert all(batches == copies[place % run.copies] for place, batches in enumerate(ranks))
    return copies


@pytest.fixture(scope="module")
def consumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Return the samples of every run; one launch for each number of ranks."""
    folder = str(tmp_path_factory.mktemp("reading"))
    lists: dict[str, list[int]] = {}
    begun = {name: first for name, (first, _) in RESUMED.items()}
    rest = {name: second for name, (_, second) in RESUMED.items()}
    for runs, resume in ((RUNS, False), (begun, False), (rest, True)):
        for ranks in sorted({run.ranks for run in runs.values()}):
            here = {name: run for name, run in runs.items() if run.ranks == ranks}
            results = run_ranks(ranks, read, here, folder, resume, timeout=240)
            for name, run in here.items():
                copies = first_of_each_copy(run, [result[name] for result in results])
                cut = [batches[: run.save_after] for batches in copies]
                lists[name] = lists.get(name, []) + in_order(cut)
    return lists


def test_three_epochs_are_one_list_of_samples_on_every_layout(consumed: dict[str, list[int]]) -> None:
    whole = consumed["dp1"]
    per_epoch = SIZE // GLOBAL_BATCH * GLOBAL_BATCH
    epochs = [whole[start : start + per_epoch] for start in range(0, len(whole), per_epoch)]
    assert len(epochs) == EPOCHS
    assert all(len(set(epoch)) == per_epoch for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for name, run in RUNS.items():
        assert consumed[name] == whole or run.costs, name


def test_a_resume_on_other_ranks_reads_on_in_the_same_list(consumed: dict[str, list[int]]) -> None:
    for name, (_, run) in RESUMED.items():
        assert consumed[name] == consumed["dp1"] or run.costs, name


def test_costs_change_who_reads_a_sample_and_not_the_step_that_it_is_in(consumed: dict[str, list[int]]) -> None:
    steps = {name: np.sort(np.reshape(read, (-1, GLOBAL_BATCH)), axis=1).tolist() for name, read in consumed.items()}
    for name in ("dp2 by cost", "dp4 by cost", "dp4 to dp2 by cost"):
        assert steps[name] == steps["dp1"], name
        assert consumed[name] != consumed["dp1"], name


def test_a_resume_with_a_global_batch_that_is_larger_reads_no_sample_twice(tmp_path: Path) -> None:
    first = Reading(1, 8, save_after=2)
    [begun] = run_ranks(1, read, {"run": first}, str(tmp_path), timeout=120)
    resumed = run_ranks(2, read_larger, {"run": replace(first, ranks=2)}, str(tmp_path), timeout=120)
    read_before = [index for batch in begun["run"][:2] for index in batch]
    left = SIZE // 16 * 16 - len(read_before)
    epoch = [batches[: left // 16] for batches in resumed]
    rest = in_order(epoch)
    assert len(rest) == left
    assert not set(rest) & set(read_before)


def read_larger(runs: dict[str, Reading], folder: str) -> list[list[int]]:
    """Go on with a global batch of twice the size."""
    [run] = runs.values()
    ids = Ids(None, "")
    trainer = make_trainer({}, callbacks=[ids], max_epochs=1)
    trainer.fit(PlainNet(), datamodule=Data(run.batch_size, 0), ckpt_path=f"{folder}/run.ckpt")
    return ids.batches
