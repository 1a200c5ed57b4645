# SPDX-License-Identifier: Apache-2.0
"""The copy that an asynchronous save writes from, and one file of a checkpoint."""

import random
import weakref
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_mcore.checkpoint import writer as checkpoint_writer
from lightning_mcore.checkpoint.manifest import FileRecord
from lightning_mcore.checkpoint.save import Piece
from lightning_mcore.checkpoint.writer import Staging

BLOCK = 1024


def some_pieces(*sizes: int) -> list[Piece]:
    """Return an object, and tensors of so many bytes in turn fp32 and bytes."""
    contents = [torch.arange(size // 4, dtype=torch.float32) for size in sizes[::2]]
    contents += [torch.arange(size).to(torch.uint8) for size in sizes[1::2]]
    return [Piece(MetadataIndex("object"), b"plain"), *(Piece(MetadataIndex("t"), tensor) for tensor in contents)]


def test_a_copy_lies_in_blocks_and_is_kept_for_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = torch.empty

    def watched(size: int, **arguments: object) -> torch.Tensor:
        taken.append(size)
        return empty(size, **arguments)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(checkpoint_writer, "_STAGING_BLOCK", BLOCK)
    monkeypatch.setattr(torch, "empty", watched)
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
    assert [size for size in taken if size] == [5056, 1024, 960, 896]  # one tensor is larger than a block
    taken.clear()
    staging.copy(pieces)
    assert not any(taken)
    staging.copy(some_pieces(400, 401, 400, 1000, 5000, 7, 400, 900))
    assert [size for size in taken if size] == [1024, 896]  # one has grown, one is new


def test_quantized_tensors_are_copied_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def dequantized(tensor: torch.Tensor) -> torch.Tensor:
        assert not any(reference() is not None for reference in made[:-1])
        plain = tensor.clone()
        made.append(weakref.ref(plain))
        return plain

    monkeypatch.setattr(checkpoint_writer, "_plain", dequantized)
    pieces = some_pieces(400, 400, 400, 400)
    copies = Staging().copy(pieces)
    assert len(made) == 4
    for piece, copy in zip(pieces[1:], copies[1:], strict=True):
        assert torch.equal(piece.content, copy.content)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 1, 4096, 10_000, 8 << 20, (8 << 20) + 5, 20_000_000])
def test_a_file_is_what_was_written_with_the_checksum_of_zlib(length: int, tmp_path: Path) -> None:
    """In parts that end within the buffer and beyond it, on blocks of the disk and between them."""
    content = random.Random(length).randbytes(length)
    with checkpoint_writer.ChecksummedFile(str(tmp_path / "file")) as file:
        for start in range(0, length, 3_000_001):
            file.write(memoryview(content)[start : start + 3_000_001])
    assert (tmp_path / "file").read_bytes() == content
    assert file.record == FileRecord(length, f"{zlib.crc32(content):08x}")
