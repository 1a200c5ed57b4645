# SPDX-License-Identifier: Apache-2.0
"""What becomes of drawn settings: the verdict of validation, and a course of training on live ranks.

The course: train all steps with validations on the way, and save in the middle. Go on from there on the same layout,
which must give the same numbers to the last digit, and on another layout, which must load the same weights and give the
same losses within the rounding of the precision (:func:`tolerance`). Last, one rank validates the weights of the end.
"""

import math
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.distributed import DistributedDataParallelConfig
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCorePrecision, MCoreStrategy
from tests.fuzz.draw import OPTIMIZERS, Settings
from tests.parity.bare_loop import DTYPES
from tests.parity.global_tensors import Slice, assemble, weight_slices
from tests.support.toy import make_trainer


@dataclass(frozen=True)
class Verdict:
    """What validation says of settings.

    Args:
        accepted: Whether they may train.
        text: Why not.
        ours: Whether the refusal is a sentence of this package, and not an error of another.
    """

    accepted: bool
    text: str = ""
    ours: bool = True

    @classmethod
    def of(cls, error: Exception) -> "Verdict":
        """Return the refusal that an error is."""
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        return cls(False, str(error), ours=f"{os.sep}lightning_mcore{os.sep}" in last)


def judge(settings: Settings) -> Verdict:
    """Validate settings as a Trainer does before it opens process groups; starts nothing."""
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's hints about models as small as these
            trainer = _trainer(settings)
            model = MCoreGPT(**settings.model)
            model.trainer = trainer
            trainer.state.fn = TrainerFn.FITTING
            trainer.strategy.connect(model)
    except Exception as error:
        return Verdict.of(error)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return Verdict(True)


@dataclass
class Outcome:
    """What the course of one settings was on this rank.

    Args:
        refusals: Why an optimizer was refused, which is known only when there is a model.
        problems: What is wrong.
        evaluated: The loss of each validation loader after training.
        checks: What was compared.
    """

    refusals: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


def train(batch: Sequence[tuple[Settings, Settings | None]], folder: str) -> list[Outcome]:
    """Take the course of each settings on this rank; the other layout of each goes on from its checkpoint."""
    return [_train_one(settings, other, f"{folder}/{settings.seed}") for settings, other in batch]


def evaluate_alone(batch: Sequence[Settings], folder: str) -> list[list[float]]:
    """Return, on one rank, the validation losses of the weights that each settings has at the end."""
    found = []
    for settings in batch:
        trainer, path = _trainer(settings), f"{folder}/{settings.seed}-end.ckpt"
        trainer.validate(_model(settings), _val_loaders(settings), ckpt_path=path, verbose=False)
        found.append(_val_losses(trainer))
    return found


def _train_one(settings: Settings, other: Settings | None, path: str) -> Outcome:
    outcome, course = Outcome(), settings.course
    whole = _Watch({course.stop: f"{path}.ckpt", course.steps: f"{path}-end.ckpt"})
    trainer = _fit(settings, whole, outcome)
    if trainer is None:
        return outcome
    trainer.validate(trainer.lightning_module, _val_loaders(settings), verbose=False)
    outcome.evaluated = _val_losses(trainer)
    outcome.problems = [f"{place} is {loss}" for place, loss in whole.losses.items() if not math.isfinite(loss)]
    if trainer.global_step != course.steps:
        outcome.problems.append(f"global_step is {trainer.global_step} after {course.steps} steps")
    again, there = _Watch(), _Watch()
    if _fit(settings, again, outcome, f"{path}.ckpt") is None:
        outcome.problems.append(f"cannot be resumed on the same layout: {outcome.refusals[-1].text}")
        return outcome
    outcome.checks.append("resumed on the same layout")
    outcome.problems += [f"{outcome.checks[-1]}: {text}" for text in _unlike(whole, again, course.stop)]
    if other is not None and _fit(other, there, outcome, f"{path}.ckpt"):
        outcome.checks.append("resumed on another layout")
        where = f"resumed on MCoreStrategy({other.strategy})"
        for part in there.before:
            if not torch.equal(part.of(whole.saved[part.key]), part.data):
                outcome.problems.append(f"{where}: {part.key} is not what was saved")
        if _trains_alike(other):
            outcome.checks.append("resumed on another layout with the same losses")
            close = _unlike(whole, there, course.stop, tolerance(other))
            outcome.problems += [f"{where}: {text}" for text in close]
    return outcome


def _fit(settings: Settings, watch: "_Watch", outcome: Outcome, ckpt_path: str | None = None) -> pl.Trainer | None:
    """Train to the last step, or add a refusal to the outcome."""
    course = settings.course
    rows = settings.step_rows * course.steps_in_epoch + course.more_rows * settings.world_size
    trainer = _trainer(settings, max_steps=course.steps, max_epochs=-1, callbacks=[watch])
    loaders = _loader(settings, rows, settings.rows), _val_loaders(settings)
    try:
        trainer.fit(_model(settings), *loaders, ckpt_path=ckpt_path)
    except (TypeError, ValueError) as error:
        if watch.losses or not Verdict.of(error).ours:
            raise
        outcome.refusals.append(Verdict.of(error))
        return None
    return trainer


def tolerance(settings: Settings) -> float:
    """Return by how much a loss may differ between two orders of the same sums.

    A token's loss moves by at most twice the error of a logit. A logit, whose size is about 1 here, has the errors of
    the roundings on the way to it, about 16 for each layer and 16 outside of the layers, with random signs.
    """
    unit = torch.finfo(DTYPES[settings.trainer["precision"].split("-")[0]]).eps / 2
    roundings = 16 * (settings.model["transformer"]["num_layers"] + 1)
    return float(2 * unit * math.sqrt(roundings))


