# SPDX-License-Identifier: Apache-2.0
"""One outcome for all ranks: a failure on one rank becomes a failure on every rank, with the same message.

Saving a checkpoint has several stages, in which each rank does something and rank 0 combines the results. If a rank
left such a stage by an exception, the others would wait for it for half an hour. So each stage goes through
:func:`collect`, which tells every rank about failures on any of them.

Only small objects are sent, over a CPU process group (:func:`control_group`). It neither waits for queued GPU work nor
shares a communicator with training. Checkpoints and data modules use it.
"""

import datetime
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
R = TypeVar("R")

# Classes that can be rebuilt from their text on another rank, subclasses first: FileNotFoundError is an OSError.
_KNOWN: tuple[type[Exception], ...] = (
    FileNotFoundError,
    OSError,
    ModuleNotFoundError,
    ValueError,
    TypeError,
    RuntimeError,
)
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # a closed world drops out


def control_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks, with the default group's timeout; the first call makes it and is collective."""
    world: Any = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return world  # type: ignore[no-any-return]
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo", timeout=default_timeout())
    group: dist.ProcessGroup = _groups[world]
    return group


def default_timeout() -> datetime.timedelta:
    """Return how long a collective of the default group may wait."""
    world: Any = dist.group.WORLD
    timeout: datetime.timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout


def collect(mine: Callable[[], T], together: Callable[[list[T]], R]) -> R | None:
    """Run ``mine`` on every rank, and ``together`` on rank 0 with all results in rank order; collective over the world.

    Returns the result of ``together`` on rank 0, and None elsewhere. The first failure of any rank is raised on all of
    them: with the same class if it is in ``_KNOWN``, otherwise as a RuntimeError.
    """
    # Four ranks, and `mine` fails on ranks 2 and 3: rank 0 receives (result, None) twice and (None, description) twice,
    # skips `together`, and broadcasts (2, description). All four raise rank 2's error.
    group, rank = control_group(), dist.get_rank()
    own, failure = _attempt(mine)
    parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object((own, _describe(failure)), parts, dst=0, group=group)
    result: R | None = None
    first: tuple[int, Any] | None = None
    if parts is not None:
        first = next(((index, error) for index, (_, error) in enumerate(parts) if error is not None), None)
        if first is None:
            result, failure = _attempt(lambda: together([part for part, _ in parts]))
            first = (0, _describe(failure)) if failure is not None else None
    # None if nothing failed. Ranks wait here for rank 0 even if they have failed themselves.
    verdict = [first]
    dist.broadcast_object_list(verdict, src=0, group=group)
    if verdict[0] is not None:
        index, description = verdict[0]
        if index == rank and failure is not None and not isinstance(failure, _KNOWN):
            raise failure  # callers on this rank may know its class
        raise _rebuild(description) from (failure if index == rank else None)
    return result


def decide(at_first: Callable[[], T]) -> T:
    """Return on every rank the result of ``at_first`` on rank 0; collective, raises as :func:`collect` does."""
    return merge(None, lambda _: at_first())


def merge(own: T, together: Callable[[list[T]], R]) -> R:
    """Return on every rank what rank 0 makes of all ranks' objects; collective, raises as :func:`collect` does.

    Each object travels once, and the result once to each rank. With :func:`gather` every object goes to every rank.
    """
    answer: list[Any] = [collect(lambda: own, together)]
    dist.broadcast_object_list(answer, src=0, group=control_group())
    found: R = answer[0]
    return found


def on_all(mine: Callable[[], T]) -> T:
    """Return the result of ``mine`` on this rank if no rank fails; collective, raises as :func:`collect` does."""
    kept: list[T] = []
    collect(lambda: kept.append(mine()), lambda _: None)
    return kept[0]


def together(mine: Callable[[], T]) -> T:
    """Call :func:`on_all` if several ranks are connected; otherwise just call ``mine``."""
    return on_all(mine) if dist.is_initialized() and dist.get_world_size() > 1 else mine()


def gather(own: T) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=control_group())
    return found


def all_true(mine: bool) -> bool:
    """Return whether ``mine`` is true on every rank; collective over the world, and cheap."""
    flag = torch.tensor([int(mine)], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=control_group())
    return bool(flag.item())


def all_arrive(timeout: float) -> bool:
    """Wait until all ranks have called this, up to ``timeout`` seconds; return whether they have."""
    try:
        dist.monitored_barrier(control_group(), timeout=datetime.timedelta(seconds=timeout))
    except RuntimeError:
        return False
    return True


def _attempt(function: Callable[[], T]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _describe(error: Exception | None) -> tuple[str, str, int | None] | None:
    if error is None:
        return None
    # An error travels as class name, text and errno: another package's exception may not survive pickling.
    known = next((kind for kind in _KNOWN if isinstance(error, kind)), None)
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        # str() of an OSError begins with "[Errno 2]"; _rebuild() sets the number as `errno` instead.
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    if known is None or not text:
        text = f"{type(error).__name__}: {error}"
    return (known or RuntimeError).__name__, text, getattr(error, "errno", None)


def _rebuild(description: tuple[str, str, int | None]) -> Exception:
    name, text, number = description
    error = next(kind for kind in _KNOWN if kind.__name__ == name)(text)
    if isinstance(error, OSError) and number is not None:
        error.errno = number
    return error
