# SPDX-License-Identifier: Apache-2.0
"""A suite that was not collected cannot pass.

``MIN_TESTS=n`` makes a run of fewer than n tests a failure: a folder that lost its ``__init__.py``, a marker expression
that selects nothing, a table of layouts that came out empty. The Makefile sets it; a run by hand does not.
"""

import os

import pytest

_OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of fewer tests than ``MIN_TESTS``; under xdist only the controller sees them all."""
    least = int(os.environ.get("MIN_TESTS", "0"))
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    reports = (report for outcome in _OUTCOMES for report in reporter.stats.get(outcome, []))
    ran = len({report.nodeid for report in reports})
    if ran < least:
        reporter.write_line(f"\nMIN_TESTS={least}, but only {ran} tests ran: part of the suite was not found", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
