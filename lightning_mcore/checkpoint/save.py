# SPDX-License-Identifier: Apache-2.0
"""One save of a sharded checkpoint: plan it, write it in the background, and put it in place.

:meth:`CheckpointSave.start` agrees with all ranks on who writes what, and starts the writers. Training may then
continue, if the save was given memory for a copy. :meth:`CheckpointSave.advance` waits for the writers; rank 0 then
writes the files common to all ranks and puts the checkpoint in place. A failure on one rank is raised on all, and
leaves only the checkpoint that was there before. Both methods are collective over the world. ``io.py`` keeps the saves
in flight.

A checkpoint on a remote store is written to local disks first. Each rank then uploads its own files in the background.

**Who writes what.** Megatron plans a save well: data-parallel copies share the work, and ``.metadata`` says where every
piece belongs. But it checks the plan only on rank 0, and after an error there the other ranks wait for ever. So
:class:`ShardPlanner` calls Megatron's functions in an order in which a failure on one rank is raised on all. To plan,
all ranks exchange descriptions of all their pieces, which takes longer than copying the pieces. Only the values change
from one save of a run to the next, so the planner keeps the last plan and only checks that it is still valid on every
rank.
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
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

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

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint.manifest import (
    COMMON_FILE,
    LIGHTNING_FILE,
    METADATA_FILE,
    FileRecord,
    saving,
    tensors_of,
)
from lightning_mcore.checkpoint.writer import Piece, Places, Staging, write_metadata, write_pieces
from lightning_mcore.parallel.consensus import all_true, collect, decide, on_all

SHARDED_STATE = "lightning_mcore/sharded_state"
MANIFEST = "lightning_mcore/manifest"
RANK_STATE = "lightning_mcore/rank_state"
CONTENT_METADATA = "lightning_mcore/content_metadata"

_MEGATRON_CHECKPOINT_VERSION = 3.0  # the version of Megatron-LM's checkpoints since 2020
_PRIORITY = 10  # niceness of a writer that yields to training, from -20 (the highest priority) to 19

T = TypeVar("T")
Written = tuple[Places, dict[str, FileRecord]]


def rank_object(rank: int, world_size: int, state: Any = None) -> ShardedObject:
    """Return the piece of a checkpoint that holds what one rank alone knows.

    Args:
        rank: The rank that saves.
        world_size: Number of ranks that save.
        state: What it knows; None only to name the piece.
    """
    return ShardedObject("lightning_mcore.rank_state", state, (world_size,), (rank,))


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
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads; told by wait(), which all ranks call
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or failed."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """Wait for the function to end, and return its result.

        Raises:
            BaseException: The error that the function raised.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def join(self, timeout: float | None = None) -> None:
        """Wait for the function to return or fail, for some seconds at most."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout)

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


@dataclass(frozen=True)
class ShardPlan:
    """The pieces that one rank writes.

    Args:
        pieces: The pieces that this rank writes; a piece may be built only when it is accessed.
        metadata: The metadata of all ranks' pieces; on rank 0 only.
    """

    pieces: Sequence[Piece]
    metadata: Metadata | None


@dataclass(frozen=True)
class _Outline:
    """A plan without values.

    Args:
        groups: The groups of ranks that it was made for: the world, and the copies that divide the writing.
        described: All pieces that this rank holds.
        written: The pieces that it writes, as indices into ``described``: one for a tensor, several for an object.
        metadata: The metadata of all ranks' pieces; on rank 0 only.
    """

    groups: tuple[Any, Any]
    described: list[Any]
    written: list[tuple[MetadataIndex, list[int]]]
    metadata: Metadata | None


class ShardPlanner:
    """Plans saves, and keeps the last plan."""

    def __init__(self) -> None:
        self._kept: _Outline | None = None

    def plan(self, sharded_state: dict[str, Any], copies: dist.ProcessGroup) -> ShardPlan:
        """Agree with all ranks on who writes what; collective over the world.

        Source: megatron-core 0.16.1 to 0.19.2, ``dist_checkpointing.save`` through ``FullyParallelSaveStrategyWrapper``
        and ``TorchDistSaveShardedStrategy``.

        Args:
            sharded_state: This rank's sharded tensors and objects, nested in any way; factories in it are applied.
            copies: The group of ranks that hold copies of each other's tensors and divide the writing.

        Raises:
            ValueError: The pieces of all ranks do not form whole tensors.
        """
        own, described = on_all(lambda: _describe(sharded_state))
        held: list[Any] = list(nested_values(own))  # before the calls below change which copy is the main one
        groups, kept = (dist.group.WORLD, copies), self._kept
        if not all_true(kept is not None and kept.groups == groups and kept.described == described):
            kept = _Outline(groups, described, *_agree(own, held, described, copies))
        assert kept is not None
        outline = kept
        pieces = on_all(
            lambda: [Piece(index, _content([held[place] for place in places])) for index, places in outline.written]
        )
        self._kept = outline
        return ShardPlan(pieces, outline.metadata)


def _describe(sharded_state: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    own: dict[str, Any] = save_preprocess(sharded_state, False)[0]
    return own, [piece.without_data() for piece in nested_values(own)]


def _agree(
    own: dict[str, Any], held: list[Any], described: list[Any], copies: dist.ProcessGroup
) -> tuple[list[tuple[MetadataIndex, list[int]]], Metadata | None]:
    """Return the pieces that this rank writes, and on rank 0 the metadata of all pieces; collective over the world."""
    collect(lambda: described, _validate)
    shares = determine_main_replica_uniform_distribution(own, copies)
    distribute_main_replicas_with_precomputed_distribution(own, copies, shares)
    planner: Any = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    written: list[tuple[MetadataIndex, list[int]]] = []

    def plan_own() -> SavePlan:
        places = {id(piece): place for place, piece in enumerate(held)}
        by_name = _replace_state_dict_keys_with_sharded_keys(own, True)[0]
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

    def plan_all(plans: list[SavePlan]) -> Metadata:
        try:
            metadata: Metadata = planner.create_global_plan(plans)[1]
        except (ValueError, AssertionError) as error:
            raise _not_whole(error) from error
        return metadata

    metadata = collect(plan_own, plan_all)
    return written, metadata


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
    return ValueError(f"the pieces of all ranks do not form whole tensors: {error}")


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
        """Start a save; collective over the world.

        Args:
            path: The same on every rank.
            checkpoint: Lightning's dict with this rank's sharded state, manifest and rank state.
            copies: The group of ranks that hold copies of each other's tensors.
            planner: Agrees on who writes what.
            staging: Memory for a copy of the tensors; without it, the tensors must not change until the save is
                finished.

        Raises:
            OSError: The disk reports an error.
            ValueError: The pieces of all ranks do not form whole tensors, or ``path`` is not a checkpoint.
        """
        directory = _begin(path)
        try:
            files = on_all(lambda: _common_files(checkpoint) if dist.get_rank() == 0 else {})
            plan = planner.plan(_pieces(checkpoint), copies)
            save = cls(path, directory, dict(checkpoint.get(MANIFEST) or {}), plan.metadata)
            pieces = on_all(lambda: plan.pieces if staging is None else staging.copy(plan.pieces))
        except BaseException:
            _abandon(path, directory)
            raise
        save._start_writing(pieces, files, staging)  # last, because it cannot fail
        return save

    def _start_writing(self, pieces: Sequence[Piece], files: dict[str, bytes], staging: Staging | None) -> None:
        prefix, path, directory = f"__{dist.get_rank()}_", self.path, self._directory
        self.staging = staging
        self._writing = BackgroundTask(
            f"writer of {path}",
            saving(path)(partial(write_pieces, directory, prefix, pieces, files, self._stopped.is_set)),
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
            OSError: The disk or the store reported an error, on some rank.
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
                decide(lambda: checkpoint_files.begin_upload(self.path))
                path, directory = self.path, self._directory
                self._uploading = BackgroundTask(
                    f"uploader of {path}", lambda: checkpoint_files.upload_files(directory, path)
                )
                return False
            on_all(self._uploading.wait)
            decide(lambda: checkpoint_files.finish_upload(self._directory, self.path, self._manifest, self._records))
            shutil.rmtree(self._directory, ignore_errors=True)
            return True
        except BaseException:
            self._stopped.set()
            self.join()  # after a Ctrl-C it still writes, and a folder is never deleted under a writer
            _abandon(self.path, self._directory)
            raise

    def join(self) -> None:
        """Wait for this rank's background work to end, whatever comes of it."""
        for task in (self._writing, self._uploading):
            if task is not None:
                task.join()

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
        OSError: The disk reports an error; ``path`` is unchanged.
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


def _pieces(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded state, with the rank state as one more piece."""
    pieces: dict[str, Any] = checkpoint[SHARDED_STATE]
    state = checkpoint.get(RANK_STATE)
    return {**pieces, RANK_STATE: rank_object(dist.get_rank(), dist.get_world_size(), state)} if state else pieces


def _common_files(checkpoint: dict[str, Any]) -> dict[str, bytes]:
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
