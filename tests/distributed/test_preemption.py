# SPDX-License-Identifier: Apache-2.0
"""A signal to any rank, at any moment of a run, loses no step: real signals to real rank processes."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_mcore import MCoreCheckpointIO, MCoreStrategy, PreemptionCheckpoint
from lightning_mcore.strategy.preemption import shield_workers
from tests.support.ranks import on_ranks, run_ranks, start_context
from tests.support.sentences import refuses
from tests.support.toy import PP2, PlainNet, StagedNet, Watch, loader, make_trainer, run_fit

NUM_BATCHES = 12  # of an epoch on a data-parallel rank; two make an optimizer step
STEPS = NUM_BATCHES // 2 * 2  # of two epochs


class Sender(pl.Callback):
    """Sends a signal to this process during a certain training or validation batch, counted over the run.

    Args:
        number: The signal.
        training: The training batch.
        validation: The validation batch.
        delay: Seconds from the beginning of the batch; at most until its end.
    """

    def __init__(
        self, number: signal.Signals, training: int | None = None, validation: int | None = None, delay: float = 0.0
    ) -> None:
        self.number = number
        self.at = {"training": training, "validation": validation}
        self.counted = {"training": 0, "validation": 0}
        self.delay = delay
        self.timer: threading.Timer | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._count("training")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.timer is not None:
            self.timer.join()

    def on_validation_batch_start(self, *_: Any) -> None:
        self._count("validation")

    def _count(self, kind: str) -> None:
        if self.counted[kind] == self.at[kind]:
            self.timer = threading.Timer(self.delay, os.kill, (os.getpid(), self.number))
            self.timer.start()
            if not self.delay:
                self.timer.join()
        self.counted[kind] += 1


class Journal(pl.Callback):
    """Notes into an :class:`Outcome` when validations end and when something is saved."""

    def __init__(self, outcome: "Outcome") -> None:
        self.outcome = outcome

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.outcome.validated.append(trainer.global_step)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self.outcome.saved.append(trainer.global_step)


@dataclass
class Outcome:
    """What became of a run on one rank.

    Attributes:
        losses: One for each optimizer step.
        stopped: Whether it was ended from outside.
        handlers_are_back: Whether the signal handlers after it are those from before it.
        validated: The optimizer steps after which a validation ended.
        saved: Those at which something was saved.
    """

    losses: list[float] = field(default_factory=list)
    stopped: bool = False
    handlers_are_back: bool = False
    validated: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)


def fit(folder: str, callbacks: list[pl.Callback], resume: str | None = "last", **arguments: Any) -> Outcome:
    """Train for two epochs, or go on where an earlier run was told to end."""
    settings: dict[str, Any] = {"module": StagedNet, "strategy": PP2, "max_epochs": 2, **arguments}
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    outcome, watch = Outcome(), Watch()
    checkpoints = ModelCheckpoint(folder, save_top_k=0)  # saves nothing by itself
    module, strategy, workers = settings.pop("module")(), settings.pop("strategy"), settings.pop("workers", 0)
    copies = dist.get_world_size() if strategy == {} else 1
    if settings.pop("asynchronous", False):
        strategy = MCoreStrategy(**strategy, checkpoint_io=MCoreCheckpointIO(async_save=True))
        checkpoints = ModelCheckpoint(folder, every_n_train_steps=2)  # one of these is in flight when the signal comes
    try:
        run_fit(
            module,
            strategy,
            loader(NUM_BATCHES * copies, 1, shuffle=True, num_workers=workers),
            loader(4, 1),
            ckpt_path=resume,
            accumulate_grad_batches=2,
            enable_checkpointing=True,
            callbacks=[checkpoints, *callbacks, watch, Journal(outcome)],
            **settings,
        )
    except SIGTERMException:
        outcome.stopped = True
    outcome.losses = watch.seen.losses
    outcome.handlers_are_back = handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    return outcome


class SendToAll(Sender):
    """Sends the signal also to the workers of the loaders, as schedulers do."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        if self.timer is not None:
            workers = [str(child.pid) for child in multiprocessing.active_children()]
            subprocess.run(["kill", f"-{self.number.value}", *workers], check=True)  # torch hides signals from this pid
            time.sleep(0.2)  # a worker that ends raises an error here
            self.timer = None


def on_rank(rank: int, sender: Sender) -> list[pl.Callback]:
    """Let one rank get a signal."""
    return [sender] if dist.get_rank() == rank else []


@dataclass
class Told:
    """A run that was told to end, and the one that went on."""

    first: Outcome
    second: Outcome
    files: list[str]

    @property
    def losses(self) -> list[float]:
        """Those of both."""
        return self.first.losses + self.second.losses


