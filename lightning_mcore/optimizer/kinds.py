# SPDX-License-Identifier: Apache-2.0
"""What kind of optimizer the user returned: which Megatron has too, and which a split model would change.

Megatron has Adam, AdamW and SGD of its own; :func:`megatron_fields` says which of its fields make the same optimizer.
Any other optimizer is stepped by its own code on the parameters (or fp32 copies) of each rank. That is right as long as
its rule looks at one element at a time. A rule that looks at a whole matrix (Muon, Adafactor, Shampoo), at the norm of
a parameter (LARS, LAMB) or at all parameters at once (LBFGS) gives other numbers on a part of it, without any error;
:func:`check_kind` refuses it there.

``factory.py`` calls both, on every rank alike, before Megatron makes anything.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mcore.optimizer.options import check_sharded

_NOT_IN_MEGATRON = ("amsgrad", "maximize", "dampening", "nesterov")
# By name, so that the optimizers of other packages are known without them; a subclass counts as its parents.
_WHOLE_MATRICES = {
    "adafactor",
    "came",
    "distributedshampoo",
    "galoreadamw",
    "lamb",
    "lars",
    "muon",
    "muonwithadamw",
    "novograd",
    "shampoo",
    "soap",
}
_ALL_PARAMETERS = {"lbfgs"}


def megatron_fields(user: Optimizer) -> dict[str, Any] | None:
    """Return the fields of Megatron's ``OptimizerConfig`` that make the same optimizer, None where there are none."""
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
            "adam_beta1": float(beta1),
            "adam_beta2": float(beta2),
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


def check_number(optimizers: Sequence[Optimizer], inline: bool, distributed: bool, overlap_grad_reduce: bool) -> None:
    """Refuse several optimizers where Megatron makes one over all parameters, or sums all gradients in one go.

    Raises:
        TypeError: There are several.
    """
    reasons = {
        "a model built with pipeline()": not inline,
        "use_distributed_optimizer=True": distributed,
        "overlap_grad_reduce=True": overlap_grad_reduce,
    }
    because = next((reason for reason, holds in reasons.items() if holds), None)
    if len(optimizers) > 1 and because is not None:
        raise TypeError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and {because} needs one over all parameters;"
            " make one with several parameter groups"
        )


def check_not_summed(optimizers: Iterable[Any]) -> None:
    """Refuse to add to gradients that are summed over the ranks already, where that can be done only once.

    Args:
        optimizers: Megatron's, as :class:`~lightning_mcore.optimizer.megatron.MCoreOptimizer`.

    Raises:
        RuntimeError: They have not been zeroed since.
    """
    if any(optimizer.gradients_are_summed for optimizer in optimizers):
        raise RuntimeError(
            "backward ran again before zero_grad(), and with use_distributed_optimizer or overlap_grad_reduce the"
            " gradients are summed over the ranks by then; add the losses up, or set both to False"
        )


def check_kind(
    user: Optimizer,
    *,
    inline: bool,
    distributed: bool,
    tensor_parallel_size: int,
    expert_model_parallel_size: int,
    may_skip_steps: bool = False,
) -> None:
    """Refuse an optimizer that cannot do what the layout asks of it.

    Args:
        user: What ``configure_optimizers`` returned.
        inline: Lightning's own loop runs backward (plain modules), not Megatron's schedule.
        distributed: Whether its state is to be sharded over the data-parallel ranks.
        tensor_parallel_size: Ranks that share each matrix, those of experts included.
        expert_model_parallel_size: Ranks that share the experts.
        may_skip_steps: Whether a step whose gradients overflow is skipped (fp16).

    Raises:
        TypeError: It must be rebuilt and cannot be, or it looks at more than a rank holds.
    """
    fields, name = megatron_fields(user), type(user).__name__
    if distributed:
        check_sharded(fields, name, _because_split(user, "which needs whole matrices"))
    if expert_model_parallel_size > 1 and fields is None:
        raise TypeError(
            "expert_model_parallel_size > 1 needs torch's Adam, AdamW or SGD without amsgrad, maximize, dampening or "
            f"nesterov; got {name}"
        )
    if not inline and _is_one_of(user, _ALL_PARAMETERS):
        raise TypeError(
            f"{name} evaluates the step several times and looks at all parameters at once, which a model built with"
            " pipeline() cannot give it; use another optimizer, such as AdamW"
        )
    if may_skip_steps and _is_one_of(user, _ALL_PARAMETERS):
        raise TypeError(
            f"{name} evaluates the step several times, and loss scaling may skip a step; use another optimizer, or"
            " Trainer(precision='32-true') or 'bf16-mixed'"
        )
    if tensor_parallel_size > 1 and _is_one_of(user, _WHOLE_MATRICES):
        raise TypeError(
            f"{name} looks at whole matrices, and tensor_model_parallel_size={tensor_parallel_size} leaves each rank a"
            " part of them; set the tensor sizes to 1, or use an optimizer that is elementwise, such as AdamW"
        )


def _because_split(user: Optimizer, reason: str) -> str:
    return f", {reason}" if _is_one_of(user, _WHOLE_MATRICES) else ""


def _is_one_of(user: Optimizer, names: set[str]) -> bool:
    return any(parent.__name__.lower() in names for parent in type(user).__mro__)
