# SPDX-License-Identifier: Apache-2.0
"""Ranks for a Trainer in a notebook, or in any other interactive Python.

Lightning's usual launcher runs the script again for each rank, and a notebook has no script. Lightning's
``"ddp_notebook"`` forks the notebook's process instead. But a fork fails with CUDA if the notebook has used it, and
hangs in its first operation on several CPU threads if the notebook has done one, as when it draws a sample between two
runs. So here each rank is a new process. It gets a copy of the trainer with its model and data, and runs it as under
torchrun. cloudpickle writes the copy, because only the notebook has the classes that are defined in it.

==========================================  ============================================================================
what the notebook has after a run           where it comes from
==========================================  ============================================================================
return value, metrics, ``global_step``,     rank 0
state of callbacks and loggers
weights of layers that the notebook built   rank 0
weights of layers that the ranks built      not here: each rank had a part, which is in the run's checkpoint
==========================================  ============================================================================

After ``fit`` with ``MCoreGPT`` on two ranks, the notebook's model is as empty as before, and
:class:`NotebookLauncher` says which checkpoint has its weights. Another run of that model without ``ckpt_path`` would
start from new weights, so it is rejected.

Ranks write into one pipe, whose text the notebook shows in the cell. An interrupt goes to the notebook, which passes it
on. A rank also ends when its standard input does, that is, when the notebook's process ends.
"""

import codecs
import contextlib
import inspect
import io
import json
import operator
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.rank_process import describe
from lightning_mcore.strategy.checkpointing import last_checkpoint

_GRACE = 30.0  # seconds for the other ranks to end by themselves, once one has failed or the run was interrupted
_TICK = 0.1

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from lightning_mcore.strategy.notebook import run_rank
run_rank(sys.argv[2])
"""

_kept_by_ranks: WeakSet[pl.LightningModule] = WeakSet()
"""Models that ranks have trained; their weights are only in a checkpoint."""


@dataclass
class _Outcome:
    """What a rank sends back: rank 0 everything, another rank its error and, with it, attributes and metrics."""

    failed_at: float | None = None  # seconds, the same clock for all ranks
    error: str = ""
    traceback: str = ""
    exception: bytes = b""
    returned: Any = None
    attributes: list[dict[str, bytes]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Any] | None = None


class _RankTracebackError(Exception):
    """The cause of an error from a rank: its traceback there, as text."""

    def __str__(self) -> str:
        """Return the traceback, below the name of this class."""
        return f"\n{self.args[0]}"


class NotebookLauncher(_Launcher):
    """Runs each call of ``fit``, ``validate``, ``test`` or ``predict`` on new processes."""

    def __init__(self, strategy: DDPStrategy, restores: contextlib.ExitStack) -> None:
        if strategy.num_nodes > 1:
            raise ValueError(
                f"num_nodes={strategy.num_nodes} in a notebook: it can only start ranks on its own machine; use"
                " num_nodes=1, or run a script on each machine with torchrun or SLURM"
            )
        try:
            import cloudpickle  # noqa: F401 - only notebooks need it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"devices={strategy.num_processes} in a notebook needs the package cloudpickle; pip install"
                " cloudpickle, or use devices=1",
                name="cloudpickle",
            ) from error
        self._strategy = strategy
        self._restores = restores
        self._ranks: list[subprocess.Popen[bytes]] = []

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether Lightning accepts this launcher in a notebook."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function on all ranks, bring back what the module docstring lists, and return rank 0's result."""
        assert trainer is not None
        receivers = _receivers(trainer)
        try:
            _check_has_weights(trainer, inspect.signature(function).bind(*args, **kwargs).arguments)
            with tempfile.TemporaryDirectory(prefix="lightning-mcore-") as folder:
                Path(folder, "run").write_bytes(_pickled_run((trainer, function, args, kwargs)))
                try:
                    self._run_ranks(folder)
                finally:
                    outcomes = [_read_outcome(folder, rank) for rank in range(len(self._ranks))]
                    # Rank 0's, or another's if rank 0 had to be ended: an interrupt must name the last checkpoint
                    for outcome in [each for each in outcomes if each is not None and each.attributes][:1]:
                        _receive(outcome, trainer, receivers)
                self._raise_first(outcomes)
        except KeyboardInterrupt:
            told = _interrupted(trainer)  # by its callbacks
            self._keep_callbacks_out(trainer)
            raise RuntimeError(told) from None
        except BaseException:
            self._keep_callbacks_out(trainer)
            raise
        assert outcomes[0] is not None
        if trainer.state.fn == TrainerFn.FITTING:
            _take_weights(trainer, outcomes[0].weights)
        return outcomes[0].returned

    def kill(self, signum: int | signal.Signals) -> None:
        """Send a signal to all ranks."""
        for rank in self._ranks:
            rank.send_signal(signum)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the processes and what else belongs to the notebook."""
        return {"_strategy": self._strategy, "_restores": contextlib.ExitStack(), "_ranks": []}

    def _keep_callbacks_out(self, trainer: pl.Trainer) -> None:
        """Hide callbacks until teardown: the ranks have called ``on_exception``, and here one has nothing to save."""
        self._restores.enter_context(attributes_set([trainer], {"callbacks": []}))

    def _run_ranks(self, folder: str) -> None:
        """Start the ranks, show their output, and return when all have ended."""
        environment = {
            # Jupyter asks for colors; Rich would then take the cell for a terminal, and move a cursor in it.
            **{name: value for name, value in os.environ.items() if name != "FORCE_COLOR"},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_network_port()),
            "WORLD_SIZE": str(self._strategy.num_processes),
            "NODE_RANK": "0",
            "PYTHONUNBUFFERED": "1",
        }
        self._ranks = []
        ours, theirs = os.pipe()
        try:
            with open(theirs, "wb", buffering=0) as output:
                for rank in range(self._strategy.num_processes):
                    process = subprocess.Popen(
                        [sys.executable, "-c", _START, json.dumps(sys.path), folder],
                        env={**environment, "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                        process_group=0,  # so that an interrupt reaches a rank once, when the notebook passes it on
                    )
                    self._ranks.append(process)
            try:
                self._follow(ours, sys.stdout.write)
            except KeyboardInterrupt:
                self.kill(signal.SIGINT)
                self._follow(ours, len, until=time.monotonic() + _GRACE)
                raise
        finally:
            for process in self._ranks:
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
            os.close(ours)

    def _follow(self, output: int, show: Callable[[str], object], until: float = float("inf")) -> None:
        """Show what the ranks print until all have ended, or too long after one has failed."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        alive = True
        while alive and time.monotonic() < until:
            codes = [process.poll() for process in self._ranks]
            alive = None in codes
            if any(codes):  # one has failed: the others may wait for it, so they get a limited time
                until = min(until, time.monotonic() + _GRACE)
            show(decoder.decode(_available(output, _TICK)))
        # Not up to the end of the pipe, which a process that a rank has started may keep open.
        while text := _available(output, 0):
            show(decoder.decode(text))

    def _raise_first(self, outcomes: list[_Outcome | None]) -> None:
        """Raise the error of the rank that failed first, if any did."""
        failed = [outcome for outcome in outcomes if outcome is not None and outcome.failed_at is not None]
        if failed:
            first = min(failed, key=lambda outcome: outcome.failed_at or 0.0)
            error: BaseException = RuntimeError(first.error)
            with contextlib.suppress(Exception):  # a class that exists only on the rank
                error = _loads(first.exception)
            raise error from _RankTracebackError(first.traceback)
        for rank, (outcome, process) in enumerate(zip(outcomes, self._ranks, strict=True)):
            if outcome is None or process.returncode:
                raise RuntimeError(
                    f"rank {rank} of {len(outcomes)} ended with exit code {process.returncode} and without an error"
                    " message (killed, out of memory, or a crash outside Python); see what it printed above"
                )


