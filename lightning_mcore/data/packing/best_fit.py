# SPDX-License-Identifier: Apache-2.0
"""Which samples share a row: best-fit decreasing over sample lengths, in plain numpy.

Packing samples into rows of fixed length leaves almost no padding. Finding the fewest rows is bin packing. *Best-fit
decreasing* takes samples from longest to shortest and puts each into the fullest row that still has room.
:func:`pack_lengths` computes the same result without visiting every sample, because samples of one length are
interchangeable, and so are rows with the same room. :func:`pack_parts` lets as few as possible of the ranks of a row
share a sample.

:func:`fit_sample` first handles samples that are longer than a row or have nothing to learn, and counts them in
:class:`PackingStatistics`, which becomes one log line. ``rows.py`` makes tensors of the rows, ``online.py`` packs
streams.
"""

import dataclasses
import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.config.text import counted
from lightning_mcore.config.value_checks import neighbours, require_choice, require_size
from lightning_mcore.parallel.context import segment_widths

logger = logging.getLogger(__name__)


# Parts that are less full are packed again for more ranks, if that takes less than this share of their places
_LOOSE = 0.95
# What is left out, by the name of its count
_LEFT_OUT = {
    "pieces_without_target": "pieces without a target",
    "without_answer": "without an answer",
    "too_short": "of fewer than two tokens",
    "without_target": "without a target",
    "through_image": "whose cut goes through an image or a video",
    "unreadable_image": "with an image or a video that cannot be read",
}


@dataclass
class PackingStatistics:
    """Counts of samples, rows and tokens; two of these can be added."""

    samples: int = 0
    packed: int = 0  # samples that are in rows; a split sample counts once
    rows: int = 0
    tokens: int = 0
    sub_sequence_padding: int = 0  # places that fill sub-sequences up to their multiple
    row_padding: int = 0
    cut: int = 0
    cut_tokens: int = 0
    split: int = 0
    pieces: int = 0
    # The rest was left out: pieces of split samples, then whole samples by reason.
    pieces_without_target: int = 0
    too_short: int = 0
    without_target: int = 0
    without_answer: int = 0
    through_image: int = 0
    unreadable_image: int = 0

    @property
    def padding(self) -> int:
        """Places that hold padding."""
        return self.sub_sequence_padding + self.row_padding

    @property
    def padding_share(self) -> float:
        """Padding as a fraction of all places; 0 without rows."""
        return self.padding / (self.tokens + self.padding) if self.rows else 0.0

    @property
    def fill(self) -> float:
        """Tokens as a fraction of all places; 1 without rows."""
        return 1.0 - self.padding_share

    @property
    def left_out(self) -> int:
        """Samples that are in no row."""
        return sum(getattr(self, name) for name in _LEFT_OUT if name != "pieces_without_target")

    @property
    def lossless(self) -> bool:
        """Whether the rows contain every token of every sample."""
        return not (self.cut or self.left_out or self.pieces_without_target)

    def add_rows(self, rows: int, row_length: int, tokens: int, sub_sequence_padding: int) -> None:
        """Count rows of one length; all padding that is not ``sub_sequence_padding`` counts as ``row_padding``."""
        self.rows += rows
        self.tokens += tokens
        self.sub_sequence_padding += sub_sequence_padding
        self.row_padding += rows * row_length - tokens - sub_sequence_padding

    def leave_out_unanswered(self) -> None:
        """Count a sample without any text to learn."""
        self.samples += 1
        self.without_answer += 1

    def log(self) -> None:
        """Log the counts, as a warning if anything was cut or left out."""
        logger.log(logging.INFO if self.lossless else logging.WARNING, "%s", self)

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))

    def __str__(self) -> str:
        rows = counted(self.rows, "row") + (f", {self.fill:.2%} filled" if self.rows else "")
        counts = (
            (self.cut, f"cut {self.cut:,} that were longer than a row by {self.cut_tokens:,} tokens"),
            (self.split, f"split {self.split:,} that were longer than a row into {self.pieces:,} pieces"),
            *((getattr(self, name), f"left out {getattr(self, name):,} {why}") for name, why in _LEFT_OUT.items()),
        )
        said = f"packed {self.packed:,} of {self.samples:,} samples, {self.tokens:,} tokens, into {rows}"
        return "; ".join([said, *(text for count, text in counts if count)])


