# SPDX-License-Identifier: Apache-2.0
"""What Megatron layers need to run under a strategy that is not ours.

A module built with ``pipeline()`` may run under ``strategy="auto"`` or ``"ddp"``. Its layers still ask for Megatron's
process groups and, on the CPU, for ``torch.cuda``. :class:`SingleModelSession` is a callback that the module adds to
the trainer for that run: it opens groups in which nothing is split, and closes all it opened when the run is over,
also when it ends in an exception.
"""

import contextlib
from datetime import timedelta

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_mcore.cpu_runtime import cpu_runtime
from lightning_mcore.layout import ParallelLayout
from lightning_mcore.process_groups import close_process_groups, open_process_groups, open_single_process


class SingleModelSession(Callback):
    """Holds the CPU runtime and one-rank process groups open while a foreign strategy runs a Megatron model."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    @classmethod
    def attach(cls, trainer: "pl.Trainer") -> None:
        """Open a session for the current run of ``trainer``, unless one is open."""
        if any(isinstance(callback, cls) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return
        session = cls()
        session._enter(trainer)
        trainer.callbacks.append(session)  # type: ignore[attr-defined]

    def _enter(self, trainer: "pl.Trainer") -> None:
        if trainer.strategy.root_device.type == "cpu":
            self._open.enter_context(cpu_runtime())
        if open_single_process():
            self._open.callback(dist.destroy_process_group)
        self._open.callback(close_process_groups)
        open_process_groups(ParallelLayout(), seed=torch.initial_seed() % 2**31, timeout=timedelta(minutes=30))

    def _leave(self, trainer: "pl.Trainer") -> None:
        self._open.close()
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Close what was opened, at the end of ``fit``, ``validate``, ``test`` or ``predict``."""
        self._leave(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Close what was opened when the run ends in an exception."""
        self._leave(trainer)
