# SPDX-License-Identifier: Apache-2.0
"""Import megatron-core without its hints that TransformerEngine and Apex are not installed.

megatron-core warns several times while it is imported, and ``transformer_impl="auto"`` already does what can be done
about it. The hints are hidden during this import only: the process's warning filters stay as they are. If torch is
built without CUDA, the import also skips torch's compiler. ``lightning_mcore``, ``lightning_mcore.hf`` and
``lightning_mcore.strategy`` call it before their names are imported; the command line hides the hints during a command.
"""

import importlib
import sys
import warnings

HINTS = ".*(Transformer Engine|Apex).*not installed"
"""What the hints say, as a regular expression."""


def import_megatron() -> None:
    """Import the megatron-core modules that warn, once, without the hints."""
    name = "megatron.core.models.gpt.gpt_layer_specs"
    if name in sys.modules:
        return
    runtime = importlib.import_module("lightning_mcore.parallel.cpu_runtime")
    with warnings.catch_warnings(), runtime.without_compiler():
        warnings.filterwarnings("ignore", message=HINTS, category=UserWarning)
        importlib.import_module(name)
