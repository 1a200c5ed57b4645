# SPDX-License-Identifier: Apache-2.0
"""Save and end when the scheduler says so.

Schedulers announce the end of a job with a signal: SIGTERM, or another one that was asked for, some seconds before
SIGKILL. :class:`PreemptionCheckpoint` lets the optimizer step that is running end, saves a checkpoint on all ranks
together, and ends the run; the same command with ``ckpt_path="last"`` goes on from there.

A signal may reach one rank only, and each rank in another line of its step, so nothing can be saved where it arrives:
a save needs all ranks. The handler only takes a note, and after each optimizer step the ranks ask each other whether
anyone has one. Lightning's own handlers do more: that of SIGTERM broadcasts from within the handler, which meets
whatever the other ranks are communicating at that moment, and that of SLURM's requeue signal saves there. Both are
replaced while a fit lasts, and what they are for happens between steps: the end of the run is Lightning's
(``SIGTERMException`` on every rank), and so is the requeueing of ``SLURMEnvironment(auto_requeue=True)``.

What this cannot do: a rank that waits for a dead peer inside a collective runs no Python, so its handler has to wait
as well. It ends some seconds after the peer (``parallel/rank_watch.py``), with this callback as without it.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_mcore.checkpoint.io import MCoreCheckpointIO

logger = logging.getLogger(__name__)

_SHELL_CODE = 128  # and the number of a signal are the exit code of what it ended, as shells have it

SignalName = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"]


class PreemptionCheckpoint(Checkpoint):
    """Save a checkpoint and end the run when any rank receives a signal.

    ::

        callbacks = [ModelCheckpoint("runs/gpt", save_last=True), PreemptionCheckpoint(signals=["SIGTERM", "SIGUSR1"])]
        pl.Trainer(..., callbacks=callbacks).fit(model, data, ckpt_path="last")

    The checkpoint is that of the optimizer step during which the signal came, never one of half an accumulation window.
    If a validation or the end of an epoch follows that step, the checkpoint is there before it begins, and is written
    again after it. Then ``fit`` raises Lightning's ``SIGTERMException``, which ends a script with exit code 0.

    Under ``SLURMEnvironment(auto_requeue=True)`` the requeue signal does between steps what Lightning does for it: save
    ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir`` and requeue the job. Leave ``ckpt_path`` out there, and Lightning
    finds the newest of these.

    Works under every strategy. It runs after all other callbacks, so that the checkpoint holds what they did.

    Args:
        signals: The signals to heed. Another handler that the script had set for one of them is called, too.
        dirpath: The folder; by default that of the first ModelCheckpoint. ``ckpt_path="last"`` looks only into the
            folders of ModelCheckpoints.
        filename: The name without ``.ckpt``; it must begin with ``last`` for ``ckpt_path="last"`` to find it. The next
            checkpoint of this name replaces it.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A signal cannot be heeded, or a name cannot be found or stored.
    """

    best_model_path = ""  # what Lightning asks the first of its checkpoint callbacks for

    def __init__(
        self,
        *,
        signals: Sequence[SignalName] = ("SIGTERM",),
        dirpath: str | Path | None = None,
        filename: str = "last-preempted",
    ) -> None:
        super().__init__()
        _check_signals(signals)
        if dirpath is not None and not isinstance(dirpath, str | Path):
            raise TypeError(f"dirpath={dirpath!r} is of type {type(dirpath).__name__}; give a path, or None")
        if not isinstance(filename, str):
            raise TypeError(f"filename={filename!r} is of type {type(filename).__name__}; give a text")
        if not filename.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST):
            raise ValueError(f'filename={filename!r} must begin with "last", or ckpt_path="last" does not find it')
        if "/" in filename or filename.endswith(ModelCheckpoint.FILE_EXTENSION):
            raise ValueError(f'filename={filename!r} must have no folder and no ".ckpt"; give a folder as dirpath')
        self.signals: tuple[SignalName, ...] = tuple(signals)
        self.dirpath = dirpath
        self.filename = filename
        self._requeue_signal: str | None = None
        self._heeds = False
        self._received: set[str] = set()
        self._arrived: tuple[str, ...] = ()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the signals of an earlier run, and move behind the other callbacks.

        Raises:
            ValueError: There is no folder to save in.
        """
        if stage == TrainerFn.FITTING and self._needs_a_folder(trainer):
            raise ValueError(
                f"{type(self).__name__} saves beside a ModelCheckpoint, and the trainer has none; add"
                " ModelCheckpoint(dirpath) to its callbacks, or give dirpath here"
            )
        self._heeds, self._received, self._arrived = False, set(), ()
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined] # a new list: Lightning is going through it

    def _needs_a_folder(self, trainer: pl.Trainer) -> bool:
        is_real = not trainer.fast_dev_run  # type: ignore[attr-defined]
        return is_real and self.dirpath is None and not _model_checkpoints(trainer)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the signals: this is the first hook after Lightning has set its handlers."""
        self._take_over(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the signals, where no sanity check came before."""
        self._take_over(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a signal has come, and stop unless a validation or the end of the epoch follows."""
        if not self._is_told(trainer):
            return
        epoch, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        assert fetcher is not None
        more_follows = self._any_rank(trainer, epoch._is_training_done or epoch._should_check_val_fx(fetcher))
        self._save(trainer, more_follows)
        if not more_follows:
            self._stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and stop if a signal has come, after a validation in the middle of an epoch."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if not trainer.fit_loop.epoch_loop._is_training_done and self._is_told(trainer):
            self._save(trainer)
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if a signal has come, and stop unless the run ends here anyway."""
        if not self._is_told(trainer):
            return
        run_ends = trainer.fit_loop.done
        self._save(trainer, more_follows=run_ends)
        if not run_ends:
            self._stop(trainer)

    def _take_over(self, trainer: pl.Trainer) -> None:
        """Replace Lightning's handlers; at the end of the run Lightning puts back those from before it.

        Source: ``_SignalConnector.register_signal_handlers`` and ``teardown`` (Lightning 2.6.6).
        """
        if self._heeds or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._heeds = True
        self._requeue_signal = _requeue_signal(trainer)
        if threading.current_thread() is not threading.main_thread():
            logger.warning("fit runs outside the main thread, where Python can set no signal handler; none is heeded")
            return
        for name in self._heeded:
            number = signal.Signals[name]
            signal.signal(number, _Note(name, self._received, _handlers_of_the_script(trainer, number)))

    @property
    def _heeded(self) -> list[str]:
        """The signals in an order that all ranks share."""
        return list(dict.fromkeys([*self.signals, *filter(None, [self._requeue_signal])]))

    def _is_told(self, trainer: pl.Trainer) -> bool:
        """Whether a signal has come to any rank and the optimizer has just stepped; collective over the world."""
        if not self._heeds or trainer.fit_loop._should_accumulate():
            return False
        if not self._arrived and self._any_rank(trainer, bool(self._received)):
            self._arrived = tuple(name for name in self._heeded if self._any_rank(trainer, name in self._received))
        return bool(self._arrived)

    @staticmethod
    def _any_rank(trainer: pl.Trainer, decision: bool) -> bool:
        return trainer.strategy.reduce_boolean_decision(decision, all=False)

    def _save(self, trainer: pl.Trainer, more_follows: bool = False) -> None:
        """Save what the signals that came ask for; collective over the world.

        Args:
            trainer: The trainer.
            more_follows: Whether :meth:`_stop`, which saves for a requeued job, has to wait.
        """
        paths = [self._path(trainer)] if set(self._arrived) - {self._requeue_signal} else []
        if more_follows and self._requeue_signal in self._arrived:
            paths += [trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)]
        for path in trainer.strategy.broadcast(paths):
            with _written_when_it_returns(trainer):
                trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                logger.warning("%s: step %d is saved as %s", ", ".join(self._arrived), trainer.global_step, path)

    def _stop(self, trainer: pl.Trainer) -> None:
        """Requeue the job if that was asked for, and let Lightning raise SIGTERMException after this batch or epoch.

        Source: ``_SignalConnector._slurm_sigusr_handler_fn``, ``_TrainingEpochLoop.on_advance_end`` and
        ``_FitLoop.on_advance_end`` (Lightning 2.6.6).
        """
        if self._requeue_signal in self._arrived:
            with _written_when_it_returns(trainer):
                trainer._signal_connector._slurm_sigusr_handler_fn(signal.Signals[self._requeue_signal], None)  # type: ignore[arg-type]
        trainer._signal_connector.received_sigterm = True

    def _path(self, trainer: pl.Trainer) -> str:
        folder = self.dirpath if self.dirpath is not None else _model_checkpoints(trainer)[0].dirpath
        assert folder is not None
        return os.path.join(folder, self.filename + ModelCheckpoint.FILE_EXTENSION)


