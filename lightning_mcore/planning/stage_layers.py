# SPDX-License-Identifier: Apache-2.0
"""Which layers each pipeline rank holds, chunk by chunk, as Megatron builds them.

``config/layout.py`` refuses a split that does not come out even; here layers are split: evenly, with the embedding or
the loss counted as a layer, with a first or last stage of its own size, or as ``pipeline_model_parallel_layout`` says.
Counting parameters and memory, and the report of ``lightning-mcore plan``, start from it. Pure arithmetic.

Source: ``get_num_layers_to_build`` and ``get_transformer_layer_offset`` of megatron-core 0.16.1.
"""

from dataclasses import dataclass
from itertools import accumulate

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.gpt_fields import GPTFields


@dataclass(frozen=True)
class ChunkLayers:
    """What one virtual stage of one pipeline rank holds of the model.

    Args:
        layers: Numbers of its decoder layers in the whole model, from 0, in order.
        embedding: Whether the model begins here.
        output: Whether the model ends here, with output layer and loss.
        mtp: Layers of multi-token prediction; with any, the chunk has an embedding (a copy if it is not the first).
    """

    layers: tuple[int, ...]
    embedding: bool
    output: bool
    mtp: int = 0


def stage_layers(fields: GPTFields, layout: ParallelLayout) -> list[list[ChunkLayers]]:
    """Return the chunks of every pipeline rank.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model (``ParallelLayout.validate_model``).

    Returns:
        Indexed by pipeline rank, then by virtual stage.
    """
    pp, chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    stages = layout.pipeline_stages
    if stages:
        counts = [stage.count("t") for stage in stages]
        mtp = [stage.count("m") for stage in stages]
    else:
        counts = _counts(fields, pp, chunks)
        mtp = [0] * (pp * chunks - 1) + [fields.mtp_num_layers]
    starts = [0, *accumulate(counts)]
    last = pp * chunks - 1

    def chunk(stage: int) -> ChunkLayers:
        numbers = range(starts[stage], starts[stage] + counts[stage])
        return ChunkLayers(tuple(numbers), embedding=stage == 0, output=stage == last, mtp=mtp[stage])

    return [[chunk(index * pp + rank) for index in range(chunks)] for rank in range(pp)]


def _counts(fields: GPTFields, pp: int, chunks: int) -> list[int]:
    """Return the decoder layers of every virtual stage, in the order of the layers."""
    shape = fields.shape
    first, last = shape.num_layers_in_first_pipeline_stage, shape.num_layers_in_last_pipeline_stage
    counted = (shape.account_for_embedding_in_pipeline_split, shape.account_for_loss_in_pipeline_split)
    if first is not None or last is not None:
        given = [size for size in (first, last) if size is not None]
        others = pp - len(given)
        middle = (fields.num_layers - sum(given)) // others if others else 0
        of_ranks = [middle] * pp
        if first is not None:
            of_ranks[0] = first
        if last is not None:
            of_ranks[-1] = last
    else:
        of_ranks = [(fields.num_layers + sum(counted)) // pp] * pp
    counts = [of_ranks[rank] // chunks for _ in range(chunks) for rank in range(pp)]
    counts[0] -= counted[0]
    counts[-1] -= counted[1]
    return counts
