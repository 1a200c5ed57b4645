# SPDX-License-Identifier: Apache-2.0
"""The benchmark of rehearsals: its runs can be played, and its results say at which commit each one was."""

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import overhead
from benchmarks import rehearse as benchmark
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.rehearsal.settings import build_of

RUNS = [(name, variant) for name, model in benchmark.MODELS.items() for variant in model.variants]


@pytest.mark.parametrize(("name", "variant"), RUNS)
def test_every_run_of_the_table_can_be_played(name: str, variant: str) -> None:
    model = benchmark.MODELS[name]
    _, layout = build_of(benchmark.settings_of(model, variant), model.devices, 8)
    layout.validate_world(model.devices)
    if name == "qwen2.5-vl-7b":  # whose plan reads fields of the tower that nothing checks
        assert make_plan(benchmark.settings_of(model, variant), model.devices, 8).stages


def test_each_run_keeps_its_own_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"date": "2026-11-26", overhead._LOAD: "1.0 before"}
    rank = {"stage": 0, "planned_bytes": 2**30, "peak_bytes": 2**31, "ratio": 2.0, "cpu_seconds": 9.0}
    row = {"devices": 8, "ranks": [{**rank, "host_bytes": 2**29, "traffic": []}]}
    benchmark.keep(tmp_path, facts, "llama3-8b lora", {**row, "commit": "1234567", "load": 2.5})
    benchmark.keep(tmp_path, facts, "llama3-8b full", {**row, "commit": "89abcde", "load": 0.5})
    text = (tmp_path / "rehearse_cpu_20261126.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| llama3-8b") and "GiB" not in line][:2] == [
        "| llama3-8b full | 8 | 0 | 1.00 | 2.00 | 2.000 | 9 | 0.50 | 89abcde | 0.5 |",
        "| llama3-8b lora | 8 | 0 | 1.00 | 2.00 | 2.000 | 9 | 0.50 | 1234567 | 2.5 |",
    ]
    assert "- commit" not in text


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_copy_without_history_says_why_its_commit_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert overhead.commit() == "unknown"
    assert "not a git repository" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert overhead.commit() == "unknown"
    assert "git is not installed" in capsys.readouterr().err
    monkeypatch.undo()
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setattr(overhead, "REPOSITORY", tmp_path)
    assert overhead.commit() not in ("unknown", "")
