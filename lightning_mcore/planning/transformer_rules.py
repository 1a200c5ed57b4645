# SPDX-License-Identifier: Apache-2.0
"""The rules of ``TransformerConfig`` between fields, as data, so that they are known without importing megatron-core.

Each rule is what Megatron refuses and the sentence for it. What layouts refuse stands in ``config/layout.py``, what
this package does not carry out in ``config/field_support.py``. ``plan --check`` builds the real config, for what is not
here.

Source: ``TransformerConfig.__post_init__``, ``MLATransformerConfig.__post_init__`` and
``ModelParallelConfig.__post_init__`` of megatron-core 0.16.1.
"""

from collections.abc import Callable, Collection
from typing import Any

from lightning_mcore.config.checks import choices

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
_OFFLOAD_MODULES = ("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear")
_BALANCED_BY_A_LOSS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")

Rule = tuple[Callable[[Any], Any], str]
"""What is refused, of a config; and the sentence, in which ``{c.name}`` is a field."""

_RECOMPUTE: tuple[Rule, ...] = (
    (
        lambda c: c.recompute_granularity == "full" and c.recompute_method is None,
        "recompute_granularity='full' needs recompute_method; choose 'uniform' or 'block'",
    ),
    (
        lambda c: c.recompute_granularity == "full" and c.recompute_num_layers is None,
        "recompute_granularity='full' needs recompute_num_layers; give the layers of a group (uniform) or of a stage"
        " (block), 1 or more",
    ),
    (
        lambda c: c.recompute_granularity == "selective" and c.recompute_num_layers is not None,
        "recompute_num_layers={c.recompute_num_layers} with recompute_granularity='selective', which recomputes parts"
        " of every layer; leave it out",
    ),
    (
        lambda c: c.recompute_granularity and c.distribute_saved_activations and c.sequence_parallel,
        "distribute_saved_activations=True with sequence_parallel=True, which shares them already; leave one out",
    ),
    (
        lambda c: _selected(c) - set(RECOMPUTE_MODULES),
        "recompute_modules={c.recompute_modules} names a part that is none; choose " + choices(RECOMPUTE_MODULES),
    ),
    (
        lambda c: "moe_act" in _selected(c) and not c.moe_grouped_gemm,
        "recompute_modules with 'moe_act' needs moe_grouped_gemm=True; set it, or leave 'moe_act' out",
    ),
    (
        lambda c: "mla_up_proj" in _selected(c) and not c.multi_latent_attention,
        "recompute_modules with 'mla_up_proj' needs multi_latent_attention=True; leave 'mla_up_proj' out",
    ),
    (
        lambda c: "shared_experts" in _selected(c) and _overlapped_shared(c),
        "recompute_modules with 'shared_experts' contradicts moe_shared_expert_overlap=True; set one of them",
    ),
    (
        lambda c: c.fp8 and c.fp8_recipe == "delayed" and _selected(c) & {"moe_act", "layernorm"},
        "recompute_modules with 'moe_act' or 'layernorm' is not available with fp8_recipe='delayed'; choose"
        " another recipe",
    ),
    (
        lambda c: c.moe_layer_recompute and c.recompute_granularity == "full",
        "moe_layer_recompute=True contradicts recompute_granularity='full', which recomputes those layers too; leave it"
        " out",
    ),
    (
        lambda c: c.cpu_offloading and c.recompute_granularity is not None,
        "cpu_offloading=True contradicts recompute_granularity={c.recompute_granularity!r}; set one of them",
    ),
    (
        lambda c: c.cpu_offloading and c.pipeline_model_parallel_size > 1,
        "cpu_offloading=True needs pipeline_model_parallel_size=1, but it is {c.pipeline_model_parallel_size}; set"
        " it to 1, or leave cpu_offloading out",
    ),
    (
        lambda c: c.cpu_offloading and not 0 <= c.cpu_offloading_num_layers < c.num_layers,
        "cpu_offloading_num_layers={c.cpu_offloading_num_layers} is not below num_layers={c.num_layers}; choose fewer",
    ),
    (
        lambda c: c.fine_grained_activation_offloading and not (set(c.offload_modules or ()) & set(_OFFLOAD_MODULES)),
        "fine_grained_activation_offloading=True needs offload_modules; choose from " + choices(_OFFLOAD_MODULES),
    ),
)

