# SPDX-License-Identifier: Apache-2.0
"""transformers' own training arguments: which are carried out, and why the others are refused.

``TrainingArguments`` of transformers has more than a hundred fields, and each serves its Trainer. The tables below say
what becomes of them: :data:`HONOURED` land somewhere (``mapping.py``, ``trainer_parts.py``), :data:`REFUSED` are an
error unless they have their default, with the reason. :data:`AS_IT_IS` name what happens anyway, or what nobody can
tell from a default. A field of a newer transformers that is in none of them is refused as unknown.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

_FSDP = "data parallelism is Megatron's; use_distributed_optimizer=True shards the optimizer"
_DDP = "it is an option of torch's DDP, and data parallelism is Megatron's"
_COMPILE = "Megatron's layers are not compiled"
_HUB = "nothing is uploaded while training; upload what save_hf_model=True writes with the tools of huggingface_hub"
_EVALUATION = "evaluation logs loss, perplexity and accuracy of the next token, and gathers no predictions"
_LOADER = "the data module makes its loaders; use a DataLoader of your own with Trainer.fit"
_TRACKIO = "trackio is none of Lightning's loggers"
_GENERATION = "evaluation does not generate; use MCoreGPT.generate"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"), _FSDP),
    **dict.fromkeys(("ddp_broadcast_buffers", "ddp_static_graph"), _DDP),
    "ddp_bucket_cap_mb": f"{_DDP}; ddp_bucket_size is Megatron's, in parameters",
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILE),
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"), _HUB
    ),
    "hub_revision": _HUB,
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"), _EVALUATION),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics", "prediction_loss_only", "label_names"), _EVALUATION),
    **dict.fromkeys(("dataloader_drop_last", "dataloader_persistent_workers", "dataloader_prefetch_factor"), _LOADER),
    **dict.fromkeys(("dataloader_multiprocessing_context", "dataloader_in_order", "train_sampling_strategy"), _LOADER),
    **dict.fromkeys(("remove_unused_columns", "length_column_name"), _LOADER),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _TRACKIO),
    **dict.fromkeys(("sortish_sampler",), _LOADER),
    **dict.fromkeys(("predict_with_generate", "generation_max_length", "generation_num_beams"), _GENERATION),
    "generation_config": _GENERATION,
    "optim_args": "optimizer chooses between Megatron's AdamW and SGD, which have adam_beta1 and the like",
    "optim_target_modules": "it is for optimizers of low rank, such as GaLore",
    "label_smoothing_factor": "the loss is Megatron's vocabulary-parallel cross entropy, which has no smoothing",
    "use_liger_kernel": "Liger's kernels replace layers of transformers, and the model is Megatron's",
    "liger_kernel_config": "Liger's kernels replace layers of transformers, and the model is Megatron's",
    "use_cache": "Megatron's model keeps no cache while training",
    "neftune_noise_alpha": "it patches the embedding of transformers' models",
    "torch_empty_cache_steps": "Megatron's buffers stay; set PYTORCH_CUDA_ALLOC_CONF for fragmented memory",
    "auto_find_batch_size": "a run cannot go on after running out of memory; lightning-mcore plan says what fits",
    "activation_checkpointing_kwargs": "recompute_granularity, recompute_method and recompute_modules say what and how",
    "gradient_checkpointing_kwargs": "recompute_granularity, recompute_method and recompute_modules say what and how",
    "include_num_input_tokens_seen": "log the metric lightning_mcore.TokensSeen in a module of your own",
    "log_level_replica": "ranks but the first log what Lightning's rank_zero functions leave",
    "eval_delay": "Lightning validates from the first epoch or step on",
    "load_best_model_at_end": (
        "weights stay those of the last step; set save_strategy='best', and give the checkpoint to"
        " trainer.test(ckpt_path='best')"
    ),
    "save_on_each_node": "a checkpoint is one folder that all machines write to together",
    "ignore_data_skip": "a resumed run goes on with the very next sample",
    "skip_memory_metrics": "use Trainer(profiler=...) or Lightning's DeviceStatsMonitor",
    "debug": "use Trainer(detect_anomaly=True)",
}
"""Fields that nobody would carry out; the reason, as the end of a sentence."""

HONOURED = frozenset(
    {
        *("output_dir", "run_name", "seed", "data_seed", "full_determinism", "use_cpu", "tf32", "bf16", "fp16"),
        *("bf16_full_eval", "fp16_full_eval", "log_level", "disable_tqdm", "report_to"),
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("num_train_epochs", "max_steps", "max_grad_norm", "learning_rate", "weight_decay"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "average_tokens_across_devices"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        *("activation_checkpointing", "gradient_checkpointing"),
        *("logging_strategy", "logging_steps", "logging_first_step"),
        *("eval_strategy", "eval_steps", "eval_on_start"),
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "enable_jit_checkpoint"),
        *("metric_for_best_model", "greater_is_better"),
        *("dataloader_num_workers", "ddp_backend", "ddp_timeout", "ddp_find_unused_parameters"),
        *("do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
    }
)
"""Fields that land somewhere."""

AS_IT_IS: Mapping[str, str] = {
    "log_on_each_node": "rank 0 of the run logs, and no other",
    "logging_nan_inf_filter": "a loss that is no number is logged as it is",
    "dataloader_pin_memory": "Lightning's loaders decide by the device",
    "restore_callback_states_from_checkpoint": "a resumed run restores the states of its callbacks",
    "local_rank": "launchers before torchrun passed it; the environment says it now",
}
"""Fields whose values cannot be told from what happens anyway; what happens."""

_OFF: tuple[Any, ...] = (None, False, "", "no", [], {})  # HfArgumentParser turns some of these into others


def check_foreign(arguments: Any, of: type) -> None:
    """Refuse fields of transformers that nobody would carry out.

    Args:
        arguments: Arguments that have them.
        of: transformers' class.

    Raises:
        ValueError: One differs from its default.
    """
    for field in dataclasses.fields(of):
        if not field.init or field.name in HONOURED or field.name in AS_IT_IS:
            continue
        value, default = getattr(arguments, field.name), _default(field)
        if _means_the_same(value, default):
            continue
        reason = REFUSED.get(field.name, "this option of transformers is not known here")
        raise ValueError(f"{field.name}={_shown(value)} is not available: {reason}; leave it out")


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _means_the_same(value: Any, default: Any) -> bool:
    """Whether a value is the default, as it was written or as transformers rewrites it when it reads it."""
    value, default = (getattr(item, "value", item) for item in (value, default))  # members of enumerations
    if value == default:
        return True
    if type(value).__name__ == "AcceleratorConfig":  # what transformers makes of None
        return bool(value == type(value)())
    off = any(default == item and type(default) is type(item) for item in _OFF)
    return off and any(value == item and type(value) is type(item) for item in _OFF)


def _shown(value: Any) -> str:
    return "..." if isinstance(value, str) and value.startswith("hf_") else repr(value)  # a token stays secret
