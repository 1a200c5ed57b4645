# SPDX-License-Identifier: Apache-2.0
"""An export is planned, described and refused before it writes; what it writes is whole or not there."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file

from lightning_mcore import MCoreGPT, Recipe, cli
from lightning_mcore.checkpoint import atomic
from lightning_mcore.hf.registry import find_family
from lightning_mcore.hf.weight_map import WeightMap
from lightning_mcore.hf.weight_rules import Shape
from lightning_mcore.hf.weights import require_fits
from lightning_mcore.interop import callback as save_hf_model
from lightning_mcore.interop.callback import SaveHFModel
from lightning_mcore.interop.export import export_checkpoint, export_model
from lightning_mcore.interop.export_config import describe, warn_of_losses
from lightning_mcore.interop.export_folder import require_free
from lightning_mcore.interop.export_plan import ExportPlan, Place, parse_size
from lightning_mcore.interop.importing import import_checkpoint
from tests.support.hf_models import read_tensors, save_tiny
from tests.support.sentences import refuses
from tests.support.toy import PlainNet, loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron and transformers

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 4,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "layernorm_epsilon": 1e-6,
}
IN_FP32 = "e_score_correction_bias"
FIELDS: dict[str, Any] = {**LLAMA, "vocab_size": 10}
SHAPES: dict[str, Shape] = {
    "embedding.word_embeddings.weight": (16, 8),
    "output_layer.weight": (16, 8),
    "decoder.final_layernorm.weight": (8,),
} | {
    f"decoder.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attention.linear_qkv.layer_norm_weight": (8,),
        "self_attention.linear_qkv.weight": (16, 8),
        "self_attention.linear_proj.weight": (8, 8),
        "mlp.linear_fc1.layer_norm_weight": (8,),
        "mlp.linear_fc1.weight": (24, 8),
        "mlp.linear_fc2.weight": (8, 12),
    }.items()
}


def places(shapes: dict[str, Shape], dtype: torch.dtype = torch.bfloat16) -> dict[str, list[Place]]:
    """Return each tensor as one rectangle."""
    return {name: [Place((0,) * len(shape), shape, dtype, name)] for name, shape in shapes.items()}


def plan(dtype: torch.dtype | None = None, most: int = 10**9, **fields: Any) -> ExportPlan:
    weights = WeightMap(find_family("llama"), FIELDS | fields, SHAPES)
    return ExportPlan(weights, places(SHAPES), dtype, most)


# ---- the plan


def test_files_follow_the_model_and_stay_below_their_size() -> None:
    planned = plan(most=800)
    names = [name for file in planned.files.values() for name in file]
    assert names[0] == "model.embed_tokens.weight"
    assert [name for name in names if ".layers." in name] == names[1:-2]
    assert names[1:-2] == sorted(names[1:-2])
    assert set(names[-2:]) == {"lm_head.weight", "model.norm.weight"}
    assert next(iter(planned.files)) == f"model-00001-of-{len(planned.files):05d}.safetensors"
    assert all(sum(map(planned.size, file)) <= 800 for file in planned.files.values())
    assert planned.index is not None
    assert planned.index["metadata"] == {"total_parameters": planned.total_size // 2, "total_size": planned.total_size}
    assert list(plan().files) == ["model.safetensors"]
    assert plan().index is None


def test_the_vocabulary_is_cut_to_its_size_and_the_type_is_as_told() -> None:
    assert plan().shapes["model.embed_tokens.weight"] == (10, 8)
    assert plan().main_dtype == torch.bfloat16
    assert set(plan(torch.float16).dtypes.values()) == {torch.float16}


def test_pieces_of_any_cut_make_the_same_tensor() -> None:
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    whole = torch.arange(24 * 8, dtype=torch.float32).view(24, 8)
    cut = [Place((r, c), (6, 4), torch.float32, (r, c)) for c in (4, 0) for r in (18, 0, 12, 6)]
    weights = WeightMap(find_family("llama"), FIELDS, SHAPES)
    planned = ExportPlan(weights, places(SHAPES) | {name: cut}, None, 10**9)

    def read(place: Place) -> torch.Tensor:
        row, column = place.source
        return whole[row : row + 6, column : column + 4]

    memory = torch.empty(1000, dtype=torch.uint8)
    assert torch.equal(planned.assemble("model.layers.1.mlp.up_proj.weight", read, memory), whole[12:])


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["decoder.layers.0.mlp.linear_fc1.weight"].pop(),
        lambda found: found["embedding.word_embeddings.weight"].pop(),
    ],
)
def test_a_rectangle_that_is_missing_is_found_before_writing(change: Callable[[Any], Any]) -> None:
    halves = {
        name: [
            Place((start, *(0,) * len(shape[1:])), (shape[0] // 2, *shape[1:]), torch.float32, None)
            for start in (0, shape[0] // 2)
        ]
        for name, shape in SHAPES.items()
    }
    weights = WeightMap(find_family("llama"), FIELDS, SHAPES)
    ExportPlan(weights, halves, None, 10**9)
    change(halves)
    with refuses(ValueError, "would be incomplete"):
        ExportPlan(weights, halves, None, 10**9)


@pytest.mark.parametrize("fields", [{"num_query_groups": 2}, {"kv_channels": 2}, {"vocab_size": 17}])
def test_sizes_that_are_not_those_of_the_weights_are_refused(fields: dict[str, Any]) -> None:
    with refuses(ValueError, "do not fit its config"):
        plan(**fields)


@pytest.mark.parametrize(("size", "wanted"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), (1000, 1000), ("0.5KB", 500)])
def test_sizes_are_read_as_transformers_reads_them(size: Any, wanted: int) -> None:
    assert parse_size(size) == wanted


@pytest.mark.parametrize("size", ["5XB", "", "GB", 0, -1, True, None, 1.5, "0GB"])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with refuses(ValueError, "is not a file size"):
        parse_size(size)


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ([], torch.float32),
        ([65519.0, -65519.0, 1e-30], torch.float32),
        ([float("inf"), -float("inf"), float("nan"), 65504.0], torch.float32),
        ([float("inf"), 65280.0], torch.bfloat16),
    ],
)
def test_values_that_a_type_can_hold_are_let_through(values: list[float], source: torch.dtype) -> None:
    require_fits("it", torch.tensor(values, dtype=source), torch.float16)
    require_fits("it", torch.tensor(values, dtype=source) * 1e30, torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "largest"),
    [([1.0, -1e5, 7e4], "100000"), ([float("nan"), 1e5], "100000"), ([-float("inf"), 65520.0], "65520")],
)
def test_a_value_that_would_become_infinite_is_refused(values: list[float], largest: str) -> None:
    with refuses(ValueError, f"it has values up to {largest}, and the largest of"):
        require_fits("it", torch.tensor(values), torch.float16)


# ---- the config


def settings(**more: Any) -> dict[str, Any]:
    """Return the hyper-parameters of a Llama that was made from scratch."""
    transformer = LLAMA | more.pop("transformer", {})
    return {"vocab_size": 10, "seq_length": 64, "transformer": transformer, "make_vocab_size_divisible_by": 16, **more}


def test_a_model_made_from_scratch_is_of_the_first_family_that_has_a_place_for_it() -> None:
    found = describe("it", settings(rotary_base=500000), SHAPES)
    assert found.family == "llama"
    assert found.source is found.generation_config is None
    assert found.config["rope_parameters"]["rope_theta"] == 500000
    assert found.config["max_position_embeddings"] == 64
    assert found.config["head_dim"] == 4
    assert found.config["eos_token_id"] is None
    assert found.config["architectures"] == ["LlamaForCausalLM"]


def test_a_model_of_no_known_family_is_told_the_nearest_and_what_differs() -> None:
    sentence = (
        r"^it does not fit a known family; the nearest is '\w+', but normalization='LayerNorm' cannot be expressed in"
        r" its config, which always means 'RMSNorm'( \(\d more .*\))?; change the model, or give your own family with"
        " family$"
    )
    with pytest.raises(ValueError, match=sentence):
        describe("it", settings(transformer={"normalization": "LayerNorm"}), SHAPES)


def test_a_model_that_drops_tokens_is_exported_with_a_warning() -> None:
    for capacity in (None, -1.0):
        found = describe("it", settings(transformer={"moe_expert_capacity_factor": capacity}), SHAPES)
        warn_of_losses(found, {}, None)
    found = describe("it", settings(transformer={"moe_expert_capacity_factor": 1.25}), SHAPES)
    with pytest.warns(
        UserWarning, match=r"moe_expert_capacity_factor=1\.25, so that full experts dropped.*transformers does not"
    ):
        warn_of_losses(found, {}, None)


def test_a_config_is_kept_but_for_what_is_no_longer_true(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama", tie_word_embeddings=False)
    own = MCoreGPT.from_pretrained(str(folder), seq_length=16)
    shapes = {"embedding.word_embeddings.weight": (128, 32)} | {f"decoder.layers.{n}.x": (1,) for n in range(4)}
    kept = json.loads((folder / "config.json").read_text())
    assert describe("it", own.hparams, shapes).config == kept
    changed = own.hparams["transformer"] | {"layernorm_epsilon": 1e-3}
    found = describe("it", {**own.hparams, "transformer": changed}, shapes).config
    assert found == kept | {"rms_norm_eps": 1e-3}


def test_a_model_without_multi_token_layers_says_so(tmp_path: Path) -> None:
    folder = save_tiny("glm4_moe", tmp_path / "glm", num_nextn_predict_layers=1)
    own = MCoreGPT.from_pretrained(str(folder), seq_length=16, transformer={"mtp_num_layers": None})
    shapes = {"embedding.word_embeddings.weight": (128, 32)} | {f"decoder.layers.{n}.x": (1,) for n in range(4)}
    assert describe("it", own.hparams, shapes).config["num_nextn_predict_layers"] == 0
    assert describe("it", own.hparams, {**shapes, "mtp.layers.0.x": (1,)}).config["num_nextn_predict_layers"] == 1


# ---- a checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a Hugging Face model and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny("deepseek_v3", folder / "model", dtype=torch.bfloat16, tokenizer=True)
    import_checkpoint(str(model), str(folder / "tiny.ckpt"))
    return model, folder / "tiny.ckpt"


def test_the_command_takes_a_model_there_and_back(
    tiny: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny[0], tmp_path / "model"))
    templates = {"chat_template.jinja": "{{ messages }}", "additional_chat_templates/tool_use.jinja": "{{ tools }}"}
    templates |= {"tekken.json": "{}", "hy.tiktoken": "IQ== 0"}  # Mistral's and HunYuan's tokenizers
    for name, text in templates.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
    checkpoint, out = str(tmp_path / "made.ckpt"), tmp_path / "deep" / "out"
    assert cli.main(["import", str(model), checkpoint]) == 0
    assert cli.main(["export", checkpoint, str(out), "--max-shard-size", "60KB"]) == 0
    assert "error" not in capsys.readouterr().err
    wanted, found = dict(read_tensors(model)), dict(read_tensors(out))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    copied = {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"}
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {name for name in names if "safetensors" not in name} == copied | templates.keys()
    assert all((out / name).read_text() == text for name, text in templates.items())
    files = [path for path in out.iterdir() if path.suffix == ".safetensors"]
    assert len(files) > 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {stat.S_IMODE((out / "config.json").stat().st_mode)}
    assert not (tmp_path / "deep" / ".unfinished").exists()


def test_a_type_that_is_told_leaves_what_must_stay_in_fp32(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, checkpoint = tiny
    for dtype in ("float32", "float16"):
        export_checkpoint(str(checkpoint), str(tmp_path / dtype), dtype=dtype)
        kind = getattr(torch, dtype)
        found = dict(read_tensors(tmp_path / dtype))
        for name, tensor in read_tensors(model):
            kept = torch.float32 if name.endswith(IN_FP32) else kind
            assert found[name].dtype == kept, name
            assert torch.equal(found[name], tensor.to(kept))
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype


def test_a_checkpoint_that_says_nothing_of_itself_is_exported_like_another_model(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    model, checkpoint = tiny
    theirs, out = tmp_path / "iter_0000001", tmp_path / "out"
    shutil.copytree(checkpoint, theirs)
    for name in ("checkpoint.json", "lightning.pt"):
        (theirs / name).unlink()
    with refuses(ValueError, "does not describe its model"):
        export_checkpoint(str(theirs), str(out))
    assert not out.exists()
    export_checkpoint(str(theirs), str(out), like=str(model))
    found = dict(read_tensors(out))
    assert all(torch.equal(tensor, found[name]) for name, tensor in read_tensors(model))
    assert (out / "tokenizer.json").exists()


def test_a_source_that_is_gone_costs_the_tokenizer_and_a_warning(tmp_path: Path) -> None:
    model = save_tiny("qwen2", tmp_path / "model", tokenizer=True)
    import_checkpoint(str(model), str(tmp_path / "c.ckpt"))
    shutil.move(model, tmp_path / "moved")
    with pytest.warns(UserWarning, match=r"model, the source of the model, no longer exists.*--like FOLDER"):
        export_checkpoint(str(tmp_path / "c.ckpt"), str(tmp_path / "out"))
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    export_checkpoint(str(tmp_path / "c.ckpt"), str(tmp_path / "with"), like=str(tmp_path / "moved"))
    assert (tmp_path / "with" / "tokenizer.json").exists()


def _flip(path: Path, tensor: torch.Tensor) -> None:
    """Change one bit of a tensor in a file."""
    content = bytearray(path.read_bytes())
    content[content.index(tensor.view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(content)


def _set(folder: Path, name: str, value: float) -> None:
    """Give a tensor of a model in one file its first value."""
    tensors = dict(read_tensors(folder))
    tensors[name][0] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


REFUSALS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "nothing": (lambda at: [str(at / "none.ckpt"), str(at / "out")], "none.ckpt does not exist; give the path"),
    "a file": (lambda at: [str(at / "file"), str(at / "out")], "is a file; give the directory of a sharded checkpoint"),
    "a folder": (lambda at: [str(at / "full"), str(at / "out")], "is a directory, but not a checkpoint"),
    "another machine": (lambda at: ["memory://x", str(at / "out")], "is not on a disk of this machine"),
    "taken": (lambda at: [str(at / "c.ckpt"), str(at / "full")], "full holds other files (notes.txt); give a folder"),
    "taken by a file": (lambda at: [str(at / "c.ckpt"), str(at / "file")], "file is a file; give a folder"),
    "shard size": (
        lambda at: [str(at / "c.ckpt"), str(at / "out"), "--max-shard-size", "5XB"],
        "'5XB' is not a file size",
    ),
    "like": (
        lambda at: [str(at / "c.ckpt"), str(at / "out"), "--like", str(at / "no")],
        "is not the folder of a Hugging",
    ),
    "family": (lambda at: [str(at / "c.ckpt"), str(at / "out"), "--family", "gpt2"], "'gpt2' are not supported"),
    "inside": (lambda at: [str(at / "c.ckpt"), str(at / "c.ckpt" / "out")], "out lies inside the checkpoint"),
    "linked inside": (lambda at: [str(at / "link.ckpt"), str(at / "c.ckpt" / "out")], "lies inside the checkpoint"),
    "too large": (
        lambda at: [str(at / "large.ckpt"), str(at / "out"), "--dtype", "float16"],
        "model.norm.weight has values up to 99840, and the largest of float16 is 65504; choose dtype bfloat16",
    ),
    "other family": (
        lambda at: [str(at / "c.ckpt"), str(at / "out"), "--family", "llama"],
        "the model is not one of 'llama'",
    ),
    "flipped": (
        lambda at: [str(at / "flipped.ckpt"), str(at / "out")],
        "the checksum of its record archive/data/0 differs from the one in the archive",
    ),
    "cut": (lambda at: [str(at / "cut.ckpt"), str(at / "out")], "is damaged: __0_0.distcp has"),
}


@pytest.fixture
def around(tiny: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a folder with checkpoints, whole and broken, and other things."""
    for name in ("c", "flipped", "cut"):
        shutil.copytree(tiny[1], tmp_path / f"{name}.ckpt")
    norm = dict(read_tensors(tiny[0]))["model.norm.weight"]
    _flip(tmp_path / "flipped.ckpt" / "__0_0.distcp", norm)
    _cut(tmp_path / "cut.ckpt" / "__0_0.distcp")
    (tmp_path / "link.ckpt").symlink_to("c.ckpt")
    large = save_tiny("llama", tmp_path / "large", dtype=torch.bfloat16)
    _set(large, "model.norm.weight", 1e5)
    import_checkpoint(str(large), str(tmp_path / "large.ckpt"))
    (tmp_path / "file").write_text("text")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    return tmp_path


