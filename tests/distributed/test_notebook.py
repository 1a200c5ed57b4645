# SPDX-License-Identifier: Apache-2.0
"""Several ranks in a notebook, in a real Jupyter kernel: they train, are interrupted, train again, fail and end."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCoreStrategy
from lightning_mcore.strategy import notebook, strategy
from lightning_mcore.strategy.notebook import NotebookLauncher
from tests.support.kernel import Kernel, kernel, scaled
from tests.support.ranks import run_ranks
from tests.support.toy import PlainNet, loader

SECONDS = 300.0  # a cell takes 10 on two free cores, and 30 on slow ones: most of it imports of the ranks

GPT = """
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from lightning_mcore import MCoreGPT, MCoreStrategy

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
rows = torch.arange(65 * 16).remainder(50).view(-1, 65)
samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]

class Losses(pl.Callback):
    def __init__(self):
        self.losses = []
        self.square = lambda number: number**2  # cannot be pickled

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_rank == 0:
            print("step", trainer.global_step, flush=True)

def run(**settings):
    pl.seed_everything(1)
    model = MCoreGPT(vocab_size=50, seq_length=64, transformer=SIZES, recipe={"learning_rate": 0.01})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MCoreStrategy(tensor_model_parallel_size=2),
        callbacks=[Losses(), ModelCheckpoint(every_n_train_steps=2)],
        enable_progress_bar=False,
        **settings,
    )
    trainer.fit(model, DataLoader(samples, batch_size=4))
    return trainer, model
"""

PLAIN = """
class NoBatch(KeyError):
    pass

class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == fails_at and self.global_rank == 1:
            raise NoBatch(f"no batch {batch_idx}")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

plain = Plain()
before = plain.layer.weight.detach().clone()
numbers = torch.arange(48.0).view(16, 3) / 48

def fit_plain():
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=MCoreStrategy(), max_epochs=1, logger=False)
    trainer.fit(plain, DataLoader(numbers, batch_size=2))
    return trainer
"""


def losses_of_a_script(folder: str) -> list[float]:
    """Train as in the cell, on ranks that are there already."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(GPT, names)
    trainer, _ = names["run"](max_steps=4)
    found: list[float] = trainer.callbacks[0].losses
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_notebook_trains_on_two_ranks_again_and_again(tmp_path: Path) -> None:
    with kernel(tmp_path) as notebook_kernel:
        assert notebook_kernel.run(GPT, SECONDS).error == ""
        _interrupted_in_the_middle(notebook_kernel, tmp_path)
        # Large enough for several threads, after which a fork of the kernel could hang.
        assert (
            notebook_kernel.run("torch.set_num_threads(2); torch.ones(999, 999) @ torch.ones(999, 999)", SECONDS).error
            == ""
        )
        cell = notebook_kernel.run("trainer, model = run(max_steps=4); print(trainer.callbacks[0].losses)", SECONDS)
        assert cell.error == ""
        assert "MCoreStrategy: tp2 pp1 cp1 dp1 (2 ranks: tensor 2)" in cell.text
        assert "weights are in lightning_logs/version_1/checkpoints/epoch=0-step=4.ckpt" in cell.text
        expected = run_ranks(2, losses_of_a_script, str(tmp_path), timeout=SECONDS, open_group=False)[0]
        assert len(expected) == 4
        assert str(expected) in cell.text
        _state_is_that_of_rank_0(notebook_kernel)
        _weights_of_a_plain_module_come_back(notebook_kernel, tmp_path)
        _an_error_on_a_rank_is_raised(notebook_kernel)
        _ranks_end_with_the_kernel(notebook_kernel)


def _interrupted_in_the_middle(notebook_kernel: Kernel, folder: Path) -> None:
    cell = notebook_kernel.run("run(max_steps=10**6)", SECONDS, "step 3\n", notebook_kernel.manager.interrupt_kernel)
    assert "step 3\n" in cell.text
    told = re.fullmatch(
        "RuntimeError: fit was interrupted, and its ranks have ended; run it again to start over, or go on from the"
        " last checkpoint with ckpt_path='(lightning_logs/version_0/checkpoints/epoch=.*)'",
        cell.error,
    )
    assert told is not None, cell.error
    assert (folder / told[1]).is_dir()
    assert notebook_kernel.ranks == []


