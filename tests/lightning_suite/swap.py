# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for Lightning's test suite: gives the Trainers of CPU processes another strategy.

Load it with ``-p tests.lightning_suite.swap``. ``--swap-strategy`` says which strategy, ``--swap-ranks`` on how many
ranks each test runs, ``--swap-report`` where the outcome of each test goes: one line of JSON as soon as the test starts
and one when it has ended, so that a run that crashed or was killed still says how far it came, and in which test.
"""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator

import lightning_mcore  # noqa: F401 - registers the strategy "mcore"
from tests.lightning_suite.two_ranks import NUM_RANKS, TwoRanks

STRATEGIES = ("plain", "ddp", "mcore")
REPLACED = ("auto", "ddp", "ddp_spawn")
STARTED = "started"


def runs_on_cpu(arguments: dict[str, Any], ranks: int = 1) -> bool:
    """Return whether a Trainer with these arguments runs on the CPU, and its strategy may be switched.

    Args:
        arguments: The keyword arguments of ``Trainer(...)``.
        ranks: How many devices it may ask for at most.
    """
    accelerator = arguments.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or isinstance(accelerator, CPUAccelerator)
    if accelerator == "auto":
        on_cpu = not CUDAAccelerator.is_available() and not MPSAccelerator.is_available()
    return (
        on_cpu
        and arguments.get("strategy", "auto") in REPLACED
        and arguments.get("devices", "auto") in ("auto", *range(1, ranks + 1), *map(str, range(1, ranks + 1)))
        and arguments.get("num_nodes", 1) == 1
    )


class Swap:
    """Switches the strategy of Trainers and writes down what became of each test.

    Args:
        strategy: One of :data:`STRATEGIES`.
        report: Where the outcomes are appended; None for nowhere.
        ranks: How many devices a switched Trainer gets.
    """

    def __init__(self, strategy: str, report: Path | None, ranks: int = 1) -> None:
        self.strategy = strategy
        self.ranks = ranks
        self.report = report
        self.num_switched = 0
        self._original: Callable[..., None] = pl.Trainer.__init__
        self._wait: tuple[Any, ...] | None = _ChildProcessObserver.__init__.__defaults__
        self._switched_before = 0
        self._began = 0.0
        self._reports: list[pytest.TestReport] = []

    def install(self) -> None:
        """Wrap ``Trainer.__init__``; its signature stays visible, for LightningCLI reads it."""
        # Under ddp each Trainer of one process would wait five seconds for child processes that it does not have.
        _ChildProcessObserver.__init__.__defaults__ = (0.05,)
        original = self._original
        if self.strategy == "plain":
            return

        @functools.wraps(original)
        def init(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if runs_on_cpu(kwargs, self.ranks):
                kwargs["strategy"] = self.strategy
                if self.ranks > 1:
                    kwargs["devices"] = self.ranks
                self.num_switched += 1
            original(trainer, *args, **kwargs)

        pl.Trainer.__init__ = init  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put everything back."""
        _ChildProcessObserver.__init__.__defaults__ = self._wait
        pl.Trainer.__init__ = self._original  # type: ignore[method-assign]

    def add_switched(self, number: int) -> None:
        """Count Trainers that other processes have switched."""
        self.num_switched += number

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began, self._switched_before, self._reports = time.monotonic(), self.num_switched, []
        self._write(nodeid, STARTED, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # of pytest-rerunfailures: the last try counts
            self._reports = []
        else:
            self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, why = outcome_of(self._reports)
        self._write(nodeid, outcome, why)

    def _write(self, nodeid: str, outcome: str, why: str) -> None:
        if self.report is None:
            return
        line = {
            "test": nodeid.rpartition("tests_pytorch/")[2],
            "outcome": outcome,
            "why": why,
            "switched": self.num_switched - self._switched_before,
            "seconds": round(time.monotonic() - self._began, 2),
        }
        with self.report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def outcome_of(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """Return the outcome of a test from the reports of its phases (setup, call, teardown), and the last line of why."""
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines() or [""]
            return "failed", f"{report.when}: {lines[0][:300]}"
    for report in reports:
        if report.skipped:
            return "skipped", str(report.longrepr)[-200:]
    return "passed", ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("swap", "Lightning's suite with another strategy")
    group.addoption("--swap-strategy", choices=STRATEGIES, default="plain", help="what the Trainers get")
    group.addoption("--swap-ranks", type=int, choices=(1, NUM_RANKS), default=1, help="on how many ranks tests run")
    group.addoption("--swap-report", type=Path, default=None, help="file that the outcomes are appended to")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to switch."""
    ranks = config.getoption("--swap-ranks")
    swap = Swap(config.getoption("--swap-strategy"), config.getoption("--swap-report"), ranks)
    swap.install()
    config.add_cleanup(swap.remove)
    config.pluginmanager.register(swap, "swap-strategy")
    if ranks > 1:
        config.pluginmanager.register(TwoRanks(lambda: swap.num_switched, swap.add_switched), "two-ranks")