def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(
    around: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir(around))
    for name, (arguments, sentence) in REFUSALS.items():
        assert cli.main(["export", *arguments(around)]) == 2, name
        said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
        assert len(said) == 1, f"{name}: {said}"
        assert said[0].startswith("error: "), name
        assert sentence in said[0], f"{name}: {said[0]}"
        assert sorted(os.listdir(around)) == before, name
    assert (around / "full" / "notes.txt").read_text() == "mine"
    with refuses(ValueError, "dtype='int8'"):
        export_checkpoint(str(around / "c.ckpt"), str(around / "out"), dtype="int8")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", "a", "b", "--dtype", "int8"])


def test_a_full_disk_leaves_nothing(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = os.write

    def refuse(descriptor: int, content: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", refuse)
    assert cli.main(["export", str(tiny[1]), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path}/out could not be saved: no space left on device; free"
    )
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_may_be_filled(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_checkpoint(str(tiny[1]), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_link_to_an_empty_folder_stays_and_the_folder_is_filled(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    export_checkpoint(str(tiny[1]), str(tmp_path / "out"))
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "model.safetensors").exists()
    with refuses(ValueError, "holds other files"):
        export_checkpoint(str(tiny[1]), str(tmp_path / "out"))


# ---- the callback


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "SaveHFModel() writes nothing; give a"),
        ({"folder": "x", "dtype": "int8"}, "dtype='int8'"),
        ({"folder": "x", "max_shard_size": "5"}, None),
        ({"folder": "x", "max_shard_size": "many"}, "is not a file size"),
    ],
)
def test_the_callback_refuses_what_it_could_not_do(arguments: dict[str, Any], sentence: str | None) -> None:
    if sentence is None:
        SaveHFModel(**arguments)
        return
    with refuses(ValueError, sentence):
        SaveHFModel(**arguments)


def test_the_callback_needs_checkpoints_to_write_beside(tmp_path: Path) -> None:
    trainer = make_trainer("auto", callbacks=[SaveHFModel(every_checkpoint=True)])
    with refuses(ValueError, "beside a ModelCheckpoint, and the trainer"):
        trainer.fit(PlainNet(), loader(4, 2))


def text(rows: int = 2) -> Any:
    """Return batches of one sequence."""
    tokens = torch.randint(10, (rows, 9), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens])  # type: ignore[arg-type]


