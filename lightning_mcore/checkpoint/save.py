# SPDX-License-Identifier: Apache-2.0
"""One save of a sharded checkpoint: plan it, write it in the background, and put it in place.

:meth:`CheckpointSave.start` agrees with all ranks on who writes what, and starts the writers. Training may then
continue, if the save was given memory for a copy. :meth:`CheckpointSave.advance` waits for the writers; rank 0 then
writes the files common to all ranks and puts the checkpoint in place. A failure on one rank is raised on all, and
leaves only the checkpoint that was there before. Both methods are collective over the world. ``io.py`` keeps the saves
in flight.

A checkpoint on a remote store is written to local disks first. Each rank then uploads its own files in the background.
"""

import contextlib
import errno
import io
import json
import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from torch.distributed.checkpoint.metadata import Metadata

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint import remote
from lightning_mcore.checkpoint.manifest import LIGHTNING_FILE, METADATA_FILE, RANKS_FILE, FileRecord, saving
from lightning_mcore.checkpoint.metadata import COMMON_FILE, tensors_of
from lightning_mcore.checkpoint.save_plan import Piece, ShardPlanner
from lightning_mcore.checkpoint.storage import atomic
from lightning_mcore.checkpoint.writer import Places, Staging, write_metadata, write_pieces
from lightning_mcore.parallel.consensus import collect, decide, on_all

SHARDED_STATE = "lightning_mcore/sharded_state"
MANIFEST = "lightning_mcore/manifest"
RANK_STATE = "lightning_mcore/rank_state"
CONTENT_METADATA = "lightning_mcore/content_metadata"

_MEGATRON_CHECKPOINT_VERSION = 3.0  # the version of Megatron-LM's checkpoints since 2020
_PRIORITY = 10  # niceness of a writer that yields to training, from -20 (the highest priority) to 19

T = TypeVar("T")
Written = tuple[Places, dict[str, FileRecord]]


class CheckpointSave:
    """A save in flight, created by :meth:`start`.

    Attributes:
        path: Where the checkpoint will be.
        links: Links to set to this checkpoint when it is whole.
        removals: Checkpoints to delete after that; on rank 0.
        staging: The memory of the copy; free again once the checkpoint is in place.
    """

    def __init__(self, path: str, directory: str, manifest: dict[str, Any], metadata: Metadata | None) -> None:
        self.path = path
        self.links: list[str] = []
        self.removals: list[str] = []
        self._directory = directory
        self._manifest = manifest
        self._metadata = metadata
        self.staging: Staging | None = None
        self._writing: BackgroundTask[Written] | None = None
        self._uploading: BackgroundTask[None] | None = None
        self._records: dict[str, FileRecord] = {}

    @classmethod
    def start(
        cls,
        path: str,
        checkpoint: dict[str, Any],
        copies: dist.ProcessGroup,
        planner: ShardPlanner,
        staging: Staging | None = None,
    ) -> Self:
        """Start a save; collective over the world.

        Args:
            path: The same on every rank.
            checkpoint: Lightning's dict with this rank's sharded state, manifest and rank state.
            copies: The group of ranks that hold copies of each other's tensors.
            planner: Agrees on who writes what.
            staging: Memory for a copy of the tensors; without it, the tensors must not change until the save is
                finished.

        Raises:
            OSError: The disk refuses.
            ValueError: The pieces of all ranks do not form whole tensors, or ``path`` is not a checkpoint.
        """
        directory = _begin(path)
        try:
            files = collect(
                lambda: checkpoint.get(RANK_STATE), lambda rank_states: _files_of_all(checkpoint, rank_states)
            )
            plan = planner.plan(checkpoint[SHARDED_STATE], copies)
            save = cls(path, directory, dict(checkpoint.get(MANIFEST) or {}), plan.metadata)
            on_all(lambda: save._start_writing(plan.pieces, files or {}, staging))
        except BaseException:
            _abandon(path, directory)
            raise
        return save

    def _start_writing(self, pieces: Sequence[Piece], files: dict[str, bytes], staging: Staging | None) -> None:
        if staging is not None:
            pieces = staging.copy(pieces)
        prefix, path, directory = f"__{dist.get_rank()}_", self.path, self._directory
        self.staging = staging
        self._writing = BackgroundTask(
            f"writer of {path}",
            saving(path)(partial(write_pieces, directory, prefix, pieces, files)),
            gives_way=staging is not None,
        )

    @property
    def is_done(self) -> bool:
        """Whether the next call of :meth:`advance` need not wait for this rank."""
        task = self._uploading or self._writing
        return task is None or task.is_done

    def advance(self) -> bool:
        """Wait for the background work of all ranks and take the next step; collective over the world.

        Returns:
            Whether the checkpoint is in place now.

        Raises:
            FileNotFoundError: The folder that the save writes into was deleted.
            OSError: The disk or the store refused, on some rank.
        """
        try:
            if self._uploading is None:
                assert self._writing is not None
                collect(
                    partial(self._unless_deleted, self._writing.wait),
                    lambda written: self._unless_deleted(partial(self._complete, written)),
                )
                if checkpoint_files.writes_directly(self.path):
                    return True
                decide(lambda: remote.begin_upload(self.path))
                path, directory = self.path, self._directory
                self._uploading = BackgroundTask(f"uploader of {path}", lambda: remote.upload_files(directory, path))
                return False
            on_all(self._uploading.wait)
            decide(lambda: remote.finish_upload(self._directory, self.path, self._manifest, self._records))
            shutil.rmtree(self._directory, ignore_errors=True)
            return True
        except BaseException:
            _abandon(self.path, self._directory)
            raise

    def _unless_deleted(self, function: Callable[[], T]) -> T:
        """Call ``function`` and return its result; if it fails because the folder was deleted, say so."""
        try:
            return function()
        except OSError as error:
            if os.path.isdir(self._directory):
                raise
            what = f"{self.path} was not saved, because {self._directory} was deleted while it was being written"
            raise FileNotFoundError(errno.ENOENT, what) from error

    def _complete(self, written: list[Written]) -> None:
        """Write the files common to all ranks, and put a local checkpoint in place; on rank 0."""
        metadata = self._metadata
        assert metadata is not None
        places = [of_rank for of_rank, _ in written]
        self._records = {name: record for _, records in written for name, record in records.items()}
        with saving(self.path):
            self._records[METADATA_FILE] = write_metadata(self._directory, metadata, places)
        self._manifest["tensors"] = tensors_of(metadata)
        if checkpoint_files.writes_directly(self.path):
            checkpoint_files.finish(self.path, self._manifest, self._records)
            for name in self.links:
                checkpoint_files.link(name, self.path)


