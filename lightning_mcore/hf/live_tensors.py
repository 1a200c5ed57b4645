# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of the running model, brought together from the ranks that hold their parts.

Each rank writes files of its own. In a *round* every rank has one file to fill: it asks all owners for the rectangles
of that file, and sends from its own what the others ask for. Every rank knows the plan, so nobody asks anything: both
sides go through the same list in the same order. What travels is in main memory, and already in the type that is
written. A rank holds the file that it fills, and a bounded number of bytes on their way out.

``export.py`` calls :func:`places_of_all` and :func:`exchange`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.hf.export_plan import ExportPlan, Part, Place
from lightning_mcore.hf.pretrained import ModelPieces
from lightning_mcore.parallel.consensus import control_group, gather, on_all

_ON_THEIR_WAY = 256 << 20  # bytes that a rank sends at once, or one rectangle that is larger
_ALIGNMENT = 8  # bytes; what begins there can be of any type


@dataclass(frozen=True)
class _Transfer:
    """A rectangle on its way.

    Args:
        owner: Rank that holds it.
        writer: Rank that writes it.
        name: Of the Hugging Face tensor.
        part: Which rectangle.
    """

    owner: int
    writer: int
    name: str
    part: Part


def places_of_all(pieces: ModelPieces) -> dict[str, list[Place]]:
    """Return where each rectangle of the model lies: on which rank, as which of its pieces; collective over the world.

    Args:
        pieces: What this rank holds.
    """
    own = [
        (piece.name, piece.start, piece.shape, piece.data.dtype, number)
        for number, piece in enumerate(pieces.own)
        if piece.is_main
    ]
    places: dict[str, list[Place]] = {}
    for rank, found in enumerate(gather(own)):
        for name, start, shape, dtype, number in found:
            places.setdefault(name, []).append(Place(start, shape, dtype, (rank, number)))
    return places


def exchange(plan: ExportPlan, pieces: ModelPieces, files: Sequence[str]) -> dict[str, Tensor]:
    """Fill the file of this rank in one round; collective over the world.

    Args:
        plan: The same on every rank.
        pieces: What this rank holds.
        files: For each rank the file that it writes; those behind the last write none.

    Returns:
        The tensors of this rank's file; empty where it has none.

    Raises:
        Exception: A rank lacks the memory, or holds values that their new type cannot; the same on every rank.
    """
    rank = dist.get_rank()
    transfers = list(_transfers(plan, files))
    leaving = [transfer for transfer in transfers if transfer.owner == rank != transfer.writer]
    filled, arriving, waiting_room = on_all(lambda: _memory(plan, files, transfers, leaving))
    received = [_started(dist.irecv(arrival.buffer, arrival.owner, group=control_group())) for arrival in arriving]
    failures: list[Exception] = []
    for batch in _batches(leaving, plan, waiting_room.nbytes):
        _send(batch, plan, pieces, waiting_room, failures)
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

    on_all(finish)
    return filled


class _Arrival:
    """Memory for a rectangle that is received: its place, where that is one piece of memory."""

    def __init__(self, transfer: _Transfer, whole: Tensor) -> None:
        self._place = transfer.part.within_target(whole)
        self.owner = transfer.owner
        self.buffer = (
            self._place
            if self._place.is_contiguous()
            else torch.empty_like(self._place, memory_format=torch.contiguous_format)
        )

    def put(self) -> None:
        """Put it into its place, once it is there."""
        if self.buffer is not self._place:
            self._place.copy_(self.buffer)


def _memory(
    plan: ExportPlan, files: Sequence[str], transfers: Sequence[_Transfer], leaving: Sequence[_Transfer]
) -> tuple[dict[str, Tensor], list[_Arrival], Tensor]:
    """Take all the memory of a round: of this rank's file, of what arrives, and of what is on its way out.

    No rank sends before all have it: one that fails halfway would leave the others waiting for what never comes.
    """
    rank = dist.get_rank()
    own = plan.files[files[rank]] if rank < len(files) else ()
    filled = {name: torch.empty(plan.shapes[name], dtype=plan.dtypes[name]) for name in own}
    arriving = [_Arrival(t, filled[t.name]) for t in transfers if t.writer == rank != t.owner]
    sizes = [_room(transfer, plan) for transfer in leaving]
    room = min(sum(sizes), max(_ON_THEIR_WAY, *sizes)) if sizes else 0
    return filled, arriving, torch.empty(room, dtype=torch.uint8)


def _send(
    batch: Sequence[_Transfer],
    plan: ExportPlan,
    pieces: ModelPieces,
    waiting_room: Tensor,
    failures: list[Exception],
) -> None:
    """Send rectangles from the waiting room, and wait until they are gone.

    One that cannot be had is sent with any content, since somebody waits for it; ``failures`` tells of it.
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
    """Return the bytes that a rectangle takes in the waiting room, where each begins at a multiple of any type."""
    size = prod(transfer.part.block.hf_shape) * plan.dtypes[transfer.name].itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _batches(leaving: Sequence[_Transfer], plan: ExportPlan, most: int) -> Iterator[list[_Transfer]]:
    """Yield as many as find room at once, and then the next."""
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
    piece = pieces.own[part.place.source[1]]
    return part.within_place(piece.data.view(piece.shape) if piece.data.shape != piece.shape else piece.data)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work
