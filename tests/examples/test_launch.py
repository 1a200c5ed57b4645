# SPDX-License-Identifier: Apache-2.0
"""The scripts that start runs do so: on one machine, with torchrun on two "machines" on loopback, and under SLURM.

They run as a user runs them, with CPU ranks and a tiny model. In SLURM's place stands a ``srun`` that starts the tasks
with the variables that SLURM sets, and knows the options of its plugin Pyxis for containers. The commands of
``cluster/`` run with the variables of SkyPilot and Kubeflow.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support.docker_context import context_files
from tests.support.ranks import free_port, program_environment
from tests.support.thorough import thorough_but

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDE = EXAMPLES.parent / "docs" / "start" / "cluster.md"
SECONDS = 240.0  # a run takes 15 to 30 on two free cores
SHORT = ["--trainer.max_steps=2", "--trainer.limit_val_batches=0", "--trainer.enable_checkpointing=false"]
ENDED = "`max_steps=2` reached"

SRUN = """#!{python}
import argparse, os, pathlib, subprocess, sys

options = argparse.ArgumentParser("srun", allow_abbrev=False)
options.add_argument("--kill-on-bad-exit", choices=["0", "1"])
for name in ("image", "mounts", "workdir", "name", "save", "env"):  # the options of Pyxis
    options.add_argument("--container-" + name)
for name in ("mount-home", "remap-root", "entrypoint"):
    options.add_argument("--container-" + name, action=argparse.BooleanOptionalAction)
for name in ("entrypoint-log", "writable", "readonly"):
    options.add_argument("--container-" + name, action="store_true")
options.add_argument("command", nargs=argparse.REMAINDER)
given = options.parse_args()
folder = pathlib.Path.cwd()
if given.container_image:
    workdir = pathlib.Path(given.container_workdir)
    mounts = [mount.split(":") for mount in given.container_mounts.split(",")]
    [source, target] = next(mount[:2] for mount in mounts if workdir.is_relative_to(mount[1]))
    folder = pathlib.Path(source, workdir.relative_to(target))
    print("in a container of", given.container_image, flush=True)
