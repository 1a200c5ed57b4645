# SPDX-License-Identifier: Apache-2.0
"""Steps on a reranker equal a plain loop over transformers with the whole batch, on every layout, padded and packed.

The plain loop runs in fp64, pair by pair, writes the losses out, and knows nothing of padding, packing or ranks.
"""

import dataclasses
import functools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCoreReranker, MCoreRerankingData, MCoreStrategy, Recipe, Reranker, SaveHFModel
from lightning_mcore.data.embedding.texts import Texts, collate_padded_texts
from lightning_mcore.interop.export import export_checkpoint
from tests.parity.hf_training import on_disk
from tests.parity.test_embedding import (
    ADAM,
    LOSS,
    MULTIPLE,
    QUERIES,
    STEPS,
    Form,
    Seen,
    Wanted,
    Watching,
    differences,
    train_steps,
    words,
)
from tests.support.chats import END, characters, write
from tests.support.hf_models import VOCAB_SIZE, save_tiny, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import make_trainer, run_fit, weights

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("rerankers")]

PACKED_LENGTH = 72
GRADIENT = 4e-5  # of the greatest value of a tensor; transformers in fp32 is up to 1.5e-5 away from the loop
YES, NO = 90, 7  # on two tensor-parallel ranks, each has one of them
CASES = {
    "softmax": Reranker(documents=3),
    "ranknet": Reranker("ranknet", documents=3),
    "yes or no": Reranker("binary_cross_entropy", documents=2, tokens=[YES, NO]),
    "yes": Reranker(documents=3, tokens=[YES]),
}

Run = tuple[str, str, Form]  # a case, a family, and the form of the rows
BOTH: tuple[Run, ...] = (("softmax", "qwen2", False), ("yes or no", "qwen2", True))  # tied
OTHER: tuple[Run, ...] = (("ranknet", "llama", True), ("yes", "llama", False))
HYBRID: tuple[Run, ...] = (("yes or no", "qwen2", "hybrid"), ("ranknet", "llama", "hybrid"))
LAYOUTS: dict[str, dict[Layout, tuple[Run, ...]]] = {  # each name begins with the number of ranks
    "1": {Layout(): (*BOTH, *OTHER, ("yes or no", "gemma2", True), ("yes", "granite", True))},
    "2": {
        Layout(tp=2, sp=True): (BOTH[0], *OTHER, ("yes or no", "gemma2", True)),
        Layout(pp=2): BOTH,
        Layout(cp=2): (BOTH[0], OTHER[1], *HYBRID),
        Layout(dp=2, distributed_optimizer=True): (BOTH[1], OTHER[0]),
    },
    "2 more": {
        Layout(tp=2, sp=True): BOTH[1:],
        Layout(cp=2): (BOTH[1], OTHER[0]),
        Layout(dp=2, distributed_optimizer=True): (BOTH[0], OTHER[1]),
        Layout(tp=2): (*BOTH, OTHER[1]),
        Layout(pp=2, vp=2): (*BOTH, OTHER[1]),
        Layout(dp=2): (*BOTH, *OTHER),
        Layout(moe=True, dp=2, ep=2): (("softmax", "qwen2_moe", False), ("yes or no", "qwen2_moe", True)),
    },
    "4": {
        Layout(tp=2, cp=2, sp=True): (*BOTH, *OTHER, *HYBRID),
        Layout(pp=2, cp=2): HYBRID,
        Layout(tp=2, pp=2, sp=True): BOTH,
        Layout(dp=2, cp=2): (*BOTH, *OTHER, *HYBRID),
        Layout(dp=2, pp=2, distributed_optimizer=True): (BOTH[0], OTHER[1]),
    },
}


@functools.cache
def rows_of(case: str) -> list[Texts]:
    """Return the pairs of four queries, of uneven lengths, with their relevances."""
    setting, random = CASES[case], np.random.default_rng(3)
    most = {"ranknet": [2.0, 0.5, 0.0], "yes or no": [0.8, 0.0]}.get(case, [1.0, 0.0, 0.0])
    found = []
    for number in range(QUERIES):
        pairs = [random.integers(1, VOCAB_SIZE, random.integers(1, 8)) for _ in range(setting.documents)]
        found.append(Texts(pairs, number, random.permutation(most).tolist()))
    return found


