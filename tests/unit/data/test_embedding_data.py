# SPDX-License-Identifier: Apache-2.0
"""Files of queries: rows, prompts, tokens, cuts, batches, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_mcore import Embedding, MCoreEmbeddingData, MCoreGPT
from tests.support.chats import characters, stub_trainer, write
from tests.support.sentences import refuses

ROW = {"query": "why", "positive": "so"}
HARD = {**ROW, "negatives": ["no", "never"]}


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sentences name files without their place."""
    monkeypatch.chdir(tmp_path)


def opened(rows: list[dict[str, Any]], setting: Embedding, **options: Any) -> MCoreEmbeddingData:
    """Return the data of a file, for a module with a setting."""
    values: dict[str, Any] = {"seq_length": 32, "batch_size": 2, "cache_dir": "cache", **options}
    data = MCoreEmbeddingData(write(Path("rows.jsonl"), rows), characters(), **values)
    data.trainer = stub_trainer(embedding=setting)
    data.prepare_data()
    data.setup("fit")
    return data


def texts(data: MCoreEmbeddingData) -> list[list[str]]:
    """Return the texts of all rows of the training data."""
    source: Any = data._data["train"]
    source = getattr(source, "samples", source)
    return [[data.tokenizer.decode(tokens) for tokens in row.tokens] for row in source.take(range(len(source)))]


def test_rows_of_all_forms_have_the_same_texts() -> None:
    setting = Embedding(negatives=1, query_prompt="q: ", document_prompt="d: ")
    for row in (
        {**ROW, "negatives": ["no"]},
        {**ROW, "negative": "no"},
        {"anchor": "why", "positive": "so", "negative": "no"},
    ):
        assert texts(opened([row, row], setting)) == [["q: why", "d: so", "d: no"]] * 2


def test_a_row_may_have_a_prompt_of_its_own() -> None:
    rows = [{**ROW, "query_prompt": "Find: "}, {**ROW, "query_prompt": None}]
    assert texts(opened(rows, Embedding(query_prompt="q: "))) == [["Find: why", "so"], ["q: why", "so"]]


def test_batches_have_the_texts_of_a_query_next_to_each_other() -> None:
    rows = [{**HARD, "query": "w" * n} for n in (3, 4)]
    data = opened(rows, Embedding(negatives=2), shuffle=False)
    [padded] = data.train_dataloader()
    assert padded["lengths"].tolist() == [3, 2, 2, 5, 4, 2, 2, 5]
    assert padded["sample_ids"].tolist() == [0] * 4 + [1] * 4
    assert padded.keys() == {"tokens", "position_ids", "lengths", "sample_ids"}
    data = opened(rows, Embedding(negatives=2), packing=True, seq_length=40, batch_size=1)
    [packed] = data.train_dataloader()
    assert packed["cu_seqlens"].diff().tolist() == [[4, 2, 2, 5, 3, 2, 2, 5]]
    assert packed["sample_ids"].tolist() == [[1] * 4 + [0] * 4]
    assert packed["tokens"].shape == (1, 40)


def test_long_texts_are_cut_by_the_tokenizer_or_refused() -> None:
    rows = [{**ROW, "positive": "s" * 20}] * 2
    assert texts(opened(rows, Embedding(), seq_length=8, overlong="cut"))[0] == ["why", "s" * 8]
    assert texts(opened(rows, Embedding(), seq_length=18, overlong="cut", packing=True))[0] == ["why", "s" * 9]
    with refuses(ValueError, "a text of more than 8 tokens"):
        opened(rows, Embedding(), seq_length=8)
    with refuses(ValueError, "overlong='split'"):
        opened(rows, Embedding(), overlong="split")


@pytest.mark.parametrize(
    ("rows", "negatives", "said"),
    [
        ([{"prompt": "why", "response": "so"}], 0, "contain no queries"),
        ([ROW], 2, "negatives=2 needs a column 'negatives'"),
        ([HARD], 0, "which negatives=0 would not use"),
        ([HARD, {**ROW, "negatives": ["no"]}], 2, "row 1 of rows.jsonl has 1 hard negative"),
        ([{**ROW, "positive": " "}], 0, "'positive' of row 0 of rows.jsonl is empty"),
        ([{**ROW, "query": None}], 0, "'query' of row 0 of rows.jsonl is of type NoneType"),
    ],
    ids=["columns", "missing", "unused", "fewer", "empty", "kind"],
)
def test_rows_that_do_not_fit_are_one_sentence(rows: list[dict[str, Any]], negatives: int, said: str) -> None:
    with refuses((ValueError, TypeError), said):
        opened(rows, Embedding(negatives=negatives))


def test_a_batch_with_nothing_to_compare_is_refused() -> None:
    with refuses(ValueError, "its loss is always 0"):
        opened([ROW, ROW], Embedding(), batch_size=1)
    opened([HARD, HARD], Embedding(negatives=2), batch_size=1)


def test_another_module_is_refused() -> None:
    data = MCoreEmbeddingData("rows.jsonl", characters(), 32)
    module = MCoreGPT(64, 32, {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4})
    data.trainer = SimpleNamespace(lightning_module=module)  # type: ignore[assignment]
    with refuses(ValueError, "MCoreGPT does not learn from these"):
        data._check_module()
