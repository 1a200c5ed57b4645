# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray equal those of Lightning's launcher, through a worker's death and through other numbers of workers."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchConfig, TorchTrainer

from lightning_mcore.cli import main
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.ray import elastic_sizes
from lightning_mcore.ray import CHECKPOINT, ElasticTorchTrainer
from tests.on_ray.runs import PARITY, Course, train
from tests.support.factory_files import QWEN3_LORA, write_run

SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
MINUTES = 60.0
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray


@pytest.fixture(autouse=True, scope="module")
def patience() -> None:
    """Give a slow machine time to start workers, and keep Ray from asking for a token or reporting its use."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "600"


@pytest.fixture
def one_machine(patience: None) -> Iterator[None]:
    ray.init(address="local", num_cpus=2, log_to_driver=False, **SMALL)
    yield
    ray.shutdown()


def course(folder: Path, layout: dict[str, int], sizes: dict[int, int], **more: Any) -> Course:
    folder.mkdir()
    return Course(str(folder), layout, {str(size): batches for size, batches in sizes.items()}, **more)


def with_lightning(of: Course) -> None:
    """Run a course under Lightning's own launcher."""
    Path(of.folder, "settings.json").write_text(json.dumps(dataclasses.asdict(of)))
    command = [sys.executable, "-m", "tests.on_ray.runs", of.folder]
    subprocess.run(command, check=True, timeout=10 * MINUTES, capture_output=True)


def options(of: Course, failures: int) -> dict[str, Any]:
    return {
        "train_loop_config": dataclasses.asdict(of),
        "torch_config": TorchConfig(backend="gloo"),
        "run_config": ray.train.RunConfig(
            name="run",
            storage_path=f"{of.folder}/storage",
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
    }


def starts(folder: str) -> list[list[list[dict[str, Any]]]]:
    """Return the diaries of each start, in order: for each rank, its steps."""
    found: list[list[list[dict[str, Any]]]] = []
    for path in sorted(Path(folder).glob("diary-*.json")):
        steps, (world, rank) = json.loads(path.read_text()), map(int, path.stem.split("-")[2:])
        if not any(len(start) == world and not start[rank] for start in found):
            found.append([[] for _ in range(world)])
        next(start for start in reversed(found) if len(start) == world and not start[rank])[rank] = steps
    return found


def course_of(folder: str) -> dict[int, tuple[list[int], float]]:
    """Return the samples of all ranks and the loss of each step, as the last start that came there saw them."""
    seen = {}
    for start in starts(folder):
        for step in start[0]:
            of_ranks = [line["samples"] for rank in start for line in rank if line["step"] == step["step"]]
            seen[step["step"]] = (sorted({sample for samples in of_ranks for sample in samples}), step["loss"])
    return seen


@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2"])
def test_a_run_on_ray_is_that_of_lightnings_launcher(name: str, one_machine: None, tmp_path: Path) -> None:
    """In the second layout a worker dies, and the run goes on from a checkpoint written beside training."""
    layout, sizes = {"tp2": ({TP: 2}, {2: 2}), "pp2": ({PP: 2}, {2: 2}), "dp2": ({}, {2: 1})}[name]
    dies = 6 if name == "pp2" else None
    mine = course(tmp_path / "ray", layout, sizes, dies=dies, asynchronous=name == "pp2")
    theirs = course(tmp_path / "lightning", layout, sizes)
    with_lightning(theirs)
    scaling = ray.train.ScalingConfig(num_workers=2)
    result = TorchTrainer(train, scaling_config=scaling, **options(mine, failures=int(name == "pp2"))).fit()
    assert result.metrics["step"] == 16
    assert course_of(mine.folder) == course_of(theirs.folder)
    for rank in range(2):
        here, there = (torch.load(Path(of.folder, f"weights-2-{rank}.pt")) for of in (mine, theirs))
        assert here.keys() == there.keys()
        assert all(torch.equal(here[key], there[key]) for key in here)
    if name == "pp2":
        assert len(starts(mine.folder)) == 2
        assert starts(mine.folder)[1][0][0]["step"] == 4  # after the checkpoint of step 3


def test_a_run_goes_on_when_machines_come_and_go(patience: None, tmp_path: Path) -> None:
    """Two machines of two workers: one is lost and another comes, and no machine keeps a part of a checkpoint."""
    sizes = elastic_sizes(ParallelLayout(**{TP: 2}), 2, 4, 2)
    assert sizes == {2: 4, 4: 2}
    mine = course(tmp_path / "ray", {TP: 2}, sizes, epochs=15, every=2, seconds=1.5)
    theirs = course(tmp_path / "lightning", {TP: 2}, {4: 2}, epochs=15)
    with_lightning(theirs)
    own = [tmp_path / name for name in ("first", "second", "third")]
    for folder in own:
        folder.mkdir()
    head = {"num_cpus": 2, "env_vars": {"TMPDIR": str(own[0])}, **SMALL}
    second = {"num_cpus": 2, "object_store_memory": SMALL["object_store_memory"]}
    results: list[Any] = []

    def wait(there: Callable[[list[int]], bool]) -> None:
        deadline = time.monotonic() + 15 * MINUTES
        while not there([len(start) for start in starts(mine.folder) if len(start[0]) >= 5]):
            assert time.monotonic() < deadline
            time.sleep(1)

    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        lost = cluster.add_node(**second, env_vars={"TMPDIR": str(own[1])})
        ray.init(address=cluster.address, log_to_driver=False)
        scaling = ray.train.ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=5)
        trainer = ElasticTorchTrainer(train, sizes=sizes, scaling_config=scaling, **options(mine, failures=3))
        thread = threading.Thread(target=lambda: results.append(trainer.fit()), daemon=True)
        thread.start()
        wait(lambda worlds: worlds == [4])
        cluster.remove_node(lost, allow_graceful=False)
        wait(lambda worlds: worlds == [4, 2])
        cluster.add_node(**second, env_vars={"TMPDIR": str(own[2])})  # in this thread: it sets a handler of a signal
        wait(lambda worlds: worlds == [4, 2, 4])
        thread.join(15 * MINUTES)
    finally:
        ray.shutdown()
        cluster.shutdown()
    (result,) = results
    here, there = course_of(mine.folder), course_of(theirs.folder)
    assert list(here) == list(there) == list(range(1, result.metrics["step"] + 1))
    assert [samples for samples, _ in here.values()] == [samples for samples, _ in there.values()]
    losses = [torch.tensor([loss for _, loss in of.values()]) for of in (here, there)]
    torch.testing.assert_close(*losses, **PARITY)
    assert main(["checkpoint", "verify", f"{result.checkpoint.path}/{CHECKPOINT}"]) == 0
    assert [path for folder in own for path in folder.rglob("*.distcp")] == []


