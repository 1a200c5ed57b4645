# SPDX-License-Identifier: Apache-2.0
"""Files of numbers that rank 0 appends to while a long pass over the data runs, and continues after an interruption.

``models/reference.py`` keeps a preference's reference in such files, ``models/stored_logits.py`` a teacher's logits.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

SILENT_SECONDS = 2.0  # shorter passes show no progress


@contextlib.contextmanager
def appending(path: str, size: int, is_writer: bool) -> Iterator[Any]:
    """Yield a function that appends to a file, cut to ``size`` valid bytes; it writes on one rank only."""
    if not is_writer:
        yield lambda _: None
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "ab") as file:
        file.truncate(size)

        def append(values: NDArray[Any]) -> None:
            file.write(values.tobytes())
            file.flush()

        yield append
