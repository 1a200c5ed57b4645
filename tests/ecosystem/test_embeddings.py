# SPDX-License-Identifier: Apache-2.0
"""Sentence Transformers: the folder of a trained model gives the vectors of the run, and its own folders are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mcore import Embedding, MCoreEmbedding, MCoreEmbeddingData, MCoreStrategy, Recipe, SaveHFModel
from lightning_mcore.data.embedding.texts import Texts, collate_padded_texts
from lightning_mcore.hf.sentence_folder import check_pooling
from tests.parity.test_embedding import embedding_base, write_queries
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

LENGTH = 32
TEXTS = ["abc", "hgfedcba", "aabb", "h"]


def trained(base: str, file: str, out: str, pooling: Any) -> np.ndarray[Any, Any]:
    """Train on two tensor-parallel ranks, write the folder, and return the vectors of texts with the query's prompt."""
    setting = Embedding(pooling, temperature=0.1, negatives=1, query_prompt="q: ")
    module = MCoreEmbedding.from_pretrained(base, LENGTH, embedding=setting, recipe=Recipe(learning_rate=0.01))
    data = MCoreEmbeddingData(file, base, LENGTH, batch_size=4, cache_dir=f"{out}-cache")
    strategy = MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True)
    trainer = make_trainer(strategy, callbacks=[SaveHFModel(out)])
    trainer.fit(module, data)
    tokens = [np.array(data.tokenizer(setting.query_prompt + text)["input_ids"]) for text in TEXTS]
    batch: Any = [collate_padded_texts([Texts(tokens)], multiple=2)]
    [vectors] = trainer.predict(module, torch.utils.data.DataLoader(batch, batch_size=None))  # type: ignore[misc]
    return vectors.numpy()


@pytest.mark.works_with("sentence-transformers", "folders of trained embeddings on TP: same vectors as in the run")
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_sentence_transformers_gives_the_vectors_of_the_run(pooling: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    base, file = embedding_base(tmp_path / "base"), write_queries(tmp_path / "a.jsonl", 12)
    vectors, again = run_ranks(2, trained, base, file, str(tmp_path / "out"), pooling, timeout=120)
    assert np.array_equal(vectors, again)
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model.max_seq_length == LENGTH
    np.testing.assert_allclose(model.encode(TEXTS, prompt_name="query"), vectors, rtol=0, atol=1e-6)
    assert np.abs(model.encode(TEXTS) - vectors).max() > 1e-3  # without the prompt
    model.save(str(tmp_path / "theirs"))  # in the form of the installed release
    other: Any = {"last": "mean", "mean": "last"}[pooling]
    check_pooling(str(tmp_path / "theirs"), pooling)
    with pytest.raises(ValueError, match=f"set Embedding\\(pooling='{pooling}'\\)"):
        check_pooling(str(tmp_path / "theirs"), other)
