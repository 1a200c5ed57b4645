# SPDX-License-Identifier: Apache-2.0
"""Loggers of other packages: on two ranks the values of one rank, written once, with the module's hyper-parameters."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import loggers
from torch.utils.data import DistributedSampler

from tests.support.ranks import run_ranks
from tests.support.toy import Memory, Samples, StagedNet, loader, make_trainer

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {  # the strategy, and batches of a step: four samples on each
    "one": ({}, 2),
    "dp2": ({}, 1),
    "pp2": ({"pipeline_model_parallel_size": 2}, 2),
}
Rows = dict[str, list[float]]


class Net(StagedNet):
    """Has a hyper-parameter."""

    def __init__(self, width_of_beam: int) -> None:
        super().__init__()
        self.save_hyperparameters()


def wandb(folder: Path) -> Any:
    return loggers.WandbLogger(save_dir=folder, project="test", offline=True)


def mlflow(folder: Path) -> Any:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # from 3.x on, folders need it
    return loggers.MLFlowLogger("test", tracking_uri=f"file:{folder}/mlruns")


def tensorboard(folder: Path) -> Any:
    return loggers.TensorBoardLogger(folder, default_hp_metric=False)


def csv(folder: Path) -> Any:
    return loggers.CSVLogger(folder)


def fit(make: Callable[[Path], Any], layout: str, folder: Path) -> list[dict[str, float]]:
    """Train for two epochs with a logger beside ours; return what ours was given."""
    strategy, accumulated = LAYOUTS[layout]
    memory = Memory()
    arguments: dict[str, Any] = {"accumulate_grad_batches": accumulated, "max_epochs": 2}
    trainer = make_trainer(strategy, logger=[make(folder), memory], use_distributed_sampler=False, **arguments)
    sampler = DistributedSampler(Samples(16), shuffle=False) if layout == "dp2" else None
    trainer.fit(Net(3), loader(16, 2, sampler=sampler))
    if make is wandb and trainer.is_global_zero:
        trainer.loggers[0].experiment.finish()  # what wandb does when Python exits, which ranks of tests leave early
    return memory.rows


def read_mlflow(folder: Path) -> tuple[int, Rows, str]:
    """Return the number of runs, the values by name and the text of the hyper-parameter."""
    runs = [path.parent for path in folder.glob("mlruns/*/*/meta.yaml")]
    values = {
        path.name: [float(line.split()[1]) for line in path.read_text().splitlines()]
        for path in runs[0].glob("metrics/*")
    }
    return len(runs), values, (runs[0] / "params" / "width_of_beam").read_text()


def read_csv(folder: Path) -> tuple[int, Rows, str]:
    import csv as table

    files = list(folder.rglob("metrics.csv"))
    rows = list(table.DictReader(files[0].read_text().splitlines()))
    values = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    return len(files), values, (files[0].parent / "hparams.yaml").read_text().strip().removeprefix("width_of_beam: ")


def read_tensorboard(folder: Path) -> tuple[int, Rows, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list(folder.rglob("events.out.tfevents.*"))
    events = EventAccumulator(str(files[0])).Reload()
    values = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    return len(files), values, (files[0].parent / "hparams.yaml").read_text().strip().removeprefix("width_of_beam: ")


def read_wandb(folder: Path) -> tuple[int, Rows, str]:
    from wandb.proto import wandb_internal_pb2

    files = list(folder.rglob("*.wandb"))
    values: Rows = {}
    width = ""
    for data in records(files[0].read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                values.setdefault(name, []).append(float(json.loads(item.value_json)))
        for item in (*record.run.config.update, *record.config.update):
            width = item.value_json if "width_of_beam" in (item.key, *item.nested_key) else width
    return len(files), values, width


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file that wandb wrote: a header of 7 bytes, and a log in LevelDB's format."""
    # A record has a checksum (4 bytes), a length (2), a kind (1: whole; 2, 3, 4: first, middle, last part) and the
    # data. A block of 32 KiB ends with zeros if fewer than 7 bytes are left in it.
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


LOGGERS = {
    wandb: ("wandb", "WandbLogger offline", read_wandb),
    mlflow: ("mlflow-skinny", "MLFlowLogger in a folder", read_mlflow),
    tensorboard: ("tensorboard", "TensorBoardLogger", read_tensorboard),
    csv: ("lightning", "CSVLogger", read_csv),
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=pytest.mark.works_with(package, f"{what}: one rank's values, once, on dp2 and pp2"))
        for make, (package, what, _) in LOGGERS.items()
    ],
    ids=[make.__name__ for make in LOGGERS],
)
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_logger_has_the_values_of_one_rank_once(make: Callable[[Path], Any], layout: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    [expected] = run_ranks(1, fit, csv, "one", tmp_path / "one", timeout=60)
    folder = tmp_path / layout
    folder.mkdir()
    run_ranks(2, fit, make, layout, folder, timeout=120)
    count, values, width = LOGGERS[make][2](folder)
    assert count == 1
    assert width.strip('"') == "3"
    losses = [row["train_loss"] for row in expected if "train_loss" in row]
    assert len(losses) == 8
    assert values["train_loss"] == pytest.approx(losses, rel=1e-5)
