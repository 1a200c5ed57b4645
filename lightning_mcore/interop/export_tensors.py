# SPDX-License-Identifier: Apache-2.0
"""The tensors of an export: gathered from the ranks of a running model, or read from a sharded checkpoint.

**From the ranks**, in rounds. In a round, each rank fills one file of its own: it receives the file's rectangles from
their owners, and sends its own rectangles to the ranks that fill other files. Every rank knows the plan, so no requests
are needed: sender and receiver go through the same list in the same order. Rectangles are sent from host memory,
already converted to the dtype that is written. A rank holds the file that it fills, and a limited number of bytes to
send.

**From a checkpoint**, piece by piece in one process. A checkpoint in Megatron's ``torch_dist`` format, ours or
Megatron-LM's, holds each tensor as rectangles in several files, as its layout split it. :class:`StoredTensors` lists
these rectangles by their tensors' whole names (:attr:`~StoredTensors.places`) and reads them from mapped files. It
needs no process groups and no GPU, and only the memory of the pages that were read last.

``export.py`` calls :func:`places_of_all` and :func:`exchange`, or makes :class:`StoredTensors`.
"""

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from threading import Lock
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from isal.isal_zlib import crc32
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint.manifest import METADATA_FILE, damaged, least_sizes, read_metadata
from lightning_mcore.checkpoint.older_formats import as_today
from lightning_mcore.checkpoint.reader import OF_AN_OPTIMIZER, ShardReader
from lightning_mcore.hf.pretrained import ModelPieces
from lightning_mcore.hf.weight_map import whole_names
from lightning_mcore.hf.weight_rules import Shape
from lightning_mcore.interop.export_plan import ExportPlan, Part, Place
from lightning_mcore.layers.hidden_states import is_projection
from lightning_mcore.parallel.consensus import all_gather_object, control_group, run_on_all_ranks
from lightning_mcore.strategy import MCoreStrategy
from lightning_mcore.strategy.precision import dtype_of

_ON_THEIR_WAY = 256 << 20  # bytes that a rank sends at once, unless one rectangle is larger
_ALIGNMENT = 8  # bytes


@contextlib.contextmanager
def ready_to_read(module: pl.LightningModule) -> Iterator[None]:
    """Enter the runtime of ``MCoreStrategy``, if it runs the module, with all parameters complete."""
    trainer = module._trainer
    strategy: Any = trainer.strategy if trainer is not None else None
    if not isinstance(strategy, MCoreStrategy):
        yield
        return
    with strategy.runtime():
        # With overlap_param_gather, this rank's parameters are partly stale between two steps
        strategy.complete_parameters()
        yield


@dataclass(frozen=True)
class _Transfer:
    """A rectangle that one rank sends to another."""

    owner: int
    writer: int
    name: str
    part: Part


def places_of_all(pieces: ModelPieces) -> dict[str, list[Place]]:
    """Return the place of each rectangle of the model: its rank, and its index among that rank's pieces; collective."""
    own = [
        (piece.name, piece.start, piece.shape, piece.dtype, number)
        for number, piece in enumerate(pieces.own)
        if piece.is_main
    ]
    places: dict[str, list[Place]] = {}
    for rank, found in enumerate(all_gather_object(own)):
        for name, start, shape, dtype, number in found:
            places.setdefault(name, []).append(Place(start, shape, dtype, (rank, number)))
    return places


def exchange(plan: ExportPlan, pieces: ModelPieces, files: Sequence[str]) -> dict[str, Tensor]:
    """Fill this rank's file in one round, and return its tensors; collective over the world.

    ``files`` are the files of this round: rank n fills ``files[n]``, later ranks fill none and get an empty dict. If a
    file is there several times, several ranks get its tensors. The
    same error is raised on every rank if one lacks memory, or holds values that the new dtype cannot represent.
    """
    rank = dist.get_rank()
    transfers = list(_transfers(plan, files))
    leaving = [transfer for transfer in transfers if transfer.owner == rank != transfer.writer]
    filled, arriving, waiting_room = run_on_all_ranks(lambda: _memory(plan, files, transfers, leaving))
    # Post all receives before the first send, so that no send waits for a receive that comes later
    received = [_started(dist.irecv(arrival.buffer, arrival.owner, group=control_group())) for arrival in arriving]
    failures: list[Exception] = []
    for batch in _batches(leaving, plan, waiting_room.nbytes):
        _send(batch, plan, pieces, waiting_room, failures)
    # Sends and receives match by their order, so an error must not skip one: failures are raised below
    for work in received:
        work.wait()

    def finish() -> None:
        for failure in failures:
            raise failure
        for transfer in transfers:
            if transfer.owner == rank == transfer.writer:
                target = transfer.part.within_target(filled[transfer.name])
                plan.convert(transfer.name, _held(pieces, transfer.part), target)
        for arrival in arriving:
            arrival.put()

    run_on_all_ranks(finish)
    return filled


