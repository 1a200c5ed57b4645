# SPDX-License-Identifier: Apache-2.0
"""A failure on one rank ends the run on all ranks, within seconds and with its cause.

A rank that fails leaves the others in a collective that never completes. They would wait for the process group's
timeout, half an hour by default, and then report nothing about the cause. So during training each rank has a thread
that listens on a TCP connection to rank 0. Nothing is sent during a step, and no heartbeat is needed: when a process
ends, for whatever reason, the kernel closes its connection.

=====================================================  ==============================================================
what happens on a rank                                 what the others do
=====================================================  ==============================================================
an exception leaves ``fit``                            end by themselves, or are ended 10 seconds later
the process ends: killed, ``os._exit``, a crash        the same
it is stopped (SIGSTOP) while another rank on its      after 10 seconds it is killed; then the same
machine runs
all are stopped, as when a job is suspended            nothing: the threads that count the seconds are stopped too
it is slow: a debugger, a compiler, a long evaluation  nothing
all raise an exception                                 nothing: each leaves ``fit`` by itself, and may run again
=====================================================  ==============================================================

A rank is ended by its own thread (``os._exit``), because its main thread may wait in a collective where no Python code
runs. This happens only inside a run: one call of ``fit``, ``validate``, ``test`` or ``predict``. The next run begins
when all ranks have reached it, and raises if a rank cannot reach it.

Before all ranks are connected, the ranks that another rank has started end with that rank. Ranks that a scheduler has
started must be ended by the scheduler (``srun --kill-on-bad-exit``; torchrun always does it).

After a run, a rank that has started others waits for them at its exit, up to 20 seconds. If one fails, it fails too.

The strategy launches runs with :class:`Launcher`, calls :func:`begin` with the process groups, and calls
:func:`mark_cleanup_done` at the end of its teardown. Before a save, :func:`collectives_usable` tells whether
collectives still work.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import psutil
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_mcore.parallel.rank_connections import Connections, Lines, connect, receive, send
from lightning_mcore.parallel.rank_hub import Hub
from lightning_mcore.parallel.rank_process import (
    end_of_rank,
    end_process,
    flush,
    is_alive,
    is_of_a_connection,
    neighbour_of,
    say,
    start_thread,
    this_process,
    without_a_word,
)

_GRACE = 10.0  # seconds for a rank to end by itself, once another has failed
_LAST_GRACE = 20.0  # seconds for the rank that failed to clear up, if the others have not failed too
_MEETING = 15.0  # seconds to wait for the exceptions of the others; more than _GRACE, less than _LAST_GRACE
_STOPPED = 10  # seconds that a rank may be stopped while another is not
_TICK = 1.0
_CAUSE_TIMEOUT = 1.0

SET_PARENT_DEATH_SIGNAL = 1  # of prctl

LAUNCHED_BY = "LIGHTNING_MCORE_LAUNCHED_BY"
"""The process that started this rank, in the rank's environment."""


# ---- what the rest of the package calls


@dataclasses.dataclass
class _ProcessState:
    """The state of this process."""

    runs: int = 0  # the same number on every rank
    is_running: bool = False
    # The id() of the error that ended the last run; a reference would keep alive everything it leads to.
    failure: int | None = None
    children: Sequence[subprocess.Popen[bytes]] = ()
    connected: threading.Event = dataclasses.field(default_factory=threading.Event)
    watch: "_Watch | None" = None
    world: Callable[[], Any] = lambda: None  # returns the group of `watch` while it exists


_process_state = _ProcessState()


@contextlib.contextmanager
def run(children: Callable[[], Sequence[subprocess.Popen[bytes]]]) -> Iterator[None]:
    """Tell the other ranks about an exception that leaves the ``with`` block, and end it if another rank fails.

    ``children`` returns the ranks that this process has started.
    """
    if _process_state.is_running:
        yield
        return
    _process_state.runs += 1
    _process_state.is_running, _process_state.failure, _process_state.connected = True, None, threading.Event()
    _watch_the_start(children, _process_state.connected)
    try:
        yield
    except BaseException as error:
        if _process_state.watch is not None:
            _process_state.watch.fail(error)
        _process_state.failure = id(error)
        _process_state.children = () if _process_state.connected.is_set() else children()
        _end_soon_at_exit()
        raise
    else:
        if _process_state.watch is not None:
            _process_state.watch.leave()
    finally:
        _process_state.is_running = False
        _process_state.connected.set()


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, with a watch over the runs that go through it."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function in :func:`run`."""
        with run(lambda: self.procs):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[LAUNCHED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LAUNCHED_BY]
        atexit.register(_fail_with_ranks, self.procs)


def begin(positions: Mapping[str, int], timeout: float) -> None:
    """Wait up to ``timeout`` seconds for all ranks to reach this run, then watch them; collective over the world.

    ``positions`` counts the collectives that this rank has issued in each group. Raises RuntimeError if a rank cannot
    reach this run, or a failed run left ranks with different counts.
    """
    if not _process_state.is_running or dist.get_world_size() == 1:
        return
    world: Any = dist.group.WORLD
    if _process_state.world() is not world:
        if _process_state.watch is not None:
            _process_state.watch.close()
        _process_state.watch, _process_state.world = _open_watch(), weakref.ref(world)
        if _process_state.watch is not None:
            weakref.finalize(world, _process_state.watch.close).atexit = False
    _process_state.connected.set()
    if _process_state.watch is not None:
        _process_state.watch.enter(positions, timeout)


