# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models that cannot be read are refused in one sentence, before a model is built if possible."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from lightning_mcore import MCoreGPT
from lightning_mcore.checkpoint import save as checkpoint_save
from lightning_mcore.checkpoint import writer as checkpoint_writer
from lightning_mcore.checkpoint.files import record_file
from lightning_mcore.checkpoint.save import CheckpointSave
from lightning_mcore.hf.config_rules import shortened
from lightning_mcore.hf.safetensors import INDEX_FILE, SafetensorsFolder
from lightning_mcore.hf.source import planned_settings
from lightning_mcore.hf.weights import HFWeights
from lightning_mcore.interop.export import export_checkpoint
from lightning_mcore.interop.importing import import_checkpoint
from lightning_mcore.layers.session import single_process
from tests.support.hf_models import YARN, read_tensors, save_tiny, tiny_folder

Damage = Callable[[Path], object]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model in several files."""
    return save_tiny("llama", tmp_path_factory.mktemp("whole") / "model", max_shard_size="60KB")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of it to damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change_config(**keys: Any) -> Damage:
    """Return what changes keys of the config; None takes one away."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **keys}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return damage


def first_file(folder: Path) -> Path:
    return min(folder.glob("model-00001-of-*.safetensors"))


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object], in_index: bool = True) -> Damage:
    """Return what changes the tensors of the first file, and the index with them."""

    def damage(folder: Path) -> None:
        path, index = first_file(folder), folder / INDEX_FILE
        tensors = load_file(path)
        before = set(tensors)
        change(tensors)
        save_file(tensors, path)
        if in_index:
            content = json.loads(index.read_text())
            for name in before - set(tensors):
                del content["weight_map"][name]
            content["weight_map"] |= dict.fromkeys(tensors, path.name)
            index.write_text(json.dumps(content))

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def only_pickles(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def another_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return what changes the header of the first file."""

    def damage(folder: Path) -> None:
        path = first_file(folder)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return damage


EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

REFUSED_AT_ONCE: dict[str, tuple[Damage, type[Exception], str]] = {
    "another architecture": (
        change_config(model_type="gpt_neox"),
        ValueError,
        r"models of type 'gpt_neox' are not supported; choose llama, mistral, mixtral, qwen2, qwen2_moe, qwen3,"
        r" qwen3_moe, deepseek_v3, glm4_moe, kimi_k2, .*, or give your own family, family='package\.module:FAMILY',"
        r' which the guide "Add a family" shows how to write',
    ),
    "no model type": (change_config(model_type=None), ValueError, r"config\.json has no model_type; give the folder"),
    "a key that changes the numbers": (
        change_config(hidden_act="gelu"),
        ValueError,
        r"config\.json: hidden_act='gelu' is not supported, because Megatron's model .*; only 'silu' is",
    ),
    "an unknown key": (
        change_config(logit_softcapping=30.0),
        ValueError,
        r"config\.json: logit_softcapping=30\.0 is not a known key of 'llama' configs",
    ),
    "a quantised model": (
        change_config(quantization_config={"quant_method": "fp8"}),
        ValueError,
        r"the weights in FOLDER are quantised with fp8, and training needs unquantised ones; give the model in bf16",
    ),
    "quantised tensors": (
        change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].to(torch.float8_e4m3fn)})),
        ValueError,
        r"model\.embed_tokens\.weight in FOLDER/model-00001-of-\d+\.safetensors holds F8_E4M3, as in a quantised model",
    ),
    "whole numbers": (
        change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].to(torch.int8)})),
        ValueError,
        r"holds I8, as in a quantised model or a buffer without weights; give the model in bf16, fp16 or fp32, and",
    ),
    "a config that is cut off": (
        write("config.json", b'{"model_type": "lla'),
        ValueError,
        r"FOLDER/config\.json is not JSON, or only part of it \(.*\); download it again",
    ),
    "a list for a config": (write("config.json", b"[]"), ValueError, r"config\.json holds a list, not an object"),
    "an index that is cut off": (
        write(INDEX_FILE, b'{"weight_map": {'),
        ValueError,
        r"FOLDER/model\.safetensors\.index\.json is not JSON, or only part of it",
    ),
    "an index of something else": (write(INDEX_FILE, b"{}"), ValueError, r"has no weight_map of file names"),
    "an index that leads elsewhere": (
        write(INDEX_FILE, json.dumps({"weight_map": {EMBEDDING: "../model.safetensors"}}).encode()),
        ValueError,
        r"has no weight_map of file names; download it again",
    ),
    "a missing file": (
        lambda folder: first_file(folder).unlink(),
        FileNotFoundError,
        r"FOLDER lacks model-00001-of-\d+\.safetensors, which model\.safetensors\.index\.json names; download the",
    ),
    "a file that is cut off": (
        lambda folder: first_file(folder).write_bytes(first_file(folder).read_bytes()[:-100]),
        ValueError,
        r"model-00001-of-\d+\.safetensors is damaged \(incomplete metadata, file not fully covered\); download",
    ),
    "a file cut off in its header": (
        lambda folder: first_file(folder).write_bytes(first_file(folder).read_bytes()[:40]),
        ValueError,
        r"is damaged \(invalid header length\); download it again",
    ),
    "an empty file": (
        lambda folder: first_file(folder).write_bytes(b""),
        ValueError,
        r"is damaged \(header too small\); download it again",
    ),
    "a header of noise": (
        lambda folder: first_file(folder).write_bytes((8).to_bytes(8, "little") + b"\xff\x00 noise" + bytes(100)),
        ValueError,
        r"is damaged \(invalid UTF-8 in header: .*\); download it again",
    ),
    "a header of another kind": (
        lambda folder: first_file(folder).write_bytes((2).to_bytes(8, "little") + b"[]"),
        ValueError,
        r"is damaged \(invalid JSON in header: .*\); download it again",
    ),
    "a tensor without a place": (
        another_header(lambda header: header[EMBEDDING].pop("data_offsets")),
        ValueError,
        r"is damaged \(invalid JSON in header: missing field `data_offsets` .*\); download it again",
    ),
    "a tensor with another place": (
        another_header(lambda header: header[EMBEDDING].update(shape=[101, 31])),
        ValueError,
        r"is damaged \(invalid shape, data type, or offset for tensor\); download it again",
    ),
    "a tensor that is in no index": (
        change_tensors(lambda tensors: tensors.update(extra=torch.zeros(2)), in_index=False),
        ValueError,
        r"and the files disagree on 1 tensors, first on extra; download the model again",
    ),
    "pickled weights": (
        only_pickles,
        ValueError,
        r"FOLDER/pytorch_model\.bin holds something other than tensors, or is damaged \(EOFError\); save the model"
        r" again with save_pretrained of transformers, which writes safetensors",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        FileNotFoundError,
        r"FOLDER has no config\.json; give the folder of a Hugging Face model",
    ),
    "a quantised model that does not say how": (
        change_config(quantization_config=[1]),
        ValueError,
        r"the weights in FOLDER are quantised with some method, and training needs unquantised ones",
    ),
    "a type from elsewhere": (
        change_config(dtype="os.system"),
        ValueError,
        r"config\.json: dtype='os\.system' is not supported, because weights .*; only None or 'float32' or 'bfloat16'",
    ),
    "a folder in place of the config": (
        lambda folder: [(folder / "config.json").unlink(), (folder / "config.json").mkdir()],
        FileNotFoundError,
        r"FOLDER has no config\.json",
    ),
    "a config nested without an end": (
        write("config.json", b'{"model_type": "llama", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ValueError,
        r"config\.json is not JSON, or only part of it \(.*\); download it again",
    ),
    "a config nested deep": (
        write("config.json", b'{"model_type": "llama", "x": ' + b"[" * 80 + b"]" * 80 + b"}"),
        ValueError,
        r"config\.json is not JSON, .* \(it is nested deeper than 64 levels\); download it again",
    ),
    "no number": (
        write("config.json", b'{"model_type": "llama", "rms_norm_eps": NaN}'),
        ValueError,
        r"config\.json is not JSON, .* \(rms_norm_eps is nan, which is not a JSON number\); download it again",
    ),
    "a key that takes a method's place": (
        change_config(to_dict=5),
        ValueError,
        r"config\.json: transformers refuses config\.json: 'int' object is not callable",
    ),
    "a key of another kind": (
        change_config(rope_parameters=[1]),
        ValueError,
        r"config\.json: (transformers refuses config\.json|rope_parameters=\[1\] does not have the type)",
    ),
    "more labels than words": (
        change_config(num_labels=10**9),
        ValueError,
        r"config\.json: num_labels=1000000000 is not supported; only whole numbers from 0 to 1000000 are",
    ),
    "sizes beyond the weights": (
        change_config(hidden_size=1 << 20, intermediate_size=1 << 20),
        ValueError,
        r"FOLDER/config\.json describes a model of \d{13} weights or more, and its files hold \d{5}; give config and",
    ),
    "two tensors in one place": (
        another_header(lambda header: [entry.update(data_offsets=[0, 12928]) for entry in header.values()]),
        ValueError,
        r"is damaged \(invalid .*offset.*\); download it again",
    ),
    "a tensor of a negative size": (
        another_header(lambda header: header[EMBEDDING].update(shape=[-101, -32])),
        ValueError,
        r"is damaged \(invalid JSON in header: invalid value: integer `-101`, .*\); download it again",
    ),
    "a tensor without an end": (
        another_header(lambda header: header[EMBEDDING].update(data_offsets=[0, 1e400])),
        ValueError,
        r"is damaged \(invalid JSON in header: .*\); download it again",
    ),
    "no folder": (
        shutil.rmtree,
        FileNotFoundError,
        r"FOLDER is not the folder of a Hugging Face model; give one with a",
    ),
    "a checkpoint of Megatron's": (
        lambda folder: [(folder / name).touch() for name in ("metadata.json", ".metadata")],
        ValueError,
        r"FOLDER is a checkpoint of Megatron-LM or another program, which does not describe its model; start from",
    ),
}


@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_what_cannot_be_read_is_refused_before_there_is_a_model(name: str, model: Path) -> None:
    damage, kind, text = REFUSED_AT_ONCE[name]
    damage(model)
    with pytest.raises(kind, match=text.replace("FOLDER", re.escape(str(model)))) as refusal:
        MCoreGPT.from_pretrained(str(model))
    assert "\n" not in str(refusal.value)


ABSURD = {
    "num_hidden_layers": (10**9, 0, -1, 2.5, True, "4", [4], {"a": 4}),
    "vocab_size": (10**13, -101, "101"),
    "hidden_size": (10**13, 0, "32", 32.0),
    "intermediate_size": (10**13, [48]),
    "num_attention_heads": (10**13, -4, True, "4"),
    "num_key_value_heads": (10**13, 0, "2"),
    "head_dim": (10**13, -1),
    "max_position_embeddings": (10**13, -1, "128", None),
    "rms_norm_eps": (-1.0, "1e-3"),
}


@pytest.mark.parametrize("read", [MCoreGPT.from_pretrained, planned_settings])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ABSURD.items() for value in values])
def test_a_number_that_no_model_has_is_refused_before_anything_is_built(
    key: str, value: Any, read: Callable[[str], object], model: Path
) -> None:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, key: value}))
    with pytest.raises(ValueError, match=rf"config\.json: .*{key}") as refusal:
        read(str(model))
    assert shortened(value) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("mixtral", {"num_local_experts": 10**9}),
        ("mixtral", {"num_local_experts": 1 << 20}),
        ("qwen2_moe", {"decoder_sparse_step": 0}),
        ("qwen2_moe", {"mlp_only_layers": [[1]]}),
        ("qwen2_moe", {"shared_expert_intermediate_size": -1}),
        ("deepseek_v3", {"n_shared_experts": 10**9}),
        ("deepseek_v3", {"num_nextn_predict_layers": 10**9}),
        ("deepseek_v3", {"first_k_dense_replace": "1"}),
        ("deepseek_v3", {"n_group": -1}),
        ("deepseek_v3", {"routed_scaling_factor": "2"}),
        ("deepseek_v3", {"kv_lora_rank": 10**9}),
        ("mistral", {"sliding_window": "8"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": True, "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}),
    ],
)
def test_numbers_of_experts_windows_and_positions_are_refused_too(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder(family), tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **keys}))
    with pytest.raises(ValueError, match=r"config\.json") as refusal:
        MCoreGPT.from_pretrained(str(folder))
    assert "\n" not in str(refusal.value)


def test_experts_that_would_contribute_nothing_are_refused_by_their_number(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("deepseek_v3"), tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "routed_scaling_factor": 0.0}))
    with pytest.raises(ValueError, match=r"routed_scaling_factor=0\.0 is not supported, .*; only numbers above 0 are$"):
        MCoreGPT.from_pretrained(str(folder))


def copy_embedding(folder: Path, more_rows: int = 0) -> None:
    """Make the output layer a copy of the embedding, and more."""
    embedding = dict(read_tensors(folder))[EMBEDDING]
    [path] = [path for path in folder.glob("*.safetensors") if OUTPUT in load_file(path)]
    save_file({**load_file(path), OUTPUT: torch.cat([embedding, torch.zeros(more_rows, 32)])}, path)


REFUSED_WITH_THE_MODEL: dict[str, tuple[Damage, str]] = {
    "missing tensors": (
        change_tensors(lambda tensors: tensors.pop(EMBEDDING)),
        r"the weights in FOLDER do not belong to this model: it lacks model\.embed_tokens\.weight; give config and",
    ),
    "extra tensors": (
        change_tensors(lambda tensors: tensors.update(extra=torch.zeros(2))),
        r"to this model: it has extra, which the model does not have; give config and weights of one model",
    ),
    "another shape": (
        change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:50].contiguous()})),
        r"shapes differ: model\.embed_tokens\.weight \(\[50, 32\] in it, \[101, 32\] in the model\); give config and",
    ),
    "more layers than the config says": (
        change_config(num_hidden_layers=3),
        r"to this model: it has model\.layers\.3\.input_layernorm\.weight, model\.layers\.3\..* and 4 more, which",
    ),
    "a tied output layer that is another": (
        change_config(tie_word_embeddings=True),
        r"lm_head\.weight in FOLDER differs from model\.embed_tokens\.weight, and its config ties the two"
        r" \(tie_word_embeddings=True\); set that to false to have both, or remove the wrong one",
    ),
    "a tied output layer with more rows": (
        lambda folder: [change_config(tie_word_embeddings=True)(folder), copy_embedding(folder, more_rows=3)],
        r"to this model: it has lm_head\.weight, which the model does not have",
    ),
    "another family": (
        change_config(model_type="qwen2", attention_bias=None, mlp_bias=None, pretraining_tp=None, head_dim=None),
        r"it lacks model\.layers\.0\.self_attn\.k_proj\.bias, ",
    ),
}


@pytest.mark.parametrize("name", REFUSED_WITH_THE_MODEL)
def test_weights_of_another_model_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    damage, text = REFUSED_WITH_THE_MODEL[name]
    damage(model)
    with pytest.raises(ValueError, match=text.replace("FOLDER", re.escape(str(model)))) as refusal:
        import_checkpoint(str(model), str(tmp_path / "out.ckpt"))
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".unfinished/*"))


def test_a_tied_output_layer_may_be_there_once_more(model: Path) -> None:
    change_config(tie_word_embeddings=True)(model)
    copy_embedding(model)
    load(MCoreGPT.from_pretrained(str(model)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_value_that_a_type_cannot_hold_is_refused(dtype: Any, model: Path, tmp_path: Path) -> None:
    change_tensors(lambda tensors: tensors[EMBEDDING].fill_(1e5 if dtype == "float16" else 3.4e38))(model)
    with pytest.raises(
        ValueError, match=rf"model\.embed_tokens\.weight has values up to .*, and the largest of {dtype} is"
    ):
        import_checkpoint(str(model), str(tmp_path / "out.ckpt"), dtype=dtype)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_an_import_that_is_interrupted_leaves_no_thread(
    seconds: float, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_fill(weights: HFWeights, *arguments: Any) -> None:
        time.sleep(0.05)
        fill(weights, *arguments)

    def late_write(*arguments: Any) -> Any:
        time.sleep(0.05 - seconds / 2)
        return checkpoint_writer.write_pieces(*arguments)

    def interrupted(save: CheckpointSave) -> bool:
        time.sleep(seconds)  # before the writer's thread has begun to read, and while it reads
        raise KeyboardInterrupt

    fill, before = HFWeights.fill, set(threading.enumerate())
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # tqdm's own thread outlives its bars
    monkeypatch.setattr(HFWeights, "fill", slow_fill)
    monkeypatch.setattr(checkpoint_save, "write_pieces", late_write)
    monkeypatch.setattr(CheckpointSave, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(str(whole), str(tmp_path / "out.ckpt"))
    assert set(threading.enumerate()) <= before


def test_a_sequence_without_tokens_is_refused(whole: Path) -> None:
    with pytest.raises(ValueError, match="seq_length=0"):
        MCoreGPT.from_pretrained(str(whole), seq_length=0)


@pytest.mark.parametrize("name", ["moe_layer_freq", "window_attn_skip_freq"])
def test_a_list_for_other_layers_than_there_are_is_refused(name: str, whole: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name} has 4 entries and num_layers is 2; give one for each layer"):
        MCoreGPT.from_pretrained(str(whole), transformer={"num_layers": 2, name: [0, 1, 1, 1]})


def test_a_model_in_a_folder_next_to_this_one_is_found_from_another(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = MCoreGPT.from_pretrained(model.name)
    monkeypatch.chdir("/")
    load(module)


def test_an_import_goes_where_a_link_leads(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.ckpt").symlink_to("elsewhere")
    import_checkpoint(str(whole), str(tmp_path / "out.ckpt"))
    assert (tmp_path / "out.ckpt").is_symlink()
    assert (tmp_path / "elsewhere" / "checkpoint.json").exists()


def test_a_model_of_other_sizes_than_its_source_is_refused(whole: Path) -> None:
    module = MCoreGPT.from_pretrained(str(whole), transformer={"num_query_groups": 4})
    with pytest.raises(ValueError, match=r"k_proj\.weight \(\[16, 32\] in it, \[32, 32\] in the model\)"):
        load(module)


def load(module: MCoreGPT) -> None:
    """Build a module's model in this process and fill it."""
    with single_process():
        module.configure_model()


def test_a_model_without_room_for_all_tokens_is_refused(whole: Path) -> None:
    module = MCoreGPT.from_pretrained(str(whole))
    module.padded_vocab_size = 100
    text = (
        r"embedding\.word_embeddings\.weight of the model \(\[100, 32\]\) is too small for model\.embed_tokens\.weight"
    )
    with pytest.raises(ValueError, match=text):
        load(module)


@pytest.fixture(scope="module")
def multi_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that predicts two tokens."""
    folder = tmp_path_factory.mktemp("multi_token") / "model"
    return save_tiny("glm4_moe", folder, num_nextn_predict_layers=1, max_shard_size="60KB")


def test_a_second_embedding_that_differs_is_refused_and_can_be_left_out(multi_token: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(multi_token, tmp_path / "model"))
    name = "model.layers.4.embed_tokens.weight"
    [path] = [path for path in folder.glob("*.safetensors") if name in load_file(path)]
    save_file({**load_file(path), name: torch.zeros(101, 32)}, path)
    with pytest.raises(ValueError, match=rf"{name} in .* differs from model\.embed_tokens\.weight, and Megatron's"):
        load(MCoreGPT.from_pretrained(str(folder)))
    load(MCoreGPT.from_pretrained(str(folder), transformer={"mtp_num_layers": None}))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"num_nextn_predict_layers": 0}, r"it has model\.layers\.4\."),
        ({"num_hidden_layers": 3}, r"it has model\.layers\.3\."),
        ({"num_hidden_layers": 3, "num_nextn_predict_layers": 2}, r"it has model\.layers\.3\."),
    ],
)
def test_layers_behind_the_last_are_left_out_only_where_they_predict_more_tokens(
    keys: dict[str, int], text: str, multi_token: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(multi_token, tmp_path / "model"))
    change_config(**keys)(folder)
    with pytest.raises(ValueError, match=text):
        load(MCoreGPT.from_pretrained(str(folder), transformer={"mtp_num_layers": None}))


def test_a_second_embedding_may_be_missing(multi_token: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(multi_token, tmp_path / "model"))
    name = "model.layers.4.embed_tokens.weight"
    [path] = [path for path in folder.glob("*.safetensors") if name in load_file(path)]
    save_file({key: value for key, value in load_file(path).items() if key != name}, path)
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"][name]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    load(MCoreGPT.from_pretrained(str(folder)))


def test_a_config_whose_layers_for_more_tokens_have_no_weights_gives_a_model_without(tmp_path: Path) -> None:
    folder = save_tiny("glm4_moe", tmp_path / "model")
    change_config(num_nextn_predict_layers=1)(folder)
    module = MCoreGPT.from_pretrained(str(folder))
    assert "mtp_num_layers" not in module.hparams["transformer"]
    load(module)


def test_a_checkpoint_that_knows_no_hugging_face_model_is_refused(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    import_checkpoint(str(whole), str(out))
    with pytest.raises(ValueError, match=r"out\.ckpt is already a checkpoint; give the folder of a Hugging Face model"):
        import_checkpoint(str(out), str(tmp_path / "again.ckpt"))
    with pytest.raises(ValueError, match=r"family='qwen2' is given for .*out\.ckpt, a checkpoint of family 'llama'"):
        MCoreGPT.from_pretrained(str(out), family="qwen2")
    MCoreGPT.from_pretrained(str(out), family="llama")
    state = torch.load(out / "lightning.pt", weights_only=True)
    state["hyper_parameters"]["hf"] = None
    torch.save(state, out / "lightning.pt")
    manifest = json.loads((out / "checkpoint.json").read_text())
    manifest["files"]["lightning.pt"] = asdict(record_file(out / "lightning.pt"))
    (out / "checkpoint.json").write_text(json.dumps(manifest))
    text = (
        r"a checkpoint of a model that was not made from a Hugging Face model; start from it with self\.load_weights\("
    )
    with pytest.raises(ValueError, match=text):
        MCoreGPT.from_pretrained(str(out))


def test_an_export_of_absurd_numbers_is_refused_before_anything_is_built(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    import_checkpoint(str(whole), str(out))
    state = torch.load(out / "lightning.pt", weights_only=True)
    recorded = state["hyper_parameters"]
    for changes, text in (
        (
            {"transformer": {**recorded["transformer"], "num_layers": 10**9, "window_attn_skip_freq": 2}},
            "num_layers=4 in its",
        ),
        ({"hf": {**recorded["hf"], "config": {**recorded["hf"]["config"], "num_hidden_layers": 10**9}}}, "only whole"),
    ):
        torch.save({**state, "hyper_parameters": {**recorded, **changes}}, out / "lightning.pt")
        manifest = json.loads((out / "checkpoint.json").read_text())
        manifest["files"]["lightning.pt"] = asdict(record_file(out / "lightning.pt"))
        (out / "checkpoint.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=text):
            export_checkpoint(str(out), str(tmp_path / "exported"))


def test_an_import_refuses_what_would_be_overwritten(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="already exists; give the name of a checkpoint that does not exist yet"):
        import_checkpoint(str(whole), str(tmp_path))
    with pytest.raises(ValueError, match="already exists"):
        import_checkpoint(str(whole), str(tmp_path / "notes.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_import_refuses_an_unknown_type(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype='fp8' is not known; choose auto, bfloat16, float16 or float32"):
        import_checkpoint(str(whole), str(tmp_path / "out"), dtype="fp8")  # type: ignore[arg-type]


def test_rectangles_are_those_of_the_tensors(whole: Path) -> None:
    folder = SafetensorsFolder(str(whole))
    for path in whole.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert folder.shapes[name] == tuple(tensor.shape)
            assert folder.dtypes[name] == tensor.dtype
            assert torch.equal(folder.read(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)
    tensor = folder.read(EMBEDDING, (0, 0), (101, 32))
    assert torch.equal(folder.read(EMBEDDING, (3, 5), (40, 7)), tensor[3:43, 5:12])


def test_tensors_that_begin_at_odd_places_are_read(tmp_path: Path) -> None:
    values = torch.arange(5, dtype=torch.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    header += b" " * (1 - (len(header) + 8) % 4 % 4 + 4)
    assert (8 + len(header)) % 4 == 1
    content = len(header).to_bytes(8, "little") + header + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    folder = SafetensorsFolder(str(tmp_path))
    assert torch.equal(folder.read("x", (1,), (3,)), values[1:4])


def test_tensors_without_weights_are_passed_over(tmp_path: Path) -> None:
    save_file(
        {"a.weight": torch.ones(2), "a.masked_bias": torch.ones(2, dtype=torch.bool)}, tmp_path / "model.safetensors"
    )
    assert list(SafetensorsFolder(str(tmp_path), unread=(".masked_bias",)).shapes) == ["a.weight"]
