# SPDX-License-Identifier: Apache-2.0
"""A run that Megatron-LM began goes on here: weights, optimizer state, steps, learning rate and data.

The first two of four steps are those of the loop written by hand (``tests/parity/bare_loop.py``), which saves with
megatron-core alone, as in Megatron-LM's ``checkpointing.py``. The losses and gradient norms of the last two are
compared with the same loop, which was never interrupted: bit for bit on the same layout.
"""

import argparse
import logging
import os
import queue
import random
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import unwrap_model
from torch.optim.lr_scheduler import LambdaLR

from lightning_mcore import MCoreStrategy
from lightning_mcore.data.sampling import training_loader
from tests.distributed.test_checkpoint_of_megatron import start_from_theirs
from tests.parity import bare_loop
from tests.parity.bare_loop import Trace
from tests.parity.lightning_loop import TinyGPT, make_trainer, precision_of
from tests.support import tiny
from tests.support.layouts import Layout
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.tiny import Recipe

pytestmark = pytest.mark.distributed

RECIPE = Recipe(steps=4, global_batch_size=4, eps=1e-4)
SAVED = 2  # steps of Megatron's run before its checkpoint
TOLERANCE = 1e-5  # on another layout, as in test_reshard.py


def rate(step: int) -> float:
    """Return a learning rate for each step, as a share of the first."""
    return 1.0 - 0.2 * step


def train_theirs(
    layout: Layout, recipe: Recipe, path: str, sharding: str, of: str = "Megatron-LM", seeds_copies: bool = False
) -> Trace:
    """Train with megatron-core alone on this rank, and save after :data:`SAVED` steps."""

    def set_rate(step: int, _: list[Any], optimizer: Any) -> None:
        if seeds_copies and step == 0:  # --data-parallel-random-init
            bare_loop.seed_as_megatron_lm(1 + 10 * parallel_state.get_data_parallel_rank())
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate(steps_taken(optimizer))

    def save(step: int, chunks: list[Any], optimizer: Any) -> None:
        if step + 1 != SAVED:
            return
        if layout.overlap:  # the parameters of this step are still to be gathered
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=True)
        names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
        bare = [unwrap_model(chunk) for chunk in chunks]
        state = {name: chunk.sharded_state_dict() for name, chunk in zip(names, bare, strict=True)}
        save_theirs(state, optimizer, layout, recipe, path, sharding, of, seeds_copies)
        if layout.overlap:
            for chunk in chunks:
                chunk.enable_forward_pre_hook()

    return bare_loop.train(layout, recipe, before_step=set_rate, after_step=save)


def steps_taken(optimizer: Any) -> int:
    """Return the number of steps without those that fp16 skipped."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return max((int(state["step"]) for part in parts for state in part.optimizer.state.values()), default=0)


def random_states(seeds_copies: bool) -> ShardedObject:
    """Return this rank's random states under the names that Megatron-LM and Megatron-Bridge give them."""
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    states: list[Any] = [own]
    if seeds_copies:
        states = [None] * parallel_state.get_data_parallel_world_size()
        dist.all_gather_object(states, own, group=parallel_state.get_data_parallel_group())
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", states, sizes, place, replica_id=copy)


def save_theirs(
    state: dict[str, Any],
    optimizer: Any,
    layout: Layout,
    recipe: Recipe,
    path: str,
    sharding: str,
    of: str,
    seeds_copies: bool = False,
) -> None:
    """Save as Megatron-LM does, which avoids a prefix since megatron-core 0.14 and wrote one before."""
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": sharding != "prefixed"}
    if sharding == "prefixed":
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    optimizer_state = optimizer.sharded_state_dict(dict(state), metadata=metadata)
    if of != "another program":
        state = {**state, "rng_state": random_states(seeds_copies)}
    settings = argparse.Namespace(
        micro_batch_size=recipe.micro_batch_size,
        data_parallel_size=layout.dp,
        consumed_train_samples=SAVED * recipe.global_batch_size,
        seed=1234,
    )
    if dist.get_rank() == 0:
        os.makedirs(path)
    dist.barrier()
    common: dict[str, Any] = {"iteration": SAVED, "checkpoint_version": 3.0}
    common["opt_param_scheduler"] = {"num_steps": steps_taken(optimizer) * recipe.global_batch_size}
    if of == "Megatron-LM":
        common["args"] = settings
    with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):  # Megatron's starts a program
        dist_checkpointing.save({**state, "optimizer": optimizer_state, **common}, path)
    if of == "Megatron-Bridge" and dist.get_rank() == 0:
        counts = {"step": SAVED, "consumed_train_samples": settings.consumed_train_samples}
        torch.save({name: torch.tensor(count) for name, count in counts.items()}, f"{path}/train_state.pt")


