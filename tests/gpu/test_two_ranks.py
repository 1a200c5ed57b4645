# SPDX-License-Identifier: Apache-2.0
"""Layouts of two ranks compute over NCCL what one rank computes, on two GPUs or sharing one."""

import functools
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
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
WITH_TE = {"tp2-sp": ("bf16-mixed", 1e-3), "pp2": ("32-true", 1e-5), "cp2": ("bf16-mixed", 1e-3)}
"""Precision and tolerance of the layouts that also run with TransformerEngine, whose context parallelism has no fp32.

Losses differed by at most 4e-4 in bf16, and were equal in fp32.
"""

SPLITS_A_COPY = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"}


def run_of(name: str, **fields: Any) -> Run:
    """Return the run of a layout on one rank."""
    return Run(transformer=LAYOUTS[name][1], layout={"micro_batch_size": 2}, **fields)


@functools.cache
def losses_of_two(with_te: bool) -> dict[str, list[float]]:
    """Train each layout on the same two ranks of torchrun, one after the other; return the losses by layout."""
    if with_te:
        runs = {name: run_of(name, precision=WITH_TE[name][0]) for name in WITH_TE}
    else:
        runs = {name: run_of(name, impl="local") for name in LAYOUTS}
    given = {name: asdict(replace(run, layout=run.layout | LAYOUTS[name][0])) for name, run in runs.items()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with tempfile.TemporaryFile("w+") as errors:  # a pipe could fill up while the losses are read
        ranks = subprocess.run(
            [*command, "-m", "tests.gpu.runs", json.dumps(given)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=400,
            check=False,
        )
        errors.seek(0)
        lines = [line.split(" ", 2) for line in ranks.stdout.splitlines() if line.startswith("losses ")]
        assert ranks.returncode == 0, f"trained {[name for _, name, _ in lines]}, then: {errors.read()[-6000:]}"
    return {name: json.loads(losses) for _, name, losses in lines}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_what_one_computes(name: str) -> None:
    rows = 4 if SPLITS_A_COPY & LAYOUTS[name][0].keys() else 8  # of both data-parallel ranks
    one = train_on(DEVICE, run_of(name, impl="local"), rows=rows)
    assert losses_of_two(with_te=False)[name] == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.gpus(te=True)
@pytest.mark.parametrize("name", WITH_TE)
def test_two_ranks_compute_with_transformer_engine_what_one_computes(name: str) -> None:
    if DEVICE == "cpu":
        pytest.skip("TransformerEngine on the CPU has tests of its own")
    precision, tolerance = WITH_TE[name]
    one = train_on(DEVICE, run_of(name, precision=precision))
    assert losses_of_two(with_te=True)[name] == pytest.approx(one.losses, rel=tolerance)