class Listens(pl.Callback):
    """Keeps the model's logits when training ends, [b, s, v]."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            tokens = next(iter(text()))["tokens"]
            self.logits = pl_module.model(tokens, torch.arange(8)[None], attention_mask=None)[..., :10]


def train(*callbacks: pl.Callback) -> None:
    """Train a model made from scratch, under a strategy of Lightning's."""
    trainer = make_trainer("auto", max_steps=2, callbacks=list(callbacks))
    trainer.fit(MCoreGPT(**settings(), recipe=Recipe(learning_rate=1e-2)), text())


def test_a_model_made_from_scratch_becomes_one_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with refuses(RuntimeError, "there is no running model"):
        export_model(MCoreGPT(**settings()), str(tmp_path / "out"))
    listens = Listens()
    train(SaveHFModel(str(tmp_path / "out")), listens)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.allclose(model(next(iter(text()))["tokens"]).logits, listens.logits, atol=1e-5, rtol=0)


def test_the_callback_refuses_a_folder_that_is_taken_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(ValueError, "holds other files (notes.txt); give a folder that is"):
        train(SaveHFModel(str(tmp_path)))
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_later_run_replaces_only_what_the_callback_wrote(tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    train(SaveHFModel(str(out)))
    first = (out / "model.safetensors").read_bytes()
    train(SaveHFModel(str(out)))  # other random weights
    again = (out / "model.safetensors").read_bytes()
    assert again != first
    with refuses(ValueError, "out holds a model that SaveHFModel wrote; give a folder"):
        require_free(str(out))
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("mine")
    with refuses(ValueError, "out holds other files (notes/a.txt); give a folder"):
        train(SaveHFModel(str(out)))
    assert (out / "model.safetensors").read_bytes() == again
    # A model that something else wrote, such as a download
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".*", "notes"))
    with refuses(ValueError, "copy holds other files (config.json, model.safetensors)"):
        train(SaveHFModel(str(copy)))
    # The model that a run starts from
    shutil.rmtree(out / "notes")
    module = MCoreGPT.from_pretrained(str(out), seq_length=8)
    with refuses(ValueError, "is the model that this run starts from; give another folder"):
        make_trainer("auto", max_steps=1, callbacks=[SaveHFModel(str(out))]).fit(module, text())
    assert (out / "model.safetensors").read_bytes() == again


