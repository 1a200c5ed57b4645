# SPDX-License-Identifier: Apache-2.0
"""Runs that configuration libraries describe: Hydra, OmegaConf, and what LightningCLI offers beyond one plain file."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
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


class Rows(pl.LightningDataModule):
    """Sixteen times the same row."""

    vocab_size = 64

    def __init__(self, seq_length: int = 16) -> None:
        super().__init__()
        self.seq_length = seq_length

    def train_dataloader(self) -> Any:
        row = torch.arange(self.seq_length)
        return DataLoader([{"tokens": row, "labels": row}] * 16, batch_size=2)  # type: ignore[arg-type]


class LinkedCLI(LightningCLI):
    """Takes the model's sizes from its data: one from an argument, one from the object that was made."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        data, model = ("data.init_args", "model.init_args") if self.subclass_mode_model else ("data", "model")
        parser.link_arguments(f"{data}.seq_length", f"{model}.seq_length")
        parser.link_arguments("data.vocab_size", f"{model}.vocab_size", apply_on="instantiate")


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
    trainer.fit(model, datamodule=Rows())
    assert trainer.global_step == 2
    assert dict(model.hparams["transformer"]) == CONFIG["model"]["transformer"]
    assert type(model.hparams["transformer"]["moe_layer_freq"]) is list


@pytest.mark.works_with("jsonargparse", "LightningCLI with linked arguments, fixed classes or any, and the environment")
@pytest.mark.works_with("omegaconf", "environment variables in a LightningCLI file, also as parallel sizes")
@pytest.mark.parametrize("any_class", [False, True], ids=["fixed-classes", "any-class"])
@in_a_rank
def test_lightning_cli_links_arguments_and_reads_the_environment(any_class: bool, tmp_path: Path) -> None:
    strategy = {"tensor_model_parallel_size": "${oc.env:TP_SIZE}", "use_distributed_optimizer": True}
    trainer = {key: value for key, value in CONFIG["trainer"].items() if key not in ("_target_", "max_steps")}
    trainer["strategy"] = {"class_path": "lightning_mcore.MCoreStrategy", "init_args": strategy}
    model = {"transformer": {"num_layers": 2, "hidden_size": "${oc.env:HIDDEN_SIZE}", "num_attention_heads": 4}}
    data = {"seq_length": 8}
    written = {"trainer": trainer, "model": model, "data": data}
    if any_class:
        written["model"] = {"class_path": "lightning_mcore.MCoreGPT", "init_args": model}
        written["data"] = {"class_path": f"{__name__}.Rows", "init_args": data}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TP_SIZE": "1", "HIDDEN_SIZE": "32", "PL_FIT__TRAINER__MAX_STEPS": "3"}.items():
            patch.setenv(name, value)
        cli = LinkedCLI(
            *((None, None) if any_class else (MCoreGPT, Rows)),
            args=["fit", "--config", str(tmp_path / "run.yaml")],
            parser_kwargs={"parser_mode": "omegaconf", "default_env": True},
            save_config_callback=None,
            subclass_mode_model=any_class,
            subclass_mode_data=any_class,
        )
    assert cli.trainer.global_step == 3
    assert cli.trainer.strategy.layout.tensor_model_parallel_size == 1
    found = cli.model.hparams
    assert (found["seq_length"], found["vocab_size"], found["transformer"]["hidden_size"]) == (8, 64, 32)
