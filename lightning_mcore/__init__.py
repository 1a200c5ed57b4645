# SPDX-License-Identifier: Apache-2.0
"""A PyTorch Lightning strategy over NVIDIA megatron-core.

The names below are imported when they are used, for torch, Lightning and megatron-core take seconds to import and a
command such as ``lightning-mcore --help`` needs none of them.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from lightning_mcore.strategy_name import register_name

if TYPE_CHECKING:
    from lightning_mcore.checkpoint_io import MCoreCheckpointIO
    from lightning_mcore.communication import CommunicationOptions
    from lightning_mcore.data.finetuning_data import MCoreFinetuningData
    from lightning_mcore.data.online_packing import OnlinePacker
    from lightning_mcore.data.packed_rows import collate_padded, collate_rows, pack
    from lightning_mcore.data.packing import TokenSample
    from lightning_mcore.data.pretraining_data import MCorePretrainingData
    from lightning_mcore.gpt import MCoreGPT
    from lightning_mcore.hf.save_hf_model import SaveHFModel
    from lightning_mcore.layout import ModelShape, ParallelLayout
    from lightning_mcore.metrics import (
        PackingEfficiency,
        PaddingShare,
        TokenAccuracy,
        TokenLoss,
        TokenPerplexity,
        TokensSeen,
    )
    from lightning_mcore.module import MCoreModule
    from lightning_mcore.muon import MuonWithAdamW
    from lightning_mcore.precision import MCorePrecision
    from lightning_mcore.preemption import PreemptionCheckpoint
    from lightning_mcore.progress import MCoreProgressBar
    from lightning_mcore.session import single_process
    from lightning_mcore.strategy import MCoreStrategy
    from lightning_mcore.weights import build_from_checkpoint

__version__ = "0.1.0"

__all__ = [
    "CommunicationOptions",
    "MCoreCheckpointIO",
    "MCoreFinetuningData",
    "MCoreGPT",
    "MCoreModule",
    "MCorePrecision",
    "MCorePretrainingData",
    "MCoreProgressBar",
    "MCoreStrategy",
    "ModelShape",
    "MuonWithAdamW",
    "OnlinePacker",
    "PackingEfficiency",
    "PaddingShare",
    "ParallelLayout",
    "PreemptionCheckpoint",
    "SaveHFModel",
    "TokenAccuracy",
    "TokenLoss",
    "TokenPerplexity",
    "TokenSample",
    "TokensSeen",
    "__version__",
    "build_from_checkpoint",
    "collate_padded",
    "collate_rows",
    "pack",
    "single_process",
]

_HOMES = {
    "CommunicationOptions": "communication",
    "MCoreCheckpointIO": "checkpoint_io",
    "MCoreFinetuningData": "data.finetuning_data",
    "MCoreGPT": "gpt",
    "MCoreModule": "module",
    "MCorePrecision": "precision",
    "MCorePretrainingData": "data.pretraining_data",
    "MCoreProgressBar": "progress",
    "MCoreStrategy": "strategy",
    "ModelShape": "layout",
    "MuonWithAdamW": "muon",
    "OnlinePacker": "data.online_packing",
    "PackingEfficiency": "metrics",
    "PaddingShare": "metrics",
    "ParallelLayout": "layout",
    "PreemptionCheckpoint": "preemption",
    "SaveHFModel": "hf.save_hf_model",
    "TokenAccuracy": "metrics",
    "TokenLoss": "metrics",
    "TokenPerplexity": "metrics",
    "TokenSample": "data.packing",
    "TokensSeen": "metrics",
    "build_from_checkpoint": "weights",
    "collate_padded": "data.packed_rows",
    "collate_rows": "data.packed_rows",
    "pack": "data.packed_rows",
    "single_process": "session",
}
"""The module of each name."""

_PACKAGES = ("data", "hf")  # ``lightning_mcore.hf.Family`` needs no import of its own

# megatron-core says so several times while it is imported; transformer_impl="auto" does what can be done about it
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*not installed", category=UserWarning)
register_name()


if not TYPE_CHECKING:  # or a type checker would take any name for one that there is

    def __getattr__(name: str) -> Any:
        """Import a name when it is used first."""
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    """Return all names, imported or not."""
    return sorted({*globals(), *__all__, *_PACKAGES})
