# SPDX-License-Identifier: Apache-2.0
"""``MCoreCheckpointIO``, Lightning's checkpoint plugin: a save in flight, links, deletion, and loading in two steps.

If the strategy has put a sharded state into Lightning's dict, all ranks write a directory together. Otherwise rank 0
writes one file, as Lightning does. Loading takes two steps, because Lightning reads its own state before the model
exists: :meth:`~MCoreCheckpointIO.load_checkpoint` reads that state, :meth:`~MCoreCheckpointIO.load_shards` fills the
tensors of any layout. ``strategy/checkpointing.py`` and ``weights.py`` call this; ``save.py`` runs a single save.
"""

import atexit
import contextlib
import io
import logging
import os
import pickle
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from isal.isal_zlib import crc32
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch.distributed.checkpoint.metadata import Metadata

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint.files import absolute, resolve_folder
from lightning_mcore.checkpoint.manifest import (
    LIGHTNING_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    OLD_RANKS_FILE,
    damaged,
    read_metadata,
)
from lightning_mcore.checkpoint.megatron_lm import TRAIN_STATE_FILE, MegatronProgress
from lightning_mcore.checkpoint.older_formats import as_today
from lightning_mcore.checkpoint.reader import ShardReader, load_shards
from lightning_mcore.checkpoint.remote import locator
from lightning_mcore.checkpoint.save import (
    CONTENT_METADATA,
    MANIFEST,
    RANK_STATE,
    SHARDED_STATE,
    CheckpointSave,
    rank_object,
)
from lightning_mcore.checkpoint.save_plan import ShardPlanner
from lightning_mcore.checkpoint.single_file import checked_file, save_file
from lightning_mcore.checkpoint.writer import Staging
from lightning_mcore.config.value_checks import require_flag, require_size
from lightning_mcore.parallel.consensus import all_true, control_group, run_on_all_ranks, run_on_rank0
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.parallel.rank_watch import collectives_usable

__all__ = ["CONTENT_METADATA", "MANIFEST", "RANK_STATE", "SHARDED_STATE", "MCoreCheckpointIO"]

_LAST_TIMEOUT = 30.0  # seconds that ranks wait for each other at the end of the run

_log = logging.getLogger(__name__)
_in_use: weakref.WeakSet["MCoreCheckpointIO"] = weakref.WeakSet()


@dataclass(frozen=True)
class Contents:
    """The contents of a directory checkpoint, without its tensors."""

    manifest: dict[str, Any]  # empty for a checkpoint that Megatron wrote
    metadata: Metadata
    shapes: dict[str, tuple[int, ...]]
    objects: set[str]  # names of the entries that are not tensors


