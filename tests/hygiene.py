# SPDX-License-Identifier: Apache-2.0
"""What a test must not leave behind: replaced names and open modes.

megatron-core names ``torch.cuda`` in hundreds of places, and on the CPU our runtime makes those names mean the CPU
while a strategy is at work. A name that stays replaced changes every later test of the process without a word, so
``conftest.py`` compares a snapshot before and after each test. A rank function may do the same around a ``fit``.
"""

import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import lightning.pytorch  # noqa: F401 - wraps torch.compile when it is imported: before the first snapshot, then
import torch

_WATCHED = (FunctionType, BuiltinFunctionType, MethodDescriptorType, type, staticmethod, classmethod)


def snapshot() -> dict[str, Any]:
    """Return the functions and classes that torch and megatron-core hold now, by name, and the open modes."""
    state: dict[str, Any] = {}
    for owner in _owners():
        for name, value in _names(owner).items():
            # type(value), because isinstance asks the value itself, and some of torch's answer with a warning
            if issubclass(type(value), _WATCHED):
                state[f"{owner.__name__}.{name}"] = value
    state["torch.cuda.default_generators"] = tuple(torch.cuda.default_generators)
    state["number of torch function modes"] = torch._C._len_torch_function_stack()
    state["number of torch dispatch modes"] = torch._C._len_torch_dispatch_stack()
    return state


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names that meant something else before; a name that is new was only imported since."""
    return sorted(name for name, value in before.items() if not _same(value, after.get(name)))


def _owners() -> Iterator[ModuleType | type]:
    yield from (torch, torch.cuda, torch.cuda.random, torch.distributed, torch.nn.functional)
    yield from (torch.Tensor, torch.nn.Module)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None:
            yield module


def _names(owner: ModuleType | type) -> dict[str, Any]:
    """Return what an owner's names mean, for a class with those it inherits: a patch may hide one of them."""
    scopes = reversed(owner.__mro__) if isinstance(owner, type) else [owner]
    return {name: value for scope in scopes for name, value in list(vars(scope).items())}


def _same(first: Any, second: Any) -> bool:
    return first is second or (isinstance(first, int | tuple) and first == second)
