# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on remote stores (``s3://``, ``gs://``, ``memory://``): write to a local disk first, then upload.

A store cannot rename, so a directory cannot appear there in one step. The manifest replaces the rename: it is uploaded
last and deleted first, and a directory without it is not a checkpoint. While a checkpoint is being replaced, its name
leads to none; save under a new name if that matters (``ModelCheckpoint`` does, except with ``save_last=True``).

In a save by many ranks, each writes its files into a local directory of its own. Then rank 0 calls
:func:`begin_upload`, each rank calls :func:`upload_files`, and rank 0 calls :func:`finish_upload`. A load calls
:func:`download` with the names of the files that it needs. The stores are those of fsspec, as for Lightning's own
checkpoints.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_mcore.checkpoint.files import (
    check_size,
    files_below,
    open_store,
    read_manifest,
    record_file,
    require_replaceable,
)
from lightning_mcore.checkpoint.manifest import DELETED_FIRST, MANIFEST_FILE, METADATA_FILE, FileRecord, encode_manifest


def begin_upload(path: str) -> None:
    """Delete the checkpoint at ``path``, manifest first; on rank 0 only, once all files are written locally.

    Raises:
        ValueError: There is a directory at ``path`` that is not a checkpoint.
        OSError: The store refuses.
    """
    require_replaceable(path)
    remote_remove(path)
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
        manifest: As for :func:`~lightning_mcore.checkpoint.files.finish`.
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


def upload(local_dir: str, path: str) -> None:
    """Copy a whole local checkpoint to a store, replacing the checkpoint there.

    Raises:
        FileNotFoundError: There is nothing at ``local_dir``.
        ValueError: It is not a whole checkpoint.
        OSError: The store refuses.
    """
    manifest = read_manifest(local_dir)
    begin_upload(path)
    upload_files(local_dir, path)
    finish_upload(local_dir, path, manifest, {n: FileRecord(**record) for n, record in manifest["files"].items()})


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
        OSError: The store or the disk refuses.
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


def remote_remove(path: str) -> None:
    """Delete a remote checkpoint, manifest first; do nothing if it does not exist.

    Raises:
        OSError: The store refuses.
    """
    fs, root = open_store(path)
    for name in DELETED_FIRST:
        if fs.isfile(f"{root}/{name}"):
            fs.rm_file(f"{root}/{name}")
    if fs.exists(root):
        fs.rm(root, recursive=True)
    fs.invalidate_cache()
