# SPDX-License-Identifier: Apache-2.0
"""What TransformerEngine's layers save beside their weights, read without running code.

A layer of TransformerEngine has an *extra state*: with the delayed recipe scales and largest values of earlier steps.
It is a pickle in a uint8 tensor, so that it passes ``torch.load(weights_only=True)``. TransformerEngine up to 2.17.0
unpickles whatever it finds there; later ones refuse it unless an environment variable allows everything.
:func:`checked_extra_state` reads it first, allows only tensors, plain values and TransformerEngine's recipes, and lets
the layers have it then.

Sources: ``TransformerEngineBaseModule.get_extra_state`` (2.11.0 and 2.20.2), ``_extra_state.py`` (2.20.2).
"""

import contextlib
import importlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_NAME = "_extra_state"
_ALLOWS_ALL = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_RECIPES = "transformer_engine.common.recipe"
_STORAGES = {
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # what 0.19 puts in its place
}
_KNOWN = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
}


class _Reader(pickle.Unpickler):
    """Reads tensors, plain values and recipes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, or refuse it."""
        if (module, name) in _STORAGES:  # torch's would read any pickle
            return lambda content: torch.load(io.BytesIO(content), weights_only=True)
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == _RECIPES and name.isidentifier():
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name}")


@contextlib.contextmanager
def checked_extra_state(state: Mapping[str, Any]) -> Iterator[None]:
    """Let layers of TransformerEngine load their extra state, if it holds no code.

    Args:
        state: What ``load_state_dict`` is called with inside the ``with`` block.

    Raises:
        ValueError: An extra state names something else than tensors, plain values and recipes.
    """
    found = False
    for name, value in state.items():
        if name.rpartition(".")[2].startswith(_NAME) and isinstance(value, Tensor) and value.numel() > 0:
            found = True
            _check(name, value)
    before = os.environ.get(_ALLOWS_ALL)
    if found:
        os.environ[_ALLOWS_ALL] = "1"
    try:
        yield
    finally:
        if found:
            os.environ.pop(_ALLOWS_ALL)
            if before is not None:
                os.environ[_ALLOWS_ALL] = before


def _check(name: str, value: Tensor) -> None:
    try:
        _Reader(io.BytesIO(value.detach().cpu().numpy().tobytes())).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(
            f"{name} of the checkpoint holds something else than TransformerEngine's scales and recipe ({error}), and"
            " reading it could run code; load the weights of a checkpoint that you trust"
        ) from error
