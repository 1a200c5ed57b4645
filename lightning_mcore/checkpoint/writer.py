# SPDX-License-Identifier: Apache-2.0
"""Write one rank's files of a ``torch_dist`` checkpoint in a thread of this process; copy tensors to the host first.

Megatron's own writer forks processes and waits forever if one dies. It starts another process, which imports the user's
script again. It also copies tensors that share a buffer, which all parameters in Megatron's DistributedDataParallel do.
:func:`write_pieces` writes straight from the tensors' memory, computes the file's checksum as it goes, and flushes the
file to the disk. ``save.py`` calls this; any ``dist_checkpointing.load`` reads the result. ``hf/safetensors.py`` writes
exported files with :class:`ChecksummedFile`.

An asynchronous save writes from a copy. :class:`Staging` keeps the memory of that copy, because the first access to new
memory is slow.
"""

import errno
import fcntl
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Self

import numpy
import torch
from isal.isal_zlib import crc32, crc32_combine
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from lightning_mcore.checkpoint.manifest import METADATA_FILE, FileRecord

_DCP_VERSION = "1.0.0"  # of torch.distributed.checkpoint's metadata since torch 2.8
_ALIGNMENT = 64  # bytes; for staged tensors, archives in a file, and their data, as in torch's
_STAGING_BLOCK = 1 << 30  # bytes of staging memory taken at once, unless a tensor is larger
_BUFFER = 8 << 20  # bytes; large, because waiting for Python's global lock between two writes costs time
_DISK_BLOCK = 4096  # bytes; a multiple of the block size of common disks
_REFUSALS = (errno.EINVAL, errno.EFAULT)  # of direct writes, by a disk or for memory of a driver
_LARGE = 1 << 20  # bytes from which a tensor begins on a block of the disk
_FOLDER = "archive"
_PADDING = b"FB"  # the id of the extra field that torch pads with
_LIMIT = 0xFFFFFFFF  # bytes from which zip uses its 64-bit fields

Places = dict[MetadataIndex, _StorageInfo]


@dataclass(frozen=True)
class Piece:
    """A part of one tensor or object that this rank writes."""

    index: MetadataIndex
    content: Tensor | bytes  # a tensor on any device, or the bytes of an object


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def object_bytes(content: Any) -> bytes:
    """Return what ``torch.save`` writes of an object; ``TypeError`` if a part of it cannot be pickled."""
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"the checkpoint contains an object that cannot be saved, {error}; remove it") from error
    return stream.getvalue()


def frame_tensor(dtype: torch.dtype, shape: tuple[int, ...], checksum: int, position: int = 0) -> tuple[bytes, bytes]:
    """Return the bytes before and after a contiguous tensor's bytes in an archive of ``torch.save``.

    ``checksum`` is the CRC32 of the tensor's bytes, ``position`` the archive's place in its file. Source: torch 2.13,
    ``torch.serialization._save``; readable since torch 1.6.
    """
    # torch.save computes an archive's checksum in a slow loop, and zipfile takes three times as long for small tensors.
    # Example: a [2, 3] fp32 tensor has 384 bytes before its 24 bytes, and 268 after them. The 2 MiB of a [1024, 512]
    # tensor begin on a disk block: after 4032 bytes if the archive begins at byte 4160 (4160 + 4032 = 2 x 4096).
    size = prod(shape) * dtype.itemsize
    records = [
        ("data.pkl", tensor_pickle(dtype, shape)),
        ("byteorder", sys.byteorder.encode()),
        ("version", b"3\n"),
    ]
    head, directory = b"", b""
    for name, content in records:
        local, central = _record(name, len(head), len(content), crc32(content))
        head, directory = head + local + content, directory + central
    local, central = _record("data/0", len(head), size, checksum, _alignment(size), position)
    head += local
    return head, _end_of_archive(directory + central, len(records) + 1, len(head) + size)


@lru_cache(maxsize=65536)
def tensor_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the pickle that ``torch.save`` writes for a contiguous tensor on the CPU."""
    template: Any = torch.empty(0, dtype=dtype)
    rebuild, arguments = template.__reduce_ex__(2)
    strides = tuple(torch.empty(shape, dtype=dtype, device="meta").stride())
    storage = _Storage(arguments[0], prod(shape) * dtype.itemsize)
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Call(rebuild, (storage, 0, tuple(shape), strides, *arguments[4:])))
    return stream.getvalue()


class _Storage:
    """Represents the tensor's bytes in the pickle."""

    def __init__(self, storage: Any, size: int) -> None:
        if isinstance(storage, torch.UntypedStorage):
            self.kind, self.length = torch.UntypedStorage, size
        else:
            self.kind, self.length = getattr(torch, storage._pickle_storage_type()), size // storage.dtype.itemsize


