# SPDX-License-Identifier: Apache-2.0
"""Change attributes of another package's objects for a while."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def set_until_closed(restores: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``restores`` is closed, which does not keep ``owner`` alive."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    restores.callback(_set_if_alive, weakref.ref(owner), name, before)


def _set_if_alive(owner: Callable[[], Any], name: str, value: Any) -> None:
    if (alive := owner()) is not None:
        setattr(alive, name, value)
