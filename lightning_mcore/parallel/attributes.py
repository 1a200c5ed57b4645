# SPDX-License-Identifier: Apache-2.0
"""Change attributes of another package's objects for a while."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def attributes_set(objects: Iterable[Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Give each object these attributes inside the ``with`` block, and then the ones that it had."""
    before = [(owner, name, getattr(owner, name)) for owner in objects for name in values]
    for owner, name, _ in before:
        setattr(owner, name, values[name])
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
