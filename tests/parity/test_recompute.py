# SPDX-License-Identifier: Apache-2.0
"""Recomputing activations in backward changes memory and time, and not one bit of the numbers, also with dropout."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.parity import lightning_loop
from tests.parity.bare_loop import Trace
from tests.parity.test_loop import compare
from tests.parity.test_options import LATENT
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.tiny import CHUNKS, DELTA_NET, HYBRID, KIMI_DELTA, Recipe

pytestmark = pytest.mark.distributed

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}
SHARED = {"moe_shared_expert_intermediate_size": 32}


@dataclass(frozen=True)
class Case:
    """A model on a layout, and ways to recompute it."""

    layout: Layout
    ways: tuple[dict[str, Any], ...]
    fields: dict[str, Any]


CASES = (
    Case(Layout(), (UNIFORM, {**UNIFORM, "recompute_num_layers": 2}, BLOCK, PARTS), DROPOUT),
    Case(Layout(), (UNIFORM, {**PARTS, "recompute_modules": ("mla_up_proj",)}), {**LATENT, "q_lora_rank": 16}),
    Case(Layout(tp=2, sp=True), (UNIFORM, PARTS), DROPOUT),
    Case(Layout(tp=2), ({**UNIFORM, "distribute_saved_activations": True}, PARTS), DROPOUT),
    Case(Layout(pp=2, vp=2), (UNIFORM, BLOCK), DROPOUT),
    Case(
        Layout(moe=True, dp=2, ep=2),
        (UNIFORM, {**PARTS, "recompute_modules": ("moe",)}, {**PARTS, "recompute_modules": ("shared_experts",)}),
        {**DROPOUT, **SHARED, "moe_z_loss_coeff": 0.02},
    ),
    Case(Layout(pp=2), (UNIFORM,), {"mtp_num_layers": 1}),
    Case(Layout(cp=2), (UNIFORM, PARTS), {"num_layers": 2, "delta_net": DELTA_NET}),
    Case(Layout(tp=2, sp=True), (UNIFORM, PARTS), {"num_layers": 2, "kimi_delta": KIMI_DELTA}),
    Case(Layout(cp=2), (UNIFORM, PARTS), {"num_layers": 2, **dict(HYBRID)}),
    Case(Layout(cp=2), (UNIFORM, PARTS), {"num_layers": 2, "no_rope_freq": 2, **dict(CHUNKS)}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout.id}-{len(case.ways)}-{len(case.fields)}")
def test_recomputing_changes_nothing(case: Case) -> None:
    rows = 2 * case.layout.dp  # two microbatches for each copy: gradients add up, and chunks of a stage take turns
    recipe = Recipe(steps=2, global_batch_size=rows, aux_loss=0.02, token_weighted="mtp_num_layers" in case.fields)
    for rank in run_ranks(case.layout.world_size, _differences, case, recipe, timeout=60 + 30 * len(case.ways)):
        assert rank == []


def test_dropout_is_drawn_at_all() -> None:
    recipe = Recipe(steps=1, global_batch_size=4)
    with_dropout = replace(recipe, options=tuple(DROPOUT.items()))
    (losses,) = run_ranks(1, _losses, [recipe, with_dropout, with_dropout], timeout=120)
    assert losses[0] != losses[1] == losses[2]


def _losses(recipes: list[Recipe]) -> list[list[float]]:
    return [_train(Layout(), recipe, {}).losses for recipe in recipes]


def _train(layout: Layout, recipe: Recipe, fields: dict[str, Any]) -> Trace:
    torch.manual_seed(3)
    return lightning_loop.train(layout, replace(recipe, options=(*recipe.options, *fields.items())))


def _differences(case: Case, recipe: Recipe) -> list[str]:
    plain = _train(case.layout, recipe, case.fields)
    assert len(set(plain.losses)) == recipe.steps
    lines = []
    for way in case.ways:
        again = _train(case.layout, recipe, {**case.fields, **way})
        lines += [f"{way}: {line}" for line in compare(plain, again)]
    return lines
