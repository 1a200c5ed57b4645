# SPDX-License-Identifier: Apache-2.0
"""Families with parts that Megatron lacks, such as norms after attention and MLP (``config/architecture.py``)."""

from typing import Any

from lightning_mcore.hf.config_rules import (
    Config,
    ConfigRule,
    Constants,
    Derived,
    Fields,
    Only,
    Preset,
    Same,
    Unused,
    refuse_outside,
    refuse_unless,
)
from lightning_mcore.hf.decoder_rules import (
    ALPHA_ROPE,
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    DECODER,
    GROWING_ROPE,
    HEAD_SIZE,
    JOINED_MLP,
    LAYER_WINDOWS,
    MLP,
    MLP_BIAS,
    MLP_BIASES,
    OUTSIDE,
    PARTIAL_ROPE,
    PRETRAINING_TP,
    QK_NORM,
    QKV_BIAS,
    ROPE,
    ROPE_BY_WINDOW,
    SIZES,
    WINDOW,
    WITHOUT_ACTIVATION,
    WITHOUT_POSITIONS,
)
from lightning_mcore.hf.expert_rules import (
    ALL_LAYERS,
    CHOSEN_EXPERTS,
    EXPERT_SIZES,
    EXPERTS,
    LOCAL_EXPERTS,
    NO_ROUTER_LOSS,
    NORMALISED_ROUTER,
    NUM_EXPERTS,
    SOFTMAX_ROUTER,
    expert_weights,
    shared_expert_weights,
)
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.weight_rules import InterleavedStack, Rename, Stack, WeightRule

# ---- multipliers

_MULTIPLIERS: tuple[ConfigRule, ...] = (
    Same("embedding_multiplier", "embedding_scale"),
    Same("residual_multiplier", "residual_scale"),
    Same("logits_scaling", "logits_divisor"),
    Same("attention_multiplier", "softmax_scale"),
)

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    config=(*DECODER, ATTENTION_BIAS, MLP_BIAS, *_MULTIPLIERS),
    layer=(*ATTENTION, *ATTENTION_BIASES, *MLP, *MLP_BIASES),
    outside=OUTSIDE,
)
"""Granite 3 and 4 without experts: Llama with multipliers of embedding, attention scores, residuals and logits."""

_GRANITE_EXPERTS: tuple[WeightRule, ...] = (
    Rename("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    Rename("mlp.router.weight", "block_sparse_moe.router.layer.weight"),
    Rename("mlp.experts.experts.linear_fc1.weight", "block_sparse_moe.input_linear.weight"),
    Rename("mlp.experts.experts.linear_fc2.weight", "block_sparse_moe.output_linear.weight"),
)

GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    config=(
        *DECODER,
        ATTENTION_BIAS,
        *_MULTIPLIERS,
        LOCAL_EXPERTS,
        CHOSEN_EXPERTS,
        ALL_LAYERS,
        NORMALISED_ROUTER,
        *NO_ROUTER_LOSS,
    ),
    layer=(*ATTENTION, *ATTENTION_BIASES, *_GRANITE_EXPERTS),
    outside=OUTSIDE,
)
"""Granite 3 with experts in every layer."""

# ---- norms after attention and MLP

_AFTER: tuple[WeightRule, ...] = (
    Rename("self_attn_bda.norm.weight", "post_attention_layernorm.weight"),
    Rename("mlp_bda.norm.weight", "post_feedforward_layernorm.weight"),
)

_NORM_OF_ALL_HEADS = Constants({"head_norms": "all_heads"})

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    config=(*DECODER, ATTENTION_BIAS, Constants({"layer_norms": "after"}), _NORM_OF_ALL_HEADS),
    layer=(*ATTENTION[1:], *ATTENTION_BIASES, *QK_NORM, *MLP[1:], *_AFTER),
    outside=OUTSIDE,
)
"""OLMo 2: norms after attention and MLP, and norms of queries and keys over all heads together."""

OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    config=(
        *WITHOUT_POSITIONS,
        HEAD_SIZE,
        ROPE_BY_WINDOW,
        LAYER_WINDOWS,
        ATTENTION_BIAS,
        Constants({"layer_norms": "after"}),
        _NORM_OF_ALL_HEADS,
    ),
    layer=OLMO2.layer,
    outside=OUTSIDE,
)
"""OLMo 3: OLMo 2 with windows in some layers, which have their own rotary settings."""


def _read_hybrid(config: Config) -> dict[str, Any]:
    windowed = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    if config.get("sliding_window") is None or all(windowed):
        return {}
    return {"no_rope_freq": [int(not has_window) for has_window in windowed]}


_HYBRID = Derived((), _read_hybrid, lambda fields: {})
"""If some layers have windows, the others have no rotary positions."""

EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    config=(
        *DECODER,
        LAYER_WINDOWS,
        _HYBRID,
        Unused(("sliding_window_pattern",)),  # transformers makes layer_types from it
        Constants({"layer_norms": "after", "qk_layernorm": True}),
    ),
    layer=(*ATTENTION[1:], *QK_NORM, *MLP[1:], *_AFTER),
    outside=OUTSIDE,
)
"""EXAONE 4: norms after attention and MLP, windows in some layers, and rotary positions only in these."""

_PARTS_OF_GLM4: tuple[WeightRule, ...] = (
    Rename("self_attn_bda.norm.weight", "post_self_attn_layernorm.weight"),
    Rename("mlp_bda.norm.weight", "post_mlp_layernorm.weight"),
)

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    config=(
        *WITHOUT_POSITIONS,
        PARTIAL_ROPE,
        HEAD_SIZE,
        Constants({"rotary_interleaved": True, "layer_norms": "around"}),
        Same("attention_bias", "add_qkv_bias"),
    ),
    layer=(*ATTENTION, QKV_BIAS, *JOINED_MLP, *_PARTS_OF_GLM4),
    outside=OUTSIDE,
)
"""GLM-4-0414 and GLM-Z1: norms before and after attention and MLP."""

# ---- Gemma


def _read_gelu(config: Config) -> dict[str, Any]:
    given = config.get("hidden_activation") or config.get("hidden_act")
    refuse_unless("hidden_activation", given, ("gelu_pytorch_tanh",), "Gemma has no other")
    return {"activation_func": "gelu_tanh"}


def _scale_of_embedding(config: Config) -> dict[str, Any]:
    return {"embedding_scale": float(config["hidden_size"] ** 0.5)}


def _same_scale(fields: Fields) -> dict[str, Any]:
    wanted = float(fields["hidden_size"] ** 0.5)
    if fields["embedding_scale"] != wanted:
        raise ValueError(f"embedding_scale={fields['embedding_scale']!r} cannot be expressed in its config")
    return {}


def _read_direction(config: Config) -> dict[str, Any]:
    given = config.get("use_bidirectional_attention")
    refuse_unless("use_bidirectional_attention", given, (None, False), "a GPT sees earlier tokens only")
    return {}


_GEMMA: tuple[ConfigRule, ...] = (
    *WITHOUT_ACTIVATION,
    HEAD_SIZE,
    ATTENTION_BIAS,
    Derived((), _scale_of_embedding, _same_scale),
    Constants({"layernorm_zero_centered_gamma": True}),
    Derived(("use_bidirectional_attention",), _read_direction, lambda fields: {"use_bidirectional_attention": False}),
)


def _write_gelu(key: str) -> Derived:
    def write(fields: Fields) -> dict[str, Any]:
        if fields["activation_func"] != "gelu_tanh":
            raise ValueError(f"activation_func={fields['activation_func']!r} cannot be expressed in its config")
        return {key: "gelu_pytorch_tanh"}

    return Derived(("hidden_act", "hidden_activation"), _read_gelu, write)


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    config=(*_GEMMA, ROPE, _write_gelu("hidden_act")),
    layer=(*ATTENTION, *ATTENTION_BIASES, *MLP),
    outside=OUTSIDE,
)
"""Gemma: norms whose weights are stored minus 1, a multiplier of the embedding, and GELU."""


