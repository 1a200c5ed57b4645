# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that depend most on megatron-core on several of its releases, and writes what passed side by side.

    make releases
    make releases SOURCE=/path/to/Megatron-LM     # with a column for the checkout
    make releases ARGS="--only 0.19.2"            # one column; those measured before are kept

Results of a release are kept in ``build/releases``, after each row: a run that was ended goes on where it stopped,
unless the code was changed in between. The table goes to docs/status/tests.md, with the commit of the code that each
release was tested with. Exit status 1 if a test failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.te_suite.__main__ import outcome

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "status" / "tests.md"
RESULTS = ROOT / "build" / "releases"
START, END = "<!-- releases: written by make releases -->", "<!-- end of releases -->"

GROUPS = {
    "Model arguments, layouts, comparison with `GPTModel`": (
        "parity/test_options parity/test_layouts parity/test_gpt_chunk"
    ),
    "The hand-written loop, fp16, recomputation, chunked loss": (
        "parity/test_loop parity/test_fp16 parity/test_recompute parity/test_chunked_loss"
    ),
    "Packed rows, context parallelism": (
        "parity/test_packing parity/test_context_scale distributed/test_packed_attention distributed/test_packed_gpt"
    ),
    "Model families, delta nets and Mamba, compared with transformers": (
        "parity/test_hf_families parity/test_more_hf_families distributed/test_delta_net_folders"
    ),
    "Import and export of Hugging Face folders": "distributed/test_hf_import distributed/test_hf_export",
    "Images and videos": "parity/test_vision parity/test_vision_training distributed/test_vision",
    "Adapters": "parity/test_lora distributed/test_lora",
    "Experts, optimizers, padded vocabularies": (
        "distributed/test_experts distributed/test_router_counts distributed/test_optimizers"
        " distributed/test_padded_vocabulary"
    ),
    "Checkpoints, also Megatron's; resuming on other layouts": (
        "distributed/test_checkpoint distributed/test_checkpoint_of_megatron distributed/test_reshard"
        " distributed/test_resume distributed/test_weights"
    ),
    "Unit tests of settings, layers, families, checkpoints and the strategy": (
        "unit/config unit/layers unit/models unit/parallel unit/hf unit/checkpoint unit/strategy"
    ),
}
"""Rows of the table, and the files and folders in ``tests`` that each stands for."""


@dataclass(frozen=True)
class Results:
    """What a release did: outcomes by row of the table, the tests that failed, and the commits of both projects."""

    core: str
    tested_at: str
    outcomes: dict[str, dict[str, int]]
    failed: list[str]


def main() -> int:
    """Run the tests on each release and write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases")
    parser.add_argument("--latest", type=Path, required=True, help="folder with the newest release, unpacked")
    parser.add_argument("--source", type=Path, help="a checkout of Megatron-LM, whose commit becomes the column's name")
    parser.add_argument("--checkout", type=Path, help="folder with the megatron.core of that checkout")
    parser.add_argument("--only", nargs="+", help="names of columns to measure; the others are kept")
    parser.add_argument("--workers", default="2", help="processes of pytest-xdist")
    given = parser.parse_args()
    releases: dict[str, Path | None] = {"installed": None, "latest": given.latest / "site"}
    if given.source is not None:
        releases["source"] = given.checkout / "site"
    names = {_version(site): (column, site) for column, site in releases.items()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    for version, (column, site) in names.items():
        if given.only is None or version in given.only:
            core = f"`{_commit(given.source)}` ({version})" if column == "source" else version
            measure(Results(core, _commit(ROOT), {}, []), RESULTS / f"{column}.json", site, given.workers)
    columns = [Results(**json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}\n\n{table(columns)}\n{END}{rest.partition(END)[2]}")
    print(table(columns))
    return int(any(column.failed for column in columns))


def measure(results: Results, kept: Path, site: Path | None, workers: str) -> None:
    """Run the groups that ``kept`` lacks on one megatron-core, and write it after each; ``site`` leads the path."""
    if kept.exists():
        before = Results(**json.loads(kept.read_text()))
        if (before.core, before.tested_at) == (results.core, results.tested_at):
            results = before
    paths = [str(path) for path in (site, ROOT) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for name, files in GROUPS.items():
        if name in results.outcomes:
            continue
        chosen = [str(path) for file in files.split() for path in _paths(file)]
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch, "report.xml")
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--numprocesses", workers, "--dist", "loadgroup",
                 "-m", "not thorough", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen],
                cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            cases = list(ElementTree.parse(report).iter("testcase"))
        results.outcomes[name] = dict(Counter(map(outcome, cases)))
        results.failed.extend(
            f"{case.get('classname')}::{case.get('name')}" for case in cases if outcome(case) == "failed"
        )
        kept.write_text(json.dumps(asdict(results), indent=1))
        print(f"{results.core}: {name}: {results.outcomes[name]}", flush=True)


def table(columns: list[Results]) -> str:
    """Return the results as Markdown: a row for each group, a column for each release."""
    lines = [
        "| Tests | " + " | ".join(column.core for column in columns) + " |",
        "|---|" + "---|" * len(columns),
        *(
            f"| {name} | " + " | ".join(_cell(column.outcomes.get(name, {})) for column in columns) + " |"
            for name in GROUPS
        ),
        "| commit of this project | " + " | ".join(f"`{column.tested_at}`" for column in columns) + " |",
    ]
    failed = [f"- {column.core}: `{test}`" for column in columns for test in column.failed]
    return "\n".join([*lines, *(["", "These tests failed:", "", *failed] if failed else []), ""])


def _paths(file: str) -> list[Path]:
    """Return a file of tests, or a folder of them, by its name in ``tests``."""
    path = ROOT / "tests" / file
    return [path if path.is_dir() else path.with_suffix(".py")]


def _cell(outcomes: dict[str, int]) -> str:
    words = {"passed": "pass", "failed": "fail", "skipped": "skipped"}
    return ", ".join(f"{outcomes[kind]:,} {word}" for kind, word in words.items() if outcomes.get(kind))


def _version(site: Path | None) -> str:
    """Return the version of the megatron-core in a folder, or of the installed one."""
    code = "import megatron.core.package_info as info; print(info.__shortversion__)"
    environment = {**os.environ, "NO_VCS_VERSION": "1", **({} if site is None else {"PYTHONPATH": str(site)})}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.check_output(command, env=environment, text=True).strip()


def _commit(folder: Path) -> str:
    return subprocess.check_output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
