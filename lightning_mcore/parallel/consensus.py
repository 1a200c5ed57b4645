# SPDX-License-Identifier: Apache-2.0
"""One outcome for all ranks: what fails on one of them fails on every one, with the same words.

Saving a checkpoint is a row of stages in which each rank does something and rank 0 puts the parts together. A rank that
left such a row by an exception would leave the others waiting for it, for half an hour. So each stage goes through
:func:`collect`, which tells every rank how it went on all of them.

What travels are small objects, over a group of processes on the CPU (:func:`control_group`): it neither waits for the
work that a GPU has queued nor shares a communicator with the training. ``checkpoint/io.py`` uses it.
"""

import datetime
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
R = TypeVar("R")

_KNOWN: tuple[type[Exception], ...] = (
    FileNotFoundError,
    OSError,
    ModuleNotFoundError,
    ValueError,
    TypeError,
    RuntimeError,
)
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of a world that is closed: none


def control_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks, made at the first call; collective over the world then."""
    world: Any = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return world  # type: ignore[no-any-return]
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    group: dist.ProcessGroup = _groups[world]
    return group


def collect(mine: Callable[[], T], together: Callable[[list[T]], R]) -> R | None:
    """Let every rank do its part and rank 0 what follows from all; collective over the world.

    Args:
        mine: What this rank does.
        together: What rank 0 does with the results of all, in rank order; the others are told only whether it failed.

    Returns:
        On rank 0 the result of ``together``, on the others None.

    Raises:
        Exception: The first failure of any rank, on all of them: of the same class where that is an ordinary one, else
            a RuntimeError.
    """
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
    verdict = [first]
    dist.broadcast_object_list(verdict, src=0, group=group)
    if verdict[0] is not None:
        index, description = verdict[0]
        if index == rank and failure is not None and not isinstance(failure, _KNOWN):
            raise failure  # of a class that callers here may know
        raise _rebuild(description) from (failure if index == rank else None)
    return result


def decide(at_first: Callable[[], T]) -> T:
    """Return on every rank what rank 0 finds; collective over the world.

    Raises:
        Exception: It failed on rank 0; on all ranks, as :func:`collect` has it.
    """
    answer: list[Any] = [collect(lambda: None, lambda _: at_first())]
    dist.broadcast_object_list(answer, src=0, group=control_group())
    found: T = answer[0]
    return found


def on_all(mine: Callable[[], T]) -> T:
    """Return what this rank does, if no rank fails; collective over the world.

    Raises:
        Exception: It failed on some rank; on all ranks, as :func:`collect` has it.
    """
    kept: list[T] = []
    collect(lambda: kept.append(mine()), lambda _: None)
    return kept[0]


def together(mine: Callable[[], T]) -> T:
    """Do what :func:`on_all` does where there are several ranks, and simply do it on a single one.

    Raises:
        Exception: It failed on some rank; on all ranks, as :func:`collect` has it.
    """
    return on_all(mine) if dist.is_initialized() and dist.get_world_size() > 1 else mine()


def gather(own: T) -> list[T]:
    """Return what every rank has, in rank order, on every rank; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=control_group())
    return found


def all_true(mine: bool) -> bool:
    """Return whether it is true on every rank; collective over the world, and cheap."""
    flag = torch.tensor([int(mine)], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=control_group())
    return bool(flag.item())


def all_arrive(timeout: float) -> bool:
    """Wait for all ranks to come here; return whether they did.

    Args:
        timeout: Seconds to wait; it is there for ranks that have died.
    """
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
    known = next((kind for kind in _KNOWN if isinstance(error, kind)), None)
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
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
