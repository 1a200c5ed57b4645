# SPDX-License-Identifier: Apache-2.0
"""The copy that an asynchronous save writes from, and one file of a checkpoint."""

import errno
import fcntl
import io
import mmap
import os
import random
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_mcore.checkpoint import writer as checkpoint_writer
from lightning_mcore.checkpoint.manifest import FileRecord
from lightning_mcore.checkpoint.reader import ShardReader
from lightning_mcore.checkpoint.writer import Piece, Staging, write_pieces

BLOCK = 1024


def some_pieces(*sizes: int) -> list[Piece]:
    """Return an object, and tensors of so many bytes in turn fp32 and bytes."""
    contents = [torch.arange(size // 4, dtype=torch.float32) for size in sizes[::2]]
    contents += [torch.arange(size).to(torch.uint8) for size in sizes[1::2]]
    return [Piece(MetadataIndex("object"), b"plain"), *(Piece(MetadataIndex("t"), tensor) for tensor in contents)]


def test_a_copy_lies_in_blocks_and_is_kept_for_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    memory = checkpoint_writer._memory

    def watched(size: int, pinned: bool) -> torch.Tensor:
        taken.append(size)
        return memory(size, pinned)

    monkeypatch.setattr(checkpoint_writer, "_STAGING_BLOCK", BLOCK)
    monkeypatch.setattr(checkpoint_writer, "_memory", watched)
    pieces, staging = some_pieces(400, 401, 400, 1000, 5000, 7, 400, 0), Staging()
    copies = staging.copy(pieces)
    for piece, copy in zip(pieces, copies, strict=True):
        if isinstance(piece.content, torch.Tensor):
            assert isinstance(copy.content, torch.Tensor)
            assert torch.equal(piece.content, copy.content)
            piece.content.fill_(1)
            assert not torch.equal(piece.content, copy.content) or piece.content.numel() == 0
        else:
            assert copy is piece
    assert taken == [5056, 1024, 960, 896]  # one tensor is larger than a block
    taken.clear()
    staging.copy(pieces)
    assert not taken
    staging.copy(some_pieces(400, 401, 400, 1000, 5000, 7, 400, 900))
    assert taken == [1024, 896]  # one has grown, one is new


def test_quantized_tensors_are_copied_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def dequantized(tensor: torch.Tensor) -> torch.Tensor:
        assert not any(reference() is not None for reference in made[:-1])
        plain = tensor.clone()
        made.append(weakref.ref(plain))
        return plain

    monkeypatch.setattr(checkpoint_writer, "_dequantized", dequantized)
    pieces = some_pieces(400, 400, 400, 400)
    copies = Staging().copy(pieces)
    assert len(made) == 4
    for piece, copy in zip(pieces[1:], copies[1:], strict=True):
        assert torch.equal(piece.content, copy.content)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [3_000_001, 2 << 20], ids=["between blocks", "whole blocks"])
@pytest.mark.parametrize("with_checksum", [True, False], ids=["its checksum known", "its checksum not known"])
@pytest.mark.parametrize("length", [0, 1, 4096, 10_000, 8 << 20, (8 << 20) + 5, 20_000_000])
def test_a_file_is_what_was_written_with_the_checksum_of_zlib(
    length: int, with_checksum: bool, part: int, tmp_path: Path
) -> None:
    """In parts that end within the buffer and beyond it, on blocks of the disk and between them."""
    content = random.Random(length).randbytes(length)
    memory = memoryview(mmap.mmap(-1, length + 1))[:length]  # begins on a block of the disk
    memory[:] = content
    with checkpoint_writer.ChecksummedFile(str(tmp_path / "file")) as file:
        for start in range(0, length, part):
            piece = memory[start : start + part]
            file.write(piece, zlib.crc32(piece) if with_checksum else None)
    assert (tmp_path / "file").read_bytes() == content
    assert file.record == FileRecord(length, f"{zlib.crc32(content):08x}")


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EFAULT], ids=["by the disk", "of the memory"])
def test_refused_direct_writes_become_ordinary_ones(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = os.write, []

    def refuses_direct(descriptor: int, blocks: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(blocks))
            raise OSError(refusal, os.strerror(refusal))
        return write(descriptor, blocks)

    monkeypatch.setattr(os, "write", refuses_direct)
    content = random.Random(refusal).randbytes(10_000_000)
    with checkpoint_writer.ChecksummedFile(str(tmp_path / "file")) as file:
        is_direct = fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content
    assert len(refused) == (1 if is_direct else 0)


def test_large_tensors_of_a_copy_are_written_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another copy, wherever they lie between small ones; torch reads each archive."""
    written: dict[int, int] = {}
    write = os.write

    def watched(descriptor: int, blocks: Any) -> int:
        count = write(descriptor, blocks)
        written[blocks.ctypes.data] = count
        return count

    sizes = (400, 401, 3_000_000, 1 << 20, 10_000_000, 7)
    pieces = [
        Piece(MetadataIndex(f"{size}"), torch.arange(size).to(torch.uint8).view(-1, 1 if size % 8 else 8))
        for size in sizes
    ]
    copies = Staging().copy(pieces)
    monkeypatch.setattr(os, "write", watched)
    places, records = checkpoint_writer.write_pieces(str(tmp_path), "__0_", copies, {"other": b"bytes"})
    [name] = records.keys() - {"other"}
    content = (tmp_path / name).read_bytes()
    assert records[name] == FileRecord(len(content), f"{zlib.crc32(content):08x}")
    for piece, copy in zip(pieces, copies, strict=True):
        assert isinstance(piece.content, torch.Tensor)
        assert isinstance(copy.content, torch.Tensor)
        place = places[piece.index]
        archive = content[place.offset : place.offset + place.length]
        assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), piece.content)
        begin, size = copy.content.data_ptr(), piece.content.numel()
        direct = sum(count for address, count in written.items() if begin <= address < begin + size)
        assert direct >= (size - (1 << 20) if size > 1 << 20 else 0)
        assert direct == 0 or begin % 4096 == 0


class _Counted(list[ChunkStorageMetadata]):
    """A list that counts how often someone goes through it."""

    passes = 0

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        self.passes += 1
        return super().__iter__()


def test_to_read_a_piece_the_other_pieces_of_its_tensor_are_not_searched(tmp_path: Path) -> None:
    offsets = [torch.Size([2 * number, 0]) for number in range(50)]
    pieces = [Piece(MetadataIndex("experts", offset), torch.full((2, 3), float(offset[0]))) for offset in offsets]
    places, _ = write_pieces(str(tmp_path), "__0_", pieces, {})
    chunks = _Counted(ChunkStorageMetadata(offset, torch.Size([2, 3])) for offset in offsets)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([100, 3]), chunks)
    metadata = Metadata({"experts": entry}, storage_data=places)
    reader = ShardReader(str(tmp_path), metadata, lambda name: str(tmp_path / name), True, True)
    before = chunks.passes
    for offset in offsets:
        assert torch.equal(reader.read_piece(MetadataIndex("experts", offset)), torch.full((2, 3), float(offset[0])))
    assert chunks.passes == before + 1  # with 15,000 pieces, a pass for each of them takes minutes
