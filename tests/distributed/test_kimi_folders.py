# SPDX-License-Identifier: Apache-2.0
"""Folders of Kimi Linear, with the names of the hub and with those that transformers writes, and how it writes text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.hf import find_family
from lightning_mcore.interop.export import export_model
from tests.support.hf_models import CONFIGS, auto_model, save_tiny
from tests.support.sentences import refuses

# In this process warnings are errors, and Megatron has many.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("modules_are_tagged")]

# Keys of the hub's config, with what they say in linear_attn_config and otherwise in transformers' names
HUB: dict[str, Any] = {
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 6,
        "num_heads": 4,
        "short_conv_kernel_size": 3,
    },
    "mla_use_nope": True,
    "model_max_length": 64,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 2,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_grouped_topk": True,
}
RENAMED = ("max_position_embeddings", "norm_topk_prob", "num_local_experts", "num_experts_per_tok", "n_shared_experts")
LAYERS = ("layer_types", "mlp_layer_types", "n_group", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder with the hub's names in its config."""
    folder = save_tiny("kimi_linear", tmp_path / "hub")
    given = {key: value for key, value in CONFIGS["kimi_linear"].items() if key not in (*RENAMED, *LAYERS)}
    (folder / "config.json").write_text(json.dumps({**given, **HUB}))
    return folder


def logits_of(folder: Path, tokens: Tensor, out: Path | None = None) -> Tensor:
    with torch.no_grad(), single_process():
        module = MCoreGPT.from_pretrained(str(folder))
        module.configure_model()
        if out is not None:
            export_model(module, str(out))
        logits, _ = module.eval().token_logits({"tokens": tokens, "labels": tokens})
    return logits


def test_a_folder_of_the_hub_comes_back_bit_for_bit(hub: Path, tmp_path: Path) -> None:
    tokens = torch.randint(1, 100, (2, 70), generator=torch.Generator().manual_seed(3))
    expected = auto_model().from_pretrained(hub, dtype=torch.float32)(tokens).logits.detach()
    logits = logits_of(hub, tokens, tmp_path / "again")
    torch.testing.assert_close(logits[..., : expected.size(-1)], expected, atol=1e-4, rtol=0)
    before, after = (load_file(folder / "model.safetensors") for folder in (hub, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: written[key] for key in HUB} == HUB


def test_a_folder_that_transformers_wrote_is_read(hub: Path, tmp_path: Path) -> None:
    tokens = torch.randint(1, 100, (1, 32), generator=torch.Generator().manual_seed(3))
    auto_model().from_pretrained(hub, dtype=torch.float32).save_pretrained(tmp_path / "written")
    names = load_file(tmp_path / "written" / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in names
    assert torch.equal(logits_of(tmp_path / "written", tokens), logits_of(hub, tokens))


def test_a_model_from_scratch_is_written_with_the_names_of_the_hub(tmp_path: Path) -> None:
    source = MCoreGPT.from_pretrained(str(save_tiny("kimi_linear", tmp_path / "source")))
    arguments = {name: value for name, value in source.hparams.items() if name != "hf"}
    with torch.no_grad(), single_process():
        module = MCoreGPT(**arguments)
        module.configure_model()
        export_model(module, str(tmp_path / "out"))
        tokens = torch.randint(1, 100, (1, 32), generator=torch.Generator().manual_seed(3))
        logits, _ = module.eval().token_logits({"tokens": tokens, "labels": tokens})
        expected = auto_model().from_pretrained(tmp_path / "out", dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(logits[..., : expected.size(-1)], expected, atol=1e-4, rtol=0)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.keys() >= set(find_family("kimi_linear").aliases) - {"model_max_length"}
    assert written["model_max_length"] == module.seq_length


def test_errors_name_the_keys_of_the_file(hub: Path) -> None:
    content = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**content, "moe_renormalize": False}))
    with refuses(ValueError, "moe_renormalize=False"):
        MCoreGPT.from_pretrained(str(hub))


def test_a_tensor_of_another_shape_is_refused(hub: Path) -> None:
    tensors = load_file(hub / "model.safetensors")
    tensors["model.layers.0.self_attn.A_log"] = torch.zeros(4)  # as a gated delta net has it
    save_file(tensors, hub / "model.safetensors", {"format": "pt"})
    with refuses(ValueError, "self_attn.A_log"), single_process():
        MCoreGPT.from_pretrained(str(hub)).configure_model()
