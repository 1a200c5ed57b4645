# SPDX-License-Identifier: Apache-2.0
"""Options of ``MCoreFinetuningData`` that say how batches are made: templates, padding, order, evaluation."""

from pathlib import Path
from typing import Any

import pytest

from lightning_mcore import MCoreFinetuningData
from lightning_mcore.data.finetuning.chat import ChatTemplate
from lightning_mcore.data.finetuning.stream_reader import ReaderPlace, ReaderStreams
from tests.support.chats import characters, exchanges, write
from tests.support.sentences import refuses

PLAIN = ChatTemplate("plain", user=("Q{text}A",), answer=("{text}",))


def opened(folder: Path, rows: int = 6, **options: Any) -> MCoreFinetuningData:
    values: dict[str, Any] = {"packing": False, "cache_dir": str(folder / "cache"), **options}
    module = MCoreFinetuningData(write(folder / "a.jsonl", exchanges(rows)), characters(), 64, **values)
    module.prepare_data()
    module.setup()
    return module


def read(module: MCoreFinetuningData) -> list[str]:
    """Return the tokens of each row of an epoch as text."""
    rows = [row for batch in module.train_dataloader() for row in zip(batch["tokens"], batch["lengths"], strict=True)]
    return [module.tokenizer.decode(tokens[:length].tolist()) for tokens, length in rows]


def test_turns_are_written_as_a_template_says(tmp_path: Path) -> None:
    assert sorted(text[:4] for text in read(opened(tmp_path, template=PLAIN))) == [f"Qq{n}A" for n in range(6)]
    assert read(opened(tmp_path))[0].startswith("<|user|>")  # not from the cache of the other
    assert opened(tmp_path, template="deepseek").reading.template is not None
    with refuses(ValueError, "unknown chat template"):
        opened(tmp_path, template="vicunia")


def test_rows_may_keep_the_order_of_the_files(tmp_path: Path) -> None:
    in_order = [f"Qq{n}A" for n in range(20)]
    found = [text.partition("A")[0] + "A" for text in read(opened(tmp_path, 20, template=PLAIN, shuffle=False))]
    assert found == in_order
    assert read(opened(tmp_path, 20, template=PLAIN)) != read(opened(tmp_path, 20, template=PLAIN, shuffle=False))


def test_rows_may_all_have_one_length(tmp_path: Path) -> None:
    lengths = {batch["tokens"].size(1) for batch in opened(tmp_path).train_dataloader()}
    assert len(lengths) > 1
    padded = opened(tmp_path, pad_to_seq_length=True)
    assert {batch["tokens"].size(1) for batch in padded.train_dataloader()} == {64}


def test_rows_of_a_stream_may_all_have_one_length(tmp_path: Path) -> None:
    module = opened(tmp_path, streaming=True, pad_to_seq_length=True, template=PLAIN)
    item = next(iter(ReaderStreams(module._stream_settings(), 0, 0, 1, [ReaderPlace()], 0)))
    assert item.batch is not None
    assert item.batch["tokens"].shape == (1, 64)
    assert module.tokenizer.decode(item.batch["tokens"][0][:2].tolist()) == "Qq"


def test_evaluation_may_have_a_batch_size_of_its_own(tmp_path: Path) -> None:
    module = opened(tmp_path, batch_size=2, eval_batch_size=3, validation_share=3)
    assert [len(batch["tokens"]) for batch in module.val_dataloader()] == [3]
    assert {len(batch["tokens"]) for batch in module.train_dataloader()} == {2}
    same = opened(tmp_path, batch_size=2, validation_share=3)
    assert [len(batch["tokens"]) for batch in same.val_dataloader()] == [2, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"validation_share": 2.5},
        {"validation_share": 6},
        {"eval_batch_size": 0},
        {"pad_to_seq_length": 1},
        {"shuffle": "no"},
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with refuses((ValueError, TypeError), *options):
        opened(tmp_path, **options)