def run_rank(folder: str) -> None:
    """Run the function of :meth:`NotebookLauncher.launch` in this process, one of its ranks."""
    threading.Thread(target=_end_with_the_notebook, daemon=True).start()
    trainer, function, args, kwargs = pickle.loads(Path(folder, "run").read_bytes())
    receivers = _receivers(trainer)
    fits, sent = trainer.state.fn == TrainerFn.FITTING, _shapes(trainer.lightning_module)
    trainer.strategy.set_world_ranks()
    trainer.strategy._configure_launcher()  # the one of a script, because this process is not interactive
    outcome = _Outcome()
    try:
        outcome.returned = _call_and_handle_interrupt(trainer, function, *args, **kwargs)
    except BaseException as error:
        outcome.failed_at, outcome.error = time.monotonic(), describe(error)
        outcome.traceback = "".join(traceback.format_exception(error))
        with contextlib.suppress(Exception):
            outcome.exception = _dumps(error)
    if trainer.global_rank == 0 or outcome.failed_at is not None:
        outcome.returned = move_data_to_device(outcome.returned, "cpu")
        outcome.attributes = [_pickled_attributes(receiver, receivers, trainer) for receiver in receivers]
        outcome.metrics = move_data_to_device([dict(metrics) for metrics in _metrics(trainer)], "cpu")
        if outcome.failed_at is None and fits and _shapes(trainer.lightning_module) == sent:
            outcome.weights = move_data_to_device(trainer.lightning_module.state_dict(), "cpu")
    else:
        outcome.returned = None
    unfinished = Path(folder, f"{trainer.local_rank}.unfinished")
    unfinished.write_bytes(_dumps(outcome))
    unfinished.rename(Path(folder, str(trainer.local_rank)))
    sys.exit(0 if outcome.failed_at is None else 1)


def _end_with_the_notebook() -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    os._exit(1)


def _available(file: int, timeout: float) -> bytes:
    """Return what can be read from a pipe within ``timeout`` seconds."""
    return os.read(file, 2**16) if select.select([file], [], [], timeout)[0] else b""


