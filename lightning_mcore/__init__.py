# SPDX-License-Identifier: Apache-2.0
"""A PyTorch Lightning strategy over NVIDIA megatron-core.

The names below are imported when they are used, because torch, Lightning and megatron-core take seconds to import and a
command such as ``lightning-mcore --help`` needs none of them.

``Trainer(strategy="mcore")`` is ``MCoreStrategy()``, whichever of the two packages is imported first::

    import lightning.pytorch as pl
    import lightning_mcore

    trainer = pl.Trainer(strategy="mcore")
"""

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from lightning_mcore.te_cpu.load import prepare

if TYPE_CHECKING:
    from lightning_mcore.checkpoint.io import MCoreCheckpointIO
    from lightning_mcore.checkpoint.weights import build_from_checkpoint
    from lightning_mcore.config.communication import CommunicationOptions
    from lightning_mcore.config.distillation import Distillation
    from lightning_mcore.config.embedding import Embedding
    from lightning_mcore.config.layout import ModelShape, ParallelLayout
    from lightning_mcore.config.lora import LoRA
    from lightning_mcore.config.preference import Preference
    from lightning_mcore.config.reranking import Reranker
    from lightning_mcore.data.batches import data_shard
    from lightning_mcore.data.embedding.datamodule import MCoreEmbeddingData, MCoreRerankingData
    from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
    from lightning_mcore.data.finetuning.images import MCoreVisionData
    from lightning_mcore.data.packing.best_fit import TokenSample
    from lightning_mcore.data.packing.online import OnlinePacker
    from lightning_mcore.data.packing.rows import collate_padded, collate_rows, pack
    from lightning_mcore.data.preference.datamodule import MCorePreferenceData
    from lightning_mcore.data.pretraining.datamodule import MCorePretrainingData
    from lightning_mcore.interop.auto_model import hf_model
    from lightning_mcore.interop.callback import SaveHFModel
    from lightning_mcore.layers.adapted_layers import adapters_off
    from lightning_mcore.layers.metrics import (
        PackingEfficiency,
        PaddingShare,
        TokenAccuracy,
        TokenLoss,
        TokenPerplexity,
        TokensSeen,
    )
    from lightning_mcore.layers.own_adapters import add_lora
    from lightning_mcore.layers.session import single_process
    from lightning_mcore.models.distillation import MCoreDistillation
    from lightning_mcore.models.embedding import MCoreEmbedding
    from lightning_mcore.models.gpt import MCoreGPT
    from lightning_mcore.models.preference import MCorePreference
    from lightning_mcore.models.recipe import Recipe, loraplus_groups
    from lightning_mcore.models.reranker import MCoreReranker
    from lightning_mcore.models.vision import MCoreVisionGPT
    from lightning_mcore.models.vision_distillation import MCoreVisionDistillation
    from lightning_mcore.optimizer.muon import MuonWithAdamW
    from lightning_mcore.strategy.fp8_monitor import FP8Monitor
    from lightning_mcore.strategy.garbage import GarbageCollection
    from lightning_mcore.strategy.module import MCoreModule
    from lightning_mcore.strategy.precision import MCorePrecision
    from lightning_mcore.strategy.preemption import PreemptionCheckpoint
    from lightning_mcore.strategy.progress import MCoreProgressBar
    from lightning_mcore.strategy.run_report import RunReport
    from lightning_mcore.strategy.strategy import MCoreStrategy

__version__ = "0.1.0"

__all__ = [
    "CommunicationOptions",
    "Distillation",
    "Embedding",
    "FP8Monitor",
    "GarbageCollection",
    "LoRA",
    "MCoreCheckpointIO",
    "MCoreDistillation",
    "MCoreEmbedding",
    "MCoreEmbeddingData",
    "MCoreFinetuningData",
    "MCoreGPT",
    "MCoreModule",
    "MCorePrecision",
    "MCorePreference",
    "MCorePreferenceData",
    "MCorePretrainingData",
    "MCoreProgressBar",
    "MCoreReranker",
    "MCoreRerankingData",
    "MCoreStrategy",
    "MCoreVisionData",
    "MCoreVisionDistillation",
    "MCoreVisionGPT",
    "ModelShape",
    "MuonWithAdamW",
    "OnlinePacker",
    "PackingEfficiency",
    "PaddingShare",
    "ParallelLayout",
    "PreemptionCheckpoint",
    "Preference",
    "Recipe",
    "Reranker",
    "RunReport",
    "SaveHFModel",
    "TokenAccuracy",
    "TokenLoss",
    "TokenPerplexity",
    "TokenSample",
    "TokensSeen",
    "__version__",
    "adapters_off",
    "add_lora",
    "build_from_checkpoint",
    "collate_padded",
    "collate_rows",
    "data_shard",
    "hf_model",
    "loraplus_groups",
    "pack",
    "single_process",
]

