# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore plan`` reads a LightningCLI file as ``lightning-mcore fit`` does: unusual forms, and what is wrong.

Each of these was tried with both commands; here only plan is asked.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.cli.lightning_file import settings_of_lightning
from lightning_mcore.cli.plan import run
from lightning_mcore.config.run import RunSettings
from tests.unit.cli.test_plan_command import cli_file, printed

BASE: dict[str, Any] = {
    "trainer.accelerator": "cpu",
    "trainer.devices": 4,
    "trainer.accumulate_grad_batches": 4,
    "trainer.precision": None,
    "trainer.strategy.class_path": "lightning_mcore.MCoreStrategy",
    "trainer.strategy.init_args.tensor_model_parallel_size": 2,
    "trainer.strategy.init_args.sequence_parallel": True,
    "model.class_path": "lightning_mcore.MCoreGPT",
    "model.init_args.vocab_size": 512,
    "model.init_args.seq_length": 64,
    "model.init_args.transformer": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "add_bias_linear": False,
    },
}
STRATEGY, MODEL = "trainer.strategy.init_args.", "model.init_args."
PLUGIN = {"class_path": "MCorePrecision", "init_args": {"precision": "bf16-mixed"}}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module ``mine`` with a data module in it."""
    lines = ("import lightning.pytorch as pl", "", "class Data(pl.LightningDataModule):")
    lines += ("    def __init__(self, batch_size: int, shape: int = 2): ...",)
    (tmp_path / "mine.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mine", None)


def document(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in {**BASE, **changes}.items():
        *folders, name = key.split(".")
        inner = made
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return made


def settings(folder: Path, **changes: Any) -> RunSettings:
    return settings_of_lightning([document(**changes)], [json_file(folder, **changes)], [])


def json_file(folder: Path, **changes: Any) -> str:
    path = folder / "run.yaml"
    path.write_text(json.dumps(document(**changes)), encoding="utf-8")
    return str(path)


QUOTED: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "size": ({STRATEGY + "context_parallel_size": "2"}, "strategy", "context_parallel_size", 2),
    "flag": ({STRATEGY + "use_distributed_optimizer": "true"}, "strategy", "use_distributed_optimizer", True),
    "accumulation": ({"trainer.accumulate_grad_batches": "8"}, "trainer", "accumulate_grad_batches", 8),
    "nodes": ({"trainer.num_nodes": "2"}, "trainer", "num_nodes", 2),
    "null": ({STRATEGY + "tp_comm_overlap_cfg": "null"}, "strategy", "tp_comm_overlap_cfg", None),
    "of data elsewhere": (
        {"data": {"class_path": "elsewhere.Data", "init_args": {"batch_size": 3}}},
        "data",
        "batch_size",
        3,
    ),
    "of own data": ({"data": {"class_path": "mine.Data", "init_args": {"batch_size": "3"}}}, "data", "batch_size", 3),
}


@pytest.mark.parametrize("name", QUOTED)
@pytest.mark.usefixtures("mine")
def test_quoted_values_are_read_as_jsonargparse_reads_them(name: str, tmp_path: Path) -> None:
    changes, part, key, expected = QUOTED[name]
    assert getattr(settings(tmp_path, **changes), part).get(key) == expected


def test_quoted_fields_of_configs_too(tmp_path: Path) -> None:
    given = settings(tmp_path, **{STRATEGY + "ddp_config": {"bucket_size": "9"}}).strategy["ddp_config"]
    assert given["bucket_size"] == 9


def test_quoted_fields_of_the_transformer_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = json_file(tmp_path, **{MODEL + "transformer": {**BASE[MODEL + "transformer"], "num_layers": "8"}})
    code, text, _ = printed(capsys, path, "--json")
    assert code == 0
    assert json.loads(text)["stages"][0]["chunks"][0]["layers"] == [*range(8)]


PRECISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "int": ({"trainer.precision": 32}, "32-true"),
    "16 on the CPU is bf16, as Lightning has it": ({"trainer.precision": 16}, "bf16-mixed"),
    "16 on GPUs": ({"trainer.precision": 16, "trainer.accelerator": "gpu"}, "16-mixed"),
    "plugin of Lightning": (
        {
            "trainer.plugins": [
                {"class_path": "lightning.pytorch.plugins.HalfPrecision", "init_args": {"precision": "bf16-true"}}
            ]
        },
        "bf16-true",
    ),
    "of the strategy, beside the Trainer's default": (
        {"trainer.precision": "32-true", STRATEGY + "precision_plugin": PLUGIN},
        "bf16-mixed",
    ),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_precision_is_found_where_it_is_said(name: str, tmp_path: Path) -> None:
    changes, expected = PRECISIONS[name]
    assert settings(tmp_path, **changes).precision["precision"] == expected


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "precision twice": ({"trainer.precision": "bf16-mixed", "trainer.plugins": [PLUGIN]}, "both set the precision"),
    "precision of nobody": ({"trainer.precision": "fp32"}, "fp32"),
    "precision against the strategy's": (
        {"trainer.precision": "16-true", STRATEGY + "precision_plugin": PLUGIN},
        "contradicts the precision_plugin",
    ),
    "strategy as a path in text": ({"trainer.strategy": "lightning_mcore.MCoreStrategy"}, "is not MCoreStrategy"),
    "name of the strategy as a path": ({"trainer.strategy.class_path": "mcore"}, "unknown class 'mcore'"),
    "class of the model": ({"model.class_path": "lightning_mcore.MCoreGTP"}, "did you mean 'MCoreGPT'"),
    "short class of the model": ({"model.class_path": "MCoreGTP"}, "did you mean 'MCoreGPT'"),
    "class of the data": (
        {"data": {"class_path": "lightning_mcore.MCorePretrainingDate"}},
        "did you mean 'MCorePretrainingData'",
    ),
    "data that lack something": (
        {"data": {"class_path": "MCorePretrainingData", "init_args": {"data_paths": "x"}}},
        "lacks seq_length",
    ),
    "no model's sizes": ({MODEL + "transformer": None}, "transformer=None"),
    "no accumulation": ({"trainer.accumulate_grad_batches": 0}, "accumulate_grad_batches=0 is too small"),
    "no node": ({"trainer.num_nodes": 0}, "`num_nodes` must be a positive integer"),
    "null for a size": ({STRATEGY + "context_parallel_size": None}, "context_parallel_size=None"),
    "accelerator": ({"trainer.accelerator": "cpuu"}, "accelerator='cpuu'"),
    "clipping": ({"trainer.gradient_clip_algorithm": "foo"}, "`gradient_clip_algorithm` foo is invalid"),
    "clipping without a number": ({"trainer.gradient_clip_val": "x"}, "gradient_clip_val='x'"),
    "reloading": ({"trainer.reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs=-1"),
    "time": ({"trainer.max_time": "abc"}, "is not a valid duration"),
    "two that are right alone": (
        {"trainer.check_val_every_n_epoch": None, "trainer.val_check_interval": 0.5},
        "Lightning refuses the arguments of the Trainer together: `val_check_interval` should be an integer",
    ),
    "share": ({"trainer.limit_val_batches": 2.5}, "limit_val_batches=2.5"),
    "epochs": ({"trainer.max_epochs": -2}, "max_epochs=-2"),
    "devices of a CPU by number": ({"trainer.devices": [0, 1, 2, 3]}, "an int > 0"),
    "align_grad_reduce without a pipeline": (
        {STRATEGY + "align_grad_reduce": True, STRATEGY + "overlap_grad_reduce": True},
        "pipeline_model_parallel_size=2 or more",
    ),
    "betas": ({MODEL + "recipe": {"betas": [0.9, 0.95, 0.99]}}, "betas=[0.9, 0.95, 0.99]"),
    "activation": (
        {MODEL + "transformer": {**BASE[MODEL + "transformer"], "activation_func": "silux"}},
        "is not a function; give an import path, or for an activation one of gelu, silu",
    ),
    "scheduler alone": (
        {"lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2}}},
        "without optimizer",
    ),
    "empty key at the top": ({"trainr": {}}, "unknown key 'trainr'; did you mean 'trainer'?"),
    "empty keys at the top": ({"trainr.devices": {}}, "unknown key 'trainr'; did you mean 'trainer'?"),
    "empty key of the trainer": ({"trainer.loger": {}}, "unknown key of trainer 'loger'; did you mean 'logger'?"),
    "empty key of the model": (
        {MODEL + "recip": {}},
        "unknown key of model 'recip'; did you mean 'recipe'?",
    ),
    "trainer as a number": ({"trainer": 3}, "trainer=3 is not a mapping; give its arguments by name"),
    "trainer as a list": ({"trainer": [1]}, "trainer=[1] is not a mapping; give its arguments by name"),
    "no trainer": ({"trainer": None}, "trainer=None is not a mapping; give its arguments by name"),
    "seed": ({"seed_everything": "x"}, "seed_everything='x' does not fit; choose True or False"),
    "no recipe": ({MODEL + "recipe": None}, "recipe=None"),
    "two recipes": (
        {"optimizer": {"class_path": "torch.optim.AdamW"}, MODEL + "recipe": {"learning_rate": 0.5}},
        "model.recipe.learning_rate=0.5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_fit_refuses_plan_refuses(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, sentence = WRONG[name]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**document(), **changes} if "trainer" in changes else document(**changes)))
    code, text, error = printed(capsys, str(path))
    assert code == 2
    assert sentence in " ".join((text + error).split())
    assert "Traceback" not in error


def test_a_wrong_key_below_the_name_of_a_command_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"fit": document(**{"trainer.devicess": 2})}), encoding="utf-8")
    code, _, error = printed(capsys, str(path))
    assert code == 2
    assert "unknown key of trainer 'devicess'; did you mean 'devices'?" in error


def test_empty_mappings_of_known_keys_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {STRATEGY + "ddp_config": {}, MODEL + "recipe": {}, "model.dict_kwargs": {}}
    assert printed(capsys, json_file(tmp_path, **changes))[0] == 0


def test_the_base_of_this_table_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, json_file(tmp_path))[0] == 0


def test_a_words_class_takes_arguments_and_plus_adds_to_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = json_file(tmp_path, **{"trainer.strategy": "ddp"})
    words = ("--trainer.strategy=MCoreStrategy", "--trainer.strategy.pipeline_model_parallel_size=2")
    code, text, _ = printed(capsys, path, *words, "--trainer.plugins+=MCorePrecision", "--json")
    assert code == 0
    assert json.loads(text)["layout"]["pipeline_model_parallel_size"] == 2


@pytest.mark.parametrize(("momentum", "moments"), [("0.9", 1), ("0.0", 0)])
def test_the_optimizer_of_the_file_decides_the_memory(
    momentum: str, moments: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--optimizer=torch.optim.SGD", f"--optimizer.momentum={momentum}", "--json")
    stage = json.loads(printed(capsys, cli_file(tmp_path), *words)[1])["stages"][0]
    expected = 4 * (1 + moments) * stage["parameters"]["total"]
    assert stage["memory_bytes"]["optimizer"] == pytest.approx(expected, rel=0.01)


def test_the_short_form_of_config_names_a_file(tmp_path: Path) -> None:
    assert run(["-c", json_file(tmp_path), "--json"]) == 0
