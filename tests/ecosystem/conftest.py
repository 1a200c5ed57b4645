# SPDX-License-Identifier: Apache-2.0
"""Collects the tests of this folder only for ``make test-ecosystem``, which installs the packages that they need.

Each test is marked with the package that it runs and what it shows. The page ``docs/guides/works-with.md`` is made from
the marks of the tests that passed, and ``WRITE_WORKS_WITH=1`` writes it. If a test was skipped, its row stays as it is.
"""

import importlib.metadata
import os
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "works-with.md"
START, END = "<!-- table: written by make test-ecosystem -->", "<!-- end of table -->"

if "TEST_ECOSYSTEM" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

_outcomes: dict[tuple[str, str], set[str]] = {}
_elsewhere: dict[str, str] = {}  # versions of packages in environments of their own


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "works_with(package, shows): a row of the page on packages that were run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pass each test's mark on to its report, which may be made in another process."""
    for item in items:
        item.user_properties.extend(("works_with", mark.args) for mark in item.iter_markers("works_with"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of the tests of a row."""
    for name, value in report.user_properties:
        if name == "works_with":
            _outcomes.setdefault((value[0], value[1]), set()).add(report.outcome)
            _elsewhere.update((value[0], version) for key, version in report.user_properties if key == "version")


def _version(package: str) -> str:
    """Return the version of an installed package, or the commit of a repository, ``owner/name@commit``."""
    return package.partition("@")[2] or _elsewhere.get(package) or importlib.metadata.version(package)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, once all tests have been run."""
    if "WRITE_WORKS_WITH" not in os.environ or hasattr(session.config, "workerinput"):
        return
    before, _, rest = PAGE.read_text().partition(START)
    earlier, _, after = rest.partition(END)
    rows = []
    for (package, shows), outcomes in sorted(_outcomes.items(), key=lambda row: (row[0][0].lower(), row[0][1])):
        start, end = f"| {package.partition('@')[0]} | ", f" | {shows} |"
        if outcomes == {"passed"}:
            rows.append(f"{start}{_version(package)}{end}")
        elif "failed" not in outcomes:
            rows += [line for line in earlier.splitlines() if line.startswith(start) and line.endswith(end)]
    table = "\n".join(["| Package | Version | What was run |", "|---|---|---|", *rows])
    PAGE.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}")
