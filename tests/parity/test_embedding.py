# SPDX-License-Identifier: Apache-2.0
"""Steps on embeddings equal a plain loop over transformers with the whole batch, on every layout, padded and packed.

The plain loop runs in fp64, text by text, writes InfoNCE out, and knows nothing of padding, packing or ranks.
"""

import contextlib
import functools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from tokenizers import processors
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import Embedding, LoRA, MCoreEmbedding, MCoreEmbeddingData, MCoreStrategy, Recipe, SaveHFModel
from lightning_mcore.data.embedding.texts import Texts, build_texts_row, collate_padded_texts, collate_texts_rows
from lightning_mcore.data.packing.best_fit import RowPart
from lightning_mcore.data.packing.rows import build_parts
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.interop.export import export_checkpoint
from lightning_mcore.parallel.groups import process_group
from tests.parity.hf_training import Part, finished_gradients, on_disk
from tests.support.chats import END, characters, write
from tests.support.hf_models import VOCAB_SIZE, save_tiny, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.toy import make_trainer, run_fit, weights

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("embeddings")]

LENGTH, PACKED_LENGTH = 16, 88
MULTIPLE = 4  # what cp2 asks of a sequence
STEPS = 2
ADAM = {"lr": 0.1, "eps": 0.1, "weight_decay": 0.0}  # a large eps, so that tiny gradients make tiny steps
LOSS, GRADIENT = 1e-5, 2e-5  # the first absolute, the second of the greatest value of a tensor
CASES = {
    "last": Embedding(temperature=0.1),
    "mean": Embedding("mean", temperature=0.2, negatives=2, matryoshka_sizes=[32, 8]),
    "soft": Embedding(temperature=1.0),  # no query is so certain that fp32 rounds what an expert learns from it
}
QUERIES = 4
ROWS = {1: ((0, 1, 2), (3,)), 2: ((0, 1), (2, 3))}  # the queries in packed rows, for one microbatch or two

IN_PARTS = {  # by context-parallel ranks: rows, the ranks of their parts, and the queries in these
    2: (((1, (0,)), (1, (1,))), ((2, (2, 3)),)),
    4: (((2, (0,)), (2, (1,))), ((4, (2, 3)),)),
}

Form = bool | Literal["hybrid"]  # whether rows are packed, perhaps with hybrid_context_parallel
Run = tuple[str, str, Form]  # a case, a family, and the form of the rows
BOTH: tuple[Run, ...] = (("last", "qwen2", False), ("mean", "qwen2", True))
OTHER: tuple[Run, ...] = (("last", "qwen2", True), ("mean", "qwen2", False))
HYBRID: tuple[Run, ...] = (("last", "qwen2", "hybrid"), ("mean", "qwen2", "hybrid"))
LAYOUTS: dict[str, dict[Layout, tuple[Run, ...]]] = {  # each name begins with the number of ranks
    "1": {Layout(): (*BOTH, *OTHER, ("last", "llama", False))},
    "2": {
        Layout(tp=2, sp=True): BOTH,
        Layout(pp=2): BOTH,
        Layout(cp=2): (*OTHER, *HYBRID),
        Layout(dp=2, distributed_optimizer=True): BOTH,
    },
    "2 more": {
        Layout(cp=2): BOTH,
        Layout(dp=2, distributed_optimizer=True): OTHER,
        Layout(tp=2): BOTH,
        Layout(pp=2, vp=2): BOTH,
        Layout(dp=2): (*BOTH, *OTHER),
        Layout(moe=True, dp=2, ep=2): (("soft", "qwen2_moe", False), ("mean", "qwen2_moe", True)),
    },
    "4": {
        Layout(tp=2, cp=2, sp=True): (*BOTH, *OTHER, *HYBRID),
        Layout(pp=2, cp=2): HYBRID,
        Layout(tp=2, pp=2, sp=True): BOTH,
        Layout(dp=2, cp=2): (*BOTH, *OTHER, *HYBRID),
        Layout(dp=2, pp=2, distributed_optimizer=True): (BOTH[0], OTHER[1]),
    },
    "4 that share rows": {Layout(cp=4): HYBRID},
}


@functools.cache
def rows_of(negatives: int) -> list[Texts]:
    """Return the texts of four queries, of uneven lengths."""
    random = np.random.default_rng(3)
    found = []
    for number in range(QUERIES):
        texts = [random.integers(1, VOCAB_SIZE, random.integers(1, 8)) for _ in range(2 + negatives)]
        found.append(Texts(texts, number))
    return found


# ---- the plain loop


