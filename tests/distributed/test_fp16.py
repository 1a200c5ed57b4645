# SPDX-License-Identifier: Apache-2.0
"""fp16 as a Lightning user meets it: the loss scale is logged, saved and restored, and schedules wait for real steps.

The numbers of a model built with ``pipeline()`` are measured against a bare Megatron loop in ``tests/parity``. A plain
module is measured here against Lightning's ``ddp`` with torch's ``GradScaler``. The precision is given as a plugin: on
a CPU Lightning's Trainer turns the string ``"16-mixed"`` into ``"bf16-mixed"``, with a warning.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn import functional

from lightning_mcore import MCoreGPT, MCorePrecision
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import (
    ADAMW,
    SHARDED,
    Memory,
    PlainNet,
    StagedNet,
    loader,
    make_trainer,
    run_fit,
    texts,
    weights,
)

pytestmark = pytest.mark.distributed

PIPELINED = {"pipeline_model_parallel_size": 2}
RMSPROP = partial(torch.optim.RMSprop, lr=1e-3)
TOO_HIGH = 2.0**30  # the toy's gradients overflow from about 2**18 on


@dataclass
class Steps:
    """For each step the loss scale after it, whether it was skipped, the learning rate and the weights of this rank."""

    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    num_skipped: int = 0


class Scale(pl.Callback):
    """Fills in :class:`Steps`."""

    def __init__(self) -> None:
        self.steps = Steps()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        self.steps.scales.append(optimizer.loss_scale)
        self.steps.skipped.append(optimizer.step_skipped)
        self.steps.rates.append(optimizer.param_groups[0]["lr"])
        self.steps.weights.append(torch.cat([value.flatten() for value in weights(pl_module).values()]).tolist())
        self.steps.num_skipped = optimizer.num_skipped_steps


def half(precision: Any = "16-mixed", **scaling: Any) -> MCorePrecision:
    return MCorePrecision(precision, **scaling)


# A plain module against ddp


@pytest.mark.parametrize("initial_scale", [2.0**8, TOO_HIGH])
@on_ranks(2, timeout=120)
def test_a_plain_module_trains_as_under_ddp_with_a_grad_scaler_through_overflows(initial_scale: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale, growth_interval=3)
    arguments: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    ddp, mcore = PlainNet(), PlainNet()
    expected = run_fit(ddp, "ddp", loader(128, 2), plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **arguments)
    plugin = half(initial_loss_scale=initial_scale, loss_scale_window=3, hysteresis=1)
    seen = run_fit(mcore, {"precision_plugin": plugin}, loader(128, 2), **arguments)
    skipped = [norm is None for norm in seen.grad_norms]
    assert any(skipped) == (initial_scale == TOO_HIGH)
    assert not all(skipped)
    assert seen.losses == expected.losses
    for ours, theirs, is_skipped in zip(seen.gradients, expected.gradients, skipped, strict=True):
        assert is_skipped or torch.allclose(ours, theirs, rtol=1e-6, atol=0)  # unscaled; measured: 0
    for ours, theirs in zip(weights(mcore).values(), weights(ddp).values(), strict=True):
        assert (ours - theirs).abs().max() < 1e-6  # measured: 6e-8


# Skipped steps


class Spoilt(PlainNet):
    """Its loss is infinite in the second step, on the last rank alone."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = PlainNet.training_step(self, batch, batch_idx)
        spoil = batch_idx == 1 and dist.get_rank() == dist.get_world_size() - 1
        return loss * torch.inf if spoil else loss


class SpoiltStaged(StagedNet):
    training_step = Spoilt.training_step


KINDS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "plain": (Spoilt, {}, "16-mixed"),
    "plain-sharded": (Spoilt, SHARDED, "16-mixed"),
    "plain-true": (Spoilt, {}, "16-true"),
    "plain-rmsprop-true": (partial(Spoilt, RMSPROP), {}, "16-true"),
    "staged": (SpoiltStaged, {}, "16-mixed"),
    "staged-sharded": (SpoiltStaged, SHARDED, "16-mixed"),
    "staged-rmsprop": (partial(SpoiltStaged, RMSPROP), {}, "16-mixed"),
    "pipelined": (SpoiltStaged, PIPELINED, "16-mixed"),
}


