# SPDX-License-Identifier: Apache-2.0
"""Names of sources, and which source a sample of joined files is of."""

import time

import numpy as np
import pytest
import torch

from lightning_mcore.data.sources import names_of_sources, with_sources
from lightning_mcore.layers.inputs import check_sources


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/web.jsonl", "data/code.parquet"], ["web", "code"]),
        (["/data/en/train.jsonl", "/data/de/train.jsonl", "/data/de/extra.jsonl"], ["en/train", "de/train", "extra"]),
        (["/data/web_text_document", "/data/web.v2_text_document"], ["web", "web.v2"]),
        (["train.jsonl", "more/train.jsonl"], ["train", "more/train"]),
        ([], []),
    ],
)
def test_names_are_as_short_as_they_can_be(paths: list[str], names: list[str]) -> None:
    assert names_of_sources(paths) == names


def test_a_sample_is_of_the_file_that_has_its_row() -> None:
    batch = {"sample_ids": torch.tensor([[0, 99, 100], [149, -1, -1]])}
    found = with_sources(batch, np.array([0, 100]), [4, 2])
    assert found["source_ids"].tolist() == [[4, 4, 2], [2, -1, -1]]


def test_wrong_sources_are_refused() -> None:
    batch = {"tokens": torch.zeros(2, 8, dtype=torch.int64), "source_ids": torch.tensor([0, 3])}
    with pytest.raises(ValueError, match="source_ids has the number 3, but source_names has 2 names; choose 0 to 1"):
        check_sources(batch, ["web", "code"])
    with pytest.raises(ValueError, match=r"source_ids has the shape \[1\], but the batch has \[2\] samples"):
        check_sources({**batch, "source_ids": torch.tensor([0])}, ["web", "code"])


def test_names_of_many_files_are_found_at_once() -> None:
    paths = [f"data/{number}/train.jsonl" for number in range(3000)]
    start = time.process_time()
    assert names_of_sources(paths) == [f"{number}/train" for number in range(3000)]
    assert time.process_time() - start < 1  # comparing each path with the others took 4 seconds
