# SPDX-License-Identifier: Apache-2.0
"""Batches of a stream for training: rows of files become batches, with one end for all ranks and exact resume.

A stream is divided among *readers*: each worker of each data-parallel rank is one. All of them read all files in the
same order, which depends on the seed and the epoch. Reader ``r`` of ``n`` takes rows ``r``, ``r + n``, ``r + 2 n`` and
so on, and tokenises only these, so the readers get similar shares however the rows are spread over files. A reader
tokenises its rows, draws from a buffer in random order, packs online, and collates ``batch_size`` rows.

:class:`StreamLoader` runs the readers of a data-parallel rank, in its own process or one in each worker, and takes
their batches in turns. ``MCoreFinetuningData(streaming=True)`` makes this loader. It adds one end for all ranks, and a
state for checkpoints. A state belongs to one data-parallel rank and one number of workers, so a mid-epoch resume
requires the same numbers of both.
"""

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_mcore.data.checked_files import fingerprints
from lightning_mcore.data.finetuning.conversations import Row
from lightning_mcore.data.finetuning.files import explained, load_rows, name_of_row
from lightning_mcore.data.finetuning.tokenized import Encoder, RowReader
from lightning_mcore.data.packing.best_fit import Overlong, PackingStatistics, TokenSample, fit_sample
from lightning_mcore.data.packing.online import OnlinePacker
from lightning_mcore.data.packing.rows import collate_padded, collate_rows
from lightning_mcore.data.place import Place
from lightning_mcore.data.sampling import is_on_cuda
from lightning_mcore.parallel.consensus import all_gather_object, all_true, run_on_all_ranks

Batch = dict[str, Tensor]
State = dict[str, Any]
BATCHES_BETWEEN_STATES = 16  # at least, for each reader
OPEN_ROWS = 64  # of each reader's packer


@dataclass(frozen=True)
class StreamSettings:
    """What a stream reads, and how it makes batches of it."""

    files: list[str]  # shuffled in each epoch, unless shuffle_buffer=1
    reader: RowReader
    encoder: Encoder
    row_length: int  # places in a row, in tokens
    multiple: int  # of each sub-sequence's length; without packing, of the batch's
    batch_size: int  # rows
    packing: bool
    overlong: Overlong
    shuffle_buffer: int  # samples to draw from; 1 keeps the order
    seed: int
    vocab_size: int | None = None  # to check tokens against; None for no check
    padded_to: int | None = None  # places of a row without packing; None for the longest of the batch


@dataclass(frozen=True)
class Item:
    """What a reader yields."""

    batch: Batch | None = None  # None after the last one
    state: State | None = None  # to continue from after this batch; None if none was taken
    failure: Exception | None = None  # why the reader cannot continue
    statistics: PackingStatistics | None = None  # complete, at the end
    left_out: int = 0  # at the end, rows that do not fill a batch

    def pin_memory(self) -> "Item":
        """Return a copy whose batch is in pinned memory; a DataLoader that pins calls it."""
        batch = {name: value.pin_memory() for name, value in self.batch.items()} if self.batch is not None else None
        return replace(self, batch=batch)


@dataclass(frozen=True)
class ReaderPlace:
    """Where a reader begins."""

    state: State | None = None  # None for the beginning of the epoch
    skip: int = 0  # batches after this state to make and drop


