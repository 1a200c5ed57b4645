# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts: pooling of hidden states, and InfoNCE over the texts of all data-parallel ranks.

Hidden states come whole from the tensor-parallel ranks (``score.py``'s :class:`HiddenStates`), so each of them computes
the same loss. Context-parallel ranks add up their parts of each text. Data-parallel ranks exchange their vectors with
:func:`of_all_ranks`: each computes the losses of its own queries, and gradients flow back to the rank of every text.
"""

from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_mcore.config.embedding import Pooling
from lightning_mcore.layers.autograd import gather_over_ranks, sum_for_one_loss
from lightning_mcore.layers.inputs import ModelInputs


def pooled(
    states: Tensor, inputs: ModelInputs, lengths: Tensor, pooling: Pooling, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Return the vector of each text, [texts, h] fp32, the same on every context-parallel rank; 0 for empty texts.

    ``states`` are [b, s / cp, h], packed [1, t, h], of any float dtype; ``lengths`` [texts] counts each text's tokens.
    Context-parallel ranks share the gradient as :func:`sum_for_one_loss` does.
    """
    # Texts of 3 and 2 tokens, padded to 4:  samples 0 0 0 0 1 1 1 1, places 0 1 2 3 0 1 2 3
    #     "last"  x at tokens 2 and 5:                . . x . . x . .
    #     "mean"  x at the real tokens:               x x x . x x . .    divided by 3 and 2
    samples, places = inputs.samples.reshape(-1), inputs.position_ids.reshape(-1)
    flat = states.reshape(len(samples), -1)
    vectors = torch.zeros(inputs.num_samples, flat.size(1), dtype=torch.float32, device=flat.device)
    if pooling == "last":
        index = torch.full((inputs.num_samples,), -1, dtype=torch.int64, device=flat.device)
        here = torch.where(places == lengths[samples] - 1, torch.arange(len(samples), device=flat.device), -1)
        index = index.scatter_reduce(0, samples, here, "amax")
        vectors = torch.where((index >= 0)[:, None], flat[index.clamp(min=0)].float(), vectors)
    else:
        is_real = places < lengths[samples]
        vectors = vectors.index_add(0, samples, torch.where(is_real[:, None], flat.float(), 0.0))
        vectors = vectors / lengths.clamp(min=1)[:, None]
    return vectors if cp_group is None else sum_for_one_loss(vectors, cp_group)


Groups: TypeAlias = tuple[dist.ProcessGroup, dist.ProcessGroup]


class Compared(NamedTuple):
    """This rank's queries, and the texts of all ranks that they are compared with."""

    queries: Tensor  # [n, h] fp32
    texts: Tensor  # [m, h] fp32: the positive and the negatives of each query, rank by rank
    own: Tensor  # [n] int64, the place of each query's positive among the texts
    is_query: Tensor  # [n] bool, False for empty places
    is_text: Tensor  # [m] bool

    def detached(self) -> "Compared":
        """Return the same without gradients."""
        return self._replace(queries=self.queries.detach(), texts=self.texts.detach())


def of_all_ranks(vectors: Tensor, there: Tensor, texts: int, groups: Groups | None) -> Compared:
    """Gather the texts of all data-parallel ranks, differentiably.

    ``vectors`` are [n * texts, h], a query, its positive and its negatives in turn; ``there`` [n] is False for empty
    places, as at the end of packed rows. Ranks may have different n. ``groups`` are the data-parallel group and one of
    the same ranks for numbers on the host; None for a single rank.
    """
    # Two ranks with 2 queries and 1, one negative each: the texts are p0 n0 p1 n1 | p2 n2 . . , and the positives of
    # rank 1's queries begin at place 4.
    number, rank = len(there), 0
    rows = vectors.view(number, texts, -1)
    documents, is_text = rows[:, 1:], there
    if groups is not None and groups[0].size() > 1:
        group, hosts = groups
        rank, numbers = group.rank(), torch.zeros(group.size(), dtype=torch.int64, device="cpu")
        dist.all_gather_into_tensor(numbers, torch.tensor([number], device="cpu"), group=hosts)
        most = max(number, *numbers.tolist())
        documents = gather_over_ranks(functional.pad(documents, (0, 0, 0, 0, 0, most - number)), group)
        flags = functional.pad(there, (0, most - number)).to(torch.uint8)
        gathered = flags.new_empty(most * group.size())
        dist.all_gather_into_tensor(gathered, flags, group=group)
        is_text, rank = gathered.bool(), rank * most
    own = (rank + torch.arange(number, device=vectors.device)) * (texts - 1)
    return Compared(rows[:, 0], documents.flatten(0, 1), own, there, is_text.repeat_interleave(texts - 1))


def similarities(compared: Compared, size: int) -> Tensor:
    """Return the cosine similarity of each query with each text by the first ``size`` numbers of their vectors.

    The result is [n, m] fp32, -inf for empty places.
    """
    queries, texts = (functional.normalize(vectors[:, :size], dim=1) for vectors in (compared.queries, compared.texts))
    return (queries @ texts.t()).masked_fill(~compared.is_text, float("-inf"))


def info_nce(compared: Compared, temperature: float, size: int) -> Tensor:
    """Return the loss of each query by the first ``size`` numbers of the vectors, [n] fp32; 0 for empty places."""
    logits = similarities(compared, size) / temperature
    # An empty place has no positive: it gets one, so that its row has a finite loss, which then counts for nothing
    of_row = torch.zeros_like(logits, dtype=torch.bool).scatter(1, compared.own[:, None], True)
    logits = logits.masked_fill(of_row & ~compared.is_query[:, None], 0.0)
    losses = functional.cross_entropy(logits, compared.own, reduction="none")
    return torch.where(compared.is_query, losses, 0.0)


def reciprocal_ranks(compared: Compared) -> Tensor:
    """Return 1 / rank of each query's positive among all texts by similarity, [n] fp32; ties count against it."""
    found = similarities(compared, compared.queries.size(1))
    better = found >= found.gather(1, compared.own[:, None])
    return 1.0 / better.sum(1).clamp(min=1)
