# SPDX-License-Identifier: Apache-2.0
"""Packed equals unpacked: rows of several documents train as the documents do one by one, on every layout.

``tests/parity/packed.py`` has the documents and the reference. Losses agree to 1e-6, gradients to the tolerance of
``test_layouts.py``.
"""

import functools
from dataclasses import replace

import pytest
import torch

from tests.parity.bare_loop import Trace
from tests.parity.global_tensors import assemble, spread
from tests.parity.packed import (
    LONGER_ROWS,
    RECIPE,
    ROWS,
    TWO_LAYERS,
    Mean,
    Result,
    Rows,
    analytic_gradient,
    linear_gradients,
    loss_of_copies,
    one_by_one,
    packed_microbatches,
    slices_of,
    token_losses,
    train_one_by_one,
    train_packed,
)
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.tiny import CHUNKS, DELTA_NET, HYBRID, KIMI_DELTA, Batch, Recipe

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("packing")]  # they share runs

TOLERANCE = 1e-5
ALL: tuple[Mean, ...] = ("tokens", "samples", "microbatches")
ONE: tuple[Mean, ...] = ("tokens",)  # where a document begins is the same for each

LAYOUTS = (
    Layout(),
    Layout(tp=2, sp=True),
    Layout(cp=2),
    Layout(cp=4),
    Layout(dp=2, cp=2, distributed_optimizer=True),
    Layout(tp=2, sp=True, cp=2),
    Layout(pp=2),
    Layout(pp=2, vp=2),
    Layout(pp=2, cp=2),
    Layout(moe=True, dp=2, ep=2),
    Layout(moe=True, cp=2, ep=2),
    Layout(moe=True, tp=2, sp=True, pp=2),
)
STAY = ("tp2-sp", "dp2-cp2-do", "pp2-vp2", "moe-cp2-ep2")
WIDE = replace(RECIPE, micro_batch_size=2)


@functools.cache
def _reference(one_rank: Layout, recipe: Recipe, rows: Rows) -> dict[Mean, Result]:
    means = ALL if recipe.options in (TWO_LAYERS, ()) else ONE
    (results,) = run_ranks(1, one_by_one, one_rank, recipe, rows, means, recipe.micro_batch_size, timeout=120)
    return results


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, *STAY))
def test_packed_rows_train_as_their_documents_do_one_by_one(layout: Layout) -> None:
    _compare(layout, RECIPE, ROWS, ALL)


@pytest.mark.parametrize("layout", thorough_but([Layout(), Layout(tp=2, sp=True, cp=2), Layout(pp=2)], "tp2-sp-cp2"))
def test_memories_of_gated_delta_nets_begin_anew_with_each_document(layout: Layout) -> None:
    _compare(layout, replace(RECIPE, options=(*TWO_LAYERS, ("delta_net", DELTA_NET))), ROWS, ONE)


@pytest.mark.parametrize("layout", thorough_but([Layout(), Layout(tp=2, sp=True, cp=2), Layout(pp=2)], "tp2-sp-cp2"))
def test_memories_of_kimi_delta_attention_begin_anew_with_each_document(layout: Layout) -> None:
    _compare(layout, replace(RECIPE, options=(*TWO_LAYERS, ("kimi_delta", KIMI_DELTA))), ROWS, ONE)


@pytest.mark.parametrize("layout", thorough_but([Layout(), Layout(tp=2, sp=True, cp=2), Layout(pp=2)], "tp2-sp-cp2"))
def test_memories_of_mamba_layers_begin_anew_with_each_document(layout: Layout) -> None:
    _compare(layout, replace(RECIPE, options=(*TWO_LAYERS, *HYBRID)), ROWS, ONE)


@pytest.mark.parametrize("layout", thorough_but([Layout(), Layout(tp=2, sp=True, cp=2), Layout(pp=2)], "tp2-sp-cp2"))
def test_chunks_and_positions_begin_anew_with_each_document(layout: Layout) -> None:
    _compare(layout, replace(RECIPE, options=(*TWO_LAYERS, ("no_rope_freq", 2), *CHUNKS)), ROWS, ONE)


@pytest.mark.parametrize("layout", thorough_but([Layout(cp=2), Layout(pp=2)], "cp2"))
def test_a_microbatch_may_have_several_packed_rows(layout: Layout) -> None:
    _compare(layout, WIDE, ROWS, ALL)


@pytest.mark.parametrize(
    "layout", thorough_but([Layout(pp=2), Layout(pp=2, vp=2), Layout(pp=2, cp=2)], "pp2-vp2", "pp2-cp2")
)
def test_rows_of_a_step_may_differ_in_length_in_a_pipeline(layout: Layout) -> None:
    _compare(layout, RECIPE, LONGER_ROWS, ONE)


def test_the_meanings_of_the_loss_differ_on_these_documents() -> None:
    results = _reference(Layout(), RECIPE, ROWS)
    key = "output_layer.weight"
    for one, other in (("tokens", "samples"), ("samples", "microbatches"), ("tokens", "microbatches")):
        difference = (results[one].gradients[key] - results[other].gradients[key]).abs().max()
        assert difference > 0.05 * results[one].gradients[key].abs().max()


@pytest.mark.parametrize("layout", [Layout(), Layout(moe=True)], ids=lambda layout: layout.id)
def test_what_stands_in_padding_has_no_say(layout: Layout) -> None:
    recipe = replace(RECIPE, aux_loss=0.02) if layout.moe else RECIPE
    one, other = (run_ranks(1, train_packed, layout, recipe, ROWS, ONE, pad, timeout=120) for pad in (0, 77))
    assert other[0]["tokens"].losses == pytest.approx(one[0]["tokens"].losses, rel=1e-6)
    worst = spread(slices_of([other[0]["tokens"]]), assemble(slices_of([one[0]["tokens"]])))
    assert {key: value for key, value in worst.items() if value > 1e-6} == {}


