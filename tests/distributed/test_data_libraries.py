# SPDX-License-Identifier: Apache-2.0
"""The code of "Your data library": the ranks of a model copy read the same rows, and the copies share all of them.

A library that is not installed skips its test.
"""

import importlib.util
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, default_collate

from tests.support.ranks import run_ranks
from tests.support.toy import PP2, TP2, Batch, Samples, StagedNet, Watch, make_trainer

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "data-libraries.md"
SIZE = 32
LIBRARIES = {"webdataset": "webdataset", "litdata": "litdata", "mosaic": "streaming", "nodes": "torchdata"}


def page() -> dict[str, Any]:
    """Return what the page defines."""
    defined: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"^```python.*?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(code, str(PAGE), "exec"), defined)
    return defined


def collate(rows: list[Any]) -> Batch:
    """Return the samples whose indices a library gives."""
    return default_collate([Samples(SIZE)[int(row["index"])] for row in rows])


# Written before the ranks start


def write_datasets(folder: Path) -> None:
    for file in range(4):
        rows = [json.dumps({"index": index}) for index in range(file, SIZE, 4)]
        (folder / f"{file}.jsonl").write_text("\n".join(rows))


def write_webdataset(folder: Path) -> None:
    for file in range(4):
        with tarfile.open(folder / f"{file}.tar", "w") as tar:
            for index in range(file, SIZE, 4):
                entry = tarfile.TarInfo(f"{index:03}.cls")
                data = str(index).encode()
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def numbered(index: int) -> dict[str, int]:
    return {"index": index}


def write_litdata(folder: Path) -> None:
    from litdata import optimize

    optimize(numbered, list(range(SIZE)), str(folder / "chunks"), num_workers=1, chunk_size=4)


def write_mosaic(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "shards"), columns={"index": "int"}, size_limit=256) as out:
        for index in range(SIZE):
            out.write({"index": index})


# Read on each rank


def read_datasets(trainer: pl.Trainer, folder: Path) -> Any:
    rows = page()["stream_of_datasets"](trainer, sorted(map(str, folder.glob("*.jsonl"))))
    return DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=2)


def read_webdataset(trainer: pl.Trainer, folder: Path) -> Any:
    rows = page()["stream_of_webdataset"](trainer, sorted(map(str, folder.glob("*.tar"))))
    return DataLoader(rows.map(lambda row: {"index": row["cls"]}), batch_size=2, collate_fn=collate, num_workers=1)


def read_litdata(trainer: pl.Trainer, folder: Path) -> Any:
    from litdata import StreamingDataLoader

    rows = page()["stream_of_litdata"](trainer, str(folder / "chunks"))
    return StreamingDataLoader(rows, batch_size=2, collate_fn=collate)


