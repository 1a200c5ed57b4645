# SPDX-License-Identifier: Apache-2.0
"""The plan of an export: the file of each Hugging Face tensor, and the rectangles that it is assembled from.

The rectangles (:class:`Place`) lie in a checkpoint or in the memory of ranks. The plan does not depend on which, so
``export.py`` uses it for both. Ranks that plan with the same places get the same plan.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.checkpoint.manifest import some_of
from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes, holds, widest
from lightning_mcore.hf.weight_map import WeightMap
from lightning_mcore.hf.weight_rules import Block, Shape
from lightning_mcore.hf.weights import require_fits

DTYPES = ("auto", "bfloat16", "float16", "float32")
MAX_SHARD_SIZE = "5GB"

_FILE_NAMES = "model{suffix}.safetensors"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?B|)", re.IGNORECASE)
_SHOWN = 5  # names in an error


@dataclass(frozen=True)
class Place:
    """A rectangle of a Megatron tensor, and where it lies.

    Args:
        start: The index at which it begins in the tensor.
        shape: Its shape.
        dtype: The dtype of its values.
        source: Its location, for the function that reads it.
    """

    start: Shape
    shape: Shape
    dtype: torch.dtype
    source: Any


@dataclass(frozen=True)
class Part:
    """A rectangle that is copied in one step.

    Args:
        place: The place of its values.
        block: The rectangle, in Megatron's tensor and in Hugging Face's.
    """

    place: Place
    block: Block

    def within_place(self, held: Tensor) -> Tensor:
        """Return a view of its values, with the Hugging Face shape and the dtype of ``held``.

        Args:
            held: The whole rectangle of the place, in Megatron's shape.
        """
        block = self.block
        for axis, (start, first, length) in enumerate(zip(block.start, self.place.start, block.shape, strict=True)):
            held = held.narrow(axis, start - first, length)
        held = held.view(block.shape[len(block.shape) - len(block.hf_start) :])
        return held.mT if block.transposed else held

    def within_target(self, target: Tensor) -> Tensor:
        """Return a view of the rectangle of ``target``, a Hugging Face tensor of any shape and dtype, that it fills."""
        return target[self.block.hf_index]


class ExportPlan:
    """The file of each tensor, and the places of its values.

    Args:
        weights: The family's rules, applied to the model.
        places: The rectangles that make up each Megatron tensor, by its whole name.
        dtype: The dtype to write; None for the dtype of the places.
        max_shard_size: Bytes of tensors in a file; a single tensor may have more.
        stored: The dtypes to write if ``dtype`` is None, those of the model's source; None for those of the places.
        read: Returns the rectangle of a place; None if values can be read only when they are written.

    Attributes:
        files: Names of the tensors in each file, by file name, in order.
        shapes: Shapes of the tensors.
        dtypes: Types of the tensors.

    Raises:
        ValueError: The places do not form whole tensors.
    """

    def __init__(
        self,
        weights: WeightMap,
        places: Mapping[str, Sequence[Place]],
        dtype: torch.dtype | None,
        max_shard_size: int,
        stored: StoredDtypes | None = None,
        read: Callable[[Place], Tensor] | None = None,
    ) -> None:
        self._weights = weights
        self._places = places
        self._read = read
        self._stored = stored if dtype is None else None
        _check_whole(weights, places)
        self.shapes = weights.shapes
        self.dtypes = {name: self._dtype_of(name, dtype) for name in weights.shapes}
        self.files = _split({name: self.size(name) for name in self._in_order()}, max_shard_size)

    def size(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return prod(self.shapes[name]) * self.dtypes[name].itemsize

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return sum(map(self.size, self.shapes))

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most of the values."""
        return StoredDtypes.of_tensors(self.dtypes, self.shapes).most

    @property
    def index(self) -> dict[str, Any] | None:
        """The content of the index; None if there is only one file."""
        if len(self.files) == 1:
            return None
        counted = self.shapes.keys() - self._weights.repeated.keys()
        return {
            "metadata": {
                "total_parameters": sum(prod(self.shapes[name]) for name in counted),
                "total_size": self.total_size,
            },
            "weight_map": {name: file for file, names in self.files.items() for name in names},
        }

    def described(self, file: str) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return type and shape of each tensor in a file."""
        return {name: (self.dtypes[name], self.shapes[name]) for name in self.files[file]}

    def parts(self, name: str) -> list[Part]:
        """Return the parts of a tensor, in the same order on every rank."""
        found = []
        for megatron, block in self._weights.of(name):
            for place in self._places[megatron]:
                if block.start and not _meet(block, place):
                    continue  # skip the many other experts quickly
                inside = block.within(place.start, place.shape)
                if inside is not None:
                    found.append(Part(place, inside))
        return found

    def assemble(self, name: str, read: Callable[[Place], Tensor], memory: Tensor) -> Tensor:
        """Return a whole tensor, of its planned shape and dtype; without a copy if one place holds exactly these bytes.

        Args:
            name: The name of the tensor.
            read: Returns the rectangle of a place.
            memory: A uint8 buffer [bytes], at least as large as the tensor; reused for the next tensor.

        Raises:
            ValueError: Its new type cannot hold some of its values.
        """
        first, *others = parts = self.parts(name)
        if not others:
            held = first.within_place(read(first.place))
            if held.dtype == self.dtypes[name] and held.is_contiguous():
                return held
        target = memory[: self.size(name)].view(self.dtypes[name]).view(self.shapes[name])
        for part in parts:
            self.convert(name, part.within_place(read(part.place)), part.within_target(target))
        return target

    def convert(self, name: str, values: Tensor, target: Tensor) -> None:
        """Copy a part of a tensor into the memory from which it is written.

        Args:
            name: The name of the tensor.
            values: The part, of any shape and dtype.
            target: The memory, of the same shape, with the dtype to write.

        Raises:
            ValueError: This dtype cannot hold some of its values.
        """
        require_fits(name, values, target.dtype)
        target.copy_(values)

    def _dtype_of(self, name: str, dtype: torch.dtype | None) -> torch.dtype:
        if self._stored is not None:
            return self._dtype_as_stored(name, self._stored.of(name))
        if name in self._weights.in_fp32:
            return torch.float32
        return self._held_in(name) if dtype is None else dtype

    def _dtype_as_stored(self, name: str, wanted: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor had in its source, or a wider one if that would now round it."""
        wide = torch.promote_types(self._held_in(name), wanted)
        if wide == wanted or self._read is None:
            return wide
        values = (part.within_place(self._read(part.place)) for part in self.parts(name))
        return wanted if all(holds(wanted, each) for each in values) else wide

    def _held_in(self, name: str) -> torch.dtype:
        """Return a dtype that holds all parts of a tensor."""
        first, *others = (self._places[megatron][0].dtype for megatron, _ in self._weights.of(name))
        return widest(others, first)

    def _in_order(self) -> list[str]:
        """Return the names in the order of the model: the embedding, the layers, then the rest."""

        def place(name: str) -> tuple[int, list[tuple[int, str]]]:
            megatron = self._weights.of(name)[0][0]
            in_layer = re.search(r"\.\d+\.", name) is not None
            part = 1 if in_layer else 0 if megatron.startswith("embedding.") else 2
            return part, [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]

        return sorted(self.shapes, key=place)


