# SPDX-License-Identifier: Apache-2.0
"""The order in which all data-parallel ranks together read an epoch, and how it is dealt out to them.

Like cards, samples are dealt out in turns: rank ``r`` of ``n`` gets samples ``r``, ``r + n``, ``r + 2 n`` and so on of
one permutation, the *global order*. What all ranks together have read is therefore a prefix of it, and its length, the
samples *consumed*, says all there is to say about a position. The rest can be dealt out to another number of ranks.

Example: order 0 to 9, 4 samples consumed, now 4 ranks. The rest, 4 to 9, fills one turn and a half. With ``drop_last``,
the ranks get [4], [5], [6] and [7]; without, the epoch's first samples fill the second turn: [4, 8], [5, 9], [6, 0] and
[7, 1].
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.data.sampling import GlobalOrderSampler


def global_order(sampler: Any) -> Sequence[Any] | NDArray[np.int64]:
    """Return this epoch's samples in the order in which all ranks of a distributed sampler together read them."""
    # Never a list of the samples of a GlobalOrderSampler: a billion of them would take 40 GB on each rank
    if isinstance(sampler, GlobalOrderSampler):
        return sampler.order()
    # The same sampler as one rank of one, so that it neither skips nor pads.
    whole = copy.copy(sampler)
    whole.num_replicas = 1
    whole.rank = 0
    whole.drop_last = False
    whole.num_samples = whole.total_size = len(whole.dataset)
    return list(whole)


def global_length(sampler: Any) -> int:
    """Return the length of :func:`global_order`, in samples."""
    return sampler.epoch_size if isinstance(sampler, GlobalOrderSampler) else len(sampler.dataset)


def rank_share(length: int, consumed: int, ranks: int, drop_last: bool) -> int:
    """Return how many of the remaining samples each rank reads."""
    left = max(0, length - consumed)
    return left // ranks if drop_last else math.ceil(left / ranks)


def deal(
    order: Sequence[Any] | NDArray[np.int64], consumed: int, ranks: int, rank: int, drop_last: bool
) -> Iterator[Any]:
    """Yield one rank's share of ``order`` behind the first ``consumed`` samples.

    Source: ``DistributedSampler.__iter__`` in torch.utils.data (2.13), which this equals for ``consumed=0``.
    """
    left = len(order) - consumed
    share = rank_share(len(order), consumed, ranks, drop_last)
    for turn in range(share):
        place = turn * ranks + rank
        yield order[consumed + place] if place < left else order[(place - left) % len(order)]
