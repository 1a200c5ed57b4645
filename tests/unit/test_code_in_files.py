# SPDX-License-Identifier: Apache-2.0
"""A file that was downloaded names code, and none of it is imported: what the user names himself is."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mcore import MCoreFinetuningData, MCoreGPT, single_process
from lightning_mcore.arguments.llamafactory.run import _tokenizer
from lightning_mcore.cli.fit import TrainingCLI
from lightning_mcore.data.finetuning.processors import load_processor
from lightning_mcore.data.preprocess.tokenizer import load_tokenizer
from lightning_mcore.hf.source import planned_settings
from lightning_mcore.interop.export import export_checkpoint
from lightning_mcore.interop.importing import import_checkpoint
from lightning_mcore.layers.transformer_config import refuse_recorded_code
from tests.support.hf_models import tiny_folder
from tests.support.sentences import refuses

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

EVIL = "evil_code"
TRAINED = {"trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False}}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a file that is written when the code beside a model runs; it is importable from here."""
    mark = tmp_path / "ran"
    about = "from lightning_mcore.hf.families import LLAMA as FAMILY\nfrom lightning_mcore import MCoreGPT as Model\n"
    (tmp_path / f"{EVIL}.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n{about}\ndef activation(x):\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield mark
    sys.modules.pop(EVIL, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model."""
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "model"))


def name_in_config(folder: Path, name: str) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "model_type": name}))


def a_checkpoint(folder: Path, model: Path, **changes: Any) -> str:
    """Write a checkpoint of a model whose hyper-parameters are then others, with the right checksums."""
    out = folder / "model.ckpt"
    import_checkpoint(str(model), str(out))
    state = torch.load(out / "lightning.pt", weights_only=True)
    recorded = state["hyper_parameters"]
    for name, value in changes.items():
        recorded[name] = {**recorded[name], **value} if isinstance(recorded.get(name), dict) else value
    torch.save(state, out / "lightning.pt")
    describe_again(out)
    return str(out)


def describe_again(out: Path) -> None:
    from dataclasses import asdict

    from lightning_mcore.checkpoint.files import record_file

    manifest = json.loads((out / "checkpoint.json").read_text())
    manifest["files"]["lightning.pt"] = asdict(record_file(out / "lightning.pt"))
    (out / "checkpoint.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("read", [MCoreGPT.from_pretrained, planned_settings])
def test_a_model_type_is_never_imported(read: Any, ran: Path, model: Path) -> None:
    name_in_config(model, f"{EVIL}:FAMILY")
    with refuses(ValueError, f"'{EVIL}:FAMILY'"):
        read(str(model))
    assert not ran.exists()
    assert read(str(model), family="llama")


def test_a_family_in_a_checkpoint_is_imported_where_the_user_names_it(ran: Path, model: Path, tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path, model, hf={"family": f"{EVIL}:FAMILY"})
    with single_process():
        MCoreGPT.from_pretrained(path).configure_model()  # the weights are Megatron's already
    with refuses(ValueError, f"'{EVIL}:FAMILY'"):
        export_checkpoint(path, str(tmp_path / "out"))
    assert not ran.exists()
    export_checkpoint(path, str(tmp_path / "out"), family=f"{EVIL}:FAMILY")
    assert ran.exists()
    assert MCoreGPT.from_pretrained(path, family=f"{EVIL}:FAMILY").hparams["hf"]["family"] == f"{EVIL}:FAMILY"


@pytest.mark.parametrize("name", ["activation_func", "init_method"])
def test_a_function_in_a_checkpoint_is_imported_where_the_user_names_it(
    name: str, ran: Path, model: Path, tmp_path: Path
) -> None:
    field = {name: f"{EVIL}.activation"}
    path = a_checkpoint(tmp_path, model, transformer=field)
    for read in (MCoreGPT.from_pretrained, planned_settings, MCoreGPT.load_from_checkpoint):
        with refuses(ValueError, f"{name}='{EVIL}.activation'"):
            read(path)
    assert not ran.exists()
    assert MCoreGPT.from_pretrained(path, transformer=field).hparams["transformer"][name] == f"{EVIL}.activation"
    assert ran.exists()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("activation_func", "os.system"),
        ("activation_func", "torch.os.system"),
        ("activation_func", "torch.load"),
        ("activation_func", "torch.hub.load"),
        ("activation_func", "torch.nn.functional.importlib"),
        ("activation_func", "torch.nn.functional.Callable"),
        ("activation_func", "torch.nn.functional._verify_batch_size"),
        ("activation_func", "torch.nn.init.zeros_"),
        ("activation_func", "megatron.core.activations.jit_fuser"),
        ("activation_func", "silu.__globals__"),
        ("activation_func", 3),
        ("init_method", "torch.nn.functional.silu"),
        ("output_layer_init_method", "megatron.core.utils.subprocess"),
    ],
)
def test_no_other_function_fits_into_a_checkpoint(name: str, path: Any) -> None:
    with refuses(ValueError, f"{name}="):
        refuse_recorded_code("a.ckpt", {name: path})


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("activation_func", "silu"),
        ("activation_func", "quick_gelu"),
        ("activation_func", "torch.nn.functional.silu"),
        ("activation_func", "torch.nn.functional.gelu"),
        ("activation_func", "megatron.core.activations.squared_relu"),
        ("init_method", "torch.nn.init.normal_"),
        ("init_method", None),
        ("num_layers", 2),
    ],
)
def test_what_megatron_and_torch_have_fits_into_a_checkpoint(name: str, path: Any) -> None:
    refuse_recorded_code("a.ckpt", {name: path})


CODE_IN_A_FILE: dict[str, dict[str, Any]] = {
    "class": {"_class_path": f"{EVIL}.Model", "_instantiator": "lightning.pytorch.cli.instantiate_module"},
    "class inside": {"data": [{"class_path": f"{EVIL}.Model"}]},
    "instantiator": {"_instantiator": f"{EVIL}.activation"},
    "function": {"transformer": {"activation_func": f"{EVIL}.activation"}},
}


def one_file(folder: Path, hyper_parameters: dict[str, Any]) -> Path:
    path = folder / "one.ckpt"
    torch.save(
        {"pytorch-lightning_version": "2.6.0", "state_dict": {}, "hyper_parameters": hyper_parameters, "loops": {}},
        path,
    )
    return path


@pytest.mark.parametrize("name", CODE_IN_A_FILE)
def test_code_in_a_file_of_lightnings_is_not_run(name: str, ran: Path, tmp_path: Path) -> None:
    path = one_file(tmp_path, CODE_IN_A_FILE[name])
    with refuses(ValueError, "one.ckpt"):
        MCoreGPT.load_from_checkpoint(path)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({**TRAINED, "model": {"class_path": "lightning_mcore.MCoreGPT.from_pretrained"}}))
    model = ["--model.init_args.path", str(tiny_folder("llama"))]
    with refuses(ValueError, "one.ckpt"):
        TrainingCLI(args=["fit", "--config", str(config), *model, "--ckpt_path", str(path)])
    assert not ran.exists()


def test_code_in_a_directory_is_not_run(ran: Path, model: Path, tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path, model, **CODE_IN_A_FILE["class"])
    with refuses(ValueError, "'evil_code.Model'"):
        MCoreGPT.load_from_checkpoint(path)
    assert not ran.exists()


TOKENIZER_DOORS: dict[str, Callable[[str], Any]] = {
    "preprocess": load_tokenizer,
    "fine-tuning": lambda folder: MCoreFinetuningData("a.jsonl", folder, seq_length=8, batch_size=1).tokenizer,
    "llamafactory": _tokenizer,
}


@pytest.mark.parametrize("door", TOKENIZER_DOORS)
def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(
    door: str, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(tmp_path / f"{EVIL}.py", folder)
    content = {"auto_map": {"AutoTokenizer": [None, f"{EVIL}.Model"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with refuses((ValueError, FileNotFoundError), "contains custom code which must be"):
        TOKENIZER_DOORS[door](str(folder))
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["image", "video"])
def test_code_of_a_processor_is_not_run_and_nobody_is_asked(
    kind: Any, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "processor"
    folder.mkdir()
    shutil.copy(tmp_path / f"{EVIL}.py", folder)
    loader, name = f"Auto{kind.title()}Processor", "preprocessor_config.json"
    content = {"auto_map": {loader: f"{EVIL}.Model"}, f"{kind}_processor_type": "Evil"}
    (folder / (name if kind == "image" else f"video_{name}")).write_text(json.dumps(content))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with refuses(ValueError, f"the {kind} processor of"):
        load_processor(str(folder), kind)
    assert not ran.exists()


@pytest.mark.parametrize("door", TOKENIZER_DOORS)
def test_a_damaged_tokenizer_is_one_sentence(door: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with refuses((ValueError, FileNotFoundError)):
        TOKENIZER_DOORS[door](str(tmp_path))
