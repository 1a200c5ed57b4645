# SPDX-License-Identifier: Apache-2.0
"""A TCP connection from every rank to rank 0, next to the process groups, and messages on it.

When a process ends, for whatever reason, the kernel closes its connection; nothing has to be sent. The kernel's probes
notice a machine that disappears. A message is a list, written as one line of JSON, so nothing that arrives can run
code. ``rank_watch.py`` listens on these connections; the strategy calls :func:`rendezvous` before it opens process
groups.
"""

import contextlib
import functools
import json
import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed.distributed_c10d import Store

from lightning_mcore.parallel import consensus
from lightning_mcore.parallel.rank_process import named_ranks

T = TypeVar("T")

_log = logging.getLogger(__name__)

_ANSWER = 12.0  # seconds for torch's store on rank 0
_TIMEOUT = 20.0
_NOTICE = 60.0  # seconds until a rank logs which ranks it is waiting for
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 9}  # 60 s
_LONGEST_GREETING = 100

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@dataclass(frozen=True)
class Connections:
    """This rank's connections."""

    own: socket.socket  # to rank 0
    of_first: Mapping[int, socket.socket]  # the other ends by rank; empty except on rank 0

    def close(self) -> None:
        """Close them for both sides; threads that wait for a message wake up."""
        for connection in [self.own, *self.of_first.values()]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def connect(introduction: T) -> tuple[Connections, list[T]] | None:
    """Connect all ranks with rank 0, and exchange introductions; None if a rank cannot; collective over the world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    server: list[socket.socket] = []

    def listen() -> tuple[int, str, str]:
        server.append(_create_server(size))
        return server[0].getsockname()[1], secrets.token_hex(16), socket.gethostname()

    port, token, name = consensus.run_on_rank0(listen)
    own: socket.socket | None = None
    of_first: dict[int, socket.socket] = {}
    if rank == 0:
        own, of_first[0] = socket.socketpair()
        with server[0]:
            _accept(server[0], token, size, of_first)
    else:
        own = _reach((os.environ.get("MASTER_ADDR", ""), name), port, f"{token} {rank}\n")
    lost = size - len(of_first) if rank == 0 else int(own is None)
    # All ranks use the connections, or none does: a rank without one would not learn about failures.
    answers = consensus.all_gather_object((lost, introduction))
    _open.update(filter(None, [own, *of_first.values()]))
    _close_in_forks()
    if own is not None and not any(lost for lost, _ in answers):
        return Connections(own, of_first), [introduction for _, introduction in answers]
    if own is not None:
        Connections(own, of_first).close()
    if rank == 0:
        _log.warning(
            "%d ranks cannot reach rank 0 on %s, port %d: if a rank fails, the others notice it at the timeout of their"
            " collectives; allow connections between the machines of a run on all ports",
            answers[0][0],
            name,
            port,
        )
    return None


@contextlib.contextmanager
def rendezvous(place: ClusterEnvironment, timeout: float) -> Iterator[None]:
    """Wait up to ``timeout`` seconds until all ranks have reached rank 0's address, and name any that have not.

    Inside the ``with`` block rank 0's server lives, until torch has a store of its own on it. Raises RuntimeError if
    another program has the port or rank 0 ended, and TimeoutError if a rank did not arrive.
    """
    store = _store_of_all_ranks(place, timeout)
    yield
    del store  # of which the server is a part


def _store_of_all_ranks(place: ClusterEnvironment, timeout: float) -> Store | None:
    """Return the store in which all ranks have signed in.

    None for a single rank, and under torchrun, which has the store and ends all ranks if one ends.
    """
    # torch alone does not name the missing ranks, and waits for ever if another program has the port.
    rank, size = place.global_rank(), place.world_size()
    torchrun_has_the_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if size == 1 or (rank == 0 and torchrun_has_the_store):
        return None
    deadline = time.monotonic() + timeout
    if rank == 0:
        seconds = timedelta(seconds=timeout)
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            place.main_address, place.main_port, size, True, seconds, wait_for_workers=False, multi_tenant=True
        )
    else:
        store = _find_store(place, deadline, timeout)
    if torchrun_has_the_store:
        return None
    _sign_in(store, rank, size, deadline, f"{place.main_address}:{place.main_port}")
    return store


def _sign_in(store: Store, rank: int, size: int, deadline: float, where: str) -> None:
    """Sign in to the store, and wait until every rank has."""
    notice = time.monotonic() + _NOTICE if rank == 0 else math.inf
    pause = min(max(0.02, size / 1000), 1.0)  # rank 0 answers a thousand questions a second
    try:
        store.set(f"lightning_mcore/{rank}", "here")
        store.add("lightning_mcore", 1)
        while store.add("lightning_mcore", 0) < size:  # torch's own wait prints a warning at each timeout
            now = time.monotonic()
            if now > min(deadline, notice):
                missing = [number for number in range(size) if not store.check([f"lightning_mcore/{number}"])]
                if missing and now > deadline:
                    raise TimeoutError(
                        f"{_some_of(missing, size)} did not reach {where} in time; see their own output, or start"
                        " them too; MCoreStrategy(timeout=...) sets how long ranks wait"
                    )
                notice = math.inf
                _log.warning("still waiting for %s to start and reach %s", _some_of(missing, size), where)
            time.sleep(pause)
    except RuntimeError as error:
        raise RuntimeError(f"rank 0 ended before all ranks had reached {where}; its own output says why") from error


def _some_of(ranks: list[int], size: int) -> str:
    return f"{named_ranks(ranks)} of {size}"


def _find_store(place: ClusterEnvironment, deadline: float, timeout: float) -> Store:
    """Wait until a program listens at rank 0's port, and check that it is torch's store."""
    address, port = place.main_address, place.main_port
    notice = time.monotonic() + _NOTICE
    while True:
        try:
            with socket.create_connection((address, port), timeout=_ANSWER) as connection:
                if connection.getsockname() == connection.getpeername():  # to itself
                    raise ConnectionRefusedError("nothing listens there")
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 did not answer at {address}:{port} in {timeout:.0f} s: {error}") from error
            if time.monotonic() > notice:
                notice = math.inf
                _log.warning("still waiting for rank 0, which does not answer at %s:%d: %s", address, port, error)
            time.sleep(0.1)
    answered: queue.SimpleQueue[Store] = queue.SimpleQueue()

    # TCPStore() has no timeout for a listener that never answers, so a thread asks, and is left alone if it hangs.
    def ask() -> None:
        seconds = timedelta(seconds=_ANSWER)
        with contextlib.suppress(dist.DistError):
            answered.put(dist.TCPStore(address, port, timeout=seconds, wait_for_workers=False))  # type: ignore[attr-defined]

    threading.Thread(target=ask, daemon=True, name="ask rank 0").start()
    try:
        return answered.get(timeout=_ANSWER)
    except queue.Empty:
        raise RuntimeError(
            f"another program uses port {port} of {address}, where the ranks are to meet; choose another MASTER_PORT"
        ) from None


def _create_server(size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
    return socket.create_server(("", 0), backlog=size)


def _accept(server: socket.socket, token: str, size: int, connections: dict[int, socket.socket]) -> None:
    """Accept connections from ranks, which know the token, and from no other program."""
    server.settimeout(_TIMEOUT)
    with contextlib.suppress(TimeoutError):
        while len(connections) < size:
            connection, _ = server.accept()
            connection.settimeout(_TIMEOUT)
            with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as stream:
                word, _, rank = stream.readline(_LONGEST_GREETING).partition(b" ")
                if secrets.compare_digest(word, token.encode()):
                    connection.settimeout(None)
                    _keep_alive(connection)
                    connections[int(rank)] = connection
                    continue
            connection.close()


def _reach(hosts: tuple[str, ...], port: int, greeting: str) -> socket.socket | None:
    """Connect to rank 0 by the first of these names that works."""
    for host in filter(None, hosts):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), timeout=_TIMEOUT / 2)
            connection.sendall(greeting.encode())
            _keep_alive(connection)
            return connection
    return None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@functools.cache
def _close_in_forks() -> None:
    """Close the connections in forked processes, such as dataloader workers, which would keep them open."""

    def close() -> None:
        for connection in list(_open):
            connection.close()

    os.register_at_fork(after_in_child=close)


def send(connection: socket.socket, name: str, *arguments: Any) -> None:
    """Send a message; do nothing if the other side has ended, because the connection's reader notices that."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps([name, *arguments]).encode() + b"\n")


def receive(connection: socket.socket) -> bytes | None:
    """Return the bytes that have arrived; none if the other side has ended, and None at the timeout."""
    try:
        return connection.recv(1 << 16)
    except TimeoutError:
        return None
    except OSError:
        return b""


class Lines:
    """Splits what arrives over a connection into messages; an incomplete line waits for the rest."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, received: bytes) -> list[list[Any]]:
        """Return the messages that are complete now."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]
