# SPDX-License-Identifier: Apache-2.0
"""The zigzag cut of context parallelism: which tokens a rank holds, and that nothing is lost on the way back."""

import pytest
import torch

from lightning_mcore.parallel.context import slices_of_rank, split_for_context_parallel, unsplit_from_context_parallel
from tests.support.sentences import refuses


def test_a_rank_holds_an_early_slice_and_its_late_counterpart() -> None:
    tokens = torch.arange(16)[None]

    shares = [split_for_context_parallel(tokens, rank, 4).flatten().tolist() for rank in range(4)]

    assert shares == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shares_of_all_ranks_make_the_sequence_again(size: int, dim: int) -> None:
    sequence = torch.randn(24, 24)

    shares = [split_for_context_parallel(sequence, rank, size, dim) for rank in range(size)]

    assert {share.size(dim) for share in shares} == {24 // size}
    assert torch.equal(unsplit_from_context_parallel(shares, dim), sequence)


def test_every_rank_has_the_same_causal_work() -> None:
    for size in (2, 4, 8):
        positions = torch.arange(1, 16 * size + 1)[None]
        work = {int(split_for_context_parallel(positions, rank, size).sum()) for rank in range(size)}
        assert len(work) == 1


def test_slices_of_all_ranks_are_all_slices() -> None:
    assert sorted(index for rank in range(5) for index in slices_of_rank(rank, 5)) == list(range(10))


def test_gradients_return_to_the_share_they_came_from() -> None:
    shares = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    weights = torch.arange(8.0).expand(2, 8)

    (unsplit_from_context_parallel(shares) * weights).sum().backward()

    for rank, share in enumerate(shares):
        assert torch.equal(share.grad, split_for_context_parallel(weights, rank, 2))


def test_a_share_owns_its_memory() -> None:
    sequence = torch.zeros(1, 8)

    split_for_context_parallel(sequence, 0, 2).fill_(1)

    assert sequence.sum() == 0


@pytest.mark.parametrize(("length", "size"), [(30, 4), (6, 2), (1, 2)])
def test_a_sequence_that_does_not_divide_is_refused_with_the_length_that_does(length: int, size: int) -> None:
    with refuses(ValueError, f"context_parallel_size={2 * size}"):
        split_for_context_parallel(torch.zeros(2, length), 0, size)


def test_a_rank_outside_the_group_is_refused() -> None:
    with refuses(ValueError, "rank=2"):
        split_for_context_parallel(torch.zeros(1, 8), 2, 2)


def test_shares_that_cannot_be_joined_are_refused() -> None:
    with refuses(ValueError, "no shares"):
        unsplit_from_context_parallel([])
    with refuses(ValueError, "rank 1 has 3 tokens"):
        unsplit_from_context_parallel([torch.zeros(1, 4), torch.zeros(1, 3)])