@on_ranks(2, timeout=180)
def test_one_rank_with_an_infinite_gradient_skips_the_step_of_all() -> None:
    for name, (make, strategy, precision) in KINDS.items():
        watch = Scale()
        plugin = half(precision, initial_loss_scale=2.0**10, hysteresis=1)
        run_fit(make(), {**strategy, "precision_plugin": plugin}, loader(16, 2), max_steps=4, callbacks=[watch])
        steps = watch.steps
        assert steps.skipped == [False, True, False, False], name
        assert steps.scales == [1024.0, 512.0, 512.0, 512.0], name
        moved = [a != b for a, b in zip(steps.weights, steps.weights[1:], strict=False)]
        assert moved == [False, True, True], name
        assert steps.num_skipped == 1


# Learning rates


class Scheduled:
    """Adds a schedule by step to a toy model."""

    schedule = "lambda"

    def configure_optimizers(self) -> Any:
        optimizer = ADAMW(self.parameters())  # type: ignore[attr-defined]
        if self.schedule == "lambda":
            scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        else:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ScheduledPlain(Scheduled, PlainNet):
    pass


class ScheduledStaged(Scheduled, StagedNet):
    pass


def rates_of_a_schedule(name: str) -> list[float]:
    """Return what torch's schedule gives after 0, 1, 2, ... real steps."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    module: Any = type("Alone", (Scheduled,), {"schedule": name, "parameters": lambda self: [parameter]})()
    (optimizer,), (config,) = module.configure_optimizers()
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(19):
        optimizer.step()
        config["scheduler"].step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@on_ranks(2, timeout=180)
def test_a_schedule_by_step_waits_for_steps_that_are_made_and_the_scale_is_logged() -> None:
    for make, strategy in ((ScheduledPlain, {}), (ScheduledStaged, PIPELINED)):
        for name in ("lambda", "onecycle"):
            module, watch, memory = make(), Scale(), Memory()
            module.schedule = name
            plugin = half(initial_loss_scale=2.0**24, hysteresis=1, loss_scale_window=4)
            trainer = make_trainer(
                {**strategy, "precision_plugin": plugin}, callbacks=[watch], logger=memory, max_steps=18
            )
            trainer.fit(module, loader(80, 2))
            steps = watch.steps
            made = [sum(not skipped for skipped in steps.skipped[: i + 1]) for i in range(len(steps.skipped))]
            assert steps.skipped[0]
            assert steps.skipped.index(False) < len(steps.skipped) - 4
            assert trainer.global_step == len(steps.skipped) == 18  # Lightning counts a skipped step like any other
            rates = rates_of_a_schedule(name)
            assert steps.rates == pytest.approx([rates[count] for count in made], rel=1e-12)
            assert memory.values("loss_scale") == steps.scales
            assert memory.values("skipped_steps") == [i + 1 - count for i, count in enumerate(made)]


@on_ranks(1)
def test_other_precisions_log_no_scale() -> None:
    memory = Memory()
    run_fit(PlainNet(), {}, loader(8, 2), logger=memory, precision="bf16-mixed")
    assert memory.values("train_loss")
    assert not memory.values("loss_scale") + memory.values("skipped_steps")


# Checkpoints


RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (PlainNet, {}),
    "plain-sharded": (PlainNet, SHARDED),
    "staged": (StagedNet, {}),
    "staged-sharded": (StagedNet, SHARDED),
    "pipelined": (StagedNet, PIPELINED),
}


@on_ranks(2, timeout=240)
def test_a_resumed_run_goes_on_at_its_scale(tmp_path: Path) -> None:
    for name, (make, strategy) in RESUMED.items():
        runs = []
        for steps, start in ((10, None), (5, None), (10, f"{name}.ckpt")):
            watch, module = Scale(), make()
            plugin = half(initial_loss_scale=2.0**19, hysteresis=2, loss_scale_window=3)
            arguments: dict[str, Any] = {"callbacks": [watch], "max_steps": steps, "use_distributed_sampler": False}
            trainer = make_trainer({**strategy, "precision_plugin": plugin}, **arguments)
            trainer.fit(module, loader(2, 2), ckpt_path=start and str(tmp_path / start))  # an epoch is a step
            if steps == 5:
                trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
            runs.append(watch.steps)
        whole, _, resumed = runs
        expected = Steps(whole.scales[5:], whole.skipped[5:], whole.rates[5:], whole.weights[5:], whole.num_skipped)
        assert resumed == expected, name
        assert len(set(expected.scales)) > 1, f"{name}: the scale moves"
        assert 0 < expected.num_skipped < 10


# What else steps


class Adversaries(PlainNet):
    """Two optimizers that take turns by hand; the second learns the weights of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = functional.mse_loss(self.predictions(batch).float(), batch["y"].float())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [ADAMW(self.net[0].parameters()), ADAMW(self.net[2].parameters())]


