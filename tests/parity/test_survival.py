# SPDX-License-Identifier: Apache-2.0
"""What must not be lost between Lightning and Megatron: gradients, the next fit, and the news of a death."""

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from tests.parity import bare_loop, lightning_loop, linear
from tests.parity.global_tensors import Slice, assemble, spread, weight_slices
from tests.parity.lightning_loop import TinyGPT, make_trainer
from tests.support import hygiene
from tests.support.layouts import Layout
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.thorough import thorough_but
from tests.support.tiny import Batch, Recipe

pytestmark = pytest.mark.distributed

EPOCHS = 3
TOLERANCE = 1e-5  # of the largest element; measured 1.5e-6
RECIPE = Recipe(eps=1e-4, steps=2, global_batch_size=4)


# ---- gradients survive Lightning's zero_grad, which it calls between training_step and backward


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_pipeline_module_trains_as_plain_torch_does(accumulate: int, use_distributed_optimizer: bool) -> None:
    wanted = _train_by_hand(accumulate)
    (weight,) = run_ranks(1, _train_linear, accumulate, use_distributed_optimizer)
    assert (wanted - torch.tensor(linear.START)).abs().max() > 0.2
    torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_plain_module_trains_as_plain_torch_does(use_distributed_optimizer: bool) -> None:
    wanted = _train_by_hand(accumulate=4)
    for weight in run_ranks(2, _train_plain, use_distributed_optimizer):
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)


def _train_by_hand(accumulate: int) -> Tensor:
    """Return the weight after a loop in plain torch over the microbatches of all ranks."""
    weight = nn.Parameter(torch.tensor(linear.START))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
    for index, batch in enumerate(linear.microbatches("masked mean") * EPOCHS, start=1):
        (_masked_mean((batch["x"] @ weight - batch["y"]) ** 2 / 2, batch["loss_mask"]) / accumulate).backward()
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weight.detach()


def _masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def _train_linear(accumulate: int, use_distributed_optimizer: bool) -> Tensor:
    module = linear.LinearModule("masked mean", EPOCHS)
    strategy = MCoreStrategy(use_distributed_optimizer=use_distributed_optimizer)
    make_trainer(1, strategy, accumulate).fit(module)
    return module.weight.clone()


