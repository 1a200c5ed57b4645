# SPDX-License-Identifier: Apache-2.0
"""A sentence that refuses something stands once in the package: a rule that stands twice drifts apart."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lightning_mcore

PACKAGE = Path(lightning_mcore.__file__).parent
LEAST = 40
"""Characters of a message, without what is filled in, from which on it is a sentence of its own."""

TWICE: tuple[str, ...] = ("{} cannot be read as parquet: {}; fix or remove the file",)
"""Messages that still stand in two files."""


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield the sentences that a file raises or yields, each value that is filled in as ``{}``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found = node.exc.args[:1]
        elif isinstance(node, ast.Yield) and node.value is not None:
            found = [node.value]
        else:
            continue
        for text in found:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.value
            elif isinstance(text, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in text.values)
                yield "".join(map(str, parts))


def test_no_message_stands_in_two_files() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for message in messages(ast.parse(path.read_text(encoding="utf-8"))):
            if len(re.sub(r"\W", "", message)) >= LEAST:
                homes[message].add(str(path.relative_to(PACKAGE)))
    twice = {message: sorted(files) for message, files in homes.items() if len(files) > 1 and message not in TWICE}
    assert twice == {}
    assert len(homes) > 500


def test_messages_are_found() -> None:
    source = 'def f(a):\n    yield f"{a} is wrong; " "choose b"\n    raise ValueError("c is wrong")\n'
    assert {*messages(ast.parse(source))} == {"{} is wrong; choose b", "c is wrong"}
