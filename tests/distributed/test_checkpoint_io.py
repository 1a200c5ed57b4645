# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints by many ranks, on bare tensors whose values are known by their index."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from lightning_mcore import checkpoint_writer
from lightning_mcore.checkpoint_io import MANIFEST, RANK_STATE, SHARDED_STATE, MCoreCheckpointIO
from lightning_mcore.cpu_runtime import cpu_runtime
from lightning_mcore.layout import ParallelLayout
from lightning_mcore.process_groups import close_process_groups, open_process_groups
from tests.ranks import run_ranks

ROWS, COLUMNS = 8, 6
BIAS = 5


def weight(scale: float = 1.0) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) * scale


def state(world_size: int, rank: int, scale: float = 1.0) -> dict[str, Any]:
    """Return this rank's part: a weight cut by rows, a vector that all have, rectangles, and an object."""
    rows = ROWS // world_size
    whole = weight(scale)
    own = whole[rank * rows : (rank + 1) * rows].clone()
    bias = torch.arange(BIAS).to(torch.bfloat16) * scale
    result: dict[str, Any] = {
        "weight": ShardedTensor.from_rank_offsets("weight", own, (0, rank, world_size)),
        "bias": ShardedTensor.from_rank_offsets("bias", bias, replica_id=rank),
        "object": ShardedObject("extra", {"rank": rank, "scale": scale}, (world_size,), (rank,)),
    }
    for index, (row, column, height, width) in enumerate(rectangles(world_size, rank)):
        piece = (whole[row : row + height, column : column + width] + 1000).contiguous()
        result[f"moment{index}"] = ShardedTensor(
            "moment", piece, piece.dtype, tuple(piece.shape), (ROWS, COLUMNS), (row, column), None
        )
    return result


def rectangles(world_size: int, rank: int) -> list[tuple[int, int, int, int]]:
    """Cut the flat weight into uneven ranges, one for each rank, and each range into rectangles: row, column, size."""
    ends = [ROWS * COLUMNS * (index + 1) // world_size - (index + 1) % world_size for index in range(world_size)]
    start, end = ([0, *ends][rank], ends[rank])
    found = []
    while start < end:
        row, column = divmod(start, COLUMNS)
        if column or end - start < COLUMNS:
            width = min(COLUMNS - column, end - start)
            found.append((row, column, 1, width))
            start += width
        else:
            height = (end - start) // COLUMNS
            found.append((row, 0, height, COLUMNS))
            start += height * COLUMNS
    return found


@contextlib.contextmanager
def groups() -> Iterator[None]:
    with cpu_runtime():
        open_process_groups(ParallelLayout(), seed=1, timeout=timedelta(seconds=60))
        try:
            yield
        finally:
            close_process_groups()


def checkpoint(scale: float = 1.0, step: int = 7) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        "global_step": step,
        "loops": {"fit": step},
        SHARDED_STATE: state(world_size, rank, scale),
        MANIFEST: {"world_size": world_size, "global_step": step},
        RANK_STATE: {"rank": rank, "random": torch.arange(rank + 1)},
    }


def blank(scale: float = 0.0) -> dict[str, Any]:
    return state(dist.get_world_size(), dist.get_rank(), scale)


def assert_loaded(found: dict[str, Any], scale: float = 1.0) -> None:
    expected = state(dist.get_world_size(), dist.get_rank(), scale)
    for name, piece in expected.items():
        if isinstance(piece, ShardedTensor):
            assert torch.equal(found[name], piece.data), name


def save_and_load(path: str) -> None:
    with groups():
        plugin = MCoreCheckpointIO()
        plugin.save_checkpoint(checkpoint(), path)
        assert_loaded(plugin.load_shards(path, blank()))
        lightning = plugin.load_checkpoint(path)
        assert lightning["loops"] == {"fit": 7}
        assert [len(of_rank["random"]) for of_rank in lightning[RANK_STATE]] == [
            rank + 1 for rank in range(dist.get_world_size())
        ]
        bare = dist_checkpointing.load(blank(), path)
        assert_loaded(bare)
        assert bare["object"]["rank"] == dist.get_rank()


def only_load(path: str) -> None:
    with groups():
        wanted = {name: piece for name, piece in blank().items() if name != "object"}
        assert_loaded(MCoreCheckpointIO().load_shards(path, wanted))
        assert_loaded(dist_checkpointing.load({n: p for n, p in blank().items() if n != "object"}, path))


def test_what_any_number_of_ranks_wrote_any_other_reads(tmp_path: Path) -> None:
    for writers in (1, 2, 4):
        run_ranks(writers, save_and_load, str(tmp_path / f"{writers}.ckpt"))
        for readers in {1, 2, 4} - {writers}:
            run_ranks(readers, only_load, str(tmp_path / f"{writers}.ckpt"))


