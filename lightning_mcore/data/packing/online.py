# SPDX-License-Identifier: Apache-2.0
"""Packing of a stream: several rows are open, and each new sample goes into the fullest one that has room for it.

A stream cannot be sorted first, so :class:`OnlinePacker` keeps a bounded number of rows open. If a sample fits none of
them, the fullest is closed and a new row is opened. For samples much shorter than a row, the fill comes close to
``best_fit.pack_lengths``, which sees all samples first. Equal streams give equal rows. A checkpoint contains the open
rows, so a resumed stream produces exactly the rows of an uninterrupted one.

The parts of a row (``best_fit.pack_parts``) should have similar costs. So with ``parts``, samples wait until there are
enough for many rows, and are then packed together.

``data/finetuning/stream_reader.py`` runs one packer in each reader.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mcore.config.value_checks import require_size
from lightning_mcore.data.packing.best_fit import (
    Empty,
    Overlong,
    PackingStatistics,
    RowPart,
    TokenSample,
    fit_sample,
    multiple_in,
    pack_parts,
    require_multiple,
    require_parts,
)
from lightning_mcore.data.packing.rows import build_parts, build_row
from lightning_mcore.parallel.context import segment_widths


def samples_to_state(samples: Sequence[TokenSample]) -> dict[str, Any]:
    """Return samples as numbers and tensors, end to end: ``tokens`` [t] int64 and ``loss_mask`` [t] bool."""
    tokens = [torch.zeros(0, dtype=torch.int64)]
    masks = [torch.zeros(0, dtype=torch.bool)]
    for sample in samples:
        tokens.append(torch.as_tensor(sample.tokens.astype(np.int64)))
        is_learnt = np.ones(len(sample.tokens)) if sample.loss_mask is None else sample.loss_mask
        masks.append(torch.as_tensor(is_learnt.astype(np.bool_)))
    return {
        "sample_ids": [sample.sample_id for sample in samples],
        "sample_sizes": [len(sample.tokens) for sample in samples],
        "tokens": torch.cat(tokens),
        "loss_mask": torch.cat(masks),
    }


def samples_from_state(state: Mapping[str, Any]) -> list[TokenSample]:
    """Rebuild samples from the result of :func:`samples_to_state`."""
    sizes = state["sample_sizes"]
    parts = zip(state["tokens"].split(sizes), state["loss_mask"].split(sizes), state["sample_ids"], strict=True)
    return [TokenSample(tokens.numpy(), mask.numpy(), sample_id) for tokens, mask, sample_id in parts]


Row = list[RowPart]
"""The parts of a row, with their samples."""


class _OpenRow(NamedTuple):
    """A row with room left. Tuple order sorts rows from fullest to emptiest, and by age among equals."""

    room: int  # places left, in tokens
    number: int  # unique, so that comparisons never reach the samples
    samples: list[TokenSample]


class _OpenRows:
    """Rows for one rank that are filled one sample after the other; ``most`` rows are open."""

    def __init__(self, row_length: int, multiple: int, most: int) -> None:
        self._row_length, self._multiple, self._most = row_length, multiple, most
        self._open: list[_OpenRow] = []
        self._next_number = 0

    def add(self, sample: TokenSample) -> list[Row]:
        """Put a sample into a row and return the rows to close."""
        # row_length=8, open_rows=2, samples of 3, 5, 2 and 4 places: 3 opens row 0; 5 fills row 0, which is returned; 2
        # opens row 1; 4 goes into row 1, which now has room for 2.
        length = self._padded(sample)
        done = []
        # Number -1 sorts before every row of the same room: this finds the fullest row with room for ``length``.
        place = bisect_left(self._open, _OpenRow(length, -1, []))
        if place < len(self._open):
            row = self._open.pop(place)
        else:
            if len(self._open) == self._most:
                # Closing the fullest open row wastes the least room.
                done.append(self._open.pop(0))
            row = _OpenRow(self._row_length, self._next_number, [])
            self._next_number += 1
        row.samples.append(sample)
        row = _OpenRow(row.room - length, row.number, row.samples)
        if row.room:
            insort(self._open, row)
        else:
            done.append(row)
        return [[RowPart(1, row.samples)] for row in done]

    def flush(self) -> list[Row]:
        """Return all rows, from fullest to emptiest."""
        rows, self._open = self._open, []
        return [[RowPart(1, row.samples)] for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the open rows."""
        # ``row_sizes`` deals the samples to the open rows.
        return {
            "next_number": self._next_number,
            "row_numbers": [row.number for row in self._open],
            "row_sizes": [len(row.samples) for row in self._open],
            **samples_to_state([sample for row in self._open for sample in row.samples]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._next_number = state["next_number"]
        samples = iter(samples_from_state(state))
        self._open = []
        for number, size in zip(state["row_numbers"], state["row_sizes"], strict=True):
            held = list(islice(samples, size))
            self._open.append(_OpenRow(self._row_length - sum(map(self._padded, held)), number, held))

    def _padded(self, sample: TokenSample) -> int:
        return -(-sample.length // self._multiple) * self._multiple


class _WaitingSamples:
    """Samples that wait until they fill ``most`` rows, and are then packed together into rows with ``parts``.

    The fullest half of these rows is returned one by one, as samples come. The samples of the other half are packed
    again.
    """

    def __init__(self, row_length: int, multiple: int, most: int, parts: int) -> None:
        self._row_length, self._multiple, self._most, self._parts = row_length, multiple, most, parts
        self._loose: list[TokenSample] = []  # in the order of arrival
        self._packed: deque[Row] = deque()
        self._tokens = 0  # of all of them

    def add(self, sample: TokenSample) -> list[Row]:
        """Add a sample and return the rows that make room for others."""
        self._loose.append(sample)
        self._tokens += sample.length
        done = []
        while self._tokens >= self._most * self._row_length:
            if not self._packed:
                self._pack()
            done.append(self._packed.popleft())
            self._tokens -= _tokens_in(done[-1])
        return done

    def flush(self) -> list[Row]:
        """Pack all samples, and return all rows."""
        rows = [*self._packed, *map(self._row, self._rows())]
        self._loose, self._packed, self._tokens = [], deque(), 0
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that are packed, and the other samples."""
        # ``part_sizes`` has the ranks and samples of each part of a row. Those that are left are in no row.
        return {
            "part_sizes": [[[width, len(samples)] for width, samples in row] for row in self._packed],
            **samples_to_state([*chain(*(samples for row in self._packed for _, samples in row)), *self._loose]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        samples = iter(samples_from_state(state))
        self._packed = deque(
            [RowPart(width, list(islice(samples, size))) for width, size in sizes] for sizes in state["part_sizes"]
        )
        self._loose = list(samples)
        self._tokens = sum(map(_tokens_in, [*self._packed, [RowPart(1, self._loose)]]))

    def _pack(self) -> None:
        """Pack all samples, and keep half of the rows."""

        def is_last_choice(row: Row) -> tuple[bool, int]:
            # Rows with samples that fewer ranks could share, had there been others to join them with, come after all
            # others, then fuller rows come first.
            room, parts = self._row_length // self._parts, self._row(row)
            is_wide = any(
                width > 1 and max(sample.length for sample in samples) <= room * segment_widths(width)[1]
                for width, samples in parts
            )
            return is_wide, -_tokens_in(parts)

        rows = sorted(self._rows(), key=is_last_choice)
        half = rows[: -(-len(rows) // 2)]
        chosen = sorted(half, key=lambda row: min(part.samples.min() for part in row))  # in the order of arrival
        self._packed.extend(map(self._row, chosen))
        gone = {index for row in chosen for part in row for index in part.samples.tolist()}
        self._loose = [sample for index, sample in enumerate(self._loose) if index not in gone]

    def _rows(self) -> list[Row]:
        """Pack the samples that are in no row; parts have their numbers."""
        lengths = np.array([sample.length for sample in self._loose], np.int64)
        packed = pack_parts(lengths, self._row_length, self._multiple, self._parts)
        return [packed[row] for row in range(len(packed))]

    def _row(self, numbers: Row) -> Row:
        return [RowPart(width, [self._loose[index] for index in samples]) for width, samples in numbers]


def _tokens_in(row: Row) -> int:
    return sum(sample.length for part in row for sample in part.samples)


class OnlinePacker:
    """Packs samples in the order in which they arrive.

    Args:
        row_length: Places in a row, in tokens.
        multiple: Each sub-sequence is padded to a multiple of this; ``packing_multiples`` returns what a layout
            requires.
        open_rows: Number of open rows. More open rows fill better, but hold samples back for longer. With ``parts``,
            samples are held back for this number of rows.
        overlong: For a sample longer than a row: ``"error"`` raises, ``"cut"`` keeps its beginning, ``"split"`` makes
            pieces that share one token.
        empty: For a sample with fewer than two tokens or without a target: ``"error"`` raises, ``"drop"`` leaves it
            out.
        vocab_size: Vocabulary size to check tokens against; None for no check.
        pad_token: Token written into padding, which is masked and never attended to.
        parts: With ``hybrid_context_parallel``, the context-parallel size. A row then consists of parts for one or
            several of these ranks, and a sample is in a part for as few ranks as have room for it. Parts for one rank,
            of ``row_length / parts`` places, have no padding between samples.

    Attributes:
        statistics: Counts of added samples and finished rows.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is too small, or ``multiple`` or ``parts`` does not divide ``row_length``.

    Examples:
        >>> from lightning_mcore import OnlinePacker
        >>> packer = OnlinePacker(row_length=4, open_rows=1)
        >>> rows = [row for tokens in ([1, 2, 3], [4, 5, 6], [7, 8]) for row in packer.add(tokens)]
        >>> [row["tokens"].tolist() for row in rows + packer.flush()]
        [[1, 2, 4, 5], [7, 0, 0, 0]]
    """

    def __init__(
        self,
        row_length: int,
        multiple: int = 1,
        open_rows: int = 64,
        overlong: Overlong = "error",
        empty: Empty = "error",
        vocab_size: int | None = None,
        pad_token: int = 0,
        parts: int = 1,
    ) -> None:
        require_multiple(row_length, multiple)
        require_size("open_rows", open_rows)
        require_parts(row_length, parts)
        self.row_length = row_length
        self.multiple = multiple
        self.open_rows = open_rows
        self.overlong: Overlong = overlong
        self.empty: Empty = empty
        self.vocab_size = vocab_size
        self.pad_token = pad_token
        self.parts = parts
        self.statistics = PackingStatistics()
        self._held = (
            _OpenRows(row_length, multiple, open_rows)
            if parts == 1
            else _WaitingSamples(row_length, multiple, open_rows, parts)
        )
        self._next_sample = 0

    def add(self, sample: TokenSample | Sequence[int] | NDArray[Any]) -> list[dict[str, Tensor]]:
        """Add a sample and return the rows that it completes: none, one, or several if it was split.

        Args:
            sample: A sample, or a list or array of tokens, numbered by its place in the stream.

        Returns:
            Packed rows; ``rows.py`` lists the shapes and dtypes of their tensors.

        Raises:
            ValueError: The sample is rejected, or a row has a token outside the vocabulary.
        """
        if not isinstance(sample, TokenSample):
            sample = TokenSample(np.asarray(sample), sample_id=self._next_sample)
        self._next_sample += 1
        pieces = fit_sample(sample, self.row_length, self.statistics, self.overlong, self.empty)
        return [self._close(row) for piece in pieces for row in self._held.add(piece)]

    def flush(self) -> list[dict[str, Tensor]]:
        """Close all rows at the end of the stream and return them; without ``parts``, from fullest to emptiest."""
        return [self._close(row) for row in self._held.flush()]

    def state_dict(self) -> dict[str, Any]:
        """Return the samples that are held back and the counts, as numbers and tensors."""
        return {
            "settings": self._settings(),
            "next_sample": self._next_sample,
            "statistics": asdict(self.statistics),
            **self._held.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another packer with the same settings.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            ValueError: The settings differ, so the open rows would not match an uninterrupted run.
        """
        before = {"parts": 1, **state["settings"]}  # which older states lack
        for name, value in self._settings().items():
            if before[name] != value:
                raise ValueError(
                    f"{name}={value!r}, but the stream was packed with {name}={before[name]!r} before; "
                    "keep that value, or restart the stream"
                )
        self._next_sample = state["next_sample"]
        self.statistics = PackingStatistics(**state["statistics"])
        self._held.load_state_dict(state)

    def _close(self, row: Row) -> dict[str, Tensor]:
        padding = sum(
            -sample.length % multiple_in(self.multiple, width, self.parts) for width, part in row for sample in part
        )
        self.statistics.add_rows(1, self.row_length, _tokens_in(row), padding)

        def build(samples: list[TokenSample], length: int, multiple: int) -> dict[str, Tensor]:
            return build_row(samples, length, multiple, self.vocab_size, self.pad_token)

        return build_parts(build, row, self.row_length, self.multiple)

    def _settings(self) -> dict[str, Any]:
        names = ("row_length", "multiple", "open_rows", "overlong", "empty", "parts")
        return {name: getattr(self, name) for name in names}
