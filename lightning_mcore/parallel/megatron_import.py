# SPDX-License-Identifier: Apache-2.0
"""Import megatron-core without its hints that TransformerEngine and Apex are not installed.

megatron-core warns of that several times while it is imported, and ``transformer_impl="auto"`` already does what can be
done about it. So the hints are hidden, for the length of this import alone: the warning filters of the process stay as
they are. Where torch is built without CUDA, the import also leaves out torch's compiler. ``lightning_mcore``,
``lightning_mcore.hf`` and ``lightning_mcore.strategy`` call it before their names are imported; the command line hides
the hints for the length of a command.
"""

import importlib
import sys
import warnings

HINTS = ".*(Transformer Engine|Apex).*not installed"
"""What the hints say, as a regular expression."""


def import_megatron() -> None:
    """Import those modules of megatron-core that warn, once, without the hints."""
    name = "megatron.core.models.gpt.gpt_layer_specs"
    if name in sys.modules:
        return
    runtime = importlib.import_module("lightning_mcore.parallel.cpu_runtime")  # imports torch, which may set filters
    with warnings.catch_warnings(), runtime.without_compiler():
        warnings.filterwarnings("ignore", message=HINTS, category=UserWarning)
        importlib.import_module(name)
