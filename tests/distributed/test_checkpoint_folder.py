# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints: what is not the run's stays, and a folder that is deleted is made again."""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore import MCoreCheckpointIO, MCoreStrategy
from lightning_mcore.checkpoint.files import verify
from lightning_mcore.checkpoint.writer import ChecksummedFile
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import PlainNet, StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed


def train(
    folder: Path, steps: int, *callbacks: pl.Callback, io: MCoreCheckpointIO | None = None, **arguments: Any
) -> pl.Trainer:
    module = arguments.pop("module", None) or StagedNet()
    last = arguments.pop("save_last", True)
    best = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", save_last=last
    )
    strategy = MCoreStrategy(**({} if isinstance(module, PlainNet) else {"use_distributed_optimizer": True}))
    trainer = make_trainer(strategy, max_steps=steps, callbacks=[best, *callbacks], enable_checkpointing=True)
    if io is not None:
        strategy.checkpoint_io = io
    trainer.fit(module, loader(24, 2), **arguments)
    return trainer


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect what the package warns of."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_mcore")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@on_ranks(2)
def test_a_folder_of_unfinished_checkpoints_that_leads_elsewhere_is_refused_on_every_rank(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    if dist.get_rank() == 0:
        for path in (run, mine):
            path.mkdir()
        (mine / "thesis.tex").touch()
        (run / ".unfinished").symlink_to(mine)
    dist.barrier()
    for module in (StagedNet(), PlainNet()):
        with refuses(ValueError, "is a link to a folder"):
            train(run, 1, module=module)
    assert os.listdir(mine) == ["thesis.tex"]


@pytest.mark.parametrize("kind", ["directory", "file"])
@on_ranks(1)
def test_a_resume_deletes_no_path_of_the_checkpoint_that_is_not_a_checkpoint_of_this_run(
    tmp_path: Path, kind: str
) -> None:
    """Resume from checkpoints whose callback states name what is not this run's to delete."""
    run, other = Path(tmp_path, "run"), Path(tmp_path, "other")

    def module() -> pl.LightningModule:
        return PlainNet() if kind == "file" else StagedNet()

    train(other, 1, module=module())
    for path in (other / "thesis", run / "notes"):
        path.mkdir(parents=True)
        (path / "thesis.tex").touch()
    (run / "way").symlink_to("../other")
    (run / "report.zip").write_bytes(b"PK of something else")
    of_others = [f"{run}/../other/thesis", f"{run}/../other/last.ckpt", f"{run}/way/last.ckpt"]
    no_checkpoints = [str(run / "notes"), str(run / "report.zip")]
    old = str(run / "old.ckpt")
    for number, path in enumerate([*of_others, *no_checkpoints, old]):
        named = {"best_k_models": {path: torch.tensor(0)}, "kth_best_model_path": path, "last_model_path": path}
        state = ModelCheckpoint.state_dict
        with mock.patch.object(ModelCheckpoint, "state_dict", lambda own, n=named, s=state: {**s(own), **n}):
            train(run, 1, module=module())
        start = Path(tmp_path, f"start{number}.ckpt")
        (run / "step=1.ckpt").rename(start)
        verify(str(run / "last.ckpt")) if kind == "directory" else None
        (run / "last.ckpt").rename(old)
        with warnings() as found:
            train(run, 2, module=module(), ckpt_path=start)
        assert (run / "step=2.ckpt").exists()
        assert os.path.lexists(path) == (path != old)
        assert len([text for text in found if text.startswith(f"{path} is not ") and "deleted" in text]) == 2 * (
            path != old
        ), found
        for name in ("step=2.ckpt", "last.ckpt", "old.ckpt"):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(run / name) if (run / name).is_dir() else os.unlink(run / name)
    assert os.listdir(other / "thesis") == os.listdir(run / "notes") == ["thesis.tex"]
    assert (other / "last.ckpt").exists()


class Vandal(pl.Callback):
    """Deletes the folder while the save of a step is being written, which goes on only then."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.is_gone = False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        write = ChecksummedFile.write

        def when_it_is_gone(file: ChecksummedFile, *arguments: Any) -> None:
            while f"step={self.step}.ckpt" in file.path and not self.is_gone:
                time.sleep(0.01)
            write(file, *arguments)

        with mock.patch.object(ChecksummedFile, "write", when_it_is_gone):
            yield

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._delete(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._delete(trainer)

    def _delete(self, trainer: pl.Trainer) -> None:
        if trainer.global_step == self.step and not self.is_gone:
            if trainer.is_global_zero:
                shutil.rmtree(self.folder)
            trainer.strategy.barrier()
            self.is_gone = True


def delete_the_folder(folder: str) -> tuple[list[str], str, float]:
    run = Path(folder, "run")
    early, late = Vandal(run, 2), Vandal(run, 3)
    with warnings() as found, early.at_work():
        train(run, 4, early, io=MCoreCheckpointIO(async_save=True), save_last=False)
    assert early.is_gone
    dist.barrier()  # rank 0 clears up
    assert os.listdir(run) == ["step=4.ckpt"]
    assert verify(str(run / "step=4.ckpt"))["global_step"] == 4
    began = time.monotonic()
    with late.at_work(), pytest.raises(FileNotFoundError) as raised:
        train(run, 3, late, io=MCoreCheckpointIO(async_save=True), save_last=False)
    return found, str(raised.value), time.monotonic() - began


def test_a_folder_that_is_deleted_costs_the_save_in_flight_and_is_an_error_if_none_follows(tmp_path: Path) -> None:
    (warned, raised, seconds), (silent, raised_too, _) = run_ranks(2, delete_the_folder, str(tmp_path))
    unfinished = f"{tmp_path}/run/.unfinished"
    lost = (
        f"{tmp_path}/run/step={{0}}.ckpt was not saved, because {unfinished}/step={{0}}.ckpt was deleted while it was"
    )
    lost += " being written"
    assert warned == [lost.format(2) + "; training continues, and the next save creates the folder again"]
    assert silent == []
    assert raised == raised_too == lost.format(3)
    assert seconds < 20  # and no waiting for ranks that do not come