def digests(plan: ExportPlan, pieces: ModelPieces) -> dict[str, bytes]:
    """Return a digest of this rank's part of each tensor that it has a part of, converted to the dtype to write."""

    def converted(name: str, parts: Sequence[Part]) -> Iterator[Tensor]:
        for part in parts:
            values = torch.empty(part.block.hf_shape, dtype=plan.dtypes[name])
            plan.convert(name, _held(pieces, part), values)
            yield values

    own = {name: [part for part in plan.parts(name) if part.place.source[0] == dist.get_rank()] for name in plan.shapes}
    return {name: digest(converted(name, parts)) for name, parts in own.items() if parts}


def digest(tensors: Iterable[Tensor]) -> bytes:
    """Return 16 bytes that differ if a bit of the tensors does, which are contiguous and on the CPU."""
    found = blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return found.digest()


class _Arrival:
    """Memory for a rectangle to receive: its place in the tensor if that is contiguous, otherwise a buffer."""

    def __init__(self, transfer: _Transfer, whole: Tensor) -> None:
        self._place = transfer.part.within_target(whole)
        self.owner = transfer.owner
        self.buffer = (
            self._place
            if self._place.is_contiguous()
            else torch.empty_like(self._place, memory_format=torch.contiguous_format)
        )

    def put(self) -> None:
        """Copy the rectangle into its place after it has arrived."""
        if self.buffer is not self._place:
            self._place.copy_(self.buffer)


def _memory(
    plan: ExportPlan, files: Sequence[str], transfers: Sequence[_Transfer], leaving: Sequence[_Transfer]
) -> tuple[dict[str, Tensor], list[_Arrival], Tensor]:
    """Allocate a round's memory for a file, for receiving and for sending; no rank sends before all have it."""
    rank = dist.get_rank()
    own = plan.files[files[rank]] if rank < len(files) else ()
    filled = {name: torch.empty(plan.shapes[name], dtype=plan.dtypes[name]) for name in own}
    arriving = [_Arrival(t, filled[t.name]) for t in transfers if t.writer == rank != t.owner]
    sizes = [_room(transfer, plan) for transfer in leaving]
    # 3 rectangles of 100 MiB: 256 MiB, so two are sent, then one. A single one of 400 MiB gets a buffer of 400 MiB.
    room = min(sum(sizes), max(_ON_THEIR_WAY, *sizes)) if sizes else 0
    return filled, arriving, torch.empty(room, dtype=torch.uint8)


