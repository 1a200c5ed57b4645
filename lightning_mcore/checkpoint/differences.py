# SPDX-License-Identifier: Apache-2.0
"""Compare stored tensors with a model by name and shape, and say in words what differs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from lightning.pytorch.utilities import rank_zero_warn

from lightning_mcore.checkpoint.manifest import some_of

_SHOWN = 6  # names in an error
_OF_ONE_SPLIT = re.compile(r"chunk\d+\.")  # names of chunks without sharded_state_dict (model_state.py)
_OF_ONE_LAYER = re.compile(r"(?<=\bdecoder\.layers\.)\d+\.")
_OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
Shape = tuple[int, ...]


@dataclass
class Differences:
    """Which tensors only the model has, which only the file has, and which have different shapes."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    remedy: str = "load it into the model that wrote it"

    @classmethod
    def between(cls, found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Self:
        """Compare the tensors found in a file with the tensors that the model needs."""
        other = [name for name in sorted(wanted.keys() & found.keys()) if tuple(found[name]) != tuple(wanted[name])]
        differences = cls(
            missing=sorted(wanted.keys() - found.keys()),
            unexpected=sorted(found.keys() - wanted.keys()),
            shapes=[f"{name} ({list(found[name])} in it, {list(wanted[name])} in the model)" for name in other],
        )
        if other[:1] == [_OF_VOCABULARY[0]] and {*other} <= {*_OF_VOCABULARY}:
            differences.remedy = (
                f"set vocab_size and make_vocab_size_divisible_by so that the vocabulary has {found[other[0]][0]} rows"
            )
        layers = {_OF_ONE_LAYER.sub("", name) for name in differences.unexpected}
        if differences.missing and layers >= {*differences.missing, *other}:
            differences.remedy = (
                "set hetereogenous_dist_checkpoint=True in the model's config, because each layer is stored under its"
                " own name"
            )
        return differences

    def __str__(self) -> str:
        """Return the first names of each kind of difference, as part of a sentence; empty if there is none."""
        kinds = (
            ("lacks", self.missing),
            ("has weights that the model does not have:", self.unexpected),
            ("has different shapes:", self.shapes),
        )
        return "; ".join(f"it {text} {some_of(names, _SHOWN)}" for text, names in kinds if names)

    def check(self, path: str, strict: bool, advice: str) -> None:
        """Raise ``ValueError`` for a checkpoint that does not fit, and warn about weights that stay unchanged.

        Names may differ unless ``strict``; shapes must always agree. ``advice`` tells the user how to allow different
        names.
        """
        # All ranks compare the same names and raise together.
        if self.shapes or (strict and (self.missing or self.unexpected)):
            other = "" if self.shapes else f", or {advice} to load what fits"
            if any(map(_OF_ONE_SPLIT.match, self.missing)):  # with other stages, what is missing is the trained layers
                other = ", on the same pipeline stages"
            raise ValueError(f"{path} does not fit this model: {self}; {self.remedy}{other}")
        if self.missing or self.unexpected:
            rank_zero_warn(f"{path} does not fit this model: {self}; weights that it lacks stay unchanged")
