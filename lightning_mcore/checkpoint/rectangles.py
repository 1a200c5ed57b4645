# SPDX-License-Identifier: Apache-2.0
"""Cut a flat range of a tensor into rectangles, because checkpoints store and read rectangles only."""

from collections.abc import Sequence
from math import prod


def rectangles(shape: Sequence[int], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a flattened tensor into blocks, and return their offsets and sizes, in the order of the range.

    There are at most ``2 * len(shape) - 1`` blocks.
    """
    # Elements 4 to 14 of a [4, 6] matrix (begin=4, end=15):
    #   row 0   . . . . 4 5        the rest of a row:      offsets (0, 4), sizes (1, 2)
    #   row 1   6 7 8 9 10 11      complete rows:          offsets (1, 0), sizes (1, 6)
    #   row 2   12 13 14 . . .     the start of a row:     offsets (2, 0), sizes (1, 3)
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    inner = prod(shape[1:])
    # first is rounded up, last down: here 1 and 2.
    first, last = -(-begin // inner), end // inner
    if first > last:
        return _of_row(shape, end // inner, begin, end)
    head = _of_row(shape, first - 1, begin, first * inner) if begin < first * inner else []
    tail = _of_row(shape, last, last * inner, end) if last * inner < end else []
    rest = tuple(shape[1:])
    whole = [((first, *(0,) * len(rest)), (last - first, *rest))] if first < last else []
    return [*head, *whole, *tail]


def _of_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    start = row * prod(shape[1:])
    blocks = rectangles(shape[1:], begin - start, end - start)
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in blocks]
