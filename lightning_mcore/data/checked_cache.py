# SPDX-License-Identifier: Apache-2.0
"""Folders of files that are made once and read by many runs, and made anew when they are not as they were made.

A folder stands under its name when all of it is written (``checkpoint/storage/atomic.py``), with the checksums of its
files beside them (``file_checksums.py``). Whoever wants to read it calls :func:`stand` first: what was damaged or
changed since is made again from its source, which a line in the log says. So a file in a cache never decides what is
learnt.

``data/pretraining/blend.py`` keeps Megatron's index files so, ``data/finetuning/tokenized.py`` the tokens of files.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from lightning_mcore.checkpoint.storage.atomic import abandon, begin, publish
from lightning_mcore.data.file_checksums import Checksums, checksums_of, read_checksums, write_checksums

_CHECKSUMS = "checksums"

_log = logging.getLogger(__name__)


def stand(folder: str, make: Callable[[str], None], what: str, check: bool = True) -> Checksums:
    """Let a folder stand that is as it was made; return its checksums.

    Args:
        folder: Of the cache.
        make: Called with an empty folder to write the files into, if there are none or not the right ones.
        what: What they are, for the log and for errors, such as ``"the index files of the dataset"``.
        check: Read the files and compare them, once in a process; one process of those on a machine does.

    Raises:
        OSError: They cannot be written.
        Exception: Whatever ``make`` raises; then nothing stands there.
    """
    while True:
        try:
            return _checked(folder, _marks(folder)) if check else read_checksums(os.path.join(folder, _CHECKSUMS))
        except (ValueError, OSError) as error:
            if os.path.lexists(folder):
                _log.warning("%s are made anew: %s", what, error)
        try:
            partial = begin(folder)
        except RuntimeError as error:  # another run writes the same
            _log.info("waiting for %s, which another run makes: %s", what, error)
            time.sleep(1.0)
            continue
        except OSError as error:
            raise OSError(
                f"{what} cannot be written to cache_dir={os.path.dirname(folder)!r} ({error.strerror}); give a folder"
                " that can be written and that every machine sees"
            ) from error
        try:
            make(partial)
            names = sorted(os.listdir(partial))
            found = {name: checksums_of(os.path.join(partial, name)) for name in names}
            write_checksums(os.path.join(partial, _CHECKSUMS), found)
            publish(folder)
        except BaseException:
            abandon(folder)
            raise
        return read_checksums(os.path.join(folder, _CHECKSUMS))


def is_made(folder: str) -> bool:
    """Return whether a folder is one that :func:`stand` made, and not one that is being made."""
    return os.path.exists(os.path.join(folder, _CHECKSUMS))


def _marks(folder: str) -> tuple[tuple[Any, ...], ...]:
    """Return what changes when one of the files in a folder does."""
    with os.scandir(folder) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats))


@functools.lru_cache(maxsize=1024)
def _checked(folder: str, marks: tuple[tuple[Any, ...], ...]) -> Checksums:
    """Return the checksums of a folder whose files are as they were made.

    Raises:
        ValueError: They are not.
        OSError: One of them is not there.
    """
    checksums = read_checksums(os.path.join(folder, _CHECKSUMS))
    for name in checksums.files:
        if os.path.basename(name) != name:
            raise ValueError(f"{checksums.path} names files of another folder")
        checksums.check(name, os.path.join(folder, name))
    return checksums
