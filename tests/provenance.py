# SPDX-License-Identifier: Apache-2.0
"""Writes the provenance of a release: from which commit, with what and how its files were built.

``python tests/provenance.py dist`` is the last step of ``make dist``. The file is a statement in in-toto's format with
a predicate of SLSA provenance v1, as JSON: https://slsa.dev/spec/v1.0/provenance. It is not signed.
"""

import argparse
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD_TYPE = "https://packaging.python.org/en/latest/flow/"  # an sdist, a wheel from it, an upload
BUILDER = "https://github.com/pypa/build"
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints about a repository."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def _digest(path: Path) -> dict[str, str]:
    """Return a file's digest in in-toto's form."""
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _dependencies(root: Path, pins: Path, project: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the commit, the file of pinned versions, and each package in it."""
    source: dict[str, Any] = {"name": project["name"], "digest": {"gitCommit": _git(root, "rev-parse", "HEAD")}}
    if repository := project.get("urls", {}).get("Repository"):
        source["uri"] = f"git+{repository}"
    packages = re.findall(r"^([\w.-]+)==(\S+)", (root / pins).read_text(), re.MULTILINE)
    return [
        source,
        {"name": str(pins), "digest": _digest(root / pins)},
        *({"uri": f"pkg:pypi/{name}@{version}"} for name, version in packages),
    ]


def provenance(files: list[Path], pins: Path, root: Path = ROOT) -> dict[str, Any]:
    """Return the statement about some files, which were built from the current commit.

    Args:
        files: What was built.
        pins: The versions with which they were built and checked: a file, relative to ``root``.
        root: The repository.

    Raises:
        SystemExit: A file is not committed as it is, so the commit does not describe the build.
    """
    if changed := _git(root, "status", "--porcelain"):
        raise SystemExit(f"files differ from the commit that the provenance would name; commit them first:\n{changed}")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    built = {
        "buildType": BUILD_TYPE,
        "externalParameters": {"command": "make dist", "version": project["version"]},
        "resolvedDependencies": _dependencies(root, pins, project),
    }
    versions = {"python": platform.python_version(), "build": importlib.metadata.version("build")}
    finished = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "_type": STATEMENT,
        "subject": [{"name": path.name, "digest": _digest(path)} for path in sorted(files)],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": built,
            "runDetails": {"builder": {"id": BUILDER, "version": versions}, "metadata": {"finishedOn": finished}},
        },
    }


def main() -> None:
    """Write the provenance of all files of a folder into it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pins", type=Path, required=True, help="file of pinned versions")
    parser.add_argument("--out", type=Path, required=True, help="what to write")
    given = parser.parse_args()
    files = [path for path in given.folder.iterdir() if path != given.out]
    given.out.write_text(json.dumps(provenance(files, given.pins), indent=2) + "\n")


if __name__ == "__main__":
    main()
