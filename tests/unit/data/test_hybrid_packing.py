# SPDX-License-Identifier: Apache-2.0
"""Rows of a hybrid packing: every sample once, on as few ranks as have room for it, parts of like cost."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mcore import OnlinePacker, pack
from lightning_mcore.data.packing.best_fit import PackingStatistics, TokenSample
from lightning_mcore.data.packing.rows import PackedDataset, PackingMultiples, collate_rows, costs_of_rows
from lightning_mcore.data.preference.datamodule import PackedPairs
from lightning_mcore.data.preference.pairs import Pair
from lightning_mcore.layers.inputs import ModelInputs, split_packed_batch
from lightning_mcore.layers.packed_sequences import packed_sequences, split_packed_rows
from lightning_mcore.parallel.context import segments_of
from tests.support.sentences import refuses

ROW = 64


def samples_of(lengths: list[int]) -> list[TokenSample]:
    """Return samples of these lengths; sample n consists of the token n."""
    return [TokenSample(np.full(length + 1, number), None, number) for number, length in enumerate(lengths)]


def dataset(lengths: list[int], parts: int) -> PackedDataset:
    """Return the rows of samples of these lengths."""
    samples = samples_of(lengths)
    stub = SimpleNamespace(
        lengths=np.array(lengths), take=lambda found: [samples[n] for n in found], statistics=PackingStatistics()
    )
    return PackedDataset(stub, ROW, PackingMultiples(2 * parts, 2 * parts, parts))


def packed(lengths: list[int], parts: int, how: str) -> tuple[list[Any], PackingStatistics | None]:
    """Return the rows of samples of these lengths, and the counts if there are any."""
    if how == "samples in memory":
        return pack(samples_of(lengths), ROW, multiple=2 * parts, parts=parts), None
    if how == "dataset":
        found = dataset(lengths, parts)
        return [found[row] for row in range(len(found))], found.samples.statistics
    packer = OnlinePacker(ROW, 2 * parts, 6, parts=parts)
    rows = [row for sample in samples_of(lengths) for row in packer.add(sample)]
    assert len(rows) > 6 or sum(lengths) < 12 * ROW
    return rows + packer.flush(), packer.statistics


def widths_of(starts: list[int], ranks: int, first: int = 0, length: int = ROW) -> list[int]:
    """Return for each rank how many ranks share its documents, from where the documents of a row start."""
    if ranks == 1 or first + length // 2 not in starts:
        return [ranks] * ranks
    halves = [widths_of(starts, ranks // 2, first + place, length // 2) for place in (0, length // 2)]
    return halves[0] + halves[1]


LENGTHS: dict[str, list[int]] = {
    "mixed": np.random.default_rng(1).integers(1, ROW + 1, 120).tolist(),
    "short": np.random.default_rng(2).integers(1, 12, 150).tolist(),
    "long": [ROW] * 5,
    "one": [3],
    "many of one token": [1] * 97,
}


def test_all_ranks_share_samples_of_which_two_would_leave_half_a_row_empty() -> None:
    rows = pack(samples_of([200] * 9), 640, multiple=8, parts=4)
    assert [row["sample_ids"].tolist() for row in rows] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    by_two = pack(samples_of([270] * 6), 640, multiple=8, parts=4)  # of which no row has room for three
    assert [row["cu_seqlens_padded"].tolist() for row in by_two] == [[0, 320, 640]] * 3


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("how", ["dataset", "samples in memory", "stream"])
def test_every_sample_is_in_one_row_on_as_few_ranks_as_have_room_for_it_or_for_one_beside_it(
    how: str, name: str, parts: int
) -> None:
    lengths, part = LENGTHS[name], ROW // parts
    rows, statistics = packed(lengths, parts, how)
    found: list[int] = []
    too_wide = 0
    for row in rows:
        ids, ends = row["sample_ids"].tolist(), row["cu_seqlens_padded"].tolist()
        found += ids
        assert row["cu_seqlens"].diff().tolist() == [lengths[number] for number in ids]
        assert len(row["tokens"]) == ends[-1] == ROW
        for number, start in zip(ids, ends[:-1], strict=True):
            assert (row["tokens"][start : start + lengths[number]] == number).all()
            assert row["position_ids"][start : start + lengths[number]].tolist() == list(range(lengths[number]))
        longest = [0] * parts  # of the samples that each rank shares
        widths = widths_of(ends, parts)
        for number, start, end in zip(ids, ends, ends[1:], strict=False):
            width = widths[start // part]
            first = start // part // width * width
            assert first * part <= start < start + lengths[number] <= end <= (first + width) * part
            assert width == 1 or (end - start) % (2 * width) == 0
            longest[first] = max(longest[first], lengths[number])
        too_wide += any(
            width > 1 and 0 < longest[rank] <= width // 2 * part for rank, width in enumerate(widths) if longest[rank]
        )
    assert sorted(found) == list(range(len(lengths)))
    assert too_wide <= 2  # what nothing could be joined with
    if statistics is not None:
        assert (statistics.rows, statistics.tokens) == (len(rows), sum(lengths))
        assert statistics.tokens + statistics.padding == len(rows) * ROW


@pytest.mark.parametrize("parts", [2, 4])
def test_the_sequences_of_a_pair_stay_together_on_the_ranks_that_share_them(parts: int) -> None:
    each, part = np.random.default_rng(5).integers(1, 14, (60, 2)), ROW // parts
    each[:4] += 12
    pairs = [
        Pair(*(TokenSample(np.full(size + 1, n), np.ones(size + 1, bool), n) for size in each[n])) for n in range(60)
    ]
    stub = SimpleNamespace(each=each, take=lambda found: [pairs[n] for n in found], statistics=PackingStatistics())
    rows = PackedPairs(stub, ROW, PackingMultiples(2 * parts, 2 * parts, parts))
    found: list[int] = []
    kinds = set()
    for row in (rows[index] for index in range(len(rows))):
        ids, starts = row["sample_ids"].tolist(), row["cu_seqlens_padded"].tolist()
        assert ids[::2] == ids[1::2]
        assert row["cu_seqlens"].diff().tolist() == each[ids[::2]].flatten().tolist()
        found += ids[::2]
        widths = widths_of(starts, parts)
        kinds |= set(widths)
        for place, number in enumerate(ids):
            width, first = widths[starts[place] // part], starts[place // 2 * 2]
            assert width == 1 or starts[place] % (2 * width) == 0
            end = starts[place] + each[number, place % 2]
            assert starts[place] // part // width == (end - 1) // part // width
            # A pair for two ranks may have one answer on each.
            assert first // part // width == (end - 1) // part // width or first % 4 == starts[place] % part == 0
    assert sorted(found) == list(range(60))
    assert kinds == ({1, 2} if parts == 2 else {1, 2, 4})
    assert stub.statistics.tokens + stub.statistics.padding == len(rows) * ROW


@pytest.mark.parametrize("parts", [2, 4])
def test_a_rank_has_the_documents_of_its_part_as_if_they_were_a_row_of_their_own(parts: int) -> None:
    rows = dataset(LENGTHS["short"], parts)
    batch = collate_rows([rows[len(rows) - 1]])
    whole = ModelInputs.of(batch)
    for rank in range(parts):
        share = split_packed_batch(batch, rank, parts, hybrid=True)
        inputs = ModelInputs.of(share, rank, parts, hybrid=True)
        own = slice(rank * ROW // parts, (rank + 1) * ROW // parts)
        for name in ("tokens", "position_ids", "labels", "loss_mask", "samples", "padding"):
            assert torch.equal(getattr(inputs, name), getattr(whole, name)[:, own]), name
        assert inputs.packed is not None
        assert whole.packed is not None
        mine, every = inputs.packed.boundaries, whole.packed.boundaries
        assert mine is not None
        assert every is not None
        assert mine.shared_by == 1
        first = every.offsets.index(own.start)
        assert mine.lengths == every.lengths[first : first + len(mine.lengths)]
        assert mine.offsets == tuple(end - own.start for end in every.offsets if own.start <= end <= own.stop)


ROWS_OF_SEGMENTS = {  # where the documents of a row of 64 begin, and the ranks that share them
    "halves": ([0, 32, 40], [range(2), range(2, 4)]),
    "two of three": ([0, 20, 32, 35, 48], [range(2), range(2, 3), range(3, 4)]),
    "the last": ([0, 16, 24, 32], [range(1), range(1, 2), range(2, 4)]),
    "all": ([0, 16, 48], [range(4)]),
    "six": ([0, 4, 30, 40, 50], [range(3), range(3, 4), range(4, 5), range(5, 6)]),
}


@pytest.mark.parametrize("name", ROWS_OF_SEGMENTS)
def test_ranks_that_share_documents_have_them_as_if_they_were_all_ranks_of_a_shorter_row(name: str) -> None:
    starts, segments = ROWS_OF_SEGMENTS[name]
    size, length = segments[-1].stop, 60 if name == "six" else ROW
    part, offsets = length // size, torch.tensor([[*starts, length, length]], dtype=torch.int32)
    assert segments_of(offsets.tolist(), length, size) == segments
    row = torch.arange(length)[None]
    for ranks in segments:
        own = slice(ranks.start * part, ranks.stop * part)
        inside = torch.tensor([[start - own.start for start in [*starts, length] if own.start <= start <= own.stop]])
        for place, rank in enumerate(ranks):
            found = split_packed_rows(row, offsets, rank, size, hybrid=True)
            assert torch.equal(found, split_packed_rows(row[:, own], inside, place, len(ranks)))


def test_documents_must_divide_into_slices_for_the_ranks_that_share_them() -> None:
    offsets = torch.tensor([[0, 18, 32, 41, 48, 64]])  # ranks 0 and 1 share 18 and 14, the others have whole ones
    for rank in range(4):
        with refuses(
            ValueError, "packed sequence 0 has 18 tokens, padding included, which do not divide into 4 slices"
        ):
            packed_sequences(offsets, offsets, ROW, 4, rank)
    offsets[0, 1] += 2
    shared_by = [packed_sequences(offsets, offsets, ROW, 4, rank).boundaries for rank in range(4)]
    assert [each and (each.shared_by, each.offsets) for each in shared_by] == [
        *[(2, (0, 20, 32))] * 2,
        (1, (0, 9, 16)),
        (1, (0, 16)),
    ]


def test_a_row_that_fits_alone_says_that_the_rows_of_a_microbatch_are_split_alike() -> None:
    rows = torch.tensor([[0, 5, 8, 16], [0, 16, 16, 16]])  # the first is split in halves, the second is shared
    for row in rows:
        assert packed_sequences(row[None], row[None], 16, 2, hybrid_rank=0).boundaries is not None
    with refuses(ValueError, "pad it to 8 tokens, or set micro_batch_size=1 in MCoreStrategy"):
        packed_sequences(rows, rows, 16, 2, hybrid_rank=0)


@pytest.mark.parametrize("how", ["dataset", "stream"])
def test_parts_of_like_cost_share_a_row(how: str) -> None:
    lengths = np.random.default_rng(3).integers(1, 17, 400).tolist()
    rows, _ = packed(lengths, 4, how)

    def idle(work: np.ndarray) -> float:
        return float((1 - work.mean(1) / work.max(1)).mean())

    found = []
    for row in rows:
        starts, each = row["cu_seqlens_padded"][:-1], row["cu_seqlens"].diff().double()
        found.append(
            [
                float(each[starts // 16 // width == rank // width].square().sum()) / width
                for rank, width in enumerate(widths_of(starts.tolist(), 4))
            ]
        )
    assert idle(np.array(found)) < 0.07
    assert idle(np.random.default_rng(0).permutation(np.array(found).flatten()).reshape(-1, 4)) > 0.1
    np.testing.assert_allclose(costs_of_rows(collate_rows(rows), 4), np.array(found).max(1))
    if how == "dataset":
        # Its first row, which is split, counts the padding too
        np.testing.assert_allclose(dataset(lengths, 4).costs[1:], np.array(found)[1:].max(1))


@pytest.mark.parametrize("after", [0, 40, 150, 250])
def test_a_stream_goes_on_from_its_state_with_the_same_rows(after: int) -> None:
    """At the first of these places nothing is packed, at the others some rows are and some samples are not."""
    samples = [sample for name in ("mixed", "short") for sample in samples_of(LENGTHS[name])]
    straight, first, second = (OnlinePacker(ROW, 8, 5, parts=4) for _ in range(3))
    expected = [row for sample in samples for row in straight.add(sample)] + straight.flush()
    actual = [row for sample in samples[:after] for row in first.add(sample)]
    second.load_state_dict(first.state_dict())
    actual += [row for sample in samples[after:] for row in second.add(sample)] + second.flush()
    assert len(actual) == len(expected)
    for row, other in zip(actual, expected, strict=True):
        assert all(torch.equal(row[name], other[name]) for name in other)
    assert second.statistics == straight.statistics


def test_a_stream_fills_long_rows_and_holds_back_no_more_than_told() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 6000).astype(int), 1, 8192).tolist()
    packer, held = OnlinePacker(8192, 8, open_rows=32, parts=4), 0
    for length in lengths:
        rows = packer.add(np.zeros(length + 1, np.int64))
        held += length - sum(int(row["cu_seqlens"][-1]) for row in rows)
        assert held < 32 * 8192
    assert packer.statistics.rows > 300
    assert packer.statistics.fill >= 0.995


def test_a_stream_without_samples_has_no_rows() -> None:
    packer = OnlinePacker(ROW, parts=2)
    assert [*packer.flush(), *packer.flush()] == []
    assert pack([], ROW, parts=2) == []


def test_the_parts_of_a_row_are_checked() -> None:
    for pack_with in (lambda parts: pack([[1, 2]], ROW, parts=parts), lambda parts: OnlinePacker(ROW, parts=parts)):
        with refuses(ValueError, "does not divide into parts=3"):
            pack_with(3)
    with refuses(ValueError, "parts=2"):
        OnlinePacker(ROW, parts=2).load_state_dict(OnlinePacker(ROW, parts=4).state_dict())
