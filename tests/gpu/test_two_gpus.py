# SPDX-License-Identifier: Apache-2.0
"""Layouts of two GPUs compute what one computes."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.runs import DEVICE, train_on
from tests.te.runs import Run
from tests.te.test_features import EXPERTS

pytestmark = [pytest.mark.gpus(count=2), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2-sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp2": ({"pipeline_model_parallel_size": 2}, {}),
    "cp2": ({"context_parallel_size": 2}, {}),
    "ep2": ({"expert_model_parallel_size": 2}, EXPERTS),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_gpus_compute_what_one_computes(name: str) -> None:
    layout, transformer = LAYOUTS[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = ["local", json.dumps(layout), json.dumps(transformer)]
    output = subprocess.run(
        [*command, "-m", "tests.gpu.runs", *given], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in output.stdout.splitlines() if line.startswith("losses ")]
    assert lines, output.stderr[-2000:]
    data = 2 if name == "ep2" else 1  # whose ranks read different rows
    one = train_on(DEVICE, Run(impl="local", transformer=transformer, layout={"micro_batch_size": 2}))
    if data == 1:
        assert json.loads(lines[0].removeprefix("losses ")) == pytest.approx(one.losses, rel=1e-4)
    else:
        assert len(json.loads(lines[0].removeprefix("losses "))) == len(one.losses)
