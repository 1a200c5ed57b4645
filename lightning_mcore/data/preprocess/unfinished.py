# SPDX-License-Identifier: Apache-2.0
"""The unfinished dataset of ``lightning-mcore preprocess``: finished work survives whatever ends the process.

It is made in the folder ``PREFIX.unfinished``:

==============  =============================================================================================
``*.piece``     the tokens of one piece of the input, written by a worker; named after the piece and the settings
``command``     the input files and the settings that decide the content (JSON)
``publishing``  present while the final files get their names
``lock``        locked by the process that writes; the lock ends with the process
==============  =============================================================================================

A piece file appears complete or not at all, so the command resumes by skipping the pieces whose files exist. Piece
files are not flushed to disk: one that a power failure damaged fails its checksum and is made again. At the end they
are concatenated in input order. ``run.py`` is the only user.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_mcore.checkpoint.atomic import is_locked_elsewhere, sync_directory
from lightning_mcore.data.preprocess.inputs import UNFINISHED
from lightning_mcore.data.preprocess.worker import Piece, read_tokens
from lightning_mcore.data.pretraining.index import checksums_path, facts_path, write_dataset_checksums, write_index

_FORMAT = 3  # of the files in the folder; work of another format is not resumed


@dataclass(frozen=True)
class Progress:
    """How much is tokenised."""

    pieces: int = 0
    input_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    resumed_bytes: int = 0  # of the text bytes, those that an earlier run tokenised


class UnfinishedDataset:
    """The dataset of one prefix while it is made.

    ``command`` is everything that decides the content, under names that a user knows. ``overwrite`` replaces a finished
    dataset of that name, and unfinished work of another command.
    """

    def __init__(self, prefix: str, command: dict[str, Any], overwrite: bool) -> None:
        self.prefix = prefix
        self.folder = Path(prefix + UNFINISHED)
        self.progress = Progress()
        self._pieces: list[str] = []
        # Through JSON, so that it compares equal to a stored one: tuples become lists.
        self._command = json.loads(json.dumps({**command, "format of the unfinished files": _FORMAT}))
        settings = {name: value for name, value in self._command.items() if name != "inputs"}
        # A worker may outlive a killed command by one piece, and finish it while another command is writing.
        self._settings = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
        # Before anything is looked at: until then, another process may still be writing the dataset.
        self._lock = self._take_lock()
        try:
            self._begin(overwrite)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> Any:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = (self.folder / "lock").open("ab")
            except FileNotFoundError:  # its process has finished, and deleted the folder
                continue
            is_ours = False
            try:
                if is_locked_elsewhere(lock.fileno()):
                    raise RuntimeError(
                        f"{self.prefix} is being written by another process; wait for it, or give another --output"
                    )
                with contextlib.suppress(FileNotFoundError):  # deleted between opening and locking
                    is_ours = os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name))
            finally:
                if not is_ours:
                    lock.close()
            if is_ours:
                return lock

    def _begin(self, overwrite: bool) -> None:
        for name in (self.prefix + ".bin", self.prefix + ".idx"):
            # A process that died between the final names has published some files already, and may go on.
            if os.path.lexists(name) and not overwrite and not (self.folder / "publishing").exists():
                raise FileExistsError(f"{name} already exists; give another --output, or replace it with --overwrite")
        begun = self._read_command(overwrite)
        other = None if begun is None else _difference(begun, self._command)
        if other is not None and not overwrite and self._has_work():
            raise ValueError(
                f"{self.folder} was started with {other}; repeat that command to resume, or start again with"
                " --overwrite"
            )
        if begun is None or other is not None:
            (self.folder / "command").unlink(missing_ok=True)  # before the work that it describes is lost
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
        partial = self.folder / "command.partial"
        partial.write_text(json.dumps(self._command), encoding="utf-8")
        os.replace(partial, self.folder / "command")

    def _read_command(self, overwrite: bool) -> dict[str, Any] | None:
        """Return the stored command, or None if there is none to resume; raise ValueError if it is damaged."""
        try:
            begun = json.loads((self.folder / "command").read_text(encoding="utf-8"))
            if isinstance(begun, dict):
                return begun
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            pass
        if overwrite:
            return None
        raise ValueError(f"{self.folder / 'command'} is damaged; start again with --overwrite")

    def _has_work(self) -> bool:
        return (self.folder / "command").exists() and any(self.folder.glob("*.piece"))

    def missing(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces without an intact file, with the path of that file as ``output``; count the others."""
        for piece in pieces:
            path = str(self.folder / f"{piece['name']}-{self._settings}.piece")
            self._pieces.append(path)
            try:
                counts = read_tokens(path)[0]
            except (FileNotFoundError, ValueError):
                yield {**piece, "output": path}
            else:
                self.add(piece, counts, resumed=True)

    def add(self, piece: Piece, counts: dict[str, int], resumed: bool = False) -> None:
        """Count a finished piece; ``counts`` come from its file."""
        done = {name: getattr(self.progress, name) + count for name, count in counts.items()}
        self.progress = Progress(
            pieces=self.progress.pieces + 1,
            input_bytes=self.progress.input_bytes + piece["input_bytes"],
            resumed_bytes=self.progress.resumed_bytes + (counts["text_bytes"] if resumed else 0),
            **done,
        )

    def publish(self, dtype: type[np.generic], facts: dict[str, Any]) -> None:
        """Make the final files and give them their names, replacing existing ones; ``facts`` go to the facts file."""
        tokens, index, facts_file, checksums = (
            str(self.folder / name) for name in ("tokens", "index", "facts", "checksums")
        )
        lengths = bytearray()
        with open(tokens, "wb") as file:
            for path in self._pieces:
                _, of_documents, of_piece = read_tokens(path)
                lengths += of_documents
                file.write(of_piece)
            _flush(file)
        write_index(index, np.frombuffer(lengths, "<i4"), dtype)
        with open(facts_file, "w", encoding="utf-8") as file:
            file.write(json.dumps(facts, indent=1) + "\n")
            _flush(file)
        write_dataset_checksums(checksums, tokens, index, facts_file)
        # If the process dies between two names, the next run finds ``publishing`` and does all of this again.
        (self.folder / "publishing").touch()
        sync_directory(str(self.folder))
        if os.path.lexists(self.prefix + ".idx"):
            os.unlink(self.prefix + ".idx")  # the old index must not point into the new tokens
        os.replace(facts_file, facts_path(self.prefix))
        os.replace(checksums, checksums_path(self.prefix))
        os.replace(tokens, self.prefix + ".bin")
        os.replace(index, self.prefix + ".idx")  # last: without the index there is no dataset yet
        sync_directory(os.path.dirname(os.path.abspath(self.prefix)))
        self.discard()

    def discard(self) -> None:
        """Delete the folder."""
        (self.folder / "command").unlink()  # first: without it, what a crash here leaves is not resumed
        shutil.rmtree(self.folder)
        self._lock.close()

    def close(self) -> None:
        """Let other processes write the dataset; delete the folder if it holds no finished work."""
        if self._lock.closed:
            return
        if not self._has_work():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _difference(begun: dict[str, Any], command: dict[str, Any]) -> str | None:
    """Return a phrase about what makes the finished pieces useless; None if some of them may be of use."""
    for name in {**begun, **command}:
        before, now = begun.get(name), command.get(name)
        if before != now and name != "inputs":
            return f"another {name}" if isinstance(now, list) else f"{name} {before!r}"
    before, now = begun["inputs"], command["inputs"]
    unchanged = {tuple(file) for file in before} & {tuple(file) for file in now}
    if unchanged:
        return None
    paths = [file[0] for file in before]
    changed = next((file[0] for file in now if file[0] in paths), None)
    return f"other inputs ({len(before)} files, now {len(now)})" if changed is None else f"another content of {changed}"
