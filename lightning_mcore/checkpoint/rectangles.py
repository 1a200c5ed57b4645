# SPDX-License-Identifier: Apache-2.0
"""Ranges of a flattened tensor as blocks of the tensor.

The distributed optimizer gives each rank a range of the elements of a parameter, and checkpoints know blocks: a range
of a matrix is the rest of a row, some whole rows, and the beginning of another. ``optimizer_state.py`` stores its
shards so.
"""

from collections.abc import Sequence
from math import prod


def rectangles(shape: Sequence[int], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a flattened tensor into blocks of the tensor.

    Args:
        shape: The tensor's shape.
        begin: First element of the range.
        end: The element after the last.

    Returns:
        Offsets and sizes of the blocks, in the order of the range; at most ``2 * len(shape) - 1``.
    """
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    inner = prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # whole rows
    if first > last:  # within one row
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