# ---- the plain loop


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rerankers_")


@functools.cache
def folder_of(case: str, family: str) -> str:
    """Return the folder of a tiny language model, or of one with a score layer that transformers has added."""
    from transformers import AutoModelForSequenceClassification

    if CASES[case].tokens is not None:
        return str(tiny_folder(family))
    folder = str(Path(_folders().name) / family)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_folder(family), num_labels=1, dtype=torch.float32, ignore_mismatched_sizes=True
    )
    model.save_pretrained(folder)
    return folder


def plain_model(case: str, folder: str, dtype: torch.dtype = torch.float64) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if CASES[case].tokens is None else AutoModelForCausalLM
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped products have no fp64
    return kind.from_pretrained(folder, dtype=dtype, **plain)


def plain_scores(model: Any, tokens: list[int] | None, rows: Sequence[Texts]) -> Tensor:
    """Return the score of each pair, [rows, documents]."""
    found = []
    for pair in (pair for row in rows for pair in row.tokens):
        logits = model(torch.from_numpy(pair)[None]).logits[0]
        if tokens is None:
            found.append(logits[0])
        else:
            found.append(logits[-1, tokens[0]] - (logits[-1, tokens[1]] if len(tokens) > 1 else 0))
    return torch.stack(found).view(len(rows), -1)


def plain_loss(loss: str, scores: Tensor, wanted: Sequence[float]) -> Tensor:
    """Return the loss of a query, written out."""
    terms = []
    if loss == "softmax":
        weights = torch.exp(scores)
        terms = [-torch.log(weights[place] / weights.sum()) for place, value in enumerate(wanted) if value]
    elif loss == "ranknet":
        for first, better in enumerate(wanted):
            terms += [
                torch.log(1 + torch.exp(scores[second] - scores[first]))
                for second, worse in enumerate(wanted)
                if better > worse
            ]
    else:
        odds = torch.sigmoid(scores)
        terms = [
            -(value * torch.log(odds[place]) + (1 - value) * torch.log(1 - odds[place]))
            for place, value in enumerate(wanted)
        ]
    return torch.stack(terms).mean()


@functools.cache
def plain_steps(case: str, family: str) -> Wanted:
    """Run the steps of the plain loop over all queries."""
    setting, rows = CASES[case], rows_of(case)
    model = plain_model(case, folder_of(case, family)).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        scores = plain_scores(model, setting.tokens, rows)
        losses = [plain_loss(setting.loss, each, row.relevance) for each, row in zip(scores, rows, strict=True)]
        loss = torch.stack(losses).mean()
        loss.backward()
        if step < STEPS - 1:
            optimizer.step()
    hits = [each.argmax() == np.argmax(row.relevance) for each, row in zip(scores, rows, strict=True)]
    values = {"train_loss": loss.item(), "train_accuracy": float(torch.stack(hits).double().mean())}
    return Wanted(values, on_disk(family, dict(model.named_parameters())))


# ---- a run


class Watched(Watching, MCoreReranker):
    """A reranker that keeps its gradients."""


def train(layouts: dict[Layout, tuple[Run, ...]], folders: dict[tuple[str, str], str]) -> list[list[Seen]]:
    """Train the steps of each run on each layout, one after the other, on this rank."""
    return [[_train(layout, run, folders[run[:2]]) for run in runs] for layout, runs in layouts.items()]


