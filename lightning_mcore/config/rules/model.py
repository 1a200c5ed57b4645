# SPDX-License-Identifier: Apache-2.0
"""The supported fields of ``TransformerConfig``, and the layers that support them, so that none is silently ignored.

Megatron's config has about 320 options. Some are read only by TransformerEngine's layers, some need CUDA, and some need
Megatron-LM's training loop. A field that would have no effect raises unless it has its default. The tables below are
data; a field in none of them works wherever Megatron accepts it.

``layers/spec.py`` and ``MCoreGPT.check_settings`` call :func:`check_fields` before a model is built, and
``parallel/chunks.py`` calls it for the config of any other model.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.config.value_checks import require_choice, require_number, require_size

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# Fields that give layers losses of their own, with Megatron's defaults
_LAYER_LOSSES: Mapping[str, Any] = {
    "num_moe_experts": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
}
LossNormalization: TypeAlias = Literal["tokens", "samples"]
"""The unit over which the loss of a language model is a mean."""

NEEDS_TRANSFORMER_ENGINE: Collection[str] = (
    # attention
    *("experimental_attention_variant", "kitchen_attention_backend", "log_max_attention_logit", "qk_clip"),
    *("apply_rope_fusion", "fused_single_qkv_rope", "mla_down_proj_fusion", "use_kitchen_attention"),
    # linear layers, norms, activations and number formats
    *("batch_invariant_mode", "cpu_offloading", "delay_wgrad_compute", "disable_parameter_transpose_cache"),
    *("fused_residual_rmsnorm", "memory_efficient_layer_norm", "persist_layer_norm", "symmetric_ar_type"),
    *("activation_func_fp8_input_store", "use_te_activation_func", "use_transformer_engine_op_fuser", "use_kitchen"),
    *("fp4", "fp8", "quant_recipe", "batch_invariant_backend"),
    # experts
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"),
    *("moe_router_padding_for_quantization", "moe_single_grouped_bias", "moe_single_grouped_weight"),
    *("moe_use_grouped_tensor", "moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"),
    *("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"),
    "overlap_dispatch_backward_with_experts_wgrad",
)
"""Fields read only by TransformerEngine's layers or kernels; they raise with the torch backend."""

NEEDS_CUDA: Collection[str] = (
    *("defer_embedding_wgrad_compute", "gradient_accumulation_fusion", "disable_bf16_reduced_precision_matmul"),
    *("moe_hybridep_num_sms", "moe_paged_stash", "moe_permute_fusion_into_hybridep"),
    "fine_grained_activation_offloading",
)
"""Fields that need CUDA; they raise on other devices."""

TORCH_BACKEND_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "attention_backend": (("auto", "local"), "its attention is PyTorch's, which chooses its kernel itself"),
    "attention_softmax_in_fp32": ((True,), "its softmax is computed in fp32"),
    "cp_comm_type": ((None, "all_gather"), "it gathers keys and values over the context-parallel ranks"),
    "deterministic_mode": ((False,), "it follows Trainer(deterministic=True)"),
    "flash_attention_version": ((None,), "its attention is PyTorch's, which chooses its kernel itself"),
    "masked_softmax_fusion": ((False,), "its attention has no softmax of its own to fuse"),
}
"""The values that the torch backend supports for these fields, and why it does not support others."""

KERNELS: Collection[str] = frozenset(
    {
        *("apply_rope_fusion", "fused_single_qkv_rope", "mla_down_proj_fusion"),
        *("attention_backend", "cp_comm_type", "flash_attention_version", "masked_softmax_fusion"),
        *("kitchen_attention_backend", "use_kitchen_attention"),
        *("fused_residual_rmsnorm", "memory_efficient_layer_norm", "persist_layer_norm"),
        *("use_te_activation_func", "use_transformer_engine_op_fuser", "disable_parameter_transpose_cache"),
        *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "moe_permute_fusion_into_hybridep"),
        *("moe_single_grouped_bias", "moe_single_grouped_weight", "moe_hybridep_num_sms", "moe_paged_stash"),
        *("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"),
        *("delay_wgrad_compute", "defer_embedding_wgrad_compute", "gradient_accumulation_fusion"),
        *("overlap_dispatch_backward_with_experts_wgrad", "symmetric_ar_type"),
        *("cpu_offloading", "fine_grained_activation_offloading"),
    }
)
"""Fields above that choose a kernel, a transport or a place in memory; without them only rounding changes."""

