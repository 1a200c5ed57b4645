# SPDX-License-Identifier: Apache-2.0
"""Translate the fields of ``TrainingArguments`` into a run as plain data, a ``RunSettings``.

:data:`LANDINGS` lists the fields that keep their value; the functions below it handle the others. Callbacks and loggers
are class names with arguments, from which ``build.py`` makes the objects. No slow module is imported, so
``lightning-mcore plan`` can read arguments without Lightning or Megatron.

For example, ``ddp_bucket_size=40_000_000`` becomes ``settings.strategy["ddp_config"]["bucket_size"]``, and
``eval_steps=50`` with ``gradient_accumulation_steps=4`` becomes ``val_check_interval=200``, counted in batches.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mcore.arguments.documents import put_at
from lightning_mcore.arguments.megatron_rules import check_variable_lengths, fp8_settings
from lightning_mcore.arguments.on_cpu import without_gpu_switches
from lightning_mcore.arguments.training_rules import METRICS, checkpoints_activations, text_of
from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.rules.strategy import GRADIENT_SETTINGS
from lightning_mcore.config.run import RunSettings
from lightning_mcore.hf.files import CONFIG_FILE, read_json

_SAME_IN_STRATEGY = """
    tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size pipeline_model_parallel_layout
    overlap_p2p_comm use_distributed_optimizer overlap_grad_reduce overlap_param_gather
"""
_SAME_IN_TRANSFORMER = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split bias_activation_fusion
    apply_rope_fusion cross_entropy_loss_fusion moe_token_dispatcher_type moe_aux_loss_coeff moe_grouped_gemm
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_shared_expert_overlap
    moe_router_dtype calculate_per_token_loss
"""
LANDINGS: Mapping[str, str] = {
    **{name: f"strategy.{name}" for name in _SAME_IN_STRATEGY.split()},
    "ddp_timeout": "strategy.timeout",
    "ddp_backend": "strategy.process_group_backend",
    "ddp_average_in_collective": "strategy.ddp_config.average_in_collective",
    "ddp_bucket_size": "strategy.ddp_config.bucket_size",
    **{name: f"model.transformer.{name}" for name in _SAME_IN_TRANSFORMER.split()},
    "transformer_impl": "model.transformer_impl",
    "learning_rate": "model.recipe.learning_rate",
    "weight_decay": "model.recipe.weight_decay",
    "adam_epsilon": "model.recipe.eps",
    "lr_scheduler_kwargs": "model.recipe.lr_scheduler_kwargs",
    "warmup_steps": "model.recipe.warmup_steps",
    "output_dir": "trainer.default_root_dir",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "full_determinism": "trainer.deterministic",
    "per_device_train_batch_size": "data.batch_size",
    "per_device_eval_batch_size": "data.eval_batch_size",
    "dataloader_num_workers": "data.num_workers",
    "sequence_packing": "data.packing",
}
"""Fields that keep their value, and their places in ``RunSettings``; fields that are None are skipped."""

_NEVER = 10**9
# Fields of additional_configs that go to MCoreStrategy and CommunicationOptions, not to TransformerConfig.
_STRATEGY_EXTRAS = ("microbatch_group_size_per_vp_stage", "tp_comm_overlap")
_COMMUNICATION_EXTRAS = ("batch_p2p_comm", "overlap_p2p_comm_warmup_flush", "deallocate_pipeline_outputs")
_EXPERTS_IN_CONFIGS = ("num_experts", "num_local_experts", "n_routed_experts")


def run_settings(
    arguments: Any,
    model_path: str | None,
    *,
    seq_length: int | None,
    devices: int | str | None,
    num_nodes: int | None,
    on_cpu: bool | None,
) -> RunSettings:
    """Return the run that ``TrainingArguments`` describes; ``TrainingArguments.settings`` explains the parameters."""
    if model_path is not None:
        check_variable_lengths(arguments, _has_experts(model_path), f"{model_path} is one")
    parts: dict[str, dict[str, Any]] = {part: {} for part in ("strategy", "precision", "model", "trainer", "data")}
    for name, place in LANDINGS.items():
        value = getattr(arguments, name)
        if value is not None:
            put_at(parts, place, value)
    parts["strategy"] |= _strategy(arguments, parts["strategy"].pop("ddp_config", {}))
    parts["precision"] |= _precision(arguments)
    transformer = {**parts["model"].pop("transformer", {}), **_transformer(arguments)}
    recipe = {**parts["model"].pop("recipe", {}), **_recipe(arguments)}
    parts["model"] |= {"recipe": recipe, "transformer": transformer}
    if model_path is not None:
        parts["model"]["path"] = model_path
    if seq_length is not None:
        parts["model"]["seq_length"] = parts["data"]["seq_length"] = seq_length
    parts["trainer"] |= _trainer(arguments)
    parts["trainer"] |= {k: v for k, v in (("devices", devices), ("num_nodes", num_nodes)) if v is not None}
    parts["data"] |= _data(arguments)
    settings = RunSettings(parts["strategy"], parts["precision"], parts["model"], parts["trainer"], parts["data"])
    # Last, because it must see every switch.
    return without_gpu_switches(settings) if (arguments.use_cpu if on_cpu is None else on_cpu) else settings


