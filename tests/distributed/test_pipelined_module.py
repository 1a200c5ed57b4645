# SPDX-License-Identifier: Apache-2.0
"""A module built with ``pipeline()`` trains on two ranks as it does under ``strategy="auto"`` on one.

Weights, gradient norms and the epoch's mean loss agree; and every counter and hook of Lightning is where it is without
us, because its loops are its own. (The loss of a *step* is the mean over its window here, and that of the last batch in
Lightning.)
"""

import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import (
    ADAMW,
    CP2,
    OVERLAPPED,
    PP2,
    SHARDED,
    VP2,
    MakeOptimizer,
    Samples,
    StagedNet,
    Watch,
    loader,
    make_trainer,
    run_fit,
    two_groups,
    weights,
)

pytestmark = pytest.mark.distributed


SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM: MakeOptimizer = partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1)
RMSPROP: MakeOptimizer = partial(torch.optim.RMSprop, lr=1e-3)
BY_NORM = {"gradient_clip_val": 0.5}


class Net(StagedNet):
    """Logs the loss once for each epoch, and moves the learning rate at every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.predictions(batch).float() - batch["y"]).square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on two ranks and the one on one rank that it equals.

    Args:
        strategy: Arguments of MCoreStrategy.
        optimizer: What makes the optimizer.
        trainer: More arguments of the trainer, on both.
        data: How many samples, how many in a batch.
        accumulate: Batches of a step on one rank and on two.
    """

    strategy: dict[str, Any]
    optimizer: MakeOptimizer = ADAMW
    trainer: dict[str, Any] = field(default_factory=dict)
    data: tuple[int, int] = (13, 2)
    accumulate: tuple[int, int] = (3, 3)


