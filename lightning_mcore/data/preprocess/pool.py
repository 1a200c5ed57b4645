# SPDX-License-Identifier: Apache-2.0
"""The workers of ``lightning-mcore preprocess``: one thread gives them pieces, one at a time, and counts the results.

A worker writes the tokens of its piece to a file and sends back only counts, so the order of the results does not
matter. ``run.py`` owns the workers; ``worker.py`` is what they run.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from lightning_mcore.data.preprocess import worker as preprocess_worker
from lightning_mcore.data.preprocess.worker import Piece

_STANDARD_ERROR = 2


class Workers:
    """Processes that tokenise; a context manager that starts and ends them. ``settings`` go to ``worker.py``."""

    def __init__(self, count: int, settings: dict[str, Any]) -> None:
        self._count = count
        self._settings = settings
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Workers":
        try:
            for _ in range(self._count):
                self._start()
            for pipe in self._processes:  # a large tokenizer waits in the pipe until its reader has started
                self._send(pipe, self._settings)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _start(self) -> None:
        ours, theirs = Pipe()
        # -P keeps the worker's folder off sys.path, where its neighbours could hide packages of the same name.
        command = [sys.executable, "-P", preprocess_worker.__file__, str(theirs.fileno())]
        # Threads inside a worker would compete with the other workers.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,
            )
        self._processes[ours] = process

    def _end(self) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.kill()
            process.wait()
        self._processes.clear()

    def results(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, dict[str, int]]]:
        """Yield each piece with the counts of its file when it is finished, in any order.

        After a failure no more pieces are given out, but those in work are finished. Then the failure of the earliest
        piece is raised: ValueError if a document cannot be read, OSError if a file cannot be written, RuntimeError if a
        worker died or failed.
        """
        idle = list(self._processes)
        at_work: dict[Connection, tuple[int, Piece]] = {}
        failures: dict[int, Exception] = {}
        source = enumerate(pieces)
        while True:
            while idle and not failures and (following := next(source, None)) is not None:
                pipe = idle.pop()
                at_work[pipe] = following
                self._send(pipe, following[1])
            if not at_work:
                break
            ready = wait(list(at_work))
            for pipe in [pipe for pipe in at_work if pipe in ready]:
                number, piece = at_work.pop(pipe)
                idle.append(pipe)
                counts = self._receive(pipe)
                if isinstance(counts, Exception):
                    failures[number] = counts
                else:
                    yield piece, counts
        if failures:
            raise failures[min(failures)]

    def _send(self, pipe: Connection, what: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker died; reading from it says so
            pipe.send(what)

    def _receive(self, pipe: Connection) -> dict[str, int] | Exception:
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self._processes[pipe].wait()
        else:
            if kind == "done":
                counts: dict[str, int] = value
                return counts
            if kind == "refused":
                return ValueError(value)
            if kind == "disk":
                return OSError(*value)
            return RuntimeError(f"a worker failed; repeat the command to resume from the finished work:\n{value}")
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        hint = ", perhaps because memory ran out; try fewer --workers" if code == -signal.SIGKILL else ""
        return RuntimeError(f"a worker died with {how}{hint}; repeat the command to resume from the finished work")
