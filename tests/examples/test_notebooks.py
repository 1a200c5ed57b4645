# SPDX-License-Identifier: Apache-2.0
"""The notebooks run in a Jupyter kernel, and what they show on the repository's page is what a reader gets."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, execute

LARGEST = 150_000  # bytes of a notebook with its pictures
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def texts(book: Any) -> list[list[str]]:
    """Return the texts that the code cells show, and the number of pictures of each."""
    shown = []
    for cell in book.cells:
        if cell.cell_type == "code" and "rounding" not in cell.metadata.get("tags", []):
            data = [output.get("data", {}) for output in cell.outputs]
            plain = [each.get("text/plain", "") for each in data if "image/png" not in each]
            streams = [output.get("text", "") for output in cell.outputs]
            shown.append([*streams, *plain, f"{sum('image/png' in each for each in data)} pictures"])
    return shown


@pytest.mark.slow
@pytest.mark.distributed
@notebooks
def test_a_notebook_shows_what_its_saved_outputs_show(path: Path, tmp_path: Path) -> None:
    assert texts(execute(path, tmp_path)) == texts(nbformat.read(path, as_version=4))


@notebooks
def test_a_saved_notebook_is_small_and_names_no_machine(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert path.stat().st_size < LARGEST
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = str([{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in outputs])
    assert re.findall(r"/(?:home|tmp|root|work|Users)/|0x[0-9a-f]{6,}|Error|Warning", shown) == []


@notebooks
def test_each_code_cell_of_a_notebook_is_explained_and_links_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    kinds = [cell.cell_type for cell in cells]
    assert [place for place, kind in enumerate(kinds) if kind == "code" and kinds[place - 1] != "markdown"] == []
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(((?!https?:)[^)]+)\)", prose)]
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []
