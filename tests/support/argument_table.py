# SPDX-License-Identifier: Apache-2.0
"""Where every field of ``TrainingArguments`` lands, as a table that tests read.

A :class:`Landing` names a field, a value that is not its default, and an expression that must have that value (or
``becomes``) in a run. :data:`LIVE` has the runs: their landings' values are set together, a tiny model is trained on
gloo ranks, and every expression is evaluated on the objects of the live run. :data:`ON_CONFIGS` has the fields that a
CPU cannot exercise; their expressions are evaluated on config objects. :data:`REFUSED_OURS` has those of Megatron's
that are refused whatever is done. A field in none of these, nor in the tables of ``arguments/training_rules.py``, fails
a test.
"""

from dataclasses import dataclass, field
from typing import Any

from lightning_mcore.arguments import TrainingArguments

_SAME = object()


@dataclass(frozen=True)
class Landing:
    """One field.

    Args:
        name: The field.
        value: What it is set to.
        place: A Python expression over the objects of the run.
        becomes: What the expression must be; the value itself where nothing is said.
    """

    name: str
    value: Any
    place: str
    becomes: Any = _SAME

    @property
    def expected(self) -> Any:
        """What the expression must be."""
        return self.value if self.becomes is _SAME else self.becomes


def since(landing: Landing) -> list[Landing]:
    """Return the landing of a field, or nothing where transformers is older than the field."""
    return [landing] if hasattr(TrainingArguments, landing.name) else []


@dataclass(frozen=True)
class Run:
    """A run on gloo ranks.

    Args:
        world_size: Ranks.
        family: Of the tiny model.
        landings: The fields that it shows.
        model: What the model's config is to have.
        base: Fields that it needs and another run shows.
    """

    world_size: int
    family: str
    landings: tuple[Landing, ...]
    model: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """All fields that are set."""
        return {**self.base, **{landing.name: landing.value for landing in self.landings}}


def _config(name: str, value: Any, becomes: Any = _SAME) -> Landing:
    """Return a landing in the field of that name of the model's TransformerConfig."""
    return Landing(name, value, f"config.{name}", becomes)


_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

