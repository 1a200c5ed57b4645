# SPDX-License-Identifier: Apache-2.0
"""Layouts of two ranks compute over NCCL what one rank computes, on two GPUs or sharing one."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.runs import DEVICE, train_on
from tests.te.runs import Run
from tests.te.test_features import EXPERTS, LATENT

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": ({"tensor_model_parallel_size": 2}, {}),
    "tp2-sp": (TP2, {}),
    "tp2-sp-latent": (TP2, LATENT),
    "pp2": ({"pipeline_model_parallel_size": 2}, {}),
    "pp2-interleaved": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"num_layers": 4},
    ),
    "pp2-multi-token": ({"pipeline_model_parallel_size": 2}, {"mtp_num_layers": 1}),
    "cp2": ({"context_parallel_size": 2}, {}),
    "dp2": ({}, {}),
    "dp2-sharded": (SHARDED, {}),
    "ep2": ({"expert_model_parallel_size": 2}, EXPERTS),
    "ep2-tp2": (TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, EXPERTS),
}
SPLITS_A_COPY = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"}


def losses_of_two(impl: str, layout: dict[str, Any], transformer: dict[str, Any]) -> list[float]:
    """Train on two ranks of torchrun; return the losses."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = [impl, json.dumps({"micro_batch_size": 2} | layout), json.dumps(transformer)]
    output = subprocess.run(
        [*command, "-m", "tests.gpu.runs", *given], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in output.stdout.splitlines() if line.startswith("losses ")]
    assert lines, output.stderr[-2000:]
    found: list[float] = json.loads(lines[0].removeprefix("losses "))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_what_one_computes(name: str) -> None:
    layout, transformer = LAYOUTS[name]
    rows = 4 if SPLITS_A_COPY & layout.keys() else 8  # of both data-parallel ranks
    one = train_on(DEVICE, Run(impl="local", transformer=transformer, layout={"micro_batch_size": 2}), rows=rows)
    assert losses_of_two("local", layout, transformer) == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.gpus(te=True)
@pytest.mark.parametrize("name", ["tp2-sp", "pp2", "cp2"])
def test_two_ranks_compute_with_transformer_engine_what_one_computes(name: str) -> None:
    layout, transformer = LAYOUTS[name]
    if DEVICE == "cpu":
        pytest.skip("TransformerEngine on the CPU has tests of its own")
    one = train_on(DEVICE, Run(transformer=transformer, layout={"micro_batch_size": 2}))
    assert losses_of_two("transformer_engine", layout, transformer) == pytest.approx(one.losses, rel=1e-4)
