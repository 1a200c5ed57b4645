# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks that share parameters, gradients and optimizer state (Megatron's FSDP).

That such a run computes what one rank and a bare Megatron loop do is in ``tests/parity``, that its checkpoints go to
and from other layouts in ``test_reshard.py``. Here is what is held on a rank, what a user sees of the parameters, and
that a run resumes in the middle of an epoch bit for bit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_layer import TransformerLayer

from lightning_mcore import MCoreStrategy
from lightning_mcore.parallel.fully_sharded import FullyShardedChunk
from tests.parity.lightning_loop import TinyGPT
from tests.support.layouts import Layout
from tests.support.live_memory import storages
from tests.support.ranks import run_ranks
from tests.support.sentences import refuses
from tests.support.tiny import Recipe
from tests.support.toy import make_trainer

pytestmark = pytest.mark.distributed

SHARDED = Layout(dp=2, sharding="optim_grads_params")
RECIPE = Recipe(steps=4, global_batch_size=4)


class Looks(pl.Callback):
    """Calls a function before each optimizer step, and keeps what it returns."""

    def __init__(self, look: Callable[[pl.Trainer], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(self.look(trainer))


class Losses(pl.Callback):
    """Keeps the loss and the gradient norm of each step, as text."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 1:
            self.seen.append(f"{outputs['loss'].item()!r} {trainer.optimizers[0].grad_norm!r}")  # type: ignore[attr-defined]


def fit(layout: Layout, callbacks: list[pl.Callback], path: str | None = None, **options: Any) -> pl.Trainer:
    """Train the tiny GPT, two batches to a step."""
    strategy = MCoreStrategy(**layout.strategy_arguments, **options.pop("strategy", {}))
    options = {"max_epochs": 1, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2} | options
    trainer = make_trainer(strategy, callbacks=callbacks, use_distributed_sampler=False, **options)
    trainer.fit(TinyGPT(layout, RECIPE), ckpt_path=path)
    return trainer


# ---- memory


def bytes_held(trainer: pl.Trainer) -> dict[str, int]:
    """Return what a rank holds between backward and step: parameters, gradients, and the optimizer's state."""
    chunk: Any = trainer.strategy._chunks.wrapped[0]  # type: ignore[attr-defined]
    shown = storages(chunk.module.parameters())
    state = [value for values in trainer.optimizers[0].state.values() for value in values.values()]
    if isinstance(chunk, FullyShardedChunk):
        layers = [layer for layer in chunk.modules() if isinstance(layer, TransformerLayer)]
        shown = storages(parameter for layer in layers for parameter in layer.parameters())  # 0.19 keeps the others
        shown |= storages(shard.to_local() for _, shard in chunk.shards)
        return {
            "parameters": sum(shown.values()),
            "gradients": sum(storages(chunk.gradients).values()),
            "state": sum(storages(value.to_local() for value in state if value.dim()).values()),
        }
    gradients = storages(buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
    return {
        "parameters": sum(shown.values()),
        "gradients": sum(gradients.values()),
        "state": sum(storages(value for value in state if value.dim()).values()),
    }


def held(layout: Layout) -> tuple[dict[str, int], int]:
    """Return what this rank holds in the last step, and the number of parameters of the whole model."""
    looks = Looks(bytes_held)
    trainer = fit(layout, [looks])
    return looks.seen[-1], sum(p.numel() for p in trainer.lightning_module.parameters())  # type: ignore[union-attr]


def test_ranks_hold_their_share_of_parameters_gradients_and_state() -> None:
    own, whole = zip(*run_ranks(2, held, SHARDED), strict=True)
    distributed, _ = zip(*run_ranks(2, held, Layout(dp=2, distributed_optimizer=True)), strict=True)
    (count,) = set(whole)
    for rank in distributed:
        assert rank["parameters"] >= 4 * count
        assert rank["gradients"] >= 4 * count
    for what, each in (("parameters", 4), ("gradients", 4), ("state", 8)):
        total = sum(rank[what] for rank in own)
        assert each * count <= total <= 1.05 * each * count, what  # together once, and padding
        assert max(rank[what] for rank in own) <= 0.55 * each * count, what


# ---- what a user sees


def seen_parameters(trainer: pl.Trainer) -> tuple[set[str], set[tuple[int, ...]]]:
    module: Any = trainer.lightning_module
    kinds = {type(value).__name__ for value in [*module.parameters(), *module.state_dict().values()]}
    return kinds, {tuple(parameter.shape) for parameter in module.parameters()}


class Whole(pl.Callback):
    """Keeps the sums of the parameters at the end of the epoch, as their norm would read them."""

    def __init__(self) -> None:
        self.sum = 0.0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sum = sum(parameter.detach().double().abs().sum().item() for parameter in pl_module.parameters())


class Fails(pl.Callback):
    """Raises in the second step."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            raise ValueError("stop")


def look_around(layout: Layout) -> tuple[Any, float, float, bool]:
    looks, whole = Looks(seen_parameters), Whole()
    module: Any = fit(layout, [looks, whole]).lightning_module
    after = sum(parameter.detach().double().abs().sum().item() for parameter in module.parameters())
    failing = TinyGPT(layout, RECIPE)
    trainer = make_trainer(MCoreStrategy(**layout.strategy_arguments), callbacks=[Fails()], max_epochs=1)
    with pytest.raises(ValueError, match="stop"):
        trainer.fit(failing)
    lost = all(parameter.isnan().all() for parameter in failing.parameters())
    if layout.sharding:
        with refuses(RuntimeError, "cannot be saved"):
            trainer.save_checkpoint("after.ckpt")
    return looks.seen[0], whole.sum, after, lost


def test_modules_show_plain_parameters_that_are_whole_when_an_epoch_and_a_run_end() -> None:
    distributed = Layout(dp=2, distributed_optimizer=True)
    [(_, expected, _, _), _] = run_ranks(2, look_around, distributed)
    [(plain, *_), _] = run_ranks(2, look_around, distributed)
    for (kinds, shapes), at_end, after, lost in run_ranks(2, look_around, SHARDED):
        assert (kinds, shapes) == plain
        assert at_end == after == pytest.approx(expected, rel=1e-6)
        assert lost  # a rank has a part only, and the others may have died


# ---- resume


def whole_and_resumed(layout: Layout, folder: str, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the losses of a run, and those of one that goes on from a save in the middle of the epoch."""
    whole, resumed = Losses(), Losses()
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(layout, [whole, save], enable_checkpointing=True, **options)
    fit(layout, [resumed], path=f"{folder}/step=2.ckpt", **options)
    return whole.seen, resumed.seen


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_goes_on_from_the_middle_of_an_epoch_bit_for_bit(tmp_path: Any, precision: str) -> None:
    options = {"precision": precision, "strategy": {"loss_chunk_size": 12}}
    for whole, resumed in run_ranks(2, whole_and_resumed, SHARDED, str(tmp_path), options, timeout=120):
        assert len(set(whole)) > 2
        assert resumed == whole[len(whole) - len(resumed) :]


# ---- random numbers


def random_states(layout: Layout) -> list[bytes]:
    """Return the random states from which this rank draws dropout, of activations that are split and that are not."""
    looks = Looks(lambda _: [state.numpy().tobytes() for state in get_cuda_rng_tracker().get_states().values()])
    fit(layout, [looks])
    states: list[bytes] = looks.seen[0]
    return states


def test_tensor_parallel_ranks_draw_as_without_sharding() -> None:
    layout = Layout(dp=2, tp=2, sp=True)
    expected = run_ranks(4, random_states, layout)
    assert len({tuple(states) for states in expected}) > 1  # Megatron would give all ranks those of the first
    assert run_ranks(4, random_states, replace(layout, sharding="optim_grads_params")) == expected


# ---- wrong gradients


class Infinite(TinyGPT):
    """Has a loss without end on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_rank == 1 else loss


def checks_gradients() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    checked = {"ddp_config": DistributedDataParallelConfig(check_for_nan_in_grad=True)}
    strategy = MCoreStrategy(**SHARDED.strategy_arguments, **checked)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(RuntimeError, match="the gradients contain NaN or infinity"):
        trainer.fit(Infinite(SHARDED, RECIPE))


def test_infinite_gradients_end_the_run_on_every_rank() -> None:
    run_ranks(2, checks_gradients)
