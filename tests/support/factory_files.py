# SPDX-License-Identifier: Apache-2.0
"""Training files of LLaMA-Factory at tiny size, with the model and the data that they name, made on the spot.

Each has the keys of a file of LLaMA-Factory's examples (ff6d4d12), with small values. :func:`write_run` makes a folder
of one. Only the process that calls it imports transformers.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.hf_models import VOCAB_SIZE, save_tiny

QWEN3_MOE: dict[str, Any] = {  # examples/megatron/qwen3_moe_full.yaml
    "model_name_or_path": "model",
    "do_train": True,
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "alpaca_en_demo",
    "preprocessing_num_workers": 2,
    "cutoff_len": 32,
    "template": "qwen3_nothink",
    "output_dir": "out",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 2,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_steps": 100,
    "lr_scheduler_type": "constant",
    "bf16": True,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 4,
    "bias_activation_fusion": True,
    "apply_rope_fusion": True,
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "recompute_granularity": "full",
}
LLAMA3: dict[str, Any] = {  # examples/megatron_bridge/llama3_sft.yaml, with finetuning_type: full
    "model_name_or_path": "model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 32,
    "preprocessing_num_workers": 2,
    "output_dir": "out",
    "logging_steps": 1,
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "max_steps": 6,
    "save_steps": 3000,
    "learning_rate": 5.0e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "bf16": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
    "mixed_precision": "bf16_mixed",
    "use_packed_sequences": False,
    "export_hf_on_finish": False,
}
QWEN3_LORA: dict[str, Any] = {  # examples/train_lora/qwen3_lora_sft.yaml
    "model_name_or_path": "model",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "alpaca_en_demo",
    "template": "qwen3_nothink",
    "cutoff_len": 32,
    "max_samples": 1000,
    "preprocessing_num_workers": 2,
    "dataloader_num_workers": 0,
    "output_dir": "out",
    "logging_steps": 1,
    "save_steps": 6,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5.0e-2,
    "max_steps": 12,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
PRETRAIN = {"stage": "pt", "template": None}  # examples/train_lora/qwen3_lora_pretrain.yaml
ZERO3 = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
TRAIN_LORA: dict[str, tuple[dict[str, Any], str | None]] = {
    "qwen3_lora_sft": ({}, None),
    "qwen3_lora_pretrain": (PRETRAIN, None),
    "qwen3_lora_sft_ds3": ({"deepspeed": ZERO3}, None),
    "qwen3_lora_sft_ray": ({"ray_num_workers": 4}, None),
    "qwen3_lora_dpo": ({"stage": "dpo", "pref_beta": 0.1, "pref_loss": "sigmoid", "dataset": "dpo_en_demo"}, None),
    "qwen3_lora_kto": ({"stage": "kto", "pref_beta": 0.1, "dataset": "kto_en_demo"}, None),
    "qwen3_lora_reward": ({"stage": "rm", "dataset": "dpo_en_demo"}, None),
    "qwen3_preprocess": ({"tokenized_path": "tokens", "do_train": None}, "tokenized_path: 'tokens' is where"),
}
"""The text files of examples/train_lora: what differs from ``QWEN3_LORA``, and why some are refused."""

MERGE_LORA: dict[str, Any] = {  # examples/merge_lora/qwen3_lora_sft.yaml
    "model_name_or_path": "model",
    "adapter_name_or_path": "out",
    "template": "qwen3_nothink",
    "trust_remote_code": True,
    "export_dir": "merged",
    "export_size": 5,
    "export_device": "cpu",
    "export_legacy_format": False,
}
_MARKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "user", "assistant")
WORDS = 60


def rows(count: int = 40) -> list[dict[str, str]]:
    """Return exchanges of words that the tokenizer knows, all different."""
    return [
        {"instruction": f"w{number % WORDS} w{number // 7}", "input": "", "output": f"w{number % 9} w{number % 5}"}
        for number in range(count)
    ]


PREFERENCES: dict[str, dict[str, Any]] = {  # data/dataset_info.json
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}


def preferences(name: str, count: int = 40) -> list[dict[str, Any]]:
    """Return rows of a dataset of :data:`PREFERENCES`, of words that the tokenizer knows."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        asked, answers = f"w{number % WORDS} w{number // 7}", [f"w{number % 9} w1", f"w{number % 9} w2 w3"]
        if name == "dpo_en_demo":
            chosen, rejected = ({"from": "gpt", "value": answer} for answer in answers)
            row = {"conversations": [{"from": "human", "value": asked}], "chosen": chosen, "rejected": rejected}
        else:
            messages = [("user", asked), ("assistant", answers[number % 2])]
            row = {"messages": [{"role": role, "content": text} for role, text in messages], "label": number % 2 == 0}
        found.append(row)
    return found


def write_run(
    folder: Path,
    keys: Mapping[str, Any],
    model: str | None = "llama",
    data: Iterable[Mapping[str, Any]] | None = None,
    info: Mapping[str, Any] | None = None,
) -> str:
    """Make a folder with a training file, and with the model and data that it names, and return the file.

    Args:
        folder: Where; made if it is not there.
        keys: Of the file. ``model`` and ``out`` become folders in this one, and so does ``dataset_dir``.
        model: Its ``model_type``; None for none.
        data: Rows of ``alpaca_en_demo``.
        info: More datasets of ``dataset_info.json``; their files are for the caller to write.
    """
    places = {"model_name_or_path": str(folder / "model"), "output_dir": str(folder / "out")}
    values = {key: places.get(key, value) for key, value in keys.items()} | {"dataset_dir": str(folder / "data")}
    (folder / "data").mkdir(parents=True, exist_ok=True)
    whole = {"alpaca_en_demo": {"file_name": "alpaca_en_demo.json"}, **PREFERENCES, **(info or {})}
    for name in PREFERENCES:
        (folder / "data" / f"{name}.json").write_text(json.dumps(preferences(name)), encoding="utf-8")
    (folder / "data" / "dataset_info.json").write_text(json.dumps(whole), encoding="utf-8")
    lines = json.dumps(list(rows() if data is None else data))
    (folder / "data" / "alpaca_en_demo.json").write_text(lines, encoding="utf-8")
    if model is not None:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} if model == "llama" else {}
        save_tiny(model, folder / "model", **rope)
        _save_tokenizer(folder / "model")
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**values, "cache_dir": str(folder / "cache")}), encoding="utf-8")
    return str(file)


def losses(folder: Path, name: str = "loss") -> list[str]:
    """Return the losses that a run wrote down, as text, each behind its step."""
    lines = (folder / "out" / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [f"{line['current_steps']} {line[name]!r}" for line in map(json.loads, lines) if name in line]


def _save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words, and of the marks that templates write."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", "<s>", "</s>", *_MARKS, *(f"w{number}" for number in range(WORDS))]
    assert len(known) <= VOCAB_SIZE
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    words.add_special_tokens(list(_MARKS[:5]))
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    ).save_pretrained(folder)
