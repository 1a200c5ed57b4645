# SPDX-License-Identifier: Apache-2.0
"""The same run, described through all four doors, gives the same losses, bit for bit.

The doors: Python, a file of LightningCLI, arguments in the style of Hugging Face, and a file of LLaMA-Factory. The run
starts from the weights of a Hugging Face model, and reads the same exchanges in the same order.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from safetensors.torch import save_file

from lightning_mcore import MCoreFinetuningData, MCoreGPT, MCorePrecision, MCoreStrategy, Recipe
from lightning_mcore.arguments import TrainingArguments
from lightning_mcore.arguments.llamafactory.output import LOG, LossRecord
from lightning_mcore.cli import fit as fit_command
from lightning_mcore.cli import llamafactory as llamafactory_command
from tests.support.factory_files import rows, write_run
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

STEPS = 5
SEQ_LENGTH = 32
RECIPE: dict[str, Any] = {"learning_rate": 5e-3, "weight_decay": 0.01, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
FACTORY: dict[str, Any] = {
    **RECIPE,
    **{"model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "full"},
    **{"dataset": "alpaca_en_demo", "template": "llama3", "cutoff_len": SEQ_LENGTH, "output_dir": "out"},
    **{"logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS},
    **{"bf16": True, "use_distributed_optimizer": True, "export_hf_on_finish": False, "save_strategy": "no"},
    **{"report_to": "none", "disable_tqdm": True, "use_cpu": True, "packing": True},
}


ADAPTED: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
ADAPTED_FACTORY = {
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "q_proj,down_proj",
    "create_new_adapter": True,
    "loraplus_lr_ratio": 4.0,
}


def through_python(folder: str, layout: dict[str, int], devices: int, **more: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MCoreStrategy(**layout, use_distributed_optimizer=True),  # type: ignore[arg-type]
        plugins=[MCorePrecision("bf16-mixed")],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        max_steps=STEPS,
        log_every_n_steps=1,
        callbacks=[LossRecord(f"{folder}/python")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    recipe = Recipe(betas=(0.9, 0.999), **RECIPE | more.pop("recipe", {}))
    model = MCoreGPT.from_pretrained(f"{folder}/model", seq_length=SEQ_LENGTH, recipe=recipe, **more)
    trainer.fit(model, datamodule=MCoreFinetuningData(**data(folder)))


def data(folder: str) -> dict[str, Any]:
    return {
        "train_files": f"{folder}/data/alpaca_en_demo.json",
        "tokenizer": f"{folder}/model",
        "seq_length": SEQ_LENGTH,
        "template": "llama3",
        "batch_size": 2,
        "seed": 42,
        "cache_dir": f"{folder}/cache",
    }


def through_lightning_cli(folder: str, layout: dict[str, int], devices: int, **more: Any) -> None:
    strategy = {"class_path": "MCoreStrategy", "init_args": {**layout, "use_distributed_optimizer": True}}
    record = {"class_path": "lightning_mcore.arguments.llamafactory.output.LossRecord"}
    settings = {
        "seed_everything": 42,
        "trainer": {
            **{"accelerator": "cpu", "devices": devices, "strategy": strategy, "max_steps": STEPS},
            **{"plugins": [{"class_path": "MCorePrecision", "init_args": {"precision": "bf16-mixed"}}]},
            **{"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "log_every_n_steps": 1, "logger": False},
            **{"enable_checkpointing": False, "enable_progress_bar": False, "default_root_dir": f"{folder}/cli"},
            **{"callbacks": [{**record, "init_args": {"folder": f"{folder}/cli"}}]},
        },
        "model": {
            "class_path": "lightning_mcore.MCoreGPT.from_pretrained",
            "init_args": {
                **{"path": f"{folder}/model", "seq_length": SEQ_LENGTH},
                "recipe": {"betas": [0.9, 0.999], **RECIPE, **more.pop("recipe", {})},
                **more,
            },
        },
        "data": {"class_path": "MCoreFinetuningData", "init_args": data(folder)},
    }
    path = Path(folder, f"fit-{layout['tensor_model_parallel_size']}.yaml")
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert fit_command.run(["fit", "--config", str(path)]) == 0


def through_arguments(folder: str, layout: dict[str, int], devices: int) -> None:
    arguments = TrainingArguments(
        output_dir=f"{folder}/arguments",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        bf16=True,
        use_distributed_optimizer=True,
        sequence_packing=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **layout,  # type: ignore[arg-type]
        **RECIPE,
    )
    trainer = arguments.trainer(devices=devices, callbacks=[LossRecord(f"{folder}/arguments")])
    named = data(folder)
    files, tokenizer = named["train_files"], named["tokenizer"]
    more = {"template": "llama3", "cache_dir": named["cache_dir"]}
    datamodule = arguments.data(files, tokenizer, SEQ_LENGTH, overrides=more)
    trainer.fit(arguments.model(f"{folder}/model", seq_length=SEQ_LENGTH), datamodule=datamodule)


def through_llama_factory(folder: str, layout: dict[str, int], devices: int) -> None:
    words = [f"{folder}/run.yaml", *(f"{key}={value}" for key, value in layout.items())]
    assert llamafactory_command.run([*words, "--devices", str(devices)]) == 0


DOORS: dict[str, Callable[[str, dict[str, int], int], None]] = {
    "python": through_python,
    "cli": through_lightning_cli,
    "arguments": through_arguments,
    "out": through_llama_factory,
}


def train(folder: str, layout: dict[str, int], devices: int) -> None:
    """Train through every door, on this rank."""
    warnings.filterwarnings("ignore")
    for door in DOORS.values():
        door(folder, layout, devices)


def logged(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a log without times."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [{name: value for name, value in line.items() if not name.endswith("_time")} for line in lines]


@pytest.mark.parametrize("devices", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_four_doors_lead_to_the_same_run(tmp_path: Path, devices: int) -> None:
    write_run(tmp_path, FACTORY, data=rows(60))
    run_ranks(devices, train, str(tmp_path), {"tensor_model_parallel_size": devices}, devices, timeout=240)
    logs = {name: logged(tmp_path / name / LOG) for name in DOORS}
    lines = logs["python"]
    assert [line["current_steps"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert len({line["lr"] for line in lines}) > 2
    for name, log in logs.items():
        assert log == logs["python"], name


def train_adapters(folder: str) -> None:
    """Train adapters through three doors, on this rank; another adapter is merged first."""
    warnings.filterwarnings("ignore")
    layout = {"tensor_model_parallel_size": 2}
    pl.seed_everything(42, verbose=False)  # A is drawn from it
    for door in (through_python, through_lightning_cli):
        given = {"recipe": {"loraplus_lr_ratio": 4.0}, "adapters": [f"{folder}/first"], "lora": ADAPTED}
        door(folder, layout, 2, **given)
    through_llama_factory(folder, layout, 2)


def test_three_doors_lead_to_the_same_run_of_adapters(tmp_path: Path) -> None:
    write_run(tmp_path, {**FACTORY, **ADAPTED_FACTORY, "adapter_name_or_path": str(tmp_path / "first")}, data=rows(60))
    (tmp_path / "first").mkdir()
    config = {"peft_type": "LORA", "target_modules": ["v_proj"], "r": 4, "lora_alpha": 8}
    (tmp_path / "first" / "adapter_config.json").write_text(json.dumps(config))
    stem, draw = "base_model.model.model.layers.{}.self_attn.v_proj.lora_{}.weight", torch.Generator().manual_seed(1)
    shapes = {stem.format(layer, kind): shape for layer in range(4) for kind, shape in (("A", (4, 32)), ("B", (16, 4)))}
    tensors = {key: torch.randn(shape, generator=draw) for key, shape in shapes.items()}
    save_file(tensors, tmp_path / "first" / "adapter_model.safetensors")
    run_ranks(2, train_adapters, str(tmp_path), timeout=240)
    logs = {name: logged(tmp_path / name / LOG) for name in ("python", "cli", "out")}
    assert [line["current_steps"] for line in logs["python"]] == list(range(1, STEPS + 1))
    assert logs["cli"] == logs["python"]
    assert logs["out"] == logs["python"]
