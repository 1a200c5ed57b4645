# SPDX-License-Identifier: Apache-2.0
"""Compares what became of Lightning's tests under ddp and under our strategy."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DIFFERS = Path(__file__).with_name("differs.toml")


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Args:
        outcome: ``passed``, ``failed``, ``skipped``, or ``started`` where the test never ended.
        why: The phase and the first line of the error; empty for a test that passed.
        switched: How many of its Trainers got the strategy.
    """

    outcome: str
    why: str
    switched: int


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with ours with a run with ddp.

    Args:
        worse: Tests that pass with ddp and not with ours, and are not in ``differs.toml``.
        known: Those that are, with the reason.
        better: Tests that pass with ours and not with ddp.
        stale: Tests of ``differs.toml`` that pass with ours: the entry can go.
    """

    worse: list[str]
    known: dict[str, str]
    better: list[str]
    stale: list[str]


def read_outcomes(files: Iterable[Path]) -> dict[str, Outcome]:
    """Read what ``swap.py`` wrote; the last line about a test counts."""
    outcomes = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            outcomes[record["test"]] = Outcome(record["outcome"], record["why"], record["switched"])
    return outcomes


def read_differences(file: Path = DIFFERS) -> dict[str, str]:
    """Read the tests that differ by nature, with the reason of each.

    Raises:
        ValueError: A test is listed twice, or has no reason.
    """
    differences: dict[str, str] = {}
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("differs", []):
        for test in entry["tests"]:
            if test in differences or not entry["reason"].strip():
                raise ValueError(f"{file.name}: {test} must stand there once and have a reason")
            differences[test] = entry["reason"]
    return differences


def on_ranks(differences: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Name the tests as a run on this many ranks reports them. An entry may name a rank: ``test on rank 1``."""
    if ranks == 1:
        return {test: reason for test, reason in differences.items() if " on rank " not in test}
    return {
        name: reason
        for test, reason in differences.items()
        for name in ([test] if " on rank " in test else [f"{test} on rank {rank}" for rank in range(ranks)])
    }


def compare(ddp: Mapping[str, Outcome], mcore: Mapping[str, Outcome], differences: Mapping[str, str]) -> Verdict:
    """Compare two runs of the same tests; one that did not end, or did not run with ours, counts as failed."""
    passed = {test for test, outcome in mcore.items() if outcome.outcome == "passed"}
    passed_with_ddp = {test for test, outcome in ddp.items() if outcome.outcome == "passed"}
    lost = sorted(passed_with_ddp - passed)
    return Verdict(
        worse=[test for test in lost if test not in differences],
        known={test: differences[test] for test in lost if test in differences},
        better=sorted(passed - passed_with_ddp),
        stale=sorted(passed & differences.keys()),
    )


def count(outcomes: Mapping[str, Outcome]) -> Counter[str]:
    """Count outcomes; a test that never ended has failed."""
    return Counter("failed" if outcome.outcome == "started" else outcome.outcome for outcome in outcomes.values())