def _train(layout: Layout, run: Run, folder: str) -> Seen:
    case, _, form = run
    module = Watched.from_pretrained(folder, seq_length=PACKED_LENGTH, reranker=CASES[case])
    return train_steps(module, layout, form, rows_of(case), PACKED_LENGTH)


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, "1", "2"))
def test_steps_on_every_layout_are_those_of_a_plain_loop_over_the_whole_batch(name: str) -> None:
    layouts = LAYOUTS[name]
    folders = {run[:2]: folder_of(*run[:2]) for runs in layouts.values() for run in runs}
    ranks = run_ranks(int(name[0]), train, layouts, folders, timeout=240)
    wrong: dict[str, Any] = {}
    for index, (layout, runs) in enumerate(layouts.items()):
        for number, run in enumerate(runs):
            found = dict(differences(plain_steps(*run[:2]), [rank[index][number] for rank in ranks], GRADIENT))
            if found:
                wrong[f"{layout.id} {run}"] = found
    assert wrong == {}


# ---- runs on files


def write_lists(path: Path, count: int, negatives: int = 1, seed: int = 0) -> str:
    draw = random.Random(seed)
    rows = (
        {"query": words(draw), "positive": words(draw), "negatives": [words(draw) for _ in range(negatives)]}
        for _ in range(count)
    )
    return write(path, rows)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    save_tiny("qwen3", folder, vocab_size=300)
    characters(eos_token=END, pad_token=END).save_pretrained(folder)
    return str(folder)


SETTING = Reranker(documents=2, template="q {query}\n{document} y", tokens=["b", "a"])


def data_of(base: str, cache: str, **arguments: Any) -> MCoreRerankingData:
    given: dict[str, Any] = {"tokenizer": base, "seq_length": 32, "cache_dir": cache, **arguments}
    return MCoreRerankingData(**given)


def interrupted(base: str, file: str, cache: str, layout: Layout, packing: bool, strategy: Any) -> list[Any]:
    """Train an epoch; resume it in its middle; and train it by another strategy, if there is one."""
    found: list[Any] = []
    arguments: dict[str, Any] = {"limit_val_batches": 0, "use_distributed_sampler": False}
    setting = dataclasses.replace(SETTING, tokens=None) if packing else SETTING
    for way, start in ((layout.strategy_arguments, None), (layout.strategy_arguments, 1), (strategy, None)):
        if way is None:
            continue
        keep = pl.callbacks.ModelCheckpoint(f"{cache}/kept", "{step}", save_top_k=-1, every_n_train_steps=1)
        pl.seed_everything(2, verbose=False)
        recipe = Recipe(learning_rate=0.01, min_learning_rate=0.01)
        module = MCoreReranker.from_pretrained(base, seq_length=64, reranker=setting, recipe=recipe)
        data = data_of(base, cache, train_files=file, batch_size=2, packing=packing, seq_length=64)
        seen = run_fit(
            module,
            way,
            data,
            ckpt_path=None if start is None else f"{cache}/kept/step={start}.ckpt",
            callbacks=[] if found else [keep],
            enable_checkpointing=not found,  # otherwise Lightning would add one of its own
            **arguments,
        )
        found.append((seen.logged, weights(module)))
    return found


@pytest.mark.parametrize(
    ("layout", "packing", "other"),
    [(Layout(dp=2), False, "ddp"), pytest.param(Layout(tp=2, pp=2, sp=True), True, None, marks=pytest.mark.thorough)],
    ids=["dp2", "tp2-pp2-packed"],
)
def test_a_resumed_run_has_the_same_bits_and_ddp_the_same_numbers(
    layout: Layout, packing: bool, other: str | None, base: str, tmp_path: Path
) -> None:
    file = write_lists(tmp_path / "a.jsonl", 24)
    ranks = run_ranks(layout.world_size, interrupted, base, file, str(tmp_path), layout, packing, other, timeout=120)
    for [whole, resumed, *rest] in ranks:
        assert len(whole[0]) > 3
        assert resumed[0] == whole[0][1:]
        for name, values in whole[1].items():
            assert torch.equal(resumed[1][name], values), name
        for losses, _ in rest:
            assert losses == pytest.approx(whole[0], abs=LOSS)


GRADED = Reranker("ranknet", documents=4, template="{query}:{document}.", top_k=2)


