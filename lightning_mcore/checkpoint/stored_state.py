# SPDX-License-Identifier: Apache-2.0
"""A checkpoint to read from: what is in it, and how that differs from a model that asks.

``strategy/checkpointing.py`` and ``weights.py`` open a :class:`StoredState`, and ``model_state.py`` reads from it into
whatever layout runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from lightning.pytorch.utilities import rank_zero_warn

from lightning_mcore.checkpoint.format import some_of
from lightning_mcore.checkpoint.io import Contents, MCoreCheckpointIO
from lightning_mcore.checkpoint.optimizer_state import Numbers
from lightning_mcore.parallel.consensus import on_all

Shape = tuple[int, ...]
OPTIMIZER = "optimizer"  # first word of the names of what belongs to one
STRICT_LOADING = "set strict_loading=False in the module"
_SHOWN = 8  # names in an error


@dataclass(frozen=True)
class StoredState:
    """A checkpoint to read from.

    Args:
        path: Where it is, for messages.
        contents: What is in it. Objects of TransformerEngine's layers may be missing, where the model ran without it.
        numbers: What :func:`collect` returned beside the tensors; None if there is no state of an optimizer.
        read: Fills the tensors of a sharded state from it and returns it; collective over the world.
    """

    path: str
    contents: Contents
    numbers: Sequence[Numbers] | None
    read: Callable[[dict[str, Any]], dict[str, Any]]

    @classmethod
    def open(
        cls,
        io: MCoreCheckpointIO,
        path: str,
        numbers: Sequence[Numbers] | None = None,
        weights_only: bool | None = None,
    ) -> Self:
        """Look into a checkpoint; collective over the world."""
        contents = on_all(lambda: io.read_contents(path))
        return cls(path, contents, numbers, partial(io.load_shards, path, weights_only=weights_only))

    def weights(self) -> dict[str, Shape]:
        """Global shapes of the tensors that belong to no optimizer."""
        shapes = self.contents.shapes
        return {name: shape for name, shape in shapes.items() if not name.startswith(f"{OPTIMIZER}.")}


@dataclass
class Differences:
    """How the names and shapes of a checkpoint differ from those of a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    def sentence(self, path: str, advice: str) -> str:
        """Say it in one sentence, with the first names of each kind and what to do."""
        kinds = (
            ("lacks", self.missing),
            ("has what this model does not:", self.unexpected),
            ("has other shapes:", self.shapes),
        )
        found = "; it ".join(f"{text} {some_of(names, _SHOWN)}" for text, names in kinds if names)
        return f"{path} is of another model: it {found}; {advice}"

    def check(self, path: str, strict: bool, advice: str) -> None:
        """Refuse what cannot be loaded, and warn of what stays as it is.

        Args:
            path: The checkpoint.
            strict: Whether names must agree; shapes must in any case.
            advice: How names need not agree.

        Raises:
            ValueError: The checkpoint does not fit.
        """
        if self.shapes or (strict and (self.missing or self.unexpected)):
            other = "" if self.shapes else f", or {advice} to load what fits"
            raise ValueError(self.sentence(path, f"load it into the model that wrote it{other}"))
        if self.missing or self.unexpected:
            rank_zero_warn(self.sentence(path, "what it lacks stays as it is"))
