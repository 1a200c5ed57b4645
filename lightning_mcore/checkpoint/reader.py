# SPDX-License-Identifier: Apache-2.0
"""Read the tensors of a ``torch_dist`` checkpoint into any layout, with checksums compared and no code run from it.

Each rank asks for the pieces that its layout needs, as parts of global tensors; ``.metadata`` says which files hold
them. Data-parallel copies divide the reading among themselves and exchange the results, as in Megatron.
:class:`ShardLoadStrategy` is Megatron's strategy with our :class:`ShardReader` in place of torch's reader, which

* unpickles ``.metadata`` and objects without checks, so it runs any code in them. Here only the classes that belong
  there are accepted, and objects are tried with ``weights_only=True`` first;
* reads a complete piece for each request that touches it, and copies it twice. Here files are mapped, and each request
  is copied once, into its place;
* does not notice a damaged file. Here each piece's checksum is compared.
"""

import io
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from isal.isal_zlib import crc32
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_mcore.checkpoint.files import has_checksums, open_store
from lightning_mcore.checkpoint.manifest import METADATA_FILE, damaged, some_of
from lightning_mcore.checkpoint.older_formats import RangeOfPiece
from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes, require_kept
from lightning_mcore.checkpoint.writer import tensor_pickle
from lightning_mcore.parallel.consensus import combine_on_rank0, run_on_all_ranks

OF_AN_OPTIMIZER = ("optimizer.", "chained_", "optimizer_")
"""How names of an optimizer's state begin."""

_SHOWN = 5  # names in an error
_AHEAD = 16 << 20  # bytes to read ahead, faster than page by page
_READERS = 4  # threads that compute checksums of one archive
_WORTH_A_THREAD = 1 << 20  # bytes


class ShardReader(FileSystemReader):
    """Reads pieces of tensors from mapped files.

    ``metadata`` was read safely; ``locate`` returns the local path of a file of the checkpoint.
    """

    def __init__(
        self, path: str, metadata: Metadata, locate: Callable[[str], str], check: bool, weights_only: bool
    ) -> None:
        super().__init__(path)
        self.checkpoint = path
        self.metadata = metadata
        self._locate = locate
        self._check = check
        self._weights_only = weights_only
        weights = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(OF_AN_OPTIMIZER)
        }
        shapes = {name: tuple(entry.size) for name, entry in weights.items()}
        dtypes = {name: entry.properties.dtype for name, entry in weights.items()}
        self._stored = StoredDtypes.of_tensors(dtypes, shapes)
        self._sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}  # of a tensor's pieces, by their offsets

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each requested part into its place."""
        requests: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            requests.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in requests.items():
            with open(self._locate(name), "rb") as file:
                items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
                self._read_file(file.fileno(), items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_piece(self, index: MetadataIndex) -> Tensor:
        """Return a stored piece in its mapped file's memory, in the stored dtype; ``ValueError`` if damaged."""
        info = self._place(index)
        with open(self._locate(info.relative_path), "rb") as file:
            os.posix_fadvise(file.fileno(), info.offset, info.length, os.POSIX_FADV_WILLNEED)
            return self._tensor(file.fileno(), info, index)

    def read_object(self, name: str) -> Any:
        """Return a stored object, reading only its bytes; ValueError if it is damaged or could run code."""
        info = self._place(MetadataIndex(name))
        fs, root = open_store(self.checkpoint)
        file = f"{root}/{info.relative_path}"
        content = self._object(fs.cat_file(file, info.offset, info.offset + info.length), info, name)
        return torch.load(content, map_location="cpu", weights_only=self._weights_only)[0]

    def _place(self, index: MetadataIndex) -> _StorageInfo:
        info: _StorageInfo | None = (self.metadata.storage_data or {}).get(index)
        if info is None:
            raise damaged(self.checkpoint, f"{METADATA_FILE} does not say where {index.fqn} is stored")
        return info

    def _read_file(self, file: int, items: list[ReadItem], planner: LoadPlanner) -> None:
        place, tensor, asked_for = None, None, 0
        # In the order of the file: the disk reads ahead, and requests for one piece share its map.
        for item in items:
            info: _StorageInfo = self.storage_data[item.storage_index]
            if self._check and info.offset + info.length > asked_for:
                ahead = max(info.length, _AHEAD)
                os.posix_fadvise(file, info.offset, ahead, os.POSIX_FADV_WILLNEED)
                asked_for = info.offset + ahead
            if item.type == LoadItemType.BYTE_IO:
                content = self._map(file, info)[-info.length :]
                planner.load_bytes(item, self._object(content, info, item.storage_index.fqn))
                continue
            if tensor is None or place != info:
                place, tensor = info, self._tensor(file, info, item.storage_index)
            # A rank with TP=2 that wants rows 4 to 7 of a stored fp32 piece [8, 6] has offsets (4, 0) and lengths (4,
            # 6): 96 of the piece's 192 bytes, straight from the file into the parameter.
            source = tensor
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(axis, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.size() != source.size():
                raise damaged(self.checkpoint, f"{item.storage_index.fqn} does not have the shape in {METADATA_FILE}")
            if not item.storage_index.fqn.startswith(OF_AN_OPTIMIZER):
                require_kept(item.storage_index.fqn, source, target.dtype, self._stored)
            target.copy_(source)
            planner.commit_tensor(item, target)

    def _tensor(self, file: int, info: _StorageInfo, index: MetadataIndex) -> Tensor:
        stored = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        # Once for each tensor: the experts of all layers may be 15,000 pieces of one
        if index.fqn not in self._sizes:
            self._sizes[index.fqn] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in stored.chunks}
        sizes = self._sizes[index.fqn]
        # An index without an offset is a tensor in one piece.
        wanted = next(iter(sizes.values()), ()) if index.offset is None else sizes.get(tuple(index.offset), ())
        shape = info.stored_shape if isinstance(info, RangeOfPiece) else wanted
        archive = self._map(file, info)
        try:
            tensor = find_tensor(archive, stored.properties.dtype, shape, self._check)
            if tensor is None:
                tensor = torch.load(io.BytesIO(archive[-info.length :]), map_location="cpu", weights_only=True)
        except (ValueError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise self._broken(info, index.fqn, error) from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            raise damaged(self.checkpoint, f"{index.fqn} does not have the shape in {METADATA_FILE}")
        if isinstance(info, RangeOfPiece):
            return tensor.reshape(-1)[info.start : info.start + prod(wanted)].view(wanted)
        return tensor

    def _object(self, content: bytes, info: _StorageInfo, name: str) -> io.BytesIO:
        try:
            if self._check and content.startswith(b"PK"):
                check_archive(content)
            if self._weights_only:
                torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{self.checkpoint} contains {name}, an object that could run code when it is read; load with "
                "weights_only=False if you trust its author"
            ) from error
        except (ValueError, RuntimeError, EOFError) as error:
            raise self._broken(info, name, error) from error
        return io.BytesIO(content)

    def _map(self, file: int, info: _StorageInfo) -> mmap.mmap:
        """Map the pages of a piece; the map ends with its archive."""
        if getattr(info, "transform_descriptors", None):  # since torch 2.7
            raise ValueError(
                f"{self.checkpoint} was written with torch extensions, {info.transform_descriptors}; save it without"
            )
        skipped = info.offset % mmap.ALLOCATIONGRANULARITY
        try:
            # ACCESS_COPY: torch.frombuffer wants writable memory, and nothing that is written reaches the file.
            return mmap.mmap(file, info.length + skipped, access=mmap.ACCESS_COPY, offset=info.offset - skipped)
        except (ValueError, OverflowError) as error:
            raise damaged(self.checkpoint, f"{info.relative_path} is shorter than {METADATA_FILE} says") from error

    def _broken(self, info: _StorageInfo, name: str, error: Exception) -> ValueError:
        return damaged(self.checkpoint, f"{info.relative_path} cannot be read at {name}: {error}")


class ShardLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Megatron's strategy with our reader; one rank's failure is raised on all before they exchange tensors."""

    def __init__(self, reader: ShardReader) -> None:
        super().__init__()
        self._reader = reader

    def load(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Any, *_: Any) -> dict[Any, Any]:
        """Read this rank's part; collective over the world."""
        return run_on_all_ranks(lambda: self._load(sharded_state_dict))

    def _load(self, sharded_state: dict[Any, Any]) -> dict[Any, Any]:
        """Read this rank's part without communication.

        Source: megatron-core 0.16.1 to 0.19.2, ``TorchDistLoadShardedStrategy.load``.
        """
        tensors = [piece for piece in nested_values(sharded_state) if isinstance(piece, ShardedTensor)]
        flat, flat_mapping, renaming = _replace_state_dict_keys_with_sharded_keys(sharded_state)
        state = mcore_to_pyt_state_dict(flat, True)
        planner: Any = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[piece for piece in tensors if not piece.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={piece.key: piece for piece in tensors if piece.allow_shape_mismatch},
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        planner.set_up_planner(state, self._reader.metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._reader.metadata, True)
        self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        found = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        result: dict[Any, Any] = _replace_sharded_keys_with_state_dict_keys(found, flat_mapping, renaming)
        _restore_dict_types(result, sharded_state)
        return result


def load_shards(reader: ShardReader, sharded_state: dict[str, Any], copies: dist.ProcessGroup) -> dict[str, Any]:
    """Replace the descriptions in ``sharded_state`` by tensors and objects, and return it; collective over the world.

    Tensors with data are read into it. The ranks of ``copies`` need the same pieces and divide the reading. Raises
    ``ValueError`` if the checkpoint lacks a part, has one of another shape, or is damaged.

    Source: megatron-core 0.16.1 to 0.19.2, ``dist_checkpointing.load``, without the file ``common.pt``.
    """

    def prepare() -> tuple[Any, Any, Any]:
        force_all_tensors_to_non_fp8(sharded_state)
        wanted, local, factories = load_preprocess(sharded_state)
        return extract_sharded_base(wanted)[0], local, factories

    wanted, result, factories = run_on_all_ranks(prepare)
    # All ranks send their mismatches to rank 0, so the error names what any of them misses, before anything is read.
    combine_on_rank0(lambda: _mismatches(reader.metadata, wanted), lambda found: _refuse(reader, found))
    combine_on_rank0(lambda: [piece.without_data() for piece in nested_values(wanted)], validate_sharding_integrity)
    strategy = FullyParallelLoadStrategyWrapper(ShardLoadStrategy(reader), copies)
    merge(result, strategy.load(wanted, reader.path))
    merged: dict[str, Any] = apply_factory_merges(result, factories)
    return merged


def _mismatches(metadata: Metadata, wanted: Any) -> tuple[set[str], set[str]]:
    """Return the names that the checkpoint lacks, and a text for each name with another shape."""
    stored, missing, other = metadata.state_dict_metadata, set(), set()
    for piece in nested_values(wanted):
        name = piece.unique_key if isinstance(piece, ShardedObject) else piece.key
        found = stored.get(name)
        if found is None or isinstance(found, TensorStorageMetadata) != isinstance(piece, ShardedTensor):
            missing.add(name)
        elif isinstance(found, TensorStorageMetadata) and not piece.allow_shape_mismatch:
            shapes = tuple(found.size), tuple(piece.global_shape)
            if shapes[0] != shapes[1]:
                other.add(f"{name} has {shapes[0]} and should have {shapes[1]}")
    return missing, other


def _refuse(reader: ShardReader, found: list[tuple[set[str], set[str]]]) -> None:
    missing, other = (set().union(*sets) for sets in zip(*found, strict=True))
    parts = []
    if missing:
        parts.append(f"it lacks {some_of(missing, _SHOWN)}")
    if other:
        parts.append(f"shapes differ: {some_of(other, _SHOWN)}")
    if parts:
        raise ValueError(
            f"{reader.checkpoint} does not fit this model: {'; '.join(parts)}; load it into the model that wrote it"
        )


def find_tensor(archive: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], check: bool) -> Tensor | None:
    """Return the tensor in an archive of ``torch.save``, in the archive's own memory.

    The archive ends with the mapped file, and may begin after its start. Returns None if it holds something other than
    one tensor of this dtype and shape, which ``torch.load`` can read. Raises ``ValueError`` if it is damaged; checksums
    are compared only with ``check``, which reads all of it.
    """
    # torch.load would copy the bytes once more.
    places = _records(archive)
    if check:
        _check_all(archive, places)
    plain = all(record.compress_type == zipfile.ZIP_STORED for record in places.values())
    if not plain or "data/0" not in places or "data/1" in places:
        return None
    # Bytes that are equal to what torch.save writes for this dtype and shape need no unpickling.
    if _content(archive, places["data.pkl"]) != tensor_pickle(dtype, shape):
        return None
    data = places["data/0"]
    if data.file_size != prod(shape) * dtype.itemsize:
        raise ValueError("its tensor has a different size")
    if data.file_size == 0:
        return torch.empty(shape, dtype=dtype)
    found = torch.frombuffer(archive, dtype=torch.uint8, count=data.file_size, offset=_start(archive, data))
    if found.data_ptr() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype).view(shape)


