# SPDX-License-Identifier: Apache-2.0
"""The process of a rank, for ``rank_watch.py``: say what happened to it, end it, and find others on its machine."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import psutil
from lightning.pytorch.utilities.exceptions import SIGTERMException

_LENGTH = 200  # characters from the beginning and from the end of an error
_FLUSH = 1.0  # seconds for an output stream


def say(sentence: str) -> None:
    """Print a sentence for the user, whatever the main thread is doing."""
    with contextlib.suppress(OSError):
        os.write(2, f"error: {sentence}\n".encode(errors="replace"))


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    if len(text) > 2 * _LENGTH:
        text = f"{text[:_LENGTH]} ... {text[-_LENGTH:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def end_of_rank(error: BaseException) -> str:
    """Return what an error did to its rank, in words that follow the rank's name."""
    if isinstance(error, SIGTERMException):
        # 143 is 128 + SIGTERM. Without a code, PreemptionCheckpoint has already named the signal.
        return f"was ended by {signal.Signals(error.code - 128).name if isinstance(error.code, int) else 'a signal'}"
    return "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {describe(error)}"


def without_a_word(rank: int) -> str:
    """Return a sentence about a rank that ended and said nothing."""
    return f"rank {rank} ended without an error message (killed, out of memory, or a crash outside Python)"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``ranks 0, 1``; only the first eight are named."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def is_of_a_connection(error: BaseException) -> bool:
    """Return whether an error may come from a collective whose peer has ended."""
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in ("peer", "gloo", "nccl"))


def end_process(sentence: str, error: BaseException | None = None) -> NoReturn:
    """End this process, usually from a thread: its main thread may never run again."""
    text = "".join(traceback.format_exception(error)) if error is not None else ""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    say(sentence)
    if threading.current_thread() is threading.main_thread():
        flush()
    else:
        with contextlib.suppress(RuntimeError):  # from Python 3.12 on, no thread starts while Python exits
            start_thread("flush", flush).join(_FLUSH)  # the main thread may hold a stream's lock
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def flush() -> None:
    """Write out what this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream
            stream.flush()


def start_thread(name: str, function: Callable[[], object]) -> threading.Thread:
    """Start a thread that does not keep the process alive."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined] # so that a breakpoint does not stop it
    thread.start()
    return thread


def this_process() -> tuple[str, str, int, float]:
    """Return what identifies this process: its machine, container, number and start time."""
    with contextlib.suppress(OSError):
        return socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getpid(), psutil.Process().create_time()
    return socket.gethostname(), "", os.getpid(), psutil.Process().create_time()


def is_alive(process: int) -> bool:
    """Return whether there is a process with this number that has not ended."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False


def neighbour_of(rank: int, processes: Sequence[tuple[str, str, int, float]]) -> tuple[int, psutil.Process] | None:
    """Return the next rank on this machine, and its process; each rank looks after one other."""
    # Ranks 0 to 3 on one machine watch 1, 2, 3 and 0; a start time tells a new process with the same number.
    ring = [other for other, process in enumerate(processes) if process[:2] == processes[rank][:2]]
    other = ring[(ring.index(rank) + 1) % len(ring)]
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(processes[other][2])
        if other != rank and process.create_time() == processes[other][3]:
            return other, process
    return None
