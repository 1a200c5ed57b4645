# SPDX-License-Identifier: Apache-2.0
"""What the code is like to read: lines by folder, density of comments, docstrings and comprehensions, what is longest.

A report and no test: a file may be as long as its subject needs.

    make house
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 10

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


@dataclass
class File:
    """What was counted in a file.

    Attributes:
        name: Its path from the root of the project.
        lines: All of its lines.
        comments: Lines that hold a comment.
        docstrings: Lines of docstrings.
        comprehensions: Comprehensions and generator expressions.
        late: Imports of this package within a function.
        functions: Lines of each function, by name.
    """

    name: str
    lines: int
    comments: int
    docstrings: int
    comprehensions: int
    late: int
    functions: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> "File":
        """Count what is in a file."""
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        nodes = list(ast.walk(ast.parse(text)))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        return cls(
            name=name,
            lines=text.count("\n"),
            comments=sum(token.type == tokenize.COMMENT for token in tokens),
            docstrings=sum(_docstring_lines(node) for node in nodes if isinstance(node, _Definition)),
            comprehensions=sum(isinstance(node, comprehension) for node in nodes),
            late=len({line for function in functions for line in _late_imports(function)}),
            functions={f"{name}:{node.lineno} {node.name}": _lines(node) for node in functions},
        )


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _docstring_lines(node: _Definition) -> int:
    return _lines(node.body[0]) if node.body and ast.get_docstring(node) is not None else 0


def _late_imports(function: ast.FunctionDef) -> Iterator[int]:
    """Yield the line of each import of this package: most of them are there because two files need each other."""
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_mcore"):
            yield node.lineno


def table(files: list[File]) -> str:
    """Return a row for each folder, and one for all of them."""
    rooms: dict[str, list[File]] = {}
    for file in files:
        folders = file.name.split("/")[:-1]
        rooms.setdefault("/".join(folders[:2]), []).append(file)
    rows = [("folder", "files", "lines", "comments", "docstrings", "comprehensions", "late imports")]
    rows.append(("", "", "", "% of lines", "% of lines", "in 1,000 lines", ""))
    for room, held in [*rooms.items(), ("all", files)]:
        sums: Counter[str] = Counter()
        for file in held:
            for key in ("lines", "comments", "docstrings", "comprehensions", "late"):
                sums[key] += getattr(file, key)
        lines = max(1, sums["lines"])
        shares = [f"{100 * sums[key] / lines:.1f}" for key in ("comments", "docstrings")]
        density = f"{1000 * sums['comprehensions'] / lines:.0f}"
        rows.append((room, str(len(held)), f"{lines:,}", *shares, density, str(sums["late"])))
    return "\n".join(f"{row[0]:<26}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows)


def main() -> None:
    """Print the report."""
    for top in ("lightning_mcore", "tests"):
        files = [File.read(path) for path in sorted((ROOT / top).rglob("*.py"))]
        functions = Counter({name: size for file in files for name, size in file.functions.items()})
        print(table(files), f"\nThe longest files and functions of {top}:", sep="\n")
        for name, size in Counter({file.name: file.lines for file in files}).most_common(LONGEST):
            print(f"{size:>6}  {name}")
        for name, size in functions.most_common(LONGEST):
            print(f"{size:>6}  {name}")
        print()


if __name__ == "__main__":
    main()
