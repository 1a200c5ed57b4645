# SPDX-License-Identifier: Apache-2.0
"""Apply a family's rules to the tensors of one model, to find the equal rectangles.

Megatron's tensors have their *whole* names here, with the layer number, such as
``decoder.layers.3.mlp.linear_fc1.weight``. If all layers of a model are alike, checkpoints stack them under the name
``decoder.layers.mlp.linear_fc1.weight``, with the layer as first axis; :func:`whole_name` says where a stored rectangle
belongs. Import, export and adapters all look up weights here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_mcore.hf.family import Family
from lightning_mcore.hf.weight_rules import Block, Rename, Shape, WeightRule

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_STACKED = re.compile(r"(decoder|mtp)\.layers\.(?!\d)(.+)")
TOWER = "vision.tower."
_MULTI_TOKEN_LAYER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.+)")  # up to megatron-core 0.16, and later


@dataclass(frozen=True)
class StoredPlace:
    """Where a tensor with a whole name is stored."""

    key: str
    layer: int | None  # index on the stored tensor's first axis; None if layers are not stacked


def whole_names(key: str, shape: Shape) -> dict[str, tuple[StoredPlace, Shape]]:
    """Return the tensors that a stored tensor consists of, by whole name, with the shape of each."""
    stacked = _STACKED.fullmatch(key)
    if stacked is None:
        return {key: (StoredPlace(key, None), shape)}
    stem, rest = stacked.groups()
    return {f"{stem}.layers.{layer}.{rest}": (StoredPlace(key, layer), shape[1:]) for layer in range(shape[0])}


def whole_name(key: str, start: Shape, shape: Shape) -> tuple[str, Shape, Shape]:
    """Return the whole name of a rectangle within one layer of a stored tensor, and its start and shape there."""
    stacked = _STACKED.fullmatch(key)
    if stacked is None:
        return key, start, shape
    stem, rest = stacked.groups()
    # decoder.layers.mlp.linear_fc1.weight at start (3, 8, 0) is decoder.layers.3.mlp.linear_fc1.weight at (8, 0)
    return f"{stem}.layers.{start[0]}.{rest}", start[1:], shape[1:]


def held_rectangle(piece: "ShardedTensor") -> tuple[str, Shape, Shape]:
    """Return the whole name of the piece that a rank holds of a stored tensor, and its start and shape there."""
    # Megatron's pieces leave out the layer (or expert) axis, of which they hold one index
    shape = (1,) * (len(piece.global_shape) - len(piece.local_shape)) + tuple(piece.local_shape)
    return whole_name(piece.key, tuple(piece.global_offset), shape)


def stacked_name(name: str) -> str:
    """Return a tensor's name in a checkpoint that stacks layers."""
    layer = _LAYER.fullmatch(name)
    return name if layer is None else f"{layer[1]}.layers.{layer[3]}"


class WeightMap:
    """The equal rectangles of one model's Megatron and Hugging Face tensors.

    ``tensors`` are the shapes of the whole model's Megatron tensors, not of one rank's, by whole name. Raises
    ValueError if the family has no rule for one of them.
    """

    def __init__(self, family: Family, fields: Mapping[str, Any], tensors: Mapping[str, Shape]) -> None:
        self.blocks: dict[str, list[Block]] = {}
        self.shapes: dict[str, Shape] = {}
        self.in_fp32: set[str] = set()
        self.repeated: dict[str, str] = {}  # a Hugging Face tensor that repeats another, and that other
        self._rules = _Rules(family, int(fields["num_layers"]))
        for name, shape in tensors.items():
            rule, prefix = self._rules.find(name)
            self.blocks[name] = [replace(block, hf=prefix + block.hf) for block in rule.blocks(shape, fields)]
            if rule.in_fp32:
                self.in_fp32 |= {block.hf for block in self.blocks[name]}
        self.shapes = _shapes(block for blocks in self.blocks.values() for block in blocks)
        of_model = self._rules.repeated(tensors)  # with tied embeddings, there is no output layer to repeat
        self.repeated = {name: other for name, other in of_model.items() if other in self.shapes}
        self.shapes |= {name: self.shapes[other] for name, other in self.repeated.items()}

    def of(self, hf: str) -> list[tuple[str, Block]]:
        """Return the Megatron tensors and blocks that a Hugging Face tensor consists of."""
        return self._by_hf[hf]

    @cached_property
    def _by_hf(self) -> dict[str, list[tuple[str, Block]]]:
        found: dict[str, list[tuple[str, Block]]] = {}
        for name, blocks in self.blocks.items():
            for block in blocks:
                found.setdefault(block.hf, []).append((name, block))
        return found | {name: found[other] for name, other in self.repeated.items()}


class _Rules:
    """The rules of a family, by the names of their tensors."""

    def __init__(self, family: Family, num_layers: int) -> None:
        self._family = family
        self._num_layers = num_layers
        self._layer = {rule.megatron: rule for rule in family.layer}
        self._multi_token = {rule.megatron: rule for rule in family.multi_token}
        self._outside = {rule.megatron: rule for rule in family.outside}

    def find(self, name: str) -> tuple[WeightRule, str]:
        """Return a tensor's rule, and the prefix of its Hugging Face names."""
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found, prefix = self._outside.get(name), ""
            if self._family.tower is not None and name.startswith(TOWER):
                found = Rename(name, self._family.tower + name.removeprefix(TOWER))
        elif layer[1] == "decoder":
            found, prefix = self._layer.get(layer[3]), self._prefix(int(layer[2]))
        else:
            # A multi-token prediction layer contains an ordinary layer, and has weights around it
            inner = _MULTI_TOKEN_LAYER.fullmatch(layer[3])
            found = self._layer.get(inner[1]) if inner else self._multi_token.get(layer[3])
            # mtp.layers.0 of a 61-layer model is model.layers.61 of Hugging Face
            prefix = self._prefix(self._num_layers + int(layer[2]))
        if found is None:
            raise ValueError(
                f"the model has {name}, which models of type {self._family.model_type!r} do not have;"
                " give the family that it belongs to"
            )
        return found, prefix

    def repeated(self, names: Iterable[str]) -> dict[str, str]:
        numbers = {int(layer[2]) for layer in map(_LAYER.fullmatch, names) if layer and layer[1] == "mtp"}
        return {
            self._prefix(self._num_layers + number) + name: other
            for number in sorted(numbers)
            for name, other in self._family.repeated.items()
        }

    def _prefix(self, layer: int) -> str:
        return self._family.layer_prefix.replace("{layer}", str(layer))


def _shapes(blocks: Iterable[Block]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for block in blocks:
        last = tuple(axis.stop for axis in block.hf_index)
        known = shapes.get(block.hf, last)
        shapes[block.hf] = tuple(map(max, known, last))
    return shapes