def _read_scalar(config: Config) -> dict[str, Any]:
    scalar = config["query_pre_attn_scalar"]
    refuse_outside("query_pre_attn_scalar", scalar, 1e-6)
    return {"softmax_scale": float(scalar**-0.5)}


def _write_scalar(fields: Fields) -> dict[str, Any]:
    scale = fields["softmax_scale"]
    if scale is None:
        return {"query_pre_attn_scalar": fields["kv_channels"]}
    scalar = round(scale**-2)
    return {"query_pre_attn_scalar": scalar if float(scalar**-0.5) == scale else scale**-2}


_AROUND: tuple[WeightRule, ...] = (
    *ATTENTION,
    *ATTENTION_BIASES,
    Rename("self_attn_bda.norm.weight", "post_attention_layernorm.weight"),
    Rename("mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight"),
    *MLP[1:],
    Rename("mlp_bda.norm.weight", "post_feedforward_layernorm.weight"),
)

_LATER_GEMMA: tuple[ConfigRule, ...] = (
    *_GEMMA,
    _write_gelu("hidden_activation"),
    LAYER_WINDOWS,
    Derived(("query_pre_attn_scalar",), _read_scalar, _write_scalar),
    Same("final_logit_softcapping", "logits_cap"),
    Constants({"layer_norms": "around"}),
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    config=(
        *_LATER_GEMMA,
        ROPE,
        Same("attn_logit_softcapping", "attention_cap"),
        Unused(("cache_implementation",)),
    ),
    layer=_AROUND,
    outside=OUTSIDE,
)
"""Gemma 2: norms before and after attention and MLP, capped scores and logits, windows in every second layer."""

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config=(
        *_LATER_GEMMA,
        ROPE_BY_WINDOW,
        Constants({"qk_layernorm": True}),
        Only("attn_logit_softcapping", None, "transformers does not apply it"),
        Unused(("cache_implementation", "_sliding_window_pattern", "sliding_window_pattern")),
    ),
    layer=(*_AROUND, *QK_NORM),
    outside=OUTSIDE,
)
"""Gemma 3, text only: Gemma 2, but norms of queries and keys instead of capped scores, and two rotary settings."""

# ---- another activation

ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    config=(
        *SIZES,
        ROPE,
        HEAD_SIZE,
        Same("rms_norm_eps", "layernorm_epsilon", at_least=0.0),
        Same("attention_dropout", "attention_dropout"),
        Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
        Only("hidden_act", "relu2"),
        Constants({"normalization": "RMSNorm", "gated_linear_unit": False, "activation_func": "relu_squared"}),
        Constants({"add_bias_linear": False}),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
    layer=(
        *ATTENTION,
        *ATTENTION_BIASES,
        MLP[0],
        Rename("mlp.linear_fc1.weight", "mlp.up_proj.weight"),
        Rename("mlp.linear_fc1.bias", "mlp.up_proj.bias"),
        Rename("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
        Rename("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
    ),
    outside=OUTSIDE,
)
"""Arcee (AFM-4.5B): Llama with an MLP without a gate, with a squared ReLU."""

# ---- norms of queries and keys

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config=(
        *DECODER,
        ATTENTION_BIAS,
        _NORM_OF_ALL_HEADS,
        Only("clip_qkv", None),
        NUM_EXPERTS,
        CHOSEN_EXPERTS,
        ALL_LAYERS,
        SOFTMAX_ROUTER,
        *NO_ROUTER_LOSS,
    ),
    layer=(*ATTENTION, *ATTENTION_BIASES, *QK_NORM, *EXPERTS),
    outside=OUTSIDE,
)
"""OLMoE: experts in every layer, and norms of queries and keys over all heads together."""

HUNYUAN_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    config=(
        *WITHOUT_POSITIONS,
        HEAD_SIZE,
        ALPHA_ROPE,
        ATTENTION_BIAS,
        PRETRAINING_TP,
        Constants({"head_norms": "after_rotation"}),
        Only("use_qk_norm", True, is_written=False),
        Only("use_cla", False, is_written=False),
        Unused(("eod_token_id", "sep_token_id", "cla_share_factor", "attention_head_dim")),
    ),
    layer=(
        *ATTENTION,
        *ATTENTION_BIASES,
        Rename("self_attention.core_attention.q_layernorm.weight", "self_attn.query_layernorm.weight"),
        Rename("self_attention.core_attention.k_layernorm.weight", "self_attn.key_layernorm.weight"),
        *MLP,
    ),
    outside=OUTSIDE,
)
"""Hunyuan without experts: norms of queries and keys after their rotation."""


