# SPDX-License-Identifier: Apache-2.0
"""Save a checkpoint and end the run when the job scheduler asks for it.

Schedulers announce the end of a job with a signal: SIGTERM, or another one on request, some seconds before SIGKILL.
:class:`PreemptionCheckpoint` waits for the current optimizer step, saves a checkpoint on all ranks together, and ends
the run. The same command with ``ckpt_path="last"`` continues from there.

A signal may reach only one rank, and each rank may be at another line of its step. A save needs all ranks, so it cannot
happen in the handler. The handler only records the signal, and after each optimizer step the ranks ask each other
whether any has received one. The strategy calls :func:`prepare_signals` and :func:`install_sigterm_handler` in every
run.
"""

import contextlib
import functools
import logging
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args
from unittest import mock

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.parallel.attributes import set_until_closed

logger = logging.getLogger(__name__)

_SHELL_CODE = 128  # plus the signal's number: the exit code of shells

SignalName = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"]


# Lightning's SIGTERM handler broadcasts, which collides with what other ranks communicate at that moment, and its
# handler of SLURM's requeue signal saves. Both are replaced during a fit; their work is done between steps.
# Example with 2 ranks and accumulate_grad_batches=4: rank 1 gets SIGTERM during batch 5. Both ranks finish batches 5, 6
# and 7, an optimizer step, find the signal, save last-preempted.ckpt and stop.
# A rank that waits for a dead peer in a collective runs no handler; parallel/rank_watch.py ends it.
class PreemptionCheckpoint(Checkpoint):
    """Save a checkpoint and end the run when any rank receives a signal.

    The checkpoint belongs to the optimizer step during which the signal came, never to half an accumulation window. If
    a validation or the end of an epoch follows that step, the checkpoint is saved before it, and again after it. Then
    ``fit`` raises Lightning's ``SIGTERMException``, which ends a script with exit code 0.

    Under ``SLURMEnvironment(auto_requeue=True)`` the requeue signal has the same effect as in Lightning, but between
    steps: save ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir`` and requeue the job. Do not set ``ckpt_path`` then:
    Lightning finds the newest of these files.

    Works under every strategy. Under :class:`~lightning_mcore.MCoreStrategy`, the workers of DataLoaders ignore these
    signals, which schedulers may send to every process. The callback runs after all others, so that the checkpoint
    includes their changes.

    Args:
        signals: The signals to handle. If the script has set its own handler for one of them, that is called too.
        dirpath: The folder; by default the first ModelCheckpoint's. ``ckpt_path="last"`` searches only the
            folders of ModelCheckpoints.
        filename: The name without ``.ckpt``; it must begin with ``last`` for ``ckpt_path="last"`` to find it. The next
            checkpoint of this name replaces it.

    Raises:
        TypeError: An argument has another type.
        ValueError: A signal cannot be handled, or the file name cannot be stored or found again.

    Examples:
        ``trainer.fit(model, data, ckpt_path="last")`` also continues a run that was ended.

        >>> import lightning.pytorch as pl
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> from lightning_mcore import PreemptionCheckpoint
        >>> preemption = PreemptionCheckpoint(signals=["SIGTERM", "SIGUSR1"])
        >>> callbacks = [ModelCheckpoint("runs/gpt", save_last=True), preemption]
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=callbacks)
    """

    best_model_path = ""  # Lightning reads this from its first checkpoint callback

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
            raise TypeError(f"dirpath={dirpath!r} is of type {type(dirpath).__name__}; give a path or None")
        if not isinstance(filename, str):
            raise TypeError(f"filename={filename!r} is of type {type(filename).__name__}; give a string")
        if not filename.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST):
            raise ValueError(f'filename={filename!r} must begin with "last", or ckpt_path="last" does not find it')
        if "/" in filename or filename.endswith(ModelCheckpoint.FILE_EXTENSION):
            raise ValueError(f'filename={filename!r} must not contain a folder or ".ckpt"; set dirpath to the folder')
        self.signals: tuple[SignalName, ...] = tuple(signals)
        self.dirpath = dirpath
        self.filename = filename
        self._requeue_signal: str | None = None
        self._watches = False
        self._received: set[str] = set()
        self._arrived: tuple[str, ...] = ()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the signals of an earlier run, and move after the other callbacks; ``ValueError`` without a folder."""
        has_folder = not self.signals or self.dirpath is not None or bool(_model_checkpoints(trainer))
        if stage == TrainerFn.FITTING and not trainer.fast_dev_run and not has_folder:  # type: ignore[attr-defined]
            raise ValueError(
                f"{type(self).__name__} saves next to a ModelCheckpoint, but the trainer has none; add"
                " ModelCheckpoint(dirpath) to its callbacks, or set dirpath"
            )
        self._watches, self._received, self._arrived = False, set(), ()
        run_last(trainer, self)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the handlers; this is the first hook after Lightning has set its own."""
        self._take_over(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the handlers, if no sanity check came before."""
        self._take_over(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a signal has come, and stop unless a validation or the end of the epoch follows."""
        if not self._must_stop(trainer):
            return
        epoch, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        assert fetcher is not None
        # All ranks must agree, because the answer decides how many checkpoints are saved.
        more_follows = self._any_rank(trainer, epoch._is_training_done or epoch._should_check_val_fx(fetcher))
        self._save(trainer, more_follows)
        if not more_follows:
            self._stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and stop if a signal has come, after a validation in the middle of an epoch."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if not trainer.fit_loop.epoch_loop._is_training_done and self._must_stop(trainer):
            self._save(trainer)
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if a signal has come, and stop unless the run ends here anyway."""
        if not self._must_stop(trainer):
            return
        run_ends = trainer.fit_loop.done
        self._save(trainer, more_follows=run_ends)
        if not run_ends:
            self._stop(trainer)

    def _take_over(self, trainer: pl.Trainer) -> None:
        """Replace Lightning's handlers; at the end of the run, Lightning restores the earlier ones.

        Source: ``_SignalConnector.register_signal_handlers`` and ``teardown`` (Lightning 2.6.6).
        """
        if self._watches or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._watches = True
        self._requeue_signal = _requeue_signal(trainer)
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "fit runs outside the main thread, where Python cannot set signal handlers; no signal will save the run"
            )
            return
        for name in self._signals_to_watch:
            number = signal.Signals[name]
            signal.signal(number, _Note(name, self._received, _handlers_of_the_script(trainer, number)))

    @property
    def _signals_to_watch(self) -> list[str]:
        """The signals in an order that all ranks share."""
        return list(dict.fromkeys([*self.signals, *filter(None, [self._requeue_signal])]))

    def _must_stop(self, trainer: pl.Trainer) -> bool:
        """Whether any rank has received a signal and the optimizer has just stepped; collective over the world."""
        if not self._watches or trainer.fit_loop._should_accumulate():
            return False
        if not self._arrived and self._any_rank(trainer, bool(self._received)):
            self._arrived = tuple(
                name for name in self._signals_to_watch if self._any_rank(trainer, name in self._received)
            )
        return bool(self._arrived)

    @staticmethod
    def _any_rank(trainer: pl.Trainer, decision: bool) -> bool:
        return trainer.strategy.reduce_boolean_decision(decision, all=False)

    def _save(self, trainer: pl.Trainer, more_follows: bool = False) -> None:
        """Save what the received signals ask for; collective over the world."""
        # For the requeue signal Lightning saves, in _stop; if more follows before that, its checkpoint is saved here.
        paths = [self._path(trainer)] if set(self._arrived) - {self._requeue_signal} else []
        if more_follows and self._requeue_signal in self._arrived:
            paths += [trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)]
        for path in trainer.strategy.broadcast(paths):
            with saving_synchronously(trainer):
                trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                logger.warning("%s: step %d is saved as %s", ", ".join(self._arrived), trainer.global_step, path)

    def _stop(self, trainer: pl.Trainer) -> None:
        """Requeue the job if asked to, and make Lightning raise SIGTERMException after this batch or epoch.

        Source: ``_SignalConnector._slurm_sigusr_handler_fn``, ``_TrainingEpochLoop.on_advance_end`` and
        ``_FitLoop.on_advance_end`` (Lightning 2.6.6).
        """
        if self._requeue_signal in self._arrived:
            with saving_synchronously(trainer):
                trainer._signal_connector._slurm_sigusr_handler_fn(signal.Signals[self._requeue_signal], None)  # type: ignore[arg-type]
        trainer._signal_connector.received_sigterm = True

    def _path(self, trainer: pl.Trainer) -> str:
        folder = self.dirpath if self.dirpath is not None else _model_checkpoints(trainer)[0].dirpath
        assert folder is not None
        return os.path.join(folder, self.filename + ModelCheckpoint.FILE_EXTENSION)


def prepare_signals(trainer: pl.Trainer, restores: contextlib.ExitStack) -> None:
    """Delay SLURM's requeue signal to the end of the step, even without PreemptionCheckpoint; ``restores`` undoes it.

    Lightning saves in the handler of that signal. If each rank has a part of the model, ranks that are interrupted at
    different lines of a step would wait for each other forever.
    """
    # Lightning broadcasts SIGTERM before each batch, and the host waits there for the GPU.
    loop: Any = trainer.fit_loop.epoch_loop
    restores.enter_context(mock.patch.object(loop, "_broadcast_sigterm_tensor", _broadcast_nothing))
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if _requeue_signal(trainer) and not any(isinstance(callback, PreemptionCheckpoint) for callback in callbacks):
        added = PreemptionCheckpoint()
        added.signals = ()
        run_last(trainer, added)
        restores.callback(_remove, trainer, added)


def _broadcast_nothing() -> None:
    """Do nothing before a batch."""


def run_last(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Put a callback behind all others, so that what it saves includes their changes."""
    _remove(trainer, callback)
    trainer.callbacks = [*trainer.callbacks, callback]  # type: ignore[attr-defined]


def _remove(trainer: pl.Trainer, callback: pl.Callback) -> None:
    # A new list: Lightning may be going through this one.
    trainer.callbacks = [other for other in trainer.callbacks if other is not callback]  # type: ignore[attr-defined]


def install_sigterm_handler(trainer: pl.Trainer) -> None:
    """Let SIGTERM end the run on this rank if no PreemptionCheckpoint handles it; the other ranks then learn of it.

    Lightning broadcasts in the handler, where ranks at other lines of their step never arrive.
    """
    present = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    if any(getattr(handler, "__self__", None) is trainer._signal_connector for handler in present):
        launcher = trainer.strategy.launcher
        others = _handlers_of_the_script(trainer, signal.SIGTERM)

        def end(number: int, frame: FrameType | None) -> None:
            if launcher is not None:
                launcher.kill(number)  # to the ranks that this process has started
            for handler in others:
                handler(number, frame)
            raise SIGTERMException(_SHELL_CODE + number)

        signal.signal(signal.SIGTERM, end)


def shield_workers(loader: DataLoader[Any], trainer: pl.Trainer, restores: contextlib.ExitStack) -> None:
    """Let a loader's workers outlive signals that a PreemptionCheckpoint handles; ``restores`` undoes it."""
    callbacks = [it for it in trainer.callbacks if isinstance(it, PreemptionCheckpoint)]  # type: ignore[attr-defined]
    names = {name for callback in callbacks for name in (*callback.signals, _requeue_signal(trainer)) if name}
    if names and not isinstance(loader.worker_init_fn, _Shield):
        shield = _Shield([signal.Signals[name] for name in names], _process_ends(os.getpid()), loader.worker_init_fn)
        set_until_closed(restores, loader, "worker_init_fn", shield)


@functools.cache
def _process_ends(pid: int) -> Any:
    """Return a flag in shared memory that is set when this process ends and is about to terminate its children."""
    flag = multiprocessing.RawValue("b", 0)
    multiprocessing.util.Finalize(None, setattr, args=(flag, "value", 1), exitpriority=0)
    return flag


class _Shield:
    """A ``worker_init_fn`` after which signals end the worker only if the process that reads its batches ends.

    Without this condition, that process would wait forever for workers that are idle when it ends.
    """

    def __init__(self, signals: list[signal.Signals], ends: Any, then: Callable[[int], None] | None) -> None:
        self._signals, self._ends, self._then = signals, ends, then

    def __call__(self, worker: int) -> None:
        """Set the handler, and initialize the worker as the user asked."""
        for number in self._signals:
            signal.signal(number, self._handle)
        if self._then is not None:
            self._then(worker)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ends.value:
            os._exit(0)


class _Note:
    """A signal handler that only records the signal and calls the handlers that the script had set."""

    def __init__(self, name: str, received: set[str], others: list[Callable[..., Any]]) -> None:
        self._name = name
        self._received = received
        self._others = others

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; a handler can interrupt anything, so it neither logs nor communicates."""
        self._received.add(self._name)
        for handler in self._others:
            handler(number, frame)


@contextlib.contextmanager
def saving_synchronously(trainer: pl.Trainer) -> Iterator[None]:
    """Save synchronously, because the run ends here, and a requeued job may not have time to finish the save later."""
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
        raise ValueError(f"signals={signals!r} is empty; choose from {', '.join(allowed)}")
    for name in signals:
        if name not in allowed or not hasattr(signal, name):
            raise ValueError(
                f"signals={list(signals)!r} contains {name!r}, which is not supported; choose from {', '.join(allowed)}"
            )


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _requeue_signal(trainer: pl.Trainer) -> str | None:
    """Return the signal at which Lightning requeues a SLURM job; None if it does not requeue."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return None if environment.requeue_signal is None else environment.requeue_signal.name


def _handlers_of_the_script(trainer: pl.Trainer, number: int) -> list[Callable[..., Any]]:
    """Return a signal's handlers except Lightning's own, which it combines with the handlers that it found."""
    present = signal.getsignal(number)
    handlers = getattr(present, "signal_handlers", [present])
    own = trainer._signal_connector
    return [handler for handler in handlers if callable(handler) and getattr(handler, "__self__", None) is not own]
