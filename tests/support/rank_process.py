# SPDX-License-Identifier: Apache-2.0
"""One rank's side of ``tests/support/ranks.py``: what happens in the process that the launcher started.

The process makes itself independent of its siblings, sends what it prints to a file, opens the process group, calls the
function, and reports one :class:`Report` over its pipe. Everything that can go wrong is inside the ``try``: whatever it
is, the test must hear of it.
"""

import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Asks for the stacks. Not SIGUSR1, which belongs to Lightning, nor another signal with a name where there are more: at
# the end of a run Lightning puts the handlers of all of those back, and takes faulthandler's for none.
STACK_SIGNAL = signal.SIGRTMIN + 1 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_CONSEQUENCES = ("connection closed by peer", "connection reset by peer", "broken pipe", "connect error")


@dataclass(frozen=True)
class Report:
    """What became of one rank: a result, or the text that says what went wrong."""

    result: Any
    error: str | None
    moment: float  # seconds of time.monotonic(), which all processes of a machine share

    @classmethod
    def of_error(cls, error: str) -> "Report":
        """Return the report of a failure noticed now."""
        return cls(None, error, time.monotonic())

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only noticed that another one had gone."""
        return self.error is not None and any(sign in self.error.lower() for sign in _CONSEQUENCES)


def rank_main(
    rank: int,
    world_size: int,
    folder: str,
    connection: Connection,
    environment: dict[str, str],
    backend: str | None,
    timeout: float,
    job: bytes,
) -> None:
    """Be one rank: set the process up, call the function, report.

    A rank that has its result keeps its process group open until the launcher has heard of all ranks: a peer may still
    be connecting. A rank that failed leaves at once, which ends what its peers are waiting for.
    """
    _isolate()
    _redirect_output(Path(folder) / f"output_{rank}")
    with open(Path(folder) / f"stack_{rank}", "w") as stack:
        faulthandler.enable()
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
        os.environ.clear()
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            _seed()
            _open_process_group(backend, rank, world_size, folder, timeout)
            function, args, kwargs = pickle.loads(job)
            report = pickle.dumps(Report(function(*args, **kwargs), None, time.monotonic()))
        except BaseException as error:  # SystemExit and pytest's outcomes too
            connection.send_bytes(pickle.dumps(Report.of_error(_describe_error(error))))
        else:
            connection.send_bytes(report)
            connection.recv_bytes()
        _close_process_group()
        _join_threads()
        faulthandler.unregister(STACK_SIGNAL)


def _seed() -> None:
    """Begin with the same random numbers in each run: what the forkserver imports seeds torch at random."""
    import random

    import numpy
    import torch

    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _open_process_group(backend: str | None, rank: int, world_size: int, folder: str, timeout: float) -> None:
    """Open the default process group; ``None`` for the backend leaves that to the function."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        _share_gloo_device()
    if backend is not None:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=2 * timeout),  # later than the launcher's: a hang is shown by stacks
        )


def _share_gloo_device() -> None:
    """Give all gloo groups of this rank one device, made with the first of them, instead of one to each.

    A device has a thread that wakes a hundred times a second, and Megatron opens 17 groups: a rank that only waits uses
    1.7 % of a core for them, and a rank that trains with tensor parallelism a tenth of its time.
    """
    from torch.distributed import distributed_c10d

    of_torch: Any = distributed_c10d.ProcessGroupGloo

    @functools.cache
    def device() -> Any:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return of_torch.create_device(interface=interface) if interface else of_torch.create_default_device()

    class OnOneDevice(of_torch):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_of_later_releases: Any) -> None:
            options = of_torch._Options()
            options._devices, options._threads, options._timeout = [device()], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice


def _close_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _isolate() -> None:
    """Be an ordinary process: lead a process group of one's own, fork workers as usual, and end with pytest."""
    os.setsid()
    gc.freeze()  # half a million objects of the imports: looking through them would copy the memory they share
    gc.enable()  # tests/support/economy.py
    multiprocessing.set_start_method(None, force=True)  # the platform's, not the fork server that started this rank
    if sys.platform == "linux":
        set_parent_death_signal = 1  # the parent is the fork server, which ends with pytest
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _redirect_output(path: Path) -> None:
    """Send what Python and C++ print to a file."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _join_threads() -> None:
    """Wait for the threads the function left; one that never ends is a hang, seen at the timeout."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _describe_error(error: BaseException) -> str:
    """Return the traceback; a bare ``assert`` also shows the local variables of its frame."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, AssertionError) and not str(error):
        frame = traceback.TracebackException.from_exception(error, capture_locals=True).stack[-1]
        text += "".join(f"    {name} = {value[:500]}\n" for name, value in (frame.locals or {}).items())
    return f"{type(error).__name__}: {error}\n{text}"
