# SPDX-License-Identifier: Apache-2.0
"""Every tensor comes through import and export with its dtype and its bits, whatever dtypes a folder mixes."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from lightning_mcore import MCoreGPT, MCoreStrategy, Recipe, SaveHFModel
from lightning_mcore.hf import export_checkpoint, import_checkpoint
from lightning_mcore.hf.vision_families import with_tower
from tests.support.hf_models import CONFIGS, VARIANTS, VOCAB_SIZE, save_tiny, tiny_folder
from tests.support.sentences import refuses
from tests.support.toy import make_trainer
from tests.support.vision_models import CONFIGS as VISION
from tests.support.vision_models import vision_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron and transformers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = (*CONFIGS, *VISION, *(name for name in VARIANTS if "multi-token" in name or "tied" in name))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, read by safetensors alone."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    return found


def mixed_folder(name: str, folder: Path, dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    """Write a tiny model whose tensors have other dtypes, and return them; copies of a tensor have one dtype."""
    source = vision_folder(name) if name in VISION else tiny_folder(name)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    known: dict[bytes, torch.dtype] = {}
    tensors = {}
    for tensor_name, tensor in tensors_of(source).items():
        dtype = known.setdefault(tensor.numpy().tobytes(), dtype_of(tensor_name))
        tensors[tensor_name] = tensor.to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Return what differs in names, dtypes or bits."""
    wrong = [f"{name} is in one of them" for name in expected.keys() ^ found.keys()]
    for name in expected.keys() & found.keys():
        one, other = expected[name], found[name]
        if one.dtype != other.dtype or not torch.equal(
            *(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
        ):
            wrong.append(f"{name}: {one.dtype} {one.flatten()[:2]}, now {other.dtype} {other.flatten()[:2]}")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_random_dtypes_come_back_with_their_bits(name: str, tmp_path: Path) -> None:
    draw = random.Random(name)
    tensors = mixed_folder(name, tmp_path / "model", lambda _: draw.choice(DTYPES))
    assert {tensor.dtype for tensor in tensors.values()} == set(DTYPES)
    family = with_tower(name) if name in VISION else None
    import_checkpoint(str(tmp_path / "model"), str(tmp_path / "checkpoint"), family=family)
    export_checkpoint(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    if name == "qwen3_vl_moe":  # transformers wrote its experts in another form than the hub has
        tensors = {key: tensor.mT.contiguous() if ".experts." in key else tensor for key, tensor in tensors.items()}
    assert differences(tensors, tensors_of(tmp_path / "out")) == []


def test_a_folder_that_transformers_writes_in_bf16_has_its_fp32_tensors_again(tmp_path: Path) -> None:
    model = save_tiny("deepseek_v3", tmp_path / "model", dtype=torch.bfloat16)
    tensors = tensors_of(model)
    stay = DeepseekV3PreTrainedModel._keep_in_fp32_modules_strict  # the weight of the router, in newer releases
    gate = torch.float32 if "gate.weight" in stay else torch.bfloat16
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == gate
    import_checkpoint(str(model), str(tmp_path / "checkpoint"))
    export_checkpoint(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert differences(tensors, tensors_of(tmp_path / "out")) == []


LINEAR = "model.layers.1.self_attn.o_proj.weight"


def test_a_run_in_bf16_refuses_to_round_a_tensor_that_is_stored_wider(tmp_path: Path) -> None:
    """A matrix product takes one dtype; a checkpoint of the model is refused too, unless it was asked to round."""
    mixed_folder("llama", tmp_path / "model", lambda name: torch.float32 if name == LINEAR else torch.bfloat16)
    import_checkpoint(str(tmp_path / "model"), str(tmp_path / "wide"))
    import_checkpoint(str(tmp_path / "model"), str(tmp_path / "rounded"), dtype="bfloat16")
    for place in ("model", "wide"):
        with refuses(ValueError, "is stored in float32"):
            fit(tmp_path / place, "bf16-mixed")
        fit(tmp_path / place, "32-true")
    fit(tmp_path / "rounded", "bf16-mixed")
    export_checkpoint(str(tmp_path / "rounded"), str(tmp_path / "out"))
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_wider_tensor_whose_values_a_run_has_exactly_is_read(tmp_path: Path) -> None:
    tensors = mixed_folder("llama", tmp_path / "model", lambda _: torch.bfloat16)
    tensors[LINEAR] = tensors[LINEAR].float()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    fit(tmp_path / "model", "bf16-mixed", SaveHFModel(str(tmp_path / "out")))
    assert differences(tensors, tensors_of(tmp_path / "out")) == []


def fit(path: Path, precision: Any, *callbacks: pl.Callback) -> None:
    """Take an optimizer step that changes nothing."""
    module = MCoreGPT.from_pretrained(str(path), seq_length=16, recipe=Recipe(learning_rate=0.0, weight_decay=0.0))
    rows = torch.randint(0, VOCAB_SIZE, (2, 17))
    loader = DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=2)
    make_trainer(MCoreStrategy(), precision=precision, max_steps=1, callbacks=[*callbacks]).fit(module, loader)