def test_a_second_fit_that_resumes_from_an_older_checkpoint_deletes_what_the_first_wrote(tmp_path: Path) -> None:
    trainer = SimpleNamespace(is_global_zero=True, checkpoint_callbacks=[ModelCheckpoint(tmp_path)])
    older, newer = (str(tmp_path / name) for name in ("older.ckpt", "newer.ckpt"))
    for path in (older, newer):
        os.makedirs(path)
        os.makedirs(path + "-hf")
        Path(path + "-hf", "config.json").touch()
    callback = SaveHFModel(every_checkpoint=True)
    callback.load_state_dict({"beside": [older, newer]})
    callback._delete_stale(trainer)  # type: ignore[arg-type]
    callback.load_state_dict({"beside": [older]})
    os.rmdir(newer)
    callback._delete_stale(trainer)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["older.ckpt", "older.ckpt-hf"]
    assert callback.state_dict() == {"beside": [older]}


def test_what_belongs_to_a_deleted_checkpoint_goes_with_it_also_after_a_resume(tmp_path: Path) -> None:
    trainer = SimpleNamespace(is_global_zero=True, checkpoint_callbacks=[ModelCheckpoint(tmp_path)])
    kept, gone, coming = (str(tmp_path / name) for name in ("kept.ckpt", "gone.ckpt", "coming.ckpt"))
    for path in (kept, gone, coming):
        os.makedirs(path + "-hf")
        Path(path + "-hf", "config.json").touch()
    os.makedirs(kept)
    os.makedirs(gone)
    first = SaveHFModel(every_checkpoint=True)
    first.load_state_dict({"beside": [kept, gone, coming, str(tmp_path / "moved.ckpt")]})
    first._delete_stale(trainer)  # type: ignore[arg-type]
    again = SaveHFModel(every_checkpoint=True)
    again.load_state_dict(first.state_dict())
    again._delete_stale(trainer)  # type: ignore[arg-type]
    assert again.state_dict() == {"beside": [coming, gone, kept]}
    os.rmdir(gone)
    again._delete_stale(trainer)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["coming.ckpt-hf", "kept.ckpt", "kept.ckpt-hf"]


