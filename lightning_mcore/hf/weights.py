# SPDX-License-Identifier: Apache-2.0
"""Read Hugging Face tensors as Megatron's: check them against the whole model, then read rectangle by rectangle.

A caller that fills a model, or writes a checkpoint of it, asks for rectangles of Megatron's tensors
(:meth:`HFWeights.fill`). ``pretrained.py`` asks for the rectangles of a rank, ``interop/importing.py`` for one tensor
after another.

:func:`require_finite` rejects weights that are infinite or NaN, :func:`require_fits` values that would become infinite
in a narrower type. Among the dtypes of weights only float16 is so narrow, with a largest value of 65504. Import and
export call :func:`require_fits` before they convert. A model with infinite trained weights is exported unchanged.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.checkpoint.differences import Differences
from lightning_mcore.checkpoint.manifest import some_of
from lightning_mcore.checkpoint.stored_dtypes import require_kept, widest
from lightning_mcore.hf.family import SCORE, SCORING, Family
from lightning_mcore.hf.safetensors import SafetensorsFolder
from lightning_mcore.hf.weight_map import WeightMap, stacked_name
from lightning_mcore.hf.weight_rules import Block, Shape

_OUTPUT_IN_HF = "lm_head.weight"
_SAME_MODEL = "give config and weights of one model, and do not change its sizes"
_SHOWN = 5
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class HFWeights:
    """A Hugging Face model's weights, as the tensors of one Megatron model.

    ``shapes`` are the shapes of the whole Megatron model's tensors, by whole name. ``multi_token_layers`` is the
    config's number of multi-token prediction layers, which the model may lack. ``rounds`` allows rounding values that
    are stored in a wider dtype than most weights.
    """

    def __init__(
        self,
        folder: SafetensorsFolder,
        family: Family,
        fields: Mapping[str, Any],
        shapes: Mapping[str, Shape],
        multi_token_layers: int,
        rounds: bool = False,
    ) -> None:
        self._folder = folder
        self._family = family
        self._fields = fields
        self._shapes = shapes
        self._stored = None if rounds else folder.stored
        # Use the variant whose shapes match the files; if there are several, the one that shares most names with them
        maps = [WeightMap(each, fields, shapes) for each in (family, *family.variants)]
        fitting = [each for each in maps if _agree(each.shapes, folder.shapes)] or maps[:1]
        self._map = max(fitting, key=lambda each: len(each.shapes.keys() & folder.shapes.keys()))
        self._aliases: dict[str, list[str]] = {}
        for alias, name in self._map.repeated.items():
            if alias in folder.shapes:
                self._aliases.setdefault(name, []).append(alias)
        self._tied = self._blocks_of_tied_output()
        self._left_out = self._layers_left_out(multi_token_layers)
        self._check()

    def fill(self, target: Tensor, name: str, start: Shape, shape: Shape) -> None:
        """Read a rectangle of a Megatron tensor into ``target``; padding rows of the vocabulary become zero.

        ``target`` has as many values as the rectangle, in any shape and floating-point dtype. Raises ValueError if two
        tensors that Megatron stores as one differ, or a value is not finite or does not fit the dtype of ``target``.
        """
        parts = [part for block in self._overlapping(name, start, shape) if (part := block.within(start, shape))]
        if any(part.hf not in self._folder.shapes for part in parts):  # optional, and not there
            return
        place = target.view(shape) if target.shape != shape else target
        # Blocks do not cover padding rows. With vocab_size 1000 padded to 1024, rank 1 of TP=2 has rows 512-1023; its
        # only part has 488 rows, and rows 1000-1023 stay zero.
        if sum(prod(part.shape) for part in parts) < place.numel():
            place.zero_()
        for part in parts:
            # Still a view of the file: the checks below read it, copy_ converts it
            values = self._folder.read(part.hf, part.hf_start, part.hf_shape, part.steps)
            for alias in self._aliases.get(part.hf, ()):
                self._check_equal(part, values, alias)
            if name == _EMBEDDING:
                self._check_tied(part)
            require_finite(part.hf, values)
            require_fits(part.hf, values, place.dtype)
            if self._stored is not None:
                require_kept(part.hf, values, place.dtype, self._stored)
            first = tuple(a - b for a, b in zip(part.start, start, strict=True))
            inside = place[tuple(slice(a, a + n) for a, n in zip(first, part.shape, strict=True))]
            inside.copy_((values.mT if part.transposed else values).view_as(inside))

    def dtype(self, name: str, least: torch.dtype) -> torch.dtype:
        """Return a dtype that holds every value of a Megatron tensor in all layers, and of dtype ``least``."""
        return widest(self._dtypes[stacked_name(name)], least)

    @cached_property
    def _dtypes(self) -> dict[str, set[torch.dtype]]:
        """The dtypes of each Megatron tensor in the files; layers are stacked in a checkpoint, and share a dtype."""
        found: dict[str, set[torch.dtype]] = {}
        for name, blocks in self._map.blocks.items():
            there = {self._folder.dtypes[block.hf] for block in blocks if block.hf in self._folder.dtypes}
            found.setdefault(stacked_name(name), set()).update(there)
        return found

    def files(self, name: str, start: Shape, shape: Shape) -> set[str]:
        """Return the paths of the files that :meth:`fill` reads for a rectangle."""
        near = (block.hf for block in self._overlapping(name, start, shape) if block.within(start, shape))
        there = (hf for hf in near if hf in self._folder.shapes)
        return {
            path for hf in there for each in (hf, *self._aliases.get(hf, ())) for path in self._folder.files_of(each)
        }

    def _overlapping(self, name: str, start: Shape, shape: Shape) -> list[Block]:
        """Return the blocks that overlap a rectangle on its first axis, such as a few of many stacked experts."""
        if not start:
            return self._map.blocks[name]
        # Without this, a rank with 2 of 256 experts would intersect the blocks of all 256 for each tensor
        first, last = start[0], start[0] + shape[0]
        return [
            block
            for block in self._map.blocks[name]
            if block.start[0] < last and first < block.start[0] + block.shape[0]
        ]

    def _check_equal(self, part: Block, values: Tensor, alias: str) -> None:
        if not _are_the_same(values, self._folder.read(alias, part.hf_start, part.hf_shape, part.steps)):
            raise ValueError(
                f"{alias} in {self._folder.folder} differs from {part.hf}, and Megatron's model has one tensor for"
                " both; set mtp_num_layers=None in transformer to leave multi-token prediction out"
            )

    def _check_tied(self, part: Block) -> None:
        """Raise ValueError if the files' output layer differs from the embedding although the model ties the two."""
        for block in self._tied:
            output = block.within(part.start, part.shape)
            if output is None:
                continue
            rows = part.within(output.start, output.shape)
            assert rows is not None
            first, second = (self._folder.read(each.hf, each.hf_start, each.hf_shape) for each in (rows, output))
            if not _are_the_same(first.t() if rows.transposed else first, second.t() if output.transposed else second):
                raise ValueError(
                    f"{output.hf} in {self._folder.folder} differs from {rows.hf}, and its config ties the two"
                    " (tie_word_embeddings=True); set that to false to have both, or remove the wrong one"
                )

    def _blocks_of_tied_output(self) -> list[Block]:
        """Return the blocks of an output layer in the files, if the model uses its embedding instead."""
        if _OUTPUT in self._shapes or _EMBEDDING not in self._shapes:
            return []
        rules = (rule for rule in self._family.outside if rule.megatron == _OUTPUT)
        blocks = (block for rule in rules for block in rule.blocks(self._shapes[_EMBEDDING], self._fields))
        return [block for block in blocks if block.hf in self._folder.shapes and block.hf not in self._map.shapes]

    def _layers_left_out(self, multi_token_layers: int) -> tuple[str, ...]:
        """Return the prefixes of multi-token prediction layers in the files, if the model has none."""
        if any(name.startswith("mtp.") for name in self._shapes):
            return ()
        prefixes = self._family.multi_token_prefixes(int(self._fields["num_layers"]), multi_token_layers)
        return tuple(prefix for prefix in prefixes if self._is_multi_token(prefix))

    def _is_multi_token(self, prefix: str) -> bool:
        """Return whether a layer has weights that only such layers have."""
        size = int(self._fields["hidden_size"])
        rules = self._family.multi_token
        return any(
            prefix + b.hf in self._folder.shapes for rule in rules for b in rule.blocks((size, size), self._fields)
        )

    def _check(self) -> None:
        wanted, found = self._map.shapes, self._folder.shapes
        missing = wanted.keys() - found.keys() - self._map.repeated.keys() - set(self._family.optional)
        extra = [name for name in found.keys() - wanted.keys() if not self._is_left_out(name)]
        extra += sorted({block.hf for block in self._tied} - self._whole_tied())
        other = Differences.between(found, wanted).shapes
        parts = []
        if missing:
            parts.append(f"it lacks {some_of(missing, _SHOWN)}")
        if extra:
            parts.append(f"it has {some_of(extra, _SHOWN)}, which the model does not have")
        if other:
            parts.append(f"shapes differ: {some_of(other, _SHOWN)}")
        if not parts:
            parts = self._too_small()
        if parts:
            remedy = self._remedy(missing, extra) if len(parts) == bool(missing) + bool(extra) else _SAME_MODEL
            raise ValueError(
                f"the weights in {self._folder.folder} do not belong to this model: {'; '.join(parts)}; {remedy}"
            )

    def _remedy(self, missing: Collection[str], extra: Collection[str]) -> str:
        """Return what to do about tensors that are missing or unknown."""
        if SCORE in extra:
            return (
                "it is a classifier or a reward model: take hf_model(head='sequence-classification') or"
                f" MCorePreference, or family={self._family.model_type + SCORING!r}"
            )
        if not missing and not extra:
            return _SAME_MODEL
        if {*missing} == {_OUTPUT_IN_HF}:
            return "it has no output layer: take hf_model(head='hidden-states') or (head='sequence-classification')"
        if missing:
            return _SAME_MODEL
        return f"{_SAME_MODEL}, or leave them out with a family of your own that has them in unread (family=)"

    def _too_small(self) -> list[str]:
        """Return a sentence if a Megatron tensor is too small for its Hugging Face block."""
        for name, blocks in self._map.blocks.items():
            size = self._shapes[name]
            for block in blocks:
                if any(a + n > m for a, n, m in zip(block.start, block.shape, size, strict=True)):
                    return [f"{name} of the model ({list(size)}) is too small for {block.hf} ({list(block.hf_shape)})"]
        return []

    def _whole_tied(self) -> set[str]:
        """Return the tensors of a tied output layer that have the size in the rules."""
        sizes: Counter[str] = Counter()
        for block in self._tied:
            sizes[block.hf] += prod(block.shape)
        return {name for name, size in sizes.items() if size == prod(self._folder.shapes[name])}

    def _is_left_out(self, name: str) -> bool:
        """Return whether the model may lack a tensor, because it repeats another one or is skipped."""
        return name.startswith(self._left_out) or any(name == block.hf for block in self._tied)


