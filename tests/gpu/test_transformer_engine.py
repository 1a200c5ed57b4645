# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's layers on a GPU: against the torch backend, attention, fusions, FP8, checkpoints and memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_mcore.config.field_homes import fusion_defaults
from lightning_mcore.planning.live import plan_of
from tests.gpu.runs import DEVICE, train_on
from tests.gpu.test_checkpoints import SaveAt
from tests.te.runs import TRANSFORMER, Run
from tests.te.test_features import EXPERTS, LATENT

pytestmark = [pytest.mark.gpus(te=True), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BF16 = Run(precision="bf16-mixed", steps=5)
REFERENCE = Path(__file__).with_name("fp8_on_the_cpu.json")
RECIPES = [
    "delayed",
    "tensorwise",
    "blockwise",
    pytest.param("mxfp8", marks=pytest.mark.gpus(te=True, capability=(10, 0))),
]
SAME = {
    "dense": BF16,
    "packed": replace(BF16, packed=True),
    "packed-unfused": replace(BF16, packed=True, transformer={"attention_backend": "unfused"}),
    "packed-fused": replace(BF16, packed=True, transformer={"attention_backend": "fused"}),
    "experts": replace(BF16, precision="32-true", transformer=EXPERTS),  # in bf16, rounding sends tokens elsewhere
    "latent": replace(BF16, transformer=LATENT),
    "multi-token": replace(BF16, transformer={"mtp_num_layers": 1}),
}


@pytest.mark.parametrize("case", SAME)
def test_both_kinds_of_layers_compute_the_same(case: str) -> None:
    run = SAME[case]
    fields = {name: value for name, value in run.transformer.items() if name != "attention_backend"}
    ours, local = train_on(DEVICE, run), train_on(DEVICE, replace(run, impl="local", transformer=fields))
    assert ours.losses == pytest.approx(local.losses, rel=2e-3)
    assert ours.norms == pytest.approx(local.norms, rel=1e-2)


@pytest.mark.parametrize("name", fusion_defaults(TRANSFORMER | EXPERTS))
def test_a_fusion_computes_the_same(name: str) -> None:
    fields = EXPERTS | dict.fromkeys(fusion_defaults(TRANSFORMER | EXPERTS), False)
    fused = replace(BF16, transformer=fields | {name: True})
    plain = replace(BF16, transformer=fields)
    assert train_on(DEVICE, fused).losses == pytest.approx(train_on(DEVICE, plain).losses, rel=5e-3)


def fp8(recipe: str) -> Run:
    """Return the run whose losses on the CPU are in ``REFERENCE``."""
    return replace(BF16, fp8={"fp8_recipe": recipe}, steps=8)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_computes_what_it_computes_on_the_cpu(recipe: str) -> None:
    """Scales and rounding are the same; sums are in another order, and their bf16 results then round to other FP8.

    On the CPU alone, first weights that differ by half of bf16's rounding change these losses by up to 1.5 %.
    """
    expected = json.loads(REFERENCE.read_text())[recipe]
    losses = train_on(DEVICE, fp8(recipe)).losses
    assert losses[0] == pytest.approx(expected[0], rel=0.005)
    assert losses == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_fp8_run_goes_on_bit_by_bit(recipe: str, tmp_path: Path) -> None:
    run = replace(BF16, fp8={"fp8_recipe": recipe}, steps=4, layout={"use_distributed_optimizer": True})
    whole = train_on(DEVICE, run, SaveAt(2, tmp_path / "half.ckpt"))
    rest = train_on(DEVICE, run, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses[-2:] == whole.losses[2:]


@pytest.mark.gpus(te=True, capability=(10, 0))
def test_nvfp4_is_near_bf16_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    run = replace(BF16, fp8={"fp4_recipe": "nvfp4"}, steps=4, layout={"use_distributed_optimizer": True})
    whole = train_on(DEVICE, run, SaveAt(2, tmp_path / "half.ckpt"))
    in_bf16 = train_on(DEVICE, replace(run, fp8={})).losses
    assert whole.losses != in_bf16
    assert whole.losses[:3] == pytest.approx(in_bf16[:3], rel=0.05)
    assert train_on(DEVICE, run, ckpt_path=tmp_path / "half.ckpt").losses[-2:] == whole.losses[2:]


class Peak(pl.Callback):
    """Keeps the most memory that PyTorch gave out, and what ``plan`` says, both in bytes."""

    measured = planned = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        stage = plan_of(trainer, pl_module, batch_size=4).fullest
        assert stage is not None
        self.planned = stage.memory.total
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, *rest: Any) -> None:
        self.measured = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else self.planned


def test_a_plan_has_the_memory_of_the_run() -> None:
    sizes = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16}
    peak = Peak()
    train_on(DEVICE, replace(BF16, steps=3, transformer=sizes if DEVICE == "cuda" else {}), peak)
    assert peak.measured == pytest.approx(peak.planned, rel=0.15)
