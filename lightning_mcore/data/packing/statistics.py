# SPDX-License-Identifier: Apache-2.0
"""What became of samples on their way into rows: counts, the share of the rows that is filled, one line for the log.

Every sample that is cut, split or left out is counted here, so that nothing disappears in silence. ``best_fit.py`` and
``online.py`` count, ``packed_rows.pack`` and the data modules log the line.
"""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Self

logger = logging.getLogger(__name__)


@dataclass
class PackingStatistics:
    """Counts of samples, rows and tokens; two of them can be added.

    Args:
        samples: Samples that were given.
        packed: Samples that are in the rows, the pieces of a split one counted as one.
        rows: Rows that were made.
        tokens: Places in the rows that hold a real token.
        sub_sequence_padding: Places that fill sub-sequences up to their multiple.
        row_padding: Places at the ends of rows.
        cut: Samples that were longer than a row and cut.
        cut_tokens: Tokens that were cut off them.
        split: Samples that were longer than a row and split.
        pieces: Pieces that these were split into.
        pieces_without_target: Pieces that were left out because no target is in them.
        too_short: Samples that were left out because they have fewer than two tokens.
        without_target: Samples that were left out because no target is in them.
        without_answer: Samples that were left out because nothing in them is said that could be learnt.
    """

    samples: int = 0
    packed: int = 0
    rows: int = 0
    tokens: int = 0
    sub_sequence_padding: int = 0
    row_padding: int = 0
    cut: int = 0
    cut_tokens: int = 0
    split: int = 0
    pieces: int = 0
    pieces_without_target: int = 0
    too_short: int = 0
    without_target: int = 0
    without_answer: int = 0

    @property
    def padding(self) -> int:
        """Places in the rows that hold no real token."""
        return self.sub_sequence_padding + self.row_padding

    @property
    def padding_share(self) -> float:
        """Share of the places that hold no real token, 0 to 1; 0 where there are no rows."""
        return self.padding / (self.tokens + self.padding) if self.rows else 0.0

    @property
    def fill(self) -> float:
        """Share of the places that hold a real token, 0 to 1; 1 where there are no rows."""
        return 1.0 - self.padding_share

    @property
    def left_out(self) -> int:
        """Samples that are in no row."""
        return self.without_answer + self.too_short + self.without_target

    @property
    def lossless(self) -> bool:
        """Whether every token of every sample is in the rows."""
        return not (self.cut or self.left_out or self.pieces_without_target)

    def add_rows(self, rows: int, row_length: int, tokens: int, sub_sequence_padding: int) -> None:
        """Count rows that were made.

        Args:
            rows: How many.
            row_length: Places in each, tokens.
            tokens: Real tokens in all of them.
            sub_sequence_padding: Places in all of them that fill sub-sequences up to their multiple.
        """
        self.rows += rows
        self.tokens += tokens
        self.sub_sequence_padding += sub_sequence_padding
        self.row_padding += rows * row_length - tokens - sub_sequence_padding

    def leave_out_unanswered(self) -> None:
        """Count a sample in which nothing is said that could be learnt."""
        self.samples += 1
        self.without_answer += 1

    def log(self) -> None:
        """Write the line to the log: a warning where something was left out or cut, else for information."""
        logger.log(logging.INFO if self.lossless else logging.WARNING, "%s", self)

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))

    def __str__(self) -> str:
        filled = f", {self.fill:.2%} filled" if self.rows else ""
        parts = [
            f"packed {self.packed:,} of {self.samples:,} samples, {self.tokens:,} tokens, into {self.rows:,} rows"
            + filled
        ]
        if self.cut:
            parts.append(f"cut {self.cut:,} that were longer than a row by {self.cut_tokens:,} tokens")
        if self.split:
            parts.append(f"split {self.split:,} that were longer than a row into {self.pieces:,} pieces")
        if self.pieces_without_target:
            parts.append(f"left out {self.pieces_without_target:,} pieces without a target")
        if self.without_answer:
            parts.append(f"left out {self.without_answer:,} without an answer")
        if self.too_short:
            parts.append(f"left out {self.too_short:,} of fewer than two tokens")
        if self.without_target:
            parts.append(f"left out {self.without_target:,} without a target")
        return "; ".join(parts)