def _agree(some: Mapping[str, Shape], others: Mapping[str, Shape]) -> bool:
    """Return whether the tensors in both have the same shapes."""
    return all(some[name] == others[name] for name in some.keys() & others.keys())


def _are_the_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of any shape and dtype are equal bit for bit, and of the same dtype."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # As bytes, because NaN differs from itself and 0.0 equals -0.0
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def require_finite(name: str, values: Tensor) -> None:
    """Raise ValueError for infinite weights or NaN: the file is damaged, or the model never worked."""
    if values.numel() and not torch.stack(torch.aminmax(values)).isfinite().all():  # propagates NaN, needs no memory
        raise ValueError(f"{name} has infinite or NaN values, which cannot be trained; download it again")


def require_fits(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for finite values that would become infinite in ``dtype``; infinite values may stay infinite."""
    if not values.numel() or torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
        return
    ends = torch.stack(torch.aminmax(values))
    if ends.to(dtype).isfinite().all():
        return
    # 65519 rounds down to float16's largest, 65504; 65520 rounds up to infinity, so it is the conversion that decides
    lost = values.isfinite() & ~values.to(dtype).isfinite()
    if lost.any():
        largest = values[lost].abs().max().item()
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} has values up to {largest:.6g}, and the largest of {kind} is {torch.finfo(dtype).max:.6g}; choose"
            " dtype bfloat16 or float32"
        )
