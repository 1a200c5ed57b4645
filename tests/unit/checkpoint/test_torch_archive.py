# SPDX-License-Identifier: Apache-2.0
"""Our archives of tensors are those of torch.save, byte by byte where it matters."""

import io
import mmap
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mcore.checkpoint import reader
from lightning_mcore.checkpoint.reader import check_archive, find_tensor
from lightning_mcore.checkpoint.writer import frame_tensor, tensor_bytes, tensor_pickle

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.complex64,
    torch.float8_e4m3fn,
]
SHAPES = [(), (0,), (0, 3), (5,), (2, 3), (7, 1, 3), (64, 33)]

cases = pytest.mark.parametrize(("dtype", "shape"), [(dtype, shape) for dtype in DTYPES for shape in SHAPES])


def some_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def ours(tensor: torch.Tensor) -> bytes:
    content = tensor_bytes(tensor)
    before, after = frame_tensor(tensor.dtype, tuple(tensor.shape), zlib.crc32(content))
    return before + bytes(content) + after


def saved(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def theirs(tensor: torch.Tensor) -> bytes:
    return saved(tensor)


def mapped(archive: bytes, before: bytes = b"") -> mmap.mmap:
    memory = mmap.mmap(-1, len(before) + len(archive))
    memory[:] = before + archive
    return memory


def assert_same(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert found is not None
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert bytes(tensor_bytes(found)) == bytes(tensor_bytes(expected))


@cases
def test_torch_reads_what_is_framed_here(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some_tensor(dtype, shape)
    archive = ours(tensor)
    assert_same(torch.load(io.BytesIO(archive), weights_only=True), tensor)
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        assert records.testzip() is None
    with zipfile.ZipFile(io.BytesIO(theirs(tensor))) as records:
        assert tensor_pickle(dtype, shape) == records.read("archive/data.pkl")


@cases
def test_a_tensor_is_found_wherever_its_archive_begins(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some_tensor(dtype, shape)
    for archive in (ours(tensor), theirs(tensor)):
        for before in (b"", b"x" * 64, b"x" * 13):
            assert_same(find_tensor(mapped(archive, before), dtype, shape, check=True), tensor)


@pytest.mark.parametrize("position", [0, 64, 4032, 1_000_000])
def test_the_data_of_an_archive_is_aligned(position: int) -> None:
    """As torch aligns it; that of a large tensor to a block of the disk, wherever the archive begins."""
    tensors = (torch.arange(15.0).view(3, 5), 64), (torch.arange(500_000.0), 4096)
    for tensor, alignment in tensors:
        content = tensor_bytes(tensor)
        before, after = frame_tensor(tensor.dtype, tuple(tensor.shape), zlib.crc32(content), position)
        assert (position + len(before)) % alignment == 0
        archive = before + bytes(content) + after
        assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)
        assert_same(find_tensor(mapped(archive), tensor.dtype, tuple(tensor.shape), check=True), tensor)


def test_another_shape_type_or_layout_is_left_to_torch() -> None:
    tensor = some_tensor(torch.float32, (4, 6))
    assert find_tensor(mapped(theirs(tensor)), torch.float32, (6, 4), check=True) is None
    assert find_tensor(mapped(theirs(tensor)), torch.int32, (4, 6), check=True) is None
    assert find_tensor(mapped(theirs(tensor.T)), torch.float32, (6, 4), check=True) is None
    assert find_tensor(mapped(theirs(tensor[:2])), torch.float32, (2, 6), check=True) is None


def test_no_flipped_byte_goes_unseen() -> None:
    tensor = some_tensor(torch.float32, (2, 3))
    archive = ours(tensor)
    for place in range(len(archive)):
        damaged = bytearray(archive)
        damaged[place] ^= 0x40
        try:
            found = find_tensor(mapped(bytes(damaged)), torch.float32, (2, 3), check=True)
        except ValueError:
            continue
        if found is not None:  # in a field that nobody reads, such as a date
            assert_same(found, tensor)


def test_an_archive_may_be_larger_than_four_gigabytes(tmp_path: Path) -> None:
    size = (1 << 32) + 320
    before, after = frame_tensor(torch.uint8, (size,), checksum=0)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.write(before)
        file.seek(size - 1, 1)  # the rest is a hole in the file
        file.write(b"\x07" + after)
    assert torch.load(path, mmap=True, weights_only=True)[-1] == 7
    with path.open("rb") as file:
        found = find_tensor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), torch.uint8, (size,), check=False)
    assert found is not None
    assert found[-1] == 7


def test_a_cut_archive_is_an_error() -> None:
    archive = ours(some_tensor(torch.float32, (2, 3)))
    for length in (1, 50, len(archive) // 2, len(archive) - 1):
        with pytest.raises(ValueError, match="archive"):
            find_tensor(mapped(archive[:length]), torch.float32, (2, 3), check=True)


@pytest.mark.parametrize("by_threads", [True, False], ids=["by threads", "in turn"])
def test_a_flipped_bit_of_any_content_is_found(by_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_threads:
        monkeypatch.setattr(reader, "_WORTH_A_THREAD", 1)
    archive = saved({"weights": [torch.arange(9.0), torch.arange(4)], "step": 3})
    check_archive(mapped(archive))
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        for record in records.infolist():
            content = records.read(record)
            for place in (0, len(content) - 1):
                damaged = bytearray(archive)
                damaged[archive.index(content, record.header_offset) + place] ^= 0x10
                with pytest.raises(ValueError, match=f"the checksum of its record {record.filename} differs"):
                    check_archive(mapped(bytes(damaged)))
    with pytest.raises(ValueError, match=r"is not an archive of torch\.save"):
        check_archive(mapped(archive[: len(archive) // 2]))


def test_an_archive_without_checksums_is_read_unchecked() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        archive = saved(torch.arange(9.0))
    finally:
        torch.serialization.set_crc32_options(True)
    check_archive(mapped(archive))
    assert_same(find_tensor(mapped(archive), torch.float32, (9,), check=True), torch.arange(9.0))
