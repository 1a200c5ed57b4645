# SPDX-License-Identifier: Apache-2.0
"""Activations that wait in host memory change no number, and leave the device's memory."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_mcore import MCoreGPT
from lightning_mcore.callbacks import OffloadActivations
from lightning_mcore.cli.lightning_file import settings_of_lightning
from lightning_mcore.rehearsal.processes import Played, run_jobs
from tests.support import toy
from tests.support.ranks import on_ranks, run_ranks
from tests.support.rehearsed import GATED, LENGTH, RECOMPUTE, SIZES, VOCABULARY, gpt_run, job, offloading_trainer
from tests.support.sentences import refuses

pytestmark = pytest.mark.distributed

RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "tp2": (2, {**toy.TP2, "sequence_parallel": True}, {}),
    "pp2 recompute": (2, toy.PP2, RECOMPUTE),
    "dp2 overlaps": (2, toy.OVERLAPPED, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}, {"num_moe_experts": 4, "moe_grouped_gemm": False}),
}


class Everything(OffloadActivations):
    """Moves tensors of a CPU too, and counts them."""

    def __init__(self) -> None:
        super().__init__(min_bytes=1)
        self.moved = 0

    def _moves(self, tensor: Tensor) -> bool:
        assert torch._C._current_graph_task_id() < 0, "what a backward pass has computed again needs no move"
        self.moved += 1
        return True


def train(layout: dict[str, Any], fields: dict[str, Any], moves: bool) -> tuple[list[float], list[Tensor], int]:
    """Train for two steps; return the losses, the weights and the number of tensors that were considered."""
    torch.manual_seed(1)
    watch, offload = toy.Watch(), Everything()
    trainer = toy.make_trainer(
        layout,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        max_steps=2,
        callbacks=[watch, *([offload] if moves else [])],
    )
    module = MCoreGPT(vocab_size=VOCABULARY, seq_length=LENGTH, transformer={**SIZES, **GATED, **fields})
    trainer.fit(module, toy.texts(rows=16, length=LENGTH, vocab_size=VOCABULARY))
    return [trainer.callback_metrics["train_loss"].item()], [p.detach() for p in module.parameters()], offload.moved


@pytest.mark.parametrize("name", RUNS)
def test_no_number_changes(name: str) -> None:
    ranks, layout, fields = RUNS[name]
    for plain, moved in zip(*(run_ranks(ranks, train, layout, fields, moves) for moves in (False, True)), strict=True):
        assert plain[0] == moved[0]
        assert all(torch.equal(one, other) for one, other in zip(plain[1], moved[1], strict=True))
        # A rank of the run with recompute has two layers with an input in each of four microbatches
        assert (plain[2], moved[2] >= (8 if fields == RECOMPUTE else 20)) == (0, True)


def test_activations_leave_the_device_of_a_rehearsal() -> None:
    kinds: list[dict[str, Any]] = [{}, {"transformer": RECOMPUTE}]
    jobs = [job(partial(gpt_run, **kind, **more)) for kind in kinds for more in ({}, {"trainer": offloading_trainer})]
    held, waits = [], []
    for played in run_jobs(jobs, lambda rank, what: None):
        assert isinstance(played, Played)
        [report] = played.ranks
        held.append(sum(holder.bytes for holder in report.holders if holder.kind == "activations"))
        waits.append(sum(wait.times for wait in report.waits))
    plain, offloaded, recomputed, both = held
    assert offloaded < 0.01 * plain
    assert recomputed - both == SIZES["num_layers"] * 2 * LENGTH * SIZES["hidden_size"] * 2  # inputs of layers, bf16
    assert len({*waits}) == 1  # the copies wait for nothing


def test_kernels_that_add_to_the_gradients_of_weights_are_refused() -> None:
    module = pl.LightningModule()
    module.config = SimpleNamespace(gradient_accumulation_fusion=True)  # type: ignore[assignment]
    with refuses(ValueError, "gradient_accumulation_fusion=True"):
        OffloadActivations().on_train_start(pl.Trainer(accelerator="cpu", logger=False), module)


def test_a_sparse_matrix_stays() -> None:
    matrix, there = torch.eye(3).to_sparse(), torch.ones(3, 2, requires_grad=True)
    with saved_tensors_hooks(Everything()._pack, lambda packed: packed):
        torch.sparse.mm(matrix, there).sum().backward()
    assert there.grad is not None
    assert torch.equal(there.grad, torch.ones(3, 2))


@on_ranks(2)
def test_gathered_weights_are_not_taken_for_activations() -> None:
    trainer = toy.make_trainer({"data_parallel_sharding": "optim_grads"}, callbacks=[OffloadActivations()])
    with refuses(ValueError, "data_parallel_sharding='optim_grads'"):
        trainer.fit(toy.StagedNet(), toy.loader(8, 2))


@pytest.mark.parametrize("is_list", [True, False])
def test_plan_says_that_it_does_not_count_the_callback_of_a_file(is_list: bool) -> None:
    offload = {"class_path": "lightning_mcore.callbacks.OffloadActivations", "init_args": {"min_bytes": 8}}
    model = {"vocab_size": VOCABULARY, "seq_length": LENGTH, "transformer": SIZES}
    document = {
        "trainer": {
            "strategy": {"class_path": "lightning_mcore.MCoreStrategy"},
            "callbacks": [offload] if is_list else offload,
        },
        "model": {"class_path": "lightning_mcore.MCoreGPT", "init_args": model},
    }
    settings = settings_of_lightning([document], ["run.yaml"], [])
    assert settings.notes == (
        "activations are counted as if OffloadActivations left them on the GPU; rehearse counts it",
    )
    [found] = settings.trainer["callbacks"]  # rehearse builds it
    assert found["init_args"] == offload["init_args"]
