# SPDX-License-Identifier: Apache-2.0
import argparse
import contextlib
import enum
import io
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist

from lightning_mcore.checkpoint import commands as checkpoint
from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint.manifest import read_common, read_metadata

MANIFEST: dict[str, Any] = {
    "versions": {"torch": "2.13.0", "lightning": "2.6.6", "megatron-core": "0.19.2", "lightning_mcore": "0.1.0"},
    "layout": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 3,
        "pipeline_model_parallel_layout": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": None,
        "sequence_parallel": True,
    },
    "world_size": 16,
    "precision": "bf16-mixed",
    "use_distributed_optimizer": True,
    "global_step": 1200,
    "epoch": 3,
    "saved_at": "2026-01-31T12:00:00+00:00",
    "model": {
        "class": "project.model.Translator",
        "vocab_size": 128,
        "config": {"num_layers": 12, "hidden_size": 64, "num_moe_experts": 8, "moe_router_topk": 2, "gated": True},
    },
    "contents": {"weights": True, "optimizer": True, "optimizer_class": "AdamW"},
    "parameters": 1_234_567,
    "tensors": {
        "embedding.word_embeddings.weight": {"shape": [128, 64], "dtype": "bfloat16"},
        "optimizer.state.exp_avg.embedding.word_embeddings.weight": {"shape": [128, 64], "dtype": "float32"},
    },
}


def save(path: Path, **changes: Any) -> str:
    directory = checkpoint_files.begin(str(path))
    Path(directory, "__0_0.distcp").write_bytes(bytes(20_000))
    Path(directory, "lightning.pt").write_bytes(bytes(500))
    checkpoint_files.finish(str(path), {**MANIFEST, **changes}, {})
    return str(path)


class Colour(enum.Enum):
    RED = 1


