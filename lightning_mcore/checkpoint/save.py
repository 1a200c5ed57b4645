# SPDX-License-Identifier: Apache-2.0
"""One save of a sharded checkpoint: plan it, write it in the background, and put it in place.

:meth:`CheckpointSave.start` agrees with all ranks on who writes what, and starts the writers. With memory for a copy,
training continues. :meth:`CheckpointSave.advance` waits for the writers; rank 0 then writes the common files and puts
the checkpoint in place. Both are collective over the world. A failure on one rank is raised on all, and leaves only the
checkpoint that was there before. ``io.py`` keeps the save in flight.

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
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint.manifest import (
    COMMON_FILE,
    LIGHTNING_FILE,
    METADATA_FILE,
    FileRecord,
    saving,
    tensors_of,
)
from lightning_mcore.checkpoint.remote import begin_upload, finish_upload, upload_files
from lightning_mcore.checkpoint.writer import Piece, Places, Staging, write_metadata, write_pieces
from lightning_mcore.parallel.consensus import all_true, combine_on_rank0, run_on_all_ranks, run_on_rank0

SHARDED_STATE = "lightning_mcore/sharded_state"
MANIFEST = "lightning_mcore/manifest"
RANK_STATE = "lightning_mcore/rank_state"
CONTENT_METADATA = "lightning_mcore/content_metadata"

_MEGATRON_CHECKPOINT_VERSION = 3.0  # of Megatron-LM since 2020
_PRIORITY = 10  # niceness of a writer that yields to training, from -20 to 19

T = TypeVar("T")
Written = tuple[Places, dict[str, FileRecord]]


def rank_object(rank: int, world_size: int, state: Any = None) -> ShardedObject:
    """Return the piece that holds what one rank alone knows; without ``state``, only its name matters."""
    return ShardedObject("lightning_mcore.rank_state", state, (world_size,), (rank,))


class BackgroundTask(Future[T]):
    """The future of a function that runs in its own thread, starting at once.

    The thread ends with the process, whatever it is doing, so its unfinished files are never put in place. (An
    executor's threads would keep a process alive while its disk hangs.) With ``gives_way`` it yields the processor to
    the training threads.
    """

    def __init__(self, name: str, function: Callable[[], T], gives_way: bool = False) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._run, args=(function, gives_way), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads; raised by result(), which all ranks call
            self.set_exception(error)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, for ``timeout`` seconds at most."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self, function: Callable[[], T], gives_way: bool) -> None:
        if gives_way and sys.platform == "linux":  # Linux has a priority per thread
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
        try:
            self.set_result(function())
        except BaseException as error:
            self.set_exception(error)


@dataclass(frozen=True)
class _CachedPlan:
    """Who writes what, without the values."""

    groups: tuple[Any, Any]  # the world, and the copies that divide the writing
    described: list[Any]
    # The pieces that this rank writes, as indices into ``described``: one for a tensor, several for an object.
    written: list[tuple[MetadataIndex, list[int]]]
    metadata: Metadata | None  # of all ranks' pieces; on rank 0 only


class ShardPlanner:
    """Plans saves, and keeps the last plan.

    Megatron plans well, but checks the plan only on rank 0, and after an error there the other ranks wait forever. So
    this calls Megatron's functions in an order in which one rank's failure is raised on all.
    """

    def __init__(self) -> None:
        self._cached: _CachedPlan | None = None

    def plan(self, sharded_state: dict[str, Any], copies: dist.ProcessGroup) -> tuple[Sequence[Piece], Metadata | None]:
        """Agree with all ranks on who writes what; collective over the world.

        Returns the pieces that this rank writes (a subclass may build each when it is accessed), and on rank 0 the
        metadata of all ranks' pieces. Raises ``ValueError`` if the pieces of all ranks do not form complete tensors.
        The ranks of ``copies`` hold copies of each other's tensors and divide the writing. Source: megatron-core 0.16.1
        to 0.19.2, ``dist_checkpointing.save`` through ``FullyParallelSaveStrategyWrapper`` and
        ``TorchDistSaveShardedStrategy``.
        """
        own, described = run_on_all_ranks(lambda: _describe(sharded_state))
        held: list[Any] = list(nested_values(own))  # before the calls below change which copy is the main one
        groups, cached = (dist.group.WORLD, copies), self._cached
        # A new plan costs more than copying the pieces, because all ranks exchange descriptions. Within a run only
        # values change, so the last plan is used again if it is valid on every rank.
        if not all_true(cached is not None and cached.groups == groups and cached.described == described):
            cached = _CachedPlan(groups, described, *_agree(own, held, described, copies))
        assert cached is not None
        self._cached, written = cached, cached.written

        def pieces() -> list[Piece]:
            return [Piece(index, _content([held[place] for place in places])) for index, places in written]

        return run_on_all_ranks(pieces), cached.metadata


def _describe(sharded_state: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    own: dict[str, Any] = save_preprocess(sharded_state, False)[0]
    return own, [piece.without_data() for piece in nested_values(own)]


def _agree(
    own: dict[str, Any], held: list[Any], described: list[Any], copies: dist.ProcessGroup
) -> tuple[list[tuple[MetadataIndex, list[int]]], Metadata | None]:
    """Return the pieces that this rank writes, and on rank 0 the metadata of all pieces; collective over the world."""
    combine_on_rank0(lambda: described, _validate)
    # Each of two data-parallel ranks with the same four 1 GB tensors becomes the main copy of two and writes them.
    shares = determine_main_replica_uniform_distribution(own, copies)
    distribute_main_replicas_with_precomputed_distribution(own, copies, shares)
    planner: Any = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    written: list[tuple[MetadataIndex, list[int]]] = []

    def plan_own() -> SavePlan:
        places = {id(piece): place for place, piece in enumerate(held)}
        by_name = _replace_state_dict_keys_with_sharded_keys(own, True)[0]
        # Pieces of one name, such as the blocks of an optimizer's range, appear in the plan in the same order, so each
        # item takes the next place. Objects of one name are saved together.
        left = {name: [places[id(piece)] for piece in pieces] for name, pieces in by_name.items()}
        try:
            state = mcore_to_pyt_state_dict(by_name, False)
        except CheckpointingException as error:
            raise ValueError(f"a piece of this rank cannot be saved: {error}") from error
        planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
        plan: SavePlan = planner.create_local_plan()
        for item in plan.items:
            places_of_name = left[item.index.fqn]
            count = len(places_of_name) if item.type == WriteItemType.BYTE_IO else 1
            written.append((item.index, places_of_name[:count]))
            del places_of_name[:count]
        return plan

    metadata: list[Metadata] = []  # stays on rank 0, because it grows with the number of ranks

    def plan_all(plans: list[SavePlan]) -> None:
        try:
            metadata.append(planner.create_global_plan(plans)[1])
        except (ValueError, AssertionError) as error:
            raise _not_whole(error) from error

    combine_on_rank0(plan_own, plan_all)
    return written, metadata[0] if metadata else None


def _content(pieces: Sequence[Any]) -> Tensor | bytes:
    """Return the tensor of a piece, or the bytes of objects.

    Source: megatron-core 0.16.1, ``mcore_to_pyt_state_dict``.
    """
    first = pieces[0]
    if isinstance(first, ShardedTensor):
        if first.data is None:
            raise ValueError(f"a piece of this rank cannot be saved: {first.key} has no data")
        tensor: Tensor = first.data.detach()
        return tensor.reshape((1,) * first.prepend_axis_num + tuple(first.local_shape))
    return _saved([piece.data for piece in pieces])


def _validate(all_pieces: list[list[Any]]) -> None:
    try:
        validate_sharding_integrity(all_pieces)
    except Exception as error:
        raise _not_whole(error) from error


def _not_whole(error: Exception) -> ValueError:
    return ValueError(f"the shards of all ranks do not form complete tensors: {error}")


class CheckpointSave:
    """A save in flight, created by :meth:`start`."""

    def __init__(self, path: str, directory: str, manifest: dict[str, Any], metadata: Metadata | None) -> None:
        self.path = path
        self.links: list[str] = []  # to set to this checkpoint once it is complete
        self._directory = directory
        self._manifest = manifest
        self._metadata = metadata
        self._writing: BackgroundTask[Written] | None = None
        self._uploading: BackgroundTask[None] | None = None
        self._records: dict[str, FileRecord] = {}
        self._stopped = threading.Event()

    @classmethod
    def start(
        cls,
        path: str,
        checkpoint: dict[str, Any],
        copies: dist.ProcessGroup,
        planner: ShardPlanner,
        staging: Staging | None = None,
    ) -> Self:
        """Start a save of Lightning's dict with this rank's sharded state, manifest and rank state; collective.

        Without ``staging``, the memory for a copy, the tensors must not change until the save is finished. Raises
        ``OSError`` if a disk fails, and ``ValueError`` if the pieces leave gaps or something else is at ``path``.
        """
        directory = _begin(path)
        try:
            files = run_on_all_ranks(lambda: _common_files(checkpoint) if dist.get_rank() == 0 else {})
            planned, metadata = planner.plan(_pieces(checkpoint), copies)
            save = cls(path, directory, dict(checkpoint.get(MANIFEST) or {}), metadata)
            pieces = run_on_all_ranks(lambda: planned if staging is None else staging.copy(planned))
        except BaseException:
            _abandon(path, directory)
            raise
        # Last, because it cannot fail.
        write = partial(write_pieces, directory, f"__{dist.get_rank()}_", pieces, files, save._stopped.is_set)
        save._writing = BackgroundTask(f"writer of {path}", saving(path)(write), gives_way=staging is not None)
        return save

    @property
    def is_done(self) -> bool:
        """Whether the next call of :meth:`advance` need not wait for this rank."""
        task = self._uploading or self._writing
        return task is None or task.done()

    def advance(self) -> bool:
        """Wait for all ranks, take the next step, and return whether the checkpoint is in place; collective.

        Raises ``OSError`` on all ranks if a disk or store failed on one: ``FileNotFoundError`` if the folder was
        deleted.
        """
        try:
            # On a store, the first call starts the uploads and the second one finishes them.
            if self._uploading is None:
                assert self._writing is not None
                combine_on_rank0(
                    partial(self._unless_deleted, self._writing.result),
                    lambda written: self._unless_deleted(partial(self._complete, written)),
                )
                if checkpoint_files.writes_directly(self.path):
                    return True
                run_on_rank0(lambda: begin_upload(self.path))
                path, directory = self.path, self._directory
                self._uploading = BackgroundTask(f"uploader of {path}", partial(upload_files, directory, path))
                return False
            run_on_all_ranks(self._uploading.result)
            run_on_rank0(lambda: finish_upload(self._directory, self.path, self._manifest, self._records))
            shutil.rmtree(self._directory, ignore_errors=True)
            return True
        except BaseException:
            self._stopped.set()
            self.join()  # after a Ctrl-C it still writes, and a folder is never deleted under a writer
            _abandon(self.path, self._directory)
            raise

    def join(self) -> None:
        """Wait for this rank's background work to end, with or without an error."""
        for task in (self._writing, self._uploading):
            if task is not None:
                task.join()

    def _unless_deleted(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns; if it fails because the folder was deleted, the error says so."""
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
        places: Places = {}
        for places_of_rank, records in written:
            places.update(places_of_rank)
            self._records.update(records)
        with saving(self.path):
            self._records[METADATA_FILE] = write_metadata(self._directory, metadata, places)
        self._manifest["tensors"] = tensors_of(metadata)
        if checkpoint_files.writes_directly(self.path):
            checkpoint_files.finish(self.path, self._manifest, self._records)
            for name in self.links:
                checkpoint_files.link(name, self.path)


def _begin(path: str) -> str:
    if checkpoint_files.writes_directly(path):
        return run_on_rank0(lambda: checkpoint_files.begin(path))
    return run_on_all_ranks(lambda: tempfile.mkdtemp(prefix="checkpoint_"))


def _abandon(path: str, directory: str) -> None:
    if not checkpoint_files.writes_directly(path):
        shutil.rmtree(directory, ignore_errors=True)
    elif dist.get_rank() == 0:
        checkpoint_files.abandon(path)


def _pieces(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded state, with the rank state as one more piece."""
    pieces: dict[str, Any] = checkpoint[SHARDED_STATE]
    state = checkpoint.get(RANK_STATE)
    return {**pieces, RANK_STATE: rank_object(dist.get_rank(), dist.get_world_size(), state)} if state else pieces


def _common_files(checkpoint: dict[str, Any]) -> dict[str, bytes]:
    """Return the content of the files that rank 0 writes in addition to the tensors, as they are now."""
    ours = (SHARDED_STATE, MANIFEST, RANK_STATE, CONTENT_METADATA)
    common: dict[str, Any] = {
        "iteration": int(checkpoint.get("global_step", 0)),
        "checkpoint_version": _MEGATRON_CHECKPOINT_VERSION,
    }
    if CONTENT_METADATA in checkpoint:
        common["content_metadata"] = checkpoint[CONTENT_METADATA]
    return {
        LIGHTNING_FILE: _saved({name: value for name, value in checkpoint.items() if name not in ours}),
        COMMON_FILE: _saved(common),
        CONFIG_FNAME: json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode(),
    }


def _saved(content: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"the checkpoint contains an object that cannot be saved, {error}; remove it") from error
    return stream.getvalue()