class PlainModule(pl.LightningModule):
    """A LightningModule that knows nothing of Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(linear.START))

    def train_dataloader(self) -> DataLoader[Batch]:
        batches = linear.microbatches("masked mean")[self.global_rank :: self.trainer.world_size]
        return DataLoader(batches * EPOCHS, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return _masked_mean((batch["x"] @ self.weight - batch["y"]) ** 2 / 2, batch["loss_mask"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)


def _train_plain(use_distributed_optimizer: bool) -> Tensor:
    module = PlainModule()
    make_trainer(2, MCoreStrategy(use_distributed_optimizer=use_distributed_optimizer), accumulate=2).fit(module)
    return module.weight.detach().clone()


# ---- one fit after another


def test_fits_of_other_layouts_follow_in_one_process() -> None:
    layouts = [
        Layout(tp=2, sp=True),
        Layout(pp=2, vp=2),
        Layout(dp=2, distributed_optimizer=True, overlap=True),
        Layout(moe=True, dp=2, ep=2),
        Layout(cp=2),
        Layout(tp=2, sp=True),
    ]
    results = run_ranks(2, _fit_one_after_another, layouts, RECIPE, timeout=180)
    for losses, left_changed in results:
        assert left_changed == []
        assert losses[0] == losses[-1], "the first and the last fit are of one layout"
    for index, layout in enumerate(layouts[:-1]):
        fresh = run_ranks(2, bare_loop.train, layout, RECIPE, timeout=120)
        assert [losses[index] for losses, _ in results] == [trace.losses for trace in fresh], layout.id


def _fit_one_after_another(layouts: Sequence[Layout], recipe: Recipe) -> tuple[list[list[float]], list[str]]:
    before = hygiene.snapshot()
    losses = [lightning_loop.train(layout, recipe).losses for layout in layouts]
    return losses, _left_changed(before)


def _left_changed(before: dict[str, Any]) -> list[str]:
    """Return what torch and Megatron hold no more as before.

    Megatron compiles a function of its router, and at the first call of a compiled function torch tags its modules.
    """
    return sorted({*hygiene.changes(before, hygiene.snapshot())} - {"Module.__init__", "Module.__setstate__"})


@pytest.mark.parametrize("other", ["ddp", pytest.param("auto", marks=pytest.mark.thorough)])
def test_fits_of_other_strategies_follow_in_one_process(other: str) -> None:
    world_size = 2 if other == "ddp" else 1
    split = Layout(tp=2, sp=True) if other == "ddp" else Layout()
    whole = Layout(dp=world_size)
    jobs = [(split, None), (whole, other), (split, None), (whole, other)]
    (one_rank,) = run_ranks(1, bare_loop.train, Layout(), RECIPE)
    reference = assemble(one_rank.weights)
    results = run_ranks(world_size, _fit_jobs, jobs, RECIPE, timeout=180)
    for index in range(len(jobs)):
        worst = spread([part for weights, _ in results for part in weights[index]], reference)
        assert max(worst.values()) <= TOLERANCE, f"fit {index}"
    assert [left_changed for _, left_changed in results] == [[]] * world_size


def _fit_jobs(jobs: Iterable[tuple[Layout, str | None]], recipe: Recipe) -> tuple[list[list[Slice]], list[str]]:
    before = hygiene.snapshot()
    weights = [_fit(layout, recipe, other or MCoreStrategy(**layout.strategy_arguments)) for layout, other in jobs]
    return weights, _left_changed(before)


def _fit(
    layout: Layout, recipe: Recipe, strategy: Strategy | str, accumulate: int | None = None, limit: int | None = None
) -> list[Slice]:
    """Train the tiny GPT and return this rank's weights."""
    module = TinyGPT(layout, recipe)
    accumulate = accumulate or recipe.num_microbatches(layout)
    make_trainer(layout.world_size, strategy, accumulate, clip=recipe.clip, limit_train_batches=limit).fit(module)
    with bare_loop.process_groups(layout):
        return weight_slices(module.model.chunks)


# ---- the last window of an epoch, when accumulate_grad_batches does not divide it


@pytest.mark.parametrize(
    "layout", thorough_but([Layout(), Layout(pp=2), Layout(pp=2, vp=2), Layout(cp=2)], "one", "pp2-vp2")
)
def test_a_short_last_window_weighs_what_it_weighs_in_lightning(layout: Layout) -> None:
    accumulate, limit = 4, 7  # windows of 4 and 3 batches
    recipe = Recipe(eps=1e-4, steps=1, clip=0.0)  # clipping would hide a wrong weight
    (slices,) = run_ranks(1, _fit, Layout(), recipe, "auto", accumulate, limit)
    ours = run_ranks(layout.world_size, _fit_ours, layout, recipe, accumulate, limit, timeout=120)
    worst = spread([part for weights in ours for part in weights], assemble(slices))
    assert max(worst.values()) <= TOLERANCE


def _fit_ours(layout: Layout, recipe: Recipe, accumulate: int, limit: int) -> list[Slice]:
    return _fit(layout, recipe, MCoreStrategy(**layout.strategy_arguments), accumulate, limit)


# ---- a rank that dies


class _Mortal(TinyGPT):
    """Ends the process of rank 1 in the middle of a step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == 1:
            os._exit(13)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "layout", thorough_but([Layout(dp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)], "dp2", "pp2")
)
def test_a_rank_that_dies_takes_the_others_down_with_a_message(layout: Layout) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(layout.world_size, _fit_mortal, layout, RECIPE, timeout=120, grace=60)
    assert time.monotonic() - started < 120
    assert failure.value.unfinished == [], "a rank waited for the dead one"
    assert "exit code 13" in failure.value.errors[1]
    assert "closed by peer" in failure.value.errors[0].lower() or "reset by peer" in failure.value.errors[0].lower()


def _fit_mortal(layout: Layout, recipe: Recipe) -> None:
    accumulate = recipe.num_microbatches(layout)
    strategy = MCoreStrategy(**layout.strategy_arguments)
    make_trainer(layout.world_size, strategy, accumulate, clip=recipe.clip).fit(_Mortal(layout, recipe))
