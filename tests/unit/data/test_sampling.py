# SPDX-License-Identifier: Apache-2.0
"""The order in which samples are dealt out, without a Trainer."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mcore.data.global_order import deal, global_order
from lightning_mcore.data.sampling import GlobalOrderSampler, data_parallel_place, even_out, training_loader
from tests.support.sentences import refuses
from tests.support.toy import Samples


def dealt(size: int, ranks: int, global_batch_size: int, epoch: int, shuffle: bool = True) -> list[int]:
    """Return what all ranks read together, put back in order."""
    samplers = [GlobalOrderSampler(Samples(size), ranks, r, global_batch_size, shuffle, seed=5) for r in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    assert len({len(sampler) for sampler in samplers}) == 1
    return [index for turn in zip(*samplers, strict=True) for index in turn]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_the_same_for_any_number_of_ranks(shuffle: bool) -> None:
    orders = {tuple(dealt(103, ranks, 8, 2, shuffle)) for ranks in (1, 2, 4, 8)}
    assert len(orders) == 1
    [order] = orders
    assert len(order) == len(set(order)) == 96
    assert shuffle or list(order) == list(range(96))


def test_each_epoch_and_seed_has_its_own_order_and_leaves_out_others() -> None:
    orders = [dealt(103, 2, 8, epoch) for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert set(orders[0]) != set(orders[1])
    assert orders[0] == dealt(103, 2, 8, 0)


def test_a_resume_sees_the_order_that_the_sampler_has() -> None:
    sampler = GlobalOrderSampler(Samples(50), 2, 1, 4, seed=3)
    sampler.set_epoch(4)
    assert list(global_order(sampler)[1::2]) == list(sampler)


def test_what_fills_no_global_batch_is_told_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):  # the level of Lightning's own messages
        loader = training_loader(None, Samples(11), 4, of="rows")
    [record] = caplog.records
    assert record.name.startswith("lightning.pytorch")
    assert record.getMessage() == "each epoch skips 3 of 11 rows, which do not fill a global batch of 4"
    assert [len(batch["index"]) for batch in loader] == [4, 4]


def test_a_dataset_smaller_than_a_global_batch_is_refused() -> None:
    with refuses(ValueError, "has 3 samples, fewer than the 4 of a"):
        training_loader(None, Samples(3), 4)
    with refuses(ValueError, "global_batch_size=6"):
        GlobalOrderSampler(Samples(9), 4, 0, 6)


def test_ranks_get_samples_of_like_cost_within_each_step() -> None:
    # Two ranks, steps of two turns: 9 1 | 8 2, then 5 5 | 0 7 and an odd one.
    assert even_out(np.array([9.0, 1, 8, 2, 5, 5, 0, 7, 3]), 2, 2).tolist() == [0, 1, 3, 2, 4, 5, 7, 6, 8]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_costs_move_samples_within_their_turn_only(ranks: int) -> None:
    costs = np.random.default_rng(0).uniform(1, 10, 2000)
    samplers = [GlobalOrderSampler(Samples(2000), ranks, rank, 48, seed=5, costs=costs) for rank in range(ranks)]
    plain = global_order(samplers[0])
    shares = np.array([list(sampler) for sampler in samplers])  # [ranks, turns]
    turns = np.array(plain).reshape(-1, ranks)
    assert np.array_equal(np.sort(shares.T, axis=1), np.sort(turns, axis=1))
    before, after = (_idle(costs[each].reshape(-1, 48 // ranks, ranks).sum(1)) for each in (turns, shares.T))
    assert after < 0.4 * before  # measured: 0.09 on 2 ranks, 0.32 on 8


def _idle(totals: np.ndarray) -> float:
    """Return the share of the ranks' time that they wait for the slowest one; totals [steps, ranks]."""
    return float(1 - (totals.mean(1) / totals.max(1)).mean())


@pytest.mark.parametrize(("consumed", "ranks"), [(0, 2), (24, 4), (16, 2), (6, 4), (21, 3)])
def test_the_rest_of_an_epoch_is_dealt_by_cost_and_each_sample_once(consumed: int, ranks: int) -> None:
    costs = np.random.default_rng(1).lognormal(0, 2, 60)
    samplers = [GlobalOrderSampler(Samples(60), ranks, rank, 12, seed=5, costs=costs) for rank in range(ranks)]
    rest = [
        list(deal(sampler.evened_out(global_order(sampler), consumed), consumed, ranks, sampler.rank, True))
        for sampler in samplers
    ]
    together = [index for turn in zip(*rest, strict=True) for index in turn]
    assert sorted(together) == sorted(global_order(samplers[0])[consumed : consumed + len(together)])
    assert 60 - consumed - len(together) < ranks
    if consumed % ranks == 0:  # as in a run that was not interrupted
        assert rest == [list(sampler)[consumed // ranks :] for sampler in samplers]


def test_outside_of_a_run_there_is_one_rank() -> None:
    assert data_parallel_place(None) == (0, 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_for_a_gpu_are_in_pinned_memory(device: str) -> None:
    place = {"rank": 0, "num_replicas": 1}
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, accumulate_grad_batches=1, distributed_sampler_kwargs=place)
    assert training_loader(trainer, Samples(4), 2).pin_memory == (device == "cuda")
    assert not training_loader(trainer, Samples(4), 2, pin_memory=False).pin_memory
