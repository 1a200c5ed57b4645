# SPDX-License-Identifier: Apache-2.0
"""The place in an epoch's data: followed without changing what is read, taken up again without reading it twice."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_mcore.data.position import FollowedLoader, Moment, batches_in_pass, deal, global_order, rank_share
from lightning_mcore.parallel.random_state import from_plain, pick, put_common, take_common, to_plain
from tests.support.ranks import in_a_rank


def nothing() -> None:
    """Be told of a request."""


# Dealing


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 12, 13])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_whole_epoch_is_dealt_as_torch_deals_it(ranks: int, size: int, drop_last: bool) -> None:
    samplers = [DistributedSampler(range(size), ranks, rank, seed=3, drop_last=drop_last) for rank in range(ranks)]  # type: ignore[arg-type]
    for sampler in samplers:
        sampler.set_epoch(2)
        order = global_order(sampler)
        assert sorted(order) == list(range(size))
        assert deal(order, 0, ranks, sampler.rank, drop_last) == list(sampler)
        assert rank_share(size, 0, ranks, drop_last) == len(sampler)


@pytest.mark.parametrize(("consumed", "ranks"), [(0, 3), (4, 1), (4, 2), (5, 4), (11, 4), (12, 4), (13, 2), (20, 2)])
def test_what_is_left_is_dealt_once(consumed: int, ranks: int) -> None:
    order = [3 * index % 13 for index in range(13)]
    parts = [deal(order, consumed, ranks, rank, False) for rank in range(ranks)]
    assert {len(part) for part in parts} == {rank_share(13, consumed, ranks, False)}
    together = [index for turn in zip(*parts, strict=True) for index in turn]
    left = order[consumed:]
    assert together[: len(left)] == left
    assert together[len(left) :] == order[: len(together) - len(left)]
    assert len(together) - len(left) < ranks


@pytest.mark.parametrize(
    ("mode", "batches", "length", "expected"),
    [
        ("min_size", 3, 5, 3),
        ("max_size", 7, 5, 5),
        ("max_size_cycle", 5, 5, 5),
        ("max_size_cycle", 6, 5, 1),
        ("max_size_cycle", 10, 5, 5),
        ("max_size_cycle", 7, float("inf"), 7),
    ],
)
def test_a_loader_beside_a_longer_one_has_given_what_its_mode_says(
    mode: str, batches: int, length: float, expected: int
) -> None:
    assert batches_in_pass(mode, batches, length) == expected


# Following


class Strange(BatchSampler):
    """A batch sampler of the user's own, with an attribute."""

    def __init__(self, size: int) -> None:
        super().__init__(SequentialSampler(range(size)), 2, False)
        self.bucket = 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(list(super().__iter__()), len(self)))


def make(kind: str, **arguments: Any) -> DataLoader[Any]:
    """Return a loader over ten samples."""
    data: Any = list(range(10))
    if kind == "batch_sampler":
        return DataLoader(data, batch_sampler=Strange(10), **arguments)
    if kind == "sampler":
        return DataLoader(data, batch_size=None, sampler=RandomSampler(data), **arguments)
    if kind == "generator":
        return DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(4), **arguments)
    return DataLoader(data, 3, shuffle=kind == "shuffle", **arguments)


