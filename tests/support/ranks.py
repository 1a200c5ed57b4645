# SPDX-License-Identifier: Apache-2.0
"""Run a function on N ranks from inside an ordinary pytest test.

A fresh process that imports torch, Lightning and megatron-core needs several seconds; four of them at once need 15 to
20. Here a *fork server* imports them, this package and the models of the tests, once for each test session: under
pytest-xdist its controller starts the server, and the workers share it. Every rank is a fork of that clean,
single-threaded process that never touched a GPU: four ranks start in about 0.2 s. That is what makes it affordable to
test every parallel layout on a laptop.

The ranks meet through a ``FileStore`` in a temporary folder, so no port is chosen and tests may run under
pytest-xdist. Each rank reports over a pipe of its own, so a rank that is killed cannot damage the report of another.
What is handed over is pickled plainly, by value: a tensor never outlives the process that holds its memory.

What a failure shows, and how:

* a rank that raised: its traceback. Its peers often fail a moment later with "connection closed by peer"; the failure
  that is shown is the first one that is not such a consequence.
* a rank that died: its exit code or signal.
* ranks that hang: the Python stack of every thread of each of them, written at the timeout by ``faulthandler``, which
  works while the rank sits inside a collective.
* whatever the ranks printed is printed by the test, rank by rank, so that pytest shows it with the failure.

Rank functions must be importable (module level, not a lambda), because a rank receives them by name.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from tests.support.rank_process import STACK_SIGNAL, Report, rank_main

_PRELOAD = [  # nothing that starts a thread
    "tests.support.economy",
    "lightning_mcore",  # before megatron-core, which may find TransformerEngine without its CUDA library
    "torch",
    "lightning.pytorch",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.models.gpt",
    "lightning_mcore.arguments.build",
    "lightning_mcore.arguments.llamafactory.run",
    "lightning_mcore.interop.callback",
    "lightning_mcore.interop.export",
    "lightning_mcore.hf.families",
    "lightning_mcore.models.gpt",
    "lightning_mcore.models.vision",
    "lightning_mcore.planning.suggest",
    "lightning_mcore.cli.fit",
    "lightning_mcore.cli.hf",
    "lightning_mcore.cli.plan",
    "tests.parity.hf_training",
    "tests.parity.lightning_loop",
    "tests.support.hf_models",
    "tests.support.tiny",
    "tests.support.toy",
    "torch.profiler._cupti_monitor",  # of Lightning's trainer
    "torch.utils.serialization.config",  # of a save
    "encodings.idna",  # of a socket's address
    "transformers.integrations.integration_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.training_args_seq2seq",
    "datasets",
    "pytest",
    "tests.support.warm",  # the last
]
_ROOT = Path(__file__).parents[2]
_OUTPUT_LIMIT = 20_000  # characters shown of what one rank printed
Test = TypeVar("Test", bound=Callable[..., None])


class RanksFailedError(pytest.fail.Exception):
    """At least one rank raised, died or did not finish in time.

    Attributes:
        errors: The text of the failure, for each rank that raised or died.
        results: What the function returned, for each rank that returned.
        unfinished: The ranks that were still running when the launcher gave up.
    """

    def __init__(self, message: str, errors: dict[int, str], results: dict[int, Any], unfinished: list[int]) -> None:
        super().__init__(message, pytrace=False)
        self.errors = errors
        self.results = results
        self.unfinished = unfinished


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    grace: float = 2.0,
    backend: Literal["gloo", "nccl"] = "gloo",
    open_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank and return the results in rank order.

    Args:
        world_size: Number of ranks; 1 works too, so that a reference run takes the same path.
        function: A function at the top level of an importable module; its result must be picklable.
        args: Positional arguments of the function.
        timeout: Seconds until ranks that have not finished are a failure. The environment variable
            ``RANKS_TIMEOUT_SCALE`` multiplies it, for a slow or crowded machine.
        grace: Seconds that the other ranks are left after the first failure, to finish or to report theirs.
        backend: ``"nccl"`` starts the ranks by ``spawn``, because a process that has touched CUDA must not be forked.
        open_group: Whether the default process group is open when the function is called. Without it the environment
            holds all that ``env://`` needs.
        kwargs: Keyword arguments of the function.

    Returns:
        The result of each rank.

    Raises:
        RanksFailedError: A rank raised, died, or did not finish in time.
    """
    job = pickle.dumps((function, args, kwargs))
    timeout *= float(os.environ.get("RANKS_TIMEOUT_SCALE", "1"))
    context = start_context(backend)
    environment = dict(os.environ) | _common_environment(world_size)
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder = Path(name)
        ranks = [_Rank(rank, world_size, folder) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start(context, (environment, backend if open_group else None, timeout, job))
            stacks = {rank.rank: rank.read_stack() for rank in _watch(ranks, timeout, grace)}
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.print_output()
        return _results(ranks, stacks, timeout)


def on_ranks(world_size: int | str, timeout: float = 60.0, open_group: bool = True) -> Callable[[Test], Test]:
    """Let every rank run the body of a test, with its fixtures and parameters pickled.

    For a test that only looks at what one rank knows at a time::

        @on_ranks(2)
        def test_ranks_agree_on_their_number(tmp_path: Path) -> None:
            assert dist.get_world_size() == 2

    Args:
        world_size: Number of ranks, or the name of the parameter that is it, or that has it.
        timeout: As in :func:`run_ranks`.
        open_group: As in :func:`run_ranks`.

    Returns:
        What decorates the test.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            given = (test.__module__, test.__name__, args, kwargs)
            size = kwargs[world_size] if isinstance(world_size, str) else world_size
            run_ranks(getattr(size, "world_size", size), _call_wrapped, *given, timeout=timeout, open_group=open_group)

        return run  # type: ignore[return-value]

    return decorate


in_a_rank = on_ranks(1, timeout=180, open_group=False)
"""A loader with workers forks them. That is safe in a process which has no threads, as a rank is, and not in one of
pytest-xdist: there a worker hangs or dies now and then."""


def _call_wrapped(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)


class _Rank:
    """The launcher's side of one rank: its process, its pipe, and the files it writes."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.world_size = world_size
        self.folder = folder
        self.report: Report | None = None
        self.process: BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self, context: Any, settings: tuple[dict[str, str], str | None, float, bytes]) -> None:
        """Start the process; ``settings`` are the arguments of :func:`rank_main` that all ranks share."""
        self._connection, theirs = context.Pipe()
        arguments = (self.rank, self.world_size, str(self.folder), theirs, *settings)
        self.process = context.Process(target=rank_main, args=arguments, name=f"rank {self.rank}")
        self.process.start()
        theirs.close()

    @property
    def exited(self) -> bool:
        """Whether the process has ended."""
        return self.process is not None and self.process.exitcode is not None

    @property
    def failed(self) -> bool:
        """Whether the rank raised or died."""
        return self.report is not None and self.report.error is not None

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when this rank has something new to tell: its pipe, its end."""
        assert self.process is not None
        return ([] if self.report else [self._connection]) + ([] if self.exited else [self.process.sentinel])

    def update(self) -> None:
        """Take in a report that has arrived, or the end of the process."""
        assert self.process is not None
        assert self._connection is not None
        code = self.process.exitcode  # read before the pipe: what a rank sent before its end is in the pipe by then
        if self.report is None and self._connection.poll():
            try:
                self.report = pickle.loads(self._connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                pass  # it died; its exit code says more
            except Exception:
                self.report = Report.of_error(f"its result cannot be read\n{traceback.format_exc()}")
        if code is not None and self.report is None:
            self.report = Report.of_error(f"died with {_describe_exit(code)}")
        elif code and not self.failed:
            self.report = Report.of_error(f"returned a result, then died with {_describe_exit(code)}")

    def release(self) -> None:
        """Let a rank that has returned its result close its process group and end."""
        assert self._connection is not None
        with contextlib.suppress(BrokenPipeError):
            self._connection.send_bytes(b"")

    def read_stack(self) -> str:
        """Ask the running process for the Python stacks of its threads."""
        assert self.process is not None
        path = self.folder / f"stack_{self.rank}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNAL)
        deadline, size = time.monotonic() + 10.0, 0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            seen = path.stat().st_size if path.exists() else 0
            if size == seen > 0:  # it has stopped growing
                break
            size = seen
        text = path.read_text() if path.exists() else ""
        return text or f"no stack: the rank did not answer; its threads: {_thread_states(self.process.pid)}"

    def kill(self) -> None:
        """End the process and whatever it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the rank leads a process group of its own
        self.process.kill()
        self.process.join(10)

    def print_output(self) -> None:
        """Print what the rank printed."""
        path = self.folder / f"output_{self.rank}"
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        if len(text) > _OUTPUT_LIMIT:
            text = f"[{len(text) - _OUTPUT_LIMIT} characters left out]\n{text[-_OUTPUT_LIMIT:]}"
        if text:
            print(f"--- printed by rank {self.rank} of {self.world_size} ---\n{text}")


