# SPDX-License-Identifier: Apache-2.0
"""Import megatron-core without its hints that TransformerEngine and Apex are not installed.

megatron-core warns several times while it is imported, and ``transformer_impl="auto"`` already does what can be done
about it. The hints are hidden during this import only: the process's warning filters stay as they are. The import also
skips TensorBoard, which only Megatron's timers use, and if torch is built without CUDA, torch's compiler.
``lightning_mcore``, ``lightning_mcore.hf`` and ``lightning_mcore.strategy`` call it before their names are imported;
the command line hides the hints during a command.
"""

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

HINTS = ".*(Transformer Engine|Apex).*not installed"
"""What the hints say, as a regular expression."""

_TENSORBOARD = "torch.utils.tensorboard"


def import_megatron() -> None:
    """Import the megatron-core modules that warn, once, without the hints."""
    name = "megatron.core.models.gpt.gpt_layer_specs"
    if name in sys.modules:
        return
    runtime = importlib.import_module("lightning_mcore.parallel.cpu_runtime")
    with warnings.catch_warnings(), runtime.without_compiler(), _without_tensorboard():
        warnings.filterwarnings("ignore", message=HINTS, category=UserWarning)
        importlib.import_module(name)


class _WriterKind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, importlib.import_module(_TENSORBOARD).SummaryWriter)


class _Writer(metaclass=_WriterKind):
    """Stands for TensorBoard's ``SummaryWriter`` in megatron-core, which only asks whether an object is one."""


@contextlib.contextmanager
def _without_tensorboard() -> Iterator[None]:
    """Import nothing of TensorBoard inside the ``with`` block, which would take a quarter of megatron-core's import."""
    if _TENSORBOARD in sys.modules:
        yield
        return
    module: Any = types.ModuleType(_TENSORBOARD)
    module.SummaryWriter = _Writer
    sys.modules[_TENSORBOARD] = module
    try:
        yield
    finally:
        del sys.modules[_TENSORBOARD]