@pytest.mark.parametrize("place", ["run/notes", "run/../other/model", "run/link/model", "other/model"])
def test_what_a_checkpoint_names_elsewhere_or_is_no_model_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to("../other")
    path = str(tmp_path / place)
    for name in (path, path + "-hf"):
        os.makedirs(name)
        Path(name, "thesis.tex" if "notes" in place else "config.json").touch()
    callback = SaveHFModel(every_checkpoint=True)
    callback.load_state_dict({"beside": [path]})
    trainer: Any = SimpleNamespace(is_global_zero=True, checkpoint_callbacks=[ModelCheckpoint(tmp_path / "run")])
    callback._delete_stale(trainer)
    shutil.rmtree(path)
    callback._delete_stale(trainer)
    assert len(os.listdir(path + "-hf")) == 1
    assert f"{path}-hf is not a model beside a checkpoint of this run, so it is not deleted" in caplog.text


def test_what_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    path = str(tmp_path / "gone.ckpt")
    for name in (path, path + "-hf"):
        os.makedirs(name)
        Path(name, "config.json").touch()
    callback = SaveHFModel(every_checkpoint=True)
    callback.load_state_dict({"beside": [path]})
    trainer: Any = SimpleNamespace(is_global_zero=True, checkpoint_callbacks=[ModelCheckpoint(tmp_path)])
    callback._delete_stale(trainer)
    shutil.rmtree(path)
    monkeypatch.setattr(atomic, "remove", refuse)
    callback._delete_stale(trainer)
    assert "gone.ckpt-hf is no longer needed and could not be deleted" in caplog.text
    assert callback.state_dict() == {"beside": []}


