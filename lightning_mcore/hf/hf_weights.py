# SPDX-License-Identifier: Apache-2.0
"""The tensors of a Hugging Face model as those of Megatron's: checked as a whole, then read rectangle by rectangle.

Whoever fills a model, or writes a checkpoint of it, says which rectangle of which of Megatron's tensors it wants
(:meth:`HFWeights.fill`) and gets exactly that. ``pretrained.py`` asks for what a rank holds, ``import_checkpoint.py``
for one tensor after the other.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.checkpoint_format import some_of
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.safetensors_folder import SafetensorsFolder
from lightning_mcore.hf.weight_map import WeightMap
from lightning_mcore.hf.weight_rules import Block, Shape

_SHOWN = 5  # names in an error


class HFWeights:
    """The weights of a Hugging Face model for one model of Megatron's.

    Args:
        folder: Where they lie.
        family: Their rules.
        fields: Settings of Megatron's model.
        shapes: Shapes of all of its tensors, by whole name.

    Raises:
        ValueError: The weights are not those of this model: some are missing, or not known, or of another shape.
    """

    def __init__(
        self, folder: SafetensorsFolder, family: Family, fields: Mapping[str, Any], shapes: Mapping[str, Shape]
    ) -> None:
        self._folder = folder
        self._family = family
        self._fields = fields
        self._shapes = shapes
        self._map = WeightMap(family, fields, shapes)
        self._aliases: dict[str, list[str]] = {}
        for alias, name in self._map.repeated.items():
            if alias in folder.shapes:
                self._aliases.setdefault(name, []).append(alias)
        self._check()

    def fill(self, target: Tensor, name: str, start: Shape, shape: Shape) -> None:
        """Read a rectangle of one of Megatron's tensors; what stands for no token becomes zero.

        Args:
            target: Where to; as many values as the rectangle has.
            name: Whole name of the tensor.
            start: Where the rectangle begins.
            shape: Its shape.

        Raises:
            ValueError: Two tensors differ of which Megatron has one.
        """
        parts = [part for block in self._near(name, start, shape) if (part := block.within(start, shape))]
        place = target.view(shape) if target.shape != shape else target
        if sum(prod(part.shape) for part in parts) < place.numel():
            place.zero_()
        for part in parts:
            values = self._folder.read(part.hf, part.hf_start, part.hf_shape)
            for alias in self._aliases.get(part.hf, ()):
                self._check_equal(part, values, alias)
            first = tuple(a - b for a, b in zip(part.start, start, strict=True))
            inside = place[tuple(slice(a, a + n) for a, n in zip(first, part.shape, strict=True))]
            inside.copy_((values.t() if part.transposed else values).view_as(inside))

    def _near(self, name: str, start: Shape, shape: Shape) -> list[Block]:
        """Return the blocks that overlap a rectangle on its first axis; where experts are stacked, few of hundreds."""
        if not start:
            return self._map.blocks[name]
        first, last = start[0], start[0] + shape[0]
        return [
            block
            for block in self._map.blocks[name]
            if block.start[0] < last and first < block.start[0] + block.shape[0]
        ]

    def _check_equal(self, part: Block, values: Tensor, alias: str) -> None:
        if not torch.equal(values, self._folder.read(alias, part.hf_start, part.hf_shape)):
            raise ValueError(
                f"{alias} in {self._folder.folder} differs from {part.hf}, and Megatron's model has one of them for"
                " both; set mtp_num_layers=None in transformer to leave multi-token prediction out"
            )

    # ---- checks

    def _check(self) -> None:
        wanted, found = self._map.shapes, self._folder.shapes
        missing = wanted.keys() - found.keys() - self._map.repeated.keys()
        extra = [name for name in found.keys() - wanted.keys() if not self._is_left_out(name)]
        other = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
        parts = []
        if missing:
            parts.append(f"it lacks {some_of(missing, _SHOWN)}")
        if extra:
            parts.append(f"it has {some_of(extra, _SHOWN)}, which the model has no place for")
        if other:
            shapes = [f"{name} ({list(found[name])} in it, {list(wanted[name])} in the model)" for name in other]
            parts.append(f"shapes differ: {some_of(shapes, _SHOWN)}")
        if not parts:
            parts = self._too_small()
        if parts:
            raise ValueError(
                f"the weights in {self._folder.folder} are not those of this model: {'; '.join(parts)}; give config and"
                " weights of one model, and leave its sizes as they are"
            )

    def _too_small(self) -> list[str]:
        """Return a sentence where one of Megatron's tensors has no room for all that belongs there."""
        for name, blocks in self._map.blocks.items():
            size = self._shapes[name]
            for block in blocks:
                if any(a + n > m for a, n, m in zip(block.start, block.shape, size, strict=True)):
                    return [f"{name} of the model ({list(size)}) has no room for {block.hf} ({list(block.hf_shape)})"]
        return []

    def _is_left_out(self, name: str) -> bool:
        """Whether a tensor has no place in the model for a good reason: it repeats another one, or is not wanted."""
        if "output_layer.weight" not in self._shapes and name in self._of_output_layer():
            return True
        start = self._family.layer_prefix.partition("{layer}")[0]
        number = name.removeprefix(start).partition(".")[0]
        behind = number.isdigit() and int(number) >= int(self._fields["num_layers"])
        return bool(self._family.multi_token) and name.startswith(start) and behind and not self._has_multi_token()

    def _has_multi_token(self) -> bool:
        return any(name.startswith("mtp.") for name in self._shapes)

    def _of_output_layer(self) -> set[str]:
        """Return the tensors of the output layer, which a model with tied embeddings has no use for."""
        embedding = self._shapes.get("embedding.word_embeddings.weight", (1, 1))
        rules = (rule for rule in self._family.outside if rule.megatron == "output_layer.weight")
        return {block.hf for rule in rules for block in rule.blocks(embedding, self._fields)}
