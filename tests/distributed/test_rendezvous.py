# SPDX-License-Identifier: Apache-2.0
"""Ranks that nobody watches meet at rank 0's port, and say for whom they wait."""

import logging
import os
import socket
import time

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_mcore.parallel import rank_connections
from lightning_mcore.parallel.rank_connections import rendezvous
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _meet(timeout: float, absent: int = -1, late: float = 0.0) -> tuple[str, list[str]]:
    """Meet on all ranks but one; the last one comes late. Returns what was raised and what was logged."""
    rank = int(os.environ["RANK"])
    if rank == absent:
        return "", []
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(late)
    rank_connections._NOTICE = 1.0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    rank_connections._log.addHandler(handler)
    try:
        with rendezvous(TorchElasticEnvironment(), timeout):
            dist.init_process_group("gloo")
    except (TimeoutError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", said
    dist.barrier()
    dist.destroy_process_group()
    return "", said


def test_a_rank_that_does_not_come_is_named() -> None:
    began = time.monotonic()
    first, second, _ = run_ranks(3, _meet, 4.0, 2, open_group=False)
    assert time.monotonic() - began < 30
    assert "TimeoutError: rank 2 of 3 did not reach" in first[0]
    assert "still waiting for rank 2 of 3" in "".join(first[1])
    assert second[0].startswith(("TimeoutError: rank 2 of 3", "RuntimeError: rank 0 ended before all ranks"))


def test_rank_0_that_does_not_come_is_named() -> None:
    _, second = run_ranks(2, _meet, 3.0, 0, open_group=False)
    assert "TimeoutError: rank 0 did not answer at" in second[0]
    assert "still waiting for rank 0" in second[1][0]


def test_a_rank_may_come_late() -> None:
    first, second = run_ranks(2, _meet, 60.0, -1, 3.0, open_group=False)
    assert first[0] == second[0] == ""
    assert "still waiting for rank 1 of 2" in first[1][0]
    assert second[1] == []


def _meet_oneself(timeout: float) -> tuple[str, list[str]]:
    """Meet while every connection that finds nobody leads back to this process, as the kernel may make it."""
    connect = socket.create_connection

    def to_oneself(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        try:
            return connect(address, timeout)
        except OSError:
            return connect(address, timeout, source_address=address)

    socket.create_connection = to_oneself  # type: ignore[assignment]
    return _meet(timeout, absent=0)


def test_a_connection_to_oneself_is_not_rank_0() -> None:
    _, second = run_ranks(2, _meet_oneself, 3.0, open_group=False)
    assert "TimeoutError: rank 0 did not answer at" in second[0]


def test_many_ranks_are_cut_short() -> None:
    assert rank_connections._some_of([3], 4) == "rank 3 of 4"
    assert rank_connections._some_of(list(range(1, 20)), 20) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 20"
