# SPDX-License-Identifier: Apache-2.0
"""Rows of a stream, dealt out so that data-parallel ranks get equal work in each optimizer step.

Readers pack their own rows, and packed rows of one length differ in work (``data/sampling.py``). Before a batch is
handed out, the ranks tell each other what their rows cost, and :func:`even_out` decides who trains on which. Rows that
change hands are sent, about 1 MB for 32,768 tokens. A step has the same rows as without dealing, and a rank reads and
tokenises only its own share of the files.

``stream.py`` calls it, on hosts only. What a checkpoint says of a stream is unchanged: it counts batches that readers
made.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lightning_mcore.data.finetuning.stream_reader import Batch
from lightning_mcore.data.packing.rows import costs_of_rows
from lightning_mcore.data.sampling import even_out

_LAST_VALUES = {"cu_seqlens": None, "cu_seqlens_padded": None, "sample_ids": -1, "source_ids": -1}  # None repeats


class RowDealer:
    """Deals out packed batches among the ranks of ``group``, a gloo group.

    ``batches_per_step`` returns the batches of an optimizer step on one rank; rows of short documents have ``parts``.
    """

    def __init__(self, group: dist.ProcessGroup, batches_per_step: Callable[[], int], parts: int = 1) -> None:
        self._group = group
        self._batches_per_step = batches_per_step
        self._parts = parts
        self._costs: list[NDArray[np.float64]] = []  # of this step's rows, batch by batch, in the order of turns

    def deal(self, batch: Batch, number: int) -> Batch:
        """Return this rank's rows of batch ``number`` of the epoch, [b, s], from those that it read; collective."""
        rank, ranks = self._group.rank(), self._group.size()
        turns, sequences = batch["sample_ids"].shape
        own = torch.cat((costs_of_rows(batch, self._parts), torch.tensor([float(sequences)])))
        told = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(told, own, group=self._group)
        known = torch.stack(told)
        if number % self._batches_per_step() == 0:
            self._costs = []
        # Two ranks with two rows each, of costs 9 8 and 1 2: the turns are 9 1 and 8 2, so the second turn is dealt as
        # 2 8. ``source`` is then [[0, 1], [1, 0]]: rank 0 keeps its first row and gets the second of rank 1. Ranks are
        # alike before a step's first turn, so nothing is sent for that one.
        self._costs.append(known[:, :-1].t().flatten().numpy())
        of_step = even_out(np.concatenate(self._costs), ranks, turns * len(self._costs)).reshape(-1, ranks) % ranks
        source = of_step[-turns:, np.argsort(of_step[0])]
        if np.array_equal(source, np.broadcast_to(np.arange(ranks), source.shape)):
            return batch
        widened = {name: _widened(name, values, int(known[:, -1].max())) for name, values in batch.items()}
        dealt = self._exchange(widened, np.argsort(source, axis=1)[:, rank], source[:, rank])
        return {name: values.pin_memory() if batch[name].is_pinned() else values for name, values in dealt.items()}

    def _exchange(self, batch: Batch, receivers: NDArray[np.int64], senders: NDArray[np.int64]) -> Batch:
        """Send each row to a rank and receive as many, in the order of ranks; both arrays are [b], of ranks."""
        rows = [values.reshape(len(values), -1).view(torch.uint8) for values in batch.values()]
        ranks = self._group.size()
        out = torch.cat(rows, dim=1)[np.argsort(receivers, kind="stable")]
        arrived = torch.empty_like(out)
        received, sent = (np.bincount(each, minlength=ranks).tolist() for each in (senders, receivers))
        dist.all_to_all_single(arrived, out, received, sent, group=self._group)
        parts = torch.split(arrived, [row.size(1) for row in rows], dim=1)
        return {
            # A copy even of one row, which may begin at any byte
            name: part.clone(memory_format=torch.contiguous_format).view(values.dtype).view(values.shape)
            for part, (name, values) in zip(parts, batch.items(), strict=True)
        }


def _widened(name: str, values: Tensor, sequences: int) -> Tensor:
    """Return a tensor of rows with room for this many sub-sequences, the new ones empty, as ``collate_rows`` does."""
    if name not in _LAST_VALUES:
        return values
    last = _LAST_VALUES[name]
    missing = sequences + (last is None) - values.size(1)
    if last is None:
        return torch.cat((values, values[:, -1:].expand(-1, missing)), dim=1)
    return functional.pad(values, (0, missing), value=last)
