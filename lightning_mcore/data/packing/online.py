# SPDX-License-Identifier: Apache-2.0
"""Packing of a stream: rows that are open at once, each new sample into the fullest one with room for it.

A stream has no end to wait for, so :class:`OnlinePacker` keeps a bounded number of rows open. Where a sample fits into
none of them, the fullest is closed and a new row opened. On samples much shorter than a row this comes close to
``packing.pack_lengths``, which sees all samples first. Equal streams give equal rows, and the open rows are in the
state of a checkpoint: a resumed stream goes on with exactly the rows that it would have made.

Data modules that read streams use it; each data-loading worker has one of its own.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mcore.config.checks import require_size
from lightning_mcore.data.packing.best_fit import (
    Empty,
    Overlong,
    PackingStatistics,
    TokenSample,
    fit_sample,
    require_multiple,
)
from lightning_mcore.data.packing.rows import build_row


class _OpenRow(NamedTuple):
    """A row that is not full; rows are ordered from the fullest to the emptiest, the oldest first among equals."""

    room: int
    number: int
    samples: list[TokenSample]


class OnlinePacker:
    """Packs samples as they come.

    Args:
        row_length: Places in a row, tokens.
        multiple: Each sub-sequence is padded to a multiple of this; what a layout needs, ``packing_multiples`` says.
        open_rows: Rows that are open at once. More of them fill better and hold samples back for longer.
        overlong: A sample that takes more than a row is refused (``"error"``), its beginning kept (``"cut"``), or made
            into pieces that share one token (``"split"``).
        empty: A sample of fewer than two tokens or without a target is refused (``"error"``) or left out (``"drop"``).
        vocab_size: Tokens that exist; None: not checked.
        pad_token: What stands in padding; it is masked and never attended to.

    Attributes:
        statistics: Counts of what was added, and of the rows that were made.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is too small, or ``multiple`` does not divide ``row_length``.
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
    ) -> None:
        require_multiple(row_length, multiple)
        require_size("open_rows", open_rows)
        self.row_length = row_length
        self.multiple = multiple
        self.open_rows = open_rows
        self.overlong: Overlong = overlong
        self.empty: Empty = empty
        self.vocab_size = vocab_size
        self.pad_token = pad_token
        self.statistics = PackingStatistics()
        self._open: list[_OpenRow] = []
        self._next_number = 0
        self._next_sample = 0

    def add(self, sample: TokenSample | Sequence[int] | NDArray[Any]) -> list[dict[str, Tensor]]:
        """Take a sample and return the rows that it completes: none, one, or several where it was split.

        Args:
            sample: A sample, or a list or array of tokens, which is numbered by its place in the stream.

        Raises:
            ValueError: The sample is refused, or a row holds a token outside the vocabulary.
        """
        if not isinstance(sample, TokenSample):
            sample = TokenSample(np.asarray(sample), sample_id=self._next_sample)
        self._next_sample += 1
        pieces = fit_sample(sample, self.row_length, self.statistics, self.overlong, self.empty)
        return [self._close(row) for piece in pieces for row in self._place(piece)]

    def flush(self) -> list[dict[str, Tensor]]:
        """Close all rows, at the end of the stream, and return them from the fullest to the emptiest."""
        rows, self._open = self._open, []
        return [self._close(row) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the open rows and the counts, as numbers and tensors."""
        samples = [sample for row in self._open for sample in row.samples]
        tokens = [torch.as_tensor(sample.tokens.astype(np.int64)) for sample in samples]
        masks = [
            torch.ones(len(sample.tokens), dtype=torch.bool)
            if sample.loss_mask is None
            else torch.as_tensor(sample.loss_mask.astype(np.bool_))
            for sample in samples
        ]
        empty = torch.zeros(0, dtype=torch.int64)
        return {
            "settings": self._settings(),
            "next_number": self._next_number,
            "next_sample": self._next_sample,
            "statistics": asdict(self.statistics),
            "row_numbers": [row.number for row in self._open],
            "row_sizes": [len(row.samples) for row in self._open],
            "sample_ids": [sample.sample_id for sample in samples],
            "sample_sizes": [len(sample.tokens) for sample in samples],
            "tokens": torch.cat([empty, *tokens]),
            "loss_mask": torch.cat([empty.bool(), *masks]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another packer of the same settings stood.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            ValueError: The settings differ, so that the open rows would not be those of a run without a break.
        """
        for name, value in self._settings().items():
            if state["settings"][name] != value:
                raise ValueError(
                    f"{name}={value!r}, but the stream was packed with {name}={state['settings'][name]!r} before; "
                    "go on with that value, or start the stream afresh"
                )
        self._next_number, self._next_sample = state["next_number"], state["next_sample"]
        self.statistics = PackingStatistics(**state["statistics"])
        sizes = state["sample_sizes"]
        parts = zip(state["tokens"].split(sizes), state["loss_mask"].split(sizes), state["sample_ids"], strict=True)
        samples = iter([TokenSample(tokens.numpy(), mask.numpy(), sample_id) for tokens, mask, sample_id in parts])
        self._open = []
        for number, size in zip(state["row_numbers"], state["row_sizes"], strict=True):
            held = [next(samples) for _ in range(size)]
            self._open.append(_OpenRow(self.row_length - sum(map(self._padded, held)), number, held))

    def _place(self, sample: TokenSample) -> list[_OpenRow]:
        """Put a sample into a row and return the rows that are to be closed."""
        length = self._padded(sample)
        done = []
        place = bisect_left(self._open, _OpenRow(length, -1, []))
        if place < len(self._open):
            row = self._open.pop(place)
        else:
            if len(self._open) == self.open_rows:
                done.append(self._open.pop(0))
            row = _OpenRow(self.row_length, self._next_number, [])
            self._next_number += 1
        row.samples.append(sample)
        row = _OpenRow(row.room - length, row.number, row.samples)
        if row.room:
            insort(self._open, row)
        else:
            done.append(row)
        return done

    def _padded(self, sample: TokenSample) -> int:
        return -(-sample.length // self.multiple) * self.multiple

    def _close(self, row: _OpenRow) -> dict[str, Tensor]:
        tokens = sum(sample.length for sample in row.samples)
        self.statistics.add_rows(1, self.row_length, tokens, self.row_length - row.room - tokens)
        return build_row(row.samples, self.row_length, self.multiple, self.vocab_size, self.pad_token)

    def _settings(self) -> dict[str, Any]:
        names = ("row_length", "multiple", "open_rows", "overlong", "empty")
        return {name: getattr(self, name) for name in names}
