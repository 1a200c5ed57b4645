# SPDX-License-Identifier: Apache-2.0
"""Hooks for mkdocs: version and repository, roles in docstrings, and fields of argument classes.

``fields of NAME`` on a line of a page becomes a list of the fields that a class of ``lightning_mcore.arguments`` adds,
and ``families that are not supported`` a table of them.
"""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(?:~(?:\w+\.)*)?([\w.]+)</code>")
_FIELDS = re.compile(r"^fields of (\w+)$", re.MULTILINE)
_UNSUPPORTED = re.compile(r"^families that are not supported$", re.MULTILINE)


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