def evaluated(base: str, file: str, cache: str, size: int, setting: Reranker = GRADED) -> dict[str, float]:
    """Validate; the last batch is repeated on the second of two ranks."""
    module = MCoreReranker.from_pretrained(base, seq_length=32, reranker=setting)
    data = data_of(base, cache, train_files=file, validation_files=file, batch_size=4, eval_batch_size=size)
    [values] = make_trainer({}).validate(module, data, verbose=False)
    return values


def test_an_evaluation_counts_each_query_once_and_ranks_as_torchmetrics_does(base: str, tmp_path: Path) -> None:
    from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_reciprocal_rank
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    draw = random.Random(4)
    rows = [
        {"query": words(draw), "documents": [words(draw) for _ in range(4)], "labels": draw.sample([0, 0, 1, 3], 4)}
        for _ in range(7)
    ]
    scorer = tmp_path / "scorer"
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32).save_pretrained(scorer)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(scorer)
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float64)
    wanted: dict[str, list[Tensor]] = {"val_loss": [], "val_mrr": [], "val_ndcg": [], "val_accuracy": []}
    for row in rows:
        texts = [f"{row['query']}:{document}." for document in row["documents"]]
        pairs = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        scores = plain_scores(model, None, [Texts(pairs)])[0].detach()
        labels = torch.tensor(row["labels"])
        moved = scores - scores.min() + 1  # torchmetrics finds no document with a score below 0
        wanted["val_loss"].append(plain_loss("ranknet", scores, row["labels"]))
        wanted["val_mrr"].append(retrieval_reciprocal_rank(moved, labels > 0, top_k=2))
        wanted["val_ndcg"].append(retrieval_normalized_dcg(moved, labels, top_k=2))
        wanted["val_accuracy"].append((labels[scores.argmax()] == 3).double())
    file = write(tmp_path / "a.jsonl", rows)
    for rank in run_ranks(2, evaluated, str(scorer), file, str(tmp_path), 3, timeout=120):
        for name, values in wanted.items():
            assert rank[name] == pytest.approx(torch.stack(values).mean().item(), abs=LOSS), name


def of_irrelevant(base: str, file: str, cache: str) -> dict[str, float]:
    return evaluated(base, file, cache, 2, dataclasses.replace(GRADED, loss="binary_cross_entropy"))


def test_queries_without_a_relevant_document_are_left_out_as_torchmetrics_skips_them(base: str, tmp_path: Path) -> None:
    from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG

    for kind in (RetrievalMRR, RetrievalNormalizedDCG):
        metric = kind(empty_target_action="skip", top_k=2)
        metric.update(torch.rand(8), torch.zeros(8, dtype=torch.long), torch.arange(8) // 4)
        assert metric.compute() == 0
    draw = random.Random(4)
    rows = [{"query": "a", "documents": [words(draw) for _ in range(4)], "labels": [0, 0, 0, 0]} for _ in range(4)]
    for rank in run_ranks(2, of_irrelevant, base, write(tmp_path / "a.jsonl", rows), str(tmp_path), timeout=120):
        assert (rank["val_mrr"], rank["val_ndcg"]) == (0, 0)


# ---- folders


def exported(base: str, out: str, file: str, layer: bool) -> list[Tensor]:
    """Train, whole and with adapters, and write folders; return the scores after it, and of a folder read again."""
    found = []
    setting = dataclasses.replace(SETTING, tokens=None) if layer else SETTING
    batch: Any = collate_padded_texts(rows_of("yes or no"), MULTIPLE)
    loader: Any = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    for name, lora in (("whole", None), ("adapters", LoRA(r=2))):
        recipe = Recipe(learning_rate=0.02, warmup_steps=0)
        module = MCoreReranker.from_pretrained(base, 32, reranker=setting, lora=lora, recipe=recipe)
        trainer = make_trainer(
            MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True),
            max_steps=2,
            limit_val_batches=0,
            callbacks=[SaveHFModel(f"{out}/{name}")],
        )
        trainer.fit(module, data_of(base, f"{out}/cache", train_files=file, batch_size=2))
        trainer.save_checkpoint(f"{out}/{name}.ckpt")
        found.append(trainer.predict(module, loader)[0])  # type: ignore[index]
    with pytest.raises(ValueError, match="gives scores and no next tokens"):
        module.generate([1], 1)
    for folder in (f"{out}/whole", f"{out}/adapters.ckpt"):
        module = MCoreReranker.from_pretrained(folder, 32, reranker=setting)
        found.append(trainer.predict(module, loader)[0])  # type: ignore[index]
    return found