Weights = dict[str, torch.Tensor]


def weights(module: pl.LightningModule) -> Weights:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"filename": "always", "save_last": True},
        {"save_top_k": 0, "save_last": True},
        {"save_top_k": -1, "every_n_train_steps": 1, "save_last": "link"},
        {"save_top_k": -1, "save_on_train_epoch_end": True},
        {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
        {"monitor": "val_loss", "filename": "best"},
        {"monitor": "val_loss", "save_top_k": -1, "every_n_train_steps": 3},
        {"monitor": "train_loss", "save_top_k": -1},
        {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 2},
    ],
    ids=str,
)
def test_what_stands_beside_a_checkpoint_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], validates: bool
) -> None:
    if arguments.get("monitor") == "val_loss" and not validates:
        return
    saved: dict[str, Weights] = {}
    written: dict[str, Weights] = {}

    def write(module: pl.LightningModule, out: str, **_: Any) -> None:
        written[out.removesuffix("-hf")] = weights(module)

    for name, function in {
        "check_export": lambda *_, **__: None,
        "export_model": write,
    }.items():
        monkeypatch.setattr(save_hf_model, name, function)
    callbacks = [
        SaveHFModel(every_checkpoint=True),
        ModelCheckpoint(tmp_path, **arguments),
        ModelCheckpoint(tmp_path / "also", every_n_train_steps=3, save_top_k=-1),
    ]
    trainer = make_trainer("auto", max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    save = trainer.save_checkpoint

    def record(path: str, *rest: Any) -> None:
        assert trainer.lightning_module is not None
        saved[os.path.abspath(path)] = weights(trainer.lightning_module)
        save(path, *rest)

    trainer.save_checkpoint = record  # type: ignore[method-assign, assignment]
    trainer.fit(PlainNet(), loader(8, 2), loader(4, 2) if validates else None)
    assert len(saved) > 4
    assert written.keys() == saved.keys()
    for path, held in saved.items():
        assert all(torch.equal(tensor, written[path][name]) for name, tensor in held.items()), path
