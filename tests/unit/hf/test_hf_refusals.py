# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models that cannot be read are refused in one sentence, before a model is built if possible."""

import json
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
from tests.support.sentences import refuses

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

REFUSED_AT_ONCE: dict[str, tuple[Damage, type[Exception]]] = {
    "another architecture": (change_config(model_type="gpt_neox"), ValueError),
    "no model type": (change_config(model_type=None), ValueError),
    "a key that changes the numbers": (change_config(hidden_act="gelu"), ValueError),
    "an unknown key": (change_config(sliding_window=30), ValueError),
    "a quantised model": (change_config(quantization_config={"quant_method": "fp8"}), ValueError),
    "quantised tensors": (
        change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].to(torch.float8_e4m3fn)})),
        ValueError,
    ),
    "whole numbers": (
        change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].to(torch.int8)})),
        ValueError,
    ),
    "a config that is cut off": (write("config.json", b'{"model_type": "lla'), ValueError),
    "a list for a config": (write("config.json", b"[]"), ValueError),
    "an index that is cut off": (write(INDEX_FILE, b'{"weight_map": {'), ValueError),
    "an index of something else": (write(INDEX_FILE, b"{}"), ValueError),
    "an index that leads elsewhere": (
        write(INDEX_FILE, json.dumps({"weight_map": {EMBEDDING: "../model.safetensors"}}).encode()),
        ValueError,
    ),
    "a missing file": (lambda folder: first_file(folder).unlink(), FileNotFoundError),
    "a file that is cut off": (
        lambda folder: first_file(folder).write_bytes(first_file(folder).read_bytes()[:-100]),
        ValueError,
    ),
    "a file cut off in its header": (
        lambda folder: first_file(folder).write_bytes(first_file(folder).read_bytes()[:40]),
        ValueError,
    ),
    "an empty file": (lambda folder: first_file(folder).write_bytes(b""), ValueError),
    "a header of noise": (
        lambda folder: first_file(folder).write_bytes((8).to_bytes(8, "little") + b"\xff\x00 noise" + bytes(100)),
        ValueError,
    ),
    "a header of another kind": (
        lambda folder: first_file(folder).write_bytes((2).to_bytes(8, "little") + b"[]"),
        ValueError,
    ),
    "a tensor without a place": (another_header(lambda header: header[EMBEDDING].pop("data_offsets")), ValueError),
    "a tensor with another place": (
        another_header(lambda header: header[EMBEDDING].update(shape=[101, 31])),
        ValueError,
    ),
    "a tensor that is in no index": (
        change_tensors(lambda tensors: tensors.update(extra=torch.zeros(2)), in_index=False),
        ValueError,
    ),
    "pickled weights": (only_pickles, ValueError),
    "no config": (lambda folder: (folder / "config.json").unlink(), FileNotFoundError),
    "a quantised model that does not say how": (change_config(quantization_config=[1]), ValueError),
    "a type from elsewhere": (change_config(dtype="os.system"), ValueError),
    "a folder in place of the config": (
        lambda folder: [(folder / "config.json").unlink(), (folder / "config.json").mkdir()],
        FileNotFoundError,
    ),
    "a config nested without an end": (
        write("config.json", b'{"model_type": "llama", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ValueError,
    ),
    "a config nested deep": (
        write("config.json", b'{"model_type": "llama", "x": ' + b"[" * 80 + b"]" * 80 + b"}"),
        ValueError,
    ),
    "no number": (write("config.json", b'{"model_type": "llama", "rms_norm_eps": NaN}'), ValueError),
    "a key that takes a method's place": (change_config(to_dict=5), ValueError),
    "a key of another kind": (change_config(rope_parameters=[1]), ValueError),
    "more labels than words": (change_config(num_labels=10**9), ValueError),
    "sizes beyond the weights": (change_config(hidden_size=1 << 20, intermediate_size=1 << 20), ValueError),
    "two tensors in one place": (
        another_header(lambda header: [entry.update(data_offsets=[0, 12928]) for entry in header.values()]),
        ValueError,
    ),
    "a tensor of a negative size": (
        another_header(lambda header: header[EMBEDDING].update(shape=[-101, -32])),
        ValueError,
    ),
    "a tensor without an end": (
        another_header(lambda header: header[EMBEDDING].update(data_offsets=[0, 1e400])),
        ValueError,
    ),
    "no folder": (shutil.rmtree, FileNotFoundError),
    "a checkpoint of Megatron's": (
        lambda folder: [(folder / name).touch() for name in ("metadata.json", ".metadata")],
        ValueError,
    ),
}


@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_what_cannot_be_read_is_refused_before_there_is_a_model(name: str, model: Path) -> None:
    damage, kind = REFUSED_AT_ONCE[name]
    damage(model)
    with refuses(kind):
        MCoreGPT.from_pretrained(str(model))


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
    with refuses(ValueError, "config.json:") as refusal:
        read(str(model))
    assert shortened(value) in str(refusal.value)


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
    with refuses(ValueError, "config.json"):
        MCoreGPT.from_pretrained(str(folder))


def test_experts_that_would_contribute_nothing_are_refused_by_their_number(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("deepseek_v3"), tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "routed_scaling_factor": 0.0}))
    with refuses(ValueError, "routed_scaling_factor=0.0"):
        MCoreGPT.from_pretrained(str(folder))


