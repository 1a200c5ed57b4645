# SPDX-License-Identifier: Apache-2.0
"""What a model warns about when the exported folder would not tell how its training data was written."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_mcore import MCoreGPT
from lightning_mcore.data.finetuning.chat import ChatTemplate
from tests.support.chats import APPENDING, END, characters

OURS = ChatTemplate("ours", answer=("{text}<|end|>",), end_of_turn=END)


def warnings(folder: Path, tokenizer: Any, template: ChatTemplate | None = OURS, **reading: Any) -> list[str]:
    """Return what a model from this folder says about its data when training starts."""
    tokenizer.save_pretrained(folder)
    settings = SimpleNamespace(template=template, **reading)
    data = SimpleNamespace(tokenizer=tokenizer, reading=settings, seq_length=8)
    model: Any = SimpleNamespace(
        trainer=SimpleNamespace(datamodule=data), hparams={"hf": {"path": str(folder)}}, seq_length=8
    )
    return list(MCoreGPT._differences_from_data(model))


def test_a_folder_that_knows_the_template_needs_no_warning(tmp_path: Path) -> None:
    assert warnings(tmp_path, characters()) == []
    assert warnings(tmp_path, characters(None), template=None) == []
    assert warnings(tmp_path, characters(None, eos_token="<|user|>"), documents=True) == []


def test_a_tokenizer_without_a_chat_template_is_named(tmp_path: Path) -> None:
    (told,) = warnings(tmp_path, characters(None))
    assert "template 'ours'" in told
    assert "no chat template" in told


@pytest.mark.parametrize("config", [None, {"eos_token_id": 1}, {"eos_token_id": [1, 2]}, []])
def test_a_tokenizer_that_does_not_stop_at_the_end_of_a_turn_is_named(tmp_path: Path, config: Any) -> None:
    tokenizer = characters(APPENDING, eos_token="<|user|>")
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    (told,) = warnings(tmp_path, tokenizer)
    assert "ends turns with '<|end|>'" in told
    assert "eos_token='<|user|>'" in told
    end = tokenizer.convert_tokens_to_ids(END)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}), encoding="utf-8")
    assert warnings(tmp_path, tokenizer) == []
