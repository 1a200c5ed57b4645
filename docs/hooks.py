# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does beside its plugins: roles of docstrings (:class:, :meth: and the like) become plain names."""

import re

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(?:~(?:\w+\.)*)?([\w.]+)</code>")


def on_page_content(html: str, **_: object) -> str:
    """Return the page with each role replaced by the name it refers to, without its module after a ``~``.

    Args:
        html: The rendered page.
    """
    return _ROLE.sub(r"<code>\1</code>", html)
