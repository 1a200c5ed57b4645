# SPDX-License-Identifier: Apache-2.0
"""The settings of a Hugging Face model, from its config alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.hf.source import planned_settings, pretrained_settings
from tests.support.hf_models import save_tiny, tiny_folder
from tests.support.sentences import refuses


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "deepseek_v3, multi-token"])
def test_a_plan_has_the_settings_of_the_run(name: str) -> None:
    folder = str(tiny_folder(name))
    transformer = {"recompute_granularity": "full"}
    settings = pretrained_settings(folder, None, 16, transformer)
    assert settings["hf"].pop("stored") == {"dtype": "float32", "others": {}}  # a plan may have no weights to look at
    assert planned_settings(folder, None, 16, transformer) == settings


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        # As in Nemotron 3 Super, whose experts work in a quarter of hidden_size
        ("nemotron_h", {"moe_latent_size": 8, "moe_intermediate_size": 256, "layers_block_type": ["moe"] * 4}),
        ("nemotron_h", {"layers_block_type": ["linear_attention"] * 4, "intermediate_size": 1024}),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4, "head_dim": 256}),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 4}),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 4, "v_head_dim": 512}),
    ],
)
def test_layers_are_not_taken_for_larger_ones_of_another_kind(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path, **keys)
    assert pretrained_settings(str(folder))["vocab_size"] == 101


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
