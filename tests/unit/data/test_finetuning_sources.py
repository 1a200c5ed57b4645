# SPDX-License-Identifier: Apache-2.0
"""Tokens in a cache are those that were made of the files."""

import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from tests.support.chats import APPENDING, END, characters, exchanges, write


def data(folder: Path, template: str | None = APPENDING, **options: Any) -> MCoreFinetuningData:
    """Return a data module of a file of 24 exchanges; its tokenizer is read from a folder, as users have it."""
    characters(template, eos_token=END).save_pretrained(folder / "tokenizer")
    if template is None:
        (folder / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    values: dict[str, Any] = {"packing": False, "cache_dir": str(folder / "cache"), "batch_size": 2, **options}
    return MCoreFinetuningData(str(folder / "a.jsonl"), str(folder / "tokenizer"), 64, **values)


def rows(module: MCoreFinetuningData) -> list[Any]:
    module.prepare_data()
    module.setup("fit")
    return [batch["tokens"].tolist() for batch in module.train_dataloader()]


def test_tokens_in_a_cache_that_changed_are_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.jsonl", exchanges(24))
    first = rows(data(tmp_path))
    [file] = tmp_path.rglob("tokens*.arrow")
    whole = file.read_bytes()
    damages = [whole[:100], b"", whole[: len(whole) // 2] + bytes(64) + whole[len(whole) // 2 + 64 :], None]
    with caplog.at_level(logging.WARNING):
        for number, damage in enumerate(damages):
            file.unlink() if damage is None else file.write_bytes(damage)
            assert rows(data(tmp_path)) == first
            assert (
                len([line for line in caplog.messages if "the tokens of train_files are rebuilt" in line]) == number + 1
            )
    assert rows(data(tmp_path)) == first
    assert len([line for line in caplog.messages if "are rebuilt" in line]) == len(damages)


def test_several_processes_leave_the_same_tokens(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", exchanges(24))
    first = rows(data(tmp_path))
    for part in tmp_path.rglob("tokens*.arrow"):
        part.unlink()
    assert rows(data(tmp_path, num_proc=2)) == first
    assert len(list(tmp_path.rglob("tokens*.arrow"))) == 2
    assert rows(data(tmp_path)) == first
