# SPDX-License-Identifier: Apache-2.0
"""What a LLaMA-Factory file may not say: one sentence each, naming what contradicts what."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.arguments.documents import read_file
from lightning_mcore.arguments.llamafactory.export import read_export
from lightning_mcore.arguments.llamafactory.output import is_waiting, move_in, unfinished, where_to_resume
from lightning_mcore.arguments.llamafactory.rules import errors_in_file_keys
from lightning_mcore.arguments.llamafactory.run import read_run
from lightning_mcore.cli.plan import run as plan
from tests.support.factory_files import LLAMA3, write_run
from tests.support.sentences import refuses


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("llama3"), LLAMA3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["finetuning_type=oft"],
        ["finetuning_type=freeze", "lora_rank=4"],
        ["finetuning_type=freeze", "adapter_name_or_path=a"],
        ["finetuning_type=freeze", "quantization_bit=4"],
        ["finetuning_type=freeze", "use_llama_pro=true"],
        ["lora_rank=4"],
        ["finetuning_type=lora", "lora_rank=0"],
        ["finetuning_type=lora", "lora_dropout=1.5"],
        ["finetuning_type=lora", "adapter_name_or_path=a", "lora_rank=4"],
        ["finetuning_type=lora", "adapter_folder=a"],
        ["finetuning_type=lora", "pissa_init=true"],
        ["finetuning_type=lora", "quantization_bit=8"],
        ["finetuning_type=lora", "quantization_bit=4", "adapter_name_or_path=a,b"],
        ["quantization_bit=4"],
        ["create_new_adapter=true"],
        ["loraplus_lr_ratio=16"],
        ["loraplus_lr_embedding=1e-5"],
        ["export_dir=a"],
        ["do_train=false", "export_dir=a", "quantization_bit=4"],
        ["do_train=false", "export_dir=a", "export_quantization_bit=4"],
        ["do_train=false", "export_dir=a", "export_size=0"],
        ["stage=ppo"],
        ["stage=dpo"],
        ["stage=kto", "dataset=dpo_en_demo"],
        ["dataset=dpo_en_demo"],
        ["dataset=kto_en_demo"],
        ["stage=dpo", "pref_loss=kto_pair"],
        ["pref_beta=0.2"],
        ["stage=kto", "pref_ftx=1"],
        ["stage=rm", "ref_model=a"],
        ["stage=dpo", "pref_loss=hinge", "dpo_label_smoothing=0.1"],
        ["stage=dpo", "pref_loss=orpo", "ref_model=a"],
        ["stage=dpo", "dpo_label_smoothing=0.6"],
        ["stage=dpo", "pref_beta=0"],
        ["stage=dpo", "neat_packing=true"],
        ["stage=dpo", "mask_history=true"],
        ["stage=dpo", "metric_for_best_model=eval_accuracy"],
        ["stage=kto", "metric_for_best_model=rewards/accuracies"],
        ["metric_for_best_model=rewards/margins"],
        ["stage=dpo", "streaming=true"],
        ["stage=dpo", "use_dft_loss=true"],
        ["stage=dpo", "finetuning_type=lora", "quantization_bit=4", "ref_model=b"],
        ["stage=dpo", "ref_model_adapters=a"],
        ["stage=sfd"],
        ["cutoff_len=long"],
        ["cutoff_len=0"],
        ["max_samples=0"],
        ["cutof_len=3"],
        ["torchdynamo=null"],
        ["template=lama3"],
        ["dataset=alpaca_en"],
        ["dataset_dir=nowhere"],
        ["dataset=null"],
        ["dataset=null", "do_train=false"],
        ["model_name_or_path=null"],
        ["use_mca=true", "use_megatron_bridge=true"],
        ["packing=false", "neat_packing=true"],
        ["packing=false", "use_packed_sequences=true"],
        ["stage=pt", "neat_packing=true"],
        ["stage=pt", "train_on_prompt=true"],
        ["stage=pt", "mask_history=true"],
        ["stage=pt", "streaming=true"],
        ["train_on_prompt=true", "mask_history=true"],
        ["template=null", "default_system=x"],
        ["template=null", "enable_thinking=false"],
        ["val_size=1"],
        ["val_size=2.5"],
        ["val_size=0.1", "eval_dataset=alpaca_en_demo"],
        ["do_eval=true"],
        ["eval_strategy=steps"],
        ["do_predict=true"],
        ["fp8_enable_fsdp_float8_all_gather=true"],
        ["hub_token=my-secret"],
        ["hub_token=[my-secret]"],
        ["swanlab_api_key=my-secret"],
        ["early_stopping_steps=2"],
        ["streaming=true", "max_samples=3"],
        ["streaming=true", "val_size=3"],
        ["streaming=true", "max_steps=-1"],
        ["streaming=true", "dataset=[alpaca_en_demo, alpaca_en_demo]"],
        ["disable_gradient_checkpointing=true", "recompute_granularity=full"],
        ["moe_aux_loss_coef=0.1", "moe_aux_loss_coeff=0.2"],
        ["mixed_precision=bf16", "bf16=true"],
        ["mixed_precision=bf16_mixed", "bf16=false"],
        ["mixed_precision=bf16_mixed", "fp16=true"],
        ["fp8=true", "fp8_backend=torchao"],
        ["fp8=true", "fp8_backend=msamp"],
        ["fp8_backend=tee"],
        ["pure_bf16=true", "mixed_precision=null", "bf16=false"],
        ["pure_bf16=true", "mixed_precision=null", "bf16=null", "fp16=true"],
        ["pure_bf16=true", "mixed_precision=fp32", "bf16=null"],
        ["flash_attn=fa9"],
        ["stage=pt", "use_dft_loss=true"],
        ["use_muon=true"],
        ["use_asft_loss=true"],
        ["use_eaft_loss=true"],
        ["tokenized_path=there"],
        ["freeze_trainable_layers=8"],
        ["overlap_grad_reduce=false"],
        ["recompute_method=recompute"],
        ["learning_rate"],
    ],
)
def test_what_cannot_be_run_is_refused(file: str, overrides: list[str]) -> None:
    refused = refuses((ValueError, TypeError, FileNotFoundError))
    with refused as caught, errors_in_file_keys():
        assert read_export(file, overrides) or read_run(file, overrides)
    assert "my-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"model": "m", "train_dataset": "d.yaml", "output_dir": "o"},
        {"model": "m", "peft_config": {"name": "lora", "export_dir": "o"}},
        {"model_name_or_path": "m", "template": "qwen3", "infer_backend": "huggingface"},
        {"model_name_or_path": "m", "do_predict": True, "eval_dataset": "d", "predict_with_generate": True},
        {"model_name_or_path": "m", "cutof_len": 3, "stage": "sft"},
    ],
)
def test_files_of_other_commands_are_named(tmp_path: Path, keys: dict[str, Any]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(keys), encoding="utf-8")
    with refuses(ValueError):
        read_run(str(file))
    if "cutof_len" not in keys:
        code = plan([str(file), "--devices", "1"])
        assert code == 2


def test_a_change_to_null_takes_a_key_back(file: str) -> None:
    """Whatever the file says: it is as if the key were not there."""
    lines = Path(file).read_text(encoding="utf-8")
    other = Path(file).with_name("other.yaml")
    other.write_text(f"{lines}fsdp: [full_shard, auto_wrap]\ncutof_len: 3\nseed: 7\n", encoding="utf-8")
    back = ["fsdp=null", "cutof_len=null"]
    for number in range(2):
        with pytest.raises(ValueError, match=r"fsdp|cutof_len"):
            read_run(str(other), back[number : number + 1])
    assert read_run(str(other), back).arguments.seed == 7
    assert read_run(str(other), [*back, "seed=null"]).arguments.seed == 42
    with pytest.raises(ValueError, match="unknown option 'cutof_len'"):
        read_run(file, ["cutof_len=null"])


def test_errors_about_what_keys_become_name_the_keys() -> None:
    said = {
        "r=0 is too small": "lora_rank=0 is too small",
        "seq_length=7 is not a multiple of 4": "cutoff_len=7 is not a multiple of 4",
        "target_modules has 'foo', and your r is": "lora_target has 'foo', and your r is",
    }
    for given, wanted in said.items():
        for kind in (ValueError, TypeError):
            with refuses(kind, wanted), errors_in_file_keys():
                raise kind(given)
    with refuses(FileNotFoundError, "seq_length"), errors_in_file_keys():
        raise FileNotFoundError("seq_length")


def test_texts_are_not_read_of_conversations(tmp_path: Path) -> None:
    info = {"talks": {"file_name": "alpaca_en_demo.json", "formatting": "sharegpt"}}
    file = write_run(tmp_path, LLAMA3, info=info)
    with refuses(ValueError, "'talks'"):
        read_run(file, ["stage=pt", "dataset=talks"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "a: ["),
        ("a.yaml", "- a"),
        ("a.yaml", "a: 1\nb: 2\na: 3"),
        ("a.json", "{"),
        ("a.txt", "a: 1"),
        ("a.yaml", "a: 2001-13-45"),
        ("a.yaml", "a: !!bool x"),
        ("a.yaml", "a: !!timestamp x"),
        ("a.yaml", "[" * 5000),
        ("a.yaml", "a: ÿ"),
        ("a.json", '{"a": "ÿ"}'),
        ("a.json", "[" * 100_000),
        ("a.json", '{"a": ' + "1" * 5000 + "}"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with refuses(ValueError):
        read_file(str(tmp_path / name), "a training file of LLaMA-Factory")
    with refuses(FileNotFoundError, "is not a file; give a training file of"):
        read_file(str(tmp_path / "b.yaml"), "a training file of LLaMA-Factory")


# The folder


@pytest.mark.parametrize("note", ["", "3", '["../../x"]', "[1]", "[" * 5000], ids=lambda note: note[:10])
def test_a_damaged_note_of_the_files_to_move_is_refused(tmp_path: Path, note: str) -> None:
    inside = Path(unfinished(str(tmp_path / "out")))
    inside.mkdir(parents=True)
    (inside / ".files-of-the-model").write_text(note)
    with refuses(ValueError, ".files-of-the-model is damaged; move the"):
        move_in(str(tmp_path / "out"))


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    assert where_to_resume(folder, overwrite=False) is None
    for name in ("checkpoint-9.ckpt", "checkpoint-10.ckpt", "checkpoint-x.ckpt", "checkpoint-11.ckpt-hf"):
        (tmp_path / "out" / name).mkdir(parents=True)
    assert where_to_resume(folder, overwrite=False) == f"{folder}/checkpoint-10.ckpt"
    assert where_to_resume(folder, overwrite=True) is None


def test_a_model_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with refuses(ValueError, "set overwrite_output_dir: true"):
        where_to_resume(str(tmp_path), overwrite=False)
    assert where_to_resume(str(tmp_path), overwrite=True) is None


def test_a_model_moves_in_whole(tmp_path: Path) -> None:
    source = Path(unfinished(str(tmp_path)))
    source.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (source / name).write_text("new", encoding="utf-8")
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "log.jsonl"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    move_in(str(tmp_path))
    found = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert found == {
        **dict.fromkeys(("config.json", "model.safetensors", "tokenizer.json"), "new"),
        "log.jsonl": "old",
    }


class Killed(BaseException):
    """The process ends."""


NEW = {"config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"}
OLD = {"config.json", "model.safetensors", "tokenizer.json"}


def put(folder: Path, names: set[str], content: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(content, encoding="utf-8")


def killed_after(steps: int, folder: Path) -> bool:
    """Move, and be killed after some operations on the disk; return whether there were more."""
    left = steps

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            move_in(str(folder))
        except Killed:
            return True
    return False


def check_that_nothing_is_lost(folder: Path) -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}
    old, new = dict.fromkeys(OLD, "old"), dict.fromkeys(NEW, "new")
    assert found in (old, new) or "config.json" not in found, found
    assert found == new or is_waiting(str(folder))


def test_whenever_a_move_is_killed_the_old_model_stands_there_or_the_next_run_has_the_new_one(tmp_path: Path) -> None:
    moments = range(20)
    deaths = set()
    for first in moments:  # the first kill, and another while the next run finishes the move
        for second in moments:
            folder = tmp_path / f"{first}-{second}"
            put(folder, OLD, "old")
            put(Path(unfinished(str(folder))), NEW, "new")
            for steps in (first, second):
                if killed_after(steps, folder):
                    deaths.add(steps)
                check_that_nothing_is_lost(folder)
            move_in(str(folder))
            check_that_nothing_is_lost(folder)
            assert not is_waiting(str(folder))
    assert 6 < len(deaths) < len(moments)  # the last ones found nothing left to kill


def test_a_folder_of_that_name_which_is_not_a_model_is_left_alone(tmp_path: Path) -> None:
    put(Path(unfinished(str(tmp_path))), {"thesis.tex"}, "years")
    move_in(str(tmp_path))
    assert not is_waiting(str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*.tex")] == ["thesis.tex"]
    assert not (tmp_path / "thesis.tex").exists()
