# SPDX-License-Identifier: Apache-2.0
"""Folders that transformers loads: those without safetensors or without ``model.``, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from torch import Tensor

from lightning_mcore.hf import export_checkpoint, import_checkpoint
from lightning_mcore.hf.source import local_folder
from tests.support.hf_models import YARN, save_tiny, tiny_folder
from tests.support.sentences import refuses
from tests.support.vision_models import CONFIGS as VISION
from tests.support.vision_models import save_vision
from tests.unit.hf.test_hf_dtypes import differences, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron and transformers


def without_weights(folder: Path, name: str = "qwen2") -> Path:
    """Copy a tiny model without its weights."""
    return Path(shutil.copytree(tiny_folder(name), folder, ignore=shutil.ignore_patterns("*.safetensors*")))


def pickled(folder: Path) -> None:
    torch.save(tensors_of(tiny_folder("qwen2")), without_weights(folder) / "pytorch_model.bin")


def pickled_long_ago(folder: Path) -> None:
    """Before torch 1.6 it was not an archive."""
    path = without_weights(folder) / "pytorch_model.bin"
    torch.save(tensors_of(tiny_folder("qwen2")), path, _use_new_zipfile_serialization=False)


def pickled_in_parts(folder: Path) -> None:
    without_weights(folder)
    parts: dict[str, dict[str, Tensor]] = {}
    for number, (name, tensor) in enumerate(tensors_of(tiny_folder("qwen2")).items()):
        parts.setdefault(f"pytorch_model-0000{number % 2 + 1}-of-00002.bin", {})[name] = tensor
    for file, tensors in parts.items():
        torch.save(tensors, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in parts.items() for name in tensors}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def of_auto_model(folder: Path) -> None:
    from transformers import AutoModel

    AutoModel.from_pretrained(tiny_folder("qwen2"), dtype=torch.float32).save_pretrained(folder)
    assert "layers.0.mlp.up_proj.weight" in tensors_of(folder)


@pytest.mark.parametrize("write", [pickled, pickled_long_ago, pickled_in_parts, of_auto_model])
def test_a_folder_that_transformers_loads_is_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write(tmp_path / "model")
    import_checkpoint(str(tmp_path / "model"), str(tmp_path / "checkpoint"))
    export_checkpoint(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert differences(tensors_of(tiny_folder("qwen2")), tensors_of(tmp_path / "out")) == []
    held = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors_of(tmp_path / "out").items())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_weights_with_the_names_of_a_vision_model_in_memory_are_read(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    save_vision(name, tmp_path / "hub")
    old, folder = tensors_of(tmp_path / "hub"), shutil.copytree(tmp_path / "hub", tmp_path / "model")
    parts = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."}
    starts = {key: next(start for start in parts if key.startswith(start)) for key in old}
    new = {parts[start] + key.removeprefix(start): old[key] for key, start in starts.items()}
    save_file(new, folder / "model.safetensors", {"format": "pt"})
    import_checkpoint(str(folder), str(tmp_path / "checkpoint"))
    export_checkpoint(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert differences(old, tensors_of(tmp_path / "out")) == []
    one, other = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / each, dtype=torch.float32).state_dict()
        for each in ("model", "out")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def with_code(folder: Path) -> None:
    torch.save({"model.norm.weight": Code()}, without_weights(folder) / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def adapter_beside_a_model(folder: Path) -> None:
    shutil.copytree(tiny_folder("qwen2"), folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def with_more_tensors(**more: Tensor) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file({**tensors_of(tiny_folder("qwen2")), **more}, without_weights(folder) / "model.safetensors")

    return write


def without_output(folder: Path) -> None:
    tensors = tensors_of(tiny_folder("llama"))
    del tensors["lm_head.weight"]
    save_file(tensors, without_weights(folder, "llama") / "model.safetensors")


def seeing_with_biases(folder: Path) -> None:
    text = {**VISION["qwen3_vl"]["text_config"], "attention_bias": True}
    save_vision("qwen3_vl", folder, text_config=text)


REFUSED: dict[str, Callable[[Path], Any]] = {
    "code": with_code,
    "adapter": adapter,
    "adapter beside": adapter_beside_a_model,
    "classifier": with_more_tensors(**{"score.weight": torch.zeros(3, 32)}),
    "another tensor": with_more_tensors(**{"model.extra.weight": torch.zeros(3)}),
    "no output layer": without_output,
    "YaRN": lambda folder: save_tiny("ernie4_5", folder, rope_parameters=YARN),
    "biases": seeing_with_biases,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    REFUSED[name](tmp_path / "model")
    with refuses(ValueError):
        import_checkpoint(str(tmp_path / "model"), str(tmp_path / "checkpoint"))
    assert "code ran" not in capsys.readouterr().out


TWICE = """
config.json model-00001-of-00001.safetensors consolidated.safetensors params.json original/params.json
original/model.safetensors original/tokenizer.model tokenizer.json pytorch_model.bin chat_template.jinja metal/model.bin
additional_chat_templates/tool_use.jinja hy.tiktoken tekken.json
"""
ON_THE_HUB = {
    "with weights twice": (
        TWICE,
        {"config.json", "model-00001-of-00001.safetensors", "params.json", "tokenizer.json", "chat_template.jinja"}
        | {"additional_chat_templates/tool_use.jinja", "hy.tiktoken", "tekken.json"},
    ),
    "without safetensors": (
        "config.json pytorch_model-00001-of-00001.bin pytorch_model.bin.index.json training_args.bin",
        {"config.json", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"},
    ),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_weights_are_downloaded_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, expected = ON_THE_HUB[name]

    def download(path: str, **patterns: Any) -> str:
        for file in filter_repo_objects(there.split(), **patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_folder("org/model") == str(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == expected
