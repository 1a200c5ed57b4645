# SPDX-License-Identifier: Apache-2.0
"""Which settings, models and batches of rerankers are refused, how they rank, and what ``plan`` counts of them."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jinja2 import Template
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_reciprocal_rank

from lightning_mcore import LoRA, MCoreFinetuningData, MCoreReranker, MCoreStrategy, Reranker
from lightning_mcore.config.run import RunSettings
from lightning_mcore.data.embedding.texts import Texts, check_texts, collate_padded_texts
from lightning_mcore.hf.cross_encoder_folder import chat_template
from lightning_mcore.layers.reranking import LOSSES, ndcg, ranks, reciprocal_rank
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.rehearsal.settings import MadeUpRows
from tests.support.chats import characters
from tests.support.hf_models import save_tiny, tiny_folder
from tests.support.sentences import refuses

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
SETTINGS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"loss": "mse"}, ValueError, "loss='mse'"),
    ({"documents": 0}, ValueError, "documents=0"),
    ({"documents": 1}, ValueError, "documents=1 leaves the loss 'softmax' nothing to compare"),
    ({"top_k": 0}, ValueError, "top_k=0"),
    ({"template": 3}, TypeError, "template=3"),
    ({"template": "{query}"}, ValueError, "template='{query}'"),
    ({"template": "{document} {query}"}, ValueError, "template='{document} {query}'"),
    ({"template": "{query} {document} {query}"}, ValueError, "each once"),
    ({"instruction": "Find"}, ValueError, "instruction='Find' has no place"),
    ({"tokens": [True, False]}, TypeError, "put quotes around yes and no"),
    ({"tokens": "yes"}, TypeError, "tokens='yes'"),
    ({"tokens": []}, TypeError, "tokens=[]"),
    ({"tokens": ["yes", 3]}, TypeError, "tokens=['yes', 3]"),
    ({"tokens": [3, 3]}, ValueError, "tokens=[3, 3]"),
    ({"tokens": [1, 2, 3]}, ValueError, "tokens=[1, 2, 3]"),
)


@pytest.mark.parametrize(("given", "kind", "said"), SETTINGS, ids=[said for *_, said in SETTINGS])
def test_settings_out_of_range_are_refused(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with refuses(kind, said):
        Reranker.of(given)


EXPERTS = {
    "num_moe_experts": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
    "calculate_per_token_loss": True,
}


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=MCoreStrategy(), logger=False)
    module = MCoreReranker(64, 16, {**SIZES, **EXPERTS})
    module._trainer = trainer
    with refuses(ValueError, "the loss is a mean over queries"):
        module.check_settings()
    path = str(tiny_folder("llama"))
    adapted = MCoreReranker.from_pretrained(path, 16, reranker={"tokens": [3]}, lora=LoRA(target_modules=["lm_head"]))
    adapted._trainer = trainer
    with refuses(ValueError, "target_modules=['lm_head'] gives the output layer an adapter"):
        adapted.check_settings()


def test_tokens_that_are_not_one_token_are_refused(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "model", vocab_size=300)
    with pytest.raises(ValueError, match="need the tokenizer of"):  # and says what transformers says
        MCoreReranker(64, 16, SIZES, {"tokens": ["y", "n"]}, hf={"path": str(tmp_path / "missing")})
    characters().save_pretrained(tmp_path / "model")
    module = MCoreReranker.from_pretrained(str(tmp_path / "model"), 16, reranker={"tokens": ["y", "n"]})
    assert module.reranker.tokens == characters().convert_tokens_to_ids(["y", "n"])
    with refuses(ValueError, "writes 'yes' as 3 tokens"):
        MCoreReranker.from_pretrained(str(tmp_path / "model"), 16, reranker={"tokens": ["yes", "n"]})
    with refuses(ValueError, "a new model has no tokenizer"):
        MCoreReranker(64, 16, SIZES, {"tokens": ["yes"]})
    with refuses(ValueError, "tokens=[64]"):
        MCoreReranker(64, 16, SIZES, {"tokens": [64]})


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"]}
    for labels in ({"id2label": {"0": "bad", "1": "good"}}, {}):  # transformers leaves out the names of two labels
        (folder / "config.json").write_text(json.dumps(config | labels))
        with refuses(ValueError, "is a classifier with num_labels=2"):
            MCoreReranker.from_pretrained(str(folder))
    [error] = make_plan(RunSettings(model={"path": str(folder), "reranker": {}}), 1).errors
    assert "is a classifier with num_labels=2" in error


def test_tokens_are_refused_for_a_classifier_which_has_no_logits(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with refuses(ValueError, "is a classifier, which has no logits of tokens=[1, 2]"):
        MCoreReranker.from_pretrained(str(folder), reranker={"tokens": [1, 2]})
    [error] = make_plan(RunSettings(model={"path": str(folder), "reranker": {"tokens": [1, 2]}}), 1).errors
    assert "leave tokens out of Reranker" in error


def test_a_plan_refuses_two_kinds_of_model(tmp_path: Path) -> None:
    folder = str(save_tiny("qwen3", tmp_path / "model"))
    for model in ({"path": folder}, {"vocab_size": 64, "seq_length": 16, "transformer": SIZES}):
        errors = make_plan(RunSettings(model={**model, "embedding": {}, "reranker": {}}), 1).errors
        assert any("embedding and reranker are given, which are two kinds of model" in error for error in errors)


def test_another_template_than_that_of_the_folder_is_said(tmp_path: Path) -> None:
    folder, earlier = save_tiny("qwen3", tmp_path / "model"), Reranker(template="Q: {query} D: {document}")
    (folder / "chat_template.jinja").write_text(chat_template(earlier), encoding="utf-8")
    MCoreReranker.from_pretrained(str(folder), 16, reranker=earlier)
    with pytest.warns(UserWarning, match="was trained with another template or instruction than template='plain'"):
        MCoreReranker.from_pretrained(str(folder), 16)
    (folder / "chat_template.jinja").write_text("{{ messages }}")  # of a language model
    MCoreReranker.from_pretrained(str(folder), 16)


def test_the_chat_template_of_a_folder_writes_the_default_instruction() -> None:
    setting = Reranker(template='\U0001f4d6 "{instruction}"\n{query}\\{document}', instruction="Find \U0001f50d 'it'")
    messages = [{"role": "query", "content": "why"}, {"role": "document", "content": "so"}]
    assert Template(chat_template(setting)).render(messages=messages) == setting.text_of("why", "so")


# ---- losses and ranks


def test_ranks_are_those_of_torchmetrics_and_ties_count_against_the_relevant() -> None:
    assert ranks(torch.tensor([[2.0, 5.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]])).tolist() == [[3, 1, 2]]
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(20, 6, generator=generator)
    relevance = torch.randint(0, 3, (20, 6), generator=generator)
    for top_k in (1, 3, 6):
        found = ndcg(scores, relevance.float(), top_k), reciprocal_rank(scores, relevance.float(), top_k)
        for row in range(20):
            best = retrieval_normalized_dcg(scores[row], relevance[row], top_k)
            first = retrieval_reciprocal_rank(scores[row], relevance[row] > 0, top_k)
            torch.testing.assert_close([values[row] for values in found], [best, first])


def test_lists_without_relevance_have_finite_gradients() -> None:
    for loss in LOSSES.values():
        scores = torch.zeros(1, 3, requires_grad=True)
        loss(scores, torch.zeros(1, 3)).sum().backward()
        assert scores.grad is not None
        assert scores.grad.isfinite().all()


# ---- batches


def batch_of(*ids: int) -> dict[str, torch.Tensor]:
    texts = Texts([np.array([1, 2])] * len(ids), relevance=[1.0] * len(ids))
    return collate_padded_texts([texts]) | {"sample_ids": torch.tensor(ids)}


def test_a_batch_without_the_documents_of_queries_is_refused() -> None:
    tokens = torch.zeros(2, 4)
    with refuses(ValueError, "a batch with tokens, lengths has no sample_ids"):
        check_texts({"tokens": tokens, "lengths": tokens}, Reranker())
    with refuses(ValueError, "a batch has 3 sequences, but each query has 2 documents"):
        check_texts(batch_of(0, 0, 1), Reranker())
    batch = batch_of(0, 0)
    del batch["relevance"]
    with refuses(ValueError, "has no relevance"):
        check_texts(batch, Reranker())


def test_made_up_rows_pass_the_checks_of_batches() -> None:
    for packed in (False, True):
        row = MadeUpRows(1, 64, packed, embedding=Reranker(documents=3))[0]
        check_texts({name: torch.stack([values] * 3) for name, values in row.items()}, Reranker(documents=3))


def test_microbatches_that_cut_a_query_apart_are_refused() -> None:
    module = MCoreReranker(64, 16, SIZES)
    strategy = MCoreStrategy(micro_batch_size=3)
    module._trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)
    with refuses(ValueError, "micro_batch_size=3 cuts the 2 documents"):
        module.on_before_batch_transfer(batch_of(0, 0, 1, 1), 0)


def test_other_data_does_not_fit(tmp_path: Path) -> None:
    module = MCoreReranker(64, 16, SIZES)
    data = MCoreFinetuningData(str(tmp_path / "a.jsonl"), None, 16)
    data.trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=MCoreStrategy(), logger=False)
    data.trainer.strategy.connect(module)  # type: ignore[attr-defined]
    with refuses(ValueError, "MCoreRerankingData"):
        data.setup("fit")


def test_only_what_changes_the_pairs_makes_other_data() -> None:
    assert Reranker(tokens=[3], top_k=5, documents=4).of_rows == Reranker(documents=4)


# ---- planned


def settings(reranker: dict[str, Any] | None, **arguments: Any) -> RunSettings:
    model: dict[str, Any] = {"path": str(tiny_folder("qwen2")), "seq_length": 64}
    model |= {} if reranker is None else {"reranker": reranker}
    return RunSettings(model=model, trainer={"accelerator": "gpu"}, data={"batch_size": 4}, **arguments)


def test_a_plan_counts_the_documents_of_queries_and_the_logits_that_are_computed() -> None:
    alone, layer, tokens = (make_plan(settings(given), 2) for given in (None, {}, {"tokens": [3, 5]}))
    totals = [plan.parameters.total for plan in (alone, layer, tokens) if plan.parameters is not None]
    # The output layer of this model is the embedding's, and the score layer has one row of 32
    assert totals == [totals[0], totals[0] + 32, totals[0]]
    assert alone.work is not None
    for plan in (layer, tokens):
        assert plan.errors == ()
        assert plan.work is not None
        assert plan.work.model_flops < 2 * alone.work.model_flops


def test_a_plan_refuses_what_a_run_refuses() -> None:
    [error] = make_plan(settings({"documents": 3}, strategy={"micro_batch_size": 4}), 1).errors
    assert "micro_batch_size=4 cuts the 3 documents" in error
