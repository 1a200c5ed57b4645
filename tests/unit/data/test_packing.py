# SPDX-License-Identifier: Apache-2.0
"""Which samples share a row: against best-fit decreasing from sample to sample, on random lengths."""

import logging
from typing import Any

import numpy as np
import pytest

from lightning_mcore.data.packing.best_fit import (
    PackedRows,
    PackingStatistics,
    TokenSample,
    as_samples,
    count_rows,
    fit_sample,
    fit_samples,
    pack_lengths,
    pack_parts,
)
from tests.support.sentences import refuses

SEEDS = range(60)


def naive_best_fit_decreasing(lengths: np.ndarray, row_length: int, multiple: int) -> list[int]:
    """Return the room left in each row, ascending."""
    rooms: list[int] = []
    for length in sorted((-(-int(length) // multiple) * multiple for length in lengths), reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            best = min(fitting, key=lambda index: rooms[index])
            rooms[best] -= length
        else:
            rooms.append(row_length - length)
    return sorted(rooms)


def random_lengths(seed: int) -> tuple[np.ndarray, int, int]:
    generator = np.random.default_rng(seed)
    multiple = int(generator.choice([1, 2, 4, 6]))
    row_length = multiple * int(generator.integers(1, 60))
    count = int(generator.integers(1, 200))
    kinds = [
        lambda: generator.integers(1, row_length + 1, count),
        lambda: np.clip(generator.lognormal(np.log(row_length / 8 + 1), 1.0, count).astype(int), 1, row_length),
        lambda: generator.choice(generator.integers(1, row_length + 1, 3), count),
        lambda: generator.integers(1, max(row_length // 5, 1) + 1, count),
    ]
    return kinds[seed % len(kinds)](), row_length, multiple


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_those_of_best_fit_decreasing(seed: int) -> None:
    lengths, row_length, multiple = random_lengths(seed)

    rows = pack_lengths(lengths, row_length, multiple)

    padded = -(-lengths // multiple) * multiple
    rooms = sorted(row_length - int(padded[rows[row]].sum()) for row in range(len(rows)))
    assert rooms == naive_best_fit_decreasing(lengths, row_length, multiple)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_is_in_exactly_one_row_and_no_row_is_over_full(seed: int) -> None:
    lengths, row_length, multiple = random_lengths(seed)

    rows = pack_lengths(lengths, row_length, multiple)

    assert sorted(rows.order.tolist()) == list(range(len(lengths)))
    assert rows.offsets[0] == 0
    assert rows.offsets[-1] == len(lengths)
    assert (np.diff(rows.offsets) > 0).all()
    assert all((-(-lengths[rows[row]] // multiple) * multiple).sum() <= row_length for row in range(len(rows)))


def test_the_longest_sample_of_a_row_comes_first_and_equal_input_gives_equal_rows() -> None:
    lengths, row_length, multiple = random_lengths(1)

    rows, again = pack_lengths(lengths, row_length, multiple), pack_lengths(lengths.tolist(), row_length, multiple)

    assert (rows.order == again.order).all()
    assert (rows.offsets == again.offsets).all()
    padded = -(-lengths // multiple)
    assert all((np.diff(padded[rows[row]]) <= 0).all() for row in range(len(rows)))


def test_rows_longer_than_sixteen_bits() -> None:
    lengths = np.array([70_000, 30_000, 99_999, 1, 69_999])

    rows = pack_lengths(lengths, 100_000)

    assert [rows[row].tolist() for row in range(len(rows))] == [[2, 3], [0, 1], [4]]


def test_log_normal_lengths_fill_long_rows() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int), 1, 8192)

    rows, statistics = pack_parts(lengths, 8192), PackingStatistics()
    count_rows(rows, lengths, 8192, 1, statistics)

    assert statistics.fill >= 0.99
    assert statistics.tokens == lengths.sum()
    assert statistics.tokens + statistics.padding == len(rows) * 8192


def test_no_samples_give_no_rows() -> None:
    rows = pack_lengths([], 8)

    assert len(rows) == 0
    with refuses(IndexError, "row 0 is out of range; there are 0 rows"):
        rows[0]


def test_rows_are_iterable_and_count_from_the_end() -> None:
    rows = PackedRows(np.array([2, 0, 1]), np.array([0, 1, 3]))

    assert [row.tolist() for row in rows] == [[2], [0, 1]]
    assert rows[-1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("lengths", "row_length", "multiple"),
    [
        ([3, 9], 8, 1),
        ([0], 8, 1),
        ([1], 10, 4),
        ([1], 0, 1),
        ([1], 8, 0),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], row_length: int, multiple: int) -> None:
    with refuses(ValueError):
        pack_lengths(lengths, row_length, multiple)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint64])
def test_lengths_of_any_integer_type(dtype: type) -> None:
    lengths, row_length, multiple = random_lengths(3)

    rows, statistics = pack_parts(lengths.astype(dtype), row_length, multiple), PackingStatistics()
    count_rows(rows, lengths.astype(dtype), row_length, multiple, statistics)

    assert (rows.parts.order == pack_lengths(lengths, row_length, multiple).order).all()
    assert statistics.tokens == lengths.sum()
    assert statistics.tokens + statistics.padding == len(rows) * row_length


@pytest.mark.parametrize("lengths", [[1.5, 2.0], [[1, 2]]])
def test_lengths_are_a_flat_array_of_ints(lengths: list[Any]) -> None:
    with refuses(TypeError, "give a flat array of ints"):
        pack_lengths(lengths, 8)


def sample(length: int, targets: list[int] | None = None, sample_id: int = 7) -> TokenSample:
    mask = None
    if targets is not None:
        mask = np.zeros(length, np.bool_)
        mask[targets] = True
    return TokenSample(np.arange(100, 100 + length), mask, sample_id)


def targets(pieces: list[TokenSample]) -> list[tuple[int, int]]:
    """Return each target with the token before it."""
    return [
        (int(piece.tokens[place - 1]), int(piece.tokens[place]))
        for piece in pieces
        for place in range(1, len(piece.tokens))
        if piece.loss_mask is None or piece.loss_mask[place]
    ]


def test_a_sample_takes_a_place_less_than_its_tokens_and_its_first_token_is_no_target() -> None:
    assert (sample(5).length, sample(5).num_targets) == (4, 4)
    assert (sample(5, [0, 4]).length, sample(5, [0, 4]).num_targets) == (4, 1)


def test_a_sample_that_is_too_long_is_refused_unless_told() -> None:
    with refuses(ValueError, "row_length=8"):
        fit_sample(sample(10), 8, PackingStatistics())


def test_a_sample_of_exactly_a_row_stays_whole() -> None:
    whole = sample(9)
    for overlong in ("error", "cut", "split"):
        assert fit_sample(whole, 8, PackingStatistics(), overlong) == [whole]


@pytest.mark.parametrize("length", [10, 16, 17, 18, 33, 101])
@pytest.mark.parametrize("masked", [False, True])
def test_the_pieces_of_a_split_sample_hold_every_target_once(length: int, masked: bool) -> None:
    whole = sample(length, list(range(1, length, 2)) if masked else None)
    statistics = PackingStatistics()

    pieces = fit_sample(whole, 8, statistics, "split")

    assert targets(pieces) == targets([whole])
    assert all(0 < piece.length <= 8 for piece in pieces)
    assert {piece.sample_id for piece in pieces} == {7}
    assert (statistics.samples, statistics.packed, statistics.split) == (1, 1, 1)
    assert statistics.pieces == len(pieces) == -(-(length - 1) // 8)


def test_a_piece_without_a_target_is_left_out_and_counted() -> None:
    statistics = PackingStatistics()

    pieces = fit_sample(sample(30, [15, 25]), 8, statistics, "split")

    assert targets(pieces) == [(114, 115), (124, 125)]
    assert len(pieces) == 2
    assert (statistics.pieces, statistics.pieces_without_target, statistics.lossless) == (4, 2, False)


def test_a_cut_sample_keeps_its_beginning_and_is_counted() -> None:
    statistics = PackingStatistics()

    (cut,) = fit_sample(sample(30, [3, 8, 9, 20]), 8, statistics, "cut")

    assert cut.tokens.tolist() == list(range(100, 109))
    assert targets([cut]) == [(102, 103), (107, 108)]
    assert (statistics.cut, statistics.cut_tokens) == (1, 21)


@pytest.mark.parametrize(
    "empty",
    [
        sample(0),
        sample(1),
        sample(4, []),
        sample(4, [0]),
        sample(12, [10]),
    ],
    ids=["empty", "one-token", "all-masked", "first-token-only", "cut-off"],
)
def test_a_sample_that_teaches_nothing_is_refused_or_left_out_and_counted(empty: TokenSample) -> None:
    statistics = PackingStatistics()

    with refuses(ValueError, "empty='drop'"):
        fit_sample(empty, 8, PackingStatistics(), "cut")

    assert fit_sample(empty, 8, statistics, "cut", "drop") == []
    assert (statistics.samples, statistics.packed, statistics.left_out, statistics.cut) == (1, 0, 1, 0)


def test_an_empty_document_from_a_list_is_one_of_fewer_than_two_tokens() -> None:
    with refuses(ValueError, "sample 1 has fewer than two tokens"):
        fit_samples([[1, 2], []], 8)


def test_lists_are_numbered_by_their_place_and_samples_keep_their_number() -> None:
    assert [item.sample_id for item in as_samples([[1, 2], sample(3), np.arange(4)])] == [0, 7, 2]


@pytest.mark.parametrize("name", ["overlong", "empty"])
def test_an_unknown_policy_is_refused(name: str) -> None:
    with refuses(ValueError, f"{name}='skip'"):
        fit_sample(sample(3), 8, PackingStatistics(), **{name: "skip"})


@pytest.mark.parametrize("tokens", [np.zeros(3), np.zeros((2, 2), int), np.array([True, False])])
def test_tokens_are_a_flat_array_of_ints(tokens: np.ndarray) -> None:
    with refuses(TypeError, "give a flat list or array of ints"):
        TokenSample(tokens, sample_id=3)


def test_a_mask_has_one_value_for_each_token() -> None:
    with refuses(ValueError, "sample 3 has a loss_mask of shape (2,) for"):
        TokenSample(np.arange(3), np.ones(2, np.bool_), 3)


def test_counts_add_up_and_say_what_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    samples = [sample(30, [3, 4]), sample(1), sample(4, []), sample(20), sample(5)]
    _, cut = fit_samples(samples, 8, "cut", "drop")
    _, split = fit_samples(samples, 8, "split", "drop")
    cut.add_rows(2, 8, 12, 1)
    total = cut + split

    with caplog.at_level(logging.INFO, "lightning_mcore.data.packing.best_fit"):
        total.log()

    assert str(total) == (
        "packed 6 of 10 samples, 12 tokens, into 2 rows, 75.00% filled; cut 2 that were longer than a row by 32 "
        "tokens; split 2 that were longer than a row into 7 pieces; left out 3 pieces without a target; left out 2 of "
        "fewer than two tokens; left out 2 without a target"
    )
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", str(total))]
    assert (total.sub_sequence_padding, total.row_padding, total.padding_share) == (1, 3, 0.25)


def test_counts_without_losses_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_mcore.data.packing.best_fit"):
        PackingStatistics(samples=2, packed=2).log()

    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert PackingStatistics().fill == 1.0
