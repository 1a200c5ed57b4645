# SPDX-License-Identifier: Apache-2.0
"""Rows of a stream are dealt out by cost: a step has the same rows, whole, and ranks wait less for each other."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_mcore.data.finetuning.stream import StreamLoader
from lightning_mcore.data.finetuning.stream_reader import _Reader
from tests.support.chats import exchanges, stub_trainer, write
from tests.support.ranks import on_ranks
from tests.unit.data.test_finetuning_stream import settings

pytestmark = pytest.mark.distributed

RANKS, ACCUMULATED = 3, 4


def rows_of(batch: dict[str, Any]) -> list[tuple[tuple[Any, ...], ...]]:
    """Return the rows of a batch as plain values, without empty sub-sequences."""
    rows = []
    for row in range(len(batch["tokens"])):
        count = int((batch["sample_ids"][row] >= 0).sum())
        ends = {"cu_seqlens": count + 1, "cu_seqlens_padded": count + 1, "sample_ids": count, "source_ids": count}
        rows.append(tuple((name, *values[row, : ends.get(name)].tolist()) for name, values in batch.items()))
    return rows


def cost(row: dict[str, Any], parts: int) -> float:
    """Return the work of attention in a row on the busiest of its ranks, from lengths, counted one by one."""
    starts, lengths = row["cu_seqlens_padded"].tolist(), row["cu_seqlens"].diff().tolist()
    part = row["tokens"].numel() // parts
    of_ranks = [0.0] * parts
    for start, length in zip(starts[:-1], lengths, strict=True):
        is_shared = not set(range(0, row["tokens"].numel(), part)) <= set(starts)
        for rank in range(parts):
            if is_shared or start // part == rank:
                of_ranks[rank] += length**2 / (parts if is_shared else 1)
    return max(of_ranks)


def work(batches: list[dict[str, Any]], parts: int) -> np.ndarray:
    """Return the work of attention in each step."""
    costs = [
        sum(cost({name: values[row] for name, values in batch.items()}, parts) for row in range(len(batch["tokens"])))
        for batch in batches
    ]
    whole = len(costs) // ACCUMULATED * ACCUMULATED
    return np.array(costs[:whole], float).reshape(-1, ACCUMULATED).sum(1)


@pytest.mark.parametrize(("batch_size", "row_length", "parts"), [(1, 95, 1), (2, 96, 1), (1, 96, 2)])
@on_ranks(RANKS, timeout=120)
def test_a_step_has_the_same_rows_and_ranks_get_like_work(
    tmp_path: Path, batch_size: int, row_length: int, parts: int
) -> None:
    """Compared with what the readers of all ranks make, each of which every rank can read alone."""
    rank, folder = dist.get_rank(), tmp_path / str(dist.get_rank())
    sizes = {"row_length": row_length, "parts": parts, "multiple": 4 if parts > 1 else 1}
    of_stream = settings(folder, batch_size=batch_size, sources=True, **sizes)
    of_stream.files.append(write(folder / "d.jsonl", exchanges(600, 80, seed=1)))
    of_stream.sources[of_stream.files[-1]] = 4  # type: ignore[index]
    trainer = stub_trainer()
    trainer.accumulate_grad_batches = ACCUMULATED
    dealt = list(StreamLoader(trainer, of_stream, rank, RANKS))
    shares: list[Any] = [None] * RANKS
    dist.all_gather_object(shares, dealt)
    read = [[item.batch for item in _Reader(of_stream, 0, other, RANKS, None) if item.batch] for other in range(RANKS)]
    assert len(dealt) == min(map(len, read)) > 10 * ACCUMULATED / batch_size
    moved = 0
    for number, batches in enumerate(zip(*shares, strict=True)):
        as_read = [rows_of(batches[number]) for batches in read]
        now = [rows_of(batch) for batch in batches]
        assert sorted(chain(*now)) == sorted(chain(*as_read))
        assert number % ACCUMULATED or batch_size > 1 or now == as_read  # nothing to even out yet
        moved += now != as_read
        assert all(batch[name].dtype == values.dtype for batch in batches for name, values in read[0][0].items())
    assert moved > len(dealt) / 4
    before, after = (
        idle(np.stack([work(batches[: len(dealt)], parts) for batches in each])) for each in (read, shares)
    )
    assert after < 0.6 * before, (before, after)


def idle(totals: np.ndarray) -> float:
    """Return the mean share of a step that ranks wait for the slowest; ``totals`` is [ranks, steps]."""
    return float((1 - totals.mean(0) / totals.max(0)).mean())


@on_ranks(2, timeout=120)
def test_a_batch_that_suits_everyone_stays_where_it_is(tmp_path: Path) -> None:
    of_stream = settings(tmp_path / str(dist.get_rank()))
    trainer = stub_trainer()  # a step is one row for each rank, so there is nothing to even out
    loader = StreamLoader(trainer, of_stream, dist.get_rank(), 2)
    alone = [item.batch for item in _Reader(of_stream, 0, dist.get_rank(), 2, None) if item.batch]
    for batch, own in zip(loader, alone, strict=False):
        assert all(torch.equal(batch[name], own[name]) for name in own)
