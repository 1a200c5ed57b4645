# SPDX-License-Identifier: Apache-2.0
"""Published folders of Llama 4, which have a vision tower: the language model is read, and written as a text model."""

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
from tests.parity.test_peft_folders import compare
from tests.support.hf_models import CONFIGS, draw_tensor

# In this process warnings are errors, and Megatron has many.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("modules_are_tagged")]

TOWER = {
    **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8},
    **{"patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
}


def save_whole(folder: Path) -> Any:
    """Write a tiny model with a tower, and return the model of transformers."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model("llama4", text_config=dict(CONFIGS["llama4_text"]), vision_config=TOWER)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = {key: draw_tensor(key, tensor) for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def test_the_language_model_of_a_folder_with_a_tower_is_read_and_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = save_whole(tmp_path / "whole")
    tokens = torch.randint(1, 100, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), single_process():
        module = MCoreGPT.from_pretrained(str(tmp_path / "whole"))
        module.configure_model()
        logits, _ = module.token_logits({"tokens": tokens, "labels": tokens})
        export_model(module, str(tmp_path / "text"))
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
        expected = whole.language_model(tokens).logits  # the whole fails without images in transformers 5.24
        torch.testing.assert_close(logits[..., : expected.size(-1)], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(written(tokens).logits, expected, atol=1e-5, rtol=0)
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("whole", "text"))
    of_text = {key: tensor for key, tensor in before.items() if key.startswith("language_model.")}
    assert len(of_text) < len(before)
    assert {f"language_model.{key}" for key in after} == of_text.keys()
    assert all(torch.equal(after[key], of_text[f"language_model.{key}"]) for key in after)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "llama4_text"


def test_peft_reads_its_adapters_on_the_class_with_its_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Llama4ForConditionalGeneration

    def of_text(model: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        return model.language_model(input_ids)

    monkeypatch.setattr(Llama4ForConditionalGeneration, "forward", of_text)  # its own fails without images in 5.24
    save_whole(tmp_path / "whole")
    compare(tmp_path / "whole", tmp_path, {"exclude_modules": ["feed_forward.experts"]}, "stacked", sees=True)


def test_keys_of_published_configs_are_known() -> None:
    """As in Llama-4-Scout-17B-16E, where the two factors of Llama 3's stretch are equal."""
    text = {
        **{"attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1},
        **{"attn_temperature_tuning": True, "cache_implementation": "hybrid", "floor_scale": 8192},
        **{"for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120},
        **{"interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
        **{"model_type": "llama4_text", "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12},
        **{"num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8},
        **{"num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        **{"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True, "vocab_size": 202048},
        "rope_scaling": {
            **{"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 8192,
        },
    }
    images = {"boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092, "vision_config": TOWER}
    family = find_family("llama4")
    fields = family.read_config(complete_config(family, {"model_type": "llama4", "text_config": text, **images}))
    assert fields["no_rope_freq"] == [0, 0, 0, 1] * 12
    assert (fields["attention_chunk"], fields["num_moe_experts"], "moe_layer_freq" in fields) == (8192, 16, False)
