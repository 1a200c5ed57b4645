# SPDX-License-Identifier: Apache-2.0
"""``Trainer(precision=...)`` in Megatron's terms.

Lightning builds a precision plugin of its own from the string; the strategy translates it into :class:`MCorePrecision`,
which says what the string means for Megatron:

============  ==================  ======================  ==================  =========================
precision     parameters          forward and backward    gradients summed    optimizer works on
============  ==================  ======================  ==================  =========================
32-true       fp32                fp32                    fp32                the parameters
bf16-mixed    bf16                bf16                    fp32                fp32 copies (main params)
bf16-true     bf16                bf16                    bf16                fp32 copies (main params)
============  ==================  ======================  ==================  =========================

A LightningModule that was not built with ``pipeline()`` keeps Lightning's meaning of ``bf16-mixed``: fp32 parameters
under autocast.

The plugin also carries out the two steps that Lightning leaves to precision plugins: the backward pass and clipping.
Where the schedule has already run backward inside ``training_step``, :meth:`MCorePrecision.backward` has nothing left
to do; elsewhere it runs it and lets the strategy reduce the gradients.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, get_args

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_mcore.optimizer import MCoreOptimizer

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]


class BackwardRunner(Protocol):
    """What the strategy does around backward."""

    @property
    def inline(self) -> bool:
        """Whether Lightning's own loop runs backward."""
        ...

    def around_backward(self) -> AbstractContextManager[None]:
        """Prepare the parameters for gradients, and reduce them after the last batch of a step."""
        ...


class MCorePrecision(Precision):
    """Numeric formats of parameters, activations, gradients and optimizer state.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``; see the table in this module.

    Raises:
        ValueError: The name is not one of these.
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        allowed = get_args(PrecisionName)
        if precision not in allowed:
            raise ValueError(f"precision={precision!r} is not available under MCoreStrategy; choose one of {allowed}")
        self.precision = precision
        self.runner: BackwardRunner | None = None

    @classmethod
    def from_lightning(cls, plugin: Precision) -> "MCorePrecision":
        """Translate the plugin that Lightning built from ``Trainer(precision=...)``.

        Raises:
            TypeError: The plugin is not one that Lightning makes from such a string.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
            raise TypeError(
                f"{type(plugin).__name__} is not available under MCoreStrategy; "
                f"use Trainer(precision=...) with one of {get_args(PrecisionName)} or plugins=MCorePrecision(...)"
            )
        return cls(plugin.precision)  # type: ignore[arg-type]  # __init__ refuses the others

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations of a model built with ``pipeline()``."""
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    def megatron_fields(self) -> dict[str, Any]:
        """Return the ``TransformerConfig`` fields of this precision."""
        return {
            "bf16": self.dtype == torch.bfloat16,
            "fp16": False,
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
        }

    def ddp_fields(self) -> dict[str, Any]:
        """Return the ``DistributedDataParallelConfig`` fields of this precision."""
        return {"grad_reduce_in_fp32": self.precision != "bf16-true"}

    def optimizer_fields(self, inline: bool) -> dict[str, Any]:
        """Return the ``OptimizerConfig`` fields of this precision; under autocast parameters stay fp32."""
        low_precision = self.precision == "bf16-true" or (self.precision == "bf16-mixed" and not inline)
        return {"bf16": low_precision, "params_dtype": torch.bfloat16 if low_precision else torch.float32}

    def convert_module(self, module: Module) -> Module:
        """Cast a plain module for ``bf16-true``; Megatron's chunks are cast where they are wrapped."""
        return module.to(torch.bfloat16) if self._is_inline and self.precision == "bf16-true" else module

    def convert_input(self, data: Any) -> Any:
        """Cast the floating-point tensors of a plain module's batch for ``bf16-true``."""
        if self._is_inline and self.precision == "bf16-true":
            return HalfPrecision("bf16-true").convert_input(data)
        return data

    def forward_context(self) -> AbstractContextManager[None]:
        """Run a plain module's steps under autocast for ``bf16-mixed``."""
        if self._is_inline and self.precision == "bf16-mixed":
            return torch.autocast(self._device_type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward of a plain module and reduce its gradients; the schedule has done both for a pipeline."""
        assert self.runner is not None
        if not self.runner.inline:
            return
        with self.runner.around_backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip at once where the gradients are whole, else hand the value to Megatron's step.

        Raises:
            ValueError: Clipping by value, where Megatron owns the gradients.
        """
        owner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not isinstance(owner, MCoreOptimizer):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        owner.clip(float(clip_val or 0.0), by_value=gradient_clip_algorithm == GradClipAlgorithmType.VALUE)

    @property
    def _is_inline(self) -> bool:
        return self.runner is not None and self.runner.inline

    @property
    def _device_type(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"
