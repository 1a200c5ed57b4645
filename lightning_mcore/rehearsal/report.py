# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_mcore.planning.report import count, size, table_text
from lightning_mcore.rehearsal.rank import RankReport

if TYPE_CHECKING:
    from lightning_mcore.rehearsal.run import Rehearsal

_HOLDERS = 5
_WAITS = 12


def rehearsal_text(rehearsal: "Rehearsal", planned: Mapping[int, int] | None = None, about: str = "") -> str:
    """Return tables of a rehearsal; ``planned`` is each stage's memory by ``plan``, in bytes; ``about`` explains it."""
    parts = [f"{rehearsal.layout} on {rehearsal.world_size:,} ranks, rehearsed in {rehearsal.seconds:.0f} s"]
    columns = ["rank", "stage", "parameters", "peak memory", " when", *(["plan", "peak / plan"] if planned else [])]
    rows = []
    for rank in rehearsal.ranks:
        row = [f"{rank.rank:,}", f"{rank.stage}", count(rank.parameters), size(rank.peak_bytes), f" {rank.peak_phase}"]
        if planned:
            row += [size(planned[rank.stage]), f"{rank.peak_bytes / planned[rank.stage]:.3f}"]
        rows.append([*row, f"{rank.operators:,}"])
    parts.append(table_text("ranks", [*columns, "operators of a step"], rows))
    parts += [about] if about else []
    for rank in rehearsal.ranks:
        parts += _of_rank(rank)
    for place, value in {place: value for rank in rehearsal.ranks for place, value in rank.reads.items()}.items():
        parts.append(f"assumed: {place} reads {value:g}; --assume {place}=VALUE assumes another value")
    for note in sorted({note for rank in rehearsal.ranks for note in rank.notes}):
        parts.append(f"assumed: {note}")
    return "\n".join(parts)


def _of_rank(rank: RankReport) -> list[str]:
    holders = [
        (f"{holder.kind} {holder.module}".strip(), size(holder.bytes), f"{holder.bytes / rank.peak_bytes:.1%}")
        for holder in rank.holders[:_HOLDERS]
    ]
    traffic = [(f"{item.kind} over {item.group}", f"{item.calls:,}", size(item.bytes)) for item in rank.traffic]
    waits = [(f"{wait.where}: {wait.what}", f"{wait.times:,}") for wait in rank.waits[:_WAITS]]
    if len(rank.waits) > _WAITS:
        waits.append((f"{len(rank.waits) - _WAITS} other lines", f"{sum(w.times for w in rank.waits[_WAITS:]):,}"))
    name = f"rank {rank.rank:,}"
    parts = [table_text(f"{name}: what holds memory at the peak", ["holder", "memory", "share"], holders)]
    if traffic:
        parts.append(table_text(f"{name}: collectives of a step", ["collective", "calls", "data"], traffic))
    if waits:
        parts.append(table_text(f"{name}: where a step waits for the GPU", ["line", "times"], waits))
    return parts