@pytest.mark.parametrize(
    "layout",
    thorough_but(
        (
            Layout(moe=True, dp=2, ep=2),
            Layout(moe=True, cp=2, ep=2),
            Layout(moe=True, tp=2, sp=True),
            Layout(moe=True, tp=2, sp=True, pp=2),
        ),
        *("moe-cp2-ep2", "moe-tp2-sp"),
    ),
)
def test_losses_of_routers_weigh_the_same_on_packed_rows_of_every_layout(layout: Layout) -> None:
    z_loss = (("moe_z_loss_coeff", 0.01),)
    recipe = replace(RECIPE, aux_loss=0.05, options=TWO_LAYERS + z_loss)
    means: tuple[Mean, ...] = ("tokens", "microbatches")
    (whole,) = run_ranks(1, train_packed, layout.one_rank, recipe, ROWS, means, timeout=120)
    traces = run_ranks(layout.world_size, train_packed, layout, recipe, ROWS, means, timeout=120)
    plain = _reference(layout.one_rank, RECIPE, ROWS)
    for mean in means:
        wanted = assemble(slices_of([whole[mean]]))
        router = "decoder.layers.mlp.router.weight"
        assert (wanted[router] - plain[mean].gradients[router]).abs().max() > 0.01 * wanted[router].abs().max()
        worst = spread(slices_of([trace[mean] for trace in traces]), wanted)
        assert {key: value for key, value in worst.items() if value > TOLERANCE} == {}, mean


@pytest.mark.parametrize(
    "layout", thorough_but([Layout(), Layout(cp=2), Layout(cp=4), Layout(dp=2, cp=2)], "one", "cp4")
)
def test_the_gradient_of_packed_rows_has_the_scale_of_the_formula(layout: Layout) -> None:
    for gradients in run_ranks(layout.world_size, linear_gradients, layout, ALL, timeout=120):
        for mean in ALL:
            wanted = analytic_gradient(mean)
            assert (gradients[mean] @ wanted / (wanted @ wanted)).item() == pytest.approx(1.0, abs=1e-6), mean
            torch.testing.assert_close(gradients[mean], wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("layout", thorough_but([Layout(), Layout(cp=2), Layout(tp=2, sp=True)], "one", "cp2"))
def test_a_document_that_changes_changes_not_one_bit_of_its_neighbours(layout: Layout) -> None:
    rows = ROWS[:1]
    before = run_ranks(layout.world_size, token_losses, layout, rows, None, timeout=120)
    for changed in range(len(rows[0][1])):
        after = run_ranks(layout.world_size, token_losses, layout, rows, changed, timeout=120)
        for old, new in zip(before, after, strict=True):
            [(losses, samples)], [(now, _)] = old, new
            assert torch.equal(losses[samples != changed], now[samples != changed])
            assert (losses[samples == changed] != now[samples == changed]).any()


MTP = replace(RECIPE, options=(*TWO_LAYERS, ("mtp_num_layers", 1), ("mtp_loss_scaling_factor", 0.3)))
MTP_LAYOUTS = (Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2))


@pytest.mark.parametrize("layout", thorough_but(MTP_LAYOUTS, *(row.id for row in MTP_LAYOUTS if row.pp == 1)))
def test_multi_token_prediction_guesses_within_documents_alone_on_every_layout(layout: Layout) -> None:
    (dense,) = run_ranks(1, train_one_by_one, layout.one_rank, MTP, ROWS, timeout=120)
    (whole,) = run_ranks(1, train_packed, layout.one_rank, MTP, ROWS, ("tokens",), timeout=120)
    traces = run_ranks(layout.world_size, train_packed, layout, MTP, ROWS, ("tokens",), timeout=120)
    wanted = assemble(slices_of([whole["tokens"]]))
    worst = spread(slices_of([trace["tokens"] for trace in traces]), wanted)
    assert {key: value for key, value in worst.items() if value > TOLERANCE} == {}
    worst = spread(slices_of([whole["tokens"]]), assemble(slices_of([dense])))
    assert {key: value for key, value in worst.items() if value > TOLERANCE} == {}


def _compare(layout: Layout, recipe: Recipe, rows: Rows, means: tuple[Mean, ...]) -> None:
    if layout.vp:
        recipe = replace(recipe, options=())  # four layers, one for each chunk
    reference = _reference(layout.one_rank, recipe, rows)
    ranks = run_ranks(layout.world_size, train_packed, layout, recipe, rows, means, timeout=180)
    for mean in means:
        batches = packed_microbatches(rows, recipe.micro_batch_size)
        assert_trained_alike([rank[mean] for rank in ranks], reference[mean], layout, batches, mean)


def assert_trained_alike(traces: list[Trace], wanted: Result, layout: Layout, batches: list[Batch], mean: Mean) -> None:
    """Compare loss and gradients of all ranks with those of documents that were trained one by one."""
    loss = loss_of_copies(traces, layout, batches, mean)
    assert loss == pytest.approx(wanted.loss, rel=1e-6), mean
    slices = slices_of(traces)
    worst = spread(slices, wanted.gradients)
    print(f"{layout.id}, {mean}: {max(worst.values()):.1e}")
    assert {key: value for key, value in worst.items() if not value <= TOLERANCE} == {}, mean
    whole = assemble(slices)["output_layer.weight"].double().flatten()
    expected = wanted.gradients["output_layer.weight"].double().flatten()
    assert torch.dot(whole, expected) / torch.dot(expected, expected) == pytest.approx(1.0, abs=1e-6), mean
