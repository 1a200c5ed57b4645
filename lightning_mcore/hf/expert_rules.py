# SPDX-License-Identifier: Apache-2.0
"""Rules for mixtures of experts: which layers have them, how tokens are routed, and their weights.

Mixtral and Qwen route by a softmax. DeepSeek and GLM route by a sigmoid with a bias that affects only which experts are
chosen. Load-balancing losses are Megatron's own; for training, the user sets them in ``transformer``. ``families.py``
combines its rows from these.
"""

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
from lightning_mcore.hf.weight_rules import Experts, Rename, Rows, Stack, WeightRule

SPARSE, DENSE = "sparse", "dense"
"""The names of layers in ``mlp_layer_types``: with and without experts."""

_BEST_OF_GROUP = 2  # number of experts by which transformers ranks a group


LOCAL_EXPERTS = Same("num_local_experts", "num_moe_experts", others=("num_experts",), at_least=1)

NUM_EXPERTS = Same("num_experts", "num_moe_experts", others=("num_local_experts",), at_least=1)

CHOSEN_EXPERTS = Same("num_experts_per_tok", "moe_router_topk", at_least=1)


def _layers_with_experts(fields: Fields) -> list[bool]:
    if not fields["num_moe_experts"]:
        raise ValueError("it has no experts")
    flags = fields["moe_layer_freq"]
    # complete_fields has turned any other value into one flag per layer
    return [True] * fields["num_layers"] if flags == 1 else list(flags)


def _expert_layers(flags: list[bool]) -> dict[str, Any]:
    return {} if all(flags) else {"moe_layer_freq": [int(flag) for flag in flags]}


def _read_sparse(config: Config) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), frozenset(config.get("mlp_only_layers") or ())
    layers = range(config["num_hidden_layers"])
    refuse_outside("decoder_sparse_step", step, 1)
    # Step 2 in 6 layers, with dense layer 3, gives [0, 1, 0, 0, 0, 1]
    return _expert_layers([layer not in dense and (layer + 1) % step == 0 for layer in layers])


def _write_sparse(fields: Fields) -> dict[str, Any]:
    dense = [layer for layer, has_experts in enumerate(_layers_with_experts(fields)) if not has_experts]
    # Every pattern can be written with a step of 1 and a list of dense layers
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def first_dense(key: str) -> Derived:
    """Return the rule of the key for how many layers have no experts, the first ones of the model."""

    def read(config: Config) -> dict[str, Any]:
        dense = config.get(key) or 0
        refuse_outside(key, dense, 0)
        return _expert_layers([layer >= dense for layer in range(config["num_hidden_layers"])])

    def write(fields: Fields) -> dict[str, Any]:
        flags = _layers_with_experts(fields)
        dense = flags.count(False)
        # With `dense` dense layers in all, they come first only if none of the first `dense` has experts
        if any(flags[:dense]):
            given = fields["moe_layer_freq"]
            raise ValueError(f"moe_layer_freq={given!r} cannot be expressed in its config: dense layers come first")
        return {key: dense}

    return Derived((key,), read, write)


def _write_all(fields: Fields) -> dict[str, Any]:
    if not all(_layers_with_experts(fields)):
        raise ValueError(
            f"moe_layer_freq={fields['moe_layer_freq']!r} cannot be expressed in its config: all layers have experts"
        )
    return {}


def _read_mlp_types(config: Config) -> dict[str, Any]:
    kinds = list(config["mlp_layer_types"])[: config["num_hidden_layers"]]
    for kind in kinds:
        refuse_unless("mlp_layer_types", kind, (SPARSE, DENSE), "Megatron does not have such layers")
    return _expert_layers([kind == SPARSE for kind in kinds])


def _write_mlp_types(fields: Fields) -> dict[str, Any]:
    return {"mlp_layer_types": [SPARSE if flag else DENSE for flag in _layers_with_experts(fields)]}


SPARSE_LAYERS = Derived(("decoder_sparse_step", "mlp_only_layers"), _read_sparse, _write_sparse)

FIRST_DENSE = first_dense("first_k_dense_replace")

# transformers makes the list from first_k_dense_replace if it is missing
MLP_TYPES = Derived(("mlp_layer_types", "first_k_dense_replace"), _read_mlp_types, _write_mlp_types)

ALL_LAYERS = Derived((), lambda config: {}, _write_all)


def _read_softmax(config: Config) -> dict[str, Any]:
    # Normalised weights equal a softmax over the chosen alone: Megatron's without moe_router_pre_softmax
    if not config.get("norm_topk_prob", False):
        return {"moe_router_pre_softmax": True}
    _refuse_one_expert(config)
    return {}


