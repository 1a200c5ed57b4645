# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu`` runs, as far as a machine without a GPU shows it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu as measurements
from tests.gpu import __main__ as pieces

NAMES = [
    "torch_backend",
    "checkpoints",
    "fp8_values",
    "transformer_engine",
    "two_ranks",
    *map("measure-{}".format, measurements.PIECES),
]


def test_every_file_and_every_measurement_is_a_piece() -> None:
    assert list(pieces.pieces()) == NAMES


@pytest.mark.parametrize(("required", "code"), [("0", 0), ("1", 1)])
def test_without_a_gpu_each_piece_is_skipped_for_one_reason(
    required: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--fresh"])
    monkeypatch.setenv("REQUIRE_GPU", required)
    assert pieces.main() == code
    assert capsys.readouterr().out.splitlines() == [f"{name}: skipped: needs a CUDA GPU" for name in NAMES]


def test_a_piece_that_has_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    mark = tmp_path / "ran"
    command = ["-c", f"open({str(mark)!r}, 'a').write('x')"]
    assert pieces.run("one", command, tmp_path, fresh=False) == "passed"
    assert pieces.run("one", command, tmp_path, fresh=False) == "passed before"
    assert pieces.run("one", command, tmp_path, fresh=True) == "passed"
    assert mark.read_text() == "xx"
    assert pieces.run("two", ["-c", "raise SystemExit(3)"], tmp_path, fresh=False) == "failed with exit code 3"
    assert pieces.run("two", ["-c", "pass"], tmp_path, fresh=False) == "passed"


def test_a_machine_may_be_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert pieces.commit() == "unknown"


def test_measurements_may_use_transformer_engine_on_the_cpu() -> None:
    """It is prepared when ``lightning_mcore`` is imported, which must come before megatron-core."""
    code = "import sys, benchmarks; sys.exit('lightning_mcore' not in sys.modules or 'megatron.core' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=pieces.REPOSITORY, check=True)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_measurements_run_on_the_cpu_and_write_nothing(tmp_path: Path) -> None:
    measured = measurements.main(["--device", "cpu", "--tiny", "--output", str(tmp_path)])
    assert measured.keys() == measurements.PIECES.keys()
    assert measured["overhead"][0]["ratio_of_medians"] > 0
    assert [row["case"] for row in measured["recipes"] if "refused" not in row][:1] == ["bf16"]
    assert all(row["planned_mebibytes"] > 0 for row in measured["recompute"])
    assert all(row["stall_seconds"] > 0 for row in measured["save"])
    assert list(tmp_path.iterdir()) == []
    text = measurements.table(measured["overhead"])
    assert text.startswith("| case | median s | bare, median s | ratio of medians |")
