# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models in and out, at any layout.

``MCoreGPT.from_pretrained(path)`` starts from one, and ``SaveHFModel`` writes one at the end of a run.
:func:`export_checkpoint` and :func:`import_checkpoint` turn checkpoints into Hugging Face models and back without a
run; they are the commands ``lightning-mcore export`` and ``lightning-mcore import``. To add a family of models, build a
:class:`Family` from the rules below.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_mcore.hf.config_rules import ConfigRule, Constants, Derived, Only, Preset, Same, Unused
from lightning_mcore.hf.family import Family, family_names, find_family
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
    from lightning_mcore.hf.auto_model import HFModel, hf_model
    from lightning_mcore.hf.callback import SaveHFModel
    from lightning_mcore.hf.export import export_checkpoint, export_model
    from lightning_mcore.hf.importing import import_checkpoint
    from lightning_mcore.hf.pretrained import load_pretrained
    from lightning_mcore.hf.source import pretrained_settings

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
    "export_checkpoint",
    "export_model",
    "family_names",
    "find_family",
    "hf_model",
    "import_checkpoint",
    "load_pretrained",
    "pretrained_settings",
]

_LATER = {
    "HFModel": "auto_model",
    "SaveHFModel": "callback",
    "export_checkpoint": "export",
    "export_model": "export",
    "hf_model": "auto_model",
    "import_checkpoint": "importing",
    "load_pretrained": "pretrained",
    "pretrained_settings": "source",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: its module is slow, or imports ``MCoreGPT``, which imports this package."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LATER[name] != "source":  # source reads configs without megatron-core
        import_megatron()
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
