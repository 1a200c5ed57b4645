# SPDX-License-Identifier: Apache-2.0
"""What a LLaMA-Factory file may not say: one sentence each, naming what contradicts what."""

import json
import os
import re
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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("llama3"), LLAMA3)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["finetuning_type=oft"], "finetuning_type: oft is not supported; choose full, freeze or lora"),
        (
            ["finetuning_type=freeze", "lora_rank=4"],
            "lora_rank: 4 is for finetuning_type: lora; leave it out, or choos",
        ),
        (
            ["finetuning_type=freeze", "adapter_name_or_path=a"],
            "adapter_name_or_path: 'a' is for finetuning_type: lora; leave it out",
        ),
        (["finetuning_type=freeze", "quantization_bit=4"], "quantization_bit: 4 is for one adapter, new or contin"),
        (["finetuning_type=freeze", "use_llama_pro=true"], "use_llama_pro: True belongs to a way of fine-tuning that"),
        (["lora_rank=4"], "lora_rank: 4 is for finetuning_type: lora; leave it out, or choose that"),
        (["finetuning_type=lora", "lora_rank=0"], "lora_rank=0 is too small; choose 1 or more"),
        (["finetuning_type=lora", "lora_dropout=1.5"], r"lora_dropout=1.5 is not in \[0, 1\)"),
        (["finetuning_type=lora", "adapter_name_or_path=a", "lora_rank=4"], "lora_rank: 4 contradicts adapter_name_or"),
        (["finetuning_type=lora", "adapter_folder=a"], "adapter_folder: a is a folder inside adapter_name_or_path"),
        (["finetuning_type=lora", "pissa_init=true"], "pissa_init: True belongs to PiSSA, which changes the weights"),
        (
            ["finetuning_type=lora", "quantization_bit=8"],
            "quantization_bit: 8 with quantization_type: nf4 is not supported; choose 4 and nf4",
        ),
        (
            ["finetuning_type=lora", "quantization_bit=4", "adapter_name_or_path=a,b"],
            "4 is for one adapter, new or cont",
        ),
        (["quantization_bit=4"], "quantization_bit: 4 is for one adapter, new or continued; choose finetuning_ty"),
        (["create_new_adapter=true"], "create_new_adapter: True is for finetuning_type: lora; leave it out"),
        (["loraplus_lr_ratio=16"], "loraplus_lr_ratio: 16 is for finetuning_type: lora; leave it out"),
        (
            ["loraplus_lr_embedding=1e-5"],
            "loraplus_lr_embedding: 1e-05 needs loraplus_lr_ratio; give both, or leave it out",
        ),
        (["export_dir=a"], "export_dir: 'a' belongs to LLaMA-Factory's export"),
        (
            ["do_train=false", "export_dir=a", "quantization_bit=4"],
            "quantization_bit: 4 contradicts export_dir: a, bec",
        ),
        (["do_train=false", "export_dir=a", "export_quantization_bit=4"], "export_quantization_bit: 4 belongs to"),
        (["do_train=false", "export_dir=a", "export_size=0"], "export_size=0 is too small; choose 1 or more"),
        (["stage=ppo"], "stage: ppo is not supported; choose pt, sft, dpo, kto or rm"),
        (
            ["stage=dpo"],
            r"'alpaca_en_demo' holds single answers \(neither ranking nor kto_tag .*stage: dpo learns from pa",
        ),
        (
            ["stage=kto", "dataset=dpo_en_demo"],
            r"holds pairs \(ranking: true in .*stage: kto learns from tagged answers",
        ),
        (
            ["dataset=dpo_en_demo"],
            r"holds pairs .*stage: sft learns from single answers .*; choose .* stage: dpo or rm",
        ),
        (["dataset=kto_en_demo"], r"holds tagged answers \(a kto_tag in .*stage: sft learns from single answers"),
        (["stage=dpo", "pref_loss=kto_pair"], "pref_loss: kto_pair is not supported; choose sigmoid, hinge, ipo"),
        (["pref_beta=0.2"], r"pref_beta: 0.2 is for stage: dpo or kto; leave it out, or choose that"),
        (["stage=kto", "pref_ftx=1"], r"pref_ftx: 1 is for stage: dpo; leave it out"),
        (["stage=rm", "ref_model=a"], r"ref_model: 'a' is for stage: dpo or kto; leave it out"),
        (
            ["stage=dpo", "pref_loss=hinge", "dpo_label_smoothing=0.1"],
            "dpo_label_smoothing: 0.1 has no meaning for pref_loss: hinge; leave it out, or choose sigmoid",
        ),
        (["stage=dpo", "pref_loss=orpo", "ref_model=a"], "ref_model: 'a' has no meaning for pref_loss: orpo"),
        (["stage=dpo", "dpo_label_smoothing=0.6"], r"dpo_label_smoothing: 0.6 is out of range; choose 0 to 0.5"),
        (["stage=dpo", "pref_beta=0"], "pref_beta: 0 leaves nothing to learn; choose a number above 0"),
        (["stage=dpo", "neat_packing=true"], "neat_packing: True is for stages pt and sft; in stage: dpo each answer"),
        (["stage=dpo", "mask_history=true"], "mask_history: True is for stage: sft; in stage: dpo the last answers"),
        (
            ["stage=dpo", "metric_for_best_model=eval_accuracy"],
            "metric_for_best_model='eval_accuracy' is not logged; choose 'loss', 'rewards/accuracies', 'rewards/margin",
        ),
        (
            ["stage=kto", "metric_for_best_model=rewards/accuracies"],
            "metric_for_best_model='rewards/accuracies' is not logged; choose 'loss', 'rewards/margins'",
        ),
        (
            ["metric_for_best_model=rewards/margins"],
            "metric_for_best_model='rewards/margins' is not logged; choose 'loss', 'perplexity', 'accuracy'",
        ),
        (["stage=dpo", "streaming=true"], "streaming: True is for stage: sft; in stage: dpo answers are tokenised"),
        (["stage=dpo", "use_dft_loss=true"], "use_dft_loss: True is for stage: sft"),
        (
            ["stage=dpo", "finetuning_type=lora", "quantization_bit=4", "ref_model=b"],
            "ref_model: b contradicts quantization_bit: 4, because weights in 4 bits cannot make room for those",
        ),
        (["stage=dpo", "ref_model_adapters=a"], "ref_model_adapters: 'a' changes the weights of the reference; merge"),
        (["stage=sfd"], "stage='sfd' is not available; choose 'pt', 'sft', 'rm', 'ppo', 'dpo' or 'kto'"),
        (["cutoff_len=long"], "cutoff_len='long' is of type str"),
        (["cutoff_len=0"], "cutoff_len: 0 is too small; choose 1 or more"),
        (["max_samples=0"], "max_samples: 0 is too small"),
        (["cutof_len=3"], "unknown option 'cutof_len'; did you mean 'cutoff_len'?"),
        (["template=lama3"], "unknown chat template 'lama3'; did you mean 'llama3'?"),
        (["dataset=alpaca_en"], "unknown dataset of .*dataset_info.json 'alpaca_en'; did you mean 'alpaca_en_demo'?"),
        (["dataset_dir=nowhere"], "dataset_dir='nowhere' has no dataset_info.json"),
        (["dataset=null"], "do_train: True needs a dataset"),
        (["dataset=null", "do_train=false"], "dataset is not given"),
        (["model_name_or_path=null"], "model_name_or_path is not given"),
        (["use_mca=true", "use_megatron_bridge=true"], "use_mca: True contradicts use_megatron_bridge: True"),
        (["packing=false", "neat_packing=true"], "neat_packing: True contradicts packing: False"),
        (["packing=false", "use_packed_sequences=true"], "use_packed_sequences: True contradicts packing: False"),
        (["stage=pt", "neat_packing=true"], "neat_packing: True is for stage: sft"),
        (["stage=pt", "train_on_prompt=true"], "train_on_prompt: True is for stage: sft"),
        (["stage=pt", "mask_history=true"], "mask_history: True is for stage: sft"),
        (["stage=pt", "streaming=true"], "streaming: True is for stage: sft"),
        (["train_on_prompt=true", "mask_history=true"], "train_on_prompt: True contradicts mask_history: True"),
        (["template=null", "default_system=x"], "default_system: 'x' needs a template"),
        (["template=null", "enable_thinking=false"], "enable_thinking: False needs a template"),
        (["val_size=1"], "val_size: 1 is neither a share nor a number of samples"),
        (["val_size=2.5"], "val_size: 2.5 is neither a share nor a number of samples"),
        (
            ["val_size=0.1", "eval_dataset=alpaca_en_demo"],
            "val_size: 0.1 and eval_dataset: alpaca_en_demo both say what to evaluate on",
        ),
        (["do_eval=true"], "do_eval: True needs something to evaluate on"),
        (["eval_strategy=steps"], "eval_strategy: steps needs something to evaluate on"),
        (["do_predict=true"], "do_predict: True generates text, which is not supported; set do_eval: true"),
        (["fp8_enable_fsdp_float8_all_gather=true"], "belongs to FSDP, and data parallelism is Megatron's here"),
        (["hub_token=my-secret"], r"hub_token=\.\.\. is not available: nothing is uploaded"),
        (["hub_token=[my-secret]"], r"hub_token=\.\.\. is not available: nothing is uploaded"),
        (["swanlab_api_key=my-secret"], r"swanlab_api_key: \.\.\. belongs to SwanLab"),
        (["early_stopping_steps=2"], "early_stopping_steps: 2 counts evaluations, and there are none"),
        (["streaming=true", "max_samples=3"], "streaming: True contradicts max_samples: 3"),
        (["streaming=true", "val_size=3"], "streaming: True contradicts val_size: 3"),
        (["streaming=true", "max_steps=-1"], "streaming: True needs max_steps"),
        (["streaming=true", "dataset=[alpaca_en_demo, alpaca_en_demo]"], "streaming: True reads one whole dataset"),
        (["disable_gradient_checkpointing=true", "recompute_granularity=full"], "contradicts recompute_granularity"),
        (["moe_aux_loss_coef=0.1", "moe_aux_loss_coeff=0.2"], "moe_aux_loss_coef: 0.1 contradicts moe_aux_loss_coeff"),
        (
            ["mixed_precision=bf16", "bf16=true"],
            "mixed_precision: 'bf16' is not supported; choose bf16_mixed, fp16_mixed",
        ),
        (["mixed_precision=bf16_mixed", "bf16=false"], "mixed_precision: bf16_mixed contradicts bf16: False"),
        (["mixed_precision=bf16_mixed", "fp16=true"], "mixed_precision: bf16_mixed contradicts fp16: True"),
        (["fp8=true", "fp8_backend=torchao"], "fp8_backend='torchao' is not available: torchao's FP8"),
        (["fp8=true", "fp8_backend=msamp"], "fp8_backend='msamp' is not available: MS-AMP"),
        (["fp8_backend=tee"], "fp8_backend='tee' is not available; choose"),
        (["pure_bf16=true", "mixed_precision=null", "bf16=false"], "pure_bf16: True contradicts bf16: False"),
        (
            ["pure_bf16=true", "mixed_precision=null", "bf16=null", "fp16=true"],
            "pure_bf16: True contradicts fp16: True",
        ),
        (["pure_bf16=true", "mixed_precision=fp32", "bf16=null"], "pure_bf16: True contradicts mixed_precision: fp32"),
        (["flash_attn=fa9"], "flash_attn='fa9' is not available; choose 'auto', 'disabled', 'sdpa', 'fa2' or 'fa3'"),
        (["stage=pt", "use_dft_loss=true"], "use_dft_loss: True is for stage: sft"),
        (["use_muon=true"], "use_muon: True treats queries, keys and values as .* MuonWithAdamW"),
        (["use_asft_loss=true"], "use_asft_loss: True needs a second model .* use_dft_loss"),
        (["use_eaft_loss=true"], "use_eaft_loss: True weighs tokens by the entropy of their logits"),
        (["tokenized_path=there"], "tokenized_path: 'there' is where LLaMA-Factory keeps tokens; .* cache_dir"),
        (["freeze_trainable_layers=8"], "freeze_trainable_layers: 8 is for finetuning_type: freeze; leave it out, or"),
        (["overlap_grad_reduce=false"], "overlap_param_gather"),
        (["recompute_method=recompute"], "recompute_method"),
        (["learning_rate"], "'learning_rate' is not key=value"),
    ],
)
def test_what_cannot_be_run_is_refused(file: str, overrides: list[str], sentence: str) -> None:
    refused = pytest.raises((ValueError, TypeError, FileNotFoundError), match=sentence)
    with refused as caught, errors_in_file_keys():
        assert read_export(file, overrides) or read_run(file, overrides)
    assert "\n" not in str(caught.value)
    assert "my-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"model": "m", "train_dataset": "d.yaml", "output_dir": "o"},
            "is in LLaMA-Factory's v1 format (train_dataset)",
        ),
        (
            {"model": "m", "peft_config": {"name": "lora", "export_dir": "o"}},
            "v1 format (peft_config), which is not re",
        ),
        (
            {"model_name_or_path": "m", "template": "qwen3", "infer_backend": "huggingface"},
            "is for chatting with a mod",
        ),
        (
            {"model_name_or_path": "m", "do_predict": True, "eval_dataset": "d", "predict_with_generate": True},
            "do_predict: True generates text, which is not supported; set do_eval: true",
        ),
        (
            {"model_name_or_path": "m", "cutof_len": 3, "stage": "sft"},
            "unknown key of {file} 'cutof_len'; did you mean",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else list(value)[1],
)
def test_files_of_other_commands_are_named(tmp_path: Path, keys: dict[str, Any], sentence: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(keys), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(sentence.replace("{file}", str(file)))):
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
            with pytest.raises(kind, match=f"^{re.escape(wanted)}$"), errors_in_file_keys():
                raise kind(given)
    with pytest.raises(FileNotFoundError, match=r"^seq_length$"), errors_in_file_keys():
        raise FileNotFoundError("seq_length")


