# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's layers compute in fp32 what a loop written by hand computes on one rank with local layers.

``tests/parity/test_layouts.py`` compares the strategy with local layers in the same way, so that all three agree:
losses, gradients and their norms before clipping, and weights after the steps, in global terms and on every rank. The
tolerance is 1e-5 of the largest element of each tensor. Measured over the table: gradients 1.5e-6, weights 5e-7,
gradient norms 3e-7, losses 2e-7.
"""

import contextlib
import functools
import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from tests.parity import bare_loop, lightning_loop, packed
from tests.parity import test_hybrid_context as hybrid
from tests.parity.bare_loop import Trace
from tests.parity.global_tensors import spread
from tests.parity.test_layouts import MEAN, TOKENS, Reference, distances
from tests.parity.test_options import LATENT
from tests.support.layouts import LAYOUTS, Layout
from tests.support.ranks import run_ranks
from tests.support.tiny import Recipe

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5

IDS = (
    *("dp2", "tp2", "tp2-sp", "pp2", "pp2-vp2", "cp2", "dp2-do", "dp2-do-overlap", "tied-pp2", "pp2-split3and1"),
    *("moe-dp2-ep2", "moe-tp2-sp", "moe-tp2-sp-ep2-etp1", "moe-cp2-ep2", "moe-dp2-pp2-ep2"),
    *("dp2-tp2-sp", "tp2-sp-pp2", "tp2-sp-cp2", "dp2-cp2-do", "dp2-tp2-sp-pp2-vp2-do-overlap"),
)
BY_ID = {layout.id: layout for layout in LAYOUTS}
MOE = Layout(moe=True, dp=2, tp=2, sp=True, ep=2, etp=1)  # gloo cannot cut experts that are spread


@dataclass(frozen=True)
class Case:
    """A layout, a model, and fields of TransformerEngine's model alone, which change no number."""

    layout: Layout
    recipe: Recipe = MEAN
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def full_recipe(self) -> Recipe:
        """What TransformerEngine's layers are trained on."""
        return replace(self.recipe, impl="transformer_engine", options=self.recipe.options + self.more)


