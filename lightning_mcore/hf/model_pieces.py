# SPDX-License-Identifier: Apache-2.0
"""The weights of a running model as rectangles of the whole model's tensors.

Megatron's modules say themselves which part of which tensor they hold (``sharded_state_dict``), for checkpoints; the
same serves to fill them from a Hugging Face model and to write one. Nothing here knows how a model is split.
"""

from dataclasses import dataclass
from math import prod

import lightning.pytorch as pl
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from lightning_mcore.checkpoint.model_state import sharded_chunk
from lightning_mcore.checkpoint.optimizer_state import pieces_of
from lightning_mcore.hf.weight_map import whole_name, whole_names
from lightning_mcore.hf.weight_rules import Shape
from lightning_mcore.parallel.chunks import ModelChunks, built_chunks
from lightning_mcore.parallel.consensus import gather, on_all


@dataclass(frozen=True)
class ModelPiece:
    """A rectangle of a tensor of the whole model, held by this rank.

    Args:
        name: Whole name of the tensor, as in ``weight_map.py``.
        start: Where the rectangle begins in it.
        shape: Its shape there; axes of size 1 may stand in front of those of ``data``.
        data: The values, in the memory of the model.
        is_main: Whether this rank is the one, of those with the same values, that speaks for them.
    """

    name: str
    start: Shape
    shape: Shape
    data: Tensor
    is_main: bool


@dataclass(frozen=True)
class ModelPieces:
    """What this rank holds of a model, and the shapes of all its tensors.

    Args:
        own: Rectangles on this rank.
        shapes: Shapes of the tensors of the whole model, by whole name.
    """

    own: list[ModelPiece]
    shapes: dict[str, Shape]


def pieces_of_module(module: pl.LightningModule) -> ModelPieces:
    """Return what this rank holds of a module's model; collective over the world.

    Args:
        module: A module whose model is built with ``pipeline()``, wrapped or not.

    Raises:
        RuntimeError: There is no such model yet.
    """
    chunks = built_chunks(module)
    if chunks.pipeline is None:
        raise RuntimeError(
            f"{type(module).__name__} has no model built with pipeline(), whose weights could be exchanged with"
            " Hugging Face's; build it in configure_model()"
        )
    own, stored = on_all(lambda: _own_pieces(chunks))
    shapes: dict[str, Shape] = {}
    for of_rank in gather(stored):
        for key, shape in of_rank.items():
            shapes |= {name: inner for name, (_, inner) in whole_names(key, shape).items()}
    return ModelPieces(own, shapes)


def _own_pieces(chunks: ModelChunks) -> tuple[list[ModelPiece], dict[str, Shape]]:
    """Return what this rank holds, and the shapes of the stored tensors that it is part of."""
    own, stored = [], {}
    for index in range(len(chunks.bare)):
        for entry in nested_values(sharded_chunk(chunks, index)):
            for piece in pieces_of(entry) if isinstance(entry, ShardedTensor | ShardedTensorFactory) else ():
                stored[piece.place.key] = tuple(piece.place.global_shape)
                own.append(_piece(entry, piece.place, piece.start))
    return own, stored


def _piece(entry: ShardedTensor | ShardedTensorFactory, place: ShardedTensor, start: int) -> ModelPiece:
    data = entry.data.detach()
    if prod(place.local_shape) != data.numel():
        data = data.view(-1)[start : start + prod(place.local_shape)].view(place.local_shape)
    shape = (1,) * (len(place.global_shape) - len(place.local_shape)) + tuple(place.local_shape)
    return ModelPiece(
        *whole_name(place.key, tuple(place.global_offset), shape), data=data, is_main=is_main_replica(place.replica_id)
    )