def _read_attention_kinds(config: Config) -> dict[str, Any]:
    for kind in config.get("attn_type_list") or ():
        refuse_unless("attn_type_list", kind, (1,), "Megatron does not have such layers")
    return {}


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    config=(
        *WITHOUT_POSITIONS,
        PARTIAL_ROPE,
        HEAD_SIZE,
        _NORM_OF_ALL_HEADS,
        LOCAL_EXPERTS,
        CHOSEN_EXPERTS,
        ALL_LAYERS,
        NORMALISED_ROUTER,
        Constants({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        Preset({"moe_router_dtype": "fp32", "moe_router_bias_update_rate": 0.0}),
        Only(
            "router_jitter_noise", 0.0, "Megatron's noise is different; give transformer={'moe_input_jitter_eps': ...}"
        ),
        Only("use_qk_norm", True, is_written=False),
        Only("qk_norm_type", "per_layer", is_written=False),
        Only("scoring_func", "sigmoid", is_written=False),
        Only("use_routing_bias", True, is_written=False),
        Only("shared_intermediate_size", 0, is_written=False),
        Derived(("attn_type_list",), _read_attention_kinds, lambda fields: {}),
        Unused(("rotary_dim", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")),
        *NO_ROUTER_LOSS,
    ),
    layer=(
        *ATTENTION,
        *QK_NORM,
        *expert_weights("block_sparse_moe.gate", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
        Rename("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", in_fp32=True),
    ),
    outside=OUTSIDE,
)
"""MiniMax-M2: norms over all heads together, a sigmoid router with a bias; multi-token prediction is left out."""

# ---- sinks

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    config=(
        *SIZES,
        ROPE,
        HEAD_SIZE,
        LAYER_WINDOWS,
        LOCAL_EXPERTS,
        CHOSEN_EXPERTS,
        ALL_LAYERS,
        NORMALISED_ROUTER,
        *NO_ROUTER_LOSS,
        Same("rms_norm_eps", "layernorm_epsilon", at_least=0.0),
        Same("attention_dropout", "attention_dropout"),
        Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
        Same("swiglu_limit", "activation_func_clamp_value", at_least=0.0),
        Only("swiglu_alpha", 1.702, "Megatron's activation has no other"),
        Only("hidden_act", "silu"),  # it means the activation below
        ATTENTION_BIAS,
        Constants({"normalization": "RMSNorm", "gated_linear_unit": True}),
        Constants({"add_bias_linear": False, "expert_bias": True}),
        Constants({"activation_func": "gelu_sigmoid", "glu_linear_offset": 1.0, "softmax_type": "learnable"}),
        Unused(("experts_per_token", "initial_context_length")),  # other names of two of its keys
    ),
    layer=(
        *ATTENTION,
        *ATTENTION_BIASES,
        Rename("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
        Rename("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        Rename("mlp.router.weight", "mlp.router.weight"),
        Rename("mlp.router.bias", "mlp.router.bias"),
        InterleavedStack("mlp.experts.experts.linear_fc1.weight", "mlp.experts.gate_up_proj", transposed=True),
        InterleavedStack("mlp.experts.experts.linear_fc1.bias", "mlp.experts.gate_up_proj_bias"),
        Stack("mlp.experts.experts.linear_fc2.weight", "mlp.experts.down_proj", transposed=True),
        Rename("mlp.experts.experts.linear_fc2.bias", "mlp.experts.down_proj_bias"),
    ),
    outside=OUTSIDE,
)
"""gpt-oss: attention sinks, experts with biases and a clamped activation, windows in every second layer."""

# ---- queries that grow

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    config=(*WITHOUT_POSITIONS, HEAD_SIZE, GROWING_ROPE, WINDOW),
    layer=(*ATTENTION, *MLP),
    outside=OUTSIDE,
)
"""Ministral 3, text only: Mistral with YaRN and queries that grow with the position, as in Llama 4."""

# ---- ERNIE


def _read_use_bias(config: Config) -> dict[str, Any]:
    names = ("add_qkv_bias", "attention_output_bias", "mlp_bias")
    return dict.fromkeys(names, True) if config.get("use_bias") else {}


def _write_use_bias(fields: Fields) -> dict[str, Any]:
    given = {bool(fields[name]) for name in ("add_qkv_bias", "attention_output_bias", "mlp_bias")}
    if len(given) > 1:
        raise ValueError("some of its projections have biases, but in its config either all or none do")
    return {"use_bias": given.pop()}


USE_BIAS = Derived(("use_bias",), _read_use_bias, _write_use_bias)
"""Either all projections have biases, or none has."""


def _read_layers(config: Config) -> dict[str, Any]:
    layers, step = config["num_hidden_layers"], config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 0), config.get("moe_layer_end_index", -1)
    refuse_outside("moe_layer_interval", step, 1)
    last = layers - 1 if last == -1 else last
    flags = [int(first <= layer <= last and (layer + 1) % step == 0) for layer in range(layers)]
    return {} if all(flags) else {"moe_layer_freq": flags}


def _write_layers(fields: Fields) -> dict[str, Any]:
    flags, layers = fields["moe_layer_freq"], fields["num_layers"]
    flags = [True] * layers if flags == 1 else list(flags)
    first = flags.index(True) if any(flags) else layers
    last = layers - 1 - flags[::-1].index(True) if any(flags) else layers
    for step in range(1, layers + 1):
        keys = {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": step}
        if [first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers)] == flags:
            return keys
    raise ValueError(f"moe_layer_freq={fields['moe_layer_freq']!r} cannot be expressed in its config")


def _read_shared(config: Config) -> dict[str, Any]:
    shared = config.get("moe_num_shared_experts") or 0
    refuse_outside("moe_num_shared_experts", shared, 0)
    return {"moe_shared_expert_intermediate_size": shared * config["moe_intermediate_size"]} if shared else {}


def _write_shared(fields: Fields) -> dict[str, Any]:
    size, of_one = fields["moe_shared_expert_intermediate_size"] or 0, fields["moe_ffn_hidden_size"]
    if size % of_one:
        raise ValueError(f"moe_shared_expert_intermediate_size={size} is not a multiple of {of_one}")
    return {"moe_num_shared_experts": size // of_one}


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    config=(
        *DECODER,
        Constants({"rotary_interleaved": True, "softmax_choice_bias": True}),
        Preset({"moe_router_dtype": "fp32"}),
        Only("use_bias", False),
        Same("moe_num_experts", "num_moe_experts", others=("num_experts",), at_least=1),
        Same("moe_k", "moe_router_topk", others=("num_experts_per_tok",), at_least=2),
        EXPERT_SIZES[1],
        Derived(("moe_num_shared_experts",), _read_shared, _write_shared),
        Derived(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _read_layers, _write_layers),
        Only("moe_norm_min", 1e-12),
        *NO_ROUTER_LOSS,
    ),
    layer=(
        *ATTENTION,
        *MLP,
        *EXPERTS,
        Rename("mlp.router.choice_bias", "mlp.moe_statics.e_score_correction_bias", in_fp32=True),
        *shared_expert_weights("mlp.shared_experts"),
    ),
    outside=OUTSIDE,
)
"""ERNIE 4.5 with experts: a softmax router with a bias that affects only the choice, and shared experts."""

VARIANTS = (
    *(GRANITE, GRANITE_MOE, OLMO2, OLMO3, EXAONE4, GLM4, GEMMA, GEMMA2, GEMMA3),
    *(ARCEE, OLMOE, HUNYUAN_DENSE, MINIMAX_M2, GPT_OSS, MINISTRAL3, ERNIE4_5_MOE),
)
