# SPDX-License-Identifier: Apache-2.0
"""The workers of ``lightning-mcore preprocess``, and their results in input order.

One thread sends pieces and receives tokens. A worker has one piece in progress and one in its pipe, so that it need not
wait. Early results wait for their turn; a limit on how far the fastest worker may run ahead also limits memory.

``run.py`` owns the workers; ``worker.py`` is what they run.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from lightning_mcore.data.preprocess import worker as preprocess_worker
from lightning_mcore.data.preprocess.worker import Piece

_IN_HAND = 2  # pieces of a worker: the current one and the next one
_AHEAD = 8  # pieces per worker, from the first missing one to the last one sent
_STANDARD_ERROR = 2


@dataclass(frozen=True)
class Tokens:
    """The tokens of a piece."""

    tokens: bytes  # of all documents, as in the .bin file
    lengths: bytes  # tokens of each document, i32
    empty: int  # documents without tokens, which are left out
    text_bytes: int  # in UTF-8


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
            process.kill()  # a worker has nothing to lose
            process.wait()
        self._processes.clear()

    def results(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, Tokens]]:
        """Yield each piece with its tokens, in order.

        Raises ValueError if a document cannot be read, after the pieces before it, and RuntimeError if a worker died or
        failed.
        """
        # given and answers have pieces by number until their turn; in_hand has the numbers that each worker works on,
        # oldest first. With two workers and answers in the order 1, 0, 2, piece 1 waits until 0 has been yielded.
        given: dict[int, Piece] = {}
        answers: dict[int, Any] = {}
        in_hand: dict[Connection, list[int]] = {pipe: [] for pipe in self._processes}
        source = enumerate(pieces)
        exhausted, turn = False, 0
        while True:
            # First one piece for every worker, then the second: the last pieces are spread over all of them.
            for depth in range(_IN_HAND):
                for pipe, numbers in in_hand.items():
                    if exhausted or len(numbers) > depth or len(given) >= _AHEAD * self._count:
                        continue
                    if (following := next(source, None)) is None:
                        exhausted = True
                        continue
                    number, given[following[0]] = following
                    self._send(pipe, given[number])
                    numbers.append(number)
            if not given:
                return
            ready = wait([pipe for pipe, numbers in in_hand.items() if numbers])
            for pipe in in_hand:
                if pipe in ready:
                    answers[in_hand[pipe].pop(0)] = self._receive(pipe)
            while turn in answers:
                yield given.pop(turn), _opened(answers.pop(turn))
                turn += 1

    def _send(self, pipe: Connection, what: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker died; reading from it raises
            pipe.send(what)

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self._processes[pipe].wait()
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        hint = ", perhaps because memory ran out; try fewer --workers" if code == -signal.SIGKILL else ""
        raise RuntimeError(f"a worker died with {how}{hint}; repeat the command to resume from the finished work")


def _opened(answer: tuple[Any, ...]) -> Tokens:
    kind, *values = answer
    if kind == "refused":
        raise ValueError(values[0])
    if kind == "failed":
        raise RuntimeError(f"a worker failed; repeat the command to resume from the finished work:\n{values[0]}")
    return Tokens(*values)
