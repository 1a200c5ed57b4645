# SPDX-License-Identifier: Apache-2.0
"""Settings for the traffic of gradients and parameters between data-parallel ranks.

Megatron keeps these settings in its ``DistributedDataParallelConfig``. The strategy has arguments for the common ones
and takes the config for the rest. A setting with different values in both places is an error, and so is one that would
do nothing, or that Megatron would reject: it rejects some of them late, on one rank, while the others wait for it.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer

from lightning_mcore.config.field_homes import check_owned_by_precision
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.strategy import (
    GRADIENT_SETTINGS,
    gradient_faults,
    resolved,
    sharding_faults_on,
    world_faults,
)
from lightning_mcore.config.value_checks import require_flag, require_size

_DEFAULTS = DistributedDataParallelConfig()


@dataclass(frozen=True)
class GradientSettings:
    """The strategy's arguments on gradients; None leaves a setting to ``ddp_config`` or Megatron's default."""

    use_distributed_optimizer: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    ddp_config: DistributedDataParallelConfig | None = field(default=None)
    use_layer_wise_distributed_optimizer: bool = False
    data_parallel_sharding: str | None = None  # Megatron's FSDP; None for none
    align_grad_reduce: bool = False  # with overlap in a pipeline: reduce on all stages at the same time

    def __post_init__(self) -> None:
        """Check the settings against each other."""
        if self.ddp_config is not None and not isinstance(self.ddp_config, DistributedDataParallelConfig):
            raise TypeError(
                f"ddp_config={self.ddp_config!r} is not a DistributedDataParallelConfig;"
                " pass the one of megatron.core.distributed"
            )
        for name in GRADIENT_SETTINGS:
            require_flag(name, getattr(self, name), or_none=True)
        for name in ("use_layer_wise_distributed_optimizer", "align_grad_reduce"):
            require_flag(name, getattr(self, name))
        config = self.ddp_config or _DEFAULTS
        require_size("ddp_config.num_distributed_optimizer_instances", config.num_distributed_optimizer_instances)
        if config.bucket_size is not None:
            require_size("ddp_config.bucket_size", config.bucket_size)
        raise_first(gradient_faults(vars(self), self.changed))

    @property
    def changed(self) -> dict[str, Any]:
        """The fields of ``ddp_config`` that do not have Megatron's default."""
        fields = vars(self.ddp_config or _DEFAULTS)
        return {name: value for name, value in fields.items() if value != getattr(_DEFAULTS, name)}

    @property
    def check_nan(self) -> bool:
        """Whether a NaN or an infinity in the summed gradients ends the run, on every rank."""
        # Megatron would check before the sum, and raise only on the rank that has the NaN.
        return self.ddp_config is not None and self.ddp_config.check_for_nan_in_grad

    @property
    def num_instances(self) -> int:
        """The number of distributed-optimizer instances: groups of data-parallel ranks, each with a complete state."""
        return self.ddp_config.num_distributed_optimizer_instances if self.ddp_config is not None else 1

    @cached_property
    def distributed(self) -> bool:
        """Whether the optimizer state is sharded."""
        return bool(self.megatron_config().use_distributed_optimizer)

    @cached_property
    def reduces_only_once(self) -> bool:
        """Whether gradients can be summed over ranks only once before they are zeroed: shards are summed in place."""
        config = self.megatron_config()
        return bool(config.use_distributed_optimizer or config.overlap_grad_reduce)

    def check_precision(self, owned: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if ``ddp_config`` has another value for a field that the precision owns."""
        check_owned_by_precision(self.changed, owned)

    def megatron_config(self, owned: Mapping[str, Any] | None = None) -> DistributedDataParallelConfig:
        """Return Megatron's config with the strategy's arguments and the fields ``owned`` by the precision."""
        self.check_precision(owned or {})
        values = resolved(vars(self), self.changed)
        return dataclasses.replace(_DEFAULTS, **{**values, **(owned or {}), "check_for_nan_in_grad": False})

    def check_run(self, layout: ParallelLayout, world_size: int, device: torch.device) -> None:
        """Reject settings that layout, world or device do not support, before process groups form."""
        raise_first(world_faults(self.changed, layout, world_size, device.type))
        raise_first(sharding_faults_on(self.data_parallel_sharding, layout, world_size))
        instances = self.num_instances
        if instances > 1 and importlib.util.find_spec("einops") is None:
            raise ModuleNotFoundError(
                f"ddp_config.num_distributed_optimizer_instances={instances} needs the package einops, which Megatron "
                "uses to create the groups; install it, or remove the option"
            )


def reduce_scatter_restored() -> AbstractContextManager[Any]:
    """Restore Megatron's reduce-scatter at the end of the ``with`` block."""
    # reduce_scatter_with_fp32_accumulation replaces this global of Megatron's, also for later runs in this process.
    name = "dist_reduce_scatter_func"
    return mock.patch.object(param_and_grad_buffer, name, getattr(param_and_grad_buffer, name))