def tell(folder: str, sender: list[pl.Callback], **arguments: Any) -> Told:
    """Run until the sender's signal ends the run, then the same again."""
    told = list(arguments.pop("signals", ["SIGTERM"]))
    first = fit(folder, [*sender, PreemptionCheckpoint(signals=told)], **arguments)
    files = sorted(os.listdir(folder))
    return Told(first, fit(folder, [PreemptionCheckpoint(signals=told)], **arguments), files)


def every_moment(folder: str) -> dict[str, Any]:
    """Rank function: signals at other moments of the same run."""
    heard: list[int] = []
    term, usr1 = signal.SIGTERM, signal.SIGUSR1
    with mock.patch.object(_TrainingEpochLoop, "_broadcast_sigterm_tensor") as broadcast:
        whole = fit(f"{folder}/none", [])
    results: dict[str, Any] = {
        "broadcasts": broadcast.call_count,
        "whole": whole,
        "window": tell(f"{folder}/window", on_rank(1, Sender(term, training=4))),
        "signal of choice": tell(
            f"{folder}/usr1", on_rank(0, Sender(usr1, training=15)), signals=["SIGTERM", "SIGUSR1"]
        ),
        "end of epoch": tell(f"{folder}/epoch", on_rank(1, Sender(term, training=NUM_BATCHES - 1))),
        "validation": tell(f"{folder}/val", on_rank(1, Sender(term, validation=5)), val_check_interval=4),
        "before validation": tell(f"{folder}/before", on_rank(0, Sender(term, training=7)), val_check_interval=4),
        "last step": tell(f"{folder}/last", on_rank(0, Sender(term, training=2 * NUM_BATCHES - 1))),
        "plain": tell(f"{folder}/plain", on_rank(1, Sender(term, training=6)), module=PlainNet, strategy={}),
        "async": tell(f"{folder}/async", on_rank(0, Sender(term, training=9)), asynchronous=True),
        "plain whole": fit(f"{folder}/none", [], module=PlainNet, strategy={}),
    }
    chance = random.Random(4)  # the same on both ranks
    for trial in range(4):
        rank, batch, delay = chance.randrange(2), chance.randrange(2 * NUM_BATCHES - 2), chance.uniform(0.0005, 0.01)
        results[f"random {trial}"] = tell(f"{folder}/{trial}", on_rank(rank, Sender(term, training=batch, delay=delay)))
    previous = signal.signal(usr1, lambda number, frame: heard.append(number))
    try:
        chained = tell(f"{folder}/chained", on_rank(1, Sender(usr1, training=3)), signals=["SIGUSR1"])
    finally:
        signal.signal(usr1, previous)
    return {**results, "chained": chained, "heard": heard}


def test_no_step_is_lost_whenever_the_signal_comes(tmp_path: Path) -> None:
    ranks = run_ranks(2, every_moment, str(tmp_path), timeout=180)
    for rank, results in enumerate(ranks):
        whole = results["whole"].losses
        assert len(whole) == STEPS
        assert results["broadcasts"] == 0  # Lightning's, before each batch, would wait for a GPU
        for name, at in {
            "window": 3,  # batch 4 opens the window of the third step
            "signal of choice": 8,
            "end of epoch": NUM_BATCHES // 2,
            "validation": 4,  # the sixth validation batch is in the validation after the eighth training batch
            "before validation": 4,
            "async": 5,
            "chained": 2,
        }.items():
            told = results[name]
            assert told.first.stopped, name
            assert told.first.losses == whole[:at], name
            assert told.losses == whole, name
            assert "last-preempted.ckpt" in told.files, name
            assert told.first.handlers_are_back, name
            assert told.second.handlers_are_back, name
            assert not told.second.stopped, name
        for trial in range(4):
            told = results[f"random {trial}"]
            assert told.first.stopped
            assert told.losses == whole
        assert not results["last step"].first.stopped  # it had run to its end
        assert results["last step"].first.losses == whole
        assert results["last step"].second.losses == []
        assert results["plain"].losses == results["plain whole"].losses
        assert len(results["plain"].first.losses) == 4
        # What follows a step is not left out, and the checkpoint is there before it begins.
        before = results["before validation"].first
        assert before.validated == [2, 4]
        assert before.saved == [4, 4]
        assert results["end of epoch"].first.validated == [6]
        assert results["end of epoch"].first.saved == [6, 6]
        assert results["end of epoch"].second.validated == [12]
        assert results["window"].first.saved == [3]
        assert len(results["heard"]) == (1 if rank == 1 else 0)


def signals_to_all(folder: str) -> tuple[list[float], list[Told]]:
    """Rank function: each signal to a rank and to the workers that read its batches."""
    whole, told = fit(f"{folder}/whole", [], resume=None), []
    for name in ("SIGTERM", "SIGUSR1"):
        sender = on_rank(1, SendToAll(signal.Signals[name], training=5))
        told.append(tell(f"{folder}/{name}", sender, signals=[name], workers=2))
    return whole.losses, told


