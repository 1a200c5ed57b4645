# SPDX-License-Identifier: Apache-2.0
"""Training on images with TransformerEngine's layers: what local layers compute, and recompute in FP8."""

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_mcore import MCorePrecision
from tests.parity.test_vision_training import UNIFORM, Ran, check_ranks, course, trained
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.vision_models import vision_folder
from tests.te.test_layouts import fused_attention_in_fp32

pytestmark = pytest.mark.distributed

FAMILY = "qwen3_vl"
SPLIT, CONTEXT, STAGES = Layout(tp=2, sp=True), Layout(cp=2), Layout(pp=2, first=3)


def runs(folder: str) -> tuple[list[Ran], list[bool]]:
    """Train on a split model and on split rows, also packed, in fp32; on stages in FP8 with and without recompute."""
    ran = [course(folder, SPLIT, 2, transformer_impl="transformer_engine")]
    with fused_attention_in_fp32():
        ran += [course(folder, CONTEXT, 2, packs, transformer_impl="transformer_engine") for packs in (False, True)]
    plain, again = (
        trained(
            folder,
            STAGES,
            fields,
            2,
            4,
            transformer_impl="transformer_engine",
            plugins=[LightningEnvironment(), MCorePrecision("bf16-mixed", fp8_recipe="tensorwise")],
        )
        for fields in ({}, UNIFORM)
    )
    return ran, list(map(torch.equal, plain, again))


def test_steps_on_images_are_those_of_local_layers_and_recompute_changes_no_bit() -> None:
    """Megatron recomputes FP8 layers by TransformerEngine's own function."""
    ranks = run_ranks(2, runs, str(vision_folder(FAMILY)), timeout=180)
    for place, layout in enumerate((SPLIT, CONTEXT, CONTEXT)):
        check_ranks([ran[place] for ran, _ in ranks], FAMILY, layout)
    assert all(all(same) for _, same in ranks)
