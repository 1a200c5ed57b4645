# SPDX-License-Identifier: Apache-2.0
"""Which settings, models and batches of embeddings are refused, and what ``plan`` counts of them."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context

from lightning_mcore import Embedding, MCoreEmbedding, MCoreFinetuningData, MCoreGPT, MCoreStrategy
from lightning_mcore.config.run import RunSettings
from lightning_mcore.data.embedding.texts import Texts, check_texts, collate_padded_texts
from lightning_mcore.hf import source
from lightning_mcore.hf.sentence_folder import check_vectors
from lightning_mcore.layers.embedding import info_nce, of_all_ranks
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.rehearsal.settings import MadeUpRows
from tests.support.hf_models import tiny_folder
from tests.support.sentences import refuses

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
SETTINGS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"pooling": "cls"}, ValueError, "pooling='cls'"),
    ({"temperature": 0}, ValueError, "temperature=0"),
    ({"negatives": -1}, ValueError, "negatives=-1"),
    ({"query_prompt": 3}, TypeError, "query_prompt=3"),
    ({"matryoshka_sizes": []}, TypeError, "matryoshka_sizes=[]"),
    ({"matryoshka_sizes": [8, 0]}, ValueError, "matryoshka_sizes=0"),
    ({"matryoshka_sizes": [8, 8]}, ValueError, "matryoshka_sizes=[8, 8]"),
)


@pytest.mark.parametrize(("given", "kind", "said"), SETTINGS, ids=[said for *_, said in SETTINGS])
def test_settings_out_of_range_are_refused(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with refuses(kind, said):
        Embedding.of(given)


EXPERTS = {
    "num_moe_experts": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
}


@pytest.mark.parametrize(
    ("transformer", "embedding", "said"),
    [
        ({}, {"matryoshka_sizes": [64, 32]}, "matryoshka_sizes=[64, 32] with hidden_size=32"),
        ({**EXPERTS, "calculate_per_token_loss": True}, {}, "the loss is a mean over queries"),
    ],
    ids=["sizes", "routers"],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    transformer: dict[str, Any], embedding: dict[str, Any], said: str
) -> None:
    module = MCoreEmbedding(64, 16, {**SIZES, **transformer}, embedding)
    module._trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=MCoreStrategy(), logger=False)
    with refuses(ValueError, said):
        module.check_settings()


def test_a_checkpoint_of_a_model_with_another_output_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "is_own_checkpoint", lambda path: True)
    for family, suffix, said in (
        ("qwen3", "+hidden", "a model with an output layer over the vocabulary, and this model has no output layer"),
        ("qwen3", "+score", "give that folder"),
        ("qwen3+score", "", "give it to the class of its run"),
    ):
        with refuses(ValueError, said):
            source.require_head("last.ckpt", family, suffix)
    source.require_head("last.ckpt", "qwen3+hidden", "+hidden")


# ---- batches


def batch_of(*ids: int) -> dict[str, torch.Tensor]:
    batch = collate_padded_texts([Texts([np.array([1, 2])] * len(ids))])
    return batch | {"sample_ids": torch.tensor(ids)}


@pytest.mark.parametrize(
    ("batch", "texts", "said"),
    [
        (
            {"tokens": torch.zeros(2, 4), "labels": torch.zeros(2, 4)},
            2,
            "a batch with tokens, labels has no sample_ids",
        ),
        ({"tokens": torch.zeros(2, 4), "sample_ids": torch.zeros(2)}, 2, "has no lengths"),
        (batch_of(0, 0, 1), 2, "a batch has 3 sequences"),
        (batch_of(0, 0, 1, 1, 1, 2), 3, "sequences 0 to 2 of a batch come from samples [0, 0, 1]"),
    ],
    ids=["ids", "lengths", "number", "neighbours"],
)
def test_a_batch_without_the_texts_of_queries_is_refused(batch: dict[str, Any], texts: int, said: str) -> None:
    with refuses(ValueError, said):
        check_texts(batch, Embedding(negatives=texts - 2))


def test_lightnings_command_line_builds_it_from_its_arguments() -> None:
    given: dict[str, Any] = {"vocab_size": 64, "seq_length": 16, "transformer": SIZES}
    named = dict(MCoreEmbedding(**given).hparams)
    with _given_hyperparameters_context(named, "lightning.pytorch.cli.instantiate_module"):
        assert MCoreEmbedding(**given).hparams["seq_length"] == 16


def test_made_up_rows_pass_the_checks_of_batches() -> None:
    embedding = Embedding(negatives=2)
    for packed in (False, True):
        row = MadeUpRows(1, 64, packed, embedding=embedding)[0]
        check_texts({name: torch.stack([values] * 4) for name, values in row.items()}, embedding)


@pytest.mark.parametrize(
    ("strategy", "ids", "said"),
    [
        ({}, (0, 0), "its loss is always 0"),
        ({"micro_batch_size": 4}, (0, 0, 1, 1, 2, 2), "its loss is always 0"),
        ({"micro_batch_size": 3}, (0, 0, 1, 1), "micro_batch_size=3 cuts the 2 texts"),
    ],
    ids=["batch", "rest", "cut"],
)
def test_microbatches_that_teach_nothing_are_refused(strategy: dict[str, Any], ids: tuple[int, ...], said: str) -> None:
    module = MCoreEmbedding(64, 16, SIZES)
    module._trainer = trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=MCoreStrategy(**strategy), logger=False
    )
    trainer.training = True
    with refuses(ValueError, said):
        module.on_before_batch_transfer(batch_of(*ids), 0)


def test_other_modules_and_other_data_do_not_fit(tmp_path: Path) -> None:
    module = MCoreEmbedding(64, 16, SIZES)
    data = MCoreFinetuningData(str(tmp_path / "a.jsonl"), None, 16)
    data.trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=MCoreStrategy(), logger=False)
    data.trainer.strategy.connect(module)  # type: ignore[attr-defined]
    with refuses(ValueError, "MCoreEmbeddingData"):
        data.setup("fit")


def test_only_what_changes_the_texts_makes_other_data() -> None:
    setting = Embedding("mean", temperature=0.5, negatives=2, matryoshka_sizes=[8], query_prompt="Q: ")
    assert setting.of_rows == Embedding(negatives=2, query_prompt="Q: ")


def test_a_batch_to_predict_tells_where_its_texts_end() -> None:
    module = MCoreEmbedding(64, 16, SIZES)
    module._trainer = trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=MCoreStrategy(), logger=False)
    trainer.predicting = True
    batch = {"tokens": torch.zeros(2, 8, dtype=torch.long)}
    with refuses(ValueError, "has no lengths"):
        module.on_before_batch_transfer(batch, 0)
    with refuses(ValueError, "row 1 of a batch has lengths=0"):
        module.on_before_batch_transfer({**batch, "lengths": torch.tensor([3, 0])}, 0)


def test_the_pooling_of_a_model_on_the_hub_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"pooling_mode": "mean"}))
    asked = set()

    def download(name: str, path: str) -> str:
        asked.add((name, path))
        return str(tmp_path / path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    check_vectors("org/model", Embedding("mean"))
    assert ("org/model", "1_Pooling/config.json") in asked
    with refuses(ValueError, "the vectors of org/model are pooled by 'mean'"):
        check_vectors("org/model", Embedding())

    def lacking(name: str, path: str) -> str:
        raise LocalEntryNotFoundError(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", lacking)
    check_vectors("org/model", Embedding())


def sentence_folder(folder: Path, kinds: list[str], pooling: dict[str, Any], prompts: dict[str, str]) -> str:
    """Write what says how a Sentence Transformers folder makes vectors, as release 6 writes it."""
    modules = [{"type": f"sentence_transformers.base.modules.{kind.lower()}.{kind}"} for kind in kinds]
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": {"prompts": prompts},
    }
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return str(folder)


def test_a_folder_that_makes_vectors_with_another_module_is_refused(tmp_path: Path) -> None:
    path = sentence_folder(tmp_path, ["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}, {})
    with refuses(ValueError, "a Dense module"):
        check_vectors(path, Embedding("mean"))


def test_a_folder_whose_mean_leaves_prompts_out_is_refused_with_a_prompt(tmp_path: Path) -> None:
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    path = sentence_folder(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling, {})
    check_vectors(path, Embedding("mean"))
    with refuses(ValueError, "query_prompt='Q: '"):
        check_vectors(path, Embedding("mean", query_prompt="Q: "))


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        ({"modality_config": {"text": {"method": "forward"}, "message": {"method": "forward"}}}, "'message'"),
        ({"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_a_folder_that_changes_texts_before_it_makes_vectors_is_refused(
    reading: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = sentence_folder(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "lasttoken"}, {})
    file = tmp_path / "sentence_bert_config.json"
    file.write_text(json.dumps({"do_lower_case": False, "modality_config": {"text": {"method": "forward"}}}))
    check_vectors(path, Embedding())
    file.write_text(json.dumps(reading))
    with refuses(ValueError, said):
        check_vectors(path, Embedding())


def test_a_warning_names_the_prompts_that_a_folder_would_lose(tmp_path: Path) -> None:
    prompts = {"query": "Q: ", "document": ""}
    path = sentence_folder(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "lasttoken"}, prompts)
    check_vectors(path, Embedding(query_prompt="Find: "))
    with pytest.warns(UserWarning, match="to keep them, set query_prompt='Q: '"):
        check_vectors(path, Embedding())


def test_empty_places_neither_have_a_loss_nor_are_compared_with() -> None:
    vectors = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    there = torch.tensor([True, True, False])
    losses = info_nce(of_all_ranks(vectors, there, 2, None), 0.1, 8)
    alone = info_nce(of_all_ranks(vectors[:4], there[:2], 2, None), 0.1, 8)
    assert torch.equal(losses[:2], alone)
    assert losses[2] == 0
    losses.sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()
    assert not vectors.grad[4:].any()


# ---- planned


def settings(embedding: dict[str, Any] | None, **arguments: Any) -> RunSettings:
    model: dict[str, Any] = {"path": str(tiny_folder("qwen2")), "seq_length": 64}
    data = {"batch_size": 4, **arguments.pop("data", {})}
    model |= {} if embedding is None else {"embedding": embedding}
    return RunSettings(model=model, trainer={"accelerator": "gpu"}, data=data, **arguments)


def test_a_plan_counts_the_texts_of_queries_and_no_output_layer() -> None:
    alone, embedding = make_plan(settings(None), 2), make_plan(settings({}), 2)
    assert embedding.errors == ()
    assert embedding.parameters is not None
    assert alone.parameters is not None
    # The output layer of this model is the embedding's
    assert embedding.parameters.total == alone.parameters.total
    assert embedding.work is not None
    assert alone.work is not None
    assert embedding.work.model_flops < 2 * alone.work.model_flops
    assert MCoreGPT.from_pretrained(str(tiny_folder("qwen2"))).hparams["share_embeddings_and_output_weights"]


@pytest.mark.parametrize(
    ("embedding", "arguments", "said"),
    [
        ({"negatives": 1}, {"strategy": {"micro_batch_size": 4}}, "micro_batch_size=4 cuts the 3 texts"),
        ({}, {"data": {"batch_size": 2}}, "its loss is always 0"),
        ({"matryoshka_sizes": [4096]}, {}, "matryoshka_sizes=[4096]"),
    ],
    ids=["cut", "alone", "sizes"],
)
def test_a_plan_refuses_what_a_run_refuses(embedding: dict[str, Any], arguments: dict[str, Any], said: str) -> None:
    [error] = make_plan(settings(embedding, **arguments), 1).errors
    assert said in error
