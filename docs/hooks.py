# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does beside its plugins: roles of docstrings become names, and argument classes are listed by their help.

``fields of NAME`` on a line of a page becomes a list of the fields that a class of ``lightning_mcore.arguments`` adds.
"""

import dataclasses
import re

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(?:~(?:\w+\.)*)?([\w.]+)</code>")
_FIELDS = re.compile(r"^fields of (\w+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with lists of fields filled in.

    Args:
        markdown: The source of the page.
    """
    return _FIELDS.sub(lambda match: _fields(match[1]), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Return the page with each role replaced by the name it refers to, without its module after a ``~``.

    Args:
        html: The rendered page.
    """
    return _ROLE.sub(r"<code>\1</code>", html)


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
