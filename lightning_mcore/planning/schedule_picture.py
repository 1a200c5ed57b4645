# SPDX-License-Identifier: Apache-2.0
"""The pipeline schedule as a picture in text: a row for each stage, time from left to right.

A forward pass is one unit wide, a backward pass two; dots are the bubble. Chunks of the interleaved schedule are told
apart by a letter behind the number of the microbatch (``a`` is the first chunk). A wide picture is cut in its middle.
"""

from string import ascii_lowercase

from lightning_mcore.planning.schedule import PipelineTimeline, Played

_CUT = " ... "
_MOST_PASSES = 20_000


def schedule_picture(timeline: PipelineTimeline, width: int = 100) -> str:
    """Draw the schedule.

    Args:
        timeline: What to draw.
        width: Columns that a line may have.

    Returns:
        A line for each stage and one below with the duration and the bubble; many stages are cut in the middle, too.
    """
    note = f"{timeline.duration} units; bubble {timeline.bubble:.1%}; forward 1 unit, backward 2"
    shown = _drawable(timeline)
    if shown is not timeline:
        note += f"; drawn with {shown.num_microbatches} microbatches instead of {timeline.num_microbatches}"
    cell = max(len(_label(played, shown.num_chunks)) for row in shown.played for played in row) + 1
    labels = [f"stage {stage} " for stage in range(shown.num_stages)]
    edge = max(map(len, labels))
    lines = []
    for label, row in zip(labels, shown.played, strict=True):
        lines.append(label.rjust(edge) + "|" + _row(row, shown, cell))
    lines = [_cut(line, width, edge + 1) for line in lines]
    if len(lines) > 24:
        lines = [*lines[:12], " " * edge + "|" + _CUT, *lines[-12:]]
    return "\n".join([*lines, note])


def _drawable(timeline: PipelineTimeline) -> PipelineTimeline:
    group = timeline.group_size or timeline.num_stages
    kept = min(timeline.num_microbatches, timeline.num_microbatches % group + 2 * group)
    if timeline.num_passes <= _MOST_PASSES or kept == timeline.num_microbatches:
        return timeline
    return PipelineTimeline(timeline.num_stages, timeline.num_chunks, kept, timeline.group_size)


def _row(row: list[Played], timeline: PipelineTimeline, cell: int) -> str:
    text, now = "", 0
    for played in row:
        text += "." * ((played.start - now) * cell)
        text += _label(played, timeline.num_chunks).ljust((played.end - played.start) * cell - 1, "-") + " "
        now = played.end
    end = max(one[-1].end for one in timeline.played)
    return text + "." * ((end - now) * cell)


def _label(played: Played, num_chunks: int) -> str:
    chunk = "" if num_chunks == 1 else ascii_lowercase[played.action.chunk % 26]
    return f"{played.action}{chunk}"


def _cut(line: str, width: int, edge: int) -> str:
    if len(line) <= width:
        return line
    half = (width - edge - len(_CUT)) // 2
    return line[: edge + half] + _CUT + line[-half:]
