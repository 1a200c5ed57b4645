# SPDX-License-Identifier: Apache-2.0
"""The settings of a Hugging Face model, from its config alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.hf.source import planned_settings, pretrained_settings
from tests.support.hf_models import tiny_folder
from tests.support.sentences import refuses


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "deepseek_v3, multi-token"])
def test_a_plan_has_the_settings_of_the_run(name: str) -> None:
    folder = str(tiny_folder(name))
    transformer = {"recompute_granularity": "full"}
    settings = pretrained_settings(folder, None, 16, transformer)
    assert settings["hf"].pop("stored") == {"dtype": "float32", "others": {}}  # a plan may have no weights to look at
    assert planned_settings(folder, None, 16, transformer) == settings


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    folder = tiny_folder("deepseek_v3, multi-token")
    shutil.copy(folder / "config.json", tmp_path)
    with refuses(FileNotFoundError, "has neither model.safetensors nor"):
        pretrained_settings(str(tmp_path))
    planned, settings = planned_settings(str(tmp_path)), pretrained_settings(str(folder))
    assert planned["transformer"] == settings["transformer"]
    assert planned["transformer"]["mtp_num_layers"] == 1


def test_a_plan_downloads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(tiny_folder("llama") / "config.json", tmp_path)
    asked: list[Any] = []

    def snapshot_download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    planned_settings("org/model")
    assert asked == [("org/model", ["*.json"])]