def _read_outcome(folder: str, rank: int) -> _Outcome | None:
    file = Path(folder, str(rank))
    return _loads(file.read_bytes()) if file.exists() else None


def _pickled_run(run: tuple[Any, ...]) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(run))
    except Exception as error:
        raise TypeError(
            "a notebook sends a copy of the trainer, the model and the data to each rank, and one of them cannot be"
            f" pickled: {describe(error)}; create what cannot be copied in a hook, such as setup or train_dataloader"
        ) from error


# ---- what comes back


def _receivers(trainer: pl.Trainer) -> list[Any]:
    """Return the objects whose attributes come back, in an order that is the same on a rank."""
    loops: list[Any] = [trainer.fit_loop]
    receivers = [trainer.state, *trainer.callbacks, *trainer.loggers]  # type: ignore[attr-defined]
    for loop in loops:
        loops += [value for value in vars(loop).values() if isinstance(value, _Loop)]
        receivers += [value for value in vars(loop).values() if isinstance(value, _BaseProgress)]
    return receivers


def _known(trainer: pl.Trainer, receivers: list[Any]) -> list[Any]:
    """Return the objects that are on both sides, so that references to them become references to the other one."""
    return [*receivers, trainer, trainer.strategy, trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]


class _Pickler(pickle.Pickler):
    """Writes references to objects that both sides know, and to classes and functions of the notebook."""

    def __init__(self, file: io.BytesIO, known: Sequence[Any]) -> None:
        super().__init__(file)
        self._numbers = {id(value): number for number, value in enumerate(known) if value is not None}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            return value.__qualname__
        return self._numbers.get(id(value))


class _Unpickler(pickle.Unpickler):
    """Reads what :class:`_Pickler` has written."""

    def __init__(self, file: io.BytesIO, known: Sequence[Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, reference: Any) -> Any:
        if isinstance(reference, int):
            return self._known[reference]
        return operator.attrgetter(reference)(sys.modules["__main__"])


def _dumps(value: Any, known: Sequence[Any] = ()) -> bytes:
    file = io.BytesIO()
    _Pickler(file, known).dump(value)
    return file.getvalue()


def _loads(pickled: bytes, known: Sequence[Any] = ()) -> Any:
    return _Unpickler(io.BytesIO(pickled), known).load()


def _pickled_attributes(value: Any, receivers: list[Any], trainer: pl.Trainer) -> dict[str, bytes]:
    """Return the attributes of an object, without those that cannot be pickled, such as an open file."""
    pickled = {}
    state = value.__getstate__()
    for name, attribute in state.items() if isinstance(state, dict) else ():
        with contextlib.suppress(Exception):
            pickled[name] = _dumps(attribute, _known(trainer, receivers))
    return pickled


def _receive(outcome: _Outcome, trainer: pl.Trainer, receivers: list[Any]) -> None:
    """Give the notebook's objects the attributes and metrics of a rank's."""
    for receiver, attributes in zip(receivers, outcome.attributes, strict=True):
        for name, pickled in attributes.items():
            with contextlib.suppress(Exception):  # it refers to what only the rank has, such as a lambda
                setattr(receiver, name, _loads(pickled, _known(trainer, receivers)))
    for here, there in zip(_metrics(trainer), outcome.metrics, strict=True):
        here.update(there)


def _metrics(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]


def _shapes(model: pl.LightningModule) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in model.state_dict().items()}


def _take_weights(trainer: pl.Trainer, weights: dict[str, Any] | None) -> None:
    """Load the trained weights into the notebook's model, or say where they are."""
    model = trainer.lightning_module
    if weights is not None:
        model.load_state_dict(weights)
        return
    _kept_by_ranks.add(model)
    checkpoint = last_checkpoint(trainer)
    where = (
        f"the trained weights are in {checkpoint}" if checkpoint else "no checkpoint was saved, so its weights are lost"
    )
    rank_zero_info(f"MCoreStrategy: the ranks of this run have ended; {where}")


def _function(trainer: pl.Trainer) -> str:
    return trainer.state.fn.value if trainer.state.fn is not None else "the run"


def _check_has_weights(trainer: pl.Trainer, arguments: dict[str, Any]) -> None:
    """Raise RuntimeError if the run would start from new weights although an earlier run has trained some."""
    if arguments.get("model") in _kept_by_ranks and arguments.get("ckpt_path") is None:
        checkpoint = last_checkpoint(trainer)
        raise RuntimeError(
            f"{_function(trainer)}: this model has been trained by ranks that have ended, and its weights are in their"
            f" checkpoint; pass ckpt_path={checkpoint or 'the path of the checkpoint'!r}, or use a new model"
        )


def _interrupted(trainer: pl.Trainer) -> str:
    checkpoint = last_checkpoint(trainer)
    further = f", or go on from the last checkpoint with ckpt_path={checkpoint!r}" if checkpoint else ""
    return f"{_function(trainer)} was interrupted, and its ranks have ended; run it again to start over{further}"
