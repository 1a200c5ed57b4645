# SPDX-License-Identifier: Apache-2.0
"""Rules for a decoder like Llama's, which most families share: for its config keys, then for its weights.

Rules for rotary positions are in ``rope_rules.py``, for windows in ``window_rules.py``, for experts in
``expert_rules.py``. A family (``families.py``) is a choice of such rules. This is all of Mistral:

    family("mistral", "Mistral", DECODER, WINDOW, ATTENTION, MLP)

A config key or a weight that no rule of the family owns is an error. The config key ``num_hidden_layers: 32`` is read
as Megatron's ``num_layers=32``. Megatron's weight ``decoder.layers.3.self_attention.linear_proj.weight`` is
``model.layers.3.self_attn.o_proj.weight``, and its ``decoder.layers.3.mlp.linear_fc1.weight`` contains the rows of
``gate_proj``, then those of ``up_proj``. In Megatron a norm is part of the projection after it: Hugging Face's
``input_layernorm.weight`` is ``self_attention.linear_qkv.layer_norm_weight``.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.rope_rules import PARTIAL_ROPE, ROPE
from lightning_mcore.hf.weight_rules import JoinedQueryKeyValue, QueryKeyValue, Rename, Rows, Vocabulary, WeightRule

# ---- config keys

MOST_LAYERS = 10_000

SIZES: tuple[ConfigRule, ...] = (
    Same("vocab_size", "vocab_size", at_least=1),
    Same("num_hidden_layers", "num_layers", at_least=1, at_most=MOST_LAYERS),
    Same("hidden_size", "hidden_size", at_least=1),
    Same("intermediate_size", "ffn_hidden_size", at_least=1),
    Same("num_attention_heads", "num_attention_heads", at_least=1),
    Same("num_key_value_heads", "num_query_groups", at_least=1),
)

# DECODER, below, without rotary positions, the size of heads, and the activation of the MLP.
GATED_LAYERS: tuple[ConfigRule, ...] = (
    *SIZES,
    Same("rms_norm_eps", "layernorm_epsilon", at_least=0.0),
    Same("attention_dropout", "attention_dropout"),
    Same("tie_word_embeddings", "share_embeddings_and_output_weights"),
    Constants({"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}),
)
# DECODER without rotary positions and the size of heads.
SWIGLU_LAYERS: tuple[ConfigRule, ...] = (
    *GATED_LAYERS,
    Only("hidden_act", "silu"),
    Constants({"activation_func": "silu"}),
)


def without(key: str, rules: tuple[ConfigRule, ...]) -> tuple[ConfigRule, ...]:
    """Return the rules except the one that owns the key, for a family that has a rule of its own for it."""
    return tuple(rule for rule in rules if key not in rule.keys)


def repeating(key: str, of: str) -> Derived:
    """Return the rule of a key that transformers does not read, and that may only repeat the key ``of``."""

    def read(config: Config) -> dict[str, Any]:
        if config.get(key) is not None:
            refuse_unless(key, config[key], (config[of],), f"{of} is {config[of]!r}")
        return {}

    return Derived((key,), read, lambda fields: {})


HEAD_SIZE = Same("head_dim", "kv_channels", at_least=1)

DECODER: tuple[ConfigRule, ...] = (*SWIGLU_LAYERS, ROPE, HEAD_SIZE)
PARTIAL_DECODER: tuple[ConfigRule, ...] = (*SWIGLU_LAYERS, PARTIAL_ROPE, HEAD_SIZE)


def _read_attention_bias(config: Config) -> dict[str, Any]:
    return {"add_qkv_bias": True, "attention_output_bias": True} if config.get("attention_bias") else {}


def _write_attention_bias(fields: Fields) -> dict[str, Any]:
    if fields["add_qkv_bias"] != fields["attention_output_bias"]:
        raise ValueError("some of the projections of attention have biases, but in its config either all or none do")
    return {"attention_bias": fields["add_qkv_bias"]}


ATTENTION_BIAS = Derived(("attention_bias",), _read_attention_bias, _write_attention_bias)
MLP_BIAS = Same("mlp_bias", "mlp_bias")


def _read_dropout(config: Config) -> dict[str, Any]:
    dropout = config.get("resid_pdrop", 0.0)
    after_embedding = config.get("embd_pdrop", dropout)
    refuse_unless("embd_pdrop", after_embedding, (dropout,), "Megatron has one dropout for both")
    return {"hidden_dropout": dropout}


ONE_DROPOUT = Derived(
    ("resid_pdrop", "embd_pdrop"),
    _read_dropout,
    lambda fields: dict.fromkeys(("resid_pdrop", "embd_pdrop"), fields["hidden_dropout"]),
)
"""Phi-3: a dropout after the embedding and one after attention and MLP, which must be equal."""

# Granite's
MULTIPLIERS: tuple[ConfigRule, ...] = (
    Same("embedding_multiplier", "embedding_scale"),
    Same("residual_multiplier", "residual_scale"),
    Same("logits_scaling", "logits_divisor"),
    Same("attention_multiplier", "softmax_scale"),
)

PRETRAINING_TP = Unused(("pretraining_tp",))  # how many ranks shared a matrix in pretraining


def _read_multi_token(config: Config) -> dict[str, Any]:
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):  # the second in newer releases of transformers
        layers = config.get(key)
        if layers:
            refuse_outside(key, layers, 0, MOST_LAYERS)
            return {"mtp_num_layers": layers}
    return {}


MULTI_TOKEN_LAYERS = Derived(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    _read_multi_token,
    lambda fields: {"num_nextn_predict_layers": fields["mtp_num_layers"] or 0},
)
"""DeepSeek-V3 and GLM-4.5: how many layers for multi-token prediction follow the others."""

# ---- weights of a layer: Megatron's name, then Hugging Face's

ATTENTION: tuple[WeightRule, ...] = (
    Rename("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    QueryKeyValue(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    Rename("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

QKV_BIAS = QueryKeyValue(
    "self_attention.linear_qkv.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
)

OUTPUT_BIAS = Rename("self_attention.linear_proj.bias", "self_attn.o_proj.bias")
ATTENTION_BIASES: tuple[WeightRule, ...] = (QKV_BIAS, OUTPUT_BIAS)

QK_NORM: tuple[WeightRule, ...] = (
    Rename("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Rename("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

MLP: tuple[WeightRule, ...] = (
    Rename("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    Rows("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Rename("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)

MLP_BIASES: tuple[WeightRule, ...] = (
    Rows("mlp.linear_fc1.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias")),
    Rename("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
)

JOINED_ATTENTION: tuple[WeightRule, ...] = (
    Rename("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    JoinedQueryKeyValue("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight"),
    Rename("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
"""Phi-3: one tensor for queries, keys and values."""

JOINED_MLP: tuple[WeightRule, ...] = (
    Rename("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    Rename("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"),
    Rename("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
"""Phi-3, GLM-4: one tensor for gate and up, equal to Megatron's, which also has all rows of the gate first."""

