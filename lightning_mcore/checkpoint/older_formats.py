# SPDX-License-Identifier: Apache-2.0
"""Describe the tensors of NeMo 2, and of megatron-core before 0.14, as today's checkpoints describe theirs.

Four things differ, all of them in ``.metadata``: NeMo puts ``module.`` before each weight's name; Megatron's own layers
(``--transformer-impl local``) name a norm before experts as if it were the one that TransformerEngine fuses with a
dense MLP; older releases put ``chained_0.`` and so on before the state of chained optimizers; and they store this
state, if it is sharded, as flat ranges of a weight's part on a tensor-parallel rank. A flat range of a matrix is at
most three rectangles, so :func:`as_today` describes each of them as a piece of its own, and the readers need no second
way to read a tensor.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from lightning_mcore.checkpoint.rectangles import rectangles

_CHAINED = re.compile(r"^chained_\d+\.(?=optimizer\.state\.)")
_NEMO = re.compile(r"^(optimizer\.state\.[^.]+\.)?(module\.)+")
_NORM = re.compile(r"(?<=\.)mlp\.linear_fc1\.layer_norm_(weight|bias)$")
_STATE = re.compile(r"^optimizer\.state\.[^.]+\.")


@dataclass
class RangeOfPiece(_StorageInfo):
    """Where a rectangle lies that is a part of a flat piece."""

    stored_shape: tuple[int, ...] = ()  # of the piece
    start: int = 0  # of the rectangle in the flattened piece, in elements


def as_today(metadata: Metadata) -> Metadata:
    """Return the description of another program's tensors with today's names and rectangular pieces."""
    tensors = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
    weights = {name for name in tensors if not name.startswith(("optimizer.", "chained_"))}
    is_nemo = bool(weights) and all(map(_NEMO.match, weights))

    def plain(name: str) -> str:
        name = _CHAINED.sub("", name)
        if _NORM.sub("mlp.linear_fc1.weight", _STATE.sub("", name)) not in weights:
            name = _NORM.sub(r"pre_mlp_layernorm.\1", name)
        return _NEMO.sub(r"\1", name) if is_nemo else name

    described = {plain(name): entry for name, entry in metadata.state_dict_metadata.items()}
    places = {replace(index, fqn=plain(index.fqn)): place for index, place in (metadata.storage_data or {}).items()}
    renamed = replace(metadata, state_dict_metadata=described, storage_data=places)
    for name in map(plain, tensors):
        weight = described.get(_STATE.sub("", name))
        if _STATE.match(name) and isinstance(weight, TensorStorageMetadata):
            _unflatten(renamed, name, weight.size)
    return renamed


def _unflatten(metadata: Metadata, name: str, shape: Sequence[int]) -> None:
    """Describe the flat ranges of a tensor as rectangles in the global ``shape``; leave another tensor as it is."""
    # A weight [32, 16] in 2 parts of [16, 16], one on each tensor-parallel rank, has a state [2, 1, 256]. Its piece at
    # (1, 0, 105) of size (1, 1, 151) begins in row 16 + 105 // 16 = 22 of the weight, at column 105 % 16 = 9.
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    *parts, numel = entry.size
    if len(parts) != len(shape) or prod(parts) * numel != prod(shape):
        return
    part = tuple(size // count for size, count in zip(shape, parts, strict=True))
    pieces = []
    for chunk in entry.chunks:
        place = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
        *which, start = chunk.offsets
        begin = 0
        for offsets, sizes in rectangles(part, start, start + chunk.sizes[-1]):
            at = torch.Size(n * size + inner for n, size, inner in zip(which, part, offsets, strict=True))
            pieces.append(ChunkStorageMetadata(at, torch.Size(sizes)))
            metadata.storage_data[MetadataIndex(name, at)] = RangeOfPiece(
                place.relative_path, place.offset, place.length, stored_shape=tuple(chunk.sizes), start=begin
            )
            begin += prod(sizes)
    metadata.state_dict_metadata[name] = replace(entry, size=torch.Size(shape), chunks=pieces)
