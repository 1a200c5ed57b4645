# SPDX-License-Identifier: Apache-2.0
"""One save of a sharded checkpoint by all ranks together: :class:`CheckpointSave`, here of ``last.ckpt`` on a disk.

    start()    rank 0     makes the folder ``.unfinished/last.ckpt``
               all ranks  agree on who writes what (``save_plan.py``)
               each rank  copies its pieces if the save is asynchronous, and starts a thread that writes them; rank 0's
                          thread also writes the files common to all ranks
    advance()  all ranks  wait for their threads
               rank 0     writes ``.metadata`` and the manifest, and moves the folder to ``last.ckpt``

Until then an older ``last.ckpt`` stays, even if the save fails. A remote store cannot exchange folders: there each rank
writes into a temporary folder of its own; the first advance() deletes an older checkpoint of that name and starts an
upload on each rank, and the second waits for the uploads and adds the manifest, without which no reader takes the
checkpoint for complete.

Each step runs through ``parallel/consensus.py``, which waits for all ranks and raises one rank's exception on all.
``run_on_all_ranks(f)`` returns each rank's own result, ``run_on_rank0(f)`` that of rank 0 on every rank.
``combine_on_rank0(f, g)`` calls f on every rank and g on rank 0 with the list of results, and returns what g returns.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.metadata import Metadata

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint.background import BackgroundTask
from lightning_mcore.checkpoint.manifest import (
    COMMON_FILE,
    LIGHTNING_FILE,
    METADATA_FILE,
    FileRecord,
    saving,
    tensors_of,
)
from lightning_mcore.checkpoint.remote import begin_upload, finish_upload, upload_files
from lightning_mcore.checkpoint.save_plan import ShardPlanner
from lightning_mcore.checkpoint.writer import Places, Staging, object_bytes, write_metadata, write_pieces
from lightning_mcore.parallel.consensus import combine_on_rank0, run_on_all_ranks, run_on_rank0

# What the strategy adds to Lightning's dict, by key:
SHARDED_STATE = "lightning_mcore/sharded_state"  # this rank's shards of model and optimizer, in Megatron's form
MANIFEST = "lightning_mcore/manifest"  # the description in checkpoint.json
RANK_STATE = "lightning_mcore/rank_state"  # what this rank alone knows: random states, position in the data
CONTENT_METADATA = "lightning_mcore/content_metadata"  # what Megatron's loaders need to know about the optimizer

_MEGATRON_CHECKPOINT_VERSION = 3.0  # of Megatron-LM since 2020

_Written = tuple[Places, dict[str, FileRecord]]  # by one rank: where each piece is; size and checksum of each file


class CheckpointSave:
    """A save in flight, created by :meth:`start`; ``io.py`` owns one at a time."""

    def __init__(
        self, path: str, is_local: bool, folder: str, manifest: dict[str, Any], metadata: Metadata | None
    ) -> None:
        self.path = path
        self.links: list[str] = []  # added by io.py: they will lead to the checkpoint, once a local one is in place
        self._is_local = is_local
        self._folder = folder
        self._manifest = manifest
        self._metadata = metadata  # of all ranks' pieces; on rank 0 only
        self._records: dict[str, FileRecord] = {}  # of all ranks' files; on rank 0 only
        self._writer: BackgroundTask[_Written] | None = None
        self._uploader: BackgroundTask[None] | None = None
        self._stopped = threading.Event()

    @classmethod
    def start(
        cls,
        path: str,
        checkpoint: dict[str, Any],
        replica_group: dist.ProcessGroup,
        planner: ShardPlanner,
        staging: Staging | None = None,
    ) -> Self:
        """Plan a save of Lightning's dict with the keys above, and start to write it; collective over the world.

        With ``staging``, the memory for a copy, training may change the tensors at once; without it, once the save is
        finished. Raises ``OSError`` if a disk fails, ``TypeError`` if an object cannot be pickled, and ``ValueError``
        if the shards leave gaps or something else is at ``path``.
        """
        is_local = checkpoint_files.writes_directly(path)
        # One folder for all ranks, or for an upload one for each
        make = partial(tempfile.mkdtemp, prefix="checkpoint_")
        folder = run_on_rank0(lambda: checkpoint_files.begin(path)) if is_local else run_on_all_ranks(make)
        try:
            # Rank 0 makes and writes these. Not by run_on_rank0, which would send them to all ranks.
            common_files = run_on_all_ranks(lambda: _common_files(checkpoint) if dist.get_rank() == 0 else {})
            planned, metadata = planner.plan(_shards(checkpoint), replica_group)
            pieces = planned if staging is None else run_on_all_ranks(lambda: staging.copy(planned))
        except BaseException:
            _delete_folder(path, is_local, folder)
            raise
        save = cls(path, is_local, folder, dict(checkpoint.get(MANIFEST) or {}), metadata)
        prefix = f"__{dist.get_rank()}_"

        def write() -> _Written:
            with saving(path):
                return write_pieces(folder, prefix, pieces, common_files, save._stopped.is_set)

        # Last, because a failure above deletes the folder, which must not happen under a writer. If training goes on,
        # the writer gives way to its threads.
        save._writer = BackgroundTask(f"writer of {path}", write, gives_way=staging is not None)
        return save

    @property
    def is_done(self) -> bool:
        """Whether the next call of :meth:`advance` need not wait for this rank."""
        task = self._uploader or self._writer  # an upload follows the writer
        return task is None or task.done()

    def advance(self) -> bool:
        """Wait for all ranks, take the next step, and return whether the checkpoint is in place; collective.

        Raises on all ranks, if it happened to one: ``OSError`` if a disk or store failed, ``FileNotFoundError`` if the
        folder was deleted, ``ValueError`` if an upload is incomplete.
        """
        try:
            if self._uploader is not None:
                self._finish_upload(self._uploader)
                return True
            combine_on_rank0(self._wait_for_writer, self._complete)
            if not self._is_local:
                run_on_rank0(lambda: begin_upload(self.path))
                upload = partial(upload_files, self._folder, self.path)
                self._uploader = BackgroundTask(f"uploader of {self.path}", upload)
            return self._is_local
        except BaseException:
            # When an exception of one rank is raised on all, the threads of all ranks have ended. After a Ctrl-C, which
            # only this rank has, others may still write into the folder that is deleted here. No checkpoint needs it.
            self._stopped.set()
            self.join()
            _delete_folder(self.path, self._is_local, self._folder)
            raise

    def join(self) -> None:
        """Wait for this rank's background work to end, with or without an error."""
        for task in (self._writer, self._uploader):
            if task is not None:
                task.join()

    def _wait_for_writer(self) -> _Written:
        assert self._writer is not None
        with self._explaining_deletion():
            return self._writer.result()

    def _complete(self, written: list[_Written]) -> None:
        """Write ``.metadata``, and put a local checkpoint in place; on rank 0, with what each rank has written."""
        metadata = self._metadata
        assert metadata is not None
        places: Places = {}
        for places_of_rank, records_of_rank in written:
            places.update(places_of_rank)
            self._records.update(records_of_rank)
        self._manifest["tensors"] = tensors_of(metadata)
        with self._explaining_deletion():
            with saving(self.path):
                self._records[METADATA_FILE] = write_metadata(self._folder, metadata, places)
            if self._is_local:
                checkpoint_files.finish(self.path, self._manifest, self._records)
        if self._is_local:
            for link in self.links:  # now that the folder has its final name
                checkpoint_files.link(link, self.path)

    def _finish_upload(self, uploader: BackgroundTask[None]) -> None:
        run_on_all_ranks(uploader.result)
        run_on_rank0(lambda: finish_upload(self._folder, self.path, self._manifest, self._records))
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _explaining_deletion(self) -> Iterator[None]:
        """If the folder was deleted, replace an error that this caused by one that says so."""
        try:
            yield
        except OSError as error:
            if os.path.isdir(self._folder):
                raise
            message = f"{self.path} was not saved, because {self._folder} was deleted while it was being written"
            raise FileNotFoundError(errno.ENOENT, message) from error


