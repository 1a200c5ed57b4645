# SPDX-License-Identifier: Apache-2.0
"""The commands of ``examples/cluster/Dockerfile`` work, one after another, on a machine without Docker and CUDA.

A folder stands for the file system of the image, and every absolute path in the file leads into it. ``INSTEAD`` lists
what else differs from a build. It takes minutes, mostly to download packages.
"""

import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docker_context import context_files

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "cluster" / "Dockerfile"
SKIPPED = "apt-get "  # steps that begin with it: system packages, for which this machine's stand
INSTEAD = {
    "python3 -m venv": f"{sys.executable} -m venv",  # this Python, not Ubuntu's
    # TransformerEngine without its compiled parts, which need CUDA
    'MAX_JOBS=8 pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]': (
        'pip install --no-deps "transformer-engine'
    ),
    "[cli,data,te]": "[cli,data]",
}


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction and what follows it."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for step in "\n".join(lines).replace("\\\n", "").splitlines():
        if step.strip():
            instruction, _, rest = step.partition(" ")
            yield instruction, rest.strip()


class Image:
    """A build of a Dockerfile in ``folder``: ``root`` is the file system of the stage that is being built."""

    def __init__(self, folder: Path, context: Path) -> None:
        self.root, self.context = folder / "root", context
        self.stages: list[Path] = []  # file systems of earlier stages
        self.shell, self.command = ["/bin/sh", "-c"], [""]
        self.environment: dict[str, str] = {}

    def inside(self, text: str) -> str:
        """Return ``text`` with its absolute paths in ``root``."""
        return re.sub(r"(?<![\w./$-])/(?=\w)", f"{self.root}/", text)

    def run(self, command: list[str]) -> str:
        """Run a command with the stage's environment, and return what it printed."""
        done = subprocess.run(command, env=self.environment, cwd=self.root, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def stage(self) -> None:
        """Begin a stage with an empty file system and none of the environment, except for settings of pip."""
        if self.root.exists():
            self.stages.append(self.root.rename(self.root.with_name(f"stage{len(self.stages)}")))
        self.root.mkdir()
        self.shell = ["/bin/sh", "-c"]
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environment = {**kept, "PATH": os.defpath, "HOME": str(self.root)}

    def copy(self, source: str, target: str, *, stage: Path | None) -> None:
        """Copy from the context or from an earlier stage; files of a stage are linked, which is faster."""
        if stage is not None:
            origin = stage / source.lstrip("/")
            shutil.copytree(origin, self.inside(target), symlinks=True, copy_function=os.link)
            return
        assert source == "."
        for name in context_files(self.context):
            place = Path(self.inside(target), name)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.context / name, place)

    def step(self, instruction: str, rest: str) -> None:
        """Take one step of the file."""
        if instruction == "FROM":
            self.stage()
        elif instruction == "SHELL":
            self.shell = json.loads(rest)
        elif instruction == "ENV":
            for setting in shlex.split(rest):
                name, _, value = setting.partition("=")
                self.environment[name] = string.Template(self.inside(value)).substitute(self.environment)
        elif instruction == "COPY":
            *options, source, target = rest.split()
            assert options in ([], ["--from=build"]), rest
            self.copy(source, target, stage=self.stages[0] if options else None)
        elif instruction == "CMD":
            self.command = json.loads(rest)
        elif instruction == "RUN" and rest.startswith(SKIPPED):
            print(f"skipped: {rest}")
        else:
            assert instruction == "RUN", instruction
            command = self.inside(rest)
            for theirs, ours in INSTEAD.items():
                command = command.replace(theirs, ours)
            self.run([*self.shell, command])


@pytest.mark.works_with("pip", "the commands of `examples/cluster/Dockerfile`, without Docker and CUDA")
def test_the_commands_of_the_dockerfile_make_an_image_that_runs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "context"], check=True)
    text = DOCKERFILE.read_text()
    assert all(theirs in text for theirs in INSTEAD)
    image = Image(tmp_path, tmp_path / "context")
    for instruction, rest in steps(text):
        image.step(instruction, rest)
    assert image.run(image.command).startswith("usage: lightning-mcore")
    [version] = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert image.run([image.command[0], "--version"]).split() == ["lightning-mcore", version]
    request.node.user_properties.append(("version", image.run(["pip", "--version"]).split()[1]))
    packages = {line.partition("==")[0] for line in image.run(["pip", "freeze"]).splitlines()}
    assert {"torch", "transformer_engine", "megatron-core"} <= packages
