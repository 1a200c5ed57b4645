# SPDX-License-Identifier: Apache-2.0
"""Llama 4: attention within chunks of the text, layers without positions, and one expert per token.

It is published with a vision tower, as ``llama4``. From such a folder, the language model is read and written as a text
model, ``llama4_text``.
"""

from dataclasses import replace
from typing import Any

from lightning_mcore.hf import decoder_rules as d
from lightning_mcore.hf import expert_rules as e
from lightning_mcore.hf.config_rules import Config, Constants, Derived, Fields, Unused, refuse_outside, refuse_unless
from lightning_mcore.hf.rope_rules import UNROTATED_LAYERS
from lightning_mcore.hf.weight_rules import Rename, Rows, Stack, Vocabulary
from lightning_mcore.hf.window_rules import FULL_ATTENTION

_CHUNKED = "chunked_attention"


def _read_chunks(config: Config) -> dict[str, Any]:
    size, layers = config.get("attention_chunk_size"), config["num_hidden_layers"]
    rotated = config["no_rope_layers"][:layers]
    for layer, (kind, flag) in enumerate(zip(config.get("layer_types") or (), rotated, strict=False)):
        wanted = _CHUNKED if size is not None and flag else FULL_ATTENTION
        why = "layers attend within chunks if and only if they have rotary positions"
        refuse_unless(f"layer_types[{layer}]", kind, (wanted,), why)
    if size is None:
        return {}
    refuse_outside("attention_chunk_size", size, 1)
    return {"attention_chunk": size}


CHUNKS = Derived(
    ("attention_chunk_size", "layer_types"),
    _read_chunks,
    lambda fields: {"attention_chunk_size": fields["attention_chunk"]},
)


def _read_temperature(config: Config) -> dict[str, Any]:
    if not config.get("attn_temperature_tuning"):
        return {}
    refuse_outside("floor_scale", config["floor_scale"], 1)
    refuse_outside("attn_scale", config["attn_scale"], 0.0)
    growth = {"beta": float(config["attn_scale"]), "original_max_position_embeddings": config["floor_scale"]}
    return {"query_growth": {**growth, "first_position": 1, "unrotated_only": True}}


def _write_temperature(fields: Fields) -> dict[str, Any]:
    growth = fields["query_growth"]
    if growth is None:
        return {"attn_temperature_tuning": False}
    scales = {"attn_scale": growth["beta"], "floor_scale": growth["original_max_position_embeddings"]}
    return {"attn_temperature_tuning": True, **scales}


TEMPERATURE = Derived(("attn_temperature_tuning", "floor_scale", "attn_scale"), _read_temperature, _write_temperature)

QK_NORM = Derived(
    ("use_qk_norm",),
    lambda config: {"head_norms": "unweighted"} if config.get("use_qk_norm") else {},
    lambda fields: {"use_qk_norm": fields["head_norms"] == "unweighted"},
)

_OF_ONE_EXPERT: dict[str, Any] = {
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_apply_probs_on_input": True,
}


def _read_experts(config: Config) -> dict[str, Any]:
    flags = [layer in config["moe_layers"] for layer in range(config["num_hidden_layers"])]
    dense = {"ffn_hidden_size": config["intermediate_size_mlp"]}
    refuse_outside("intermediate_size_mlp", config["intermediate_size_mlp"], 1)
    if not any(flags):
        return dense
    chosen, size = config["num_experts_per_tok"], config["intermediate_size"]
    refuse_unless(
        "num_experts_per_tok", chosen, (1,), "Megatron weighs the input of an expert only if it is the only one"
    )
    refuse_outside("num_local_experts", config["num_local_experts"], 1)
    refuse_outside("intermediate_size", size, 1)
    sizes = {"moe_ffn_hidden_size": size, "moe_shared_expert_intermediate_size": size}
    layers = {} if all(flags) else {"moe_layer_freq": [int(flag) for flag in flags]}
    return {**dense, "num_moe_experts": config["num_local_experts"], **sizes, **_OF_ONE_EXPERT, **layers}


def _write_experts(fields: Fields) -> dict[str, Any]:
    dense, layers = {"intermediate_size_mlp": fields["ffn_hidden_size"]}, fields["num_layers"]
    if not fields["num_moe_experts"]:
        return {**dense, "moe_layers": []}
    flags = fields["moe_layer_freq"]
    return {
        **dense,
        "num_local_experts": fields["num_moe_experts"],
        "num_experts_per_tok": fields["moe_router_topk"],
        "intermediate_size": fields["moe_ffn_hidden_size"],
        "moe_layers": [layer for layer in range(layers) if flags == 1 or flags[layer]],
    }


EXPERTS = Derived(
    (
        *("num_local_experts", "num_experts_per_tok", "moe_layers", "interleave_moe_layer_step"),
        *("intermediate_size", "intermediate_size_mlp"),
    ),
    _read_experts,
    _write_experts,
)

_MLP = "feed_forward"
_NORM = "post_attention_layernorm.weight"

LLAMA4 = d.family(
    *("llama4_text", "Llama4", d.without("intermediate_size", d.DECODER), d.ATTENTION, d.ATTENTION_BIAS),
    *(d.ATTENTION_BIASES, Constants({"rotary_interleaved": True}), UNROTATED_LAYERS, CHUNKS, TEMPERATURE, QK_NORM),
    EXPERTS,
    # transformers reads none of them; the last two are in published configs
    Unused(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")),
    Unused(("cache_implementation", "for_llm_compressor")),
    # Of dense layers, and of those with experts
    Rename("mlp.linear_fc1.layer_norm_weight", _NORM),
    Rows("mlp.linear_fc1.weight", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    Rename("mlp.linear_fc2.weight", f"{_MLP}.down_proj.weight"),
    Rename("pre_mlp_layernorm.weight", _NORM),
    Rename("mlp.router.weight", f"{_MLP}.router.weight"),
    Stack("mlp.experts.experts.linear_fc1.weight", f"{_MLP}.experts.gate_up_proj", transposed=True),
    Stack("mlp.experts.experts.linear_fc2.weight", f"{_MLP}.experts.down_proj", transposed=True),
    *e.shared_expert_weights(f"{_MLP}.shared_expert"),
)

_PREFIX = "language_model."
_OF_IMAGES = Unused(("vision_config", "boi_token_index", "eoi_token_index", "image_token_index"))

LLAMA4_WITH_TOWER = replace(
    LLAMA4,
    config=(*LLAMA4.config, _OF_IMAGES),
    outside=tuple(
        replace(rule, hf=f"{_PREFIX}{rule.hf}") for rule in d.OUTSIDE if isinstance(rule, Rename | Vocabulary)
    ),
    layer_prefix=f"{_PREFIX}{LLAMA4.layer_prefix}",
    unread=(*LLAMA4.unread, "vision_model.", "multi_modal_projector."),
)
"""The language model of a folder of type ``llama4``, which has a vision tower."""