def evaluates_alike(settings: Settings) -> bool:
    """Return whether an evaluation computes the same on every layout, apart from rounding.

    Experts with a capacity drop tokens by what else is in the microbatch of their rank. In 16 bits the rounding
    decides for some tokens which expert they go to.
    """
    transformer = settings.model["transformer"]
    routed = "num_moe_experts" in transformer
    return not routed or (
        settings.trainer["precision"] == "32-true" and "moe_expert_capacity_factor" not in transformer
    )


def _trains_alike(settings: Settings) -> bool:
    """Return whether training computes the same on every layout, apart from rounding.

    Dropout draws other numbers, routers balance each microbatch, fp16 skips steps by what overflows in a sum, and
    without weights by tokens a short batch counts as much as a long one.
    """
    transformer = settings.model["transformer"]
    return evaluates_alike(settings) and not (
        transformer.get("attention_dropout")
        or transformer.get("hidden_dropout")
        or transformer.get("moe_aux_loss_coeff")
        or transformer.get("moe_router_load_balancing_type") == "sinkhorn"
        or settings.trainer["precision"].startswith("16")
        or (settings.course.more_rows and not transformer.get("calculate_per_token_loss", True))
    )


def _unlike(whole: "_Watch", again: "_Watch", stop: int, allowed: float = 0.0) -> Iterator[str]:
    """Yield how a run that goes on after ``stop`` steps differs; weights and moments only if nothing is allowed to."""
    wanted, found = ({at: loss for at, loss in run.losses.items() if at[1] > stop} for run in (whole, again))
    if not allowed and wanted.keys() != found.keys():
        yield f"has {list(found)} and not {list(wanted)}"
    for at in sorted(wanted.keys() & found.keys()):
        if not abs(found[at] - wanted[at]) <= allowed:
            yield f"{at} is {found[at]!r} and not {wanted[at]!r}"
    for one, other in zip(whole.after, again.after, strict=True) if not allowed else ():
        if not torch.equal(one.data, other.data):
            yield f"{one.key} differs at the end"


class _Watch(pl.Callback):
    """Saves, and keeps what is seen.

    Args:
        saves: Where to save after which optimizer steps.

    Attributes:
        losses: By name, optimizer step, number of the validation at that step, and loader.
        before: This rank's weights when training begins.
        after: This rank's weights when it ends.
        saved: The weights of all ranks at the first save.
    """

    def __init__(self, saves: dict[int, str] | None = None) -> None:
        self.saves = saves or {}
        self.losses: dict[tuple[str, int, int, int], float] = {}
        self.before: list[Slice] = []
        self.after: list[Slice] = []
        self.saved: dict[str, torch.Tensor] = {}
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._step = trainer.global_step
        self.before = _weights(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = step = trainer.global_step
        loss = float(trainer.strategy.reduce(outputs["loss"])) * trainer.accumulate_grad_batches
        self.losses["train_loss", step, 0, 0] = loss
        if step in self.saves:
            trainer.save_checkpoint(self.saves[step])
            of_ranks: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(of_ranks, _weights(trainer))
            self.saved = self.saved or assemble(part for of_rank in of_ranks for part in of_rank)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        number = sum((name, at, loader) == ("val_loss", step, 0) for name, at, _, loader in self.losses)
        if trainer.state.fn == TrainerFn.FITTING:
            for loader, loss in enumerate(_val_losses(trainer)):
                self.losses["val_loss", step, number, loader] = loss

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.after = _weights(trainer)


class _Model(MCoreGPT):
    """A GPT with a drawn optimizer, which is no hyper-parameter."""

    optimizer: str

    def configure_optimizers(self) -> Any:
        kind: Any = getattr(torch.optim, self.optimizer.split()[0])
        optimizer = kind(self.parameters(), **OPTIMIZERS[self.optimizer])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _model(settings: Settings) -> _Model:
    model = _Model(**settings.model)
    model.optimizer = settings.course.optimizer
    return model


def _loader(settings: Settings, rows: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rows)
    text = torch.randint(32, (rows, settings.model["seq_length"] + 1), generator=generator)
    samples: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in text]
    return DataLoader(samples, batch_size=batch_size)


def _val_loaders(settings: Settings) -> list[DataLoader[Any]]:
    return [_loader(settings, rows, settings.course.val_rows) for rows in settings.course.val_samples]


def _val_losses(trainer: pl.Trainer) -> list[float]:
    """Return the validation loss of each loader."""
    return [float(v) for name, v in sorted(trainer.callback_metrics.items()) if name.startswith("val_loss")]


def _weights(trainer: pl.Trainer) -> list[Slice]:
    return weight_slices(trainer.strategy._chunks.bare)  # type: ignore[attr-defined]


def _trainer(settings: Settings, **arguments: Any) -> pl.Trainer:
    ddp_config = DistributedDataParallelConfig(**settings.ddp) if settings.ddp else None
    arguments = {"max_steps": 1, **settings.trainer, **arguments}
    precision = MCorePrecision(arguments.pop("precision"))  # Lightning turns "16-mixed" into bf16 on a CPU
    strategy = MCoreStrategy(**settings.strategy, ddp_config=ddp_config, precision_plugin=precision)
    return make_trainer(strategy, devices=settings.world_size, **arguments)