class MCoreCheckpointIO(TorchCheckpointIO):
    """Saves and loads checkpoints of :class:`~lightning_mcore.MCoreStrategy`.

    Args:
        async_save: Continue training while a sharded checkpoint is written, from a copy in host memory. The next save
            waits until this one is finished.
        max_in_flight: Number of saves that may be written at the same time; only 1 is supported.
        verify: What to check when a checkpoint is loaded: the ``"sizes"`` of its files, or also the ``"checksums"`` of
            everything that is read.

    Examples:
        >>> from lightning_mcore import MCoreCheckpointIO, MCoreStrategy
        >>> strategy = MCoreStrategy(checkpoint_io=MCoreCheckpointIO(async_save=True))
    """

    def __init__(
        self,
        *,
        async_save: bool = False,
        max_in_flight: int = 1,
        verify: Literal["sizes", "checksums"] = "checksums",
    ) -> None:
        require_flag("async_save", async_save)
        require_size("max_in_flight", max_in_flight)
        if max_in_flight > 1:
            raise ValueError(
                f"max_in_flight={max_in_flight} is not supported, because a save waits for the one before it; leave it"
                " out"
            )
        if verify not in ("sizes", "checksums"):
            raise ValueError(f"verify={verify!r} is not known; choose 'sizes' or 'checksums'")
        self.async_save = async_save
        self.verify = verify
        # Until a background save is in place, what Lightning wants to delete is kept, in case the save fails.
        # Example: ModelCheckpoint(save_last="link", save_top_k=1); last.ckpt leads to step-100.ckpt.
        #   step 200   step-200.ckpt is in flight; the removal of step-100.ckpt and the new link wait with it
        #   step 203   poll(): all ranks are done. step-200.ckpt appears, then last.ckpt leads to it, step-100.ckpt goes
        self._save: CheckpointSave | None = None
        self._staging = Staging()
        self._lost: BaseException | None = None  # why the last save failed, if its folder was deleted
        self._removals: list[str] = []  # deleted after the next save that succeeds
        self._links: set[str] = set()
        self._linked: list[str] = []  # deleted as soon as no link leads there
        self._planner = ShardPlanner()

    def __getstate__(self) -> dict[str, Any]:
        """Drop what belongs to this process: the save in flight, its memory, and the last plan."""
        return {"async_save": self.async_save, "verify": self.verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start again with the same options."""
        self.__init__(**state)  # type: ignore[misc]

    @property
    def has_saves_in_flight(self) -> bool:
        """Whether :meth:`drain` has a save to finish or the error of a lost one to raise; the same on every rank."""
        return self._save is not None or self._lost is not None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write a directory together with all ranks, or one file where the state is not sharded.

        Args:
            checkpoint: Lightning's dict. If it has a sharded state, the call is collective over the world.
            path: Local, or anything that fsspec opens.
            storage_options: Not supported, as in Lightning's plugin.

        Raises:
            OSError: The disk reported an error; ``path`` is unchanged.
            ValueError: The file or directory at ``path`` is not a checkpoint.
        """
        target = absolute(path)
        # A path that is saved again must not be deleted later on behalf of its earlier checkpoint.
        for unneeded in (self._removals, self._linked):
            unneeded[:] = [other for other in unneeded if absolute(other) != target]
        if SHARDED_STATE not in checkpoint:
            if storage_options is None and checkpoint_files.writes_directly(str(path)):
                save_file(checkpoint, target)
            else:
                super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options is not supported; configure fsspec instead")
        if self._save is not None:
            self._finish(another_follows=True)
        _finish_before_exit(self)
        staging = self._staging if self.async_save else None
        with _without_advice_for_megatron():
            self._save = CheckpointSave.start(target, checkpoint, process_group("dp_cp"), self._planner, staging)
        self._lost = None
        if not self.async_save:
            self._finish()

    def is_in_flight(self, path: _PATH) -> bool:
        """Return whether ``path`` is being written, whatever path leads to its folder; collective over the world."""
        save = self._save
        return save is not None and run_on_rank0(lambda: resolve_folder(path) == resolve_folder(save.path))

    def poll(self) -> None:
        """Put the save in place if all ranks have written it; collective over the world, called between steps.

        It costs nothing when no save is in flight. Raises ``OSError`` on all ranks if the save failed on one.
        """
        if self._save is not None and all_true(self._save.is_done):
            self._advance(another_follows=True)

    def drain(self, timeout: float | None = None) -> None:
        """Wait for the save in flight; collective over the world.

        Args:
            timeout: Seconds to wait for the other ranks, some of which may have died. If they do not arrive, the save
                is given up, with a warning.

        Raises:
            OSError: The save failed, on some rank.
        """
        if self._save is not None and timeout is not None and not _all_come(timeout):
            _log.warning("%s was not saved, because some ranks are missing; use an older checkpoint", self._save.path)
            # A collective would wait for the missing rank forever, so the hidden files stay for the next save to
            # delete. Their writer may still read the copy, so the next one gets other memory.
            self._save, self._staging = None, Staging()
            return
        if self._save is not None:
            self._finish()
        lost, self._lost = self._lost, None
        if lost is not None and timeout is None:  # with a timeout, another error ends the run
            raise lost

    def teardown(self) -> None:
        """Finish the save in flight if all ranks arrive, and free the memory."""
        try:
            self.drain(_LAST_TIMEOUT)
        except Exception:
            _log.exception("the last checkpoint was not saved")
        self._staging = Staging()
        self._planner = ShardPlanner()
        super().teardown()

    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint once the save in flight is complete and no link of this run leads to it; on rank 0.

        A path that is not a checkpoint, or that cannot be deleted, stays: a warning says so, and training continues.
        """
        if self._save is not None:
            self._removals.append(str(path))
        else:
            self._remove_unlinked([str(path)])

    def watch_links(self, links: Iterable[str]) -> None:
        """Keep the checkpoints that these links lead to; :meth:`link_checkpoint` adds the links that it sets."""
        self._links |= {absolute(link) for link in links}

    def link_checkpoint(self, path: _PATH, link: _PATH) -> None:
        """Make a link to a checkpoint, such as ``last.ckpt`` to the newest; collective over the world.

        While the checkpoint is in flight, the link leads to the previous one.

        Args:
            path: A checkpoint that exists, or that this plugin is saving.
            link: The path of the link, on a disk of this machine.

        Raises:
            OSError: The disk reported an error; the link is unchanged.
        """
        target, name = absolute(path), absolute(link)
        self._links.add(name)
        if self._save is not None and self.is_in_flight(target):
            self._save.links.append(name)
            return
        run_on_rank0(lambda: checkpoint_files.link(name, target))
        self._remove_unlinked()

    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read Lightning's state: all of a file, or the part of a directory that all ranks share.

        :meth:`load_shards` reads the tensors of a directory, :meth:`load_rank_state` what one rank knew. Any rank may
        call it alone.

        Args:
            path: Local, or anything that fsspec opens.
            map_location: As in ``torch.load``; the CPU by default.
            weights_only: As in ``torch.load``; None, the default, is safe for directories.

        Returns:
            Lightning's dict; for a directory also the manifest.

        Raises:
            FileNotFoundError: There is nothing at ``path``.
            ValueError: It is not a checkpoint, or is damaged.
        """
        where = str(path)
        if not self.is_directory(where):
            location = map_location if map_location is not None else (lambda storage, _: storage)
            with checked_file(where, self.verify == "checksums") as file:
                try:
                    content = super().load_checkpoint(file, location, weights_only)
                except pickle.UnpicklingError as error:
                    raise ValueError(
                        f"{where} is not a checkpoint, or contains objects that could run code when they are read; "
                        "give another path, or load it with weights_only=False if you trust its author"
                    ) from error
            if not isinstance(content, dict):
                raise ValueError(
                    f"{where} is not a checkpoint: it contains a {type(content).__name__}; give another path"
                )
            return content
        manifest = checkpoint_files.check_sizes(where)
        stored = self._read(where, manifest, LIGHTNING_FILE)
        state: dict[str, Any] = _unpacked(where, LIGHTNING_FILE, dict, stored, weights_only, map_location)
        return {**state, MANIFEST: manifest}

    def load_directory(self, path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a directory's Lightning state, as :meth:`load_checkpoint` does, on all ranks; collective over the world.

        Returns Lightning's dict and the manifest without its ``.distcp`` files, and, from format version 1 only, the
        state of all ranks. Errors as in :meth:`load_checkpoint`.
        """
        where = str(path)

        def read() -> tuple[dict[str, Any], dict[str, bytes]]:
            manifest = _checked_manifest(where)
            names = [LIGHTNING_FILE, *([OLD_RANKS_FILE] if OLD_RANKS_FILE in manifest["files"] else [])]
            return manifest, {name: self._read(where, manifest, name) for name in names}

        def unpack() -> dict[str, Any]:
            state: dict[str, Any] = _unpacked(where, LIGHTNING_FILE, dict, contents[LIGHTNING_FILE], weights_only)
            if OLD_RANKS_FILE in contents:
                state[RANK_STATE] = _unpacked(where, OLD_RANKS_FILE, list, contents[OLD_RANKS_FILE], weights_only)
            return {**state, MANIFEST: manifest}

        # Rank 0 sends the bytes: 1,000 ranks that look up 1,000 files would make a million look-ups on a shared disk.
        manifest, contents = run_on_rank0(read)
        return run_on_all_ranks(unpack)

    def load_rank_state(
        self, path: _PATH, contents: Contents, rank: int, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what global rank ``rank`` of the saving run knew; any rank may call it alone.

        Raises ``ValueError`` if the checkpoint lacks it, or is damaged.
        """
        ranks = contents.manifest.get("world_size")
        if not isinstance(ranks, int):
            raise damaged(str(path), f"{MANIFEST_FILE} does not give its world_size")
        state: dict[str, Any] = self.read_object(path, contents, rank_object(rank, ranks).unique_key, weights_only)
        return state

    def read_object(self, path: _PATH, contents: Contents, name: str, weights_only: bool | None = None) -> Any:
        """Return one of the objects of a directory, ours or Megatron's; any rank may call it alone.

        Raises ``ValueError`` if the checkpoint lacks it, or if it is damaged or could run code.
        """
        safe = True if weights_only is None else weights_only
        locate = partial(os.path.join, str(path))
        reader = ShardReader(str(path), contents.metadata, locate, self.verify == "checksums", safe)
        return reader.read_object(name)

    @staticmethod
    def is_directory(path: _PATH) -> bool:
        """Whether ``path`` is a directory, as sharded checkpoints are."""
        if str(path).startswith("http"):  # fsspec would read all of the file to look for links
            return False
        fs, root = checkpoint_files.open_store(str(path))
        return bool(fs.isdir(root))

    def read_contents(self, path: _PATH, manifest: dict[str, Any] | None = None) -> Contents:
        """Return the contents of a checkpoint directory, ours or Megatron's, without reading tensors.

        Any rank may call it alone. Without ``manifest``, the sizes of all files are checked first. Errors as in
        :meth:`load_checkpoint`.
        """
        where = str(path)
        manifest = _manifest_of(where) if manifest is None else manifest
        metadata = read_metadata(where, self._read(where, manifest, METADATA_FILE))
        if not manifest:
            metadata = as_today(metadata)
        described = metadata.state_dict_metadata
        return Contents(
            manifest=manifest,
            metadata=metadata,
            shapes={name: tuple(entry.size) for name, entry in described.items() if hasattr(entry, "size")},
            objects={name for name, entry in described.items() if not hasattr(entry, "size")},
        )

    def megatron_progress(self, path: _PATH, metadata: Metadata) -> MegatronProgress:
        """Return how far the run of Megatron had come that wrote ``path``; ``ValueError`` if it does not say."""
        where = str(path)
        state: dict[str, Any] = {}
        if TRAIN_STATE_FILE in checkpoint_files.names_in(*checkpoint_files.open_store(where)):
            state = _unpacked(where, TRAIN_STATE_FILE, dict, self._read(where, {}, TRAIN_STATE_FILE), True)
        return MegatronProgress.of(where, checkpoint_files.common_state(where, metadata), state)

    def contents_for_all(self, path: _PATH, manifest: dict[str, Any] | None = None) -> Contents:
        """Return the contents as :meth:`read_contents` does, together; collective over the world.

        Only rank 0 looks at all files. Each rank reads ``.metadata`` itself. Errors as in :meth:`load_checkpoint`.
        """
        manifest = run_on_rank0(lambda: _manifest_of(str(path))) if manifest is None else manifest
        contents = run_on_all_ranks(lambda: self.read_contents(path, manifest))
        if not manifest:
            run_on_rank0(lambda: checkpoint_files.check_complete(str(path), contents.metadata))
        return contents

    def load_shards(
        self,
        path: _PATH,
        sharded_state: dict[str, Any],
        *,
        weights_only: bool | None = None,
        contents: Contents | None = None,
    ) -> dict[str, Any]:
        """Fill ``sharded_state`` and return it, with tensors and objects in place of their descriptions; collective.

        The checkpoint may be ours or Megatron's. Tensors with data are read into it. ``weights_only`` is for objects,
        as in ``torch.load``; None means True. Raises ``ValueError`` if a part is missing or damaged.
        """
        where, metadata = str(path), (contents or self.contents_for_all(path)).metadata
        with contextlib.ExitStack() as stack, _without_advice_for_megatron():
            locate = run_on_all_ranks(lambda: locator(where, stack))
            safe = True if weights_only is None else weights_only
            reader = ShardReader(where, metadata, locate, self.verify == "checksums", safe)
            return load_shards(reader, sharded_state, process_group("dp_cp"))

    def _finish(self, another_follows: bool = False) -> None:
        while not self._advance(another_follows):
            pass

    def _advance(self, another_follows: bool = False) -> bool:
        """Take the next step of the save in flight and return whether it is finished; collective over the world."""
        save = self._save
        assert save is not None
        try:
            finished = save.advance()
        except BaseException as error:
            self._save, self._staging = None, Staging()  # after a second Ctrl-C, the writer may still read the copy
            is_deleted = isinstance(error, FileNotFoundError) and checkpoint_files.writes_directly(save.path)
            if not (another_follows and is_deleted):
                raise
            # The state in memory may now be the only copy, so training continues, and the next save makes the folder
            # again. Without a next save, drain() raises this error.
            self._lost = error
            if dist.get_rank() == 0:
                _log.warning("%s; training continues, and the next save creates the folder again", error)
            return True
        if finished:
            removals, self._save, self._removals = self._removals, None, []
            self._remove_unlinked(removals)
        return finished

    def _remove_unlinked(self, paths: Iterable[str] = ()) -> None:
        """Delete what Lightning wants to delete, except targets of links; links go first."""
        unneeded = sorted([*self._linked, *paths], key=lambda path: not os.path.islink(path))
        self._linked = []
        for path in unneeded:
            if any(_leads_to(link, path) for link in self._links):
                self._linked.append(path)
            else:
                _remove(path)

    def _read(self, path: str, manifest: dict[str, Any], name: str) -> bytes:
        fs, root = checkpoint_files.open_store(path)
        try:
            content: bytes = fs.cat_file(f"{root}/{name}")
        except FileNotFoundError:
            raise damaged(path, f"{name} is missing") from None
        record = manifest.get("files", {}).get(name)
        if self.verify == "checksums" and record is not None and f"{crc32(content):08x}" != record["crc32"]:
            raise damaged(path, f"the checksum of {name} differs from the one in the manifest")
        return content


def _unpacked(
    path: str, name: str, kind: type, content: bytes, weights_only: bool | None, map_location: Any | None = None
) -> Any:
    """Return the object of class ``kind`` in a checkpoint's file; ``ValueError`` if it is damaged or could run code."""
    safe = True if weights_only is None else weights_only
    try:
        found = torch.load(io.BytesIO(content), map_location or "cpu", weights_only=safe)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read: {name} is damaged, or contains objects that could run code when they are read; use"
            " another checkpoint, or load it with weights_only=False if you trust its author"
        ) from error
    if not isinstance(found, kind):
        raise damaged(path, f"{name} contains a {type(found).__name__}, not a {kind.__name__}")
    return found


def _finish_before_exit(plugin: MCoreCheckpointIO) -> None:
    """Finish the save in flight when the process ends, before the process group is destroyed.

    Source: Lightning 2.6.6, ``fabric.utilities.distributed._init_dist_connection``.
    """
    _in_use.add(plugin)
    # The function registered last runs first, and Lightning registers the group's destruction when it opens NCCL.
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)