Overlong = Literal["error", "cut", "split"]
Empty = Literal["error", "drop"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """A tokenised document, or a prompt with its response.

    Args:
        tokens: [l + 1] integers. The sample takes ``l`` places in a row: inputs are all tokens except the last, labels
            all except the first.
        loss_mask: [l + 1] bool, True where the token is a target; None if all are. The first token is never a target.
        sample_id: Number of the sample in its dataset, for messages and for ``sample_ids`` of a row.
        teacher_top_k: [num_targets, 2k + 1] fp32, what a teacher gives to each target; ``rows.py`` describes it.

    Examples:
        A prompt of two tokens and an answer of two.

        >>> import numpy as np
        >>> from lightning_mcore import TokenSample
        >>> sample = TokenSample(np.array([5, 6, 7, 8]), loss_mask=np.array([False, False, True, True]))
        >>> sample.length
        3
    """

    tokens: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None = None
    sample_id: int = 0
    teacher_top_k: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or (self.tokens.dtype.kind not in "iu" and self.tokens.size):
            raise TypeError(
                f"sample {self.sample_id} has tokens of dtype {self.tokens.dtype} and shape {self.tokens.shape}; "
                "give a flat list or array of ints"
            )
        if self.loss_mask is not None and self.loss_mask.shape != self.tokens.shape:
            raise ValueError(
                f"sample {self.sample_id} has a loss_mask of shape {self.loss_mask.shape} for tokens of shape "
                f"{self.tokens.shape}; give one value for each token"
            )

    @property
    def length(self) -> int:
        """Places that the sample takes in a row, in tokens."""
        return max(len(self.tokens) - 1, 0)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and count in the loss."""
        return self.length if self.loss_mask is None else int(np.count_nonzero(self.loss_mask[1:]))


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Sample numbers row by row; within a row, the longest sample comes first."""

    order: NDArray[np.int64]  # [samples], all sample numbers, row after row
    offsets: NDArray[np.int64]  # [rows + 1]; row i is order[offsets[i] : offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """Return the sample numbers of a row; negative rows count from the end. Raises IndexError."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range; there are {len(self)} rows")
        row %= len(self)
        return self.order[self.offsets[row] : self.offsets[row + 1]]


def pack_lengths(lengths: NDArray[Any] | Sequence[int], row_length: int, multiple: int = 1) -> PackedRows:
    """Put samples of these lengths [samples], in places, into as few rows as best-fit decreasing finds.

    Deterministic: equal input gives equal rows. Each sample is padded to a multiple of ``multiple``, which must divide
    ``row_length``. Raises ValueError for a length outside 1 to ``row_length``, TypeError unless they are a flat list of
    ints.
    """
    require_multiple(row_length, multiple)
    lengths = np.asarray(lengths)
    if not lengths.size:
        return PackedRows(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise TypeError(f"lengths of dtype {lengths.dtype} and shape {lengths.shape}; give a flat array of ints")
    lengths = lengths.astype(np.int64)
    refused = np.flatnonzero((lengths < 1) | (lengths > row_length))
    if refused.size:
        raise ValueError(
            f"sample {refused[0]} takes {lengths[refused[0]]} tokens; choose 1 to row_length={row_length}, or let "
            "fit_sample() cut, split or drop what does not fit"
        )
    # From here on lengths count in units of ``multiple``.
    room = row_length // multiple
    units = -(-lengths // multiple)
    narrow = np.uint16 if room < 2**16 else np.int64  # numpy sorts 16 bits by radix
    # Longest first; the stable sort keeps equal lengths in their original order, which makes the rows reproducible.
    by_length = np.argsort((room - units).astype(narrow), kind="stable")
    counts = np.bincount(units, minlength=room + 1)
    distinct = np.flatnonzero(counts)[::-1]
    first, rows, each, num_rows = _best_fit(distinct.tolist(), counts[distinct].tolist(), room)
    # ``row_of`` follows the order of ``by_length``. Sorting it (stably) groups samples by row, longest first in each.
    row_of = _rows_of_samples(first, rows, each)
    order = by_length[np.argsort(row_of, kind="stable")]
    offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=offsets[1:])
    return PackedRows(order, offsets)


class RowPart(NamedTuple):
    """A part of a row: samples that ``width`` neighbouring context-parallel ranks share."""

    width: int
    samples: Any  # their numbers, or the samples themselves


@dataclass(frozen=True, eq=False)
class PackedParts:
    """Sample numbers row by row, and part by part of a row."""

    parts: PackedRows  # of all rows, one row after the other
    offsets: NDArray[np.int64]  # [rows + 1]; row i has the parts offsets[i] to offsets[i + 1]
    widths: NDArray[np.int64]  # [parts], how many ranks share each; a row's add up to `ranks`
    ranks: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> list[RowPart]:
        """Return the parts of a row, with sample numbers."""
        return [
            RowPart(int(self.widths[part]), self.parts[part]) for part in range(*self.offsets[row : row + 2].tolist())
        ]

    def padded(self, lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
        """Return the places that sequences of these lengths take, [samples] or [samples, n]."""
        of_widths = np.array([multiple_in(multiple, width, self.ranks) for width in range(self.ranks + 1)])
        multiples = np.empty(len(lengths), np.int64)
        multiples[self.parts.order] = np.repeat(of_widths[self.widths], np.diff(self.parts.offsets))
        return _padded(lengths, multiples.reshape(-1, *[1] * (lengths.ndim - 1)))

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the work of attention in each row, on the rank that has most, for [samples] or [samples, n]."""
        # Rows of 8 places on two ranks: the parts 3 1 and 2 2 cost 10 and 8, so a row of the two costs 10. If the ranks
        # share a sequence of 8, each has 32 of its 64.
        rows = PackedRows(np.arange(len(self.parts)), self.offsets)
        return _largest(_costs(lengths, self.parts, self.widths), rows)


def multiple_in(multiple: int, width: int, ranks: int) -> int:
    """Return the multiple to which sequences are padded that ``width`` of a row's ``ranks`` share; 1 for one alone."""
    if width == 1 < ranks:
        return 1
    share, rest = divmod(multiple * width, ranks)
    return 1 if rest else share  # with a rest, it is not for these ranks


def pack_parts(
    lengths: NDArray[Any] | Sequence[int], row_length: int, multiple: int = 1, ranks: int = 1
) -> PackedParts:
    """Pack samples into rows for context-parallel ranks, so that as few ranks as possible share a sample.

    A rank has ``row_length / ranks`` places of a row, and a part for ``width`` ranks ``width`` times as many. A sample
    goes into the narrowest part that has room for it, or fills up a wider one, or shares one if narrow parts would be
    far from full. Parts of similar costs share a row, so its ranks wait less for each other. With ``ranks=1``, this
    packs as :func:`pack_lengths` does.

    ``lengths`` are [samples], or [samples, n] if samples have several sequences, which stay together and are padded one
    by one, to what :func:`multiple_in` returns. Raises as :func:`pack_lengths` does, and ValueError if a row does not
    divide among the ranks.
    """
    require_parts(row_length, ranks)
    lengths, widths, room = np.asarray(lengths), segment_widths(ranks), row_length // ranks

    def packed(samples: NDArray[np.int64], width: int) -> PackedRows:
        return _packed(lengths, samples, room * width, multiple_in(multiple, width, ranks))

    # Rows of 16 on four ranks, without padding. Lengths 13 3 | 7 1 3 5 | 4 2 2: the first row has a sample of more than
    # 8, so all ranks share it. The other samples are packed into parts of 8: 7 1, 5 3 and 4 2 2. Two ranks share each
    # that has a sample of more than 4. What is left is packed into parts of 4, here 4 and 2 2.
    rest, of_width = np.arange(len(lengths)), {}
    for width, narrower in pairwise(widths):
        places = _of_samples(_padded(lengths, multiple_in(multiple, narrower, ranks)))
        found = packed(rest, width)
        is_wide = _sums((places > room * narrower).astype(float), found) > 0
        of_width[width], rest = _chosen(found, is_wide), _chosen(found, ~is_wide).order
    of_width[1] = packed(rest, 1)
    # Samples of 5 leave much room in parts of 8, but a row of 16 has room for three. Without a choice between one rank
    # and all, what fits on one stays there.
    for narrower, width in pairwise(widths[::-1]):
        if (narrower, width) == (1, ranks):
            break
        is_loose = _sums(_of_samples(lengths).astype(float), of_width[narrower]) < _LOOSE * room * narrower
        loose = _chosen(of_width[narrower], is_loose)
        again = packed(loose.order, width)
        if len(again) * width < _LOOSE * len(loose) * narrower:
            of_width[narrower] = _chosen(of_width[narrower], ~is_loose)
            of_width[width] = _joined([of_width[width], again])
    parts = of_width[1]
    shared_by = np.ones(len(parts), np.int64)
    # Parts are joined with others that cost as much, until they fill a row: 4 with 2 2, and 7 1 with 5 3. Nothing is
    # left to join the first two with, so 4 2 2 are packed again, for all ranks.
    units = _one_by_one(0, len(parts))
    for narrower, width in pairwise(widths[::-1]):
        dearest_first = np.argsort(-_largest(_costs(lengths, parts, shared_by), units), kind="stable")
        count = width // narrower
        fill = len(units) // count * count
        left = packed(_chosen(parts, _chosen(units, dearest_first[fill:]).order).order, width)
        joined, wide = _chosen(units, dearest_first[:fill]), _joined([of_width[width], left])
        units = _joined([_one_by_one(len(parts), len(wide)), PackedRows(joined.order, joined.offsets[::count])])
        parts = _joined([parts, wide])
        shared_by = np.concatenate([shared_by, np.full(len(wide), width)])
    return PackedParts(_chosen(parts, units.order), units.offsets, shared_by[units.order], ranks)


def require_parts(row_length: int, parts: int) -> None:
    """Raise TypeError or ValueError unless ``parts`` is a positive int that divides ``row_length``."""
    require_size("parts", parts)
    if row_length % parts:
        raise ValueError(
            f"row_length={row_length} does not divide into parts={parts}; choose {neighbours(row_length, parts)}"
        )


def _packed(lengths: NDArray[Any], samples: NDArray[np.int64], row_length: int, multiple: int = 1) -> PackedRows:
    """Pack some of the samples, of these lengths, [all samples] or [all samples, n]."""
    chosen = lengths[samples]
    rows = pack_lengths(chosen if chosen.ndim == 1 else _padded(chosen, multiple).sum(1), row_length, multiple)
    return PackedRows(samples[rows.order], rows.offsets)


def _of_samples(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sum over the sequences of each sample, [samples]; ``values`` are [samples] or [samples, n]."""
    return values if values.ndim == 1 else values.sum(1)


def _padded(lengths: NDArray[Any], multiple: Any) -> NDArray[np.int64]:
    padded: NDArray[np.int64] = -(-lengths.astype(np.int64) // multiple) * multiple
    return padded


def _squares(lengths: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sum of the squared lengths of each sample, [samples]."""
    return _of_samples(np.square(lengths.astype(np.float64)))


def _sums(values: NDArray[np.float64], rows: PackedRows) -> NDArray[np.float64]:
    """Return the sum of the samples' values in each row, [rows]."""
    sums: NDArray[np.float64] = np.add.reduceat(values[rows.order], rows.offsets[:-1])
    return sums


def _costs(lengths: NDArray[Any], parts: PackedRows, widths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the work of attention in parts that so many ranks share, [parts], on each of these ranks."""
    costs: NDArray[np.float64] = _sums(_squares(lengths), parts) / widths
    return costs


def _largest(values: NDArray[np.float64], rows: PackedRows) -> NDArray[np.float64]:
    """Return the largest of the parts' values in each row, [rows]."""
    largest: NDArray[np.float64] = np.maximum.reduceat(values[rows.order], rows.offsets[:-1])
    return largest


def _one_by_one(first: int, count: int) -> PackedRows:
    """Return rows of one part each, which are numbered from ``first``."""
    return PackedRows(np.arange(first, first + count), np.arange(count + 1))


def _chosen(rows: PackedRows, places: NDArray[Any]) -> PackedRows:
    """Return some rows: by their numbers, in the given order, or by a bool for each row."""
    # Rows 7 8 | 9 | 4 5 with the offsets 0 2 3 5, numbers 2 0: sizes 2 2, and places 3 4 0 1 of the order.
    sizes, starts = np.diff(rows.offsets)[places], rows.offsets[:-1][places]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return PackedRows(rows.order[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)], offsets)


def _joined(several: Sequence[PackedRows]) -> PackedRows:
    sizes = np.concatenate([np.diff(rows.offsets) for rows in several])
    return PackedRows(np.concatenate([rows.order for rows in several]), np.concatenate([[0], np.cumsum(sizes)]))


def require_multiple(row_length: int, multiple: int) -> None:
    """Raise TypeError or ValueError unless both are positive ints and ``multiple`` divides ``row_length``."""
    require_size("row_length", row_length)
    require_size("multiple", multiple)
    if row_length % multiple:
        raise ValueError(
            f"row_length={row_length} is not a multiple of {multiple}, to which each sub-sequence is padded; "
            f"choose {max(row_length // multiple, 1) * multiple} or {(row_length // multiple + 1) * multiple}"
        )


def _best_fit(lengths: list[int], counts: list[int], room: int) -> tuple[list[int], list[int], list[int], int]:
    """Fill runs of equal rows, for distinct lengths in descending order.

    The row with the least sufficient room stays the best fit until its room is below ``length``, so it takes
    ``left // length`` samples at once, and so does every row of the same stretch. Returns three lists with one entry
    per run (its first row, its number of rows, samples per row), and the total number of rows.
    """
    first, rows, each = [], [], []
    free: dict[int, list[tuple[int, int]]] = {}  # room left -> stretches (start, stop) of rows that have it
    rooms: list[int] = []  # the keys of ``free``, ascending
    shortest = lengths[-1]
    opened = 0

    def put_back(left: int, start: int, stop: int) -> None:
        # No later sample fits, so the rows need not be found again.
        if left < shortest or start == stop:
            return
        if left not in free:
            free[left] = []
            insort(rooms, left)
        free[left].append((start, stop))

    # Rows of 10 with lengths [5, 3, 2] and counts [3, 4, 1]: row 0 takes two fives, row 1 the third and (room 5) one
    # three, row 2 three threes, and row 1 (room 2) the two. Result: first [0, 1, 1, 2, 1], rows [1, 1, 1, 1, 1], each
    # [2, 1, 1, 3, 1], 3 rows.
    for length, count in zip(lengths, counts, strict=True):
        while count:
            place = bisect_left(rooms, length)
            # No open row has room: open just enough for all samples of this length that are left.
            if place == len(rooms):
                more = -(-count // (room // length))
                put_back(room, opened, opened + more)
                opened += more
            left = rooms[place]
            start, stop = free[left].pop()
            if not free[left]:
                del free[left], rooms[place]
            most = left // length
            full = min(stop - start, count // most)
            if not full:
                full, most = 1, count
            first.append(start)
            rows.append(full)
            each.append(most)
            count -= full * most
            # The untouched rest of the stretch keeps its room, the filled rows return with less.
            put_back(left, start + full, stop)
            put_back(left - most * length, start, start + full)
    return first, rows, each, opened


def _rows_of_samples(first: list[int], rows: list[int], each: list[int]) -> NDArray[np.int64]:
    """Return the row of each sample [samples], from longest to shortest, given the runs of :func:`_best_fit`."""
    # With the runs of the example in _best_fit, the eight samples get rows [0, 0, 1, 1, 2, 2, 2, 1].
    per_row = np.asarray(each)
    placed = np.asarray(rows) * per_row
    filling = np.repeat(np.arange(len(placed)), placed)  # the run of each sample
    within = np.arange(len(filling)) - (np.cumsum(placed) - placed)[filling]  # its number within the run
    result: NDArray[np.int64] = np.asarray(first)[filling] + within // per_row[filling]
    return result


def as_samples(samples: Iterable[TokenSample | Sequence[int] | NDArray[Any]]) -> Iterable[TokenSample]:
    """Yield samples; a list or array of tokens becomes a sample numbered by its index."""
    for place, sample in enumerate(samples):
        yield sample if isinstance(sample, TokenSample) else TokenSample(np.asarray(sample), sample_id=place)


def fit_sample(
    sample: TokenSample,
    row_length: int,
    statistics: PackingStatistics,
    overlong: Overlong = "error",
    empty: Empty = "error",
) -> list[TokenSample]:
    """Cut, split or leave out a sample that does not fit into a row, and count it in ``statistics``.

    Returns what goes into rows, each part no longer than a row: the sample, its beginning, its pieces, or nothing.
    ``overlong`` and ``empty`` work as in ``rows.pack``; pieces without a target are left out, and a sample that a cut
    leaves without a target counts as empty. Raises ValueError if a sample is rejected or a choice is unknown.
    """
    require_choice("overlong", overlong, Overlong)
    require_choice("empty", empty, Empty)
    statistics.samples += 1
    pieces = [sample]
    if sample.length > row_length:
        pieces = _shorten(sample, row_length, overlong)
    kept = [piece for piece in pieces if piece.num_targets]
    if not kept:
        _leave_out(sample, statistics, empty)
        return []
    statistics.packed += 1
    if overlong == "cut" and sample.length > row_length:
        statistics.cut += 1
        statistics.cut_tokens += sample.length - row_length
    if len(pieces) > 1:
        statistics.split += 1
        statistics.pieces += len(pieces)
        statistics.pieces_without_target += len(pieces) - len(kept)
    return kept


def fit_samples(
    samples: Iterable[TokenSample | Sequence[int] | NDArray[Any]],
    row_length: int,
    overlong: Overlong = "error",
    empty: Empty = "error",
) -> tuple[list[TokenSample], PackingStatistics]:
    """Apply :func:`fit_sample` to all samples; return what goes into rows, and the counts."""
    statistics = PackingStatistics()
    fitting = [
        piece for sample in as_samples(samples) for piece in fit_sample(sample, row_length, statistics, overlong, empty)
    ]
    return fitting, statistics


def count_rows(
    rows: PackedParts, lengths: NDArray[Any], row_length: int, multiple: int, into: PackingStatistics
) -> None:
    """Count in ``into`` the rows that :func:`pack_parts` made of ``lengths``, [samples] or [samples, n]."""
    tokens = int(lengths.sum())
    into.add_rows(len(rows), row_length, tokens, int(rows.padded(lengths, multiple).sum()) - tokens)


def _shorten(sample: TokenSample, row_length: int, overlong: Overlong) -> list[TokenSample]:
    """Return the beginning or the pieces of a sample that is longer than a row."""
    if overlong == "error":
        raise ValueError(
            f"sample {sample.sample_id} takes {sample.length} tokens, more than row_length={row_length}; choose a "
            "longer row, overlong='cut' or overlong='split'"
        )
    tokens, mask = sample.tokens, sample.loss_mask
    # Pieces share one token. Tokens 0..9 in rows of 4 become 0..4, 4..8 and 8..9: token 4 is the last label of the
    # first piece and the first input of the second, so every target is trained exactly once.
    starts = range(0, sample.length, row_length) if overlong == "split" else range(1)
    return [
        TokenSample(
            tokens[start : start + row_length + 1],
            None if mask is None else mask[start : start + row_length + 1],
            sample.sample_id,
        )
        for start in starts
    ]


def _leave_out(sample: TokenSample, statistics: PackingStatistics, empty: Empty) -> None:
    """Count or reject a sample without targets."""
    too_short = len(sample.tokens) < 2
    if empty == "error":
        what = "fewer than two tokens" if too_short else "no target in the part that fits into a row"
        raise ValueError(
            f"sample {sample.sample_id} has {what}, so there is nothing to learn from it; remove it from the data, "
            "or choose empty='drop'"
        )
    if too_short:
        statistics.too_short += 1
    else:
        statistics.without_target += 1
