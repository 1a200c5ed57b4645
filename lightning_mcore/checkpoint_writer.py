# SPDX-License-Identifier: Apache-2.0
"""Write the tensors of a checkpoint, in Megatron's ``torch_dist`` format, by a thread of this process.

Megatron's own writer forks processes (a parent waits for ever for one that dies), starts one more that imports the
user's script a second time, and it copies what lies in a common buffer, as all parameters of its
DistributedDataParallel do. :func:`write_pieces` writes directly from the memory of the tensors, with the checksum of
the file on the way, past the page cache and flushed to the disk.

A save that training does not wait for writes from a copy: :class:`Staging` keeps the memory for it, because memory that
is touched for the first time is slow. ``checkpoint_save.py`` calls this; any ``dist_checkpointing.load`` reads the
result.
"""

import os
import pickle
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from lightning_mcore.checkpoint_format import METADATA_FILE, FileRecord
from lightning_mcore.checksummed_file import ChecksummedFile
from lightning_mcore.shard_plan import Piece
from lightning_mcore.tensor_record import frame_tensor, tensor_bytes

_DCP_VERSION = "1.0.0"  # of torch.distributed.checkpoint's metadata, since torch 2.8
_ALIGNMENT = 64  # bytes, of tensors in the staging memory and of archives in a file

Places = dict[MetadataIndex, _StorageInfo]


def write_metadata(directory: str, metadata: Metadata, places: Sequence[Places]) -> FileRecord:
    """Write what says where each piece lies; on rank 0, when all ranks have written theirs.

    Source: torch 2.13, ``FileSystemWriter.finish``.
    """
    metadata.storage_data = {index: place for of_rank in places for index, place in of_rank.items()}
    metadata.storage_meta = StorageMeta()
    metadata.version = _DCP_VERSION
    with ChecksummedFile(os.path.join(directory, METADATA_FILE)) as file:
        file.write(pickle.dumps(metadata))
    return file.record


class Staging:
    """Memory on the host that holds a copy of what a rank is about to write; kept for the next save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with their tensors copied, so that the originals may change; waits for a GPU's copies.

        Raises:
            RuntimeError: There is not enough memory.
        """
        tensors = [_plain(piece.content) if isinstance(piece.content, Tensor) else None for piece in pieces]
        on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += 0 if tensor is None else -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of the old first
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for piece, tensor, offset in zip(pieces, tensors, offsets, strict=True):
            if tensor is None:
                copies.append(piece)
                continue
            memory = self._memory[offset : offset + tensor.numel() * tensor.element_size()]
            copy = memory.view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            copies.append(Piece(piece.index, copy))
        if on_gpu:
            torch.cuda.synchronize()
        return copies


def write_pieces(
    directory: str, prefix: str, pieces: Sequence[Piece], others: Mapping[str, bytes]
) -> tuple[Places, dict[str, FileRecord]]:
    """Write one rank's part of a checkpoint.

    Args:
        directory: Where to write.
        prefix: What the name of this rank's file of tensors begins with.
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
    """Return a tensor of a plain type: the low-precision ones of TransformerEngine are subclasses of Tensor."""
    plain: Tensor = tensor.dequantize() if "dequantize" in vars(type(tensor)) and tensor.is_cuda else tensor
    return plain


def _write_tensor(file: ChecksummedFile, tensor: Tensor) -> None:
    content = tensor_bytes(tensor)
    checksum = zlib.crc32(content)
    before, after = frame_tensor(tensor.dtype, tuple(tensor.shape), checksum)
    file.write(before)
    file.write(content, checksum)
    file.write(after)