class _RequeueCheckpoint(PreemptionCheckpoint):
    """Heeds SLURM's requeue signal and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.signals = ()

    def _needs_a_folder(self, trainer: pl.Trainer) -> bool:
        return False


def heed_requeue_signal(trainer: pl.Trainer, restores: contextlib.ExitStack) -> None:
    """Let SLURM's requeue signal wait for the end of the step, also where the trainer has no PreemptionCheckpoint.

    Lightning saves within the handler of that signal. Where each rank has a part of the model, ranks that are
    interrupted in different lines of a step would wait for each other for ever. For strategies to call before a run.

    Args:
        trainer: The trainer of the run.
        restores: What takes the callback off after the run.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if _requeue_signal(trainer) and not any(isinstance(callback, PreemptionCheckpoint) for callback in callbacks):
        added = _RequeueCheckpoint()
        trainer.callbacks = [*callbacks, added]  # type: ignore[attr-defined]
        restores.callback(_remove, trainer, added)


def _remove(trainer: pl.Trainer, added: pl.Callback) -> None:
    trainer.callbacks = [callback for callback in trainer.callbacks if callback is not added]  # type: ignore[attr-defined]


def end_on_sigterm(trainer: pl.Trainer) -> None:
    """Let SIGTERM end the run on this rank where no PreemptionCheckpoint heeds it; the others then hear of that.

    Lightning broadcasts from within the handler, and ranks in another line of their step never meet there. For
    strategies to call when a run begins.
    """
    present = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    if any(getattr(handler, "__self__", None) is trainer._signal_connector for handler in present):
        launcher = trainer.strategy.launcher
        others = _handlers_of_the_script(trainer, signal.SIGTERM)

        def end(number: int, frame: FrameType | None) -> None:
            if launcher is not None:
                launcher.kill(number)  # to the ranks that this one has started
            for handler in others:
                handler(number, frame)
            raise SIGTERMException(_SHELL_CODE + number)

        signal.signal(signal.SIGTERM, end)