def _meet(block: Block, place: Place) -> bool:
    """Return whether the block and the place have rows in common; faster than finding the rows."""
    first, start = block.start[0], place.start[0]
    return start < first + block.shape[0] and first < start + place.shape[0]


def parse_dtype(name: str) -> torch.dtype | None:
    """Return a dtype by its name; None for ``"auto"``.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not known; choose {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return None if name == "auto" else getattr(torch, name)


def parse_size(size: str | int) -> int:
    """Return a size in bytes.

    Args:
        size: A number, or a text such as ``"5GB"``, in powers of ten.

    Raises:
        ValueError: It is not a size, or it is zero.
    """
    found = _SIZE.fullmatch(str(size).strip()) if isinstance(size, str | int) and not isinstance(size, bool) else None
    value = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if value < 1:
        raise ValueError(f"max_shard_size={size!r} is not a file size; give bytes, or text such as '5GB' or '500MB'")
    return value


def _split(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, filename_pattern=_FILE_NAMES, max_shard_size=most
    ).filename_to_tensors


def _check_whole(weights: WeightMap, places: Mapping[str, Sequence[Place]]) -> None:
    """Refuse rules that do not fit the tensors, and incomplete tensors."""
    filled: dict[str, int] = {}
    wrong = []
    for name, blocks in weights.blocks.items():
        axes = range(len(places[name][0].start))
        ends = tuple(max(place.start[axis] + place.shape[axis] for place in places[name]) for axis in axes)
        held, used = sum(prod(place.shape) for place in places[name]), sum(prod(block.shape) for block in blocks)
        # A single, smaller block is the vocabulary without its padding rows.
        if held != prod(ends) or (len(blocks) > 1 and used != held):
            wrong.append(name)
        for block in blocks:
            filled[block.hf] = filled.get(block.hf, 0) + prod(block.shape)
            if any(a + n > end for a, n, end in zip(block.start, block.shape, ends, strict=True)):
                wrong.append(name)
    wrong += [name for name, size in filled.items() if size != prod(weights.shapes[name])]
    if wrong:
        raise ValueError(
            f"the model's sizes do not fit its config: {some_of(set(wrong), _SHOWN)} would be incomplete; give config"
            " and weights of one model"
        )
