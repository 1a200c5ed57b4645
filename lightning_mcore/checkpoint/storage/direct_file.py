# SPDX-License-Identifier: Apache-2.0
"""One new file, written past the page cache (``O_DIRECT``) and flushed, with its checksum computed on the way.

A checkpoint is written once and rarely read soon. In the page cache it would evict pages of the training data, and
finding and clearing memory for it can take longer than the disk does. Direct writes need memory and sizes in whole
blocks of the disk, so everything passes through a buffer. On disks that refuse (memory disks, some network disks), the
same buffer is written in the ordinary way.

The checksum of a tensor is known from its archive (``torch_archive.py``), so the file's checksum is combined from its
parts. Computing it a second time over the tensor's bytes would make a save of large tensors take half as long again.

``checkpoint/writer.py`` writes all files of a checkpoint with it, ``hf/safetensors.py`` those of an export.
"""

import errno
import fcntl
import mmap
import os
import zlib
from typing import Self

from lightning_mcore.checkpoint.manifest import FileRecord
from lightning_mcore.checkpoint.storage.torch_archive import combine_checksums

_BUFFER = 8 << 20  # bytes; large, so that waiting for Python's global lock between two writes costs little
_BLOCK = 4096  # bytes; a multiple of the block size of common disks
_COMBINED_FROM = 1 << 16  # bytes from which a second checksum costs more than combining two


class ChecksummedFile:
    """A file being written in a ``with`` statement; it is on the disk when the statement ends.

    Args:
        path: Where to write; an existing file is replaced.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self._checksum = 0
        self._filled = 0
        self._buffer = mmap.mmap(-1, _BUFFER)
        self._descriptor = _open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._descriptor)

    def write(self, content: bytes | memoryview, checksum: int | None = None) -> None:
        """Append ``content``.

        Args:
            content: What to write.
            checksum: Its CRC32, if already known.

        Raises:
            OSError: The disk refuses.
        """
        length = len(content)
        if checksum is None or length < _COMBINED_FROM:
            self._checksum = zlib.crc32(content, self._checksum)
        else:
            self._checksum = combine_checksums(self._checksum, checksum, length)
        self.size += length
        done = 0
        while done < length:
            step = min(_BUFFER - self._filled, length - done)
            self._buffer[self._filled : self._filled + step] = content[done : done + step]
            self._filled += step
            done += step
            if self._filled == _BUFFER:
                self._write(_BUFFER)
                self._filled = 0

    @property
    def record(self) -> FileRecord:
        """Size and checksum."""
        return FileRecord(self.size, f"{self._checksum:08x}")

    def _finish(self) -> None:
        """Write the rest in whole blocks, truncate the file to its size, and flush it."""
        blocks = -(-self._filled // _BLOCK) * _BLOCK
        self._buffer[self._filled : blocks] = bytes(blocks - self._filled)
        self._write(blocks)
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)

    def _write(self, length: int) -> None:
        done = 0
        with memoryview(self._buffer) as buffer:
            while done < length:
                try:
                    done += os.write(self._descriptor, buffer[done:length])
                except OSError as error:
                    if error.errno != errno.EINVAL or not _leave_direct(self._descriptor):
                        raise
                if done % _BLOCK:  # a disk that is nearly full writes part of a block
                    _leave_direct(self._descriptor)


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _leave_direct(descriptor: int) -> bool:
    """Switch to ordinary writes; return False if they were ordinary already."""
    flags, direct = fcntl.fcntl(descriptor, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    if not flags & direct:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return True
