# SPDX-License-Identifier: Apache-2.0
"""A rehearsal's groups of ranks are Megatron's."""

import itertools

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
