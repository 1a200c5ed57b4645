# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed while a checkpoint is saved costs no more than the steps since the last one."""

from collections import Counter
from pathlib import Path

from tests.torture import LAYOUTS, PHASES, torture

KILLS = 20  # python -m benchmarks.checkpoint_torture takes more


def test_killed_ranks_lose_nothing_that_was_whole(tmp_path: Path) -> None:
    phases: Counter[str] = Counter()
    for layout in range(len(LAYOUTS)):
        tally = torture(tmp_path / str(layout), KILLS // len(LAYOUTS), seed=layout, first_layout=layout)
        assert tally.kills == KILLS // len(LAYOUTS)
        phases += tally.phases
    print(dict(phases))
    assert set(phases) == set(PHASES)  # none was missed
