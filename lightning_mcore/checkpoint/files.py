# SPDX-License-Identifier: Apache-2.0
"""The files of a sharded checkpoint: written aside, put in place when complete, and checked against the manifest.

A checkpoint is a directory::

    last.ckpt/
        .metadata, __<rank>_<n>.distcp     tensors in Megatron's torch_dist format, written by every rank, and per-rank
                                           state: random numbers, position in the data
        common.pt, metadata.json           Megatron's own files
        lightning.pt                       Lightning's own state
        checkpoint.json                    the manifest: a description, and size and checksum of every other file

``save.py`` and ``io.py`` call this file, which knows nothing about ranks or ``torch.distributed``.
"""

import contextlib
import errno
import os
import posixpath
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event, Lock
from typing import IO, TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from isal.isal_zlib import crc32

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint.manifest import (
    COMMON_FILE,
    DELETED_FIRST,
    MANIFEST_FILE,
    METADATA_FILE,
    FileRecord,
    damaged,
    decode_manifest,
    encode_manifest,
    interrupted,
    is_interrupted,
    is_megatron,
    least_sizes,
    may_be_replaced,
    no_checkpoint,
    place_of_common,
    read_common,
    saving,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

# On a local disk: rank 0 calls begin(), every rank writes its files into that directory, and rank 0 calls finish() with
# the records of all files. atomic.py puts the directory in place in one step. Remote stores: remote.py.
_BLOCK = 1 << 22  # bytes read at once
_READERS = 4  # files read at once
_OF_NEMO = "weights"  # its folder with tensors, next to "context"


def record_file(path: str | os.PathLike[str]) -> FileRecord:
    """Return size and checksum of a local file; reads it once."""
    with open(path, "rb") as file:
        return _record(file)


def writes_directly(path: str) -> bool:
    """Return whether ``path`` is on a disk of this machine, where files can be written in place and renamed."""
    return get_protocol(path) in ("file", "local")


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a local path as an absolute one, without ``file://``; a remote path is returned unchanged."""
    local = str(path).removeprefix("file://").removeprefix("local://")
    return local if "://" in local else os.path.abspath(local)


def resolve_folder(path: str | os.PathLike[str]) -> str:
    """Return the absolute path with links in its folder resolved; a remote path is returned unchanged."""
    local = absolute(path)
    folder, name = os.path.split(local)
    return local if "://" in local else os.path.join(os.path.realpath(folder), name)


def begin(path: str) -> str:
    """Return a new, empty local directory for the checkpoint ``path``; one that is there stays (rank 0 only)."""
    path = absolute(path)
    if not os.path.islink(path):
        require_replaceable(path)
    with saving(path):
        return atomic.begin(path)


def finish(path: str, manifest: dict[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Write the manifest and put the checkpoint in place (rank 0 only); ``files`` records those already flushed."""
    path = absolute(path)
    directory = atomic.unfinished(path)
    for name, record in files.items():
        # Detects a node whose disk is not shared, before the old checkpoint is replaced.
        _check_written(path, name, record, os.path.join(directory, name))
    with saving(path):
        others = {*files_below(directory)} - {*files, MANIFEST_FILE}
        records = {**files, **{name: _flush(os.path.join(directory, name)) for name in others}}
        with open(os.path.join(directory, MANIFEST_FILE), "wb") as file:
            file.write(encode_manifest(manifest, records))
            file.flush()
            os.fsync(file.fileno())
        atomic.publish(path)


def abandon(path: str) -> None:
    """Delete the files of a failed save; the checkpoint at ``path`` stays."""
    atomic.abandon(absolute(path))


def link(path: str, target: str) -> None:
    """Make ``path`` a link to the checkpoint ``target``, replacing a link or checkpoint there; never one to itself."""
    path, target = absolute(path), absolute(target)
    if resolve_folder(path) == resolve_folder(target):
        return
    if not os.path.islink(path):
        require_replaceable(path)
    with saving(path):
        atomic.link(path, target)


def remove(path: str) -> None:
    """Delete a checkpoint, or a link to one, so that no crash leaves half; a remote one need not exist."""
    if not writes_directly(path):
        remove_from_store(path)
        return
    path = absolute(path)
    try:
        atomic.remove(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # there is no room to move it aside
            raise
        for name in DELETED_FIRST:
            atomic.delete(os.path.join(path, name))
        atomic.delete(path)


def remove_from_store(path: str) -> None:
    """Delete a remote checkpoint, manifest first; do nothing if it does not exist."""
    fs, root = open_store(path)
    for name in DELETED_FIRST:
        if fs.isfile(f"{root}/{name}"):
            fs.rm_file(f"{root}/{name}")
    if fs.exists(root):
        fs.rm(root, recursive=True)
    fs.invalidate_cache()


def is_checkpoint(path: str) -> bool:
    """Return whether ``path`` may be deleted as a checkpoint: a directory of ours, a ``torch.save`` file, or a link."""
    fs, root = open_store(path)
    if writes_directly(path) and os.path.islink(root):
        return True
    if not fs.isfile(root):
        names = names_in(fs, root)
        return MANIFEST_FILE in names or is_interrupted(names)
    with fs.open(root, "rb") as file:
        try:
            return any(name.endswith("/data.pkl") for name in zipfile.ZipFile(file).namelist())
        except zipfile.BadZipFile:
            file.seek(0)
            return bool(file.read(1) == b"\x80")  # torch.save before torch 1.6


def has_checksums(records: Iterable[zipfile.ZipInfo]) -> bool:
    """Return whether an archive has checksums; ``torch.serialization.set_crc32_options(False)`` omits them."""
    return any(record.CRC for record in records)


def lies_in(path: str, folder: str) -> bool:
    """Return whether ``path`` lies in a folder or below it, with links and ``..`` resolved."""
    if writes_directly(path) != writes_directly(folder):
        return False
    if writes_directly(path):  # a link in the last part is not followed: only the link would be deleted
        path, folder = resolve_folder(path), os.path.realpath(absolute(folder))
    return path.startswith(folder.rstrip("/") + "/") and ".." not in path.split("/")


def recover(path: str) -> bool:
    """Put back a checkpoint that a crash left moved aside, and return whether there was one; any rank may call it."""
    return atomic.recover(absolute(path))


def recover_all(folder: str) -> bool:
    """Put back every checkpoint of a local folder that a crash left moved aside; return whether there was one."""
    return atomic.recover_all(absolute(folder))


def is_checkpoint_directory(path: str) -> bool:
    """Return whether ``path`` is a complete checkpoint directory of ours, after recovering one that was moved aside."""
    fs, root = open_store(path)
    return bool(fs.isfile(_join(root, MANIFEST_FILE)))


def tensors_folder(path: str) -> str:
    """Return the folder with the tensors of a checkpoint: for NeMo 2 ``path/weights``, otherwise ``path``."""
    names = names_in(*open_store(path))
    if METADATA_FILE in names or _OF_NEMO not in names:
        return path
    below = f"{path.rstrip('/')}/{_OF_NEMO}"
    return below if METADATA_FILE in names_in(*open_store(below)) else path


def is_megatron_checkpoint(path: str) -> bool:
    """Return whether ``path`` is a directory in Megatron's ``torch_dist`` format that another program wrote."""
    return is_megatron(names_in(*open_store(path)))


def common_state(path: str, metadata: "Metadata") -> dict[str, Any]:
    """Return the plain values in a Megatron checkpoint, such as its iteration; an empty dict if it has none."""
    fs, root = open_store(path)
    if (place := place_of_common(metadata)) is not None:
        return read_common(fs.cat_file(_join(root, place.relative_path), place.offset, place.offset + place.length))
    if COMMON_FILE not in names_in(fs, root):
        return {}
    return read_common(fs.cat_file(_join(root, COMMON_FILE)))


def newest_in(folder: str) -> str | None:
    """Return the newest checkpoint in a local folder whose files have the right sizes."""
    whole = []
    for entry in os.scandir(folder):
        with contextlib.suppress(ValueError, OSError):
            if entry.is_dir(follow_symlinks=False):
                check_sizes(entry.path)
            elif entry.is_symlink() or not (entry.name.endswith(".ckpt") and zipfile.is_zipfile(entry.path)):
                continue
            whole.append((entry.stat().st_mtime, entry.path))
    return max(whole)[1] if whole else None


def read_manifest(path: str) -> dict[str, Any]:
    """Return a checkpoint's manifest; FileNotFoundError if nothing is there, else ValueError if it has none."""
    fs, root = open_store(path)
    if posixpath.basename(posixpath.dirname(root)) == atomic.UNFINISHED and fs.exists(root):
        raise interrupted(path)
    try:
        text = fs.cat_file(_join(root, MANIFEST_FILE))
    except (FileNotFoundError, NotADirectoryError):
        if not fs.exists(root):
            raise FileNotFoundError(f"{path} does not exist; give the path of a checkpoint") from None
        if fs.isfile(root):
            raise ValueError(f"{path} is a file; give the directory of a sharded checkpoint") from None
        raise no_checkpoint(path, names_in(fs, root)) from None
    return decode_manifest(path, text)


def check_sizes(path: str) -> dict[str, Any]:
    """Check the size of every file in the manifest without reading the files, and return the manifest."""
    manifest = read_manifest(path)
    fs, root = open_store(path)
    for name, record in manifest["files"].items():
        check_size(fs, root, path, name, record["size"])
    return manifest


def verify(path: str, on_progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Check size and checksum of every file, and return the manifest; ``on_progress`` gets bytes read and in all."""
    while True:
        manifest = check_sizes(path)
        try:
            _check_sums(path, manifest, on_progress)
        except (ValueError, FileNotFoundError):
            if read_manifest(path) == manifest:
                raise
            continue  # a running job has replaced it in the meantime; check the new one
        return manifest


def require_replaceable(path: str) -> None:
    """Raise ``ValueError`` if ``path`` is a directory that is neither empty nor a checkpoint."""
    if not may_be_replaced(names_in(*open_store(path))):
        raise ValueError(f"{path} is a directory of other files, not a checkpoint; save under another name")


def check_complete(path: str, metadata: "Metadata") -> None:
    """Raise ``ValueError`` if a checkpoint that another program wrote lacks some of its tensor files."""
    wanted = least_sizes(metadata).keys()
    if missing := sorted(wanted - names_in(*open_store(path))):
        raise damaged(path, f"{len(missing)} of its {len(wanted)} tensor files are missing, the first {missing[0]}")


def check_size(fs: AbstractFileSystem, root: str, path: str, name: str, size: int, or_more: bool = False) -> None:
    """Raise ``ValueError`` if a file is missing, shorter than ``size`` bytes or, without ``or_more``, longer."""
    try:
        found = fs.info(_join(root, name))["size"]
    except FileNotFoundError:
        raise damaged(path, f"{name} is missing") from None
    if found < size or (found != size and not or_more):
        raise damaged(path, f"{name} has {found} of {size} bytes")


def names_in(fs: AbstractFileSystem, root: str) -> set[str]:
    """Return the names in a directory; an empty set if it does not exist."""
    if not fs.isdir(root):
        return set()
    return {posixpath.basename(name.rstrip("/")) for name in fs.ls(root, detail=False)}


def files_below(directory: str) -> Iterator[str]:
    """Yield the files of a local directory, named relative to it with ``/`` between the parts."""
    for folder, _, names in os.walk(directory):
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), directory).replace(os.sep, "/")


def open_store(path: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a path, and the path in it; on a local disk, put back what a crash left moved aside."""
    fs, root = url_to_fs(str(path))
    fs.invalidate_cache()  # another process may have written since
    if writes_directly(str(path)):
        atomic.recover(root)
    return fs, root


def _check_sums(path: str, manifest: dict[str, Any], on_progress: Callable[[int, int], None] | None) -> None:
    fs, root = open_store(path)
    records = {name: FileRecord(**record) for name, record in manifest["files"].items()}
    total, done, lock, stopped = sum(record.size for record in records.values()), 0, Lock(), Event()

    def advance(size: int) -> None:
        nonlocal done
        if stopped.is_set():
            raise CancelledError
        with lock:
            done += size
            if on_progress is not None:
                on_progress(done, total)

    def check(name: str) -> None:
        with fs.open(_join(root, name), "rb") as file:
            found = _record(file, advance)
        if found != records[name]:
            saved = records[name].crc32
            raise damaged(path, f"the checksum of {name} is {found.crc32}, but was {saved} when it was saved")

    # Largest first, or a reader may begin a large file when the others are done.
    largest_first = sorted(records, key=lambda name: -records[name].size)
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            for future in as_completed([pool.submit(check, name) for name in largest_first]):
                future.result()
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _record(file: IO[bytes], advance: Callable[[int], None] | None = None) -> FileRecord:
    size = checksum = 0
    while block := file.read(_BLOCK):
        size, checksum = size + len(block), crc32(block, checksum)
        if advance is not None:
            advance(len(block))
    return FileRecord(size, f"{checksum:08x}")


def _flush(path: str) -> FileRecord:
    record = record_file(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return record


def _check_written(path: str, name: str, record: FileRecord, file: str) -> None:
    size = os.stat(file).st_size if os.path.isfile(file) else None
    if size != record.size:
        found = "does not exist" if size is None else f"has {size} bytes"
        raise OSError(
            f"{name} of {path} was written with {record.size} bytes, but {found} on rank 0; save to a disk that"
            " all nodes share"
        )


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}"
