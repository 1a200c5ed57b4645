# SPDX-License-Identifier: Apache-2.0
"""Makes the optimizers of ``optimizer.py``: rebuilds the user's optimizer as Megatron's, or wraps it.

The strategy calls :func:`make_optimizer` in ``setup`` for each optimizer that ``configure_optimizers`` returned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mcore.optimizer import GROUP_INDEX, MCoreOptimizer
from lightning_mcore.process_groups import process_group

_NOT_IN_MEGATRON = ("amsgrad", "maximize", "dampening", "nesterov")


@dataclass(frozen=True)
class OptimizerSetting:
    """How Megatron runs the optimizer.

    Args:
        inline: Lightning's own loop runs backward (plain modules), not Megatron's schedule.
        precision: The fields of Megatron's ``OptimizerConfig`` that the precision owns.
        distributed: Shard optimizer state and fp32 copies over the data-parallel ranks.
        overlap_param_gather: The sharded step leaves gathering the parameters to the next forward.
        expert_parallel: Experts live on different ranks, so their gradients have a norm group of their own.
    """

    inline: bool
    precision: Mapping[str, Any]
    distributed: bool
    overlap_param_gather: bool
    expert_parallel: bool

    @property
    def low_precision(self) -> bool:
        """Whether the optimizer works on fp32 copies of the parameters."""
        return bool(self.precision.get("bf16") or self.precision.get("fp16"))


def make_optimizer(
    user: Optimizer, chunks: Sequence[DistributedDataParallel], setting: OptimizerSetting
) -> MCoreOptimizer:
    """Put Megatron's step behind a torch optimizer.

    Collective over the world.

    Args:
        user: A torch optimizer over parameters of the chunks.
        chunks: The model chunks, wrapped in Megatron's DistributedDataParallel.
        setting: How Megatron runs it.

    Returns:
        An optimizer of the user's class.

    Raises:
        TypeError: The optimizer cannot be rebuilt where it must be.
        ValueError: A parameter of the model needs gradients but is in no group.
    """
    fields = _rebuilt_fields(user)
    if setting.distributed and (fields is None or fields["optimizer"] != "adam"):
        raise TypeError(
            "use_distributed_optimizer=True needs torch's Adam or AdamW without amsgrad or maximize; "
            f"got {type(user).__name__}"
        )
    if setting.expert_parallel and fields is None:
        raise TypeError(
            "expert_model_parallel_size > 1 needs torch's Adam, AdamW or SGD without amsgrad, maximize, dampening or "
            f"nesterov; got {type(user).__name__}"
        )
    rebuilt = setting.distributed or (fields is not None and not setting.inline)
    parameters = [parameter for group in user.param_groups for parameter in group["params"]]
    megatron = _rebuild(user, chunks, setting) if rebuilt else _wrap(user, setting)
    return MCoreOptimizer(user, megatron, parameters, chunks, rebuilt=rebuilt, inline=setting.inline)


def _rebuilt_fields(user: Optimizer) -> dict[str, Any] | None:
    """Return the fields of Megatron's OptimizerConfig that make the same optimizer, None where there are none."""
    d = user.defaults
    if any(group.get(name) for group in user.param_groups for name in _NOT_IN_MEGATRON):
        return None
    if type(user) in (Adam, AdamW):
        decoupled = type(user) is AdamW or bool(d.get("decoupled_weight_decay"))
        beta1, beta2 = d["betas"]
        return {
            "optimizer": "adam",
            "lr": float(d["lr"]),
            "weight_decay": d["weight_decay"],
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": d["eps"],
            "decoupled_weight_decay": decoupled,
        }
    if type(user) is SGD:
        return {
            "optimizer": "sgd",
            "lr": float(d["lr"]),
            "weight_decay": d["weight_decay"],
            "sgd_momentum": d["momentum"],
        }
    return None


def _config(fields: dict[str, Any], setting: OptimizerSetting) -> OptimizerConfig:
    return OptimizerConfig(
        use_distributed_optimizer=setting.distributed,
        overlap_param_gather=setting.overlap_param_gather,
        clip_grad=0.0,
        **setting.precision,
        **fields,
    )


def _rebuild(
    user: Optimizer, chunks: Sequence[DistributedDataParallel], setting: OptimizerSetting
) -> MegatronOptimizer:
    fields = _rebuilt_fields(user)
    assert fields is not None
    _check_every_parameter_is_grouped(user, chunks)
    own = ("betas", "eps") if fields["optimizer"] == "adam" else ("momentum",)
    hyperparameters = ("lr", "weight_decay", *own)
    overrides = {}
    for index, group in enumerate(user.param_groups, start=1):
        key = ParamKey(with_name_predicate=_MemberOf(index, group["params"]).predicate())
        values = {name: group[name] for name in hyperparameters}
        overrides[key] = {GROUP_INDEX: index, **values, "lr": float(group["lr"])}
    megatron = get_megatron_optimizer(
        _config(fields, setting), list(chunks), config_overrides=overrides, use_gloo_process_groups=False
    )
    for part in getattr(megatron, "chained_optimizers", [megatron]):
        if getattr(part, "init_state_fn", _no_initial_state) is None:  # SGD's; Megatron calls it to load a checkpoint
            part.init_state_fn = _no_initial_state
    return megatron


class _MemberOf:
    """Tells Megatron which parameters belong to a user's group."""

    def __init__(self, index: int, parameters: list[torch.nn.Parameter]) -> None:
        self._index = index
        self._members = {id(parameter) for parameter in parameters}

    def predicate(self) -> ParamWithNamePredicate:
        return ParamWithNamePredicate(
            name=f"group_{self._index}", fn=lambda parameter, name: id(parameter) in self._members
        )


def _check_every_parameter_is_grouped(user: Optimizer, chunks: Sequence[DistributedDataParallel]) -> None:
    grouped = {id(parameter) for group in user.param_groups for parameter in group["params"]}
    named = (pair for chunk in chunks for pair in chunk.module.named_parameters())
    missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in grouped]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters need gradients but are in no group of the optimizer, the first is "
            f"{missing[0]!r}; add them in configure_optimizers or freeze them with requires_grad_(False)"
        )


def _wrap(user: Optimizer, setting: OptimizerSetting) -> MegatronOptimizer:
    config = _config({"optimizer": "sgd", "lr": 0.0}, setting)
    if not setting.inline:
        for index, group in enumerate(user.param_groups, start=1):  # what Megatron tells groups apart by on loading
            group |= {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, GROUP_INDEX: index}
    if setting.low_precision:
        megatron: MegatronOptimizer = Float16OptimizerWithFloat16Params(user, config, None, _no_initial_state)
    else:
        megatron = FP32Optimizer(user, config, _no_initial_state)
    megatron.grad_stats_parallel_group = process_group("model")
    megatron.tp_group = process_group("tp")
    return megatron


def _no_initial_state(optimizer: Optimizer, config: OptimizerConfig | None = None) -> None:
    """Leave the state to the user's optimizer, which makes it at its first step."""
