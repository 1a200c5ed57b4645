# SPDX-License-Identifier: Apache-2.0
"""What ``lightning-mcore preprocess`` cannot do is one sentence: what was given, where, and what to change."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_mcore.cli import main
from lightning_mcore.data.preprocess.run import Options, preprocess
from lightning_mcore.data.preprocess.worker import read_tokens
from lightning_mcore.data.pretraining.index import read_index
from tests.support.sentences import refuses, says
from tests.unit.data.test_preprocess import write_parquet

GOOD = '{"text": "a b", "id": 1}\n'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a tokenizer without an end of sequence."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words = {"a": 0, "b": 1, "<unk>": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))
    return str(path)


def refusal(inputs: list[str], tokenizer: str, place: Path, **changed: Any) -> str:
    """Return the sentence; nothing may be left behind."""
    given: dict[str, Any] = {"append_eod": False, "workers": 1, "output": str(place / "out"), **changed}
    with pytest.raises((ValueError, OSError, RuntimeError, ModuleNotFoundError)) as caught:
        preprocess(Options(inputs=inputs, tokenizer=tokenizer, **given))
    assert not list(place.glob("out.[bi]*"))
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(f"{place}/", "")


def refuse(inputs: list[str], tokenizer: str, place: Path, **changed: Any) -> None:
    """Take in the sentence."""
    says(refusal(inputs, tokenizer, place, **changed))


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}\n{"text": "b"\n',
        GOOD.encode() * 40 + b'\n["a"]\n',
        GOOD.encode() * 40 + b'{"body": "a", "id": 2}',
        b'{"text": ["a"], "raw": "a"}',
        b"{}",
        GOOD.encode() * 40 + '{"text": "ä"}'.encode("latin-1"),
        GOOD.encode() + rb'{"text": "a \ud83d b"}',
        b'\n{"text": null}\n{"text": ""}\n',
        b"",
    ],
    ids=["cut off", "no object", "no column", "no text", "no columns", "encoding", "surrogate", "empty", "nothing"],
)
def test_broken_lines_are_named(content: bytes, tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    refuse([str(tmp_path / "data.jsonl")], tokenizer, tmp_path, piece_bytes=100)


def test_what_comes_before_a_broken_line_is_kept(tokenizer: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "data.jsonl").write_text(GOOD * 40 + "oops\n")
    command = {"inputs": [str(tmp_path / "data.jsonl")], "tokenizer": tokenizer, "output": str(tmp_path / "out")}
    with refuses(ValueError, "line 41 is not JSON"):
        preprocess(Options(**command, append_eod=False, workers=2, piece_bytes=100))
    kept = [read_tokens(str(path))[0]["documents"] for path in (tmp_path / "out.unfinished").glob("*.piece")]
    assert sum(kept) == 40


def test_text_in_another_encoding_is_named(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("a\nä".encode("latin-1"))
    refuse([str(tmp_path / "a.txt")], tokenizer, tmp_path)


def test_parquet_files_are_looked_at_before_anything_is_done(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")
    write_parquet(Path(good), {"text": ["a"], "id": [1]})
    Path(bad).write_bytes(b"PAR1 no")
    said = refusal([good, bad], tokenizer, tmp_path)
    assert said.startswith("b.parquet cannot be read as parquet: ")
    assert said.endswith("; fix or remove the file")
    for column in ("body", "id"):
        refuse([good], tokenizer, tmp_path, text_column=column)
    real = importlib.import_module

    def without_pyarrow(name: str, package: str | None = None) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_pyarrow)
    refuse([good], tokenizer, tmp_path)


def test_a_damaged_row_group_is_one_sentence(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"text": [f"a b {number}" for number in range(5000)]}, compression="snappy")
    content = bytearray(path.read_bytes())
    content[40:4000] = bytes(3960)
    path.write_bytes(content)
    said = refusal([str(path)], tokenizer, tmp_path)
    assert said.startswith("a.parquet cannot be read as parquet: ")


@pytest.mark.parametrize(
    "changed",
    [
        {"output": "data/out.bin"},
        {"output": "data/"},
        {"separator": ""},
        {"workers": 0},
        {"format": "csv"},
        {"append_eod": True},
        {"append_eod": True, "eod_token": "<eos>"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(changed: dict[str, Any], tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    refuse([str(tmp_path / "a.jsonl")], tokenizer, tmp_path, **changed)


@pytest.mark.parametrize(
    "inputs",
    [["no.jsonl"], ["empty"], ["notes"], ["a.csv"], ["a.jsonl", "*.jsonl"], ["a.jsonl", "link/a.jsonl"], []],
    ids=str,
)
def test_inputs_that_are_none_are_refused(inputs: list[str], tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("text")
    (tmp_path / "link").symlink_to(".")
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text(GOOD)
    refuse([str(tmp_path / name) for name in inputs], tokenizer, tmp_path)


def test_what_is_no_tokenizer_is_refused(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    source = [str(tmp_path / "a.jsonl")]
    said = refusal(source, str(tmp_path / "broken.json"), tmp_path)
    assert said.startswith("broken.json is not a tokenizer.json (")
    assert said.endswith("; give one, or a folder or name for transformers")
    said = refusal(source, str(tmp_path / "folder"), tmp_path)
    assert said.startswith("AutoTokenizer cannot read the folder folder (")


@pytest.mark.parametrize("place", ["vocabulary", "added token"])
def test_a_token_with_an_absurd_id_is_refused_before_a_table_of_that_length_is_made(
    tokenizer: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    content = json.loads(Path(tokenizer).read_text())
    if place == "vocabulary":
        content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 10**9
    else:
        content["added_tokens"].append({"id": 10**9, "content": "<new>"})
    (tmp_path / "absurd.json").write_text(json.dumps(content))
    refuse([str(tmp_path / "a.jsonl")], str(tmp_path / "absurd.json"), tmp_path)


def test_the_command_line_ends_with_a_sentence_and_a_code(tokenizer: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.jsonl").write_text("oops")
    arguments = ["preprocess", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out")]
    assert main([*arguments, "--tokenizer", tokenizer, "--no-append-eod"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {tmp_path}/a.jsonl, line 1 is not JSON (")
    assert said.out == ""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--tokeniser", tokenizer])
    assert ended.value.code == 2


def test_files_that_are_no_dataset_are_told(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    prefix = str(tmp_path / "out")
    preprocess(Options(inputs=[str(tmp_path / "a.jsonl")], tokenizer=tokenizer, output=prefix, append_eod=False))
    with refuses(ValueError, "out.bin is a file; give the prefix of both"):
        read_index(prefix + ".bin")
    with refuses(FileNotFoundError, "other.bin does not exist; give the prefix"):
        read_index(str(tmp_path / "other"))
    os.truncate(prefix + ".bin", 2)
    with refuses(ValueError, "out.idx expects 4, so they do not belong"):
        read_index(prefix)
    os.truncate(prefix + ".idx", 40)
    with refuses(ValueError, "out.idx is damaged or of an unknown"):
        read_index(prefix)
    Path(prefix + ".idx").write_bytes(b"something else, but long enough for a head")
    with refuses(ValueError, "out.idx is not an index of Megatron"):
        read_index(prefix)


def test_settings_that_no_input_has_a_use_for_are_refused(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(GOOD)
    (tmp_path / "data.txt").write_text("a b")
    refuse([str(tmp_path / "data.jsonl")], tokenizer, tmp_path, separator="b")
    refuse([str(tmp_path / "data.txt")], tokenizer, tmp_path, text_column="body")


def test_a_failure_before_any_work_does_not_speak_of_unfinished_work(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(GOOD)
    missing = str(tmp_path / "no" / "such" / "place")
    (tmp_path / "no").write_text("a file")
    assert main(["preprocess", str(tmp_path / "data.jsonl"), "--output", missing, "--tokenizer", tokenizer]) == 1
    assert "unfinished, and the same command" not in capsys.readouterr().err
