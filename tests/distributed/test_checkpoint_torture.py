# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed while a checkpoint is saved costs no more than the steps since the last one."""

from collections import Counter
from pathlib import Path

from tests.torture import KINDS, PHASES, torture

KILLS = [8, 0, 0, 8, 4, 0]  # of each kind; python -m benchmarks.checkpoint_torture takes more


def test_killed_ranks_lose_nothing_that_was_whole(tmp_path: Path) -> None:
    phases: Counter[str] = Counter()
    for number, (kind, kills) in enumerate(zip(KINDS, KILLS, strict=True)):
        if kills:
            tally = torture(tmp_path / str(number), kills, number, kind)
            assert tally.kills == kills
            phases += tally.phases
    print(dict(phases))
    assert set(phases) == set(PHASES)  # none was missed
