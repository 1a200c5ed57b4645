# SPDX-License-Identifier: Apache-2.0
"""With ``hybrid_context_parallel``, rows train as their documents do one by one, and few ranks exchange anything.

Every run has rows whose documents are whole on their ranks, and rows whose documents are split, on four ranks also over
two of them. The reference is that of ``test_packing.py``: each document by itself, without padding, through a bare
model on one rank.
"""

import functools
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
from megatron.core import parallel_state
from torch.utils.data import DataLoader

from lightning_mcore import (
    MCoreGPT,
    MCorePreference,
    MCorePreferenceData,
    MCoreReranker,
    MCoreRerankingData,
    MCoreStrategy,
    OnlinePacker,
    Preference,
    Reranker,
)
from lightning_mcore.data.packing.best_fit import RowPart
from lightning_mcore.data.packing.rows import build_parts, build_row, collate_rows
from lightning_mcore.layers import core_attention
from tests.parity.bare_loop import Trace
from tests.parity.global_tensors import assemble, spread
from tests.parity.lightning_loop import make_trainer
from tests.parity.packed import (
    RECIPE,
    TWO_LAYERS,
    Mean,
    PackedGPT,
    Result,
    Rows,
    all_documents,
    one_by_one,
    slices_of,
    train_one_by_one,
)
from tests.parity.test_options import LATENT
from tests.parity.test_packing import MTP, TOLERANCE, assert_trained_alike
from tests.support import toy
from tests.support.chats import characters, write
from tests.support.layouts import Layout
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.tiny import MAMBA, Batch, Recipe

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("hybrid-context")]

MEANS: tuple[Mean, ...] = ("tokens", "samples", "microbatches")
SPLIT = ((32, (5, 17)), (32, (30,)))  # with documents longer than half a row
WHOLE = {  # parts of half a row, and of a quarter
    2: ((32, (9, 5, 7, 3, 4)), (32, (16, 1, 12, 2))),
    4: ((32, (5, 3, 8, 7, 1, 2, 6)), (32, (3, 4, 6, 8, 1, 1, 2))),
}
BETWEEN = {  # rows for four ranks, and the ranks and documents of each of their parts
    (32, (11, 3, 8, 5, 2)): ((2, 2), (1, 1), (1, 2)),
    (32, (9, 12, 4)): ((2, 1), (2, 2)),
    (32, (7, 15)): ((2, 1), (2, 1)),  # as when nothing can be joined with the short one
}
LAYOUTS = (
    Layout(cp=2),
    Layout(cp=4),
    Layout(tp=2, sp=True, cp=2),
    Layout(pp=2, cp=2),
    Layout(dp=2, cp=2, distributed_optimizer=True),
    Layout(moe=True, cp=2, ep=2),
    Layout(moe=True, cp=4, ep=2),
    Layout(dp=2, cp=4),
    Layout(pp=2, cp=4),
)
LATENT_RECIPE = replace(RECIPE, options=(*TWO_LAYERS, *LATENT.items(), ("q_lora_rank", None), ("rope_type", "rope")))


def rows_of(layout: Layout) -> Rows:
    """Return the rows of a step; a data-parallel rank reads every second of them."""
    one, other = WHOLE[layout.cp]
    return (one, SPLIT[0], SPLIT[1], other, *(BETWEEN if layout.cp == 4 else ()))[: 6 if layout.dp == 2 else None]


