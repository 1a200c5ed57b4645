# SPDX-License-Identifier: Apache-2.0
"""Whatever ends one rank ends the run on all, soon and with its cause; ``python -m tests.faults`` has all of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import DONE, LAUNCHER, table
from tests.faults import short_table as scenarios

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was wrong in each scenario; in a process of its own, which has started no thread before it forks ranks."""
    path = tmp_path_factory.mktemp("faults") / "report.json"
    command = [sys.executable, "-m", "tests.faults", "--short", "--report", str(path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], timeout=900, capture_output=True, check=False)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", [scenario.name for scenario in scenarios()])
def test_all_ranks_end_as_they_should(report: dict[str, Any], name: str) -> None:
    assert not report[name], "\n".join(report[name])


def test_the_long_table_has_faults_of_all_kinds_through_both_doors() -> None:
    faults = [scenario for scenario in table() if scenario.expected != DONE]
    assert len(faults) >= 60
    assert len({scenario.name for scenario in table()}) == len(table())
    assert {scenario.plan.rank for scenario in faults if scenario.door == LAUNCHER} == {0, 1}
