# SPDX-License-Identifier: Apache-2.0
"""The memory that a rehearsal counts, and that ``plan`` computes, is what gloo ranks take.

All three are totals of a step: weights, gradients, optimizer state and the most that activations ever took. Gloo ranks
are measured with another counter (``tests/support/live_memory.py``).
"""

from dataclasses import replace
from functools import partial

import pytest

from lightning_mcore.rehearsal.processes import Failure, Played
from tests.distributed.test_plan_memory import EP, MOE, SHARDED, run
from tests.distributed.test_plan_memory import RUNS as PLANNED
from tests.support.live_memory import LiveRun, measured
from tests.support.ranks import run_ranks
from tests.support.rehearsed import RECOMPUTE, job, live_run, play

pytestmark = pytest.mark.distributed
WITHIN = 0.03
# In bf16, because a GPU has no fused attention for grouped queries in fp32, and keeps all scores.
RUNS: dict[str, LiveRun] = {name: PLANNED[name] for name in ("dense-bf16", "tp2-sp-bf16")}
RUNS["cp2-bf16-two-rows"] = replace(PLANNED["cp2-two-rows"], precision="bf16-mixed")
RUNS["recomputed-experts-ep2-bf16"] = run(
    MOE | RECOMPUTE, 2, EP | SHARDED, precision="bf16-mixed", rows=2, seq_length=512
)
# RMSNorm is one kernel on a GPU alone; on a CPU it keeps two tensors in fp32.
LAYER_NORM = {"normalization": "LayerNorm"}
RUNS = {
    name: replace(one, model={**one.model, "transformer": one.model["transformer"] | LAYER_NORM})
    for name, one in RUNS.items()
}


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Played | Failure]:
    return play({name: job(partial(live_run, run)) for name, run in RUNS.items()})


def least(runs: dict[str, LiveRun]) -> dict[str, int]:
    """Return the bytes that this rank takes, the least of four times: gloo's threads may free a buffer late."""
    times = [measured(runs) for _ in range(4)]
    return {name: min(sum(found[name].values()) for found in times) for name in runs}


@pytest.fixture(scope="module")
def taken() -> dict[str, dict[int, int]]:
    """Return the bytes that each rank of a run takes on the CPU."""
    found: dict[str, dict[int, int]] = {}
    for world in sorted({RUNS[name].world for name in RUNS}):
        runs: dict[str, LiveRun] = {name: RUNS[name] for name in RUNS if RUNS[name].world == world}
        for rank, taken_here in enumerate(run_ranks(world, least, runs, timeout=300)):
            for name, count in taken_here.items():
                found.setdefault(name, {})[rank] = count
    return found


@pytest.mark.parametrize("name", RUNS)
def test_plan_and_rehearsal_agree_with_real_ranks(
    rehearsed: dict[str, Played | Failure], taken: dict[str, dict[int, int]], name: str
) -> None:
    played = rehearsed[name]
    assert isinstance(played, Played), played.trace
    for report in played.ranks:
        real = taken[name][report.rank]
        assert report.step_peak_bytes == pytest.approx(real, rel=WITHIN)
        assert RUNS[name].planned(report.rank).total == pytest.approx(real, rel=WITHIN)
