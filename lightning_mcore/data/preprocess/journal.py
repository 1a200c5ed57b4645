# SPDX-License-Identifier: Apache-2.0
"""The unfinished dataset of ``lightning-mcore preprocess``: finished work survives whatever ends the process.

It grows in the folder ``PREFIX.unfinished``:

===========  =========================================================================================
``tokens``   becomes the .bin file
``lengths``  the length of each document, i32
``blocks``   the checksum of each whole block of ``tokens``, u32
``journal``  how much of these is valid, how much of the input was read, and the command; with a checksum
``lock``     locked by the process that writes; the lock ends with the process
===========  =========================================================================================

The journal is replaced, never changed, and only after the other files are on disk. When the command resumes, it cuts
off what the journal does not cover and compares the rest with its checksums; reading takes far less time than
tokenising. ``run.py`` is the only user.
"""

import contextlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from lightning_mcore.checkpoint.atomic import is_locked_elsewhere, sync_directory
from lightning_mcore.data.checked_files import BLOCK, BlockChecksums, checksums_of
from lightning_mcore.data.preprocess.inputs import UNFINISHED
from lightning_mcore.data.preprocess.pool import Tokens
from lightning_mcore.data.preprocess.worker import Piece
from lightning_mcore.data.pretraining.index import (
    checksums_path,
    facts_path,
    token_type,
    write_dataset_checksums,
    write_index,
)

_SAVE_EVERY = 2.0  # seconds between journals while tokens are added
_FORMAT = 2  # of the files in the folder; work of another format is not resumed


@dataclass(frozen=True)
class Progress:
    """How far the command has come."""

    files: int = 0  # input files that are done
    empty_files: int = 0  # empty ones between these and the current file
    pieces: int = 0  # of the current file
    input_bytes: int = 0  # of the input files
    text_bytes: int = 0  # of the documents in UTF-8
    documents: int = 0  # those with tokens
    tokens: int = 0  # of these documents
    empty: int = 0  # documents without tokens, which are left out
    last_block: int = 0  # CRC32 of the tokens behind the last full checksum block
    lengths_checksum: int = 0  # CRC32 of the lengths
    whole: bool = False  # only the final file names are missing


@dataclass(frozen=True)
class _Begun:
    """Content of a journal."""

    command: dict[str, Any]
    progress: Progress  # at its last save
    after_file: Progress  # at the end of the last complete input file: if a later file was fixed, work resumes here


