# SPDX-License-Identifier: Apache-2.0
"""One outcome for all ranks: a failure on one rank becomes a failure on every rank, with the same message.

Saving a checkpoint has several stages, in which each rank does something and rank 0 combines the results. If a rank
left such a stage by an exception, the others would wait for it for half an hour. So each stage goes through
:func:`combine_on_rank0`, which tells every rank about failures on any of them.

Only small objects are sent, over a CPU process group (:func:`control_group`). It neither waits for queued GPU work nor
shares a communicator with training. Without process groups, this process is the only rank. Checkpoints, data
modules and Hugging Face export use it.
"""

import datetime
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
R = TypeVar("R")

# Subclasses first: FileNotFoundError is an OSError.
_KNOWN: tuple[type[Exception], ...] = (
    FileNotFoundError,
    OSError,
    ModuleNotFoundError,
    ValueError,
    TypeError,
    RuntimeError,
)
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


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


def combine_on_rank0(
    function: Callable[[], T], combine: Callable[[list[T]], R], group: dist.ProcessGroup | None = None
) -> R:
    """Run ``function`` on every rank; return on every rank what ``combine`` makes of all results on rank 0; collective.

    ``group`` is a gloo group of the ranks that take part, and rank 0 its first; None for all ranks.

    The results come in rank order. The first failure of any rank is raised on all of them: with the same class if it is
    in ``_KNOWN`` or the rank has failed in the same way, otherwise as a RuntimeError.
    """
    if not dist.is_initialized():
        return combine([function()])
    # Four ranks, and `function` fails on ranks 2 and 3: rank 0 receives (result, None) twice and (None, description)
    # twice, skips `combine`, and broadcasts (2, description). All four raise rank 2's error.
    group = control_group() if group is None else group
    rank = group.rank()
    own, failure = _attempt(function)
    parts: list[Any] | None = [None] * group.size() if rank == 0 else None
    dist.gather_object((own, _describe(failure)), parts, group=group, group_dst=0)
    result: Any = None
    first: tuple[int, Any] | None = None
    if parts is not None:
        first = next(((index, error) for index, (_, error) in enumerate(parts) if error is not None), None)
        if first is None:
            result, failure = _attempt(lambda: combine([part for part, _ in parts]))
            first = (0, _describe(failure)) if failure is not None else None
    answer: list[Any] = [(first, result)]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    first, result = answer[0]
    if first is not None:
        index, description = first
        if failure is not None and not isinstance(failure, _KNOWN) and _describe(failure) == description:
            raise failure  # callers on this rank may know its class
        raise _rebuild(description) from (failure if index == rank else None)
    reduced: R = result
    return reduced


def run_on_rank0(function: Callable[[], T]) -> T:
    """Return on every rank what rank 0's ``function()`` returns; collective, raises as :func:`combine_on_rank0`."""
    return combine_on_rank0(lambda: None, lambda _: function())


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return ``function()`` of this rank if no rank fails; collective, with arguments of :func:`combine_on_rank0`."""
    kept: list[T] = []
    combine_on_rank0(lambda: kept.append(function()), lambda _: None, group)
    return kept[0]


def all_gather_object(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank; collective over a gloo group, None for all ranks.

    With :func:`combine_on_rank0` each object is sent only to rank 0.
    """
    if not dist.is_initialized():
        return [own]
    group = control_group() if group is None else group
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def all_true(own: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``own`` is true on every rank; collective over a gloo group, None for all ranks, and cheap."""
    if not dist.is_initialized():
        return own
    flag = torch.tensor([int(own)], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=control_group() if group is None else group)
    return bool(flag.item())


def any_true(own: bool) -> bool:
    """Return whether ``own`` is true on some rank; collective, and cheap."""
    return not all_true(not own)


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