# ---- the other weights


def weights_outside_layers(prefix: str = "model.") -> tuple[WeightRule, ...]:
    """Return their rules; ``prefix`` starts all Hugging Face names but the output layer's."""
    return (
        Vocabulary("embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight"),
        Rename("decoder.final_layernorm.weight", f"{prefix}norm.weight"),
        Vocabulary("output_layer.weight", "lm_head.weight"),
    )


OUTSIDE = weights_outside_layers()

MULTI_TOKEN_WEIGHTS: tuple[WeightRule, ...] = (
    Rename("enorm.weight", "enorm.weight"),
    Rename("hnorm.weight", "hnorm.weight"),
    Rename("eh_proj.weight", "eh_proj.weight"),
    Rename("final_layernorm.weight", "shared_head.norm.weight"),
)
"""What a multi-token prediction layer has in addition to an ordinary layer."""

MULTI_TOKEN_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Hugging Face also repeats the embedding and the output layer in each multi-token prediction layer."""

# ---- families

# A rule, or a tuple of parts; mypy would take a mixed tuple for a tuple of objects
Part = ConfigRule | WeightRule | tuple[Any, ...]


def family(model_type: str, name: str, *parts: Part) -> Family:
    """Return a family of decoders whose weights outside layers have the usual names.

    ``name`` is the transformers class without ``ForCausalLM``; the order of ``parts`` does not matter.
    """
    config: list[ConfigRule] = []
    layer: list[WeightRule] = []
    for rule in _rules_of(parts):
        if isinstance(rule, WeightRule):
            layer.append(rule)
        else:
            config.append(rule)
    return Family(model_type, f"{name}ForCausalLM", tuple(config), tuple(layer), OUTSIDE)


def with_multi_token(model_type: str, name: str, *parts: Part) -> Family:
    """Return a :func:`family` that has multi-token prediction layers."""
    known = family(model_type, name, MULTI_TOKEN_LAYERS, *parts)
    return replace(known, multi_token=MULTI_TOKEN_WEIGHTS, repeated=MULTI_TOKEN_COPIES)


def _rules_of(parts: tuple[Any, ...]) -> Iterator[ConfigRule | WeightRule]:
    """Yield the rules of nested tuples, in their order."""
    for part in parts:
        if isinstance(part, tuple):
            yield from _rules_of(part)
        else:
            yield part
