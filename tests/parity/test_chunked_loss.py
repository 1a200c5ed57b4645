# SPDX-License-Identifier: Apache-2.0
"""``MCoreStrategy(loss_chunk_size=...)`` against a bare Megatron loop on one rank, whose logits are whole.

Both share Megatron's layers and loss. The bare loop calls ``GPTModel`` itself and knows nothing of chunks.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCoreGPT, MCorePrecision, MCoreStrategy
from lightning_mcore.layers import chunked_loss, gpt
from tests.parity import bare_loop, lightning_loop
from tests.parity.bare_loop import Trace
from tests.parity.test_layouts import Reference, distances
from tests.support.layouts import Layout
from tests.support.live_memory import Rows
from tests.support.ranks import on_ranks, run_ranks
from tests.support.thorough import thorough_but
from tests.support.tiny import Recipe
from tests.support.toy import make_trainer

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
CHUNK = 12  # of 2 rows of 32 tokens: six chunks of 6 positions each, the last one shorter
RECIPE = Recipe(token_weighted=True, steps=2, global_batch_size=4, micro_batch_size=2, eps=1e-4)
AHEAD = replace(RECIPE, options=(("mtp_num_layers", 1), ("num_layers", 2)))

LAYOUTS = {
    "two ranks": (
        Layout(tp=2),
        Layout(tp=2, sp=True),
        Layout(tied=True, pp=2),
        Layout(cp=2),
        Layout(dp=2, distributed_optimizer=True, overlap=True),
        Layout(moe=True, tp=2, sp=True),
    ),
    "more of two ranks": (Layout(tied=True, tp=2, sp=True), Layout(pp=2, vp=2), Layout(moe=True, dp=2, ep=2)),
    "four ranks": (
        Layout(tied=True, tp=2, sp=True, pp=2),
        Layout(tp=2, sp=True, cp=2),
        Layout(dp=2, pp=2, distributed_optimizer=True),
    ),
}


@functools.cache
def _reference(layout: Layout, recipe: Recipe) -> Reference:
    (trace,) = run_ranks(1, bare_loop.train, layout, recipe, keep_gradients=True, timeout=120)
    return Reference.of(trace)


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, "two ranks"))
def test_losses_in_chunks_train_as_whole_logits_do(name: str) -> None:
    _check(LAYOUTS[name], RECIPE)


def test_losses_of_tokens_ahead_are_computed_in_chunks_too() -> None:
    _check((Layout(pp=2), Layout(tied=True, tp=2, sp=True)), AHEAD)


def _check(layouts: Sequence[Layout], recipe: Recipe) -> None:
    recipes = [recipe.shallow(layout) for layout in layouts]
    ranks = run_ranks(layouts[0].world_size, _train_in_chunks, layouts, recipes, timeout=60 * len(layouts))
    worst = {}
    for index, (layout, own) in enumerate(zip(layouts, recipes, strict=True)):
        traces = [rank[index] for rank in ranks]
        found = distances(traces, _reference(layout.one_rank, own), layout, own)
        worst |= {(layout.id, key): value for key, value in found.items() if not value <= TOLERANCE}
    assert worst == {}


def _train_in_chunks(layouts: Sequence[Layout], recipes: Sequence[Recipe]) -> list[Trace]:
    chunks: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        chunks.append(len(args))
        return chunked_loss.in_chunks(*args, **options)

    gpt.in_chunks = counted
    traces = []
    for layout, recipe in zip(layouts, recipes, strict=True):
        chunks.clear()
        traces.append(lightning_loop.train(layout, recipe, keep_gradients=True, loss_chunk_size=CHUNK))
        assert bool(chunks) or layout.pp > 1, layout.id  # only the last stage has losses
    return traces


class Kept(MCoreGPT):
    """Keeps the tokens that evaluation found the most probable."""

    in_chunks = True  # or predicts from whole logits

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        _, self.best, _ = self._judged(batch)

    @property
    def _is_of_gpt_chunks(self) -> bool:
        return self.in_chunks


@pytest.mark.parametrize(
    "sizes",
    [{}, {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}],
    ids=["one", "tp2", "tp2-sp"],
)
def test_evaluation_in_chunks_finds_the_tokens_of_the_logits(sizes: dict[str, Any]) -> None:
    run_ranks(sizes.get("tensor_model_parallel_size", 1), _evaluate, sizes)


def _evaluate(sizes: dict[str, Any]) -> None:
    module = Kept(61, 32, {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "init_method_std": 0.5})
    loader: Any = DataLoader(Rows(2, 32, 61, False, False), batch_size=2)
    trainer = make_trainer(MCoreStrategy(**sizes, loss_chunk_size=CHUNK), limit_val_batches=1, limit_predict_batches=1)
    trainer.validate(module, loader, verbose=False)
    found = module.best
    [predicted] = trainer.predict(module, loader) or []
    module.in_chunks = False
    [wanted] = trainer.predict(module, loader) or []
    assert torch.equal(found, wanted)
    assert torch.equal(predicted, wanted)
    assert found.unique().numel() > 5  # so that another order of tokens would be seen


class OfMegatron(MCoreGPT):
    """A model of Megatron's own class, whose evaluation has whole logits."""

    def _new_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return GPTModel(*args, **kwargs)