def _strategy(arguments: Any, ddp_config: dict[str, Any]) -> dict[str, Any]:
    extra = arguments.extra_fields
    values: dict[str, Any] = {name: extra[name] for name in _STRATEGY_EXTRAS if name in extra}
    if arguments.use_megatron_fsdp:
        # These flags are on then, and False is their default
        values |= dict.fromkeys(GRADIENT_SETTINGS) | {
            "data_parallel_sharding": arguments.data_parallel_sharding_strategy
        }
    stages = (arguments.pipeline_model_parallel_size or 1) > 1
    if arguments.overlap_grad_reduce and stages:
        values["align_grad_reduce"] = arguments.delay_grad_reduce
    if not ddp_config.get("average_in_collective"):
        ddp_config.pop("average_in_collective", None)  # Megatron's default
    if arguments.check_for_nan_in_loss_and_grad and not arguments.fp16:  # an overflow in fp16 skips a step instead
        ddp_config["check_for_nan_in_grad"] = True
    if ddp_config:
        values["ddp_config"] = ddp_config
    if arguments.optimizer_cpu_offload:
        values["optimizer_config"] = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": arguments.optimizer_offload_fraction,
            "use_precision_aware_optimizer": True,  # Megatron's offload uses its code; this needs the next option
            "use_distributed_optimizer": True,
        }
    communication = {name: extra[name] for name in _COMMUNICATION_EXTRAS if name in extra}
    if communication:
        values["communication"] = communication
    if arguments.ckpt_d2h_non_blocking:
        values["checkpoint_io"] = {"async_save": True}
    return values


def _precision(arguments: Any) -> dict[str, Any]:
    name = "32-true"
    if arguments.bf16:
        name = "bf16-mixed"  # Megatron's: bf16 parameters, gradients summed in fp32
    elif arguments.fp16:
        name = "16-mixed" if arguments.accumulate_allreduce_grads_in_fp32 else "16-true"
    return {"precision": name, **fp8_settings(arguments, arguments.extra_fields)}


def _transformer(arguments: Any) -> dict[str, Any]:
    elsewhere = {*_STRATEGY_EXTRAS, *_COMMUNICATION_EXTRAS, *FP8Settings.__dataclass_fields__}
    values = {name: value for name, value in arguments.extra_fields.items() if name not in elsewhere}
    values |= _recompute(arguments)
    if arguments.mtp_num_layers is not None:
        # TransformerConfig writes None for "no such layers", and mcore_adapter 0.
        values["mtp_num_layers"] = arguments.mtp_num_layers or None
    return values


def _recompute(arguments: Any) -> dict[str, Any]:
    kind = arguments.recompute_granularity
    if kind == "full" or (kind is None and checkpoints_activations(arguments)):
        return {
            "recompute_granularity": "full",
            "recompute_method": arguments.recompute_method or "uniform",
            "recompute_num_layers": arguments.recompute_num_layers or 1,
        }
    # None of the options is set: keep the checkpoint's.
    if kind is None and not arguments.moe_layer_recompute:
        return {}
    given = arguments.recompute_modules
    modules = ["core_attn"] if given is None else list(given)
    if arguments.moe_layer_recompute and "moe" not in modules:  # as TransformerConfig.__post_init__ (0.16.1) does
        modules.append("moe")
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _recipe(arguments: Any) -> dict[str, Any]:
    return {
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "optimizer": {"adam": "adamw", "sgd": "sgd"}[arguments.optimizer],
        "lr_scheduler_type": text_of(arguments.lr_scheduler_type),
    }


def _trainer(arguments: Any) -> dict[str, Any]:
    steps = arguments.max_steps
    values: dict[str, Any] = {
        "accelerator": "cpu" if arguments.use_cpu else "auto",
        # With max_steps, data is repeated until the run has taken them, as in transformers.
        "max_epochs": -1 if steps > 0 else int(arguments.num_train_epochs),
        "max_steps": steps,
        "enable_progress_bar": not arguments.disable_tqdm,
        "enable_checkpointing": text_of(arguments.save_strategy) != "no" or bool(arguments.enable_jit_checkpoint),
        "num_sanity_val_steps": -1 if arguments.eval_on_start else 0,  # -1 for all batches
        **_validation(arguments),
    }
    # transformers' 0 means no clipping, for which Lightning has None.
    if arguments.max_grad_norm > 0:
        values["gradient_clip_val"] = arguments.max_grad_norm
    if text_of(arguments.logging_strategy) == "steps":
        values["log_every_n_steps"] = steps_of(arguments, arguments.logging_steps)
    return values


