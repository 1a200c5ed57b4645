# SPDX-License-Identifier: Apache-2.0
"""Lines of flags, as LLaMA-Factory's and ROLL's pages write them, mean what the same keys in a file mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser

from lightning_mcore.arguments import Seq2SeqTrainingArguments
from lightning_mcore.arguments.llamafactory.flags import read_words
from lightning_mcore.arguments.llamafactory.rules import OWN_KEYS
from lightning_mcore.arguments.llamafactory.run import read_run
from lightning_mcore.cli.llamafactory import run
from tests.support.factory_files import LLAMA3, MERGE_LORA, QWEN3_LORA, QWEN3_MOE, write_run

PREFERENCES = {"stage": "dpo", "dataset": "dpo_en_demo", "pref_loss": "sigmoid", "pref_beta": 0.1}


def as_flags(keys: dict[str, Any], joined: bool) -> list[str]:
    """Return keys as words: ``--key value``, or ``--key=value``; what is true stands alone, as on the pages."""
    words: list[str] = []
    for name, value in keys.items():
        text = json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
        alone = value is True and name in ("do_train", "bf16", "use_distributed_optimizer", "overlap_grad_reduce")
        words += [f"--{name}"] if alone else [f"--{name}={text}"] if joined else [f"--{name}", text]
    return words


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    ("keys", "model"),
    [
        (QWEN3_MOE, "qwen3_moe"),
        (LLAMA3, "llama"),
        ({**QWEN3_LORA, "resume_from_checkpoint": "false"}, "qwen3"),
        ({**QWEN3_LORA, **PREFERENCES, "resume_from_checkpoint": "false"}, "qwen3"),
    ],
    ids=["experts", "dense", "adapters", "pairs"],
)
def test_flags_are_the_keys_of_a_file(tmp_path: Path, keys: dict[str, Any], model: str, joined: bool) -> None:
    file = write_run(tmp_path, keys, model)
    written = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    found, changes = read_words(as_flags(written, joined), [])
    assert found is None
    assert read_run(None, changes) == read_run(file)


def test_flags_have_the_values_that_transformers_parser_gives_them(tmp_path: Path) -> None:
    words = [
        *("--output_dir", str(tmp_path), "--bf16", "--learning_rate", "3e-6", "--max_steps", "-1", "--seed", "7"),
        *("--eval_strategy", "no", "--report_to", "csv", "--overlap_grad_reduce", "false"),
        *("--lr_scheduler_type=cosine_with_min_lr", "--lr_scheduler_kwargs", '{"min_lr": 1e-6}', "--run-name", "1"),
        *("--no_delay_grad_reduce", "--sequence_parallel=False", "--use_cpu", "yes", "--recompute_granularity", "full"),
        *("--resume_from_checkpoint", "true", "--warmup_steps", "0.1", "--additional_configs", '{"qk_clip": false}'),
    ]
    [expected] = HfArgumentParser([Seq2SeqTrainingArguments], allow_abbrev=False).parse_args_into_dataclasses(words)
    _, changes = read_words(words, [])
    values = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in changes)}
    values["learning_rate"] = float(values["learning_rate"])
    values["lr_scheduler_kwargs"] = {"min_lr": 1e-6}
    assert Seq2SeqTrainingArguments(**values) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lerning_rate", "3"], "unknown option '--lerning_rate'; did you mean '--learning_rate'?"),
        (
            ["--learning_rat", "3"],
            "unknown option '--learning_rat'; did you mean '--learning_rate'?",
        ),  # no abbreviation
        (["--device", "3"], "unknown option '--device'; did you mean '--devices'?"),
        (["--learning_rate"], "--learning_rate: it needs a value; give --learning_rate VALUE"),
        (["--learning_rate", "--bf16"], "--learning_rate: it needs a value"),
        (["--do_train", "a", "b"], "'b' belongs to no option; give one FILE"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_flags_are_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "api", "webui", "help"])
def test_other_commands_of_llamafactory_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "a.yaml"]) == 2
    assert f"llamafactory-cli {command} is not available here; choose train, or export" in capsys.readouterr().err


def test_no_words_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train"]) == 2
    assert "no FILE is given; give a training file of LLaMA-Factory, or its keys as flags" in capsys.readouterr().err


def test_the_command_of_llamafactory_may_stand_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path, LLAMA3)
    for words in (["train", file], [file], ["train", file, "--dataset_dir", "none"], [file, "dataset_dir=none"]):
        assert run([*words, "--cutoff_len", "8", "stage=ppo"]) == 2
        assert "stage: ppo is not supported; choose pt, sft" in capsys.readouterr().err
    (tmp_path / "merge.yaml").write_text(yaml.safe_dump({**MERGE_LORA, "export_size": 0}))
    assert run(["export", "merge.yaml"]) == 2
    assert "export_size=0 is too small" in capsys.readouterr().err


def test_the_environment_of_llamafactorys_launcher_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_mcore.cli import llamafactory

    asked: dict[str, Any] = {}

    def trainer(self: Any, **given: Any) -> None:
        asked.update(given)
        raise RuntimeError("that is enough")

    monkeypatch.setattr(Seq2SeqTrainingArguments, "trainer", trainer)
    file = write_run(tmp_path, LLAMA3)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RDZV_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    for words, devices in (["train", file], 4), ([file, "--devices", "1"], 1):
        with pytest.raises(RuntimeError, match="that is enough"):
            llamafactory.run(words)
        assert (asked["devices"], asked["num_nodes"]) == (devices, 2)
    monkeypatch.setenv("NNODES", "two")
    assert llamafactory.run([file]) == 2
    assert "NNODES=two in the environment is not a number" in capsys.readouterr().err
    monkeypatch.setenv("RDZV_ID", "job")
    assert llamafactory.run([file]) == 2
    assert "RDZV_ID=job asks for elastic ranks of torchrun" in capsys.readouterr().err


def test_every_key_of_a_file_is_a_flag() -> None:
    for name in sorted(OWN_KEYS):
        _, [change] = read_words([f"--{name}", "1"], [])
        assert change.startswith(f"{name}=")
