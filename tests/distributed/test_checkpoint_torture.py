# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed while a checkpoint is saved costs no more than the steps since the last one."""

from pathlib import Path

import pytest

from tests.torture import LAYOUTS, torture

KILLS = 20  # python -m benchmarks.checkpoint_torture takes more


@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=["pp2", "dp2-do"])
def test_killed_ranks_lose_nothing_that_was_whole(layout: int, tmp_path: Path) -> None:
    tally = torture(tmp_path, KILLS // len(LAYOUTS), seed=layout, first_layout=layout)
    print(tally)
    assert tally.kills == KILLS // len(LAYOUTS)
    assert tally.phases["before"] + tally.phases["within"] + tally.phases["after"] == tally.kills
