# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4 are read as transformers dequantises them, and written in bf16."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightning_mcore.hf import export_checkpoint
from lightning_mcore.hf.safetensors import SafetensorsFolder
from lightning_mcore.hf.weight_rules import index_of
from lightning_mcore.interop.importing import import_checkpoint
from tests.support.hf_models import save_tiny
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore")

PACKED = ("gate_up_proj", "down_proj")
SHARD, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model with experts in MXFP4, and the same as transformers dequantises it."""
    root = tmp_path_factory.mktemp("mxfp4")
    plain = save_tiny("gpt_oss", root / "plain", dtype=torch.bfloat16, intermediate_size=64, hidden_size=96)
    packed = Path(shutil.copytree(plain, root / "packed"))
    generator = torch.Generator().manual_seed(1)
    whole, stored = load_file(plain / SHARD), load_file(plain / SHARD)
    for name in [name for name in whole if name.endswith(PACKED)]:
        experts, channels, rows = stored.pop(name).shape
        shape = (experts, rows, channels // 32, 16)
        blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 124, shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(whole, plain / SHARD)
    save_file(stored, packed / SHARD)
    content = json.loads((packed / CONFIG).read_text())
    (packed / CONFIG).write_text(json.dumps({**content, "quantization_config": {"quant_method": "mxfp4"}}))
    return packed, plain


def test_every_rectangle_has_the_bits_that_transformers_gives_it(folders: tuple[Path, Path]) -> None:
    packed, plain = (SafetensorsFolder(str(folder)) for folder in folders)
    assert (packed.shapes, packed.dtypes) == (plain.shapes, plain.dtypes)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert packed.shapes[name] == (4, 96, 128)
    whole = plain.read(name, (0, 0, 0), (4, 96, 128))
    for start, shape, steps in [
        ((0, 0, 0), (4, 96, 128), ()),
        ((1, 0, 1), (2, 96, 64), (1, 1, 2)),
        ((3, 40, 6), (1, 30, 5), (1, 1, 2)),
        ((0, 31, 127), (4, 2, 1), ()),
    ]:
        values = packed.read(name, start, shape, steps)
        assert torch.equal(values.view(torch.int16), whole[index_of(start, shape, steps)].view(torch.int16))


def test_a_model_is_imported_and_written_in_bf16_as_transformers_has_it(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    import_checkpoint(str(folders[0]), str(tmp_path / "whole.ckpt"))
    export_checkpoint(str(tmp_path / "whole.ckpt"), str(tmp_path / "out"))
    written, expected = load_file(tmp_path / "out" / SHARD), load_file(folders[1] / SHARD)
    assert written.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in written.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / CONFIG).read_text())


@pytest.mark.parametrize("lost", ["_blocks", "_scales"])
def test_half_of_a_packed_matrix_is_refused(folders: tuple[Path, Path], tmp_path: Path, lost: str) -> None:
    stored = load_file(folders[0] / SHARD)
    del stored[f"model.layers.2.mlp.experts.down_proj{lost}"]
    save_file(stored, tmp_path / SHARD)
    with refuses(ValueError, "which are not one matrix in MXFP4"):
        SafetensorsFolder(str(tmp_path))
