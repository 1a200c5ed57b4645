# SPDX-License-Identifier: Apache-2.0
"""Models of TransformerEngine's layers train on CPU ranks, and compute what those of the torch backend compute."""

from dataclasses import replace
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.te.runs import Run, train

pytestmark = pytest.mark.distributed

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def numbers(run: Run, ranks: int) -> tuple[list[float], list[float]]:
    return run_ranks(ranks, train, run, ranks, timeout=120)[0]


@pytest.mark.parametrize(("layout", "ranks"), [({}, 1), (TP2, 2)], ids=["one-rank", "tp2-sp"])
def test_both_kinds_of_layers_compute_nearly_the_same_in_bf16(layout: dict[str, Any], ranks: int) -> None:
    # which is rounded at other places; measured: 3e-4; tests/te/test_layouts.py compares fp32
    run = Run(precision="bf16-mixed", layout=layout)
    losses, norms = numbers(run, ranks)
    local_losses, local_norms = numbers(replace(run, impl="local"), ranks)
    assert losses == pytest.approx(local_losses, rel=5e-3)
    assert norms == pytest.approx(local_norms, rel=5e-3)


@pytest.mark.parametrize(("layout", "ranks"), [({}, 1), (TP2, 2)], ids=["one-rank", "tp2-sp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_close_to_bf16(recipe: str, layout: dict[str, Any], ranks: int) -> None:
    run = Run(precision="bf16-mixed", fp8={"fp8_recipe": recipe}, layout=layout, steps=4)
    losses, norms = numbers(run, ranks)
    in_bf16, norms_in_bf16 = numbers(replace(run, fp8={}), ranks)
    assert losses != in_bf16
    assert losses == pytest.approx(in_bf16, rel=0.01)
    assert norms == pytest.approx(norms_in_bf16, rel=0.1)
    assert losses[-1] < losses[0]
