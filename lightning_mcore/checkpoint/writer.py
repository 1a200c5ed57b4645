# SPDX-License-Identifier: Apache-2.0
"""Write one rank's files of a ``torch_dist`` checkpoint in a thread of this process; copy tensors to the host first.

Megatron's own writer forks processes and waits for ever if one dies. It starts another process, which imports the
user's script again. It also copies tensors that share a buffer, as all parameters in Megatron's DistributedDataParallel
do. :func:`write_pieces` writes straight from the memory of the tensors, past the page cache, computes the checksum of
the file as it goes, and flushes the file to the disk.

An asynchronous save writes from a copy. :class:`Staging` keeps the memory of that copy, because the first access to new
memory is slow. ``save.py`` calls this; any ``dist_checkpointing.load`` reads the result.
"""

import os
import pickle
import zlib
from collections.abc import Mapping, Sequence

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from lightning_mcore.checkpoint.manifest import METADATA_FILE, FileRecord
from lightning_mcore.checkpoint.save_plan import Piece
from lightning_mcore.checkpoint.storage.direct_file import ChecksummedFile
from lightning_mcore.checkpoint.storage.torch_archive import frame_tensor, tensor_bytes

_DCP_VERSION = "1.0.0"  # version of torch.distributed.checkpoint's metadata since torch 2.8
_ALIGNMENT = 64  # bytes; for tensors in the staging memory and archives in a file
_BLOCK = 1 << 30  # bytes of staging memory taken at once, unless a tensor is larger

Places = dict[MetadataIndex, _StorageInfo]


def write_metadata(directory: str, metadata: Metadata, places: Sequence[Places]) -> FileRecord:
    """Write ``.metadata``, which says where each piece lies; on rank 0, after all ranks have written.

    Source: torch 2.13, ``FileSystemWriter.finish``.
    """
    metadata.storage_data = {index: place for of_rank in places for index, place in of_rank.items()}
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
        """Return the pieces with their tensors copied, so that the originals may change; waits for copies from a GPU.

        Raises:
            RuntimeError: There is not enough memory.
        """
        on_gpu = any(piece.content.is_cuda for piece in pieces if isinstance(piece.content, Tensor))
        places, sizes = _places(pieces)
        del self._blocks[len(sizes) :]
        for block, size in enumerate(sizes):
            if block == len(self._blocks):
                self._blocks.append(torch.empty(0, dtype=torch.uint8))
            if self._blocks[block].numel() < size:
                self._blocks[block] = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._blocks[block] = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        copies = list(pieces)
        for number, (block, offset) in places.items():
            content = pieces[number].content
            assert isinstance(content, Tensor)
            tensor = _plain(content)  # one tensor at a time, because this may allocate memory
            memory = self._blocks[block][offset : offset + tensor.numel() * tensor.element_size()]
            copy = memory.view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            copies[number] = Piece(pieces[number].index, copy)
        if on_gpu:
            torch.cuda.synchronize()
        return copies


def _places(pieces: Sequence[Piece]) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return block and offset of each tensor, by its index in ``pieces``, and the size of each block, in bytes."""
    lengths = {
        number: -(-piece.content.numel() * piece.content.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        for number, piece in enumerate(pieces)
        if isinstance(piece.content, Tensor)
    }
    places: dict[int, tuple[int, int]] = {}
    sizes: list[int] = []
    for number in sorted(lengths, key=lambda number: -lengths[number]):  # small tensors fill the gaps
        length = lengths[number]
        block = next((block for block, size in enumerate(sizes) if size + length <= _BLOCK), len(sizes))
        if block == len(sizes):
            sizes.append(0)
        places[number] = block, sizes[block]
        sizes[block] += length
    return places, sizes


def write_pieces(
    directory: str, prefix: str, pieces: Sequence[Piece], others: Mapping[str, bytes]
) -> tuple[Places, dict[str, FileRecord]]:
    """Write one rank's part of a checkpoint.

    Args:
        directory: Where to write.
        prefix: Start of the name of this rank's file of tensors.
        pieces: The pieces of tensors and objects.
        others: Files to write beside them, by name.

    Returns:
        Where each piece lies, and size and checksum of each file.

    Raises:
        OSError: The disk refuses.
    """
    places: Places = {}
    records: dict[str, FileRecord] = {}
    if pieces:
        name = f"{prefix}0.distcp"
        with ChecksummedFile(os.path.join(directory, name)) as file:
            for piece in pieces:
                file.write(bytes(-file.size % _ALIGNMENT))
                start = file.size
                if isinstance(piece.content, Tensor):
                    _write_tensor(file, _plain(piece.content).cpu().contiguous())
                else:
                    file.write(piece.content)
                places[piece.index] = _StorageInfo(name, start, file.size - start)
        records[name] = file.record
    for name, content in others.items():
        with ChecksummedFile(os.path.join(directory, name)) as file:
            file.write(content)
        records[name] = file.record
    return places, records


def _plain(tensor: Tensor) -> Tensor:
    """Return a plain tensor; one that TransformerEngine keeps in FP8 is dequantized."""
    return tensor.dequantize() if is_float8tensor(tensor) else tensor


def _write_tensor(file: ChecksummedFile, tensor: Tensor) -> None:
    content = tensor_bytes(tensor)
    checksum = zlib.crc32(content)
    before, after = frame_tensor(tensor.dtype, tuple(tensor.shape), checksum)
    file.write(before)
    file.write(content, checksum)
    file.write(after)
