# SPDX-License-Identifier: Apache-2.0
"""Families with Mamba 2 layers: Granite 4 H, and Nemotron-H with Nemotron 3.

A layer of Granite has Mamba 2 or attention, and then an MLP or experts. A layer of Nemotron-H has one part alone. Both
are patterns of Megatron's letters here. Nemotron's multi-token prediction weights (``mtp.*``) are not read, as in
transformers.
"""

import math
from dataclasses import replace
from typing import Any

from lightning_mcore.config.architecture import MAMBA, pattern_layers
from lightning_mcore.hf import decoder_rules as d
from lightning_mcore.hf import expert_rules as e
from lightning_mcore.hf.config_rules import (
    Config,
    ConfigRule,
    Constants,
    Derived,
    Fields,
    Only,
    Same,
    Unused,
    refuse_outside,
    refuse_unless,
)
from lightning_mcore.hf.rope_rules import ROPE
from lightning_mcore.hf.weight_rules import Experts, MambaRows, QueryKeyValue, Rename, Vocabulary, WeightRule

_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_LETTERS = {_MAMBA: "M", _ATTENTION: "*", "moe": "E", "mlp": "-"}
_NAMES = {letter: kind for kind, letter in _LETTERS.items()}


def _layers_of(fields: Fields) -> list[str]:
    if fields["layer_pattern"] is None:
        raise ValueError("it has no layer_pattern")
    return list(pattern_layers(fields["layer_pattern"]))


def _sizes(kinds: str, *keys: str) -> Derived:
    """Return the rule of the keys for the sizes of Mamba 2 layers, in the order of ``MAMBA``, and of their steps.

    ``kinds`` is the key that says whether there are such layers.
    """

    def read(config: Config) -> dict[str, Any]:
        if _MAMBA not in config[kinds]:
            return {}
        limits = [float(limit) for limit in config.get("time_step_limit") or (0.0, math.inf)]
        refuse_unless("time_step_limit", limits, ([0.0, math.inf],), "steps are not limited here")
        for key in keys:
            refuse_outside(key, config[key], 1)
        if config[keys[0]] % config[keys[2]]:
            raise ValueError(
                f"{keys[0]}={config[keys[0]]} is not supported; only multiples of {keys[2]}={config[keys[2]]} are"
            )
        return {"mamba": {name: config[key] for key, name in zip(keys, MAMBA, strict=True)}}

    def write(fields: Fields) -> dict[str, Any]:
        return {key: fields["mamba"][name] for key, name in zip(keys, MAMBA, strict=True)} if fields["mamba"] else {}

    return Derived((*keys, "time_step_limit"), read, write)


def _weights(mixer: str) -> tuple[WeightRule, ...]:
    """Return the rules of a Mamba 2 layer's weights, whose names begin with ``mixer``."""
    convolution = ("value", "vector", "vector")
    return (
        MambaRows("self_attention.linear_in.weight", f"{mixer}.in_proj.weight", ("value", *convolution, "head")),
        MambaRows("self_attention.conv1d.weight", f"{mixer}.conv1d.weight", convolution),
        MambaRows("self_attention.conv1d_bias.weight", f"{mixer}.conv1d.bias", convolution),
        *(Rename(f"self_attention.{name}.weight", f"{mixer}.{name}") for name in ("A_log", "dt_bias", "D")),
        Rename("self_attention.out_norm.weight", f"{mixer}.norm.weight"),
        Rename("self_attention.linear_out.weight", f"{mixer}.out_proj.weight"),
    )


# ---- Granite 4 H


def _read_granite(config: Config) -> dict[str, Any]:
    kinds, experts = config["layer_types"], config["num_local_experts"]
    for kind in kinds:
        refuse_unless("layer_types", kind, (_MAMBA, _ATTENTION), "the family has no other layers")
    shared = config["shared_intermediate_size"]
    refuse_outside("shared_intermediate_size", shared, 1)
    fields: dict[str, Any] = {"ffn_hidden_size": shared}
    if experts:
        for key in ("num_local_experts", "intermediate_size"):
            refuse_outside(key, config[key], 1)
        fields = {"ffn_hidden_size": config["intermediate_size"], "num_moe_experts": experts}
        fields |= {"moe_shared_expert_intermediate_size": shared}
        fields |= e.CHOSEN_EXPERTS.read(config) | e.NORMALISED_ROUTER.read(config)
    if _MAMBA in kinds:
        fields["layer_pattern"] = "".join(f"[{_LETTERS[kind]}{'E' if experts else '-'}]" for kind in kinds)
    return fields


