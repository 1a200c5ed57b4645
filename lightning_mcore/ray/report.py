# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Ray keeps: saved where Ray looks for them, reported with the metrics, and found by the next run."""

from typing import Any

import lightning.pytorch as pl
import ray.train
from pyarrow.fs import FileSystem, PyFileSystem
from ray.train.v2.api.report_config import CheckpointUploadMode

from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.config.value_checks import require_size
from lightning_mcore.strategy.preemption import run_last, saving_synchronously

CHECKPOINT = "checkpoint.ckpt"
"""Name of the checkpoint in each folder that is reported to Ray, as in Ray's own callback."""


def checkpoint_to_resume() -> str | None:
    """Return the ``ckpt_path`` of the latest checkpoint that this run has reported to Ray; None if it has none."""
    found = ray.train.get_checkpoint()
    return None if found is None else f"{_url(found.filesystem, found.path)}/{CHECKPOINT}"


def _url(filesystem: FileSystem, path: str) -> str:
    """Return a path on a pyarrow filesystem as checkpoints take it: a path, or a URL for fsspec."""
    if filesystem.type_name in ("local", "subtree"):
        return path
    if isinstance(filesystem, PyFileSystem):
        return str(filesystem.handler.fs.unstrip_protocol(path))
    # "runs/gpt" on GcsFileSystem is "gs://runs/gpt".
    return f"{ {'gcs': 'gs'}.get(filesystem.type_name, filesystem.type_name) }://{path}"


class RayReport(pl.Callback):
    """Saves checkpoints in the run's Ray storage, and reports them with the metrics.

    All ranks write one checkpoint to one URL under ``RunConfig(storage_path=...)``, so nothing is copied and nothing
    stays behind on a machine. An asynchronous save (``async_save``) is reported once it is complete. Each
    report has the logged metrics, ``epoch`` and ``step``. A run that Ray restarts continues from
    :func:`checkpoint_to_resume`.

    When Ray announces that a machine will be taken away, a checkpoint is saved after the current optimizer step.

    Args:
        every_n_train_steps: Optimizer steps between two checkpoints; None for one at the end of each epoch. The last
            step of a run is always saved.
        watch_preemption: Ask Ray after each optimizer step whether a machine will be taken away; all workers wait for
            the answer, which takes milliseconds.

    Raises:
        ValueError: The number of steps is below 1.
    """

    def __init__(self, *, every_n_train_steps: int | None = None, watch_preemption: bool = True) -> None:
        super().__init__()
        if every_n_train_steps is not None:
            require_size("every_n_train_steps", every_n_train_steps)
        self.every_n_train_steps = every_n_train_steps
        self.watch_preemption = watch_preemption
        self._saved_step = 0
        self._waiting: list[tuple[str, dict[str, Any]]] = []  # URLs of saves, and what to report once they are complete
        self._announced: Any = None  # by Ray: the loss of a machine

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move this callback behind the others, so that the checkpoint includes their changes."""
        run_last(trainer, self)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the step that the run resumes from, because it is already saved."""
        self._saved_step, self._waiting, self._announced = trainer.global_step, [], None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Report saves that are complete, and save if it is time."""
        if trainer.fit_loop._should_accumulate():
            return
        self._report_whole(trainer)
        every, step = self.every_n_train_steps, trainer.global_step
        if self._is_preempted():
            with saving_synchronously(trainer):
                self._save(trainer)
        elif every is not None and step % every == 0 and step != self._saved_step:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, unless checkpoints are saved every few steps."""
        if self.every_n_train_steps is None:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step, and report what is still being written."""
        if self._saved_step != trainer.global_step:
            self._save(trainer)
        if self._waiting:
            plugin = trainer.strategy.checkpoint_io
            assert isinstance(plugin, MCoreCheckpointIO)
            plugin.drain()
            self._report_whole(trainer)

    def _is_preempted(self) -> bool:
        """Whether Ray has announced the loss of a machine for the first time; collective over the workers."""
        if not self.watch_preemption:
            return False
        announced, self._announced = self._announced, ray.train.get_preemption_info()
        return self._announced is not None and self._announced != announced

    def _save(self, trainer: pl.Trainer) -> None:
        storage, step = ray.train.get_context().get_storage(), trainer.global_step
        folder = f"checkpoint_{trainer.current_epoch:04d}_{step:08d}"
        path = f"{storage.experiment_fs_path}/{folder}"
        url = f"{_url(storage.storage_filesystem, path)}/{CHECKPOINT}"
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.save_checkpoint(url)
        report = {
            "metrics": metrics | {"epoch": trainer.current_epoch, "step": step},
            "checkpoint": ray.train.Checkpoint(path, storage.storage_filesystem),
            "checkpoint_dir_name": folder,
            "checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD,
        }
        self._saved_step = step
        self._waiting.append((url, report))
        self._report_whole(trainer)

    def _report_whole(self, trainer: pl.Trainer) -> None:
        """Report the saves that are complete, oldest first; all ranks agree on which are."""
        plugin = trainer.strategy.checkpoint_io
        while self._waiting:
            url, report = self._waiting[0]
            # Oldest first: Ray takes the last report for the newest checkpoint.
            if isinstance(plugin, MCoreCheckpointIO) and plugin.is_in_flight(url):
                return
            self._waiting.pop(0)
            ray.train.report(**report)
