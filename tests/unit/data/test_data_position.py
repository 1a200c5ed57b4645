# SPDX-License-Identifier: Apache-2.0
"""The place in an epoch's data: followed without changing what is read, taken up again without reading it twice."""

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_mcore.data.global_order import deal, global_order, rank_share
from lightning_mcore.data.loop_progress import batches_in_pass
from lightning_mcore.data.position import LoaderRandomState, Position, PositionTracker, TrackedSampler
from lightning_mcore.data.sampling import GlobalOrderSampler
from lightning_mcore.parallel.random_state import pick, put_common, take_common
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
        assert list(deal(order, 0, ranks, sampler.rank, drop_last)) == list(sampler)
        assert rank_share(size, 0, ranks, drop_last) == len(sampler)


@pytest.mark.parametrize(("consumed", "ranks"), [(0, 3), (4, 1), (4, 2), (5, 4), (11, 4), (12, 4), (13, 2), (20, 2)])
def test_what_is_left_is_dealt_once(consumed: int, ranks: int) -> None:
    order = [3 * index % 13 for index in range(13)]
    parts = [list(deal(order, consumed, ranks, rank, False)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {rank_share(13, consumed, ranks, False)}
    together = [index for turn in zip(*parts, strict=True) for index in turn]
    left = order[consumed:]
    assert together[: len(left)] == left
    assert together[len(left) :] == order[: len(together) - len(left)]
    assert len(together) - len(left) < ranks


def test_the_rest_of_billions_of_samples_is_dealt_without_a_list_of_them() -> None:
    samples: Any = range(3 * 10**9)
    sampler = GlobalOrderSampler(samples, 4, 1, 8, shuffle=False, seed=3)
    loader = DataLoader(samples, 2, sampler=sampler, drop_last=True)
    position = Position(batches=2**28, ranks=2, batch_size=4, seed=3)
    tracker = PositionTracker(loader, 4, nothing, position)
    assert list(itertools.islice(tracker.open_pass(), 2)) == [[2**31 + 1, 2**31 + 5], [2**31 + 9, 2**31 + 13]]
    assert tracker.current_position(2**28 + 2).consumed == 2**31 + 2 * 8


@pytest.mark.parametrize(
    ("mode", "batches", "length", "expected"),
    [
        ("min_size", 3, 5, 3),
        ("max_size", 7, 5, 5),
        ("max_size_cycle", 5, 5, 5),
        ("max_size_cycle", 6, 5, 1),
        ("max_size_cycle", 10, 5, 5),
        ("max_size_cycle", 7, None, 7),
    ],
)
def test_a_loader_beside_a_longer_one_has_given_what_its_mode_says(
    mode: str, batches: int, length: int | None, expected: int
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
        tracker = PositionTracker(loader, 1, nothing) if follows else None
        epochs = [read(loader), read(loader)]
        assert len(loader) == len(epochs[0])
        results.append((epochs, random.random(), numpy.random.rand(), float(torch.rand(()))))
        if tracker is not None:
            tracker.detach()
    assert results[0] == results[1]
    assert not isinstance(loader.batch_sampler, TrackedSampler)
    assert not isinstance(loader.sampler, TrackedSampler)


def read_on_where_another_was(kind: str, num_workers: int) -> None:
    seed_all(1)
    loader = make(kind, num_workers=num_workers)
    tracker = PositionTracker(loader, 1, nothing)
    read(loader)
    whole = read(loader)
    position = tracker.current_position(2)
    following = read(loader)
    seed_all(2)
    other = make(kind, num_workers=num_workers)
    again = PositionTracker(other, 1, nothing, position)
    iterator = iter(other)
    state = random.getstate(), torch.get_rng_state()
    rest = [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in iterator]
    assert rest == whole[2:]
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert len(other) == len(whole)
    assert again.remaining(position) == len(whole) - 2
    next_epoch = read(other)  # is whole again
    assert len(next_epoch) == len(whole)
    assert kind != "generator" or next_epoch == following  # the permutation has moved the loader's own generator on


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
    PositionTracker(loader, 1, nothing)
    tracked: Any = loader.batch_sampler
    assert isinstance(tracked, BatchSampler)
    assert tracked.sampler is own.sampler
    tracked.bucket = 5
    assert own.bucket == 5
    with pytest.raises(AttributeError, match="bucketx"):
        _ = tracked.bucketx
    assert copy.copy(tracked).sampler is own.sampler


def test_a_request_is_told_before_each_batch_without_workers() -> None:
    told: list[int] = []
    loader = make("order")
    PositionTracker(loader, 1, lambda: told.append(len(told)))
    assert told == []
    for number, _ in enumerate(loader):
        assert len(told) == number + 1


# Another number of ranks


def read_all(ranks: int, batch_size: int, position: Position | None, batches: int | None) -> tuple[list[int], Position]:
    """Return what all ranks read together of 45 shuffled samples, and the position after that."""
    loaders: list[DataLoader[Any]] = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(45), ranks, rank, seed=7)  # type: ignore[arg-type]
        loaders.append(DataLoader(list(range(45)), batch_size, sampler=sampler))  # type: ignore[arg-type]
    trackers = [PositionTracker(loader, ranks, nothing, position) for loader in loaders]
    counted = len(loaders[0]) - trackers[0].remaining(position) if position is not None else 0
    read_by = [read(loader, batches) for loader in loaders]
    turns = (turn for batch in zip(*read_by, strict=True) for turn in zip(*batch, strict=True))
    return [index for turn in turns for index in turn], trackers[0].current_position(counted + len(read_by[0]))


@pytest.mark.parametrize(("ranks", "batch_size"), [(4, 2), (2, 2), (1, 3), (3, 5)])
def test_a_run_that_was_interrupted_twice_reads_each_sample_once(ranks: int, batch_size: int) -> None:
    order = torch.randperm(45, generator=torch.Generator().manual_seed(7)).tolist()
    first, position = read_all(2, 2, None, 3)
    second, position = read_all(4, 2, position, 1)
    assert (position.batches, position.offset, position.consumed) == (2, 4, 20)
    third, _ = read_all(ranks, batch_size, position, None)
    assert [*first, *second, *third][:45] == order


def test_a_position_is_kept_until_something_is_read_behind_it() -> None:
    loader = make("shuffle")
    tracker = PositionTracker(loader, 1, nothing)
    read(loader, 2)
    position = tracker.current_position(2)
    other = make("shuffle")
    again = PositionTracker(other, 4, nothing, position)
    for kept in (again.current_position(1), iter(other) and again.current_position(1)):
        assert (kept.batches, kept.ranks, kept.started) == (2, 1, position.started)


def test_a_position_that_is_asked_for_after_the_run_has_the_seed_of_the_pass() -> None:
    sampler = DistributedSampler(range(8), 1, 0, seed=99)  # type: ignore[arg-type]
    loader: DataLoader[Any] = DataLoader(range(8), 2, sampler=sampler)  # type: ignore[arg-type]
    tracker = PositionTracker(loader, 1, nothing, Position(1, 1, 2, seed=7))
    next(iter(loader))
    tracker.detach()
    assert (sampler.seed, tracker.current_position(2).seed) == (99, 7)


def test_a_loader_with_other_generators_is_told_to_the_user() -> None:
    loader = make("generator")
    tracker = PositionTracker(loader, 1, nothing)
    read(loader, 2)
    other = make("shuffle")
    PositionTracker(other, 1, nothing, tracker.current_position(2))
    with pytest.warns(UserWarning, match="has 0 random generators of its own, but had 1 in the run that saved"):
        read(other)


# States as plain values


def test_a_position_is_plain_values_and_comes_back(tmp_path: Any) -> None:
    seed_all(3)
    random.gauss(0, 1)
    numpy.random.standard_normal()  # both keep a second number for later
    own = torch.Generator().manual_seed(5).get_state()
    position = Position(3, 2, None, started=LoaderRandomState(take_common(), (own,)), seed=7, own=(own,), offset=-1)
    torch.save(position.to_plain(), tmp_path / "position.pt")
    drawn = [random.gauss(0, 1), numpy.random.standard_normal(), float(torch.rand(()))]
    seed_all(4)
    plain = torch.load(tmp_path / "position.pt", weights_only=True)
    loaded = Position.from_plain(plain)
    assert loaded.started is not None
    put_common(loaded.started.common)
    assert [random.gauss(0, 1), numpy.random.standard_normal(), float(torch.rand(()))] == drawn
    assert torch.equal(loaded.started.own[0], own)
    assert torch.equal(loaded.own[0], own)
    assert replace(loaded, started=None, own=()) == Position(3, 2, None, seed=7, offset=-1)
    del plain["offset"]  # as older checkpoints have it
    assert Position.from_plain(plain).offset == 0


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