@dataclass(frozen=True)
class Wanted:
    """What the plain loop computes: logged values of the last step, and its gradients by the name in transformers."""

    values: dict[str, float]
    gradients: dict[str, Tensor]


def plain_vectors(model: Any, pooling: str, rows: Sequence[Texts]) -> Tensor:
    """Return the vectors of all texts, [rows, texts, h], before they are normalised."""
    found = []
    for tokens in (tokens for row in rows for tokens in row.tokens):
        states = model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
        found.append(states[-1] if pooling == "last" else states.mean(0))
    return torch.stack(found).view(len(rows), -1, found[0].numel())


def plain_losses(vectors: Tensor, setting: Embedding) -> tuple[Tensor, Tensor]:
    """Return the loss of each query, and the rank of its positive, each [rows]; InfoNCE written out."""
    losses, places = [], []
    for row in range(len(vectors)):
        loss: Any = 0
        for size in setting.matryoshka_sizes or [vectors.size(-1)]:
            cut = vectors[..., :size]
            unit = cut / cut.norm(dim=-1, keepdim=True)
            found = torch.einsum("h,kth->kt", unit[row, 0], unit[:, 1:])
            weights = torch.exp(found / setting.temperature)
            loss = loss - torch.log(weights[row, 0] / weights.sum())
        losses.append(loss)
        unit = vectors / vectors.norm(dim=-1, keepdim=True)
        found = torch.einsum("h,kth->kt", unit[row, 0], unit[:, 1:])
        places.append((found >= found[row, 0]).sum())
    return torch.stack(losses), torch.stack(places)


@functools.cache
def plain_steps(case: str, family: str, parts: int) -> Wanted:
    """Run the steps of the plain loop over all queries, whose texts are compared within each of the parts."""
    from transformers import AutoModel

    setting = CASES[case]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped products have no fp64
    model = AutoModel.from_pretrained(tiny_folder(family), dtype=torch.float64, **plain).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        vectors = plain_vectors(model, setting.pooling, rows_of(setting.negatives)).chunk(parts)
        losses, places = (
            torch.cat(values) for values in zip(*(plain_losses(v, setting) for v in vectors), strict=True)
        )
        loss = losses.mean()
        loss.backward()
        if step < STEPS - 1:
            optimizer.step()
    values = {"train_loss": loss.item(), "train_accuracy": (places == 1).double().mean().item()}
    own = on_disk(family, {f"model.{name}": parameter for name, parameter in model.named_parameters()})
    return Wanted(values, own)


# ---- a run