def save_without_waiting(folder: str) -> None:
    rank = dist.get_rank()
    with groups():
        plugin = MCoreCheckpointIO(async_save=True)
        first, second = f"{folder}/first.ckpt", f"{folder}/second.ckpt"
        given = checkpoint()
        plugin.save_checkpoint(given, first)
        for piece in given[SHARDED_STATE].values():  # training goes on
            if isinstance(piece, ShardedTensor):
                piece.data.zero_()
        assert plugin.has_saves_in_flight
        assert not os.path.exists(first)  # written or not, it becomes a checkpoint at a poll
        poll_until_done(plugin)
        assert_loaded(plugin.load_shards(first, blank()))

        plugin.save_checkpoint(checkpoint(scale=2.0), second)
        if rank == 0:
            plugin.remove_checkpoint(first)
        assert os.path.exists(first)  # until the second is whole
        plugin.save_checkpoint(checkpoint(scale=3.0), second)  # the same once more: the one in flight comes first
        dist.barrier()
        assert not os.path.exists(first)
        assert_loaded(plugin.load_shards(second, blank()), scale=2.0)
        plugin.drain()
        assert_loaded(plugin.load_shards(second, blank()), scale=3.0)

        plugin.save_checkpoint(checkpoint(scale=4.0), first)
        if rank == 0:
            plugin.remove_checkpoint(first)  # it was not among the best
        plugin.teardown()
        dist.barrier()
        assert not os.path.exists(first)
        assert not os.path.exists(f"{folder}/.unfinished")


def poll_until_done(plugin: MCoreCheckpointIO) -> None:
    deadline = time.monotonic() + 30
    while plugin.has_saves_in_flight:
        assert time.monotonic() < deadline
        plugin.poll()


def test_an_asynchronous_save_holds_the_moment_and_old_ones_go_when_it_is_whole(tmp_path: Path) -> None:
    run_ranks(2, save_without_waiting, str(tmp_path))


def two_in_flight(folder: str) -> None:
    with groups():
        plugin = MCoreCheckpointIO(async_save=True, max_in_flight=2)
        for index in range(4):
            plugin.save_checkpoint(checkpoint(scale=float(index), step=index), f"{folder}/{index}.ckpt")
            whole = [os.path.exists(f"{folder}/{earlier}.ckpt") for earlier in range(index + 1)]
            assert whole == [earlier < index - 1 for earlier in range(index + 1)]
            dist.barrier()
        plugin.drain()
        for index in range(4):
            assert_loaded(plugin.load_shards(f"{folder}/{index}.ckpt", blank()), scale=float(index))


def test_as_many_saves_are_in_flight_as_allowed(tmp_path: Path) -> None:
    run_ranks(2, two_in_flight, str(tmp_path))


def refuse_and_keep(folder: str) -> list[str]:
    """Let a save fail in several ways; each must fail on every rank, with the same words, and leave the old one."""
    rank, path = dist.get_rank(), f"{folder}/last.ckpt"
    messages = []

    def fails(plugin: MCoreCheckpointIO, given: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error) as caught:
            plugin.save_checkpoint(given, path)
            plugin.drain()
        messages.append(str(caught.value))
        assert not plugin.has_saves_in_flight
        assert_loaded(plugin.load_shards(path, blank()))
        dist.barrier()
        assert os.listdir(folder) == ["last.ckpt"]

    with groups():
        MCoreCheckpointIO().save_checkpoint(checkpoint(), path)
        for plugin in (MCoreCheckpointIO(), MCoreCheckpointIO(async_save=True)):
            with mock.patch.object(checkpoint_writer.ChecksummedFile, "write", _full if rank == 1 else _written):
                fails(plugin, checkpoint(2.0), OSError)
            gap = checkpoint(2.0)
            if rank == 1:
                del gap[SHARDED_STATE]["weight"]
            fails(plugin, gap, ValueError)
            broken = checkpoint(2.0)
            if rank == 1:
                broken[SHARDED_STATE]["weight"].data = None
            fails(plugin, broken, ValueError)
            unpicklable = checkpoint(2.0)
            unpicklable["callbacks"] = lambda: None
            fails(plugin, unpicklable, TypeError)
            old = MCoreCheckpointIO(async_save=True)
            old.save_checkpoint(checkpoint(), path)
            with mock.patch.object(checkpoint_writer.ChecksummedFile, "write", _full if rank == 1 else _written):
                old.save_checkpoint(checkpoint(3.0), f"{folder}/next.ckpt")
                if rank == 0:
                    old.remove_checkpoint(path)
                with pytest.raises(OSError, match=r"next\.ckpt"):
                    old.drain()
            assert_loaded(old.load_shards(path, blank()))  # the new one failed, so the old one stays
    return messages


_written = checkpoint_writer.ChecksummedFile.write


def _full(file: Any, content: Any, checksum: int | None = None) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)


def test_a_failed_save_is_one_error_on_every_rank_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(2, refuse_and_keep, str(tmp_path))
    assert first == second
    assert "last.ckpt could not be saved: no space left on device; free" in first[0]
    assert "whole tensors" in first[1]
