# SPDX-License-Identifier: Apache-2.0
"""``self.log`` in a step that runs as a pipeline: every rank holds the value, and the value is about the whole step.

The expected numbers are computed here from the samples that each step read.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, SumMetric

import lightning_mcore
from lightning_mcore import MCoreGPT
from lightning_mcore.parallel import groups
from lightning_mcore.strategy.same_batches import FIRST_BATCHES
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import (
    CP2,
    PP2,
    TP2,
    VP2,
    Batch,
    Memory,
    Samples,
    StagedNet,
    Watch,
    loader,
    make_trainer,
    run_fit,
)

pytestmark = pytest.mark.distributed


class Talkative(StagedNet):
    """Logs numbers of its inputs in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.collection = MetricCollection({"all_sum": SumMetric(), "all_max": MaxMetric()})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch["x"]
        self.log("before_sum", x.sum(), reduce_fx="sum")  # this line runs on every stage
        self.mean.update(x)
        loss = (self.predictions(batch).float() - batch["y"]).square().mean()
        self.log("mean", x.mean(), prog_bar=True)
        self.log("positive", x[x > 0].mean(), batch_size=(x > 0).sum())  # type: ignore[arg-type]
        self.log_dict({"sum": x.sum(), "twice": 2 * x.sum()}, reduce_fx="sum")
        self.log("min", x.min(), reduce_fx="min")
        self.log("max", x.max().item(), reduce_fx=max)
        self.log("both", x.mean(), on_step=True, on_epoch=True)
        self.log("whole", x.mean(), on_step=False, on_epoch=True)
        self.log("synced", x.mean(), sync_dist=True)
        if self.trainer.global_step % 2:
            self.log("sometimes", x.mean())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.collection.update(x)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        predictions = self.predictions(batch)
        self.log("val_rows", len(predictions), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("val_both", batch["x"].mean(), on_step=True, on_epoch=True)


def train(strategy: dict[str, Any], size: int, batch_size: int, accumulate: int) -> dict[str, Any]:
    """Train one epoch; return what a logger on this rank got."""
    memory, watch = Memory(), Watch()
    trainer = make_trainer(
        strategy,
        logger=memory,
        callbacks=[watch, LearningRateMonitor()],
        accumulate_grad_batches=accumulate,
        use_distributed_sampler="copies" in strategy,
    )
    trainer.fit(Talkative(), loader(size, batch_size), loader(4, 2))
    bar = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    return {"rows": memory.rows, "batches": watch.seen.batches, "bar": bar, "last": trainer.callback_metrics}


RUNS: dict[str, tuple[int, dict[str, Any], int, int, int]] = {  # ranks, strategy, samples, rows of a batch, batches
    "one": (1, {}, 13, 2, 3),
    "pp2": (2, PP2, 13, 2, 3),
    "pp2-at-once": (2, PP2, 13, 2, 1),
    "pp2-rows": (2, {**PP2, "micro_batch_size": 2}, 14, 5, 2),
    "pp2-vp2": (2, VP2, 14, 2, 2),
    "pp2-vp2-short-window": (2, VP2, 13, 2, 4),
    "cp2": (2, CP2, 13, 2, 3),
    "tp2": (2, TP2, 13, 2, 3),
    "cp2-pp2": (4, {**PP2, **CP2}, 13, 2, 3),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_value_is_about_the_whole_step_and_every_rank_has_it(name: str) -> None:
    world_size, strategy, size, batch_size, accumulate = RUNS[name]
    for rank in run_ranks(world_size, train, strategy, size, batch_size, accumulate):
        batches = rank["batches"]
        assert batches == [[*range(i, min(i + batch_size, size))] for i in range(0, size, batch_size)]
        windows = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
        rows = [row for row in rank["rows"] if "mean" in row]
        assert len(rows) == len(windows)
        for step, (row, window) in enumerate(zip(rows, windows, strict=True)):
            x = Samples(size).x[[index for batch in window for index in batch]].double()
            expected = {
                "mean": x.mean(),
                "both_step": x.mean(),
                "synced": x.mean(),
                "positive": x[x > 0].mean(),
                "sum": x.sum(),
                "before_sum": x.sum(),
                "twice": 2 * x.sum(),
                "min": x.min(),
                "max": x.max(),
            }
            for key, value in expected.items():
                assert row[key] == pytest.approx(value.item(), rel=1e-5, abs=1e-6), f"{key} at step {step}"
            if step % 2:
                odd_mean = expected["mean"].item()
            if step > 0:  # Lightning goes on showing a value that this step did not log
                assert row["sometimes"] == pytest.approx(odd_mean, rel=1e-5, abs=1e-6)
            assert ("sometimes" in row) == (step > 0)
            assert "whole" not in row
        check_the_epoch(rank, Samples(size).x.double())


def check_the_epoch(rank: dict[str, Any], x: Tensor) -> None:
    """What is logged at the end of the epoch is about all of its samples."""
    epoch = {name: value for row in rank["rows"] if "whole" in row for name, value in row.items()}
    for key in ("whole", "both_epoch", "metric"):
        assert epoch[key] == pytest.approx(x.mean().item(), rel=1e-5, abs=1e-6), key
    assert epoch["all_sum"] == pytest.approx(x.sum().item(), rel=1e-5)
    assert epoch["all_max"] == pytest.approx(x.max().item(), rel=1e-6)
    assert rank["bar"]["mean"] == pytest.approx(float(rank["last"]["mean"]))
    rates = [row["lr-AdamW"] for row in rank["rows"] if "lr-AdamW" in row]
    assert set(rates) == {0.01}
    validation = {name: value for row in rank["rows"] if "val_rows" in row for name, value in row.items()}
    assert validation["val_rows"] in (4.0, 8.0)  # twice where context-parallel ranks count their part of a sequence
    assert validation["val_both_epoch"] == pytest.approx(Samples(4).x.mean().item(), rel=1e-5, abs=1e-6)


def log_apart(strategy: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what two model copies with different samples log."""
    memory, watch = Memory(), Watch()
    trainer = make_trainer(strategy, logger=memory, callbacks=[watch], accumulate_grad_batches=2)
    trainer.fit(Talkative(), loader(16, 2), loader(4, 2))
    return [memory.rows, watch.seen.batches]


def test_sync_dist_is_the_mean_over_model_copies_and_nothing_else_is() -> None:
    ranks = run_ranks(4, log_apart, PP2)
    for rank in (0, 1):
        rows, batches = ranks[rank]
        other = ranks[1 - rank][1]
        assert rows == ranks[rank + 2][0], "the stages of one copy hold different values"
        assert batches == ranks[rank + 2][1]
        assert batches != other
        for step, row in enumerate(row for row in rows if "synced" in row):
            own, both = (Samples(16).x[sum(b[2 * step : 2 * step + 2], [])] for b in (batches, other))  # noqa: RUF017
            assert row["mean"] == pytest.approx(own.mean().item(), rel=1e-5, abs=1e-6)
            assert row["synced"] == pytest.approx((own.mean().item() + both.mean().item()) / 2, rel=1e-5, abs=1e-6)


# What travels between the stages


class Measured(StagedNet):
    """Updates one metric in each step, one at times, one afresh each time, one in no training step."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.odd, self.afresh, self.never = MeanMetric(), CatMetric(), SumMetric(), CatMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = (self.predictions(batch).float() - batch["y"]).square().mean()
        self.always.update(batch["x"])
        if batch_idx % 2:
            self.odd.update(batch["x"].mean())
        self.afresh.reset()
        self.afresh.update(batch["x"])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.predictions(batch)
        self.never.update(batch["index"])


class States(pl.Callback):
    """Keeps what the metrics of this rank know after each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        metrics = ((name, getattr(pl_module, name)) for name in ("always", "odd", "afresh", "never"))
        self.states.append({name: [_plain(metric.metric_state), metric._update_count] for name, metric in metrics})


def _plain(state: Any) -> Any:
    return {
        name: [v.tolist() for v in value] if isinstance(value, list) else float(value) for name, value in state.items()
    }


def send_metrics(strategy: dict[str, Any]) -> dict[str, Any]:
    """Train and validate; return the states of the metrics, and which metrics each object that was sent held."""
    sent: list[list[str]] = []
    tell_stages, states = groups.tell_stages, States()

    def noting(value: Any) -> Any:
        told = tell_stages(value)
        if isinstance(told, dict) and any("_update_count" in part for part in told.values()):
            sent.append(sorted(told))
        return told

    groups.tell_stages = noting
    try:
        module = Measured()
        trainer = make_trainer(strategy, callbacks=[states], max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, loader(8, 2), loader(4, 2))
    finally:
        groups.tell_stages = tell_stages
    return {"states": states.states, "sent": sent, "indices": torch.cat(module.never.value).tolist()}


@pytest.mark.parametrize("strategy", [PP2, {**VP2, "micro_batch_size": 1}], ids=["pp2", "pp2-vp2"])
def test_the_stages_get_the_metrics_that_a_step_changed_and_no_others(strategy: dict[str, Any]) -> None:
    first, last = run_ranks(2, send_metrics, strategy)
    assert first == last
    training = [["afresh", "always"], ["afresh", "always", "odd"]] * 2
    assert first["sent"] == [*training, ["never"], ["never"]] * 2
    x = Samples(8).x.double()
    for step, state in enumerate(first["states"]):
        stop = 2 * (step % 4) + 2
        own = x[stop - strategy.get("micro_batch_size", 2) : stop]
        assert state["afresh"] == [{"sum_value": pytest.approx(own.sum().item(), rel=1e-5)}, 1]
        updates = 2 // strategy.get("micro_batch_size", 2)
        assert state["always"][1] == updates * (step + 1)
        assert state["odd"][1] == len(state["odd"][0]["value"]) == updates * ((step + 1) // 2)
    assert first["indices"] == [0, 1, 2, 3] * 2


class Returning(StagedNet):
    """Returns what it predicts."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        return {"returned": self.error.compute() * 0 + batch_idx}

    test_step = validation_step


class Listening(Returning):
    """Reads it in a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_test_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["returned"]))


class Reads(pl.Callback):
    """Reads it in validation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["returned"]))


def send_outputs() -> dict[str, Any]:
    """Validate and test with and without readers; return how often was sent, what was seen and what was logged."""
    sent: list[Any] = []
    tell_stages = groups.tell_stages

    def noting(value: Any) -> Any:
        told = tell_stages(value)
        sent.extend(part for part in [told] if isinstance(part, dict) and "returned" in part)
        return told

    def run(way: str, module: Any, seen: list[float], *callbacks: Any) -> Any:
        sent.clear()
        trainer = make_trainer(PP2, callbacks=[DeviceStatsMonitor(), *callbacks], logger=Memory())
        [logged] = getattr(trainer, way)(module, loader(6, 2), verbose=False)
        return len(sent), seen, {name.split("_")[1]: value for name, value in logged.items()}

    reads, of_lambda, listening = Reads(), list[float](), Listening()
    at_end = LambdaCallback(
        on_validation_batch_end=lambda *all_of_it: of_lambda.append(all_of_it[2]["returned"].item())
    )
    groups.tell_stages = noting
    try:
        return {
            "nobody": run("validate", Returning(), []),
            "rank 0": run("validate", Returning(), reads.seen, *([reads] if dist.get_rank() == 0 else [])),
            "function": run("validate", Returning(), of_lambda, at_end),
            "not in test": run("test", Returning(), reads.seen, reads),
            "module": run("test", listening, listening.seen),
            "not in validation": run("validate", listening, []),
        }
    finally:
        groups.tell_stages = tell_stages


def test_the_stages_get_what_a_step_returned_where_some_rank_reads_it() -> None:
    first, last = run_ranks(2, send_outputs)
    seen = [0.0, 1.0, 2.0]
    assert {name: found[:2] for name, found in first.items()} == {
        "nobody": (0, []),
        "rank 0": (3, seen),
        "function": (3, seen),
        "not in test": (0, seen),
        "module": (3, seen),
        "not in validation": (0, []),
    }
    assert {name: found[0] for name, found in last.items()} == {name: found[0] for name, found in first.items()}
    assert last["function"][1] == last["module"][1] == seen
    assert all(found[2] == first["nobody"][2] for rank in (first, last) for found in rank.values())


# Decisions of callbacks


class Judged(StagedNet):
    """Logs a score that it reads from a list, where the last stage alone gets to."""

    train_scores = (5.0, 4.0, 3.0, 2.0, 1.0, 0.0)
    val_scores = (3.0, 1.0, 2.0, 2.0, 2.0, 2.0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = (self.predictions(batch).float() - batch["y"]).square().mean()
        self.log("train_score", self.train_scores[self.current_epoch], on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.predictions(batch)
        self.log("val_score", self.val_scores[self.current_epoch], sync_dist=True)


def train_until_stopped(strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train with callbacks that watch a score; return what they decided."""
    stopping = EarlyStopping("val_score", patience=2)
    best_val = ModelCheckpoint(folder, monitor="val_score", filename="val-{epoch}", save_weights_only=True)
    best_train = ModelCheckpoint(folder, monitor="train_score", filename="train-{epoch}", save_top_k=2)
    trainer = make_trainer(
        strategy,
        max_epochs=6,
        callbacks=[stopping, best_val, best_train],
        enable_checkpointing=True,
        accumulate_grad_batches=2,
    )
    trainer.fit(Judged(), loader(8, 2), loader(4, 2))
    return {
        "epochs": trainer.current_epoch,
        "stopped": stopping.stopped_epoch,
        "best": [Path(best_val.best_model_path).name, float(best_val.best_model_score or -1)],
        "kept": sorted(Path(path).name for path in best_train.best_k_models),
        "scores": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(2, PP2), (2, VP2), (4, PP2), (2, {})], ids=["pp2", "pp2-vp2", "pp2-dp2", "dp2"]
)
def test_early_stopping_and_checkpoints_follow_the_score_alike_on_every_rank(
    world_size: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    for rank in run_ranks(world_size, train_until_stopped, strategy, str(tmp_path)):
        assert rank == {
            "epochs": 4,
            "stopped": 3,
            "best": ["val-epoch=1.ckpt", 1.0],
            "kept": ["train-epoch=2.ckpt", "train-epoch=3.ckpt"],
            "scores": {"train_score": 2.0, "val_score": 2.0},
        }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train-epoch=2.ckpt",
        "train-epoch=3.ckpt",
        "val-epoch=1.ckpt",
    ]


# Two modules of one process do not disturb each other


@on_ranks(2)
def test_a_second_module_logs_its_own_names() -> None:
    first, second = Talkative(), Judged()
    run_fit(first, PP2, loader(4, 2))
    trainer = make_trainer(PP2)
    trainer.fit(second, loader(4, 2), loader(4, 2))
    assert set(trainer.callback_metrics) == {"train_score", "val_score"}
    for module in (first, second):
        assert type(module).log is pl.LightningModule.log
        assert "log" not in vars(module)


_COPIES = (torch.tensor, torch.as_tensor)
_PACKAGE = Path(lightning_mcore.__file__).parent


class HostCopies(TorchFunctionMode):
    """Notes which of our files copies a number of the host onto the device: on a GPU each copy waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.listening = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = func in _COPIES and not isinstance(args[0], Tensor)
        if self.listening and copies and (kwargs or {}).get("device") is not None:
            files = [Path(frame.filename) for frame in traceback.extract_stack()[:-1]]
            caller = next(file for file in reversed(files) if file.name != "cpu_runtime.py")  # which passes it on
            if _PACKAGE in caller.parents:
                self.places.append(caller.name)
        return func(*args, **(kwargs or {}))


class Numbers(StagedNet):
    """Logs numbers of the host."""

    copies: HostCopies

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.copies.listening = batch_idx >= 2  # the names are known then
        loss = (self.predictions(batch) - batch["y"]).square().mean()
        self.log_dict({"rate": 0.5, "rows": len(batch["x"])})
        return {"loss": loss, "num_tokens": batch["x"].shape[0]}


@on_ranks(2)
def test_numbers_of_the_host_reach_the_device_without_a_copy() -> None:
    module = Numbers(config={"calculate_per_token_loss": True})
    with HostCopies() as module.copies:
        make_trainer(PP2).fit(module, loader(12, 2))
    assert module.copies.places == []


class Early(StagedNet):
    """Logs a value in each step, and another one from the third step on."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = (self.predictions(batch) - batch["y"]).square().mean()
        self.log("score", batch["x"].sum() + batch_idx)
        if batch_idx >= 2:
            self.log("late", batch["x"].max())
        return loss


class LooksEarly(pl.Callback):
    """Reads, before the optimizer step and on rank 0 alone, what is logged by then; and on all ranks after it."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_rank == 0:
            self.before.append(dict(trainer.callback_metrics))

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        self.after.append(dict(trainer.callback_metrics))


def look_early(strategy: dict[str, Any]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], bool]:
    looks = LooksEarly()
    trainer = make_trainer(strategy, callbacks=[looks])
    trainer.fit(Early(), loader(8 if strategy else 16, 2))
    is_as_before = not {"log", "metrics"} & set(vars(trainer.fit_loop.epoch_loop._results))
    return looks.before, looks.after, is_as_before


@pytest.mark.parametrize("strategy", [{}, PP2], ids=["dp2", "pp2"])
def test_a_hook_before_the_optimizer_step_sees_what_the_step_logged(strategy: dict[str, Any]) -> None:
    """Values are logged after the optimizer step, or as soon as something looks at them."""
    (before, after, *restored), (_, other, *others) = run_ranks(2, look_early, strategy)
    # The first value of a new name needs all ranks, and only one looks: that step's come with the optimizer step.
    assert before == [after[0], after[1], after[1], after[3]]
    assert len({float(step["score"]) for step in after}) == 4
    assert ["late" in step for step in after] == ["late" in step for step in other] == [False, False, True, True]
    assert restored == others == [True]


@pytest.mark.parametrize(("strategy", "asked_for"), [({}, "all_reduce"), (PP2, "broadcast")], ids=["dp2", "pp2"])
@on_ranks(2)
def test_the_logs_of_a_step_cost_one_collective_once_its_names_are_known(
    strategy: dict[str, Any], asked_for: str
) -> None:
    steps: list[list[str]] = [[]]

    def noting(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked_by = sys._getframe(1).f_globals["__name__"]
            # The chunks sum the number of tokens, as Megatron does.
            if not asked_by.startswith(("megatron", "lightning_mcore.parallel.chunks")):
                steps[-1].append(f"{collective.__name__} of {asked_by}")
            return collective(*args, **kwargs)

        return call

    for name in ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list"):
        setattr(dist, name, noting(getattr(dist, name)))
    fields = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    tokens = [{"tokens": torch.arange(8) + row, "labels": torch.arange(8) + row + 1} for row in range(20)]
    end_step = LambdaCallback(on_train_batch_end=lambda *_: steps.append([]))
    make_trainer(strategy, callbacks=[end_step]).fit(MCoreGPT(32, 8, fields), DataLoader(tokens, batch_size=2))
    assert len(steps[0]) > 1  # the names are exchanged
    later = steps[FIRST_BATCHES:][:2]  # the first batches are compared
    assert later == [[f"{asked_for} of lightning_mcore.strategy.logs.pipeline"]] * 2
