# SPDX-License-Identifier: Apache-2.0
"""The readers of a stream: each reads its share of the rows of files, and makes batches of them.

Each worker of each data-parallel rank is one *reader*. All of them read all files in the same order, which depends on
the seed and the epoch. Reader ``r`` of ``n`` takes rows ``r``, ``r + n``, ``r + 2 n`` and so on, and tokenises only
these, so the readers get similar shares however the rows are spread over files. A reader tokenises its rows, draws from
a buffer in random order, packs online, and collates ``batch_size`` rows. If losses are logged for each source, it reads
file after file, and so knows which file each row is in.

``stream.py`` runs the readers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lightning_mcore.data.finetuning.conversations import Row
from lightning_mcore.data.finetuning.files import explained, load_rows, name_of_row
from lightning_mcore.data.finetuning.tokenized import Encoder, RowReader
from lightning_mcore.data.packing.best_fit import Overlong, PackingStatistics, TokenSample, fit_sample
from lightning_mcore.data.packing.online import OnlinePacker, samples_from_state, samples_to_state
from lightning_mcore.data.packing.rows import collate_padded, collate_rows
from lightning_mcore.data.sources import with_sources

Batch = dict[str, Tensor]
State = dict[str, Any]
BATCHES_BETWEEN_STATES = 16  # at least, for each reader
OPEN_ROWS = 64


@dataclass(frozen=True)
class StreamSettings:
    """What a stream reads, and how it makes batches of it."""

    files: list[str]  # shuffled in each epoch, unless shuffle_buffer=1
    reader: RowReader
    encoder: Encoder
    row_length: int
    multiple: int  # of each sub-sequence's length; without packing, of the batch's
    batch_size: int
    packing: bool
    overlong: Overlong
    shuffle_buffer: int  # samples to draw from; 1 keeps the order
    seed: int
    vocab_size: int | None = None
    padded_to: int | None = None  # places of a row without packing; None for the longest of the batch
    parts: int = 1  # of a row of short samples, with hybrid_context_parallel
    sources: Mapping[str, int] | None = None  # each file's source, for batches that name them


@dataclass(frozen=True)
class Item:
    """What a reader yields."""

    batch: Batch | None = None  # None after the last one
    state: State | None = None  # to continue from after this batch; None if none was taken
    failure: Exception | None = None
    statistics: PackingStatistics | None = None
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
        # workers runs readers 3, 4 and 5 of 6; resumed with first=2, its workers run 5, 3 and 4. ``share`` is this
        # reader's number, and the number of readers.
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
        self._all_rows = load_rows(self._files, streaming=True)
        self._firsts = [0]  # number of the first row of each part that was begun
        self._passed = 0  # rows of all readers, in all files so far
        self._buffer: list[TokenSample] = []
        self._packer = _packer(settings)
        self._rows = self._part()
        if state is not None:
            self._firsts = list(state.get("firsts", self._firsts))
            self._rows = self._part()
            self._rows.load_state_dict(state["rows"])
            self._passed = state["passed"]
            self._rng.bit_generator.state = state["random"]
            self._buffer = samples_from_state(state["buffer"])
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
        parts = 1 if self._settings.sources is None else len(self._files)
        yield from self._samples_of_part()
        while len(self._firsts) < parts:
            self._firsts.append(self._passed)
            self._rows = self._part()
            yield from self._samples_of_part()

    def _part(self) -> Any:
        """Return the rows of the last part that was begun: a file's if batches name their sources, otherwise all."""
        if self._settings.sources is None:
            return self._all_rows
        return self._all_rows.shard(len(self._files), len(self._firsts) - 1)

    def _samples_of_part(self) -> Iterator[TokenSample]:
        settings = self._settings
        turns = self._rows.iter(batch_size=self._shares)
        # Reader 1 of 3, in a file whose first row is 20: rows 22, 25, 28 and so on, which are row 2 of each turn.
        place = (self._share - self._firsts[-1]) % self._shares
        while True:
            with explained(settings.files):
                turn = next(turns, None)
            if turn is None:
                return
            rows, number = len(next(iter(turn.values()))), self._passed + place
            self._passed += rows
            if rows <= place:  # the last turn is short and has no row for this reader
                continue
            absent = dict.fromkeys(settings.reader.needed)  # rows of JSON may lack a column
            sample = self._sample(absent | {name: values[place] for name, values in turn.items()}, number)
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
            batch = collate_rows(rows)
        else:
            batch = collate_padded(rows, settings.multiple, settings.padded_to, vocab_size=settings.vocab_size)
            self._packer.statistics.row_padding += batch["tokens"].numel() - int(batch["lengths"].sum())
        if settings.sources is None:
            return batch
        return with_sources(batch, np.array(self._firsts), [settings.sources[file] for file in self._files])

    def _state(self) -> State:
        return {
            "firsts": list(self._firsts),
            "rows": self._rows.state_dict(),
            "passed": self._passed,
            "random": self._rng.bit_generator.state,
            "buffer": samples_to_state(self._buffer),
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
        parts=settings.parts,
    )


def _in_order(settings: StreamSettings, epoch: int) -> list[str]:
    """Return the files in an epoch's order, the same for every reader."""
    if settings.shuffle_buffer == 1:
        return settings.files
    order = np.random.default_rng([settings.seed, epoch]).permutation(len(settings.files))
    return [settings.files[place] for place in order]