def _thread_states(pid: int | None) -> str:
    """Return what each thread of a process does, on Linux, such as "R python, D pt_autograd_0 in folio_wait_bit"."""
    states = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended since
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            waits_in = (thread / "wchan").read_text()
            states.append(f"{rest.split()[0]} {name}" + (f" in {waits_in}" if waits_in not in ("", "0") else ""))
    return ", ".join(states) or "none, so it has ended"


def _watch(ranks: list[_Rank], timeout: float, grace: float) -> list[_Rank]:
    """Wait until every rank has reported and ended, or a failure is ``grace`` seconds old.

    Returns:
        The ranks that kept the launcher waiting until the timeout.
    """
    deadline = time.monotonic() + timeout
    failed = False
    while not all(rank.report for rank in ranks) and time.monotonic() < deadline:
        _wait_for_news(ranks, deadline)
        if not failed and any(rank.failed for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + grace)
    if failed or not all(rank.report for rank in ranks):
        return [] if failed else [rank for rank in ranks if rank.report is None]
    for rank in ranks:
        rank.release()
    deadline = max(deadline, time.monotonic() + grace)
    while not all(rank.exited for rank in ranks) and time.monotonic() < deadline:
        _wait_for_news(ranks, deadline)
    for rank in ranks:
        rank.update()
    return [rank for rank in ranks if not rank.exited]