@pytest.mark.parametrize("layer", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["layer", "tokens"])
def test_folders_are_read_by_transformers_and_say_how_a_pair_is_written(layer: bool, base: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = write_lists(tmp_path / "a.jsonl", 8)
    [whole, adapted, again, continued], _ = run_ranks(2, exported, base, str(tmp_path), file, layer, timeout=120)
    assert torch.equal(again, whole)
    assert torch.equal(continued, adapted)
    run_ranks(1, export_checkpoint, str(tmp_path / "adapters.ckpt"), str(tmp_path / "merged"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens = None if layer else tokenizer.convert_tokens_to_ids(["b", "a"])
    for name, scores in {"whole": whole, "adapters": adapted, "merged": adapted}.items():
        model = plain_model("softmax" if layer else "yes", str(tmp_path / name))
        plain = plain_scores(model, tokens, rows_of("yes or no")).detach().flatten()
        torch.testing.assert_close(scores, plain, rtol=0, atol=1e-5)
        assert model.config.pad_token_id == (tokenizer.pad_token_id if layer else 0)
        messages = [{"role": "query", "content": "ab\n"}, {"role": "document", "content": [{"text": "{query}"}]}]
        written = AutoTokenizer.from_pretrained(tmp_path / name).apply_chat_template(messages, tokenize=False)
        assert written == SETTING.text_of("ab\n", "{query}")
        modules = json.loads((tmp_path / name / "modules.json").read_text())
        assert [module["path"] for module in modules] == ["", *([] if layer else ["1_LogitScore"])]
        if tokens is not None:
            ids = json.loads((tmp_path / name / "1_LogitScore" / "config.json").read_text())
            assert [ids["true_token_id"], ids["false_token_id"]] == tokens


def adapted(base: str, out: str, file: str, layer: bool) -> Tensor:
    """Train adapters, write them alone, and return the scores after it."""
    setting = dataclasses.replace(SETTING, tokens=None) if layer else SETTING
    recipe = Recipe(learning_rate=0.02, warmup_steps=0)
    module = MCoreReranker.from_pretrained(base, 32, reranker=setting, lora=LoRA(r=2), recipe=recipe)
    trainer = make_trainer(
        MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True),
        max_steps=2,
        limit_val_batches=0,
        callbacks=[SaveHFModel(f"{out}/adapter", adapter=True)],
    )
    trainer.fit(module, data_of(base, f"{out}/cache", train_files=file, batch_size=2))
    batch: Any = [collate_padded_texts(rows_of("yes or no"), MULTIPLE)]
    [scores] = trainer.predict(module, DataLoader(batch, batch_size=None))  # type: ignore[misc]
    return scores


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by PEFT
@pytest.mark.parametrize("layer", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["layer", "tokens"])
def test_adapters_give_the_same_scores_in_peft(layer: bool, base: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    file = write_lists(tmp_path / "a.jsonl", 8)
    scores, _ = run_ranks(2, adapted, base, str(tmp_path), file, layer, timeout=120)
    if layer:
        whole = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float64)
    else:
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model = PeftModel.from_pretrained(whole, tmp_path / "adapter").double()
    tokens = None if layer else characters().convert_tokens_to_ids(["b", "a"])
    plain = plain_scores(model, tokens, rows_of("yes or no")).detach().flatten()
    torch.testing.assert_close(scores, plain, rtol=0, atol=1e-5)
