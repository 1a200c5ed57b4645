# SPDX-License-Identifier: Apache-2.0
"""Trainers and modules that Hydra instantiates, with OmegaConf's objects as arguments."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.ranks import in_a_rank

CONFIG: dict[str, Any] = {
    "trainer": {
        "_target_": "lightning.pytorch.Trainer",
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": {
            "_target_": "lightning_mcore.MCoreStrategy",
            "use_distributed_optimizer": True,
            "ddp_config": {"_target_": "megatron.core.distributed.DistributedDataParallelConfig", "bucket_size": 1000},
        },
    },
    "model": {
        "_target_": "lightning_mcore.MCoreGPT",
        "vocab_size": 64,
        "seq_length": 16,
        "transformer": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_moe_experts": 2,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "moe_layer_freq": [0, 1],
        },
        "recipe": {"_target_": "lightning_mcore.models.recipe.Recipe", "betas": [0.9, 0.95]},
    },
}


@pytest.mark.works_with("hydra-core", "Trainer, strategy and model instantiated from one file")
@pytest.mark.works_with("omegaconf", "its lists and mappings as settings; hyper-parameters contain plain ones")
@pytest.mark.parametrize("convert", ["none", "all"])
@in_a_rank
def test_hydra_instantiates_a_run(convert: str) -> None:
    import hydra.utils
    from omegaconf import OmegaConf

    config = OmegaConf.create(CONFIG)
    trainer = hydra.utils.instantiate(config["trainer"], _convert_=convert)
    model = hydra.utils.instantiate(config["model"], _convert_=convert)
    row = {"tokens": torch.arange(16), "labels": torch.arange(16)}
    trainer.fit(model, DataLoader([row] * 8, batch_size=2))  # type: ignore[arg-type]
    assert trainer.global_step == 2
    assert dict(model.hparams["transformer"]) == CONFIG["model"]["transformer"]
    assert type(model.hparams["transformer"]["moe_layer_freq"]) is list
