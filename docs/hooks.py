# SPDX-License-Identifier: Apache-2.0
"""Hooks for mkdocs: version and repository, roles in docstrings, and fields of argument classes.

On a line of a page, ``fields of NAME`` becomes a list of the fields that a class of ``lightning_mcore.arguments`` adds,
``families that are not supported`` a table of them, and ``layouts of each family`` a table of the layouts on which
tests compare a family with transformers.
"""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(?:~(?:\w+\.)*)?([\w.]+)</code>")
_FIELDS = re.compile(r"^fields of (\w+)$", re.MULTILINE)
_UNSUPPORTED = re.compile(r"^families that are not supported$", re.MULTILINE)
_TESTED = re.compile(r"^layouts of each family$", re.MULTILINE)


def on_config(config: Any, **_: object) -> None:
    """Name the package's version and license in the footer, and link the repository and each page's source.

    Args:
        config: The configuration of the site.
    """
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text())["project"]
    config.copyright = f"{project['name']} {project['version']}, {project['license']}"
    repository = project.get("urls", {}).get("Repository")
    if repository is not None:
        config.repo_url, config.repo_name, config.edit_uri = repository, "Repository", "edit/main/docs/"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with lists of fields and the table of families filled in.

    Args:
        markdown: The source of the page.
    """
    markdown = _UNSUPPORTED.sub(lambda match: _unsupported(), markdown)
    markdown = _TESTED.sub(lambda match: _tested(), markdown)
    return _FIELDS.sub(lambda match: _fields(match[1]), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Return the page with each role replaced by the name it refers to, without its module after a ``~``.

    Args:
        html: The rendered page.
    """
    return _ROLE.sub(r"<code>\1</code>", html)


def _unsupported() -> str:
    from lightning_mcore.hf.registry import UNSUPPORTED

    rows = [f"| `{name}` | {reason} | `{nearest}` |" for name, (reason, nearest) in sorted(UNSUPPORTED.items())]
    return "\n".join(["| `model_type` | Why it is not supported | Nearest family |", "|---|---|---|", *rows])


def _tested() -> str:
    from lightning_mcore.hf.families import FAMILIES, WITH_TOWERS
    from lightning_mcore.hf.vision_families import VISION_LANGUAGE_FAMILIES
    from tests.parity import test_hf_families, test_more_hf_families, test_vision, test_vision_training

    # The text of a folder with a tower is read as by the family of text alone.
    seeing = {family.model_type for family in VISION_LANGUAGE_FAMILIES.values()}
    names = (FAMILIES.keys() - WITH_TOWERS.keys()) | seeing
    layouts: dict[str, dict[str, None]] = {name: {} for name in sorted(names)}
    for table in (
        *(test_hf_families.LAYOUTS, test_more_hf_families.LAYOUTS, test_more_hf_families.MORE_LAYOUTS),
        *(test_vision.LAYOUTS, {layout: [name] for layout, name in test_vision_training.LAYOUTS}),
    ):
        for layout, compared in table.items():
            for name in compared:  # "phi3, longrope" is a variant of phi3
                layouts[name.partition(",")[0]][layout.id] = None
    rows = [f"| `{name}` | {', '.join(found)} |" for name, found in layouts.items()]
    return "\n".join(["| Family | Layouts |", "|---|---|", *rows])


def _fields(name: str) -> str:
    from lightning_mcore import arguments

    kind = getattr(arguments, name)
    lines = []
    for field in dataclasses.fields(kind):
        if field.name in kind.__annotations__:
            known = field.type.__name__ if isinstance(field.type, type) else str(field.type).replace("typing.", "")
            default = "" if field.default in (None, dataclasses.MISSING) else f", default: `{field.default!r}`"
            lines.append(f"- **`{field.name}`** (`{known}`{default}): {field.metadata['help']}")
    return "\n".join(lines)
