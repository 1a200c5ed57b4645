# SPDX-License-Identifier: Apache-2.0
"""The rules of transformers' training arguments, checked when ``TrainingArguments`` is created.

transformers' ``TrainingArguments`` has more than a hundred fields, all for its own Trainer. Fields in :data:`SUPPORTED`
are supported (``mapping.py`` says where each goes). Fields in :data:`REFUSED` raise with the reason, unless they have
their default. Fields in :data:`IGNORED` are ignored, because they ask for what happens anyway, or because their value
cannot be told apart from the default. A field of a newer transformers that is in none of these tables raises as
unknown.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_mcore.arguments.fields import shown
from lightning_mcore.arguments.megatron_rules import fp8_settings
from lightning_mcore.config.value_checks import require_size

METRICS = {
    "loss": "val_loss",
    "perplexity": "val_perplexity",
    "accuracy": "val_accuracy",
    "rewards/accuracies": "val_rewards/accuracies",
    "rewards/margins": "val_rewards/margins",
    "mrr": "val_mrr",
    "ndcg": "val_ndcg",
}
"""Names of metrics in arguments, and the names under which a module logs them."""
TEXT_METRICS = {"embedding": ("loss", "accuracy", "mrr"), "reranker": ("loss", "accuracy", "mrr", "ndcg")}
"""Those of models that learn from queries with texts, by the kind of model."""
LOGGERS = ("tensorboard", "wandb", "mlflow", "csv")
_OPTIMIZERS = {"adamw_torch": "adam", "adamw_torch_fused": "adam", "sgd": "sgd"}
_SCHEDULES_BY_LOSS = ("reduce_lr_on_plateau", "greedy")  # they need the loss of an evaluation
_BACKENDS = ("nccl", "gloo")

_SCHEDULES_THAT_NEED_OPTIONS = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")


def text_of(value: Any) -> str:
    """Return a value as text; for an enumeration member, its value."""
    return str(getattr(value, "value", value))


def check_training(arguments: Any) -> None:
    """Raise ValueError for values and contradictions, before transformers reads the arguments."""
    _check_batches(arguments)
    _check_numbers(arguments)
    _check_formats(arguments)
    _check_optimizer(arguments)
    _check_recompute(arguments)
    _check_logging(arguments)
    _check_evaluation(arguments)
    _check_saving(arguments)
    if arguments.ddp_find_unused_parameters:
        raise ValueError(
            "ddp_find_unused_parameters=True is not available: Megatron's data parallelism does not look for them;"
            " leave it out"
        )
    if arguments.ddp_backend not in (None, *_BACKENDS):
        raise ValueError(f"ddp_backend={arguments.ddp_backend!r} is not available; choose 'nccl' or 'gloo'")
    if arguments.average_tokens_across_devices is False and arguments.calculate_per_token_loss is not False:
        raise ValueError(
            "average_tokens_across_devices=False contradicts calculate_per_token_loss=True, the default, which weighs"
            " tokens over all ranks; set calculate_per_token_loss=False, or leave it out"
        )


def _check_batches(arguments: Any) -> None:
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        require_size(name, getattr(arguments, name))
    epochs, steps = arguments.num_train_epochs, arguments.max_steps
    if steps == 0 or steps < -1:
        raise ValueError(f"max_steps={steps} is not a number of steps; choose 1 or more, or -1 for num_train_epochs")
    if steps == -1 and (epochs != int(epochs) or epochs < 1):
        raise ValueError(
            f"num_train_epochs={epochs} is not a whole number of epochs, as Lightning needs; choose one, or set "
            "max_steps"
        )
    if arguments.max_grad_norm < 0:
        raise ValueError(f"max_grad_norm={arguments.max_grad_norm} is too small; choose 0 for no clipping, or more")
    if arguments.ddp_timeout < 1:
        raise ValueError(f"ddp_timeout={arguments.ddp_timeout} is too short; choose 1 second or more")


def _check_numbers(arguments: Any) -> None:
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "dataloader_num_workers"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"{name}={getattr(arguments, name)} is too small; choose 0 or more")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(arguments, name) < 1:
            raise ValueError(
                f"{name}={getattr(arguments, name)} is not a decay rate; choose 0 or more, and less than 1"
            )
    for name in ("seed", "data_seed"):
        seed = getattr(arguments, name)
        if seed is not None and not 0 <= seed < 2**32:
            raise ValueError(f"{name}={seed} is not a seed; choose 0 or more, and less than 2**32")
    warmup = arguments.warmup_steps
    if warmup < 0 or (warmup >= 1 and warmup != int(warmup)):
        raise ValueError(
            f"warmup_steps={warmup} is not a number of steps; choose a whole number, or a share of all steps below 1"
        )


def _check_formats(arguments: Any) -> None:
    if arguments.bf16 and arguments.fp16:
        raise ValueError("bf16=True contradicts fp16=True; choose one of them")
    for name in ("bf16", "fp16"):
        if getattr(arguments, f"{name}_full_eval") and not getattr(arguments, name):
            raise ValueError(
                f"{name}_full_eval=True with {name}=False is not available: evaluation computes in the format of"
                f" training; set {name}=True, or leave it out"
            )
    given = fp8_settings(arguments, arguments.extra_fields)
    if given and not arguments.bf16:
        name = next(iter(given))
        raise ValueError(f"{name}={given[name]!r} needs bf16=True, because FP8 is used together with bf16; set both")
    if given.get("fp8_param") and not arguments.use_distributed_optimizer:
        raise ValueError("fp8_param=True needs use_distributed_optimizer=True, which gathers the weights; set both")


def _check_optimizer(arguments: Any) -> None:
    optim = text_of(arguments.optim)
    if optim not in _OPTIMIZERS:
        raise ValueError(
            f"optim={optim!r} is not available: the optimizer is Megatron's; choose"
            f" {', '.join(map(repr, list(_OPTIMIZERS)[:-1]))} or 'sgd'"
        )
    # transformers' default cannot be told apart from a given value, so optimizer="sgd" alone must be enough.
    is_default = optim == "adamw_torch_fused"
    if (wanted := _OPTIMIZERS[optim]) != arguments.optimizer and not is_default:
        more = " (its momentum is 0.9; in transformers, it is 0)" if wanted == "sgd" else ""
        raise ValueError(
            f"optim={optim!r} contradicts optimizer={arguments.optimizer!r}; set optimizer={wanted!r} too{more}"
        )
    if arguments.optimizer == "sgd" and arguments.use_distributed_optimizer:
        raise ValueError(
            "use_distributed_optimizer=True needs optimizer='adam', but it is 'sgd', whose state Megatron does not"
            " shard; set one of them"
        )
    course = text_of(arguments.lr_scheduler_type)
    if course in _SCHEDULES_BY_LOSS:
        raise ValueError(
            f"lr_scheduler_type={course!r} is not available: it needs the loss of an evaluation, and schedules here"
            " depend only on steps; choose another"
        )
    if course == "constant" and arguments.warmup_steps:
        raise ValueError(
            f"warmup_steps={arguments.warmup_steps} contradicts lr_scheduler_type='constant', which has no warm-up;"
            " choose 'constant_with_warmup', or 0"
        )


def check_course(arguments: Any) -> None:
    """Raise ValueError for options that the learning-rate schedule does not have, and for missing ones that it needs.

    transformers would raise only when the run starts. Here the options are tried at once, on a one-parameter optimizer.
    """
    course, options = text_of(arguments.lr_scheduler_type), arguments.lr_scheduler_kwargs
    if options and course.startswith("constant"):
        raise ValueError(
            f"lr_scheduler_kwargs={options!r} does nothing with lr_scheduler_type={course!r}, which takes none; leave"
            " it out, or choose another"
        )
    if not options and course not in _SCHEDULES_THAT_NEED_OPTIONS:
        return
    import torch
    from transformers.optimization import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    try:
        # 1 step of warm-up and 100 steps: any numbers do, because only the names of the options are checked.
        get_scheduler(course, optimizer, 1, 100, options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_kwargs={options!r} does not fit lr_scheduler_type={course!r}"
            f" ({' '.join(str(error).split())}); change one of the two"
        ) from error


def checkpoints_activations(arguments: Any) -> bool:
    """Return whether full recomputation is on, under transformers' new or old name for it."""
    return _recomputation(arguments) is not None


