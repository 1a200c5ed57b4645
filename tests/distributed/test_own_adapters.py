# SPDX-License-Identifier: Apache-2.0
"""Adapters on a module of one's own, by one call, and a model without its adapters as its own reference."""

from typing import Any

import pytest
import torch

from lightning_mcore import LoRA, MCoreStrategy, adapters_off, add_lora
from tests.parity.global_tensors import fill_weights
from tests.parity.lightning_loop import TinyGPT, make_trainer
from tests.support import tiny
from tests.support.layouts import Layout
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.tiny import Batch, Recipe

pytestmark = pytest.mark.distributed

LOSS = 1e-5
LORA: dict[str, Any] = {
    "r": 3,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "modules_to_save": ["output_layer"],
    "rank_pattern": {r"decoder\.layers\.1\..*": 2},
}
RECIPE = Recipe(steps=3, mask="all")


class Adapted(TinyGPT):
    """Compares the logits without adapters with those of the base in each step."""

    def __init__(self, layout: Layout, lora: dict[str, Any]) -> None:
        super().__init__(layout, RECIPE)
        self.lora = LoRA(**lora)
        self.base: torch.Tensor | None = None
        self.same: list[bool] = []

    def configure_model(self) -> None:
        super().configure_model()
        if self.layout.pp == 1:
            self.model.requires_grad_(False)  # Megatron multiplies by frozen weights in a function of its own
            self.base = self.logits(self.model.chunks[0])
        for _ in range(2):  # the second call does nothing
            add_lora(self.model, self.lora)
        fill_weights(self.model.chunks)

    @torch.no_grad()
    def logits(self, model: Any) -> torch.Tensor:
        (batch, *_) = tiny.microbatches(RECIPE, self.layout, 0, 0)
        logits: torch.Tensor = model(batch["tokens"], batch["position_ids"], None)
        return logits

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.base is not None and self.lora.modules_to_save is None:
            (chunk,) = self.trainer.strategy._chunks.wrapped  # a step may call the model once
            with adapters_off(self):
                self.same.append(torch.equal(self.logits(chunk), self.base))
            self.same.append(not torch.equal(self.logits(chunk), self.base))


def train(layout: Layout, lora: dict[str, Any]) -> dict[str, Any]:
    module = Adapted(layout, lora)
    strategy = MCoreStrategy(**layout.strategy_arguments)
    make_trainer(layout.world_size, strategy, RECIPE.num_microbatches(layout)).fit(module)
    assert module.trace is not None
    return {"losses": module.trace.losses, "norms": module.trace.grad_norms, "same": module.same}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    """The run on one rank."""
    (run,) = run_ranks(1, train, Layout(), LORA)
    return run


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(pp=2)], ids=lambda layout: layout.id)
def test_a_module_of_ones_own_trains_adapters_as_on_one_rank(layout: Layout, one_rank: dict[str, Any]) -> None:
    ranks = run_ranks(2, train, layout, LORA)
    for step, loss in enumerate(one_rank["losses"]):
        assert any(rank["losses"][step] == pytest.approx(loss, abs=LOSS) for rank in ranks)
    assert ranks[0]["norms"] == pytest.approx(one_rank["norms"], rel=1e-4)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(dp=2, distributed_optimizer=True, overlap=True)], ids=lambda layout: layout.id
)
def test_without_its_adapters_a_model_is_its_base_bit_for_bit(layout: Layout) -> None:
    for rank in run_ranks(2, train, layout, {**LORA, "modules_to_save": None}):
        assert len(rank["same"]) == 2 * RECIPE.steps * RECIPE.num_microbatches(layout)
        assert all(rank["same"])


@pytest.mark.parametrize("targets", [["linear_qkv", "word_embeddings"], ["linear_qvk"]], ids=["not-linear", "unknown"])
@on_ranks(1)
def test_a_target_that_no_linear_layer_has_is_refused(targets: list[str]) -> None:
    with refuses(ValueError, targets[-1]):
        train(Layout(), {"target_modules": targets})
