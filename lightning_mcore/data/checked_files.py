# SPDX-License-Identifier: Apache-2.0
"""Files whose checksums are compared before use, and cached folders that are rebuilt when they differ.

**Checksums.** A token dataset may be too large to read at each start, so each block of a file has its own checksum. A
reader checks a block when it first reads from it (:class:`CheckedBlocks`), or all blocks at once
(:meth:`Checksums.check`), as fast as the disk and a few threads allow. ``data/pretraining/index.py`` writes a checksum
file for each dataset that is made here.

**Cached folders.** :func:`cached_folder` makes a folder once for many runs. It appears when it is complete
(``checkpoint/atomic.py``), with the checksums of its files inside. If a file was damaged or changed since, the folder
is made again from its source and the log says so. So a cached file never decides what is learnt.
``data/pretraining/blend.py`` keeps Megatron's index files this way, ``data/finetuning/tokenized.py`` tokens.
"""

import errno
import functools
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from lightning_mcore.checkpoint.atomic import abandon, begin, publish

BLOCK = 1 << 16  # bytes; a sample is a few KiB, and the system reads 128 KiB ahead anyway

_log = logging.getLogger(__name__)

_CHECKSUMS = "checksums"
_FORMAT = 1
_THREADS = 4
_WHOLE = 1 << 30
_SAMPLED = 1 << 10
_CRC = struct.Struct("<I")

Marks = tuple[tuple[str, int, int, int] | None, ...]  # of files: path, bytes, time of modification in ns, inode


@dataclass(frozen=True)
class Checksums:
    """Content of a checksum file."""

    path: str
    files: Mapping[str, tuple[int, NDArray[np.uint32]]]  # file name -> size in bytes, CRC32 of each block
    identity: str

    def check(self, name: str, path: str) -> None:
        """Compare a file's size and every block. Raises ValueError if it is missing or differs, or OSError."""
        size, wanted = self.files[name]
        if not os.path.isfile(path):
            raise ValueError(f"{path} does not exist")
        require_size(path, size)
        different = np.flatnonzero(checksums_of(path)[1] != wanted)
        if len(different):
            raise ValueError(_damaged(path, int(different[0]), len(different)))


def write_checksums(path: str, files: Mapping[str, tuple[int, NDArray[np.uint32]]]) -> None:
    """Write a checksum file and flush it to disk."""
    # The format: a JSON line with names and sizes, the CRC32 of each block of each file in that order (little-endian
    # u32), and the CRC32 of all of this. The last four bytes thus identify the content of all files. One file of
    # 150,000 bytes has three blocks: a 56-byte line, 12 bytes and 4 bytes.
    head = {"format": _FORMAT, "block": BLOCK, "files": {name: size for name, (size, _) in files.items()}}
    content = json.dumps(head).encode() + b"\n" + b"".join(sums.astype("<u4").tobytes() for _, sums in files.values())
    with open(path, "wb") as file:
        file.write(content + _CRC.pack(crc32(content)))
        file.flush()
        os.fsync(file.fileno())


def read_checksums(path: str) -> Checksums:
    """Read a checksum file in full. Raises FileNotFoundError if it is missing, ValueError if it is damaged."""
    checksums = _mapped(path)
    if checksums is None or f"{crc32(np.memmap(path, np.uint8, 'r')[: -_CRC.size].data):08x}" != checksums.identity:
        raise ValueError(f"{path} is damaged")
    return checksums