def save_file(content: Any, path: str) -> None:
    """Write a checkpoint in one file that appears only when it is whole; on one rank, to a local disk.

    Lightning writes to the folder for temporary files and then moves the file, which copies it if that is another disk.

    Args:
        content: Any object that ``torch.save`` takes.
        path: An absolute path. A file or checkpoint directory there is replaced.

    Raises:
        OSError: The disk refuses; ``path`` is unchanged.
        ValueError: The directory at ``path`` is not a checkpoint, or :func:`atomic.begin` raised it.
        RuntimeError: Another process is writing ``path``.
    """
    if not os.path.islink(path):
        checkpoint_files.require_replaceable(path)
    with saving(path):
        name = os.path.basename(path)
        directory = atomic.begin(path)
        try:
            with open(os.path.join(directory, name), "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            atomic.publish_file(path, name)
        except BaseException:
            atomic.abandon(path)
            raise


def _begin(path: str) -> str:
    if checkpoint_files.writes_directly(path):
        return decide(lambda: checkpoint_files.begin(path))
    return on_all(lambda: tempfile.mkdtemp(prefix="checkpoint_"))


def _abandon(path: str, directory: str) -> None:
    if not checkpoint_files.writes_directly(path):
        shutil.rmtree(directory, ignore_errors=True)
    elif dist.get_rank() == 0:
        checkpoint_files.abandon(path)


def _files_of_all(checkpoint: dict[str, Any], rank_states: list[Any]) -> dict[str, bytes]:
    """Return the current content of the files that rank 0 writes beside the tensors."""
    ours = (SHARDED_STATE, MANIFEST, RANK_STATE, CONTENT_METADATA)
    common: dict[str, Any] = {
        "iteration": int(checkpoint.get("global_step", 0)),
        "checkpoint_version": _MEGATRON_CHECKPOINT_VERSION,
    }
    if CONTENT_METADATA in checkpoint:
        common["content_metadata"] = checkpoint[CONTENT_METADATA]
    return {
        LIGHTNING_FILE: _saved({name: value for name, value in checkpoint.items() if name not in ours}),
        RANKS_FILE: _saved(rank_states),
        COMMON_FILE: _saved(common),
        CONFIG_FNAME: json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode(),
    }


def _saved(content: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"the checkpoint holds an object that cannot be saved, {error}; take it out") from error
    return stream.getvalue()


class BackgroundTask(Generic[T]):
    """Runs a function in its own thread, starting at once; its result or error is fetched later.

    The thread ends with the process, whatever it is doing, and its unfinished files are never put in place. (Threads of
    ``concurrent.futures`` would keep a process alive while its disk hangs.)

    Args:
        name: Name of the thread, for debuggers.
        function: What to run.
        gives_way: Whether it yields the processor to the training threads.
    """

    def __init__(self, name: str, function: Callable[[], T], gives_way: bool = False) -> None:
        self._function: Callable[[], T] | None = function
        self._gives_way = gives_way
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or failed."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """Wait for the function to end, and return its result.

        Raises:
            BaseException: The error that the function raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        assert self._function is not None
        if self._gives_way and sys.platform == "linux":  # Linux has a priority per thread
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._function = None  # free what it holds: the memory of the copy is used again
