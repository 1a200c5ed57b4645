# SPDX-License-Identifier: Apache-2.0
"""Level B: the numbers do not depend on the layout.

The strategy on every layout of the table (``tests/support/layouts.py``) against the hand-written loop on one rank: same
weights to start with, same global batch of each step, ragged masks. Losses, the gradients of every step (before
clipping, so an error of scale shows) and the weights after the last step are compared in global terms, every replica of
every rank.

The tolerance is 1e-5 of the largest element of each tensor. Measured over the table: gradients 1.9e-6, weights 4e-7,
gradient norms 3e-7, losses 2e-7. Adam's ``eps`` is 1e-4 here, because Adam divides a gradient by
its own size: with 1e-8 a gradient that is a rounding error moves its weight as far as any other.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tests.parity import bare_loop, lightning_loop
from tests.parity.bare_loop import Trace
from tests.parity.global_tensors import assemble, spread
from tests.support.layouts import LAYOUTS, ONE_RANK, Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.tiny import Recipe, microbatches

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("layouts")]  # they share runs

TOLERANCE = 1e-5

MEAN = Recipe(steps=2, global_batch_size=4, eps=1e-4)
TOKENS = replace(MEAN, token_weighted=True)

STAY = (
    *("tp2", "tp2-sp", "pp2-vp2", "pp2-vp2-group4", "cp2", "dp2-do-overlap", "tp2-sp-cp2", "moe-tp2-sp-ep2-etp1"),
    *("moe-cp2-ep2", "moe-dp2-pp2-ep2", "tied-pp2", "pp2-first1", "pp2-last1", "pp2-vp2-splitvp"),
    *("dp2-tp2-sp-pp2-vp2-do-overlap", "dp2-tp2-sp-optim_grads_params"),
)
TOKEN_WEIGHTED_IDS = ("dp2-do", "pp2-vp2", "cp4", "dp2-cp2-do", "tp2-sp-pp2", "moe-dp2-ep2", "moe-cp2-ep2")


@dataclass(frozen=True)
class Reference:
    """The run of one rank, in global terms."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    gradients: Sequence[Mapping[str, torch.Tensor]]
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, trace: Trace) -> "Reference":
        """Return what the trace of one rank says."""
        gradients = [assemble(slices) for slices in trace.gradients]
        return cls(trace.losses, [norm or 0.0 for norm in trace.grad_norms], gradients, assemble(trace.weights))


@functools.cache
def _reference(one_rank: Layout, recipe: Recipe) -> Reference:
    (trace,) = run_ranks(1, bare_loop.train, one_rank, recipe, keep_gradients=True, timeout=120)
    return Reference.of(trace)


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, *STAY))
def test_layout_agrees_with_one_rank(layout: Layout) -> None:
    _check(layout, MEAN)


@pytest.mark.parametrize("layout_id", thorough_but(TOKEN_WEIGHTED_IDS, "pp2-vp2", "dp2-cp2-do", "moe-cp2-ep2"))
def test_layout_agrees_with_one_rank_when_losses_are_weighted_by_tokens(layout_id: str) -> None:
    (layout,) = (layout for layout in LAYOUTS if layout.id == layout_id)
    _check(layout, TOKENS)


def test_the_two_loss_meanings_differ_where_masks_are_ragged() -> None:
    mean, tokens = _reference(Layout(), MEAN), _reference(Layout(), TOKENS)
    key = "output_layer.weight"
    difference = (mean.gradients[0][key] - tokens.gradients[0][key]).abs().max()
    assert difference > 0.05 * mean.gradients[0][key].abs().max()


@pytest.mark.parametrize("layout", ONE_RANK, ids=lambda layout: layout.id)
def test_every_tensor_of_the_reference_is_trained(layout: Layout) -> None:
    reference = _reference(layout, MEAN)
    (before,) = run_ranks(1, bare_loop.train, layout, replace(MEAN, steps=0))
    start = assemble(before.weights)
    assert set(start) == set(reference.weights) == set(reference.gradients[0])
    for key, weight in reference.weights.items():
        # layers and experts share a tensor: each of them must have moved
        shared_axes = key.startswith("decoder.layers.") + (".experts." in key)
        moved = (weight - start[key]).abs().flatten(shared_axes).amax(-1)
        assert moved.min() > 10 * TOLERANCE * weight.abs().max(), key


def test_the_table_is_as_wide_as_promised() -> None:
    assert len({layout.id for layout in LAYOUTS}) == len(LAYOUTS) >= 24
    assert max(layout.world_size for layout in LAYOUTS) == 8
    assert {layout.one_rank for layout in LAYOUTS} == set(ONE_RANK)


def _check(layout: Layout, recipe: Recipe) -> None:
    recipe = recipe.shallow(layout)
    reference = _reference(layout.one_rank, recipe)
    traces = run_ranks(layout.world_size, lightning_loop.train, layout, recipe, keep_gradients=True, timeout=180)
    assert {key: v for key, v in distances(traces, reference, layout, recipe).items() if not v <= TOLERANCE} == {}


def distances(traces: Sequence[Trace], reference: Reference, layout: Layout, recipe: Recipe) -> dict[str, float]:
    """Return how far each tensor, the gradient norm and the loss of all ranks are from those of one rank; printed."""
    worst: dict[str, float] = {}
    for step in range(recipe.steps):
        slices = [part for trace in traces for part in trace.gradients[step]]
        worst |= {f"gradient {key}, step {step}": v for key, v in spread(slices, reference.gradients[step]).items()}
    slices = [part for trace in traces for part in trace.weights]
    worst |= {f"weight {key}": value for key, value in spread(slices, reference.weights).items()}
    worst["norm"] = max(_relative(trace.grad_norms, reference.grad_norms) for trace in traces)
    worst["loss"] = _relative(_losses(traces, layout, recipe), reference.losses)
    for what in ("gradient", "weight", "norm", "loss"):
        print(f"{layout.id}: {what} {max(value for key, value in worst.items() if key.startswith(what)):.1e}")
    return worst


def _relative(values: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(value - wanted) / abs(wanted) for value, wanted in zip(values, reference, strict=True))


def _losses(traces: Sequence[Trace], layout: Layout, recipe: Recipe) -> list[float]:
    """Return the loss of each step over all model copies; a rank knows that of its own."""
    losses = []
    for step in range(recipe.steps):
        weights = [_num_tokens(layout, recipe, trace.dp_rank, step) if recipe.token_weighted else 1 for trace in traces]
        total = sum(trace.losses[step] * weight for trace, weight in zip(traces, weights, strict=True))
        losses.append(total / sum(weights))
    return losses


def _num_tokens(layout: Layout, recipe: Recipe, dp_rank: int, step: int) -> float:
    return sum(batch["loss_mask"].sum().item() for batch in microbatches(recipe, layout, dp_rank, step))
