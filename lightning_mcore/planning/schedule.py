# SPDX-License-Identifier: Apache-2.0
"""The order of forward and backward passes on each pipeline stage: its bubble, what is in flight, and its picture.

Megatron has two training schedules for several stages. *1F1B*: a stage warms up with one forward pass for each later
stage, then alternates. *Interleaved*: a stage owns several chunks and runs a group of microbatches through one chunk
before the next; the warm-up is longer, and the bubble is divided by the number of chunks.

:class:`PipelineTimeline` knows that order, and simulates it with forward = 1 and backward = 2 units for a chunk, and
sending without cost. It measures the bubble: the share of the time in which an average stage is idle,
for 1F1B (pp - 1) / (m + pp - 1) of m microbatches.

A microbatch is in flight from its forward pass through a chunk to its backward pass through it; meanwhile its
activations are kept. :func:`in_flight` counts them, ``activation_memory.py`` weighs the counts.

:func:`schedule_picture` draws a row for each stage, time from left to right. A forward pass is one unit wide, a
backward pass two; dots are the bubble. Chunks of the interleaved schedule have a letter after the number of the
microbatch (``a`` is the first chunk). A wide picture is cut in its middle.

Source: the two pipelined schedules of megatron-core (0.16.1), whose warm-up and order of forward passes are used here.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from string import ascii_lowercase
from types import SimpleNamespace
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from lightning_mcore.config.layout import ParallelLayout

FORWARD_UNITS, BACKWARD_UNITS = 1, 2
_MOST_PASSES = 20_000
"""Longer schedules are not simulated pass by pass if the formula is exact or the schedule repeats itself. They are
drawn with fewer microbatches, which show the same."""
_CUT = " ... "


class Pass(NamedTuple):
    """One forward or backward pass of one microbatch through one chunk."""

    forward: bool
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        """Return ``F0`` or ``B0``; the caller adds the chunk."""
        return f"{'F' if self.forward else 'B'}{self.microbatch}"


class Played(NamedTuple):
    """A pass with its start and end, in units of time."""

    action: Pass
    start: int
    end: int


@dataclass(frozen=True)
class PipelineTimeline:
    """The schedule of one step, played."""

    num_stages: int  # pipeline-parallel size
    num_chunks: int  # chunks of each stage
    num_microbatches: int  # microbatches of a step
    group_size: int | None = None  # ``microbatch_group_size_per_vp_stage``; None is the pipeline size

    @classmethod
    def of(cls, layout: ParallelLayout, num_microbatches: int, group_size: int | None = None) -> "PipelineTimeline":
        """Make the timeline of a layout; a group that the microbatches do not fill gets Megatron's default size."""
        if group_size is not None:
            group_size = layout.microbatch_group_size(num_microbatches, group_size)
        return cls(layout.pipeline_model_parallel_size, layout.num_chunks, num_microbatches, group_size)

    @property
    def formula(self) -> float:
        """The bubble by the well-known formula, exact where the microbatches fill groups of the pipeline's size."""
        idle = self.num_stages - 1
        return idle / (self.num_chunks * self.num_microbatches + idle)

    @property
    def duration(self) -> int:
        """Time of a step, in units of one chunk's forward pass."""
        return _duration(self)

    @property
    def bubble(self) -> float:
        """Share of the step in which an average stage waits, between 0 and 1."""
        busy = self.num_chunks * self.num_microbatches * (FORWARD_UNITS + BACKWARD_UNITS)
        return 1 - busy / self.duration

    @property
    def num_passes(self) -> int:
        """Forward and backward passes of all stages."""
        return 2 * self.num_stages * self.num_chunks * self.num_microbatches

    def short(self, groups: int = 2) -> "PipelineTimeline":
        """Return the schedule with only as many microbatches as show how it begins, repeats itself and ends."""
        count, group = self.num_microbatches, self.group_size or self.num_stages
        return replace(self, num_microbatches=min(count, count % group + groups * group))

    def order(self, stage: int) -> list[Pass]:
        """Return the passes of a stage in the order in which Megatron runs them."""
        chunks, microbatches, group = self.num_chunks, self.num_microbatches, self.group_size or self.num_stages
        if self.num_stages == 1:
            return [Pass(forward, microbatch, 0) for microbatch in range(microbatches) for forward in (True, False)]
        ranks = SimpleNamespace(size=lambda: self.num_stages, rank=lambda: stage)
        virtual = chunks if chunks > 1 else None
        place = SimpleNamespace(pp_group=ranks, virtual_pipeline_model_parallel_size=virtual)
        warmup: int = get_pp_rank_microbatches(microbatches, chunks, group, p2p_communicator=place)[2]
        forwards = get_schedule_table(microbatches, chunks, group)
        backwards = [(microbatch, chunks - 1 - chunk) for microbatch, chunk in forwards]
        order = [Pass(True, *place) for place in forwards[:warmup]]
        for ahead, behind in zip(forwards[warmup:], backwards, strict=False):
            order += [Pass(True, *ahead), Pass(False, *behind)]
        return order + [Pass(False, *place) for place in backwards[len(forwards) - warmup :]]

    @cached_property
    def played(self) -> list[list[Played]]:
        """The passes of each stage with their times: each starts once its stage is free and its input is there."""
        ends: dict[tuple[bool, int, int], int] = {}  # of (forward, microbatch, place of the chunk in the model)
        rows: list[list[Played]] = [[] for _ in range(self.num_stages)]
        waiting = {stage: deque(self.order(stage)) for stage in range(self.num_stages)}
        while any(waiting.values()):
            before = len(ends)
            for stage, passes in waiting.items():
                row = rows[stage]
                while passes and (ready := self._ready(passes[0], stage, ends)) is not None:
                    action = passes.popleft()
                    start = max(ready, row[-1].end if row else 0)
                    row.append(Played(action, start, start + (FORWARD_UNITS if action.forward else BACKWARD_UNITS)))
                    ends[action.forward, action.microbatch, action.chunk * self.num_stages + stage] = row[-1].end
            if len(ends) == before:
                raise RuntimeError("the stages wait for each other in this schedule")
        return rows

    def _ready(self, action: Pass, stage: int, ends: Mapping[tuple[bool, int, int], int]) -> int | None:
        """Return when the input of a pass is there; None while it is not known."""
        forward, microbatch, chunk = action
        place = chunk * self.num_stages + stage
        if forward:
            return 0 if place == 0 else ends.get((True, microbatch, place - 1))
        is_last = place == self.num_stages * self.num_chunks - 1
        return ends.get((is_last, microbatch, place + (not is_last)))