def _validation(arguments: Any) -> dict[str, Any]:
    strategy = text_of(arguments.eval_strategy)
    if strategy == "no" and arguments.do_eval:  # Trainer.validate evaluates after training, or alone
        return {"check_val_every_n_epoch": _NEVER}
    if strategy == "no":
        return {"limit_val_batches": 0}
    if strategy == "epoch":
        return {"check_val_every_n_epoch": 1}
    every = steps_of(arguments, arguments.eval_steps)
    # Lightning counts DataLoader batches; without a number of epochs it counts on from epoch to epoch.
    return {"val_check_interval": every * arguments.gradient_accumulation_steps, "check_val_every_n_epoch": None}


def steps_of(arguments: Any, steps: float) -> int:
    """Return a number of optimizer steps, from a number or a share of ``max_steps`` below 1.

    With ``max_steps=1001``, 0.1 becomes 101: transformers also rounds up.
    """
    return int(steps) if steps >= 1 else math.ceil(arguments.max_steps * steps)


def _data(arguments: Any) -> dict[str, Any]:
    return {
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
        # Pipeline stages exchange tensors of one fixed shape, unless variable_seq_lengths is set.
        "pad_to_seq_length": not (arguments.sequence_packing or arguments.allow_variable_seq_lengths()),
    }


def _has_experts(model_path: str) -> bool:
    """Return whether the Hugging Face model in a local folder has experts; False for a name on the hub."""
    try:
        config = read_json(model_path, CONFIG_FILE)
    except (OSError, ValueError):
        return False  # there is no such folder, or opening the model reports the fault
    # A vision-language model has its language model's fields in text_config.
    parts = (config, config.get("text_config"))
    counts = [part.get(name) for part in parts if isinstance(part, dict) for name in _EXPERTS_IN_CONFIGS]
    return any(isinstance(count, int | float) and count > 1 for count in counts)


def callback_settings(arguments: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of each callback by class name, in the order in which Trainer gets them."""
    callbacks: dict[str, dict[str, Any]] = {}
    if text_of(arguments.save_strategy) == "steps":
        every = steps_of(arguments, arguments.save_steps)
        # Only saving by steps has a last step that Lightning's own callback would miss.
        callbacks["StepCheckpoint"] = {"every": every, "options": _model_checkpoint(arguments)}
    elif text_of(arguments.save_strategy) != "no":
        callbacks["LimitedCheckpoint"] = _model_checkpoint(arguments)
    if text_of(arguments.eval_strategy) != "no":
        callbacks["StepEvaluation"] = {}
    if arguments.report_to and text_of(arguments.logging_strategy) != "no":
        callbacks["LearningRateMonitor"] = {"logging_interval": "step"}
    if arguments.save_hf_model:
        callbacks["SaveHFModel"] = {"every_checkpoint": True}
    if arguments.enable_jit_checkpoint:
        callbacks["PreemptionCheckpoint"] = {"dirpath": arguments.output_dir}
    return callbacks


def _model_checkpoint(arguments: Any) -> dict[str, Any]:
    strategy, limit = text_of(arguments.save_strategy), arguments.save_total_limit
    values: dict[str, Any] = {
        "dirpath": arguments.output_dir,
        # The name that transformers gives, plus Lightning's suffix: checkpoint-500.ckpt.
        "filename": "checkpoint-{step}",
        "auto_insert_metric_name": False,
        "save_weights_only": arguments.save_only_model,
        "save_last": None,
    }
    if strategy == "best":
        metric = METRICS[arguments.metric_for_best_model.removeprefix("eval_")]
        mode = "max" if arguments.greater_is_better else "min"
        return {**values, "monitor": metric, "mode": mode, "save_top_k": limit or 1}
    kept: dict[str, Any] = {"save_top_k": -1}
    if limit is not None:  # keep the newest, which have the greatest steps
        kept = {"monitor": "step", "mode": "max", "save_top_k": limit}
    if strategy == "epoch":
        kept |= {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    return {**values, **kept}


def logger_settings(arguments: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of each logger by its name in ``report_to``."""
    if text_of(arguments.logging_strategy) == "no":
        return {}
    folder, name = arguments.output_dir, arguments.run_name
    made: dict[str, dict[str, Any]] = {
        "tensorboard": {"save_dir": folder, "name": name or "runs"},
        "csv": {"save_dir": folder, "name": name or "logs"},
        "mlflow": {"run_name": name, "save_dir": os.path.join(folder, "mlruns")},
        # As in transformers' Trainer, WANDB_PROJECT may name the project, and this is the default name.
        "wandb": {"name": name, "save_dir": folder, "project": os.environ.get("WANDB_PROJECT", "huggingface")},
    }
    return {kind: made[kind] for kind in arguments.report_to}


def newest_checkpoint(folder: str) -> str:
    """Return the newest checkpoint in ``output_dir``; FileNotFoundError if there is none."""
    found = [path for path in Path(folder).glob("*.ckpt") if not path.name.startswith(".")]
    if not found:
        raise FileNotFoundError(
            f"resume_from_checkpoint='true' needs a checkpoint in output_dir={folder!r}, and there is none; give the"
            " path of one, or leave it out"
        )
    return str(max(found, key=lambda path: path.stat().st_mtime))