def parts_of(row: tuple[int, tuple[int, ...]], ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the ranks and documents of each part: one part for each rank if documents fit in this order, else one."""
    if row in BETWEEN and ranks == 4:
        return BETWEEN[row]
    length, documents = row
    parts: list[list[int]] = [[]]
    for each in documents:
        if sum(parts[-1]) + each > length // ranks:
            parts.append([])
        parts[-1].append(each)
    if len(parts) == ranks and max(documents) <= length // ranks:
        return tuple((1, len(part)) for part in parts)
    return ((ranks, len(documents)),)


def built(rows: Rows, ranks: int) -> list[Batch]:
    """Return microbatches of the rows with :func:`parts_of` them."""
    found = []
    for samples, row in zip(all_documents(rows), rows, strict=True):
        left = iter(samples)
        parts = [RowPart(width, list(islice(left, count))) for width, count in parts_of(row, ranks)]
        found.append(collate_rows([build_parts(build_row, parts, row[0], 2 * ranks)]))
    return found


def exchanged(layout: Layout, rows: Rows, rank: int) -> int:
    """Return how many rows' keys a rank exchanges with others in each attention layer."""
    place = MCoreStrategy(**layout.strategy_arguments).layout.coordinates(rank, layout.world_size)
    mine = rows[place.data_parallel_rank :: layout.dp]
    widths = [[width for width, _ in parts_of(row, layout.cp) for _ in range(width)] for row in mine]
    return sum(each[place.context_parallel_rank] > 1 for each in widths)


def streamed(rows: Rows, ranks: int) -> list[Batch]:
    """Return microbatches of what a stream makes of the same documents."""
    packer = OnlinePacker(rows[0][0], 2 * ranks, open_rows=2, parts=ranks)
    found = [row for samples in all_documents(rows) for sample in samples for row in packer.add(sample)]
    return [collate_rows([row]) for row in found + packer.flush()]


class HybridGPT(PackedGPT):
    """Trains on the rows of :func:`built`, or of :func:`streamed`."""

    is_streamed = False

    def train_dataloader(self) -> DataLoader[Batch]:
        batches = (streamed if self.is_streamed else built)(self.rows, self.layout.cp)
        mine = batches[parallel_state.get_data_parallel_rank() :: self.layout.dp]
        return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]


def counting_exchanges() -> Any:
    """Count how often attention exchanges keys and values."""
    return mock.patch.object(core_attention, "over_whole_sequences", wraps=core_attention.over_whole_sequences)


def train(
    layout: Layout, recipe: Recipe, rows: Rows, means: tuple[Mean, ...], is_streamed: bool = False
) -> tuple[dict[Mean, Trace], int]:
    """Train for one step with each meaning of the loss; also return how often attention exchanged keys and values."""
    traces: dict[Mean, Trace] = {}
    with counting_exchanges() as calls:
        for mean in means:
            module = HybridGPT(layout, replace(recipe, token_weighted=mean != "microbatches"), rows, mean)
            module.is_streamed = is_streamed
            strategy = MCoreStrategy(**layout.strategy_arguments, hybrid_context_parallel=True)
            make_trainer(layout.world_size, strategy, len(rows) // layout.dp).fit(module)
            assert module.trace is not None
            traces[mean] = module.trace
    return traces, calls.call_count


@functools.cache
def _reference(one_rank: Layout, recipe: Recipe, rows: Rows) -> dict[Mean, Result]:
    (results,) = run_ranks(1, one_by_one, one_rank, recipe, rows, MEANS, recipe.micro_batch_size, timeout=120)
    return results


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, "cp4", "tp2-sp-cp2", "pp2-cp2"))
def test_rows_of_both_kinds_train_as_their_documents_do_one_by_one(layout: Layout) -> None:
    _compare(layout, RECIPE, MEANS)


@pytest.mark.parametrize("layout", thorough_but([Layout(cp=2), Layout(cp=4), Layout(tp=2, sp=True, cp=2)], "cp4"))
def test_latent_attention_has_the_right_positions_too(layout: Layout) -> None:
    _compare(layout, LATENT_RECIPE, ("tokens",))


def test_layers_that_are_computed_again_know_the_kind_of_their_row() -> None:
    """Backward runs them after other rows have gone through."""
    again = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    _compare(Layout(pp=2, cp=2), replace(RECIPE, options=(*TWO_LAYERS, *again)), ("tokens",))


MTP_LAYOUTS = (Layout(cp=2), Layout(cp=4), Layout(tp=2, sp=True, cp=2), Layout(pp=2, cp=2))


@pytest.mark.parametrize("layout", thorough_but(MTP_LAYOUTS, "cp4"))
def test_multi_token_prediction_guesses_within_documents_of_both_kinds_of_rows(layout: Layout) -> None:
    rows = rows_of(layout)
    (dense,) = run_ranks(1, train_one_by_one, layout.one_rank, MTP, rows, timeout=120)
    ranks = run_ranks(layout.world_size, train, layout, MTP, rows, ("tokens",), timeout=180)
    worst = spread(slices_of([found["tokens"] for found, _ in ranks]), assemble(slices_of([dense])))
    assert any("mtp" in name for name in worst)
    assert {key: value for key, value in worst.items() if not value <= TOLERANCE} == {}


