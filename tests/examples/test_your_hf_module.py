# SPDX-License-Identifier: Apache-2.0
"""The example of a LightningModule around a Hugging Face model: the same losses under DDP and split over ranks."""

import re
from pathlib import Path

import pytest

from tests.examples.test_examples import run_on_ranks


def losses(output: str) -> list[float]:
    found = re.search(r"losses: ([\d. ]+)", output)
    assert found is not None, output
    return [float(loss) for loss in found[1].split()]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_module_gives_the_same_losses_under_ddp_and_on_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_on_ranks(capsys, 1, "your_hf_module.py", "--ddp", "--max-steps=4", folder=tmp_path)
    split = run_on_ranks(capsys, 2, "your_hf_module.py", "--max-steps=4", folder=tmp_path)
    assert losses(split) == pytest.approx(losses(plain), abs=2e-5)  # printed with five places
    assert plain.split("written:")[1].splitlines()[0] == split.split("written:")[1].splitlines()[0]
    assert (tmp_path / "outputs/your_hf_module/tuned/model.safetensors").exists()
