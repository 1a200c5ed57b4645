# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint has of one rank in addition to weights, optimizer and Lightning's loops.

``resume.py`` fills these records when it saves, and reads them when it resumes. A checkpoint has each as a dict::

    RankState                     one rank: coordinates, progress, random state, metrics, and for each training loader
      LoaderState                 how it continues, and for a DataLoader of torch
        Position                  what it has read (``data/position.py``), with the random states of the moments when
          LoaderRandomState       its pass was opened and started
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import _Stateful  # private, but what Lightning saves a loader's state by
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_mcore.data.loop_progress import LoopProgress
from lightning_mcore.data.position import Position, index_sampler
from lightning_mcore.parallel.random_state import RandomState, from_plain, to_plain

LoaderKind = Literal["index", "stateful", "read"]
"""How a loader continues: it skips indices, it loads its own state, or its batches are read and dropped."""


def kind_of(loader: object) -> LoaderKind:
    """Return how a loader continues in the middle of an epoch."""
    if isinstance(loader, _Stateful):
        return "stateful"
    has_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return "index" if has_index else "read"


def epoch_of(loader: Any) -> int | None:
    """Return the epoch that orders a loader's dataset, as in Hugging Face streams; None without one."""
    dataset = getattr(loader, "dataset", None)
    epoch = getattr(dataset, "epoch", None)
    return epoch if isinstance(epoch, int) and callable(getattr(dataset, "set_epoch", None)) else None


def seed_of(loader: object) -> int | None:
    """Return the seed of a loader's distributed sampler; None for any other sampler."""
    sampler = index_sampler(loader)
    return sampler.seed if isinstance(sampler, DistributedSampler) else None


@dataclass(frozen=True)
class LoaderState:
    """How a training loader continues."""

    kind: LoaderKind
    position: Position | None = None
    epoch: int | None = None  # of its dataset, which a hook of the user sets; older files lack it
    seed: int | None = None  # of its distributed sampler; older files lack it

    def to_plain(self) -> dict[str, Any]:
        """Return the state as numbers, strings and tensors."""
        position = self.position.to_plain() if self.position is not None else {}
        return {"kind": self.kind, "epoch": self.epoch, "sampler_seed": self.seed, **position}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LoaderState":
        """Rebuild the result of :meth:`to_plain`."""
        position = {name: value for name, value in plain.items() if name not in ("kind", "epoch", "sampler_seed")}
        place = Position.from_plain(position) if position else None
        return cls(plain["kind"], place, plain.get("epoch"), plain.get("sampler_seed"))


@dataclass(frozen=True)
class RankState:
    """One rank's part of a checkpoint."""

    coordinates: Mapping[str, int]  # of the rank, with the sizes of the layout's axes
    progress: LoopProgress
    random: RandomState
    loaders: list[LoaderState] | None  # None if the module read batches itself (dataloader_iter)
    stateful: list[Any]  # Lightning's states of the stateful loaders
    metrics: Mapping[str, torch.Tensor]  # that monitors and plateau schedulers look up
    # An epoch's first batch is next, and ``stateful`` is for loop_progress.begin_pass(); older files lack it.
    begins_pass: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return the state as numbers, strings and tensors, which ``torch.load(weights_only=True)`` can read."""
        return {
            "coordinates": self.coordinates,
            "place": asdict(self.progress),
            "random": to_plain(self.random),
            "loaders": [loader.to_plain() for loader in self.loaders] if self.loaders is not None else None,
            "stateful": self.stateful,
            "metrics": self.metrics,
            "begins_pass": self.begins_pass,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "RankState":
        """Rebuild the result of :meth:`to_plain`."""
        loaders = plain["loaders"]
        return cls(
            coordinates=plain["coordinates"],
            progress=LoopProgress(**plain["place"]),
            random=from_plain(plain["random"]),
            loaders=[LoaderState.from_plain(loader) for loader in loaders] if loaders is not None else None,
            stateful=plain["stateful"],
            metrics=plain["metrics"],
            begins_pass=plain.get("begins_pass", False),
        )

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the run."""
        return self.coordinates["data_parallel_size"]

    @property
    def is_between_epochs(self) -> bool:
        """Whether the next epoch begins."""
        return not self.progress.in_epoch and not self.progress.ending

    @property
    def kinds(self) -> list[LoaderKind]:
        """How each loader continues."""
        return [loader.kind for loader in self.loaders or []]

    @property
    def can_open_later(self) -> bool:
        """Whether the next epoch may open its loaders again; Lightning has opened them before ``on_train_start``."""
        # Opening a loader that is only read may consume data, unless its dataset knows epochs. One that keeps its own
        # state must be opened again, as its state belongs to the epoch that has ended, and the first pass has nothing
        # left.
        return all(loader.kind != "read" or loader.epoch is not None for loader in self.loaders or [])

    def set_epoch(self, loader: Any, index: int) -> None:
        """Read the rest of an epoch in its own order: Lightning skips the hook in which a user calls ``set_epoch``."""
        saved = self.loaders[index].epoch if self.loaders is not None and index < len(self.loaders) else None
        if self.progress.in_epoch and saved is not None and epoch_of(loader) is not None:
            loader.dataset.set_epoch(saved)

    def seed(self, index: int) -> int | None:
        """Return the seed of the distributed sampler of the loader with this index; None if it had none."""
        return self.loaders[index].seed if self.loaders is not None and index < len(self.loaders) else None

    def position(self, index: int) -> Position | None:
        """Return where the loader with this index continues; None if it has no position."""
        if self.loaders is None or index >= len(self.loaders):
            return None
        position = self.loaders[index].position
        if position is None:
            return None
        if not self.progress.in_epoch:  # a new pass; persistent workers keep the seed of the first one
            opened = position.opened if self.can_open_later else None
            return replace(position, batches=0, offset=0, opened=opened, started=None)
        # If some loaders are read and none is stateful, all are read together, from the beginning.
        reads_all = "read" in self.kinds and "stateful" not in self.kinds
        return replace(position, batches=0) if reads_all else position
