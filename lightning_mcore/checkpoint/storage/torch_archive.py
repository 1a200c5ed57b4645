# SPDX-License-Identifier: Apache-2.0
"""One tensor as an archive of ``torch.save``: make its zip frame for writing, find its bytes for reading, copy nothing.

A ``.distcp`` file of the ``torch_dist`` format is a row of ``torch.save`` archives, one for each piece of a tensor.
``torch.save`` and ``torch.load`` are slower than a good disk: the first computes the checksum of the archive in a slow
loop, the second makes one more copy. The archive itself is simple: an uncompressed zip file with a pickle of shape and
type, and the bytes. So the writer puts the frame of :func:`frame_tensor` around the memory of the tensor, and the
reader finds these bytes in a mapped file (:func:`find_tensor`). ``torch.load`` reads these archives, and
:func:`find_tensor` reads those of ``torch.save``. ``zipfile`` is not used for writing, because it takes three times as
long for small tensors.

``checkpoint/writer.py`` writes with it and ``checkpoint/reader.py`` reads with it. This module opens no files.
"""

import io
import mmap
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

_FOLDER = "archive"
_ALIGNMENT = 64  # bytes; the data begin at a multiple of it, as in torch's archives
_PADDING = b"FB"  # the id of the extra field that torch pads with
_LIMIT = 0xFFFFFFFF  # bytes from which zip uses its 64-bit fields
_POLYNOMIAL = 0xEDB88320
_BITS = 32
_READERS = 4  # threads that compute checksums of one archive
_WORTH_A_THREAD = 1 << 20  # bytes


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, of any shape and dtype, as bytes."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def frame_tensor(dtype: torch.dtype, shape: tuple[int, ...], checksum: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after those of a contiguous tensor in an archive of ``torch.save``.

    Source: torch 2.13, ``torch.serialization._save``; readable since torch 1.6.

    Args:
        dtype: Type of the tensor.
        shape: Its shape.
        checksum: CRC32 of its bytes.
    """
    size = prod(shape) * dtype.itemsize
    records = [
        ("data.pkl", tensor_pickle(dtype, shape)),
        ("byteorder", sys.byteorder.encode()),
        ("version", b"3\n"),
    ]
    head, directory = b"", b""
    for name, content in records:
        local, central = _record(name, len(head), len(content), zlib.crc32(content))
        head, directory = head + local + content, directory + central
    local, central = _record("data/0", len(head), size, checksum, aligned=True)
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


def find_tensor(archive: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], check: bool) -> Tensor | None:
    """Return the tensor in an archive of ``torch.save``, in the archive's own memory.

    Args:
        archive: A mapped file. The archive ends at the end of the file, and may begin after its start.
        dtype: The type that the tensor must have.
        shape: The shape that it must have.
        check: Whether to compare the checksums of the archive, which reads all of it.

    Returns:
        The tensor, of the given shape and dtype; None if the archive holds something else, which ``torch.load`` can
        read.

    Raises:
        ValueError: A checksum differs, or the archive cannot be read.
    """
    places = _records(archive)
    if check:
        _check_all(archive, places)
    plain = all(record.compress_type == zipfile.ZIP_STORED for record in places.values())
    if not plain or "data/0" not in places or "data/1" in places:
        return None
    if _content(archive, places["data.pkl"]) != tensor_pickle(dtype, shape):
        return None
    data = places["data/0"]
    if data.file_size != prod(shape) * dtype.itemsize:
        raise ValueError("its tensor has another size")
    if data.file_size == 0:
        return torch.empty(shape, dtype=dtype)
    found = torch.frombuffer(archive, dtype=torch.uint8, count=data.file_size, offset=_start(archive, data))
    if found.data_ptr() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype).view(shape)


def check_archive(archive: mmap.mmap) -> None:
    """Compare all checksums of an archive of ``torch.save``, whatever it holds; reads all of it.

    Raises:
        ValueError: A checksum differs, or the archive cannot be read.
    """
    _check_all(archive, _records(archive))


def combine_checksums(first: int, second: int, length: int) -> int:
    """Return the CRC32 of two byte strings joined together.

    Source: ``crc32_combine`` of zlib 1.3, which Python does not offer.

    Args:
        first: CRC32 of the first.
        second: CRC32 of the second.
        length: Bytes of the second.
    """
    return _multiply(_shift(length), first) ^ second


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Return x to the power of the bits of ``length`` bytes, modulo the polynomial of CRC32."""
    result, power = 1 << 31, 1 << 23  # x to the power of 0 and of 8, bits reflected
    while length:
        if length & 1:
            result = _multiply(power, result)
        power, length = _multiply(power, power), length >> 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(_BITS - 1, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


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


def _record(name: str, offset: int, size: int, checksum: int, aligned: bool = False) -> tuple[bytes, bytes]:
    """Return a record's header, which precedes its content, and its entry in the directory at the end."""
    encoded = f"{_FOLDER}/{name}".encode()
    short, long = (_LIMIT, struct.pack("<HHQQ", 1, 16, size, size)) if size >= _LIMIT else (size, b"")
    padding = b""
    if aligned:
        room = -(offset + 30 + len(encoded) + len(long) + 4) % _ALIGNMENT
        padding = struct.pack("<2sH", _PADDING, room) + bytes(room)
    fields = struct.pack("<5H3L2H", 45, 0, 0, 0, 33, checksum, short, short, len(encoded), len(long) + len(padding))
    local = b"PK\3\4" + fields + encoded + long + padding
    fields = struct.pack("<5H3L2H", 45, 0, 0, 0, 33, checksum, short, short, len(encoded), len(long))
    central = b"PK\1\2" + struct.pack("<H", 45) + fields + struct.pack("<3H2L", 0, 0, 0, 0, offset) + encoded + long
    return local, central


def _end_of_archive(directory: bytes, count: int, offset: int) -> bytes:
    size, end = len(directory), b""
    if offset >= _LIMIT:
        end = b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, count, count, size, offset)
        end += b"PK\6\7" + struct.pack("<LQL", 0, offset + size, 1)
    return directory + end + b"PK\5\6" + struct.pack("<4H2LH", 0, 0, count, count, size, min(offset, _LIMIT), 0)


