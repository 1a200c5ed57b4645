# SPDX-License-Identifier: Apache-2.0
"""A family outside the package: found by its path and by an entry point, and equal to transformers both ways."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.hf import family_names, find_family
from lightning_mcore.interop.export import export_checkpoint
from lightning_mcore.interop.importing import import_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
PATH = "own_family:FAMILY"
VOCAB_SIZE = 101

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("own_family", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """Return the folder of a StableLM, tokens, and its logits of them in transformers."""
    from transformers import StableLmConfig, StableLmForCausalLM

    torch.manual_seed(1)
    config = StableLmConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_qkv_bias=True,
        partial_rotary_factor=0.5,
        hidden_dropout=0.0,
    )
    stablelm = StableLmForCausalLM(config).eval()
    for parameter in stablelm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("stablelm") / "model"
    stablelm.save_pretrained(folder)
    tokens = torch.randint(VOCAB_SIZE, (2, 16))
    with torch.no_grad():
        return folder, tokens, stablelm(tokens).logits


def logits_of(module: MCoreGPT, tokens: Tensor) -> Tensor:
    with single_process(), torch.no_grad():
        if not hasattr(module, "model"):
            module.configure_model()
        module.eval()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits: Tensor = module.model(tokens, positions, None)
    return logits[..., :VOCAB_SIZE]


def test_a_family_of_your_own_computes_what_transformers_does(model: tuple[Path, Tensor, Tensor]) -> None:
    folder, tokens, wanted = model
    own = logits_of(MCoreGPT.from_pretrained(str(folder), family=PATH), tokens)
    assert torch.allclose(own, wanted, rtol=0, atol=1e-4)


def test_it_goes_in_and_out_bit_for_bit(model: tuple[Path, Tensor, Tensor], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, tokens, wanted = model
    import_checkpoint(str(folder), str(tmp_path / "own.ckpt"), family=PATH)
    export_checkpoint(str(tmp_path / "own.ckpt"), str(tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits, wanted)


def install(folder: Path, name: str, path: str) -> None:
    """Write what pip leaves of a distribution with an entry point."""
    about = folder / "own_families-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-families\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[lightning_mcore.families]\n{name} = {path}\n")


def test_an_installed_package_registers_a_family(
    model: tuple[Path, Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tokens, wanted = model
    with pytest.raises(ValueError, match="models of type 'stablelm' are not supported; choose llama, "):
        MCoreGPT.from_pretrained(str(folder))
    install(tmp_path, "stablelm", PATH)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "stablelm" in family_names()
    assert find_family("stablelm").architecture == "StableLmForCausalLM"
    module = MCoreGPT.from_pretrained(str(folder))
    assert module.hparams["hf"]["family"] == "stablelm"
    assert torch.allclose(logits_of(module, tokens), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("absent_module:FAMILY", r"family='absent_module:FAMILY' cannot be imported: No module named"),
        ("own_family:OTHER", r"family='own_family:OTHER' cannot be imported: .* has no attribute 'OTHER'; give"),
        (":", r"family=':' is not the path of a family; give 'package\.module:FAMILY'"),
        ("json:dumps", r"family='json:dumps' is a function, not a Family; give the path of one"),
        ("own_family", r"models of type 'own_family' are not supported; choose llama, .*family='package\.module"),
    ],
)
def test_what_is_no_family_is_refused(path: str, text: str, model: tuple[Path, Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match=text):
        MCoreGPT.from_pretrained(str(model[0]), family=path)


def test_its_tied_output_layer_must_be_the_embedding(model: tuple[Path, Tensor, Tensor], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model[0], tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"lm_head\.weight in .* differs from model\.embed_tokens\.weight"):
        import_checkpoint(str(folder), str(tmp_path / "own.ckpt"), family=PATH)


def test_what_it_does_not_know_is_refused(model: tuple[Path, Tensor, Tensor], tmp_path: Path) -> None:
    content = json.loads((model[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "use_parallel_residual": True}))
    with pytest.raises(ValueError, match="use_parallel_residual=True is not supported, because Megatron's model"):
        MCoreGPT.from_pretrained(str(tmp_path), family=PATH)
