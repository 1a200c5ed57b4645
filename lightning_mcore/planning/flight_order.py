# SPDX-License-Identifier: Apache-2.0
"""How many microbatches of each chunk are in flight on a pipeline rank, at the moments when most can be.

A microbatch is in flight from its forward pass through a chunk to its backward pass through it; meanwhile its
activations are kept. ``activation_memory.py`` weighs the counts. Pure arithmetic.

Source: ``get_pp_rank_microbatches`` and ``get_schedule_table`` of megatron-core 0.16.1.
"""

from collections.abc import Iterator

from lightning_mcore.config.layout import ParallelLayout


def in_flight(
    layout: ParallelLayout, pipeline_rank: int, num_microbatches: int, group_size: int | None = None
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield, before each backward pass, what is in flight and which chunk goes backward.

    The first period of the schedule is enough, for the later ones repeat it: the cost does not grow with the number of
    microbatches.

    Args:
        layout: The parallel sizes.
        pipeline_rank: The stage, from 0.
        num_microbatches: Microbatches of a step on one data-parallel rank.
        group_size: ``microbatch_group_size_per_vp_stage``; None is the pipeline size.

    Yields:
        Microbatches in flight of each chunk, and the number of a chunk.
    """
    pp, chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    behind = pp - pipeline_rank - 1
    if chunks == 1:
        yield (min(num_microbatches, behind + 1),), 0
        return
    group = layout.microbatch_group_size(num_microbatches, group_size or pp)
    period = group * chunks
    warmup = min(2 * behind + (chunks - 1) * group, num_microbatches * chunks)
    shown = min(num_microbatches, -(-(warmup + 2 * period) // period) * group)  # whole groups
    forward = _order(shown, chunks, group)
    backward = [chunks - 1 - chunk for chunk in forward]
    counts = [forward[:warmup].count(chunk) for chunk in range(chunks)]
    for done, chunk in enumerate(backward):
        if warmup + done < len(forward):
            counts[forward[warmup + done]] += 1
        elif shown < num_microbatches:
            return
        yield tuple(counts), chunk
        counts[chunk] -= 1


def _order(num_microbatches: int, chunks: int, group: int) -> list[int]:
    """Return the chunk of every forward pass of a rank, in their order."""
    order: list[int] = []
    for start in range(0, num_microbatches, group):
        size = min(group, num_microbatches - start)
        order += [chunk for chunk in range(chunks) for _ in range(size)]
    return order
