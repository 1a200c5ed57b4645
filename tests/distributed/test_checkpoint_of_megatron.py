# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go from here to bare megatron-core and back: same format, same names.

The other side is a program of megatron-core alone: a model, its ``sharded_state_dict`` and a bare
``dist_checkpointing.save`` or ``load``, as in Megatron-LM's ``checkpointing.py``.
"""

import os
import queue
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from torch import Tensor, nn

from tests.distributed.test_reshard import RECIPE, make_trainer, save_on
from tests.parity.bare_loop import _build_chunks, _build_optimizer, _parallel_fields, process_groups
from tests.parity.global_tensors import Slice, assemble, fill_weights, state_slices, weight_slices
from tests.parity.lightning_loop import TinyGPT
from tests.support import tiny
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

PAIRS = [
    pytest.param(Layout(tp=2, sp=True), Layout(pp=2), marks=pytest.mark.thorough),
    (Layout(pp=2, vp=2, dp=2, distributed_optimizer=True), Layout(tp=2)),
    (Layout(moe=True, dp=2, ep=2), Layout(moe=True, pp=2)),
]
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda layout: layout.id)


def _chunks(layout: Layout) -> tuple[list[nn.Module], dict[str, Any]]:
    """Return Megatron's wrapped chunks and the sharded state of the model, under Megatron-LM's keys."""
    fields = {**tiny.transformer_fields(layout, RECIPE), **_parallel_fields(layout, RECIPE)}
    chunks = _build_chunks(tiny.make_config(fields), layout, RECIPE)
    bare = [chunk.module for chunk in chunks]
    names = ["model"] if len(bare) == 1 else [f"model{index}" for index in range(len(bare))]
    return chunks, {name: chunk.sharded_state_dict() for name, chunk in zip(names, bare, strict=True)}


def save_theirs(layout: Layout, path: str) -> list[Slice]:
    """Save with megatron-core alone, on this rank."""
    with process_groups(layout):
        chunks, state = _chunks(layout)
        with torch.no_grad():
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                parameter.mul_(1.5)  # other weights than those a new model here begins with
        if torch.distributed.get_rank() == 0:
            os.makedirs(path)
        torch.distributed.barrier()
        with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):  # Megatron's starts a program
            dist_checkpointing.save({**state, "iteration": 7, "checkpoint_version": 3.0}, path)
        return weight_slices(chunks)


def load_theirs(layout: Layout, path: str) -> tuple[list[Slice], list[Slice], int]:
    """Load a checkpoint of ours with megatron-core alone: weights, the optimizer's moments, and the iteration."""
    with process_groups(layout):
        chunks, state = _chunks(layout)
        optimizer = _build_optimizer(chunks, layout, RECIPE)  # type: ignore[arg-type]
        for group in (g for part in optimizer.chained_optimizers for g in part.optimizer.param_groups):
            for parameter in group["params"]:
                zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                optimizer.chained_optimizers[0].optimizer.state[parameter] = {"step": torch.ones(()), **zeros}
        moments = optimizer.sharded_state_dict(dict(state), is_loading=True, metadata=METADATA)
        wanted = {**state, "optimizer": moments}
        described = state_slices(moments)
        loaded = dist_checkpointing.load(wanted, path)
        for name, chunk in zip(state, chunks, strict=True):
            chunk.module.load_state_dict(loaded[name])
        assert described
        return weight_slices(chunks), _filled(moments), loaded["iteration"]


def _filled(moments: Any) -> list[Slice]:
    return [part for part in state_slices(moments) if ".exp_avg" in part.key]


@pairs
def test_megatron_reads_what_is_saved_here(ours: Layout, theirs: Layout, tmp_path: Path) -> None:
    whole = save_on(ours, str(tmp_path / "ours.ckpt"))
    for weights, moments, iteration in run_ranks(theirs.world_size, load_theirs, theirs, whole.path, timeout=120):
        assert iteration == 2
        assert weights
        assert moments
        for part in weights:
            assert torch.equal(part.data, part.of(whole.weights[part.key])), part.key
        for part in moments:
            expected = part.of(whole.optimizer[part.key])
            assert torch.equal(part.data.view_as(expected), expected), part.key  # loading leaves axes of size 1


class FromTheirs(TinyGPT):
    """Starts from a checkpoint that Megatron wrote."""

    path = ""

    def configure_model(self) -> None:
        super().configure_model()
        fill_weights(self.model.chunks)
        self.load_weights(self.path)


def start_from_theirs(layout: Layout, path: str) -> list[Slice]:
    """Load their weights through Lightning, on this rank, and look at them before the first step."""
    module = FromTheirs(layout, RECIPE)
    module.path = path
    trainer = make_trainer(layout, 0, "32-true", pl.Callback())
    trainer.fit(module)
    with process_groups(layout):
        return weight_slices(module.model.chunks)


@pairs
def test_what_megatron_saved_is_read_here(ours: Layout, theirs: Layout, tmp_path: Path) -> None:
    path = str(tmp_path / "iter_0000007")
    saved = assemble(s for rank in run_ranks(theirs.world_size, save_theirs, theirs, path, timeout=120) for s in rank)
    for weights in run_ranks(ours.world_size, start_from_theirs, ours, path, timeout=120):
        assert weights
        for part in weights:
            assert torch.equal(part.data, part.of(saved[part.key])), part.key


EXPERTS = Layout(moe=True)


def save_own_layers(path: str) -> list[Tensor]:
    """Save experts in Megatron's own layers (``--transformer-impl local``); return the norms before the experts."""
    with process_groups(EXPERTS):
        fields = {**tiny.transformer_fields(EXPERTS, RECIPE), **_parallel_fields(EXPERTS, RECIPE)}
        config = tiny.make_config(fields)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        model = GPTModel(config, spec, tiny.VOCAB_SIZE, tiny.SEQ_LENGTH, position_embedding_type="rope")
        norms = [layer.pre_mlp_layernorm.weight.data.normal_() for layer in model.decoder.layers]
        os.makedirs(path)
        with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):  # Megatron's starts a program
            dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 7}, path)
        return norms


def test_norms_before_experts_in_megatrons_own_layers_are_read(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_0000007")
    [norms] = run_ranks(1, save_own_layers, path, timeout=120)
    [weights] = run_ranks(1, start_from_theirs, EXPERTS, path, timeout=120)
    read = [part.data.flatten() for part in weights if part.key == "decoder.layers.pre_mlp_layernorm.weight"]
    assert torch.equal(torch.stack(read), torch.stack(norms))
