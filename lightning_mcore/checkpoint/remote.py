# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints on a remote store, such as ``s3://``, ``gs://`` or ``memory://``: whatever fsspec opens.

Nothing can be renamed there. The manifest stands in for the rename: it is uploaded last and deleted first, and a
directory without it is not a checkpoint. While a checkpoint is being replaced, no checkpoint has its name; save under a
new name if that matters (ModelCheckpoint does, except with ``save_last=True``).

Each rank writes into a local directory of its own. Then ``save.py`` calls :func:`begin_upload` on rank 0,
:func:`upload_files` on each rank, and :func:`finish_upload` on rank 0. ``io.py`` reads through :func:`locator`.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_mcore.checkpoint.files import (
    check_size,
    files_below,
    open_store,
    read_manifest,
    record_file,
    remove_from_store,
    require_replaceable,
    writes_directly,
)
from lightning_mcore.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, FileRecord, damaged, encode_manifest


def begin_upload(path: str) -> None:
    """Delete the checkpoint at ``path``, manifest first (rank 0 only, once all files are written locally)."""
    require_replaceable(path)
    remove_from_store(path)
    fs, root = open_store(path)
    fs.makedirs(root, exist_ok=True)


def upload_files(local_dir: str, path: str) -> None:
    """Upload the files of a local directory, except the manifest (every rank that has files)."""
    fs, root = open_store(path)
    # Upload the metadata last: without it, an interrupted upload is not taken for a checkpoint of Megatron-LM.
    names = {*files_below(local_dir)} - {MANIFEST_FILE}
    for name in sorted(names, key=lambda name: (name == METADATA_FILE, name)):
        fs.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        fs.put_file(os.path.join(local_dir, name), f"{root}/{name}")


def finish_upload(local_dir: str, path: str, manifest: dict[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Check that all files have arrived, and upload the manifest; on rank 0, after every rank has uploaded."""
    own = {*files_below(local_dir)} - {MANIFEST_FILE} - {*files}
    records = {**files, **{name: record_file(os.path.join(local_dir, name)) for name in own}}
    fs, root = open_store(path)
    for name, record in records.items():
        check_size(fs, root, path, name, record.size)
    fs.pipe_file(f"{root}/{MANIFEST_FILE}", encode_manifest(manifest, records))
    fs.invalidate_cache()


def download(path: str, local_dir: str, names: Iterable[str] | None = None) -> str:
    """Copy a checkpoint, or the files in ``names``, into a local directory, and return that directory."""
    fs, root = open_store(path)
    if not fs.exists(root):
        raise FileNotFoundError(f"{path} does not exist; give the path of a checkpoint")
    found = {name.removeprefix(root).lstrip("/"): info["size"] for name, info in fs.find(root, detail=True).items()}
    if MANIFEST_FILE in found:
        recorded = {name: record["size"] for name, record in read_manifest(path)["files"].items()}
        # The manifest has the true sizes; the store's own are all there is for a Megatron checkpoint.
        found = {**recorded, MANIFEST_FILE: found[MANIFEST_FILE]}
    for name in found if names is None else names:
        target = os.path.join(local_dir, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if name not in found and fs.isfile(f"{root}/{name}"):
            raise damaged(path, f"{MANIFEST_FILE} does not list {name}")
        check_size(fs, root, path, name, found.get(name, 0))
        fs.get_file(f"{root}/{name}", target)
        if os.path.getsize(target) != found.get(name):
            raise ValueError(f"{name} of {path} was not downloaded completely; try again")
    return local_dir


def locator(path: str, stack: contextlib.ExitStack) -> Callable[[str], str]:
    """Return a function that returns the local path of a file of the checkpoint, and fetches it if it is remote."""
    if writes_directly(path):
        root = open_store(path)[1]
        return lambda name: os.path.join(root, name)
    local = stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint_"))

    def fetch(name: str) -> str:
        if not os.path.exists(os.path.join(local, name)):
            download(path, local, [name])
        return os.path.join(local, name)

    return fetch