def _wait_for_news(ranks: list[_Rank], deadline: float) -> None:
    awaited = [item for rank in ranks for item in rank.waitables]
    if awaited:  # the last rank may have ended since it was asked
        wait_for_any(awaited, max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.update()


def _results(ranks: list[_Rank], stacks: dict[int, str], timeout: float) -> list[Any]:
    """Return every rank's result, or raise with the failure that explains the others."""
    reports = {rank.rank: rank.report for rank in ranks if rank.report is not None}
    errors = {rank: report for rank, report in reports.items() if report.error is not None}
    if not errors and not stacks:
        return [reports[rank.rank].result for rank in ranks]
    results = {rank: report.result for rank, report in reports.items() if report.error is None}
    unfinished = [rank.rank for rank in ranks if rank.rank not in reports]
    parts = []
    if errors:
        cause = min(errors, key=lambda rank: (errors[rank].is_consequence, errors[rank].moment))
        parts.append(f"rank {cause} of {len(ranks)} failed first: {errors[cause].error}")
        parts += [f"rank {rank}: {_last_line(errors[rank].error)}" for rank in sorted(errors) if rank != cause]
    if stacks:
        parts.append(f"ranks {sorted(stacks)} of {len(ranks)} did not finish in {timeout:g} s")
        for rank, stack in stacks.items():
            state = " (it had returned its result)" if rank in results else ""
            parts.append(f"--- stack of rank {rank}{state} ---\n{stack}")
    elif unfinished:
        parts.append(f"ranks {unfinished} were still running")
    texts = {rank: report.error or "" for rank, report in errors.items()}
    raise RanksFailedError("\n".join(parts), texts, results, unfinished)


def _last_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[-1][:300]


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name} (exit code {code})"
    return f"exit code {code}"


@functools.cache
def start_context(backend: str, *more: str) -> BaseContext:
    """Return how ranks are started; the first call of a session waits for the fork server's imports.

    Args:
        backend: Of the process groups.
        more: Modules that the fork server imports too, if it has not started yet.
    """
    if backend == "nccl":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *more])
    first = context.Process(target=_do_nothing)
    first.start()
    first.join()
    return context


def start_server() -> str:
    """Start a fork server that the workers of this process share; it ends with this process. Return its address."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address


def use_server(address: str) -> None:
    """Let this process start ranks as forks of the server at ``address``, which another process started."""
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # not the server's: a rank keeps what it is sent
    server.ensure_running = resource_tracker.ensure_running


def _do_nothing() -> None:
    """Stand in for a rank: the fork server starts, and imports, at the first process."""


def free_port() -> int:
    """Return a port that nobody listens on, and that the kernel gives to nobody who asks for any port.

    A rank that listens after ten seconds of imports would find a port of the kernel's own range taken by one of the
    connections that other tests open meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def program_environment() -> dict[str, str]:
    """Return the variables for a program that imports this checkout and starts its own ranks.

    They are free of those of any launcher around the tests.
    """
    foreign = ("PL_", "SLURM_", "MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    folders = [str(_ROOT / "tests" / "support" / "startup"), str(_ROOT), kept.get("PYTHONPATH")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "MASTER_PORT": str(free_port())}


def _common_environment(world_size: int) -> dict[str, str]:
    """Return the variables that all ranks share."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # for a rank that opens a group itself; the launcher's own meets at a file
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    } | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