class _Note:
    """A signal handler that only takes a note, and calls the handlers that the script had set."""

    def __init__(self, name: str, received: set[str], others: list[Callable[..., Any]]) -> None:
        self._name = name
        self._received = received
        self._others = others

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take the note; a handler interrupts anything, so it neither logs nor communicates."""
        self._received.add(self._name)
        for handler in self._others:
            handler(number, frame)


@contextlib.contextmanager
def _written_when_it_returns(trainer: pl.Trainer) -> Iterator[None]:
    """Save synchronously: nothing goes on after this save, and a requeued job may not be left the time to finish it."""
    plugin = trainer.strategy.checkpoint_io
    if not isinstance(plugin, MCoreCheckpointIO) or not plugin.async_save:
        yield
        return
    plugin.drain()
    plugin.async_save = False
    try:
        yield
    finally:
        plugin.async_save = True


def _check_signals(signals: Any) -> None:
    allowed = get_args(SignalName)
    if isinstance(signals, str) or not isinstance(signals, Sequence):
        raise TypeError(f"signals={signals!r} is of type {type(signals).__name__}; give a list, such as ['SIGTERM']")
    if not signals:
        raise ValueError(f"signals={signals!r} names no signal; choose from {', '.join(allowed)}")
    for name in signals:
        if name not in allowed or not hasattr(signal, name):
            raise ValueError(f"signals={list(signals)!r} has {name!r}; choose from {', '.join(allowed)}")


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _requeue_signal(trainer: pl.Trainer) -> str | None:
    """Return the signal at which Lightning requeues a SLURM job, unless it does not."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return None if environment.requeue_signal is None else environment.requeue_signal.name


def _handlers_of_the_script(trainer: pl.Trainer, number: int) -> list[Callable[..., Any]]:
    """Return the handlers of a signal without Lightning's own, which composes them with those that it found."""
    present = signal.getsignal(number)
    handlers = getattr(present, "signal_handlers", [present])
    own = trainer._signal_connector
    return [handler for handler in handlers if callable(handler) and getattr(handler, "__self__", None) is not own]
