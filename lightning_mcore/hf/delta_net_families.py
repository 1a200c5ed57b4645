# SPDX-License-Identifier: Apache-2.0
"""Families with gated delta nets, and attention in every fourth layer: Qwen3-Next and Qwen3.5.

Their published folders have multi-token prediction weights (``mtp.*``), which neither transformers nor these families
read. Qwen3.5 is published with a vision tower, as ``qwen3_5`` and ``qwen3_5_moe``. From those folders, the language
model is read and written as a text model, ``qwen3_5_text`` or ``qwen3_5_moe_text``; ``vision_families.py`` has the
families that read the tower too.

``KIMI_DELTA`` is the part of Kimi Linear that has a memory; ``families.py`` has its row.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_mcore.config.architecture import DELTA_NET
from lightning_mcore.config.architecture import KIMI_DELTA as SIZES_OF_KIMI
from lightning_mcore.hf import decoder_rules as d
from lightning_mcore.hf import expert_rules as e
from lightning_mcore.hf.config_rules import (
    Config,
    ConfigRule,
    Constants,
    Derived,
    Fields,
    Only,
    Unused,
    refuse_outside,
    refuse_unless,
)
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.rope_rules import PARTIAL_ROPE
from lightning_mcore.hf.weight_rules import DeltaNetRows, Experts, GatedQueryKeyValue, Rename, Rows, WeightRule

_DELTA_NET, _ATTENTION = "linear_attention", "full_attention"


def _memory_layers(field: str, sizes: Iterable[str], *more_keys: str) -> Derived:
    """Return the rule of which layers have a memory instead of attention, and of its sizes, which ``field`` holds."""

    def read(config: Config) -> dict[str, Any]:
        kinds = config["layer_types"]
        for kind in kinds:
            refuse_unless("layer_types", kind, (_DELTA_NET, _ATTENTION), "the family has no other layers")
        for key in sizes:
            refuse_outside(key, config[key], 1)
        if "linear_num_value_heads" in sizes:  # Kimi's layers have one number of heads
            heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
            if values % heads:
                raise ValueError(
                    f"linear_num_value_heads={values} is not supported; only multiples of"
                    f" linear_num_key_heads={heads} are"
                )
        flags = [int(kind == _DELTA_NET) for kind in kinds]
        given = {"linear_attention_freq": flags, **{key: config[key] for key in sizes}}
        return {field: given} if any(flags) else {}

    def write(fields: Fields) -> dict[str, Any]:
        given = fields[field]
        if given is None:
            return {"layer_types": [_ATTENTION] * fields["num_layers"]}
        kinds = [_DELTA_NET if flag else _ATTENTION for flag in given["linear_attention_freq"]]
        return {"layer_types": kinds, **{key: given[key] for key in sizes}}

    return Derived(("layer_types", *more_keys, *sizes), read, write)


_MIXED_LAYERS: tuple[ConfigRule, ...] = (
    _memory_layers("delta_net", DELTA_NET, "full_attention_interval"),
    Constants({"layernorm_zero_centered_gamma": True, "qk_layernorm": True, "attention_output_gate": True}),
    d.HEAD_SIZE,
    d.ATTENTION_BIAS,
)


def _gated(kind: str) -> WeightRule:
    query, key, value = (f"self_attn.{name}_proj.{kind}" for name in "qkv")
    return GatedQueryKeyValue(f"self_attention.linear_qkv.{kind}", query, key, value)


_GATED_ATTENTION: tuple[WeightRule, ...] = (
    d.ATTENTION[0],
    _gated("weight"),
    _gated("bias"),
    d.ATTENTION[2],
    d.OUTPUT_BIAS,
    *d.QK_NORM,
)

# One convolution over the channels of queries, keys and values; a query is as wide as a key
_CONVOLUTION = "linear_attn.conv1d.weight"

_AROUND_MEMORY: tuple[WeightRule, ...] = (
    Rename("input_layernorm.weight", "input_layernorm.weight"),
    DeltaNetRows("self_attention.conv1d.weight", tuple((_CONVOLUTION, (part,)) for part in ("key", "key", "value"))),
    Rename("self_attention.A_log.weight", "linear_attn.A_log"),
    Rename("self_attention.dt_bias.weight", "linear_attn.dt_bias"),
    Rename("self_attention.out_norm.weight", "linear_attn.norm.weight"),
    Rename("self_attention.linear_out.weight", "linear_attn.out_proj.weight"),
)

_SHARED_EXPERT: tuple[ConfigRule, ...] = (
    e.NUM_EXPERTS,
    *e.EXPERT_SIZES,
    *e.GATED_SHARED_EXPERT,
    *e.NO_ROUTER_LOSS,
)

_UNREAD = ("rotary_emb.inv_freq", "mtp.")

QWEN3_NEXT = replace(
    d.family(
        *("qwen3_next", "Qwen3Next", d.SWIGLU_LAYERS, PARTIAL_ROPE, _MIXED_LAYERS, _SHARED_EXPERT),
        *(e.SPARSE_LAYERS, e.SOFTMAX_ROUTER),
        Only("use_sliding_window", False, "transformers does not apply it", is_written=False),
        *(_GATED_ATTENTION, _AROUND_MEMORY, d.MLP, e.GATED_SHARED_EXPERT_WEIGHTS),
        DeltaNetRows(
            "self_attention.linear_in.weight",
            (
                # Head by head already. With 2 key heads of 2 channels and 4 value heads of 3, a head has 16 rows
                # (2, 2, 6 and 6) in the first tensor, and 4 (2 and 2) in the second.
                ("linear_attn.in_proj_qkvz.weight", ("key", "key", "value", "value")),
                ("linear_attn.in_proj_ba.weight", ("head", "head")),
            ),
        ),
    ),
    unread=_UNREAD,
)


def _read_text_rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    of_images = ("mrope_section", "mrope_interleaved")  # the three positions of a token of text are equal
    text_rope = {key: rope[key] for key in rope if key not in of_images}
    return PARTIAL_ROPE.read({**config, "rope_parameters": text_rope})


TEXT_ROPE = Derived(("rope_parameters",), _read_text_rope, PARTIAL_ROPE.write)

_MORE_KEYS: tuple[ConfigRule, ...] = (
    Only("attn_output_gate", True, is_written=False),
    Only("output_gate_type", "swish", is_written=False),
    Unused(("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "unsloth_fixed_mtp")),
)

# Qwen3.5 stores all queries, then all keys, then all values, and has a tensor each for gates and the two scalars
_MORE_WEIGHTS: tuple[WeightRule, ...] = (
    *_GATED_ATTENTION,
    *_AROUND_MEMORY,
    DeltaNetRows(
        "self_attention.linear_in.weight",
        (
            *(("linear_attn.in_proj_qkv.weight", (part,)) for part in ("key", "key", "value")),
            ("linear_attn.in_proj_z.weight", ("value",)),
            ("linear_attn.in_proj_b.weight", ("head",)),
            ("linear_attn.in_proj_a.weight", ("head",)),
        ),
    ),
)

QWEN3_5 = replace(
    d.family(
        *("qwen3_5_text", "Qwen3_5", d.SWIGLU_LAYERS, TEXT_ROPE, _MIXED_LAYERS, _MORE_KEYS),
        *(_MORE_WEIGHTS, d.MLP),
    ),
    unread=_UNREAD,
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    config=(
        *d.without("intermediate_size", QWEN3_5.config),
        *_SHARED_EXPERT,
        e.ALL_LAYERS,
        e.NORMALISED_ROUTER,
        Unused(("intermediate_size", "mlp_only_layers")),  # transformers does not read them
    ),
    layer=(*_MORE_WEIGHTS, *e.GATED_SHARED_EXPERT_WEIGHTS),
)

# ---- Kimi Linear


KIMI_DELTA: tuple[ConfigRule | WeightRule, ...] = (
    _memory_layers("kimi_delta", SIZES_OF_KIMI),
    DeltaNetRows(
        "self_attention.linear_in.weight",
        (
            *((f"self_attn.{part}_proj.weight", ("key",)) for part in "qkv"),
            ("self_attn.b_proj.weight", ("head",)),
        ),
    ),
    DeltaNetRows(
        "self_attention.conv1d.weight", tuple((f"self_attn.{part}_conv1d.weight", ("key",)) for part in "qkv")
    ),
    Rename("self_attention.A_log.weight", "self_attn.A_log"),
    Rename("self_attention.dt_bias.weight", "self_attn.dt_bias", in_fp32=True),
    Rows("self_attention.linear_low.weight", ("self_attn.f_a_proj.weight", "self_attn.g_a_proj.weight")),
    Rename("self_attention.linear_decay.weight", "self_attn.f_b_proj.weight"),
    Rename("self_attention.linear_gate.weight", "self_attn.g_b_proj.weight"),
    Rename("self_attention.out_norm.weight", "self_attn.o_norm.weight"),
    Rename("self_attention.linear_out.weight", "self_attn.o_proj.weight"),
)
"""The keys and weights of Kimi delta attention; latent attention has the norm before either."""

DELTA_NETS = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)

_OF_IMAGES = Unused(
    ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
)


def _text_of(text: Family) -> Family:
    """Return the family that reads the language model of a folder with a vision tower."""
    prefix = "model.language_model."
    return replace(
        text,
        config=(*text.config, _OF_IMAGES),
        outside=d.weights_outside_layers(prefix),
        layer_prefix=f"{prefix}layers.{{layer}}.",
        unread=(*text.unread, "model.visual."),
    )


# As the hub has them: one tensor for all experts of a layer. transformers 5 writes one for each expert.
QWEN3_5_MOE_STACKED = replace(
    QWEN3_5_MOE,
    layer=(
        *(rule for rule in QWEN3_5_MOE.layer if not isinstance(rule, Experts)),
        *e.STACKED_EXPERTS[2:],
    ),
)

WITH_TOWERS = {
    "qwen3_5": _text_of(QWEN3_5),
    "qwen3_5_moe": replace(_text_of(QWEN3_5_MOE), variants=(_text_of(QWEN3_5_MOE_STACKED),)),
}
"""The language models of folders with a vision tower, by the folder's ``model_type``; each is one of the above."""
