# SPDX-License-Identifier: Apache-2.0
"""Where each field of Megatron's configs is set, so that each setting has one place.

``TransformerConfig`` mixes what a model is with how it is run. A module takes the first kind as plain data
(``layers/transformer_config.py``); the strategy and the precision own the second. ``OptimizerConfig`` repeats settings
of torch's optimizer, the Trainer and the precision (``optimizer/rules.py``). The tables are separate from the checks
that need Megatron, so ``lightning-mcore plan`` can use them without importing it.

Sources: ``TransformerConfig.__post_init__``, ``apply_rotary_pos_emb`` and ``TEGroupedMLP`` of megatron-core 0.16.1 and
0.19.2.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

from lightning_mcore.config.fp8 import TRANSFORMER_FIELDS as FP8_FIELDS
from lightning_mcore.config.layout import ParallelLayout

DEFAULTS: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,
    "moe_token_dispatcher_type": "alltoall",
}
"""Our defaults that differ from Megatron's: no dropout (Megatron: 0.1), equal weight for every token, and ranks that
share experts may have batches of different shapes (Megatron's ``allgather`` needs equal ones)."""

# Fields of TransformerConfig without a default
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")

PER_LAYER_FIELDS = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq")

# Activation functions that files may name without a path
SHORT_NAMES = {
    "gelu": "torch.nn.functional.gelu",
    "silu": "torch.nn.functional.silu",
    "relu": "torch.nn.functional.relu",
    "gelu_tanh": "lightning_mcore.layers.activations.gelu_tanh",
    "gelu_sigmoid": "lightning_mcore.layers.activations.gelu_sigmoid",
    "relu_squared": "lightning_mcore.layers.activations.relu_squared",
    "xielu": "lightning_mcore.layers.activations.xielu",
    "quick_gelu": "megatron.core.activations.quick_gelu",
    "squared_relu": "megatron.core.activations.squared_relu",
}

_STRATEGY_FIELDS = {
    *(field.name for field in dataclass_fields(ParallelLayout)),
    *("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "deallocate_pipeline_outputs", "tp_comm_overlap"),
    "microbatch_group_size_per_vp_stage",
}
_PRECISION_FIELDS = {
    *("fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"),
    *(*FP8_FIELDS, "fp4", "fp4_recipe", "fp4_param"),
}
_SCHEDULE_FIELDS = {
    *("batch_p2p_comm", "batch_p2p_sync", "variable_seq_lengths", "timers", "finalize_model_grads_func"),
    *("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
}
MODULE_FIELDS = {
    *("transformer_impl", "architecture", "vision", "vocab_size", "make_vocab_size_divisible_by", "seq_length"),
    *("rotary_base", "rotary_percent", "position_embedding_type", "yarn", "seq_len_interpolation_factor"),
    *("rope_scaling", "rope_scaling_factor", "share_embeddings_and_output_weights"),
}

TORCH_OPTIMIZER = "the torch optimizer that configure_optimizers returns"
_PRECISION = "Trainer(precision=...) or plugins=MCorePrecision(...)"
# Fields of OptimizerConfig that are set elsewhere
OPTIMIZER_HOMES: dict[str, str] = {
    **dict.fromkeys(("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"), f"{TORCH_OPTIMIZER} and its LR scheduler"),
    **dict.fromkeys(("weight_decay", "decoupled_weight_decay", "optimizer"), TORCH_OPTIMIZER),
    "apply_wd_to_qk_layernorm": TORCH_OPTIMIZER,
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"), TORCH_OPTIMIZER),
    **dict.fromkeys(("fp16", "bf16", "params_dtype", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"), _PRECISION),
    **dict.fromkeys(("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window"), _PRECISION),
    "hysteresis": _PRECISION,
    "clip_grad": "Trainer(gradient_clip_val=...)",
    "overlap_param_gather": "MCoreStrategy(overlap_param_gather=...)",
    "use_layer_wise_distributed_optimizer": "MCoreStrategy(use_layer_wise_distributed_optimizer=...)",
    "timers": "Lightning's profilers, Trainer(profiler=...)",
}
# Fields of OptimizerConfig that must keep their default, with the reason
OPTIMIZER_NOT_AVAILABLE: dict[str, str] = {
    "barrier_with_L1_time": "it acts on Megatron's timers, which Lightning's profilers replace",
    "overlap_param_gather_with_optimizer_step": "Megatron cannot write sharded checkpoints with it",
    "grad_norm_skip_threshold": "stages without parameters would not see that the step was skipped",
    "optimizer_cuda_graph": "Lightning's hooks run inside the step",
}
OTHER_OPTIMIZER_PREFIXES = ("muon_", "lion_", "soap_", "adaptive_muon_")
OFFLOAD_FIELDS = (
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)

FSDP = "MCoreStrategy(data_parallel_sharding=...) sets the fields of Megatron FSDP"
DDP_NOT_AVAILABLE = {
    **dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"), FSDP),
    **dict.fromkeys(("outer_dp_sharding_strategy", "suggested_communication_unit_size"), FSDP),
    **dict.fromkeys(("preserve_fp32_weights", "keep_fp8_transpose_cache", "gradient_reduce_div_fusion"), FSDP),
    "check_for_large_grads": "Megatron's rerun machine judges them, and it cannot run steps of Lightning again",
    "delay_wgrad_compute": "it needs a schedule that computes weight gradients separately, which is missing here",
}


def ddp_fields_of(precision: str) -> dict[str, Any]:
    """Return the ``DistributedDataParallelConfig`` fields of a number format, such as ``"bf16-mixed"``; not FP8's."""
    fields: dict[str, Any] = {"grad_reduce_in_fp32": precision == "32-true" or precision.endswith("-mixed")}
    if precision.startswith("16"):
        fields["check_for_nan_in_grad"] = False  # an overflow skips a step and does not end the run
    return fields


def check_owned_by_precision(given: Mapping[str, Any], owned: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of ``ddp_config`` (``given``) that contradicts the precision (``owned``)."""
    for name, value in owned.items():
        if name in given and given[name] != value:
            raise ValueError(
                f"ddp_config.{name}={given[name]} contradicts Trainer(precision=...), which means {name}={value};"
                " set it through the precision"
            )


def check_home(name: str) -> None:
    """Raise ValueError for a field of ``TransformerConfig`` that the module, strategy, precision or schedule sets."""
    if name in MODULE_FIELDS:
        raise ValueError(f"{name} is an argument of the module, not a field of transformer; move it one level up")
    if name in _STRATEGY_FIELDS:
        raise ValueError(f"{name} belongs to the strategy, not to the model; set it in MCoreStrategy({name}=...)")
    if name in _PRECISION_FIELDS:
        raise ValueError(f"{name} belongs to the precision, not to the model; set it through Trainer(precision=...)")
    if name in _SCHEDULE_FIELDS or name.startswith("_"):
        raise ValueError(f"{name} is filled in by the strategy while it runs the model; remove it from transformer")


def unknown_field(name: str, known: Collection[str], of_latent_attention: Collection[str], release: str) -> str:
    """Return a sentence that rejects a name which is not among the ``known`` fields of ``TransformerConfig``."""
    if name in of_latent_attention:
        return f"{name} is a field of multi-latent attention; set multi_latent_attention=True or remove it"
    close = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {close[0]}?" if close else "see TransformerConfig for the fields there are"
    return f"TransformerConfig of megatron-core {release} has no field {name}; {suggestion}"


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for per-layer lists of the wrong length, which Megatron notices late or not at all."""
    for name in PER_LAYER_FIELDS:
        given = fields.get(name)
        if isinstance(given, list | tuple) and len(given) != fields["num_layers"]:
            raise ValueError(
                f"{name} has {len(given)} entries and num_layers is {fields['num_layers']}; give one for each layer"
            )


_SILU = ("silu", "torch.nn.functional.silu")


def fusion_defaults(
    transformer: Mapping[str, Any],
    position_embedding_type: str = "rope",
    has_adapters: bool = False,
    architecture: Mapping[str, Any] | None = None,
) -> dict[str, bool]:
    """Return the fused kernels that are on by default, except for fields of ``TransformerConfig`` that a model sets.

    They are for TransformerEngine's layers on a GPU; Megatron leaves them all off. They compute what the plain kernels
    do, with fewer passes over memory. A fusion stays off if Megatron has no such kernel for the model, or if the kernel
    would ignore a setting. Fused cross entropy always stays off, because TransformerEngine's kernel writes gradients
    over the logits, which metrics read.
    """
    get = transformer.get
    has_bias, has_experts = get("add_bias_linear", True), bool(get("num_moe_experts"))
    wanted = {
        # With packed rows, Megatron's fused kernel ignores YaRN's scale and rotary_interleaved.
        "apply_rope_fusion": position_embedding_type == "rope"
        and not (architecture or {}).get("stretch")
        and not get("multi_latent_attention")
        and not get("rotary_interleaved"),
        "bias_activation_fusion": bool(get("gated_linear_unit"))
        and get("activation_func") in _SILU
        and not get("use_te_activation_func")
        and not get("activation_func_clamp_value")
        and not get("glu_linear_offset")
        and not (has_experts and has_bias),
        "bias_dropout_fusion": not get("hidden_dropout") and not (has_experts and has_bias),
        "moe_grouped_gemm": has_experts and not has_adapters,
        "moe_permute_fusion": has_experts and get("moe_expert_capacity_factor") is None,
    }
    return {name: True for name, is_wanted in wanted.items() if is_wanted and name not in transformer}