class _Call:
    """Represents the tensor in the pickle: a call that builds it."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.length) if isinstance(obj, _Storage) else None


def _alignment(size: int) -> int:
    """Return the alignment of a tensor of this many bytes, in memory and in a file."""
    return _DISK_BLOCK if size >= _LARGE else _ALIGNMENT


def _record(
    name: str, offset: int, size: int, checksum: int, alignment: int | None = None, position: int = 0
) -> tuple[bytes, bytes]:
    """Return a record's header, which precedes its content, and its entry in the directory at the end."""
    encoded = f"{_FOLDER}/{name}".encode()
    short, long = (_LIMIT, struct.pack("<HHQQ", 1, 16, size, size)) if size >= _LIMIT else (size, b"")
    padding = b""
    if alignment is not None:
        # 30 bytes precede the name, and 4 bytes of the extra field its padding.
        room = -(position + offset + 30 + len(encoded) + len(long) + 4) % alignment
        padding = struct.pack("<2sH", _PADDING, room) + bytes(room)
    fields = struct.pack("<5H3L2H", 45, 0, 0, 0, 33, checksum, short, short, len(encoded), len(long) + len(padding))
    local = b"PK\3\4" + fields + encoded + long + padding
    fields = struct.pack("<5H3L2H", 45, 0, 0, 0, 33, checksum, short, short, len(encoded), len(long))
    central = b"PK\1\2" + struct.pack("<H", 45) + fields + struct.pack("<3H2L", 0, 0, 0, 0, offset) + encoded + long
    return local, central


def _end_of_archive(directory: bytes, count: int, offset: int) -> bytes:
    size, end = len(directory), b""
    # zip64: a second end record with 64-bit sizes, and a locator that says where it is.
    if offset >= _LIMIT:
        end = b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, count, count, size, offset)
        end += b"PK\6\7" + struct.pack("<LQL", 0, offset + size, 1)
    return directory + end + b"PK\5\6" + struct.pack("<4H2LH", 0, 0, count, count, size, min(offset, _LIMIT), 0)


