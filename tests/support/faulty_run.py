# SPDX-License-Identifier: Apache-2.0
"""A training of a small GPT as a user writes it, in which something goes wrong on one rank.

``tests/faults.py`` starts it, on each rank or through Lightning's launcher, and judges how the ranks end.
"""

import atexit
import ctypes
import dataclasses
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_mcore import MCoreCheckpointIO, MCoreGPT, MCoreStrategy
from lightning_mcore.checkpoint import save as checkpoint_save

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"use_distributed_optimizer": True},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
SAYING = "a bad batch"
STEP = 2  # the optimizer step in which things go wrong
STEPS = 4
SLOW = 13  # seconds; longer than a rank is left to end by itself


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        fault: What goes wrong, a key of ``FAULTS``.
        place: Where: a hook of the module, of a callback or of the strategy.
        rank: On which rank; -1 for all.
        layout: A key of ``LAYOUTS``.
        asynchronous: Whether saves are, with one in flight all the time.
        again: Whether the script catches what leaves ``fit`` and calls it a second time.
        rescue: Whether a checkpoint is to be saved when an exception is raised.
        lingers: Whether an exit handler of the script waits for ever.
        folder: Where it writes.
    """

    fault: str
    place: str = "training_step"
    rank: int = 1
    layout: str = "dp2"
    asynchronous: bool = False
    again: bool = False
    rescue: bool = False
    lingers: bool = False
    folder: str = ""

    def dumps(self) -> str:
        """Return it as a command-line argument."""
        return json.dumps(dataclasses.asdict(self))


class UnpicklableError(Exception):
    """Cannot leave its process, and cannot even be printed."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise ValueError("no text")


def _raise(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def _kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _stop_the_other() -> None:
    """Stop the other rank, and fail before anybody can have noticed."""
    folder = Path(json.loads(sys.argv[-1])["folder"])
    other = next(path for path in folder.glob("process_*") if path.read_text() != str(os.getpid()))
    os.kill(int(other.read_text()), signal.SIGSTOP)
    raise ValueError(SAYING)


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(SLOW)  # without letting another thread of Python run


FAULTS: dict[str, Callable[[], object]] = {
    "ValueError": _raise(ValueError(SAYING)),
    "StopIteration": _raise(StopIteration(SAYING)),
    "GeneratorExit": _raise(GeneratorExit(SAYING)),
    "KeyboardInterrupt": _raise(KeyboardInterrupt(SAYING)),
    "SystemExit": _raise(SystemExit(3)),
    "MemoryError": _raise(MemoryError(SAYING)),
    "UnpicklableError": _raise(UnpicklableError()),
    "os._exit": lambda: os._exit(7),
    **{name: _kill(signal.Signals[name]) for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGSTOP", "SIGSEGV", "SIGINT")},
    "stops the other": _stop_the_other,
    "slow": lambda: time.sleep(SLOW),
    "holds the interpreter": _hold_the_interpreter,
    "none": lambda: None,
}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """64 rows of 16 tokens."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.rows = torch.randint(0, 64, (64, 17), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.run.at("dataset", self.run.rows_read == 4)
        self.run.rows_read += 1
        return {"tokens": self.rows[index, :-1], "labels": self.rows[index, 1:]}


class Run:
    """Knows when it is time, and notes that moment.

    Args:
        plan: What goes wrong.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.rows_read = 0
        self.is_over = False

    def at(self, place: str, now: bool = True) -> None:
        """Let it go wrong here, if here is where."""
        plan = self.plan
        if not now or self.is_over or place != plan.place or plan.rank not in (self.rank, -1):
            return
        self.is_over = True
        self.note()
        FAULTS[plan.fault]()

    def note(self) -> None:
        """Write down when it happened."""
        Path(self.plan.folder, f"cause_{self.rank}").write_text(str(time.monotonic()))


class GPT(MCoreGPT):
    """Goes wrong in the hooks of a module."""

    run: Run

    def configure_model(self) -> None:
        self.run.at("configure_model")
        super().configure_model()

    def configure_optimizers(self) -> Any:
        self.run.at("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.run.at("training_step", self.trainer.global_step == STEP)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.run.at("validation_step", self.trainer.global_step == STEP)
        return super().validation_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.run.at("optimizer_step", self.trainer.global_step == STEP)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.run.at("save", self.trainer.global_step == STEP)
        super().on_save_checkpoint(checkpoint)


class Hooks(pl.Callback):
    """Goes wrong in the hooks of a callback.

    Args:
        run: What knows when.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def setup(self, *_: Any, **__: Any) -> None:
        self.run.at("setup")

    def on_train_start(self, *_: Any) -> None:
        self.run.at("on_train_start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.run.at("on_train_batch_end", trainer.global_step == STEP)

    def on_train_end(self, *_: Any) -> None:
        self.run.at("on_train_end")

    def on_fit_end(self, *_: Any) -> None:
        self.run.at("on_fit_end")


class Strategy(MCoreStrategy):
    """Goes wrong where process groups open, and at the end."""

    def setup_environment(self) -> None:
        self.run.at("setup_environment")
        super().setup_environment()

    def teardown(self) -> None:
        self.run.at("teardown")
        super().teardown()


def _slow_writer(write_pieces: Callable[..., Any]) -> Callable[..., Any]:
    def write(*args: Any) -> Any:
        time.sleep(3)
        return write_pieces(*args)

    return write


def _fit(run: Run) -> None:
    plan = run.plan
    timeout = timedelta(seconds=20) if plan.place == "setup_environment" else timedelta(minutes=30)
    save_to = MCoreCheckpointIO(async_save=plan.asynchronous)
    strategy = Strategy(**LAYOUTS[plan.layout], checkpoint_io=save_to, timeout=timeout)
    strategy.run = run
    if plan.place == "files" and plan.rank == run.rank:
        run.note()
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, used + 40))  # enough for the default group
    save = ModelCheckpoint(plan.folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        val_check_interval=STEP,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=strategy,
        callbacks=[Hooks(run), save, *([OnExceptionCheckpoint(plan.folder)] if plan.rescue else [])],
    )
    samples = Samples(run)
    workers = 1 if plan.place == "dataset" else 0
    data = DataLoader(samples, batch_size=2, num_workers=workers)
    transformer = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    model = GPT(vocab_size=64, seq_length=16, transformer=transformer)
    model.run = run  # no argument, which would be a hyper-parameter in checkpoints
    trainer.fit(model, data, DataLoader(samples, batch_size=2))


def main(text: str) -> None:
    """Be a rank.

    Args:
        text: What ``Plan.dumps`` returned.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    plan = Plan(**json.loads(text))
    run = Run(plan)
    Path(plan.folder, f"process_{run.rank}").write_text(str(os.getpid()))
    if plan.asynchronous:
        checkpoint_save.write_pieces = _slow_writer(checkpoint_save.write_pieces)
    if plan.lingers:
        atexit.register(threading.Event().wait)
        print("before the run")  # in a buffer
    run.at("script")
    try:
        _fit(run)
    except Exception as error:
        if not plan.again:
            raise
        print(f"rank {run.rank} caught {type(error).__name__}", flush=True)
        _fit(run)
    run.at("end")
    print(f"rank {run.rank} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
