# SPDX-License-Identifier: Apache-2.0
"""Every callback class of Lightning: it leaves the weights and the progress of one rank, or is rejected in a sentence.

Each class has a line in ``CALLBACKS``. It runs on two ranks, in a pipeline and in a plain module with data parallelism,
and on one rank under Lightning's own strategy. What a class shows besides, and its use with other settings, is compared
in the tests of loops, logs, progress and checkpoints.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks
from torch.utils.data import DistributedSampler

from tests.support.ranks import run_ranks
from tests.support.toy import Memory, PlainNet, Samples, StagedNet, loader, make_trainer, weights

pytestmark = pytest.mark.distributed


class Finetuning(callbacks.BaseFinetuning):
    """Freezes the first layer for the first epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze([pl_module.net[0]])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-3, initial_denom_lr=1.0)


class Writer(callbacks.BasePredictionWriter):
    """Predicts nothing: ``fit`` never calls it."""


class Saver(callbacks.Checkpoint):
    """Saves at the end of each epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/own.ckpt")


class Bar(callbacks.ProgressBar):
    """Counts what a bar would show."""

    def __init__(self) -> None:
        super().__init__()
        self.enable()

    def disable(self) -> None:
        """Lightning calls it on other ranks than 0."""

    def enable(self) -> None:
        """Nothing is hidden."""


Make = Callable[[], pl.Callback]
CALLBACKS: dict[str, Make] = {
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
    "BaseFinetuning": Finetuning,
    "BasePredictionWriter": lambda: Writer("epoch"),
    "BatchSizeFinder": lambda: callbacks.BatchSizeFinder(max_trials=1),
    "Callback": callbacks.Callback,
    "Checkpoint": Saver,
    "DeviceStatsMonitor": lambda: callbacks.DeviceStatsMonitor(cpu_stats=True),
    "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(decay=0.8),
    "EarlyStopping": lambda: callbacks.EarlyStopping("val_loss", mode="max", patience=1),
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 1}),
    "LambdaCallback": lambda: callbacks.LambdaCallback(on_train_start=lambda trainer, module: None),
    "LearningRateFinder": lambda: callbacks.LearningRateFinder(num_training_steps=4, early_stop_threshold=None),
    "LearningRateMonitor": lambda: callbacks.LearningRateMonitor("step"),
    "ModelCheckpoint": lambda: callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=1),
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "ModelSummary": lambda: callbacks.ModelSummary(max_depth=-1),
    "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint("."),
    "ProgressBar": Bar,
    "RichModelSummary": lambda: callbacks.RichModelSummary(max_depth=-1),
    "RichProgressBar": callbacks.RichProgressBar,
    "SpikeDetection": lambda: callbacks.SpikeDetection(warmup=2, exclude_batches_path="skipped.json"),
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    "TQDMProgressBar": callbacks.TQDMProgressBar,
    "ThroughputMonitor": lambda: callbacks.ThroughputMonitor(lambda batch: len(batch["x"]), window_size=4),
    "Timer": lambda: callbacks.Timer(duration={"hours": 1}),
    "WeightAveraging": callbacks.WeightAveraging,
}

# Strategy, module, and the number of batches of a step: four samples on every layout
LAYOUTS: dict[str, tuple[Any, type[pl.LightningModule], int]] = {
    "one": ("auto", StagedNet, 2),
    "one-plain": ("auto", PlainNet, 2),
    "pp2": ({"pipeline_model_parallel_size": 2}, StagedNet, 2),
    "dp2-plain": ({}, PlainNet, 1),
}
UNFROZEN = "2 parameters were frozen when training began"
# By Lightning itself, or by a sentence of ours; StagedNet has no backbone when Lightning looks for it.
REJECTED: dict[str, dict[str, str]] = {
    "pp2": {
        "BackboneFinetuning": "'StagedNet' object has no attribute 'backbone'",
        "BaseFinetuning": "'StagedNet' object has no attribute 'net'",
        "BatchSizeFinder": "The Batch size finder is not supported with distributed strategies",
        "EMAWeightAveraging": "EMAWeightAveraging copies the whole module",
        "ModelPruning": "ModelPruning looks for weights before configure_model()",
        "StochasticWeightAveraging": "StochasticWeightAveraging copies the whole module",
        "WeightAveraging": "WeightAveraging copies the whole module",
    },
    "dp2-plain": {
        "BackboneFinetuning": UNFROZEN,
        "BaseFinetuning": UNFROZEN,
        "BatchSizeFinder": "The Batch size finder is not supported with distributed strategies",
    },
}


def fit(layout: str, name: str, folder: str) -> dict[str, Any]:
    """Train for two epochs with one callback; return weights, progress and logged names, or the error."""
    strategy, kind, accumulated = LAYOUTS[layout]
    callback, memory, module = CALLBACKS[name](), Memory(), kind()
    if name == "GradientAccumulationScheduler":
        accumulated = 1
        callback = callbacks.GradientAccumulationScheduler({0: 1, 1: 2} if layout == "dp2-plain" else {0: 2, 1: 4})
    if name == "BackboneFinetuning" and isinstance(module, PlainNet):
        module.backbone = module.net[0]
    module.learning_rate = 1e-2  # type: ignore[assignment]  # for the finder
    trainer = make_trainer(
        strategy,
        callbacks=[callback],
        accumulate_grad_batches=accumulated,
        max_epochs=2,
        logger=memory,
        default_root_dir=folder,
        use_distributed_sampler=False,  # in order, so that a step has the same samples on one rank and on two
        enable_progress_bar=isinstance(callback, callbacks.ProgressBar),
        enable_checkpointing=isinstance(callback, callbacks.Checkpoint),
        enable_model_summary=isinstance(callback, callbacks.ModelSummary),
    )
    samplers = [None, None]
    if layout == "dp2-plain":
        samplers = [DistributedSampler(Samples(size), shuffle=False) for size in (16, 8)]
    data = [loader(size, 2, sampler=sampler) for size, sampler in zip((16, 8), samplers, strict=True)]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(module, *data)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    names = {each for row in memory.rows for each in row}
    return {
        "weights": weights(module),
        "steps": trainer.global_step,
        "names": names,
        "losses": memory.values("val_loss"),
    }


def fit_all(layouts: list[str], folder: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Run every callback on some layouts."""
    return {layout: {name: fit(layout, name, folder) for name in CALLBACKS} for layout in layouts}


