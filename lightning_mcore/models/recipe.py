# SPDX-License-Identifier: Apache-2.0
"""The training recipe of ``MCoreGPT``: its optimizer and learning-rate schedule, as plain data.

A :class:`Recipe` checks its values when it is created, before anything is allocated; :meth:`Recipe.build` makes
optimizer and scheduler once the parameters exist. torch and transformers are imported only by the methods that need
them, so the command line can read a recipe without them.

The schedule is our own warm-up and cosine, or one of transformers' schedules by its name. Ours differs from
transformers' ``"cosine"``, which starts at a learning rate of zero, so its first step changes nothing, and which needs
transformers.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from lightning_mcore.config.value_checks import Settings, make_fields_plain

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

OptimizerName: TypeAlias = Literal["adamw", "sgd", "muon"]
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

LR_EMBEDDING = 1e-6  # LoRA+'s default in PEFT
_WITHOUT_WARMUP = "constant"
_WITHOUT_END = (_WITHOUT_WARMUP, "constant_with_warmup", "inverse_sqrt")  # these do not need the number of steps


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """Optimizer and learning rate, by default AdamW with linear warm-up and cosine decay.

    Args:
        learning_rate: The peak of the learning rate, reached after the warm-up.
        min_learning_rate: The learning rate at the end of the cosine, at the last step.
        weight_decay: Weight decay of matrices; biases and norms, which have one dimension, have none.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        optimizer: ``"adamw"``, ``"sgd"``, or ``"muon"`` for the matrices inside the layers and AdamW for the rest, as
            in :class:`~lightning_mcore.MuonWithAdamW`. Muon's steps are scaled to the size of AdamW's, so that both
            have the same learning rate.
        sgd_momentum: Momentum of SGD.
        warmup_steps: Optimizer steps over which the learning rate rises; a number below 1 is a fraction of all steps.
        lr_scheduler_type: The name of a transformers schedule, such as ``"linear"``; None for a linear warm-up, whose
            first step already changes the weights, and a cosine.
        lr_scheduler_kwargs: Other arguments of that schedule, such as ``min_lr``; None for none.
        loraplus_lr_ratio: LoRA+: how many times A's learning rate B and trained vectors get; None for the same rate.
        loraplus_lr_embedding: With LoRA+, the learning rate of the embedding's adapters.

    Raises:
        ValueError: A name does not exist, a number is out of range, or two settings contradict each other.
        TypeError: A value that must be a number is not one.

    Examples:
        >>> from lightning_mcore import Recipe
        >>> warmup_cosine = Recipe(learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=0.05)
        >>> warmup_linear = Recipe(learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=100)
    """

    argument = "recipe"
    learning_rate: float = 3e-4
    min_learning_rate: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    optimizer: OptimizerName = "adamw"
    sgd_momentum: float = 0.9
    warmup_steps: float = 0
    lr_scheduler_type: SchedulerName | None = None
    lr_scheduler_kwargs: dict[str, Any] | None = None
    loraplus_lr_ratio: float | None = None
    loraplus_lr_embedding: float = LR_EMBEDDING

    def __post_init__(self) -> None:
        """Check the values."""
        make_fields_plain(self)
        self._check_types()
        for name, known in (("optimizer", OptimizerName), ("lr_scheduler_type", SchedulerName)):
            given = getattr(self, name)
            if given not in get_args(known) and not (name == "lr_scheduler_type" and given is None):
                raise ValueError(f"{name}={given!r} is not available; choose one of {get_args(known)}")
        self._check_schedule()
        self._check_warmup()
        if not all(0 <= beta < 1 for beta in self.betas):  # torch would refuse it after the model is built
            raise ValueError(f"betas={self.betas} are out of range; choose two of 0 or more, below 1")
        if self.loraplus_lr_ratio is not None and self.loraplus_lr_ratio <= 0:
            raise ValueError(f"loraplus_lr_ratio={self.loraplus_lr_ratio} is too small; choose more than 0, such as 16")
        if self.loraplus_lr_ratio is None and self.loraplus_lr_embedding != LR_EMBEDDING:
            raise ValueError(
                f"loraplus_lr_embedding={self.loraplus_lr_embedding} needs loraplus_lr_ratio; give both, or neither"
            )
        if self.loraplus_lr_ratio is not None and self.optimizer == "muon":
            raise ValueError(
                f"loraplus_lr_ratio={self.loraplus_lr_ratio} sets learning rates of AdamW or SGD, not of"
                " optimizer='muon'; leave one of them out"
            )
        for name in ("weight_decay", "eps", "sgd_momentum", "loraplus_lr_embedding"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is too small; choose 0 or more")

    def plain(self) -> dict[str, Any]:
        """Return all fields as plain data for YAML; :meth:`of` reads it back."""
        return {**dataclasses.asdict(self), "betas": [*self.betas]}

    def check_unused(self) -> None:
        """Raise ValueError for a changed recipe if the ``optimizer:`` of a LightningCLI file would override it."""
        for field in dataclasses.fields(self):
            if (given := getattr(self, field.name)) != field.default:
                raise ValueError(
                    "optimizer: replaces the model's own, so"
                    f" model.recipe.{field.name}={given!r} would have no effect; leave one of them out"
                )

    def check_model(self, has_adapters: bool, uses_mup: bool) -> None:
        """Raise ValueError for LoRA+ without adapters, and for muP's learning rates with Muon or LoRA+."""
        if uses_mup and self.optimizer == "muon":
            raise ValueError(
                "optimizer='muon' has no learning rates by width, which use_mup=True needs; choose 'adamw', or set"
                " use_mup to False"
            )
        if self.loraplus_lr_ratio is not None and not has_adapters:
            raise ValueError(
                f"loraplus_lr_ratio={self.loraplus_lr_ratio} is for adapters, and the model has none; give"
                " lora=LoRA(...), or leave it out"
            )
        if self.loraplus_lr_ratio is not None and uses_mup:
            raise ValueError(
                f"loraplus_lr_ratio={self.loraplus_lr_ratio} sets learning rates of adapters, and so does use_mup=True;"
                " leave one of them out"
            )

    def check_end(self, total: int | None) -> None:
        """Raise ValueError if the schedule needs the number of optimizer steps and ``total`` is None (unknown)."""
        if total is not None:
            return
        course, peak, least = self.lr_scheduler_type, self.learning_rate, self.min_learning_rate
        if course is not None and course not in _WITHOUT_END:
            raise ValueError(
                f"the number of steps is unknown, and lr_scheduler_type={course!r} needs it; set Trainer(max_steps=...)"
                f", or choose one of {_WITHOUT_END}"
            )
        if 0 < self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is a share of the steps, whose number is unknown; set"
                " Trainer(max_steps=...), or give a number of steps"
            )
        if course is None and least != peak:
            raise ValueError(
                f"the number of steps is unknown, and learning_rate={peak} decays to min_learning_rate={least}; set "
                "Trainer(max_steps=...), or min_learning_rate=learning_rate for a constant rate"
            )

    def build(
        self, parameters: "list[tuple[str, Parameter]]", trainer: "pl.Trainer", width_mult: float = 1.0
    ) -> "OptimizerLRSchedulerConfig":
        """Return the optimizer and its scheduler, which steps with it.

        Args:
            parameters: The trained parameters, by name.
            trainer: The trainer, which knows the number of steps.
            width_mult: ``mup_width_mult`` of a model with ``use_mup``.

        Raises:
            ValueError: The number of steps is unknown and the schedule needs it, or transformers rejects its arguments.
        """
        optimizer = self.build_optimizer(parameters, width_mult)
        scheduler = self._build_scheduler(optimizer, _number_of_steps(trainer))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def build_optimizer(self, parameters: "list[tuple[str, Parameter]]", width_mult: float = 1.0) -> "Optimizer":
        """Return the optimizer, with weight decay on matrices only; ``parameters`` are the trained ones, by name."""
        from torch.optim import SGD, AdamW

        parameters = sorted(parameters, key=lambda pair: pair[0])
        if self.optimizer == "muon":
            return self._build_muon(parameters)
        if self.loraplus_lr_ratio is not None:
            rates = (self.learning_rate, self.loraplus_lr_ratio, self.weight_decay, self.loraplus_lr_embedding)
            groups = loraplus_groups(parameters, *rates)
        else:
            tensors = [parameter for _, parameter in parameters]
            # Both exist on every stage, so that their order means the same on every rank
            groups = [
                {"params": [p for p in tensors if p.dim() > 1], "weight_decay": self.weight_decay},
                {"params": [p for p in tensors if p.dim() <= 1], "weight_decay": 0.0},
            ]
            if width_mult != 1.0:
                groups = self._mup_groups(groups, width_mult)
        if self.optimizer == "sgd":
            return SGD(groups, lr=self.learning_rate, momentum=self.sgd_momentum)
        return AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps)

    def _build_muon(self, parameters: "list[tuple[str, Parameter]]") -> "Optimizer":
        from lightning_mcore.optimizer.muon import MuonWithAdamW

        matrices: list[Parameter] = []
        others: list[Parameter] = []
        for name, parameter in parameters:
            is_end = "embed" in name or getattr(parameter, "is_embedding_or_output_parameter", False)
            (matrices if parameter.dim() == 2 and not is_end else others).append(parameter)
        rest: list[dict[str, Any]] = [
            {"params": [p for p in others if p.dim() > 1]},
            {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return MuonWithAdamW(
            matrices,
            rest,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            adjust_lr_fn="match_rms_adamw",
            adamw_lr=self.learning_rate,
            adamw_betas=self.betas,
            adamw_eps=self.eps,
            adamw_weight_decay=self.weight_decay,
        )

    def _mup_groups(self, groups: list[dict[str, Any]], width_mult: float) -> list[dict[str, Any]]:
        """Return the groups with the learning rates of muP, and the embedding and output layer in one of their own.

        Source: ``get_mup_config_overrides`` (megatron.core.optimizer, 0.19.2).
        """
        matrices, vectors = groups
        by_end: dict[bool, list[Any]] = {True: [], False: []}
        for parameter in matrices["params"]:
            marks = (getattr(parameter, name, False) for name in ("is_embedding_parameter", "shared_embedding"))
            by_end[any(marks)].append(parameter)
        ends, hidden = ({**matrices, "params": by_end[is_end]} for is_end in (True, False))
        if self.optimizer == "sgd":
            return [hidden, *({**group, "lr": self.learning_rate * width_mult} for group in (ends, vectors))]
        return [{**hidden, "lr": self.learning_rate / width_mult, "eps": self.eps / width_mult}, ends, vectors]

    def _build_scheduler(self, optimizer: "Optimizer", estimated: float) -> "LRScheduler":
        # Lightning's estimate is -1 or infinite if the run has no end
        total = None if estimated < 0 or math.isinf(estimated) else int(estimated)
        self.check_end(total)
        warmup = int(self.warmup_steps)
        if 0 < self.warmup_steps < 1:
            assert total is not None, "check_end refuses a share of an unknown number"
            warmup = math.ceil(total * self.warmup_steps)
        if self.lr_scheduler_type is None:
            from torch.optim.lr_scheduler import LambdaLR

            least = self.min_learning_rate / self.learning_rate if self.learning_rate else 1.0
            steps = math.inf if total is None else total
            return LambdaLR(
                optimizer, functools.partial(warmup_cosine, warmup_steps=warmup, total_steps=steps, least=least)
            )
        from transformers import get_scheduler

        options = self.lr_scheduler_kwargs or {}
        decay = options.get("num_decay_steps") or 0
        if total is not None and warmup + decay > total:
            from lightning.pytorch.utilities import rank_zero_warn

            rank_zero_warn(
                f"warmup_steps={warmup} and num_decay_steps={decay} are more than the {total} steps of the run, so the"
                " learning rate jumps in between; choose fewer, or more steps"
            )
        try:
            scheduler: LRScheduler = get_scheduler(self.lr_scheduler_type, optimizer, warmup, total, options)
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"lr_scheduler_type={self.lr_scheduler_type!r} with lr_scheduler_kwargs={options!r}: {reason}"
            ) from error
        return scheduler

    def _check_types(self) -> None:
        betas = tuple(_number(f"betas[{i}]", beta) for i, beta in enumerate(self.betas))  # YAML has lists
        if len(betas) != 2:
            raise ValueError(f"betas={betas} are not two numbers; give two, such as (0.9, 0.95)")
        object.__setattr__(self, "betas", betas)
        rates = ("learning_rate", "min_learning_rate", "loraplus_lr_embedding")
        for name in (*rates, "weight_decay", "eps", "sgd_momentum"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        warmup = _number("warmup_steps", self.warmup_steps, "steps, or a share of all steps below 1")
        object.__setattr__(self, "warmup_steps", warmup)
        if self.loraplus_lr_ratio is not None:
            object.__setattr__(self, "loraplus_lr_ratio", _number("loraplus_lr_ratio", self.loraplus_lr_ratio))

    def _check_schedule(self) -> None:
        peak, least, course = self.learning_rate, self.min_learning_rate, self.lr_scheduler_type
        if not 0 <= least <= peak:
            raise ValueError(f"min_learning_rate={least} is not between 0 and learning_rate={peak}; choose one")
        if course is None and self.lr_scheduler_kwargs:
            raise ValueError(
                "lr_scheduler_kwargs needs lr_scheduler_type; name a schedule of transformers, or leave both out"
            )
        if course is not None and least:
            raise ValueError(
                f"min_learning_rate={least} works only without lr_scheduler_type, which is {course!r};"
                " leave one out, or use lr_scheduler_type='cosine_with_min_lr' with lr_scheduler_kwargs="
                "{'min_lr': ...}"
            )

    def _check_warmup(self) -> None:
        warmup = self.warmup_steps
        if warmup < 0:
            raise ValueError(f"warmup_steps={warmup} is too small; choose 0 or more")
        if warmup >= 1 and warmup != int(warmup):
            raise ValueError(
                f"warmup_steps={warmup} is neither a number of steps nor a share below 1 of them; choose one"
            )
        if warmup and self.lr_scheduler_type == _WITHOUT_WARMUP:
            raise ValueError(
                f"warmup_steps={warmup} with lr_scheduler_type='constant', which has no warm-up; choose"
                " 'constant_with_warmup', or 0"
            )


def _number_of_steps(trainer: "pl.Trainer") -> float:
    """Return the optimizer steps of a run: Lightning's estimate, which ignores the scheduler of accumulated batches."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    estimated = trainer.estimated_stepping_batches
    schedules = [callback for callback in trainer.callbacks if isinstance(callback, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    if not schedules or trainer.max_epochs in (None, -1) or math.isinf(trainer.num_training_batches):
        return estimated
    windows = map(schedules[-1].get_accumulate_grad_batches, range(trainer.max_epochs))
    steps = sum(math.ceil(trainer.num_training_batches / window) for window in windows)
    return steps if trainer.max_steps < 0 else min(steps, trainer.max_steps)


def _number(name: str, value: Any, advice: str = "one") -> float:
    """Return a Python number from a number or a scalar; an int stays an int, infinity and NaN raise."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is not a number; give {advice}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} is not finite; give {advice}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def warmup_cosine(step: int, warmup_steps: int, total_steps: float, least: float) -> float:
    """Return the learning rate's factor, which rises over the warm-up, then falls as a cosine to ``least``.

    ``step`` is the number of optimizer steps taken so far; ``total_steps`` is infinite if unknown. With 2 warm-up steps
    of 10 and ``least=0.1``, steps 0 to 3 have 0.333, 0.667, 1.0 and 0.966, and step 10 would have 0.1.
    """
    if step < warmup_steps:
        # Not step / warmup_steps, which would make the first step's rate zero
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2


def loraplus_groups(
    parameters: "Iterable[tuple[str, Parameter]]",
    lr: float,
    ratio: float,
    weight_decay: float = 0.0,
    lr_embedding: float = LR_EMBEDDING,
) -> list[dict[str, Any]]:
    """Return LoRA+'s parameter groups for an optimizer: B and trained vectors learn faster than A.

    For your own ``configure_optimizers``; ``Recipe(loraplus_lr_ratio=...)`` does the same. All groups exist on every
    rank, even if empty, so that their order is the same.

    Args:
        parameters: Names and parameters, as ``named_parameters()`` returns them; frozen ones are skipped.
        lr: Learning rate of A and of other matrices.
        ratio: How many times ``lr`` the learning rate of B and of vectors is.
        weight_decay: Weight decay of matrices; vectors have none.
        lr_embedding: Learning rate of the embedding's adapters.

    Examples:
        >>> import torch
        >>> from lightning_mcore import loraplus_groups
        >>> adapter = torch.nn.ParameterDict({"lora_A": torch.randn(2, 8), "lora_B": torch.zeros(8, 2)})
        >>> optimizer = torch.optim.AdamW(loraplus_groups(adapter.named_parameters(), lr=1e-4, ratio=16))
        >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [(1, 0.0001), (0, 0.0016), (1, 0.0016), (0, 1e-06)]
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": lr, "weight_decay": weight_decay},
        {"params": [], "lr": lr * ratio, "weight_decay": 0.0},
        {"params": [], "lr": lr * ratio, "weight_decay": weight_decay},
        {"params": [], "lr": lr_embedding, "weight_decay": weight_decay},
    ]
    for name, parameter in parameters:
        if parameter.requires_grad:
            group = 1 if parameter.dim() <= 1 else 2 if name.endswith("lora_B") else 0
            group = 3 if ".word_embeddings.lora." in name else group
            groups[group]["params"].append(parameter)
    return groups
