# SPDX-License-Identifier: Apache-2.0
"""How pipeline stages tell each other the shapes of activations that only the sender knows.

Megatron sends such shapes in device tensors. Before a stage can allocate memory for an activation, its host waits until
the GPU has done all its work, at every exchange. :func:`exchange_shapes` sends them from host to host instead, so the
host waits only until the other stage's host has come to the same exchange.

To remember the shapes of an earlier step would not be safe. What a step sends may depend on the values in a batch, such
as a batch cut at its longest row, and a receive of the wrong size hangs or fills an activation with parts of another.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.consensus import control_group


@contextlib.contextmanager
def shapes_sent_between_hosts() -> Iterator[None]:
    """Let Megatron's schedules exchange shapes by :func:`exchange_shapes` inside the ``with`` block; collective."""
    control_group()  # The first call creates it and needs all ranks, which are here, but not at each exchange.
    with attributes_set([P2PCommunicator], {"_communicate_shapes": exchange_shapes}):
        yield


def exchange_shapes(
    communicator: Any,
    tensor_send_next: Tensor | None,
    tensor_send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> list[list[int]]:
    """Send the shapes of activations and gradients [s, b, h], and return those to receive from both neighbors.

    Stands in for ``P2PCommunicator._communicate_shapes`` (megatron.core.pipeline_parallel, 0.16.1 and 0.19.2).
    """
    # Stages 1 and 2 of 4, with activations of 7 tokens and 2 rows. Stage 1 sends [7, 2, h] and receives the shape of a
    # gradient, which goes the other way. On two stages both neighbors are the same rank, so each way has its own tag.
    before, after = communicator.prev_rank, communicator.next_rank
    shapes = torch.ones(2, 3, dtype=torch.int64)
    works: list[Any] = []
    ways = ((tensor_send_next, after, recv_prev, before), (tensor_send_prev, before, recv_next, after))
    for way, (sent, receiver, receives, sender) in enumerate(ways):
        tag = way + 1  # torch's own messages have the tag 0
        if sent is not None:
            works.append(dist.isend(torch.tensor(sent.shape), receiver, control_group(), tag))
        if receives:
            works.append(dist.irecv(shapes[way], sender, control_group(), tag))
    for work in works:
        work.wait()
    found: list[list[int]] = shapes.tolist()
    return found
