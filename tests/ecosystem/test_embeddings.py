# SPDX-License-Identifier: Apache-2.0
"""Sentence Transformers: the folder of a trained model gives the vectors of the run, and its own folders are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mcore import (
    Embedding,
    MCoreEmbedding,
    MCoreEmbeddingData,
    MCoreReranker,
    MCoreRerankingData,
    MCoreStrategy,
    Recipe,
    Reranker,
    SaveHFModel,
)
from lightning_mcore.data.embedding.reranking_rows import RerankingEncoder
from lightning_mcore.data.embedding.texts import Texts, collate_padded_texts
from lightning_mcore.hf.sentence_folder import check_vectors
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
    check_vectors(str(tmp_path / "theirs"), Embedding(pooling, query_prompt="q: "))
    with pytest.raises(ValueError, match=f"set Embedding\\(pooling='{pooling}'\\)"):
        check_vectors(str(tmp_path / "theirs"), Embedding(other))


PAIRS = [("abc", "hgfedcba"), ("aabb", "h\ng"), ("h", "a" * 40)]  # the last is cut


def scored(base: str, file: str, out: str, tokens: Any) -> np.ndarray[Any, Any]:
    """Train a reranker on two tensor-parallel ranks, write the folder, and return the scores of pairs."""
    template = "<q>{instruction} {query}</q> {document}: "
    setting = Reranker(documents=2, tokens=tokens, template=template, instruction="find")
    module = MCoreReranker.from_pretrained(base, LENGTH, reranker=setting, recipe=Recipe(learning_rate=0.01))
    data = MCoreRerankingData(file, base, 48, batch_size=4, cache_dir=f"{out}-cache", overlong="cut")
    strategy = MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True)
    trainer = make_trainer(strategy, callbacks=[SaveHFModel(out)])
    trainer.fit(module, data)
    encoder = RerankingEncoder(data.tokenizer, 48, setting)
    row = encoder.encode([(setting.text_of(query, document), 0.0) for query, document in PAIRS], 0, "a row")
    batch: Any = [collate_padded_texts([row], multiple=2)]
    [scores] = trainer.predict(module, torch.utils.data.DataLoader(batch, batch_size=None))  # type: ignore[misc]
    return scores.numpy()


@pytest.mark.works_with("sentence-transformers", "folders of trained rerankers on TP: same scores as in the run")
@pytest.mark.parametrize("tokens", [None, ["b", "a"], ["b"]], ids=["layer", "tokens", "token"])
def test_sentence_transformers_gives_the_scores_of_the_run(tokens: Any, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    base, file = embedding_base(tmp_path / "base"), write_queries(tmp_path / "a.jsonl", 12)
    scores, again = run_ranks(2, scored, base, file, str(tmp_path / "out"), tokens, timeout=120)
    assert np.array_equal(scores, again)
    model = CrossEncoder(str(tmp_path / "out"), device="cpu", max_length=48)
    np.testing.assert_allclose(model.predict(PAIRS, activation_fn=torch.nn.Identity()), scores, rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.predict(PAIRS), 1 / (1 + np.exp(-scores)), rtol=0, atol=1e-5)
    other = model.predict(PAIRS, prompt="other", activation_fn=torch.nn.Identity())
    assert np.abs(other - scores).max() > 1e-3  # another instruction
