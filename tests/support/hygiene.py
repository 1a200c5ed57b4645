# SPDX-License-Identifier: Apache-2.0
"""What a test must not leave behind: replaced names and open modes.

megatron-core names ``torch.cuda`` in hundreds of places, and on the CPU our runtime makes those names mean the CPU
while a strategy is at work. A name that stays replaced changes every later test of the process without a word, so
``conftest.py`` compares a snapshot before and after each test. A rank function may do the same around a ``fit``.
"""

import functools
import sys
from collections.abc import Iterator, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import lightning.pytorch  # noqa: F401 - wraps torch.compile when it is imported: before the first snapshot, then
import torch

_WATCHED = (FunctionType, BuiltinFunctionType, MethodDescriptorType, type, staticmethod, classmethod)
_MODES = "modes"


def snapshot() -> dict[str, dict[str, Any]]:
    """Return what the names of torch and megatron-core mean now, by owner and name, and the open modes.

    Two of them for each test of thousands: so they are copies of whole namespaces, and :func:`changes` looks closer.
    """
    state = {owner.__name__: _names(owner) for owner in _owners()}
    state[_MODES] = {
        "torch.cuda.default_generators": tuple(torch.cuda.default_generators),
        "number of torch function modes": torch._C._len_torch_function_stack(),
        "number of torch dispatch modes": torch._C._len_torch_dispatch_stack(),
    }
    return state


def changes(before: Mapping[str, dict[str, Any]], after: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the functions, classes and modes that were others before; a new name was only imported since."""
    found = []
    for owner, names in before.items():
        now = after.get(owner, {})
        if owner == _MODES:
            found += [name for name, value in names.items() if value != now.get(name)]
        elif len(names) != len(now) or not all(map(is_, names.values(), now.values())):  # the same in nearly all cases
            found += [
                f"{owner}.{name}"
                for name, value in names.items()
                # type(value), because isinstance asks the value itself, and some of torch's answer with a warning
                if value is not now.get(name) and issubclass(type(value), _WATCHED)
            ]
    return sorted(found)


def _owners() -> Iterator[ModuleType | type]:
    yield from (torch, torch.cuda, torch.cuda.random, torch.distributed, torch.nn.functional)
    yield from (torch.Tensor, torch.nn.Module)
    names = _of_megatron(len(sys.modules))
    yield from (module for name in names if (module := sys.modules.get(name)) is not None)


@functools.lru_cache(maxsize=1)
def _of_megatron(num_modules: int) -> list[str]:
    """Return the names of megatron-core's modules, among ten thousand, until their number changes."""
    return [name for name in list(sys.modules) if name.startswith("megatron.core")]


def _names(owner: ModuleType | type) -> dict[str, Any]:
    """Return what an owner's names mean, for a class with those it inherits: a patch may hide one of them."""
    if not isinstance(owner, type):
        return dict(vars(owner))
    names: dict[str, Any] = {}
    for scope in reversed(owner.__mro__):
        names |= vars(scope)
    return names