@pytest.mark.parametrize("layout", thorough_but([Layout(cp=2), Layout(cp=4)], "cp4"))
def test_rows_of_a_stream_train_as_their_documents_do_one_by_one(layout: Layout) -> None:
    means: tuple[Mean, ...] = ("tokens", "samples")
    rows = rows_of(layout)
    batches = streamed(rows, layout.cp)
    assert len(batches) == len(rows)
    ranks = run_ranks(layout.cp, train, layout, RECIPE, rows, means, True, timeout=180)
    assert 0 < ranks[0][1] < len(means) * len(rows) * 2, "both kinds of rows"
    for mean in means:
        traces = [found[mean] for found, _ in ranks]
        assert_trained_alike(traces, _reference(layout, RECIPE, rows)[mean], layout, batches, mean)


def _compare(layout: Layout, recipe: Recipe, means: tuple[Mean, ...]) -> None:
    rows = rows_of(layout)
    reference = _reference(layout.one_rank, replace(recipe, options=recipe.options), rows)
    ranks = run_ranks(layout.world_size, train, layout, recipe, rows, means, timeout=180)
    runs = 2 if dict(recipe.options).get("recompute_granularity") else 1
    for rank, (_, exchanges) in enumerate(ranks):
        assert exchanges == len(means) * exchanged(layout, rows, rank) * (2 // layout.pp) * runs
    for mean in means:
        traces = [found[mean] for found, _ in ranks]
        assert_trained_alike(traces, reference[mean], layout, built(rows, layout.cp), mean)


def evaluated(layout: Layout, folder: str, hybrid: bool) -> dict[str, float]:
    """Return the validation losses of pairs of answers and of queries with documents, packed if ``hybrid``."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    strategy: dict[str, Any] = dict(layout.strategy_arguments)
    if hybrid:
        strategy |= {"hybrid_context_parallel": True, "micro_batch_size": 1}
    losses = {}
    ranking = Reranker("ranknet", documents=2, template="{query}:{document}.")
    for name, module, data in (
        ("pairs", MCorePreference(260, 64, sizes, preference=Preference("simpo")), MCorePreferenceData),
        ("queries", MCoreReranker(260, 64, sizes, reranker=ranking), MCoreRerankingData),
    ):
        file = f"{folder}/{name}.jsonl"
        pl.seed_everything(3, verbose=False)
        given = data(file, characters(pad_token="<|pad|>"), 64, validation_files=file, packing=hybrid, cache_dir=folder)
        with mock.patch.object(
            core_attention, "over_whole_sequences", wraps=core_attention.over_whole_sequences
        ) as calls:
            [found] = toy.make_trainer(strategy).validate(module, datamodule=given, verbose=False)
        rows = given.statistics["validation"].rows
        assert not hybrid or 0 < calls.call_count < 2 * rows, "both kinds of rows"
        losses[name] = found["val_loss"]
    return losses


@pytest.mark.parametrize("size", thorough_but([2, 4], 4))
def test_packed_pairs_and_queries_have_the_losses_that_they_have_one_by_one(tmp_path: Path, size: int) -> None:
    draw = random.Random(1)

    def text(longest: int) -> str:
        return "".join(draw.choices("abcdefgh", k=draw.randint(2, longest)))

    longest = [9] * 30 + [22] * 4
    write(tmp_path / "pairs.jsonl", [{"prompt": text(5), "chosen": text(n), "rejected": text(n)} for n in longest])
    queries = [{"query": text(5), "documents": [text(n), text(n)], "labels": [1, 0]} for n in longest]
    write(tmp_path / "queries.jsonl", queries)
    [wanted] = run_ranks(1, evaluated, Layout(), str(tmp_path), False, timeout=120)
    for found in run_ranks(size, evaluated, Layout(cp=size), str(tmp_path), True, timeout=120):
        assert found == pytest.approx(wanted, rel=1e-6)


AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


@pytest.mark.parametrize(
    ("transformer", "architecture", "about"),
    [
        ({}, {"layer_pattern": "[M-][*-]", "mamba": dict(MAMBA)}, "does not support layers with a memory"),
        ({**LATENT, "q_lora_rank": 16, **AGAIN}, None, "does not support recompute_modules=['mla_up_proj']"),
    ],
    ids=["memory", "mla"],
)
@on_ranks(2, timeout=120)
def test_models_that_need_every_row_split_are_refused(
    transformer: dict[str, Any], architecture: dict[str, Any] | None, about: str
) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **transformer}
    strategy = {"context_parallel_size": 2, "hybrid_context_parallel": True}
    with refuses(ValueError, about):
        toy.make_trainer(strategy).fit(MCoreGPT(40, 32, sizes, architecture=architecture), [{}])
