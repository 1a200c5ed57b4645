# SPDX-License-Identifier: Apache-2.0
"""A process that reads configs and nothing else does so without torch.

transformers needs no torch for a config or for training arguments. Where torch is installed it imports it all the same,
and half of its compiler, to know the names of activations: four seconds instead of one. ``cli/__init__.py`` keeps torch
out of a process that is only there to plan; a config is the same either way.
"""

import os
import sys
from typing import Any

_modules: dict[str, Any] = sys.modules


def keep_torch_out() -> None:
    """Let ``import torch`` fail in this process, as Python offers it; before transformers is imported."""
    _modules.setdefault("torch", None)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch was not found


def let_torch_in() -> None:
    """Take :func:`keep_torch_out` back; transformers, once imported, still believes that there is no torch."""
    if torch_is_out():
        del _modules["torch"]


def torch_is_out() -> bool:
    """Return whether torch is kept out of this process."""
    return _modules.get("torch", _modules) is None