class ReaderStreams(IterableDataset[Item]):
    """The readers of one data-parallel rank, one in each worker of a DataLoader; ``first`` is asked first.

    The items never end: after its last batch a reader keeps yielding items without one. So a DataLoader, which asks its
    workers in turns, keeps the same order whenever each of them comes to its end.
    """

    def __init__(
        self, settings: StreamSettings, epoch: int, rank: int, ranks: int, places: Sequence[ReaderPlace], first: int = 0
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._rank = rank
        self._ranks = ranks
        self._places = places
        self._first = first

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        # The DataLoader starts with worker 0, so worker 0 runs the reader that is asked first. Rank 1 of 2 with 3
        # workers runs readers 3, 4 and 5 of 6; resumed with first=2, its workers run 5, 3 and 4. ``share`` is the
        # number of this reader, and that of all readers.
        number = (self._first + (worker.id if worker is not None else 0)) % len(self._places)
        share = self._rank * len(self._places) + number, self._ranks * len(self._places)
        place = self._places[number]
        last = Item()
        try:
            for count, item in enumerate(_Reader(self._settings, self._epoch, *share, place.state)):
                if item.batch is None:
                    last = item
                elif count >= place.skip:
                    yield item
        except Exception as error:
            last = Item(failure=error)  # StreamLoader raises it on all ranks together
        while True:
            yield last


class _Reader:
    """One reader of a stream: reads, tokenises, shuffles, packs and collates its share of the rows.

    From time to time an item carries a *state*: how far the files are read, the samples in the buffer, the open rows,
    the random numbers. It is plain data. A reader that starts from a state yields exactly the items that came after it.
    """

    def __init__(
        self, settings: StreamSettings, epoch: int, share: int, shares: int, state: Mapping[str, Any] | None
    ) -> None:
        self._settings = settings
        self._share = share
        self._shares = shares
        self._rng = np.random.default_rng([settings.seed, epoch, share])
        self._files = _in_order(settings, epoch)
        self._rows = load_rows(self._files, streaming=True)
        self._passed = 0  # rows of all readers, in all files so far
        self._buffer: list[TokenSample] = []
        self._packer = _packer(settings)
        if state is not None:
            self._rows.load_state_dict(state["rows"])
            self._passed = state["passed"]
            self._rng.bit_generator.state = state["random"]
            self._buffer = _samples(state["buffer"])
            self._packer.load_state_dict(state["packer"])

    def __iter__(self) -> Iterator[Item]:
        """Yield batches, and an item without a batch at the end."""
        settings = self._settings
        waiting: list[Any] = []
        since_state = 0
        for sample in self._drawn():
            waiting += self._packer.add(sample)
            while len(waiting) >= settings.batch_size:
                rows, waiting = waiting[: settings.batch_size], waiting[settings.batch_size :]
                since_state += 1
                # Only when no finished row waits for its batch: a state has no place for it.
                takes_state = not waiting and since_state >= BATCHES_BETWEEN_STATES
                since_state = 0 if takes_state else since_state
                yield Item(self._collate(rows), self._state() if takes_state else None)
        waiting += self._packer.flush()
        whole = len(waiting) // settings.batch_size * settings.batch_size
        for start in range(0, whole, settings.batch_size):
            yield Item(self._collate(waiting[start : start + settings.batch_size]))
        yield Item(statistics=self._packer.statistics, left_out=len(waiting) - whole)

    def _drawn(self) -> Iterator[TokenSample]:
        """Yield the samples in drawing order; a state may be taken at each of them."""
        size, buffer = self._settings.shuffle_buffer, self._buffer
        # With a buffer of 3 and samples a to f: a, b and c fill it, then d replaces one of them, which is yielded, and
        # so on. The last three are drawn from what is left.
        for sample in self._samples():
            if size == 1:
                yield sample
            elif len(buffer) < size:
                buffer.append(sample)
            else:
                place = int(self._rng.integers(size))
                drawn, buffer[place] = buffer[place], sample
                yield drawn
        while buffer:
            place = int(self._rng.integers(len(buffer)))
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            yield buffer.pop()

    def _samples(self) -> Iterator[TokenSample]:
        """Yield the samples of this reader's share, in the order of the files."""
        settings = self._settings
        # A turn has one row for each reader. With 4 readers, reader 1 takes row 1 of each turn, that is rows 1, 5, 9
        # and so on.
        turns = self._rows.iter(batch_size=self._shares)
        while True:
            with explained(settings.files):
                turn = next(turns, None)
            if turn is None:
                return
            rows, number = len(next(iter(turn.values()))), self._passed + self._share
            self._passed += rows
            if rows <= self._share:  # the last turn is short and has no row for this reader
                continue
            absent = dict.fromkeys(settings.reader.needed)  # rows of JSON may lack a column
            sample = self._sample(absent | {name: values[self._share] for name, values in turn.items()}, number)
            if len(sample.tokens):
                yield sample
            else:
                self._packer.statistics.leave_out_unanswered()

    def _sample(self, row: Row, number: int) -> TokenSample:
        """Return the sample of a row; on failure, find out which file the row is in."""
        try:
            return self._encode(row, number, f"row {number}")
        except (ValueError, TypeError):
            return self._encode(row, number, name_of_row(self._files, number))  # fails again, and names the file

    def _encode(self, row: Row, number: int, name: str) -> TokenSample:
        settings = self._settings
        sample = settings.encoder.encode(settings.reader.messages(row, name), number, name)
        if settings.overlong == "error" and sample.length > settings.row_length:
            raise ValueError(
                f"{name} takes {sample.length} tokens, more than the seq_length={settings.row_length} of a row; choose"
                " a larger seq_length, overlong='cut' or overlong='split'"
            )
        return sample

    def _collate(self, rows: list[Any]) -> Batch:
        settings = self._settings
        if settings.packing:
            return collate_rows(rows)
        batch = collate_padded(rows, settings.multiple, settings.padded_to, vocab_size=settings.vocab_size)
        self._packer.statistics.row_padding += batch["tokens"].numel() - int(batch["lengths"].sum())
        return batch

    def _state(self) -> State:
        return {
            "rows": self._rows.state_dict(),
            "passed": self._passed,
            "random": self._rng.bit_generator.state,
            "buffer": _plain(self._buffer),
            "packer": self._packer.state_dict(),
        }


class _OneInARow:
    """Replaces the packer if each sample has its own row."""

    def __init__(self, row_length: int, overlong: Overlong) -> None:
        self.statistics = PackingStatistics()
        self._row_length = row_length
        self._overlong: Overlong = overlong

    def add(self, sample: TokenSample) -> list[TokenSample]:
        """Return the sample, cut or split if necessary."""
        pieces = fit_sample(sample, self._row_length, self.statistics, self._overlong, "drop")
        self.statistics.rows += len(pieces)
        self.statistics.tokens += sum(piece.length for piece in pieces)
        return pieces

    def flush(self) -> list[TokenSample]:
        """Return an empty list: no sample waits here."""
        return []

    def state_dict(self) -> State:
        """Return the counts."""
        return asdict(self.statistics)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.statistics = replace(PackingStatistics(), **state)


def _packer(settings: StreamSettings) -> OnlinePacker | _OneInARow:
    if not settings.packing:
        return _OneInARow(settings.row_length, settings.overlong)
    return OnlinePacker(
        settings.row_length,
        settings.multiple,
        OPEN_ROWS,
        overlong=settings.overlong,
        empty="drop",
        vocab_size=settings.vocab_size,
    )


def _in_order(settings: StreamSettings, epoch: int) -> list[str]:
    """Return the files in an epoch's order, the same for every reader."""
    if settings.shuffle_buffer == 1:
        return settings.files
    order = np.random.default_rng([settings.seed, epoch]).permutation(len(settings.files))
    return [settings.files[place] for place in order]


def _plain(samples: Sequence[TokenSample]) -> State:
    """Return samples as plain numbers and tensors: ``tokens`` [t] int32, ``learnt`` [t] bool, end to end."""
    tokens = [torch.as_tensor(sample.tokens.astype(np.int32)) for sample in samples]
    masks = [torch.as_tensor(sample.loss_mask) for sample in samples]
    return {
        "ids": [sample.sample_id for sample in samples],
        "sizes": [len(sample.tokens) for sample in samples],
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *tokens]),
        "learnt": torch.cat([torch.zeros(0, dtype=torch.bool), *masks]),
    }


