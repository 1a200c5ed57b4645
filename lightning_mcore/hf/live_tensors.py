# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of the running model, brought together from the ranks that hold their parts.

Each rank writes files of its own. In a *round* every rank has one file to fill: it asks all owners for the rectangles
of that file, and sends from its own what the others ask for. Every rank knows the plan, so nobody asks anything: both
sides go through the same list in the same order. What travels is in main memory, and already in the type that is
written. A rank holds the file that it fills, and a bounded number of bytes on their way out.

``export.py`` calls :func:`places_of_all` and :func:`exchange`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.agreement import control_group, gather
from lightning_mcore.hf.export_plan import ExportPlan, Part, Place
from lightning_mcore.hf.model_pieces import ModelPieces

_ON_THEIR_WAY = 256 << 20  # bytes that a rank sends before it waits for the first of them to arrive


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
    """
    rank = dist.get_rank()
    filled = {
        name: torch.empty(plan.shapes[name], dtype=plan.dtypes[name])
        for name in (plan.files[files[rank]] if rank < len(files) else ())
    }
    transfers = list(_transfers(plan, files))
    arriving = [_Arrival(t, filled[t.name]) for t in transfers if t.writer == rank != t.owner]
    leaving: deque[tuple[dist.Work, Tensor]] = deque()
    for transfer in transfers:
        if transfer.owner != rank:
            continue
        held = _held(pieces, transfer.part)
        if transfer.writer == rank:
            transfer.part.within_target(filled[transfer.name]).copy_(held)
            continue
        ready = held.to("cpu", plan.dtypes[transfer.name]).contiguous()
        while leaving and ready.nbytes + sum(sent.nbytes for _, sent in leaving) > _ON_THEIR_WAY:
            leaving.popleft()[0].wait()
        leaving.append((_started(dist.isend(ready, transfer.writer, group=control_group())), ready))
    for work, _ in leaving:
        work.wait()
    for arrival in arriving:
        arrival.finish()
    return filled


class _Arrival:
    """A rectangle that is received, in its place where that is one piece of memory."""

    def __init__(self, transfer: _Transfer, whole: Tensor) -> None:
        self._place = transfer.part.within_target(whole)
        self._buffer = self._place if self._place.is_contiguous() else torch.empty_like(self._place).contiguous()
        self._work = _started(dist.irecv(self._buffer, transfer.owner, group=control_group()))

    def finish(self) -> None:
        """Wait for it, and put it into its place."""
        self._work.wait()
        if self._buffer is not self._place:
            self._place.copy_(self._buffer)


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