def save_as_megatron_does(path: Path) -> str:
    state = {
        "decoder.weight": torch.ones(4, 6, dtype=torch.bfloat16),
        "optimizer.state.exp_avg.decoder.weight": torch.ones(4, 6),
        "rng_state": {"seed": 3},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # which is what no_dist asks
        save_torch_dist(state, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    arguments = {"tensor_model_parallel_size": 2, "world_size": 8, "num_layers": 3, "padded_vocab_size": 512}
    common = {"iteration": 70, "args": argparse.Namespace(**arguments, colour=Colour.RED, bias=torch.ones(2))}
    torch.save(common, path / "common.pt")
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = checkpoint.main(arguments)
        output, errors = capsys.readouterr()
        return code, output, errors

    return call


Run = Callable[..., tuple[int, str, str]]


# As a user calls it


def test_from_a_shell(tmp_path: Path) -> None:
    broken = save(tmp_path / "broken.ckpt")
    os.truncate(tmp_path / "broken.ckpt" / "__0_0.distcp", 7)
    command = [sys.executable, "-m", "lightning_mcore.checkpoint", "verify", broken]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    damage = "__0_0.distcp has 7 of 20000 bytes; use another checkpoint or a copy of this one"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {broken} is damaged: {damage}\n")


def test_verify_says_what_it_has_checked(tmp_path: Path, run: Run) -> None:
    path = save(tmp_path / "a.ckpt")
    said = f"{path} is whole: size and checksum of 2 files are right, 20.5kB in all\n"
    assert run("verify", path) == (0, said, "")
    assert run("verify", f"{path}x") == (2, "", f"error: {path}x does not exist; give the path of a checkpoint\n")


def test_wrong_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        checkpoint.main(["check"])
    assert caught.value.code == 2
    assert "usage: python -m lightning_mcore.checkpoint" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert checkpoint.main(["inspect", save(tmp_path / "a.ckpt")]) == 0


# Our directories


def test_inspect_shows_what_one_asks_first(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    assert checkpoint.inspect(path) == "\n".join(
        [
            f"{path}: sharded checkpoint of lightning_mcore, format version 2",
            "  step        1200",
            "  epoch       3",
            "  saved       2026-01-31T12:00:00+00:00",
            "  model       project.model.Translator",
            "  sizes       vocab_size 128, num_layers 12, hidden_size 64, num_moe_experts 8, moe_router_topk 2",
            "  parameters  1.23M (1,234,567)",
            "  layout      tp2 pp2 vpp3 cp1 ep4 etp2 dp4 on 16 ranks with sequence parallelism",
            "  precision   bf16-mixed",
            "  optimizer   AdamW, distributed",
            "  versions    torch 2.13.0, lightning 2.6.6, megatron-core 0.19.2, lightning_mcore 0.1.0",
            "  on disk     20.5kB in 2 files (weights 16.4kB, optimizer 32.8kB)",
        ]
    )


def test_inspect_says_that_there_are_weights_alone(tmp_path: Path) -> None:
    contents = {"weights": True, "optimizer": False, "optimizer_class": None}
    assert "optimizer   none: weights only" in checkpoint.inspect(save(tmp_path / "a.ckpt", contents=contents))


def test_the_layout_is_shown_as_the_strategy_counts_its_ranks(tmp_path: Path) -> None:
    from lightning_mcore.config.layout import ParallelLayout

    layout = ParallelLayout(**MANIFEST["layout"])
    shown = re.search("layout +(.*)", checkpoint.inspect(save(tmp_path / "a.ckpt")))
    assert shown is not None
    assert f"dp{layout.data_parallel_size(16)} " in shown.group(1)
    assert f"etp{layout.expert_tensor_size} " in shown.group(1)


def test_experts_are_not_mentioned_where_there_are_none(tmp_path: Path) -> None:
    model = {"class": "M", "config": {"num_layers": 2, "num_moe_experts": None, "moe_router_topk": 2}}
    assert "  sizes       num_layers 2\n" in checkpoint.inspect(save(tmp_path / "a.ckpt", model=model))


def test_a_manifest_with_little_in_it_is_shown(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", **dict.fromkeys(MANIFEST))
    assert checkpoint.inspect(path).splitlines()[1:] == ["  on disk  20.5kB in 2 files"]


def test_the_table_of_tensors(tmp_path: Path) -> None:
    text = checkpoint.inspect(save(tmp_path / "a.ckpt"), with_tensors=True)
    assert text.splitlines()[-2:] == [
        "embedding.word_embeddings.weight                          bfloat16  [128, 64]",
        "optimizer.state.exp_avg.embedding.word_embeddings.weight  float32   [128, 64]",
    ]


def test_json_is_the_manifest(tmp_path: Path, run: Run) -> None:
    path = save(tmp_path / "a.ckpt")
    code, output, _ = run("inspect", path, "--json")
    assert code == 0
    assert json.loads(output) == json.loads((tmp_path / "a.ckpt" / "checkpoint.json").read_text())


def test_inspect_reads_the_manifest_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "__0_0.distcp").unlink()
    assert "1.23M" in checkpoint.inspect(path)


def test_remote_checkpoints_are_checked_and_shown(tmp_path: Path) -> None:
    from tests.unit.checkpoint.test_checkpoint_files import upload

    remote = f"memory://{tmp_path.name}/a.ckpt"
    upload(save(tmp_path / "a.ckpt"), remote)
    assert checkpoint.verify(remote).startswith(f"{remote} is whole: size and checksum of 2 files are right")
    assert "Translator" in checkpoint.inspect(remote)


# Checkpoints of others


def test_a_checkpoint_of_megatron_is_shown(tmp_path: Path) -> None:
    path = save_as_megatron_does(tmp_path / "iter_0000070")
    lines = checkpoint.inspect(path, with_tensors=True).splitlines()
    assert "torch_dist checkpoint of Megatron-LM or another program" in lines[0]
    assert lines[1:5] == [
        "  step        70",
        "  sizes       vocab_size 512, num_layers 3",
        "  parameters  24",
        "  layout      tp2 pp1 vpp1 cp1 ep1 etp2 dp4 on 8 ranks",
    ]
    assert lines[5].endswith("(weights 48B, optimizer 96B)")
    assert lines[-2:] == [
        "decoder.weight                          bfloat16  [4, 6]",
        "optimizer.state.exp_avg.decoder.weight  float32   [4, 6]",
    ]


def test_a_truncated_or_changed_file_of_megatron_is_named(tmp_path: Path, run: Run) -> None:
    path = save_as_megatron_does(tmp_path / "iter_0000070")
    code, output, _ = run("verify", path)
    assert (code, "the checksums of 3 of its 3 pieces are right" in output) == (0, True)
    (shard,) = (tmp_path / "iter_0000070").glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content.replace(torch.ones(6).numpy().tobytes(), bytes(24)))
    code, _, errors = run("verify", path)
    assert (code, f"of {shard.name} is wrong" in errors) == (1, True)
    shard.write_bytes(content)
    os.truncate(shard, shard.stat().st_size - 1)
    code, _, errors = run("verify", path)
    assert (code, f"{shard.name} has {shard.stat().st_size} of" in errors) == (1, True)


@pytest.mark.parametrize("outside", ["../other/weights.distcp", "/etc/hosts"])
def test_metadata_that_lead_out_of_the_checkpoint_are_not_followed(tmp_path: Path, run: Run, outside: str) -> None:
    path = tmp_path / "a"
    save_as_megatron_does(path)
    metadata = read_metadata(str(path), (path / ".metadata").read_bytes())
    place = next(iter(metadata.storage_data.values()))
    (tmp_path / "other").mkdir()
    (path / place.relative_path).rename(tmp_path / "other" / "weights.distcp")
    for found in metadata.storage_data.values():
        found.relative_path = outside
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    code, _, errors = run("verify", str(path))
    assert (code, f".metadata names {outside}, which lies outside the checkpoint" in errors) == (1, True)


def test_metadata_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    path = save_as_megatron_does(tmp_path / "a")
    ours = read_metadata(path, (tmp_path / "a" / ".metadata").read_bytes())
    theirs = FileSystemReader(path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def test_metadata_are_read_whichever_python_wrote_them(tmp_path: Path) -> None:
    """Python 3.13 pickles a path as one of pathlib._local, which other releases do not have."""
    path = save_as_megatron_does(tmp_path / "a")
    metadata = FileSystemReader(path).read_metadata()
    metadata.storage_meta.checkpoint_id = tmp_path
    for module in (b"cpathlib\n", b"cpathlib._local\n"):
        written = re.sub(rb"cpathlib(\._local)?\n", module, pickle.dumps(metadata, protocol=2))
        assert module in written
        assert read_metadata(path, written).storage_meta.checkpoint_id == tmp_path


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, run: Run) -> None:
    attack = Attack(tmp_path / "attacked")
    path = save_as_megatron_does(tmp_path / "a")
    torch.save({"iteration": 5, "args": attack}, tmp_path / "a" / "common.pt")
    assert "step        5" in checkpoint.inspect(path)
    nested = b"\x80\x04\x8c\x29torch.distributed.checkpoint.filesystem\x8c\x08os.mkdir\x93."
    for content in (pickle.dumps(attack), pickle.dumps({"a": attack}), nested):
        (tmp_path / "a" / ".metadata").write_bytes(content)
        for command in ("inspect", "verify"):
            code, _, errors = run(command, path)
            assert (code, f"{path} cannot be read, because .metadata is damaged or unsafe" in errors) == (1, True)
    torch.save({"state_dict": {}, "extra": attack}, tmp_path / "one.ckpt")
    code, output, _ = run("inspect", str(tmp_path / "one.ckpt"))
    assert code == 0
    assert "not shown, because it holds objects of posix.mkdir" in output
    assert not (tmp_path / "attacked").exists()


def test_common_values_that_cannot_be_read_are_left_out() -> None:
    stream = io.BytesIO()
    torch.save([1], stream)
    assert read_common(b"") == read_common(b"no archive") == read_common(stream.getvalue()) == {}


# Checkpoints in one file


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    content = {
        "global_step": 11,
        "epoch": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }
    torch.save(content, tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def test_a_checkpoint_in_one_file_is_shown(one_file: Path) -> None:
    lines = checkpoint.inspect(str(one_file), with_tensors=True).splitlines()
    assert lines[0] == f"{one_file}: checkpoint in one file"
    assert lines[1:6] == [
        "  step        11",
        "  epoch       2",
        "  parameters  15",
        "  optimizer   its state",
        "  versions    lightning 2.6.6",
    ]
    assert lines[6].endswith(" in 1 file (weights 60B, optimizer 128B)")  # two moments and a step for each weight
    assert [line for line in lines if line.startswith(("bias", "weight"))] == [
        "bias                            float32  [3]",
        "weight                          float32  [3, 4]",
    ]


def test_a_checkpoint_in_one_file_is_checked(one_file: Path, run: Run) -> None:
    assert run("verify", str(one_file))[0] == 0
    content = bytearray(one_file.read_bytes())
    with zipfile.ZipFile(one_file) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content[content.find(b"state_dict")] ^= 1
    one_file.write_bytes(content)
    code, _, errors = run("verify", str(one_file))
    assert (code, f"the checksum of its record {largest.filename} differs" in errors) == (1, True)
    os.truncate(one_file, len(content) // 2)
    for command in ("verify", "inspect"):
        code, _, errors = run(command, str(one_file))
        assert (code, errors.count("\n")) == (1, 1)


def test_a_checkpoint_in_one_file_without_checksums_is_not_called_damaged(tmp_path: Path, run: Run) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"weight": torch.ones(3)}}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    code, output, _ = run("verify", str(tmp_path / "a.ckpt"))
    assert (code, "without checksums; there is nothing to compare" in output) == (0, True)


def test_a_checkpoint_of_megatron_without_checksums_is_not_called_damaged(tmp_path: Path, run: Run) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save_as_megatron_does(tmp_path / "iter_0000070")
    finally:
        torch.serialization.set_crc32_options(True)
    code, output, _ = run("verify", path)
    assert (code, "has no checksums to compare with" in output) == (0, True)


def test_what_cannot_be_looked_at_has_its_own_exit_code(tmp_path: Path, run: Run) -> None:
    for command in ("verify", "inspect"):
        assert run(command, str(tmp_path / "none"))[0] == 2
        assert run(command, str(tmp_path))[0] == 1


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "shown"), [(0.001, False), (0.5, True)])
def test_progress_is_shown_on_a_terminal_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, seconds: float, shown: bool
) -> None:
    clock = [100.0]
    monkeypatch.setattr("lightning_mcore.checkpoint.commands.time.monotonic", lambda: clock[0])
    for output in (Terminal(), io.StringIO()):
        progress = checkpoint._Progress(output)
        for step in range(1, 11):
            clock[0] += seconds
            progress(step * 1000, 10_000)
        assert bool(output.getvalue()) == (shown and output.isatty())
        if output.getvalue():
            assert output.getvalue().startswith("\r 30%  3.00kB of 10.0kB  2.00kB/s")
            assert output.getvalue().endswith("\n")
            assert "\r100%" in output.getvalue()


def test_an_error_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("lightning_mcore.checkpoint.commands.time.monotonic", lambda: clock[0])
    output = Terminal()
    progress = checkpoint._Progress(output)
    clock[0] += 2
    progress(1, 2)
    assert progress.refuse(ValueError("a file is missing"), 1) == 1
    assert output.getvalue().splitlines()[-1] == "error: a file is missing"
    assert len(output.getvalue().splitlines()) == 3  # a carriage return begins a line, too