def with_fields(fields: dict[str, Any], recipe: Recipe = MEAN) -> Recipe:
    return replace(recipe, options=tuple(fields.items()))


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
SMALL_LATENT = with_fields(LATENT | {"q_lora_rank": 16, "rope_type": "rope", "qk_layernorm": True, "num_layers": 2})
UNFUSED = (("attention_backend", AttnBackend.unfused),)
CASES = {
    **{name: Case(BY_ID[name]) for name in IDS},
    "tokens": Case(BY_ID["dp2-do"], TOKENS),
    "experts": Case(MOE),
    "experts-grouped": Case(MOE, more=(("moe_grouped_gemm", True),)),
    "experts-grouped-fused": Case(
        BY_ID["moe-dp2-ep2"], more=(("moe_grouped_gemm", True), ("moe_permute_fusion", True))
    ),
    "experts-with-biases": Case(
        BY_ID["moe-tp2-sp-ep2-etp1"], with_fields({"add_bias_linear": True}), more=(("moe_grouped_gemm", True),)
    ),
    "latent": Case(BY_ID["tp2-sp"], SMALL_LATENT),
    "latent-without-sequence-parallelism": Case(BY_ID["tp2"], SMALL_LATENT),
    "latent-without-compressed-queries": Case(
        BY_ID["tp2"], with_fields(LATENT | {"q_lora_rank": None, "rope_type": "rope", "num_layers": 2})
    ),
    "sinks": Case(BY_ID["tp2"], with_fields({"softmax_type": "learnable", "num_layers": 2}), UNFUSED),
    "two-tokens-ahead": Case(BY_ID["pp2"], with_fields({"mtp_num_layers": 1, "num_layers": 2}, TOKENS)),
    "recompute-all": Case(BY_ID["pp2"], more=tuple(FULL.items())),
    "recompute-parts": Case(BY_ID["tp2-sp"], more=tuple(PARTS.items())),
    "layer-norms-and-biases": Case(
        BY_ID["tp2-sp"], with_fields({"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True})
    ),
    "fused-rotary": Case(BY_ID["cp2"], more=(("apply_rope_fusion", True),)),
}
THOROUGH = (
    *("dp2", "tp2", "pp2", "dp2-do", "pp2-split3and1", "moe-dp2-ep2", "moe-tp2-sp", "moe-dp2-pp2-ep2", "dp2-tp2-sp"),
    *("tp2-sp-pp2", "dp2-cp2-do", "dp2-tp2-sp-pp2-vp2-do-overlap", "experts", "recompute-all"),
)
ON_PACKED_ROWS = (BY_ID["tp2-sp"], BY_ID["cp2"], BY_ID["moe-dp2-ep2"])


class _Torch(types.ModuleType):
    """torch, in which fp16 is another name of fp32."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def fused_attention_in_fp32() -> Iterator[None]:
    """Let TransformerEngine take fused attention for fp32, which cuDNN has for 16 bits alone.

    No other attention has context parallelism and packed rows.
    """
    attention = "transformer_engine.pytorch.attention.dot_product_attention"
    with contextlib.ExitStack() as stack:
        for name in ("utils", "backends"):
            module = importlib.import_module(f"{attention}.{name}")
            stack.enter_context(mock.patch.object(module, "torch", _Torch("torch")))
        yield


def train_all(cases: list[Case]) -> list[Trace]:
    with fused_attention_in_fp32():
        return [lightning_loop.train(case.layout, case.full_recipe, keep_gradients=True) for case in cases]


def train_all_packed(layouts: list[Layout]) -> list[Trace]:
    recipe = replace(packed.RECIPE, impl="transformer_engine")
    with fused_attention_in_fp32():
        return [packed.train_packed(layout, recipe, packed.ROWS, ("tokens",))["tokens"] for layout in layouts]


def train_references(runs: list[tuple[Layout, Recipe]]) -> list[Trace]:
    return [bare_loop.train(layout, recipe, keep_gradients=True) for layout, recipe in runs]


@functools.cache
def references(names: tuple[str, ...]) -> dict[tuple[Layout, Recipe], Reference]:
    runs = list({(CASES[name].layout.one_rank, CASES[name].recipe): None for name in names})
    (traces,) = run_ranks(1, train_references, runs, timeout=120)
    return {run: Reference.of(trace) for run, trace in zip(runs, traces, strict=True)}


@pytest.mark.parametrize(
    ("world_size", "thorough"),
    [(2, False), (4, False), *(pytest.param(size, True, marks=pytest.mark.thorough) for size in (2, 4, 8))],
)
def test_layouts_agree_with_the_bare_loop_on_one_rank(world_size: int, thorough: bool) -> None:
    of_mark = tuple(name for name in CASES if (name in THOROUGH) == thorough)
    names = [name for name in of_mark if CASES[name].layout.world_size == world_size]
    cases = [CASES[name] for name in names]
    ranks = run_ranks(world_size, train_all, cases, timeout=60 + 30 * len(cases))
    wrong = {}
    for index, (name, case) in enumerate(zip(names, cases, strict=True)):
        traces = [rank[index] for rank in ranks]
        found = distances(traces, references(of_mark)[case.layout.one_rank, case.recipe], case.layout, case.recipe)
        wrong |= {f"{name}: {key}": value for key, value in found.items() if not value <= TOLERANCE}
    assert wrong == {}


def test_packed_rows_train_as_their_documents_do_one_by_one() -> None:
    ranks = run_ranks(2, train_all_packed, list(ON_PACKED_ROWS), timeout=120)
    for index, layout in enumerate(ON_PACKED_ROWS):
        (wanted,) = run_ranks(1, packed.one_by_one, layout.one_rank, packed.RECIPE, packed.ROWS, ("tokens",), 1)
        traces = [rank[index] for rank in ranks]
        loss = packed.loss_of_copies(traces, layout, packed.packed_microbatches(packed.ROWS, 1), "tokens")
        assert loss == pytest.approx(wanted["tokens"].loss, rel=1e-6)
        worst = spread(packed.slices_of(traces), wanted["tokens"].gradients)
        assert {key: value for key, value in worst.items() if not value <= TOLERANCE} == {}, layout.id


def train_of_both_kinds(layout: Layout) -> Trace:
    recipe = replace(packed.RECIPE, impl="transformer_engine")
    with fused_attention_in_fp32():
        traces, _ = hybrid.train(layout, recipe, hybrid.rows_of(layout), ("tokens",))
    return traces["tokens"]


@pytest.mark.parametrize(
    "layout", [Layout(cp=2), Layout(cp=4), Layout(tp=2, sp=True, cp=2)], ids=lambda layout: layout.id
)
def test_rows_of_whole_documents_and_of_split_ones_train_as_one_by_one(layout: Layout) -> None:
    rows = hybrid.rows_of(layout)
    traces = run_ranks(layout.world_size, train_of_both_kinds, layout, timeout=120)
    (wanted,) = run_ranks(1, packed.one_by_one, layout.one_rank, packed.RECIPE, rows, ("tokens",), 1)
    assert traces[0].losses[0] == pytest.approx(wanted["tokens"].loss, rel=1e-6)
    worst = spread(packed.slices_of(traces), wanted["tokens"].gradients)
    assert {key: value for key, value in worst.items() if not value <= TOLERANCE} == {}


def test_at_least_twenty_layouts_are_compared() -> None:
    assert len({case.layout.id for case in CASES.values()}) >= 20
