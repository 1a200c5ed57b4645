# SPDX-License-Identifier: Apache-2.0
"""A changed bit in a Hugging Face model is found by the hub's checksum; files without one are reported."""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_mcore import MCoreGPT
from lightning_mcore.hf.files import check_download
from lightning_mcore.interop.importing import import_checkpoint
from tests.support.hf_models import save_tiny
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = "model.safetensors"


def checksum(path: Path) -> str:
    """Return what the hub names a file by: SHA-256 where it is large, git's SHA-1 where it is small."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model without checksums."""
    return save_tiny("llama", tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def cached(plain: Path, tmp_path: Path) -> Path:
    """Return the same in the cache of the hub."""
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "1f2e", tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        shutil.copy(path, blobs / checksum(path))
        (snapshot / path.name).symlink_to(f"../../blobs/{checksum(path)}")
    return snapshot


@pytest.fixture
def downloaded(plain: Path, tmp_path: Path) -> Path:
    """Return the same as a download into a folder."""
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    about = folder / ".cache" / "huggingface" / "download"
    about.mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.is_file()]:
        (about / f"{path.name}.metadata").write_text(f"1f2e\n{checksum(path)}\n{path.stat().st_mtime + 0.5}\n")
    return folder


def flip(path: Path, place: int) -> None:
    """Turn a bit round as a failing disk does, which changes no time."""
    path = path.resolve()
    content, status = bytearray(path.read_bytes()), path.stat()
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("where", ["cached", "downloaded"])
def test_a_changed_bit_in_weights_of_the_hub_is_refused(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder: Path = request.getfixturevalue(where)
    with caplog.at_level(logging.INFO):
        import_checkpoint(str(folder), str(tmp_path / "whole.ckpt"))
    assert "no checksum" not in caplog.text
    flip(folder / WEIGHTS, -3)
    with refuses(ValueError, f"{WEIGHTS} differs from the hub's file of that"):
        import_checkpoint(str(folder), str(tmp_path / "changed.ckpt"))
    assert not (tmp_path / "changed.ckpt").exists()


@pytest.mark.parametrize("where", ["cached", "downloaded"])
def test_a_changed_digit_in_a_config_of_the_hub_is_refused(where: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(where)
    MCoreGPT.from_pretrained(str(folder))
    flip(folder / "config.json", (folder / "config.json").read_bytes().index(b"128"))
    with refuses(ValueError, "config.json differs from the hub's file of"):
        MCoreGPT.from_pretrained(str(folder))


def test_a_file_that_was_changed_since_its_download_is_the_users(downloaded: Path) -> None:
    text = (downloaded / "config.json").read_text()
    (downloaded / "config.json").write_text(text.replace("128", "64"))
    later = (downloaded / "config.json").stat().st_mtime + 60
    os.utime(downloaded / "config.json", (later, later))
    assert MCoreGPT.from_pretrained(str(downloaded)).seq_length == 64


@pytest.mark.parametrize("about", ["", "1f2e\n", "1f2e\nnot-a-checksum\n9e9\n", "1f2e\nabc\nlater\n", "\xff"])
def test_what_a_download_left_may_be_damaged(about: str, downloaded: Path) -> None:
    (downloaded / ".cache" / "huggingface" / "download" / f"{WEIGHTS}.metadata").write_text(about, encoding="latin-1")
    assert not check_download(str(downloaded / WEIGHTS))


def test_it_is_said_that_a_file_has_no_checksum(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        import_checkpoint(str(plain), str(tmp_path / "out.ckpt"))
    [line] = [record.getMessage() for record in caplog.records if "checksum" in record.getMessage()]
    assert line.startswith(f"{plain}: there is no checksum from the hub for {WEIGHTS}, so a damaged bit is noticed")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(value: float, dtype: torch.dtype, plain: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(tensors, folder / WEIGHTS)
    with refuses(ValueError, "model.layers.1.mlp.down_proj.weight"):
        import_checkpoint(str(folder), str(tmp_path / "out.ckpt"))
    assert not (tmp_path / "out.ckpt").exists()


def test_an_index_that_counts_other_bytes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny("llama", tmp_path / "model", max_shard_size="60KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for more, told in ((0, False), (2, True)):
        index.write_text(json.dumps({**content, "metadata": {"total_size": content["metadata"]["total_size"] + more}}))
        MCoreGPT.from_pretrained(str(folder))
        assert ("bytes of weights, but the files have" in caplog.text) is told