def read(loader: DataLoader[Any], stop: int | None = None) -> list[Any]:
    """Return the batches of an epoch, or its first ones."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in itertools.islice(loader, stop)]


KINDS = ["order", "shuffle", "generator", "batch_sampler", "sampler"]


def seed_all(seed: int) -> None:
    for seeds in (random.seed, numpy.random.seed, torch.manual_seed):
        seeds(seed)


def read_with_and_without_being_followed(kind: str, num_workers: int) -> None:
    results = []
    for follows in (False, True):
        seed_all(1)
        loader = make(kind, num_workers=num_workers)
        followed = FollowedLoader(loader, 1, nothing) if follows else None
        epochs = [read(loader), read(loader)]
        assert len(loader) == len(epochs[0])
        results.append((epochs, random.random(), numpy.random.rand(), float(torch.rand(()))))
        if followed is not None:
            followed.leave()
    assert results[0] == results[1]
    assert not isinstance(loader.batch_sampler, FollowedLoader)
    assert not isinstance(loader.sampler, FollowedLoader)


def read_on_where_another_was(kind: str, num_workers: int) -> None:
    seed_all(1)
    loader = make(kind, num_workers=num_workers)
    followed = FollowedLoader(loader, 1, nothing)
    read(loader)
    whole = read(loader)
    position = followed.position(2)
    seed_all(2)
    other = make(kind, num_workers=num_workers)
    again = FollowedLoader(other, 1, nothing, position)
    iterator = iter(other)
    state = random.getstate(), torch.get_rng_state()
    rest = [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in iterator]
    assert rest == whole[2:]
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert len(other) == len(whole)
    assert again.remaining(position) == len(whole) - 2
    assert len(read(other)) == len(whole)  # the next epoch is whole again


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_reads_the_same_when_it_is_followed(kind: str) -> None:
    read_with_and_without_being_followed(kind, num_workers=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_goes_on_where_another_was_and_leaves_random_states_alone(kind: str) -> None:
    read_on_where_another_was(kind, num_workers=0)


@pytest.mark.distributed
@in_a_rank
def test_with_a_worker_it_is_the_same() -> None:
    for kind in KINDS:
        read_with_and_without_being_followed(kind, num_workers=1)
        read_on_where_another_was(kind, num_workers=1)


def test_what_stands_in_for_a_batch_sampler_answers_as_it_does() -> None:
    loader = make("batch_sampler")
    own: Any = loader.batch_sampler
    followed: Any = FollowedLoader(loader, 1, nothing)
    assert loader.batch_sampler is followed
    assert isinstance(followed, BatchSampler)
    assert followed.sampler is own.sampler
    followed.bucket = 5
    assert own.bucket == 5
    with pytest.raises(AttributeError, match="bucketx"):
        _ = followed.bucketx


def test_a_request_is_told_before_each_batch_without_workers() -> None:
    told: list[int] = []
    loader = make("order")
    FollowedLoader(loader, 1, lambda: told.append(len(told)))
    assert told == []
    for number, _ in enumerate(loader):
        assert len(told) == number + 1


# States as plain values


def test_a_moment_is_plain_values_and_comes_back(tmp_path: Any) -> None:
    seed_all(3)
    random.gauss(0, 1)
    numpy.random.standard_normal()  # both keep a second number for later
    moment = Moment(take_common(), (torch.Generator().manual_seed(5).get_state(),))
    torch.save(moment.to_plain(), tmp_path / "moment.pt")
    drawn = [random.gauss(0, 1), numpy.random.standard_normal(), float(torch.rand(()))]
    seed_all(4)
    loaded = Moment.from_plain(torch.load(tmp_path / "moment.pt", weights_only=True))
    put_common(loaded.common)
    assert [random.gauss(0, 1), numpy.random.standard_normal(), float(torch.rand(()))] == drawn
    assert torch.equal(loaded.own[0], moment.own[0])
    assert from_plain(to_plain(loaded.common)).python == moment.common.python


def place(data: int, tensor: int, tensor_size: int, data_size: int = 2) -> dict[str, int]:
    """Return the coordinates of a rank, and the sizes of its axes."""
    ranks = {"data_parallel_rank": data, "tensor_model_parallel_rank": tensor}
    sizes = {"data": data_size, "tensor_model": tensor_size, "context": 1}
    return {**ranks, **{f"{axis}_parallel_size": size for axis, size in sizes.items()}}


def test_a_rank_takes_its_own_state_or_that_of_a_rank_which_read_the_same_data() -> None:
    saved = place(0, 0, tensor_size=2)  # ranks 0 and 1 read the same data, and 2 and 3
    assert pick(saved, place(1, 1, tensor_size=2), rank=3) == (3, True)
    assert pick(saved, place(1, 0, tensor_size=1), rank=1) == (2, False)
    assert pick(saved, place(1, 3, tensor_size=4), rank=7) == (2, False)
    assert pick(saved, place(2, 0, tensor_size=2, data_size=4), rank=4) == (0, False)
