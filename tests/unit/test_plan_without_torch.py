# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore plan`` imports no torch, whichever door the file is for, and says what it says with torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.cli import main
from tests.hf_models import tiny_folder

CONSOLE = """
import sys
from lightning_mcore.cli import console
code = console()
print("heavy:", [name for name in ("lightning", "megatron", "torch") if sys.modules.get(name) is not None])
sys.exit(code)
"""
MEGATRON: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-3,
    "bf16": True,
    "output_dir": "out",
}


def write_files(folder: Path, **more: Any) -> dict[str, list[str]]:
    """Write a run for each door; return what follows ``plan``."""
    model = str(tiny_folder("llama"))
    (folder / "arguments.json").write_text(json.dumps(MEGATRON | more))
    (folder / "rows.json").write_text(json.dumps([{"instruction": "say one", "output": "one"}] * 8))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    keys = {"model_name_or_path": model, "stage": "sft", "do_train": True, "finetuning_type": "full"}
    data = {"dataset": "rows", "dataset_dir": str(folder), "template": "default", "cutoff_len": 32}
    (folder / "factory.yaml").write_text(json.dumps(keys | data | MEGATRON | more))
    own = {"class_path": "lightning_mcore.MCoreGPT.from_pretrained", "init_args": {"path": model}}
    strategy = {"class_path": "lightning_mcore.MCoreStrategy", "init_args": {"tensor_model_parallel_size": 2}}
    trainer = {"devices": 4, "accelerator": "cpu", "strategy": strategy, "max_steps": 2}
    (folder / "lightning.yaml").write_text(json.dumps({"trainer": trainer, "model": own}))
    return {
        "arguments": [str(folder / "arguments.json"), "--model", model, "--seq-length", "32", "--devices", "4"],
        "factory": [str(folder / "factory.yaml"), "--devices", "4"],
        "lightning": [str(folder / "lightning.yaml")],
    }


@pytest.mark.parametrize("door", ["arguments", "factory", "lightning"])
def test_a_plan_needs_no_torch(door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *write_files(tmp_path)[door], "--json"]
    done = subprocess.run(
        [sys.executable, "-c", CONSOLE, *words], capture_output=True, text=True, timeout=120, check=False
    )
    output, _, heavy = done.stdout.rpartition("heavy:")
    assert heavy.strip() == "[]", done.stderr
    assert done.returncode == main(words) == 0
    assert json.loads(output) == json.loads(capsys.readouterr().out)
