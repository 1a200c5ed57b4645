# SPDX-License-Identifier: Apache-2.0
"""MCoreGPT on packed rows: it trains, validates and predicts alike on every layout, and refuses what it cannot cut."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, Recipe
from lightning_mcore.data.packing.rows import collate_rows, pack
from lightning_mcore.layers import host_values, packed_sequences
from tests.parity.global_tensors import fill_weights
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import Memory, make_trainer

pytestmark = pytest.mark.distributed

VOCAB_SIZE, ROW = 40, 32
READS = 3  # in a step: the norm of gradients, twice on a CPU, and the logs
LENGTHS = (6, 25, 9, 17, 3, 30, 12, 12, 8, 20, 5, 14)
TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "add_bias_linear": False,
}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2, cp2": (
        4,
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
    ),
    "cp2, hybrid": (2, {"context_parallel_size": 2, "hybrid_context_parallel": True, "micro_batch_size": 1}),
    "cp4, hybrid": (4, {"context_parallel_size": 4, "hybrid_context_parallel": True, "micro_batch_size": 1}),
    "pp2, cut into rows": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
}


def rows(multiple: int = 8) -> list[dict[str, Tensor]]:
    """Return packed rows of counting sequences."""
    samples = [((torch.arange(length + 1) + 7 * n) % VOCAB_SIZE).tolist() for n, length in enumerate(LENGTHS)]
    return pack(samples, ROW, multiple=multiple)


def loader(batch_size: int, dataset: Any = None) -> DataLoader[Any]:
    """Return the rows, in order."""
    return DataLoader(rows() if dataset is None else dataset, batch_size, collate_fn=collate_rows)


class Filled(MCoreGPT):
    """Starts from weights that do not depend on the layout."""

    def configure_model(self) -> None:
        is_new = not hasattr(self, "model")
        super().configure_model()
        if is_new:
            fill_weights(self.model.chunks)


def gpt() -> MCoreGPT:
    """Return the same model each time."""
    return Filled(VOCAB_SIZE, ROW, TRANSFORMER, recipe=Recipe(learning_rate=1e-2))


def run(strategy: dict[str, Any], copies: int) -> tuple[dict[str, float], list[list[int]], list[dict[str, float]]]:
    """Train, validate and predict; return what was validated, predicted and logged."""
    model, memory = gpt(), Memory()
    trainer = make_trainer(strategy, max_epochs=2, logger=memory, accumulate_grad_batches=2 // copies)
    trainer.fit(model, loader(2, rows()[2:6]))
    [validated] = trainer.validate(model, loader(2), verbose=False)
    predicted: Any = trainer.predict(model, loader(2))
    return validated, torch.cat(predicted).tolist(), memory.rows


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Run on every layout."""
    return {
        name: run_ranks(ranks, run, strategy, 2 if name == "dp2" else 1, timeout=180)
        for name, (ranks, strategy) in LAYOUTS.items()
    }


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_packed_rows_give_the_same_numbers_on_every_layout(results: dict[str, Any], name: str) -> None:
    [(validated, predicted, _)] = results["one"]
    assert validated["val_perplexity"] == pytest.approx(torch.tensor(validated["val_loss"]).exp().item(), rel=1e-5)
    assert 0 < validated["val_accuracy"] < 1
    for rank, (found, tokens, _) in enumerate(results[name]):
        assert found == pytest.approx(validated, rel=1e-4)
        here = predicted if name != "dp2" else predicted[rank::2]
        assert tokens == here[: len(tokens)]


def test_the_speed_counts_tokens_and_no_padding(results: dict[str, Any]) -> None:
    [(_, _, logged)] = results["one"]
    assert all(row["tokens_per_second"] > 0 for row in logged if "tokens_per_second" in row)


def too_small_a_multiple() -> None:
    """Train rows whose sub-sequences two context-parallel ranks cannot cut."""
    make_trainer({"context_parallel_size": 2}).fit(gpt(), loader(2, rows(multiple=1)))


def a_label_too_many() -> None:
    """Train on a token that does not exist."""
    dataset = rows()
    dataset[1]["labels"][5] = VOCAB_SIZE
    make_trainer({}).fit(gpt(), loader(2, dataset))


@pytest.mark.parametrize(
    ("function", "about"),
    [
        (too_small_a_multiple, "do not divide into 2 * context_parallel_size=4 slices"),
        (a_label_too_many, "labels hold 40 at row 1, position 5, outside the vocabulary of vocab_size=40"),
    ],
)
def test_a_batch_that_cannot_be_run_is_refused_in_one_sentence(function: Any, about: str) -> None:
    with refuses(RanksFailedError, about):
        run_ranks(2, function, timeout=120)


class OnHost(Tensor):
    """A tensor that stays on the host where there is a GPU, and so is everything that is made of it."""


class Reads(TorchFunctionMode):
    """Counts what would wait for a GPU: numbers that are read from tensors which would be there."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.below = ReadsOfOne(self)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self.count(args[0])
        return function(*args, **(kwargs or {}))

    def count(self, tensor: Tensor) -> None:
        self.number += not isinstance(tensor, OnHost)


class ReadsOfOne(TorchDispatchMode):
    """Counts ``item()``, and all that goes through it: truth, comparisons with a number, an index, a slice."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name.removeprefix("aten::") in self.WAITING:
            self.reads.count(args[0])
        return function(*args, **(kwargs or {}))


class CountReads(pl.Callback):
    """Counts the reads of each optimizer step, from its first batch to its last."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.reads = Reads()
        self.reads.__enter__()
        self.reads.below.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reads.below.__exit__(None, None, None)
        self.reads.__exit__(None, None, None)
        self.steps.append(self.reads.number)


def count_reads(strategy: dict[str, Any], runs: list[tuple[int, int, dict[str, Any]]]) -> list[int]:
    """Return the reads of a whole optimizer step for each number of layers, of microbatches and other fields."""
    note = host_values.note_values  # of what the host still knows of a batch that is on the device
    host_values.note_values = lambda tensor, values: note(tensor, values.as_subclass(OnHost))
    described = packed_sequences._described

    def on_host(boundaries: Any, device: torch.device) -> Any:
        made = described(boundaries, device)
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            setattr(made, name, getattr(made, name).as_subclass(OnHost))
        return made

    packed_sequences._described = on_host
    packed_sequences.PackedSequences.on = lambda self, device: described(self.boundaries, device)
    counted = []
    for layers, microbatches, fields in runs:
        reads = CountReads()
        # not AdamW, whose counts of steps are on the host
        model = MCoreGPT(VOCAB_SIZE, ROW, TRANSFORMER | {"num_layers": layers} | fields, recipe=Recipe(optimizer="sgd"))
        trainer = make_trainer(strategy, accumulate_grad_batches=microbatches, max_steps=2, callbacks=[reads])
        trainer.fit(model, loader(1, rows()[:microbatches] * 2))
        counted.append(sum(reads.steps[microbatches : 2 * microbatches]))  # names travel in the first step
    return counted


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_reads_as_little_from_the_device_however_many_layers_microbatches_and_sequences(size: int) -> None:
    ahead = {"mtp_num_layers": 1}
    runs: list[tuple[int, int, dict[str, Any]]] = [(2, 1, {}), (4, 1, {}), (2, 3, {}), (2, 3, ahead)]
    for counted in run_ranks(size, count_reads, {"context_parallel_size": size}, runs, timeout=180):
        assert counted == [READS] * len(runs)
