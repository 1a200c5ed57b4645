# SPDX-License-Identifier: Apache-2.0
"""Files of documents to rank: rows, templates, tokens, cuts, batches, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_mcore import MCoreGPT, MCoreRerankingData, Reranker
from tests.support.chats import END, characters, stub_trainer, write
from tests.support.sentences import refuses

TRIPLET = {"query": "why", "positive": "so", "negative": "no"}
LISTED = {"query": "why", "documents": ["so", "no"], "labels": [1, 0]}
PAIR = {"query": "why", "document": "so", "label": 0.5}
SETTING = Reranker(documents=2, template="{query}? {document}!")
POINTWISE = Reranker("binary_cross_entropy", 1, template="{query}? {document}!")


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sentences name files without their place."""
    monkeypatch.chdir(tmp_path)


def opened(rows: list[dict[str, Any]], setting: Reranker, **options: Any) -> MCoreRerankingData:
    """Return the data of a file, for a module with a setting."""
    values: dict[str, Any] = {"seq_length": 64, "batch_size": 2, "cache_dir": "cache", **options}
    tokenizer = characters(eos_token=END, pad_token=END)
    data = MCoreRerankingData(write(Path("rows.jsonl"), rows), tokenizer, **values)
    data.trainer = stub_trainer(reranker=setting)
    data.prepare_data()
    data.setup("fit")
    return data


def pairs(data: MCoreRerankingData) -> list[tuple[list[str], list[float]]]:
    """Return the pairs of all rows of the training data, and their relevances."""
    source: Any = data._data["train"]
    source = getattr(source, "samples", source)
    return [
        ([data.tokenizer.decode(tokens) for tokens in row.tokens], [float(value) for value in row.relevance])
        for row in source.take(range(len(source)))
    ]


def test_rows_of_all_forms_have_the_same_pairs() -> None:
    wanted = (["why? so!", "why? no!"], [1.0, 0.0])
    for row in (
        TRIPLET,
        {"anchor": "why", "positive": "so", "negatives": ["no"]},
        LISTED,
    ):
        assert pairs(opened([row, row], SETTING)) == [wanted] * 2
    assert pairs(opened([PAIR, {**PAIR, "label": True}], POINTWISE)) == [(["why? so!"], [0.5]), (["why? so!"], [1.0])]


def test_a_row_may_have_an_instruction_of_its_own() -> None:
    setting = Reranker(documents=2, template="{instruction}: {query}{document}", instruction="Find")
    rows = [{**TRIPLET, "instruction": "{query}"}, {**TRIPLET, "instruction": None}]
    assert [texts[0] for texts, _ in pairs(opened(rows, setting))] == ["{query}: whyso", "Find: whyso"]


def test_batches_have_the_documents_of_a_query_next_to_each_other() -> None:
    rows = [{**LISTED, "query": "w" * n, "labels": [n, 0]} for n in (3, 4)]
    [padded] = opened(rows, SETTING, shuffle=False).train_dataloader()
    assert padded["lengths"].tolist() == [8, 8, 9, 9]
    assert padded["relevance"].tolist() == [3, 0, 4, 0]
    assert padded["sample_ids"].tolist() == [0, 0, 1, 1]
    assert padded.keys() == {"tokens", "position_ids", "lengths", "sample_ids", "relevance"}
    rows.append(rows[0])
    [packed] = opened(rows, SETTING, packing=True, seq_length=40, shuffle=False).train_dataloader()
    assert packed["relevance"].shape == packed["sample_ids"].shape == (2, 4)
    assert packed["relevance"].sort().values.tolist() == [[0, 0, 3, 4], [0, 0, 0, 3]]


def test_long_pairs_keep_the_end_of_the_template_or_are_refused() -> None:
    rows = [{**TRIPLET, "positive": "s" * 20}] * 2
    assert pairs(opened(rows, SETTING, seq_length=8, overlong="cut"))[0][0] == ["why? ss!", "why? no!"]
    with refuses(ValueError, "a text of more than 8 tokens"):
        opened(rows, SETTING, seq_length=8)
    long = Reranker(documents=2, template="{query}{document} yes or no?")
    with refuses(ValueError, "has 11 tokens, and a pair may have 8"):
        opened(rows, long, seq_length=8, overlong="cut")


@pytest.mark.parametrize(
    ("rows", "setting", "said"),
    [
        ([{"prompt": "why", "response": "so"}], SETTING, "are not those of queries with documents"),
        ([{**TRIPLET, **LISTED}], SETTING, "are not those of queries with documents"),
        ([{**TRIPLET, "instruction": "Find"}], SETTING, "the files have a column 'instruction'"),
        ([{**LISTED, "documents": ["so"]}], SETTING, "row 0 of rows.jsonl has 1 document(s) with 2 label(s)"),
        ([TRIPLET], POINTWISE, "row 0 of rows.jsonl has 2 document(s)"),
        ([{**LISTED, "labels": [0, 0]}], SETTING, "row 0 of rows.jsonl has the labels [0, 0]"),
        ([{**LISTED, "labels": [2, 2]}], Reranker("ranknet"), "row 0 of rows.jsonl has the labels [2, 2]"),
        ([{**PAIR, "label": 1.5}], POINTWISE, "'label' of row 0 of rows.jsonl has 1.5"),
        ([{**LISTED, "labels": [-1, 1]}], SETTING, "'labels' of row 0 of rows.jsonl has -1"),
        ([{**PAIR, "label": None}], POINTWISE, "'label' of row 0 of rows.jsonl has None"),
        ([{**PAIR, "document": " "}], POINTWISE, "'document' of row 0 of rows.jsonl is empty"),
        ([{**TRIPLET, "negative": " "}], SETTING, "'negative' of row 0 of rows.jsonl is empty"),
        ([{**PAIR, "query": None}], POINTWISE, "'query' of row 0 of rows.jsonl is of type NoneType"),
    ],
    ids=[
        *("columns", "two-forms", "instruction", "fewer", "more", "no-positive", "equal", "above", "below", "none"),
        *("empty", "empty-negative", "kind"),
    ],
)
def test_rows_that_do_not_fit_are_one_sentence(rows: list[dict[str, Any]], setting: Reranker, said: str) -> None:
    with refuses((ValueError, TypeError), said):
        opened(rows, setting)


def test_an_instruction_is_text() -> None:
    setting = Reranker(documents=2, template="{instruction}{query}{document}")
    with refuses(TypeError, "'instruction' of row 0 of rows.jsonl is of type int"):
        opened([{**TRIPLET, "instruction": 3}], setting)


def test_a_template_that_ends_with_padding_is_refused_for_a_score_layer() -> None:
    ending = {"documents": 2, "template": "{query}{document}" + END}
    with refuses(ValueError, "ends with the padding token"):
        opened([TRIPLET], Reranker(**ending))
    opened([TRIPLET], Reranker(**ending, tokens=[1]))


def test_another_module_is_refused() -> None:
    data = MCoreRerankingData("rows.jsonl", characters(), 32)
    module = MCoreGPT(64, 32, {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4})
    data.trainer = SimpleNamespace(lightning_module=module)  # type: ignore[assignment]
    with refuses(ValueError, "MCoreGPT does not learn from these"):
        data._check_module()
