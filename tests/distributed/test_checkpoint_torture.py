# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed while a checkpoint is saved costs no more than the steps since the last one."""

from collections import Counter
from pathlib import Path

import pytest

from tests.torture import KINDS, PHASES, torture


@pytest.mark.parametrize(  # the kills of each kind; python -m benchmarks.checkpoint_torture takes more
    "kills", [(8, 0, 0, 0, 4, 0), pytest.param((8, 0, 0, 8, 4, 0), marks=pytest.mark.thorough)], ids=sum
)
def test_killed_ranks_lose_nothing_that_was_whole(kills: tuple[int, ...], tmp_path: Path) -> None:
    phases: Counter[str] = Counter()
    # On a busy machine, kills that are aimed at a phase may miss it: then more of them, of the first kind.
    more = [(KINDS[0], 4)] * 4
    for number, (kind, wanted) in enumerate([*zip(KINDS, kills, strict=True), *more]):
        if wanted and (number < len(KINDS) or set(phases) != set(PHASES)):
            tally = torture(tmp_path / str(number), wanted, number, kind)
            assert tally.kills == wanted
            phases += tally.phases
    print(dict(phases))
    assert set(phases) == set(PHASES)  # none was missed