@cache
def on_one_rank() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what every callback leaves on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        [found] = run_ranks(1, fit_all, ["one", "one-plain"], folder, open_group=False, timeout=120)
    return found  # type: ignore[no-any-return]


@cache
def on_two_ranks() -> list[dict[str, dict[str, dict[str, Any]]]]:
    """Return what every callback leaves on each of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, fit_all, ["pp2", "dp2-plain"], folder, timeout=120)


def test_every_callback_of_lightning_is_in_the_table() -> None:
    assert set(CALLBACKS) == set(callbacks.__all__)


@pytest.mark.xdist_group("callbacks")
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize(("layout", "alone"), [("pp2", "one"), ("dp2-plain", "one-plain")], ids=["pp2", "dp2-plain"])
def test_a_callback_leaves_what_it_leaves_on_one_rank_or_is_rejected(layout: str, alone: str, name: str) -> None:
    expected = on_one_rank()[alone][name]
    for number, rank in enumerate(on_two_ranks()):
        found = rank[layout][name]
        if name in REJECTED[layout]:
            assert REJECTED[layout][name] in found["error"]
            continue
        assert "error" not in found, found["error"]
        assert found["steps"] == expected["steps"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for parameter, value in found["weights"].items():
            assert (value - expected["weights"][parameter]).abs().max().item() <= 5e-7, parameter
        if number == 0:
            # Rates of all ranks exist only on several ranks, and none before a window of batches is full.
            ours, theirs = (
                {each for each in run["names"] if not each.endswith("_per_sec")} for run in (found, expected)
            )
            assert ours == theirs
