# SPDX-License-Identifier: Apache-2.0
"""Read Hugging Face models and PEFT adapters, at any layout; also the public names of imports and exports.

``MCoreGPT.from_pretrained(path)`` starts from a model, and ``SaveHFModel`` writes one at the end of a run.
:func:`export_checkpoint` and :func:`import_checkpoint` turn checkpoints into Hugging Face models and back without a
run; they are the commands ``lightning-mcore export`` and ``lightning-mcore import``. To add a family of models, build a
:class:`Family` from the rules below.

What needs an ``MCoreGPT`` is in ``interop/``, above ``models/``; its public names are found here too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_mcore.hf.config_rules import ConfigRule, Constants, Derived, Only, Preset, Same, Unused
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.registry import family_names, find_family
from lightning_mcore.hf.weight_rules import (
    Block,
    Experts,
    QueryKeyValue,
    Rename,
    Rows,
    Transpose,
    Vocabulary,
    WeightRule,
)
from lightning_mcore.parallel.megatron_import import import_megatron

if TYPE_CHECKING:
    from lightning_mcore.hf.pretrained import load_pretrained
    from lightning_mcore.hf.source import pretrained_settings
    from lightning_mcore.interop.auto_model import HFModel, as_hf_model, hf_model
    from lightning_mcore.interop.callback import SaveHFModel
    from lightning_mcore.interop.export import export_checkpoint, export_model
    from lightning_mcore.interop.importing import import_checkpoint
    from lightning_mcore.interop.named_weights import named_weights

__all__ = [
    "Block",
    "ConfigRule",
    "Constants",
    "Derived",
    "Experts",
    "Family",
    "HFModel",
    "Only",
    "Preset",
    "QueryKeyValue",
    "Rename",
    "Rows",
    "Same",
    "SaveHFModel",
    "Transpose",
    "Unused",
    "Vocabulary",
    "WeightRule",
    "as_hf_model",
    "export_checkpoint",
    "export_model",
    "family_names",
    "find_family",
    "hf_model",
    "import_checkpoint",
    "load_pretrained",
    "named_weights",
    "pretrained_settings",
]

_LATER = {
    "HFModel": "interop.auto_model",
    "SaveHFModel": "interop.callback",
    "as_hf_model": "interop.auto_model",
    "export_checkpoint": "interop.export",
    "export_model": "interop.export",
    "hf_model": "interop.auto_model",
    "import_checkpoint": "interop.importing",
    "load_pretrained": "hf.pretrained",
    "named_weights": "interop.named_weights",
    "pretrained_settings": "hf.source",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: its module is slow, or belongs to ``interop/``, which imports this package."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LATER[name] != "hf.source":  # source reads configs without megatron-core
        import_megatron()
    return getattr(importlib.import_module(f"lightning_mcore.{_LATER[name]}"), name)
