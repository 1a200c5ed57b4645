# SPDX-License-Identifier: Apache-2.0
"""The files of a sharded checkpoint: written aside, put in place when whole, and checked against the manifest.

A checkpoint is a directory::

    last.ckpt/
        .metadata, __<rank>_<n>.distcp     tensors in Megatron's torch_dist format, written by every rank, and what
                                           differs from rank to rank: random numbers, position in the data
        common.pt, metadata.json           Megatron's own files beside them
        lightning.pt                       Lightning's own state
        checkpoint.json                    the manifest: a description, and size and checksum of every other file

Rank 0 calls :func:`begin`, every rank writes its files into that directory, and rank 0 calls :func:`finish` with the
records of all files. ``atomic.py`` puts the directory in place in one step.

A path may also lie on a remote store (``s3://``, ``gs://``, ``memory://``; those of fsspec, as for Lightning's own
checkpoints). A store cannot rename, so a directory cannot appear there in one step. The manifest replaces the rename:
it is uploaded last and deleted first, and a directory without it is not a checkpoint. While a checkpoint is being
replaced, its name leads to none; save under a new name if that matters (``ModelCheckpoint`` does, except with
``save_last=True``). In a save by many ranks, each writes its files into a local directory of its own. Then rank 0 calls
:func:`begin_upload`, each rank calls :func:`upload_files`, and rank 0 calls :func:`finish_upload`. A load calls
:func:`download` with the names of the files that it needs.

This module knows nothing about ranks or ``torch.distributed``.
"""

import contextlib
import errno
import os
import posixpath
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event, Lock
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from isal.isal_zlib import crc32

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint.manifest import (
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
    may_be_replaced,
    no_checkpoint,
    saving,
)

_BLOCK = 1 << 22  # bytes read at once
_READERS = 4  # files read at once


def record_file(path: str | os.PathLike[str]) -> FileRecord:
    """Return size and checksum of a local file; reads it once."""
    with open(path, "rb") as file:
        return _record(file)


def writes_directly(path: str) -> bool:
    """Return whether ``path`` lies on a disk of this machine, where files can be written in place and renamed."""
    return get_protocol(path) in ("file", "local")


def begin(path: str) -> str:
    """Return a new, empty directory to write the checkpoint ``path`` into; on rank 0 only.

    It is ``<parent>/.unfinished/<name>``. Leftovers of crashed saves there are deleted. A checkpoint that was moved
    aside before a crash is put back.

    Args:
        path: A local path. A checkpoint there stays until :func:`finish`.

    Raises:
        ValueError: The directory at ``path`` is not a checkpoint, or :func:`atomic.begin` raised it.
        RuntimeError: The path is already being written.
        OSError: The disk reports an error.
    """
    path = _local(path)
    if not os.path.islink(path):
        require_replaceable(path)
    with saving(path):
        return atomic.begin(path)