def _send(
    batch: Sequence[_Transfer],
    plan: ExportPlan,
    pieces: ModelPieces,
    waiting_room: Tensor,
    failures: list[Exception],
) -> None:
    """Send rectangles from the send buffer, and wait until they are sent.

    If one cannot be converted, arbitrary bytes are sent instead, because a rank waits for them; ``failures`` gets the
    error.
    """
    works, start = [], 0
    for transfer in batch:
        dtype, shape = plan.dtypes[transfer.name], transfer.part.block.hf_shape
        ready = waiting_room[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _room(transfer, plan)
        try:
            plan.convert(transfer.name, _held(pieces, transfer.part), ready)
        except Exception as error:
            failures.append(error)
        works.append(_started(dist.isend(ready, transfer.writer, group=control_group())))
    for work in works:
        work.wait()


def _room(transfer: _Transfer, plan: ExportPlan) -> int:
    """Return the bytes that a rectangle takes in the send buffer, aligned for any dtype: 16 for 5 values of bf16."""
    size = prod(transfer.part.block.hf_shape) * plan.dtypes[transfer.name].itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _batches(leaving: Sequence[_Transfer], plan: ExportPlan, most: int) -> Iterator[list[_Transfer]]:
    """Yield batches of transfers that fit into ``most`` bytes."""
    batch: list[_Transfer] = []
    free = most
    for transfer in leaving:
        size = _room(transfer, plan)
        if size > free:
            yield batch
            batch, free = [], most
        batch.append(transfer)
        free -= size
    yield batch


def _transfers(plan: ExportPlan, files: Sequence[str]) -> Iterator[_Transfer]:
    for writer, file in enumerate(files):
        for name in plan.files[file]:
            for part in plan.parts(name):
                yield _Transfer(part.place.source[0], writer, name, part)


def _held(pieces: ModelPieces, part: Part) -> Tensor:
    # The index of places_of_all counts all pieces of this rank, also those of which another rank has the main copy
    piece = pieces.own[part.place.source[1]]
    data = piece.data
    return part.within_place(data.view(piece.shape) if data.shape != piece.shape else data)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work


_MAPPED = 64 << 20  # bytes of pieces that stay mapped, because they may hold the next tensor


class StoredTensors:
    """The weights of a checkpoint, a directory on a disk of this machine."""

    def __init__(self, path: str) -> None:
        self.path = path = checkpoint_files.tensors_folder(path)
        if not checkpoint_files.writes_directly(path):
            raise ValueError(f"{path} is not on a disk of this machine; download it, and give the folder")
        fs, self._root = checkpoint_files.open_store(path)
        # Other programs' checkpoints have no checksums of files and do not describe their model
        self.is_ours = not checkpoint_files.is_megatron_checkpoint(path)
        self.manifest = manifest = checkpoint_files.check_sizes(path) if self.is_ours else None
        self.runs_in = None if manifest is None else dtype_of(manifest["precision"])
        content = self._read(METADATA_FILE)
        record = None if manifest is None else manifest["files"].get(METADATA_FILE)
        if record is not None and f"{crc32(content):08x}" != record["crc32"]:
            raise damaged(path, f"the checksum of {METADATA_FILE} differs from the one in the manifest")
        metadata = read_metadata(path, content)
        self._metadata = metadata if self.is_ours else as_today(metadata)
        for name, size in least_sizes(self._metadata).items():
            checkpoint_files.check_size(fs, self._root, path, name, size, or_more=True)
        self._readers = {check: self._reader(check) for check in (True, False)}
        self._lock = Lock()
        self._checked: set[MetadataIndex] = set()
        self._open: OrderedDict[MetadataIndex, Tensor] = OrderedDict()
        self.shapes: dict[str, Shape] = {}
        self.places: dict[str, list[Place]] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            is_weight = not key.startswith(OF_AN_OPTIMIZER) and not is_projection(key)
            if is_weight and isinstance(entry, TensorStorageMetadata):
                self._add(key, entry)

    def read(self, place: Place) -> Tensor:
        """Return a rectangle, of shape ``place.shape`` and the stored dtype, in the memory of the mapped file.

        Its checksum is compared once; ValueError if it differs. Any thread may call this.
        """
        index, layer = place.source
        stored = self._piece(index)
        return stored if layer is None else stored[layer]

    def _add(self, key: str, entry: TensorStorageMetadata) -> None:
        dtype = entry.properties.dtype
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        for name, (stored, shape) in whole_names(key, tuple(entry.size)).items():
            self.shapes[name] = shape
            self.places[name] = places = []
            for start, size in chunks:
                index = MetadataIndex(key, start)
                if stored.layer is None:
                    places.append(Place(start, size, dtype, (index, None)))
                # Stacked layers: a piece at (4, 0, 0) of size (2, 8, 8) holds layers 4 and 5, and layer 5 is its [1]
                elif start[0] <= stored.layer < start[0] + size[0]:
                    places.append(Place(start[1:], size[1:], dtype, (index, stored.layer - start[0])))

    def _piece(self, index: MetadataIndex) -> Tensor:
        with self._lock:
            if index in self._open:
                self._open.move_to_end(index)
                return self._open[index]
        reader = self._readers[index not in self._checked]
        piece = reader.read_piece(index)
        with self._lock:
            self._checked.add(index)
            self._open[index] = piece
            # Drop the piece that was used longest ago; its tensor's memory is unmapped when the last view of it is gone
            while len(self._open) > 1 and sum(tensor.nbytes for tensor in self._open.values()) > _MAPPED:
                self._open.popitem(last=False)
        return piece

    def _reader(self, check: bool) -> ShardReader:
        return ShardReader(self.path, self._metadata, self._locate, check, weights_only=True)

    def _locate(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _read(self, name: str) -> bytes:
        with open(self._locate(name), "rb") as file:
            return file.read()
