# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints by many ranks, on bare tensors whose values are known by their index."""

import contextlib
import copy
import errno
import json
import os
import pickle
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint import save as checkpoint_save
from lightning_mcore.checkpoint import save_plan
from lightning_mcore.checkpoint import writer as checkpoint_writer
from lightning_mcore.checkpoint.background import BackgroundTask
from lightning_mcore.checkpoint.io import CONTENT_METADATA, MANIFEST, RANK_STATE, SHARDED_STATE, MCoreCheckpointIO
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import close_process_groups, open_process_groups
from tests.support.ranks import on_ranks, program_environment, run_ranks
from tests.support.sentences import refuses, says

pytestmark = pytest.mark.distributed

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
        RANK_STATE: {"rank": rank, "random": torch.arange(rank + 1), "scale": scale},
    }


def blank(scale: float = 0.0) -> dict[str, Any]:
    return state(dist.get_world_size(), dist.get_rank(), scale)


def assert_loaded(found: dict[str, Any], scale: float = 1.0) -> None:
    expected = state(dist.get_world_size(), dist.get_rank(), scale)
    for name, piece in expected.items():
        if isinstance(piece, ShardedTensor):
            assert torch.equal(found[name], piece.data), name


def rank_state(plugin: MCoreCheckpointIO, path: str, rank: int | None = None) -> dict[str, Any]:
    """Return what a rank, or this one, said of itself when it saved."""
    return plugin.load_rank_state(path, plugin.read_contents(path), dist.get_rank() if rank is None else rank)


