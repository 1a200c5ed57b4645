# SPDX-License-Identifier: Apache-2.0
"""``StreamLoader``: batches of a stream for training, with one end for all data-parallel ranks and exact resume.

Each data-parallel rank has one reader (``stream.py``) in its own process, or one in each worker. The batches of the
workers are taken in turns. This loader adds:

* **One end for all ranks.** The ranks do not get exactly the same number of batches. Before a batch is handed out, the
  ranks agree that each of them has one. When a rank has none, the epoch ends on all of them, and the log says how much
  is left. If one rank fails, for example on a broken line, all of them fail with the same message. An epoch without any
  batch also fails: nothing would be learnt, and a run that counts steps would never end.
* **A state for checkpoints.** Lightning saves the state of a loader that has ``state_dict``, and
  ``strategy/resume.py`` keeps one for each data-parallel rank. The state counts the batches of the epoch that were
  trained on, not those handed out: Lightning reads one batch in advance, and a checkpoint between two optimizer steps
  belongs to the first of them. Readers send their states only now and then, so the loader's state has a state of each
  reader and the number of batches to make again from there without training on them.

A state belongs to one data-parallel rank and one number of workers, so in the middle of an epoch a run can resume only
with the same numbers of both. ``MCoreFinetuningData(streaming=True)`` makes this loader.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lightning_mcore.data.finetuning.stream import Batch, Item, ReaderPlace, ReaderStreams, StreamSettings
from lightning_mcore.data.loop_position import Place
from lightning_mcore.data.packing.best_fit import PackingStatistics
from lightning_mcore.parallel.consensus import all_true, gather, together

T = TypeVar("T")
_AHEAD = 2  # batches that Lightning may have read in advance: one, and one more to be safe


class StreamLoader:
    """Iterates over one epoch of a stream at a time.

    Args:
        trainer: The trainer of the run; None outside a run.
        settings: What the stream reads, and how it makes batches of it.
        rank: This data-parallel rank.
        ranks: Number of data-parallel ranks.
        num_workers: Number of processes that read in advance; 0 reads in this process.
    """

    def __init__(
        self, trainer: pl.Trainer | None, settings: StreamSettings, rank: int = 0, ranks: int = 1, num_workers: int = 0
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._rank = rank
        self._ranks = ranks
        self._num_workers = num_workers
        self._restored: dict[str, Any] | None = None
        self._running: _Epoch | None = None
        self.sampler = EpochNumber()

    def __iter__(self) -> Iterator[Batch]:
        """Read an epoch, or the rest of one; nothing is read before the first batch is asked for.

        Raises:
            ValueError: The epoch has no batches, or a file or a row cannot be read.
        """
        restored, self._restored = self._restored, None
        places, first, given = [ReaderPlace()] * max(1, self._num_workers), 0, 0
        epoch = self.sampler.epoch
        if restored is not None:
            places = [ReaderPlace(reader["state"], reader["skip"]) for reader in restored["readers"]]
            first, given, epoch = restored["next"], restored["batches"], restored["epoch"]
        running = self._running = _Epoch(epoch, places, first, given, self._window)
        streams = ReaderStreams(self._settings, epoch, self._rank, self._ranks, places, first)
        loader = DataLoader(
            streams,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            generator=torch.Generator().manual_seed(self._settings.seed),  # leaves the default generator alone
        )
        items = iter(loader)
        try:
            while True:
                item = running.take(items)
                if not _all(item is not None and item.failure is None):
                    together(partial(_raise_failure, item))
                    self._finish(running, items, item)
                    return
                assert item is not None
                assert item.batch is not None
                running.hand_out()
                yield item.batch
        finally:
            del (
                items
            )  # ends the workers now; an exception would keep them until the garbage collector ends them one by one

    # ---- the state that Lightning saves and loads

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, as numbers and tensors."""
        if self._restored is not None:
            return self._restored
        running, trainer = self._running, self._trainer
        epoch, batches = self.sampler.epoch, running.batches if running is not None else 0
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            place = Place.of(trainer)
            epoch, batches = place.epoch, place.batches if place.in_epoch else 0
        if running is None or not batches:
            return {"epoch": epoch, "batches": 0}
        return {"epoch": running.epoch, "batches": batches, "stream": self._marks(), **running.state(batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch the rest of the one that the state was taken in.

        Raises:
            ValueError: The state is that of a stream with other settings, or of another rank.
        """
        self.sampler.set_epoch(state["epoch"])
        self._restored = None
        if not state["batches"]:
            return
        for name, value in self._marks().items():
            then = state["stream"][name]
            if then != value:
                raise ValueError(
                    f"the checkpoint was taken in the middle of an epoch of a stream with {name}={then}, but now"
                    f" {name}={value}; resume with that value, or from the end of an epoch"
                )
        self._restored = dict(state)

    def _marks(self) -> dict[str, Any]:
        """Return what must be the same for a stream to resume within an epoch."""
        settings = self._settings
        names = ("row_length", "multiple", "batch_size", "packing", "overlong", "shuffle_buffer", "seed")
        return {
            "files": [f"{Path(file).name} ({Path(file).stat().st_size} bytes)" for file in settings.files],
            "data_parallel_rank": self._rank,
            "data_parallel_size": self._ranks,
            "num_workers": self._num_workers,
            **{name: getattr(settings, name) for name in names},
        }

    @property
    def _window(self) -> int:
        """How many batches back a checkpoint may go."""
        return _AHEAD + (self._trainer.accumulate_grad_batches if self._trainer is not None else 1)

    def _finish(self, running: "_Epoch", items: Iterator[Item], item: Item | None) -> None:
        """Read to the end, to count what all ranks leave out, and log it."""
        dropped = 0
        while item is not None and item.failure is None:
            dropped += self._settings.batch_size
            item = running.take(items)
        together(partial(_raise_failure, item))
        mine = (self._rank, running.statistics, running.left_out + dropped)
        found = {rank: (counts, rows) for rank, counts, rows in (gather(mine) if _many() else [mine])}
        statistics = sum((counts for counts, _ in found.values()), PackingStatistics())
        rows = sum(rows for _, rows in found.values())
        if not running.batches:
            raise ValueError(self._why_no_batch(statistics, rows))
        said = f"; {rows} rows left out, which do not fill a batch on all ranks" if rows else ""
        rank_zero_info(f"epoch {running.epoch} of the stream: {statistics}{said}")

    def _why_no_batch(self, statistics: PackingStatistics, rows: int) -> str:
        settings, readers = self._settings, max(1, self._num_workers)
        files = (
            settings.files[0] if len(settings.files) == 1 else f"{settings.files[0]} and {len(settings.files) - 1} more"
        )
        if not statistics.packed:
            return f"{files} has nothing to learn ({statistics}); give rows with answers"
        return (
            f"the stream of {files} has {rows} rows, too few for a batch: each of {self._ranks} data-parallel ranks"
            f" needs {settings.batch_size} rows from one of its {readers} readers, {settings.batch_size * self._ranks}"
            f" on all of them ({statistics}); give more data, or lower batch_size, num_workers or the number of ranks"
        )


class EpochNumber:
    """Receives the number of the epoch from Lightning, as a distributed sampler does.

    Source: ``_set_sampler_epoch`` in lightning/fabric/utilities/data.py (2.6).
    """

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that begins."""
        self.epoch = epoch


class _Epoch:
    """One epoch while it is read: the batches that each reader gave, and the states of the readers."""

    def __init__(self, epoch: int, places: list[ReaderPlace], first: int, given: int, window: int) -> None:
        self.epoch = epoch
        self.batches = given
        self.statistics = PackingStatistics()
        self.left_out = 0
        self._window = window
        self._next = first
        self._ended: set[int] = set()
        self._counts = [place.skip for place in places]  # batches of each reader since the state it began with
        self._states = [deque([(0, place.state)]) for place in places]
        self._recent: deque[int] = deque(maxlen=window)
        self._taken: tuple[int, Item] | None = None

    def take(self, items: Iterator[Item]) -> Item | None:
        """Return the next batch, or a failure; None if every reader is at its end."""
        while len(self._ended) < len(self._counts):
            item, reader = next(items), self._next
            self._next = (reader + 1) % len(self._counts)
            if item.batch is None and item.failure is None:
                if reader not in self._ended and item.statistics is not None:
                    self.statistics = self.statistics + item.statistics
                    self.left_out += item.left_out
                self._ended.add(reader)
                continue
            self._taken = reader, item
            return item
        return None

    def hand_out(self) -> None:
        """Count the batch that was taken."""
        assert self._taken is not None
        (reader, item), self._taken = self._taken, None
        self.batches += 1
        self._counts[reader] += 1
        self._recent.append(reader)
        states = self._states[reader]
        if item.state is not None:
            states.append((self._counts[reader], item.state))
            while len(states) > 1 and states[1][0] <= self._counts[reader] - self._window:
                states.popleft()

    def state(self, batches: int) -> dict[str, Any]:
        """Return the position after the first ``batches`` batches of the epoch.

        Raises:
            RuntimeError: More batches than were handed out, or so few that the reader states of then are gone.
        """
        back = self.batches - batches
        if not 0 <= back <= len(self._recent):
            raise RuntimeError(
                f"{self.batches} batches of the stream were handed out, but the checkpoint was asked for after"
                f" {batches} of them; take it after at least {self.batches - len(self._recent)}"
            )
        undone = list(self._recent)[len(self._recent) - back :]
        readers = []
        for reader, states in enumerate(self._states):
            count = self._counts[reader] - undone.count(reader)
            at, state = next((at, state) for at, state in reversed(states) if at <= count)
            readers.append({"state": state, "skip": count - at})
        return {"readers": readers, "next": undone[0] if undone else self._next}


def _as_it_is(item: Any) -> Any:
    return item


def _raise_failure(item: Item | None) -> None:
    if item is not None and item.failure is not None:
        raise item.failure


def _many() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _all(mine: bool) -> bool:
    return all_true(mine) if _many() else mine
