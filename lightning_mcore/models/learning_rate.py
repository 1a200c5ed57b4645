# SPDX-License-Identifier: Apache-2.0
"""The course of the learning rate: a linear warm-up, then a cosine down to a least value, where it stays.

``MCoreGPT.configure_optimizers`` gives it to a ``LambdaLR``.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl


def learning_rate_course(trainer: "pl.Trainer", peak: float, least: float, warmup_steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by optimizer steps, over the steps of a run.

    Args:
        trainer: Knows how many steps there will be.
        peak: The learning rate after the warm-up.
        least: What it decays to.
        warmup_steps: Optimizer steps of the warm-up.

    Raises:
        ValueError: The number of steps is unknown, and the learning rate is to decay.
    """
    total = trainer.estimated_stepping_batches
    check_decay(math.inf if total < 0 else total, peak, least)
    share = least / peak if peak else 1.0
    return functools.partial(warmup_cosine, warmup_steps=warmup_steps, total_steps=total, least=share)


def check_decay(total_steps: float, peak: float, least: float) -> None:
    """Refuse a learning rate that is to decay over an unknown number of steps.

    Args:
        total_steps: Steps of the whole run, infinity where nobody knows.
        peak: The learning rate after the warm-up.
        least: What it decays to.

    Raises:
        ValueError: As said.
    """
    if math.isinf(total_steps) and least != peak:
        raise ValueError(
            f"the number of steps is unknown, and learning_rate={peak} is to decay to min_learning_rate={least}; "
            "set Trainer(max_steps=...), or min_learning_rate=learning_rate for a constant rate"
        )


def warmup_cosine(step: int, warmup_steps: int, total_steps: float, least: float) -> float:
    """Return the factor of the learning rate: rises over the warm-up, falls as a cosine to ``least``, stays there.

    Args:
        step: Optimizer steps taken so far.
        warmup_steps: Steps over which it rises; the first one already moves the weights.
        total_steps: Steps of the whole run.
        least: Factor at its end.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2
