# SPDX-License-Identifier: Apache-2.0
"""Packing of a stream: several rows are open, and each new sample goes into the fullest one that has room for it.

A stream cannot be sorted first, so :class:`OnlinePacker` keeps a bounded number of rows open. If a sample fits none of
them, the fullest is closed and a new row is opened. For samples much shorter than a row, the fill comes close to
``best_fit.pack_lengths``, which sees all samples first. Equal streams give equal rows. A checkpoint contains the open
rows, so a resumed stream produces exactly the rows of an uninterrupted one.

``data/finetuning/stream_reader.py`` runs one packer in each reader.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
    TokenSample,
    fit_sample,
    require_multiple,
)
from lightning_mcore.data.packing.rows import build_row


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


class _OpenRow(NamedTuple):
    """A row with room left. Tuple order sorts rows from fullest to emptiest, and by age among equals."""

    room: int  # places left, in tokens
    number: int  # unique, so that comparisons never reach the samples
    samples: list[TokenSample]


class OnlinePacker:
    """Packs samples in the order in which they arrive.

    Args:
        row_length: Places in a row, in tokens.
        multiple: Each sub-sequence is padded to a multiple of this; ``packing_multiples`` returns what a layout
            requires.
        open_rows: Number of open rows. More open rows fill better, but hold samples back for longer.
        overlong: For a sample longer than a row: ``"error"`` raises, ``"cut"`` keeps its beginning, ``"split"`` makes
            pieces that share one token.
        empty: For a sample with fewer than two tokens or without a target: ``"error"`` raises, ``"drop"`` leaves it
            out.
        vocab_size: Vocabulary size to check tokens against; None for no check.
        pad_token: Token written into padding, which is masked and never attended to.

    Attributes:
        statistics: Counts of added samples and finished rows.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is too small, or ``multiple`` does not divide ``row_length``.

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
        return [self._close(row) for piece in pieces for row in self._place(piece)]

    def flush(self) -> list[dict[str, Tensor]]:
        """Close all rows at the end of the stream and return them, from fullest to emptiest."""
        rows, self._open = self._open, []
        return [self._close(row) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the open rows and the counts, as numbers and tensors."""
        # ``row_sizes`` deals the samples to the open rows.
        return {
            "settings": self._settings(),
            "next_number": self._next_number,
            "next_sample": self._next_sample,
            "statistics": asdict(self.statistics),
            "row_numbers": [row.number for row in self._open],
            "row_sizes": [len(row.samples) for row in self._open],
            **samples_to_state([sample for row in self._open for sample in row.samples]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another packer with the same settings.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            ValueError: The settings differ, so the open rows would not match an uninterrupted run.
        """
        for name, value in self._settings().items():
            if state["settings"][name] != value:
                raise ValueError(
                    f"{name}={value!r}, but the stream was packed with {name}={state['settings'][name]!r} before; "
                    "keep that value, or restart the stream"
                )
        self._next_number, self._next_sample = state["next_number"], state["next_sample"]
        self.statistics = PackingStatistics(**state["statistics"])
        samples = iter(samples_from_state(state))
        self._open = []
        for number, size in zip(state["row_numbers"], state["row_sizes"], strict=True):
            held = [next(samples) for _ in range(size)]
            self._open.append(_OpenRow(self.row_length - sum(map(self._padded, held)), number, held))

    def _place(self, sample: TokenSample) -> list[_OpenRow]:
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
            if len(self._open) == self.open_rows:
                # Closing the fullest open row wastes the least room.
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