def mark_cleanup_done() -> None:
    """Tell the watch that this rank, if it has failed, has finished clearing up."""
    if _process_state.watch is not None:
        _process_state.watch.mark_cleanup_done()


def collectives_usable() -> bool:
    """Return whether this rank may still use collectives: after an exception, only if all ranks have raised one.

    This cannot be found out with a collective, because ranks without an exception are waiting in a different one.
    """
    return not has_failed() or (_process_state.watch is not None and _process_state.watch.all_failed(_MEETING))


def has_failed() -> bool:
    """Return whether this rank has raised an exception in this run and is clearing up."""
    return _process_state.watch is not None and _process_state.watch.has_failed


# ---- the thread of one rank; rank_hub.py decides what it hears


class _Watch:
    """The thread of one rank, which listens to rank 0; ``neighbour`` is another rank of this machine."""

    def __init__(
        self, rank: int, size: int, connections: Connections, neighbour: tuple[int, psutil.Process] | None
    ) -> None:
        self._me = f"rank {rank} of {size}"
        self._connections = connections
        self._neighbour = neighbour
        self._changed = threading.Condition()
        self._run = 0
        self._is_in = False
        self._error: BaseException | None = None  # why this rank failed
        self._cause: str | None = None  # why another rank failed
        self._answer: tuple[int, str | None] = (0, None)
        self._verdict: bool | None = None  # whether all ranks failed, once no rank is in the run
        self._absent: int | None = None
        self._first_has_left = False
        self._deadline: float | None = None
        self._seconds_stopped = 0.0
        start_thread("rank watch", self._listen)

    @property
    def has_failed(self) -> bool:
        """Whether this rank has failed and is clearing up."""
        return self._error is not None

    def enter(self, positions: Mapping[str, int], timeout: float) -> None:
        """Begin a run when all ranks do."""
        with self._changed:
            self._start(is_in=True)
            self._send("enter", self._run, dict(positions))
            refusal: str | None = f"not all ranks have reached this run in {timeout:g} s"
            if self._changed.wait_for(lambda: self._is_answered or self._cause or self._absent is not None, timeout):
                refusal = self._answer[1] if self._is_answered else self._cause
            if self._absent is not None:
                refusal = f"rank {self._absent} has ended"
            if refusal is not None:
                raise RuntimeError(f"{refusal}, but a run needs all ranks; restart the script")

    @property
    def _is_answered(self) -> bool:
        return self._answer[0] == self._run

    def leave(self) -> None:
        """End a run."""
        with self._changed:
            if self._is_in and self._run == _process_state.runs:
                self._is_in, self._deadline = False, None
                self._send("left", self._run)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, and add to the error what is known about the cause."""
        with self._changed:
            if self._run != _process_state.runs:
                self._start(is_in=True)
            if is_of_a_connection(error):  # often follows another rank's error
                self._wait_for_cause()
            is_first = self._cause is None or self._cause.endswith(end_of_rank(error))
            error.add_note(f"(on {self._me})" if is_first else f"(on {self._me}, after {self._cause})")
            self._error = error
            self._deadline = time.monotonic() + _LAST_GRACE
            self._send("failed", self._run, end_of_rank(error))
            self.end_stopped_neighbour()
            self._wait_for_cause()
        # Such an error prints no traceback. After Ctrl-C, the strategy says how to continue.
        if is_first and not isinstance(error, Exception | KeyboardInterrupt):
            say(f"{self._me} {end_of_rank(error)}")

    def _wait_for_cause(self) -> None:
        self._changed.wait_for(lambda: self._cause is not None or self._absent is not None, _CAUSE_TIMEOUT)

    def mark_cleanup_done(self) -> None:
        """End the run of a rank that has failed."""
        with self._changed:
            if self._error is not None:
                self._error, self._is_in, self._deadline = None, False, None
                self.end_stopped_neighbour()

    def all_failed(self, timeout: float) -> bool:
        """Wait until no rank is in this run any more; return whether all have failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None or self._absent is not None, timeout)
            return bool(self._verdict) and self._absent is None

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_in, self._deadline, self._first_has_left = False, None, True
        self._connections.close()

    def _start(self, is_in: bool) -> None:
        self._run, self._is_in = _process_state.runs, is_in
        self._error = self._cause = self._verdict = self._deadline = None
        self._first_has_left = False

    def _send(self, name: str, *arguments: Any) -> None:
        send(self._connections.own, name, *arguments)

    # ---- the thread

    def _listen(self) -> None:
        self._connections.own.settimeout(_TICK)
        lines = Lines()
        while True:
            received = receive(self._connections.own)
            with self._changed:
                for name, *arguments in lines.split(received or b""):
                    getattr(self, f"_on_{name}")(*arguments)
                if received == b"":
                    self._on_end()
                self._look_after_neighbour()
                self._changed.notify_all()
            if received == b"":
                break
            self._end_in_time()
        while self._deadline is not None:
            time.sleep(_TICK)
            self._end_in_time()

    def _on_answer(self, run: int, refusal: str | None) -> None:
        self._answer = (run, refusal)

    def _on_cause(self, run: int, cause: str) -> None:
        if run != _process_state.runs or self._cause is not None:
            return
        self._cause = cause
        if self._is_in and self._error is None:
            self._deadline = time.monotonic() + _GRACE

    def _on_verdict(self, run: int, all_failed: bool) -> None:
        if run == self._run:
            self._verdict = all_failed
            if all_failed and self._absent is None:
                self._deadline = None

    def _on_absent(self, rank: int) -> None:
        self._absent = rank
        if self._error is not None and self._deadline is None:
            self._deadline = time.monotonic() + _LAST_GRACE

    def _on_first_has_left(self) -> None:
        self._first_has_left = True

    def _on_end(self) -> None:
        """Note that rank 0 has ended."""
        self._on_absent(0)
        if self._is_in and not self._first_has_left:
            self._on_cause(self._run, without_a_word(0))

    def _look_after_neighbour(self) -> None:
        """End a rank that is stopped too long. Time is counted in ticks of this rank, so it stops if this rank does."""
        self._seconds_stopped = self._seconds_stopped + _TICK if self._is_in and self._neighbour_is_stopped() else 0.0
        if self._seconds_stopped > _STOPPED:
            assert self._neighbour is not None
            rank = self._neighbour[0]
            cause = f"rank {rank} was stopped (SIGSTOP) for {_STOPPED} s while others were not, and was killed"
            self._send("stopped", self._run, cause)
            if rank == 0:  # it does not receive this
                self._on_cause(self._run, cause)
            self.end_stopped_neighbour()

    def _neighbour_is_stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return self._neighbour is not None and self._neighbour[1].status() == psutil.STATUS_STOPPED
        return False

    def end_stopped_neighbour(self) -> None:
        """End a rank that is stopped: it would not learn that the run is over, and would stay for ever."""
        if self._neighbour is not None and self._neighbour_is_stopped():
            with contextlib.suppress(psutil.Error):
                self._neighbour[1].kill()

    def _end_in_time(self) -> None:
        with self._changed:
            if self._deadline is None or time.monotonic() < self._deadline:
                return
            self.end_stopped_neighbour()
            if self._error is None:
                end_process(f"{self._me} is ended, because {self._cause}")
            end_process(f"{self._me} is ended: it failed, and has not cleared up in {_LAST_GRACE:g} s", self._error)


