# SPDX-License-Identifier: Apache-2.0
"""The provenance of a release names its files, the commit and the versions, and only if the commit describes them."""

import hashlib
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.provenance import provenance

PINS = Path("requirements/tested-3.11.txt")


def git(root: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(["git", *settings, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def release(folder: Path) -> tuple[Path, list[Path]]:
    """Return a committed repository and the files that were built from it."""
    root, dist = folder / "source", folder / "dist"
    (root / "requirements").mkdir(parents=True)
    dist.mkdir()
    urls = 'urls = {Repository = "https://example.com/ours"}'
    (root / "pyproject.toml").write_text(f'[project]\nname = "ours"\nversion = "1.2"\n{urls}\n')
    (root / PINS).write_text("# comment\nhatchling==1.33.0\n    # via ours\ntorch-like==2.13.0\n")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        git(root, *command)
    files = [dist / "ours-1.2.whl", dist / "ours-1.2.tar.gz"]
    for file in files:
        file.write_text(file.name)
    return root, files


@pytest.fixture(autouse=True)
def _build(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make dist`` installs the package ``build`` for itself."""
    monkeypatch.setattr(importlib.metadata, "version", {"build": "1.3.0"}.__getitem__)


def test_the_provenance_names_files_commit_and_versions(tmp_path: Path) -> None:
    root, files = release(tmp_path)
    found: dict[str, Any] = provenance(files, PINS, root)
    digests = {file.name: hashlib.sha256(file.name.encode()).hexdigest() for file in files}
    assert {subject["name"]: subject["digest"]["sha256"] for subject in found["subject"]} == digests
    source, pins, *packages = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["uri"] == "git+https://example.com/ours"
    assert source["digest"] == {"gitCommit": git(root, "rev-parse", "HEAD")}
    assert pins["digest"] == {"sha256": hashlib.sha256((root / PINS).read_bytes()).hexdigest()}
    assert [package["uri"] for package in packages] == ["pkg:pypi/hatchling@1.33.0", "pkg:pypi/torch-like@2.13.0"]


@pytest.mark.parametrize("name", ["pyproject.toml", "new.py"])
def test_what_is_not_committed_has_no_provenance(name: str, tmp_path: Path) -> None:
    root, files = release(tmp_path)
    with (root / name).open("a") as file:
        file.write("# changed\n")
    with pytest.raises(SystemExit, match=name):
        provenance(files, PINS, root)
