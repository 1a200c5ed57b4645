# SPDX-License-Identifier: Apache-2.0
"""The losses of a reranker, and how well it ranks, from the scores and relevances of the documents of each query.

All tensors are [queries, documents]. A query's relevances are 0 or more; losses and measures are [queries].
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from lightning_mcore.config.reranking import RerankingLoss


def _softmax(scores: Tensor, relevance: Tensor) -> Tensor:
    wanted = relevance / relevance.sum(1, keepdim=True).clamp(min=torch.finfo(relevance.dtype).tiny)
    return -(wanted * functional.log_softmax(scores, dim=1)).sum(1)


def _binary_cross_entropy(scores: Tensor, relevance: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, relevance, reduction="none").mean(1)


def _ranknet(scores: Tensor, relevance: Tensor) -> Tensor:
    is_better = relevance[:, :, None] > relevance[:, None, :]
    losses = functional.softplus(scores[:, None, :] - scores[:, :, None])
    return (losses * is_better).sum((1, 2)) / is_better.sum((1, 2)).clamp(min=1)


LOSSES: Mapping[RerankingLoss, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": _softmax,
    "binary_cross_entropy": _binary_cross_entropy,
    "ranknet": _ranknet,
}
"""The loss of each query, from scores and relevances in the same dtype."""


def ranks(scores: Tensor, relevance: Tensor) -> Tensor:
    """Return each document's place in the list by score, from 1; among equal scores, the less relevant come first."""
    # Scores 2 5 2 with relevances 1 0 0: the second is first, then the third, and the first is last: 3 1 2.
    order = relevance.argsort(dim=1, stable=True)
    order = order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
    return order.argsort(dim=1) + 1


def is_best_first(scores: Tensor, relevance: Tensor) -> Tensor:
    """Return whether the most relevant document has the highest score, bool.

    In a list of one, whether its score is above 0 if its relevance is above 0.5.
    """
    if scores.size(1) == 1:
        return ((scores > 0) == (relevance > 0.5))[:, 0]
    first = ranks(scores, relevance) == 1
    return (relevance * first).sum(1) == relevance.amax(1)


def reciprocal_rank(scores: Tensor, relevance: Tensor, top_k: int) -> Tensor:
    """Return 1 / place of the first document with a relevance above 0, or 0 if it is not among the first ``top_k``."""
    places = ranks(scores, relevance)
    found = torch.where((relevance > 0) & (places <= top_k), 1.0 / places, 0.0)
    return found.amax(1)


def ndcg(scores: Tensor, relevance: Tensor, top_k: int) -> Tensor:
    """Return the normalised discounted cumulative gain of the first ``top_k`` places, 0 for lists without relevance."""

    def gain(by: Tensor) -> Tensor:
        places = ranks(by, relevance)
        return torch.where(places <= top_k, relevance / torch.log2(places + 1.0), 0.0).sum(1)

    best = gain(relevance)
    return torch.where(best > 0, gain(scores) / best, 0.0)