RUNS: dict[str, Run] = {
    "pp2": Run(strategy=PP2),
    "pp2-at-once": Run(strategy=PP2, accumulate=(1, 1)),
    "pp2-sgd": Run(strategy=PP2, optimizer=SGD),
    "pp2-adam": Run(strategy=PP2, optimizer=ADAM),
    "pp2-rmsprop": Run(strategy=PP2, optimizer=RMSPROP),
    "pp2-groups": Run(strategy=PP2, optimizer=two_groups),
    "pp2-by-norm": Run(strategy=PP2, trainer=BY_NORM),
    "pp2-by-norm-rmsprop": Run(strategy=PP2, optimizer=RMSPROP, trainer=BY_NORM),
    "pp2-by-value-rmsprop": Run(
        strategy=PP2, optimizer=RMSPROP, trainer={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    ),
    "pp2-sharded": Run(strategy={**PP2, **SHARDED}, trainer=BY_NORM),
    "pp2-rows": Run(strategy={**PP2, "micro_batch_size": 2}, data=(24, 8), accumulate=(1, 1)),
    "pp2-rows-twice": Run(strategy={**PP2, "micro_batch_size": 2}, data=(30, 6), accumulate=(2, 2)),
    "pp2-uneven-rows": Run(strategy={**PP2, "micro_batch_size": 3}, data=(24, 8), accumulate=(2, 2)),
    "vp2": Run(strategy=VP2, accumulate=(2, 2)),
    "vp2-short-window": Run(strategy=VP2, accumulate=(4, 4)),
    "vp2-overlapped": Run(strategy={**VP2, **OVERLAPPED}, accumulate=(2, 2), trainer=BY_NORM),
    "vp2-rows": Run(strategy={**VP2, "micro_batch_size": 2}, data=(26, 8), accumulate=(1, 1)),
    "cp2": Run(strategy=CP2),
    "cp2-overlapped": Run(strategy={**CP2, **OVERLAPPED}, trainer=BY_NORM),
    "dp2": Run(strategy={}, data=(24, 2), accumulate=(2, 1)),
    "dp2-accumulated": Run(strategy={}, data=(40, 2), accumulate=(4, 2)),
    "dp2-overlapped": Run(strategy=OVERLAPPED, data=(40, 2), accumulate=(4, 2), trainer=BY_NORM),
}


def fit(run: Run, strategy: Any, accumulate: int) -> dict[str, Any]:
    """Train on this rank."""
    module, watch = Net(run.optimizer), Watch()
    trainer = make_trainer(
        strategy,
        callbacks=[watch],
        accumulate_grad_batches=accumulate,
        max_epochs=2,
        use_distributed_sampler=False,  # in order, so that a step has the same samples on one rank and on two
        **run.trainer,
    )
    copies = run.accumulate[0] // run.accumulate[1] if strategy != "auto" else 1
    sampler = (
        DistributedSampler(Samples(run.data[0]), copies, dist.get_rank() % copies, shuffle=False)
        if copies > 1
        else None
    )
    trainer.fit(module, loader(*run.data, sampler=sampler))
    norms = watch.seen.grad_norms
    return {
        "weights": weights(module),
        "norms": [g.norm().item() for g in watch.seen.gradients] if strategy == "auto" else norms,
        "loss": float(trainer.callback_metrics["train_loss"]),
        "steps": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


def fit_all(ours: bool) -> dict[str, dict[str, Any]]:
    """Train every run on this rank."""
    if ours:
        return {name: fit(run, run.strategy, run.accumulate[1]) for name, run in RUNS.items()}
    return {name: fit(run, "auto", run.accumulate[0]) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, dict[str, Any]]:
    return run_ranks(1, fit_all, False, timeout=120, open_group=False)[0]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, fit_all, True, timeout=180)


@pytest.mark.parametrize("name", RUNS)
def test_trains_as_under_lightning_on_one_rank(one_rank: Any, two_ranks: Any, name: str) -> None:
    expected, ranks = one_rank[name], [rank[name] for rank in two_ranks]
    whole = ranks[0]["weights"] | ranks[1]["weights"]
    assert whole.keys() == expected["weights"].keys()
    for parameter, value in whole.items():  # the spread that was measured: 1.2e-7
        assert (value - expected["weights"][parameter]).abs().max().item() <= 5e-7, parameter
    for rank in ranks:
        assert rank["rate"] == expected["rate"]
        assert rank["loss"] == ranks[0]["loss"]
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert rank["norms"] == ranks[0]["norms"]
        assert len(rank["norms"]) == rank["steps"] == expected["steps"]
        if rank["norms"][0] is not None:  # an optimizer that Megatron does not rebuild measures it for clipping only
            assert rank["norms"] == pytest.approx(expected["norms"], rel=2e-6)


# Counters and hooks


def recorder(name: str) -> Any:
    def hook(self: Any, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        progress = (trainer.current_epoch, loop.batch_idx, loop._batches_that_stepped, trainer.global_step)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.events.append((name, *progress, *rates))

    return hook


class Events(pl.Callback):
    """Keeps every hook that fires, in order, with the counters and the learning rate at that moment."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []


for _name in [name for name in dir(pl.Callback) if name.startswith("on_") and "checkpoint" not in name]:
    setattr(Events, _name, recorder(_name))


class ModuleHooks(Net):
    """Keeps the hooks of a module that a user may override."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("optimizer_step", args[1]))
        super().optimizer_step(*args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append(("optimizer_zero_grad", batch_idx))
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_gradient_clipping(self, optimizer: Any, *values: Any, **named: Any) -> None:
        self.calls.append(("configure_gradient_clipping", (values, named)))
        self.clip_gradients(optimizer, 0.5, "norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append(("lr_scheduler_step", scheduler.last_epoch))
        super().lr_scheduler_step(scheduler, metric)


LOOPS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 2, "accumulate_grad_batches": 4},
    "steps": {"max_steps": 5, "accumulate_grad_batches": 2},
    "validation": {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 2},
    "sanity-check": {"max_epochs": 1, "accumulate_grad_batches": 2, "num_sanity_val_steps": 2},
    "fractions": {"max_epochs": 2, "limit_train_batches": 0.6, "limit_val_batches": 0.5, "accumulate_grad_batches": 2},
    "overfit": {"max_epochs": 3, "overfit_batches": 2, "accumulate_grad_batches": 2},
    "stopped": {"max_epochs": -1, "max_time": {"seconds": 0}, "min_steps": 3, "accumulate_grad_batches": 2},
}


def loops(strategy: Any, with_schedule: bool) -> dict[str, Any]:
    """Fit with every setting of the loops and return what fired when."""
    results = {name: fired(strategy, Events(), **arguments) for name, arguments in LOOPS.items()}
    if with_schedule:
        results["schedule"] = fired(strategy, Events(), GradientAccumulationScheduler({0: 2, 1: 4, 2: 1}), max_epochs=3)
    return results


def fired(strategy: Any, events: Events, *callbacks: pl.Callback, **arguments: Any) -> Any:
    """Return events, calls and final counters of one fit."""
    module = ModuleHooks()
    trainer = make_trainer(strategy, use_distributed_sampler=False, callbacks=[events, *callbacks], **arguments)
    trainer.fit(module, loader(14, 2), loader(8, 2))
    return events.events, module.calls, trainer.global_step, trainer.estimated_stepping_batches


@pytest.mark.parametrize("strategy", [pytest.param(PP2, marks=pytest.mark.thorough), VP2], ids=["pp2", "vp2"])
def test_every_hook_and_counter_of_lightning_is_where_it_is_without_us(strategy: dict[str, Any]) -> None:
    any_window = strategy is PP2  # an interleaved schedule needs windows that fill it
    [expected] = run_ranks(1, loops, "auto", any_window, open_group=False)
    for ours in run_ranks(2, loops, strategy, any_window):
        assert len(ours) == len(LOOPS) + any_window
        for name, (events, calls, *counters) in ours.items():
            assert events == expected[name][0], name
            assert calls == expected[name][1], name
            assert counters == list(expected[name][2:]), name
            assert {"on_before_backward", "on_after_backward", "on_before_zero_grad"} <= {event[0] for event in events}


class Holding(Net):
    """Returns more than its loss, and counts how much of it earlier microbatches still hold."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self.predictions(batch)
        self.alive.append(sum(reference() is not None for reference in self.returned))
        loss = (predictions.float() - batch["y"]).square().mean()
        self.returned += [weakref.ref(loss), weakref.ref(predictions)]
        return {"loss": loss, "predictions": predictions, "first": float(batch["x"].flatten()[0])}


def alive_and_last(strategy: dict[str, Any]) -> tuple[list[int], Any]:
    module, seen = Holding(), []

    class Last(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs.get("first"), float(batch["x"].flatten()[0]), set(outputs)))

    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=8, callbacks=[Last()])
    trainer.fit(module, loader(16, 2))
    return module.alive, seen[-1]


def test_what_a_step_returned_is_kept_of_the_last_microbatch_alone() -> None:
    first, last = run_ranks(2, alive_and_last, PP2)
    assert first[0] == []  # its steps end where the model is called
    assert len(last[0]) == 8
    assert max(last[0]) <= 2  # of the microbatch before, while the next one replaces it
    returned, expected, names = last[1]
    assert returned == expected
    assert names == {"loss", "predictions", "first"}


class Reading(nn.Linear):
    """A layer that is never called: whoever calls it computes with its weights."""

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class ReadsLayers(StagedNet):
    """Reads the weights of its layers without calling these."""

    def build_chunk(self, **where: Any) -> nn.Module:
        chunk = super().build_chunk(**where)
        for child in chunk.modules():
            if isinstance(child, nn.Linear):
                child.__class__ = Reading
        return chunk


@pytest.mark.parametrize("layout", [{}, CP2], ids=["dp2", "cp2"])
@on_ranks(2)
def test_weights_that_are_read_without_a_call_are_gathered_in_time(layout: dict[str, Any]) -> None:
    found = []
    for strategy in (SHARDED, {**OVERLAPPED, "ddp_config": DistributedDataParallelConfig(bucket_size=1)}):
        module = ReadsLayers()
        trainer = make_trainer({**layout, **strategy}, accumulate_grad_batches=2)
        trainer.fit(module, loader(24, 2))
        found.append(weights(module))
    whole, overlapped = found
    assert all(torch.equal(whole[name], overlapped[name]) for name in whole)


@on_ranks(2)
def test_a_run_may_resume_with_the_short_batch_that_ends_an_epoch(tmp_path: Path) -> None:
    """Its microbatch does not fill a group of the interleaved schedule, which is no fault of the settings there."""
    path = str(tmp_path / "short.ckpt")
    settings = {**VP2, "micro_batch_size": 2}
    pl.seed_everything(1, verbose=False)
    whole = run_fit(StagedNet(), settings, loader(10, 4))
    pl.seed_everything(1, verbose=False)
    module = StagedNet()
    trainer = make_trainer(settings, max_steps=2)
    trainer.fit(module, loader(10, 4))
    trainer.save_checkpoint(path)
    rest = run_fit(StagedNet(), settings, loader(10, 4), ckpt_path=path)
    assert [len(batch) for batch in whole.batches] == [4, 4, 2]
    assert rest.batches == whole.batches[2:]
    assert rest.losses == whole.losses[2:]


class TurnedNet(StagedNet):
    """Hands on activations whose last two dimensions are swapped in memory."""

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        chunk = super().build_chunk(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if not post_process:
            chunk.register_forward_hook(lambda _, __, hidden: hidden.transpose(1, 2).contiguous().transpose(1, 2))
        return chunk


@on_ranks(2)
def test_a_stage_may_return_a_tensor_that_is_not_contiguous() -> None:
    trained = []
    for net in (StagedNet(), TurnedNet()):
        make_trainer(PP2, max_steps=2, limit_val_batches=1).fit(net, loader(4, 2), loader(4, 2))
        trained.append(list(net.parameters()))
    for expected, found in zip(*trained, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