def rank_object(rank: int, world_size: int, state: Any = None) -> ShardedObject:
    """Return the shard of one rank's ``RANK_STATE``; a reader needs only its name, and leaves out ``state``."""
    return ShardedObject("lightning_mcore.rank_state", state, (world_size,), (rank,))


def _delete_folder(path: str, is_local: bool, folder: str) -> None:
    """Delete this rank's folder after a failure; rank 0 deletes the one for all ranks."""
    if not is_local:
        shutil.rmtree(folder, ignore_errors=True)
    elif dist.get_rank() == 0:
        checkpoint_files.abandon(path)


def _shards(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's shards, with its own state as one more."""
    shards: dict[str, Any] = checkpoint[SHARDED_STATE]
    state = checkpoint.get(RANK_STATE)
    if state is None:
        return shards
    return {**shards, RANK_STATE: rank_object(dist.get_rank(), dist.get_world_size(), state)}


def _common_files(checkpoint: dict[str, Any]) -> dict[str, bytes]:
    """Return the content of the files common to all ranks, as it is now."""
    added = (SHARDED_STATE, MANIFEST, RANK_STATE, CONTENT_METADATA)
    common: dict[str, Any] = {
        "iteration": int(checkpoint.get("global_step", 0)),
        "checkpoint_version": _MEGATRON_CHECKPOINT_VERSION,
    }
    if CONTENT_METADATA in checkpoint:
        common["content_metadata"] = checkpoint[CONTENT_METADATA]
    config = CheckpointingConfig(sharded_backend="torch_dist", sharded_backend_version=1)
    return {
        LIGHTNING_FILE: object_bytes({name: value for name, value in checkpoint.items() if name not in added}),
        COMMON_FILE: object_bytes(common),
        CONFIG_FNAME: json.dumps(asdict(config)).encode(),
    }
