# SPDX-License-Identifier: Apache-2.0
"""The training recipe of ``MCoreGPT``: its optimizer and the course of its learning rate, by name.

``MCoreGPT`` checks the names in its constructor (:func:`check_recipe`), where nothing is allocated yet, and builds both
in ``configure_optimizers`` (:func:`build_recipe`), which alone needs torch: ``lightning-mcore plan`` calls the checks.
A course is our own warm-up and cosine (``learning_rate.py``), or
one of those that transformers has, by its name there, so that a run described in its terms has its learning rates.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from lightning_mcore.models.learning_rate import check_decay, learning_rate_course

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

OptimizerName: TypeAlias = Literal["adamw", "sgd"]
SchedulerName: TypeAlias = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
RECIPE = (
    "learning_rate",
    "min_learning_rate",
    "weight_decay",
    "betas",
    "eps",
    "optimizer",
    "sgd_momentum",
    "warmup_steps",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
)
"""The arguments of ``MCoreGPT`` that belong to its recipe."""

_WITHOUT_WARMUP = "constant"
_WITHOUT_END = (_WITHOUT_WARMUP, "constant_with_warmup", "inverse_sqrt")  # they need no number of steps


def check_recipe(settings: Mapping[str, Any]) -> None:
    """Refuse names that do not exist and numbers that contradict each other.

    Args:
        settings: The arguments of ``MCoreGPT``.

    Raises:
        ValueError: As said.
    """
    for name, known in (("optimizer", OptimizerName), ("lr_scheduler_type", SchedulerName)):
        given = settings[name]
        if given not in get_args(known) and not (name == "lr_scheduler_type" and given is None):
            raise ValueError(f"{name}={given!r} is not available; choose one of {get_args(known)}")
    peak, least, course = settings["learning_rate"], settings["min_learning_rate"], settings["lr_scheduler_type"]
    if not 0 <= least <= peak:
        raise ValueError(f"min_learning_rate={least} is not between 0 and learning_rate={peak}; choose one")
    if course is None and settings["lr_scheduler_kwargs"]:
        raise ValueError("lr_scheduler_kwargs needs lr_scheduler_type; give one of transformers', or leave both out")
    if course is not None and least:
        raise ValueError(
            f"min_learning_rate={least} belongs to the course without lr_scheduler_type, which is {course!r}; leave one"
            " out, or use lr_scheduler_type='cosine_with_min_lr' with lr_scheduler_kwargs={'min_lr': ...}"
        )
    _check_warmup(settings["warmup_steps"], course)
    _check_numbers(settings)


def check_end(settings: Mapping[str, Any], total: int | None) -> None:
    """Refuse a course that needs the number of steps of a run in which nobody knows it.

    Args:
        settings: The arguments of ``MCoreGPT``.
        total: Optimizer steps of the run, None where nobody knows.

    Raises:
        ValueError: As said.
    """
    if total is not None:
        return
    course, warmup = settings["lr_scheduler_type"], settings["warmup_steps"]
    if course is not None and course not in _WITHOUT_END:
        raise ValueError(
            f"the number of steps is unknown, and lr_scheduler_type={course!r} needs it; set Trainer(max_steps=...), or"
            f" choose one of {_WITHOUT_END}"
        )
    if 0 < warmup < 1:
        raise ValueError(
            f"warmup_steps={warmup} is a share of the steps, whose number is unknown; set Trainer(max_steps=...), or"
            " give a number of steps"
        )
    if course is None:
        check_decay(math.inf, settings["learning_rate"], settings["min_learning_rate"])


def build_recipe(
    parameters: "list[tuple[str, Parameter]]", settings: Mapping[str, Any], trainer: "pl.Trainer"
) -> "OptimizerLRSchedulerConfig":
    """Return the optimizer and the course of its learning rate by steps.

    Args:
        parameters: Those that are trained, by name.
        settings: The arguments of ``MCoreGPT``.
        trainer: Knows how many steps there will be.

    Raises:
        ValueError: The number of steps is unknown, and the course needs it; or transformers refuses its arguments.
    """
    optimizer = optimizer_of_recipe(parameters, settings)
    scheduler = _course(optimizer, settings, trainer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def optimizer_of_recipe(parameters: "list[tuple[str, Parameter]]", settings: Mapping[str, Any]) -> "Optimizer":
    """Return the optimizer, with weight decay on matrices only.

    A pipeline stage may leave a group empty; both always exist, so that their order means the same on every rank.

    Args:
        parameters: Those that are trained, by name.
        settings: The arguments of ``MCoreGPT``.
    """
    from torch.optim import SGD, AdamW

    tensors = [parameter for _, parameter in sorted(parameters, key=lambda pair: pair[0])]
    groups = [
        {"params": [p for p in tensors if p.dim() > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in tensors if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if settings["optimizer"] == "sgd":
        return SGD(groups, lr=settings["learning_rate"], momentum=settings["sgd_momentum"])
    betas = tuple(settings["betas"])
    return AdamW(groups, lr=settings["learning_rate"], betas=betas, eps=settings["eps"])


def _course(optimizer: "Optimizer", settings: Mapping[str, Any], trainer: "pl.Trainer") -> "LRScheduler":
    name, warmup = settings["lr_scheduler_type"], settings["warmup_steps"]
    total = _steps(trainer)
    check_end(settings, total)
    if name is None:
        peak, least = settings["learning_rate"], settings["min_learning_rate"]
        steps = _steps_of_warmup(warmup, total)
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, learning_rate_course(trainer, peak, least, steps))
    from transformers import get_scheduler

    options = settings["lr_scheduler_kwargs"] or {}
    steps = _steps_of_warmup(warmup, total)
    try:
        scheduler: LRScheduler = get_scheduler(name, optimizer, steps, total, options)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={options!r}: {reason}") from error
    return scheduler


def _check_numbers(settings: Mapping[str, Any]) -> None:
    """Refuse now what torch's optimizers refuse once the model is built."""
    if not all(0 <= beta < 1 for beta in settings["betas"]):
        raise ValueError(f"betas={tuple(settings['betas'])} are out of range; choose two of 0 or more, below 1")
    for name in ("weight_decay", "eps", "sgd_momentum"):
        if settings[name] < 0:
            raise ValueError(f"{name}={settings[name]} is too small; choose 0 or more")


def _check_warmup(warmup: float, course: str | None) -> None:
    if isinstance(warmup, bool) or not isinstance(warmup, int | float):
        raise TypeError(f"warmup_steps={warmup!r} is not a number; give steps, or a share of all steps below 1")
    if warmup < 0:
        raise ValueError(f"warmup_steps={warmup} is too small; choose 0 or more")
    if warmup >= 1 and warmup != int(warmup):
        raise ValueError(f"warmup_steps={warmup} is neither a number of steps nor a share below 1 of them; choose one")
    if warmup and course == _WITHOUT_WARMUP:
        raise ValueError(
            f"warmup_steps={warmup} with lr_scheduler_type='constant', which has no warm-up; choose"
            " 'constant_with_warmup', or 0"
        )


def _steps(trainer: "pl.Trainer") -> int | None:
    """Return the optimizer steps of a run, None where nobody knows."""
    total = trainer.estimated_stepping_batches
    return None if total < 0 or math.isinf(total) else int(total)


def _steps_of_warmup(warmup: float, total: int | None) -> int:
    if warmup == 0 or warmup >= 1:
        return int(warmup)
    assert total is not None, "check_end refuses a share of an unknown number"
    return math.ceil(total * warmup)
