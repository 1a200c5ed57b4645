# SPDX-License-Identifier: Apache-2.0
"""``MCoreStrategy(optimizer_config=...)``: Megatron's ``OptimizerConfig`` for what has no other home.

Learning rates belong to the torch optimizer that ``configure_optimizers`` returns, clipping to the Trainer, number
formats to the precision, sharding to the strategy's arguments. A field of the config that says one of these things a
second time is refused by name; so is an option that would do nothing, or that the device cannot do. What is left goes
into the config that Megatron's optimizer is made with:

* memory: ``optimizer_cpu_offload`` with its fraction; ``use_precision_aware_optimizer`` with the types of main
  gradients, main parameters and moments;
* ``log_num_zeros_in_grad``: :attr:`~lightning_mcore.optimizer.MCoreOptimizer.num_zeros_in_grad`.

The checks run when they can: the values at construction (:func:`check_optimizer_config`), the device when the trainer
meets the model (:func:`check_optimizer_device`), the optimizer when it is known (:func:`check_options`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

from lightning_mcore.field_homes import (
    OF_OFFLOAD,
    OF_OTHER_OPTIMIZERS,
    OF_TORCH_OPTIMIZER,
    OPTIMIZER_HOMES,
    OPTIMIZER_NOT_AVAILABLE,
)
from lightning_mcore.settings import GradientSettings


def check_optimizer_config(config: OptimizerConfig | None, gradients: GradientSettings) -> None:
    """Refuse fields that have another home, and options without what they need.

    Args:
        config: What ``MCoreStrategy(optimizer_config=...)`` was given.
        gradients: The strategy's settings of gradients and of the distributed optimizer.

    Raises:
        TypeError: It is not an ``OptimizerConfig``.
        ValueError: A field has another home, is not available here, or lacks another.
    """
    if config is None:
        return
    if not isinstance(config, OptimizerConfig):
        raise TypeError(f"optimizer_config={config!r} is not an OptimizerConfig; make one from megatron.core.optimizer")
    given = _given(config)
    for name, value in given.items():
        if name in OPTIMIZER_HOMES:
            raise ValueError(
                f"optimizer_config.{name}={value!r} has another home: set it through {OPTIMIZER_HOMES[name]}"
            )
        if name.startswith(OF_OTHER_OPTIMIZERS):
            raise ValueError(f"optimizer_config.{name}={value!r} has another home: set it through {OF_TORCH_OPTIMIZER}")
        if name in OPTIMIZER_NOT_AVAILABLE:
            raise ValueError(
                f"optimizer_config.{name}={value!r} is not available: {OPTIMIZER_NOT_AVAILABLE[name]}; leave it out"
            )
    if config.use_distributed_optimizer and not gradients.distributed:
        raise ValueError(
            "optimizer_config.use_distributed_optimizer=True contradicts the strategy, which does not shard the"
            " optimizer; set MCoreStrategy(use_distributed_optimizer=True)"
        )
    _check_offload(config, given)


def _given(config: OptimizerConfig) -> dict[str, Any]:
    """Return the fields that do not have Megatron's default."""
    defaults = OptimizerConfig()
    names = [name for name in vars(defaults) if name in OptimizerConfig.__dataclass_fields__]
    if config.use_precision_aware_optimizer:  # Megatron itself turns it off where TransformerEngine is too old for it
        names.remove("store_param_remainders")
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(defaults, name)}


def _check_offload(config: OptimizerConfig, given: Mapping[str, Any]) -> None:
    """Refuse an offload that offloads nothing, and what Megatron-LM refuses (``validate_args``, 0.16 to 0.19)."""
    if not config.optimizer_cpu_offload:
        for name in OF_OFFLOAD:
            if name in given:
                raise ValueError(
                    f"optimizer_config.{name}={given[name]!r} does nothing without optimizer_cpu_offload=True; set both"
                )
        return
    fraction = config.optimizer_offload_fraction
    if not 0.0 < fraction <= 1.0:
        raise ValueError(
            f"optimizer_config.optimizer_offload_fraction={fraction} with optimizer_cpu_offload=True"
            f" {'offloads nothing' if fraction == 0 else 'is no fraction'}; choose more than 0, and at most 1"
        )
    if not config.use_precision_aware_optimizer:
        raise ValueError(
            "optimizer_config.optimizer_cpu_offload=True needs use_precision_aware_optimizer=True and the distributed"
            " optimizer, whose code Megatron's offload shares; set both"
        )


def check_optimizer_device(config: OptimizerConfig | None, device: torch.device, ddp_fields: Mapping[str, Any]) -> None:
    """Refuse options that the device or the precision cannot do; called before anything is allocated.

    Args:
        config: What the strategy was given.
        device: Where the model will be.
        ddp_fields: The fields of Megatron's ``DistributedDataParallelConfig`` that the precision owns.

    Raises:
        ValueError: The option needs a GPU, or gradients in another type.
    """
    if config is None:
        return
    if config.optimizer_cpu_offload and device.type != "cuda":
        raise ValueError(
            "optimizer_config.optimizer_cpu_offload=True moves optimizer state from a GPU to the host, but this run is"
            f" on {device.type!r}, where it is already; leave it out"
        )
    if config.use_precision_aware_optimizer and device.type != "cuda":
        raise ValueError(
            "optimizer_config.use_precision_aware_optimizer=True needs the FusedAdam of TransformerEngine, which runs"
            f" on CUDA, but this run is on {device.type!r}; leave it out"
        )
    if config.main_grads_dtype != torch.float32 and ddp_fields.get("grad_reduce_in_fp32"):
        raise ValueError(
            f"optimizer_config.main_grads_dtype={config.main_grads_dtype} contradicts Trainer(precision=...), which"
            ' sums gradients in fp32; choose precision="bf16-true"'
        )


def check_options(config: OptimizerConfig | None, fields: Mapping[str, Any] | None, name: str) -> None:
    """Refuse options that the optimizer has not.

    Args:
        config: What the strategy was given.
        fields: Megatron's fields of the optimizer where Megatron makes it, None where the user's own steps.
        name: Its class, for the message.

    Raises:
        ValueError: Megatron does not make this optimizer, or not with this option.
    """
    if config is None:
        return
    if config.use_precision_aware_optimizer and (fields is None or fields["optimizer"] != "adam"):
        raise ValueError(
            f"optimizer_config.use_precision_aware_optimizer=True needs torch's Adam or AdamW, got {name}; leave it out"
        )
    if config.optimizer_cpu_offload and not (fields or {}).get("decoupled_weight_decay"):
        raise ValueError(
            f"optimizer_config.optimizer_cpu_offload=True needs torch's AdamW, got {name}, whose weight decay"
            " Megatron's offload does not have; use AdamW"
        )
