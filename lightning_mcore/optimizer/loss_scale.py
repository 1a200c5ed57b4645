# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for fp16: the scale, the ranks that agree on it, and steps that overflow.

The smallest gradient that fp16 can hold is 6e-8, so the loss is multiplied by a scale before backward, and the
gradients are divided by it before the step. If a gradient is inf or nan, every rank skips the step. Megatron's
``DynamicGradScaler`` does that, with the settings of ``config/fp16.py``. This file adds one scale per run
(:class:`LossScaler`), agreement between dense and expert parameters (:class:`AgreedGradScaler`), and learning-rate
schedules that wait after a skipped step (:class:`SkippableSchedule`).

``strategy/precision.py`` makes the scaler, ``factory.py`` attaches it to the optimizers.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from lightning_mcore.config.fp16 import LossScaling
from lightning_mcore.optimizer.parts import optimizer_parts

_NEVER = 2**62


class LossScaler:
    """The loss scale of a run, which all of its optimizers share.

    Source: ``get_megatron_optimizer`` in megatron/core/optimizer, which makes the scaler (0.16).
    """

    def __init__(self, settings: LossScaling) -> None:
        self.megatron: MegatronGradScaler
        if settings.loss_scale is not None:
            self.megatron = ConstantGradScaler(settings.loss_scale)
        else:
            # From 65536 with hysteresis=2, three overflows leave 65536, 32768, 16384: the first is forgiven, and
            # one more each time that the scale has doubled after loss_scale_window steps without overflow.
            self.megatron = DynamicGradScaler(
                initial_scale=settings.initial_loss_scale,
                min_scale=settings.min_loss_scale,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=settings.loss_scale_window,
                hysteresis=settings.hysteresis,
            )
        self._smallest = settings.min_loss_scale if settings.loss_scale is None else settings.loss_scale
        self._has_warned = False
        self.attached: list[AgreedGradScaler] = []

    @property
    def scale(self) -> Tensor:
        """The factor of the loss, [1] fp32 on the device."""
        scale: Tensor = self.megatron.scale
        return scale

    def update(self, found_inf: bool) -> None:
        """Update the scale after a step; warn once if an overflow cannot make it smaller."""
        # After an overflow only, because the scale is read from the device
        if found_inf and not self._has_warned and float(self.scale) <= self._smallest:
            self._has_warned = True
            rank_zero_warn(
                f"fp16 gradients overflow at a loss scale of {self._smallest:g}, and MCorePrecision allows no smaller"
                " one, so the step is skipped; if skipped_steps keeps growing, use bf16-mixed, microbatches of fewer"
                " tokens, or a smaller min_loss_scale (loss_scale, if that is set)"
            )
        self.megatron.update(found_inf)

    def attach(self, megatron: MegatronOptimizer) -> "AgreedGradScaler":
        """Put this run's scale in place of the scaler of each part of an optimizer."""
        parts = [part for part in optimizer_parts(megatron) if getattr(part, "grad_scaler", None)]
        agreed = AgreedGradScaler(self, num_parts=max(len(parts), 1))
        for part in parts:
            part.grad_scaler = agreed
        self.attached.append(agreed)
        return agreed

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, which ``torch.load(weights_only=True)`` reads."""
        state = {name: float(value) for name, value in self.megatron.state_dict().items()}
        return {**state, "num_skipped_steps": [scaler.num_skipped_steps for scaler in self.attached]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; a constant scale keeps the run's value."""
        for scaler, count in zip(self.attached, state["num_skipped_steps"], strict=True):
            scaler.num_skipped_steps = count
        if "scale" in state:
            self.megatron.load_state_dict(
                {
                    "scale": torch.tensor([state["scale"]]),
                    "growth_tracker": int(state["growth_tracker"]),
                    "hysteresis_tracker": int(state["hysteresis_tracker"]),
                }
            )


class AgreedGradScaler(MegatronGradScaler):  # type: ignore[misc]  # Megatron's class has no types
    """One optimizer's scaler: the run's scale changes once, after all ``num_parts`` of it have reported."""

    def __init__(self, run: LossScaler, num_parts: int) -> None:
        # MegatronGradScaler.__init__ is not called, because it would create its own scale.
        self._run = run
        self._num_parts = num_parts
        self._found: list[bool] = []
        self._scale_of_gradients: Tensor | None = None
        self.step_skipped = False
        self.num_skipped_steps = 0

    @property
    def scale(self) -> Tensor:
        """The factor of the loss, [1] fp32."""
        return self._run.scale

    @property
    def inv_scale(self) -> Tensor:
        """The factor of the gradients, [1] fp32."""
        # In fp64: the reciprocal of a large scale is then rounded only once.
        scale = self.scale if self._scale_of_gradients is None else self._scale_of_gradients
        return scale.double().reciprocal().float()

    def remember_scale(self) -> None:
        """Remember the scale of this backward pass, because another optimizer's step may change it before ours."""
        self._scale_of_gradients = self.scale.clone()

    def update(self, found_inf: bool) -> None:
        """Record one part's report; after the last one, update the scale of the run."""
        # Megatron gives dense and expert parameters a scaler each; after an overflow in one, their scales would differ.
        self._found.append(bool(found_inf))
        if len(self._found) < self._num_parts:
            return
        overflow = any(self._found)
        self._found.clear()
        self.step_skipped = overflow
        self.num_skipped_steps += overflow
        self._run.update(overflow)

    def unscale(self, gradients: Sequence[Tensor], group: dist.ProcessGroup) -> bool:
        """Divide dense gradients by the scale, where Megatron does not; return whether a rank found inf or nan.

        Source: ``MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan`` in megatron/core/optimizer (0.16).
        """
        found_inf = torch.zeros_like(self.scale)
        for dtype in {gradient.dtype for gradient in gradients}:
            same_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, self.inv_scale)
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)
        overflow = bool(found_inf.item())
        self.update(overflow)
        return overflow

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: the precision plugin saves the run's scale once."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""


class SkippableSchedule(LRSchedulerConfig):
    """A per-step learning-rate schedule that does not advance after a skipped step.

    After each step, Lightning's loop advances the schedules that are due by their ``frequency``; after a skipped step
    this one is not due. Source: ``_TrainingEpochLoop._update_learning_rates`` in lightning/pytorch/loops (2.6).
    """

    def __init__(self, config: LRSchedulerConfig, scaler: AgreedGradScaler) -> None:
        self._scaler = scaler
        super().__init__(**{field.name: getattr(config, field.name) for field in fields(LRSchedulerConfig)})

    @property
    def frequency(self) -> int:
        """The number of batches or epochs after which it advances."""
        return _NEVER if self.interval == "step" and self._scaler.step_skipped else self._frequency

    @frequency.setter
    def frequency(self, value: int) -> None:
        self._frequency = value


def skippable(configs: Sequence[LRSchedulerConfig], scaler: AgreedGradScaler) -> list[LRSchedulerConfig]:
    """Return schedules that do not advance when a step is skipped."""
    return [
        config if isinstance(config, SkippableSchedule) else SkippableSchedule(config, scaler) for config in configs
    ]