def read_mosaic(trainer: pl.Trainer, folder: Path) -> Any:
    os.environ.update(RANK=str(trainer.global_rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")  # as torchrun does
    rows = page()["stream_of_mosaic"](trainer, str(folder / "shards"), 2)
    return DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=1)  # its threads outlive the rank otherwise


def read_nodes(trainer: pl.Trainer, folder: Path) -> Any:
    rows = [{"index": index} for index in range(SIZE)]
    return page()["loader_of_nodes"](trainer, rows, 2, collate)


class Reader(StagedNet):
    """Reads a library's data."""

    def __init__(self, read: Callable[[pl.Trainer, Path], Any], folder: str) -> None:
        super().__init__()
        self.read = read
        self.folder = Path(folder)

    def train_dataloader(self) -> Any:
        return self.read(self.trainer, self.folder)


def train(read: Callable[[pl.Trainer, Path], Any], folder: str, strategy: dict[str, Any]) -> list[int]:
    """Train an epoch; return the samples that this rank read."""
    watch = Watch()
    make_trainer(strategy, callbacks=[watch]).fit(Reader(read, folder))
    return [index for batch in watch.seen.batches for index in batch]


CASES: dict[str, tuple[Callable[[Path], None], Callable[[pl.Trainer, Path], Any]]] = {
    "datasets": (write_datasets, read_datasets),
    "webdataset": (write_webdataset, read_webdataset),
    "litdata": (write_litdata, read_litdata),
    "mosaic": (write_mosaic, read_mosaic),
    "nodes": (lambda folder: None, read_nodes),
}


@pytest.mark.parametrize("name", CASES)
def test_the_copies_share_the_rows_and_the_ranks_of_a_copy_read_the_same(name: str, tmp_path: Path) -> None:
    library = LIBRARIES.get(name, name)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    write, read = CASES[name]
    write(tmp_path)
    for strategy in (TP2,) if name == "mosaic" else (TP2, PP2):
        ranks = run_ranks(4, train, read, str(tmp_path), strategy)
        copies = [ranks[0], ranks[2 if strategy is TP2 else 1]]
        assert ranks[1 if strategy is TP2 else 2] == copies[0]
        assert ranks[3] == copies[1]
        assert sorted(copies[0] + copies[1]) == list(range(SIZE))


class Stateful(StagedNet):
    """Reads through the loader of the page that keeps its own state."""

    def train_dataloader(self) -> Any:
        return page()["stateful_loader"](self.trainer, Samples(SIZE), 2)


def resume_stateful(folder: str, strategy: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Train an epoch; then its first half and, from a checkpoint, the rest."""

    def run(ckpt_path: str | None, **arguments: Any) -> list[int]:
        watch = Watch()
        save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        halves: dict[str, Any] = {"enable_checkpointing": True, "use_distributed_sampler": False}
        make_trainer(strategy, callbacks=[watch, save], **halves, **arguments).fit(Stateful(), ckpt_path=ckpt_path)
        return [index for batch in watch.seen.batches for index in batch]

    half = run(None, max_steps=4)
    return run(None, max_epochs=1), half + run(f"{folder}/step=4.ckpt", max_epochs=1)


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
@pytest.mark.parametrize("strategy", [TP2, {**TP2, "broadcast_batches": True}], ids=["read", "sent"])
def test_a_stateful_loader_is_dealt_out_and_resumes(tmp_path: Path, strategy: dict[str, Any]) -> None:
    ranks = run_ranks(4, resume_stateful, str(tmp_path), strategy)
    for whole, resumed in ranks:
        assert resumed == whole
    assert ranks[0] == ranks[1]
    assert sorted(ranks[0][0] + ranks[2][0]) == list(range(SIZE))


class Shuffled(StagedNet):
    """Reads a stream of ``datasets`` whose epoch a hook sets, as on the page."""

    def __init__(self, folder: str, loader: Callable[..., Any], workers: int) -> None:
        super().__init__()
        self.folder, self.loader, self.workers = Path(folder), loader, workers

    def train_dataloader(self) -> Any:
        rows = page()["stream_of_datasets"](self.trainer, sorted(map(str, self.folder.glob("*.jsonl"))))
        if self.loader is DataLoader:  # a state of datasets has no rows of the buffer
            rows = rows.shuffle(seed=1, buffer_size=8)
        return self.loader(rows, batch_size=2, collate_fn=collate, num_workers=self.workers)

    def on_train_epoch_start(self) -> None:
        page()["EpochOrder"].on_train_epoch_start(self)


def resume_shuffled(folder: str, loader: Callable[..., Any], workers: int) -> list[list[int]]:
    """Train two epochs; then from the middle and the end of the first and from the middle of the second."""

    def run(ckpt_path: str | None) -> list[int]:
        watch = Watch()
        save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        trainer = make_trainer({}, callbacks=[watch, save], enable_checkpointing=True, max_epochs=2)
        trainer.fit(Shuffled(folder, loader, workers), ckpt_path=ckpt_path)
        return [index for batch in watch.seen.batches for index in batch]

    whole = run(None)
    return [whole, *(whole[: 2 * step] + run(f"{folder}/step={step}.ckpt") for step in (4, 8, 12))]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
@pytest.mark.parametrize("keeps_state", [False, True], ids=["read", "stateful"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_epoch_of_a_shuffled_stream_has_its_own_order(
    keeps_state: bool, workers: int, tmp_path: Path
) -> None:
    if keeps_state and importlib.util.find_spec("torchdata") is None:
        pytest.skip("torchdata is not installed")
    write_datasets(tmp_path)
    loader: Any = DataLoader
    if keeps_state:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader
    for whole, *resumed in run_ranks(2, resume_shuffled, str(tmp_path), loader, workers):
        first, second = whole[: SIZE // 2], whole[SIZE // 2 :]
        assert sorted(first) == sorted(second)
        assert (first == second) == keeps_state
        assert resumed == [whole] * len(resumed)