def _read_normalised(config: Config) -> dict[str, Any]:
    _refuse_one_expert(config)
    return {}


def _refuse_one_expert(config: Config) -> None:
    if config["num_experts_per_tok"] == 1:
        raise ValueError(
            "num_experts_per_tok=1 is not supported where the weights of chosen experts are normalised, because the"
            " weight would be 1 and the router would not be trained; only 2 and more are"
        )


def _read_sigmoid(config: Config) -> dict[str, Any]:
    # Megatron normalises sigmoid weights if and only if more than one expert is chosen
    several = config["num_experts_per_tok"] > 1
    why = f"Megatron normalises the weights of {config['num_experts_per_tok']} chosen experts"
    why = why if several else "Megatron does not normalise the weight of one chosen expert"
    refuse_unless("norm_topk_prob", config.get("norm_topk_prob", True), (several,), why)
    return {}


def _read_groups(config: Config) -> dict[str, Any]:
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    for key, value in (("n_group", groups), ("topk_group", chosen)):
        refuse_outside(key, value, 1)
    if chosen >= groups:
        return {}
    experts = next(config[key] for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key))
    if experts % groups or experts // groups < _BEST_OF_GROUP:
        raise ValueError(
            f"n_group={groups} of {experts} experts is not supported, because a group is ranked by its "
            f"{_BEST_OF_GROUP} best experts; only equal groups of at least that many are"
        )
    # DeepSeek-V3: 8 experts per token from 4 of 8 groups, so Megatron also ranks a group by its 8 // 4 = 2 best experts
    counted = config["num_experts_per_tok"] // chosen
    if counted != _BEST_OF_GROUP:
        raise ValueError(
            f"topk_group={chosen} of n_group={groups} with num_experts_per_tok={config['num_experts_per_tok']} is not "
            f"supported, because Megatron ranks a group by its num_experts_per_tok // topk_group = {counted} best "
            f"experts, and transformers by {_BEST_OF_GROUP}; only equal numbers, or choosing all groups, are"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _write_groups(fields: Fields) -> dict[str, Any]:
    chosen = fields["moe_router_group_topk"]
    return {"n_group": fields["moe_router_num_groups"] if chosen else 1, "topk_group": chosen or 1}


def scale(key: str) -> Derived:
    """Return the rule of the key for the factor that the weights of chosen experts are multiplied by."""

    def read(config: Config) -> dict[str, Any]:
        factor = config.get(key, 1.0)
        refuse_outside(key, factor, 0.0)
        if factor == 0:
            raise ValueError(
                f"{key}={factor!r} is not supported, because no expert would contribute then; only numbers above 0 are"
            )
        return {"moe_router_topk_scaling_factor": float(factor)} if factor != 1 else {}

    return Derived((key,), read, lambda fields: {key: fields["moe_router_topk_scaling_factor"] or 1.0})


NO_ROUTER_LOSS: tuple[ConfigRule, ...] = (
    Only(
        "output_router_logits",
        False,
        "transformers then adds a loss for routers that is not Megatron's; set it to False and give from_pretrained"
        " transformer={'moe_aux_loss_coeff': ...} if you want Megatron's",
    ),
    Unused(("router_aux_loss_coef",)),
)

SOFTMAX_ROUTER = Derived(
    ("norm_topk_prob",), _read_softmax, lambda fields: {"norm_topk_prob": not fields["moe_router_pre_softmax"]}
)

NORMALISED_ROUTER = Derived((), _read_normalised, lambda fields: {})

SIGMOID_WITH_BIAS: tuple[ConfigRule, ...] = (
    Constants({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
    Preset({"moe_router_dtype": "fp32", "moe_router_bias_update_rate": 0.0}),
)

SIGMOID_ROUTER: tuple[ConfigRule, ...] = (
    *SIGMOID_WITH_BIAS,
    Derived(("norm_topk_prob",), _read_sigmoid, lambda fields: {"norm_topk_prob": fields["moe_router_topk"] > 1}),
    Derived(("n_group", "topk_group"), _read_groups, _write_groups),
    scale("routed_scaling_factor"),
)


def _read_softmax_groups(config: Config) -> dict[str, Any]:
    groups = _read_groups(config)
    if groups and config.get("norm_topk_prob"):
        raise ValueError(
            f"n_group={config['n_group']} is not supported with norm_topk_prob=True, because Megatron then ranks groups"
            " by logits, and transformers by probabilities; only choosing all groups is"
        )
    return groups


SCALED_SOFTMAX_ROUTER: tuple[ConfigRule, ...] = (
    SOFTMAX_ROUTER,
    Derived(("n_group", "topk_group"), _read_softmax_groups, _write_groups),
    scale("routed_scaling_factor"),
)


EXPERT_SIZES: tuple[ConfigRule, ...] = (
    CHOSEN_EXPERTS,
    Same("moe_intermediate_size", "moe_ffn_hidden_size", at_least=1),
)


def shared_experts(key: str) -> Derived:
    """Return the rule of the key for the number of shared experts, which are as wide as routed ones."""

    def read(config: Config) -> dict[str, Any]:
        shared = config.get(key, 1)
        refuse_outside(key, shared, 1)
        return {"moe_shared_expert_intermediate_size": shared * config["moe_intermediate_size"]}

    def write(fields: Fields) -> dict[str, Any]:
        size, of_one = fields["moe_shared_expert_intermediate_size"], fields["moe_ffn_hidden_size"]
        if not size or size % of_one:
            raise ValueError(
                f"moe_shared_expert_intermediate_size={size} cannot be expressed in its config: shared experts have"
                f" a multiple of {of_one}"
            )
        return {key: size // of_one}

    return Derived((key,), read, write)


ROUTED_EXPERTS = Same("n_routed_experts", "num_moe_experts", others=("num_local_experts",), at_least=1)

SIGMOID_EXPERTS: tuple[ConfigRule, ...] = (
    ROUTED_EXPERTS,
    *EXPERT_SIZES,
    shared_experts("n_shared_experts"),
    *SIGMOID_ROUTER,
    *NO_ROUTER_LOSS,
)
"""Routed and shared experts as in DeepSeek-V3, without the rule that says which layers have them."""


def expert_weights(
    gate: str, expert: str, names: tuple[str, str, str], in_fp32: bool = False
) -> tuple[WeightRule, ...]:
    """Return the rules of routed experts.

    ``gate`` is Hugging Face's name of the router, which the model may keep ``in_fp32``. ``expert`` is the prefix of an
    expert's weights with ``{expert}`` for its number, and ``names`` are the names of its gate, up and down projections.
    """
    gate_projection, up, down = (f"{expert}.{name}.weight" for name in names)
    return (
        Rename("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        Rename("mlp.router.weight", f"{gate}.weight", in_fp32),
        Experts(Rows("mlp.experts.experts.linear_fc1.weight", (gate_projection, up))),
        Experts(Rename("mlp.experts.experts.linear_fc2.weight", down)),
    )


def shared_expert_weights(expert: str) -> tuple[WeightRule, ...]:
    """Return the rules of shared experts, whose weights have the prefix ``expert``."""
    return (
        Rows("mlp.shared_experts.linear_fc1.weight", (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")),
        Rename("mlp.shared_experts.linear_fc2.weight", f"{expert}.down_proj.weight"),
    )


EXPERTS = expert_weights("mlp.gate", "mlp.experts.{expert}", ("gate_proj", "up_proj", "down_proj"))

STACKED_EXPERTS: tuple[WeightRule, ...] = (
    *EXPERTS[:2],
    Stack("mlp.experts.experts.linear_fc1.weight", "mlp.experts.gate_up_proj"),
    Stack("mlp.experts.experts.linear_fc2.weight", "mlp.experts.down_proj"),
)
"""One tensor for all experts of a layer."""

GATED_SHARED_EXPERT: tuple[ConfigRule, ...] = (
    Same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", at_least=1),
    Constants({"moe_shared_expert_gate": True}),
)

GATED_SHARED_EXPERT_WEIGHTS: tuple[WeightRule, ...] = (
    *EXPERTS,
    *shared_expert_weights("mlp.shared_expert"),
    Rename("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)

GRANITE_EXPERTS: tuple[WeightRule, ...] = (
    Rename("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    Rename("mlp.router.weight", "block_sparse_moe.router.layer.weight"),
    Rename("mlp.experts.experts.linear_fc1.weight", "block_sparse_moe.input_linear.weight"),
    Rename("mlp.experts.experts.linear_fc2.weight", "block_sparse_moe.output_linear.weight"),
)

EXPERT_BIAS = Rename("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", in_fp32=True)

SIGMOID_EXPERT_WEIGHTS: tuple[WeightRule, ...] = (*EXPERTS, EXPERT_BIAS, *shared_expert_weights("mlp.shared_experts"))
