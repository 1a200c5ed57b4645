# SPDX-License-Identifier: Apache-2.0
"""A callback that logs how many values FP8 cannot hold, in a preview of FP8 on the CPU."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.te_cpu import quantize

_KINDS = {"scaling_fwd": ("inputs", "weights"), "scaling_bwd": ("gradients",)}
_PER_PRODUCT = {"scaling_fwd": 3, "scaling_bwd": 2}  # quantizers that TransformerEngine keeps for a matrix product


class FP8Monitor(pl.Callback):
    """Logs the shares of the values cast to FP8 that saturate and that underflow.

    For each kind of tensor (``inputs`` and ``weights`` of the linear layers, ``gradients`` of their outputs) the
    loggers get ``fp8/<kind>_saturated`` and ``fp8/<kind>_underflowed``, between 0 and 1, over all ranks and
    microbatches of an optimizer step. A value saturates if it is larger than the largest one that its scale allows. It
    underflows if it is not zero and becomes zero. TransformerEngine must run on the CPU. Weights that the optimizer
    keeps in FP8 (``fp8_param``) are not cast in the step and not counted.

    Args:
        every_n_steps: Optimizer steps between two counts; a step in which values are counted is slower.

    Raises:
        ValueError: ``every_n_steps`` is below 1.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore import FP8Monitor
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[FP8Monitor(every_n_steps=100)])
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is not positive; choose 1 or more")
        self.every_n_steps = every_n_steps
        self._kinds: dict[int, str] = {}
        self._counts: dict[str, Tensor] = {}
        self._step = -1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reject a run that casts nothing to FP8 on the CPU.

        Raises:
            ValueError: The run has no FP8 recipe, or is not on the CPU.
        """
        precision = trainer.precision_plugin
        if not isinstance(precision, MCorePrecision) or not precision.fp8.is_on:
            raise ValueError(
                "FP8Monitor has nothing to count without FP8; set MCorePrecision(fp8_recipe=...), or remove it"
            )
        if trainer.strategy.root_device.type != "cpu":
            raise ValueError(
                f"FP8Monitor works only on the CPU, but the run is on {trainer.strategy.root_device}; "
                'choose accelerator="cpu", or remove the callback'
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count from here if the step is due."""
        if trainer.global_step % self.every_n_steps == 0 and quantize.observer is None:
            self._step = trainer.global_step
            self._counts = {kind: torch.zeros(3, dtype=torch.int64) for kinds in _KINDS.values() for kind in kinds}
            quantize.observer = lambda *cast: self._count(pl_module, *cast)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was counted once the step is done; collective over the world."""
        if quantize.observer is None or trainer.global_step == self._step:
            return
        quantize.observer = None
        counts = torch.stack(list(self._counts.values()))
        if dist.is_initialized():
            dist.all_reduce(counts)
        metrics = {}
        for kind, (values, saturated, underflowed) in zip(self._counts, counts.tolist(), strict=True):
            if values:
                metrics[f"fp8/{kind}_saturated"] = saturated / values
                metrics[f"fp8/{kind}_underflowed"] = underflowed / values
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop counting."""
        quantize.observer = None
        self._kinds = {}

    def _count(self, module: pl.LightningModule, quantizer: Any, values: Tensor, cast: Any) -> None:
        keys = (id(quantizer), id(cast))
        # Known by identity: the quantizer of an input or gradient, the kept copy of a weight.
        if not self._kinds.keys() & keys:  # TransformerEngine makes quantizers in the first step
            self._kinds = dict(_kinds_of(module))
        kind = next((self._kinds[key] for key in keys if key in self._kinds), None)
        if kind is not None:
            self._counts[kind] += torch.tensor([values.numel(), *quantize.lost(values, cast)])


def _kinds_of(module: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the identity of each quantizer and of each kept FP8 weight, and the kind of tensor that it is for."""
    for layer in module.modules():
        for direction, quantizers in getattr(layer, "quantizers", {}).items():
            for index, quantizer in enumerate(quantizers):
                # Forward: input, weight and output of each matrix product; outputs are not cast.
                place = index % _PER_PRODUCT[direction]
                if place < len(_KINDS[direction]):
                    yield id(quantizer), _KINDS[direction][place]
        for weight in getattr(layer, "_fp8_workspaces", {}).values():
            yield id(weight), "weights"