@lru_cache(maxsize=4096)  # layouts that --suggest compares often have the same schedule
def _duration(timeline: PipelineTimeline) -> int:
    chunks, unit = timeline.num_chunks, FORWARD_UNITS + BACKWARD_UNITS
    group = timeline.group_size or timeline.num_stages
    if timeline.num_passes > _MOST_PASSES:
        if chunks == 1 or (group == timeline.num_stages and timeline.num_microbatches % group == 0):
            return (chunks * timeline.num_microbatches + timeline.num_stages - 1) * unit
        if (short := timeline.short()) != timeline:
            return short.duration + (timeline.num_microbatches - short.num_microbatches) * chunks * unit
    return max(row[-1].end for row in timeline.played)


def in_flight(timeline: PipelineTimeline, stage: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield, before each backward pass of a stage, the microbatches in flight of each chunk, and which goes backward.

    Three groups of microbatches are enough because the schedule repeats itself: more do not cost more.
    """
    counts = [0] * timeline.num_chunks
    for action in timeline.short(3).order(stage):
        if not action.forward:
            yield tuple(counts), action.chunk
        counts[action.chunk] += 1 if action.forward else -1


def schedule_picture(timeline: PipelineTimeline, width: int = 100) -> str:
    """Draw the schedule.

    There is a line for each stage, and one with duration and bubble; many stages are cut in the middle, too.
    """
    note = f"{timeline.duration} units; bubble {timeline.bubble:.1%}; forward 1 unit, backward 2"
    shown = timeline.short() if timeline.num_passes > _MOST_PASSES else timeline
    if shown != timeline:
        note += f"; drawn with {shown.num_microbatches} microbatches instead of {timeline.num_microbatches}"
    cell = max(len(_label(played, shown.num_chunks)) for row in shown.played for played in row) + 1
    end, labels = max(row[-1].end for row in shown.played), [f"stage {stage} " for stage in range(shown.num_stages)]
    edge, lines = max(map(len, labels)), []
    for label, row in zip(labels, shown.played, strict=True):
        text, now = label.rjust(edge) + "|", 0
        for played in row:
            text += "." * ((played.start - now) * cell)
            text += _label(played, shown.num_chunks).ljust((played.end - played.start) * cell - 1, "-") + " "
            now = played.end
        lines.append(_cut(text + "." * ((end - now) * cell), width, edge + 1))
    if len(lines) > 24:
        lines = [*lines[:12], " " * edge + "|" + _CUT, *lines[-12:]]
    return "\n".join([*lines, note])


def _label(played: Played, num_chunks: int) -> str:
    return f"{played.action}{'' if num_chunks == 1 else ascii_lowercase[played.action.chunk % 26]}"


def _cut(line: str, width: int, edge: int) -> str:
    half = (width - edge - len(_CUT)) // 2
    return line if len(line) <= width else line[: edge + half] + _CUT + line[-half:]