def _samples(state: Mapping[str, Any]) -> list[TokenSample]:
    """Rebuild samples from the result of :func:`_plain`."""
    parts = zip(state["tokens"].split(state["sizes"]), state["learnt"].split(state["sizes"]), strict=True)
    return [
        TokenSample(tokens.numpy(), learnt.numpy(), number)
        for (tokens, learnt), number in zip(parts, state["ids"], strict=True)
    ]


T = TypeVar("T")
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

    def __init__(
        self, trainer: pl.Trainer | None, settings: StreamSettings, rank: int = 0, ranks: int = 1, num_workers: int = 0
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._rank = rank
        self._ranks = ranks
        self._num_workers = num_workers
        self._restored: dict[str, Any] | None = None  # until the next epoch begins
        self._running: _Epoch | None = None
        self.sampler = EpochNumber()  # where Lightning looks for set_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Read an epoch, or the rest of one; nothing is read before the first batch is requested.

        Raises ValueError, on all ranks, if the epoch has no batches, or a file or a row cannot be read.
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
            pin_memory=is_on_cuda(self._trainer),
            generator=torch.Generator().manual_seed(self._settings.seed),  # leaves the default generator alone
        )
        if self._num_workers:
            import datasets  # noqa: F401 - workers are forks: without it each imports it anew in every epoch
        items = iter(loader)
        try:
            while True:
                item = running.take(items)
                # Collective, once per batch. The ranks that still have a batch drop it here.
                if not all_true(item is not None and item.failure is None):
                    run_on_all_ranks(partial(_raise_failure, item))
                    self._finish(running, items, item)
                    return
                assert item is not None
                assert item.batch is not None
                running.hand_out()
                yield item.batch
        finally:
            # Ends the workers now. An exception would keep them until the garbage collector ends them one by one.
            del items

    # ---- the state that Lightning saves and loads

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, as numbers and tensors."""
        if self._restored is not None:
            return self._restored
        running, trainer = self._running, self._trainer
        epoch, batches = self.sampler.epoch, running.batches if running is not None else 0
        # Counts batches that were trained on, not those handed out: Lightning reads one batch ahead, and a checkpoint
        # between two optimizer steps belongs to the first of them.
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            place = Place.of(trainer)
            epoch, batches = place.epoch, place.batches if place.in_epoch else 0
        if running is None or not batches:
            return {"epoch": epoch, "batches": 0}
        return {"epoch": running.epoch, "batches": batches, "stream": self._marks(), **running.state(batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch the rest of the one that the state was taken in.

        Raises ValueError if the state is that of a stream with other settings, or of another rank.
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
            "files": self._files,
            "data_parallel_rank": self._rank,
            "data_parallel_size": self._ranks,
            "num_workers": self._num_workers,
            **{name: getattr(settings, name) for name in names},
        }

    @functools.cached_property
    def _files(self) -> list[str]:
        files = self._settings.files
        return [f"{Path(file).name} ({mark})" for file, mark in zip(files, fingerprints(files), strict=True)]

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
        # Collective again: a rank may fail in the batches that are only counted.
        run_on_all_ranks(partial(_raise_failure, item))
        mine = (self._rank, running.statistics, running.left_out + dropped)
        found = {rank: (counts, rows) for rank, counts, rows in all_gather_object(mine)}
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
        self._recent: deque[int] = deque(maxlen=window)  # readers of the last batches handed out
        self._taken: tuple[int, Item] | None = None  # not handed out yet

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