def _state_is_that_of_rank_0(notebook_kernel: Kernel) -> None:
    cell = notebook_kernel.run(
        "print(trainer.global_step, trainer.current_epoch, trainer.callbacks[0].square(3))", SECONDS
    )
    assert (cell.text, cell.error) == ("4 1 9\n", "")
    assert (
        "pass ckpt_path='lightning_logs/version_1"
        in notebook_kernel.run("trainer.validate(model, DataLoader(samples))", SECONDS).error
    )
    generate = """
    from lightning_mcore import single_process
    with single_process():
        trained = MCoreGPT.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        print(len(trained.generate([1, 2, 3], 5)))
    """
    cell = notebook_kernel.run(generate, SECONDS)
    assert (cell.text, cell.error) == ("8\n", "")


def _weights_of_a_plain_module_come_back(notebook_kernel: Kernel, folder: Path) -> None:
    code = """
fails_at = None
trainer = fit_plain()
torch.save([before, plain.layer.weight], "weights.pt")
print(trainer.checkpoint_callback.best_model_path)
"""
    cell = notebook_kernel.run(PLAIN + code, SECONDS)
    assert cell.error == ""
    path = re.findall(r"/\S+\.ckpt", cell.text)[-1]
    saved = torch.load(path, weights_only=False)["state_dict"]["layer.weight"]
    before, after = torch.load(folder / "weights.pt")
    assert torch.equal(after, saved)
    assert not torch.equal(after, before)


def _an_error_on_a_rank_is_raised(notebook_kernel: Kernel) -> None:
    assert notebook_kernel.run("fails_at = 2\nfit_plain()", SECONDS).error == "NoBatch: 'no batch 2'"
    assert notebook_kernel.ranks == []


def _ranks_end_with_the_kernel(notebook_kernel: Kernel) -> None:
    ranks: list[psutil.Process] = []

    def kill() -> None:
        ranks.extend(notebook_kernel.ranks)
        notebook_kernel.manager.provisioner.process.kill()
        raise EOFError("nothing more comes from the kernel")

    with pytest.raises(EOFError):
        notebook_kernel.run("run(max_steps=10**6)", SECONDS, "step 3\n", kill)
    assert len(ranks) == 2
    assert psutil.wait_procs(ranks, timeout=scaled(SECONDS))[1] == []


@pytest.fixture
def interactive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let Lightning and the strategy take this process for a notebook's."""
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    monkeypatch.setattr(strategy, "_IS_INTERACTIVE", True)
    monkeypatch.chdir(tmp_path)


def _trainer(**arguments: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=2, strategy=MCoreStrategy(), **arguments)


@pytest.mark.usefixtures("interactive")
def test_what_cannot_be_copied_to_ranks_is_named() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    model = MCoreGPT(vocab_size=8, seq_length=8, transformer=sizes)
    rows = (number for number in range(3))
    with pytest.raises(TypeError, match=r"one of them cannot be pickled: TypeError: .*generator.*; create what"):
        _trainer().fit(model, DataLoader([0, 1], collate_fn=lambda _: next(rows)))


@pytest.mark.usefixtures("interactive")
def test_several_machines_are_rejected_in_a_notebook() -> None:
    with pytest.raises(ValueError, match=r"num_nodes=2 in a notebook: .*; use num_nodes=1, or run a script"):
        _trainer(num_nodes=2)


@pytest.mark.usefixtures("interactive")
def test_cloudpickle_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"devices=2 in a notebook needs the package cloudpickle; pip install"
    ):
        _trainer()


@pytest.mark.usefixtures("interactive")
def test_ranks_do_not_take_a_cell_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter sets FORCE_COLOR, which would make Rich move a cursor."""

    def start(*_: Any, env: dict[str, str], **__: Any) -> None:
        raise ConnectionAbortedError("FORCE_COLOR" in env)

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(notebook.subprocess, "Popen", start)
    with pytest.raises(ConnectionAbortedError, match="False"):
        _trainer(max_steps=1, logger=False, enable_checkpointing=False).fit(PlainNet(), loader(4, 2))


@pytest.mark.usefixtures("interactive")
def test_which_runs_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = pl.Trainer(accelerator="cpu", devices=1, strategy=MCoreStrategy())
    assert alone.strategy.launcher is None
    assert isinstance(_trainer().strategy.launcher, NotebookLauncher)
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "jupyter", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(_trainer(plugins=[LightningEnvironment()]).strategy.launcher, NotebookLauncher)
