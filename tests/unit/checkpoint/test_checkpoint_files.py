# SPDX-License-Identifier: Apache-2.0
import contextlib
import errno
import fcntl
import json
import os
import runpy
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_mcore.checkpoint import atomic, files
from lightning_mcore.checkpoint import remote as remote_files
from lightning_mcore.checkpoint.manifest import LIGHTNING_FILE, FileRecord
from lightning_mcore.data.preprocess.unfinished import UnfinishedDataset
from tests.support.sentences import refuses

SHARD = "__0_0.distcp"
CONTENT = bytes(range(256)) * 40


@pytest.fixture(params=["exchange", "two renames"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on a disk that can exchange two names, and on one that cannot."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_renameat2", lambda: None)
    return request.param


def fill(directory: str, step: int) -> dict[str, FileRecord]:
    """Write what ranks write; return the records of the shards."""
    Path(directory, SHARD).write_bytes(CONTENT + str(step).encode())
    Path(directory, ".metadata").write_bytes(b"metadata")
    Path(directory, "metadata.json").write_bytes(b"{}")
    Path(directory, LIGHTNING_FILE).write_bytes(b"state of step %d" % step)
    return {SHARD: files.record_file(os.path.join(directory, SHARD))}


def save(path: Path, step: int) -> None:
    records = fill(files.begin(str(path)), step)
    files.finish(str(path), {"global_step": step}, records)


def upload(local_dir: str, path: str) -> None:
    """Copy a whole local checkpoint to a store, as a save of one rank does."""
    manifest = files.read_manifest(local_dir)
    remote_files.begin_upload(path)
    remote_files.upload_files(local_dir, path)
    remote_files.finish_upload(
        local_dir, path, manifest, {n: FileRecord(**record) for n, record in manifest["files"].items()}
    )


def step_of(path: Path | str) -> int:
    """Return the step of a checkpoint whose every file is as it was saved, and belongs to that step."""
    step = int(files.verify(str(path))["global_step"])
    if "://" not in str(path):
        assert Path(path, LIGHTNING_FILE).read_bytes() == b"state of step %d" % step
    return step


def failing(number: int) -> Callable[..., None]:
    """Return what stands in for a function of os that fails, as each does on a full disk."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


KINDS = ["nothing", "checkpoint", "link", "file"]


def put(path: Path, kind: str) -> None:
    """Put what may stand under a name before a save."""
    if kind == "checkpoint":
        save(path, 1)
    elif kind == "link":
        path.symlink_to("other.ckpt")
    elif kind == "file":
        path.write_bytes(b"one file")


# What is written


def test_a_checkpoint_appears_when_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    directory = files.begin(str(path))
    assert directory == str(tmp_path / ".unfinished" / "a.ckpt")
    records = fill(directory, 3)
    assert not path.exists()
    files.finish(str(path), {"global_step": 3}, records)
    assert step_of(path) == 3
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_the_manifest_lists_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    directory = files.begin(str(tmp_path / "a.ckpt"))
    records = fill(directory, 3)
    Path(directory, "more").mkdir()
    Path(directory, "more", "rest.pt").write_bytes(b"123456789")
    files.finish(str(tmp_path / "a.ckpt"), {"global_step": 3}, records)
    manifest = json.loads((tmp_path / "a.ckpt" / "checkpoint.json").read_text())
    assert manifest["format"] == "lightning_mcore"
    assert manifest["format_version"] == 2
    content = CONTENT + b"3"
    assert manifest["files"] == {
        ".metadata": {"size": 8, "crc32": f"{zlib.crc32(b'metadata'):08x}"},
        SHARD: {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"},
        "lightning.pt": {"size": 15, "crc32": f"{zlib.crc32(b'state of step 3'):08x}"},
        "metadata.json": {"size": 2, "crc32": f"{zlib.crc32(b'{}'):08x}"},
        "more/rest.pt": {"size": 9, "crc32": "cbf43926"},  # the check value in every description of CRC-32
    }


def test_every_file_and_directory_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(source: str, target: str) -> None:
        events.append("rename")
        rename(source, target)

    directory = files.begin(str(tmp_path / "a.ckpt"))
    records = fill(directory, 1)
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    files.finish(str(tmp_path / "a.ckpt"), {}, records)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert sorted(before[:-2]) == [".metadata", "lightning.pt", "metadata.json"]  # the shard was flushed by its writer
    assert before[-2:] == ["checkpoint.json", "a.ckpt"]
    assert after == [tmp_path.name]


def test_a_file_that_another_rank_wrote_elsewhere_is_missed(tmp_path: Path) -> None:
    records = fill(files.begin(str(tmp_path / "a.ckpt")), 1)
    records["__1_0.distcp"] = FileRecord(10, "00000000")
    with refuses(OSError, "10 bytes, but does not exist"):
        files.finish(str(tmp_path / "a.ckpt"), {}, records)
    assert not (tmp_path / "a.ckpt").exists()


# What stood under the name


def test_a_checkpoint_is_replaced(tmp_path: Path, disk: str) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    Path(path, "of_the_old_one").touch()
    directory = files.begin(str(path))
    assert step_of(path) == 1
    files.finish(str(path), {"global_step": 2}, fill(directory, 2))
    assert step_of(path) == 2
    assert not Path(path, "of_the_old_one").exists()
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path, disk: str) -> None:
    save(tmp_path / "a.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "dangling.ckpt").symlink_to("nothing")
    save(tmp_path / "last.ckpt", 2)
    save(tmp_path / "dangling.ckpt", 3)
    assert [step_of(tmp_path / name) for name in ("a.ckpt", "last.ckpt", "dangling.ckpt")] == [1, 2, 3]
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert not (tmp_path / "dangling.ckpt").is_symlink()


def test_a_checkpoint_in_one_file_is_replaced(tmp_path: Path, disk: str) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"one file")
    save(tmp_path / "last.ckpt", 2)
    assert step_of(tmp_path / "last.ckpt") == 2


def test_an_interrupted_or_empty_directory_is_replaced(tmp_path: Path, disk: str) -> None:
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "shards.ckpt").mkdir()
    fill(str(tmp_path / "shards.ckpt"), 1)
    for name in ("empty.ckpt", "shards.ckpt"):
        save(tmp_path / name, 2)
        assert step_of(tmp_path / name) == 2


def test_a_directory_of_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    with refuses(ValueError, "thesis is a directory of other files, not"):
        files.begin(str(tmp_path / "thesis"))
    assert os.listdir(tmp_path / "thesis") == ["chapter.tex"]


def test_a_reader_that_puts_the_old_one_back_does_not_stop_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    records = fill(files.begin(str(path)), 2)
    rename, renames = os.rename, []

    def slow(source: str, target: str) -> None:
        renames.append(source)
        if len(renames) == 2:  # between the two renames of the writer
            monkeypatch.setattr(os, "rename", rename)
            assert step_of(path) == 1
        rename(source, target)

    monkeypatch.setattr(atomic, "_renameat2", lambda: None)
    monkeypatch.setattr(os, "rename", slow)
    files.finish(str(path), {"global_step": 2}, records)
    assert step_of(path) == 2
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("name", ["a.ckpt/", "./x/../a.ckpt", "file://{}/a.ckpt"])
def test_other_spellings_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    path = name.format(tmp_path)
    files.finish(path, {"global_step": 1}, fill(files.begin(path), 1))
    assert step_of(tmp_path / "a.ckpt") == files.read_manifest(path)["global_step"] == 1
    files.remove(path)
    assert os.listdir(tmp_path) == ["x"]


# Failures and leftovers


def test_abandon_leaves_the_old_checkpoint_alone(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", 1)
    fill(files.begin(str(tmp_path / "last.ckpt")), 2)
    files.abandon(str(tmp_path / "last.ckpt"))
    assert step_of(tmp_path / "last.ckpt") == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def end_of_process() -> None:
    """Let go of what ends with a process: its locks, and what it knows of its saves."""
    for descriptor in atomic._marks.values():
        os.close(descriptor)
    atomic._marks.clear()


def test_leftovers_go_with_the_next_save_and_saves_in_flight_stay(tmp_path: Path) -> None:
    fill(files.begin(str(tmp_path / "crashed.ckpt")), 1)
    Path(tmp_path, ".unfinished", "crashed.ckpt.removed").mkdir()
    end_of_process()
    fill(files.begin(str(tmp_path / "in_flight.ckpt")), 1)
    save(tmp_path / "a.ckpt", 2)
    assert sorted(os.listdir(tmp_path / ".unfinished")) == ["in_flight.ckpt", "in_flight.ckpt.mcore-lock"]
    files.finish(str(tmp_path / "in_flight.ckpt"), {"global_step": 1}, {})
    assert step_of(tmp_path / "in_flight.ckpt") == 1
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "in_flight.ckpt"]


@pytest.mark.parametrize("other", ["link", "real", "up/../real"])
def test_a_save_in_flight_is_known_by_every_name_of_its_folder(tmp_path: Path, other: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "up").mkdir()
    (tmp_path / "link").symlink_to("real")
    fill(files.begin(str(tmp_path / "link" / "a.ckpt")), 1)
    save(tmp_path / other / "b.ckpt", 2)
    files.remove(str(tmp_path / other / "b.ckpt"))
    with refuses(RuntimeError, "a.ckpt is still being written; wait for"):
        files.begin(str(tmp_path / other / "a.ckpt"))
    files.finish(str(tmp_path / "link" / "a.ckpt"), {"global_step": 1}, {})
    assert step_of(tmp_path / "real" / "a.ckpt") == 1
    assert os.listdir(tmp_path / "real") == ["a.ckpt"]


def test_the_lock_of_a_save_in_flight_lasts_until_its_end(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(".")
    files.begin(str(tmp_path / "a.ckpt"))
    save(tmp_path / "link" / "b.ckpt", 2)
    with refuses(RuntimeError, "is still being written"):
        files.begin(str(tmp_path / "link" / "a.ckpt"))
    script = "import runpy, sys; runpy.run_path(sys.argv[1])['begin'](sys.argv[2])"
    command = [sys.executable, "-c", script, str(atomic.__file__), str(tmp_path / "a.ckpt")]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert f"a.ckpt is being written by process {os.getpid()} on " in found
    files.abandon(str(tmp_path / "a.ckpt"))


def test_a_folder_of_unfinished_checkpoints_that_is_a_link_is_refused(tmp_path: Path) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    (mine / "a.ckpt.replaced").mkdir(parents=True)
    (mine / "thesis.tex").touch()
    run.mkdir()
    save(run / "old.ckpt", 1)
    (run / ".unfinished").symlink_to(mine)
    for action in (files.begin, files.remove):
        with refuses(ValueError, ".unfinished is a link to a folder"):
            action(str(run / "old.ckpt"))
    assert not files.recover(str(run / "a.ckpt"))
    assert step_of(run / "old.ckpt") == 1
    assert sorted(os.listdir(mine)) == ["a.ckpt.replaced", "thesis.tex"]


def test_what_others_put_into_the_folder_of_unfinished_checkpoints_stays(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run" / ".unfinished", tmp_path / "outside"
    (folder / "thesis").mkdir(parents=True)
    (folder / "notes.replaced").touch()
    outside.mkdir()
    (outside / "data").touch()
    (folder / "way").symlink_to(outside)
    (folder / "marked.mcore-lock").symlink_to(outside / "data")
    for name in ("", ".", ".."):
        (folder / f"{name}.mcore-lock").touch()
    save(tmp_path / "run" / "a.ckpt", 1)
    assert step_of(tmp_path / "run" / "a.ckpt") == 1
    with refuses(ValueError, "thesis is in the way and was not written"):
        files.begin(str(tmp_path / "run" / "thesis"))
    assert not files.recover(str(tmp_path / "run" / "notes"))
    assert {*os.listdir(folder)} >= {"marked.mcore-lock", "notes.replaced", "thesis", "way"}
    assert os.listdir(outside) == ["data"]


def test_a_save_whose_folder_somebody_has_deleted_leaves_that_of_another_process_alone(tmp_path: Path) -> None:
    files.begin(str(tmp_path / "run" / "a.ckpt"))
    atomic.delete(str(tmp_path / "run"))
    (tmp_path / "run" / ".unfinished" / "a.ckpt").mkdir(parents=True)
    (tmp_path / "run" / ".unfinished" / "a.ckpt.mcore-lock").touch()  # of a process on another machine
    files.abandon(str(tmp_path / "run" / "a.ckpt"))
    assert sorted(os.listdir(tmp_path / "run" / ".unfinished")) == ["a.ckpt", "a.ckpt.mcore-lock"]
    save(tmp_path / "run" / "a.ckpt", 2)  # on this one, nobody holds the mark
    assert step_of(tmp_path / "run" / "a.ckpt") == 2


@pytest.mark.parametrize("name", ["x.replaced", "x.removed", "x.mcore-lock", ".unfinished"])
def test_names_that_leftovers_have_are_refused(tmp_path: Path, name: str) -> None:
    with refuses(ValueError, "which is reserved for unfinished"):
        files.begin(str(tmp_path / name))


def test_a_save_of_another_living_process_is_left_alone(tmp_path: Path) -> None:
    script = "import runpy, sys; print(runpy.run_path(sys.argv[1])['begin'](sys.argv[2]), flush=True); input()"
    command = [sys.executable, "-c", script, str(atomic.__file__), str(tmp_path / "theirs.ckpt")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            directory = Path(process.stdout.readline().strip())
            save(tmp_path / "ours.ckpt", 1)
            assert directory.is_dir()
            with pytest.raises(RuntimeError, match=rf"theirs\.ckpt is being written by process {process.pid} on "):
                files.begin(str(tmp_path / "theirs.ckpt"))
        finally:
            process.kill()
    save(tmp_path / "ours.ckpt", 2)
    assert not directory.exists()


def test_the_atomic_part_needs_nothing_but_the_standard_library() -> None:
    code = f"import runpy, sys; runpy.run_path({atomic.__file__!r}); print('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert "begin" in runpy.run_path(str(atomic.__file__))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_is_named_and_the_old_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    records = fill(files.begin(str(path)), 2)

    monkeypatch.setattr(os, "fsync", failing(number))
    with refuses(OSError, "last.ckpt could not be saved:") as caught:
        files.finish(str(path), {}, records)
    assert caught.value.errno == number
    monkeypatch.undo()
    files.abandon(str(path))
    assert step_of(path) == 1


def test_a_disk_that_refuses_the_first_step_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    mkdir = os.mkdir

    def refuse(name: str, *mode: int) -> None:
        if name == str(tmp_path / ".unfinished" / "last.ckpt"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(name, *mode)

    monkeypatch.setattr(os, "mkdir", refuse)
    with refuses(OSError, "last.ckpt could not be saved: no space"):
        files.begin(str(path))
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert step_of(path) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_what_was_moved_away_comes_back_when_the_new_one_cannot_be_moved_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    records = fill(files.begin(str(path)), 2)
    rename = os.rename

    def refuse(source: str, target: str) -> None:
        if source == str(tmp_path / ".unfinished" / "last.ckpt"):
            raise OSError(number, os.strerror(number))
        rename(source, target)

    monkeypatch.setattr(atomic, "_renameat2", lambda: None)
    monkeypatch.setattr(os, "rename", refuse)
    with refuses(OSError, "last.ckpt could not be saved"):
        files.finish(str(path), {}, records)
    assert (path / LIGHTNING_FILE).read_bytes() == b"state of step 1"


def test_a_new_save_begins_with_putting_back_what_a_crash_left_moved_away(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", 1)
    for name in ("last.ckpt", "other.ckpt"):  # the same name, and another one in the folder
        (tmp_path / ".unfinished").mkdir()
        (tmp_path / ".unfinished" / "last.ckpt.mcore-lock").touch()
        (tmp_path / "last.ckpt").rename(tmp_path / ".unfinished" / "last.ckpt.replaced")
        atomic.begin(str(tmp_path / name))
        assert (tmp_path / "last.ckpt" / LIGHTNING_FILE).read_bytes() == b"state of step 1"
        files.abandon(str(tmp_path / name))


class Interrupting:
    """Raises one error around one of the operations on the disk, before it or after it, and lets all others pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: int, error: BaseException, comes_after: bool) -> None:
        self.left, self.error, self.comes_after = passes, error, comes_after
        for name in ("rename", "symlink", "unlink", "rmdir", "mkdir", "fsync", "open", "ftruncate", "write", "listdir"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.left -= 1
            if self.left == -1 and not self.comes_after:
                raise self.error
            result = function(*arguments, **keywords)
            if self.left == -1:
                raise self.error
            return result

        return call


@pytest.mark.parametrize("error", ["Ctrl-C before", "Ctrl-C after", "no permission"])
@pytest.mark.parametrize("moved_aside", [False, True])
@pytest.mark.parametrize("action", ["begin", "save", "link", "remove"])
def test_after_an_interrupted_call_the_process_can_write_the_name_again(
    tmp_path: Path, disk: str, action: str, moved_aside: bool, error: str
) -> None:
    path, target = tmp_path / "run" / "last.ckpt", tmp_path / "run" / "target.ckpt"
    raised = PermissionError(errno.EACCES, "no permission") if error == "no permission" else KeyboardInterrupt()
    calls: dict[str, tuple[Callable[[], object], list[int | None]]] = {
        "begin": (lambda: files.abandon(str(path)) if files.begin(str(path)) else None, [1]),
        "save": (lambda: save(path, 2), [1, 2]),
        "link": (lambda: files.link(str(path), str(target)), [1, 7]),
        "remove": (lambda: files.remove(str(path)), [1, None]),
    }
    call, allowed = calls[action]
    passes, raises = 0, True
    while raises:
        clean(path.parent)
        save(target, 7)
        save(path, 1)
        if moved_aside:  # by a crash
            (path.parent / ".unfinished").mkdir()
            (path.parent / ".unfinished" / "last.ckpt.mcore-lock").touch()
            path.rename(path.parent / ".unfinished" / "last.ckpt.replaced")
        with pytest.MonkeyPatch.context() as patch:
            interrupting = Interrupting(patch, passes, raised, error == "Ctrl-C after")
            with contextlib.suppress(KeyboardInterrupt, OSError):
                call()
            raises = interrupting.left < 0
            passes += 1
        if action == "save":
            files.abandon(str(path))  # as every writer does after an error
        files.begin(str(path))
        files.abandon(str(path))
        assert (step_of(path) if path.exists() else None) in allowed
        assert sorted({*os.listdir(path.parent), "last.ckpt"}) == ["last.ckpt", "target.ckpt"]
    assert passes > 4


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_only_a_disk_without_locks_is_written_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "a.ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", failing(number))
        if number == errno.ENOLCK:
            save(path, 1)
        else:
            with pytest.raises(OSError, match=r"a\.ckpt could not be saved: input/output error; check the disk"):
                files.begin(str(path))
            with pytest.raises(OSError, match="Input/output error"):
                UnfinishedDataset(str(tmp_path / "text"), {"inputs": []}, overwrite=False)
    save(path, 2)
    assert step_of(path) == 2


