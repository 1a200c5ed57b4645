# SPDX-License-Identifier: Apache-2.0
"""Batches of a stream for training: rows of files become batches, with one end for all ranks and exact resume.

A stream is divided among *readers* (``stream_reader.py``): each worker of each data-parallel rank is one.
:class:`StreamLoader` runs the readers of a data-parallel rank, in its own process or one in each worker, and takes
their batches in turns. ``MCoreFinetuningData(streaming=True)`` makes this loader. It adds one end for all ranks, and a
state for checkpoints. A state belongs to one data-parallel rank and one number of workers, so a mid-epoch resume
requires the same numbers of both. Packed rows are dealt out among the data-parallel ranks by their work
(``stream_dealing.py``).
"""

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.text import counted
from lightning_mcore.data.checked_files import first_change, named_fingerprints
from lightning_mcore.data.finetuning.stream_dealing import RowDealer
from lightning_mcore.data.finetuning.stream_reader import Batch, Item, ReaderPlace, ReaderStreams, StreamSettings
from lightning_mcore.data.loop_progress import LoopProgress
from lightning_mcore.data.packing.best_fit import PackingStatistics
from lightning_mcore.data.sampling import is_on_cuda
from lightning_mcore.parallel.consensus import all_gather_object, all_true, control_group, run_on_all_ranks
from lightning_mcore.parallel.groups import data_parallel_hosts

_AHEAD = 2  # batches that Lightning may have read ahead: one, and one more to be safe


class StreamLoader:
    """Iterates over one epoch of a stream at a time.

    *One end for all ranks.* The ranks do not get exactly the same number of batches. Before a batch is handed out, they
    agree that each of them has one. When a rank has none, the epoch ends on all of them, and the log says how much is
    left. If one rank fails, for example on a broken line, all raise the same error. An epoch without any batch also
    raises: nothing would be learnt, and a run that counts steps would never end.

    *A state for checkpoints.* Lightning saves the state of a loader that has ``state_dict``, and ``strategy/resume.py``
    keeps one for each data-parallel rank.
    """

    counts_trained_batches = True  # so its state is right although Lightning reads ahead

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
        self.sampler = EpochNumber()  # where Lightning looks for set_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Read an epoch, or the rest of one; nothing is read before the first batch is requested."""
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
            pin_memory=is_on_cuda(self._trainer),
            generator=torch.Generator().manual_seed(self._settings.seed),  # leaves the default generator alone
        )
        if self._num_workers:
            import datasets  # noqa: F401 - workers are forks: without it each imports it anew in every epoch
        items = iter(loader)
        group = self._readers_group()
        dealer = self._dealer()
        try:
            while True:
                item = running.take(items)
                # Collective, once per batch. The ranks that still have a batch drop it here.
                if not all_true(item is not None and item.failure is None, group):
                    run_on_all_ranks(partial(_raise_failure, item), group)
                    self._finish(running, items, item, group)
                    return
                assert item is not None
                assert item.batch is not None
                running.hand_out()
                yield item.batch if dealer is None else dealer.deal(item.batch, running.batches - 1)
        finally:
            # Ends the workers now. An exception would keep them until the garbage collector ends them one by one.
            del items

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, as numbers and tensors."""
        if self._restored is not None:
            return self._restored
        running, trainer = self._running, self._trainer
        epoch, batches = self.sampler.epoch, running.batches if running is not None else 0
        # Counts batches that were trained on, not those handed out: Lightning reads one batch ahead, and a checkpoint
        # between two optimizer steps belongs to the first of them.
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            progress = LoopProgress.of(trainer)
            epoch, batches = progress.epoch, progress.batches if progress.in_epoch else 0
        if running is None or not batches:
            return {"epoch": epoch, "batches": 0}
        return {"epoch": running.epoch, "batches": batches, "stream": self._marks(), **running.state(batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch the rest of the one that this stream's state was taken in."""
        self.sampler.set_epoch(state["epoch"])
        self._restored = None
        if not state["batches"]:
            return
        older = {"log_sources": False, "hybrid_context_parallel": False}  # which older checkpoints lack
        saved = {**older, **state["stream"]}
        if (change := first_change(saved, self._marks())) is not None:
            name, then, now = change
            raise ValueError(
                f"the checkpoint was taken in the middle of an epoch of a stream with {name}={then}, but now"
                f" {name}={now}; resume with that value, or from the end of an epoch"
            )
        self._restored = dict(state)

    def _marks(self) -> dict[str, Any]:
        """Return what must be the same for a stream to resume within an epoch."""
        settings = self._settings
        names = ("row_length", "multiple", "batch_size", "packing", "overlong", "shuffle_buffer", "seed")
        return {
            "files": self._files,
            "data_parallel_rank": self._rank,
            "data_parallel_size": self._ranks,
            "num_workers": self._num_workers,
            "log_sources": settings.sources is not None,
            "hybrid_context_parallel": settings.parts > 1,
            **{name: getattr(settings, name) for name in names},
        }

    @functools.cached_property
    def _files(self) -> list[str]:
        return named_fingerprints(self._settings.files)

    @property
    def _window(self) -> int:
        """How many batches back a checkpoint may go."""
        return _AHEAD + (self._trainer.accumulate_grad_batches if self._trainer is not None else 1)

    def _readers_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that agree on each batch: with ``broadcast_batches`` those that read, else all of them."""
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        return data_parallel_hosts() if getattr(getattr(strategy, "batches", None), "sends", False) else None

    def _dealer(self) -> RowDealer | None:
        """Return what deals out rows among the ranks; None for one rank, and for rows of one sample."""
        trainer = self._trainer
        if trainer is None or self._ranks == 1 or not self._settings.packing:
            return None
        is_ours = isinstance(getattr(trainer.strategy, "layout", None), ParallelLayout)
        group = data_parallel_hosts() if is_ours else control_group()
        return RowDealer(group, lambda: trainer.accumulate_grad_batches, self._settings.parts)

    def _finish(
        self, running: "_Epoch", items: Iterator[Item], item: Item | None, group: dist.ProcessGroup | None
    ) -> None:
        """Read to the end, to count what all ranks leave out, and log it."""
        dropped = 0
        while item is not None and item.failure is None:
            dropped += self._settings.batch_size
            item = running.take(items)
        # Collective again: a rank may fail in the batches that are only counted.
        run_on_all_ranks(partial(_raise_failure, item), group)
        mine = (self._rank, running.statistics, running.left_out + dropped)
        found = {rank: (counts, rows) for rank, counts, rows in all_gather_object(mine, group)}
        statistics = sum((counts for counts, _ in found.values()), PackingStatistics())
        rows = sum(rows for _, rows in found.values())
        if not running.batches:
            raise ValueError(self._why_no_batch(statistics, rows))
        said = f"; left out {counted(rows, 'row')}, too few to give every rank a batch" if rows else ""
        rank_zero_info(f"epoch {running.epoch} of the stream: {statistics}{said}")

    def _why_no_batch(self, statistics: PackingStatistics, rows: int) -> str:
        settings, readers = self._settings, max(1, self._num_workers)
        files = (
            settings.files[0] if len(settings.files) == 1 else f"{settings.files[0]} and {len(settings.files) - 1} more"
        )
        if not statistics.packed:
            return f"{files} has nothing to learn ({statistics}); give rows with answers"
        needed = settings.batch_size
        return (
            f"the stream of {files} has {counted(rows, 'row')}, too few for a batch: each of {self._ranks}"
            f" data-parallel ranks needs {counted(needed, 'row')} from a single reader (it has {readers}),"
            f" {counted(needed * self._ranks, 'row')} in total ({statistics}); give more data, or lower batch_size,"
            " num_workers or the number of ranks"
        )


class EpochNumber:
    """Receives the epoch number from Lightning, as a distributed sampler does.

    Source: ``_set_sampler_epoch`` in lightning/fabric/utilities/data.py (2.6).
    """

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that begins."""
        self.epoch = epoch


