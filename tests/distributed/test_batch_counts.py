# SPDX-License-Identifier: Apache-2.0
"""Model copies with unequal numbers of training batches end together; ``test_evaluation_rows.py`` evaluates on such."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_mcore import data_shard
from tests.distributed.test_same_batches import Shard
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import TP2, Batch, PlainNet, Samples, StagedNet, Watch, make_trainer

pytestmark = pytest.mark.distributed


class Shares(StagedNet):
    """Reads a stream of ``shares[i]`` batches on model copy i."""

    def __init__(self, shares: tuple[int, ...], make: Callable[[IterableDataset[Batch]], Any]) -> None:
        super().__init__()
        self.shares, self.make = shares, make

    def train_dataloader(self) -> Any:
        rank = data_shard(self.trainer).rank
        return self.make(Shard(rank, 2, 4 * self.shares[rank]))


class SharesPlain(PlainNet):
    """The same of a plain module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.shares, self.make = arguments

    train_dataloader = Shares.train_dataloader


def of_torch(rows: IterableDataset[Batch]) -> Any:
    return DataLoader(rows, batch_size=2)


def of_torchdata(rows: IterableDataset[Batch]) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows, batch_size=2)


def train_uneven(module: Any, make: Any, strategy: dict[str, Any], folder: str) -> Any:
    """Train two epochs, and the second again from a checkpoint of its middle; return what was read and what is said."""

    def run(ckpt_path: str | None = None) -> list[list[int]]:
        watch = Watch()
        save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(strategy, callbacks=[watch, save], enable_checkpointing=True, max_epochs=2)
        warnings.simplefilter("always")
        trainer.fit(module((4, 3), make), ckpt_path=ckpt_path)
        return watch.seen.batches

    with warnings.catch_warnings(record=True) as caught:
        whole = run()
        said = [sentence for sentence in map(str, caught) if "the epoch ends on all ranks" in sentence]
        return whole, [run(f"{folder}/step={step}.ckpt") for step in (2, 3, 4)], said


@pytest.mark.parametrize(
    ("module", "make", "strategy"),
    [
        (Shares, of_torch, {}),
        (SharesPlain, of_torch, {}),
        (Shares, of_torchdata, {}),
        (Shares, of_torch, TP2),
        (Shares, of_torch, {**TP2, "broadcast_batches": True}),
    ],
    ids=["dp2", "plain", "stateful", "tp2", "sent"],
)
def test_an_epoch_ends_on_all_ranks_where_the_first_stream_ends(
    module: Any, make: Any, strategy: dict[str, Any], tmp_path: Path
) -> None:
    size = 4 if strategy else 2
    for rank, (whole, resumed, said) in enumerate(run_ranks(size, train_uneven, module, make, strategy, str(tmp_path))):
        copy = rank // (size // 2)
        assert whole == [[copy, copy + 2], [copy + 4, copy + 6], [copy + 8, copy + 10]] * 2
        assert resumed == [whole[step:] for step in (2, 3, 4)]
        last = "ranks 2, 3" if strategy else "rank 1"
        assert all(f"no more batches on {last};" in sentence for sentence in said)
        assert len(said) == (0 if rank else 2)


@on_ranks(2)
def test_a_copy_without_any_batch_ends_the_run_on_every_rank() -> None:
    with refuses(ValueError, "the train_dataloader has no batch on rank 1"):
        make_trainer({}, max_steps=4).fit(Shares((2, 0), of_torch))


class Listed(StagedNet):
    """Reads a list of 4 batches on model copy 0, and of 3 on copy 1, which it shards by itself."""

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(4 - data_shard(self.trainer).rank))


@on_ranks(4)
def test_loaders_of_different_lengths_are_refused_on_every_rank() -> None:
    settings: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
    with refuses(ValueError, "an epoch has 3 batches on rank 2 and 4 on rank 0", "limit_train_batches=3"):
        make_trainer(TP2, **settings).fit(Listed())
    trainer = make_trainer(TP2, **settings, limit_train_batches=3)
    trainer.fit(Listed())
    assert trainer.global_step == 3
