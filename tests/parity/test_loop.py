# SPDX-License-Identifier: Apache-2.0
"""Level A: the strategy adds nothing to the numbers.

A user's module under ``MCoreStrategy`` and a real ``Trainer`` against the hand-written Megatron loop on the same
layout, in the same processes: the loss and the gradient norm of every step, and every weight afterwards, bit for bit.
"""

from dataclasses import replace

import pytest
import torch

from tests.parity import bare_loop, lightning_loop
from tests.parity.bare_loop import Trace
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.tiny import Precision, Recipe

pytestmark = pytest.mark.distributed

LAYOUTS = (
    Layout(),
    Layout(dp=2),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(pp=2, vp=2),
    Layout(pp=2, vp=2, group=4),
    Layout(cp=2),
    Layout(dp=2, distributed_optimizer=True, overlap=True),
    Layout(tied=True, pp=2),
    Layout(tp=2, pp=2, sp=True),
    Layout(dp=2, tp=2, sp=True, distributed_optimizer=True),
    Layout(dp=2, sharding="optim_grads_params"),
    Layout(dp=2, tp=2, sp=True, sharding="optim_grads_params"),
    Layout(moe=True),
    Layout(moe=True, dp=2, ep=2),
    Layout(moe=True, dp=2, pp=2, ep=2, distributed_optimizer=True, overlap=True),
)
WEIGHTINGS: dict[Precision, bool] = {"32-true": False, "bf16-mixed": True}  # whether losses are weighted by tokens
BOTH_IN_FP32 = ("dp2", "tp2-sp-pp2", "dp2-do-overlap")
# test_options.py has "cp2" and "tied-pp2" too
STAY = ("one", "tp2-sp", "pp2-vp2", "dp2-do-overlap", "moe-dp2-pp2-ep2-do-overlap", "dp2-optim_grads_params")


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, *STAY))
def test_strategy_equals_the_bare_loop_bit_for_bit(layout: Layout) -> None:
    cases = [*WEIGHTINGS.items(), *([("32-true", True)] if layout.id in BOTH_IN_FP32 else [])]
    rows = 8 if layout.pp > 1 else 4 * layout.dp  # four microbatches of two rows in a pipeline, else two on each copy
    base = Recipe(mask="thinned", steps=3, global_batch_size=rows, micro_batch_size=2, aux_loss=0.01).shallow(layout)
    recipes = [replace(base, precision=precision, token_weighted=tokens) for precision, tokens in cases]
    for differences in run_ranks(layout.world_size, _differences, layout, recipes, timeout=180):
        assert differences == []


@pytest.mark.parametrize(
    "layout", thorough_but([Layout(dp=2, distributed_optimizer=True), Layout(tp=2, sp=True)], "dp2-do")
)
def test_strategy_equals_the_bare_loop_with_gradients_in_bf16(layout: Layout) -> None:
    rows = 4 * layout.dp
    recipe = Recipe(precision="bf16-true", mask="thinned", steps=3, global_batch_size=rows, micro_batch_size=2)
    recipe = recipe.shallow(layout)
    for differences in run_ranks(2, _differences, layout, [recipe], timeout=120):
        assert differences == []


def test_rows_of_a_large_batch_are_microbatches_too() -> None:
    layout, recipe = Layout(pp=2), Recipe(mask="thinned", micro_batch_size=2)
    for differences in run_ranks(2, _differences, layout, [recipe], True, timeout=120):
        assert differences == []


def _differences(layout: Layout, recipes: list[Recipe], split_rows: bool = False) -> list[str]:
    """Return what is not equal on this rank; run on every rank."""
    differences = []
    for recipe in recipes:
        bare = bare_loop.train(layout, recipe)
        ours = lightning_loop.train(layout, recipe, split_rows=split_rows)
        _check_it_trains(bare, recipe)
        weighting = "tokens" if recipe.token_weighted else "mean"
        differences += [f"{recipe.precision}, {weighting}: {line}" for line in compare(bare, ours)]
    return differences


def _check_it_trains(trace: Trace, recipe: Recipe) -> None:
    assert recipe.steps >= 3
    assert len(set(trace.losses)) == len(set(trace.grad_norms)) == recipe.steps
    assert max(trace.grad_norms) > recipe.clip, "clipping is not exercised"


def compare(bare: Trace, ours: Trace) -> list[str]:
    """Return what is not equal between two runs on the same rank."""
    lines = []
    if ours.losses != bare.losses:
        lines.append(f"losses {ours.losses}, the bare loop has {bare.losses}")
    if ours.grad_norms != bare.grad_norms:
        lines.append(f"grad norms {ours.grad_norms}, the bare loop has {bare.grad_norms}")
    assert len(ours.weights) == len(bare.weights)
    for mine, its in zip(ours.weights, bare.weights, strict=True):
        assert (mine.key, mine.index) == (its.key, its.index)
        if not torch.equal(mine.data, its.data):
            lines.append(f"weights {mine.key} differ by {(mine.data - its.data).abs().max().item():.1e}")
    return lines
