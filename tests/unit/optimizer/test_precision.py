# SPDX-License-Identifier: Apache-2.0
"""``MCorePrecision``: its loss scale is checked where it is given, and reaches Megatron's config under its names.

How steps are scaled and skipped is tested on ranks, in ``tests/distributed/test_fp16.py`` and against a bare Megatron
loop in ``tests/parity/test_fp16.py``.
"""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

from lightning_mcore import MCorePrecision
from lightning_mcore.config.fp16 import LossScaling
from lightning_mcore.optimizer.loss_scale import AgreedGradScaler, LossScaler, SkippableSchedule, skippable
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from tests.support.sentences import refuses


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"loss_scale": 0.0}, ValueError),
        ({"loss_scale": "big"}, TypeError),
        ({"loss_scale": True}, TypeError),
        ({"initial_loss_scale": float("inf")}, ValueError),
        ({"initial_loss_scale": None}, TypeError),
        ({"min_loss_scale": -1.0}, ValueError),
        ({"min_loss_scale": 8.0, "initial_loss_scale": 4.0}, ValueError),
        ({"loss_scale_window": 0}, ValueError),
        ({"loss_scale_window": 2.0}, TypeError),
        ({"hysteresis": 0}, ValueError),
        ({"loss_scale": 8.0, "hysteresis": 3}, ValueError),
    ],
)
def test_a_wrong_loss_scale_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *arguments):
        MCorePrecision("16-mixed", **arguments)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_loss_scale_without_fp16_is_refused(precision: Any) -> None:
    with refuses(ValueError, f"precision='{precision}'"):
        MCorePrecision(precision, initial_loss_scale=8.0)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_the_loss_scale_reaches_megatrons_config(precision: Any, inline: bool) -> None:
    scaling = {"initial_loss_scale": 64.0, "min_loss_scale": 2.0, "loss_scale_window": 7, "hysteresis": 3}
    config = OptimizerConfig(**MCorePrecision(precision, **scaling).optimizer_fields(inline))
    assert {name: getattr(config, name) for name in scaling} == scaling
    assert config.fp16
    assert config.loss_scale is None
    assert OptimizerConfig(**MCorePrecision(precision, loss_scale=32.0).optimizer_fields(inline)).loss_scale == 32.0


def test_the_scaler_is_megatrons_with_these_settings() -> None:
    with cpu_runtime():
        dynamic = LossScaler(LossScaling(initial_loss_scale=64.0, min_loss_scale=16.0, loss_scale_window=2)).megatron
        assert isinstance(dynamic, DynamicGradScaler)
        scales = []
        for overflow in (True, True, True, True, False, False, False, False):
            dynamic.update(overflow)
            scales.append(dynamic.scale.item())
        assert scales == [64.0, 32.0, 16.0, 16.0, 16.0, 32.0, 32.0, 64.0]
        constant = LossScaler(LossScaling(loss_scale=8.0)).megatron
        assert isinstance(constant, ConstantGradScaler)
        constant.update(True)
        assert constant.scale.item() == 8.0


@pytest.mark.parametrize(
    ("settings", "num_before"),
    [
        (LossScaling(initial_loss_scale=4.0, min_loss_scale=1.0, hysteresis=1), 2),  # 4, 2, then 1
        (LossScaling(loss_scale=8.0), 0),
    ],
)
def test_an_overflow_at_the_smallest_scale_is_told_once(settings: LossScaling, num_before: int) -> None:
    with cpu_runtime(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = LossScaler(settings)
        for _ in range(num_before):
            run.update(True)
        with pytest.warns(UserWarning, match="if skipped_steps keeps growing, use bf16-mixed"):
            run.update(True)
        run.update(False)
        run.update(True)


def test_lightning_has_no_fp16_on_the_cpu_but_the_plugin_has() -> None:
    arguments: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "strategy": "mcore", "logger": False}
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        trainer = pl.Trainer(precision="16-mixed", **arguments)
    assert trainer.precision == "bf16-mixed"  # what Lightning makes of it, with a warning, before we see it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(plugins=MCorePrecision("16-mixed"), **arguments)
    assert trainer.precision == "16-mixed"


def test_a_grad_scaler_of_ones_own_is_refused_and_lightnings_is_not() -> None:
    assert MCorePrecision.from_lightning(MixedPrecision("16-mixed", "cpu")).precision == "16-mixed"
    own = torch.amp.GradScaler("cpu", growth_interval=7)
    with refuses(ValueError, "plugins=MCorePrecision"):
        MCorePrecision.from_lightning(MixedPrecision("16-mixed", "cpu", own))


def test_a_schedule_by_step_is_not_due_after_a_skipped_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with cpu_runtime():
        run = LossScaler(LossScaling())
        steps = AgreedGradScaler(run, num_parts=2)
    by_step = LRSchedulerConfig(scheduler, name="a", interval="step", frequency=2, monitor="m", strict=False)
    by_epoch = LRSchedulerConfig(scheduler, interval="epoch", frequency=3)
    ours, epochs = skippable([by_step, by_epoch], steps)
    assert isinstance(ours, SkippableSchedule)
    names = ("scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict")
    assert all(getattr(ours, name) == getattr(by_step, name) for name in names)
    steps.update(False)
    steps.update(True)  # one of two parts has overflowed
    assert (steps.step_skipped, steps.num_skipped_steps) == (True, 1)
    assert not any(batch % ours.frequency == 0 for batch in range(1, 100))
    assert epochs.frequency == 3
    assert skippable([ours], steps) == [ours]
    steps.update(False)
    assert not any(batch % ours.frequency == 0 for batch in range(1, 100)), "the other part has not reported yet"
    steps.update(False)
    assert ours.frequency == 2