_EXPERTS: tuple[Rule, ...] = (
    (
        lambda c: c.num_moe_experts is not None and c.num_moe_experts <= 0,
        "num_moe_experts={c.num_moe_experts} is too small; choose 1 or more, or None for a dense model",
    ),
    (
        lambda c: c.num_moe_experts is None and c.moe_ffn_hidden_size is not None,
        "moe_ffn_hidden_size={c.moe_ffn_hidden_size} needs num_moe_experts; give both or neither",
    ),
    (
        lambda c: c.moe_enable_deepep and c.moe_token_dispatcher_type != "flex",
        "moe_enable_deepep=True needs moe_token_dispatcher_type='flex', but it is {c.moe_token_dispatcher_type!r};"
        " set both",
    ),
    (
        lambda c: (
            c.moe_token_dispatcher_type == "flex"
            and c.moe_pad_expert_input_to_capacity
            and (c.moe_enable_deepep or c.moe_flex_dispatcher_backend == "deepep")
        ),
        "moe_pad_expert_input_to_capacity=True is not available with DeepEP; choose"
        " moe_token_dispatcher_type='alltoall'",
    ),
    (
        lambda c: c.moe_shared_expert_intermediate_size is not None and c.moe_shared_expert_intermediate_size <= 0,
        "moe_shared_expert_intermediate_size={c.moe_shared_expert_intermediate_size} is too small; choose 1 or more, or"
        " None for no shared expert",
    ),
    (
        lambda c: _overlapped_shared(c) and c.moe_token_dispatcher_type != "alltoall",
        "moe_shared_expert_overlap=True needs moe_token_dispatcher_type='alltoall', but it is"
        " {c.moe_token_dispatcher_type!r}; set both",
    ),
    (
        lambda c: (
            isinstance(c.moe_router_load_balancing_type, list)
            and not (
                isinstance(c.moe_aux_loss_coeff, list)
                and len(c.moe_aux_loss_coeff) == len(c.moe_router_load_balancing_type)
            )
        ),
        "moe_router_load_balancing_type={c.moe_router_load_balancing_type} needs a list of as many coefficients in"
        " moe_aux_loss_coeff, but it is {c.moe_aux_loss_coeff}",
    ),
    (
        lambda c: c.moe_expert_capacity_factor is not None and _balancing(c) - set(_BALANCED_BY_A_LOSS),
        "moe_expert_capacity_factor={c.moe_expert_capacity_factor} is not available with"
        " moe_router_load_balancing_type={c.moe_router_load_balancing_type!r}; choose " + choices(_BALANCED_BY_A_LOSS),
    ),
    (
        lambda c: (
            c.moe_pad_expert_input_to_capacity
            and (c.moe_expert_capacity_factor is None or c.moe_expert_capacity_factor < 0)
        ),
        "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor; set both",
    ),
    (
        lambda c: c.moe_router_enable_expert_bias and c.moe_router_score_function != "sigmoid",
        "moe_router_enable_expert_bias=True needs moe_router_score_function='sigmoid', but it is"
        " {c.moe_router_score_function!r}; set both",
    ),
    (
        lambda c: (
            c.moe_router_topk == 1
            and c.moe_router_score_function == "softmax"
            and not c.moe_router_pre_softmax
            and c.moe_router_load_balancing_type != "sinkhorn"
        ),
        "moe_router_topk=1 with softmax over the chosen expert alone has no gradient; set moe_router_pre_softmax=True",
    ),
    (
        lambda c: c.moe_router_group_topk and not c.moe_router_num_groups,
        "moe_router_group_topk={c.moe_router_group_topk} needs moe_router_num_groups; set both",
    ),
    (
        lambda c: c.moe_router_group_topk and c.moe_router_topk_limited_devices,
        "moe_router_topk_limited_devices is retired; leave it out where moe_router_group_topk is set",
    ),
    (
        lambda c: (
            c.moe_router_group_topk and c.moe_router_num_groups and (c.num_moe_experts or 0) % c.moe_router_num_groups
        ),
        "moe_router_num_groups={c.moe_router_num_groups} does not divide num_moe_experts={c.num_moe_experts};"
        " choose a divisor",
    ),
    (
        lambda c: (
            c.moe_router_group_topk
            and (c.moe_router_num_groups or 0)
            and c.moe_router_group_topk > c.moe_router_num_groups
        ),
        "moe_router_group_topk={c.moe_router_group_topk} is more than moe_router_num_groups={c.moe_router_num_groups};"
        " choose fewer groups",
    ),
    (
        lambda c: (c.moe_router_padding_for_quantization or c.moe_router_padding_for_fp8) and not c.fp8,
        "moe_router_padding_for_quantization=True needs FP8; set MCorePrecision(fp8_recipe=...), or leave it out",
    ),
    (
        lambda c: c.num_moe_experts is not None and c.add_bias_linear and c.expert_tensor_parallel_size != 1,
        "experts with biases need expert_tensor_parallel_size=1, but it is {c.expert_tensor_parallel_size}; set it, or"
        " add_bias_linear=False",
    ),
)

