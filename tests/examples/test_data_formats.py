# SPDX-License-Identifier: Apache-2.0
"""Each example line of ``docs/guides/data.md`` is read by the data module under whose name it stands."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from PIL import Image

from lightning_mcore import Embedding, Reranker
from lightning_mcore.cli import main
from tests.support.chats import characters, write
from tests.support.clips import write_clip
from tests.support.pages import ROOT
from tests.unit.data.test_embedding_data import opened as opened_queries
from tests.unit.data.test_embedding_data import texts as texts_of_queries
from tests.unit.data.test_finetuning_data import opened, samples_of
from tests.unit.data.test_preference_data import halves
from tests.unit.data.test_preference_data import opened as opened_pairs
from tests.unit.data.test_reranking_data import opened as opened_documents
from tests.unit.data.test_reranking_data import pairs as pairs_of_queries
from tests.unit.data.test_video_data import video_processor
from tests.unit.data.test_vision_data import batches, data


def lines(name: str) -> list[str]:
    """Return the lines under a heading of the page."""
    page = (ROOT / "docs/guides/data.md").read_text()
    section = re.search(rf"^### {name}\n(.*?)^##", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    return re.findall(r"^\{.*\}$", section[1], re.MULTILINE)


def texts(value: Any, key: str = "") -> Iterator[str]:
    """Yield what the model reads of a line, in its order: all texts but roles, kinds and files."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("role", "from", "type", "image", "images", "videos"):
                yield from texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner, key)
    elif isinstance(value, str) and value:
        yield value


def in_order(parts: list[str], text: str) -> bool:
    return re.search(".*".join(map(re.escape, parts)), text, re.DOTALL) is not None


def test_every_format_of_the_readers_has_a_line() -> None:
    assert {name: len(lines(name)) for name in ("MCoreFinetuningData", "MCoreVisionData")} == {
        "MCoreFinetuningData": 5,
        "MCoreVisionData": 3,
    }
    assert len(lines("MCorePreferenceData")) == 9
    assert len(lines("MCoreEmbeddingData")) == 3
    assert len(lines("MCoreRerankingData")) == 4
    assert len(lines("lightning-mcore preprocess")) == 1


def lines_without_tools(name: str) -> list[str]:
    """Return the lines under a heading but those with tools, which tests/unit/data/test_tool_calls.py reads."""
    return [line for line in lines(name) if '"tools"' not in line]


@pytest.mark.parametrize("line", lines_without_tools("MCoreFinetuningData"))
def test_a_line_for_fine_tuning_is_read(line: str, tmp_path: Path) -> None:
    parts = list(texts(json.loads(line)))
    [(tokens, labels)] = samples_of(
        opened(tmp_path, write(tmp_path / "a.jsonl", [json.loads(line)]), 256).train_dataloader()
    ).values()
    assert in_order(parts, characters().decode(tokens))
    assert characters().decode([label for label in labels if label >= 0]) == f"{parts[-1]}<|end|>"


@pytest.mark.parametrize("line", lines("MCoreVisionData"))
def test_a_line_with_an_image_or_a_video_is_read(line: str, tmp_path: Path) -> None:
    row = json.loads(line)
    Image.fromarray(np.full((16, 24, 3), 80, np.uint8)).save(tmp_path / "cat.png")
    write_clip(tmp_path / "cat.mp4", 9, 24, 16)
    module = data(tmp_path, [], packing=False, seq_length=300, video_processor=video_processor())
    [batch] = batches(module, write(tmp_path / "lines.jsonl", [row]))
    parts = [part.strip() for text in texts(row) for part in re.split("<image>|<video>", text)]
    assert in_order(parts, module.tokenizer.decode(batch["tokens"][0]))
    assert ("video_grid_thw" in batch) == ("videos" in row)
    assert ("image_grid_thw" in batch) != ("videos" in row)


@pytest.mark.parametrize("line", lines_without_tools("MCorePreferenceData"))
def test_a_line_of_preferences_is_read(line: str, tmp_path: Path) -> None:
    row = json.loads(line)
    [(asked, answer, asked_too, other)] = halves(opened_pairs(tmp_path, [row]))
    assert "What is 2 + 2?" in asked
    assert asked == asked_too
    assert answer.startswith("It is 4.")
    assert other.startswith("It is 5." if "rejected" in row else "It is 4.")  # KTO's only other answer is the same
    assert ("Be brief." in asked) == ("system" in row)
    assert ("1 + 1" in asked) == ("history" in row)


@pytest.mark.parametrize("line", lines("MCoreEmbeddingData"))
def test_a_line_of_texts_to_compare_is_read(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.loads(line)
    negatives = row.get("negatives", [row["negative"]] if "negative" in row else [])
    query = row.get("query_prompt", "") + "What is 2 + 2?"
    found = texts_of_queries(opened_queries([row, row], Embedding(negatives=len(negatives))))
    assert found == [[query, "It is 4.", *negatives]] * 2


@pytest.mark.parametrize("line", lines("MCoreRerankingData"))
def test_a_line_of_documents_to_rank_is_read(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.loads(line)
    documents = ["It is 4."] if "document" in row else ["It is 4.", "It is 5."]
    template = "{instruction}{query} {document}" if "instruction" in row else "{query} {document}"
    loss: Any = "softmax" if len(documents) > 1 else "binary_cross_entropy"
    found = pairs_of_queries(opened_documents([row, row], Reranker(loss, len(documents), template=template)))
    asked = row.get("instruction", "") + "What is 2 + 2?"
    assert found == [([f"{asked} {document}" for document in documents], [1.0, 0.0][: len(documents)])] * 2


def test_a_line_of_text_is_preprocessed(tmp_path: Path) -> None:
    [line] = lines("lightning-mcore preprocess")
    (tmp_path / "a.jsonl").write_text(line + "\n")
    characters().save_pretrained(tmp_path / "words")
    out = str(tmp_path / "corpus")
    assert main(["preprocess", str(tmp_path / "a.jsonl"), "--output", out, "--tokenizer", str(tmp_path / "words")]) == 0
    dataset = IndexedDataset(out)  # its arrays lie in the file
    assert characters().decode(dataset[0].tolist()) == json.loads(line)["text"] + "<|end|>"