_KEPT: list[Any] = []


def keep_an_iterator() -> None:
    """End a process whose workers nobody has shut down, as after an error with its traceback."""
    data = loader(4, 1, num_workers=1)
    trainer = make_trainer("auto", callbacks=[PreemptionCheckpoint()], enable_checkpointing=True)
    shield_workers(data, trainer, contextlib.ExitStack())
    _KEPT.append(iter(data))
    next(_KEPT[0])


def test_workers_end_with_their_process() -> None:
    process = start_context("gloo").Process(target=keep_an_iterator)  # type: ignore[attr-defined]
    process.start()
    process.join(60)
    code = process.exitcode  # None while it waits for the worker
    process.kill()
    assert code == 0


def test_workers_outlive_a_signal_to_every_process(tmp_path: Path) -> None:
    for whole, runs in run_ranks(2, signals_to_all, str(tmp_path)):
        for told in runs:
            assert told.first.stopped
            assert told.losses == whole


SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/requeued"
"""


@on_ranks(1, timeout=120)
def test_the_callback_for_slurms_signal_leaves_with_the_run() -> None:
    os.environ.update(SLURM_NTASKS="1", SLURM_JOB_NAME="train", SLURM_JOB_ID="77", SLURM_NODEID="0", SLURM_PROCID="0")
    os.environ.update(SLURM_LOCALID="0", SLURM_NTASKS_PER_NODE="1")
    trainer = make_trainer({}, plugins=[SLURMEnvironment(auto_requeue=True)], max_steps=2)
    names = [type(callback).__name__ for callback in trainer.callbacks]
    trainer.fit(PlainNet(), loader(8, 2))
    trainer.fit(PlainNet(), loader(8, 2))
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)  # it is Lightning's again
    left = [type(callback).__name__ for callback in trainer.callbacks]
    assert [name for name in left if name not in names] == []


def requeue(folder: str, has_callback: bool) -> tuple[Outcome, Outcome, Outcome]:
    """Rank function: SLURM's requeue signal, to one rank, then the restart that SLURM would make."""
    rank = os.environ["RANK"]
    os.environ.update(
        SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_JOB_NAME="train", SLURM_JOB_ID="77", SLURM_NODEID="0"
    )
    os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank, PATH=f"{folder}/bin:{os.environ['PATH']}")

    def run(*callbacks: pl.Callback, **arguments: Any) -> Outcome:
        slurm: dict[str, Any] = {"plugins": [SLURMEnvironment(auto_requeue=True)], "default_root_dir": folder}
        own = [PreemptionCheckpoint()] if has_callback else []  # without it the strategy sees to the requeue signal
        return fit(f"{folder}/beside", [*callbacks, *own], resume=None, **slurm, **arguments)

    whole = fit(f"{folder}/none", [])
    first = run(*on_rank(1, Sender(signal.SIGUSR1, training=8)))
    second = run(*on_rank(0, Sender(signal.SIGUSR1, training=3)), val_check_interval=2)
    return whole, Outcome(first.losses + second.losses, first.stopped and second.stopped), run()


@pytest.mark.parametrize("has_callback", [True, False], ids=["callback", "strategy"])
def test_slurm_requeues_between_steps_and_lightning_finds_the_directory(has_callback: bool, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    for whole, interrupted, last in run_ranks(2, requeue, str(tmp_path), has_callback, timeout=120):
        assert interrupted.stopped
        assert len(interrupted.losses) == 7  # the fifth step of the first run, the second of the next
        assert not last.stopped
        assert interrupted.losses + last.losses == whole.losses
    assert (tmp_path / "bin" / "requeued").read_text().splitlines() == ["requeue 77"] * 2
    names = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert names == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt", "hpc_ckpt_3.ckpt"]  # before and after the validation
    assert all(path.is_dir() for path in tmp_path.glob("*.ckpt"))
    assert not list(tmp_path.glob("beside/*"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"signals": "SIGTERM"}, TypeError),
        ({"signals": 15}, TypeError),
        ({"signals": []}, ValueError),
        ({"signals": ["SIGKILL"]}, ValueError),
        ({"signals": [15]}, ValueError),
        ({"filename": "preempted"}, ValueError),
        ({"filename": "last.ckpt"}, ValueError),
        ({"filename": "last/one"}, ValueError),
        ({"filename": 3}, TypeError),
        ({"dirpath": 3}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *(f"{name}={value!r}" for name, value in arguments.items())):
        PreemptionCheckpoint(**arguments)


@on_ranks(1)
def test_a_trainer_without_a_folder_is_refused_before_training() -> None:
    with refuses(ValueError, "saves next to a ModelCheckpoint"):
        run_fit(PlainNet(), {}, loader(2, 1), enable_checkpointing=True, callbacks=[PreemptionCheckpoint()])
