# SPDX-License-Identifier: Apache-2.0
"""``self.log`` on every layout, number by number.

What is logged is read off the samples alone, so each expected value is plain arithmetic over the samples that the ranks
read: sums, extremes, and means weighted by rows or by ``batch_size``, over the microbatches of a step, the ranks that
share a sequence, and with ``sync_dist=True`` the model copies. Masks are ragged: no two batches have the same weight.

``tests/distributed/test_logging.py`` has the rest: sampler-made differences, ``LearningRateMonitor``, two modules.
"""

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.aggregation import MaxMetric, MeanMetric, SumMetric

from lightning_mcore.optimizer.plateau import _stepping_on_mean, _Strict
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import CP2, PP2, TP2, VP2, Batch, Memory, PlainNet, Samples, StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed

SIZE, BATCH_SIZE, ACCUMULATE = 14, 2, 3  # 7 batches: windows of 3, 3 and 1; on two copies 4: windows of 3 and 1
RARE = 5  # the sample whose batch alone logs some names


class Talk:
    """Steps and hooks that log in every way; mixed into the plain and the pipelined toy module."""

    def add_metrics(self: Any) -> None:
        self.mean, self.running = MeanMetric(), MeanMetric()
        self.collection = MetricCollection({"metric_sum": SumMetric(), "metric_max": MaxMetric()})
        self.seen: list[tuple[list[int], ...]] = []
        self.steps: list[dict[str, float]] = []

    def talk(self: Any, batch: Batch, **levels: Any) -> None:
        """Log what the samples are, whatever the model makes of them."""
        x = batch["x"].double()  # so that sums are not what limits the comparison
        mask = x > 0.8  # ragged: from no element of a batch to many
        synced = {**levels, "sync_dist": True}
        self.log("mean", x.mean(), **synced)
        self.log("masked", x[mask].mean(), batch_size=mask.sum(), **synced)
        self.log_dict({"sum": x.sum(), "rows": len(x)}, reduce_fx="sum", **synced)
        self.log("min", x.min(), reduce_fx=min, **synced)
        self.log("max", x.max().item(), reduce_fx=torch.max, **synced)
        self.log("own", x.mean(), **levels)
        # A plain module merges a step's value at once, as under ddp: a name that other ranks do not log would hang.
        levels_of_rare = synced if isinstance(self, StagedNet) else {**synced, "on_step": False}
        self.log("whole", x.mean() + 1e9, on_step=False, on_epoch=True, sync_dist=True)
        self.log("bar", x.sum(), prog_bar=True, logger=False, reduce_fx="sum", **synced)
        if RARE in batch["index"]:
            self.log("rare", x.mean(), **levels_of_rare)
            self.log("rare_sum", x.sum(), reduce_fx="sum", **levels_of_rare)
            self.log("rare_own", x.mean(), on_step=False, on_epoch=True)
        self.mean.update(batch["x"])
        self.log("metric_mean", self.mean, on_step=False, on_epoch=True)
        self.running(batch["x"])
        self.log("running", self.running, on_step=True, on_epoch=True, metric_attribute="running")
        self.collection.update(batch["x"])
        self.log_dict(self.collection, on_step=False, on_epoch=True)

    def training_step(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        loss = (self.predictions(batch).float() - batch["y"]).square().mean()
        self.talk(batch, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_start(self: Any, batch: Batch, batch_idx: int) -> None:
        self.seen.append(batch["index"].tolist())

    def on_train_batch_end(self: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.log("hook_batches", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
        if self.trainer.global_step > len(self.steps):
            self.steps.append({name: float(v) for name, v in self.trainer.callback_metrics.items()})

    def on_train_epoch_end(self: Any) -> None:
        self.log("hook_epoch", float(self.current_epoch + 7), sync_dist=True)

    def validation_step(self: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x = (self.predictions(batch) * 0 + batch["x"].mean()).mean()
        self.log("val_each", x, sync_dist=True)
        self.log(f"val_own_name_{dataloader_idx}", x, add_dataloader_idx=False, sync_dist=True)
        if RARE in batch["index"]:
            self.log("val_rare", x, sync_dist=True)
            self.log("val_rare_max", x, reduce_fx="max", sync_dist=True)

    def on_validation_epoch_end(self: Any) -> None:
        self.log("val_hook", 11, sync_dist=True)

    def test_step(self: Any, batch: Batch, batch_idx: int) -> None:
        self.predictions(batch)
        self.talk(batch, on_step=False, on_epoch=True)


class Plain(Talk, PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.add_metrics()


class Staged(Talk, StagedNet):
    def __init__(self) -> None:
        super().__init__()
        self.add_metrics()


class EachDataloader(StagedNet):
    """Logs one name with other arguments in each dataloader."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.predictions(batch)
        reduce_fx = ("mean", "max")[dataloader_idx]
        self.log("x", batch["x"].amax(), prog_bar=dataloader_idx == 0, reduce_fx=reduce_fx, sync_dist=True)


@on_ranks(2)
def test_a_name_may_have_other_arguments_in_another_dataloader() -> None:
    x = Samples(8).x.double()
    for strategy in (PP2, CP2):
        trainer = make_trainer(strategy)
        trainer.validate(EachDataloader(), [loader(8, 2), loader(4, 2)], verbose=False)
        logged = numbers(trainer.callback_metrics)
        if strategy == PP2:
            assert logged["x/dataloader_idx_0"] == close(x.view(4, 2, -1).amax((1, 2)).mean().item())
        assert logged["x/dataloader_idx_1"] == close(x[:4].amax().item())
        assert trainer.progress_bar_metrics.keys() == {"x/dataloader_idx_0"}


class FromCallback(pl.Callback):
    """Logs from the hooks of a callback."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.log("callback_batches", 1, reduce_fx="sum", on_step=False, on_epoch=True)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.log("callback_val", 13.0, sync_dist=True)


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def fit_and_test(staged: bool, strategy: Any, accumulate: int, batch_size: int) -> dict[str, Any]:
    """Fit one epoch with two validation loaders, then test; return what this rank holds."""
    module, memory = Staged() if staged else Plain(), Memory()
    trainer = make_trainer(strategy, logger=memory, callbacks=[FromCallback()], accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(SIZE, batch_size), [loader(8, 2), loader(4, 2)])
    fitted = {
        "seen": module.seen,
        "steps": module.steps,
        "epoch": numbers(trainer.callback_metrics),
        "logged": numbers(trainer.logged_metrics),
        "bar": numbers(trainer.progress_bar_metrics),
        "rows": memory.rows,
    }
    trainer.test(module, loader(SIZE, batch_size), verbose=False)
    return {**fitted, "test": numbers(trainer.callback_metrics)}


RUNS: dict[str, tuple[int, bool, Any, int, int]] = {  # ranks, staged, strategy, batches of a step, rows of a batch
    "plain-one": (1, False, {}, ACCUMULATE, BATCH_SIZE),
    "plain-dp2": (2, False, {}, 1, BATCH_SIZE),
    "one": (1, True, {}, ACCUMULATE, BATCH_SIZE),
    "dp2": (2, True, {}, ACCUMULATE, BATCH_SIZE),
    "cp2": (2, True, CP2, ACCUMULATE, BATCH_SIZE),
    "tp2": (2, True, TP2, 1, BATCH_SIZE),
    "pp2": (2, True, PP2, ACCUMULATE, BATCH_SIZE),
    "pp2-rows": (2, True, {**PP2, "micro_batch_size": 2}, 2, 5),
    "pp2-vp2": (2, True, VP2, 2, BATCH_SIZE),
    "pp2-dp2": (4, True, PP2, ACCUMULATE, BATCH_SIZE),
    "cp2-dp2-rows": (4, True, {**CP2, "micro_batch_size": 2}, 1, 5),
}


def values(indices: list[int]) -> dict[str, float]:
    """Return what the samples mean, as the module logs it."""
    x = Samples(SIZE).x[indices].double()
    return {
        "mean": x.mean().item(),
        "masked": x[x > 0.8].mean().item(),
        "sum": x.sum().item(),
        "rows": len(indices),
        "min": x.min().item(),
        "max": x.max().item(),
        "bar": x.sum().item(),
    }


def close(value: float) -> Any:
    return pytest.approx(value, rel=2e-6, abs=1e-6)


def joined(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def cut(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@pytest.mark.parametrize("name", RUNS)
def test_every_number_on_every_rank(name: str) -> None:
    world_size, staged, strategy, accumulate, batch_size = RUNS[name]
    ranks = run_ranks(world_size, fit_and_test, staged, strategy, accumulate, batch_size, timeout=180)
    parts = strategy.get("context_parallel_size", 1)
    split = parts * strategy.get("tensor_model_parallel_size", 1) * strategy.get("pipeline_model_parallel_size", 1)
    copies = list({str(rank["seen"]): rank["seen"] for rank in ranks}.values())
    assert len(copies) == world_size // split
    rows = strategy.get("micro_batch_size", batch_size)
    for rank in ranks:
        if staged:
            windows = [joined(rank["seen"][i : i + accumulate]) for i in range(0, len(rank["seen"]), accumulate)]
            of_all = [[joined(c[i : i + accumulate]) for c in copies] for i in range(0, len(copies[0]), accumulate)]
            assert len(rank["steps"]) == len(windows)
            for step, own, everyone in zip(rank["steps"], windows, of_all, strict=True):
                assert step["own_step"] == close(values(own)["mean"])
                check_values(step, joined(everyone), "_step", parts)
        check_epoch(rank, joined([joined(batches) for batches in copies]), parts)
        microbatches = [part for batches in copies for batch in batches for part in cut(batch, rows)]
        tested = [batch for c in range(len(copies)) for batch in cut([*range(c, SIZE, len(copies))], batch_size)]
        tested = [part for batch in tested for part in cut(batch, rows)]  # a step sees parts in evaluation too
        check_rare(rank["test"], tested, "")
        check_rare(rank["epoch"], microbatches, "_epoch" if staged else "")
    check_alike(ranks, parts)


def check_values(metrics: dict[str, float], indices: list[int], suffix: str, parts: int) -> None:
    """Check everything that is logged with ``sync_dist=True`` against the samples that all copies read."""
    for key, value in values(indices).items():
        counted = value * parts if key == "rows" else value  # each rank of a sequence counts its rows
        assert metrics[f"{key}{suffix}"] == close(counted), f"{key}{suffix}"


def check_epoch(rank: dict[str, Any], trained: list[int], parts: int) -> None:
    """Check the values of the epoch, of its hooks and validation, and of the test."""
    for metrics, indices, suffix in ((rank["epoch"], trained, "_epoch"), (rank["test"], [*range(SIZE)], "")):
        check_values(metrics, indices, suffix, parts)
        x = Samples(SIZE).x[indices].double()
        assert metrics["whole"] == pytest.approx(x.mean().item() + 1e9, abs=2e-6, rel=0)
        assert metrics["metric_mean"] == metrics["running_epoch"] == close(x.mean().item())
        assert metrics["metric_sum"] == close(x.sum().item())
        assert metrics["metric_max"] == close(x.max().item())
    metrics = rank["epoch"]
    assert metrics["hook_batches"] == metrics["callback_batches"] == len(rank["seen"])
    assert metrics["hook_epoch"] == 7
    assert (metrics["val_hook"], metrics["callback_val"]) == (11, 13)
    for index, size in ((0, 8), (1, 4)):
        mean = close(Samples(size).x.double().mean().item())
        assert metrics[f"val_each/dataloader_idx_{index}"] == metrics[f"val_own_name_{index}"] == mean
    assert not {"bar", "bar_step", "bar_epoch"} & rank["logged"].keys()
    assert {"bar_step", "bar_epoch"} <= rank["bar"].keys()
    assert {name for row in rank["rows"] for name in row} >= {"mean_step", "mean_epoch", "metric_mean", "hook_epoch"}


def check_rare(metrics: dict[str, float], batches: list[list[int]], suffix: str) -> None:
    """Check what a single batch logged, on whichever rank that was."""
    [batch] = [batch for batch in batches if RARE in batch] or [[]]
    if batch:  # shuffled, an epoch need not hold the sample
        x = Samples(SIZE).x[batch].double()
        assert metrics[f"rare{suffix}"] == close(x.mean().item())
        assert metrics[f"rare_sum{suffix}"] == close(x.sum().item())
    else:
        assert f"rare{suffix}" not in metrics


def check_alike(ranks: list[dict[str, Any]], parts: int) -> None:
    """Check that all ranks hold the same, but for what is logged apart on each copy."""
    for rank in ranks:
        for where in ("epoch", "logged", "bar", "test"):
            for other in ranks:
                apart = ("running", "running_step") if parts > 1 else ()  # torchmetrics shows this rank's own value
                if other["seen"] != rank["seen"]:
                    apart = ("own", "own_step", "own_epoch", "rare", "rare_step", "rare_own", "running", "running_step")
                one, two = ({k: v for k, v in r[where].items() if k not in apart} for r in (rank, other))
                if other["seen"] != rank["seen"]:
                    one, two = ({k: v for k, v in d.items() if not k.startswith("rare")} for d in (one, two))
                assert one == two, where


# One name, different arguments; a metric that nobody knows; different names on different copies


class Wrong(StagedNet):
    """Breaks the rules of ``self.log`` on one rank or one batch only."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = (self.predictions(batch).float() - batch["y"]).square().mean()
        if self.way == "arguments":
            self.log("a", loss, prog_bar=RARE in batch["index"], sync_dist=True)
        elif self.way == "metric":
            self.log("a", MeanMetric())
        elif self.way == "vector":
            self.log("a", batch["x"].flatten())
        elif self.way == "dict":
            self.log("a", {"b": loss})  # type: ignore[arg-type]
        else:
            self.log("a", loss, reduce_fx=torch.median)
        return loss


@on_ranks(2, timeout=120)
def test_what_cannot_be_logged_is_refused_on_every_rank() -> None:
    errors = {}
    for way in ("arguments", "metric", "vector", "dict", "median"):
        module = Wrong(way)
        try:
            make_trainer({}, accumulate_grad_batches=2).fit(module, loader(8, 2))
            errors[way] = ""
        except Exception as error:
            errors[way] = f"{type(error).__name__}: {error}"
    assert errors["arguments"].startswith("ValueError: self.log('a', ...) was called with different arguments")
    assert "prog_bar" in errors["arguments"]
    assert "needs a metric that is an attribute of the module" in errors["metric"]
    assert "takes a single number" in errors["vector"]
    assert "takes a single number, got dict" in errors["dict"]
    assert "choose mean, sum, min or max" in errors["median"]


# Decisions: each rank measures something else, and all decide the same


class Judged:
    """Logs a score that each model copy sees differently, and that of all copies together."""

    own_scores = ((5.0, 4.0, 4.1, 4.2, 4.3, 4.4), (5.0, 4.9, 4.0, 3.0, 2.0, 1.0))  # alone, the second never rests

    def validation_step(self: Any, batch: Batch, batch_idx: int) -> None:
        self.predictions(batch)
        copy = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        score = self.own_scores[copy][self.current_epoch]
        self.log("own", score)
        self.log("synced", score, sync_dist=True)

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        plateau = {"scheduler": scheduler, "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


class JudgedPlain(Judged, PlainNet):
    pass


class JudgedStaged(Judged, StagedNet):
    pass


class Rates(pl.Callback):
    """Keeps the learning rate of each epoch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def decide(module: Any, strategy: Any, folder: str) -> dict[str, Any]:
    """Train with every callback that decides, once on what each copy measured and once on the mean."""
    found = {}
    for monitor in ("own", "synced"):
        net, rates = module(), Rates()
        net.monitor = monitor
        stopping = EarlyStopping(monitor, patience=2)
        kept = ModelCheckpoint(f"{folder}/{monitor}", monitor="synced", save_top_k=2, filename="{epoch}")
        trainer = make_trainer(
            strategy, max_epochs=6, callbacks=[stopping, kept, rates], enable_checkpointing=True, limit_train_batches=2
        )
        trainer.fit(net, loader(8, 2), loader(4, 2))
        state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
        found[monitor] = {
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "rates": rates.rates,
            "best": Path(kept.best_model_path).name,
            "kept": sorted(Path(path).name for path in kept.best_k_models),
            "saved": sorted(key for key, value in state.items() if callable(value)),
        }
    return found


@pytest.mark.parametrize(
    ("world_size", "module", "strategy"),
    [(2, JudgedPlain, {}), (4, JudgedStaged, PP2)],
    ids=["plain-dp2", "pp2-dp2"],
)
def test_callbacks_and_schedulers_decide_alike(world_size: int, module: Any, strategy: Any, tmp_path: Path) -> None:
    ranks = run_ranks(world_size, decide, module, strategy, str(tmp_path), timeout=120)
    mean = [(first + second) / 2 for first, second in zip(*Judged.own_scores, strict=True)]
    assert mean == sorted(mean, reverse=True)  # so a rate that follows it never falls, and all epochs run
    for rank in ranks:
        for monitor, epochs in (("own", 4), ("synced", 6)):  # with "own" the first copy rests for two epochs and stops
            decisions = rank[monitor]
            assert decisions["epochs"] == epochs
            assert decisions["steps"] == 2 * epochs
            assert decisions["rates"] == [1.0] * epochs
            assert decisions["best"] == f"epoch={epochs - 1}.ckpt"
            assert decisions["kept"] == [f"epoch={epochs - 2}.ckpt", f"epoch={epochs - 1}.ckpt"]
            assert decisions["saved"] == []


def test_a_pickled_plateau_is_the_scheduler_of_the_user() -> None:
    kind = torch.optim.lr_scheduler.ReduceLROnPlateau
    scheduler = kind(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), factor=0.5, patience=0)
    cpu = torch.device("cpu")
    scheduler.__class__ = _stepping_on_mean(kind, True, "own", cpu)
    for protocol in (0, 2, 5):
        copy, strict = pickle.loads(pickle.dumps((scheduler, _Strict(True, cpu)), protocol))
        copy.step(9.0)
        copy.step(9.0)
        assert (type(copy), strict, copy.optimizer.param_groups[0]["lr"]) == (kind, True, 0.5)


class ShortPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Takes no epoch."""

    def step(self, metrics: Any) -> None:  # type: ignore[override]
        super().step(metrics)


class HalfJudged(JudgedPlain):
    """Measures its score in the last two epochs on the second copy, in each of four on the first."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict = strict

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.trainer.strategy.distributed_sampler_kwargs["rank"] == 0 or self.current_epoch > 1:
            self.log("own", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = ShortPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "own", "strict": self.strict},
        }


def monitor_what_some_have() -> tuple[list[float], str]:
    rates = Rates()
    make_trainer({}, max_epochs=4, callbacks=[rates]).fit(HalfJudged(strict=False), loader(8, 2), loader(4, 2))
    try:
        make_trainer({}).fit(HalfJudged(strict=True), loader(8, 2), loader(4, 2))
    except Exception as error:
        return rates.rates, str(error)
    return rates.rates, ""


def test_a_plateau_waits_for_nobody_and_steps_once_every_copy_has_the_value() -> None:
    (rates, with_value), (others, without) = run_ranks(2, monitor_what_some_have, timeout=60)
    assert rates == others
    assert rates[:3] == [1.0] * 3
    assert "'own', which ReduceLROnPlateau monitors, was logged on 1 of 2 ranks" in with_value
    assert "conditioned on metric own which is not available" in without
