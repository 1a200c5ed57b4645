# SPDX-License-Identifier: Apache-2.0
"""What is wrong with fine-tuning data is said in one sentence, with the file, the row and the setting to change."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.data.finetuning.chat import ChatEncoder
from lightning_mcore.data.finetuning.conversations import ConversationReader
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.files import explained, find_files, load_rows, name_of_row
from lightning_mcore.data.finetuning.tokenized import cache_folder
from tests.support.chats import Row, characters, exchanges, write
from tests.support.sentences import refuses

SILENT: dict[str, Row] = {
    "empty": {"prompt": "q", "response": ""},
    "null": {"prompt": "q", "response": None},
    "missing": {"prompt": "q"},
}


def data(folder: Path, *, streaming: bool = True, seq_length: int = 64, **options: Any) -> MCoreFinetuningData:
    """Return a data module of all files of a folder."""
    cache = str(folder / "cache")
    return MCoreFinetuningData(
        str(folder / "*.jsonl"), characters(), seq_length, streaming=streaming, cache_dir=cache, **options
    )


def batches(module: MCoreFinetuningData) -> list[Any]:
    """Return an epoch."""
    module.prepare_data()
    module.setup("fit")
    return list(module.train_dataloader())


def refuse(folder: Path, about: str, **options: Any) -> None:
    """Expect that the files of a folder are refused."""
    with refuses(ValueError, about):
        batches(data(folder, **options))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for file in ("stream", "datamodule"):
        monkeypatch.setattr(f"lightning_mcore.data.finetuning.{file}.rank_zero_info", lines.append)
    return lines


# Files


def test_files_of_a_folder_are_found_by_suffix_in_any_case_but_not_its_description(tmp_path: Path) -> None:
    write(tmp_path / "A.JSONL", exchanges(3))
    write(tmp_path / "b.json", exchanges(2))
    for name in ("dataset_info.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    found = find_files(str(tmp_path), "train_files")
    assert [Path(file).name for file in found] == ["A.JSONL", "b.json"]
    assert len(list(load_rows(found, streaming=True))) == 5


# An epoch without a batch


def test_a_stream_that_fills_no_batch_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [*exchanges(3), SILENT["empty"]])
    for workers in (0, 2):
        about = (
            "too few for a batch: each of 1 data-parallel ranks needs 8 rows from a single reader (it has"
            f" {max(1, workers)}), 8 rows in total"
        )
        refuse(tmp_path, about, batch_size=8, packing=False, num_workers=workers)


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_that_teaches_nothing_is_refused(tmp_path: Path, packing: bool) -> None:
    write(tmp_path / "a.jsonl", [SILENT["empty"], SILENT["null"]])
    refuse(tmp_path, "a.jsonl has nothing to learn (packed 0 of 2 samples", packing=packing)


def test_packed_rows_that_fill_no_batch_are_called_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", exchanges(3))
    for packing, rows in ((True, "2 rows"), (False, "3 samples")):
        refuse(tmp_path, f"the dataset has {rows}, fewer than the 8", batch_size=8, streaming=False, packing=packing)


# Rows


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "files"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_rows_without_an_answer_are_counted_as_such(
    tmp_path: Path, streaming: bool, packing: bool, said: list[str]
) -> None:
    write(tmp_path / "a.jsonl", [*exchanges(3), *SILENT.values()])
    batches(data(tmp_path, streaming=streaming, packing=packing))
    assert len(said) == 1
    assert said[0].endswith("; left out 3 without an answer")


def test_a_stream_of_padded_rows_counts_their_tokens(tmp_path: Path, said: list[str]) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "q", "response": "a" * count} for count in (1, 5, 3)])
    found = batches(data(tmp_path, packing=False, batch_size=2, shuffle_buffer=1))
    places = sum(batch["tokens"].numel() for batch in found)
    tokens = sum(int(batch["lengths"].sum()) for batch in found)
    left = 9  # the third sample fills no batch
    assert said == [
        f"epoch 0 of the stream: packed 3 of 3 samples, {tokens + left} tokens, into 3 rows,"
        f" {(tokens + left) / (places + left):.2%} filled; left out 1 row, too few to give every rank a batch"
    ]


def test_a_row_of_a_stream_that_is_too_long_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", exchanges(3, longest=5))
    write(tmp_path / "b.jsonl", [{"prompt": "q", "response": "a"}, {"prompt": "q", "response": "a" * 99}])
    for buffer in (1, 8):
        refuse(tmp_path, "b.jsonl takes 105 tokens, more than the seq_length=64", shuffle_buffer=buffer)


def test_a_row_is_found_in_files_of_every_kind(tmp_path: Path) -> None:
    rows = exchanges(3)
    (tmp_path / "list.json").write_text(str(rows).replace("'", '"'))
    (tmp_path / "blank.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    files = [str(tmp_path / "list.json"), str(tmp_path / "blank.jsonl"), write(tmp_path / "c.parquet", rows)]
    found = [name_of_row(files, number) for number in range(8)]
    names = [f"row {n} of {file}" for file, count in zip(files, (3, 2, 3), strict=True) for n in range(count)]
    assert found == names


# Columns


@pytest.mark.parametrize(
    ("other", "columns"),
    [
        ({"prompt": "q", "answer": "x"}, "answer, prompt"),
        ({"more": 1, "prompt": "q", "response": "x"}, "more, prompt, response"),
    ],
    ids=["missing", "more"],
)
def test_a_file_with_other_columns_is_named_in_any_order(tmp_path: Path, other: Row, columns: str) -> None:
    write(tmp_path / "a.jsonl", exchanges(5))
    write(tmp_path / "b.jsonl", [other] * 3)
    (tmp_path / "empty.jsonl").write_text("")
    for options in ({"streaming": False}, {"seed": 0}, {"seed": 1}, {"shuffle_buffer": 1}):
        refuse(tmp_path, f"b.jsonl has the columns {columns} but ", **options)


def test_empty_files_and_columns_that_only_some_rows_have_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", exchanges(2))
    write(tmp_path / "b.jsonl", [SILENT["missing"], {"prompt": "q", "response": "x"}])
    for name, blank in {"0.jsonl": "\n", "1.jsonl": "", "z.jsonl": ""}.items():
        (tmp_path / name).write_text(blank)
    for streaming in (True, False):
        found = batches(data(tmp_path, streaming=streaming))
        assert sum(int((batch["sample_ids"] >= 0).sum()) for batch in found) == 3


def test_a_row_without_a_column_is_refused() -> None:
    with refuses(ValueError, "row 3 has the columns 'prompt', 'id' but not 'response'"):
        ConversationReader(["prompt", "response"]).messages({"prompt": "q", "id": 5}, "row 3")


def test_a_blank_file_of_a_stream_is_called_empty(tmp_path: Path) -> None:
    for blank in ("\n\n", ""):
        (tmp_path / "a.jsonl").write_text(blank)
        for streaming in (True, False):
            refuse(tmp_path, "a.jsonl is empty", streaming=streaming)


# Settings and packages


@pytest.mark.parametrize("options", [{"overlong": "nope"}, {"format": "chatml"}, {"loss_on": "user"}])
def test_a_choice_that_is_unknown_is_refused_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    with refuses(ValueError, *(f"{name}='{value}' is unknown" for name, value in options.items())):
        data(tmp_path, **options)


def test_only_what_files_can_cause_is_explained_by_them(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", exchanges(1))
    for other in (TimeoutError("late"), MemoryError("full"), RuntimeError("moment"), KeyError("name")):
        with pytest.raises(type(other)) as raised, explained([file]):
            raise other
        assert raised.value is other
    for error in (OSError("gone"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ValueError("odd")):
        with pytest.raises(ValueError, match="cannot be read: "), explained([file]):
            raise error


def test_files_need_datasets_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    for needs in (lambda: cache_folder(None), lambda: load_rows(["a.jsonl"])):
        with refuses(ModuleNotFoundError, "needs the package datasets; install it: pip"):
            needs()


def test_a_template_needs_jinja2_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with refuses(ModuleNotFoundError, "needs the package jinja2; install it: pip"):
        ChatEncoder(characters())
    ChatEncoder(characters(None))


# A tokenizer whose settings are damaged


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("model_max_length", "no", "the tokenizer's model_max_length is of type str; set a number in its"),
        ("model_max_length", [1], "the tokenizer's model_max_length is of type list; set a number in its"),
        ("unk_token", "", "the tokenizer's unk_token '' is not one of its tokens; set one of them, or null"),
        ("padding_side", "a" * 100_000, "Padding side should be selected between"),
    ],
)  # fmt: skip
def test_a_damaged_setting_of_the_tokenizer_is_refused(tmp_path: Path, key: str, value: Any, sentence: str) -> None:
    write(tmp_path / "a.jsonl", exchanges(3))
    characters().save_pretrained(tmp_path / "tokenizer")
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), key: value}))
    with pytest.raises((ValueError, TypeError)) as raised:
        batches(MCoreFinetuningData(str(tmp_path / "*.jsonl"), str(tmp_path / "tokenizer"), 64))
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 600


def test_a_tokenizer_without_a_chat_template_is_told(tmp_path: Path, said: list[str]) -> None:
    write(tmp_path / "a.jsonl", exchanges(3))
    characters().save_pretrained(tmp_path / "tokenizer")
    line = "the tokenizer has no chat template: each row becomes prompt, response and EOS token"
    for has_template, streaming in ((True, False), (False, False), (False, True)):
        if not has_template:
            (tmp_path / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
        said.clear()
        files, tokenizer = str(tmp_path / "*.jsonl"), str(tmp_path / "tokenizer")
        batches(MCoreFinetuningData(files, tokenizer, 64, batch_size=1, num_workers=0, streaming=streaming))
        assert (line in said) is not has_template
