# SPDX-License-Identifier: Apache-2.0
"""Models whose attention has an indexer, DeepSeek-V3.2 and GLM-5, in sequences so short that it selects all tokens."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_mcore import MCoreGPT, Recipe, SaveHFModel, hf_model, single_process
from lightning_mcore.interop.export import export_model
from lightning_mcore.layers.indexer import Indexer
from tests.support.hf_models import CONFIGS, VOCAB_SIZE, auto_model, save_tiny
from tests.support.sentences import refuses
from tests.support.toy import run_fit, texts

# In this process warnings are errors, and Megatron has many.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("modules_are_tagged")]

TOPK = CONFIGS["deepseek_v32"]["index_topk"]
FIRST_DENSE = ["dense", "sparse", "sparse", "sparse"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("deepseek_v32", tmp_path_factory.mktemp("model"))


def draw(rows: int, length: int) -> Tensor:
    return torch.randint(1, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(3))


def train(folder: Path, out: Path, precision: Any = "32-true") -> list[float]:
    """Train for three steps with AdamW, export, and return the losses; the indexers would show any weight decay."""
    module = MCoreGPT.from_pretrained(str(folder), TOPK, recipe=Recipe(learning_rate=1e-2, weight_decay=0.5))
    options: dict[str, Any] = {"max_steps": 3, "precision": precision, "callbacks": [SaveHFModel(str(out))]}
    return run_fit(module, {}, texts(3, TOPK, VOCAB_SIZE, first=1), **options).logged


def test_it_trains_as_deepseek_v3_does_with_a_layer_for_multi_token_prediction_too(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"num_nextn_predict_layers": 1}
    new = save_tiny("deepseek_v32", tmp_path / "new", mlp_layer_types=FIRST_DENSE, **keys)
    old = save_tiny("deepseek_v3", tmp_path / "old", first_k_dense_replace=1, rms_norm_eps=1e-3, **keys)
    before = load_file(new / "model.safetensors")
    plain = {name: tensor for name, tensor in before.items() if ".indexer." not in name}
    assert len(before) - len(plain) == 5 * 5  # of four layers, and of the one ahead
    save_file(plain, old / "model.safetensors", {"format": "pt"})
    assert train(new, tmp_path / "new_out") == train(old, tmp_path / "old_out")
    after, of_old = (load_file(tmp_path / name / "model.safetensors") for name in ("new_out", "old_out"))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] if ".indexer." in name else of_old[name]), name
    changed = [name for name in plain if not torch.equal(after[name], before[name])]
    assert len(changed) > len(plain) / 2


def test_weights_that_are_stored_in_fp32_keep_their_bits_in_a_run_in_bf16(tmp_path: Path) -> None:
    folder = save_tiny("deepseek_v32", tmp_path / "model", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    wide = ("indexer.weights_proj.weight", "indexer.k_norm.weight", "indexer.k_norm.bias")
    tensors |= {name: tensor.float() + 1e-6 for name, tensor in tensors.items() if name.endswith(wide)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    train(folder, tmp_path / "out", "bf16-mixed")
    after = load_file(tmp_path / "out" / "model.safetensors")
    kept = [name for name in tensors if ".indexer." in name]
    assert {tensors[name].dtype for name in kept} == {torch.float32, torch.bfloat16}
    assert [name for name in kept if after[name].dtype != tensors[name].dtype] == []
    assert [name for name in kept if not torch.equal(after[name], tensors[name])] == []


def test_longer_sequences_are_refused_before_anything_is_built(folder: Path) -> None:
    with refuses(ValueError, f"seq_length={TOPK + 1}"):
        MCoreGPT.from_pretrained(str(folder), seq_length=TOPK + 1)
    assert MCoreGPT.from_pretrained(str(folder)).seq_length == TOPK < CONFIGS["deepseek_v32"]["max_position_embeddings"]


def test_longer_rows_are_refused_and_packed_rows_only_for_longer_documents(folder: Path) -> None:
    tokens = draw(1, 2 * TOPK)

    def packed(first: int) -> dict[str, Tensor]:
        ends = torch.tensor([[0, first, 2 * TOPK]])
        return {"tokens": tokens, "labels": tokens, "cu_seqlens": ends, "cu_seqlens_padded": ends}

    with torch.no_grad(), single_process():
        module = MCoreGPT.from_pretrained(str(folder))
        module.configure_model()
        one, _ = module.token_logits({"tokens": tokens[:, :TOPK], "labels": tokens[:, :TOPK]})
        both, _ = module.token_logits(packed(TOPK))
        torch.testing.assert_close(both[:, :TOPK], one, atol=1e-5, rtol=0)
        for batch in ({"tokens": tokens, "labels": tokens}, packed(TOPK - 1)):
            with refuses(ValueError, f"index_topk={TOPK}"):
                module.token_logits(batch)
            with refuses(ValueError, f"index_topk={TOPK}"):
                module.on_before_batch_transfer(batch, 0)
        assert module.on_before_batch_transfer(packed(TOPK), 0)


def test_text_is_generated_up_to_the_same_length(folder: Path) -> None:
    prompt = draw(1, TOPK - 6)
    expected = auto_model().from_pretrained(folder, dtype=torch.float32)
    wanted = expected.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    module = pl.LightningModule()
    with torch.no_grad(), single_process():
        model = hf_model(module, str(folder))
        found = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert torch.equal(found, wanted)
        with refuses(ValueError, f"index_topk={TOPK}"):
            model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)


def test_an_indexer_cannot_be_trained_alone(folder: Path) -> None:
    module = MCoreGPT.from_pretrained(str(folder), train_only=["indexer"])
    with refuses(ValueError, "train_only has 'indexer'"):
        module.check_settings()
    module = MCoreGPT.from_pretrained(str(folder), lora={"r": 2, "target_modules": ["wq_b"]})
    with refuses(ValueError, "wq_b"):
        module.check_settings()


def test_a_model_from_scratch_is_written_for_transformers(folder: Path, tmp_path: Path) -> None:
    source = MCoreGPT.from_pretrained(str(folder))
    arguments = {name: value for name, value in source.hparams.items() if name != "hf"}
    tokens = draw(1, 32)
    with torch.no_grad(), single_process():
        module = MCoreGPT(**arguments)
        module.configure_model()
        assert sum(isinstance(layer, Indexer) for layer in module.modules()) == 4
        export_model(module, str(tmp_path / "out"))
        logits, _ = module.eval().token_logits({"tokens": tokens, "labels": tokens})
        expected = auto_model().from_pretrained(tmp_path / "out", dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(logits[..., : expected.size(-1)], expected, atol=1e-4, rtol=0)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "deepseek_v32"
