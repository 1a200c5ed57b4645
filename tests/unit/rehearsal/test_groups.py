# SPDX-License-Identifier: Apache-2.0
"""A rehearsal's groups of ranks are Megatron's, and those of a large world are made quickly."""

import itertools
import time

import pytest
from megatron.core import parallel_state

from lightning_mcore.rehearsal.device import rank_groups


@pytest.mark.parametrize("sizes", [[2, 1, 3, 4], [1, 1, 1], [4, 2], [3, 2, 1, 5, 2]], ids=str)
def test_groups_are_those_of_megatron(sizes: list[int]) -> None:
    world = 1
    for size in sizes:
        world *= size
    for mask in itertools.product([False, True], repeat=len(sizes)):
        theirs = parallel_state.generate_masked_orthogonal_rank_groups(world, sizes, list(mask))
        assert rank_groups(world, sizes, list(mask)) == theirs, mask


def test_groups_of_16384_ranks_take_milliseconds() -> None:
    begun = time.process_time()
    groups = rank_groups(16_384, [8, 1, 1, 128, 16], [False, False, False, False, True])
    assert len(groups) == 1024
    assert groups[1] == list(range(1, 16_384, 1024))
    assert time.process_time() - begun < 0.1
