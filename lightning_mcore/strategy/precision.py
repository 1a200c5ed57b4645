# SPDX-License-Identifier: Apache-2.0
"""Translate ``Trainer(precision=...)`` into Megatron's settings.

Lightning builds its own precision plugin from the string; the strategy translates it into :class:`MCorePrecision`,
which defines what the string means for Megatron:

============  ==================  ======================  ==================  =========================
precision     parameters          forward and backward    gradients summed    optimizer works on
============  ==================  ======================  ==================  =========================
32-true       fp32                fp32                    fp32                the parameters
bf16-mixed    bf16                bf16                    fp32                fp32 copies (main params)
bf16-true     bf16                bf16                    bf16                fp32 copies (main params)
16-mixed      fp16                fp16, scaled loss       fp32                fp32 copies (main params)
16-true       fp16                fp16, scaled loss       fp16                fp32 copies (main params)
============  ==================  ======================  ==================  =========================

A LightningModule that was not built with ``pipeline()`` keeps Lightning's meaning of ``bf16-mixed`` and ``16-mixed``:
fp32 parameters under autocast. With bf16, the matrix products of TransformerEngine's layers may run in FP8
(``config/fp8.py`` has the recipes and their rules). The plugin also runs what Lightning leaves to precision plugins:
backward, the optimizer step and clipping.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_mcore.config.field_homes import ddp_fields_of
from lightning_mcore.config.fp8 import AmaxComputeAlgo, FP4Recipe, FP8Format, FP8Recipe, FP8Settings, asked_for
from lightning_mcore.config.fp16 import LossScaling
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.optimizer.factory import OptimizerSetting
from lightning_mcore.optimizer.loss_scale import LossScaler, skippable
from lightning_mcore.optimizer.megatron import MCoreOptimizer
from lightning_mcore.strategy.module import MCoreModule
from lightning_mcore.strategy.step_runner import StepRunner

# On a CPU, Lightning turns "16-mixed" into "bf16-mixed"; plugins=MCorePrecision("16-mixed") trains in fp16 there.
PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]

# Bytes per parameter with Adam, unsharded: weight, gradient, fp32 copy, two moments.
#   32-true      4 + 4 + 0 + 8 = 16
#   bf16-mixed   2 + 4 + 4 + 8 = 18
#   bf16-true    2 + 2 + 4 + 8 = 16
_DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


_FP8_HINT = ", and for FP8 plugins=MCorePrecision('bf16-mixed', fp8_recipe='delayed')"


def dtype_of(precision: str) -> torch.dtype | None:
    """Return the dtype of the parameters of a model built with ``pipeline()``; None for an unknown precision."""
    return _DTYPES.get(precision)


_HOOKS_THAT_STEP = ("optimizer_step", "training_step")  # training_step in manual optimization


class MCorePrecision(Precision):
    """Numeric formats of parameters, activations, gradients and optimizer state.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-mixed"`` or ``"16-true"``; see the table in
            this module.
        loss_scale: With fp16 a constant loss scale; None for a dynamic one.
        initial_loss_scale: The first dynamic scale; Megatron's own default of 2**32 skips about the first thirty steps.
        min_loss_scale: Lower bound of the dynamic scale.
        loss_scale_window: Steps without overflow after which the dynamic scale doubles.
        hysteresis: Steps with overflow after which the dynamic scale is halved.
        fp8: With bf16 the FP8 format, ``"e4m3"`` or ``"hybrid"``; None for ``"hybrid"`` if there is a recipe.
        fp8_recipe: How tensors are scaled to FP8: ``"delayed"``, ``"tensorwise"``, ``"blockwise"`` or ``"mxfp8"``;
            turns FP8 on. None for ``"delayed"`` if ``fp8`` is given.
        fp8_param: Keep the weights in FP8, and gather them in FP8; needs the distributed optimizer, which steps fp32
            copies.
        fp8_margin: With the delayed recipe: powers of two that the scale stays below the largest.
        fp8_amax_history_len: With the delayed recipe: number of steps whose largest values are remembered.
        fp8_amax_compute_algo: With the delayed recipe: which of these values to use, ``"most_recent"`` or ``"max"``.
        fp8_wgrad: With the delayed recipe: whether to compute weight gradients in FP8 too.
        fp8_dot_product_attention: Attention in FP8, with the delayed and the tensorwise recipe.
        fp8_multi_head_attention: With the delayed recipe: FP8 also between attention and its linear layers.
        tp_only_amax_red: With the delayed recipe: agree on largest values in tensor-parallel groups only.
        first_last_layers_bf16: Keep the first and last layers in bf16; not with the delayed recipe.
        num_layers_at_start_in_bf16: Number of these layers at the start.
        num_layers_at_end_in_bf16: Number of these layers at the end.
        reuse_grad_buf_for_mxfp8_param_ag: With mxfp8 and ``fp8_param``, where it is required: gather weights in the
            buffer of the gradients.
        fp4_recipe: ``"nvfp4"`` multiplies in 4 bits instead of 8, on GPUs of compute capability 10.0 or higher, or with
            TransformerEngine on the CPU. None for no FP4.

    Raises:
        TypeError: An argument has another type.
        ValueError: The name is not one of these, a scale is out of range or given without fp16, or FP8 settings are
            given without bf16 or contradict each other.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore import MCorePrecision
        >>> trainer = pl.Trainer(strategy="mcore", plugins=MCorePrecision("bf16-mixed", fp8_recipe="blockwise"))
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        *,
        loss_scale: float | None = None,
        initial_loss_scale: float = 2.0**16,
        min_loss_scale: float = 1.0,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        fp8: FP8Format | None = None,
        fp8_recipe: FP8Recipe | None = None,
        fp8_param: bool = False,
        fp8_margin: int = 0,
        fp8_amax_history_len: int = 1,
        fp8_amax_compute_algo: AmaxComputeAlgo = "most_recent",
        fp8_wgrad: bool = True,
        fp8_dot_product_attention: bool = False,
        fp8_multi_head_attention: bool = False,
        tp_only_amax_red: bool = False,
        first_last_layers_bf16: bool = False,
        num_layers_at_start_in_bf16: int = 1,
        num_layers_at_end_in_bf16: int = 1,
        reuse_grad_buf_for_mxfp8_param_ag: bool = False,
        fp4_recipe: FP4Recipe | None = None,
    ) -> None:
        allowed = get_args(PrecisionName)
        if precision not in allowed:
            hint = _FP8_HINT if str(precision).startswith(("fp8", "transformer-engine")) else ""
            raise ValueError(
                f"precision={precision!r} is not available under MCoreStrategy; choose one of {allowed}{hint}"
            )
        self.precision = precision
        self._half = HalfPrecision(precision) if precision == "bf16-true" or precision == "16-true" else None
        self._runner: StepRunner | None = None
        self._builds_plain_module = False
        self.scaler: LossScaler | None = None
        scaling = LossScaling(loss_scale, initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis)
        scaling.check_precision(precision)
        self._scaling = scaling if self.dtype == torch.float16 else None
        self.fp8 = FP8Settings(
            fp8=fp8,
            fp8_recipe=fp8_recipe,
            fp8_param=fp8_param,
            fp8_margin=fp8_margin,
            fp8_amax_history_len=fp8_amax_history_len,
            fp8_amax_compute_algo=fp8_amax_compute_algo,
            fp8_wgrad=fp8_wgrad,
            fp8_dot_product_attention=fp8_dot_product_attention,
            fp8_multi_head_attention=fp8_multi_head_attention,
            tp_only_amax_red=tp_only_amax_red,
            first_last_layers_bf16=first_last_layers_bf16,
            num_layers_at_start_in_bf16=num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=num_layers_at_end_in_bf16,
            reuse_grad_buf_for_mxfp8_param_ag=reuse_grad_buf_for_mxfp8_param_ag,
            fp4_recipe=fp4_recipe,
        )
        if self.fp8.is_on and self.dtype != torch.bfloat16:
            raise ValueError(
                f"{asked_for(self.fp8.recipe)} is not available with precision={precision!r}; "
                'use MCorePrecision("bf16-mixed", ...) or "bf16-true"'
            )

    @classmethod
    def from_lightning(cls, plugin: Precision) -> "MCorePrecision":
        """Translate the plugin that Lightning built from ``Trainer(precision=...)``.

        Raises ``TypeError`` for a plugin that Lightning does not build from such a string, and ``ValueError`` for a
        GradScaler with its own settings.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
            hint = _FP8_HINT if type(plugin).__name__ == "TransformerEnginePrecision" else ""
            raise TypeError(
                f"{type(plugin).__name__} is not available under MCoreStrategy; "
                f"use Trainer(precision=...) with one of {get_args(PrecisionName)} or plugins=MCorePrecision(...){hint}"
            )
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and scaler.state_dict() != torch.amp.GradScaler(scaler._device).state_dict():
            raise ValueError(
                "a GradScaler with its own settings is not available under MCoreStrategy; "
                'use plugins=MCorePrecision("16-mixed", initial_loss_scale=..., loss_scale_window=...)'
            )
        return cls(plugin.precision)  # type: ignore[arg-type]  # __init__ rejects all others

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations of a model built with ``pipeline()``."""
        return _DTYPES[self.precision]

    def megatron_fields(self) -> dict[str, Any]:
        """Return the ``TransformerConfig`` fields of this precision."""
        return {
            "bf16": self.dtype == torch.bfloat16,
            "fp16": self.dtype == torch.float16,
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            **self.fp8.transformer_fields(),
        }

    def ddp_fields(self) -> dict[str, Any]:
        """Return the ``DistributedDataParallelConfig`` fields of this precision."""
        return {**ddp_fields_of(self.precision), **self.fp8.ddp_fields()}

    def optimizer_fields(self, inline: bool) -> dict[str, Any]:
        """Return the ``OptimizerConfig`` fields of this precision; under autocast, parameters stay fp32."""
        dtype = torch.float32 if inline and self.precision.endswith("-mixed") else self.dtype
        fields: dict[str, Any] = {"bf16": dtype == torch.bfloat16, "params_dtype": dtype}
        fields |= self.fp8.optimizer_fields()
        if self._scaling is not None:
            fields |= {"fp16": True, **self._scaling.optimizer_fields()}
        return fields

    def optimizer_setting(
        self,
        layout: ParallelLayout,
        ddp_config: DistributedDataParallelConfig,
        config: OptimizerConfig | None,
        inline: bool,
        layer_wise: bool,
    ) -> OptimizerSetting:
        """Return how Megatron runs the optimizers of a new run, with a new loss scale."""
        return OptimizerSetting(
            inline=inline,
            precision=self.optimizer_fields(inline),
            distributed=ddp_config.use_distributed_optimizer,
            layer_wise=layer_wise,
            overlap_param_gather=ddp_config.overlap_param_gather,
            tensor_parallel_size=max(layout.tensor_model_parallel_size, layout.expert_tensor_size),
            expert_model_parallel_size=layout.expert_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            config=config,
            scaler=self.make_scaler(),
        )

    def make_scaler(self) -> LossScaler | None:
        """Create the loss scale of a new run; None in precisions without one."""
        self.scaler = LossScaler(self._scaling) if self._scaling is not None else None
        return self.scaler

    def prepare_to_build(self, module: pl.LightningModule) -> None:
        """Choose the dtype in which a module will create its parameters, which a plain module does not choose."""
        self._builds_plain_module = not isinstance(module, MCoreModule)

    def attach_runner(self, runner: StepRunner) -> None:
        """Let backward and forward of the module go through ``runner``, until :meth:`detach_runner`."""
        self._runner = runner

    def detach_runner(self) -> None:
        """Run backward as Lightning does: nothing is wrapped any more."""
        self._runner = None

    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        """Make per-step schedules wait when a step is skipped."""
        if self.scaler is not None and self.scaler.attached:
            lr_schedulers = skippable(lr_schedulers, self.scaler.attached[0])  # Lightning's loop steps one optimizer
        return model, optimizers, lr_schedulers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; an empty dict in precisions without one."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, if this run scales its loss."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    def convert_module(self, module: Module) -> Module:
        """Cast a plain module for ``bf16-true`` and ``16-true``; Megatron's chunks are cast where they are wrapped."""
        return module.to(self.dtype) if self._is_inline and self._half is not None else module

    def convert_input(self, data: Any) -> Any:
        """Cast the floating-point tensors of a plain module's batch for ``bf16-true`` and ``16-true``."""
        if self._is_inline and self._half is not None:
            return self._half.convert_input(data)
        return data

    @property
    def device(self) -> str | None:
        """The type of device that autocast is for, as in Lightning's ``MixedPrecision``; None outside a run."""
        return None if self._runner is None else self._runner.root_device.type

    def forward_context(self) -> AbstractContextManager[None]:
        """Run a plain module's steps under autocast for ``bf16-mixed`` and ``16-mixed``."""
        if self._is_inline and self.precision.endswith("-mixed"):
            # Without the cache of cast weights, as in Lightning, because manual optimization steps change the weights.
            assert self._runner is not None
            return torch.autocast(self._runner.root_device.type, dtype=self.dtype, cache_enabled=False)
        if self._is_inline and self._half is not None:
            return self._half.forward_context()
        return contextlib.nullcontext()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Create a plain module's tensors in the dtype of ``bf16-true`` or ``16-true``; Megatron's have a config."""
        if self._builds_plain_module and self._half is not None:
            return self._half.tensor_init_context()
        return super().tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Create a plain module's parameters in that dtype."""
        return self.tensor_init_context()

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss, a float scalar ``[]``, and reduce a plain module's gradients.

        A pipeline's schedule has already done both, inside ``training_step``.
        """
        if self._runner is None:  # after a run, nothing is wrapped
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        if not self._runner.inline:
            return
        if self.scaler is not None:
            tensor = tensor * self.scaler.scale.reshape(())
        with self._runner.backward_context():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step; with fp16, unscale the gradients for hooks where parameters are fp32, and log the loss scale."""
        # A step that overflows is skipped on every rank: weights, optimizer state and per-step schedules do not change,
        # but Lightning counts it in global_step and max_steps.
        if self.scaler is None or not isinstance(optimizer, MCoreOptimizer):
            return super().optimizer_step(optimizer, model, closure, **kwargs)

        def unscaled() -> Any:
            result = closure()
            # With fp16 parameters, on_before_optimizer_step sees gradients of the scaled loss.
            optimizer.unscale()
            return result

        result = super().optimizer_step(optimizer, model, unscaled, **kwargs)
        if model._current_fx_name in _HOOKS_THAT_STEP:
            scale, skipped_steps = self.scaler.scale.reshape(()), torch.tensor(float(optimizer.num_skipped_steps))
            model.log_dict({"loss_scale": scale, "skipped_steps": skipped_steps}, on_step=True, on_epoch=False)
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip now if the gradients are complete; otherwise pass the value to Megatron's step."""
        owner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not isinstance(owner, MCoreOptimizer):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        limit = float(clip_val or 0.0)
        if limit > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            owner.clip_grad_value(limit)
        elif limit > 0:
            owner.clip_grad_norm(limit)

    @property
    def _is_inline(self) -> bool:
        return self._runner is not None and self._runner.inline
