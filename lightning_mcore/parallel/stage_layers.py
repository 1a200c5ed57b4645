# SPDX-License-Identifier: Apache-2.0
"""How many layers each chunk of a pipeline holds, and a check that needs these numbers."""

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


def check_uniform_recompute(config: TransformerConfig) -> None:
    """Raise ValueError if ``recompute_num_layers`` does not divide the layers of each chunk."""
    if config.recompute_granularity != "full" or config.recompute_method != "uniform":
        return
    # 12 layers on 4 stages are chunks of 3, so groups of 2 are rejected.
    group = config.recompute_num_layers
    uneven = sorted(layers for layers in layers_of_chunks(config) if layers % group)
    if uneven:
        raise ValueError(
            f"recompute_num_layers={group} with recompute_method='uniform' does not divide the {uneven[0]} layers of a "
            "pipeline stage's chunk; choose a divisor, or recompute_method='block'"
        )


def layers_of_first_chunk(config: TransformerConfig) -> int:
    """Return the number of layers in the chunk with the embedding."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return int(layout.layout[0][0].count(LayerType.decoder))
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    return int(get_num_layers_to_build(config, vp_stage=0 if interleaved else None, pp_rank=0))


def layers_of_chunks(config: TransformerConfig) -> list[int]:
    """Return the number of layers of each chunk, in the order of the layers."""
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return [stage[chunk].count(LayerType.decoder) for chunk in range(chunks or 1) for stage in layout.layout]
    return [
        int(get_num_layers_to_build(config, vp_stage=None if chunks is None else chunk, pp_rank=rank))
        for chunk in range(chunks or 1)
        for rank in range(stages)
    ]
