# SPDX-License-Identifier: Apache-2.0
"""The library of a rehearsal's device is built for one installation of PyTorch, and kept."""

from pathlib import Path

import pytest

from lightning_mcore.rehearsal import library


def test_another_environment_with_the_same_release_of_pytorch_builds_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[Path] = []

    def build(path: Path) -> None:
        path.touch()
        built.append(path)

    monkeypatch.setattr(library, "_build", build)
    monkeypatch.setenv("LIGHTNING_MCORE_CACHE", str(tmp_path))
    paths = []
    for environment in ("one", "other", "one"):
        monkeypatch.setattr(library.cpp_extension, "library_paths", lambda name=environment: [f"/{name}/torch/lib"])
        paths.append(library.fake_cuda_library())
    assert paths[0] == paths[2] != paths[1]
    assert built == paths[:2]