def finish(path: str, manifest: dict[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Write the manifest and put the checkpoint in place of what is at ``path``; on rank 0 only.

    Args:
        path: As given to :func:`begin`.
        manifest: The entries, as values that JSON can hold; format and files are added here.
        files: Records of the files that their writers have already flushed, by name. All others are flushed and
            recorded here.

    Raises:
        OSError: The disk reports an error, or a file differs from its record.
    """
    path = _local(path)
    directory = atomic.unfinished(path)
    for name, record in files.items():
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
    atomic.abandon(_local(path))


def link(path: str, target: str) -> None:
    """Make ``path`` a link to the checkpoint ``target``; replaces a link or checkpoint that is there.

    Raises:
        ValueError: There is a directory at ``path`` that is not a checkpoint.
        RuntimeError: Another process is writing ``path``.
        OSError: The disk reports an error; ``path`` is unchanged.
    """
    path, target = _local(path), _local(target)
    if not os.path.islink(path):
        require_replaceable(path)
    with saving(path):
        atomic.link(path, target)


def remove(path: str) -> None:
    """Delete a checkpoint so that a crash never leaves half of it. If it is a link, only the link is deleted.

    A remote checkpoint need not exist.

    Raises:
        OSError: The disk or the store reports an error.
    """
    if not writes_directly(path):
        _remove_from_store(path)
        return
    path = _local(path)
    try:
        atomic.remove(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # there is no room to move it aside
            raise
        for name in DELETED_FIRST:
            atomic.delete(os.path.join(path, name))
        atomic.delete(path)


def is_checkpoint(path: str) -> bool:
    """Return whether ``path`` may be deleted as a checkpoint: a directory of ours, one file, or a link."""
    fs, root = open_store(path)
    if writes_directly(path) and os.path.islink(root):
        return True  # only the link would be deleted
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
    """Return whether an archive has checksums; ``torch.serialization.set_crc32_options(False)`` leaves them out."""
    return any(record.CRC for record in records)


def lies_in(path: str, folder: str) -> bool:
    """Return whether ``path`` lies in a folder or below it, with links and ``..`` resolved."""
    if writes_directly(path) != writes_directly(folder):
        return False
    if writes_directly(path):  # a link in the last part is not followed: only the link would be deleted
        parent, name = os.path.split(os.path.abspath(_local(path)))
        path, folder = os.path.join(os.path.realpath(parent), name), os.path.realpath(_local(folder))
    return path.startswith(folder.rstrip("/") + "/") and ".." not in path.split("/")


def recover(path: str) -> bool:
    """Put back a checkpoint that a crash left moved aside, and return whether there was one; any rank may call it."""
    return atomic.recover(_local(path))


def recover_all(folder: str) -> bool:
    """Put back every checkpoint of a local folder that a crash left moved aside; return whether there was one."""
    return atomic.recover_all(_local(folder))


def is_checkpoint_directory(path: str) -> bool:
    """Return whether ``path`` is a whole checkpoint directory of ours, after putting back one that was moved aside."""
    fs, root = open_store(path)
    return bool(fs.isfile(_join(root, MANIFEST_FILE)))


def is_megatron_checkpoint(path: str) -> bool:
    """Return whether ``path`` is a directory in Megatron's ``torch_dist`` format that another program wrote."""
    return is_megatron(names_in(*open_store(path)))


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
    """Return the manifest of a checkpoint.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        ValueError: It is not a checkpoint, it is unfinished or of a newer version, or its manifest is damaged.
    """
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
    """Check that every file of the manifest is there with its size, without reading them.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        ValueError: A file is missing or has another size, or the manifest cannot be read (:func:`read_manifest`).
    """
    manifest = read_manifest(path)
    fs, root = open_store(path)
    for name, record in manifest["files"].items():
        check_size(fs, root, path, name, record["size"])
    return manifest


def verify(path: str, on_progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Check size and checksum of every file; reads all of them.

    Args:
        path: A checkpoint directory, local or remote.
        on_progress: Called with the bytes read so far and the bytes in all, from several threads but one at a time.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        ValueError: A file is missing, has another size or another checksum, or the manifest cannot be read.
    """
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
    """Refuse to save over a directory of other files.

    Raises:
        ValueError: The directory is neither empty nor a checkpoint.
    """
    if not may_be_replaced(names_in(*open_store(path))):
        raise ValueError(f"{path} is a directory of other files, not a checkpoint; save under another name")


def check_size(fs: AbstractFileSystem, root: str, path: str, name: str, size: int, or_more: bool = False) -> None:
    """Check the size in bytes of one file in a store from :func:`open_store`.

    Raises:
        ValueError: The file is missing or has another size.
    """
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
    """Return the file system of a local or remote path, and the path in it; recovers a local path if necessary."""
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
            raise damaged(path, f"the checksum of {name} is {found.crc32} and was {saved} when it was saved")

    largest_first = sorted(records, key=lambda name: -records[name].size)
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            for future in as_completed([pool.submit(check, name) for name in largest_first]):
                future.result()
        finally:  # after a fault, cancel the rest
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
        found = "is not there" if size is None else f"has {size} bytes"
        raise OSError(
            f"{name} of {path} was written with {record.size} bytes and {found} on rank 0; save to a disk that"
            " all nodes share"
        )


def _local(path: str) -> str:
    """Return a path without its ``file://`` prefix."""
    return str(url_to_fs(str(path))[1]) if "://" in str(path) else str(path)


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}"


def begin_upload(path: str) -> None:
    """Delete the checkpoint at ``path``, manifest first; on rank 0 only, once all files are written locally.

    Raises:
        ValueError: There is a directory at ``path`` that is not a checkpoint.
        OSError: The store refuses.
    """
    require_replaceable(path)
    remove(path)
    fs, root = open_store(path)
    fs.makedirs(root, exist_ok=True)


def upload_files(local_dir: str, path: str) -> None:
    """Upload the files of a local directory, except the manifest; on every rank that has files.

    Raises:
        OSError: The store refuses.
    """
    fs, root = open_store(path)
    # Upload the metadata last: without it, an interrupted upload is not taken for a checkpoint of Megatron-LM.
    names = {*files_below(local_dir)} - {MANIFEST_FILE}
    for name in sorted(names, key=lambda name: (name == METADATA_FILE, name)):
        fs.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        fs.put_file(os.path.join(local_dir, name), f"{root}/{name}")


def finish_upload(local_dir: str, path: str, manifest: dict[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Check that all files have arrived, and upload the manifest; on rank 0 only, after every rank has uploaded.

    Args:
        local_dir: The directory of rank 0; its files are recorded here unless they are in ``files``.
        path: The remote path.
        manifest: As for :func:`finish`.
        files: What all ranks wrote, by name.

    Raises:
        ValueError: A file is missing or incomplete.
        OSError: The store refuses.
    """
    own = {*files_below(local_dir)} - {MANIFEST_FILE} - {*files}
    records = {**files, **{name: record_file(os.path.join(local_dir, name)) for name in own}}
    fs, root = open_store(path)
    for name, record in records.items():
        check_size(fs, root, path, name, record.size)
    fs.pipe_file(f"{root}/{MANIFEST_FILE}", encode_manifest(manifest, records))
    fs.invalidate_cache()


def download(path: str, local_dir: str, names: Iterable[str] | None = None) -> str:
    """Copy a checkpoint, or some files of it, into a local directory.

    Args:
        path: The remote path.
        local_dir: The directory to copy to; created if it does not exist.
        names: The files to fetch, as the manifest names them (or Megatron, if there is no manifest); None for all.

    Returns:
        ``local_dir``.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        ValueError: A file is missing or incomplete.
        OSError: The store or the disk reports an error.
    """
    fs, root = open_store(path)
    if not fs.exists(root):
        raise FileNotFoundError(f"{path} does not exist; give the path of a checkpoint")
    found = {name.removeprefix(root).lstrip("/"): info["size"] for name, info in fs.find(root, detail=True).items()}
    if MANIFEST_FILE in found:
        recorded = {name: record["size"] for name, record in read_manifest(path)["files"].items()}
        found = {**recorded, MANIFEST_FILE: found[MANIFEST_FILE]}
    for name in found if names is None else names:
        target = os.path.join(local_dir, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        check_size(fs, root, path, name, found.get(name, 0))
        fs.get_file(f"{root}/{name}", target)
        if os.path.getsize(target) != found.get(name):
            raise ValueError(f"{name} of {path} did not arrive whole; try again")
    return local_dir


def _remove_from_store(path: str) -> None:
    """Delete a remote checkpoint, manifest first; do nothing if it does not exist."""
    fs, root = open_store(path)
    for name in DELETED_FIRST:
        if fs.isfile(f"{root}/{name}"):
            fs.rm_file(f"{root}/{name}")
    if fs.exists(root):
        fs.rm(root, recursive=True)
    fs.invalidate_cache()
