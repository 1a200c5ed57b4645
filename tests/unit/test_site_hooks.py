# SPDX-License-Identifier: Apache-2.0
"""The site takes version and repository from ``pyproject.toml``, and invents no address."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_mcore.hf.registry import UNSUPPORTED
from tests.support.pages import PAGES, ROOT


def hooks_of_site() -> Any:
    specification = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert specification is not None
    assert specification.loader is not None
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    return hooks


def configured(folder: Path, urls: str) -> Any:
    """Return the configuration of the site after the hook."""
    (folder / "pyproject.toml").write_text(f'[project]\nname = "a"\nversion = "1"\nlicense = "b"\n{urls}')
    config = SimpleNamespace(config_file_path=str(folder / "mkdocs.yml"), repo_url=None, edit_uri=None)
    hooks_of_site().on_config(config)
    return config


@pytest.mark.parametrize("address", [None, "https://example.org/a"])
def test_the_repository_of_the_site_is_that_of_the_package(address: str | None, tmp_path: Path) -> None:
    config = configured(tmp_path, f'[project.urls]\nRepository = "{address}"\n' if address else "")
    assert config.copyright == "a 1, b"
    assert config.repo_url == address
    assert (config.edit_uri is not None) == (address is not None)


def test_no_page_invents_an_address_of_this_repository() -> None:
    named = [
        address
        for path in PAGES
        for address in re.findall(r"https?://[^\s)`\"]*lightning[-_]mcore[^\s)`\"]*", path.read_text())
    ]
    assert named == []


def test_the_guide_lists_the_models_that_are_refused_by_name() -> None:
    page = hooks_of_site().on_page_markdown((ROOT / "docs/guides/add-a-family.md").read_text())
    for name, (reason, nearest) in UNSUPPORTED.items():
        assert f"| `{name}` | {reason} | `{nearest}` |" in page.splitlines()
