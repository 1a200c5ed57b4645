# SPDX-License-Identifier: Apache-2.0
"""Runs TransformerEngine's PyTorch tests on the CPU, and compares their failures with those that are known.

    python -m tests.te_suite --source PATH_TO_A_CHECKOUT_OF_TRANSFORMER_ENGINE
    python -m tests.te_suite --source ... --only test_recipe.py

The Python package of TransformerEngine, in the release of the checkout, is on the path (``make test-te-suite``). Exit
status 1 if a test fails that is not among :data:`KNOWN`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_SMALL = "not 1024 and not 2048 and not 8192 and not 16384"  # sizes of matrices
FILES = {  # and which of their tests; not models of 100 million parameters, and matrices of millions of values
    "test_float8tensor.py": "",
    "test_float8blockwisetensor.py": "",
    "test_float8_current_scaling_exact.py": "",
    "test_float8_blockwise_scaling_exact.py": "",
    "test_recipe.py": "",
    "test_custom_recipe.py": "",
    "test_numerics.py": "not 126m and not nvfp4",
    "test_deferred_init.py": "",
    "test_gqa.py": "",
    "test_parallel_cross_entropy.py": "",
    "nvfp4/test_nvfp4_quantize_exact.py": _SMALL,
    "nvfp4/test_nvfp4_rht_quantize_exact.py": _SMALL,
    "nvfp4/test_nvfp4_gemm_exact.py": "not 1008 and not 1024 and not 3072 and not 4096",
    "nvfp4/test_nvfp4_module_exact.py": "not 1024 and not 3072",
}

KNOWN = {
    r"tensor\.py::.*::(test_constructor|test_set_data)": "asks whether a tensor is on a GPU",
    r"test_deferred_init": "asks how much memory of a GPU is taken",
    r"gemm_versus_reference": "is compared bit for bit; products are summed in another order here",
    r"fuser_op|ops_linear|test_custom_recipe_sanity|test_noncontiguous": "te.ops names a device by its number",
    r"test_(gpt|mha)_accuracy.*dtype2": "torch's bf16 attention on the CPU, the reference, is farther from fp64",
}
"""Tests that fail, as regular expressions, and why."""


def main() -> int:
    """Run the tests and print what they say."""
    parser = argparse.ArgumentParser(prog="python -m tests.te_suite")
    parser.add_argument("--source", required=True, type=Path, help="checkout of TransformerEngine")
    parser.add_argument("--only", nargs="+", default=list(FILES), choices=list(FILES))
    given = parser.parse_args()
    folder = (given.source / "tests" / "pytorch").resolve()
    unknown = 0
    for name in given.only:
        outcomes = run(folder, name, FILES[name])
        counts = Counter(outcome for outcome, _ in outcomes)
        print(name, ", ".join(f"{number} {what}" for what, number in sorted(counts.items())), flush=True)
        for outcome, test in outcomes:
            if outcome != "failed":
                continue
            reason = next((why for pattern, why in KNOWN.items() if re.search(pattern, test)), None)
            unknown += reason is None
            print(f"  {test}: {reason or 'NOT KNOWN'}")
    return int(unknown > 0)


def run(folder: Path, name: str, chosen: str) -> list[tuple[str, str]]:
    """Return the outcome and the name of each test of a file."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        paths = (str(REPOSITORY), str(folder), os.environ.get("PYTHONPATH", ""))
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.te_suite.plugin",
             "-W", "ignore", f"--rootdir={folder}", f"--junitxml={report}", "-k", chosen, name],
            cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        cases = list(ElementTree.parse(report).iter("testcase"))
    return [(outcome(case), f"{name}::{case.get('classname')}::{case.get('name')}") for case in cases]


def outcome(case: ElementTree.Element) -> str:
    """Return what became of a test."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


if __name__ == "__main__":
    sys.exit(main())
