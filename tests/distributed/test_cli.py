# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore fit`` trains as a user starts it: the installed script and ``python -m``, on one rank and on two.

The runs are processes of their own, in a folder with a module that only that folder has: ``class_path`` finds it, on
the ranks that Lightning starts as well. Programs start in the first test, in both ways there are. The other runs are
forks of a process that has imported everything; the ranks that Lightning starts for such a run are programs again.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from lightning_mcore.cli import console
from tests.support.hf_models import save_tiny
from tests.support.ranks import program_environment, run_ranks

SECONDS = 240.0
SCRIPT = [str(Path(sys.executable).parent / "lightning-mcore")]
MODULE = [sys.executable, "-m", "lightning_mcore.cli"]

DATA = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, number):
        tokens = torch.arange(17) * (number + 1) % 61
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(16),
            "position_ids": torch.arange(16),
        }


class OwnData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4, fault: str = ""):
        super().__init__()
        self.batch_size, self.fault = batch_size, fault

    def setup(self, stage):
        if self.fault == "setup":
            raise ValueError("a fault of the user's")

    def train_dataloader(self):
        return DataLoader(Rows(), batch_size=self.batch_size)

    val_dataloader = train_dataloader


class Fails(pl.Callback):
    def on_train_batch_start(self, *_):
        raise ValueError("in the middle of a run")
"""

RUN = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 3
  limit_val_batches: 1
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  logger: {class_path: CSVLogger, init_args: {save_dir: ., name: logs, version: ""}}
  strategy: {class_path: lightning_mcore.MCoreStrategy, init_args: {micro_batch_size: 2}}
model:
  class_path: lightning_mcore.MCoreGPT
  init_args:
    vocab_size: 64
    seq_length: 16
    transformer: {num_layers: 2, hidden_size: 16, num_attention_heads: 2}
data: own_data.OwnData
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_data.py").write_text(DATA)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def lightning_mcore(folder: Path, *arguments: str, program: Sequence[str] | None = None) -> tuple[int, str, str]:
    """Run the command in ``folder``; return its exit code, what it printed and what it complained about.

    Args:
        folder: Where it runs.
        arguments: What follows the name of the program.
        program: The program; None for a fork that does what the installed script does.
    """
    if program is None:
        [result] = run_ranks(1, _forked, str(folder), arguments, timeout=SECONDS, open_group=False)
        return result
    process = subprocess.Popen(
        [*program, *arguments],
        cwd=folder,
        env=program_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the ranks that Lightning starts are in the same group
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"{arguments} did not finish in {SECONDS:g} s\n{output}{errors}", pytrace=False)
    return process.returncode, output, errors


def _forked(folder: str, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Do what the program does, in this process."""
    environment = program_environment()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [*SCRIPT, *arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = console()
        except Exception:
            traceback.print_exc()
            code = 1
    return code, output.getvalue(), errors.getvalue()


def trained(folder: Path, *arguments: str, program: Sequence[str] | None = None) -> list[float]:
    """Run ``fit`` and return the loss of every step."""
    code, output, errors = lightning_mcore(folder, "fit", "--config", "run.yaml", *arguments, program=program)
    assert code == 0, output + errors
    header, *rows = (folder / "logs" / "metrics.csv").read_text().splitlines()
    place = header.split(",").index("train_loss")
    return [float(cells[place]) for cells in (row.split(",") for row in rows) if cells[place]]


TENSOR_PARALLEL = ["--trainer.devices=2", "--trainer.strategy.tensor_model_parallel_size=2"]


@pytest.mark.slow
def test_two_ranks_are_started_however_the_command_is_and_a_second_run_overwrites(folder: Path) -> None:
    losses = trained(folder, *TENSOR_PARALLEL)  # the second rank is the installed script
    assert len(losses) == 3
    saved = yaml.safe_load((folder / "logs" / "config.yaml").read_text())
    assert saved["trainer"]["strategy"]["init_args"]["tensor_model_parallel_size"] == 2
    assert trained(folder, *TENSOR_PARALLEL, program=MODULE) == losses


@pytest.mark.slow
def test_the_optimizer_of_the_file_trains(folder: Path) -> None:
    optimizer = ["--optimizer=torch.optim.SGD", "--optimizer.lr=0.5"]
    plain = trained(folder, *optimizer)
    scheduler = ["--lr_scheduler=torch.optim.lr_scheduler.ConstantLR", "--lr_scheduler.factor=0.0"]
    stopped = trained(folder, *optimizer, *scheduler)  # a learning rate of 0 in the first epoch
    assert plain[0] == stopped[0]
    assert plain[1] != stopped[1]


@pytest.mark.slow
def test_a_model_of_hugging_face_is_trained_and_handed_back(folder: Path) -> None:
    save_tiny("llama", folder / "llama")
    run = yaml.safe_load(RUN)
    run["model"] = {
        "class_path": "lightning_mcore.MCoreGPT.from_pretrained",
        "init_args": {"path": "llama", "seq_length": 16},
    }
    run["trainer"] |= {
        "callbacks": [{"class_path": "SaveHFModel", "init_args": {"folder": "tuned"}}],
        "enable_checkpointing": True,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    code, output, errors = lightning_mcore(folder, "fit", "--config", "run.yaml")
    assert code == 0, errors
    [checkpoint] = folder.rglob("*.ckpt")
    code, _, errors = lightning_mcore(folder, "export", str(checkpoint), "again")
    assert code == 0, errors
    tuned = (folder / "tuned" / "model.safetensors").read_bytes()
    assert (folder / "again" / "model.safetensors").read_bytes() == tuned
    # The command that the run printed replaces what its callback wrote
    [command] = re.findall(r"^continue +\S+ (fit .*)", output + errors, re.MULTILINE)
    code, _, errors = lightning_mcore(folder, *shlex.split(command))
    assert code == 0, errors
    assert (folder / "tuned" / "model.safetensors").read_bytes() != tuned


@pytest.mark.slow
def test_what_is_wrong_before_the_run_is_one_sentence(folder: Path) -> None:
    run = ["fit", "--config", "run.yaml"]
    code, _, errors = lightning_mcore(
        folder, *run, "--trainer.devices=3", "--trainer.strategy.tensor_model_parallel_size=2"
    )
    told = [line for line in errors.splitlines() if line.startswith("error")]
    assert (code, len(told)) == (2, 1), errors
    assert told[0].startswith("error: tensor_model_parallel_size=2 does not divide the number of ranks")
    assert "Traceback" not in errors
    code, _, errors = lightning_mcore(
        folder, *run, "--trainer.devices=4", "--trainer.strategy.pipeline_model_parallel_size=3"
    )
    told = [line for line in errors.splitlines() if line.startswith("error")]
    assert (code, len(told)) == (2, 1), errors
    assert told[0].startswith("error: pipeline_model_parallel_size=3 does not divide num_layers="), told
    code, _, errors = lightning_mcore(folder, *run, "--ckpt_path=no.ckpt")
    assert code == 2
    assert re.search(r"^error: .*no\.ckpt", errors, re.MULTILINE), errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("--data.fault=setup", "ValueError: a fault of the user's"),
        ("--trainer.callbacks=own_data.Fails", "ValueError: in the middle of a run"),
    ],
)
def test_a_fault_in_code_of_the_user_keeps_its_traceback(folder: Path, fault: str, text: str) -> None:
    code, _, errors = lightning_mcore(folder, "fit", "--config", "run.yaml", fault)
    assert code == 1
    assert text in errors
    assert "own_data.py" in errors