def _recomputation(arguments: Any) -> str | None:
    names = ("activation_checkpointing", "gradient_checkpointing")
    return next((name for name in names if getattr(arguments, name, None)), None)


def _check_recompute(arguments: Any) -> None:
    name = _recomputation(arguments)
    for other, value in (("recompute_granularity", "selective"), ("moe_layer_recompute", True)):
        if name and getattr(arguments, other) == value:
            raise ValueError(
                f"{name}=True, which recomputes whole layers, contradicts {other}={value!r}; leave one out"
            )


def _check_logging(arguments: Any) -> None:
    strategy = text_of(arguments.logging_strategy)
    if strategy == "epoch":
        raise ValueError(
            "logging_strategy='epoch' is not available: losses are logged by steps; choose 'steps' with logging_steps,"
            " or 'no'"
        )
    if strategy == "steps":
        _check_steps(arguments, "logging_steps")
    if arguments.logging_first_step and arguments.logging_steps != 1:
        raise ValueError(
            f"logging_first_step=True with logging_steps={arguments.logging_steps} is not available: Lightning logs"
            " every n-th step; leave it out, or set logging_steps=1"
        )


def check_loggers(names: list[str]) -> None:
    """Raise ValueError for a logger in ``report_to`` that Lightning does not have."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"report_to={name!r} is not available; choose from {', '.join(LOGGERS)} or none")


def _check_evaluation(arguments: Any) -> None:
    strategy = text_of(arguments.eval_strategy)
    if strategy == "steps" and not arguments.eval_steps:
        # transformers' default for eval_steps is logging_steps.
        _check_steps(arguments, "logging_steps")
    elif strategy == "steps":
        _check_steps(arguments, "eval_steps")
    elif arguments.eval_steps is not None:
        raise ValueError(
            f"eval_steps={arguments.eval_steps} contradicts eval_strategy={strategy!r}; set eval_strategy='steps', or"
            " leave it out"
        )
    if arguments.eval_on_start and strategy == "no":
        raise ValueError("eval_on_start=True contradicts eval_strategy='no'; set eval_strategy, or leave it out")


def check_validation(arguments: Any, data: Mapping[str, Any]) -> None:
    """Raise ValueError for an evaluation without data; ``data`` has the arguments of the data module."""
    strategy = text_of(arguments.eval_strategy)
    if strategy != "no" and not data.get("validation_files") and not data.get("validation_share"):
        raise ValueError(
            f"eval_strategy={strategy!r} needs something to evaluate on; give validation_files or validation_share in"
            " overrides, or set eval_strategy='no'"
        )


def _check_saving(arguments: Any) -> None:
    strategy, metric = text_of(arguments.save_strategy), arguments.metric_for_best_model
    if strategy == "steps":
        _check_steps(arguments, "save_steps")
    if arguments.save_total_limit is not None and arguments.save_total_limit < 1:
        raise ValueError(
            f"save_total_limit={arguments.save_total_limit} is too small; choose 1 or more, or save_strategy='no'"
        )
    # These describe checkpoints, which then do not exist.
    if strategy == "no":
        for name in ("save_hf_model", "save_total_limit", "save_only_model", "ckpt_d2h_non_blocking"):
            if value := getattr(arguments, name):
                raise ValueError(f"{name}={value!r} contradicts save_strategy='no'; choose another, or leave it out")
    _require_metric(metric, METRICS)
    if strategy == "best" and (metric is None or text_of(arguments.eval_strategy) == "no"):
        missing = "metric_for_best_model" if metric is None else "eval_strategy='steps' or 'epoch'"
        raise ValueError(f"save_strategy='best' needs {missing}; set it")
    if strategy != "best" and metric is not None:
        raise ValueError(
            f"metric_for_best_model={metric!r} contradicts save_strategy={strategy!r}, which does not use a metric; set"
            " save_strategy='best', or leave it out"
        )
    if arguments.greater_is_better is not None and metric is None:
        raise ValueError(
            f"greater_is_better={arguments.greater_is_better} does nothing without metric_for_best_model; set both"
        )


def check_metric(metric: str | None, loss: str | None, kind: str | None = None) -> None:
    """Raise ValueError for a ``metric_for_best_model`` that the module does not log.

    ``loss`` is the loss of ``Preference``, or None for a module that learns from single answers; ``kind`` is the kind
    of model that learns from queries with texts, if it is one.
    """
    if kind is not None:
        _require_metric(metric, TEXT_METRICS[kind])
        return
    # KTO learns from single tagged answers, so it has no accuracy of pairs.
    pairs = [name for name in METRICS if name.startswith("rewards/") and (loss, name) != ("kto", "rewards/accuracies")]
    _require_metric(metric, ["loss", "perplexity", "accuracy"] if loss is None else ["loss", *pairs])


def _require_metric(metric: str | None, known: Iterable[str]) -> None:
    if metric is not None and metric.removeprefix("eval_") not in known:
        raise ValueError(f"metric_for_best_model={metric!r} is not logged; choose {', '.join(map(repr, known))}")


def _check_steps(arguments: Any, name: str) -> None:
    """Raise ValueError for a value that is not a number of steps, or is a share of an unknown number of steps."""
    # With max_steps=1000, 50 and 0.05 are both 50 steps; 0.05 without max_steps has no meaning before the data is read.
    steps = getattr(arguments, name)
    if steps <= 0 or (steps >= 1 and steps != int(steps)):
        raise ValueError(
            f"{name}={steps} is not a number of steps; choose a whole number from 1, or a share of max_steps below 1"
        )
    if steps < 1 and arguments.max_steps < 1:
        raise ValueError(
            f"{name}={steps} is a share of all steps, but their number is unknown here; set max_steps, or give a number"
            " of steps"
        )


_FSDP = "data parallelism is Megatron's; use_distributed_optimizer=True shards the optimizer"
_DDP = "it is an option of torch's DDP, and data parallelism is Megatron's"
_COMPILE = "Megatron's layers are not compiled"
_HUB = "nothing is uploaded while training; upload what save_hf_model=True writes with the tools of huggingface_hub"
_EVALUATION = "evaluation logs loss, perplexity and accuracy of the next token, and gathers no predictions"
_LOADER = "the data module builds its loaders; pass your own DataLoader to Trainer.fit"
_TRACKIO = "Lightning has no trackio logger"
_GENERATION = "evaluation does not generate; use MCoreGPT.generate"
_LIGER = "Liger's kernels replace layers of transformers, and the model is Megatron's"
_RECOMPUTES = "recompute_granularity, recompute_method and recompute_modules say what and how"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("fsdp", "fsdp_config", "parallelism_config", "accelerator_config"), _FSDP),
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
    "optim_target_modules": "it is for low-rank optimizers such as GaLore",
    "label_smoothing_factor": "the loss is Megatron's vocabulary-parallel cross entropy, which has no smoothing",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), _LIGER),
    "use_cache": "Megatron's model keeps no cache while training",
    "neftune_noise_alpha": "it patches the embedding of transformers' models",
    "torch_empty_cache_steps": "Megatron's buffers stay; set PYTORCH_CUDA_ALLOC_CONF for fragmented memory",
    "auto_find_batch_size": "a run cannot continue after running out of memory; lightning-mcore plan shows what fits",
    **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), _RECOMPUTES),
    "include_num_input_tokens_seen": "log the metric lightning_mcore.TokensSeen in your own module",
    "log_level_replica": "other ranks log everything that does not go through Lightning's rank_zero functions",
    "eval_delay": "Lightning starts validating with the first epoch or step",
    "load_best_model_at_end": (
        "the last weights stay in memory, and save_strategy='best' keeps the best ones in a checkpoint, which"
        " trainer.test(ckpt_path='best') and lightning-mcore export read"
    ),
    "save_on_each_node": "a checkpoint is one folder that all machines write to together",
    "ignore_data_skip": "a resumed run continues with the very next sample",
    "skip_memory_metrics": "use Trainer(profiler=...) or Lightning's DeviceStatsMonitor",
    "debug": "use Trainer(detect_anomaly=True)",
}
"""The unsupported fields, each with the reason as the end of a sentence."""

SUPPORTED = frozenset(
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
        *("deepspeed", "dataloader_num_workers", "ddp_backend", "ddp_timeout", "ddp_find_unused_parameters"),
        *("do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
    }
)
"""The supported fields."""

IGNORED: Mapping[str, str] = {
    "log_on_each_node": "only rank 0 of the run logs",
    "logging_nan_inf_filter": "a loss that is NaN or infinite is logged unchanged",
    "dataloader_pin_memory": "batches are in pinned memory where the device is CUDA",
    "restore_callback_states_from_checkpoint": "a resumed run restores the states of its callbacks",
    "local_rank": "launchers before torchrun passed it; now the environment has it",
}
"""The ignored fields, each with what happens anyway."""

# HfArgumentParser turns some of these into others, so any of them means that a field is off.
_OFF: tuple[Any, ...] = (None, False, "", "no", [], {})


def check_foreign(arguments: Any, of: type) -> None:
    """Raise ValueError for a field of transformers' class ``of`` that is not supported and is not at its default."""
    for field in dataclasses.fields(of):
        if not field.init or field.name in SUPPORTED or field.name in IGNORED:
            continue
        value = getattr(arguments, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if _means_the_same(field.name, value, default):
            continue
        # A newer transformers may have fields that REFUSED does not list.
        reason = REFUSED.get(field.name, "this option of transformers is unknown here")
        raise ValueError(f"{field.name}={shown(field.name, value)} is not available: {reason}; leave it out")


def _means_the_same(name: str, value: Any, default: Any) -> bool:
    """Return whether a value is the default, as it is declared, as transformers rewrites it, or as ``to_dict`` does."""
    value, default = (getattr(item, "value", item) for item in (value, default))  # enumeration members
    if value == default or value == f"<{name.upper()}>":  # to_dict hides a token, and also that there is none
        return True
    if name == "accelerator_config":  # transformers turns None into an object, and to_dict that into a dict
        from transformers.trainer_pt_utils import AcceleratorConfig

        defaults, given = vars(AcceleratorConfig()), getattr(value, "__dict__", value)
        return isinstance(given, dict) and {**defaults, **given} == defaults
    return all(any(one == item and type(one) is type(item) for item in _OFF) for one in (value, default))
