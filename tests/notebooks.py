# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks of ``examples/notebooks`` and save what they show: ``python -m tests.notebooks``.

What is saved is the same on every machine, but for small differences of pictures and rounding: warnings, which name
files, are left out, and so is all output of cells tagged ``varies``, which print times.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.kernel import kernel_environment

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
SECONDS = 300.0  # a cell; a notebook takes 10 to 30 on two free cores, and 90 on slow ones


def execute(path: Path, folder: Path) -> Any:
    """Run a notebook in a folder, and return it with its new outputs."""
    book = nbformat.read(path, as_version=4)
    timeout = SECONDS * float(os.environ.get("RANKS_TIMEOUT_SCALE", "1"))
    client = NotebookClient(book, timeout=int(timeout), resources={"metadata": {"path": str(folder)}})
    client.execute(env=kernel_environment())
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            varies = "varies" in cell.metadata.get("tags", [])
            cell.outputs = [] if varies else [output for output in cell.outputs if output.get("name") != "stderr"]
    book.metadata["language_info"] = {"name": "python"}
    return book


def main() -> int:
    """Save new outputs in all notebooks."""
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