_LAYERS: tuple[Rule, ...] = (
    (
        lambda c: (
            c.bias_activation_fusion
            and c.activation_func == "gelu"
            and not c.gated_linear_unit
            and not c.add_bias_linear
        ),
        "bias_activation_fusion=True with 'gelu' needs add_bias_linear=True; set it, or leave the fusion out",
    ),
    (
        lambda c: c.bias_activation_fusion and c.activation_func not in ("gelu", "silu", "quick_gelu"),
        "bias_activation_fusion=True is not available with activation_func={c.activation_func!r}; choose 'gelu', 'silu'"
        " or 'quick_gelu', or leave it out",
    ),
    (
        lambda c: c.bias_activation_fusion and c.activation_func == "quick_gelu" and not c.gated_linear_unit,
        "bias_activation_fusion=True with 'quick_gelu' needs gated_linear_unit=True; set it, or leave the fusion out",
    ),
    (
        lambda c: c.bias_activation_fusion and c.glu_linear_offset and c.activation_func != "quick_gelu",
        "bias_activation_fusion=True with glu_linear_offset={c.glu_linear_offset} needs activation_func='quick_gelu';"
        " leave one out",
    ),
    (
        lambda c: c.bias_activation_fusion and c.use_te_activation_func,
        "bias_activation_fusion=True contradicts use_te_activation_func=True; set one of them",
    ),
    (
        lambda c: c.use_te_activation_func and c.activation_func not in ("gelu", "silu", "relu"),
        "use_te_activation_func=True is not available with activation_func={c.activation_func!r}; choose 'gelu', 'silu'"
        " or 'relu'",
    ),
    (
        lambda c: c.activation_func_fp8_input_store and not (c.activation_func == "silu" and c.gated_linear_unit),
        "activation_func_fp8_input_store=True needs activation_func='silu' and gated_linear_unit=True; set both",
    ),
    (
        lambda c: c.multi_latent_attention and c.rotary_interleaved,
        "rotary_interleaved=True is not available with multi_latent_attention; leave it out",
    ),
    (
        lambda c: c.multi_latent_attention and c.attention_output_gate,
        "attention_output_gate=True is not available with multi_latent_attention; leave it out",
    ),
    (
        lambda c: c.fused_single_qkv_rope and c.attention_output_gate,
        "fused_single_qkv_rope=True is not available with attention_output_gate=True; set one of them",
    ),
    (
        lambda c: isinstance(c.no_rope_freq, int) and c.no_rope_freq and c.num_layers % c.no_rope_freq,
        "no_rope_freq={c.no_rope_freq} does not divide num_layers={c.num_layers}; choose a divisor",
    ),
    (
        lambda c: c.defer_embedding_wgrad_compute and c.pipeline_model_parallel_size == 1,
        "defer_embedding_wgrad_compute=True needs pipeline_model_parallel_size of 2 or more; leave it out",
    ),
    (
        lambda c: c.defer_embedding_wgrad_compute and not c.gradient_accumulation_fusion,
        "defer_embedding_wgrad_compute=True needs gradient_accumulation_fusion=True; set both",
    ),
    (
        lambda c: c.batch_invariant_mode and c.attention_backend != "flash",
        "batch_invariant_mode=True needs attention_backend='flash'; set both",
    ),
    (
        lambda c: (
            c.context_parallel_size > 1 and isinstance(c.cp_comm_type, list) and len(c.cp_comm_type) != c.num_layers
        ),
        "cp_comm_type names another number of layers than num_layers={c.num_layers}; give one for each layer",
    ),
)

RULES = (*_RECOMPUTE, *_EXPERTS, *_LAYERS)


def refused_by_megatron(config: Any) -> list[str]:
    """Return a sentence for each rule that a config breaks.

    Args:
        config: Attributes named as the fields of ``TransformerConfig``; a rule on a field that the installed version
            lacks is passed over.
    """
    sentences = []
    for is_broken, sentence in RULES:
        try:
            broken = is_broken(config)
        except AttributeError:
            continue
        if broken:
            sentences.append(sentence.format(c=config))
    return sentences


def _selected(config: Any) -> set[str]:
    modules: Collection[str] = config.recompute_modules if config.recompute_modules is not None else ("core_attn",)
    return set(modules) if config.recompute_granularity == "selective" else set()


def _overlapped_shared(config: Any) -> bool:
    return bool(config.moe_shared_expert_overlap) and config.moe_shared_expert_intermediate_size is not None


def _balancing(config: Any) -> set[str]:
    given = config.moe_router_load_balancing_type
    return set(given) if isinstance(given, list) else {given}
