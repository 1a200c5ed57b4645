# SPDX-License-Identifier: Apache-2.0
"""The bytes of an element of weights, gradients, optimizer state and activations, and who holds it.

Weights in FP8 and TransformerEngine's optimizer are as its documentation says; they need a GPU and are not measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mcore.planning.built import ParameterTensor
from lightning_mcore.planning.model import FP32

OPTIMIZERS: Mapping[str, int] = {"adam": 2, "adamw": 2, "sgd": 1, "sgd_without_momentum": 0, "muonwithadamw": 2}
"""Moments that an optimizer keeps of each element; Muon keeps one of each matrix."""

BYTES = {"32-true": (4, 4), "bf16-mixed": (2, 4), "bf16-true": (2, 2), "16-mixed": (2, 4), "16-true": (2, 2)}
"""Bytes of a parameter and of its gradient."""
_BACKENDS = ("local", "transformer_engine")
WHOLLY = "optim_grads_params"
"""The ``data_parallel_sharding`` that also shares parameters."""


def optimizer_of(model: Mapping[str, Any]) -> str:
    """Return the name in :data:`OPTIMIZERS` of the optimizer that arguments of ``MCoreGPT`` ask for."""
    recipe = model.get("recipe") or {}
    name = str(recipe.get("optimizer") or "adamw").replace("muon", "muonwithadamw")
    return "sgd_without_momentum" if name == "sgd" and recipe.get("sgd_momentum") == 0 else name


@dataclass(frozen=True)
class Formats:
    """Bytes of elements; made by :meth:`of`."""

    parameter: int  # bytes of a parameter, and of an activation
    gradient: int  # bytes of a gradient in its buffer
    main: int  # bytes of the copy that the optimizer works on; 0 where it works on the parameters
    moments: tuple[int, ...]  # bytes of each moment
    optimizer: str  # A name of :data:`OPTIMIZERS`
    distributed: bool  # whether the optimizer state is sharded over the data-parallel ranks, by ranges of elements
    layer_wise: bool = False  # whether it is sharded by whole parameters
    sharding: str | None = None  # ``data_parallel_sharding``: whether gradients and parameters are shared, too
    unit_size: int | None = None  # elements that it gathers ahead, times 2; None for Megatron's default
    instances: int = 1  # groups of these ranks, each of which holds a whole state
    bucket_size: int | None = None  # elements of a bucket; None for one bucket, 0 for Megatron's default
    large_buckets: bool = False  # ``pad_buckets_for_high_nccl_busbw``
    fp8: bool = False  # whether linear layers compute in FP8
    fp8_param: bool = False  # whether their weights are kept in it
    offloaded: float = 0.0  # share of the optimizer state that is kept on the host
    compute: str = "bf16"  # the number format of matrix products: ``"fp32"``, ``"bf16"`` or ``"fp8"``
    backend: str = "local"  # the layers: ``"local"``, which are plain PyTorch, or ``"transformer_engine"``
    packed: bool = False  # whether rows hold several sequences each, and are joined to one
    on_gpu: bool = False

    @classmethod
    def of(
        cls,
        precision: Mapping[str, Any],
        strategy: Mapping[str, Any],
        optimizer: str = "adamw",
        backend: str = "local",
        packed: bool = False,
        on_gpu: bool = False,
    ) -> "Formats":
        """Read them from the arguments of a run, which ``rules.py`` has checked.

        Raises ValueError for a backend that is unknown.
        """
        if backend not in _BACKENDS:
            raise ValueError(f"backend={backend!r} is unknown; choose one of {_BACKENDS}")
        parameter, gradient = BYTES[precision.get("precision") or "32-true"]
        ddp, own = strategy.get("ddp_config") or {}, strategy.get("optimizer_config") or {}
        main, moments = _of_optimizer(parameter, optimizer, own, precision)
        overlaps = bool(strategy.get("overlap_grad_reduce") or ddp.get("overlap_grad_reduce"))
        fraction = own.get("optimizer_offload_fraction") if own.get("optimizer_cpu_offload") else 0.0
        fp8 = precision.get("fp8") is not None or precision.get("fp8_recipe") is not None
        is_narrow = fp8 or precision.get("fp4_recipe") is not None  # FP4 counts as FP8 in time
        return cls(
            parameter=parameter,
            gradient=gradient,
            main=main,
            moments=moments,
            optimizer=optimizer,
            distributed=bool(strategy.get("use_distributed_optimizer") or ddp.get("use_distributed_optimizer")),
            layer_wise=bool(strategy.get("use_layer_wise_distributed_optimizer")),
            sharding=strategy.get("data_parallel_sharding"),
            unit_size=ddp.get("suggested_communication_unit_size"),
            instances=ddp.get("num_distributed_optimizer_instances") or 1,
            bucket_size=(ddp.get("bucket_size") or 0) if overlaps else None,
            large_buckets=bool(ddp.get("pad_buckets_for_high_nccl_busbw")),
            fp8=fp8,
            fp8_param=bool(precision.get("fp8_param")),
            offloaded=float(fraction or 0.0),
            compute="fp8" if is_narrow else "fp32" if parameter == FP32 else "bf16",
            backend=backend,
            packed=packed,
            on_gpu=on_gpu,
        )

    def state_bytes(self, tensor: ParameterTensor) -> int:
        """Return the bytes of the optimizer's state of one element: its copy and its moments."""
        if self.optimizer == "muonwithadamw" and tensor.is_linear:
            return self.main + self.moments[0]
        return self.main + sum(self.moments)

    @property
    def gathered(self) -> int:
        """Bytes of an element of a parameter while the distributed optimizer gathers it."""
        return 1 if self.fp8_param else self.parameter

    @property
    def is_local(self) -> bool:
        """Whether the layers are plain PyTorch."""
        return self.backend == "local"

    @property
    def fuses_norms(self) -> bool:
        """Whether RMSNorm is one kernel, as PyTorch (from 2.9) and TransformerEngine have it for GPUs."""
        return self.on_gpu or not self.is_local

    @property
    def keeps_fp8(self) -> bool:
        """Whether linear layers keep their inputs in 8 bits."""
        return self.fp8 and not self.is_local

    @property
    def linear_input(self) -> int:
        """Bytes of an element of the input that a linear layer keeps."""
        return 1 if self.keeps_fp8 else self.parameter

    @property
    def mask(self) -> int:
        """Bytes that dropout keeps for an element."""
        return self.parameter if self.is_local else 1


def _of_optimizer(
    parameter: int, optimizer: str, own: Mapping[str, Any], precision: Mapping[str, Any]
) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the optimizer's copy of an element, and of each moment."""
    main, count = 0 if parameter == FP32 else FP32, OPTIMIZERS[optimizer]
    if not own.get("use_precision_aware_optimizer"):
        return main, (FP32,) * count
    main_type = _type_bytes(own.get("main_params_dtype"))
    recipe = precision.get("fp8_recipe") or ("delayed" if precision.get("fp8") else None)
    if parameter != FP32 and (main_type != FP32 or recipe in (None, "delayed")):
        # TransformerEngine's optimizer holds the copy: what bf16 lacks of fp32, where it stores remainders.
        halved = str(precision.get("precision")).startswith("bf16") and own.get("store_param_remainders", True)
        main = 2 if halved else main_type
    return main, tuple(_type_bytes(own.get(name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")[:count])


def _type_bytes(dtype: Any) -> int:
    """Return the bytes of an element of a torch type, or of its name; None is fp32."""
    name = str(dtype).rpartition(".")[2]
    return {"uint8": 1, "float8_e4m3fn": 1, "fp8": 1, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}.get(name, 4)
