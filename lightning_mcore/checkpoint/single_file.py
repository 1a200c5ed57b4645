# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in one file, as ``torch.save`` writes it: written aside, and checked before it is unpickled.

Models that are not split are saved this way, and Lightning's other strategies write nothing else. ``io.py`` saves and
loads with it, ``strategy/module.py`` loads.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint.files import absolute, open_store, require_replaceable
from lightning_mcore.checkpoint.manifest import damaged, saving
from lightning_mcore.checkpoint.reader import check_archive


def save_file(content: Any, path: str) -> None:
    """Write a single-file checkpoint that appears only when complete; on one rank, to an absolute local path."""
    if not os.path.islink(path):
        require_replaceable(path)
    with saving(path):
        name = os.path.basename(path)
        # Lightning writes to the temporary folder and moves the file, which copies it if that is on another disk.
        directory = atomic.begin(path)
        try:
            with open(os.path.join(directory, name), "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            atomic.publish_file(path, name)
        except BaseException:
            atomic.abandon(path)
            raise


@contextlib.contextmanager
def checked_file(path: str, checksums: bool = True) -> Iterator[str]:
    """Compare the checksums in a single-file checkpoint, and yield the path to read it from.

    A remote file is fetched once, and kept until the ``with`` statement ends. A file from ``http`` is left to
    Lightning, which fetches it into torch's cache. Raises ``ValueError`` if it is damaged, or not a ``torch.save``
    file.
    """
    local = absolute(path)
    with contextlib.ExitStack() as stack:
        if "://" in local and not local.startswith("http") and checksums:
            fs, root = open_store(path)
            if fs.isfile(root):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint_"))
                local = os.path.join(folder, os.path.basename(root))
                fs.get_file(root, local)
        if os.path.isfile(local):
            _check_file(path, local, checksums)
        elif "://" not in local:  # which Lightning fetches
            raise FileNotFoundError(f"{path} does not exist; give the path of a checkpoint")
        yield local


def _check_file(path: str, local: str, checksums: bool) -> None:
    """Reject a file that ``torch.save`` cannot have written, because unpickling it could run any code."""
    with open(local, "rb") as stream:
        begin = stream.read(2)
        # torch.save writes a zip archive ("PK"), before torch 1.6 a pickle (0x80).
        if begin != b"PK" and begin[:1] != b"\x80":
            raise ValueError(f"{path} is not a checkpoint: torch.save did not write it; give the path of a checkpoint")
        if begin == b"PK" and checksums:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as archive:
                try:
                    check_archive(archive)
                except ValueError as error:
                    raise damaged(path, str(error)) from error
