# SPDX-License-Identifier: Apache-2.0
"""The reference pages show an example of each public name, and every example runs as it is printed."""

import doctest
import inspect
import re
from pathlib import Path

import pytest

import lightning_mcore

ROOT = Path(__file__).resolve().parents[2]
LISTED = sorted(
    name
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall(r"^::: lightning_mcore\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if name in lightning_mcore.__all__
)
WITHOUT = {"MCoreVisionGPT", "MCoreVisionDistillation"}  # they are made from the files of a Hugging Face model


def test_every_listed_name_has_an_example() -> None:
    assert len(LISTED) > 30
    documented = {name for name in LISTED if "\nExamples:\n" in (inspect.getdoc(getattr(lightning_mcore, name)) or "")}
    assert {*LISTED} - documented == WITHOUT


@pytest.mark.filterwarnings("ignore")  # such as Lightning's about a GPU that is not used
@pytest.mark.parametrize("name", [name for name in LISTED if name not in WITHOUT])
def test_an_example_runs_as_printed(name: str) -> None:
    found = getattr(lightning_mcore, name)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    printed: list[str] = []
    for example in doctest.DocTestFinder(recurse=False).find(found, name, globs={}):
        runner.run(example, out=printed.append)
    assert runner.summarize(verbose=False).attempted > 0
    assert not printed, "".join(printed)
