# SPDX-License-Identifier: Apache-2.0
"""How many parameters one rank of a pipeline stage holds, and how many the whole model has.

All ranks of a stage hold as many: axes divide evenly (``config/layout.py`` refuses the rest). The sum over ranks is
more than the model has, for norms, routers and some biases are whole on every tensor-parallel rank, a tied embedding is
on the first and on the last stage, and multi-token prediction has an embedding of its own stage. Pure arithmetic.
"""

from dataclasses import dataclass

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.parameter_tensors import ParameterTensor, chunk_tensors


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank, in elements.

    Args:
        dense: Those outside routed experts.
        expert: Those of routed experts.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of a whole model, in elements; embedding and output layer are counted, a tied one once.

    Args:
        total: All.
        active: Those that one token meets: of the routed experts of a layer, the ``moe_router_topk`` it goes to.
    """

    total: int
    active: int


def rank_parameters(
    fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, backend: str = "local"
) -> ParameterCount:
    """Return how many parameters each rank of a pipeline stage holds.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model.
        pipeline_rank: The stage, from 0.
        backend: Whose layers, ``"local"`` or ``"transformer_engine"``; they differ for multi-latent attention alone.
    """
    tensors = [tensor for chunk in rank_tensors(fields, layout, pipeline_rank, backend) for tensor in chunk]
    expert = sum(tensor.elements for tensor in tensors if tensor.expert)
    return ParameterCount(dense=sum(tensor.elements for tensor in tensors) - expert, expert=expert)


def rank_tensors(
    fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, backend: str = "local"
) -> list[list[ParameterTensor]]:
    """Return the parameter tensors of each rank of a pipeline stage, chunk by chunk; arguments as above."""
    chunks = stage_layers(fields, layout)[pipeline_rank]
    return [chunk_tensors(fields, layout, chunk, backend) for chunk in chunks]


def model_parameters(fields: GPTFields) -> ModelParameters:
    """Return how many parameters the model has, on however many ranks."""
    whole = ChunkLayers(tuple(range(fields.num_layers)), embedding=True, output=True, mtp=fields.mtp_num_layers)
    tensors = chunk_tensors(fields, ParallelLayout(), whole)
    total = sum(tensor.elements for tensor in tensors)
    if fields.experts is None:
        return ModelParameters(total, total)
    idle = 1 - fields.experts.topk / fields.experts.count
    return ModelParameters(total, total - round(idle * sum(t.elements for t in tensors if t.expert)))
