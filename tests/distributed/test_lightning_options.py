# SPDX-License-Identifier: Apache-2.0
"""The options of Lightning's loops and its callbacks mean under ours what they mean under ``strategy="ddp"``.

Each case runs once under ddp on one rank and once under ours, as a plain module on one rank and as two pipeline stages;
steps, epochs, batches, validation runs and the reason to stop are equal.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    RichModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_mcore import MCoreGPT, Recipe
from tests.support.ranks import RanksFailedError, on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import PP2, Batch, PlainNet, Samples, StagedNet, loader, make_trainer, texts, weights

pytestmark = pytest.mark.distributed


class Stream(IterableDataset[Batch]):
    """Samples without a length."""

    def __init__(self, size: int) -> None:
        self.samples = Samples(size)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self.samples)):
            yield self.samples[index]


class Steps:
    """Mixed into a module: a score that falls for two epochs and then stays, and what a loader of two gives."""

    learning_rate = 0.01

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        batch = batch.get("b", batch)
        return (self.predictions(batch).float() - batch["y"]).square().mean()

    def validation_step(self: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.predictions(batch)
        self.log("score", max(0.0, 2.0 - self.current_epoch), sync_dist=True)

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class Plain(Steps, PlainNet):
    pass


class Staged(Steps, StagedNet):
    pass


class Skips(pl.Callback):
    """Ends the epoch at its third batch, as a module may by returning -1."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None


class Stops(pl.Callback):
    """Asks to stop, after the third batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.fit_loop.total_batch_idx >= 2


class Reloads(pl.LightningDataModule):
    """Counts how often it is asked for a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader(6 + 2 * self.asked, 2)

    def val_dataloader(self) -> Any:
        self.asked += 100
        return loader(4, 2)


