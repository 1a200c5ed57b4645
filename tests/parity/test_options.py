# SPDX-License-Identifier: Apache-2.0
"""Levels A and B for the model's options: routers and dispatchers of experts, attention, positions, norms, MTP.

``test_layouts.py`` and ``test_loop.py`` cut one model in every way; here a few cuts meet many models. A row of the
table is an option, as fields of ``TransformerConfig`` or arguments of ``GPTModel``, and the layouts it is trained on.
Options that do not touch each other share a row, and its name joins theirs with " + ". On each layout the losses,
gradients and weights agree with one rank within the tolerance of ``test_layouts.py``; measured over the table: 2.0e-6.
On the first the strategy also equals the bare Megatron loop bit for bit. The layouts under ``more`` are
left to ``make test-thorough``.

An option whose arithmetic is about the tokens of one rank, as a capacity is, has layouts that leave sequences whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import TransformerConfig

from tests.parity import bare_loop, lightning_loop
from tests.parity.bare_loop import Trace
from tests.parity.global_tensors import assemble, spread
from tests.parity.test_loop import compare as differences
from tests.support.layouts import LAYOUTS, Layout
from tests.support.ranks import run_ranks
from tests.support.tiny import CHUNKS, DELTA_NET, HYBRID, KIMI_DELTA, Recipe

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5

MEAN = Recipe(steps=2, global_batch_size=2, eps=1e-4, mask="thinned", aux_loss=0.02)
TOKENS = replace(MEAN, token_weighted=True)

TP2 = Layout(tp=2, sp=True)
PP2 = Layout(pp=2)
VP2 = Layout(pp=2, vp=2)
CP2 = Layout(cp=2)
DO2 = Layout(dp=2, distributed_optimizer=True)
TIED_PP2 = Layout(tied=True, pp=2)
EP2 = Layout(moe=True, dp=2, ep=2)
MOE_TP2 = Layout(moe=True, tp=2, sp=True)
MOE_PP2 = Layout(moe=True, pp=2)
MOE_CP2 = Layout(moe=True, cp=2, ep=2)
MOE_SPREAD = Layout(moe=True, tp=2, sp=True, ep=2, etp=1)


@dataclass(frozen=True)
class Option:
    """A model, and where it is trained.

    Args:
        name: A short name.
        fields: Fields of the ``TransformerConfig``; a tuple stands for a list.
        layouts: Where; the bare loop runs on the first.
        more: Where in ``make test-thorough`` too.
        model: Arguments of ``GPTModel``.
        recipe: How losses are weighted.
        tolerance: How far a layout may be from one rank.
        num_layers: Layers of the model; 4 where the option is about which layers, or chunks interleave.
    """

    name: str
    fields: Mapping[str, Any]
    layouts: tuple[Layout, ...]
    more: tuple[Layout, ...] = ()
    model: Mapping[str, Any] | None = None
    recipe: Recipe = MEAN
    tolerance: float = TOLERANCE
    num_layers: int = 2

    @property
    def full_recipe(self) -> Recipe:
        """The recipe of this model."""
        fields = {"num_layers": self.num_layers} | dict(self.fields)
        return replace(self.recipe, options=tuple(fields.items()), model_options=tuple((self.model or {}).items()))


SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
NO_BALANCE = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
LATENT = {"multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4} | {
    "v_head_dim": 8,
    "kv_channels": None,
    "num_query_groups": None,
}

INDEXER = (("indexer_freq", (1, 0)), ("index_topk", 64), ("index_n_heads", 2), ("index_head_dim", 8))

NEW: tuple[Option, ...] = ()
if "mtp_detach_heads" in TransformerConfig.__dataclass_fields__:  # megatron-core 0.19
    HEADS = {"mtp_num_layers": 1, "mtp_detach_heads": True}
    NEW = (Option("heads-that-are-clipped-by-themselves", HEADS, (PP2, CP2, DO2), recipe=TOKENS),)
OPTIONS = (
    # experts: who goes where
    Option("sigmoid-with-bias", SIGMOID | NO_BALANCE, (EP2,), (MOE_TP2, Layout(moe=True, pp=2, cp=2, ep=2))),
    Option("aux-and-z-loss", {"moe_z_loss_coeff": 0.02}, (MOE_TP2,), (EP2,)),
    Option("aux-and-z-loss-by-tokens", {"moe_z_loss_coeff": 0.02}, (MOE_CP2,), (MOE_TP2, MOE_PP2), recipe=TOKENS),
    Option(
        "sequence-loss-by-tokens",
        {"moe_router_load_balancing_type": "seq_aux_loss"},
        (MOE_CP2,),
        (MOE_TP2,),
        recipe=TOKENS,
    ),
    Option(
        "three-losses",
        {
            "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
            "moe_aux_loss_coeff": (0.02, 0.02, 0.02),
        },
        (MOE_TP2,),
        (MOE_CP2, MOE_PP2),
    ),
    Option(
        "softmax-before-top-k + groups + router-in-fp64 + narrow-experts",
        {
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_dtype": "fp64",
            "moe_latent_size": 20,
        },
        (MOE_TP2,),
        (EP2, MOE_PP2, MOE_CP2),
    ),
    Option("sinkhorn", {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}, (EP2,), (MOE_PP2,)),
    Option("capacity", {"moe_expert_capacity_factor": 1.0}, (EP2,), (MOE_PP2,)),
    Option(
        "capacity-padded-by-position",
        {
            "moe_expert_capacity_factor": 1.25,
            "moe_pad_expert_input_to_capacity": True,
            "moe_token_drop_policy": "position",
        },
        (EP2,),
        (MOE_PP2,),
    ),
    # experts: what they are
    Option(
        "shared-expert + gate-of-the-shared-expert + allgather",
        {
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_gate": True,
            "moe_token_dispatcher_type": "allgather",
        },
        (MOE_TP2,),
        (EP2, MOE_CP2),
    ),
    Option(
        "shared-expert-overlapped",
        {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
        (EP2,),
        (MOE_TP2,),
    ),
    Option("experts-with-biases", {"add_bias_linear": True}, (EP2, MOE_SPREAD)),
    Option("narrow-experts-with-biases", {"moe_latent_size": 20, "add_bias_linear": True}, (EP2, MOE_SPREAD)),
    Option("experts-every-second-layer", {"moe_layer_freq": 2}, (MOE_PP2,), (EP2,), num_layers=4),
    Option(
        "experts-on-the-last-stage-only",
        {"moe_layer_freq": (0, 0, 1, 1), "moe_z_loss_coeff": 0.02},
        (MOE_PP2,),
        (Layout(moe=True, dp=2, pp=2, ep=2, distributed_optimizer=True),),
        num_layers=4,
    ),
    Option("experts-in-three-layers", {"moe_layer_freq": (0, 1, 1, 1)}, (Layout(moe=True, pp=2, vp=2),), num_layers=4),
    Option(
        "one-expert-weighed-first",
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        (EP2,),
        (MOE_TP2,),
    ),
    # attention
    Option(
        "norms-of-queries-and-keys + softmax-scale + gate-behind-attention + bias-of-queries-keys-values",
        {"qk_layernorm": True, "softmax_scale": 0.2, "attention_output_gate": True, "add_qkv_bias": True},
        (TP2,),
        (CP2, Layout(tp=2), PP2),
    ),
    Option(
        "window-in-every-second-layer + llama-3-scaling",
        {"window_size": (8, 0), "window_attn_skip_freq": 2},
        (CP2,),
        (TP2, VP2),
        model={"rope_scaling": True, "rope_scaling_factor": 4.0, "rotary_base": 500},
        num_layers=4,
    ),
    Option(
        "windows-by-layer + no-positions",
        {"window_size": (4, 0), "window_attn_skip_freq": (1, 0, 0, 1)},
        (TIED_PP2,),
        model={"position_embedding_type": "none"},
        num_layers=4,
    ),
    Option("one-key-head", {"num_query_groups": 1}, (TP2,), (CP2, PP2)),
    Option(
        "gated-delta-net", {"delta_net": DELTA_NET}, (Layout(tp=2, sp=True, cp=2),), (Layout(tp=2), CP2, PP2, MOE_PP2)
    ),
    Option("kimi-delta", {"kimi_delta": KIMI_DELTA}, (Layout(tp=2, sp=True, cp=2),), (Layout(tp=2), CP2, PP2, MOE_PP2)),
    Option("mamba", dict(HYBRID), (Layout(tp=2, sp=True, cp=2),), (Layout(tp=2), Layout(tp=4, sp=True), CP2, PP2)),
    Option("layers-of-one-part", {**dict(HYBRID), "layer_pattern": "M*-M"}, (PP2,), (TP2, VP2), num_layers=4),
    Option("latent-attention", LATENT | {"q_lora_rank": 16}, (TP2,)),
    Option("indexers", LATENT | {"q_lora_rank": 16, "indexer": INDEXER}, (PP2,), (TP2, CP2)),
    Option("latent-attention-with-rope", LATENT | {"q_lora_rank": None, "rope_type": "rope"}, (CP2,), (TP2,)),
    Option(
        "latent-attention + norms-of-its-queries-and-keys",
        LATENT | {"q_lora_rank": 16, "qk_layernorm": True, "mscale": 0.7},
        (TP2,),
        (PP2, CP2, DO2),
    ),
    # positions
    Option(
        "interleaved + half-of-the-head + interpolated-positions",
        {"rotary_interleaved": True},
        (CP2,),
        model={"rotary_percent": 0.5, "seq_len_interpolation_factor": 4.0},
    ),
    Option(
        "yarn + squared-relu",
        {"gated_linear_unit": False, "activation_func": squared_relu, "add_qkv_bias": True},
        (CP2,),
        (TP2,),
        model={
            "position_embedding_type": "yarn",
            "yarn": (("rotary_scaling_factor", 4.0), ("original_max_position_embeddings", 16), ("beta_fast", 4.0)),
        },
    ),
    Option(
        "attention-in-chunks + norms-without-weights + growing-queries",
        {"no_rope_freq": 2, **dict(CHUNKS)},
        (CP2,),
        (VP2, TP2),
        num_layers=4,
    ),
    Option("no-rotation-in-every-second-layer", {"no_rope_freq": 2}, (VP2,), (CP2,), num_layers=4),
    Option("learned-positions", {}, (CP2, TP2), (PP2,), model={"position_embedding_type": "learned_absolute"}),
    # layers
    Option(
        "gelu-with-biases + l2-norms-of-queries-and-keys",
        {
            "qk_l2_norm": True,
            "gated_linear_unit": False,
            "activation_func": torch.nn.functional.gelu,
            "add_bias_linear": True,
            "normalization": "LayerNorm",
        },
        (TP2,),
        (Layout(tp=2, pp=2, sp=True),),
    ),
    Option(
        "norms-around-zero + clamped-units + one-key-head-with-gates",
        {
            "num_query_groups": 1,
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "normalization": "LayerNorm",
            "activation_func": quick_gelu,  # megatron-core 0.20 clamps a gated SiLU only in experts
            "activation_func_clamp_value": 0.5,
            "glu_linear_offset": 1.0,
        },
        (TP2,),
        (PP2,),
    ),
    # Megatron rounds the gradients of this loss to bf16, also in fp32 (calculate_gradients, fused_cross_entropy.py).
    # One that lies between two of its numbers goes the other way on another layout, so layouts agree to a unit of bf16
    # at best; measured on two CPUs: 1.7e-5 and below 2.2e-6.
    Option("fused-cross-entropy", {"cross_entropy_loss_fusion": True}, (TP2,), tolerance=2**-8),
    # more tokens at once
    Option(
        "two-tokens-ahead",
        {"mtp_num_layers": 1},
        (PP2, CP2),
        (DO2, Layout(tied=True, tp=2, sp=True)),
        recipe=TOKENS,
    ),
    Option("two-tokens-ahead-by-means", {"mtp_num_layers": 1}, (PP2,)),
    Option(
        "three-tokens-ahead", {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, (VP2,), recipe=TOKENS, num_layers=4
    ),
    Option(
        "two-tokens-ahead-with-experts",
        {"mtp_num_layers": 1, "moe_layer_freq": (0, 1, 1, 1)},
        (MOE_PP2,),
        (EP2,),
        recipe=TOKENS,
        num_layers=4,
    ),
    Option(
        "two-tokens-ahead-in-a-layout",
        {"mtp_num_layers": 1},
        (Layout(pp=2, split="Et*3|tmL", label="splitm"),),
        recipe=TOKENS,
        num_layers=4,
    ),
    *NEW,
)


TWINS = {  # whose parts other options have
    *("aux-and-z-loss", "aux-and-z-loss-by-tokens", "experts-every-second-layer", "experts-in-three-layers"),
    *("latent-attention", "one-key-head"),
}


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(option, id=option.name, marks=[pytest.mark.thorough] if option.name in TWINS else [])
        for option in OPTIONS
    ],
)
def test_option_equals_the_bare_loop_and_one_rank(option: Option) -> None:
    _check(option, option.layouts)


@pytest.mark.thorough
@pytest.mark.parametrize("option", [row for row in OPTIONS if row.more], ids=lambda option: option.name)
def test_option_equals_one_rank_on_more_layouts(option: Option) -> None:
    _check(option, option.more)


def test_losses_of_tokens_ahead_weigh_alike_however_rows_are_cut() -> None:
    """Rows with masks of different lengths, one by one and two in a microbatch; measured: 3.3e-7."""
    recipe = replace(TOKENS, mask="ragged", options=(("mtp_num_layers", 2), ("num_layers", 2)))
    runs = [replace(recipe, micro_batch_size=size) for size in (1, 2)]
    ((one, two),) = run_ranks(1, _train_each, Layout(), runs)
    assert _distance([two], one, recipe.steps) <= TOLERANCE


def test_at_least_sixty_combinations_of_layout_and_option_are_trained() -> None:
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    combinations = {
        (n, layout.id)
        for option in OPTIONS
        for n in option.name.split(" + ")
        for layout in option.layouts + option.more
    }
    assert len(combinations) >= 60
    assert len(combinations) + len(LAYOUTS) >= 110


def _check(option: Option, layouts: Sequence[Layout]) -> None:
    """Compare each layout with one rank, and the first layout of the option with the bare loop."""
    recipe = option.full_recipe
    one_rank = list({layout.one_rank: None for layout in layouts})
    (references,) = run_ranks(1, _train_bare, one_rank, recipe, timeout=120)
    unequal: list[str] = []
    worst: dict[str, float] = {}
    for world_size in sorted({layout.world_size for layout in layouts}):
        chosen = [layout for layout in layouts if layout.world_size == world_size]
        ranks = run_ranks(world_size, _train_both, chosen, recipe, option.layouts[0], timeout=60 + 60 * len(chosen))
        for index, layout in enumerate(chosen):
            ours = [rank[index].ours for rank in ranks]
            unequal += [f"{layout.id}: {line}" for rank in ranks for line in rank[index].differences]
            worst[layout.id] = _distance(ours, references[one_rank.index(layout.one_rank)], recipe.steps)
            print(f"{option.name}, {layout.id}: {worst[layout.id]:.1e}")
    assert unequal == []
    assert {layout_id: value for layout_id, value in worst.items() if not value <= option.tolerance} == {}


@dataclass
class Pair:
    """A run through Lightning on one rank, and in what it differs from the bare loop where that ran."""

    ours: Trace
    differences: list[str]


def _train_bare(layouts: Sequence[Layout], recipe: Recipe) -> list[Trace]:
    return [bare_loop.train(layout, recipe, keep_gradients=True) for layout in layouts]


def _train_each(layout: Layout, recipes: Sequence[Recipe]) -> list[Trace]:
    return [lightning_loop.train(layout, recipe, keep_gradients=True) for recipe in recipes]


def _train_both(layouts: Sequence[Layout], recipe: Recipe, compared: Layout) -> list[Pair]:
    pairs = []
    for layout in layouts:
        ours = lightning_loop.train(layout, recipe, keep_gradients=True)
        pairs.append(Pair(ours, differences(bare_loop.train(layout, recipe), ours) if layout == compared else []))
    return pairs


def _distance(traces: Sequence[Trace], reference: Trace, steps: int) -> float:
    """Return how far gradients, weights and gradient norms of all ranks are from those of one, at most."""
    worst = 0.0
    for step in range(steps):
        slices = [part for trace in traces for part in trace.gradients[step]]
        worst = max(worst, *spread(slices, assemble(reference.gradients[step])).values())
    slices = [part for trace in traces for part in trace.weights]
    worst = max(worst, *spread(slices, assemble(reference.weights)).values())
    norms = [zip(trace.grad_norms, reference.grad_norms, strict=True) for trace in traces]
    return max(worst, *(abs(norm - wanted) / wanted for pairs in norms for norm, wanted in pairs))