class _Epoch:
    """One epoch while it is read: the batches that each reader gave, and the states of the readers.

    Readers send their states only now and then, so :meth:`state` has a state of each reader and the number of batches
    to make again from there without training on them.
    """

    def __init__(self, epoch: int, places: list[ReaderPlace], first: int, given: int, window: int) -> None:
        self.epoch = epoch
        self.batches = given
        self.statistics = PackingStatistics()
        self.left_out = 0
        self._window = window
        self._next = first
        self._ended: set[int] = set()
        self._counts = [place.skip for place in places]  # batches of each reader since the state it began with
        self._states = [deque([(0, place.state)]) for place in places]  # per reader: (count, state), oldest first
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
            # A state is dropped once the next one is old enough for the oldest checkpoint that may come.
            while len(states) > 1 and states[1][0] <= self._counts[reader] - self._window:
                states.popleft()

    def state(self, batches: int) -> dict[str, Any]:
        """Return the position after the first ``batches`` batches of the epoch.

        Raises RuntimeError for more batches than were handed out, or so few that the reader states of then are gone.
        """
        back = self.batches - batches
        if not 0 <= back <= len(self._recent):
            raise RuntimeError(
                f"{self.batches} batches of the stream were handed out, but the checkpoint was asked for after"
                f" {batches} of them; take it after at least {self.batches - len(self._recent)}"
            )
        # Two readers and 5 batches, of readers 0 1 0 1 0, none with a state. After 5 the skips are 3 and 2 and reader 1
        # is next. After 3, the batches of readers 1 and 0 are undone: skips 2 and 1, reader 1 next.
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