def test_a_file_of_llamafactory_runs_on_ray(patience: None, tmp_path: Path) -> None:
    """Its output, losses and files are those of a run without Ray; too many workers are refused at once."""
    keys = QWEN3_LORA | {"use_cpu": True, "bf16": False, TP: 2, "max_steps": 4, "save_steps": 2}
    runs = {name: write_run(tmp_path / name, keys, "qwen3") for name in ("lightning", "ray")}
    asked = {"lightning": ["--devices", "2"], "ray": ["ray_num_workers=2", 'ray_init_kwargs={"num_cpus": 2}']}
    command = [sys.executable, "-m", "lightning_mcore.cli", "llamafactory"]
    given: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10 * MINUTES, "check": False}
    ended = {name: subprocess.run([*command, runs[name], *asked[name]], **given) for name in runs}
    assert {name: run.returncode for name, run in ended.items()} == {"lightning": 0, "ray": 0}, ended["ray"].stderr
    told = ("layout", "effective batch", "training loss", "losses", "picture", "adapters")
    printed = {name: run.stdout.replace(f"/{name}/", "/").splitlines() for name, run in ended.items()}
    reports = [[line for line in lines if line.startswith(told)] for lines in printed.values()]
    assert len(reports[0]) == len(told)
    assert reports[0] == reports[1]
    assert "Setting up DistributedDataParallel" not in ended["ray"].stdout + ended["ray"].stderr  # logged at INFO
    folders = [tmp_path / name / "out" for name in runs]
    logs = [
        [json.loads(line).get("loss") for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert logs[0] == logs[1]
    files = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in folders]
    assert files[0] == [path for path in files[1] if path.partition("/")[0] != "ray"]
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    many = subprocess.run([*command, runs["ray"], "ray_num_workers=64", "overwrite_output_dir=true"], **given)
    assert many.returncode == 2
    assert many.stderr.strip().splitlines()[-1].startswith("error: num_workers=64 is more than Ray has room for")