class Journal:
    """Writes the unfinished dataset of one prefix.

    ``command`` is everything that decides the content, under names that a user knows. ``overwrite`` replaces a finished
    dataset of that name, and unfinished work of another command. Raises FileExistsError if the dataset exists,
    ValueError if the unfinished work is damaged or belongs to another command, RuntimeError if another process writes
    it, or OSError.
    """

    def __init__(self, prefix: str, command: dict[str, Any], vocab_size: int, overwrite: bool) -> None:
        self.prefix = prefix
        self.folder = Path(prefix + UNFINISHED)
        self.progress = Progress()
        self._after_file = Progress()
        # Through JSON, so that it compares equal to a stored one: tuples become lists.
        self._command = {**json.loads(json.dumps(command)), "format of the unfinished files": _FORMAT}
        self._dtype = token_type(vocab_size)
        self._saved = time.monotonic()
        begun = self._read(overwrite)
        # A process that died between the final names has published some files already, and may go on.
        if begun is None or not begun.progress.whole:
            self._refuse_finished(overwrite)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: list[Any] = []
        self._lock = self._take_lock()
        try:
            self._begin(begun, overwrite)
        except BaseException:
            self.close()
            raise

    def _begin(self, begun: _Begun | None, overwrite: bool) -> None:
        if begun is not None:
            other = _difference(begun.command, self._command)
            kept, changed = _unchanged(begun, self._command["inputs"])
            # Changed inputs matter only if none of the finished work comes from unchanged files.
            other = other or (changed if kept.documents == 0 else None)
            if other is None and overwrite and self._damage(kept) is not None:
                begun = None
            elif other is None:
                self._require_intact(kept)
                self.progress, self._after_file = kept, begun.after_file
            elif begun.progress.documents > 0 and not overwrite:
                self.progress = begun.progress  # so that close() keeps it
                raise ValueError(
                    f"{self.folder} was started with {other}; repeat that command to resume, or start again with"
                    " --overwrite"
                )
        if self.progress == Progress():
            (self.folder / "journal").unlink(missing_ok=True)  # before the work that it covers is lost
        if not self.progress.whole:  # otherwise files may have their final names already
            sizes = self._sizes(self.progress)
            self._files += [self._open(name, size) for name, size in sizes.items()]
            self._blocks = BlockChecksums(sizes["tokens"], self.progress.last_block)

    def _refuse_finished(self, overwrite: bool) -> None:
        for name in (self.prefix + ".bin", self.prefix + ".idx"):
            if os.path.lexists(name) and not overwrite:
                raise FileExistsError(f"{name} already exists; give another --output, or replace it with --overwrite")

    def _take_lock(self) -> Any:
        lock = (self.folder / "lock").open("ab")
        try:
            if is_locked_elsewhere(lock.fileno()):
                raise RuntimeError(
                    f"{self.prefix} is being written by another process; wait for it, or give another --output"
                )
        except BaseException:
            lock.close()
            raise
        return lock

    def _read(self, overwrite: bool) -> _Begun | None:
        """Return the journal, or None if there is none to resume from; raise ValueError if it is damaged."""
        try:
            stored = json.loads((self.folder / "journal").read_text(encoding="utf-8"))
            checksum = stored.pop("checksum", None)
            begun = _Begun(stored["command"], Progress(**stored["progress"]), Progress(**stored["after_file"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            stored, checksum, begun = {}, None, None
        if begun is None or checksum != _checksum(stored):
            if overwrite:
                return None
            raise ValueError(f"{self.folder / 'journal'} is damaged; start again with --overwrite")
        return begun

    def _lengths(self, progress: Progress) -> Any:
        """Return the lengths of the documents that the journal covers, [documents] int32."""
        return np.fromfile(self.folder / "lengths", "<i4", progress.documents)

    def _sizes(self, progress: Progress) -> dict[str, int]:
        """Return how many bytes of each file the journal covers."""
        # 50,000 uint16 tokens of 120 documents: 100,000 bytes, 480 bytes, and one full block of 65,536 bytes: 4 bytes.
        tokens = progress.tokens * np.dtype(self._dtype).itemsize
        return {"tokens": tokens, "lengths": progress.documents * 4, "blocks": tokens // BLOCK * 4}

    def _damage(self, progress: Progress) -> str | None:
        """Return a phrase about damage in the files that the journal covers; None if they are intact."""
        if progress.whole:
            return None  # files may have their final names already
        for name, size in self._sizes(progress).items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size < size:
                return f"{path} is shorter than its journal says"
        if crc32(self._lengths(progress)) != progress.lengths_checksum:
            return f"{self.folder / 'lengths'} is damaged"
        size = self._sizes(progress)["tokens"]
        found = checksums_of(str(self.folder / "tokens"), size)[1]
        if not np.array_equal(found, self._checksums(size, progress.last_block)):
            return f"{self.folder / 'tokens'} is damaged"
        return None

    def _checksums(self, size: int, last_block: int) -> Any:
        """Return the checksums of the blocks of the first ``size`` bytes of tokens, [blocks] uint32."""
        blocks = np.fromfile(self.folder / "blocks", "<u4", size // BLOCK)
        return np.append(blocks, np.uint32(last_block)) if size % BLOCK else blocks

    def _require_intact(self, progress: Progress) -> None:
        damage = self._damage(progress)
        if damage is not None:
            self.progress = progress  # so that close() keeps it
            raise ValueError(f"{damage}; start again with --overwrite")

    def _open(self, name: str, size: int) -> Any:
        path = self.folder / name
        # Not "a": the file is cut to what the journal covers and continues there.
        file = path.open("r+b" if path.exists() else "w+b")
        file.truncate(size)
        file.seek(size)
        return file

    def add(self, piece: Piece, result: Tokens) -> None:
        """Write the tokens of the next piece; save every few seconds."""
        tokens, lengths, blocks = self._files
        tokens.write(result.tokens)
        lengths.write(result.lengths)
        blocks.write(self._blocks.add(result.tokens))
        # A piece that ends a file starts the count of pieces again; on resume, run.py skips that many of the current
        # file.
        done, files = self.progress, piece["files_done"]
        self.progress = Progress(
            files=done.files + files,
            empty_files=piece["empty_files"],
            pieces=0 if files else done.pieces + 1,
            input_bytes=done.input_bytes + piece["input_bytes"],
            text_bytes=done.text_bytes + result.text_bytes,
            documents=done.documents + len(result.lengths) // 4,
            tokens=done.tokens + len(result.tokens) // np.dtype(self._dtype).itemsize,
            empty=done.empty + result.empty,
            last_block=self._blocks.last,
            lengths_checksum=crc32(result.lengths, done.lengths_checksum),
        )
        if files:
            self._after_file = self.progress
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write everything that was added to disk, and then the journal."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        partial = self.folder / "journal.partial"
        with partial.open("w", encoding="utf-8") as file:
            stored = {"progress": asdict(self.progress), "after_file": asdict(self._after_file)}
            whole = {"command": self._command, **stored}
            json.dump({**whole, "checksum": _checksum(whole)}, file)
            file.flush()
            os.fsync(file.fileno())
        # The old journal stays valid until this moment: it covers less of the same files.
        os.replace(partial, self.folder / "journal")
        sync_directory(str(self.folder))
        self._saved = time.monotonic()

    def publish(self, facts: dict[str, Any]) -> None:
        """Give the files their final names, replacing existing ones; ``facts`` become the content of the facts file."""
        if not self.progress.whole:
            write_index(str(self.folder / "index"), self._lengths(self.progress), self._dtype)
            self._write_facts(facts)
            self._write_checksums()
            self.progress = replace(self.progress, whole=True)
            self.save()
        # The index comes last, because Megatron needs both: without it there is no dataset yet. If the process dies
        # between two names, the next run finds ``whole`` and moves the rest.
        ready = {
            "facts": facts_path(self.prefix),
            "checksums": checksums_path(self.prefix),
            "tokens": self.prefix + ".bin",
            "index": self.prefix + ".idx",
        }
        if (self.folder / "tokens").exists() and os.path.lexists(ready["index"]):
            os.unlink(ready["index"])  # the old index must not point into the new tokens
        for name, final in ready.items():
            if (self.folder / name).exists():
                os.replace(self.folder / name, final)
        sync_directory(os.path.dirname(os.path.abspath(self.prefix)))
        self.close()
        shutil.rmtree(self.folder)

    def _write_facts(self, facts: dict[str, Any]) -> None:
        with (self.folder / "facts").open("w", encoding="utf-8") as file:
            file.write(json.dumps(facts, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _write_checksums(self) -> None:
        blocks = self._checksums(self._blocks.size, self._blocks.last)
        paths = [str(self.folder / name) for name in ("checksums", "index", "facts")]
        write_dataset_checksums(paths[0], (self._blocks.size, blocks), *paths[1:])

    def close(self) -> None:
        """Close the files; remove the folder if it holds no work."""
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk has been reported already
                file.close()
        if self.progress.documents == 0 and not self._lock.closed:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _checksum(stored: dict[str, Any]) -> int:
    return crc32(json.dumps(stored, sort_keys=True).encode())


def _difference(begun: dict[str, Any], command: dict[str, Any]) -> str | None:
    """Return a phrase about the first difference apart from the inputs; None if there is none."""
    for name in {**begun, **command}:
        before, now = begun.get(name), command.get(name)
        if before != now and name != "inputs":
            return f"another {name}" if isinstance(now, list) else f"{name} {before!r}"
    return None


def _unchanged(begun: _Begun, now: list[list[Any]]) -> tuple[Progress, str]:
    """Return the part of the work that comes from unchanged files, and a phrase about what has changed."""
    before = begun.command["inputs"]
    same = next((number for number, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), None)
    if same is None and len(before) == len(now):
        return begun.progress, ""
    same = min(len(before), len(now)) if same is None else same
    words = f"other inputs ({len(before)} files, now {len(now)})"
    if same < len(now) and now[same][0] in [path for path, *_ in before]:
        words = f"another content of {now[same][0]}"
    if begun.progress.whole or same < begun.after_file.files:
        return Progress(), words
    # ``same`` is the first changed file. Files behind the current one have not been read, so nothing is lost. If the
    # current one changed, work resumes at its beginning.
    in_work = begun.progress.files + begun.progress.empty_files
    return begun.progress if same > in_work else begun.after_file, words
