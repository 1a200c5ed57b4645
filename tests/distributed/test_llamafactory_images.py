# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's file for a vision-language model runs, layout included: frozen parts stay, the others learn."""

import json
from pathlib import Path

import pytest
import torch

from lightning_mcore.cli.llamafactory import run
from tests.support.factory_images import write_file
from tests.support.hf_models import read_tensors
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


def train(file: str) -> None:
    assert run([file, "use_cpu=true", "report_to=none", "disable_tqdm=true", "--devices", "4"]) == 0


def test_the_file_of_qwen2_vl_trains_its_language_model(tmp_path: Path) -> None:
    """On four ranks: tensor, sequence and pipeline parallel; two of its datasets have videos."""
    run_ranks(4, train, write_file(tmp_path, weights=True, videos=True))
    lines = (tmp_path / "out" / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert losses[-1] < losses[0] - 1
    before, after = (dict(read_tensors(tmp_path / name)) for name in ("model", "out"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name].bfloat16(), after[name].bfloat16())}
    assert same == {name for name in before if name.startswith("visual.")}
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
