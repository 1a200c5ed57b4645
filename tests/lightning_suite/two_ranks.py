# SPDX-License-Identifier: Apache-2.0
"""Runs each test of Lightning's suite on two ranks: two forks of the process that has collected the tests.

A rank sees what ``torchrun`` would show it, so a Trainer with two devices starts no process of its own. Both ranks run
the whole test, with one process group and temporary folder. Their outcomes are reported one by one, because a test of
a message that only rank 0 prints fails on rank 1 under every strategy.

Example: rank 1 raises in a test while rank 0 waits for it in a collective. Rank 0 is left ``GRACE_SECONDS`` to notice,
then both are killed: the test has failed on rank 1 with its error, and on rank 0 because it did not end.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

NUM_RANKS = 2
TIMEOUT_SECONDS = 60  # of one test
GRACE_SECONDS = 10  # for the other rank, once one has failed
_PRELOADED = (  # by the process that forks, so that not every rank of every test imports them
    "lightning_mcore.strategy.strategy",
    "lightning_mcore.checkpoint.model_state",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.models.gpt",
    "torch.utils.tensorboard",
)

Answer = tuple[list[dict[str, Any]], int]  # serialized reports of one rank, and how many Trainers it has switched


class TwoRanks:
    """A pytest plugin that runs each test in two forks and reports what became of it on both.

    Args:
        num_switched: Returns how many Trainers this process has switched so far.
        add_switched: Is told how many the ranks have switched.
    """

    def __init__(self, num_switched: Callable[[], int], add_switched: Callable[[int], None]) -> None:
        self._num_switched = num_switched
        self._add_switched = add_switched
        self._folder = Path()
        for name in _PRELOADED:
            importlib.import_module(name)

    @pytest.fixture
    def tmp_path(self) -> Path:
        """The same folder on both ranks."""
        return self._folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self) -> None:
        """Keep Lightning's conftest from leaving out all tests but those that need a process of their own."""
        os.environ.pop("PL_RUN_STANDALONE_TESTS", None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Close the process group, and with it the threads that watch its ranks, before Lightning looks for threads."""
        _destroy_dist_connection()
        watches = [thread for thread in threading.enumerate() if thread.name.startswith("rank watch")]
        if watches:
            gc.collect()  # the watch ends with the group's last reference
        for thread in watches:
            thread.join(GRACE_SECONDS)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run a test on two ranks instead of here."""
        with TemporaryDirectory(prefix="two_ranks_") as folder:
            self._folder = Path(folder)
            answers = self._run(item)
        hook = item.ihook
        for rank in range(NUM_RANKS):
            name = f"{item.nodeid} on rank {rank}"
            hook.pytest_runtest_logstart(nodeid=name, location=item.location)
            serialized, switched = answers.get(rank, ([], 0))
            self._add_switched(switched)
            for data in serialized:
                report = hook.pytest_report_from_serializable(config=item.config, data=data)
                hook.pytest_runtest_logreport(report=report)
            if not serialized:
                hook.pytest_runtest_logreport(report=_ended_early(item))
            hook.pytest_runtest_logfinish(nodeid=name, location=item.location)
        return True

    def _run(self, item: pytest.Item) -> dict[int, Answer]:
        """Fork the ranks, wait for their answers, and end what is left of them."""
        fork = multiprocessing.get_context("fork")
        pipes, processes = {}, []
        port = find_free_network_port()
        for rank in range(NUM_RANKS):
            pipes[rank], far_end = fork.Pipe(duplex=False)
            process = fork.Process(target=self._run_rank, args=(item, rank, port, far_end))
            process.start()
            far_end.close()
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                _kill_group(process.pid)
                process.join()

    def _run_rank(self, item: pytest.Item, rank: int, port: int, far_end: Connection) -> None:
        """Be one rank of a test."""
        os.setsid()  # so that what the test starts can be ended with it
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        rank_zero_only.rank = rank
        _SubprocessScriptLauncher._check_can_spawn_children = _refuse  # type: ignore[method-assign]
        before = self._num_switched()
        reports = runtestprotocol(item, log=False)
        hook = item.config.hook.pytest_report_to_serializable
        far_end.send(([hook(config=item.config, report=report) for report in reports], self._num_switched() - before))
        os._exit(0)


def _collect(pipes: dict[int, Connection]) -> dict[int, Answer]:
    """Return what each rank reported, without those that died or did not finish in time."""
    answers: dict[int, Answer] = {}
    waiting, deadline = dict(pipes), time.monotonic() + TIMEOUT_SECONDS
    while waiting and (ready := wait(waiting.values(), max(0.0, deadline - time.monotonic()))):
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            pipe, failed = waiting.pop(rank), True
            try:
                answers[rank] = pipe.recv()
                failed = any(report["outcome"] == "failed" for report in answers[rank][0])
            except EOFError:
                pass
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return answers


def _ended_early(item: pytest.Item) -> pytest.TestReport:
    """Return the report of a rank that died, or was still running at the end of its time."""
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", "the rank died or did not end", "call")


def _kill_group(pid: int | None) -> None:
    """End a rank and every process that it has started."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _refuse(launcher: _SubprocessScriptLauncher) -> None:
    """Keep a test that clears the environment from running the whole of pytest again."""
    raise RuntimeError("a rank of the suite starts no other rank")
