# SPDX-License-Identifier: Apache-2.0
"""A launch on Ray, as far as it needs no cluster: numbers of workers, refusals, the doors, reports of one rank.

``tests/on_ray`` has the rest.
"""

import ast
import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest

from lightning_mcore import MCoreCheckpointIO, MCoreStrategy
from lightning_mcore.arguments import RayArguments, TrainingArguments, parse_arguments
from lightning_mcore.arguments.llamafactory.run import read_run
from lightning_mcore.cli import main
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.ray import RaySettings, check_room, elastic_sizes, largest_size, room
from tests.support.factory_files import QWEN3_LORA, write_run
from tests.support.sentences import refuses
from tests.support.toy import PlainNet, StagedNet, loader, make_trainer

ROOT = Path(__file__).parents[3]
TP, PP, VP, CP, EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def test_ray_is_imported_in_one_room() -> None:
    importing = set()
    for path in (ROOT / "lightning_mcore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importing |= {path.parent for name in names if name.partition(".")[0] == "ray"}
    assert importing == {ROOT / "lightning_mcore" / "ray"}
    assert "ray" not in (ROOT / "lightning_mcore" / "cli" / "ray.py").read_text().split("import ")[1].split()


# ---- numbers of workers


@pytest.mark.parametrize(
    ("layout", "least", "most", "accumulated", "sizes"),
    [
        ({}, 1, 4, 1, {1: 4, 2: 2, 4: 1}),  # 3 does not divide 4 batches
        ({}, 1, 4, 3, {1: 12, 2: 6, 3: 4, 4: 3}),
        ({TP: 2}, 2, 4, 2, {2: 4, 4: 2}),
        ({TP: 2}, 2, 5, 1, {2: 2, 4: 1}),  # one worker of five stays idle
        ({TP: 2, PP: 2}, 4, 15, 2, {4: 6, 8: 3, 12: 2}),
        ({CP: 2}, 4, 4, 1, {4: 1}),
        ({EP: 4}, 2, 8, 1, {4: 2, 8: 1}),  # experts take from the data-parallel ranks
        ({PP: 2, VP: 2}, 2, 6, 2, {2: 6, 6: 2}),  # with 4 workers, 3 microbatches do not fill the interleaved schedule
    ],
)
def test_admissible_sizes_keep_the_global_batch(
    layout: dict[str, int], least: int, most: int, accumulated: int, sizes: dict[int, int]
) -> None:
    shape = ParallelLayout(**layout)
    assert elastic_sizes(shape, least, most, accumulated) == sizes
    assert len({shape.data_parallel_size(size) * batches for size, batches in sizes.items()}) == 1
    assert [largest_size(sizes, available) for available in (0, least, most + 5)] == [
        0,
        least if least in sizes else 0,
        max(sizes),
    ]


@pytest.mark.parametrize(("least", "most"), [(3, 3), (6, 6), (5, 7)])
def test_a_range_without_an_admissible_size_is_refused(least: int, most: int) -> None:
    with refuses(ValueError, "num_workers="):
        elastic_sizes(ParallelLayout(**{TP: 2, PP: 2}), least, most)


def test_workers_are_counted_on_each_machine() -> None:
    machines = [{"CPU": 7, "GPU": 4}, {"CPU": 2, "GPU": 4}, {"CPU": 64}]
    assert room(machines, {"CPU": 2, "GPU": 1}) == 4
    assert room(machines, {"CPU": 1}) == 73
    check_room(4, machines, {"CPU": 2, "GPU": 1})
    with refuses(ValueError, "num_workers=5"):
        check_room(5, machines, {"CPU": 2, "GPU": 1})


@pytest.mark.parametrize(
    "values",
    [
        {"num_workers": 0},
        {"num_workers": (4, 2)},
        {"num_workers": 2, "max_failures": -2},
        {"num_workers": 2, "save_every_n_steps": 0},
        {"num_workers": 2, "placement_strategy": "TIGHT"},
        {"num_workers": 2, "master_port": 70000},
        {"num_workers": 2, "resources_per_worker": {"CPU": -1}},
        {"num_workers": 2, "init_kwargs": "[]"},
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any]) -> None:
    with refuses(ValueError, *values):
        RaySettings(**values)


# ---- the doors


def test_arguments_ask_for_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("USE_RAY", raising=False)
    assert not RayArguments().use_ray
    here = RayArguments(master_addr="10.0.0.1", master_port="29500")
    assert here.environment() == {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    words = ["--ray_num_workers", "4", "--ray_min_workers", "2", "--ray_init_kwargs", '{"num_cpus": 4}']
    (asked,) = parse_arguments([*words, "--ray_max_failures", "1", "--master_port", "29500"], RayArguments)
    expected = RaySettings((2, 4), max_failures=1, init_kwargs={"num_cpus": 4}, master_port=29500)
    assert asked.ray_settings() == expected
    assert expected.with_storage_in(str(tmp_path)).storage_path == str(tmp_path / "ray")
    assert asked.checkpoint is None
    args = TrainingArguments(output_dir=str(tmp_path))
    assert RayArguments().launch(args, lambda value: value + 1, 2) == 3  # here, without Ray
    monkeypatch.setenv("USE_RAY", "1")
    assert RayArguments(ray_init_kwargs={"num_cpus": 1}).use_ray


def test_options_of_ray_without_ray_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USE_RAY", raising=False)
    cases: tuple[dict[str, Any], ...] = (
        {"ray_num_workers": 0},
        {"ray_num_workers": 2, "ray_min_workers": 3},
        {"ray_init_kwargs": '{"num_cpus": 1}'},
        {"ray_max_failures": 1},
        {"master_port": "none"},
    )
    for values in cases:
        with refuses(ValueError, *values):
            RayArguments(**values)
    with pytest.raises(ValueError, match="is not JSON"):
        RayArguments(ray_num_workers=2, ray_init_kwargs="{")
    with refuses(TypeError, "ray_num_workers='2'"):
        RayArguments(ray_num_workers="2")  # type: ignore[arg-type]


def test_a_llamafactory_file_asks_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("USE_RAY", raising=False)
    file = write_run(tmp_path, QWEN3_LORA | {"use_cpu": True}, "qwen3")
    keys = ["ray_num_workers=4", 'ray_init_kwargs={"num_cpus": 4}', "master_port=29500", "ray_run_name=mine"]
    asked = read_run(file, keys)
    assert asked.ray.ray_settings() == RaySettings(4, name="mine", init_kwargs={"num_cpus": 4}, master_port=29500)
    assert read_run(file).settings().ray is None
    with refuses(ValueError, "'10.0.0.1'"):
        read_run(file, ["master_addr=10.0.0.1"])
    capsys.readouterr()
    refused = {
        ("tensor_model_parallel_size=3",): "num_workers=4 is not a multiple of 3",
        ("--devices", "2"): "devices=2 times num_nodes=1 is not num_workers=4",
        ("--devices", "0"): "devices=0 times num_nodes=1 is not num_workers=4",
        ("resume_from_checkpoint=nowhere",): "resume_from_checkpoint: 'nowhere' does not exist",
        ("resume_from_checkpoint=true",): "resume_from_checkpoint",
        ("--ray-min-workers", "5"): "ray_min_workers=5 is not between 1 and ray_num_workers=4",
    }
    for words, sentence in refused.items():
        assert main(["llamafactory", file, "ray_num_workers=4", *words]) == 2
        printed = capsys.readouterr().err.strip()
        assert printed.startswith(f"error: {sentence}")
        assert "\n" not in printed
    words = ["ray_num_workers=4", "tensor_model_parallel_size=2"]
    assert main(["plan", file, *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 4


RUN = """
trainer:
  accelerator: cpu
  accumulate_grad_batches: 2
  strategy: {class_path: MCoreStrategy, init_args: {tensor_model_parallel_size: 2}}
model:
  class_path: MCoreGPT
  init_args:
    {vocab_size: 8, seq_length: 8, transformer: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}}
"""
ELASTIC = "ray: {num_workers: [2, 4], max_failures: 1}\n"


def test_a_run_on_ray_without_its_package_is_refused(tmp_path: Path) -> None:
    """In a process of its own: where another test has imported Ray, its classes stay known."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "elastic.yaml").write_text(RUN + ELASTIC)
    file = write_run(tmp_path / "factory", QWEN3_LORA | {"use_cpu": True}, "qwen3")
    fit = ["fit", "--config"]
    commands = [["llamafactory", file, "ray_num_workers=4"], [*fit, "run.yaml", "--ray.num_workers=2"]]
    code = f"""
import sys
sys.modules["ray"] = None
from lightning_mcore.cli import main
for command in {[*commands, [*fit, "elastic.yaml"]]!r}:
    assert main(command) == 2, command
"""
    given: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "timeout": 240}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 3
    assert all(line.startswith("error: a run on Ray needs the package ray, which is not installed;") for line in told)


def test_a_file_of_lightning_asks_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("elastic.yaml").write_text(RUN + ELASTIC)
    refused = {
        ("run.yaml", "--ray.num_workers=3"): "num_workers=3 is not a multiple of 2",
        ("run.yaml", "--ray.num_workers=0"): "num_workers=0 is too small",
        ("run.yaml", "--ray.num_worker=2"): "unknown key of ray 'num_worker'; did you mean 'num_workers'",
        ("run.yaml", "--ray.num_workers=2", "--trainer.devices=4"): "devices=4 times num_nodes=1 is not num_workers=2",
        ("run.yaml", "--ray.num_workers=4", "--trainer.devices=0,1"): "devices=0,1 times num_nodes=1 is not num_wo",
        ("elastic.yaml", "--ray.resources_per_worker={GPU: 1}"): "resources_per_worker has GPU=1, but accelerator=cpu",
    }
    for words, sentence in refused.items():
        assert main(["fit", "--config", *words]) == 2, words
        printed = capsys.readouterr().err.strip()
        assert printed.startswith(f"error: {sentence}")
        assert "\n" not in printed
    assert main(["plan", "elastic.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "workers that Ray starts, with the same global batch: 2 (accumulate_grad_batches=4), 4" in shown
    capsys.readouterr()
    assert main(["plan", "elastic.yaml", "--ray.num_workers=[3,3]", "--model.transformer.num_attention_heads=3"]) == 2
    shown = capsys.readouterr().out
    assert "num_workers=3 is not a multiple of 2" in shown  # and the other faults beside it
    assert "num_attention_heads=3" in shown
    assert main(["plan", "run.yaml", "--trainer.accelerator=gpu", "--trainer.devices=0,2,", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 2
    assert main(["plan", "run.yaml", "--config"]) == 2
    assert "error: --config needs a file" in capsys.readouterr().err


# ---- one rank, with Ray's package and without a cluster


@dataclasses.dataclass
class FakeRay:
    """Stands for Ray in one worker."""

    folder: Path
    world: int = 1
    reports: list[tuple[dict[str, float], str, bool]] = dataclasses.field(default_factory=list)
    announced: Any = None

    def get_context(self) -> Any:
        from pyarrow.fs import LocalFileSystem

        storage = SimpleNamespace(
            storage_filesystem=LocalFileSystem(),
            storage_fs_path=str(self.folder),
            experiment_fs_path=str(self.folder / "run"),
        )
        numbers = dict.fromkeys(("get_world_size", "get_local_world_size"), lambda: self.world)
        zeros = dict.fromkeys(("get_world_rank", "get_local_rank", "get_node_rank"), lambda: 0)
        return SimpleNamespace(**numbers, **zeros, get_storage=lambda: storage)

    def report(self, metrics: dict[str, float], checkpoint: Any, checkpoint_dir_name: str, **_: Any) -> None:
        whole = Path(checkpoint.path, "checkpoint.ckpt").exists()
        self.reports.append((metrics, checkpoint_dir_name, whole))

    def get_preemption_info(self) -> Any:
        return self.announced


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    import ray.train
    import ray.train.torch
    import torch

    stands_in = FakeRay(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".validate_storage_marker").touch()
    for name in ("get_context", "report", "get_preemption_info"):
        monkeypatch.setattr(ray.train, name, getattr(stands_in, name))
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    return stands_in


@with_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of megatron-core and Lightning, as in a rank's own process
def test_a_checkpoint_is_reported_when_it_is_whole(fake: FakeRay) -> None:
    from lightning_mcore.ray import RayReport

    class Announcement(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            fake.announced = "node 1" if trainer.global_step == 3 else None

    for asynchronous in (False, True):
        strategy = MCoreStrategy(checkpoint_io=MCoreCheckpointIO(async_save=asynchronous))
        callbacks = [RayReport(every_n_train_steps=3), Announcement()]
        trainer = make_trainer(strategy, callbacks=callbacks, accumulate_grad_batches=2, max_epochs=2)
        trainer.fit(StagedNet(), loader(16, 2))
    steps = [report[0]["step"] for report in fake.reports]
    assert steps == [3, 4, 6, 8] * 2  # 4 because a machine will be taken away, 8 is the end
    assert all(whole for _, _, whole in fake.reports)
    assert fake.reports[0][1] == "checkpoint_0000_00000003"
    assert {"train_loss", "epoch", "step"} == set(fake.reports[0][0])
    fake.reports.clear()
    trainer = make_trainer("auto", callbacks=[RayReport(watch_preemption=False)], max_epochs=2)
    trainer.fit(PlainNet(), loader(16, 2))
    assert [report[1] for report in fake.reports] == ["checkpoint_0000_00000008", "checkpoint_0001_00000016"]


@with_ray
def test_a_trainer_that_does_not_fit_the_workers_is_refused(fake: FakeRay) -> None:
    from ray.train.lightning import RayLightningEnvironment

    from lightning_mcore.ray import prepare_trainer

    def trainer(strategy: Any = None, **arguments: Any) -> pl.Trainer:
        plugins = arguments.pop("plugins", [RayLightningEnvironment()])
        return make_trainer(strategy or MCoreStrategy(), plugins=plugins, **arguments)

    good = trainer()
    assert prepare_trainer(good) is good
    refused: list[tuple[pl.Trainer, str]] = [
        (trainer("ddp"), "strategy=DDPStrategy is not an MCoreStrategy"),
        (make_trainer({}), "the trainer takes its ranks from LightningEnvironment, not from Ray"),
        (trainer(devices=2), "devices=2 does not match the 1 Ray workers on this machine"),
        (trainer(num_nodes=2), "num_nodes=2 times devices=1 does not match the 1 Ray workers; set num_nodes=1"),
        (trainer(MCoreStrategy(**{TP: 2})), "tensor_model_parallel_size=2 does not divide the number of ranks"),
    ]
    for wrong, sentence in refused:
        with refuses((TypeError, ValueError), sentence):
            prepare_trainer(wrong)
    (fake.folder / "run" / ".validate_storage_marker").unlink()
    with refuses(ValueError, "storage_path="):
        prepare_trainer(good)


@with_ray
def test_a_path_of_pyarrow_is_one_that_fsspec_opens() -> None:
    import fsspec
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    from lightning_mcore.ray.report import _url

    assert _url(LocalFileSystem(), "/runs/a") == "/runs/a"
    assert _url(PyFileSystem(FSSpecHandler(fsspec.filesystem("memory"))), "/runs/a") == "memory:///runs/a"
    for kind, url in (("s3", "s3://runs/a"), ("gcs", "gs://runs/a")):
        assert _url(SimpleNamespace(type_name=kind), "runs/a") == url


@with_ray
def test_ranks_meet_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_mcore.ray import launch

    class Group:
        def execute_single(self, rank: int, function: Any, *arguments: Any) -> Any:
            return function(*arguments)

    met: list[Any] = []

    def meet(self: Any, group: Any, config: Any) -> None:
        met.append(group.execute_single(0, lambda: ("10.0.0.7", 4242)))

    monkeypatch.setattr(launch._TorchBackend, "on_start", meet)
    with socket.create_server(("", 0)) as server:
        free = server.getsockname()[1]
    for addr, port in ((None, None), ("127.0.0.1", None), (None, free), ("127.0.0.1", free)):
        launch._RendezvousBackend().on_start(Group(), launch._RendezvousConfig("gloo", addr=addr, port=port))
        assert met[-1] == (addr or "10.0.0.7", port or 4242)
    foreign = launch._RendezvousConfig("gloo", addr="203.0.113.9")
    with refuses(ValueError, "master_addr=203.0.113.9"):
        launch._RendezvousBackend().on_start(Group(), foreign)


@with_ray
def test_what_rank_0_prints_is_sent(capfd: pytest.CaptureFixture[str]) -> None:
    from lightning_mcore.ray.output import sent

    seen: list[tuple[int, bytes]] = []
    with sent(SimpleNamespace(put=seen.append)):
        os.write(1, "größe\n".encode())
        os.write(2, b"a warning\n")
    os.write(1, b"later\n")
    assert sorted(seen) == [(1, "größe\n".encode()), (2, b"a warning\n")]
    assert capfd.readouterr().out == "later\n"


@with_ray
def test_an_elastic_run_waits_until_a_loss_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train import ScalingConfig

    from lightning_mcore.ray import elastic

    policy = elastic._AdmissibleSizes(ScalingConfig(num_workers=(2, 8)), (2, 4, 8))
    nodes = [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]
    monkeypatch.setattr(elastic.ray, "nodes", lambda: nodes)
    reserved = {"a": {"CPU": 7.0}, "b": {"CPU": 4.0}}
    assert policy._count_possible_workers(reserved) == 4
    nodes[1]["Alive"] = True
    assert policy._count_possible_workers(reserved) == 8
    policy._may_start = time.monotonic() + 5
    assert isinstance(policy.make_decision_for_non_running_worker_group(), elastic.NoopDecision)


@with_ray
def test_ray_that_does_not_start_in_time_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_mcore.ray import launch

    said = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
    for error, kind, text in ((said, RuntimeError, "Ray did not start on"), ("another failure", Exception, "another")):
        monkeypatch.setattr(launch.ray, "init", Mock(side_effect=Exception(error)))
        with pytest.raises(kind, match=text), launch._cluster(RaySettings(1, init_kwargs={"num_cpus": 1})):
            pass
