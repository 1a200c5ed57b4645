# SPDX-License-Identifier: Apache-2.0
"""Rows of docs/how/conventions.md and docs/status/upstream.md name tests that exist; defaults are as the rows say."""

import ast
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch import nn

from lightning_mcore import MCoreGPT, MCoreStrategy, Recipe
from lightning_mcore.config.fp16 import LossScaling

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how/conventions.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ") and "Convention" not in line]


UPSTREAM = (ROOT / "docs/status/upstream.md").read_text(encoding="utf-8")
FAULTS = [
    line.strip("|").split("|") for line in UPSTREAM.splitlines() if line.startswith("| ") and "Here |" not in line
]
UNTESTED = ("cannot occur", "not checked")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_every_convention_has_a_test(row: list[str]) -> None:
    assert len(row) == 4
    assert _names_tests(row[3])


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[1].strip())
def test_every_fault_of_a_release_has_a_test_or_a_reason(row: list[str]) -> None:
    assert len(row) == 4
    assert _names_tests(row[3]) or row[2].strip().startswith(UNTESTED)


def _names_tests(cell: str) -> bool:
    """Return whether a cell names tests, all of which must exist."""
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
    for file, name in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
    return bool(tests)


def test_the_pages_have_their_rows() -> None:
    assert len(ROWS) >= 34
    assert len(FAULTS) >= 18


def test_defaults_that_differ_from_megatrons() -> None:
    megatrons = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    model = MCoreGPT(64, 8, {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1})
    ours = model._build_config()
    for name, theirs, here in (
        ("hidden_dropout", 0.1, 0.0),
        ("attention_dropout", 0.1, 0.0),
        ("calculate_per_token_loss", False, True),
        ("moe_token_dispatcher_type", "allgather", "alltoall"),
    ):
        assert (megatrons[name], getattr(ours, name)) == (theirs, here)
    # Megatron-LM's flags: --position-embedding-type learned_absolute, and no --untie-embeddings-and-output-weights
    assert model.hparams["position_embedding_type"] == "rope"
    assert not model.hparams["share_embeddings_and_output_weights"]
    optimizer, recipe, scale = OptimizerConfig(), Recipe(), LossScaling()
    assert (optimizer.weight_decay, optimizer.adam_beta1, optimizer.adam_beta2) == (0.01, 0.9, 0.999)
    assert (recipe.weight_decay, recipe.betas) == (0.1, (0.9, 0.95))
    assert (optimizer.initial_loss_scale, optimizer.hysteresis) == (2**32, 2)
    assert (scale.initial_loss_scale, scale.hysteresis) == (2**16, 2)
    assert optimizer.clip_grad == 1.0
    assert MCoreStrategy().optimizer_config is None  # so that clipping is the trainer's alone, which is off


def test_weight_decay_stays_while_the_rate_moves() -> None:
    trainer = cast(Any, SimpleNamespace(estimated_stepping_batches=8, callbacks=[]))
    built = cast(dict[str, Any], Recipe(warmup_steps=2).build(list(nn.Linear(2, 2).named_parameters()), trainer))
    rates, decays = set(), set()
    for _ in range(8):
        matrices, vectors = built["optimizer"].param_groups
        rates.add(matrices["lr"])
        decays.add((matrices["weight_decay"], vectors["weight_decay"]))
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()
    assert decays == {(0.1, 0.0)}
    assert len(rates) > 4
