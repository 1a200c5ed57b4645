# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in pieces of a few minutes: the tests of this folder, then the measurements.

A piece that has passed at this commit is not run again, so a run that was cut off goes on where it was. On a machine
without a GPU each piece is skipped, for one reason; with ``REQUIRE_GPU=1`` that is a failure.

    python -m tests.gpu                   # or: make gpu
    python -m tests.gpu --only fp8 --fresh
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import PIECES as MEASUREMENTS
from benchmarks.overhead import commit

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 570  # seconds of a piece
REASON = "needs a CUDA GPU"


def pieces() -> dict[str, list[str]]:
    """Return the commands by the name of their piece, in order."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    tests = {path.stem.removeprefix("test_"): ["-m", "pytest", "-q", str(path)] for path in files}
    order = ["torch_backend", "checkpoints", "fp8_values", "transformer_engine", "two_ranks"]
    named = {name: tests[name] for name in sorted(tests, key=order.index)}
    return named | {f"measure-{name}": ["-m", "benchmarks.gpu", "--pieces", name] for name in MEASUREMENTS}


def run(name: str, command: list[str], folder: Path, fresh: bool) -> str:
    """Run a piece unless it has passed; return what came of it."""
    record = folder / f"{name}.json"
    if not fresh and record.is_file() and json.loads(record.read_text())["outcome"] == "passed":
        return "passed before"
    if not torch.cuda.is_available():
        return f"skipped: {REASON}"
    start = time.monotonic()
    try:
        code = subprocess.run([sys.executable, *command], cwd=REPOSITORY, timeout=LIMIT, check=False).returncode
        outcome = "passed" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        outcome = f"failed: not done after {LIMIT} s"
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"outcome": outcome, "seconds": round(time.monotonic() - start)}) + "\n")
    return outcome


def main() -> int:
    """Run the pieces that were asked for; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description="Run what needs a GPU.")
    parser.add_argument("--only", nargs="+", default=[], help="pieces whose names contain one of these words")
    parser.add_argument("--fresh", action="store_true", help="also run pieces that have passed at this commit")
    options = parser.parse_args()
    folder = REPOSITORY / "build" / "gpu" / commit()
    outcomes = {}
    for name, command in pieces().items():
        if options.only and not any(word in name for word in options.only):
            continue
        outcomes[name] = run(name, command, folder, options.fresh)
        print(f"{name}: {outcomes[name]}", flush=True)
    bad = ("failed", "skipped") if os.environ.get("REQUIRE_GPU") == "1" else ("failed",)
    return int(any(outcome.startswith(bad) for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
