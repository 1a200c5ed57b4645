# SPDX-License-Identifier: Apache-2.0
"""A PyTorch Lightning strategy over NVIDIA megatron-core."""

import warnings

with warnings.catch_warnings():
    # megatron-core says so several times while it is imported; transformer_impl="auto" does what can be done about it
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*not installed", category=UserWarning)
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
