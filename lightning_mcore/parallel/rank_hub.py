# SPDX-License-Identifier: Apache-2.0
"""What rank 0 does for ``rank_watch.py``: it hears from all ranks, decides what that means for a run, and tells them.

Each rank is "out" of a run, "in" it, or has "failed". Messages go over the connections of ``rank_connections.py``:

================  ==========================================  ======================================================
a rank sends      when                                        rank 0 then sends to all ranks
================  ==========================================  ======================================================
``enter``         it begins a run                             once all have: ``answer``, None or why it cannot begin
``left``          it has ended a run                          ``first_has_left`` if the rank is rank 0
``failed``        an exception has left its run               ``cause``, if it is the first failure
``stopped``       its neighbour was stopped for too long      ``cause``, likewise
nothing           its process has ended                       ``absent``, and ``cause`` if it was in a run
================  ==========================================  ======================================================

Once no rank is in the run any more, it sends ``verdict``: whether all have failed, and so can go on together.
"""

import selectors
import socket
from collections.abc import Mapping
from typing import Any

from lightning_mcore.parallel.rank_connections import Lines, receive, send
from lightning_mcore.parallel.rank_process import say, start_thread, without_a_word


class Hub:
    """The thread of rank 0 that receives messages from all ranks, itself included, and decides what they mean."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = dict(connections)
        self._present = set(connections)
        self._states = dict.fromkeys(connections, "out")  # of a run: "out", "in" or "failed"
        self._runs = dict.fromkeys(connections, 0)
        self._positions: dict[int, dict[str, int]] = {}
        self._told = 0
        start_thread("rank watch hub", self._listen)

    def _listen(self) -> None:
        buffers = {rank: Lines() for rank in self._connections}
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    received = receive(self._connections[rank]) or b""
                    for name, *arguments in buffers[rank].split(received):
                        getattr(self, f"_on_{name}")(rank, *arguments)
                    if not received:
                        selector.unregister(key.fileobj)
                        self._on_end(rank)

    def _send(self, name: str, *arguments: Any) -> None:
        for rank in self._present:
            send(self._connections[rank], name, *arguments)

    def _on_enter(self, rank: int, run: int, positions: dict[str, int]) -> None:
        self._states[rank], self._runs[rank], self._positions[rank] = "in", run, positions
        # Only a failed run leaves ranks with different numbers of collectives.
        if all(state == "in" for state in self._states.values()) and set(self._runs.values()) == {run}:
            self._send("answer", run, out_of_step(self._positions) if self._told == run - 1 else None)

    def _on_left(self, rank: int, run: int) -> None:
        self._states[rank] = "out"
        if rank == 0:
            self._send("first_has_left")
        self._judge(run)

    def _on_failed(self, rank: int, run: int, how: str) -> None:
        self._states[rank], self._runs[rank] = "failed", run
        # Rank 2 of 4 fails: all hear the cause and have 10 seconds. If the other three raise too, the verdict is that
        # all have failed, and no rank is ended.
        self._send_cause(run, f"rank {rank} {how}")
        self._judge(run)

    def _on_stopped(self, rank: int, run: int, cause: str) -> None:
        self._send_cause(run, cause)

    def _on_end(self, rank: int) -> None:
        self._present.discard(rank)
        self._connections[rank].close()
        self._send("absent", rank)
        if self._states[rank] == "in":
            if self._told != self._runs[rank] and self._states[0] == "in":
                say(f"{without_a_word(rank)}; the run ends on all ranks")
            self._send_cause(self._runs[rank], without_a_word(rank))
        self._judge(self._runs[rank])

    def _send_cause(self, run: int, cause: str) -> None:
        """Tell the first failure of a run."""
        if self._told != run:
            self._told = run
            self._send("cause", run, cause)

    def _judge(self, run: int) -> None:
        """Say whether all ranks have failed, when no rank is in the run any more."""
        open_ranks = [rank for rank in self._present if self._states[rank] == "in" or self._runs[rank] < run]
        if not open_ranks:
            failed = all(state == "failed" for state in self._states.values())
            self._send("verdict", run, failed and len(self._present) == len(self._states))


def out_of_step(positions: Mapping[int, Mapping[str, int]]) -> str | None:
    """Return which ranks would not meet in a group's next collective, because they have issued fewer or more.

    With {0: {"tp": 7}, 1: {"tp": 9}} it names ranks 0 and 1: rank 1 would use its tenth for rank 0's eighth.
    """
    seen: dict[str, tuple[int, int]] = {}
    for rank in sorted(positions):
        for group, position in positions[rank].items():
            first, expected = seen.setdefault(group, (rank, position))
            if position != expected:
                return f"ranks {first} and {rank} are out of step since the run that failed"
    return None