def _finish_at_exit() -> None:
    for plugin in list(_in_use):
        plugin.teardown()


def _all_come(timeout: float) -> bool:
    """Wait for all ranks up to ``timeout`` seconds, if this rank may use collectives; return whether they came."""
    if not (dist.is_initialized() and collectives_usable()):
        return False
    try:
        dist.monitored_barrier(control_group(), timeout=timedelta(seconds=timeout))
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _without_advice_for_megatron() -> Iterator[None]:
    """Hide torch's warning to use another class; only Megatron's authors can follow it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield


def _manifest_of(path: str) -> dict[str, Any]:
    """Return the manifest as :func:`_checked_manifest` does; an empty dict for a checkpoint that Megatron wrote."""
    return {} if checkpoint_files.is_megatron_checkpoint(path) else _checked_manifest(path)


def _checked_manifest(path: str) -> dict[str, Any]:
    """Check the sizes of a directory's files, and return its manifest without the ``.distcp`` files."""
    manifest = checkpoint_files.check_sizes(path)
    # Every rank gets the manifest, so .distcp files would make traffic grow with both rank counts.
    shared = {name: record for name, record in manifest["files"].items() if not name.endswith(".distcp")}
    return {**manifest, "files": shared}


def _remove(path: str) -> None:
    try:
        fs, root = checkpoint_files.open_store(path)
        if fs.lexists(root) and not checkpoint_files.is_checkpoint(path):
            _log.warning("%s is not a checkpoint, so it is not deleted", path)
        else:
            checkpoint_files.remove(path)
    except (OSError, ValueError) as error:
        _log.warning("%s is no longer needed and could not be deleted: %s", path, error)


def _leads_to(link: str, path: str) -> bool:
    return os.path.islink(link) and not os.path.islink(path) and os.path.realpath(link) == os.path.realpath(path)