class Ours(TinyGPT):
    """The same model and data, whose loader and schedule go on from the checkpoint's step."""

    def train_dataloader(self) -> Any:
        steps = [tiny.microbatches(self.recipe, Layout(), 0, step) for step in range(self.recipe.steps)]
        rows: Any = [row for step in steps for row in step]
        return training_loader(self.trainer, rows, 1, shuffle=False, collate_fn=itemgetter(0))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trace_of_ours(layout: Layout, recipe: Recipe, path: str) -> Trace:
    """Go on through Lightning on this rank; return what was logged."""
    return _resume(layout, recipe, path)[0]


def resume_ours(layout: Layout, recipe: Recipe, path: str) -> tuple[list[float], list[float | None], int, int]:
    """Go on through Lightning on this rank; return what was logged, and the first and the last step."""
    trace, first, last = _resume(layout, recipe, path)
    return trace.losses, trace.grad_norms, first, last


def _resume(layout: Layout, recipe: Recipe, path: str) -> tuple[Trace, int, int]:
    module = Ours(layout, recipe)
    trainer = make_trainer(
        layout.world_size,
        MCoreStrategy(**layout.strategy_arguments, precision_plugin=precision_of(recipe)),
        recipe.num_microbatches(layout),
        recipe.precision,
        recipe.clip,
    )
    first = FirstStep()
    trainer.callbacks.append(first)  # type: ignore[attr-defined]
    trainer.fit(module, ckpt_path=path)
    assert module.trace is not None
    return module.trace, first.step, trainer.global_step


