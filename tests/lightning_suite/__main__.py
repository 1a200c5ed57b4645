# SPDX-License-Identifier: Apache-2.0
"""Runs Lightning's own tests as they are, with ddp and with our strategy, and compares.

    python -m tests.lightning_suite --source PATH_TO_A_CHECKOUT_OF_LIGHTNING
    python -m tests.lightning_suite --source ... --set 1 --strategies ddp mcore
    python -m tests.lightning_suite --source ... --only loops callbacks --resume
    python -m tests.lightning_suite --source ... --strategies ddp mcore --ranks 2

A folder at a time; 10 to 15 minutes for each strategy on a quiet machine, twice as long on two ranks. Exit status 1 if
a test that passes with ddp fails with ours and is not in ``differs.toml``, 2 if a folder did not run to its end.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.lightning_suite.swap import STRATEGIES
from tests.lightning_suite.two_ranks import NUM_RANKS
from tests.lightning_suite.verdict import Outcome, Verdict, compare, count, on_ranks, read_differences, read_outcomes

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 120  # of one test

# Folders and files of tests/tests_pytorch, in two sets. Not in them: accelerators and strategies, which are about the
# choice of a strategy; legacy checkpoints, which are downloads; ONNX and serving; GPUs and TPUs.
SETS: dict[str, dict[str, list[str]]] = {
    "1": {
        "flags": ["trainer/flags"],
        "hooks": ["models/test_hooks.py"],
        "optimization": ["trainer/optimization"],
        "logging": ["trainer/logging_"],
        "restore": ["models/test_restore.py"],
        "loops": ["loops"],
        "checkpointing": ["checkpointing", "--ignore=checkpointing/test_legacy_checkpoints.py"],
        "callbacks": ["callbacks"],
        "loggers": ["loggers"],
    },
    "2": {
        "trainer": ["trainer/test_trainer.py"],
        "connectors": ["trainer/connectors", "--ignore=trainer/connectors/test_accelerator_connector.py"],
        "dataloaders": ["trainer/test_dataloaders.py"],
        "core": ["core"],
        "hparams": ["models/test_hparams.py"],
        "cli": ["test_cli.py"],
        "properties": [
            "trainer/test_states.py",
            "trainer/test_config_validator.py",
            "trainer/test_ddp_sigterm_handling.py",
            "trainer/dynamic_args",
            "trainer/properties",
        ],
        "models": [
            "models/test_cpu.py",
            "models/test_amp.py",
            "models/test_torchscript.py",
            "models/test_fabric_integration.py",
            "models/test_ddp_fork_amp.py",
        ],
        "tuner": ["tuner"],
        "profilers": ["profilers"],
        "plugins": ["plugins", "overrides", "demos", "deprecated_api"],
        "utilities": ["utilities", "--ignore=utilities/migration"],
    },
}

console = Console()


def command(strategy: str, ranks: int, paths: Sequence[str], report: Path) -> list[str]:
    """Return the pytest command that runs one folder, from ``tests`` of the checkout."""
    folder = "tests_pytorch/"
    chosen = [
        f"--ignore={folder}{path.removeprefix('--ignore=')}" if path.startswith("--ignore=") else folder + path
        for path in paths
    ]
    plugins = ["-p", "tests.lightning_suite.swap", "-p", "no:cacheprovider", "-p", "no:xdist"]
    swap = ["--swap-strategy", strategy, "--swap-ranks", str(ranks), "--swap-report", str(report)]
    timeout = ["--timeout", str(TIMEOUT_SECONDS), "--timeout-method", "signal"]
    return [sys.executable, "-m", "pytest", *plugins, *swap, *timeout, "-q", "--color=no", "--tb=native", *chosen]


def run(source: Path, strategy: str, ranks: int, paths: Sequence[str], report: Path) -> bool:
    """Run one folder with one strategy.

    Returns:
        Whether pytest came to the end of it.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if ranks > 1:
        environment["PL_RUN_STANDALONE_TESTS"] = "1"  # collect those that need processes of their own
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(source / "tests")])
    report.unlink(missing_ok=True)
    log = report.with_suffix(".log")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        status = subprocess.run(
            command(strategy, ranks, paths, report),
            cwd=source / "tests",
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    numbers = count(read_outcomes([report])) if report.exists() else {}
    shown = ", ".join(f"{number} {outcome}" for outcome, number in sorted(numbers.items())) or "no tests"
    console.print(f"{strategy:6} {report.stem.partition('.')[0]:14} {shown}, {time.monotonic() - began:.0f} s")
    if status in (0, 1):
        report.with_suffix(".done").touch()
        return True
    console.print(f"[red]pytest ended with {status}; its output is in {log}")
    return False


def show(outcomes: dict[str, dict[str, Outcome]]) -> None:
    """Print how many tests passed, failed and skipped with each strategy, and how many Trainers were switched."""
    table = Table("strategy", "passed", "failed", "skipped", "Trainers switched")
    for strategy, tests in outcomes.items():
        numbers = count(tests)
        switched = sum(outcome.switched for outcome in tests.values())
        table.add_row(strategy, *(str(numbers[name]) for name in ("passed", "failed", "skipped")), str(switched))
    console.print(table)


def explain(verdict: Verdict, mcore: dict[str, Outcome]) -> None:
    """Print the tests that differ between ddp and ours."""
    for test, reason in verdict.known.items():
        console.print(f"known to differ: {test}: {reason}", markup=False, soft_wrap=True)
    for test in verdict.stale:
        console.print(f"passes now, take it out of differs.toml: {test}", markup=False, soft_wrap=True)
    for test in verdict.worse:
        why = mcore[test].why if test in mcore else "did not run"
        console.print(f"passes with ddp, not with mcore: {test}: {why}", style="red", markup=False, soft_wrap=True)
    console.print(
        f"{len(verdict.worse)} tests pass with ddp and fail with mcore, {len(verdict.known)} more for a known reason;"
        f" {len(verdict.better)} pass with mcore and not with ddp",
        soft_wrap=True,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m tests.lightning_suite", description="Lightning's tests, three times")
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Lightning, of the installed version")
    parser.add_argument("--set", choices=[*SETS, "all"], default="all", help="which of the two sets of folders")
    parser.add_argument("--only", nargs="+", metavar="FOLDER", help="some of the names that the progress shows")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--ranks", type=int, choices=(1, NUM_RANKS), default=1, help="on how many ranks each test runs")
    parser.add_argument("--output", type=Path, default=Path("outputs/lightning_suite"), help="where outcomes are kept")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes of folders that have run to their end")
    given = parser.parse_args(arguments)
    if not (given.source / "tests" / "tests_pytorch").is_dir():
        parser.error(f"--source={given.source} has no tests/tests_pytorch; give a checkout of the Lightning repository")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        The exit status.
    """
    given = parse(arguments)
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    folders = {name: paths for key in SETS if given.set in (key, "all") for name, paths in SETS[key].items()}
    chosen = {name: paths for name, paths in folders.items() if not given.only or name in given.only}
    complete = True
    outcomes = {}
    for strategy in given.strategies:
        ranks = "" if given.ranks == 1 else f".ranks{given.ranks}"
        reports = {name: output / f"{name}.{strategy}{ranks}.jsonl" for name in chosen}
        for name, report in reports.items():
            if not (given.resume and report.with_suffix(".done").exists()):
                complete &= run(given.source.resolve(), strategy, given.ranks, chosen[name], report)
        outcomes[strategy] = read_outcomes(report for report in reports.values() if report.exists())
    show(outcomes)
    if not {"ddp", "mcore"} <= outcomes.keys():
        return 0 if complete else 2
    verdict = compare(outcomes["ddp"], outcomes["mcore"], on_ranks(read_differences(), given.ranks))
    explain(verdict, outcomes["mcore"])
    return 1 if verdict.worse else 0 if complete else 2


if __name__ == "__main__":
    sys.exit(main())
