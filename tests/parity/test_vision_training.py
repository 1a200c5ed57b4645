# SPDX-License-Identifier: Apache-2.0
"""Training on images: what changes time and memory changes no number, and every layout learns what one rank learns."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy, MCoreVisionGPT
from tests.layouts import Layout
from tests.ranks import run_ranks
from tests.toy import make_trainer
from tests.vision_models import vision_batch, vision_folder

pytestmark = pytest.mark.distributed

LENGTH = 48
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**UNIFORM, "recompute_method": "block"}
NOTHING: list[Any] = [[], []]


def batches(family: str, count: int) -> list[dict[str, Tensor]]:
    """Return microbatches of two rows; every fourth is text alone."""
    text = {"images": NOTHING, "videos": NOTHING}
    return [vision_batch(family, LENGTH, seed=seed, **(text if seed % 4 == 3 else {})) for seed in range(count)]


def trained(folder: str, layout: Layout, fields: dict[str, Any], steps: int, microbatches: int) -> list[Tensor]:
    """Return this rank's weights after some steps."""
    first = {} if layout.first is None else {"num_layers_in_first_pipeline_stage": layout.first}
    module = MCoreVisionGPT.from_pretrained(folder, LENGTH, {**first, **fields})
    loader = DataLoader(batches(module.vision.model_type, steps * microbatches), batch_size=None)  # type: ignore[arg-type]
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments), max_steps=steps, accumulate_grad_batches=microbatches
    )
    trainer.fit(module, loader)
    return [parameter.detach().clone() for parameter in module.parameters()]


def ways(folder: str, layout: Layout, recomputes: list[dict[str, Any]]) -> list[list[bool]]:
    """Train without recomputing and in several ways with it; return which weights are the same bit for bit."""
    plain = trained(folder, layout, {}, 2, 4)
    return [list(map(torch.equal, plain, trained(folder, layout, fields, 2, 4))) for fields in recomputes]


@pytest.mark.parametrize(
    ("layout", "family", "recomputes"),
    [
        (Layout(pp=2, first=3), "qwen3_vl", [UNIFORM, {**BLOCK, "recompute_num_layers": 2}]),
        (Layout(tp=2, sp=True), "qwen3_vl_moe", [{**UNIFORM, "recompute_num_layers": 2}]),
    ],
    ids=lambda value: getattr(value, "id", None) or (value if isinstance(value, str) else ""),
)
def test_recomputing_changes_no_bit(layout: Layout, family: str, recomputes: list[dict[str, Any]]) -> None:
    """Outputs from inside the tower belong to the microbatch whose layers are recomputed."""
    for rank in run_ranks(2, ways, str(vision_folder(family)), layout, recomputes, timeout=120):
        assert all(all(same) for same in rank), rank