tasks = [
    subprocess.Popen(
        given.command,
        cwd=folder,
        env={{**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}},
    )
    for rank in range(2)
]
sys.exit(max([task.wait() for task in tasks], key=abs))
"""


@contextlib.contextmanager
def started(script: str, folder: Path, *arguments: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a script whose run writes into ``folder``; every process of it ends with the block."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [str(EXAMPLES / script), "configs/cpu_tiny.yaml", *SHORT, *own_folder(folder), *arguments],
        cwd=folder,
        env={**program_environment(), "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def own_folder(folder: Path) -> list[str]:
    return [
        f"--trainer.default_root_dir={folder}",
        f"--trainer.logger.save_dir={folder}",
        f"--data.cache_dir={folder / 'cache'}",
    ]


def end_of(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.distributed
def test_a_single_machine(tmp_path: Path) -> None:
    """One rank; ``tests/distributed/test_cli.py`` sees that Lightning starts the others of the same command."""
    whole = ["--trainer.strategy.tensor_model_parallel_size=1", "--trainer.strategy.sequence_parallel=false"]
    with started("launch_single_node.sh", tmp_path, "--trainer.devices=1", *whole) as process:
        assert ENDED in end_of(process)
    assert list(tmp_path.rglob("metrics.csv"))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_machines_with_torchrun(tmp_path: Path) -> None:
    common = {"NNODES": "2", "DEVICES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        started("launch_torchrun.sh", tmp_path, NODE_RANK="0", **common) as first,
        started("launch_torchrun.sh", tmp_path, NODE_RANK="1", **common) as second,
    ):
        output = end_of(first) + end_of(second)
    assert output.count("MEMBER: 1/2") == output.count("MEMBER: 2/2") == 1
    assert "tp2" in output
    assert ENDED in output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("container", thorough_but([False, True], True))
def test_two_tasks_of_slurm(container: bool, tmp_path: Path) -> None:
    """In containers, the tasks find their files only through the options that the guide adds to ``srun``."""
    stub, script = tmp_path / "srun", EXAMPLES / "launch_slurm.sh"
    stub.write_text(SRUN.format(python=sys.executable))
    stub.chmod(0o755)
    if container:
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared" / "lightning_mcore").symlink_to(EXAMPLES.parent)
        options = " ".join(re.findall(r"--container-\S+=[^\s`]+", GUIDE.read_text()))
        options = options.replace("=/shared:", f"={tmp_path}/shared:")
        text, script = script.read_text(), tmp_path / script.name
        script.write_text(text.replace("srun --", f"srun {options} --"))
        script.chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path if container else EXAMPLES),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "lightning-mcore",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODELIST": "127.0.0.1",
    }
    with started(str(script), tmp_path, **slurm) as process:
        output = end_of(process)
    assert ("in a container of IMAGE" in output) == container
    assert output.count("MEMBER: 1/2") == output.count("MEMBER: 2/2") == 1
    assert ENDED in output


def of_skypilot() -> str:
    return str(yaml.safe_load((EXAMPLES / "cluster" / "skypilot.yaml").read_text())["run"])


def of_kubeflow() -> str:
    trainer = yaml.safe_load((EXAMPLES / "cluster" / "kubeflow_trainjob.yaml").read_text())["spec"]["trainer"]
    return shlex.join([*trainer["command"], *trainer["args"]])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", [pytest.param(of_skypilot, marks=pytest.mark.thorough), of_kubeflow])
def test_the_command_of_a_cluster_file_trains(command: Callable[[], str], tmp_path: Path) -> None:
    """On one machine with two ranks, and the variables that the two programs set for torchrun."""
    port = str(free_port())
    ours = {"29500": port, "/shared/run.yaml": "configs/cpu_tiny.yaml", "accelerator=gpu": "accelerator=cpu"}
    ours |= {"num_nodes=2": "num_nodes=1", "devices=8": "devices=2"}
    text = " ".join([command().rstrip(), *SHORT, *own_folder(tmp_path)])
    for theirs, replacement in ours.items():
        text = text.replace(theirs, replacement)
    variables = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}
    variables |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    variables |= {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=EXAMPLES,
        env={**program_environment(), "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp2" in done.stdout + done.stderr
    assert ENDED in done.stdout + done.stderr


def test_the_dockerfile_installs_what_the_project_declares() -> None:
    text = (EXAMPLES / "cluster" / "Dockerfile").read_text()
    extras = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [engine] = [Requirement(line) for line in extras["te"] if "python_version >= '3.12'" in line]  # Ubuntu 24.04 has it
    [installed] = re.findall(r'"(transformer-engine\S+)"', text)
    assert (Requirement(installed).specifier, Requirement(installed).extras) == (engine.specifier, engine.extras)
    [ours] = re.findall(r'"/src\[(\S+)\]"', text)
    assert set(ours.split(",")) <= extras.keys()
    [torch] = re.findall(r"^TORCH \?= (\S+)", (EXAMPLES.parent / "Makefile").read_text(), re.MULTILINE)
    assert f"pip install {torch}\n" in text
    assert f"pip install {torch}\n" in (EXAMPLES / "cluster" / "skypilot.yaml").read_text()


def test_an_image_is_built_from_the_package_alone(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=EXAMPLES.parent, capture_output=True, text=True, check=True)
    names = tracked.stdout.split()
    package = {name for name in names if name.startswith("lightning_mcore/")}
    more = (".git/HEAD", ".venv/bin/python", "build/a.whl", "lightning_mcore/__pycache__/a.cpython-311.pyc", "run.ckpt")
    for name in (*names, *more):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((EXAMPLES.parent / name).read_bytes() if name in names else b"")
    sent = set(context_files(tmp_path))
    assert sent == {*package, "pyproject.toml", "README.md", "LICENSE"}
    for name in {*names, *more} - sent:
        (tmp_path / name).unlink()
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=SECONDS)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package


@pytest.mark.parametrize("script", ["launch_single_node.sh", "launch_torchrun.sh", "launch_slurm.sh"])
def test_the_scripts_are_programs(script: str) -> None:
    assert os.access(EXAMPLES / script, os.X_OK)
    subprocess.run(["bash", "-n", str(EXAMPLES / script)], check=True, timeout=10)


def test_the_slurm_script_asks_for_as_many_tasks_as_devices() -> None:
    text = (EXAMPLES / "launch_slurm.sh").read_text(encoding="utf-8")
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --ntasks-per-node=8" in asked
    assert "#SBATCH --gpus-per-node=8" in asked
    before = text.partition("set -euo pipefail")[0].splitlines()
    assert set(asked) <= set(before)  # sbatch stops reading at the first command
