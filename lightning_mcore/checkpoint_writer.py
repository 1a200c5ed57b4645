# SPDX-License-Identifier: Apache-2.0
"""Write the tensors of a checkpoint, in Megatron's ``torch_dist`` format, by threads of this process.

Megatron plans a save well: which rank writes which piece, so that data-parallel copies share the work, and what the
file ``.metadata`` says of all pieces. Its writer is another matter. It forks processes (a parent waits for ever for one
that dies), starts one more that imports the user's script a second time, and it copies what lies in a common buffer, as
all parameters of its DistributedDataParallel do. So :func:`plan_shards` puts Megatron's functions for planning in a row
where a failure on one rank is a failure on all, and :func:`write_pieces`, in a thread of this process, writes directly
from the memory of the tensors, with the checksum of the file on the way, and flushed to the disk.

A save that training does not wait for writes from a copy: :class:`Staging` keeps the memory for it, because memory that
is touched for the first time is slow. ``checkpoint_save.py`` calls this; any ``dist_checkpointing.load`` reads the
result.
"""

import io
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from lightning_mcore.agreement import collect
from lightning_mcore.checkpoint_format import METADATA_FILE, FileRecord
from lightning_mcore.checksummed_file import ChecksummedFile
from lightning_mcore.tensor_record import frame_tensor, tensor_bytes

_DCP_VERSION = "1.0.0"  # of torch.distributed.checkpoint's metadata, since torch 2.8
_ALIGNMENT = 64  # bytes, of tensors in the staging memory and of archives in a file

Places = dict[MetadataIndex, _StorageInfo]


@dataclass(frozen=True)
class Piece:
    """What this rank writes of one tensor or object.

    Args:
        index: Its name and place, as the metadata has them.
        content: A tensor on any device, or the bytes of an object.
    """

    index: MetadataIndex
    content: Tensor | bytes


@dataclass(frozen=True)
class ShardPlan:
    """What one rank has to write.

    Args:
        pieces: The pieces that this rank writes.
        metadata: What all ranks write; on rank 0 only.
    """

    pieces: list[Piece]
    metadata: Metadata | None


def plan_shards(sharded_state: dict[str, Any], copies: dist.ProcessGroup) -> ShardPlan:
    """Agree with all ranks on who writes what; collective over the world.

    Source: megatron-core 0.16.1 to 0.19.2, ``dist_checkpointing.save`` through ``FullyParallelSaveStrategyWrapper`` and
    ``TorchDistSaveShardedStrategy``, whose checks fail on rank 0 alone while the others wait.

    Args:
        sharded_state: This rank's sharded tensors and objects, nested as one likes; factories in it are applied.
        copies: The ranks that hold copies of each other's tensors and share the writing.

    Raises:
        ValueError: The pieces of all ranks do not make whole tensors.
    """
    own: dict[str, Any] = {}

    def preprocess() -> list[Any]:
        own.update(save_preprocess(sharded_state, False)[0])
        return [piece.without_data() for piece in nested_values(own)]

    collect(preprocess, _validate)
    shares = determine_main_replica_uniform_distribution(own, copies)
    distribute_main_replicas_with_precomputed_distribution(own, copies, shares)
    planner: Any = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    pieces: list[Piece] = []

    def plan_own() -> SavePlan:
        flat = _replace_state_dict_keys_with_sharded_keys(own, True)[0]
        try:
            tensors = mcore_to_pyt_state_dict(flat, False)
        except CheckpointingException as error:
            raise ValueError(f"a piece of this rank cannot be saved: {error}") from error
        planner.set_up_planner(tensors, is_coordinator=dist.get_rank() == 0)
        plan: SavePlan = planner.create_local_plan()
        pieces.extend(_piece(item, planner) for item in plan.items)
        return plan

    def plan_all(plans: list[SavePlan]) -> Metadata:
        try:
            metadata: Metadata = planner.create_global_plan(plans)[1]
        except (ValueError, AssertionError) as error:
            raise ValueError(f"the pieces of all ranks do not make whole tensors: {error}") from error
        return metadata

    return ShardPlan(pieces, collect(plan_own, plan_all))


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


def _validate(all_pieces: list[list[Any]]) -> None:
    try:
        validate_sharding_integrity(all_pieces)
    except Exception as error:
        raise ValueError(f"the pieces of all ranks do not make whole tensors: {error}") from error


def _piece(item: WriteItem, planner: Any) -> Piece:
    content: Tensor | io.BytesIO = planner.resolve_data(item)
    return Piece(item.index, content.getvalue() if isinstance(content, io.BytesIO) else content.detach())


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
