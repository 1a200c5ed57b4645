# SPDX-License-Identifier: Apache-2.0
"""``ModelCheckpoint(save_last="link")``: the link leads to a whole checkpoint, whenever the process dies."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint.commands import verify
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from tests.support.ranks import on_ranks
from tests.support.sentences import refuses
from tests.support.toy import PlainNet, StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed

STEPS = 4


class Link:
    """Looks where the link leads after every change of a name on the disk, as whoever resumes after a kill would.

    Attributes:
        path: The link.
        led_to: Where it led, in order.
    """

    changes = ("rename", "replace", "unlink", "remove", "symlink", "rmdir")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.led_to: list[str] = []

    def look(self) -> None:
        if not self.led_to and not self.path.is_symlink():
            return
        target = os.readlink(self.path)
        if self.led_to[-1:] != [target]:
            self.led_to.append(target)
        verify(str(self.path))

    def watched(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            result = change(*arguments, **keywords)
            self.look()
            return result

        return call


class InFlight(pl.Callback):
    """Counts the steps that began while the save of the step before was being written."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps += trainer.strategy.checkpoint_io.has_saves_in_flight  # type: ignore[attr-defined]


def train(folder: Path, net: type[pl.LightningModule], strategy: dict[str, Any], steps: int, **options: Any) -> Any:
    """Save after each step, with a link to the newest; return the trainer."""
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = make_trainer(strategy, max_steps=steps, callbacks=[keep, InFlight()], enable_checkpointing=True)
    trainer.strategy.checkpoint_io = MCoreCheckpointIO(**options)
    trainer.fit(net(), loader(24, 2), ckpt_path="last")
    return trainer


def save_and_look(folder: Path, net: type[pl.LightningModule], strategy: dict[str, Any], **options: Any) -> None:
    link = Link(folder / "last.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        for name in Link.changes if dist.get_rank() == 0 else ():
            patch.setattr(os, name, link.watched(getattr(os, name)))
        trainer = train(folder, net, strategy, STEPS, **options)
    saved = [f"step={step + 1}.ckpt" for step in range(STEPS)]
    assert link.led_to == saved * (dist.get_rank() == 0)
    is_sharded = (folder / "last.ckpt").is_dir()
    assert trainer.callbacks[0].steps == (STEPS - 1) * (is_sharded and "async_save" in options)
    assert on_the_disk(folder) == ["last.ckpt", saved[-1]]
    resumed = train(folder, net, strategy, STEPS + 1, **options)
    assert resumed.ckpt_path == str(folder / "last.ckpt")
    assert on_the_disk(folder) == ["last.ckpt", f"step={STEPS + 1}.ckpt"]


def on_the_disk(folder: Path) -> list[str]:
    """Return the names in a folder when rank 0 has deleted what it had to."""
    dist.barrier()
    return sorted(os.listdir(folder))


@on_ranks(2, timeout=120)
def test_a_link_always_leads_to_a_whole_checkpoint(tmp_path: Path) -> None:
    save_and_look(Path(tmp_path, "sharded"), StagedNet, {"pipeline_model_parallel_size": 2})
    save_and_look(Path(tmp_path, "behind"), StagedNet, {"pipeline_model_parallel_size": 2}, async_save=True)
    save_and_look(Path(tmp_path, "two"), PlainNet, {"use_distributed_optimizer": True}, async_save=True)
    save_and_look(Path(tmp_path, "file"), PlainNet, {})


@on_ranks(2)
def test_a_link_to_a_checkpoint_that_is_gone_is_refused_instead_of_beginning_anew(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        os.symlink("step=9.ckpt", tmp_path / "last.ckpt")
    dist.barrier()
    with refuses(FileNotFoundError, "last.ckpt links to the checkpoint step=9.ckpt"):
        train(tmp_path, PlainNet, {}, 1)


@on_ranks(2)
def test_a_last_checkpoint_that_a_crash_moved_away_is_put_back_instead_of_beginning_anew(tmp_path: Path) -> None:
    train(tmp_path, StagedNet, {"pipeline_model_parallel_size": 2}, 1)
    last = f"{tmp_path}/last.ckpt"
    if dist.get_rank() == 0:
        os.unlink(last)
        os.rename(f"{tmp_path}/step=1.ckpt", last)
        atomic.begin(last)
        os.close(atomic._marks.popitem()[1])  # as when the process dies
        os.rename(last, atomic.unfinished(last) + ".replaced")
    dist.barrier()
    with refuses(FileNotFoundError, "last.ckpt had been moved aside by an interrupted save and has been restored"):
        train(tmp_path, StagedNet, {"pipeline_model_parallel_size": 2}, 2)
    resumed = train(tmp_path, StagedNet, {"pipeline_model_parallel_size": 2}, 2)
    assert resumed.ckpt_path == last


@on_ranks(1)
def test_a_checkpoint_goes_when_no_link_leads_there_and_not_when_it_was_saved_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    os.mkdir(folder)
    plugin, one, two = MCoreCheckpointIO(), f"{folder}/1.ckpt", f"{folder}/2.ckpt"
    for path in (one, two):
        plugin.save_checkpoint({"path": path}, path)
    plugin.link_checkpoint(one, f"{folder}/last.ckpt")
    plugin.remove_checkpoint(one)
    assert plugin.load_checkpoint(f"{folder}/last.ckpt")["path"] == one
    plugin.save_checkpoint({"path": "1 again"}, one)
    plugin.link_checkpoint(two, f"{folder}/last.ckpt")
    assert plugin.load_checkpoint(f"{folder}/last.ckpt")["path"] == two
    assert plugin.load_checkpoint(one)["path"] == "1 again"
    plugin.remove_checkpoint(two)
    plugin.link_checkpoint(one, f"{folder}/last-2.ckpt")
    plugin.remove_checkpoint(f"{folder}/last.ckpt")
    plugin.link_checkpoint(one, one)
    assert sorted(os.listdir(folder)) == ["1.ckpt", "last-2.ckpt"]
    with pytest.raises(ValueError, match="is a directory of other files"):
        plugin.link_checkpoint(one, os.path.dirname(folder))


@on_ranks(1)
def test_a_link_that_cannot_be_made_is_not_called_a_deleted_folder(tmp_path: Path) -> None:
    whole = atomic.link

    def link(path: str, target: str) -> None:
        if Path(path) == tmp_path / "last.ckpt":
            raise OSError(1, "Operation not permitted", path)
        whole(path, target)

    with mock.patch.object(atomic, "link", link), refuses(OSError, "operation not permitted"):
        train(tmp_path, StagedNet, {}, 1, async_save=True)
    [saved] = [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]
    verify(str(saved))
