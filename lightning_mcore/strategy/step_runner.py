# SPDX-License-Identifier: Apache-2.0
"""What the strategy and the precision plugin need from whatever runs a module's steps.

There are two: ``pipeline_runner.py`` for a model built with ``pipeline()``, and ``plain_module_runner.py`` for other
LightningModules. The strategy makes one in ``setup`` and lends it to the precision plugin until ``teardown``.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class StepRunner(Protocol):
    """Runs the steps of one module during one run."""

    @property
    def inline(self) -> bool:
        """Whether Lightning's own loop runs backward; otherwise Megatron's schedule does, inside the training step."""
        ...

    @property
    def root_device(self) -> torch.device:
        """The device that the module runs on."""
        ...

    def training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a training step, or keep its batch until the accumulation window is full."""
        ...

    def evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any], shares_output: bool) -> Any:
        """Run a step forward only; with ``shares_output`` every rank of the pipeline returns its output."""
        ...

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Keep gradients on this rank while Lightning accumulates."""
        ...

    def backward_context(self) -> AbstractContextManager[None]:
        """Prepare the parameters for gradients, and reduce them after the last batch of a window."""
        ...