NOT_AVAILABLE: Mapping[str, str] = {
    "apply_residual_connection_post_layernorm": "megatron-core does not read it",
    **dict.fromkeys(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        "CUDA graphs need random states and batches that Megatron-LM's training loop prepares",
    ),
    **dict.fromkeys(
        (
            "cuda_graph_modules",
            "cuda_graph_scope",  # its name before megatron-core 0.19
            "cuda_graph_warmup_steps",
            "cuda_graph_use_single_mempool",
            "cuda_graph_retain_backward_graph",
        ),
        "it is part of cuda_graph_impl, which is not supported",
    ),
    "enable_mhc_connections": "the layers here pass on one stream of activations, not several",
    **dict.fromkeys(
        ("mhc_num_residual_streams", "mhc_sinkhorn_iterations", "mhc_init_gating_factor", "mhc_recompute_layer_num"),
        "it is part of enable_mhc_connections, which is not supported",
    ),
    "ep_overlap_early_attn_memory_release": "it is part of overlap_moe_expert_parallel_comm",
    "expert_gtp_weight_remat_size": "its process groups are not opened",
    "flash_decode": "it is for Megatron's inference engine",
    "gtp_remat_opt_in_modules": "its process groups are not opened",
    "gtp_weight_remat_size": "its process groups are not opened",
    "heterogeneous_block_specs": "it belongs to Megatron's HeterogeneousTransformerConfig",
    "hierarchical_context_parallel_sizes": "its process groups are not opened",
    "hybrid_context_parallel": "Megatron's own needs the data loader of Megatron-LM; set it in MCoreStrategy",
    "inference_rng_tracker": "it is for Megatron's inference engine",
    "init_model_with_meta_device": "nothing would initialise the parameters",
    "max_seqlen_per_dp_cp_rank": "it is part of hybrid_context_parallel",
    "moe_enable_routing_replay": "nothing here would record and replay",
    "moe_extended_tp": "megatron-core has retired it; set expert_tensor_parallel_size in MCoreStrategy",
    "moe_token_dropping": "megatron-core does not read it; set moe_expert_capacity_factor",
    "mtp_hsm": "it has not been tested here",
    "num_microbatches_with_partial_activation_checkpoints": "a training_step does not know about microbatches",
    "overlap_moe_expert_parallel_comm": "it needs the schedule plans of Megatron-LM",
    "use_inference_optimized_layers": "it is for Megatron's inference engine",
    "use_ring_exchange_p2p": "it needs a build of PyTorch that is not public",
    "use_te_rng_tracker": "random states are PyTorch's, so that every layout draws alike",
}
"""Fields that need code outside the model that this package lacks, with the reason as the end of a sentence."""

NOT_OF_A_GPT: Collection[str] = (
    *("is_hybrid_model", "linear_attention_freq", "mamba_num_heads", "mrope_section", "mtp_hybrid_override_pattern"),
    *("gdp_num_householder", "gdp_cutedsl_kernel", "gdp_num_chunk_states_to_recompute"),
)
"""Fields of Megatron's other models."""


def check_fields(
    config: "TransformerConfig",
    transformer_impl: Literal["local", "transformer_engine"] | None = None,
    device_type: str | None = None,
) -> None:
    """Raise ValueError for fields that would have no effect or fail later.

    ``transformer_impl`` is None for a model that is not ours, and ``device_type`` is None if the device is unknown.
    """
    defaults = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    defaults |= {
        field.name: field.default_factory() for field in fields(config) if field.default_factory is not MISSING
    }
    given = {name: value for name, value in vars(config).items() if name in defaults and value != defaults[name]}
    for name, reason in NOT_AVAILABLE.items():
        if given.get(name, []) != []:  # Megatron turns its own default of cuda_graph_modules into an empty list
            raise ValueError(f"{name}={given[name]!r} is not available: {reason}; leave it out")
    for name in NEEDS_CUDA:
        if name in given and device_type not in ("cuda", None):
            raise ValueError(f"{name}={given[name]!r} needs CUDA, and this run is on {device_type!r}; leave it out")
    _check_combinations(config)
    _check_dropped_tokens(config, device_type)
    if transformer_impl is not None:
        # It has no effect but on how weights start, and MCoreGPT sets it for layers of one part
        known = {"is_hybrid_model"} if architecture_of(config).has_half_layers else set()
        for name in NOT_OF_A_GPT:
            if name in given.keys() - known:
                raise ValueError(f"{name}={given[name]!r} is for models other than a GPT; leave it out")
    if transformer_impl == "local":
        _check_torch_backend(config, given, defaults)
    if transformer_impl == "transformer_engine":
        _check_context_parallelism(config)


_ENGINE = 'transformer_impl="transformer_engine", on CUDA or, with lightning-mcore[te-cpu], on a CPU'


def _check_torch_backend(config: "TransformerConfig", given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for name in NEEDS_TRANSFORMER_ENGINE:
        if name in given:
            raise ValueError(f"{name}={given[name]!r} needs TransformerEngine; choose {defaults[name]!r}, or {_ENGINE}")
    for name, (allowed, reason) in TORCH_BACKEND_VALUES.items():
        value = getattr(config, name, None)
        value = getattr(value, "name", value)  # a member of an enum
        if name in given and value not in allowed:
            raise ValueError(
                f"{name}={value!r} is not for the torch backend, because {reason}; choose "
                f"{' or '.join(map(repr, allowed))}, or {_ENGINE}"
            )
    check_attention(config)
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        raise ValueError(
            "cross_entropy_fusion_impl='te' needs TransformerEngine; choose 'native' or cross_entropy_loss_fusion=False"
        )


def _check_context_parallelism(config: "TransformerConfig") -> None:
    """Reject values of ``cp_comm_type`` that TransformerEngine's attention would reject at the first step."""
    given = config.cp_comm_type
    # A list has one value per layer.
    kinds = set(given) if isinstance(given, list | tuple) else {given}
    if "a2a+p2p" in kinds:
        raise ValueError(
            "cp_comm_type='a2a+p2p' is not available: its process groups are not opened; choose 'p2p', 'a2a' or"
            " 'all_gather'"
        )
    if config.window_size is not None and config.context_parallel_size > 1 and kinds & {None, "p2p"}:
        raise ValueError(
            f"window_size={config.window_size} with context_parallel_size={config.context_parallel_size} and"
            f" cp_comm_type={given!r} is not available: TransformerEngine sends keys and values from rank to rank"
            " (p2p, its default) only without a window; set cp_comm_type='all_gather' or 'a2a'"
        )
    if config.softmax_type != "vanilla" and config.context_parallel_size > 1 and kinds != {"a2a"}:
        raise ValueError(
            f"softmax_type={config.softmax_type!r} with context_parallel_size={config.context_parallel_size} and"
            f" cp_comm_type={given!r} is not available in TransformerEngine; set cp_comm_type='a2a', or"
            " transformer_impl='local'"
        )


SoftmaxType: TypeAlias = Literal["vanilla", "off-by-one", "learnable"]


def check_attention(config: Any, is_causal: bool = True) -> None:
    """Reject what the torch backend lacks: other softmaxes, wrong windows, causal ones that look ahead."""
    require_choice("softmax_type", config.softmax_type, SoftmaxType)
    if config.window_size is None:
        return
    # (127, 0): each query sees 127 earlier keys and its own.
    back, ahead = config.window_size
    if back < -1 or ahead < -1:
        raise ValueError(
            f"window_size={config.window_size} is not a window; choose numbers of tokens, or -1 for no end"
        )
    if is_causal and ahead > 0:
        raise ValueError(
            f"window_size={config.window_size} looks {ahead} tokens ahead, and the attention is causal; "
            f"choose ({back}, 0)"
        )


def check_without_transformer_engine(config: Any) -> None:
    """Reject recomputed norms, for which Megatron's local layers need TransformerEngine."""
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        raise ValueError(
            "recompute_modules with 'layernorm' needs TransformerEngine; choose from 'core_attn', 'mla_up_proj', "
            "'mlp', 'moe' and 'shared_experts'"
        )


def _check_combinations(config: "TransformerConfig") -> None:
    """Reject combinations that Megatron accepts but computes wrongly."""
    _check_values(config)
    etp, ep = config.expert_tensor_parallel_size, config.expert_model_parallel_size
    if config.num_moe_experts and ep == 1 and etp not in (None, config.tensor_model_parallel_size):
        # Megatron reduces the gradients of experts over their own ranks only if ep > 1.
        raise ValueError(
            f"expert_tensor_parallel_size={etp} with tensor_model_parallel_size={config.tensor_model_parallel_size} "
            "needs expert_model_parallel_size > 1: otherwise megatron-core lets the copies of an expert drift apart; "
            f"choose expert_tensor_parallel_size={config.tensor_model_parallel_size} or more expert parallelism"
        )
    selected = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
    if "mlp" in selected and (config.add_bias_linear or architecture_of(config).mlp_bias):
        # Megatron's recomputation returns the bias, a parameter, as an output, which makes it a node of its own graph.
        raise ValueError(
            "recompute_modules with 'mlp' needs add_bias_linear=False (and no mlp_bias): otherwise the backward pass of"
            " megatron-core recurses endlessly; set it, or leave 'mlp' out"
        )
    if config.num_moe_experts and ep > 1 and config.use_cpu_initialization:
        raise ValueError(
            f"use_cpu_initialization=True with expert_model_parallel_size={ep}: megatron-core draws the same experts on"
            " every expert-parallel rank; leave use_cpu_initialization out"
        )
    staged = config.pipeline_model_parallel_size > 1
    halved = config.pipeline_dtype is not None and config.pipeline_dtype.itemsize < 4
    if config.fp32_residual_connection and staged and halved:
        raise ValueError(
            f"fp32_residual_connection=True with pipeline_model_parallel_size={config.pipeline_model_parallel_size}"
            f" would send fp32 where {config.pipeline_dtype} is expected; choose 32-true or one stage"
        )


def _check_dropped_tokens(config: "TransformerConfig", device_type: str | None) -> None:
    """Reject dropped tokens on the CPU where tensor-parallel ranks would exchange unequal numbers of them.

    ``expert_faults`` has the same limit for expert parallelism.
    """
    capacity, size = config.moe_expert_capacity_factor, config.tensor_model_parallel_size
    split = device_type == "cpu" and size > 1 and config.expert_model_parallel_size == 1
    if config.num_moe_experts and capacity is not None and split and not config.moe_pad_expert_input_to_capacity:
        raise ValueError(
            f"moe_expert_capacity_factor={capacity} with tensor_model_parallel_size={size} needs collectives of uneven"
            " sizes, which gloo does not have on the CPU; set moe_pad_expert_input_to_capacity=True"
        )


def _check_values(config: "TransformerConfig") -> None:
    """Reject values that Megatron rejects only when it computes with them, and options that have never run."""
    if config.moe_token_dispatcher_type == "flex":
        raise ValueError(
            "moe_token_dispatcher_type='flex' (DeepEP, HybridEP) is not available: it has never run here; choose"
            " 'alltoall' or 'allgather'"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(
                f"{name}={getattr(config, name)} is not a share of values to drop; choose 0 or more, below 1"
            )
    experts, topk = config.num_moe_experts, config.moe_router_topk
    if experts:
        require_size("moe_router_topk", topk)
        _check_balancing(config)
    if experts and topk > experts:
        raise ValueError(f"moe_router_topk={topk} is more than num_moe_experts={experts}; choose {experts} or fewer")
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    if experts and groups and chosen and not chosen <= topk <= (most := chosen * (experts // groups)):
        # Megatron scores a group by the sum of its best topk // chosen experts.
        raise ValueError(
            f"moe_router_topk={topk} does not fit moe_router_group_topk={chosen} groups of {experts // groups} experts;"
            f" choose {chosen if chosen == most else f'{chosen} to {most}'}"
        )
    latent, overlapped = config.moe_latent_size, config.moe_shared_expert_overlap
    if latent is not None and (isinstance(latent, bool) or not isinstance(latent, int) or latent < 1 or not experts):
        raise ValueError(
            f"moe_latent_size={latent!r} with num_moe_experts={experts}; give a width above 0 and the number of"
            " experts, or leave it out"
        )
    if latent and overlapped:
        raise ValueError(
            f"moe_latent_size={latent} does not work with moe_shared_expert_overlap=True; leave one of them out"
        )


RouterBalancing: TypeAlias = Literal[
    "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"
]
_QUANTILES = "quantile_balancing"


def _check_balancing(config: "TransformerConfig") -> None:
    """Reject settings of a router's balancing that Megatron would ignore, so that experts would not be balanced."""
    name = "moe_router_load_balancing_type"
    balancing, weight = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(weight, list) and not isinstance(balancing, list):
        raise ValueError(
            f"moe_aux_loss_coeff={weight} with {name}={balancing!r}; give a number, or a list for each of them"
        )
    kinds = balancing if isinstance(balancing, list) else [balancing]
    for kind in kinds:
        require_choice(name, kind, RouterBalancing)
        if kind in ("sinkhorn", _QUANTILES) and isinstance(balancing, list):
            raise ValueError(
                f"{name}={balancing}: {kind!r} routes tokens and cannot be in a list; give it alone, or leave it out"
            )
    for number in weight if isinstance(weight, list) else [weight]:
        require_number("moe_aux_loss_coeff", number, at_least=0.0)
    if balancing in ("sinkhorn", _QUANTILES) and weight:
        raise ValueError(
            f"moe_aux_loss_coeff={weight} with {name}={balancing!r}, which balances without a loss; set it to 0, or"
            " choose 'aux_loss'"
        )
    if balancing != _QUANTILES:
        return
    if not hasattr(config, "moe_router_quantile_balancing_ema"):
        raise ValueError(
            f"{name}={balancing!r} needs a newer megatron-core than the one installed, such as 0.19.2; update it, or"
            " choose 'aux_loss'"
        )
    # Megatron fails on the first three in the first step, and ignores the last.
    for other in (
        "moe_router_fusion",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_enable_expert_bias",
    ):
        if getattr(config, other):
            raise ValueError(f"{other}={getattr(config, other)} does not work with {name}={balancing!r}; leave it out")


def check_normalization(normalization: LossNormalization, config: Any) -> None:
    """Raise ValueError for a normalization that is unknown, or that the layers' own losses do not allow."""
    require_choice("normalization", normalization, LossNormalization)
    if normalization == "tokens" or not config.calculate_per_token_loss:
        return
    for name in weighted_by_tokens(config):
        raise ValueError(
            f"loss normalization 'samples' with {name}={getattr(config, name)} is not available, because"
            " Megatron weights that loss by tokens; choose 'tokens', or leave that loss out"
        )


def weighted_by_tokens(config: Any) -> list[str]:
    """Return the set fields that give layers losses of their own, which Megatron weights by tokens."""
    fields = {**_LAYER_LOSSES, **vars(config)}
    coefficients = fields["moe_aux_loss_coeff"]
    balanced = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    routed = fields["num_moe_experts"] is not None
    is_there = {
        "moe_aux_loss_coeff": routed and balanced and fields["moe_router_load_balancing_type"] != "none",
        "moe_z_loss_coeff": routed and bool(fields["moe_z_loss_coeff"]),
        "mtp_num_layers": bool(fields["mtp_num_layers"]),
    }
    return [name for name, there in is_there.items() if there]


def faults_of_mean(config: Any) -> Iterator[str]:
    """Yield a sentence if the loss is a mean over queries, but layers add losses weighted by tokens."""
    weighted = weighted_by_tokens(config)
    if config.calculate_per_token_loss and weighted:
        yield (
            f"calculate_per_token_loss=True with {weighted[0]}={getattr(config, weighted[0])}: the loss is a mean"
            " over queries, and Megatron weights that one by tokens; leave calculate_per_token_loss out"
        )


def check_average_in_collective(average_in_collective: bool, config: Any) -> None:
    """Raise ValueError for gradients that are averaged over ranks although the loss is a sum over tokens.

    Source: ``DistributedDataParallel.__init__`` (megatron-core 0.16.1 and 0.19.2).
    """
    if average_in_collective and config.calculate_per_token_loss:
        raise ValueError(
            "ddp_config.average_in_collective=True averages over ranks, but the model's "
            "calculate_per_token_loss=True needs a sum over tokens; set one of them to False"
        )
