# SPDX-License-Identifier: Apache-2.0
"""Data libraries with files of other kinds: each model copy reads its share, and a resumed run reads the rest of it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.distributed.test_data_libraries import SIZE, Reader, collate, page
from tests.support.ranks import run_ranks
from tests.support.toy import Watch, make_trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
ROWS = {"index": list(range(SIZE))}


def write_parquet(folder: Path) -> None:
    from datasets import Dataset

    for shard in range(4):
        Dataset.from_dict(ROWS).shard(4, shard).to_parquet(folder / f"{shard}.parquet")


def write_arrow(folder: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict(ROWS).save_to_disk(folder / "saved", num_shards=4)


def write_lance(folder: Path) -> None:
    import lance
    import pyarrow

    lance.write_dataset(pyarrow.table(ROWS), folder / "rows.lance", max_rows_per_file=SIZE // 4)


def write_energon(folder: Path) -> None:
    import webdataset

    for shard in range(4):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as tar:
            for index in range(shard, SIZE, 4):
                tar.write({"__key__": f"{index:03}", "json": {"index": index}})
    command = [Path(sys.executable).with_name("energon"), "prepare", "--non-interactive", "--split-ratio", "1,0,0"]
    subprocess.run([*command, "--sample-type", "CrudeWebdataset", folder], check=True, stdout=subprocess.DEVNULL)


def read_parquet(trainer: pl.Trainer, folder: Path) -> Any:
    return _of_datasets(trainer, "parquet", sorted(map(str, folder.glob("*.parquet"))))


def read_arrow(trainer: pl.Trainer, folder: Path) -> Any:
    return _of_datasets(trainer, "arrow", sorted(map(str, folder.glob("saved/*.arrow"))))


def read_lance(trainer: pl.Trainer, folder: Path) -> Any:
    return _of_datasets(trainer, "lance", str(folder / "rows.lance" / "**"))


def _of_datasets(trainer: pl.Trainer, kind: str, files: Any) -> Any:
    return DataLoader(page()["stream_of_datasets"](trainer, files, kind), batch_size=2, collate_fn=collate)


def read_energon(trainer: pl.Trainer, folder: Path) -> Any:
    from megatron.energon import Cooker, TaskEncoder, basic_sample_keys, stateless

    @stateless
    def cook(sample: dict[str, Any]) -> dict[str, Any]:
        return {**basic_sample_keys(sample), **sample["json"]}

    class Indices(TaskEncoder):
        cookers = (Cooker(cook),)

        @stateless
        def batch(self, samples: list[Any]) -> Any:
            return collate(samples)

        @stateless
        def encode_batch(self, batch: Any) -> Any:
            return batch

    return page()["loader_of_energon"](trainer, folder, Indices(), batch_size=2)


def resume(read: Callable[[pl.Trainer, Path], Any], folder: Path, strategy: dict[str, Any]) -> tuple[list[int], ...]:
    """Train for two epochs; then for one and a half and, from a checkpoint, the rest; return what this rank read."""

    def run(ckpt_path: str | None, **arguments: Any) -> list[int]:
        watch = Watch()
        save = ModelCheckpoint(folder / "saves", filename="half", every_n_train_steps=12, save_top_k=-1)
        trainer = make_trainer(strategy, callbacks=[watch, save], enable_checkpointing=True, **arguments)
        trainer.fit(Reader(read, str(folder)), ckpt_path=ckpt_path)
        return [index for batch in watch.seen.batches for index in batch]

    steps = 2 * SIZE // 2 // (1 if strategy else 2)
    whole = run(None, max_epochs=2)
    half = run(None, max_steps=steps * 3 // 4)
    return whole, half + run(str(folder / "saves" / "half.ckpt"), max_epochs=2)


CASES = {
    "parquet": ("datasets", "a stream of Parquet files", write_parquet, read_parquet),
    "arrow": ("datasets", "a stream of Arrow files", write_arrow, read_arrow),
    "lance": ("pylance", "a Lance dataset, streamed by `datasets`", write_lance, read_lance),
    "energon": ("megatron-energon", "a WebDataset with 2 workers", write_energon, read_energon),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("write", "read"),
    [
        pytest.param(
            write,
            read,
            marks=pytest.mark.works_with(
                package, f"{what}: each row once per epoch, and exact resumes, on dp2, tp2 and pp2"
            ),
        )
        for package, what, write, read in CASES.values()
    ],
    ids=list(CASES),
)
def test_each_copy_reads_its_share_and_resumes(
    write: Callable[[Path], None], read: Callable[[pl.Trainer, Path], Any], layout: str, tmp_path: Path
) -> None:
    write(tmp_path)
    ranks = run_ranks(2, resume, read, tmp_path, LAYOUTS[layout])
    for whole, resumed in ranks:
        assert resumed == whole
    if layout != "dp2":
        assert ranks[0] == ranks[1]
    copies = [whole for whole, _ in (ranks if layout == "dp2" else ranks[:1])]
    for epoch in range(2):
        share = SIZE // len(copies)
        assert sorted(index for rows in copies for index in rows[epoch * share :][:share]) == list(range(SIZE))
