# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the README and of ``docs/``: what a title says about a block, and the commands in one of bash.

A title is what a reader sees above the block. It names the file to save the block as, says why the block does not run
as it stands (:data:`MARKS`), or is ``output``, which the blocks before it must have printed::

    ```bash title="first.sbatch, needs a cluster"
"""

import re
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKS = {
    "fragment": "part of a file that the page does not show",
    "in a clone": "installs this repository, or is one of its own checks",
    "in a clone of Megatron-LM": "runs another program",
    "needs a network": "downloads packages",
    "needs a GPU": "does not run on a CPU",
    "takes minutes": "plays a model of billions of parameters",
    "needs a cluster": "runs on several machines, or on more processes than a test can start",
}
OUTPUT = "output"
REJECTED = "is rejected"  # a command that ends with an error message
LANGUAGES = ("python", "bash", "yaml", "json", "dockerfile", "text")
PROGRAMS = ("lightning-mcore", "python")
_FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?\n(.*?)^\1```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        place: Its page and line.
        language: The word after the fence; empty if there is none.
        titles: The parts of its title.
        text: What is between the fences, without the indent of a tab's contents.
    """

    place: str
    language: str
    titles: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the reader saves it as."""
        return next((title for title in self.titles if title not in (*MARKS, OUTPUT, REJECTED)), None)

    @property
    def marked(self) -> bool:
        """Whether it does not run as it stands."""
        return any(title in MARKS for title in self.titles)


def blocks(path: Path, language: str | None = None) -> list[Block]:
    """Return the code blocks of a page, or those in one language."""
    text, found = path.read_text(), []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        titles = tuple(match[3].split(", ")) if match[3] else ()
        found.append(Block(f"{path.relative_to(ROOT)}:{line}", match[2], titles, textwrap.dedent(match[4])))
    return [block for block in found if language in (None, block.language)]


def commands(text: str, folder: Path, **given: str) -> list[list[str]]:
    """Return the words of each command of a bash block, as bash passes them on, without running it.

    Args:
        text: The block. Only bash's own commands and :data:`PROGRAMS` are known there; any other is an error.
        folder: Where it runs.
        given: Variables. With some, other commands are known too.
    """
    recorders = "".join(f'{name}() {{ record {name} "$@"; }}\n' for name in PROGRAMS)
    if given:
        recorders += 'command_not_found_handle() { record "$@"; }\ncd() { :; }\n'
    done = subprocess.run(
        ["/bin/bash", "-euc", 'record() { printf "%s\\0" "$#" "$@"; }\n' + recorders + text],
        cwd=folder,
        env={"PATH": "/nowhere", **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts, found = done.stdout.split("\0")[:-1], []
    while parts:
        end = int(parts[0]) + 1
        found.append(parts[1:end])
        parts = parts[end:]
    return found


NUMBER = re.compile(r"\d+\.\d+")
_SECONDS = re.compile(r"\b\d+ s\b")


def check_output(shown: str, output: str) -> None:
    """Assert that the output has each line of a page, but for ``...``, times, and a percent of other numbers."""
    lines = [_SECONDS.sub("... s", line) for line in output.splitlines()]
    for line in _SECONDS.sub("... s", shown).splitlines():
        if line == "...":
            continue
        pattern = ".*".join(NUMBER.sub("#", part).replace("#", "\0") for part in line.split("..."))
        wanted = re.compile(re.escape(pattern).replace(re.escape(".*"), ".*").replace("\0", r"(\d+\.\d+)"))
        found = [match for match in map(wanted.fullmatch, lines) if match]
        assert found, f"{line!r} is not in\n{output}"
        numbers = [float(number) for number in NUMBER.findall(line)]
        assert [float(number) for number in found[0].groups()] == pytest.approx(numbers, rel=1e-2)
