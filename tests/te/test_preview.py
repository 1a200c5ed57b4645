# SPDX-License-Identifier: Apache-2.0
"""The preview of FP8: what is counted, and the example that draws it."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_mcore import FP8Monitor
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.te_cpu import quantize
from tests.examples.test_examples import PNG, run_on_ranks
from tests.support.ranks import run_ranks
from tests.te.runs import Counting, Run, make_model, make_trainer


class Kept(Logger):
    """Keeps what is logged under ``fp8/``."""

    name = "kept"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Keep a row."""
        if any(name.startswith("fp8/") for name in metrics):
            self.rows[step or 0] = dict(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""


def test_lost_values_are_those_of_the_format() -> None:
    """A scale of 4 takes 112 to the largest value of E4M3, 448, and 2**-12 to half of the smallest, 2**-9."""
    import transformer_engine.pytorch.tensor as tensors
    import transformer_engine_torch as tex

    values = torch.tensor([[112.0, 113.0, -500.0, 0.0], [2.0**-12, -(2.0**-12.1), 2.0**-11.9, 1.0]])
    with cpu_runtime():
        delayed = tensors.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), tex.DType.kFloat8E4M3)
        current = tensors.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device="cpu")
        assert quantize.lost(values, quantize.quantize(values, delayed)) == (2, 2)
        assert quantize.lost(values, quantize.quantize(values, current)) == (0, 3)


def monitored(world_size: int) -> dict[int, dict[str, float]]:
    """Train three steps on four rows each with the monitor; return what it logged on this rank."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    kept, rows = Kept(), 4 // world_size
    run = Run(precision="bf16-mixed", fp8={"fp8_recipe": "delayed"}, layout={"micro_batch_size": rows})
    trainer = make_trainer(run, world_size, FP8Monitor(every_n_steps=2), logger=kept)
    trainer.fit(make_model(run), DataLoader(Counting(), batch_size=rows))
    assert quantize.observer is None
    return kept.rows


@pytest.mark.distributed
def test_the_monitor_counts_every_kind_on_all_ranks() -> None:
    """Two data-parallel ranks cast, together, the inputs that one rank casts."""
    one = run_ranks(1, monitored, 1)[0]
    assert list(one) == [0, 2]
    tensors = ("inputs", "weights", "gradients")
    kinds = [f"fp8/{tensor}_{what}" for tensor in tensors for what in ("saturated", "underflowed")]
    assert list(one[0]) == list(one[2]) == kinds
    assert one[0]["fp8/weights_underflowed"] > 0.01  # their first scale is 1
    assert one[2]["fp8/weights_underflowed"] < one[0]["fp8/weights_underflowed"] / 10
    two = run_ranks(2, monitored, 2)
    assert two[1] == two[0]
    assert two[0][0]["fp8/weights_underflowed"] == one[0]["fp8/weights_underflowed"]
    assert two[0][0]["fp8/inputs_underflowed"] == pytest.approx(one[0]["fp8/inputs_underflowed"], rel=1e-3)


def test_a_run_that_casts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to count without FP8"):
        FP8Monitor().setup(make_trainer(Run(), 1), make_model(Run()), "fit")
    with pytest.raises(ValueError, match="every_n_steps=0 is not positive"):
        FP8Monitor(every_n_steps=0)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_compares_bf16_with_the_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-steps=3", "--vocab-size=384", "--max-bytes=300000", "--num-layers=1", "--hidden-size=128")
    output = run_on_ranks(capsys, 1, "preview_fp8.py", *options, "--recipes", "delayed", "mxfp8", folder=tmp_path)
    losses = dict(re.findall(r"^(\w+) +(\d\.\d{4})", output, re.MULTILINE))
    assert list(losses) == ["bf16", "delayed", "mxfp8"]
    assert abs(float(losses["mxfp8"]) - float(losses["bf16"])) < 0.05
    assert (tmp_path / "outputs/preview_fp8/curves.png").read_bytes().startswith(PNG)
