# SPDX-License-Identifier: Apache-2.0
"""The text families of this package. A row is a model type, a transformers class, and what its layers consist of.

A *part* is a tuple of rules: config keys (``config_rules.py``) together with the weights that these keys decide
(``weight_rules.py``), so that a family names each thing once. :func:`family` sorts a row's rules into the two tables.
``registry.py`` finds a row by its name.

``family("mistral", "Mistral", DECODER, WINDOW, d.MLP)`` reads: the class ``MistralForCausalLM`` has a Llama-like
decoder, an optional window in all layers, and a gated MLP.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from lightning_mcore.config.architecture import INDEXER
from lightning_mcore.hf import decoder_rules as d
from lightning_mcore.hf import expert_rules as e
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
    shortened,
)
from lightning_mcore.hf.decoder_rules import family
from lightning_mcore.hf.delta_net_families import DELTA_NETS, KIMI_DELTA
from lightning_mcore.hf.delta_net_families import WITH_TOWERS as DELTA_NETS_WITH_TOWERS
from lightning_mcore.hf.llama4_family import LLAMA4, LLAMA4_WITH_TOWER
from lightning_mcore.hf.mamba_families import MAMBA_FAMILIES
from lightning_mcore.hf.rope_rules import (
    ALPHA_ROPE,
    GROWING_LATENT_ROPE,
    GROWING_ROPE,
    LATENT_ROPE,
    ROPE,
    ROPE_BY_LAYER_TYPE,
    UNROTATED_LAYERS,
)
from lightning_mcore.hf.weight_rules import GatedQueryKeyValue, InterleavedStack, Rename, Stack, renamed
from lightning_mcore.hf.window_rules import (
    LAYER_WINDOWS,
    SLIDING_ATTENTION,
    SWITCHED_LAYER_WINDOWS,
    SWITCHED_WINDOW,
    WINDOW,
)


def _read_only(read: Callable[[Config], dict[str, Any]], *keys: str) -> Derived:
    """Return a rule that writes nothing; ``Family.write_config`` reads its keys back and rejects other values."""
    return Derived(keys, read, lambda fields: {})


BIASES = (d.ATTENTION_BIAS, *d.ATTENTION_BIASES)
SOME_BIASES = (Same("attention_bias", "add_qkv_bias"), d.QKV_BIAS)
HEAD_NORMS = (Constants({"qk_layernorm": True}), *d.QK_NORM)
NORM_OF_ALL_HEADS = (Constants({"head_norms": "all_heads"}), *d.QK_NORM)
INTERLEAVED = Constants({"rotary_interleaved": True})
BASICS = (
    *(d.SIZES, ROPE, d.HEAD_SIZE, Same("rms_norm_eps", "layernorm_epsilon", at_least=0.0)),
    Same("attention_dropout", "attention_dropout"),
    Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
)  # DECODER without what its MLP computes


MLP_BIASES = (d.MLP_BIAS, *d.MLP_BIASES)
CHOSEN = (e.LOCAL_EXPERTS, e.CHOSEN_EXPERTS, e.ALL_LAYERS, e.NORMALISED_ROUTER, e.NO_ROUTER_LOSS)
JITTER = Only(
    "router_jitter_noise", 0.0, "Megatron's noise is different; give transformer={'moe_input_jitter_eps': ...}"
)
BLOCK_SPARSE = (
    JITTER,
    *e.expert_weights("block_sparse_moe.gate", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
)
SPARSE = (e.EXPERT_SIZES, e.SPARSE_LAYERS, e.SOFTMAX_ROUTER, e.NO_ROUTER_LOSS)
SIGMOID_LAYERS = (e.SIGMOID_EXPERTS, e.SIGMOID_EXPERT_WEIGHTS)
SIGMOID = (e.FIRST_DENSE, SIGMOID_LAYERS)


def _norms(attention: str, mlp: str) -> tuple[Rename, Rename]:
    """Return the norms after attention and after the MLP."""
    return Rename("self_attn_bda.norm.weight", attention), Rename("mlp_bda.norm.weight", mlp)


# Norms after attention and MLP instead of before: the first rule of d.ATTENTION and d.MLP is the norm before
AFTER = (
    Constants({"layer_norms": "after"}),
    *(*d.ATTENTION[1:], *d.MLP[1:], *_norms("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")),
)
# Norms before and after both. Hugging Face calls the norm before the MLP pre_feedforward_layernorm then.
AROUND = (
    Constants({"layer_norms": "around"}),
    *(*d.ATTENTION, *d.MLP[1:], *_norms("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")),
    Rename("mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight"),
)


_LATENT_SIZES = tuple(
    Same(key, field, at_least=1)
    for key, field in (
        *(("kv_lora_rank", "kv_lora_rank"), ("v_head_dim", "v_head_dim")),
        *(("qk_nope_head_dim", "qk_head_dim"), ("qk_rope_head_dim", "qk_pos_emb_head_dim")),
    )
)
_LATENT_WEIGHTS = tuple(
    Rename(f"self_attention.{ours}.weight", f"self_attn.{theirs}.weight")
    for ours, theirs in (
        *(("linear_q_proj", "q_proj"), ("linear_q_down_proj", "q_a_proj"), ("linear_q_up_proj", "q_b_proj")),
        *(("linear_kv_down_proj", "kv_a_proj_with_mqa"), ("linear_kv_up_proj", "kv_b_proj")),
        ("linear_proj", "o_proj"),
    )
)
_EPSILON_OF_LATENTS = 1e-6  # fixed in transformers; rms_norm_eps applies to the other norms


def _latent_attention(*positions: ConfigRule, head_dim: Literal["turned", "whole", "unread"]) -> tuple[d.Part, ...]:
    """Return the rules of latent attention; ``head_dim`` counts the rotated channels of a head, all, or nothing."""

    def read(config: Config) -> dict[str, Any]:
        heads, turned = config["num_attention_heads"], config["qk_rope_head_dim"]
        # Latent attention has no groups, and its head sizes follow from two others: the keys may only repeat them
        refuse_unless(
            "num_key_value_heads", config.get("num_key_value_heads", heads), (heads,), "each head has its own"
        )
        whole = config["qk_nope_head_dim"] + turned
        sizes = {"head_dim": whole if head_dim == "whole" else turned, "qk_head_dim": whole}
        for key, size in list(sizes.items())[head_dim == "unread" :]:
            refuse_unless(key, config.get(key, size), (size,), "it follows from qk_nope_head_dim and qk_rope_head_dim")
        other = config.get("rms_norm_eps") != _EPSILON_OF_LATENTS
        # q_lora_rank=None matters: Megatron's default is a number
        return {"q_lora_rank": config.get("q_lora_rank")} | ({"latent_epsilon": _EPSILON_OF_LATENTS} if other else {})

    return (
        Constants({"multi_latent_attention": True, "qk_layernorm": True}),
        d.SWIGLU_LAYERS,
        *positions,
        _LATENT_SIZES,
        Derived(("q_lora_rank", "head_dim", "qk_head_dim"), read, lambda f: {"q_lora_rank": f["q_lora_rank"]}),
        Only("attention_bias", False, "Megatron's latent attention has none"),
        Rename("input_layernorm.weight", "input_layernorm.weight"),
        Rename("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
        Rename("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
        _LATENT_WEIGHTS,
    )


_NEIGHBOURS = Only("rope_interleave", True, "Megatron rotates neighbouring channels of latent attention")
LATENT_ATTENTION = _latent_attention(LATENT_ROPE, _NEIGHBOURS, head_dim="turned")


def _write_original(fields: Fields) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    return {key: fields["stretch"][key]} if fields["stretch"] else {}


def _read_hybrid(config: Config) -> dict[str, Any]:
    windowed = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    if config.get("sliding_window") is None or all(windowed):
        return {}
    # EXAONE 4: layer_types of (sliding, sliding, full) becomes [0, 0, 1], no rotation in the third
    return {"no_rope_freq": [int(not has_window) for has_window in windowed]}


HYBRID = _read_only(_read_hybrid)


def _gelu(key: str) -> Derived:
    def read(config: Config) -> dict[str, Any]:
        # Gemma 1 has hidden_act and later models hidden_activation; transformers ignores the other key if it is there
        refuse_unless(key, config.get(key), ("gelu_pytorch_tanh",), "Gemma has no other")
        return {"activation_func": "gelu_tanh"}

    return Derived(("hidden_act", "hidden_activation"), read, lambda fields: {key: "gelu_pytorch_tanh"})


def _read_scalar(config: Config) -> dict[str, Any]:
    refuse_outside("query_pre_attn_scalar", config["query_pre_attn_scalar"], 1e-6)
    return {"softmax_scale": float(config["query_pre_attn_scalar"] ** -0.5)}


def _write_scalar(fields: Fields) -> dict[str, Any]:
    scale = fields["softmax_scale"]
    if scale is None:
        return {"query_pre_attn_scalar": fields["kv_channels"]}
    # Write a whole number if it reads back as the same scale, because scale ** -2 alone may be off by a rounding error
    scalar = round(scale**-2)
    return {"query_pre_attn_scalar": scalar if float(scalar**-0.5) == scale else scale**-2}


def _read_direction(config: Config) -> dict[str, Any]:
    given = config.get("use_bidirectional_attention")
    refuse_unless("use_bidirectional_attention", given, (None, False), "a GPT sees earlier tokens only")
    return {}


GEMMA = (
    *(d.GATED_LAYERS, d.HEAD_SIZE, BIASES),
    _read_only(lambda config: {"embedding_scale": float(config["hidden_size"] ** 0.5)}),
    Constants({"layernorm_zero_centered_gamma": True}),
    Derived(("use_bidirectional_attention",), _read_direction, lambda fields: {"use_bidirectional_attention": False}),
)
LATER_GEMMA = (
    *(GEMMA, _gelu("hidden_activation"), LAYER_WINDOWS, AROUND),
    Derived(("query_pre_attn_scalar",), _read_scalar, _write_scalar),
    Same("final_logit_softcapping", "logits_cap"),
)

_BIASED = ("add_qkv_bias", "attention_output_bias", "mlp_bias")
USE_BIAS = Derived(
    ("use_bias",),
    lambda config: dict.fromkeys(_BIASED, True) if config.get("use_bias") else {},
    lambda fields: {"use_bias": bool(fields["mlp_bias"])},
)


def _read_interval(config: Config) -> dict[str, Any]:
    layers, step = config["num_hidden_layers"], config.get("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 0), config.get("moe_layer_end_index", -1)
    refuse_outside("moe_layer_interval", step, 1)
    last = layers - 1 if last == -1 else last
    flags = [int(first <= layer <= last and (layer + 1) % step == 0) for layer in range(layers)]
    return {} if all(flags) else {"moe_layer_freq": flags}


def _write_interval(fields: Fields) -> dict[str, Any]:
    layers, given = fields["num_layers"], fields["moe_layer_freq"]
    # Without any expert layer, `[layers]` is a start index after the last layer
    with_experts = [layer for layer in range(layers) if given == 1 or given[layer]] or [layers]
    keys = {"moe_layer_start_index": with_experts[0], "moe_layer_end_index": with_experts[-1]}
    wanted = [layer in with_experts for layer in range(layers)]
    for step in range(1, layers + 1):
        if [with_experts[0] <= n <= with_experts[-1] and (n + 1) % step == 0 for n in range(layers)] == wanted:
            return {**keys, "moe_layer_interval": step}
    return {**keys, "moe_layer_interval": 1}  # another model, which is found when this is read back


def _read_ernie_shared(config: Config) -> dict[str, Any]:
    shared = config.get("moe_num_shared_experts") or 0
    refuse_outside("moe_num_shared_experts", shared, 0)
    return {"moe_shared_expert_intermediate_size": shared * config["moe_intermediate_size"]} if shared else {}


def _write_ernie_shared(fields: Fields) -> dict[str, Any]:
    size = fields["moe_shared_expert_intermediate_size"] or 0
    return {"moe_num_shared_experts": size // fields["moe_ffn_hidden_size"]}


ERNIE_EXPERTS = (
    Constants({"softmax_choice_bias": True}),
    Preset({"moe_router_dtype": "fp32"}),
    Only("use_bias", False),
    Same("moe_num_experts", "num_moe_experts", others=("num_experts",), at_least=1),
    Same("moe_k", "moe_router_topk", others=("num_experts_per_tok",), at_least=2),
    e.EXPERT_SIZES[1],
    Derived(("moe_num_shared_experts",), _read_ernie_shared, _write_ernie_shared),
    Derived(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _read_interval, _write_interval),
    Only("moe_norm_min", 1e-12),
    *(e.NO_ROUTER_LOSS, e.EXPERTS, e.shared_expert_weights("mlp.shared_experts")),
    Rename("mlp.router.choice_bias", "mlp.moe_statics.e_score_correction_bias", in_fp32=True),
)


def _ungated(hidden_act: str, activation: str) -> tuple[d.Part, ...]:
    """Return the rules of an MLP without a gate: its up projection alone is Megatron's linear_fc1."""
    return (
        Only("hidden_act", hidden_act),
        Constants({"normalization": "RMSNorm", "gated_linear_unit": False, "activation_func": activation}),
        Constants({"add_bias_linear": False}),
        *(Rename(f"mlp.linear_fc1.{kind}", f"mlp.up_proj.{kind}") for kind in ("weight", "bias")),
        *(Rename(f"mlp.linear_fc2.{kind}", f"mlp.down_proj.{kind}") for kind in ("weight", "bias")),
    )


