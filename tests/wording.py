# SPDX-License-Identifier: Apache-2.0
"""Phrases that do not belong in plain English, looked for in the package, the pages and the examples.

``make check`` runs ``python -m tests.wording``, which prints each place with what to write instead, and exits with 1 if
there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".md", ".yaml"}
CHECKED = ["README.md", "CONTRIBUTING.md", "docs", "examples", "lightning_mcore"]
"""Files and folders that are clean and stay so."""

_ALLOWED = "longer|more|less|fewer|larger|smaller|greater|faster|slower|better|worse|later|earlier|one"
PHRASES = {
    r"See there\.": "repeat the meaning",
    r"As (?:said|there)\.": "say it again",
    r"[Ff]ront doors?": "way to write a run, or kind of file",
    r"says of itself": "describes, or contains",
    r"stands under its name": "has its name",
    r", for (?:it|they|there|nobody|else)\b": "because",
    rf"(?<![Tt]here\s)\b(?:is|are) no (?!(?:{_ALLOWED})\b)[A-Za-z]": "is not a, or there is no",
    r"\bcarr(?:y|ies|ied) out\b": "support, apply or run",
    r"\b[Mm]end(?:s|ed|ing)?\b": "fix",
    r"nobody would": "is not supported",
}
"""Regular expressions, where a space may be a line break, and what to write instead."""


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the phrase and what to write instead, for each phrase in a text.

    Args:
        text: The text of a file.
    """
    for pattern, instead in PHRASES.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def files() -> Iterator[Path]:
    """Yield the files that are checked."""
    for name in CHECKED:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in SUFFIXES:
                yield file


def main() -> int:
    """Print every place, and return the exit code."""
    places = [
        f"{file.relative_to(ROOT)}:{line}: {phrase!r}; write: {instead}"
        for file in files()
        for line, phrase, instead in found_in(file.read_text(encoding="utf-8"))
    ]
    print("\n".join(places), end="\n" if places else "")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