def _write_granite(fields: Fields) -> dict[str, Any]:
    experts, inner = fields["num_moe_experts"], fields["ffn_hidden_size"]
    layers = ["*"] * fields["num_layers"] if fields["layer_pattern"] is None else _layers_of(fields)
    written = {"layer_types": [_NAMES[layer[0]] for layer in layers]}
    if not experts:
        return {**written, "num_local_experts": 0, "shared_intermediate_size": inner}
    e.ALL_LAYERS.write(fields)
    of_experts = {"num_local_experts": experts, "num_experts_per_tok": fields["moe_router_topk"]}
    shared = fields["moe_shared_expert_intermediate_size"]
    return {**written, **of_experts, "intermediate_size": inner, "shared_intermediate_size": shared}


def _read_positions(config: Config) -> dict[str, Any]:
    kind = config.get("position_embedding_type")
    return ROPE.read(config) if kind == "rope" else {"position_embedding_type": "none"}


def _write_positions(fields: Fields) -> dict[str, Any]:
    if fields["position_embedding_type"] == "none":
        return {"position_embedding_type": None}
    return {"position_embedding_type": "rope", **ROPE.write(fields)}


def _write_expansion(fields: Fields) -> dict[str, Any]:
    if not fields["mamba"]:  # sizes of no layer, which transformers checks all the same
        return {"mamba_expand": 1, "mamba_n_heads": 1, "mamba_d_head": fields["hidden_size"]}
    width = fields["mamba"]["mamba_num_heads"] * fields["mamba"]["mamba_head_dim"]
    times, rest = divmod(width, fields["hidden_size"])
    if rest:
        raise ValueError(f"its Mamba layers have {width} channels, and in its config a multiple of hidden_size")
    return {"mamba_expand": times}


