# SPDX-License-Identifier: Apache-2.0
"""Reject keys of a LLaMA-Factory file that are unknown, unsupported, or contradict each other.

Each error is one sentence that names the keys. ``run.py`` applies these rules before it uses the file.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_mcore.arguments.documents import overridden, read_file
from lightning_mcore.arguments.fields import check_types, shown
from lightning_mcore.arguments.llamafactory.keys import (
    FREEZE_KEYS,
    LISTED,
    LORA_KEYS,
    NEW_ADAPTER_KEYS,
    REFUSED,
    FactoryKeys,
)
from lightning_mcore.arguments.llamafactory.preference import check_preferences, preference_of
from lightning_mcore.arguments.training_rules import check_metric
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.text import unknown_name

OWN_KEYS = {field.name for field in dataclasses.fields(FactoryKeys)}
"""Names of the supported keys that are not training or Megatron arguments."""

RAY_KEYS = {"ray_num_workers", "ray_init_kwargs", "master_addr", "master_port"}
# Some keys belong to older releases of LLaMA-Factory.
RAY_KEYS |= {"ray_run_name", "ray_storage_path", "resources_per_worker", "placement_strategy"}
"""Keys for a launch on Ray; ``RayArguments`` has more, which are our own options."""

TRAINING_FILE = "a training file of LLaMA-Factory"
_MAY_BE_NULL = ("enable_thinking",)  # None is a value of its own, and not the default

_PRECISIONS = ("bf16_mixed", "fp16_mixed", "fp32")
_BRIDGE_FP8 = "set fp8: hybrid and bf16: true for FP8"


# Keys that only the v1 format has
_V1_KEYS = {
    *("model_class", "train_dataset", "peft_config", "dist_config"),
    *("kernel_config", "quant_config", "init_config"),
}
# Keys of a file that trains, evaluates or exports; a file for chatting has none of them.
_TASK_KEYS = ("stage", "dataset", "eval_dataset", "do_train", "do_eval", "do_predict", "export_dir")
_FILE_KEYS = {
    "seq_length": "cutoff_len",
    "r": "lora_rank",
    "target_modules": "lora_target",
    "modules_to_save": "additional_target",
    "accumulate_grad_batches": "gradient_accumulation_steps",
}
"""Names in errors of other packages, and the keys that they come from."""


@contextlib.contextmanager
def errors_in_file_keys() -> Iterator[None]:
    """Put the file's own keys into errors about the arguments that they become."""
    try:
        yield
    except (TypeError, ValueError) as error:
        names = "|".join(name for name in _FILE_KEYS if name != "r")
        # "r=0 is too small" becomes "lora_rank=0 is too small". The letter r counts only before "=".
        text = re.sub(rf"\b(?:{names}|r(?==))\b", lambda found: _FILE_KEYS[found[0]], str(error))
        # A subclass may need other arguments than one text.
        if type(error) not in (TypeError, ValueError) or text == str(error):
            raise
        raise type(error)(text) from error