class ChecksummedFile:
    """A file being written in a ``with`` statement; it is on the disk when the statement ends.

    An existing file is replaced.
    """

    def __init__(self, path: str) -> None:
        # Writes bypass the page cache (O_DIRECT), where a checkpoint would evict training data. That takes memory,
        # places and sizes in whole disk blocks, so what is not aligned passes through a buffer. Some memory and network
        # disks get ordinary writes.
        self.path = path
        self.size = 0
        self._checksum = 0
        self._filled = 0
        self._buffer = numpy.frombuffer(mmap.mmap(-1, _BUFFER), numpy.uint8)  # begins on a page
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
        """Append bytes, whose CRC32 is ``checksum`` if known; ``OSError`` if the disk fails."""
        left = numpy.frombuffer(content, numpy.uint8)
        self.size += len(left)
        if checksum is not None:
            self._checksum = crc32_combine(self._checksum, checksum, len(left))
        while len(left):
            # File position and memory are both on a disk block: write without the buffer.
            if self._filled % _DISK_BLOCK == left.ctypes.data % _DISK_BLOCK == 0 and len(left) >= _LARGE:
                part = left[: min(_BUFFER, len(left) // _DISK_BLOCK * _DISK_BLOCK)]
                self._write(self._buffer[: self._filled])
                self._write(part)
                self._filled = 0
            else:
                part = left[: _BUFFER - self._filled]
                # numpy copies without Python's global lock
                self._buffer[self._filled : self._filled + len(part)] = part
                self._filled += len(part)
                if self._filled == _BUFFER:
                    self._write(self._buffer)
                    self._filled = 0
            if checksum is None:
                self._checksum = crc32(part, self._checksum)  # now, while it is in the processor's cache
            left = left[len(part) :]

    @property
    def record(self) -> FileRecord:
        """Size and checksum."""
        return FileRecord(self.size, f"{self._checksum:08x}")

    def _finish(self) -> None:
        """Write the rest in whole blocks, truncate the file to its size, and flush it."""
        blocks = -(-self._filled // _DISK_BLOCK) * _DISK_BLOCK
        self._buffer[self._filled : blocks] = 0
        self._write(self._buffer[:blocks])
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)

    def _write(self, blocks: Any) -> None:
        """Write an array of bytes, [length] in whole blocks of memory."""
        done = 0
        while done < len(blocks):
            try:
                done += os.write(self._descriptor, blocks[done:])
            except OSError as error:
                if error.errno not in _REFUSALS or not _leave_direct(self._descriptor):
                    raise
            if done % _DISK_BLOCK:  # a disk that is nearly full writes part of a block
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


def write_metadata(directory: str, metadata: Metadata, places: Places) -> FileRecord:
    """Write ``.metadata``, which says where each piece is; on rank 0, after all ranks have written.

    Source: torch 2.13, ``FileSystemWriter.finish``.
    """
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta()
    metadata.version = _DCP_VERSION
    with ChecksummedFile(os.path.join(directory, METADATA_FILE)) as file:
        file.write(pickle.dumps(metadata))
    return file.record


class Staging:
    """Host memory for a copy of the tensors that a rank writes; kept for the next save.

    It is allocated in blocks, because PyTorch rounds page-locked memory up to a power of two: 17 GB would take 32 GB.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with copied tensors, so that the originals may change; waits for copies from a GPU."""
        on_gpu = any(piece.content.is_cuda for piece in pieces if isinstance(piece.content, Tensor))
        places, sizes = _places(pieces)
        del self._blocks[len(sizes) :]
        for block, size in enumerate(sizes):
            if block == len(self._blocks):
                self._blocks.append(torch.empty(0, dtype=torch.uint8))
            if self._blocks[block].numel() < size:
                self._blocks[block] = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._blocks[block] = _memory(size, on_gpu)
        copies = list(pieces)
        for number, (block, offset) in places.items():
            content = pieces[number].content
            assert isinstance(content, Tensor)
            tensor = _dequantized(content)  # one tensor at a time, because this may allocate memory
            memory = self._blocks[block][offset : offset + tensor.numel() * tensor.element_size()]
            copy = memory.view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            copies[number] = Piece(pieces[number].index, copy)
        if on_gpu:
            torch.cuda.synchronize()
        return copies


def _memory(size: int, pinned: bool) -> Tensor:
    """Return uninitialised memory that begins on a disk block, as all page-locked memory does: [size] uint8."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(size + _DISK_BLOCK, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _DISK_BLOCK :][:size]


def _places(pieces: Sequence[Piece]) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return block and offset of each tensor, by its index in ``pieces``, and the size of each block, in bytes."""
    contents = {number: piece.content for number, piece in enumerate(pieces) if isinstance(piece.content, Tensor)}
    bytes_of = {number: content.numel() * content.dtype.itemsize for number, content in contents.items()}
    lengths = {number: -(-size // _alignment(size)) * _alignment(size) for number, size in bytes_of.items()}
    places: dict[int, tuple[int, int]] = {}
    sizes: list[int] = []
    for number in sorted(lengths, key=lambda number: -lengths[number]):
        length = lengths[number]
        block = next((block for block, size in enumerate(sizes) if size + length <= _STAGING_BLOCK), len(sizes))
        if block == len(sizes):
            sizes.append(0)
        places[number] = block, sizes[block]
        sizes[block] += length
    return places, sizes


def write_pieces(
    directory: str,
    prefix: str,
    pieces: Sequence[Piece],
    others: Mapping[str, bytes],
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[Places, dict[str, FileRecord]]:
    """Write one rank's part of a checkpoint: its pieces in ``<prefix>0.distcp``, and ``others`` by name.

    Returns where each piece is, and size and checksum of each file. Raises ``OSError`` if the disk fails, and
    ``InterruptedError`` once ``is_stopped`` returns True.
    """
    places: Places = {}
    records: dict[str, FileRecord] = {}
    if pieces:
        name = f"{prefix}0.distcp"
        with ChecksummedFile(os.path.join(directory, name)) as file:
            for piece in pieces:
                if is_stopped():
                    raise InterruptedError("the save was cancelled")
                file.write(bytes(-file.size % _ALIGNMENT))
                start = file.size
                if isinstance(piece.content, Tensor):
                    _write_tensor(file, _dequantized(piece.content).cpu().contiguous())
                else:
                    file.write(piece.content)
                places[piece.index] = _StorageInfo(name, start, file.size - start)
        records[name] = file.record
    for name, content in others.items():
        with ChecksummedFile(os.path.join(directory, name)) as file:
            file.write(content)
        records[name] = file.record
    return places, records


def _dequantized(tensor: Tensor) -> Tensor:
    """Return a plain tensor; FP8 tensors of TransformerEngine are dequantized."""
    return tensor.dequantize() if is_float8tensor(tensor) else tensor


def _write_tensor(file: ChecksummedFile, tensor: Tensor) -> None:
    content = tensor_bytes(tensor)
    checksum = crc32(content)
    before, after = frame_tensor(tensor.dtype, tuple(tensor.shape), checksum, file.size)
    file.write(before)
    file.write(content, checksum)
    file.write(after)