GRANITE = d.family(
    *("granitemoehybrid", "GraniteMoeHybrid", d.without("intermediate_size", d.SWIGLU_LAYERS), d.MULTIPLIERS),
    Derived(("position_embedding_type", *ROPE.keys), _read_positions, _write_positions),
    Derived(
        (
            *("layer_types", "num_local_experts", "num_experts_per_tok"),
            *("intermediate_size", "shared_intermediate_size"),
        ),
        _read_granite,
        _write_granite,
    ),
    _sizes("layer_types", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    Derived(("mamba_expand",), lambda config: {}, _write_expansion),  # transformers checks it
    Only("mamba_conv_bias", True),
    Only("mamba_proj_bias", False),
    Unused(("mamba_chunk_size", "layers_block_type", "init_method")),
    Only("normalization_function", "rmsnorm", is_written=False),
    *(e.NO_ROUTER_LOSS, d.ATTENTION_BIAS, d.ATTENTION, d.ATTENTION_BIASES),
    *(Rename("input_layernorm.weight", "input_layernorm.weight"), _weights("mamba"), e.GRANITE_EXPERTS),
    d.JOINED_MLP[0],
    *(
        Rename(f"mlp.{owner}linear_fc{number}.weight", f"shared_mlp.{name}_linear.weight")
        for owner in ("", "shared_experts.")
        for number, name in ((1, "input"), (2, "output"))
    ),
)

# ---- Nemotron-H


def _read_layers(config: Config) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    for kind in kinds:
        refuse_unless("layers_block_type", kind, tuple(_LETTERS), "the family has no other layers")
    refuse_outside("the length of layers_block_type", len(kinds), 1, d.MOST_LAYERS)
    fields = {"num_layers": len(kinds), "layer_pattern": "".join(_LETTERS[kind] for kind in kinds)}
    if "moe" not in kinds:
        return fields
    experts = {"moe_layer_freq": [int(kind == "moe") for kind in kinds]} if set(kinds) != {"moe"} else {}
    for rule in _OF_EXPERTS:
        experts |= rule.read(config)
    return fields | experts


def _write_layers(fields: Fields) -> dict[str, Any]:
    layers = _layers_of(fields)
    if any(len(layer) > 1 for layer in layers):
        raise ValueError(f"layer_pattern={fields['layer_pattern']!r} has layers of two parts, and its config has not")
    written: dict[str, Any] = {"layers_block_type": [_NAMES[layer] for layer in layers]}
    for rule in _OF_EXPERTS if fields["num_moe_experts"] else ():
        written |= rule.write(fields)
    return written


_OF_EXPERTS: tuple[ConfigRule, ...] = (
    *(e.ROUTED_EXPERTS, *e.EXPERT_SIZES, *e.SIGMOID_ROUTER),
    Same("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", at_least=1),
    Same("moe_latent_size", "moe_latent_size", at_least=1),
)
_NORM = "norm.weight"

NEMOTRON = replace(
    d.family(
        *("nemotron_h", "NemotronH", d.without("num_hidden_layers", d.SIZES), d.HEAD_SIZE),
        Derived(
            ("layers_block_type", *(key for rule in _OF_EXPERTS for key in rule.keys)), _read_layers, _write_layers
        ),
        _sizes(
            *("layers_block_type", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
        ),
        Constants({"position_embedding_type": "none", "normalization": "RMSNorm", "add_bias_linear": False}),
        Constants({"gated_linear_unit": False, "activation_func": "relu_squared"}),
        Same("layer_norm_epsilon", "layernorm_epsilon", at_least=0.0),
        Same("attention_dropout", "attention_dropout"),
        Only("tie_word_embeddings", False, "transformers does not tie the weights of this family"),
        *(Only(key, False) for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")),
        *(Only("use_conv_bias", True), Only("mamba_hidden_act", "silu"), Only("mlp_hidden_act", "relu2")),
        *(Only("sliding_window", None), e.NO_ROUTER_LOSS),
        Unused(("num_hidden_layers", "hidden_dropout", "expand", "chunk_size", "residual_in_fp32", "n_shared_experts")),
        Unused(("time_step_max", "time_step_floor", "rescale_prenorm_residual")),  # initial values
        # Also a lower limit of steps in transformers, but not in Megatron, nor in NVIDIA's own code with kernels
        Unused(("time_step_min",)),
        Unused(("num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap")),
        Unused(("num_nextn_predict_layers", "mtp_layers_block_type")),
        d.repeating("attention_head_dim", "head_dim"),
        # In published models; transformers reads none of them
        Unused(("norm_eps", "partial_rotary_factor", "rms_norm_eps", "rope_theta", "time_step_rank")),
        *(Rename("input_layernorm.weight", _NORM), _weights("mixer")),
        Rename("self_attention.linear_qkv.layer_norm_weight", _NORM),
        QueryKeyValue(
            "self_attention.linear_qkv.weight", "mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"
        ),
        Rename("self_attention.linear_proj.weight", "mixer.o_proj.weight"),
        Rename("mlp.linear_fc1.layer_norm_weight", _NORM),
        Rename("pre_mlp_layernorm.weight", _NORM),
        Rename("mlp.router.weight", "mixer.gate.weight", in_fp32=True),
        Rename("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias", in_fp32=True),
        *(Rename(f"mlp.{name}.weight", f"mixer.{name}.weight") for name in ("fc1_latent_proj", "fc2_latent_proj")),
        *(
            rule
            for number, name in ((1, "up"), (2, "down"))
            for rule in (
                Rename(f"mlp.linear_fc{number}.weight", f"mixer.{name}_proj.weight"),
                Rename(f"mlp.shared_experts.linear_fc{number}.weight", f"mixer.shared_experts.{name}_proj.weight"),
                Experts(
                    Rename(
                        f"mlp.experts.experts.linear_fc{number}.weight", f"mixer.experts.{{expert}}.{name}_proj.weight"
                    )
                ),
            )
        ),
    ),
    outside=(
        Vocabulary("embedding.word_embeddings.weight", "backbone.embeddings.weight"),
        Rename("decoder.final_layernorm.weight", "backbone.norm_f.weight"),
        Vocabulary("output_layer.weight", "lm_head.weight"),
    ),
    layer_prefix="backbone.layers.{layer}.",
    in_memory=("backbone.", "model."),
    unread=("mtp.",),
)

MAMBA_FAMILIES = (GRANITE, NEMOTRON)
