# SPDX-License-Identifier: Apache-2.0
"""All ranks collect Python's garbage after the same steps, and nothing of it outlives a fit."""

import contextlib
import gc
import multiprocessing
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_mcore import GarbageCollection
from tests.support.ranks import run_ranks
from tests.support.toy import PlainNet, loader, make_trainer

pytestmark = pytest.mark.distributed


class Wasteful(PlainNet):
    """Leaves circles of objects, more on rank 1, and fails after ``fails_after`` batches."""

    fails_after = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(20_000 * dist.get_rank()):
            circle: list[Any] = []
            circle.append(circle)
        if batch_idx == self.fails_after:
            raise RuntimeError("enough")
        return super().training_step(batch, batch_idx)


class Collections(pl.Callback):
    """Notes after how many steps garbage is collected, and whether a forked process would collect on its own."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.of_fork: bool | None = None
        self.trainer: pl.Trainer | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trainer = trainer
        gc.callbacks.append(self.note)

    def note(self, phase: str, _: Any) -> None:
        if phase == "start":
            assert self.trainer is not None
            self.steps.append(self.trainer.global_step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        process = context.Process(target=lambda: answers.put(gc.isenabled()))
        process.start()
        self.of_fork = answers.get()
        process.join()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gc.callbacks.remove(self.note)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        gc.callbacks.remove(self.note)


def fit(fails_after: int = -1, is_on: bool = True) -> tuple[list[int], bool | None, bool, int]:
    """Train ten steps of two batches; return after which steps was collected, and what is left after the run."""
    gc.enable()
    gc.unfreeze()
    seen, module = Collections(), Wasteful()
    module.fails_after = fails_after
    callbacks = [seen, GarbageCollection(every_n_steps=3)] if is_on else [seen]
    trainer = make_trainer({}, callbacks=callbacks, accumulate_grad_batches=2, max_epochs=1)
    with pytest.raises(RuntimeError, match="enough") if fails_after >= 0 else contextlib.nullcontext():
        trainer.fit(module, loader(80, 2), loader(4, 2))
    return seen.steps, seen.of_fork, gc.isenabled(), gc.get_freeze_count()


def test_ranks_collect_after_the_same_steps_and_after_validation() -> None:
    alone = [steps for steps, *_ in run_ranks(2, fit, is_on=False)]
    assert set(range(1, 10)) <= set(alone[1])  # else there would be nothing to align
    for found in run_ranks(2, fit):
        assert found == ([0, 3, 6, 9, 10], True, True, 0)


def test_a_failed_fit_collects_automatically_again() -> None:
    for steps, _, *left in run_ranks(2, fit, fails_after=9):
        assert (steps, left) == ([0, 3], [True, 0])


@pytest.mark.parametrize(("given", "error"), [(0, ValueError), ("ten", TypeError)])
def test_steps_between_collections_are_counted_from_one(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"every_n_steps={given!r} is"):
        GarbageCollection(every_n_steps=given)
