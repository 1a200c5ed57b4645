# SPDX-License-Identifier: Apache-2.0
"""Datasets of a LLaMA-Factory file: looked up in dataset_info.json, and read as it says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_mcore.arguments.llamafactory.data import FactoryData, FactoryReading, FactoryRows
from lightning_mcore.arguments.llamafactory.datasets import DatasetEntry, read_datasets
from tests.support.chats import characters, write
from tests.support.sentences import refuses

ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}


def entry(folder: Path, rows: list[Any], name: str = "a.jsonl", **says: Any) -> DatasetEntry:
    """Return a dataset whose file has these rows."""
    write(folder / name, rows)
    (folder / "dataset_info.json").write_text(json.dumps({"d": {"file_name": name, **says}}), encoding="utf-8")
    return read_datasets("d", str(folder))[0]


def messages(folder: Path, row: Mapping[str, Any], **says: Any) -> list[tuple[str, str]]:
    """Return the conversation that a row becomes."""
    reader = FactoryRows(entry(folder, [row], **says), list(row))
    return [(message["role"], message["content"]) for message in reader.messages(row, "row 0")]


def test_an_alpaca_row_joins_its_instruction_by_a_line(tmp_path: Path) -> None:
    assert messages(tmp_path, ALPACA) == [("user", "Add.\n1 and 2"), ("assistant", "3")]
    assert messages(tmp_path, {**ALPACA, "input": ""})[0] == ("user", "Add.")
    assert messages(tmp_path, {**ALPACA, "input": None, "output": None}) == [("user", "Add."), ("assistant", "")]


def test_an_empty_list_of_tools_is_none(tmp_path: Path) -> None:
    columns = {"prompt": "instruction", "query": "input", "response": "output", "tools": "t"}
    assert messages(tmp_path, {**ALPACA, "t": "[]"}, columns=columns) == messages(tmp_path, ALPACA)


def test_columns_have_the_names_of_dataset_info(tmp_path: Path) -> None:
    row = {"q": "Hi", "a": "Ho", "s": "Be brief.", "h": [["old", "older"]], "input": "is not named"}
    columns = {"prompt": "q", "response": "a", "system": "s", "history": "h"}
    expected = [("system", "Be brief."), ("user", "old"), ("assistant", "older"), ("user", "Hi"), ("assistant", "Ho")]
    assert messages(tmp_path, row, columns=columns) == expected


def test_a_conversation_has_the_roles_of_dataset_info(tmp_path: Path) -> None:
    assert messages(tmp_path, SHAREGPT, formatting="sharegpt") == [("user", "Hi"), ("assistant", "Ho")]
    row: dict[str, Any] = {
        "talk": [
            {"role": "sys", "content": "Be brief."},
            {"role": "u", "content": "Hi"},
            {"role": "a", "content": None},
        ],
        "more": "is not used",
    }
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "u", "assistant_tag": "a", "system_tag": "sys"}
    says = {"formatting": "openai", "tags": tags, "columns": {"messages": "talk", "system": "more"}}
    assert messages(tmp_path, row, **says) == [("system", "Be brief."), ("user", "Hi"), ("assistant", "")]
    row["talk"][0]["content"] = ""  # a system message counts even if it is empty
    assert messages(tmp_path, row, **says)[0] == ("user", "Hi")
    row["talk"] = row["talk"][1:]
    assert messages(tmp_path, row, **says)[0] == ("system", "is not used")


@pytest.mark.parametrize("roles", [["gpt", "human"], ["human"], ["human", "human"], ["human", "somebody"]])
def test_a_conversation_that_does_not_alternate_is_left_out(tmp_path: Path, roles: list[str]) -> None:
    row = {"conversations": [{"from": role, "value": "x"} for role in roles]}
    assert messages(tmp_path, row, formatting="sharegpt") == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"instruction": "x"}, {}),
        ({**ALPACA, "output": 3}, {}),
        ({**ALPACA, "h": [["a"]]}, {"columns": {"prompt": "instruction", "history": "h"}}),
        ({**ALPACA, "t": "[...]"}, {"columns": {"prompt": "instruction", "tools": "t"}}),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{}"}]},
            {"formatting": "sharegpt"},
        ),
        ({"conversations": [{"role": "x"}]}, {"formatting": "sharegpt"}),
        ({"conversations": "x"}, {"formatting": "sharegpt"}),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, row: Any, says: Any) -> None:
    with refuses((ValueError, TypeError)):
        messages(tmp_path, row, **says)


@pytest.mark.parametrize(
    "says",
    [
        {"hf_hub_url": "a/b"},
        {"ms_hub_url": "a/b"},
        {"om_hub_url": "a/b"},
        {"script_url": "a.py"},
        {"cloud_file_name": "s3://a"},
        {"ranking": True},
        {"ranking": 1},
        {"ranking": True, "columns": {"chosen": "c", "rejected": "r", "kto_tag": "k"}},
        {"formatting": "parrot"},
        {"split": "test"},
        {"subset": "x"},
        {"num_samples": 0},
        {"columns": {"images": "i"}},
        {"columns": {"chosen": "c"}},
        {"columns": {"promt": "c"}},
        {"tags": {"rol_tag": "c"}},
        {"formating": "alpaca"},
    ],
)
def test_a_dataset_that_is_not_read_is_refused(tmp_path: Path, says: Any) -> None:
    with refuses(ValueError):
        entry(tmp_path, [ALPACA], **says)


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    entry(tmp_path, [ALPACA])
    with refuses(ValueError, "json 'e'; choose from d"):
        read_datasets("d, e", str(tmp_path))
    with refuses(FileNotFoundError, "has no dataset_info.json; give the folder"):
        read_datasets("d", str(tmp_path / "no"))
    for place in ("ONLINE", "REMOTE:a/b"):
        with refuses(ValueError, "asks for datasets from a hub, and nothing"):
            read_datasets("d", place)
    (tmp_path / "a.jsonl").unlink()
    with refuses(FileNotFoundError, "file_name of the dataset 'd' of"):
        read_datasets("d", str(tmp_path))
    (tmp_path / "dataset_info.json").write_text('{"d": {}', encoding="utf-8")
    with refuses(ValueError, "dataset_info.json is not JSON"):
        read_datasets("d", str(tmp_path))


# The data module


def opened(folder: Path, readings: list[FactoryReading], **options: Any) -> FactoryData:
    """Return the data of datasets, ready to be asked for rows."""
    values: dict[str, Any] = {"seq_length": 64, "cache_dir": str(folder / "cache"), **options}
    module = FactoryData(readings, characters(), **values)
    module.prepare_data()
    module.setup("fit")
    return module


def texts(module: FactoryData, split: str = "train") -> list[str]:
    """Return the tokens of each sample as text."""
    samples = module._opened(split)
    return [module.tokenizer.decode(samples[number].tokens.tolist()) for number in range(len(samples))]  # type: ignore[arg-type,union-attr]


def reading(where: DatasetEntry, **options: Any) -> FactoryReading:
    return FactoryReading(entry=where, **options)


def numbered(count: int) -> list[dict[str, str]]:
    return [{"instruction": f"q{number}", "input": "", "output": "a"} for number in range(count)]


def test_datasets_stand_one_after_another(tmp_path: Path) -> None:
    first = entry(tmp_path / "1", numbered(3))
    second = entry(tmp_path / "2", [SHAREGPT], formatting="sharegpt")
    module = opened(tmp_path, [reading(first, max_samples=2), reading(second)], packing=False)
    assert [text.replace("\n", "") for text in texts(module)] == [
        "<|user|>q0<|end|><|assistant|>a<|end|>",
        "<|user|>q1<|end|><|assistant|>a<|end|>",
        "<|user|>Hi<|end|><|assistant|>Ho<|end|>",
    ]


@pytest.mark.parametrize(
    "content",
    [
        b'{"d": "\xf3"}',
        b'{"d": {"file_name": 5}}',
        b'{"d": {"file_name": "a.jsonl", "columns": 5}}',
        b'{"d": {"file_name": "a.jsonl", "tags": {"role_tag": [1]}}}',
    ],
)
def test_a_damaged_dataset_info_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "dataset_info.json").write_bytes(content)
    with refuses(ValueError):
        read_datasets("d", str(tmp_path))


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": {"file_name": "a" * 5000}}))
    with pytest.raises(FileNotFoundError, match="does not exist; give a file"):
        read_datasets("d", str(tmp_path))


def test_rows_are_drawn_as_often_as_dataset_info_says(tmp_path: Path) -> None:
    drawn = texts(opened(tmp_path, [reading(entry(tmp_path, numbered(4), num_samples=6))]))
    assert (len(drawn), len(set(drawn))) == (6, 4)
    few = reading(entry(tmp_path, numbered(40), num_samples=5), max_samples=3)
    assert len(set(texts(opened(tmp_path, [few])))) == 3
    assert few.chosen(40) == few.chosen(40) != reading(few.entry, seed=1, max_samples=3).chosen(40)


def test_some_samples_are_held_back_to_evaluate_on(tmp_path: Path) -> None:
    where = entry(tmp_path, numbered(10))
    module = opened(tmp_path, [reading(where)], validation_share=3)
    train, validation = texts(module), texts(module, "validation")
    assert (len(train), len(validation), len({*train, *validation})) == (7, 3, 10)


def test_other_datasets_are_evaluated_on(tmp_path: Path) -> None:
    where, other = entry(tmp_path / "1", numbered(3)), entry(tmp_path / "2", [ALPACA])
    module = opened(tmp_path, [reading(where)], evaluation=[reading(other)])
    assert len(texts(module)) == 3
    assert "Add." in texts(module, "validation")[0]


def test_texts_stand_one_after_another_in_blocks(tmp_path: Path) -> None:
    columns = {"prompt": "text"}
    where = entry(tmp_path, [{"text": "abcde"}, {"text": ""}, {"text": "fg"}, {"text": "hijk"}], columns=columns)
    module = opened(tmp_path, [reading(where, documents=True, joined=True)], seq_length=4, packing=True)
    assert texts(module) == ["abcde", "<|end|>fg<|end|>h"]  # "ijk<|end|>" fills no block
    batch = module._collate([module._opened("train")[1]])  # type: ignore[list-item]
    assert batch["loss_mask"].tolist() == [[1.0] * 4]
    assert batch["labels"][0, :-1].tolist() == batch["tokens"][0, 1:].tolist()
    assert str(module.statistics["train"]).startswith("packed 3 of 4 samples, 8 tokens, into 2 rows")


def test_blocks_may_begin_with_a_token_of_the_tokenizer(tmp_path: Path) -> None:
    where = entry(tmp_path, [{"text": "abcdefghij"}], columns={"prompt": "text"})
    tokenizer = characters(bos_token="<|system|>", eos_token="<|end|>")
    tokenizer.add_bos_token = True
    blocks = FactoryData(
        [reading(where, documents=True, joined=True)], tokenizer, 4, packing=True, cache_dir=str(tmp_path / "cache")
    )
    blocks.prepare_data()
    blocks.setup("fit")
    assert texts(blocks) == ["<|system|>bcde", "<|system|>ghij"]


def test_texts_may_have_a_row_each(tmp_path: Path) -> None:
    where = entry(tmp_path, [{"text": "abcdefg"}, {"text": "hi"}], columns={"prompt": "text"})
    module = opened(tmp_path, [reading(where, documents=True, longest=5)], seq_length=4)
    samples = module._opened("train")
    # The first is cut, and keeps its place.
    assert np.asarray(samples.lengths).tolist() == [4, 2]  # type: ignore[union-attr]


def test_too_little_text_for_a_block_is_told(tmp_path: Path) -> None:
    where = entry(tmp_path, [{"text": "ab"}], columns={"prompt": "text"})
    with refuses(ValueError, "has only 3 tokens, fewer than the 65 of"):
        opened(tmp_path, [reading(where, documents=True, joined=True)], packing=True)
