# SPDX-License-Identifier: Apache-2.0
"""A disk that is full or read-only: the same sentence on every rank, and the previous checkpoint as it was."""

import ctypes
import os
import resource
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_mcore.checkpoint.files import verify
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from tests.support.ranks import run_ranks
from tests.support.toy import StagedNet, Watch, loader, make_trainer

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # of unshare(2)
READ_ONLY, REMOUNT = 1, 32  # of mount(2)
NOBODY = 65534
SIZE = 8 << 20  # bytes of the disk
STEPS = 5
FAILS_AT = 3  # the optimizer step whose save fails


class SmallDisk:
    """A disk of a few megabytes that the ranks of one test share and nobody else sees.

    Rank 0 makes a mount namespace of its own with a tmpfs in it, as ``unshare -rm`` does, and the others join it. That
    works without privileges where the system lets users make namespaces, and only while a process has one thread.
    Where it does not, limits and permissions of the process stand in for it.

    Args:
        folder: A folder that all ranks see.
        is_real: Whether to make one, or to begin with the stand-in.
    """

    def __init__(self, folder: Path, is_real: bool) -> None:
        self.path = folder / "disk"
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._is_first = os.environ["RANK"] == "0"
        said, joined = folder / "said", folder / "joined"
        if self._is_first:
            self.path.mkdir()
            self.is_real = is_real and self._make()
            said.with_suffix(".new").write_text(f"{os.getpid()} {int(self.is_real)}")
            said.with_suffix(".new").rename(said)
        else:
            _wait_for(said)
            pid, made = map(int, said.read_text().split())
            self.is_real = bool(made)
            if self.is_real:
                self._join(pid)
            joined.touch()
        _wait_for(joined)

    def _make(self) -> bool:
        user, group = os.geteuid(), os.getegid()
        if self._libc.unshare(NEW_USER | NEW_MOUNTS):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        return self._libc.mount(b"tmpfs", bytes(self.path), b"tmpfs", 0, b"size=%d" % SIZE) == 0

    def _join(self, pid: int) -> None:
        for kind in ("user", "mnt"):
            with open(f"/proc/{pid}/ns/{kind}") as namespace:
                assert self._libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())

    def fill(self, room: int) -> None:
        """Leave ``room`` bytes, or let no file of this process grow beyond them; on every rank."""
        if not self.is_real:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        elif self._is_first:
            (self.path / "filler").write_bytes(bytes(shutil.disk_usage(self.path).free - room))

    def protect(self, value: bool = True) -> None:
        """Let nobody write any more, or again; on every rank."""
        if self.is_real and self._is_first:
            flags = REMOUNT | (READ_ONLY if value else 0)
            assert self._libc.mount(b"tmpfs", bytes(self.path), b"tmpfs", flags, None) == 0
        elif not self.is_real:
            if os.getuid() == 0:
                os.seteuid(NOBODY if value else 0)
            else:
                os.chmod(self.path / "run", 0o555 if value else 0o755)

    def relieve(self) -> None:
        """Take back what :meth:`fill` did; on every rank."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if self._is_first:
            (self.path / "filler").unlink(missing_ok=True)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.002)


class Trouble(pl.Callback):
    """Makes the disk fail before the save of a certain step.

    Args:
        disk: The disk.
        room: Bytes to leave; None makes it read-only.
        ranks: Those that are in trouble; a real disk is one for all.
    """

    def __init__(self, disk: SmallDisk, room: int | None, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.disk = disk
        self.room = room
        self.ranks = ranks
        self.is_over = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != FAILS_AT or self.is_over:
            return
        self.is_over = True
        trainer.strategy.checkpoint_io.drain()  # type: ignore[attr-defined] # what was saved before is whole
        trainer.strategy.barrier()
        if dist.get_rank() not in self.ranks:
            return
        if self.room is None:
            self.disk.protect()
        else:
            self.disk.fill(self.room)


@dataclass
class Failed:
    """What one rank saw of a save that failed.

    Attributes:
        kind: The type of the error that ended the run.
        error: Its text.
        steps: The optimizer steps of what can be taken for a checkpoint then, by name; all of it verified.
        losses: Those of the run that failed, and of the one that went on when the disk had recovered.
        left: What is in the folder at the end.
    """

    kind: str
    error: str
    steps: dict[str, int]
    losses: tuple[list[float], list[float]]
    left: list[str]


def fit(folder: Path, watch: Watch, asynchronous: bool, *callbacks: pl.Callback, resume: str | None = None) -> None:
    """Train on two stages, saving after each optimizer step."""
    trainer = make_trainer(
        {"pipeline_model_parallel_size": 2},
        max_steps=STEPS,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
        plugins=[LightningEnvironment(), MCoreCheckpointIO(async_save=asynchronous)],
        callbacks=[
            watch,
            *callbacks,
            ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=True),
        ],
    )
    trainer.fit(StagedNet(), loader(24, 2, shuffle=True), ckpt_path=resume)


def fail(disk: SmallDisk, asynchronous: bool, trouble: Trouble) -> Failed:
    """Train until the disk fails, then relieve it and go on."""
    folder = disk.path / "run"
    before, after = Watch(), Watch()
    with pytest.raises(Exception, match="") as raised:  # noqa: PT011 - which one is what the test looks at
        fit(folder, before, asynchronous, trouble)
    disk.protect(False)
    disk.relieve()
    dist.barrier()
    steps = {path.name: verify(str(path))["global_step"] for path in folder.glob("*.ckpt")}
    dist.barrier()
    fit(folder, after, asynchronous, resume=str(folder / "last.ckpt"))
    left = sorted(path.name for path in folder.glob("*"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return Failed(type(raised.value).__name__, str(raised.value), steps, (before.seen.losses, after.seen.losses), left)


def troubles(folder: str, is_real: bool) -> tuple[bool, list[float], dict[str, Failed]]:
    """Rank function: every kind of trouble, one after the other."""
    disk = SmallDisk(Path(folder), is_real)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), rank=rank, world_size=world_size)
    whole = Watch()
    fit(disk.path / "whole", whole, False)
    failed = {
        "full": fail(disk, False, Trouble(disk, 0)),
        "nearly full": fail(disk, False, Trouble(disk, 3 * 4096)),
        "full, async": fail(disk, True, Trouble(disk, 4096)),
        "read-only": fail(disk, False, Trouble(disk, None)),
    }
    if not disk.is_real:
        failed["one rank"] = fail(disk, False, Trouble(disk, 1000, ranks=(1,)))
        failed["one rank, async"] = fail(disk, True, Trouble(disk, 1000, ranks=(1,)))
    return disk.is_real, whole.seen.losses, failed


REASONS = {True: "no space left on device", False: "file too large"}
PROTECTED = {True: "read-only", False: "permission denied"}


@pytest.mark.parametrize(
    "is_real", [pytest.param(True, id="disk"), pytest.param(False, id="limits", marks=pytest.mark.thorough)]
)
def test_a_disk_that_fails_ends_the_run_and_leaves_what_was_saved(is_real: bool, tmp_path: Path) -> None:
    ranks = run_ranks(2, troubles, str(tmp_path), is_real, open_group=False, timeout=150)
    for is_disk, whole, failed in ranks:
        for name, seen in failed.items():
            asynchronous = "async" in name
            reason = (PROTECTED if name == "read-only" else REASONS)[is_disk]
            assert seen.kind in {"OSError", "PermissionError"}, (name, seen.kind, seen.error)
            assert reason in seen.error, name
            assert "\n" not in seen.error, name
            assert "run" in seen.error, name  # the path
            # What was saved before is there, whole, and is what the run goes on from.
            assert seen.steps == {f"step={FAILS_AT - 1}.ckpt": FAILS_AT - 1, "last.ckpt": FAILS_AT - 1}, name
            first, second = seen.losses
            assert first == whole[: len(first)], name
            assert len(first) >= FAILS_AT if asynchronous else len(first) == FAILS_AT, name
            assert second == whole[FAILS_AT - 1 :], name
            assert seen.left == ["last.ckpt", f"step={STEPS}.ckpt"], name
    assert [seen.error for seen in ranks[0][2].values()] == [seen.error for seen in ranks[1][2].values()]