@on_ranks(1)
def test_evaluation_of_megatrons_model_has_the_same_results() -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    loader: Any = DataLoader(Rows(2, 32, 128, False, False), batch_size=2)
    results = []
    for kind in (MCoreGPT, OfMegatron):
        pl.seed_everything(1)
        trainer = make_trainer(MCoreStrategy(), limit_val_batches=1)
        results.append(dict(trainer.validate(kind(128, 32, sizes), loader, verbose=False)[0]))
    found, wanted = results
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found["val_loss"] > 1


class KeepsGradient(pl.Callback):
    """Keeps the gradient of the output layer's weight, where this rank has it."""

    found: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        for chunk in pl_module.model.chunks:
            if chunk.post_process:
                tied = chunk.share_embeddings_and_output_weights
                weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
                self.found = weight.main_grad.clone()


IN_BF16: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one": (1, {}, False),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, False),
    "pp2-tied": (2, {"pipeline_model_parallel_size": 2}, True),
    "dp2-overlaps": (2, {"overlap_grad_reduce": True}, False),
}


@pytest.mark.parametrize("name", thorough_but(IN_BF16, "one", "pp2-tied", "dp2-overlaps"))
def test_chunks_in_bf16_sum_the_gradient_of_the_output_in_fp32(name: str) -> None:
    world, sizes, tied = IN_BF16[name]
    found = [gradients for gradients in run_ranks(world, _gradients_in_bf16, sizes, tied) if gradients is not None]
    assert found
    for whole, chunks in found:
        # 0.16 to 0.23 % apart; sums of 128 chunks in bf16 would be 1 % apart
        assert float((chunks - whole).norm() / whole.norm()) < 0.004


def _gradients_in_bf16(sizes: dict[str, Any], tied: bool) -> list[torch.Tensor] | None:
    found = []
    for size in (None, 2):
        pl.seed_everything(1)
        keeps = KeepsGradient()
        model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
        module = MCoreGPT(128, 128, model, share_embeddings_and_output_weights=tied)
        trainer = make_trainer(
            MCoreStrategy(**sizes, loss_chunk_size=size),
            plugins=[MCorePrecision("bf16-mixed")],  # type: ignore[arg-type]
            callbacks=[keeps],
            max_steps=1,
        )
        trainer.fit(module, DataLoader(Rows(4, 128, 128, False, False), batch_size=2))  # type: ignore[arg-type]
        found.append(keeps.found)
    return [gradient for gradient in found if gradient is not None] or None


class Adapted(MCoreGPT):
    """A model whose adapters' B are not zero, so that their A have gradients."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.3)


class KeepsGradients(pl.Callback):
    """Keeps the gradients of all trained parameters of this rank, by name."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.found = {name: p.main_grad.clone() for name, p in named if hasattr(p, "main_grad")}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor_model_parallel_size": 2}, id="tp2", marks=pytest.mark.thorough),
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="tp2-sp"),
        pytest.param({"pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param({"context_parallel_size": 2}, id="cp2"),
    ],
)
def test_caps_adapters_of_the_output_and_masks_act_on_chunks_of_every_layout(sizes: dict[str, Any]) -> None:
    names = set()
    for whole, chunks in run_ranks(2, _gradients_of_adapters, sizes):
        assert chunks.keys() == whole.keys()
        names |= whole.keys()
        for name, wanted in whole.items():
            assert float(wanted.norm()) > 0, name
            assert float((chunks[name] - wanted).norm()) <= TOLERANCE * float(wanted.norm()), name
    assert any("output_layer" in name for name in names)


def _gradients_of_adapters(sizes: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64}
    model |= {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(100, (2, 33), generator=generator)
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    batch["loss_mask"] = (torch.rand(2, 32, generator=generator) < 0.6).float()
    found = []
    for size in (None, CHUNK):
        pl.seed_everything(1)
        module = Adapted(
            100,
            32,
            model | {"normalization": "RMSNorm", "init_method_std": 0.5},
            lora=LoRA(r=4, target_modules=["lm_head", "q_proj"]),
            architecture={"logits_cap": 2.0},
        )
        keeps = KeepsGradients()
        trainer = make_trainer(MCoreStrategy(**sizes, loss_chunk_size=size), callbacks=[keeps], max_steps=1)
        trainer.fit(module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
        found.append(keeps.found)
    return found
