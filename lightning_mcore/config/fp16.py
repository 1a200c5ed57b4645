# SPDX-License-Identifier: Apache-2.0
"""The fp16 loss scale: its settings, as given to ``MCorePrecision``, checked against each other.

``optimizer/loss_scale.py`` uses them; ``lightning-mcore plan`` makes the same checks.
"""

from dataclasses import dataclass, fields
from typing import Any

from lightning_mcore.config.value_checks import require_number, require_size


@dataclass(frozen=True)
class LossScaling:
    """Settings of the loss scale, named as in Megatron's ``OptimizerConfig``; ``MCorePrecision`` documents them."""

    loss_scale: float | None = None  # constant; None for a dynamic scale
    # Megatron's default, 2**32, skips about the first thirty steps until the scale is low enough. 2**16, as in
    # torch.amp.GradScaler, lets a short run train.
    initial_loss_scale: float = 2.0**16
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000  # steps without overflow after which the scale doubles
    hysteresis: int = 2  # steps with overflow after which the scale is halved

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if value is not None or name != "loss_scale":
                require_number(name, value)
        for name in ("loss_scale_window", "hysteresis"):
            require_size(name, getattr(self, name))
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale={self.min_loss_scale} is above initial_loss_scale={self.initial_loss_scale}; "
                "start at or above the minimum"
            )
        changed = [field.name for field in fields(self)[1:] if getattr(self, field.name) != field.default]
        if self.loss_scale is not None and changed:
            raise ValueError(
                f"{changed[0]} is for a dynamic scale, and loss_scale={self.loss_scale} is constant; give one of them"
            )

    def check_precision(self, precision: str) -> None:
        """Raise ValueError for changed settings with a precision that is not fp16, such as ``"bf16-mixed"``."""
        if not precision.startswith("16") and self != LossScaling():
            raise ValueError(f'precision={precision!r} has no loss scale; leave its arguments out, or use "16-mixed"')

    def optimizer_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's ``OptimizerConfig``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