def _mapped(path: str) -> Checksums | None:
    """Map a checksum file without reading all of it or comparing its own checksum; None if its structure is damaged."""
    if not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, "the file does not exist", path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        line = file.readline(1 << 16)
        file.seek(max(0, size - _CRC.size))
        identity = file.read()
    try:
        head = json.loads(line)
        sizes = [(str(name), int(bytes_)) for name, bytes_ in head["files"].items()]
        fits = (head["format"], head["block"]) == (_FORMAT, BLOCK) and all(size >= 0 for _, size in sizes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    counts = [-(-size // BLOCK) for _, size in sizes]
    if not fits or size != len(line) + 4 * sum(counts) + _CRC.size:
        return None
    table = np.memmap(path, "<u4", "r", len(line), (sum(counts),)) if sum(counts) else np.zeros(0, "<u4")
    parts = np.split(table, np.cumsum(counts)[:-1]) if counts else []
    files = {name: (size, part) for (name, size), part in zip(sizes, parts, strict=True)}
    return Checksums(path, files, f"{_CRC.unpack(identity)[0]:08x}")


def checksums_of(path: str) -> tuple[int, NDArray[np.uint32]]:
    """Return a file's size and the CRC32 of each block."""
    size = os.path.getsize(path)
    blocks = range(-(-size // BLOCK))
    return size, np.fromiter(_checksums(path, size, blocks, at_once=128), np.uint32, len(blocks))


def fingerprints(paths: Sequence[str]) -> list[str]:
    """Return a short content mark for each file: its size and a CRC32.

    Up to 1 GiB in total, files are read entirely. Beyond that, about 1,024 blocks of 64 KiB are read in all, spread
    evenly over each file, first and last included. Bytes changed in place between these blocks go unnoticed; bytes
    inserted or removed do not.
    """
    sizes = [os.path.getsize(path) for path in paths]
    most = max(2, _SAMPLED // max(1, len(paths))) if sum(sizes) > _WHOLE else None
    return [_fingerprint(path, size, most) for path, size in zip(paths, sizes, strict=True)]


def _fingerprint(path: str, size: int, most: int | None) -> str:
    count = -(-size // BLOCK)
    blocks = range(count) if most is None or count <= most else np.linspace(0, count - 1, most).astype(int).tolist()
    sums = b"".join(map(_CRC.pack, _checksums(path, size, blocks, at_once=16)))
    return f"{size} bytes, {crc32(sums):08x}"


def _checksums(path: str, size: int, blocks: Sequence[int], at_once: int) -> Iterator[int]:
    """Yield the CRC32 of some blocks of a file, in their order; a thread takes ``at_once`` of them at a time."""
    # crc32 and pread release the GIL, so threads run in parallel.
    with open(path, "rb") as file, ThreadPoolExecutor(_THREADS) as threads:

        def read(part: Sequence[int]) -> list[int]:
            places = [block * BLOCK for block in part]
            return [crc32(os.pread(file.fileno(), min(BLOCK, size - place), place)) for place in places]

        for part in threads.map(read, [blocks[start : start + at_once] for start in range(0, len(blocks), at_once)]):
            yield from part


def named_fingerprints(paths: Sequence[str]) -> list[str]:
    """Return the name of each file, without its folder, and its fingerprint."""
    return [f"{os.path.basename(path)} ({mark})" for path, mark in zip(paths, fingerprints(paths), strict=True)]


def first_change(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first entry that differs, with both values (``"absent"`` without one); None if all are equal."""
    for name in {**now, **then}:
        before, after = then.get(name, "absent"), now.get(name, "absent")
        if before != after:
            return name, before, after
    return None


class CheckedBlocks:
    """A memory-mapped file whose blocks are each checked before they are first read."""

    def __init__(self, path: str, checksums: str, name: str) -> None:
        said = _mapped(checksums)
        if said is None or name not in said.files:
            raise ValueError(f"{checksums} is damaged")
        self._path = path
        self._size, self._wanted = said.files[name]
        require_size(path, self._size)
        self._content = np.memmap(path, np.uint8, "r") if self._size else np.zeros(0, np.uint8)
        self._checked = np.zeros(len(self._wanted), np.bool_)

    def read(self, dtype: Any, count: int, offset: int) -> NDArray[Any]:
        """Return ``count`` numbers from byte ``offset`` on, [count]. Raises ValueError if a block has changed."""
        stop = offset + count * np.dtype(dtype).itemsize
        for block in range(offset // BLOCK, -(-stop // BLOCK)):
            if not self._checked[block]:
                if crc32(self._content[block * BLOCK : (block + 1) * BLOCK].data) != self._wanted[block]:
                    raise ValueError(_damaged(self._path, block))
                self._checked[block] = True
        return np.frombuffer(self._content, dtype, count, offset)


def require_size(path: str, size: int) -> None:
    """Raise ValueError unless a file has ``size`` bytes."""
    if (found := os.path.getsize(path)) != size:
        raise ValueError(f"{path} has {found} bytes, but had {size} when it was written")


def _damaged(path: str, block: int, blocks: int = 1) -> str:
    more = f", and in {blocks - 1} more blocks" if blocks > 1 else ""
    return f"{path} has changed since it was written: the checksum differs from byte {block * BLOCK} on{more}"


def cached_folder(folder: str, make: Callable[[str], None], what: str, check: bool = True) -> Checksums:
    """Let ``make`` fill a cache folder, unless it exists unchanged; return its checksums.

    If ``make`` raises, no folder is left behind. ``what`` names the files in messages. With ``check``, for one process
    per machine, existing files are compared with their checksums once per process.
    """
    # Concurrent runs may want the same folder. One of them writes it; the others wait and then find it finished.
    while True:
        try:
            if not check:
                return read_checksums(os.path.join(folder, _CHECKSUMS))
            return _checked(folder, stat_marks(os.path.join(folder, name) for name in sorted(os.listdir(folder))))
        except (ValueError, OSError) as error:
            if os.path.lexists(folder):
                _log.warning("%s are rebuilt: %s", what, error)
        try:
            partial = begin(folder)
        except RuntimeError as error:
            _log.info("waiting for %s, which another run is building: %s", what, error)
            time.sleep(1.0)
            continue
        except OSError as error:
            raise OSError(
                f"{what} cannot be written to cache_dir={os.path.dirname(folder)!r} ({error.strerror}); choose a"
                " writable folder that every machine sees"
            ) from error
        try:
            make(partial)
            # The files as they are on disk now; publish() renames the folder after their checksums are written.
            names = sorted(os.listdir(partial))
            found = {name: checksums_of(os.path.join(partial, name)) for name in names}
            write_checksums(os.path.join(partial, _CHECKSUMS), found)
            publish(folder)
        except BaseException:
            abandon(folder)
            raise
        return read_checksums(os.path.join(folder, _CHECKSUMS))


def is_cached(folder: str) -> bool:
    """Return whether :func:`cached_folder` has finished this folder."""
    return os.path.exists(os.path.join(folder, _CHECKSUMS))


def stat_marks(paths: Iterable[str]) -> Marks:
    """Return values that change when one of some files does, or appears or disappears."""
    marks: list[tuple[str, int, int, int] | None] = []
    for path in paths:
        try:
            stat = os.stat(path)
            marks.append((path, stat.st_size, stat.st_mtime_ns, stat.st_ino))
        except OSError:
            marks.append(None)
    return tuple(marks)


@functools.lru_cache(maxsize=1024)
def _checked(folder: str, marks: Marks) -> Checksums:
    """Compare a folder's files with their checksums, once for these ``marks``; raise ValueError or OSError."""
    checksums = read_checksums(os.path.join(folder, _CHECKSUMS))
    for name in checksums.files:
        # The names come from a file in the cache: they must not lead out of the folder.
        if os.path.basename(name) != name:
            raise ValueError(f"{checksums.path} lists files outside its folder")
        checksums.check(name, os.path.join(folder, name))
    return checksums