GPT_OSS_EXPERTS = (
    Same("swiglu_limit", "activation_func_clamp_value", at_least=0.0),
    Only("swiglu_alpha", 1.702, "Megatron's activation has no other"),
    Only("hidden_act", "silu"),  # it means the activation below
    Constants({"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "expert_bias": True}),
    Constants({"activation_func": "gelu_sigmoid", "glu_linear_offset": 1.0, "softmax_type": "learnable"}),
    Rename("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    Rename("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    *(Rename(f"mlp.router.{kind}", f"mlp.router.{kind}") for kind in ("weight", "bias")),
    InterleavedStack("mlp.experts.experts.linear_fc1.weight", "mlp.experts.gate_up_proj", transposed=True),
    InterleavedStack("mlp.experts.experts.linear_fc1.bias", "mlp.experts.gate_up_proj_bias"),
    Stack("mlp.experts.experts.linear_fc2.weight", "mlp.experts.down_proj", transposed=True),
    Rename("mlp.experts.experts.linear_fc2.bias", "mlp.experts.down_proj_bias"),
)
MINIMAX_ROUTER = (
    *e.SIGMOID_WITH_BIAS,
    Rename("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", in_fp32=True),
)


def _read_attention_kinds(config: Config) -> dict[str, Any]:
    for kind in config.get("attn_type_list") or ():
        refuse_unless("attn_type_list", kind, (1,), "Megatron does not have such layers")
    return {}


def _unwritten(**values: Any) -> tuple[Only, ...]:
    """Return rules for keys that are supported with one value and that transformers does not know."""
    return tuple(Only(key, value, is_written=False) for key, value in values.items())


_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
DECODER = (d.DECODER, d.ATTENTION)
HUNYUAN = (
    *(d.SWIGLU_LAYERS, d.HEAD_SIZE, ALPHA_ROPE, d.ATTENTION, BIASES),
    *(d.PRETRAINING_TP, Constants({"head_norms": "after_rotation"})),
    *_unwritten(use_qk_norm=True, use_cla=False, mlp_bias=False, add_classification_head=False),
    Unused(("eod_token_id", "sep_token_id", "cla_share_factor", "attention_head_dim")),
    Rename("self_attention.core_attention.q_layernorm.weight", "self_attn.query_layernorm.weight"),
    Rename("self_attention.core_attention.k_layernorm.weight", "self_attn.key_layernorm.weight"),
)


def _read_hunyuan_experts(config: Config) -> dict[str, Any]:
    given = config["moe_topk"]
    chosen = given if isinstance(given, list) else [given]
    if len(set(chosen)) > 1:
        raise ValueError(
            f"moe_topk={shortened(given)} is not supported, because Megatron chooses equally many experts in all"
            " layers; only equal numbers are"
        )
    # Their weights are normalised, so a single one would always have the weight 1
    refuse_outside("moe_topk", chosen[0], 2)
    return {"moe_router_topk": chosen[0], "moe_shared_expert_intermediate_size": config["intermediate_size"]}


HUNYUAN_EXPERTS = (
    *(e.NUM_EXPERTS, e.ALL_LAYERS, e.NO_ROUTER_LOSS),
    Derived(("moe_topk",), _read_hunyuan_experts, lambda fields: {"moe_topk": fields["moe_router_topk"]}),
    *_unwritten(norm_topk_prob=True, use_mixed_mlp_moe=True),
    # Lists with a number for each layer, which transformers does not read; other numbers would change shapes
    Unused(("moe_intermediate_size", "num_shared_expert", "moe_layer_num_skipped")),
    *e.expert_weights("mlp.gate.wg", "mlp.experts.{expert}", ("gate_proj", "up_proj", "down_proj")),
    *e.shared_expert_weights("mlp.shared_mlp"),
)


def _read_repeated_layers(config: Config) -> dict[str, Any]:
    # K-EXAONE says twice more which layers have experts; transformers reads mlp_layer_types alone
    sparse = [kind == e.SPARSE for kind in config["mlp_layer_types"]]
    repeated = {"is_moe_layer": sparse, "first_last_k_dense_replace": [*sparse, True].index(True)}
    for key, value in repeated.items():
        refuse_unless(key, config.get(key, value), (value,), "mlp_layer_types says which layers have experts")
    return {}


EXAONE_EXPERTS = (
    _read_only(_read_repeated_layers, "is_moe_layer", "first_last_k_dense_replace"),
    *_unwritten(scoring_func="sigmoid", topk_method="noaux_tc"),
    *(e.MLP_TYPES, e.NUM_EXPERTS, e.EXPERT_SIZES, e.shared_experts("num_shared_experts")),
    *(e.SIGMOID_ROUTER, e.NO_ROUTER_LOSS, e.EXPERTS, e.shared_expert_weights("mlp.shared_experts")),
    Rename("mlp.router.expert_bias", "mlp.e_score_correction_bias", in_fp32=True),
)


def _read_local_positions(config: Config) -> dict[str, Any]:
    # layer_types of (sliding, sliding, full) becomes [0, 0, 1], no rotation in the third
    unrotated = [int(kind != SLIDING_ATTENTION) for kind in config["layer_types"]]
    return {"no_rope_freq": unrotated} if any(unrotated) else {}


LOCAL_POSITIONS = _read_only(_read_local_positions)


def _read_whole_heads(config: Config) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    refuse_unless("head_dim", config.get("head_dim", size), (size,), "it follows from hidden_size")
    return {}


COHERE = (
    *(d.SIZES, ROPE, Same("layer_norm_eps", "layernorm_epsilon", at_least=0.0), Only("hidden_act", "silu")),
    Same("attention_dropout", "attention_dropout"),
    Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
    Constants({"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}),
    Constants({"normalization": "LayerNorm", "layer_norms": "parallel", "norm_bias": False}),
    Derived(
        ("logit_scale",),
        lambda config: {"logits_divisor": 1 / config["logit_scale"]},
        lambda fields: {"logit_scale": 1 / fields["logits_divisor"]},
    ),
    _read_only(_read_whole_heads, "head_dim"),
    *_unwritten(use_qk_norm=False, use_parallel_block=True, use_gated_activation=True),
    Unused(("use_parallel_embedding",)),  # how many ranks shared the embedding in pretraining
    Unused(("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct")),
    Unused(("use_embedding_sharing",)),  # tie_word_embeddings says it
)
AFMOE = (
    Constants({"layer_norms": "around", "attention_output_gate": True}),
    Derived(
        ("mup_enabled",),
        lambda config: {"embedding_scale": float(config["hidden_size"] ** 0.5)} if config.get("mup_enabled") else {},
        lambda fields: {"mup_enabled": fields["embedding_scale"] != 1.0},
    ),
    *(e.first_dense("num_dense_layers"), e.NUM_EXPERTS, e.EXPERT_SIZES, e.shared_experts("num_shared_experts")),
    *(e.SIGMOID_WITH_BIAS, e.NORMALISED_ROUTER, e.scale("route_scale"), e.NO_ROUTER_LOSS),
    *_unwritten(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    *_unwritten(num_expert_groups=1, num_limited_groups=1),
    Unused(("load_balance_coeff", "use_grouped_mm")),
    d.ATTENTION[0],
    GatedQueryKeyValue(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        gate="self_attn.gate_proj.weight",
    ),
    d.ATTENTION[2],
    *_norms("post_attention_layernorm.weight", "post_mlp_layernorm.weight"),
    # Of dense layers, and of those with experts
    Rename("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    Rename("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
    *d.MLP[1:],
    # Without the norm before them
    *e.expert_weights("mlp.router.gate", "mlp.experts.{expert}", ("gate_proj", "up_proj", "down_proj"))[1:],
    *e.shared_expert_weights("mlp.shared_experts"),
    Rename("mlp.router.expert_bias", "mlp.expert_bias", in_fp32=True),
)
# Keys that published models share with DeepSeek's
LIKE_DEEPSEEK: tuple[ConfigRule, ...] = (
    *_unwritten(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1),
    Unused(("aux_loss_alpha", "ep_size", "seq_aux")),
)
LLAMA = family("llama", "Llama", DECODER, BIASES, d.MLP, MLP_BIASES, d.PRETRAINING_TP)
QWEN2 = family(  # and Qwen2.5
    *("qwen2", "Qwen2", DECODER, SWITCHED_LAYER_WINDOWS, Constants({"add_qkv_bias": True}), d.QKV_BIAS, d.MLP),
    *_unwritten(use_mrope=False),
)
QWEN3 = family("qwen3", "Qwen3", DECODER, SWITCHED_LAYER_WINDOWS, BIASES, HEAD_NORMS, d.MLP)
QWEN3_MOE = family(
    *("qwen3_moe", "Qwen3Moe", DECODER, SWITCHED_WINDOW, BIASES, HEAD_NORMS),
    *(d.MLP, e.LOCAL_EXPERTS, SPARSE, e.EXPERTS),
)
DEEPSEEK_V3 = d.with_multi_token(  # and R1
    *("deepseek_v3", "DeepseekV3", LATENT_ATTENTION, d.PRETRAINING_TP, d.MLP, SIGMOID),
    LIKE_DEEPSEEK,
)


_FULL, _SHARED = "full", "shared"


def _indexer(*types: str) -> Derived:
    """Return the rule of indexers; ``types`` is the key that says which layers have one, none if all have."""

    def read(config: Config) -> dict[str, Any]:
        for name in INDEXER:
            refuse_outside(name, config[name], 1)
        kinds = [_FULL] * config["num_hidden_layers"]
        for key in types:
            kinds = list(config.get(key) or kinds)[: len(kinds)]
            refuse_unless(f"the first of {key}", kinds[0], (_FULL,), "no layer before it has an indexer")
            for kind in kinds:
                refuse_unless(key, kind, (_FULL, _SHARED), "there are no such indexers")
        flags = [int(kind == _FULL) for kind in kinds]
        return {"indexer": {"indexer_freq": flags, **{name: config[name] for name in INDEXER}}}

    def write(fields: Fields) -> dict[str, Any]:
        if fields["indexer"] is None:
            raise ValueError("it has no indexer")
        keys = {name: fields["indexer"][name] for name in INDEXER}
        kinds = [_FULL if flag else _SHARED for flag in fields["indexer"]["indexer_freq"]]
        if _SHARED in kinds and not types:
            raise ValueError("layers without an indexer cannot be expressed in its config")
        return keys | dict.fromkeys(types, kinds)

    return Derived((*INDEXER, *types), read, write)


def _read_indexed_layers(config: Config) -> dict[str, Any]:
    for kind in config.get("layer_types") or ():
        refuse_unless("layer_types", kind, ("indexed_attention",), "the family has no other layers")
    return {}


INDEXED_LATENT_ATTENTION = (
    _latent_attention(LATENT_ROPE, *_unwritten(rope_interleave=True), head_dim="turned"),
    _read_only(_read_indexed_layers, "layer_types"),
    *(
        Rename(f"self_attention.indexer.{ours}", f"self_attn.indexer.{theirs}")
        for ours, theirs in (
            *(("wq_b", "wq_b.weight"), ("wk", "wk.weight"), ("weights_proj", "weights_proj.weight")),
            *(("k_norm_weight", "k_norm.weight"), ("k_norm_bias", "k_norm.bias")),
        )
    ),
    *(d.MLP, e.MLP_TYPES, SIGMOID_LAYERS, Only("mlp_bias", False), d.PRETRAINING_TP),
    LIKE_DEEPSEEK,
)
_ROWS = (
    LLAMA,
    family("mistral", "Mistral", DECODER, WINDOW, d.MLP),
    family("mixtral", "Mixtral", DECODER, WINDOW, CHOSEN, BLOCK_SPARSE),
    QWEN2,
    family(  # and Qwen1.5-MoE
        *("qwen2_moe", "Qwen2Moe", DECODER, SWITCHED_LAYER_WINDOWS, Same("qkv_bias", "add_qkv_bias"), d.QKV_BIAS),
        *(d.MLP, e.NUM_EXPERTS, SPARSE, e.GATED_SHARED_EXPERT, e.GATED_SHARED_EXPERT_WEIGHTS),
    ),
    QWEN3,
    QWEN3_MOE,
    DEEPSEEK_V3,
    d.with_multi_token(  # GLM-4.5 and 4.6
        *("glm4_moe", "Glm4Moe", d.PARTIAL_DECODER, d.ATTENTION, SOME_BIASES, d.MLP, SIGMOID),
        *(Same("use_qk_norm", "qk_layernorm"), d.QK_NORM),
    ),
    replace(DEEPSEEK_V3, model_type="kimi_k2", config_class="deepseek_v3"),  # which transformers does not know
    family("ministral", "Ministral", DECODER, LAYER_WINDOWS, d.MLP),
    family(
        *("smollm3", "SmolLM3", DECODER, SWITCHED_LAYER_WINDOWS, UNROTATED_LAYERS, BIASES),
        *(d.MLP, MLP_BIASES, d.PRETRAINING_TP),
    ),
    family(  # its dropout also acts on the embedding here
        *("seed_oss", "SeedOss", DECODER, SOME_BIASES, Same("attention_out_bias", "attention_output_bias")),
        *(d.OUTPUT_BIAS, Same("residual_dropout", "hidden_dropout"), d.MLP, MLP_BIASES, d.PRETRAINING_TP),
    ),
    family(  # and Phi-4
        *("phi3", "Phi3", d.PARTIAL_DECODER, WINDOW, d.ONE_DROPOUT, d.JOINED_ATTENTION, d.JOINED_MLP),
        *_unwritten(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1),
        # In the config itself, not in rope_parameters
        Derived(("original_max_position_embeddings",), lambda config: {}, _write_original),
    ),
    # GLM-4 of 2024 and GLM-Edge
    family("glm", "Glm", d.PARTIAL_DECODER, d.ATTENTION, INTERLEAVED, SOME_BIASES, d.JOINED_MLP),
    family("ernie4_5", "Ernie4_5", DECODER, INTERLEAVED, USE_BIAS, d.ATTENTION_BIASES, d.MLP, d.MLP_BIASES),
    family(
        *("dots1", "Dots1", DECODER, LAYER_WINDOWS, BIASES, HEAD_NORMS, d.MLP, SIGMOID),
        *(d.PRETRAINING_TP, d.without("scoring_func", LIKE_DEEPSEEK)),
        Unused(("scoring_func",)),  # "noaux_tc" in dots.llm1
    ),
    # Granite 3 and 4
    family("granite", "Granite", DECODER, BIASES, d.MLP, MLP_BIASES, d.MULTIPLIERS),
    family("granitemoe", "GraniteMoe", DECODER, BIASES, d.MULTIPLIERS, CHOSEN, e.GRANITE_EXPERTS),
    family("olmo2", "Olmo2", d.DECODER, BIASES, AFTER, NORM_OF_ALL_HEADS),
    family(
        *("olmo3", "Olmo3", d.SWIGLU_LAYERS, d.HEAD_SIZE, ROPE_BY_LAYER_TYPE, LAYER_WINDOWS),
        *(BIASES, AFTER, NORM_OF_ALL_HEADS),
    ),
    family(
        *("exaone4", "Exaone4", d.DECODER, LAYER_WINDOWS, HYBRID, AFTER, HEAD_NORMS),
        Unused(("sliding_window_pattern",)),  # transformers makes layer_types from it
    ),
    family(  # GLM-4-0414 and GLM-Z1
        *("glm4", "Glm4", d.PARTIAL_DECODER, d.ATTENTION, INTERLEAVED, SOME_BIASES, d.JOINED_MLP),
        Constants({"layer_norms": "around"}),
        *_norms("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
    ),
    family("gemma", "Gemma", GEMMA, ROPE, _gelu("hidden_act"), d.ATTENTION, d.MLP),
    family(
        *("gemma2", "Gemma2", LATER_GEMMA, ROPE, Same("attn_logit_softcapping", "attention_cap")),
        *(d.repeating("sliding_window_size", "sliding_window"), Unused(("cache_implementation",))),
    ),
    family(
        *("gemma3_text", "Gemma3", LATER_GEMMA, ROPE_BY_LAYER_TYPE, HEAD_NORMS),
        Only("attn_logit_softcapping", None, "transformers does not apply it"),
        Unused(("cache_implementation", "_sliding_window_pattern", "sliding_window_pattern")),
    ),
    # AFM-4.5B
    family("arcee", "Arcee", BASICS, d.ATTENTION, BIASES, d.MLP_BIAS, d.MLP[0], _ungated("relu2", "relu_squared")),
    family(
        *("olmoe", "Olmoe", DECODER, BIASES, NORM_OF_ALL_HEADS, Only("clip_qkv", None), e.NUM_EXPERTS),
        *(e.CHOSEN_EXPERTS, e.ALL_LAYERS, e.SOFTMAX_ROUTER, e.NO_ROUTER_LOSS, e.EXPERTS),
    ),
    family("hunyuan_v1_dense", "HunYuanDenseV1", HUNYUAN, d.MLP),
    family(  # without multi-token prediction
        *("minimax_m2", "MiniMaxM2", d.PARTIAL_DECODER, d.ATTENTION, NORM_OF_ALL_HEADS),
        *(CHOSEN, BLOCK_SPARSE, MINIMAX_ROUTER),
        *_unwritten(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True),
        *_unwritten(shared_intermediate_size=0),
        _read_only(_read_attention_kinds, "attn_type_list"),
        Unused(("rotary_dim", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")),
    ),
    family(
        *("gpt_oss", "GptOss", BASICS, LAYER_WINDOWS, d.ATTENTION, BIASES, CHOSEN, GPT_OSS_EXPERTS),
        Unused(("experts_per_token", "initial_context_length")),  # other names of two of its keys
    ),
    family("ministral3", "Ministral3", d.SWIGLU_LAYERS, d.HEAD_SIZE, GROWING_ROPE, WINDOW, d.ATTENTION, d.MLP),
    replace(
        family(  # without multi-token prediction
            *("ernie4_5_moe", "Ernie4_5_Moe", DECODER, INTERLEAVED, d.MLP, ERNIE_EXPERTS),
            *_unwritten(moe_gate="topk", moe_use_aux_free=True),
            Unused(("moe_capacity", "num_nextn_predict_layers")),
        ),
        unread=(
            *LLAMA.unread,
            *(f"model.mtp_{part}." for part in ("block", "emb_norm", "hidden_norm", "linear_proj")),
        ),
    ),
    d.with_multi_token(  # GLM-4.7-Flash
        *("glm4_moe_lite", "Glm4MoeLite", LATENT_ATTENTION, d.PRETRAINING_TP, d.MLP),
        *(e.MLP_TYPES, SIGMOID_LAYERS, _unwritten(topk_method="noaux_tc", partial_rotary_factor=1.0)),
    ),
    d.with_multi_token("deepseek_v32", "DeepseekV32", INDEXED_LATENT_ATTENTION, _indexer()),
    d.with_multi_token(  # GLM-5
        *("glm_moe_dsa", "GlmMoeDsa", INDEXED_LATENT_ATTENTION, _indexer("indexer_types")),
        Unused(("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")),  # which make indexer_types
        Unused(("indexer_rope_interleave", "index_share_for_mtp_iteration")),  # of indexers that do not select all
        *_unwritten(moe_router_dtype="float32"),
    ),
    family(
        *("solar_open", "SolarOpen", d.without("intermediate_size", d.PARTIAL_DECODER), d.ATTENTION),
        *(SOME_BIASES, e.ALL_LAYERS, SIGMOID_LAYERS, Unused(("intermediate_size",))),
        *_unwritten(first_k_dense_replace=0, use_qk_norm=False),
    ),
    replace(
        family(  # without multi-token prediction
            *("exaone_moe", "ExaoneMoe", DECODER, LAYER_WINDOWS, HYBRID, HEAD_NORMS, d.MLP, EXAONE_EXPERTS),
            Unused(("sliding_window_pattern",)),  # transformers makes layer_types from it
            Unused(("num_nextn_predict_layers",)),
        ),
        unread=(*LLAMA.unread, "mtp."),
    ),
    family("hunyuan_v1_moe", "HunYuanMoEV1", HUNYUAN, HUNYUAN_EXPERTS),
    family(
        *("apertus", "Apertus", BASICS, d.ATTENTION[1:], BIASES, HEAD_NORMS, _ungated("xielu", "xielu")),
        *_unwritten(mlp_bias=False, post_norm=False, qk_norm=True, hidden_dropout=0.0),
        Rename("self_attention.linear_qkv.layer_norm_weight", "attention_layernorm.weight"),
        Rename("mlp.linear_fc1.layer_norm_weight", "feedforward_layernorm.weight"),
        *(
            Rename(f"mlp.activation_func.{name}", f"mlp.act_fn.{name}")
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        ),
    ),
    family(  # Command R7B and Command A
        *("cohere2", "Cohere2", COHERE, LAYER_WINDOWS, LOCAL_POSITIONS),
        *(d.ATTENTION, INTERLEAVED, BIASES, d.MLP[1:]),
        Unused(("sliding_window_pattern",)),  # transformers makes layer_types from it
    ),
    family(  # Trinity
        *("afmoe", "Afmoe", d.DECODER, LAYER_WINDOWS, LOCAL_POSITIONS, HEAD_NORMS, AFMOE),
        Only("attention_bias", False, "Megatron's output gates would have one too"),
        Unused(("global_attn_every_n_layers",)),  # transformers makes layer_types from it
    ),
    family(
        *("mistral4", "Mistral4", _latent_attention(GROWING_LATENT_ROPE, _NEIGHBOURS, head_dim="whole")),
        d.PRETRAINING_TP,
        *(d.MLP, e.FIRST_DENSE, e.ROUTED_EXPERTS, e.EXPERT_SIZES, e.shared_experts("n_shared_experts")),
        *(e.SCALED_SOFTMAX_ROUTER, e.NO_ROUTER_LOSS, e.STACKED_EXPERTS, e.shared_expert_weights("mlp.shared_experts")),
    ),
)


# The names on the hub. transformers writes MLPs without experts as if they had some; both are read.
_WITHOUT_POSITIONS = Constants({"position_embedding_type": "none", "rope_type": "rope", "rotary_scaling_factor": 1.0})
_KIMI_LINEAR = replace(
    family(
        *("kimi_linear", "KimiLinear", _latent_attention(_WITHOUT_POSITIONS, head_dim="unread"), KIMI_DELTA),
        *(d.MLP, e.MLP_TYPES, e.LOCAL_EXPERTS, e.EXPERT_SIZES, e.shared_experts("n_shared_experts"), e.SIGMOID_ROUTER),
        e.expert_weights(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"), in_fp32=True
        ),
        Rename("mlp.router.expert_bias", "block_sparse_moe.gate.e_score_correction_bias", in_fp32=True),
        *(e.shared_expert_weights("block_sparse_moe.shared_experts"), e.NO_ROUTER_LOSS, d.PRETRAINING_TP),
        Only("tie_word_embeddings", False, "transformers does not tie the weights of this family"),
        *_unwritten(mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1),
        *_unwritten(num_nextn_predict_layers=0, use_grouped_topk=True),
        Unused(("linear_attn_config", "rope_theta", "rope_parameters")),  # transformers makes other keys of the first
    ),
    aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    moved_in_memory=(
        ("block_sparse_moe.", "mlp."),
        *((f".{old}.", f".{new}.") for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))),
        *((f"self_attn.{name}", f"self_attn.forget_gate.{name}") for name in ("f_", "dt_bias", "A_log")),
        *((f"self_attn.{part}_conv1d.", "self_attn.conv1d.") for part in "qkv"),
    ),
)
_WRITTEN_BY_TRANSFORMERS = tuple(
    renamed(rule, lambda name: name.replace("mlp.", "block_sparse_moe.")) for rule in _KIMI_LINEAR.layer
)
KIMI_LINEAR = replace(_KIMI_LINEAR, variants=(replace(_KIMI_LINEAR, layer=_WRITTEN_BY_TRANSFORMERS),))

WITH_TOWERS = {**DELTA_NETS_WITH_TOWERS, "llama4": LLAMA4_WITH_TOWER}
"""The language models of folders with a vision tower, by the folder's ``model_type``; each is a text family too."""

FAMILIES = {row.model_type: row for row in (*_ROWS, *DELTA_NETS, KIMI_LINEAR, *MAMBA_FAMILIES, LLAMA4)} | WITH_TOWERS
"""All families, by the ``model_type`` of their ``config.json``."""