class Follows(pl.Callback):
    """Keeps what the loops did."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.validated_at: list[tuple[int, int]] = []
        self.num_validated = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch = batch.get("b", batch)
        self.batches.append((batch_idx, batch["index"].tolist()))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.validated_at.append((trainer.global_step, trainer.current_epoch))

    def on_validation_batch_end(self, *_: Any) -> None:
        self.num_validated += 1


def case(
    data: Callable[[], Any] = lambda: (loader(14, 2), loader(8, 2)),
    callbacks: Callable[[], list[Any]] = list,
    **arguments: Any,
) -> tuple[Callable[[], Any], Callable[[], list[Any]], dict[str, Any]]:
    return data, callbacks, arguments


ACCUMULATED: dict[str, Any] = {"accumulate_grad_batches": 2}
CASES = {
    "fast-dev-run": case(fast_dev_run=True),
    "fast-dev-run-2": case(fast_dev_run=2, **ACCUMULATED),
    "overfit-float": case(overfit_batches=0.3, max_epochs=2),
    "limits-int": case(limit_train_batches=3, limit_val_batches=1, max_epochs=2, **ACCUMULATED),
    "limits-float": case(limit_train_batches=0.5, limit_val_batches=0.75),
    "limits-zero": case(limit_val_batches=0),
    "val-every-half": case(val_check_interval=0.5, **ACCUMULATED),
    "val-by-time": case(val_check_interval="00:00:00:00", max_steps=3, max_epochs=1),
    "val-across-epochs": case(val_check_interval=4, check_val_every_n_epoch=None, max_epochs=2, **ACCUMULATED),
    "val-every-other-epoch": case(check_val_every_n_epoch=2, max_epochs=4, limit_train_batches=2),
    "sanity": case(num_sanity_val_steps=-1, limit_train_batches=1),
    "max-steps": case(max_steps=4, max_epochs=-1, **ACCUMULATED),
    "max-steps-within": case(max_steps=9, max_epochs=2),
    "no-steps": case(max_steps=0),
    "no-epochs": case(max_epochs=0),
    "min-epochs": case(
        callbacks=lambda: [EarlyStopping("score", patience=1)], min_epochs=5, max_epochs=9, limit_train_batches=2
    ),
    "min-steps": case(callbacks=lambda: [Stops()], min_steps=5, max_epochs=2),
    "early-stopping": case(callbacks=lambda: [EarlyStopping("score", patience=1)], max_epochs=9, limit_train_batches=2),
    "stopped-within": case(callbacks=lambda: [Stops()], max_epochs=2, **ACCUMULATED),
    "timer": case(callbacks=lambda: [Timer(duration={"seconds": 0}, interval="step")], max_epochs=2),
    "max-time": case(max_time="00:00:00:00", max_epochs=3),
    "scheduled": case(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=2),
    "skips": case(callbacks=lambda: [Skips()], max_epochs=2, **ACCUMULATED),
    "no-length": case(data=lambda: (DataLoader(Stream(7), 2), DataLoader(Stream(3), 2)), max_epochs=2, **ACCUMULATED),
    "no-length-interval": case(data=lambda: (DataLoader(Stream(7), 2), loader(4, 2)), val_check_interval=2),
    "two-at-once": case(
        data=lambda: (CombinedLoader({"a": loader(4, 2), "b": loader(10, 2)}, "max_size_cycle"), None), **ACCUMULATED
    ),
    "several-val": case(data=lambda: (loader(6, 2), [loader(4, 2), loader(2, 1)]), limit_val_batches=0.5),
    "reloads": case(data=lambda: Reloads(), reload_dataloaders_every_n_epochs=1, max_epochs=3),
    "barebones": case(barebones=True, limit_train_batches=3),
    "anomaly": case(detect_anomaly=True, limit_train_batches=2),
    "deterministic": case(deterministic=True, limit_train_batches=2),
    "inference-mode": case(inference_mode=True, limit_train_batches=2),
    "device-stats": case(callbacks=lambda: [DeviceStatsMonitor(cpu_stats=True)], limit_train_batches=2),
}


def run_case(module: type, strategy: Any, name: str, folder: str) -> dict[str, Any]:
    """Fit once and return everything that the loops counted."""
    data, callbacks, arguments = CASES[name]
    follows = Follows()
    if name == "barebones":  # which refuses every argument that says more
        arguments = {**arguments, "logger": None, "num_sanity_val_steps": None, "log_every_n_steps": None}
        arguments |= {f"enable_{what}": None for what in ("checkpointing", "progress_bar", "model_summary")}
    if name == "device-stats":
        arguments = {**arguments, "logger": CSVLogger(f"{folder}/{module.__name__}")}
    given = data()
    if "max_steps" in arguments:
        arguments = {"max_epochs": None, **arguments}
    trainer = make_trainer(
        strategy, callbacks=[follows, *callbacks()], use_distributed_sampler=False, default_root_dir=folder, **arguments
    )
    if isinstance(given, tuple):
        trainer.fit(module(), *given)
    else:
        trainer.fit(module(), datamodule=given)
    torch.use_deterministic_algorithms(False)
    loop = trainer.fit_loop
    return {
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": follows.batches,
        "validated_at": follows.validated_at,
        "num_validated": follows.num_validated,
        "should_stop": trainer.should_stop,
        "progress": [loop.epoch_progress.current.completed, loop.epoch_loop.batch_progress.total.completed],
        "asked": getattr(given, "asked", None),
        "total": trainer.num_training_batches,
    }


def run_cases(module: type, strategy: Any, folder: str) -> dict[str, Any]:
    return {name: run_case(module, strategy, name, folder) for name in cases_of(torch.distributed.get_world_size())}


def cases_of(ranks: int) -> list[str]:
    """The cases that run on this number of ranks: several would validate at a time by different clocks."""
    return [name for name in CASES if ranks == 1 or name != "val-by-time"]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: Any) -> dict[str, Any]:
    return run_ranks(1, run_cases, Plain, "ddp", str(tmp_path_factory.mktemp("ddp")), timeout=180)[0]


@pytest.mark.parametrize(("world_size", "module", "strategy"), [(1, Plain, {}), (2, Staged, PP2)], ids=["plain", "pp2"])
def test_the_loops_do_what_they_do_under_ddp(
    ddp: Any, world_size: int, module: type, strategy: Any, tmp_path: Path
) -> None:
    for rank in run_ranks(world_size, run_cases, module, strategy, str(tmp_path), timeout=240):
        for name in cases_of(world_size):
            assert rank[name] == ddp[name], name


# Tools around the loop: tuner, profilers, loggers, summaries, predictions, two fits


class Counts(pl.Callback):
    """Counts the batches of test and predict."""

    num_tested = num_predicted = 0

    def on_test_batch_end(self, *_: Any) -> None:
        self.num_tested += 1

    def on_predict_batch_end(self, *_: Any) -> None:
        self.num_predicted += 1


def tools(module: type, strategy: Any, folder: str) -> dict[str, Any]:
    """Use every tool once; return what there is to see."""
    seen: dict[str, Any] = {}
    quiet = {"use_distributed_sampler": False, "default_root_dir": folder}

    net = module()
    trainer = make_trainer(strategy, max_steps=5, **quiet)
    found = Tuner(trainer).lr_find(net, loader(28, 2), num_training=16, early_stop_threshold=None)
    assert found is not None
    seen["lr_find"] = (found.results, net.learning_rate == found.suggestion())
    fresh = module()
    make_trainer(strategy, **quiet).validate(fresh, loader(2, 2), verbose=False)  # which builds the model
    start, now = weights(fresh), weights(net)
    seen["after_lr_find"] = trainer.global_step, max(float((now[name] - start[name]).abs().max()) for name in start)
    trainer.fit(net, loader(28, 2))
    seen["fit_after_lr_find"] = trainer.global_step

    net = module()
    trainer = make_trainer(strategy, callbacks=[LearningRateFinder(num_training_steps=6)], max_steps=4, **quiet)
    trainer.fit(net, loader(28, 2))
    seen["lr_finder_callback"] = trainer.global_step

    try:
        Tuner(make_trainer(strategy, **quiet)).scale_batch_size(module(), train_dataloaders=loader(8, 2))
    except Exception as error:
        seen["batch_size"] = str(error)

    profilers = {
        "simple": SimpleProfiler(dirpath=folder, filename="simple"),
        "advanced": AdvancedProfiler(dirpath=folder, filename="advanced"),
        "pytorch": PyTorchProfiler(dirpath=folder, filename="pytorch", export_to_chrome=False),
    }
    for name, profiler in profilers.items():
        trainer = make_trainer(strategy, profiler=profiler, **quiet)
        trainer.fit(module(), loader(6, 2), loader(2, 2))
        seen[f"profiler_{name}"] = sorted(actions(profiler))
    seen["profiles"] = sorted(path.name.split("-")[1].split(".")[0] for path in Path(folder).glob("fit-*.txt"))

    limited = Counts()
    trainer = make_trainer(strategy, callbacks=[limited], limit_test_batches=0.5, limit_predict_batches=3, **quiet)
    trainer.test(module(), loader(12, 2), verbose=False)
    trainer.predict(module(), loader(14, 2))
    seen["limits"] = limited.num_tested, limited.num_predicted

    logger = CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)
    callbacks = [LearningRateMonitor("step"), RichModelSummary(max_depth=2)]
    trainer = make_trainer(strategy, logger=logger, callbacks=callbacks, enable_model_summary=True, **quiet)
    net = module()
    trainer.fit(net, loader(6, 2), loader(2, 2))
    first = trainer.global_step
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, loader(6, 2))
    seen["two_fits"] = first, trainer.global_step, trainer.current_epoch
    metrics = Path(logger.log_dir) / "metrics.csv"
    seen["csv"] = sorted(metrics.read_text().splitlines()[0].split(",")) if trainer.is_global_zero else None
    return seen


def actions(profiler: Any) -> set[str]:
    """Return the names of the actions of the loop that a profiler measured."""
    names = getattr(profiler, "recorded_durations", None) or getattr(profiler, "profiled_actions", None) or {}
    return {name for name in names if "Strategy" in name or name.startswith("run_")}


@pytest.fixture(scope="module")
def ddp_tools(tmp_path_factory: Any) -> dict[str, Any]:
    return run_ranks(1, tools, Plain, "ddp", str(tmp_path_factory.mktemp("tools")), timeout=180)[0]


@pytest.mark.parametrize(("world_size", "module", "strategy"), [(1, Plain, {}), (2, Staged, PP2)], ids=["plain", "pp2"])
def test_the_tools_around_the_loop(
    ddp_tools: Any, world_size: int, module: type, strategy: Any, tmp_path: Path
) -> None:
    ranks = run_ranks(world_size, tools, module, strategy, str(tmp_path), timeout=240)
    for number, rank in enumerate(ranks):
        results, was_set = rank["lr_find"]
        assert results["lr"] == ddp_tools["lr_find"][0]["lr"]
        assert was_set
        if module is Plain:
            assert results["loss"] == pytest.approx(ddp_tools["lr_find"][0]["loss"], rel=1e-6)
        assert rank["after_lr_find"][1] == 0.0  # the weights are those of the beginning again
        for name in ("after_lr_find", "fit_after_lr_find", "lr_finder_callback", "two_fits", "batch_size"):
            assert rank[name] == ddp_tools[name], name
        assert rank["limits"] == ddp_tools["limits"] == (3, 3)
        assert set(rank["profiles"]) == {"advanced", "pytorch", "simple"}
        assert "not supported with distributed strategies" in rank["batch_size"]
        for profiler in ("profiler_simple", "profiler_advanced"):
            expected = {name.replace("DDPStrategy", "MCoreStrategy") for name in ddp_tools[profiler]}
            assert expected <= set(rank[profiler]), profiler
        if number == 0:
            assert rank["csv"] == ddp_tools["csv"]


def find_learning_rate(folder: str) -> dict[str, Any]:
    """Let the finder choose the learning rate of an MCoreGPT, and fit; return both rates and those of the finder."""
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
    module = MCoreGPT(32, 8, sizes, recipe=Recipe(lr_scheduler_type="constant"))
    trainer = make_trainer(PP2, max_steps=1, default_root_dir=folder)
    data = texts(20, 8, 32)
    found = Tuner(trainer).lr_find(module, data, num_training=16, min_lr=1e-4, max_lr=1.0, early_stop_threshold=None)
    assert found is not None
    trainer.fit(module, data)
    return {
        "tried": found.results["lr"],
        "suggestion": found.suggestion(),
        "recipe": module.recipe.learning_rate,
        "recorded": module.hparams["recipe"]["learning_rate"],
        "optimizer": {group["lr"] for group in trainer.optimizers[0].param_groups},
    }


def test_the_finder_sets_the_learning_rate_of_a_recipe(tmp_path: Path) -> None:
    for rank in run_ranks(2, find_learning_rate, str(tmp_path), timeout=120):
        assert rank["tried"] == pytest.approx([1e-4 * 1e4 ** (step / 16) for step in (0, *range(2, 17))])
        found = rank["suggestion"]
        assert found is not None
        assert rank["recipe"] == rank["recorded"] == found
        assert rank["optimizer"] == {found}


# Evaluation and prediction with loaders that the ranks do not share evenly


class Uneven(IterableDataset[Batch]):
    """Samples without a length, of which each model copy has another number: five on the first, two on the second."""

    def __init__(self, copy: int) -> None:
        self.indices = range(5) if copy == 0 else range(5, 7)

    def __iter__(self) -> Iterator[Batch]:
        return (Samples(7)[index] for index in self.indices)


class Writer(BasePredictionWriter):
    """Keeps what it is to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches.append((prediction["index"].tolist(), list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = [[p["index"].tolist() for p in part] for part in predictions], indices


class Evaluated:
    """Mixed into a module: logs a number of each sample, and which they were."""

    def validation_step(self: Any, batch: Batch, batch_idx: int) -> None:
        self.predictions(batch)
        self.log("mean_index", batch["index"].double().mean(), sync_dist=True)

    def predict_step(self: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return {"index": batch["index"], "y": self.predictions(batch)}


class PlainEvaluated(Evaluated, PlainNet):
    pass


class StagedEvaluated(Evaluated, StagedNet):
    pass


def uneven(module: type, strategy: Any, copy: int) -> dict[str, Any]:
    """Validate on uneven streams; predict from two loaders with and without results; return what there is."""
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    [logged] = trainer.validate(module(), DataLoader(Uneven(copy), 2), verbose=False)
    writer = Writer()
    trainer = make_trainer(strategy, callbacks=[writer])
    nothing = trainer.predict(module(), [loader(7, 2), loader(3, 2)], return_predictions=False)
    outputs = make_trainer(strategy).predict(module(), [loader(7, 2), loader(3, 2)])
    returned = [[batch["index"].tolist() for batch in part] for part in outputs or []]
    return {"logged": logged, "batches": writer.batches, "epoch": writer.epoch, "nothing": nothing, "all": returned}


def uneven_in_each_way(number: int) -> list[dict[str, Any]]:
    ways: list[Any] = [(PlainEvaluated, "ddp"), (PlainEvaluated, {}), (StagedEvaluated, {})]
    return [uneven(*way, number) for way in ways]


def uneven_pipeline() -> dict[str, Any]:
    return uneven(StagedEvaluated, PP2, torch.distributed.get_rank() % 2)


def uneven_copies() -> list[dict[str, Any]]:
    return uneven_in_each_way(torch.distributed.get_rank())


def test_uneven_streams_are_evaluated_and_each_rank_writes_its_own_predictions() -> None:
    first, second = run_ranks(2, uneven_copies, timeout=120)
    pipeline = run_ranks(4, uneven_pipeline, timeout=120)
    for copy, ways in enumerate((first, second)):
        for number, found in enumerate([*ways, pipeline[copy], pipeline[copy + 2]]):
            # The mean of the samples 0 to 6. ddp has 3.5: it cuts off the fraction of the mean number of rows.
            assert found.pop("logged") == {"mean_index": pytest.approx(3.0 if number else 3.5)}
            assert found["nothing"] is None
            assert [batch for batch, _ in found["batches"]] == joined(found["epoch"][0]) == joined(found["all"])
            assert [indices for _, indices in found["batches"]] == joined(found["epoch"][1])
            expected = [[*range(copy, size, 2)] for size in (7, 3)]
            assert [joined(part) for part in found["all"]] == expected, number
            assert [indices for _, indices in found["batches"]] == [batch for batch, _ in found["batches"]]
            assert found == ways[0], number  # as under ddp


def joined(parts: list[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


# What goes wrong on one rank


class Fails(pl.Callback):
    """Raises on one rank, in the middle of a run."""

    def __init__(self, rank: int, error: type[BaseException]) -> None:
        self.rank, self.error = rank, error

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 2:
            raise self.error("on one rank")


def fail(module: type, strategy: Any, rank: int, error: type[BaseException]) -> None:
    make_trainer(strategy, callbacks=[Fails(rank, error)]).fit(module(), loader(12, 2))


@pytest.mark.parametrize(
    ("module", "strategy", "rank", "error"),
    [(Plain, {}, 1, RuntimeError), (Staged, PP2, 0, RuntimeError), (Staged, PP2, 1, KeyboardInterrupt)],
    ids=["plain-dp2", "pp2-first-stage", "pp2-interrupted"],
)
def test_an_exception_on_one_rank_ends_all(module: type, strategy: Any, rank: int, error: type[BaseException]) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(2, fail, module, strategy, rank, error, timeout=60, grace=30)
    assert not failed.value.unfinished
    assert set(failed.value.errors) == {0, 1}
    shown = failed.value.errors[rank]
    assert "on one rank" in shown or "SystemExit" in shown  # what Lightning makes of an interrupt


# Compiled modules


@on_ranks(2)
def test_a_compiled_module_is_refused_for_a_pipeline_alone() -> None:
    trainer = make_trainer({})
    trainer.fit(torch.compile(PlainNet(), backend="eager"), loader(12, 2))  # type: ignore[arg-type]
    assert trainer.global_step == 3
    with refuses(ValueError, "torch.compile(StagedNet(...)) is not supported"):
        make_trainer(PP2).fit(torch.compile(StagedNet(), backend="eager"), loader(12, 2))  # type: ignore[arg-type]


# Steps that draw their own batches


class Draws(StagedNet):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.predictions(batch).square().mean()


class DrawsPlain(PlainNet):
    training_step = Draws.training_step  # type: ignore[assignment]


@on_ranks(2)
def test_a_step_with_dataloader_iter_is_refused_for_a_pipeline_alone() -> None:
    trainer = make_trainer({})
    trainer.fit(DrawsPlain(), loader(12, 2))
    assert trainer.global_step == 3
    with refuses(TypeError, "Draws.training_step(dataloader_iter) is not supported"):
        make_trainer(PP2).fit(Draws(), loader(12, 2))


def steps_without_validation(module: pl.LightningModule, strategy: Any) -> int:
    """Train with a validation step of None, as Lightning allows; return the number of steps."""
    module.validation_step = None  # type: ignore[assignment, method-assign]
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    trainer.fit(module, loader(6, 2), loader(2, 2))
    return trainer.global_step


@on_ranks(2)
def test_a_step_that_is_none_switches_its_loop_off_as_under_ddp() -> None:
    assert steps_without_validation(StagedNet(), PP2) == steps_without_validation(PlainNet(), "ddp") == 3


class Plateau(PlainNet):
    """Notes what Lightning's own code may read of a run while it trains."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train_loss"}

    def on_train_batch_end(self, *_: Any) -> None:
        self.device_of_autocast = self.trainer.precision_plugin.device
        self.config = repr(self.trainer.lr_scheduler_configs[0])
        self.is_strict = self.trainer.lr_scheduler_configs[0].strict == True  # noqa: E712 - as dataclasses compare it


def read(strategy: Any) -> tuple[str, str, bool]:
    module = Plateau()
    make_trainer(strategy, precision="bf16-mixed").fit(module, loader(4, 2))
    return module.device_of_autocast, module.config.partition("monitor")[2], module.is_strict


@on_ranks(2)
def test_what_is_read_of_a_run_is_what_ddp_shows() -> None:
    assert read({}) == read("ddp")
