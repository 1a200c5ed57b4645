# SPDX-License-Identifier: Apache-2.0
"""The plan of an export: the file of each Hugging Face tensor, and the rectangles that it is assembled from.

The rectangles (:class:`Place`) are in a checkpoint or in the ranks' memory. The plan does not depend on which, so
``export.py`` uses it for both. Ranks that plan with the same places get the same plan, so they need not exchange it.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
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
_SHOWN = 5


@dataclass(frozen=True)
class ExportOptions:
    """What the user chooses for an export; ``export_checkpoint`` says what the fields mean."""

    like: str | None = None
    family: str | None = None
    dtype: str = "auto"
    max_shard_size: str | int = MAX_SHARD_SIZE

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)
        parse_size(self.max_shard_size)


@dataclass(frozen=True)
class Place:
    """A rectangle of a Megatron tensor, and where its values are."""

    start: Shape
    shape: Shape
    dtype: torch.dtype
    source: Any  # for the function that reads it: (rank, number of the piece), or an entry of the checkpoint


@dataclass(frozen=True)
class Part:
    """A rectangle that is copied in one step."""

    place: Place
    block: Block  # the rectangle, in Megatron's tensor and in Hugging Face's

    def within_place(self, held: Tensor) -> Tensor:
        """Return a view of its values, in the Hugging Face shape, in ``held``: the whole place in Megatron's shape."""
        block = self.block
        for axis, (start, first, length) in enumerate(zip(block.start, self.place.start, block.shape, strict=True)):
            # The block's start counts from the tensor's origin, `held` begins at the place's: rows 12-13 of a place
            # that starts at row 8 are its rows 4-5
            held = held.narrow(axis, start - first, length)
        # Drop the axes of layer and expert, of size 1 here
        held = held.view(block.shape[len(block.shape) - len(block.hf_start) :])
        return held.mT if block.transposed else held

    def within_target(self, target: Tensor) -> Tensor:
        """Return a view of the rectangle that it fills in ``target``, the whole Hugging Face tensor."""
        return target[self.block.hf_index]


class ExportPlan:
    """The file of each tensor, and the places of its values.

    ``places`` are the rectangles that make up each Megatron tensor, by its whole name. ``dtype`` is the dtype to write;
    None means the dtypes in the model's source (``stored``), or in the places if ``stored`` is None as well. A file has
    at most ``max_shard_size`` bytes of tensors, unless a single tensor has more. ``read`` returns a place's values;
    None if they can be read only while writing.
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
        """Return a tensor's size in bytes."""
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
        # A tensor that repeats another is written, but is not a parameter of its own
        counted = self.shapes.keys() - self._weights.repeated.keys()
        return {
            "metadata": {
                "total_parameters": sum(prod(self.shapes[name]) for name in counted),
                "total_size": self.total_size,
            },
            "weight_map": {name: file for file, names in self.files.items() for name in names},
        }

    def described(self, file: str) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return dtype and shape of each tensor in a file."""
        return {name: (self.dtypes[name], self.shapes[name]) for name in self.files[file]}

    def keep(self, names: Collection[str]) -> None:
        """Drop all other tensors from the files, and files without tensors."""
        kept = {file: [name for name in of_file if name in names] for file, of_file in self.files.items()}
        self.files = {file: of_file for file, of_file in kept.items() if of_file}

    def parts(self, name: str) -> list[Part]:
        """Return a tensor's parts, in the same order on every rank."""
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

        ``memory`` is a uint8 buffer [bytes], at least as large as the tensor; it is reused for the next one. Raises
        ValueError if the new dtype cannot hold some of the values.
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
        """Copy a part of a tensor to where it is written from; ValueError if the dtype to write cannot hold a value."""
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
        # A gate stored in bf16 may be fp32 in Megatron's tensor only because its neighbours are: look at the values
        values = (part.within_place(self._read(part.place)) for part in self.parts(name))
        return wanted if all(holds(wanted, each) for each in values) else wide

    def _held_in(self, name: str) -> torch.dtype:
        """Return a dtype that holds all parts of a tensor."""
        first, *others = (self._places[megatron][0].dtype for megatron, _ in self._weights.of(name))
        return widest(others, first)

    def _in_order(self) -> list[str]:
        """Return the names in model order: the embedding, the layers, then the rest."""

        def place(name: str) -> tuple[int, list[tuple[int, str]]]:
            megatron = self._weights.of(name)[0][0]
            in_layer = re.search(r"\.\d+\.", name) is not None
            part = 1 if in_layer else 0 if megatron.startswith("embedding.") else 2
            # Layer 2 comes before layer 10; a word sorts before a number
            return part, [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]

        return sorted(self.shapes, key=place)


def _meet(block: Block, place: Place) -> bool:
    """Return whether the block and the place have rows in common; faster than finding the rows."""
    first, start = block.start[0], place.start[0]
    return start < first + block.shape[0] and first < start + place.shape[0]


def parse_dtype(name: str) -> torch.dtype | None:
    """Return a dtype by its name; None for ``"auto"``. ValueError if the name is unknown."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not known; choose {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return None if name == "auto" else getattr(torch, name)


def parse_size(size: str | int, name: str = "max_shard_size") -> int:
    """Return a size in bytes, from a number or a text in powers of ten: ``"5GB"`` is 5,000,000,000."""
    found = _SIZE.fullmatch(str(size).strip()) if isinstance(size, str | int) and not isinstance(size, bool) else None
    value = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if value < 1:
        raise ValueError(f"{name}={size!r} is not a file size; give bytes, or text such as '5GB' or '500MB'")
    return value


def _split(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    from huggingface_hub import split_state_dict_into_shards_factory

    # As save_pretrained splits
    return split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, filename_pattern=_FILE_NAMES, max_shard_size=most
    ).filename_to_tensors


def _check_whole(weights: WeightMap, places: Mapping[str, Sequence[Place]]) -> None:
    """Raise ValueError for rules that do not fit the tensors, and for incomplete tensors."""
    filled: dict[str, int] = {}
    wrong = []
    for name, blocks in weights.blocks.items():
        # A tensor ends where its farthest place ends; places that overlap or leave a gap do not add up to its size
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