def check_archive(archive: mmap.mmap | bytes) -> None:
    """Compare all checksums of a ``torch.save`` archive; ``ValueError`` if one differs or the archive is damaged."""
    _check_all(archive, _records(archive))


def _records(archive: mmap.mmap | bytes) -> dict[str, zipfile.ZipInfo]:
    """Return the records of an archive, by their names in its folder."""
    stream: Any = io.BytesIO(archive) if isinstance(archive, bytes) else archive
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


def _start(archive: mmap.mmap | bytes, record: zipfile.ZipInfo) -> int:
    # A local header has 30 bytes, ending with the lengths of name and extra field. It must be read, because the
    # directory's extra field may have another length.
    name, extra = struct.unpack_from("<HH", archive, record.header_offset + 26)
    return record.header_offset + 30 + int(name) + int(extra)


def _content(archive: mmap.mmap, record: zipfile.ZipInfo) -> bytes:
    start = _start(archive, record)
    return archive[start : start + record.file_size]


def _check_all(archive: mmap.mmap | bytes, records: dict[str, zipfile.ZipInfo]) -> None:
    if not has_checksums(records.values()):
        return
    largest_first = sorted(records.values(), key=lambda record: -record.file_size)
    if len(largest_first) < 2 or largest_first[1].file_size < _WORTH_A_THREAD:
        for record in largest_first:
            _check(archive, record)
        return
    with ThreadPoolExecutor(_READERS) as pool:  # zlib releases Python's global lock
        for _ in pool.map(partial(_check, archive), largest_first):
            pass


def _check(archive: mmap.mmap | bytes, record: zipfile.ZipInfo) -> None:
    start = _start(archive, record)
    with memoryview(archive) as whole, whole[start : start + record.compress_size] as content:
        if record.compress_type == zipfile.ZIP_STORED and crc32(content) != record.CRC:
            raise ValueError(f"the checksum of its record {record.filename} differs from the one in the archive")