def read_keys(path: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a file's keys with their values, after the changes (``key=value``); a change to null removes a key."""
    in_file = read_file(path, TRAINING_FILE)
    given = overridden(in_file, overrides)
    changed = {text.partition("=")[0].partition(".")[0] for text in overrides}
    for key in sorted(changed):
        if given[key] is None and (key in in_file or key in _names()) and key not in _MAY_BE_NULL:
            del given[key]
    refuse_v1(given, path)
    for key in given:
        if key not in _names():
            what = f"key of {path}" if key in in_file else "option"
            raise ValueError(unknown_name(what, key, _names(), LISTED))
    if "infer_backend" in given and not any(given.get(name) for name in _TASK_KEYS):
        raise ValueError(
            f"{path} is for chatting with a model (infer_backend), which is not available here; give a file that trains"
            " (stage and dataset) or merges adapters (export_dir)"
        )
    return given


def refuse_v1(given: Mapping[str, Any], path: str | None) -> None:
    """Raise ValueError for a file in LLaMA-Factory's v1 format, whose keys have other names."""
    found = sorted(_V1_KEYS & given.keys())
    if found and "model_name_or_path" not in given:
        raise ValueError(
            f"{path} is in LLaMA-Factory's v1 format ({', '.join(found)}), which is not read; write model_name_or_path,"
            " stage, finetuning_type, dataset and template instead, as in examples/train_lora of LLaMA-Factory"
        )


@functools.cache
def _names() -> frozenset[str]:
    from lightning_mcore.arguments.training import Seq2SeqTrainingArguments

    of_training = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
    return frozenset(OWN_KEYS | RAY_KEYS | set(REFUSED) | of_training)


def own_keys(given: Mapping[str, Any]) -> FactoryKeys:
    """Return the keys of :class:`FactoryKeys`; TypeError or ValueError for a wrong value, or without a model."""
    keys = FactoryKeys(**{key: value for key, value in given.items() if key in OWN_KEYS})
    check_types(keys)
    if keys.model_name_or_path is None:
        raise ValueError("model_name_or_path is not given; give a Hugging Face folder or name")
    return keys


def check_supported(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a LLaMA-Factory key that is not supported, unless it has its default value."""
    for key, value in given.items():
        if key not in REFUSED:
            continue
        default, reason = REFUSED[key]
        if value != default or isinstance(value, bool) != isinstance(default, bool):  # 0 == False
            raise ValueError(f"{key}: {shown(key, value)} {reason}; leave it out, or keep its default {default!r}")


def check_keys(keys: FactoryKeys, given: Mapping[str, Any]) -> None:
    """Raise ValueError for unsupported values and contradictions; ``given`` has all keys of the file."""
    _check_stage(keys, given)
    _check_adapters(keys, given)
    _check_sizes(keys)
    _check_packing(keys, given)
    _check_learning(keys)
    _check_evaluation(keys, given)
    _check_streaming(keys, given)
    _check_training(keys, given)


def _check_stage(keys: FactoryKeys, given: Mapping[str, Any]) -> None:
    if keys.stage == "ppo":
        raise ValueError("stage: ppo is not supported; choose pt, sft, dpo, kto or rm")
    check_preferences(keys, keys.stage)
    loss = preference_of(keys, keys.stage)["loss"] if keys.learns_preferences else None
    metric = given.get("metric_for_best_model")
    check_metric(metric if isinstance(metric, str) else None, loss)
    if keys.finetuning_type == "oft":
        raise ValueError("finetuning_type: oft is not supported; choose full, freeze or lora")
    if keys.use_mca and keys.use_megatron_bridge:
        raise ValueError("use_mca: True contradicts use_megatron_bridge: True; leave one of them out")


def _check_adapters(keys: FactoryKeys, given: Mapping[str, Any]) -> None:
    others = [name for name in NEW_ADAPTER_KEYS if given.get(name) is not None]
    named = others + [name for name in LORA_KEYS if name not in others and given.get(name)]
    frozen = [name for name in FREEZE_KEYS if getattr(keys, name) != getattr(FactoryKeys, name)]
    for kind, keys_of_kind in (("lora", named), ("freeze", frozen)):
        if keys.finetuning_type != kind and keys_of_kind:
            name = keys_of_kind[0]
            raise ValueError(f"{name}: {given[name]!r} is for finetuning_type: {kind}; leave it out, or choose that")
    if keys.loraplus_lr_ratio is None and keys.loraplus_lr_embedding != FactoryKeys.loraplus_lr_embedding:
        raise ValueError(
            f"loraplus_lr_embedding: {keys.loraplus_lr_embedding} needs loraplus_lr_ratio; give both, or leave it out"
        )
    _check_quantization(keys)
    if isinstance(keys.lora, dict) and "path" not in keys.lora:
        # For its errors alone
        LoRA.of(keys.lora)
    if keys.adapters and not keys.create_new_adapter and others:
        raise ValueError(
            f"{others[0]}: {given[others[0]]!r} contradicts adapter_name_or_path: {keys.adapters[-1]}, whose"
            " adapter_config.json has the settings; leave one of them out, or set create_new_adapter: true"
        )
    if keys.adapter_folder is not None and not keys.adapters:
        raise ValueError(
            f"adapter_folder: {keys.adapter_folder} is a folder inside adapter_name_or_path, which is not given; name"
            " that, or leave adapter_folder out"
        )


def _check_quantization(keys: FactoryKeys) -> None:
    bits, kind = keys.quantization_bit, keys.quantization_type
    if bits is None:
        return
    if bits != 4 or kind != "nf4":
        raise ValueError(f"quantization_bit: {bits} with quantization_type: {kind} is not supported; choose 4 and nf4")
    if keys.ref_model is not None:
        raise ValueError(
            f"ref_model: {keys.ref_model} contradicts quantization_bit: 4, because weights in 4 bits cannot make room"
            " for those of another model; leave one of them out"
        )
    if keys.finetuning_type != "lora" or keys.merged_adapters:
        raise ValueError(
            "quantization_bit: 4 is for one adapter, new or continued; choose finetuning_type: lora with at most one"
            " adapter_name_or_path and without create_new_adapter, or leave it out"
        )


def _check_sizes(keys: FactoryKeys) -> None:
    sizes = {
        "cutoff_len": keys.cutoff_len,
        "buffer_size": keys.buffer_size,
        "max_samples": keys.max_samples,
        "preprocessing_num_workers": keys.preprocessing_num_workers,
        "preprocessing_batch_size": keys.preprocessing_batch_size,
        "early_stopping_steps": keys.early_stopping_steps,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}: {size} is too small; choose 1 or more")
    if keys.val_size < 0 or keys.val_size == 1 or (keys.val_size > 1 and keys.val_size != int(keys.val_size)):
        raise ValueError(
            f"val_size: {keys.val_size} is neither a share nor a number of samples; choose 0 or more, and less than 1,"
            " or a whole number above 1"
        )


def _check_packing(keys: FactoryKeys, given: Mapping[str, Any]) -> None:
    if keys.learns_preferences and keys.packs:
        names = ("packing", "neat_packing", "sequence_packing", "use_packed_sequences")
        name = next(name for name in names if getattr(keys, name))
        raise ValueError(
            f"{name}: True is for stages pt and sft; in stage: {keys.stage} each answer has its own row, and"
            " MCorePreferenceData packs pairs in Python"
        )
    for name in ("neat_packing", "sequence_packing", "use_packed_sequences"):
        if not getattr(keys, name):
            continue
        if keys.packing is False:
            raise ValueError(f"{name}: True contradicts packing: False; leave one of them out")
        if keys.stage == "pt":
            raise ValueError(
                f"{name}: True is for stage: sft; in stage: pt texts are joined, and each sees those before it"
            )


def _check_learning(keys: FactoryKeys) -> None:
    if keys.train_on_prompt and keys.mask_history:
        raise ValueError("train_on_prompt: True contradicts mask_history: True; leave one of them out")
    for name in ("train_on_prompt", "mask_history"):
        if keys.stage != "sft" and getattr(keys, name):
            learnt = "every token is trained on" if keys.stage == "pt" else "the last answers are compared"
            raise ValueError(f"{name}: True is for stage: sft; in stage: {keys.stage} {learnt}")
    if keys.stage != "sft" and keys.use_dft_loss:
        raise ValueError("use_dft_loss: True is for stage: sft; leave it out")
    # These change a named template, and so need one.
    needs = {"default_system": None, "enable_thinking": True, "preserve_thinking": False}
    for name, default in needs.items():
        value = getattr(keys, name)
        if keys.template is None and value != default:
            raise ValueError(
                f"{name}: {value!r} needs a template, and the tokenizer's own cannot be changed; set template"
            )


def _check_evaluation(keys: FactoryKeys, given: Mapping[str, Any]) -> None:
    for name in ("do_predict", "predict_with_generate"):
        if given.get(name):
            raise ValueError(
                f"{name}: True generates text, which is not supported; set do_eval: true for the loss of an evaluation,"
                " and generate with the exported model"
            )
    if given.get("do_train") and not keys.dataset:
        raise ValueError("do_train: True needs a dataset; name one of dataset_info.json")
    if not keys.dataset:
        raise ValueError("dataset is not given; name one of dataset_info.json, which evaluation alone needs too")
    if not given.get("do_train") and not given.get("do_eval"):
        raise ValueError("neither training nor evaluation is asked for; set do_train: true, or do_eval: true")
    if keys.val_size and keys.eval_dataset:
        raise ValueError(
            f"val_size: {keys.val_size} and eval_dataset: {keys.eval_dataset} both say what to evaluate on; leave one"
            " of them out"
        )
    if given.get("do_eval") and not keys.val_size and not keys.eval_dataset:
        raise ValueError("do_eval: True needs something to evaluate on; set eval_dataset or val_size")
    evaluates = isinstance(given.get("eval_strategy"), str) and given["eval_strategy"] != "no"
    if evaluates and not keys.val_size and not keys.eval_dataset:
        raise ValueError(
            f"eval_strategy: {given['eval_strategy']} needs something to evaluate on; set eval_dataset or val_size"
        )
    if keys.early_stopping_steps is not None and not evaluates:
        raise ValueError(
            f"early_stopping_steps: {keys.early_stopping_steps} counts evaluations, and there are none; set"
            " eval_strategy"
        )


def _check_streaming(keys: FactoryKeys, given: Mapping[str, Any]) -> None:
    if not keys.streaming:
        return
    if keys.stage != "sft":
        rows = "texts" if keys.stage == "pt" else "answers"
        raise ValueError(
            f"streaming: True is for stage: sft; in stage: {keys.stage} {rows} are tokenised first; leave it out"
        )
    for name, off in {"max_samples": None, "val_size": 0}.items():
        if getattr(keys, name) != off:
            raise ValueError(
                f"streaming: True contradicts {name}: {getattr(keys, name)}, because the number of samples in a"
                " stream is unknown; leave one of them out"
            )
    if given.get("max_steps", -1) == -1:
        raise ValueError("streaming: True needs max_steps, because the length of an epoch is unknown; set it")


def _check_training(keys: FactoryKeys, given: Mapping[str, Any]) -> None:
    if keys.disable_gradient_checkpointing and given.get("recompute_granularity") is not None:
        raise ValueError(
            f"disable_gradient_checkpointing: True contradicts recompute_granularity: {given['recompute_granularity']},"
            " which recomputes activations; leave one of them out"
        )
    if not 0 <= keys.warmup_ratio < 1:
        raise ValueError(
            f"warmup_ratio: {keys.warmup_ratio} is not a share of the steps; choose 0 or more, and less than 1"
        )
    if keys.warmup_ratio and given.get("warmup_steps"):
        raise ValueError(
            f"warmup_ratio: {keys.warmup_ratio} and warmup_steps: {given['warmup_steps']} both set the length of the "
            "warm-up; leave one of them out"
        )
    coefficients = keys.moe_aux_loss_coef, given.get("moe_aux_loss_coeff")
    if None not in coefficients and coefficients[0] != coefficients[1]:
        raise ValueError(
            f"moe_aux_loss_coef: {coefficients[0]} contradicts moe_aux_loss_coeff: {coefficients[1]}; leave one of"
            " them out"
        )
    _check_precision(keys.mixed_precision, given)
    if keys.pure_bf16:
        wrong = {"bf16": given.get("bf16") is False, "fp16": given.get("fp16")}
        wrong["mixed_precision"] = keys.mixed_precision not in (None, "bf16_mixed")
        for name in (name for name, contradicts in wrong.items() if contradicts):
            raise ValueError(f"pure_bf16: True contradicts {name}: {given[name]}; leave one of them out")


def _check_precision(mixed: str | None, given: Mapping[str, Any]) -> None:
    if mixed is None:
        return
    if mixed not in _PRECISIONS:
        raise ValueError(f"mixed_precision: {mixed!r} is not supported; choose {', '.join(_PRECISIONS)}; {_BRIDGE_FP8}")
    for name in ("bf16", "fp16"):
        same = mixed == f"{name}_mixed"
        if name in given and bool(given[name]) != same:
            raise ValueError(f"mixed_precision: {mixed} contradicts {name}: {given[name]}; leave one of them out")
