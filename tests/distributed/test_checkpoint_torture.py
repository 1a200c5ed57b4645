# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed while a checkpoint is saved costs no more than the steps since the last one."""

from pathlib import Path

import pytest

from tests.torture import KINDS, PHASES, torture


@pytest.mark.parametrize(  # python -m benchmarks.checkpoint_torture takes more of each kind
    ("kind", "kills"), [(0, 8), (4, 4), pytest.param(3, 8, marks=pytest.mark.thorough)]
)
def test_killed_ranks_lose_nothing_that_was_whole(kind: int, kills: int, tmp_path: Path) -> None:
    tally = torture(tmp_path, kills, kind, KINDS[kind])
    assert tally.kills == kills
    print(dict(tally.phases))
    assert set(tally.phases) == set(PHASES)  # none was missed
