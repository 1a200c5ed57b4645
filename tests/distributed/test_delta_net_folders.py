# SPDX-License-Identifier: Apache-2.0
"""Published folders of Qwen3-Next and Qwen3.5: of what they hold beside a text model, the text model is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.hf.registry import find_family
from lightning_mcore.hf.source import complete_config
from lightning_mcore.interop.export import export_model
from tests.support.hf_models import CONFIGS, draw_tensor, stacked_experts

# In this process warnings are errors, and Megatron has many.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("modules_are_tagged")]

TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
TEXTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def save_whole(name: str, folder: Path, stacked: bool) -> Any:
    """Write a tiny model with a tower and multi-token prediction, and return the model of transformers."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    sections = {"mrope_section": [1, 2, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    text = {**CONFIGS[TEXTS[name]], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections}}
    config = AutoConfig.for_model(name, text_config=text, vision_config=TOWER)
    config.tie_word_embeddings = text.get("tie_word_embeddings", False)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = {key: draw_tensor(key, tensor) for key, tensor in load_file(folder / "model.safetensors").items()}
    tensors["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(stacked_experts(tensors) if stacked else tensors, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(("name", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)])
def test_the_text_model_of_a_folder_with_a_tower_is_read_and_written(name: str, stacked: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = save_whole(name, tmp_path / "whole", stacked)
    tokens = torch.randint(1, 100, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), single_process():
        module = MCoreGPT.from_pretrained(str(tmp_path / "whole"))
        module.configure_model()
        logits, _ = module.token_logits({"tokens": tokens, "labels": tokens})
        export_model(module, str(tmp_path / "text"))
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
        expected = whole(tokens).logits
        torch.testing.assert_close(logits[..., : expected.size(-1)], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(written(tokens).logits, expected, atol=1e-5, rtol=0)
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("whole", "text"))
    assert not any(key.startswith(("mtp.", "model.visual.")) for key in after)
    renamed = {key.replace("model.language_model.", "model."): tensor for key, tensor in before.items()}
    assert all(torch.equal(after[key], renamed[key]) for key in after.keys() & renamed.keys())
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == TEXTS[name]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3_next", {"use_sliding_window": False, "full_attention_interval": 2, "rope_theta": 1e7}),
        (
            "qwen3_5_text",
            {
                "attn_output_gate": True,
                "output_gate_type": "swish",
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
            },
        ),
    ],
)
def test_keys_of_published_configs_are_known(name: str, published: dict[str, Any]) -> None:
    family, given = find_family(name), {**CONFIGS[name], **published, "model_type": name}
    if "full_attention_interval" in published:
        del given["layer_types"]
    fields = family.read_config(complete_config(family, given))
    assert fields["delta_net"]["linear_attention_freq"] == [1, 0, 1, 0]