LIVE: dict[str, Run] = {
    "interleaved stages in bf16": Run(
        4,
        "llama",
        (
            _config("pipeline_model_parallel_size", 2),
            _config("virtual_pipeline_model_parallel_size", 2),
            _config("overlap_p2p_comm", True),
            _config("account_for_embedding_in_pipeline_split", True),
            _config("account_for_loss_in_pipeline_split", True),
            _config("recompute_granularity", "full"),
            _config("recompute_method", "block"),
            _config("recompute_num_layers", 1),
            _config("bias_activation_fusion", True),
            _config("cross_entropy_loss_fusion", True),
            _config("calculate_per_token_loss", False),
            Landing("additional_configs", {"attention_dropout": 0.125}, "config.attention_dropout", 0.125),
            Landing("variable_seq_lengths", True, "data.pad_to_seq_length", False),
            Landing("bf16", True, "str(config.params_dtype)", "torch.bfloat16"),
            Landing("bf16_full_eval", True, "str(config.params_dtype)", "torch.bfloat16"),
            Landing("accumulate_allreduce_grads_in_fp32", True, "ddp.grad_reduce_in_fp32"),
            Landing("use_distributed_optimizer", True, "ddp.use_distributed_optimizer"),
            Landing("distrib_optim_fully_reshardable", True, "saved['sharding']", "fully_reshardable"),
            Landing("distrib_optim_fully_reshardable_mem_efficient", True, "saved['shards']", 4),
            Landing("overlap_grad_reduce", True, "ddp.overlap_grad_reduce"),
            Landing("overlap_param_gather", True, "ddp.overlap_param_gather"),
            Landing("delay_grad_reduce", True, "config.grad_sync_func is not None"),
            Landing("ddp_bucket_size", 5000, "ddp.bucket_size"),
            Landing("check_for_nan_in_loss_and_grad", True, "strategy.gradients.check_nan"),
            Landing("ckpt_format", "torch_dist", "saved['backend']"),
            Landing("ckpt_d2h_non_blocking", True, "strategy.checkpoint_io.async_save"),
            Landing("save_hf_model", True, "callback('SaveHFModel').every_checkpoint"),
            Landing("optimizer", "adam", "megatron.optimizer"),
            Landing("optim", "adamw_torch", "isinstance(optimizer, torch.optim.AdamW)", True),
            Landing("learning_rate", 1e-3, "module.recipe.learning_rate"),
            Landing("weight_decay", 0.25, "optimizer.param_groups[0]['weight_decay']"),
            Landing("adam_beta1", 0.75, "optimizer.param_groups[0]['betas'][0]"),
            Landing("adam_beta2", 0.875, "optimizer.param_groups[0]['betas'][1]"),
            Landing("adam_epsilon", 1e-6, "optimizer.param_groups[0]['eps']"),
            Landing("lr_scheduler_type", "cosine_with_min_lr", "module.recipe.lr_scheduler_type"),
            Landing("lr_scheduler_kwargs", {"min_lr": 1e-4}, "module.recipe.lr_scheduler_kwargs"),
            Landing("warmup_steps", 1, "scheduler.lr_lambdas[0].keywords['num_warmup_steps']"),
            Landing("max_grad_norm", 0.5, "trainer.gradient_clip_val"),
            Landing("average_tokens_across_devices", False, "config.calculate_per_token_loss"),
            Landing("gradient_accumulation_steps", 2, "trainer.accumulate_grad_batches"),
            Landing("max_steps", 2, "trainer.max_steps"),
            Landing("per_device_train_batch_size", 2, "data.batch_size"),
            Landing("per_device_eval_batch_size", 3, "data.eval_batch_size"),
            Landing("dataloader_num_workers", 1, "trainer.train_dataloader.num_workers"),
            Landing("output_dir", "{out}", "trainer.default_root_dir"),
            Landing("run_name", "mine", "trainer.logger.name"),
            Landing("report_to", ["csv"], "type(trainer.logger).__name__", "CSVLogger"),
            Landing("logging_strategy", "steps", "trainer.log_every_n_steps", 1),
            Landing("logging_steps", 1, "trainer.log_every_n_steps"),
            Landing("logging_first_step", True, "trainer.log_every_n_steps", 1),
            Landing("log_level", "error", "logging.getLogger('lightning_mcore').level", 40),
            Landing("disable_tqdm", True, "trainer.progress_bar_callback", None),
            Landing("eval_strategy", "steps", "trainer.check_val_every_n_epoch", None),
            Landing("eval_steps", 1, "trainer.val_check_interval", 2),
            Landing("save_strategy", "steps", "checkpoint._every_n_train_steps", 2),
            Landing("save_steps", 2, "checkpoint._every_n_train_steps"),
            Landing("save_total_limit", 3, "(checkpoint.save_top_k, checkpoint.monitor)", (3, "step")),
            Landing("seed", 7, "os.environ['PL_GLOBAL_SEED']", "7"),
            Landing("data_seed", 8, "data.seed"),
            Landing("use_cpu", True, "type(trainer.accelerator).__name__", "CPUAccelerator"),
            Landing("ddp_backend", "gloo", "strategy._process_group_backend"),
            Landing("ddp_timeout", 77, "strategy._timeout.total_seconds()"),
            Landing("ddp_find_unused_parameters", False, "getattr(ddp, 'find_unused_parameters', False)"),
            Landing("tf32", True, "torch.get_float32_matmul_precision()", "high"),
            Landing("full_determinism", True, "torch.are_deterministic_algorithms_enabled()"),
        ),
        model={**_PLAIN_ROPE, "num_hidden_layers": 6},
    ),
    "tensor, sequence and context in fp16": Run(
        4,
        "llama",
        (
            _config("tensor_model_parallel_size", 2),
            _config("sequence_parallel", True),
            _config("context_parallel_size", 2),
            _config("recompute_granularity", "selective"),
            _config("recompute_modules", "core_attn,mlp", ["core_attn", "mlp"]),
            Landing("fp16", True, "str(config.params_dtype)", "torch.float16"),
            Landing("fp16_full_eval", True, "str(config.params_dtype)", "torch.float16"),
            Landing("accumulate_allreduce_grads_in_fp32", False, "ddp.grad_reduce_in_fp32"),
            Landing("check_for_nan_in_loss_and_grad", True, "strategy.gradients.check_nan", False),
            Landing("sequence_packing", True, "data.packing"),
            Landing("optimizer", "sgd", "megatron.optimizer"),
            Landing("num_train_epochs", 1.0, "trainer.max_epochs", 1),
            Landing("save_strategy", "epoch", "checkpoint._every_n_epochs", 1),
            Landing("save_only_model", True, "checkpoint.save_weights_only"),
            Landing("eval_strategy", "epoch", "trainer.check_val_every_n_epoch", 1),
            Landing("eval_on_start", True, "trainer.num_sanity_val_steps", float("inf")),
            Landing("report_to", ["tensorboard"], "type(trainer.logger).__name__", "TensorBoardLogger"),
            Landing("enable_jit_checkpoint", True, "callback('PreemptionCheckpoint').dirpath", "{out}"),
            *since(Landing("activation_checkpointing", False, "config.recompute_granularity", "selective")),
        ),
        model=_PLAIN_ROPE,
        base={"use_cpu": True, "per_device_train_batch_size": 2, "disable_tqdm": True},
    ),
    "experts": Run(
        4,
        "mixtral",
        (
            _config("expert_model_parallel_size", 2),
            _config("expert_tensor_parallel_size", 1),
            Landing("moe_layer_recompute", True, "config.recompute_modules", ["core_attn", "moe"]),
            _config("moe_token_dispatcher_type", "alltoall"),
            _config("moe_aux_loss_coeff", 0.125),
            _config("moe_expert_capacity_factor", 2.0),
            _config("moe_pad_expert_input_to_capacity", True),
            _config("moe_token_drop_policy", "position"),
            _config("moe_shared_expert_overlap", True),
            _config("moe_router_dtype", "fp64"),
            Landing("transformer_impl", "local", "module.hparams['transformer_impl']"),
            Landing("save_strategy", "best", "checkpoint.monitor", "val_accuracy"),
            Landing("metric_for_best_model", "eval_accuracy", "checkpoint.monitor", "val_accuracy"),
            Landing("greater_is_better", True, "checkpoint.mode", "max"),
            Landing("resume_from_checkpoint", "{out}/none.ckpt", "args.ckpt_path"),
            Landing("do_train", True, "args.stages[0]", "fit"),
            Landing("do_predict", True, "args.stages[-1]", "predict"),
        ),
        model={"num_local_experts": 4, "sliding_window": None},
        base={
            "use_cpu": True,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "disable_tqdm": True,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "a layout string": Run(
        2,
        "llama",
        (
            Landing(
                "pipeline_model_parallel_layout", "Et|tt|t|L", "strategy.layout.virtual_pipeline_model_parallel_size", 2
            ),
            Landing("delay_grad_reduce", False, "config.grad_sync_func is not None"),
            Landing("variable_seq_lengths", False, "data.pad_to_seq_length", True),
            Landing("gradient_checkpointing", True, "config.recompute_granularity", "full"),
            Landing("check_for_nan_in_loss_and_grad", False, "strategy.gradients.check_nan"),
            Landing("logging_strategy", "no", "trainer.logger", None),
            Landing("save_strategy", "no", "checkpoint", None),
            Landing("eval_strategy", "no", "trainer.check_val_every_n_epoch", 10**9),
            Landing("do_eval", True, "args.stages", ["validate"]),
        ),
        model=_PLAIN_ROPE,
        base={
            "use_cpu": True,
            "max_steps": 1,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2,
            "disable_tqdm": True,
            "pipeline_model_parallel_size": 2,
            "overlap_grad_reduce": True,
        },
    ),
}

_FP8 = {"bf16": True, "use_distributed_optimizer": True}

ON_CONFIGS: tuple[tuple[dict[str, Any], Landing], ...] = (
    ({}, Landing("apply_rope_fusion", True, "transformer.apply_rope_fusion")),
    ({}, Landing("moe_grouped_gemm", True, "transformer.moe_grouped_gemm")),
    ({}, Landing("moe_token_dispatcher_type", "flex", "transformer.moe_token_dispatcher_type")),
    ({}, Landing("mtp_num_layers", 0, "transformer.mtp_num_layers", None)),
    ({}, Landing("mtp_num_layers", 2, "transformer.mtp_num_layers")),
    ({}, Landing("transformer_impl", "transformer_engine", "settings.model['transformer_impl']")),
    (_FP8, Landing("fp8_recipe", "tensorwise", "precision.megatron_fields()['fp8_recipe']")),
    (_FP8, Landing("fp8_recipe", "delayed", "precision.megatron_fields()['fp8']", "hybrid")),
    (_FP8, Landing("fp8", "e4m3", "precision.megatron_fields()['fp8']")),
    (_FP8 | {"fp8_recipe": "tensorwise"}, Landing("fp8_param", True, "precision.ddp_fields()['fp8_param_gather']")),
    (_FP8 | {"fp8": "hybrid"}, Landing("fp8_param", True, "precision.megatron_fields()['fp8_param']")),
    (
        _FP8 | {"fp8_recipe": "mxfp8"},
        Landing("fp8_param", True, "precision.optimizer_fields(False)['reuse_grad_buf_for_mxfp8_param_ag']"),
    ),
    (
        {"calculate_per_token_loss": False},
        Landing("ddp_average_in_collective", True, "strategy.gradients.megatron_config().average_in_collective"),
    ),
    (
        {"data_parallel_sharding_strategy": "optim_grads_params"},
        Landing("use_megatron_fsdp", True, "strategy.gradients.data_parallel_sharding", "optim_grads_params"),
    ),
    (
        {"use_megatron_fsdp": True},
        Landing("data_parallel_sharding_strategy", "optim_grads", "strategy.gradients.data_parallel_sharding"),
    ),
    (
        {"use_distributed_optimizer": True},
        Landing("optimizer_cpu_offload", True, "optimizer_config.optimizer_cpu_offload"),
    ),
    (
        {"use_distributed_optimizer": True, "optimizer_cpu_offload": True},
        Landing("optimizer_offload_fraction", 1.0, "optimizer_config.optimizer_offload_fraction"),
    ),
    (
        {"use_distributed_optimizer": True, "optimizer_cpu_offload": True},
        Landing("optimizer_offload_fraction", 0.5, "optimizer_config.optimizer_offload_fraction"),
    ),
    (
        {"fp16": True},
        Landing("accumulate_allreduce_grads_in_fp32", True, "precision.ddp_fields()['grad_reduce_in_fp32']"),
    ),
    (
        {"bf16": True},
        Landing("accumulate_allreduce_grads_in_fp32", False, "precision.ddp_fields()['grad_reduce_in_fp32']", True),
    ),
    (
        _FP8 | {"fp8": "hybrid"},
        Landing("additional_configs", {"fp8_margin": 1}, "precision.megatron_fields()['fp8_margin']", 1),
    ),
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        Landing("additional_configs", {"microbatch_group_size_per_vp_stage": 4}, "strategy.microbatch_group_size", 4),
    ),
    (
        {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
        Landing("additional_configs", {"batch_p2p_comm": True}, "strategy.communication.batch_p2p_comm", True),
    ),
    ({"report_to": "wandb"}, Landing("run_name", "mine", "loggers['wandb']['name']")),
    ({}, Landing("report_to", "wandb", "list(loggers)", ["wandb"])),
    ({}, Landing("save_strategy", "no", "callbacks", {})),
    ({}, Landing("seed", 5, "settings.data['seed']")),
    *(
        ({}, row)
        for row in since(Landing("activation_checkpointing", True, "transformer.recompute_granularity", "full"))
    ),
    (
        {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "accuracy"},
        Landing("greater_is_better", False, "callbacks['LimitedCheckpoint']['mode']", "min"),
    ),
    ({"max_steps": 50}, Landing("save_steps", 0.1, "callbacks['StepCheckpoint']['every']", 5)),
    ({"max_steps": 50}, Landing("logging_steps", 0.1, "settings.trainer['log_every_n_steps']", 5)),
    ({}, Landing("max_grad_norm", 0.0, "settings.trainer.get('gradient_clip_val')", None)),
)

REFUSED_OURS: tuple[tuple[str, Any], ...] = (
    ("cuda_graph_impl", "local"),
    ("cuda_graph_impl", "transformer_engine"),
    ("cuda_graph_scope", "attn"),
    ("moe_enable_routing_replay", True),
    ("save_merged_model", True),
    ("compile_warmup", True),
    ("ckpt_format", "legacy"),
)
