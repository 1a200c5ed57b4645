# SPDX-License-Identifier: Apache-2.0
"""An untouched LightningModule under MCoreStrategy trains as it does under ``strategy="ddp"``.

Two ranks, an accumulation window that does not divide the epoch, two epochs. Where Megatron does nothing else than
torch's DistributedDataParallel the numbers are the same bit for bit; where it does, the spread that was measured stands
beside the tolerance.
"""

import contextlib
import copy
import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn
from torch.nn import functional

from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.toy import (
    ADAMW,
    OVERLAPPED,
    SEQ_LENGTH,
    SHARDED,
    Batch,
    MakeOptimizer,
    Memory,
    PlainNet,
    Samples,
    Seen,
    StagedNet,
    fill,
    loader,
    make_trainer,
    run_fit,
    two_groups,
    weights,
)

pytestmark = pytest.mark.distributed

SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.1)
NESTEROV: MakeOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
ADAM: MakeOptimizer = partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1)
RMSPROP: MakeOptimizer = partial(torch.optim.RMSprop, lr=1e-2)
LBFGS: MakeOptimizer = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)

BY_NORM = {"gradient_clip_val": 0.05}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Scheduled(PlainNet):
    """Moves learning rate and betas at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Frozen(PlainNet):
    """Does not train its first layer."""

    def __init__(self, make_optimizer: MakeOptimizer = ADAMW) -> None:
        super().__init__(make_optimizer)
        self.net[0].requires_grad_(False)


class Adversaries(PlainNet):
    """Two networks, two optimizers, manual optimization: each learns at the other's expense."""

    def __init__(self, make_optimizer: MakeOptimizer = ADAMW) -> None:
        super().__init__(make_optimizer)
        self.automatic_optimization = False
        self.rival = nn.Linear(1, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        made = self.predictions(batch).float()
        loss = functional.mse_loss(made, batch["y"]) - self.rival(made).float().mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        rival_loss = (self.rival(made.detach()).float() - self.rival(batch["y"]).float()).square().mean()
        if batch_idx % 2:  # its gradients of two batches
            self.manual_backward(rival_loss)
            second.step()
            second.zero_grad()
        else:
            self.manual_backward(rival_loss)
        self.untoggle_optimizer(second)
        self.log("train_loss", loss + rival_loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters()), torch.optim.SGD(self.rival.parameters(), lr=0.05)


class Surgeon(PlainNet):
    """Puts gradients of its own in the place of those that it is shown."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        first, *_, last = (layer for layer in self.net if isinstance(layer, nn.Linear))
        first.weight.grad = first.weight.grad * 0.5
        last.bias.grad = None  # it is not stepped this time, nor does it decay


class Forgetful(PlainNet):
    """Forgets some of the gradients while they accumulate."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to compare.

    Args:
        module: The class of the module.
        optimizer: What makes its optimizer.
        precision: Of the trainer.
        trainer: More arguments of the trainer.
        strategy: Arguments of MCoreStrategy.
        reference: Lightning's strategy that it is compared with.
        spread: Largest difference of losses, gradients and weights; 0 is bit for bit.
    """

    module: type[PlainNet] = PlainNet
    optimizer: MakeOptimizer = ADAMW
    precision: str = "32-true"
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    reference: str = "ddp"
    spread: float = 0.0


AT_ONCE = {"accumulate_grad_batches": 1}
RUNS: dict[str, Run] = {
    "sgd": Run(optimizer=SGD),
    "nesterov": Run(optimizer=NESTEROV),
    "adam": Run(optimizer=ADAM),
    "adamw": Run(),
    "rmsprop": Run(optimizer=RMSPROP),
    "lbfgs": Run(optimizer=LBFGS, trainer=AT_ONCE),
    "groups": Run(optimizer=two_groups),
    "at-once": Run(trainer=AT_ONCE),
    "scheduled": Run(module=Scheduled),
    "frozen": Run(module=Frozen),
    "surgeon": Run(module=Surgeon),
    "forgetful": Run(module=Forgetful),
    "by-value-sgd": Run(optimizer=SGD, trainer=BY_VALUE),
    "by-value-adamw": Run(trainer=BY_VALUE),
    # Megatron sums the squares of a norm in another order; measured: 1.2e-7.
    "by-norm-sgd": Run(optimizer=SGD, trainer=BY_NORM, spread=5e-7),
    "by-norm-adamw": Run(trainer=BY_NORM, spread=5e-7),
    "by-norm-rmsprop": Run(optimizer=RMSPROP, trainer=BY_NORM, spread=5e-7),
    "mixed-sgd": Run(precision="bf16-mixed", optimizer=SGD),
    "mixed-adamw": Run(precision="bf16-mixed"),
    "mixed-by-norm": Run(precision="bf16-mixed", trainer=BY_NORM, spread=5e-7),
    "sharded-adam": Run(optimizer=ADAM, strategy=SHARDED),
    "sharded-groups": Run(optimizer=two_groups, strategy=SHARDED),
    "sharded-scheduled": Run(module=Scheduled, strategy=SHARDED),
    "sharded-by-value": Run(strategy=SHARDED, trainer=BY_VALUE),
    "sharded-by-norm": Run(strategy=SHARDED, trainer=BY_NORM, spread=5e-7),
    "sharded-frozen": Run(module=Frozen, strategy=SHARDED),
    "sharded-mixed": Run(precision="bf16-mixed", strategy=SHARDED),
    "overlap-of-gradients": Run(strategy={"overlap_grad_reduce": True}),
    "overlapped": Run(strategy=OVERLAPPED),
    "overlapped-at-once": Run(strategy=OVERLAPPED, trainer=AT_ONCE),
    "overlapped-groups": Run(optimizer=two_groups, strategy=OVERLAPPED),
    "manual": Run(module=Adversaries, trainer=AT_ONCE, reference="ddp_find_unused_parameters_true", spread=5e-7),
}


def fit(run: Run, strategy: Any) -> tuple[Seen, dict[str, Tensor]]:
    """Train on this rank; return what the module saw and its weights."""
    torch.manual_seed(0)
    module = run.module(run.optimizer)
    arguments = {"accumulate_grad_batches": 3, "max_epochs": 2, "precision": run.precision, **run.trainer}
    seen = run_fit(module, strategy, loader(28, 2), loader(5, 2), **arguments)  # validation moves its metrics too
    return seen, weights(module)


THOROUGH = (  # what they combine is in runs that stay
    *("nesterov", "adam", "at-once", "by-value-sgd", "by-norm-sgd", "by-norm-rmsprop", "mixed-sgd", "sharded-adam"),
    *("sharded-groups", "sharded-scheduled", "sharded-by-value", "sharded-mixed", "overlap-of-gradients"),
)
in_one_process = pytest.mark.xdist_group("plain_module-pairs")


def fit_both(names: list[str]) -> dict[str, Any]:
    """Train some runs under Lightning's strategy and under ours, in one process."""
    return {name: (fit(RUNS[name], RUNS[name].reference), fit(RUNS[name], RUNS[name].strategy)) for name in names}


@functools.cache
def pairs(thorough: bool) -> list[dict[str, Any]]:
    """Return what each rank saw of the runs of a mark, which are trained once."""
    names = [name for name in RUNS if (name in THOROUGH) == thorough]
    ranks: list[dict[str, Any]] = run_ranks(2, fit_both, names, timeout=180)
    return ranks


@in_one_process
@pytest.mark.parametrize("name", thorough_but(RUNS, *RUNS.keys() - {*THOROUGH}))
def test_trains_as_under_ddp(name: str) -> None:
    run, ranks = RUNS[name], pairs(name in THOROUGH)
    for rank in ranks:
        (expected, expected_weights), (seen, ours) = rank[name]
        assert seen.batches == expected.batches
        if not run.trainer:
            assert len(seen.losses) == 6  # windows of 3, 3 and 1 batches, twice
        for kind in ("losses", "logged"):
            numbers, reference = torch.tensor(getattr(seen, kind)), torch.tensor(getattr(expected, kind))
            assert numbers.shape == reference.shape
            assert largest_difference(numbers, reference) <= run.spread, kind
        if not run.strategy.get("use_distributed_optimizer"):
            assert len(seen.gradients) == len(expected.gradients) > 0
            for gradient, reference in zip(seen.gradients, expected.gradients, strict=True):
                assert gradient.numel() > 0
                assert largest_difference(gradient, reference) <= run.spread, "gradients"
        assert ours.keys() == expected_weights.keys()
        for parameter, value in ours.items():
            assert largest_difference(value, expected_weights[parameter]) <= run.spread, parameter
            assert torch.equal(value, ranks[0][name][1][1][parameter]), f"{parameter} differs between the ranks"


def largest_difference(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item() if first.numel() else 0.0


@in_one_process
@pytest.mark.parametrize("name", ["by-norm-adamw", "mixed-by-norm", "sharded-by-norm"])
def test_clipping_by_norm_is_exercised_and_the_norm_is_shown(name: str) -> None:
    assert RUNS[name].trainer is BY_NORM
    seen = pairs(False)[0][name][1][0]
    assert min(seen.grad_norms) > BY_NORM["gradient_clip_val"]
    if seen.gradients[0].numel():
        shown = [gradient.norm().item() for gradient in seen.gradients]
        assert seen.grad_norms == pytest.approx(shown, rel=1e-6)


# Gradients are forgotten between steps


class OneSample(Samples):
    """The same sample, again and again."""

    def __getitem__(self, index: int) -> Batch:
        return super().__getitem__(0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@on_ranks(2, timeout=120)
def test_every_step_begins_without_the_gradients_of_the_last(precision: str) -> None:
    data = torch.utils.data.DataLoader(OneSample(16), batch_size=2)
    still: MakeOptimizer = partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0)
    results: dict[str, list[Any]] = {}
    for accumulate in (1, 2):
        arguments = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1e3}
        seen = run_fit(PlainNet(still), {}, data, **arguments)
        results[f"plain-{accumulate}"] = [gradient.tolist() for gradient in seen.gradients]
        for kind in (PlainNet, StagedNet):
            for strategy in ({}, SHARDED, OVERLAPPED):
                seen = run_fit(kind(still), strategy, data, **arguments)
                results[f"{kind.__name__}-{len(strategy)}-{accumulate}"] = list(seen.grad_norms)
    assert len(results) == 14
    for name, steps in results.items():
        assert len(steps) >= 2
        assert all(step == steps[0] for step in steps), name
        assert steps[0], name


# Parameters in bf16


@on_ranks(2)
def test_parameters_in_bf16_follow_the_course_of_fp32() -> None:
    for optimizer in (SGD, NESTEROV, ADAMW):
        precise = fit(Run(optimizer=optimizer), {})[0].losses
        assert len(set(precise)) == len(precise) == 6
        for strategy in [{}, OVERLAPPED] if optimizer is ADAMW else [{}]:
            losses = fit(Run(optimizer=optimizer, precision="bf16-true"), strategy)[0].losses
            assert losses == pytest.approx(precise, rel=0.02)  # bf16 has 8 bits


class ClipsByHand(PlainNet):
    """Manual optimization of a loss with large gradients, clipped by the user."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=1.0))
        self.automatic_optimization = False
        self.moved: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        before = weights(self)
        optimizer.zero_grad()
        self.manual_backward(1000 * functional.mse_loss(self.predictions(batch).float(), batch["y"].float()))
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        steps = [(after - before[name]).float().flatten() for name, after in weights(self).items()]
        self.moved.append(torch.cat(steps).norm().item())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@on_ranks(2)
def test_clipping_by_hand_is_not_undone_by_the_step(precision: str) -> None:
    module = ClipsByHand()
    run_fit(module, {}, loader(16, 2), precision=precision)
    assert module.moved == pytest.approx([1.0] * 4, rel=0.03)  # parameters in bf16 are rounded


# Model copies begin alike


def begin_apart(entry: str) -> list[list[float]]:
    """Give every rank weights of its own; return those that it ends with after a run of each kind of module."""
    results = []
    for make in (PlainNet, StagedNet):
        module = make(partial(torch.optim.SGD, lr=0.0))
        trainer = make_trainer({}, callbacks=[Scatter()])
        getattr(trainer, entry)(module, loader(4, 2))
        results.append(torch.cat([weight.flatten() for weight in weights(module).values()]).tolist())
    return results


class Scatter(pl.Callback):
    """Moves the weights by the number of the rank before the strategy wraps them, as different seeds would."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        configure = pl_module.configure_model

        def configure_and_scatter() -> None:
            configure()
            for parameter in pl_module.parameters():
                parameter.data += dist.get_rank()

        pl_module.configure_model = configure_and_scatter


class Noisy(PlainNet):
    """Has a buffer that each rank draws for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.rand(3))


def draw_noise(strategy: Any) -> list[float]:
    torch.manual_seed(dist.get_rank())
    module = Noisy()
    run_fit(module, strategy, loader(4, 2))
    return module.noise.tolist()


def test_model_copies_take_the_buffers_of_the_first_as_under_ddp() -> None:
    expected = run_ranks(2, draw_noise, "ddp")
    assert expected[0] == expected[1]
    assert run_ranks(2, draw_noise, {}) == expected


class Averaging(PlainNet):
    """Has running statistics, which each rank moves by its own batches."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.norm = nn.BatchNorm1d(SEQ_LENGTH)
        self.seen: list[list[float]] = []

    def predictions(self, batch: Batch) -> Tensor:
        return self.net(self.norm(batch["x"]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(torch.cat([buffer.flatten() for buffer in self.norm.buffers()]).tolist())


def average(strategy: Any) -> dict[str, Any]:
    """Return the statistics after each batch and at the end, and the validation loss of each epoch."""
    module, memory = Averaging(), Memory()
    run_fit(module, strategy, loader(28, 2), loader(6, 3), accumulate_grad_batches=3, max_epochs=2, logger=memory)
    final = {name: value.tolist() for name, value in module.named_buffers()}
    return {"seen": module.seen, "final": final, "val_loss": memory.values("val_loss")}


def test_running_statistics_are_those_of_ddp() -> None:
    for expected, found in zip(run_ranks(2, average, "ddp"), run_ranks(2, average, {}), strict=True):
        assert len(expected["seen"]) == 14
        assert len(expected["val_loss"]) == 2
        assert found.pop("val_loss") == pytest.approx(expected.pop("val_loss"), rel=1e-6)
        assert found == expected


@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_model_copies_take_the_weights_of_the_first(entry: str) -> None:
    first, second = run_ranks(2, begin_apart, entry)
    assert first == second
    expected = torch.cat([weight.flatten() for weight in weights(PlainNet()).values()]).tolist()
    assert first[0] == expected


class StopsEarly(pl.Callback):
    """Ends the run in the middle of an epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


@on_ranks(2)
def test_a_run_that_ends_within_an_epoch_leaves_whole_parameters() -> None:
    results = []
    for strategy in (SHARDED, OVERLAPPED):
        module = PlainNet()
        trainer = make_trainer(strategy, callbacks=[StopsEarly()])
        trainer.fit(module, loader(28, 2))
        assert trainer.global_step == 2
        results.append(weights(module))
    whole, overlapped = results
    assert all(torch.equal(value, overlapped[name]) for name, value in whole.items())


class ReadsParameters(PlainNet):
    """Has a parameter of its own, some in a list, and reads those of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shifts = nn.ParameterList([torch.zeros(1)])
        self.square = nn.Linear(1, 1)
        fill(self.square, seed=2)

    def predictions(self, batch: Batch) -> Tensor:
        made = super().predictions(batch) * self.scale + self.shifts[0]
        return functional.linear(made, self.square.weight, self.square.bias)


class StepsTwice(ReadsParameters):
    """Steps within a training step, and goes on with the new parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(functional.mse_loss(self.predictions(batch).float(), batch["y"].float()))
            optimizer.step()


@on_ranks(2)
def test_parameters_that_are_read_without_a_call_are_gathered_in_time() -> None:
    one_bucket_each = {**OVERLAPPED, "ddp_config": DistributedDataParallelConfig(bucket_size=1)}
    for kind in (ReadsParameters, StepsTwice):
        ends = []
        for strategy in (SHARDED, OVERLAPPED, one_bucket_each):
            module = kind()
            run_fit(module, strategy, loader(28, 2), max_epochs=2)
            ends.append(torch.cat([weight.flatten() for weight in weights(module).values()]))
        assert torch.equal(ends[0], ends[1])
        assert torch.equal(ends[0], ends[2])


# What would go wrong in silence is refused


class BackwardTwice(PlainNet):
    """Accumulates by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(functional.mse_loss(self.predictions(batch).float(), batch["y"].float()))
        if batch_idx % 2 == 1:
            optimizer.step()


@on_ranks(2)
def test_what_sharded_or_overlapped_gradients_cannot_do_is_refused() -> None:
    run_fit(BackwardTwice(), {}, loader(8, 2))
    for strategy in (SHARDED, {"overlap_grad_reduce": True}):
        with refuses(RuntimeError, "backward ran again before zero_grad()"):
            run_fit(BackwardTwice(), strategy, loader(8, 2))
    with refuses(TypeError, "configure_optimizers returned several optimizers, and overlap_grad_reduce=True needs one"):
        run_fit(Adversaries(ADAMW), {"overlap_grad_reduce": True}, loader(8, 2))


class UsesLess(PlainNet):
    """Does not use a layer: in some batches, or in all."""

    def __init__(self, unused_in: Collection[int]) -> None:
        super().__init__()
        self.side = nn.Linear(1, 1)
        self.unused_in = unused_in

    def predictions(self, batch: Batch) -> Tensor:
        made = super().predictions(batch)
        return made if self.trainer.global_step in self.unused_in else self.side(made)


@pytest.mark.parametrize("unused_in", [range(9), (2,)], ids=["never-used", "unused-once"])
@pytest.mark.parametrize("strategy", [{"overlap_grad_reduce": True}, OVERLAPPED], ids=["gradients", "all"])
@on_ranks(2)
def test_a_parameter_without_a_gradient_is_refused_where_overlapped_sums_would_wait_for_it(
    strategy: Any, unused_in: Collection[int]
) -> None:
    with refuses(RuntimeError, "2 parameters, such as 'side.weight', have none in this step"):
        run_fit(UsesLess(unused_in), strategy, loader(16, 2))
    run_fit(UsesLess(unused_in), {"use_distributed_optimizer": True}, loader(16, 2))


class UnfreezeLater(BaseFinetuning):
    """Lightning's callback: trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class TrainsWhatIsNotFrozen(PlainNet):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(p for p in self.parameters() if p.requires_grad)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_parameter_unfrozen_during_training_is_refused_where_its_gradients_would_not_be_reduced(ranks: int) -> None:
    """On one rank it is trained."""
    module = TrainsWhatIsNotFrozen(SGD)
    before = module.net[0].weight.clone()
    with refuses(RuntimeError, "frozen when training began") if ranks > 1 else contextlib.nullcontext():
        run_fit(module, {}, loader(8, 2), max_epochs=2, callbacks=[UnfreezeLater()])
    assert torch.equal(before, module.net[0].weight) == (ranks > 1)


def freeze_biases(module: pl.LightningModule) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("bias" not in name)


class PlainWithFrozen(PlainNet):
    def configure_model(self) -> None:
        freeze_biases(self)


class StagedWithFrozen(StagedNet):
    def configure_model(self) -> None:
        super().configure_model()
        freeze_biases(self)


class UnfreezeInPlace(pl.Callback):
    """Trains all parameters, which the optimizer has had from the beginning, from the second epoch on."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.requires_grad_(True)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(PlainWithFrozen, {}), (PlainWithFrozen, SHARDED), (StagedWithFrozen, {"pipeline_model_parallel_size": 2})],
    ids=["plain", "sharded", "pipeline"],
)
@on_ranks(2)
def test_a_frozen_parameter_of_the_optimizer_cannot_be_unfrozen_where_it_would_not_be_trained(
    kind: type[pl.LightningModule], strategy: dict[str, Any]
) -> None:
    with refuses(RuntimeError, "parameters were frozen when training began"):
        run_fit(kind(), strategy, loader(8, 2), max_epochs=2, callbacks=[UnfreezeInPlace()])


@on_ranks(2)
def test_one_module_goes_from_strategy_to_strategy() -> None:
    module, agreed = PlainNet(), []
    for strategy in ({}, "ddp", SHARDED, pl.strategies.DDPStrategy(), OVERLAPPED, {}):
        before = weights(module)
        run_fit(module, strategy, loader(8, 2))
        after = torch.cat([weight.flatten() for weight in weights(module).values()])
        assert not torch.equal(after, torch.cat([weight.flatten() for weight in before.values()]))
        others = [torch.zeros_like(after) for _ in range(2)]
        dist.all_gather(others, after)
        agreed.append(torch.equal(*others))
        assert not any(hasattr(parameter, "main_grad") for parameter in module.parameters())
    assert agreed == [True] * 6


class Sparing(PlainNet):
    """Learns from every other batch only."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


class Counting(torch.optim.SGD):
    """Knows how often it was called, and with what."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.notes: list[str] = []
        self.num_zeroed = 0

    def step(self, closure: Any = None, note: str = "") -> Any:
        self.notes.append(note)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_zeroed += 1
        super().zero_grad(set_to_none)


class Noting(PlainNet):
    """Tells its optimizer something at each step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure, note=f"batch {batch_idx}")


class Typed(PlainNet):
    """Knows of what type tensors are that are made without saying so."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.types: list[torch.dtype] = []

    def configure_model(self) -> None:
        self.types.append(nn.Linear(1, 1).weight.dtype)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.types.append(torch.zeros(1).dtype)
        return super().training_step(batch, batch_idx)


class Copying(pl.Callback):
    """Copies the module while the run is on, as weight averaging does."""

    copied: Any = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.copied = copy.deepcopy(pl_module)


def one_rank(strategy: Any) -> dict[str, Any]:
    """Return what becomes of modules that do as a user of one process may."""
    sparing = Sparing()
    in_order = {"use_distributed_sampler": False}  # which shuffles
    run_fit(sparing, strategy, loader(28, 2), **in_order)
    typed = Typed()
    run_fit(typed, strategy, loader(4, 2), precision="bf16-true")
    noting, copying = Noting(Counting), Copying()
    trainer = make_trainer(strategy, callbacks=[copying], **in_order)
    trainer.fit(noting, loader(8, 2))
    (optimizer,) = trainer.optimizers
    counted = (type(optimizer), list(optimizer.notes), optimizer.num_zeroed)
    optimizer.zero_grad()
    noting.predictions(next(iter(loader(8, 2)))).square().mean().backward()
    optimizer.step()  # the run is over; it goes on by hand
    return {
        "weights without a loss": weights(sparing),
        "types": typed.types,
        "calls": counted,
        "weights of a copy": weights(copying.copied),
        "weights after the run": weights(noting),
    }


@on_ranks(1)
def test_what_a_user_of_one_process_does_has_the_effect_that_it_has_without_a_strategy() -> None:
    expected, ours = one_rank("auto"), one_rank({})
    assert ours["types"] == expected["types"] == [torch.bfloat16] * 3
    assert ours["calls"] == expected["calls"]
    assert expected["calls"][1] == [f"batch {index}" for index in range(4)]
    for name in ("weights without a loss", "weights of a copy", "weights after the run"):
        assert ours[name].keys() == expected[name].keys()
        for parameter, value in ours[name].items():
            assert torch.equal(value, expected[name][parameter]), f"{name}: {parameter}"


@on_ranks(1)
def test_a_module_is_saved_before_any_run(tmp_path: Path) -> None:
    trainer = make_trainer({})
    trainer.strategy.connect(PlainNet())
    trainer.save_checkpoint(f"{tmp_path}/model.ckpt")
    loaded: dict[str, Tensor] = torch.load(f"{tmp_path}/model.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, loaded[name]) for name, value in weights(PlainNet()).items())


@on_ranks(1)
def test_a_checkpoint_of_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    path = f"{tmp_path}/model.ckpt"
    trainer = make_trainer({})
    trainer.fit(PlainNet(), loader(8, 2))
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    torch.save({**checkpoint, "optimizer_states": []}, path)
    run_fit(PlainNet(), {}, loader(8, 2), max_epochs=2, ckpt_path=path)
    torch.save({**checkpoint, "optimizer_states": [state, state]}, path)
    with refuses(ValueError, "contains the states of 2 optimizers, but configure_optimizers returned 1"):
        run_fit(PlainNet(), {}, loader(8, 2), max_epochs=2, ckpt_path=path)
