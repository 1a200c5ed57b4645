# SPDX-License-Identifier: Apache-2.0
"""Loggers of other packages: on two ranks the values of one rank, written once, with hyper-parameters and layout."""

import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import loggers
from torch.utils.data import DistributedSampler

from lightning_mcore.callbacks import LogLayout
from tests.support.ranks import run_ranks
from tests.support.toy import Memory, Samples, StagedNet, loader, make_trainer

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {  # the strategy, and batches of a step: four samples on each
    "one": ({}, 2),
    "dp2": ({}, 1),
    "pp2": ({"pipeline_model_parallel_size": 2}, 2),
}
Rows = dict[str, list[float]]
Given = tuple[int, int]


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
    return loggers.TensorBoardLogger(folder)


def csv(folder: Path) -> Any:
    return loggers.CSVLogger(folder)


def comet(folder: Path) -> Any:
    os.environ["COMET_START_ONLINE"] = "false"  # Lightning 2.6 lets CometLogger(online=False) write nothing
    return loggers.CometLogger(offline_directory=str(folder), project="test", log_env_details=False, log_code=False)


def fit(make: Callable[[Path], Any], layout: str, folder: Path) -> list[dict[str, float]]:
    """Train for two epochs with a logger beside ours; return what ours was given."""
    strategy, accumulated = LAYOUTS[layout]
    memory = Memory()
    arguments: dict[str, Any] = {"accumulate_grad_batches": accumulated, "max_epochs": 2}
    arguments |= {"logger": [make(folder), memory], "callbacks": [LogLayout()], "use_distributed_sampler": False}
    trainer = make_trainer(strategy, **arguments)
    sampler = DistributedSampler(Samples(16), shuffle=False) if layout == "dp2" else None
    trainer.fit(Net(3), loader(16, 2, sampler=sampler))
    if trainer.is_global_zero and make in (wandb, comet):
        experiment: Any = trainer.loggers[0].experiment
        # What they do when Python exits, which ranks of tests leave early
        (experiment.finish if make is wandb else experiment.end)()
    return memory.rows


def read_mlflow(folder: Path) -> tuple[int, Rows, Given]:
    """Return the number of runs, the values by name, and the hyper-parameter with the number of ranks of the layout."""
    runs = [path.parent for path in folder.glob("mlruns/*/*/meta.yaml")]
    values = {
        path.name: [float(line.split()[1]) for line in path.read_text().splitlines()]
        for path in runs[0].glob("metrics/*")
    }
    width, ranks = ((runs[0] / "params" / name).read_text() for name in ("width_of_beam", "layout/world_size"))
    return len(runs), values, (int(width), int(ranks))


def in_yaml(folder: Path) -> Given:
    """Return what a logger of Lightning writes next to its values."""
    given = yaml.safe_load((folder / "hparams.yaml").read_text())
    return given["width_of_beam"], given["layout"]["world_size"]


def read_csv(folder: Path) -> tuple[int, Rows, Given]:
    import csv as table

    files = list(folder.rglob("metrics.csv"))
    rows = list(table.DictReader(files[0].read_text().splitlines()))
    values = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    return len(files), values, in_yaml(files[0].parent)


def read_tensorboard(folder: Path) -> tuple[int, Rows, Given]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    files = list(folder.rglob("events.out.tfevents.*"))
    events = EventAccumulator(str(files[0])).Reload()
    values = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    shown = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    session = metadata.parse_session_start_info_plugin_data(shown).hparams  # of the page HPARAMS
    given = int(session["width_of_beam"].number_value), int(session["layout/world_size"].number_value)
    assert given == in_yaml(files[0].parent)
    return len(files), values, given


def read_wandb(folder: Path) -> tuple[int, Rows, Given]:
    from wandb.proto import wandb_internal_pb2

    files = list(folder.rglob("*.wandb"))
    values: Rows = {}
    given: dict[str, Any] = {}
    for data in records(files[0].read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                values.setdefault(name, []).append(float(json.loads(item.value_json)))
        for item in (*record.run.config.update, *record.config.update):
            given[item.key or item.nested_key[0]] = json.loads(item.value_json)
    return len(files), values, (given["width_of_beam"], given["layout"]["world_size"])


def read_comet(folder: Path) -> tuple[int, Rows, Given]:
    files = list(folder.glob("*.zip"))
    values: Rows = {}
    given: dict[str, Any] = {}
    for line in zipfile.ZipFile(files[0]).read("messages.json").splitlines():
        payload = json.loads(line)["payload"]
        if metric := payload.get("metric"):
            values.setdefault(metric["metricName"], []).append(metric["metricValue"])
        if parameter := payload.get("param"):
            given[parameter["paramName"]] = parameter["paramValue"]
    return len(files), values, (given["width_of_beam"], given["layout|world_size"])


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
    comet: ("comet-ml", "CometLogger offline", read_comet),
    wandb: ("wandb", "WandbLogger offline", read_wandb),
    mlflow: ("mlflow-skinny", "MLFlowLogger in a folder", read_mlflow),
    tensorboard: ("tensorboard", "TensorBoardLogger", read_tensorboard),
    csv: ("lightning", "CSVLogger", read_csv),
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            make,
            marks=pytest.mark.works_with(package, f"{what}: same values as one rank, and the layout, on dp2 and pp2"),
        )
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
    count, values, given = LOGGERS[make][2](folder)
    assert count == 1
    assert given == (3, 2)
    losses = [row["train_loss"] for row in expected if "train_loss" in row]
    assert len(losses) == 8
    assert values["train_loss"] == pytest.approx(losses, rel=1e-5)
