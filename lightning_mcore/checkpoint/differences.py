# SPDX-License-Identifier: Apache-2.0
"""Compare stored tensors with a model by name and shape, and say in words what differs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from lightning.pytorch.utilities import rank_zero_warn

from lightning_mcore.checkpoint.manifest import some_of

_SHOWN = 8  # names in an error
_OF_ONE_SPLIT = re.compile(r"chunk\d+\.")  # names of chunks without sharded_state_dict (model_state.py)
Shape = tuple[int, ...]


@dataclass
class Differences:
    """Which tensors only the model has, which only the file has, and which have different shapes."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    @classmethod
    def between(cls, found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Self:
        """Compare the tensors found in a file with the tensors that the model needs."""
        return cls(
            missing=sorted(wanted.keys() - found.keys()),
            unexpected=sorted(found.keys() - wanted.keys()),
            shapes=[
                f"{name} ({list(found[name])} in it, {list(wanted[name])} in the model)"
                for name in sorted(wanted.keys() & found.keys())
                if tuple(found[name]) != tuple(wanted[name])
            ],
        )

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
            raise ValueError(f"{path} does not fit this model: {self}; load it into the model that wrote it{other}")
        if self.missing or self.unexpected:
            rank_zero_warn(f"{path} does not fit this model: {self}; weights that it lacks stay unchanged")