def _records(archive: mmap.mmap) -> dict[str, zipfile.ZipInfo]:
    """Return the records of an archive, by their names in its folder."""
    stream: Any = archive
    try:
        with zipfile.ZipFile(stream) as content:
            records = {record.filename.partition("/")[2]: record for record in content.infolist()}
        for record in records.values():
            if not 0 <= _start(archive, record) <= len(archive) - record.compress_size:
                raise ValueError(record.filename)
    except Exception as error:  # zipfile can raise anything on a damaged archive
        raise ValueError("it is not an archive of torch.save") from error
    if "data.pkl" not in records:
        raise ValueError("it is not an archive of torch.save")
    return records


def _start(archive: mmap.mmap, record: zipfile.ZipInfo) -> int:
    name, extra = struct.unpack_from("<HH", archive, record.header_offset + 26)
    return record.header_offset + 30 + int(name) + int(extra)


def _content(archive: mmap.mmap, record: zipfile.ZipInfo) -> bytes:
    start = _start(archive, record)
    return archive[start : start + record.file_size]


def has_checksums(records: Iterable[zipfile.ZipInfo]) -> bool:
    """Return whether an archive has checksums; ``torch.serialization.set_crc32_options(False)`` leaves them out."""
    return any(record.CRC for record in records)


def _check_all(archive: mmap.mmap, records: dict[str, zipfile.ZipInfo]) -> None:
    if not has_checksums(records.values()):
        return
    largest_first = sorted(records.values(), key=lambda record: -record.file_size)
    if largest_first[0].file_size < _WORTH_A_THREAD:
        for record in largest_first:
            _check(archive, record)
        return
    with ThreadPoolExecutor(_READERS) as pool:  # zlib releases Python's global lock
        for _ in pool.map(partial(_check, archive), largest_first):
            pass


def _check(archive: mmap.mmap, record: zipfile.ZipInfo) -> None:
    start = _start(archive, record)
    with memoryview(archive) as whole, whole[start : start + record.compress_size] as content:
        if record.compress_type == zipfile.ZIP_STORED and zlib.crc32(content) != record.CRC:
            raise ValueError(f"the checksum of its record {record.filename} differs from the one in the archive")