class Data(pl.LightningDataModule):
    """The rows of the queries in ``parts`` microbatches a step.

    They are packed into ``packed`` tokens, perhaps for ``hybrid`` context parallelism, or if this is None padded to
    ``length``, or to the longest text.
    """

    def __init__(
        self,
        rows: Sequence[Texts],
        packed: int | None,
        length: int | None = None,
        parts: int = 1,
        steps: int = STEPS,
        hybrid: bool = False,
    ) -> None:
        super().__init__()
        self._hybrid = hybrid
        self._rows, self._packed, self._length = rows, packed, length
        self._parts, self._steps = parts, steps

    def train_dataloader(self) -> DataLoader[Any]:
        rank, ranks = data_parallel_place(self.trainer)
        packed: Any = IN_PARTS[process_group("cp").size()] if self._hybrid else ROWS[self._parts]
        chosen: Any = packed if self._packed else range(QUERIES)
        size = len(chosen) // self._parts
        parts = [chosen[part * size :][:size][rank::ranks] for part in range(self._parts)]
        collate = self._pad if self._packed is None else self._pack
        return DataLoader(parts * self._steps, batch_size=None, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def _take(self, numbers: Sequence[int]) -> list[Texts]:
        return [self._rows[number] for number in numbers]

    def _pack(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        assert self._packed is not None
        if self._hybrid:
            wide = [[RowPart(width, self._take(part)) for width, part in row] for row in rows]
            multiple = 2 * process_group("cp").size()
            return collate_texts_rows([build_parts(build_texts_row, row, self._packed, multiple) for row in wide])
        return collate_texts_rows([build_texts_row(self._take(row), self._packed, MULTIPLE) for row in rows])

    def _pad(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        return collate_padded_texts(self._take(numbers), MULTIPLE, self._length)


class Watching(pl.LightningModule):
    """Keeps finished gradients, beside a class of models."""

    gradients: list[Part]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = finished_gradients(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAM)


class Watched(Watching, MCoreEmbedding):
    """An embedding that keeps its gradients."""


Seen = tuple[dict[str, float], list[Part]]


def train(layouts: dict[Layout, tuple[Run, ...]], folders: dict[str, str]) -> list[list[Seen]]:
    """Train the steps of each run on each layout, one after the other, on this rank."""
    return [[_train(layout, run, folders[run[1]]) for run in runs] for layout, runs in layouts.items()]


def parts_of(layout: Layout, form: Form) -> int:
    """Return the microbatches of a step: of one row with ``hybrid_context_parallel``."""
    return 2 // layout.dp if form == "hybrid" else layout.pp


def _train(layout: Layout, run: Run, folder: str) -> Seen:
    case, _, form = run
    setting = CASES[case]
    module = Watched.from_pretrained(folder, seq_length=PACKED_LENGTH, embedding=setting)
    return train_steps(module, layout, form, rows_of(setting.negatives), PACKED_LENGTH)


def train_steps(module: Any, layout: Layout, form: Form, rows: Sequence[Texts], length: int) -> Seen:
    """Train a module that is :class:`Watching` for some steps on rows of this form and, if packed, length."""
    is_hybrid, parts = form == "hybrid", parts_of(layout, form)
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments, hybrid_context_parallel=is_hybrid),
        max_steps=STEPS,
        accumulate_grad_batches=parts,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    data = Data(rows, length if form else None, LENGTH if layout.moe else None, parts, hybrid=is_hybrid)
    trainer.fit(module, data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.gradients


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, "1", "2"))
def test_steps_on_every_layout_are_those_of_a_plain_loop_over_the_whole_batch(name: str) -> None:
    layouts = LAYOUTS[name]
    folders = {family: str(tiny_folder(family)) for runs in layouts.values() for _, family, _ in runs}
    ranks = run_ranks(int(name[0]), train, layouts, folders, timeout=240)
    wrong: dict[str, Any] = {}
    for index, (layout, runs) in enumerate(layouts.items()):
        for number, run in enumerate(runs):
            wanted = plain_steps(*run[:2], parts_of(layout, run[2]))
            found = dict(differences(wanted, [rank[index][number] for rank in ranks]))
            if found:
                wrong[f"{layout.id} {run}"] = found
    assert wrong == {}


def differences(wanted: Wanted, ranks: Sequence[Seen], gradient: float = GRADIENT) -> Iterator[tuple[str, float]]:
    """Yield what differs by more than it may; nothing may be missing."""
    seen = set()
    for values, gradients in ranks:
        for name, value in wanted.values.items():
            if not abs(values[name] - value) <= LOSS * max(1, abs(value)):
                yield name, values[name] - value
        for part in gradients:
            seen.add(part.name)
            whole = wanted.gradients[part.name]
            difference = (part.values - part.of(whole)).abs().max().item() / max(whole.abs().max().item(), 1e-30)
            if not difference <= gradient:
                yield part.name, difference
    if seen != wanted.gradients.keys():
        yield f"names {seen ^ wanted.gradients.keys()}", float("nan")


# ---- runs on files


class Uneven(pl.LightningDataModule):
    """Has two queries for the first of two ranks, and one for the second: in a batch to train, in batches to test."""

    def _queries(self) -> list[Texts]:
        return rows_of(0)[data_parallel_place(self.trainer)[0] : 2]  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return DataLoader([collate_padded_texts(self._queries())], batch_size=None)  # type: ignore[arg-type]

    def test_dataloader(self) -> Any:
        batches = [collate_padded_texts([texts]) for texts in self._queries()]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@on_ranks(2, timeout=60)
def test_ranks_with_other_numbers_of_batches_or_microbatches_are_told_so() -> None:
    module = MCoreEmbedding(VOCAB_SIZE, LENGTH, {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2})
    trainer = make_trainer(MCoreStrategy(micro_batch_size=2), max_steps=1, use_distributed_sampler=False)
    with refuses(ValueError, "the data-parallel ranks have [2, 1] microbatches"):
        trainer.fit(module, Uneven())
    with refuses(ValueError, "the data-parallel ranks have [[2], [1]] test batches"):
        trainer.test(module, Uneven(), verbose=False)


def words(draw: random.Random) -> str:
    """Return a text of two to ten letters, each a token."""
    return "".join(draw.choices("abcdefgh", k=draw.randint(2, 10)))


def write_queries(path: Path, count: int, negatives: int = 1, seed: int = 0) -> str:
    draw = random.Random(seed)
    rows = (
        {"query": words(draw), "positive": words(draw), "negatives": [words(draw)] * negatives} for _ in range(count)
    )
    return write(path, rows)


def embedding_base(folder: Path) -> str:
    """Write a tiny model, whose tokenizer ends each text with a token, as that of Qwen3-Embedding."""
    save_tiny("qwen3", folder, vocab_size=300)
    tokenizer = characters(eos_token=END, pad_token=END)
    ending = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = ending
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return embedding_base(tmp_path_factory.mktemp("base"))


SETTING = Embedding(temperature=0.1, negatives=1, query_prompt="q: ", document_prompt="d:")


def data_of(base: str, cache: str, **arguments: Any) -> MCoreEmbeddingData:
    given: dict[str, Any] = {"tokenizer": base, "seq_length": LENGTH, "cache_dir": cache, **arguments}
    return MCoreEmbeddingData(**given)


def interrupted(base: str, files: tuple[str, str], cache: str, layout: Layout, strategy: Any) -> list[Any]:
    """Train an epoch; resume it in its middle; try to resume it on other data; and train it by another strategy."""
    found: list[Any] = []
    arguments: dict[str, Any] = {"limit_val_batches": 0, "use_distributed_sampler": False}
    for file, way, start in ((files[0], 0, None), (files[0], 0, 1), (files[1], 0, 1), (files[0], strategy, None)):
        if way is None:
            continue
        keep = pl.callbacks.ModelCheckpoint(f"{cache}/kept", "{step}", save_top_k=-1, every_n_train_steps=1)
        callbacks = [keep] if way == 0 and start is None else []
        pl.seed_everything(2, verbose=False)
        recipe = Recipe(learning_rate=0.01, min_learning_rate=0.01)
        module = MCoreEmbedding.from_pretrained(base, seq_length=LENGTH, embedding=SETTING, recipe=recipe)
        data = data_of(base, cache, train_files=file, batch_size=2)
        ckpt_path = None if start is None else f"{cache}/kept/step={start}.ckpt"
        given = layout.strategy_arguments if way == 0 else way
        with pytest.raises(ValueError, match="different data") if file == files[1] else contextlib.nullcontext():
            arguments["enable_checkpointing"] = bool(callbacks)  # otherwise Lightning would add one of its own
            seen = run_fit(module, given, data, ckpt_path=ckpt_path, callbacks=callbacks, **arguments)
            found.append((seen.logged, weights(module)))
    return found


@pytest.mark.parametrize(
    ("layout", "other"),
    [(Layout(dp=2), "ddp"), pytest.param(Layout(tp=2, pp=2, sp=True), None, marks=pytest.mark.thorough)],
    ids=["dp2", "tp2-pp2"],
)
def test_a_resumed_run_has_the_same_bits_and_ddp_the_same_numbers(
    layout: Layout, other: str | None, base: str, tmp_path: Path
) -> None:
    files = write_queries(tmp_path / "a.jsonl", 24), write_queries(tmp_path / "b.jsonl", 24, seed=1)
    for rank in run_ranks(layout.world_size, interrupted, base, files, str(tmp_path), layout, other, timeout=120):
        [whole, resumed, *rest] = rank
        assert len(whole[0]) == 24 // (2 * layout.dp)
        assert resumed[0] == whole[0][1:]
        for name, values in whole[1].items():
            assert torch.equal(resumed[1][name], values), name
        for losses, _ in rest:
            assert losses == pytest.approx(whole[0], abs=LOSS)


def evaluated(base: str, file: str, cache: str, sizes: Sequence[int]) -> list[dict[str, float]]:
    """Validate with several batch sizes; the last batch of the ranks is uneven, or is repeated on the second."""
    found = []
    for size in sizes:
        module = MCoreEmbedding.from_pretrained(base, seq_length=LENGTH, embedding=SETTING)
        data = data_of(base, cache, train_files=file, validation_files=file, batch_size=4, eval_batch_size=size)
        [values] = make_trainer({}).validate(module, data, verbose=False)
        found.append(values)
    return found


def test_an_evaluation_counts_each_query_once_and_its_ranks_are_those_of_torchmetrics(
    base: str, tmp_path: Path
) -> None:
    from torchmetrics.functional.retrieval import retrieval_reciprocal_rank
    from transformers import AutoModel, AutoTokenizer

    file = write_queries(tmp_path / "a.jsonl", 7)
    model = AutoModel.from_pretrained(base, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    texts = [
        [
            SETTING.query_prompt + row["query"],
            *(SETTING.document_prompt + t for t in (row["positive"], *row["negatives"])),
        ]
        for row in rows
    ]
    tokens = [Texts([np.array(tokenizer(text)["input_ids"]) for text in each]) for each in texts]
    vectors = plain_vectors(model, "last", tokens).detach()
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    # Of 7 queries, rank 0 has 0 2 4 6 and rank 1 has 1 3 5
    batches = {4: [[0, 1, 2, 3, 4, 5, 6]], 3: [[0, 1, 2, 3, 4, 5], [6]]}
    for rank in run_ranks(2, evaluated, base, file, str(tmp_path), list(batches), timeout=120):
        for values, parts in zip(rank, batches.values(), strict=True):
            losses = torch.cat([plain_losses(vectors[part], SETTING)[0] for part in parts])
            found = []
            for part in parts:
                documents = unit[part, 1:].flatten(0, 1)
                for place, query in enumerate(part):
                    target = torch.arange(len(documents)) == place * (unit.size(1) - 1)
                    # Moved above 0, because torchmetrics finds no text with a similarity below 0
                    found.append(retrieval_reciprocal_rank(1 + documents @ unit[query, 0], target))
            ranks = torch.stack(found)
            wanted = {"loss": losses.mean(), "mrr": ranks.mean(), "accuracy": (ranks == 1).double().mean()}
            for name, value in wanted.items():
                assert values[f"val_{name}"] == pytest.approx(value.item(), abs=LOSS), name


# ---- folders


def exported(folders: Sequence[str], out: str) -> list[Tensor]:
    """Train, whole and with adapters, and write folders; return the vectors after it, and of each folder read."""
    found = []
    for name, lora in (("whole", None), ("adapters", LoRA(r=2))):
        module = MCoreEmbedding.from_pretrained(
            folders[0], LENGTH, embedding=SETTING, lora=lora, recipe=Recipe(learning_rate=0.02, warmup_steps=0)
        )
        trainer = make_trainer(
            MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True),
            max_steps=2,
            limit_val_batches=0,
            callbacks=[SaveHFModel(f"{out}/{name}")],
        )
        data = Data(rows_of(1), packed=None)
        trainer.fit(module, data)
        trainer.save_checkpoint(f"{out}/{name}.ckpt")
        found.append(trainer.predict(module, data)[0])  # type: ignore[index]
        with pytest.raises(ValueError, match="gives vectors and no next tokens"):
            module.generate([1], 1)
    for folder in (f"{out}/whole.ckpt", f"{out}/adapters.ckpt", f"{out}/whole", *folders[1:]):
        module = MCoreEmbedding.from_pretrained(folder, LENGTH, embedding=SETTING)
        found.append(trainer.predict(module, data)[0])  # type: ignore[index]
    return found


def test_folders_are_read_by_transformers_and_say_how_to_pool(base: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    alone = tmp_path / "without a head"
    AutoModel.from_pretrained(base, dtype=torch.float32).save_pretrained(alone)  # names without "model."
    [whole, adapted, again, continued, read, headless], _ = run_ranks(
        2, exported, [base, str(alone)], str(tmp_path), timeout=120
    )
    assert torch.equal(again, whole)
    assert torch.equal(continued, adapted)
    assert torch.equal(read, whole)
    run_ranks(1, export_checkpoint, str(tmp_path / "adapters.ckpt"), str(tmp_path / "merged"))
    wanted = {"whole": whole, "adapters": adapted, "merged": adapted, alone.name: headless}
    for name, vectors in wanted.items():
        model = AutoModel.from_pretrained(tmp_path / name, dtype=torch.float64)
        plain = plain_vectors(model, "last", rows_of(1)).detach().flatten(0, 1)
        torch.testing.assert_close(vectors.double(), plain / plain.norm(dim=-1, keepdim=True), rtol=0, atol=1e-5)
    for name in ("whole", "adapters", "merged"):
        modules = json.loads((tmp_path / name / "modules.json").read_text())
        assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
        pooling = json.loads((tmp_path / name / "1_Pooling" / "config.json").read_text())
        assert pooling["word_embedding_dimension"] == model.config.hidden_size
        assert {flag for flag, is_on in pooling.items() if is_on is True} == {
            "pooling_mode_lasttoken",
            "include_prompt",
        }
        prompts = json.loads((tmp_path / name / "config_sentence_transformers.json").read_text())["prompts"]
        assert prompts == {"query": SETTING.query_prompt, "document": SETTING.document_prompt}
        assert json.loads((tmp_path / name / "sentence_bert_config.json").read_text())["max_seq_length"] == LENGTH
        assert (tmp_path / name / "tokenizer.json").is_file()
    with pytest.raises(ValueError, match=r"set Embedding\(pooling='last'\)"):
        MCoreEmbedding.from_pretrained(str(tmp_path / "whole"), embedding=Embedding("mean"))
