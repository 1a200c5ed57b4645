# SPDX-License-Identifier: Apache-2.0
"""The parts of Megatron's optimizer, and their parameter groups.

Megatron's optimizer is a chain of parts, one for dense and one for expert parameters. Each steps a torch optimizer with
groups of its own; on a rank without such parameters, it is a *stub* without one. Two groups of the user's, with rates
1e-4 and 3e-4, become four of Megatron's if the model has experts: 1e-4 and 3e-4 in each part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

# The field of Megatron's groups that holds the number of the user's group, from 1 on, because 0 equals its default,
# False. Of Megatron's param_group_identifier_keys (0.16.1 and 0.19.2), it is the one that only loading reads.
GROUP_INDEX = "is_decoupled_lr"
# Others of these fields (0.19.2), which the user's groups may have with another meaning: OneCycleLR adds max_lr.
_IDENTIFIERS = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult")
_KERNEL_OPTIONS = ("fused", "foreach", "capturable", "differentiable")  # how a torch optimizer computes its step


def optimizer_parts(megatron: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the parts of Megatron's optimizer in order, including stubs; itself if it is not chained."""
    return list(getattr(megatron, "chained_optimizers", [megatron]))


def parts_with_parameters(megatron: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the parts in order, without stubs."""
    return [part for part in optimizer_parts(megatron) if not part.is_stub_optimizer]


def follow_user_groups(megatron: MegatronOptimizer, user_groups: Sequence[Mapping[str, Any]]) -> None:
    """Copy the user's current hyperparameters, which LR schedulers change, into Megatron's groups."""
    is_offloaded = megatron.config.optimizer_cpu_offload
    # Offloaded, a group is stepped by a torch optimizer on each device, with kernel options that differ.
    own = {"params", *_IDENTIFIERS, *(_KERNEL_OPTIONS if is_offloaded else ())}
    for group in megatron.param_groups:
        user_group = user_groups[int(group[GROUP_INDEX]) - 1]
        for name, value in user_group.items():
            if name in group and name not in own:
                is_number = isinstance(value, Tensor) and value.numel() == 1
                group[name] = value.item() if is_number else value
        if not is_offloaded:
            group.update(fused_kernel(group))


def fused_kernel(group: Mapping[str, Any]) -> dict[str, bool]:
    """Return ``{"fused": True}`` for torch's optimizers on a GPU, which otherwise make several passes over memory."""
    if "fused" not in group or group["fused"] is not None or group.get("foreach") is not None:
        return {}
    if group.get("capturable") or group.get("differentiable"):
        return {}
    is_on_gpu = bool(group["params"]) and all(parameter.is_cuda for parameter in group["params"])
    return {"fused": True} if is_on_gpu else {}


def clamp_gradients(part: MegatronOptimizer, limit: float) -> None:
    """Clip each element of the gradients that ``part`` steps with; exact on a rank's share too."""
    for parameter in part.get_parameters():
        for name in ("grad", "decoupled_grad"):  # the second in a precision-aware optimizer
            gradient = getattr(parameter, name, None)
            if gradient is not None:
                gradient.clamp_(-limit, limit)