def test_a_full_disk_does_not_stop_a_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.ckpt", 1)
    monkeypatch.setattr(os, "mkdir", failing(errno.ENOSPC))
    files.remove(str(tmp_path / "a.ckpt"))
    assert os.listdir(tmp_path) == []


# Crashes


class Crash(BaseException):
    """The process dies: nothing that it does afterwards reaches the disk."""


class Dying:
    """Lets a number of operations on the disk pass, and none after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
        self.left = passes
        for name in ("rename", "replace", "symlink", "unlink", "rmdir", "mkdir", "fsync", "write"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))
        if (exchange := atomic._renameat2()) is not None:
            counted = self.counted(exchange)
            monkeypatch.setattr(atomic, "_renameat2", lambda: counted)

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.left <= 0:
                raise Crash
            self.left -= 1
            return function(*arguments, **keywords)

        return call


def crashes(action: Callable[[], None], prepare: Callable[[], None], disk: str, least: int) -> Iterator[bool]:
    """Let ``action`` die before its first operation, its second and so on; yield whether it died, at last False.

    Args:
        action: What dies.
        prepare: Called before each attempt.
        disk: As the fixture says.
        least: Operations that ``action`` needs at least.
    """
    died, passes = True, 0
    while died:
        prepare()
        with pytest.MonkeyPatch.context() as patch:
            if disk == "two renames":
                patch.setattr(atomic, "_renameat2", lambda: None)
            Dying(patch, passes)
            try:
                action()
            except Crash:
                passes += 1
            else:
                died = False
        end_of_process()
        yield died
    assert passes >= least


def clean(folder: Path) -> None:
    atomic.delete(str(folder))
    folder.mkdir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_in_a_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, disk: str, kind: str) -> None:
    folder = tmp_path / "run"
    path, other = folder / "last.ckpt", folder / "other.ckpt"

    def prepare() -> None:
        clean(folder)
        save(other, 7)
        put(path, kind)

    outcomes = set()
    for died in crashes(lambda: save(path, 2), prepare, disk, least=8):
        files.recover(str(path))
        found: Any = "file" if path.is_file() else step_of(path) if os.path.lexists(path) else None
        assert found in {"nothing": {None, 2}, "checkpoint": {1, 2}, "link": {7, 2}, "file": {"file", 2}}[kind]
        assert path.is_symlink() == (kind == "link" and found == 7)
        assert found == 2 or died
        outcomes.add(found)
        visible = sorted(name for name in os.listdir(folder) if name != ".unfinished")
        assert visible == ["last.ckpt", "other.ckpt"][found is None :]
        assert step_of(other) == 7
        files.begin(str(folder / "next.ckpt"))
        assert sorted(os.listdir(folder / ".unfinished")) == ["next.ckpt", "next.ckpt.mcore-lock"]
        files.abandon(str(folder / "next.ckpt"))
        assert sorted(os.listdir(folder)) == visible
    assert len(outcomes) == 2  # it died both before and after the moment that decides


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_in_a_save_of_one_file_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, disk: str, kind: str
) -> None:
    path = tmp_path / "run" / "last.ckpt"

    def prepare() -> None:
        clean(path.parent)
        put(path, kind)

    def save_file() -> None:
        Path(atomic.begin(str(path)), "last.ckpt").write_bytes(b"new")
        atomic.publish_file(str(path), "last.ckpt")

    outcomes = set()
    for died in crashes(save_file, prepare, disk, least=4):
        files.recover(str(path))
        is_new = path.is_file() and path.read_bytes() == b"new"
        old = {"nothing": not os.path.lexists(path), "link": path.is_symlink(), "file": path.is_file()}
        assert is_new or (old[kind] if kind in old else step_of(path) == 1)
        assert is_new or died
        outcomes.add(is_new)
        save(path.parent / "next.ckpt", 8)
        assert sorted(os.listdir(path.parent)) == ["last.ckpt", "next.ckpt"][not os.path.lexists(path) :]
    assert len(outcomes) == 2


def test_a_crash_in_a_save_does_not_stop_the_next_one_of_that_name(tmp_path: Path, disk: str) -> None:
    path = tmp_path / "run" / "last.ckpt"

    def prepare() -> None:
        clean(path.parent)
        save(path, 1)

    for _ in crashes(lambda: save(path, 2), prepare, disk, least=8):
        save(path, 3)
        assert step_of(path) == 3
        assert os.listdir(path.parent) == ["last.ckpt"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_while_a_link_is_set_leaves_what_stood_there_or_the_link(tmp_path: Path, disk: str, kind: str) -> None:
    folder = tmp_path / "run"
    path, old, new = folder / "last.ckpt", folder / "other.ckpt", folder / "below" / "new.ckpt"

    def prepare() -> None:
        clean(folder)
        save(old, 7)
        save(new, 8)
        put(path, kind)

    outcomes = []
    for _ in crashes(lambda: files.link(str(path), str(new)), prepare, disk, least=5):
        files.recover(str(path))
        found: Any = "file" if path.is_file() else step_of(path) if os.path.lexists(path) else None
        outcomes.append(found)
        assert (step_of(old), step_of(new)) == (7, 8)
        save(folder / "next.ckpt", 9)
        assert sorted(os.listdir(folder)) == ["below", *["last.ckpt"] * (found is not None), "next.ckpt", "other.ckpt"]
    before = {"nothing": None, "checkpoint": 1, "link": 7, "file": "file"}[kind]
    changed = outcomes.index(8)
    assert outcomes == [before] * changed + [8] * (len(outcomes) - changed)  # at one moment
    assert changed > 0
    assert os.readlink(path) == "below/new.ckpt"


def test_a_link_through_linked_folders_leads_where_it_should(tmp_path: Path) -> None:
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to("disk/runs")
    (tmp_path / "disk" / "runs" / "here").symlink_to("..")
    save(tmp_path / "a.ckpt", 1)
    save(tmp_path / "runs" / "b.ckpt", 2)
    for name, target, step in (
        ("runs/last", "a.ckpt", 1),
        ("runs/here/last", "runs/b.ckpt", 2),
        ("last", "runs/b.ckpt", 2),
    ):
        files.link(str(tmp_path / name), str(tmp_path / target))
        assert step_of(tmp_path / name) == step


def test_the_newest_checkpoint_of_a_folder_is_whole(tmp_path: Path) -> None:
    assert files.newest_in(str(tmp_path)) is None
    for step, name in enumerate(("a.ckpt", "b.ckpt", "c.ckpt")):
        save(tmp_path / name, step)
        os.utime(tmp_path / name, (step, step))
    truncate(tmp_path / "c.ckpt" / SHARD)
    (tmp_path / "d.ckpt").write_bytes(b"PK")
    (tmp_path / "e.ckpt").symlink_to("a.ckpt")
    (tmp_path / "f").mkdir()
    assert files.newest_in(str(tmp_path)) == str(tmp_path / "b.ckpt")
    with zipfile.ZipFile(tmp_path / "file.ckpt", "w") as archive:
        archive.writestr("data.pkl", b"")
    assert files.newest_in(str(tmp_path)) == str(tmp_path / "file.ckpt")


@pytest.mark.parametrize("kind", ["checkpoint", "link"])
def test_a_crash_in_a_removal_leaves_all_or_nothing(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    path, other = folder / "a.ckpt", folder / "other.ckpt"

    def prepare() -> None:
        clean(folder)
        save(other, 7)
        put(path, kind)

    found = []
    for _ in crashes(lambda: files.remove(str(path)), prepare, "exchange", least=2):
        found.append(os.path.lexists(path))
        if found[-1]:
            assert step_of(path) == (7 if kind == "link" else 1)
        assert step_of(other) == 7
        save(folder / "next.ckpt", 8)
        assert sorted(os.listdir(folder)) == ["a.ckpt", "next.ckpt", "other.ckpt"][not found[-1] :]
    assert found[0]
    assert found == sorted(found, reverse=True)  # first it is there, then it is not
    assert not found[-1]


def test_a_crash_in_a_removal_on_a_full_disk_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.ckpt"

    def prepare() -> None:
        clean(path.parent)
        save(path, 1)

    def remove() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "mkdir", failing(errno.ENOSPC))
            files.remove(str(path))

    whole = []
    for _ in crashes(remove, prepare, "exchange", least=5):
        whole.append(files.is_checkpoint_directory(str(path)))
        if whole[-1]:
            assert step_of(path) == 1
        elif path.exists() and (path / ".metadata").exists():
            assert sorted(os.listdir(path)) == [".metadata", SHARD, "lightning.pt", "metadata.json"]
    assert whole[0]
    assert whole == sorted(whole, reverse=True)
    assert not path.exists()


def test_what_is_removed_does_not_come_back(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    (tmp_path / ".unfinished" / "a.ckpt.replaced").mkdir(parents=True)  # of a crash after the second rename
    (tmp_path / ".unfinished" / "a.ckpt.mcore-lock").touch()
    files.remove(str(tmp_path / "a.ckpt"))
    assert not files.recover(str(tmp_path / "a.ckpt"))
    assert os.listdir(tmp_path) == []


def test_removal_of_nothing_is_nothing(tmp_path: Path) -> None:
    files.remove(str(tmp_path / "nothing.ckpt"))
    files.remove(str(tmp_path / "no" / "folder.ckpt"))
    assert os.listdir(tmp_path) == []


def test_removal_of_a_link_leaves_its_target(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    files.remove(str(tmp_path / "last.ckpt"))
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert step_of(tmp_path / "a.ckpt") == 1


def test_only_checkpoints_are_taken_for_what_may_be_deleted(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    (tmp_path / "link").symlink_to("nothing")
    torch.save({}, tmp_path / "one_file.ckpt")
    torch.save({}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    (tmp_path / "interrupted.ckpt").mkdir()
    (tmp_path / "interrupted.ckpt" / "lightning.pt").touch()
    with zipfile.ZipFile(tmp_path / "report.docx", "w") as file:
        file.writestr("word/document.xml", "")
    (tmp_path / "text.ckpt").write_text("PK is how it begins")
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "of_megatron").mkdir()
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (tmp_path / "of_megatron" / name).touch()
    found = {name for name in os.listdir(tmp_path) if files.is_checkpoint(str(tmp_path / name))}
    assert found == {"a.ckpt", "link", "one_file.ckpt", "old.ckpt", "interrupted.ckpt"}
    assert not files.is_checkpoint(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("path", "folder", "is_in"),
    [
        ("{0}/run/a.ckpt", "{0}/run", True),
        ("{0}/run/b/a.ckpt", "{0}/run/", True),
        ("{0}/link/a.ckpt", "{0}/run", True),
        ("file://{0}/run/a.ckpt", "{0}/link", True),
        ("{0}/run/away", "{0}/run", True),  # the link itself
        ("{0}/run/away/a.ckpt", "{0}/run", False),
        ("{0}/run/../a.ckpt", "{0}/run", False),
        ("{0}/runs/a.ckpt", "{0}/run", False),
        ("{0}/run", "{0}/run", False),
        ("s3://bucket/run/a.ckpt", "s3://bucket/run", True),
        ("s3://bucket/run/../a.ckpt", "s3://bucket/run", False),
        ("s3://bucket/runs/a.ckpt", "s3://bucket/run", False),
        ("s3://bucket/run/a.ckpt", "{0}/run", False),
    ],
)
def test_what_lies_in_a_folder(tmp_path: Path, path: str, folder: str, is_in: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "run" / "away").symlink_to("..")
    assert files.lies_in(path.format(tmp_path), folder.format(tmp_path)) == is_in


# What is read


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [SHARD, ".metadata", "lightning.pt"])
@pytest.mark.parametrize(
    ("damage", "seen_by_size"),
    [
        (truncate, True),
        (Path.unlink, True),
        (flip, False),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None], seen_by_size: bool) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    damage(path / name)
    with refuses(ValueError, "a.ckpt is damaged: "):
        files.verify(str(path))
    if seen_by_size:
        with refuses(ValueError, "a.ckpt is damaged: "):
            files.check_sizes(str(path))
    else:
        files.check_sizes(str(path))


def test_more_files_are_no_damage(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    (tmp_path / "a.ckpt" / "notes.txt").touch()
    assert files.verify(str(tmp_path / "a.ckpt"))["global_step"] == 1


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    calls: list[tuple[int, int]] = []
    files.verify(str(tmp_path / "a.ckpt"), lambda done, total: calls.append((done, total)))
    size = len(CONTENT) + 1 + len(b"metadata") + len(b"{}") + len(b"state of step 1")
    assert calls == sorted(calls)
    assert calls[-1] == (size, size)


def test_a_checkpoint_that_is_replaced_while_it_is_checked_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_READERS", 1)
    save(tmp_path / "last.ckpt", 1)
    done = []

    def replace(*_: int) -> None:
        if not done:
            done.append(save(tmp_path / "last.ckpt", 2))

    assert files.verify(str(tmp_path / "last.ckpt"), replace)["global_step"] == 2


def test_after_a_fault_the_other_files_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK", 10)
    save(tmp_path / "a.ckpt", 1)
    flip(tmp_path / "a.ckpt" / "metadata.json")
    calls: list[int] = []

    def slowly(done: int, total: int) -> None:
        calls.append(done)
        time.sleep(0.001)

    with refuses(ValueError, "the checksum of metadata.json"):
        files.verify(str(tmp_path / "a.ckpt"), slowly)
    assert len(calls) < len(CONTENT) / 10 / 2


def rewrite(path: Path, **entries: Any) -> None:
    manifest = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**manifest, **entries}))


@pytest.mark.parametrize(
    "entries",
    [
        {"format_version": 3, "files": "another kind", "versions": {"lightning_mcore": "9.1"}},
        {"format": "other"},
        {"format_version": None},
        {"files": {"../../secret": {"size": 1, "crc32": "00000000"}}},
        {"files": {"/secret": {"size": 1, "crc32": "00000000"}}},
        {"files": {"a": 3}},
        {"model": "other"},
        {"contents": [1]},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, entries: dict[str, Any]) -> None:
    save(tmp_path / "a.ckpt", 1)
    rewrite(tmp_path / "a.ckpt", **entries)
    with refuses(ValueError):
        files.read_manifest(str(tmp_path / "a.ckpt"))


@pytest.mark.parametrize("text", [b"", b'{"format": "lightning_mc', b"\xff\xfe\x00"])
def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    save(tmp_path / "a.ckpt", 1)
    (tmp_path / "a.ckpt" / "checkpoint.json").write_bytes(text)
    with refuses(ValueError, "a.ckpt is damaged: checkpoint.json is not"):
        files.read_manifest(str(tmp_path / "a.ckpt"))


def test_what_is_no_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    (tmp_path / "file.ckpt").write_bytes(b"one file")
    for name, contents in {
        "empty": [],
        "shards": [".metadata", SHARD],
        "uploading": [SHARD, "metadata.json", ".metadata", "lightning.pt"],
        "megatron": ["metadata.json", ".metadata", "common.pt", SHARD],
        "runs": ["iter_0000100"],
    }.items():
        (tmp_path / name).mkdir()
        for file in contents:
            (tmp_path / name / file).touch()
    unfinished = files.begin(str(tmp_path / "b.ckpt"))
    for name in ["nothing", "file.ckpt", "empty", "", "runs", "shards", "uploading", "megatron", unfinished]:
        assert not files.is_checkpoint_directory(str(tmp_path / name))
        assert files.is_megatron_checkpoint(str(tmp_path / name)) == (name == "megatron")
        with refuses(FileNotFoundError if name == "nothing" else ValueError):
            files.read_manifest(str(tmp_path / name))
    assert files.is_checkpoint_directory(str(tmp_path / "a.ckpt"))
    assert not files.is_megatron_checkpoint(str(tmp_path / "a.ckpt"))


# Remote stores


class DyingStore(MemoryFileSystem):
    """A store that lets a number of changes pass, and none after them; it has its own objects."""

    protocol = "dying"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the class that it extends has it
    pseudo_dirs = [""]  # noqa: RUF012
    left = 1000

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("dying://")))

    @classmethod
    def spend(cls) -> None:
        if cls.left <= 0:
            raise Crash
        cls.left -= 1

    def put_file(self, *arguments: Any, **keywords: Any) -> None:
        self.spend()
        super().put_file(*arguments, **keywords)

    def pipe_file(self, *arguments: Any, **keywords: Any) -> None:
        self.spend()
        super().pipe_file(*arguments, **keywords)

    def _rm(self, path: str) -> None:
        self.spend()
        super()._rm(path)

    rm_file = _rm


@pytest.fixture
def store() -> Iterator[str]:
    fsspec.register_implementation("dying", DyingStore, clobber=True)
    DyingStore.store.clear()
    DyingStore.pseudo_dirs[:] = [""]
    DyingStore.left = 1000
    yield "dying://bucket/run"
    DyingStore.store.clear()


def test_only_local_paths_are_written_directly() -> None:
    assert [files.writes_directly(path) for path in ("a/b.ckpt", "/a/b.ckpt", "file:///a/b.ckpt")] == [True] * 3
    assert [files.writes_directly(path) for path in ("s3://a/b.ckpt", "memory://b", "gs://b")] == [False] * 3


def test_a_checkpoint_survives_the_way_to_a_store_and_back(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 4)
    remote = f"memory://{tmp_path.name}/a.ckpt"
    upload(str(tmp_path / "a.ckpt"), remote)
    assert step_of(remote) == 4
    assert files.is_checkpoint_directory(remote)
    assert remote_files.download(remote, str(tmp_path / "copy")) == str(tmp_path / "copy")
    assert step_of(tmp_path / "copy") == 4
    remote_files.download(remote, str(tmp_path / "part"), ["lightning.pt"])
    assert os.listdir(tmp_path / "part") == ["lightning.pt"]
    files.remove(remote)
    with refuses(FileNotFoundError, "a.ckpt does not exist; give the path of a"):
        files.read_manifest(remote)
    with refuses(FileNotFoundError, "a.ckpt does not exist; give the path of a"):
        remote_files.download(remote, str(tmp_path / "none"))
    files.remove(remote)


def test_a_link_to_itself_by_another_path_keeps_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    save(tmp_path / "run" / "a.ckpt", 3)
    files.link(str(tmp_path / "latest" / "a.ckpt"), str(tmp_path / "run" / "a.ckpt"))
    assert step_of(tmp_path / "run" / "a.ckpt") == 3


def test_each_rank_uploads_its_own_files(tmp_path: Path) -> None:
    remote = f"memory://{tmp_path.name}/b.ckpt"
    records = {}
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        shard = tmp_path / str(rank) / f"__{rank}_0.distcp"
        shard.write_bytes(b"shard %d" % rank)
        records[shard.name] = files.record_file(shard)
    (tmp_path / "0" / "lightning.pt").write_bytes(b"state")
    remote_files.begin_upload(remote)
    remote_files.upload_files(str(tmp_path / "0"), remote)
    with refuses(ValueError, "__1_0.distcp is missing"):
        remote_files.finish_upload(str(tmp_path / "0"), remote, {"global_step": 5}, records)
    with refuses(ValueError, "because its save was interrupted"):
        files.read_manifest(remote)
    remote_files.upload_files(str(tmp_path / "1"), remote)
    remote_files.finish_upload(str(tmp_path / "0"), remote, {"global_step": 5}, records)
    assert sorted(files.verify(remote)["files"]) == ["__0_0.distcp", "__1_0.distcp", "lightning.pt"]


def test_damage_in_a_store_is_named(tmp_path: Path, store: str) -> None:
    save(tmp_path / "a.ckpt", 1)
    remote = f"{store}/a.ckpt"
    upload(str(tmp_path / "a.ckpt"), remote)
    fs = fsspec.filesystem("dying")
    fs.pipe_file(f"{remote}/{SHARD}", CONTENT + b"2")
    with refuses(ValueError, f"a.ckpt is damaged: the checksum of {SHARD}"):
        files.verify(remote)
    fs.pipe_file(f"{remote}/{SHARD}", CONTENT)
    with refuses(ValueError, f"a.ckpt is damaged: {SHARD} has 10240 of 10241"):
        remote_files.download(remote, str(tmp_path / "copy"))
    with refuses(ValueError, "a.ckpt is damaged: other is missing"):
        remote_files.download(remote, str(tmp_path / "copy"), ["other"])
    fs.pipe_file(f"{remote}/other", b"12345")
    with refuses(ValueError, "a.ckpt is damaged: checkpoint.json does"):
        remote_files.download(remote, str(tmp_path / "copy"), ["other"])
    fs.rm_file(f"{remote}/{SHARD}")
    with refuses(ValueError, f"a.ckpt is damaged: {SHARD} is missing"):
        files.check_sizes(remote)


def test_an_upload_or_removal_that_dies_leaves_no_half_checkpoint(tmp_path: Path, store: str) -> None:
    for step in (1, 2):
        save(tmp_path / f"{step}.ckpt", step)
    remote = f"{store}/last.ckpt"
    actions = {2: lambda: upload(str(tmp_path / "2.ckpt"), remote), None: lambda: files.remove(remote)}
    for result, action in actions.items():
        found, died = [], True
        while died:
            DyingStore.left = 1000
            upload(str(tmp_path / "1.ckpt"), remote)
            DyingStore.left = len(found)
            try:
                action()
            except Crash:
                pass
            else:
                died = False
            found.append(step_of(remote) if files.is_checkpoint_directory(remote) else None)
            names = files.names_in(*files.open_store(remote))
            if found[-1] is None and ".metadata" in names:  # which makes others take it for a checkpoint
                assert names >= {SHARD, "lightning.pt", "metadata.json"}
        assert found == [
            1,
            *[None] * (len(found) - 2),
            result,
        ]  # the first operation ends the old one, the last makes the new one
        assert len(found) > 4


def test_a_folder_of_other_files_in_a_store_is_never_replaced(tmp_path: Path, store: str) -> None:
    save(tmp_path / "a.ckpt", 1)
    fs = fsspec.filesystem("dying")
    fs.pipe_file(f"{store}/data.bin", b"data")
    with refuses(ValueError, "is a directory of other files, not a"):
        upload(str(tmp_path / "a.ckpt"), store)
    assert fs.cat_file(f"{store}/data.bin") == b"data"
