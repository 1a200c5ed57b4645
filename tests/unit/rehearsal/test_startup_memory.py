# SPDX-License-Identifier: Apache-2.0
"""``plan`` counts the moment before the first step when a rank holds the weights of a chunk twice."""

from typing import Any

import pytest

from lightning_mcore.planning.plan import make_plan
from lightning_mcore.rehearsal.processes import Played, run_jobs
from lightning_mcore.rehearsal.settings import build_of
from tests.support.rehearsed import RECOMPUTE, job
from tests.unit.rehearsal.test_planned_memory import run

RANKS = 256  # so many share the optimizer's state that a step needs less
SHARDED = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one chunk": SHARDED,
    "two chunks": {**SHARDED, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


def test_the_copies_at_startup_are_planned() -> None:
    runs = [run(layout, length=64, **RECOMPUTE) for layout in LAYOUTS.values()]
    jobs = [job(build_of(settings, RANKS, 8)[0], 0) for settings in runs]
    for settings, played in zip(runs, run_jobs(jobs, lambda rank, what: None), strict=True):
        assert isinstance(played, Played), played.trace
        memory = make_plan(settings, RANKS).stages[0].memory
        assert memory.setup > 1.05 * memory.step
        assert (played.ranks[0].peak_phase, memory.total) == ("setup", memory.setup)
        assert played.ranks[0].peak_bytes == pytest.approx(memory.setup, rel=0.01)
        assert played.ranks[0].step_peak_bytes == pytest.approx(memory.step, rel=0.03)
