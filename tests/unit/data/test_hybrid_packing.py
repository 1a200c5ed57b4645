# SPDX-License-Identifier: Apache-2.0
"""Rows of a hybrid packing: every sample once, short ones within a part or in a split row, parts of like cost."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mcore.data.packing.best_fit import PackingStatistics, TokenSample
from lightning_mcore.data.packing.rows import HybridPackedDataset, collate_rows
from lightning_mcore.layers.inputs import ModelInputs, split_packed_batch

ROW = 64


def dataset(lengths: list[int], parts: int) -> HybridPackedDataset:
    """Return the rows of samples of these lengths; sample n consists of the token n."""
    samples = [TokenSample(np.full(length + 1, number), None, number) for number, length in enumerate(lengths)]
    stub = SimpleNamespace(
        lengths=np.array(lengths), take=lambda found: [samples[n] for n in found], statistics=PackingStatistics()
    )
    return HybridPackedDataset(stub, ROW, 2 * parts, parts)


LENGTHS: dict[str, list[int]] = {
    "mixed": np.random.default_rng(1).integers(1, ROW + 1, 120).tolist(),
    "short": np.random.default_rng(2).integers(1, 12, 150).tolist(),
    "long": [ROW] * 5,
    "one": [3],
    "many of one token": [1] * 97,
}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_sample_is_in_one_row_and_short_ones_stay_whole_in_rows_without_a_long_one(name: str, parts: int) -> None:
    lengths, part = LENGTHS[name], ROW // parts
    rows = dataset(lengths, parts)
    found: list[int] = []
    split_short = 0
    for row in (rows[index] for index in range(len(rows))):
        ids, ends = row["sample_ids"].tolist(), row["cu_seqlens_padded"].tolist()
        found += ids
        assert row["cu_seqlens"].diff().tolist() == [lengths[number] for number in ids]
        assert len(row["tokens"]) == ends[-1] == ROW
        for number, start in zip(ids, ends[:-1], strict=True):
            assert (row["tokens"][start : start + lengths[number]] == number).all()
            assert row["position_ids"][start : start + lengths[number]].tolist() == list(range(lengths[number]))
        if set(range(0, ROW, part)) <= set(ends):
            assert all(start // part == (start + lengths[n] - 1) // part for n, start in zip(ids, ends, strict=False))
        else:
            assert not any(end % (2 * parts) for end in ends)
            split_short += all(lengths[number] <= part for number in ids)
    assert sorted(found) == list(range(len(lengths)))
    assert split_short <= 2  # what did not fill the parts of a row
    statistics = rows.samples.statistics
    assert (statistics.rows, statistics.tokens) == (len(rows), sum(lengths))
    assert statistics.tokens + statistics.padding == len(rows) * ROW


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
        assert mine.is_whole
        first = every.offsets.index(own.start)
        assert mine.lengths == every.lengths[first : first + len(mine.lengths)]
        assert mine.offsets == tuple(end - own.start for end in every.offsets if own.start <= end <= own.stop)


def test_parts_of_like_cost_share_a_row() -> None:
    rows = dataset(np.random.default_rng(3).integers(1, 17, 400).tolist(), 4)

    def idle(work: np.ndarray) -> float:
        return float((1 - work.mean(1) / work.max(1)).mean())

    found = []
    for index in range(len(rows)):
        row: Any = rows[index]
        starts, lengths = row["cu_seqlens_padded"][:-1], row["cu_seqlens"].diff().double()
        found.append([float(lengths[starts // 16 == rank].square().sum()) for rank in range(4)])
    assert idle(np.array(found)) < 0.05
    assert idle(np.random.default_rng(0).permutation(np.array(found).flatten()).reshape(-1, 4)) > 0.1
    np.testing.assert_allclose(rows.costs[1:], np.array(found)[1:].max(1))  # the first row has the rest, and is split
