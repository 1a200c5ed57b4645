# SPDX-License-Identifier: Apache-2.0
"""A callback with which all ranks collect Python's garbage after the same optimizer steps."""

import functools
import gc
import os

import lightning.pytorch as pl

from lightning_mcore.config.value_checks import require_size

_pausing: set["GarbageCollection"] = set()  # those that have turned automatic collection off


class GarbageCollection(pl.Callback):
    """Collects Python's garbage on all ranks after the same optimizer steps, and after each validation.

    Python collects on its own when a process has made enough objects. That moment differs between ranks, and while one
    rank collects, those that communicate with it wait. This callback turns automatic collection off while the trainer
    fits, except in the workers of DataLoaders. It skips objects from before the first step, such as modules of Python
    code, which are most of them. Objects that refer to each other in a circle, and the tensors they hold, exist until
    the next collection.

    Args:
        every_n_steps: Optimizer steps between two collections.

    Raises:
        TypeError: ``every_n_steps`` is not an int.
        ValueError: ``every_n_steps`` is below 1.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore import GarbageCollection
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[GarbageCollection(every_n_steps=100)])
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        require_size("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._last_step = 0  # of the last collection

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect, and turn automatic collection off, unless it is off already."""
        if not gc.isenabled():
            return
        _watch_forks()
        self._last_step = trainer.global_step
        gc.collect()
        gc.freeze()
        gc.disable()
        _pausing.add(self)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Collect if this batch has ended an optimizer step that is due."""
        step = trainer.global_step
        if self in _pausing and step != self._last_step and step % self.every_n_steps == 0:
            self._last_step = step
            gc.collect()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect what validation has left."""
        if self in _pausing:
            gc.collect()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Turn automatic collection on again."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Turn automatic collection on again."""
        self._restore()

    def _restore(self) -> None:
        if self in _pausing:
            _pausing.remove(self)
            gc.unfreeze()
            gc.enable()


@functools.cache
def _watch_forks() -> None:
    """Let processes that are forked from now on, such as workers of DataLoaders, collect on their own."""
    os.register_at_fork(after_in_child=lambda: gc.enable() if _pausing else None)
