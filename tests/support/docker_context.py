# SPDX-License-Identifier: Apache-2.0
"""What ``COPY .`` copies in a Dockerfile, without Docker."""

import re
from collections.abc import Iterator
from pathlib import Path


def context_files(context: Path) -> Iterator[str]:
    """Yield the files that ``COPY .`` copies; of the patterns that fit a file or a folder of it, the last one decides.

    ``**/`` stands for any folders. Source: Docker's "Dockerfile reference" and "Build context" pages.
    """
    lines = (context / ".dockerignore").read_text().splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for file in sorted(path for path in context.rglob("*") if path.is_file()):
        name, is_sent = file.relative_to(context).as_posix(), True
        parts = name.split("/")
        above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for pattern in patterns:
            glob = pattern.removeprefix("!")
            expression = re.escape(glob).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if any(re.fullmatch(expression, path) for path in above):
                is_sent = pattern.startswith("!")
        if is_sent:
            yield name