def test_texts_are_not_read_of_conversations(tmp_path: Path) -> None:
    info = {"talks": {"file_name": "alpaca_en_demo.json", "formatting": "sharegpt"}}
    file = write_run(tmp_path, LLAMA3, info=info)
    with pytest.raises(ValueError, match="the dataset 'talks' holds conversations, and stage: pt reads texts"):
        read_run(file, ["stage=pt", "dataset=talks"])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", "a: [", "line 1 of .*a.yaml is not YAML"),
        ("a.yaml", "- a", "does not hold keys with values"),
        ("a.yaml", "a: 1\nb: 2\na: 3", "line 3 of .*a.yaml is not YAML: the key 'a' appears twice; keep one"),
        ("a.json", "{", "line 1 of .*a.json is not JSON"),
        ("a.txt", "a: 1", "is neither YAML nor JSON"),
        ("a.yaml", "a: 2001-13-45", "a.yaml has a value that YAML does not allow: month must be in 1..12"),
        ("a.yaml", "a: !!bool x", "a.yaml has a value that YAML does not allow"),
        ("a.yaml", "a: !!timestamp x", "a.yaml has a value that YAML does not allow"),
        ("a.yaml", "[" * 5000, "a.yaml has a value that YAML does not allow: maximum recursion depth"),
        ("a.yaml", "a: \xff", "a.yaml is not text in UTF-8: .*; save it in UTF-8"),
        ("a.json", '{"a": "\xff"}', "a.json is not text in UTF-8"),
        ("a.json", "[" * 5000, "a.json is not JSON: maximum recursion depth"),
        ("a.json", '{"a": ' + "1" * 5000 + "}", "a.json is not JSON: Exceeds the limit"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=sentence):
        read_file(str(tmp_path / name), "a training file of LLaMA-Factory")
    with pytest.raises(FileNotFoundError, match="is not a file; give a training file of LLaMA-Factory"):
        read_file(str(tmp_path / "b.yaml"), "a training file of LLaMA-Factory")


# The folder


@pytest.mark.parametrize("note", ["", "3", '["../../x"]', "[1]", "[" * 5000], ids=lambda note: note[:10])
def test_a_damaged_note_of_the_files_to_move_is_refused(tmp_path: Path, note: str) -> None:
    inside = Path(unfinished(str(tmp_path / "out")))
    inside.mkdir(parents=True)
    (inside / ".files-of-the-model").write_text(note)
    with pytest.raises(
        ValueError, match=r"\.files-of-the-model is damaged; move the files of .* to .*, or delete both"
    ):
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
    with pytest.raises(ValueError, match=r"already holds a model .*set overwrite_output_dir: true"):
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