def resume_and_log(layout: Layout, recipe: Recipe, path: str) -> tuple[Any, list[str]]:
    """Return what :func:`resume_ours` returns, and what was said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return resume_ours(layout, recipe, path), [line for line in said if "resuming from Megatron" in line]


class FirstStep(pl.Callback):
    """Notes the step at which training begins."""

    step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


SAME = [
    (Layout(), "none", "32-true"),
    (Layout(dp=2, distributed_optimizer=True), "fully_reshardable", "bf16-mixed"),
    pytest.param(
        *(Layout(tp=2, sp=True, dp=2, distributed_optimizer=True), "fully_reshardable", "32-true"),
        marks=pytest.mark.thorough,
    ),
    (Layout(pp=2, vp=2), "none", "bf16-mixed"),
    (Layout(moe=True, dp=2, ep=2), "prefixed", "32-true"),
    (Layout(moe=True, dp=2, ep=2, distributed_optimizer=True), "fully_reshardable", "bf16-mixed"),
    pytest.param(Layout(dp=2, distributed_optimizer=True), "dp_reshardable", "32-true", marks=pytest.mark.thorough),
    (Layout(tp=2, sp=True, dp=2, distributed_optimizer=True, overlap=True), "dp_reshardable", "bf16-mixed"),
    (Layout(moe=True, dp=2, pp=2, ep=2, distributed_optimizer=True), "dp_reshardable", "bf16-mixed"),
]


@pytest.mark.parametrize(("layout", "sharding", "precision"), SAME, ids=lambda value: getattr(value, "id", value))
def test_a_run_of_megatron_goes_on_bit_for_bit(layout: Layout, sharding: str, precision: str, tmp_path: Path) -> None:
    path, recipe = str(tmp_path / "iter_0000002"), replace(RECIPE, precision=precision)
    theirs = run_ranks(layout.world_size, train_theirs, layout, recipe, path, sharding, timeout=120)
    for bare, ours in zip(theirs, run_ranks(layout.world_size, resume_ours, layout, recipe, path), strict=True):
        assert ours == (bare.losses[SAVED:], bare.grad_norms[SAVED:], SAVED, recipe.steps)


FP16 = replace(RECIPE, precision="16-mixed", steps=6)
SCALED = [
    # Gradients overflow in the last step before the save and in the first after it: only then the scale falls
    (Layout(), replace(FP16, initial_loss_scale=1.5 * 2.0**17, loss_scale_window=1), "none"),
    (
        Layout(dp=2, distributed_optimizer=True),
        replace(FP16, initial_loss_scale=2.0**10, loss_scale_window=3),
        "fully_reshardable",
    ),
]


@pytest.mark.parametrize(("layout", "recipe", "sharding"), SCALED, ids=lambda value: getattr(value, "id", ""))
def test_the_loss_scale_of_a_run_of_megatron_goes_on(
    layout: Layout, recipe: Recipe, sharding: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "iter_0000002")
    theirs = run_ranks(layout.world_size, train_theirs, layout, recipe, path, sharding, timeout=120)
    recipe = replace(recipe, initial_loss_scale=2.0)  # which the checkpoint's scale replaces
    for bare, ours in zip(theirs, run_ranks(layout.world_size, trace_of_ours, layout, recipe, path), strict=True):
        assert len(set(bare.loss_scales[SAVED:])) > 1
        assert ours.loss_scales == bare.loss_scales[SAVED:]
        assert (ours.losses, ours.grad_norms) == (bare.losses[SAVED:], bare.grad_norms[SAVED:])


DROPOUT = replace(RECIPE, options=(("hidden_dropout", 0.2), ("attention_dropout", 0.2)))
# On the CPU, pipeline stages do not share the default generator with Megatron's; only what its tracker draws is alike.
DRAWN = [
    pytest.param(Layout(), DROPOUT, False, marks=pytest.mark.thorough),
    (Layout(dp=2, distributed_optimizer=True), DROPOUT, False),
    pytest.param(Layout(dp=2), DROPOUT, True, marks=pytest.mark.thorough),
    (Layout(tp=2, dp=2), DROPOUT, True),
    (Layout(tp=2, sp=True, pp=2), replace(RECIPE, options=(("attention_dropout", 0.2),)), False),
]


@pytest.mark.parametrize(("layout", "recipe", "seeds_copies"), DRAWN, ids=lambda value: getattr(value, "id", ""))
def test_dropout_of_a_run_of_megatron_goes_on(
    layout: Layout, recipe: Recipe, seeds_copies: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "iter_0000002")
    sharding = "fully_reshardable" if layout.distributed_optimizer else "none"
    arguments = (layout, recipe, path, sharding, "Megatron-LM", seeds_copies)
    theirs = run_ranks(layout.world_size, train_theirs, *arguments, timeout=120)
    for bare, (ours, _) in zip(theirs, run_ranks(layout.world_size, resume_and_log, layout, recipe, path), strict=True):
        assert ours == (bare.losses[SAVED:], bare.grad_norms[SAVED:], SAVED, recipe.steps)


def test_random_states_of_another_layout_begin_anew_and_a_line_says_so(tmp_path: Path) -> None:
    path, theirs = str(tmp_path / "iter_0000002"), Layout(dp=2)
    bare = run_ranks(2, train_theirs, theirs, DROPOUT, path, "none", "Megatron-LM", True, timeout=120)[0]
    [(_, same), _] = run_ranks(2, resume_and_log, theirs, DROPOUT, path)
    assert same == ["resuming from Megatron's iteration 2, after 8 samples; random states continue"]
    [((losses, *_), split), _] = run_ranks(2, resume_and_log, Layout(tp=2), DROPOUT, path)
    assert split[0].endswith(
        "begin anew, because they were saved with tensor_model_parallel_size=1 and pipeline_model_parallel_size=1"
    )
    assert losses != bare.losses[SAVED:]
    [(_, alone)] = run_ranks(1, resume_and_log, Layout(), DROPOUT, path)
    assert alone[0].endswith("begin anew, because they were saved on 2 data-parallel ranks")


OTHER = [
    (Layout(dp=2, distributed_optimizer=True), "fully_reshardable", Layout(tp=2, sp=True)),
    pytest.param(Layout(), "none", Layout(dp=2, distributed_optimizer=True), marks=pytest.mark.thorough),
    (Layout(dp=2, distributed_optimizer=True), "dp_reshardable", Layout(distributed_optimizer=True)),
    (Layout(moe=True, dp=2, ep=2), "prefixed", Layout(moe=True, pp=2, dp=2, distributed_optimizer=True)),
]


def test_a_run_of_megatron_bridge_goes_on_bit_for_bit(tmp_path: Path) -> None:
    layout, path = Layout(dp=2, distributed_optimizer=True), str(tmp_path / "iter_0000002")
    kind = "fully_reshardable", "Megatron-Bridge"
    theirs = run_ranks(2, train_theirs, layout, RECIPE, path, *kind, timeout=120)
    for bare, ours in zip(theirs, run_ranks(2, resume_ours, layout, RECIPE, path), strict=True):
        assert ours == (bare.losses[SAVED:], bare.grad_norms[SAVED:], SAVED, RECIPE.steps)


@pytest.mark.parametrize(("theirs", "sharding", "ours"), OTHER, ids=lambda value: getattr(value, "id", value))
def test_a_run_of_megatron_goes_on_on_another_layout(
    theirs: Layout, sharding: str, ours: Layout, tmp_path: Path
) -> None:
    path = str(tmp_path / "iter_0000002")
    bare = run_ranks(theirs.world_size, train_theirs, theirs, RECIPE, path, sharding, timeout=120)[0]
    for _, norms, first, last in run_ranks(ours.world_size, resume_ours, ours, RECIPE, path):
        assert norms == pytest.approx(bare.grad_norms[SAVED:], rel=TOLERANCE)
        assert (first, last) == (SAVED, RECIPE.steps)


def test_weights_alone_are_read_from_a_checkpoint_with_chained_optimizers(tmp_path: Path) -> None:
    layout, path = Layout(moe=True, dp=2, ep=2), str(tmp_path / "iter_0000002")
    run_ranks(2, train_theirs, layout, RECIPE, path, "prefixed", timeout=120)
    assert all(run_ranks(2, start_from_theirs, layout, path))


@pytest.mark.parametrize(
    "ours", [Layout(dp=2), Layout(tp=2, sp=True, distributed_optimizer=True)], ids=lambda value: value.id
)
def test_state_by_buckets_is_read_by_the_same_buckets_only(ours: Layout, tmp_path: Path) -> None:
    layout, path = Layout(dp=2, distributed_optimizer=True), str(tmp_path / "iter_0000002")
    run_ranks(2, train_theirs, layout, RECIPE, path, "dp_reshardable", timeout=120)
    with pytest.raises(RanksFailedError, match=r"by the buckets .*use_distributed_optimizer=True and the tensor"):
        run_ranks(2, resume_ours, ours, RECIPE, path)


def test_a_checkpoint_without_arguments_goes_on_in_steps_and_begins_the_data_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_0000002")
    [bare] = run_ranks(1, train_theirs, Layout(), RECIPE, path, "none", "another program", timeout=120)
    [(losses, _, first, last)] = run_ranks(1, resume_ours, Layout(), RECIPE, path)
    assert (first, last, len(losses)) == (SAVED, SAVED + RECIPE.steps, RECIPE.steps)
    assert losses[0] < bare.losses[0]  # the same text with trained weights