def copy_embedding(folder: Path, more_rows: int = 0) -> None:
    """Make the output layer a copy of the embedding, and more."""
    embedding = dict(read_tensors(folder))[EMBEDDING]
    [path] = [path for path in folder.glob("*.safetensors") if OUTPUT in load_file(path)]
    save_file({**load_file(path), OUTPUT: torch.cat([embedding, torch.zeros(more_rows, 32)])}, path)


REFUSED_WITH_THE_MODEL: dict[str, Damage] = {
    "missing tensors": change_tensors(lambda tensors: tensors.pop(EMBEDDING)),
    "extra tensors": change_tensors(lambda tensors: tensors.update(extra=torch.zeros(2))),
    "another shape": change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:50].contiguous()})),
    "more layers than the config says": change_config(num_hidden_layers=3),
    "a tied output layer that is another": change_config(tie_word_embeddings=True),
    "a tied output layer with more rows": lambda folder: [
        change_config(tie_word_embeddings=True)(folder),
        copy_embedding(folder, more_rows=3),
    ],
    "another family": change_config(
        model_type="qwen2", attention_bias=None, mlp_bias=None, pretraining_tp=None, head_dim=None
    ),
}


@pytest.mark.parametrize("name", REFUSED_WITH_THE_MODEL)
def test_weights_of_another_model_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    REFUSED_WITH_THE_MODEL[name](model)
    with refuses(ValueError):
        import_checkpoint(str(model), str(tmp_path / "out.ckpt"))
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".unfinished/*"))


def test_a_tied_output_layer_may_be_there_once_more(model: Path) -> None:
    change_config(tie_word_embeddings=True)(model)
    copy_embedding(model)
    load(MCoreGPT.from_pretrained(str(model)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_value_that_a_type_cannot_hold_is_refused(dtype: Any, model: Path, tmp_path: Path) -> None:
    change_tensors(lambda tensors: tensors[EMBEDDING].fill_(1e5 if dtype == "float16" else 3.4e38))(model)
    with refuses(ValueError, "model.embed_tokens.weight has values up to"):
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
    with refuses(ValueError, "seq_length=0"):
        MCoreGPT.from_pretrained(str(whole), seq_length=0)


def test_experts_for_a_dense_model_are_refused(whole: Path) -> None:
    with refuses(ValueError, "num_moe_experts=4"):
        MCoreGPT.from_pretrained(str(whole), transformer={"num_moe_experts": 4})


@pytest.mark.parametrize("name", ["moe_layer_freq", "window_attn_skip_freq"])
def test_a_list_for_other_layers_than_there_are_is_refused(name: str, whole: Path) -> None:
    with refuses(ValueError, f"{name} has 4 entries and num_layers is 2; give"):
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
    with refuses(ValueError, "k_proj.weight ([16, 32] in it, [32, 32] in"):
        load(module)


def load(module: MCoreGPT) -> None:
    """Build a module's model in this process and fill it."""
    with single_process():
        module.configure_model()


def test_a_model_without_room_for_all_tokens_is_refused(whole: Path) -> None:
    module = MCoreGPT.from_pretrained(str(whole))
    module.padded_vocab_size = 100
    with refuses(ValueError, "embedding.word_embeddings.weight"):
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
    with refuses(ValueError, "differs from model.embed_tokens.weight"):
        load(MCoreGPT.from_pretrained(str(folder)))
    load(MCoreGPT.from_pretrained(str(folder), transformer={"mtp_num_layers": None}))


@pytest.mark.parametrize(
    "keys",
    [
        {"num_nextn_predict_layers": 0},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 3, "num_nextn_predict_layers": 2},
    ],
)
def test_layers_behind_the_last_are_left_out_only_where_they_predict_more_tokens(
    keys: dict[str, int], multi_token: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(multi_token, tmp_path / "model"))
    change_config(**keys)(folder)
    with refuses(ValueError):
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
    with refuses(ValueError, "out.ckpt is already a checkpoint; give the"):
        import_checkpoint(str(out), str(tmp_path / "again.ckpt"))
    with refuses(ValueError, "family='qwen2'"):
        MCoreGPT.from_pretrained(str(out), family="qwen2")
    MCoreGPT.from_pretrained(str(out), family="llama")
    state = torch.load(out / "lightning.pt", weights_only=True)
    state["hyper_parameters"]["hf"] = None
    torch.save(state, out / "lightning.pt")
    manifest = json.loads((out / "checkpoint.json").read_text())
    manifest["files"]["lightning.pt"] = asdict(record_file(out / "lightning.pt"))
    (out / "checkpoint.json").write_text(json.dumps(manifest))
    with refuses(ValueError, "not made from a Hugging Face model"):
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
        with refuses(ValueError, text):
            export_checkpoint(str(out), str(tmp_path / "exported"))


def test_an_import_refuses_what_would_be_overwritten(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(ValueError, "already exists; give the name of a"):
        import_checkpoint(str(whole), str(tmp_path))
    with refuses(ValueError, "already exists"):
        import_checkpoint(str(whole), str(tmp_path / "notes.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_import_refuses_an_unknown_type(whole: Path, tmp_path: Path) -> None:
    with refuses(ValueError, "dtype='fp8'"):
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
