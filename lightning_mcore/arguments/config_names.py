# SPDX-License-Identifier: Apache-2.0
"""The names of the fields of Megatron's ``TransformerConfig``, read from its source without importing it.

Importing megatron-core takes seconds, and arguments are checked where there is not a GPU in sight, by the command line
and by ``lightning-mcore plan``. The source of the installed megatron-core is parsed instead.
"""

import ast
import functools
import importlib.util
from pathlib import Path

_FILES = ("core/model_parallel_config.py", "core/transformer/transformer_config.py")
_CLASSES = ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig")


@functools.cache
def transformer_config_names() -> frozenset[str]:
    """Return the names of all fields of ``TransformerConfig`` and ``MLATransformerConfig``, inherited ones included.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
    """
    spec = importlib.util.find_spec("megatron")  # a namespace: finding it imports nothing
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    folder = next((folder for folder in folders if (folder / _FILES[0]).is_file()), None)
    if folder is None:
        raise ModuleNotFoundError("megatron-core is not installed; install it with pip install megatron-core")
    names: set[str] = set()
    for file in _FILES:
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return frozenset(names)
