# SPDX-License-Identifier: Apache-2.0
"""The part of a stream that one process reads: rows of files become batches, with states to resume from.

A stream is divided among *readers*: each worker of each data-parallel rank is one. All of them read all files in the
same order, which depends on the seed and the epoch. Reader ``r`` of ``n`` takes the rows ``r``, ``r + n``, ``r + 2 n``
and so on, and tokenises only these. So the readers get similar shares, however the rows are spread over files. A reader
tokenises its rows, draws from a buffer in random order, packs online, and collates ``batch_size`` rows.

From time to time an item carries a *state*: how far the files are read, the samples in the buffer, the open rows, the
random numbers. It is plain data. A reader that starts from a state gives exactly the items that came after it.
``stream_loader.py`` runs the readers and keeps their states.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lightning_mcore.data.finetuning.conversations import Row
from lightning_mcore.data.finetuning.files import explained, load_rows, name_of_row
from lightning_mcore.data.finetuning.tokenized import Encoder, RowReader
from lightning_mcore.data.packing.best_fit import Overlong, PackingStatistics, TokenSample, fit_sample
from lightning_mcore.data.packing.online import OnlinePacker
from lightning_mcore.data.packing.rows import collate_padded, collate_rows

Batch = dict[str, Tensor]
State = dict[str, Any]
BATCHES_BETWEEN_STATES = 16
OPEN_ROWS = 64


@dataclass(frozen=True)
class StreamSettings:
    """What a stream reads, and how it makes batches of it.

    Attributes:
        files: The files, in the order of the first epoch.
        reader: Turns rows into conversations.
        encoder: Tokenises conversations.
        row_length: Places in a row, tokens.
        multiple: Each sub-sequence is padded to a multiple of this; without packing, each batch.
        batch_size: Rows in a batch.
        packing: Whether rows hold several samples.
        overlong: Whether a sample longer than a row is refused, cut or split.
        shuffle_buffer: Number of samples to draw from; 1 keeps the order.
        seed: Seed of the order.
        vocab_size: Size of the vocabulary, to check tokens against; None for no check.
        padded_to: Without packing, the places of each row; None for as many as the longest sample of a batch takes.
    """

    files: list[str]
    reader: RowReader
    encoder: Encoder
    row_length: int
    multiple: int
    batch_size: int
    packing: bool
    overlong: Overlong
    shuffle_buffer: int
    seed: int
    vocab_size: int | None = None
    padded_to: int | None = None


@dataclass(frozen=True)
class Item:
    """What a reader yields.

    Attributes:
        batch: A batch; None after the last one.
        state: State to continue from after this batch; None if no state was taken.
        failure: Why the reader cannot continue.
        statistics: The counts of used, cut and dropped samples; complete at the end.
        left_out: At the end, the number of rows that do not fill a batch.
    """

    batch: Batch | None = None
    state: State | None = None
    failure: Exception | None = None
    statistics: PackingStatistics | None = None
    left_out: int = 0


@dataclass(frozen=True)
class ReaderPlace:
    """Where a reader begins.

    Attributes:
        state: The state to begin from; None for the beginning of the epoch.
        skip: Number of batches after this state to make and drop.
    """

    state: State | None = None
    skip: int = 0


class ReaderStreams(IterableDataset[Item]):
    """The readers of one data-parallel rank, one in each worker of a DataLoader.

    The items never end: after its last batch a reader keeps yielding items without one. So a DataLoader, which asks its
    workers in turns, keeps the same order whenever each of them comes to its end.

    Args:
        settings: What the stream reads.
        epoch: Number of the epoch, for the order.
        rank: This data-parallel rank.
        ranks: Number of data-parallel ranks.
        places: Where each reader of this rank begins.
        first: The reader that is asked first.
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
            last = Item(failure=error)
        while True:
            yield last


class _Reader:
    """One reader of a stream, as the module's docstring describes it."""

    def __init__(
        self, settings: StreamSettings, epoch: int, share: int, shares: int, state: Mapping[str, Any] | None
    ) -> None:
        self._settings = settings
        self._share = share
        self._shares = shares
        self._rng = np.random.default_rng([settings.seed, epoch, share])
        self._files = _in_order(settings, epoch)
        self._rows = load_rows(self._files, streaming=True)
        self._passed = 0
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
                takes_state = not waiting and since_state >= BATCHES_BETWEEN_STATES
                since_state = 0 if takes_state else since_state
                yield Item(self._collate(rows), self._state() if takes_state else None)
        waiting += self._packer.flush()
        whole = len(waiting) // settings.batch_size * settings.batch_size
        for start in range(0, whole, settings.batch_size):
            yield Item(self._collate(waiting[start : start + settings.batch_size]))
        yield Item(statistics=self._packer.statistics, left_out=len(waiting) - whole)

    def _drawn(self) -> Iterator[TokenSample]:
        """Yield the samples in the order in which they are drawn; a state may be taken at each of them."""
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
        settings = self._settings
        turns = self._rows.iter(batch_size=self._shares)
        while True:
            with explained(settings.files):
                turn = next(turns, None)
            if turn is None:
                return
            rows, number = len(next(iter(turn.values()))), self._passed + self._share
            self._passed += rows
            if rows <= self._share:  # the last turn
                continue
            absent = dict.fromkeys(settings.reader.needed)  # these rows may lack them
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
            return self._encode(row, number, name_of_row(self._files, number))  # fails again, and says where

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
    """Return the files in the order of an epoch, the same for every reader."""
    if settings.shuffle_buffer == 1:
        return settings.files
    order = np.random.default_rng([settings.seed, epoch]).permutation(len(settings.files))
    return [settings.files[place] for place in order]


def _plain(samples: Sequence[TokenSample]) -> State:
    """Return samples as plain numbers and tensors: ``tokens`` [t] int32, ``learnt`` [t] bool."""
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
