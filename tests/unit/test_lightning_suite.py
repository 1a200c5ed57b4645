# SPDX-License-Identifier: Apache-2.0
"""What runs Lightning's own tests with our strategy: it does switch, and a difference is not missed."""

import inspect
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy

from lightning_mcore import MCoreStrategy
from tests.lightning_suite import __main__ as suite
from tests.lightning_suite.swap import Swap, runs_on_cpu
from tests.lightning_suite.verdict import Outcome, compare, count, on_ranks, read_differences, read_outcomes

pytest_plugins = ("pytester",)

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
PASSED, FAILED = Outcome("passed", "", 1), Outcome("failed", "call: AssertionError", 1)


@pytest.mark.parametrize(("name", "expected"), [("mcore", MCoreStrategy), ("ddp", DDPStrategy)])
def test_a_trainer_of_one_process_gets_the_strategy(name: str, expected: type) -> None:
    original, signature = pl.Trainer.__init__, inspect.signature(pl.Trainer)
    swap = Swap(name, None)
    swap.install()
    try:
        assert inspect.signature(pl.Trainer) == signature  # LightningCLI makes its options from it
        assert type(pl.Trainer(**QUIET).strategy) is expected
        assert type(pl.Trainer(**QUIET, strategy="ddp", devices=1).strategy) is expected
        assert swap.num_switched == 2
    finally:
        swap.remove()
    assert pl.Trainer.__init__ is original
    assert not isinstance(pl.Trainer(**QUIET).strategy, expected)


@pytest.mark.parametrize(
    ("arguments", "switched"),
    [
        ({"accelerator": "cpu"}, True),
        ({"accelerator": CPUAccelerator(), "devices": "1"}, True),
        ({"accelerator": "cpu", "strategy": "ddp_spawn", "devices": 1}, True),
        ({"accelerator": "cpu", "strategy": "ddp", "devices": 2}, False),
        ({"accelerator": "cpu", "num_nodes": 2}, False),
        ({"accelerator": "cpu", "strategy": "fsdp"}, False),
        ({"accelerator": "cpu", "strategy": DDPStrategy()}, False),
        ({"accelerator": "gpu"}, False),
    ],
)
def test_other_trainers_keep_theirs(arguments: dict[str, Any], switched: bool) -> None:
    assert runs_on_cpu(arguments) is switched
    assert runs_on_cpu(arguments, ranks=2) is (switched or arguments.get("devices") == 2)


def test_the_outcome_of_each_test_is_written_down(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_outcomes="""
        import pytest, lightning.pytorch as pl

        def test_switched():
            trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
            assert type(trainer.strategy).__name__ == "MCoreStrategy"

        def test_failed():
            assert 1 == 2

        def test_skipped():
            pytest.skip("not here")

        @pytest.fixture
        def broken():
            yield
            raise RuntimeError("too late")

        def test_failed_at_the_end(broken):
            pass
        """
    )
    report = pytester.path / "report.jsonl"
    options = ["--swap-strategy", "mcore", "--swap-report", str(report), "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytester.runpytest_inprocess("-p", "tests.lightning_suite.swap", *options)
    outcomes = read_outcomes([report])
    assert {name.partition("::")[2]: outcome for name, outcome in outcomes.items()} == {
        "test_switched": Outcome("passed", "", 1),
        "test_failed": Outcome("failed", "call: assert 1 == 2", 0),
        "test_skipped": Outcome("skipped", outcomes["test_outcomes.py::test_skipped"].why, 0),
        "test_failed_at_the_end": Outcome("failed", "teardown: RuntimeError: too late", 0),
    }


def test_a_test_runs_on_two_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_ranks="""
        import os, torch, lightning.pytorch as pl
        from lightning.pytorch.demos.boring_classes import BoringModel

        def test_trains(tmp_path):
            trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, fast_dev_run=True)
            trainer.fit(BoringModel())
            folders = [None, None]
            torch.distributed.all_gather_object(folders, str(tmp_path))
            assert trainer.world_size == 2 and len(set(folders)) == 1

        def test_failed_on_rank_1():
            assert os.environ["LOCAL_RANK"] == "0"
        """
    )
    report = pytester.path / "report.jsonl"
    options = ["--swap-strategy", "mcore", "--swap-ranks", "2", "--swap-report", str(report), "-p", "no:xdist"]
    pytester.runpytest_subprocess("-p", "tests.lightning_suite.swap", "-p", "no:cacheprovider", *options)
    passed, reason = Outcome("passed", "", 0), "call: AssertionError: assert '1' == '0'"
    assert {name.partition("::")[2]: outcome for name, outcome in read_outcomes([report]).items()} == {
        "test_trains on rank 0": PASSED,
        "test_trains on rank 1": PASSED,
        "test_failed_on_rank_1 on rank 0": passed,
        "test_failed_on_rank_1 on rank 1": Outcome("failed", reason, 0),
    }


def test_differences_are_named_on_each_rank() -> None:
    differences = {"a": "by nature", "b on rank 1": "prints on rank 0"}
    assert on_ranks(differences, 1) == {"a": "by nature"}
    on_two = {"a on rank 0": "by nature", "a on rank 1": "by nature", "b on rank 1": "prints on rank 0"}
    assert on_ranks(differences, 2) == on_two


def test_what_is_lost_against_ddp_is_told_from_what_differs_by_nature() -> None:
    ddp = {"lost": PASSED, "known": PASSED, "missing": PASSED, "hung": PASSED, "kept": PASSED, "won": FAILED}
    mcore = {"lost": FAILED, "known": FAILED, "hung": Outcome("started", "", 0), "kept": PASSED, "won": PASSED}
    verdict = compare(ddp, mcore, {"known": "by nature", "kept": "was so once"})
    assert verdict.worse == ["hung", "lost", "missing"]
    assert verdict.known == {"known": "by nature"}
    assert verdict.better == ["won"]
    assert verdict.stale == ["kept"]
    assert count(mcore) == {"passed": 2, "failed": 3}


@pytest.mark.parametrize(
    ("mcore", "listed", "ended", "status"),
    [
        ("passed", False, True, 0),
        ("failed", False, True, 1),
        ("failed", True, True, 0),
        ("started", False, False, 1),
        ("passed", False, False, 2),
    ],
)
def test_the_exit_status_tells(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mcore: str,
    listed: bool,
    ended: bool,
    status: int,
) -> None:
    def run(source: Path, strategy: str, ranks: int, paths: list[str], report: Path) -> bool:
        outcome = mcore if strategy == "mcore" else "passed"
        report.write_text(json.dumps({"test": "test_it", "outcome": outcome, "why": "because", "switched": 3}) + "\n")
        return ended

    (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
    monkeypatch.setattr(suite, "run", run)
    monkeypatch.setattr(suite, "read_differences", lambda: {"test_it": "by nature"} if listed else {})
    source = ["--source", str(tmp_path), "--output", str(tmp_path / "out"), "--only", "flags"]
    assert suite.main(source) == status
    assert ("test_it: because" in capsys.readouterr().out) is (status == 1)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.main(["--source", str(tmp_path)])
    assert "has no tests/tests_pytorch; give a checkout" in capsys.readouterr().err


def test_every_known_difference_has_its_reason_once(tmp_path: Path) -> None:
    assert all(reason for reason in read_differences().values())
    twice = tmp_path / "differs.toml"
    twice.write_text('[[differs]]\ntests = ["a"]\nreason = "one"\n[[differs]]\ntests = ["a"]\nreason = "two"\n')
    with pytest.raises(ValueError, match="a must stand there once"):
        read_differences(twice)