def manual(precision: Any) -> tuple[list[float], float]:
    ddp, mcore, memory = Adversaries(), Adversaries(), Memory()
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_HIGH) if precision == "16-mixed" else None
    run_fit(ddp, "ddp", loader(128, 2), plugins=[MixedPrecision(precision, "cpu", scaler)])
    scaling = {"initial_loss_scale": TOO_HIGH, "hysteresis": 1} if precision == "16-mixed" else {}
    run_fit(mcore, {"precision_plugin": half(precision, **scaling)}, loader(128, 2), logger=memory)
    pairs = zip(weights(ddp).values(), weights(mcore).values(), strict=True)
    return memory.values("loss_scale"), max((a - b).abs().max().item() for a, b in pairs)


def test_two_optimizers_by_hand_share_one_scale_as_under_ddp() -> None:
    for scales, difference in run_ranks(2, manual, "16-mixed"):
        assert len(scales) == 32
        assert scales[0] == TOO_HIGH / 4, "both have overflowed"
        assert scales[-1] < 2.0**18
        assert difference < 1e-6  # measured: 0


def test_autocast_sees_the_weights_that_a_step_by_hand_has_moved() -> None:
    for _, difference in run_ranks(2, manual, "bf16-mixed"):
        assert difference < 1e-6  # measured: 0; with a cache of casted weights 1e-2


@on_ranks(1)
def test_an_optimizer_that_evaluates_its_closure_again_is_refused() -> None:
    with refuses(TypeError, "LBFGS evaluates the step several times, and loss scaling may skip a step"):
        run_fit(PlainNet(partial(torch.optim.LBFGS, lr=0.1)), {"precision_plugin": half()}, loader(8, 2))


# The gradient norm in the logs


@on_ranks(2, timeout=120)
def test_a_skipped_step_logs_an_infinite_gradient_norm_also_just_after_a_resume(tmp_path: Path) -> None:
    data, found = texts(32, 8, 64, batch_size=2), []
    for steps, start in ((3, None), (24, f"{tmp_path}/three.ckpt")):
        module = MCoreGPT(64, 8, {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2})
        watch, memory = Scale(), Memory()
        plugin = half(initial_loss_scale=2.0**24, loss_scale_window=2, hysteresis=1)
        arguments = {"max_steps": steps, "callbacks": [watch], "logger": memory}
        trainer = make_trainer({**PIPELINED, "precision_plugin": plugin}, **arguments)
        trainer.fit(module, data, ckpt_path=start)
        if start is None:
            trainer.save_checkpoint(f"{tmp_path}/three.ckpt")
        norms = [row.get("grad_norm", -1.0) for row in memory.rows]
        found.append(list(zip(watch.steps.skipped, norms, strict=True)))
    first, second = found
    for skipped, norm in (*first, *second):
        assert skipped == (norm == math.inf), (first, second)
        assert norm > 0
    assert first[-1][0]
    assert second[0][0]
    assert any(before and not after for (before, _), (after, _) in pairwise(second))
    assert any(after and not before for (before, _), (after, _) in pairwise(second))