def save_and_load(path: str) -> None:
    with groups():
        plugin = MCoreCheckpointIO()
        plugin.save_checkpoint(checkpoint(), path)
        assert_loaded(plugin.load_shards(path, blank()))
        lightning = plugin.load_checkpoint(path)
        assert lightning["loops"] == {"fit": 7}
        states = [rank_state(plugin, path, rank) for rank in range(dist.get_world_size())]
        assert [(state["rank"], state["random"].tolist()) for state in states] == [
            (rank, [*range(rank + 1)]) for rank in range(dist.get_world_size())
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


@on_ranks(2)
def test_a_plan_is_kept_until_some_rank_holds_something_else(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    with groups(), mock.patch.object(save_plan, "_agree", wraps=save_plan._agree) as agree:
        plugin = MCoreCheckpointIO()
        for scale, more, plans in ((1.0, False, 1), (2.0, False, 1), (3.0, True, 2), (4.0, True, 2), (5.0, False, 3)):
            given, wanted = checkpoint(scale), blank()
            if more and dist.get_rank() == 1:  # rank 0 has what it had, and must take part nevertheless
                given[SHARDED_STATE]["more"] = ShardedTensor.from_rank_offsets("more", torch.full((3,), scale))
                wanted["more"] = ShardedTensor.from_rank_offsets("more", torch.zeros(3))
            plugin.save_checkpoint(given, path)
            assert agree.call_count == plans
            found = plugin.load_shards(path, wanted)
            assert_loaded(found, scale)
            assert found.get("more", torch.full((3,), scale)).tolist() == [scale] * 3
            assert found["object"] == {"rank": dist.get_rank(), "scale": scale}
            assert rank_state(plugin, path)["scale"] == scale
            assert ("more" in plugin.read_contents(path).shapes) == more


@on_ranks(2)
def test_a_rank_state_may_be_empty(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    with groups():
        plugin, given = MCoreCheckpointIO(), checkpoint()
        if dist.get_rank() == 1:
            given[RANK_STATE] = {}
        plugin.save_checkpoint(given, path)
        assert rank_state(plugin, path, 0)["rank"] == 0
        assert rank_state(plugin, path, 1) == {}


def poll_until_done(plugin: MCoreCheckpointIO) -> None:
    deadline = time.monotonic() + 30
    while plugin.has_saves_in_flight:
        assert time.monotonic() < deadline
        plugin.poll()


@on_ranks(2)
def test_an_asynchronous_save_holds_the_moment_and_old_ones_go_when_it_is_whole(tmp_path: Path) -> None:
    rank = dist.get_rank()
    with groups():
        plugin = MCoreCheckpointIO(async_save=True)
        first, second = f"{tmp_path}/first.ckpt", f"{tmp_path}/second.ckpt"
        given = checkpoint()
        plugin.save_checkpoint(given, first)
        for piece in given[SHARDED_STATE].values():  # training goes on
            if isinstance(piece, ShardedTensor):
                piece.data.zero_()
        given[RANK_STATE]["random"].zero_()
        assert plugin.has_saves_in_flight
        assert not os.path.exists(first)  # written or not, it becomes a checkpoint at a poll
        poll_until_done(plugin)
        assert_loaded(plugin.load_shards(first, blank()))
        assert rank_state(plugin, first)["random"].tolist() == [*range(rank + 1)]

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
        assert not os.path.exists(f"{tmp_path}/.unfinished")


@on_ranks(2)
def test_a_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    with groups():
        plugin = pickle.loads(pickle.dumps(MCoreCheckpointIO(async_save=True, verify="sizes")))
        for index in range(4):
            plugin.save_checkpoint(checkpoint(scale=float(index), step=index), f"{tmp_path}/{index}.ckpt")
            whole = [os.path.exists(f"{tmp_path}/{earlier}.ckpt") for earlier in range(index + 1)]
            assert whole == [earlier < index for earlier in range(index + 1)]
            dist.barrier()
        plugin.drain()
        for index in range(4):
            assert_loaded(plugin.load_shards(f"{tmp_path}/{index}.ckpt", blank()), scale=float(index))
        again = copy.deepcopy(plugin)  # which a tuner may do, after saves too
        assert (again.async_save, again.verify) == (True, "sizes")


_delete_folder = checkpoint_save._delete_folder
_copy = checkpoint_writer.Staging.copy
_write_pieces = checkpoint_writer.write_pieces


@on_ranks(2)
def test_a_folder_is_not_deleted_while_a_writer_of_its_save_runs(tmp_path: Path) -> None:
    """Let saves fail that rank 0 could already write; its folder must not be deleted under its writer."""
    path, rank = f"{tmp_path}/a.ckpt", dist.get_rank()
    running, overlaps = [0], []

    def write_slowly(*arguments: Any) -> Any:
        running[0] += 1
        try:
            time.sleep(0.5)
            return _write_pieces(*arguments)
        finally:
            running[0] -= 1

    def delete_folder(*arguments: Any) -> None:
        overlaps.append(running[0])
        _delete_folder(*arguments)

    def no_memory(*_: Any) -> Any:
        raise MemoryError("no room for a copy")

    with (
        groups(),
        mock.patch.object(checkpoint_save, "write_pieces", write_slowly),
        mock.patch.object(checkpoint_save, "_delete_folder", delete_folder),
    ):
        plugin = MCoreCheckpointIO(async_save=True)
        with (
            mock.patch.object(checkpoint_writer.Staging, "copy", no_memory if rank == 1 else _copy),
            pytest.raises((MemoryError, RuntimeError), match="no room for a copy"),
        ):
            plugin.save_checkpoint(checkpoint(), path)
        plugin.save_checkpoint(checkpoint(), path)
        with (  # a Ctrl-C on all ranks
            mock.patch.object(BackgroundTask, "result", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            plugin.drain()
        assert overlaps == [0, 0]
        dist.barrier()
        plugin.save_checkpoint(checkpoint(3.0), path)
        plugin.drain()
        assert_loaded(plugin.load_shards(path, blank()), scale=3.0)
        assert os.listdir(tmp_path) == ["a.ckpt"]


@on_ranks(2)
def test_old_checkpoints_go_with_the_next_whole_one(tmp_path: Path) -> None:
    """Let two saves fail and the next succeed, which deletes what all three of them replace."""
    rank = dist.get_rank()
    with groups():
        plugin = MCoreCheckpointIO(async_save=True)
        for name in ("old", "older", "oldest"):
            plugin.save_checkpoint(checkpoint(), f"{tmp_path}/{name}.ckpt")
        plugin.drain()
        with mock.patch.object(checkpoint_writer.ChecksummedFile, "write", _full if rank == 1 else _written):
            for name, unneeded in (("first", "oldest"), ("second", "older")):
                plugin.save_checkpoint(checkpoint(), f"{tmp_path}/{name}.ckpt")
                if rank == 0:
                    plugin.remove_checkpoint(f"{tmp_path}/{unneeded}.ckpt")
                with pytest.raises(OSError, match=rf"{name}\.ckpt could not be saved"):
                    plugin.drain()
        dist.barrier()
        assert sorted(os.listdir(tmp_path)) == ["old.ckpt", "older.ckpt", "oldest.ckpt"]  # nothing newer is whole
        plugin.save_checkpoint(checkpoint(), f"{tmp_path}/third.ckpt")
        if rank == 0:
            plugin.remove_checkpoint(f"{tmp_path}/old.ckpt")
        plugin.drain()
        dist.barrier()
        assert os.listdir(tmp_path) == ["third.ckpt"]


@on_ranks(2)
def test_a_file_is_not_deleted_for_an_earlier_checkpoint_of_its_name(tmp_path: Path) -> None:
    """Save one file under the name of a checkpoint that would be deleted when the save in flight is finished."""
    with groups():
        plugin = MCoreCheckpointIO(async_save=True)
        plugin.save_checkpoint(checkpoint(), f"{tmp_path}/a.ckpt")
        plugin.drain()
        plugin.save_checkpoint(checkpoint(), f"{tmp_path}/b.ckpt")
        if dist.get_rank() == 0:
            plugin.remove_checkpoint(f"{tmp_path}/a.ckpt")
            plugin.save_checkpoint({"state_dict": {}}, f"{tmp_path}/a.ckpt")
        plugin.drain()
        dist.barrier()
        assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


@on_ranks(2)
def test_a_link_by_another_path_waits_for_the_save_too(tmp_path: Path) -> None:
    """Set a link to a save in flight, whose folder is reached through a link the second time."""
    with groups():
        if dist.get_rank() == 0:
            os.mkdir(f"{tmp_path}/run")
            os.symlink("run", f"{tmp_path}/latest")
        dist.barrier()
        plugin = MCoreCheckpointIO(async_save=True)
        plugin.save_checkpoint(checkpoint(), f"{tmp_path}/run/a.ckpt")
        plugin.link_checkpoint(f"{tmp_path}/latest/a.ckpt", f"{tmp_path}/latest/last.ckpt")
        assert not os.path.lexists(f"{tmp_path}/run/last.ckpt")
        plugin.drain()
        dist.barrier()
        assert os.path.samefile(f"{tmp_path}/run/last.ckpt", f"{tmp_path}/run/a.ckpt")


def save_and_wait(plugin: MCoreCheckpointIO, given: dict[str, Any], path: str) -> None:
    plugin.save_checkpoint(given, path)
    plugin.drain()


def load_all(plugin: MCoreCheckpointIO, path: str) -> None:
    plugin.load_shards(path, blank())
    plugin.load_directory(path)


@on_ranks(2)
def test_a_failed_save_is_one_error_on_every_rank_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    rank, path = dist.get_rank(), f"{tmp_path}/last.ckpt"

    def fails(plugin: MCoreCheckpointIO, given: dict[str, Any], error: type[Exception], about: str) -> None:
        with pytest.raises(error, match=about) as caught:
            save_and_wait(plugin, given, path)
        of_ranks = [""] * 2
        dist.all_gather_object(of_ranks, str(caught.value))
        assert of_ranks[0] == of_ranks[1]
        assert not plugin.has_saves_in_flight
        assert_loaded(plugin.load_shards(path, blank()))
        dist.barrier()
        assert os.listdir(tmp_path) == ["last.ckpt"]

    with groups():
        MCoreCheckpointIO().save_checkpoint(checkpoint(), path)
        for plugin in (MCoreCheckpointIO(), MCoreCheckpointIO(async_save=True)):
            with mock.patch.object(checkpoint_writer.ChecksummedFile, "write", _full if rank == 1 else _written):
                fails(plugin, checkpoint(2.0), OSError, "last.ckpt could not be saved: no space left on device")
            gap = checkpoint(2.0)
            if rank == 1:
                del gap[SHARDED_STATE]["weight"]
            fails(plugin, gap, ValueError, "complete tensors")
            broken = checkpoint(2.0)
            if rank == 1:
                broken[SHARDED_STATE]["weight"].data = None
            fails(plugin, broken, ValueError, "weight")
            unpicklable = checkpoint(2.0)
            unpicklable["callbacks"] = lambda: None
            fails(plugin, unpicklable, TypeError, "an object that cannot be saved")
            old = MCoreCheckpointIO(async_save=True)
            save_and_wait(old, checkpoint(), path)
            with mock.patch.object(checkpoint_writer.ChecksummedFile, "write", _full if rank == 1 else _written):
                old.save_checkpoint(checkpoint(3.0), f"{tmp_path}/next.ckpt")
                if rank == 0:
                    old.remove_checkpoint(path)
                with pytest.raises(OSError, match=r"next\.ckpt"):
                    old.drain()
            assert_loaded(old.load_shards(path, blank()))  # the new one failed, so the old one stays


_written = checkpoint_writer.ChecksummedFile.write


def _full(file: Any, content: Any, checksum: int | None = None) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)


class Malicious:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


@contextlib.contextmanager
def damaged(path: str, damage: Callable[[Path], object]) -> Iterator[None]:
    """Let the first rank damage a checkpoint, which is whole again afterwards."""
    sound = {name: Path(path, name).read_bytes() for name in os.listdir(path)}
    dist.barrier()
    if dist.get_rank() == 0:
        damage(Path(path))
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        for name, content in sound.items():
            Path(path, name).write_bytes(content)
    dist.barrier()


def replace_file(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    with manifest_of(path) as manifest:
        manifest["files"][name]["size"] = len(content)


@contextlib.contextmanager
def manifest_of(path: Path) -> Iterator[dict[str, Any]]:
    """Give what is then the manifest of a checkpoint."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    yield manifest
    (path / "checkpoint.json").write_text(json.dumps(manifest))


@on_ranks(2)
def test_nothing_that_lies_in_a_checkpoint_runs(tmp_path: Path) -> None:
    """Read checkpoints in which somebody has hidden something that runs when it is unpickled."""
    mark, path = f"{tmp_path}/it_ran", f"{tmp_path}/a.ckpt"
    plugin = MCoreCheckpointIO(verify="sizes")
    with groups():
        plugin.save_checkpoint(checkpoint(), path)
        bad = tmp_path / f"bad{dist.get_rank()}"
        torch.save(Malicious(mark), bad)
        for name, content, read in (
            ("lightning.pt", bad.read_bytes(), lambda: plugin.load_checkpoint(path)),
            ("lightning.pt", bad.read_bytes(), lambda: plugin.load_directory(path)),
            (".metadata", pickle.dumps(Malicious(mark)), lambda: plugin.load_shards(path, blank())),
        ):
            with damaged(path, partial(replace_file, name=name, content=content)), refuses(ValueError, "a.ckpt"):
                read()
            assert not os.path.exists(mark)
        dangerous = checkpoint()
        dangerous[SHARDED_STATE]["object"].data = Malicious(f"{mark}{dist.get_rank()}")
        dangerous[RANK_STATE]["random"] = Malicious(f"{mark}{dist.get_rank()}")
        plugin.save_checkpoint(dangerous, path)
        with pytest.raises(ValueError, match="could run code"):
            rank_state(plugin, path)
        with pytest.raises(ValueError, match="could run code"):
            plugin.load_shards(path, blank())
        assert not os.path.exists(f"{mark}{dist.get_rank()}")
        plugin.load_shards(path, blank(), weights_only=False)  # the mark can be made, so its absence says something
        assert os.path.exists(f"{mark}{dist.get_rank()}")


def a_list(path: Path) -> None:
    torch.save([], path / "lightning.pt")
    replace_file(path, "lightning.pt", (path / "lightning.pt").read_bytes())


def without_its_entry(path: Path) -> None:
    with manifest_of(path) as manifest:
        del manifest["files"]["lightning.pt"]
    (path / "lightning.pt").unlink()


def without_world_size(path: Path) -> None:
    with manifest_of(path) as manifest:
        del manifest["world_size"]


def of_another_place(path: Path) -> None:
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"random", b"rANdom"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.find(b"FB") + 70 if b"FB" in content else len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@on_ranks(2)
def test_damage_and_another_model_are_one_sentence_on_every_rank(tmp_path: Path) -> None:
    path, plugin, of_sizes = str(tmp_path / "a.ckpt"), MCoreCheckpointIO(), MCoreCheckpointIO(verify="sizes")
    with groups():
        plugin.save_checkpoint(checkpoint(), path)
        for name in ("__1_0.distcp", ".metadata", "lightning.pt"):
            for damage in (flip, cut, os.unlink):
                with (
                    damaged(path, lambda folder, name=name, damage=damage: damage(folder / name)),
                    pytest.raises(ValueError, match=r"a\.ckpt is damaged: ") as raised,
                ):
                    load_all(plugin, path)
                says(re.sub(r"\d+ of \d+ bytes", "fewer bytes", str(raised.value)), name)
        with damaged(path, of_another_place):
            with refuses(ValueError, "damaged: __1_0.distcp cannot be read at"):
                rank_state(plugin, path, 1)
            assert rank_state(plugin, path, 0)["rank"] == 0  # which reads another file
            assert rank_state(of_sizes, path, 1)["rank"] == 1
        for damage, about in (
            (a_list, "damaged: lightning.pt contains a list, not a dict"),
            (without_its_entry, "damaged: lightning.pt is missing"),
        ):
            for read in (of_sizes.load_directory, of_sizes.load_checkpoint):
                with damaged(path, damage), refuses(ValueError, about):
                    read(path)
        with damaged(path, without_world_size), refuses(ValueError, "checkpoint.json does not give its world_size"):
            rank_state(of_sizes, path)
        strange = blank()
        if dist.get_rank() == 0:
            strange["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(2))
        strange["bias"] = ShardedTensor.from_rank_offsets("bias", torch.zeros(9), replica_id=dist.get_rank())
        with refuses(ValueError, "it lacks new; shapes differ: bias has (5,) and should have (9,)"):
            plugin.load_shards(path, strange)
        with refuses(FileNotFoundError, "a.ckpt.none"):
            plugin.load_shards(f"{path}.none", blank())
        with refuses(ValueError, "checkpoint.json"):
            plugin.load_shards(os.path.dirname(path), blank())


def replace_tensor(folder: Path, row: bytes) -> None:
    """Flip a bit in the file that has these bytes."""
    [file] = [found for found in folder.glob("*.distcp") if row in found.read_bytes()]
    file.write_bytes(file.read_bytes().replace(row, row[:-1] + bytes([row[-1] ^ 1])))


@on_ranks(2)
def test_megatron_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    with groups():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        path = f"{tmp_path}/theirs"
        if rank == 0:
            os.mkdir(path)
        dist.barrier()
        with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
            dist_checkpointing.save(state(world_size, rank), path)
        dist.barrier()
        plugin = MCoreCheckpointIO()
        assert_loaded(plugin.load_shards(path, blank()))
        assert plugin.read_contents(path).shapes["moment"] == (ROWS, COLUMNS)
        if rank == 0:
            replace_tensor(Path(path), weight()[:1].numpy().tobytes())
        dist.barrier()
        with pytest.raises(ValueError, match=r"is damaged: .* cannot be read at weight: the checksum of its record"):
            plugin.load_shards(path, blank())
        MCoreCheckpointIO(verify="sizes").load_shards(path, blank())
        with pytest.raises(ValueError, match="Megatron-LM"):
            plugin.load_checkpoint(path)
        given = {**checkpoint(), CONTENT_METADATA: {"kind": "ours"}}
        plugin.save_checkpoint(given, f"{tmp_path}/ours.ckpt")
        common = torch.load(f"{tmp_path}/ours.ckpt/common.pt", weights_only=True)
        assert common == {"iteration": 7, "checkpoint_version": 3.0, "content_metadata": {"kind": "ours"}}
        assert dist_checkpointing.load_content_metadata(f"{tmp_path}/ours.ckpt") == {"kind": "ours"}
        stored = FileSystemReader(f"{tmp_path}/ours.ckpt").read_metadata().state_dict_metadata
        shapes = {name: tuple(t.size) for name, t in stored.items() if isinstance(t, TensorStorageMetadata)}
        assert shapes == plugin.read_contents(f"{tmp_path}/ours.ckpt").shapes


class SharedStore(LocalFileSystem):
    """A remote store that all ranks see: files in a folder, under another protocol."""

    protocol = "shared"
    root = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = path.removeprefix("shared://")
        return path if path.startswith(cls.root) else f"{cls.root}/{path}".rstrip("/")

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        shutil.copyfile(lpath, self._strip_protocol(rpath))

    def get_file(self, rpath: str, lpath: str, *_: Any, **__: Any) -> None:
        shutil.copyfile(self._strip_protocol(rpath), lpath)


@on_ranks(2)
def test_a_remote_store_is_written_and_read_by_every_rank(tmp_path: Path) -> None:
    SharedStore.root = str(tmp_path)
    fsspec.register_implementation("shared", SharedStore, clobber=True)
    with groups():
        for plugin in (MCoreCheckpointIO(), MCoreCheckpointIO(async_save=True)):
            for scale in (1.0, 2.0):
                plugin.save_checkpoint(checkpoint(scale), "shared://bucket/a.ckpt")
                plugin.drain()
                assert_loaded(plugin.load_shards("shared://bucket/a.ckpt", blank()), scale)
            assert plugin.load_checkpoint("shared://bucket/a.ckpt")["global_step"] == 7
            for rank in range(2):
                assert rank_state(plugin, "shared://bucket/a.ckpt", rank)["rank"] == rank
            dist.barrier()
            if dist.get_rank() == 0:
                plugin.remove_checkpoint("shared://bucket/a.ckpt")
            dist.barrier()
            assert not os.path.exists(f"{tmp_path}/bucket/a.ckpt")


def lose_a_rank(folder: str) -> float:
    with groups():
        plugin = MCoreCheckpointIO(async_save=True)
        plugin.save_checkpoint(checkpoint(), f"{folder}/old.ckpt")
        plugin.drain()
        plugin.save_checkpoint(checkpoint(), f"{folder}/new.ckpt")
        start = time.monotonic()
        if dist.get_rank() == 0:
            plugin.drain(timeout=1.0)
            assert not plugin.has_saves_in_flight
        return time.monotonic() - start


def test_a_rank_that_is_gone_does_not_hold_up_the_end(tmp_path: Path) -> None:
    waited, _ = run_ranks(2, lose_a_rank, str(tmp_path))
    assert waited < 10
    assert (tmp_path / "old.ckpt").exists()
    assert not (tmp_path / "new.ckpt").exists()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"async_save": 1}, TypeError),
        ({"async_save": True, "max_in_flight": 1.0}, TypeError),
        ({"async_save": True, "max_in_flight": True}, TypeError),
        ({"async_save": True, "max_in_flight": 0}, ValueError),
        ({"async_save": True, "max_in_flight": 2}, ValueError),
        ({"verify": "nothing"}, ValueError),
    ],
)
def test_a_wrong_option_is_refused_at_once(given: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, str([*given][-1])):
        MCoreCheckpointIO(**given)


_SCRIPT = """
import atexit
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore import MCoreCheckpointIO, MCoreStrategy

print("the script starts", flush=True)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


trainer = pl.Trainer(
    accelerator="cpu", devices=2, max_steps=4, logger=False, enable_progress_bar=False,
    strategy=MCoreStrategy(use_distributed_optimizer=True, checkpoint_io=MCoreCheckpointIO(async_save=True)),
    callbacks=ModelCheckpoint("saved", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True),
)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2))

from tests.distributed import test_checkpoint_io as helpers

atexit.register(torch.distributed.destroy_process_group)  # as Lightning does for NCCL
opened = helpers.groups()
opened.__enter__()
plugin = MCoreCheckpointIO(async_save=True)
plugin.save_checkpoint(helpers.checkpoint(), "at_exit.ckpt")
sys.exit()
"""


def run_script(script: Path) -> str:
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=script.parent,
        env=program_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the rank that Lightning starts is in the same group
    )
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def test_a_script_without_a_main_guard_saves_while_it_trains_and_at_its_exit(tmp_path: Path) -> None:
    """The save that is in flight at the exit is finished before the process group goes."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    output = run_script(tmp_path / "train.py")
    assert output.count("the script starts") == 2  # once on each rank, and in no helper process of a writer
    saved = tmp_path / "saved"
    assert sorted(os.listdir(saved)) == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    for path in saved.iterdir():
        assert checkpoint_files.verify(str(path))["world_size"] == 2
    assert checkpoint_files.verify(str(tmp_path / "at_exit.ckpt"))["global_step"] == 7


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@on_ranks(2)
def test_a_full_disk_is_one_error_and_the_old_checkpoint_is_intact(small_disk: Path) -> None:
    with groups():
        for plugin in (MCoreCheckpointIO(), MCoreCheckpointIO(async_save=True)):
            save_and_wait(plugin, checkpoint(), f"{small_disk}/old.ckpt")
            large = checkpoint()
            for index in range(3):
                large[SHARDED_STATE][f"large{index}"] = ShardedTensor.from_rank_offsets(
                    f"large{index}", torch.zeros(1 << 18), (0, dist.get_rank(), dist.get_world_size())
                )
            with pytest.raises(OSError, match=r"no space left .*; free some space there or keep fewer checkpoints$"):
                save_and_wait(plugin, large, f"{small_disk}/new.ckpt")
            assert_loaded(plugin.load_shards(f"{small_disk}/old.ckpt", blank()))
            dist.barrier()
            assert os.listdir(small_disk) == ["old.ckpt"]


def test_one_file_stands_under_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    path, plugin = tmp_path / "last.ckpt", MCoreCheckpointIO()
    plugin.save_checkpoint({"step": 1}, path)
    with pytest.raises(AttributeError):
        plugin.save_checkpoint({"step": 2, "bad": lambda: None}, path)
    assert plugin.load_checkpoint(path) == {"step": 1}
    with mock.patch.object(os, "rename", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):  # noqa: SIM117
        with pytest.raises(OSError, match="read-only file system; save to a writable disk"):
            plugin.save_checkpoint({"step": 3}, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert plugin.load_checkpoint(path) == {"step": 1}


@on_ranks(1)
def test_a_file_and_a_directory_replace_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    with groups():
        plugin = MCoreCheckpointIO()
        plugin.save_checkpoint(checkpoint(), path)
        for step in (1, 2):  # over a directory, over a file
            plugin.save_checkpoint({"step": step}, path)
            assert plugin.load_checkpoint(path) == {"step": step}
        plugin.save_checkpoint(checkpoint(), path)
        assert_loaded(plugin.load_shards(path, blank()))
    assert os.listdir(tmp_path) == ["last.ckpt"]