def _open_watch() -> _Watch | None:
    """Let all ranks watch; collective over the world."""
    connected = connect(this_process())
    if connected is None:
        return None
    connections, processes = connected
    rank = dist.get_rank()
    if connections.of_first:
        Hub(connections.of_first)
    return _Watch(rank, len(processes), connections, neighbour_of(rank, processes))


# ---- before all ranks are connected, and after a failure


@functools.cache
def _end_soon_at_exit() -> None:
    """Limit the time that a failed process takes to exit: exit handlers may wait for ranks that are gone."""
    exits = threading.Event()

    def end_soon() -> None:
        exits.wait()
        time.sleep(_GRACE)
        end_process(f"this process is ended: its run failed, and it has not ended by itself in {_GRACE:g} s")

    def at_exit() -> None:
        if _process_state.failure is None:
            return
        flush()
        exits.set()
        if _process_state.watch is not None:
            _process_state.watch.end_stopped_neighbour()
        if id(getattr(sys, "last_value", None)) == _process_state.failure:
            for child in _process_state.children:
                child.kill()

    start_thread("rank watch ends", end_soon)  # now: from Python 3.12 on, no thread starts while Python exits
    atexit.register(at_exit)


def _fail_with_ranks(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Exit with code 1 if a rank that this process started fails after the run, when nothing else watches it."""
    if _process_state.failure is not None or getattr(sys, "last_value", None) is not None:
        return
    end = time.monotonic() + _LAST_GRACE
    while time.monotonic() < end:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            break
        time.sleep(_TICK / 20)
    for rank, child in enumerate(children, start=1):
        if child.returncode:
            end_process(f"rank {rank} of this machine ended with exit code {child.returncode} after the run")


def _watch_the_start(children: Callable[[], Sequence[subprocess.Popen[bytes]]], connected: threading.Event) -> None:
    """Notice ranks that end before all are connected, if one has started the others."""
    launcher = int(os.environ.pop(LAUNCHED_BY, "0"))  # not for programs that this rank starts
    if os.getppid() == launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)  # wakes it up if it is stopped

    def watch() -> None:
        while not connected.wait(_TICK / 4):
            if launcher and not is_alive(launcher):
                end_process(
                    "this rank is ended, because the process that started it ended before all ranks were connected"
                )
            for rank, child in enumerate(children(), start=1):
                if child.poll():
                    say(f"rank {rank} of this machine ended with exit code {child.returncode} before all had started")
                    return

    start_thread("rank watch starts", watch)