HOMES = {
    "CommunicationOptions": "config.communication",
    "Distillation": "config.distillation",
    "Embedding": "config.embedding",
    "FP8Monitor": "strategy.fp8_monitor",
    "GarbageCollection": "strategy.garbage",
    "LoRA": "config.lora",
    "MCoreCheckpointIO": "checkpoint.io",
    "MCoreDistillation": "models.distillation",
    "MCoreEmbedding": "models.embedding",
    "MCoreEmbeddingData": "data.embedding.datamodule",
    "MCoreFinetuningData": "data.finetuning.datamodule",
    "MCoreGPT": "models.gpt",
    "MCoreModule": "strategy.module",
    "MCorePrecision": "strategy.precision",
    "MCorePreference": "models.preference",
    "MCorePreferenceData": "data.preference.datamodule",
    "MCorePretrainingData": "data.pretraining.datamodule",
    "MCoreProgressBar": "strategy.progress",
    "MCoreReranker": "models.reranker",
    "MCoreRerankingData": "data.embedding.datamodule",
    "MCoreStrategy": "strategy.strategy",
    "MCoreVisionData": "data.finetuning.images",
    "MCoreVisionDistillation": "models.vision_distillation",
    "MCoreVisionGPT": "models.vision",
    "ModelShape": "config.layout",
    "MuonWithAdamW": "optimizer.muon",
    "OnlinePacker": "data.packing.online",
    "PackingEfficiency": "layers.metrics",
    "PaddingShare": "layers.metrics",
    "ParallelLayout": "config.layout",
    "PreemptionCheckpoint": "strategy.preemption",
    "Preference": "config.preference",
    "Recipe": "models.recipe",
    "Reranker": "config.reranking",
    "RunReport": "strategy.run_report",
    "SaveHFModel": "interop.callback",
    "TokenAccuracy": "layers.metrics",
    "TokenLoss": "layers.metrics",
    "TokenPerplexity": "layers.metrics",
    "TokenSample": "data.packing.best_fit",
    "TokensSeen": "layers.metrics",
    "adapters_off": "layers.adapted_layers",
    "add_lora": "layers.own_adapters",
    "build_from_checkpoint": "checkpoint.weights",
    "collate_padded": "data.packing.rows",
    "collate_rows": "data.packing.rows",
    "data_shard": "data.batches",
    "hf_model": "interop.auto_model",
    "loraplus_groups": "models.recipe",
    "pack": "data.packing.rows",
    "single_process": "layers.session",
}
"""The module of each name."""

_PACKAGES = ("callbacks", "data", "hf")  # ``lightning_mcore.hf.Family`` needs no import of its own

# Rooms that import megatron-core
_WITH_MEGATRON = ("checkpoint", "interop", "layers", "models", "optimizer", "strategy")
_LIGHT = ("Recipe", "loraplus_groups")  # these do not import it, although their room does


def _build_strategy() -> Any:
    return importlib.import_module("lightning_mcore.strategy.strategy").MCoreStrategy()


_REGISTRY = "lightning.pytorch.strategies"  # the module of Lightning's names of strategies


def _register_strategy() -> None:
    """Let Lightning know the name ``"mcore"``: now if it is imported already, else when it is; imports nothing."""
    registry: Any = getattr(sys.modules.get(_REGISTRY), "StrategyRegistry", None)
    if registry is None:
        sys.meta_path.insert(0, _WhenLightningComes())
    elif "mcore" not in registry.available_strategies():
        registry.register("mcore", _build_strategy, description="Class: MCoreStrategy")


class _WhenLightningComes(MetaPathFinder):
    """Finds nothing itself: it waits for the import of Lightning's strategies, registers ours after it, and is gone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders find, with one step more after the module has run."""
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                _register_strategy()

            loader.exec_module = run_and_register
        return spec


_register_strategy()
prepare()  # TransformerEngine's Python code alone, if that is what is installed


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name on first use."""
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if HOMES[name].partition(".")[0] in _WITH_MEGATRON and name not in _LIGHT:
            importlib.import_module(f"{__name__}.parallel.megatron_import").import_megatron()
        value = getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    """Return all names, imported or not."""
    return sorted({*globals(), *__all__, *_PACKAGES})
