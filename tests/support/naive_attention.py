# SPDX-License-Identifier: Apache-2.0
"""Attention as it is defined, the whole matrix of scores in double precision: what every fast path is measured by."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_mcore.parallel.context import split_for_context_parallel, unsplit_from_context_parallel


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return ``softmax(scale * query @ key^T) @ value`` over the keys that are seen.

    Args:
        query: [s, b, h, d].
        key: [keys, b, groups, d].
        value: [keys, b, groups, d_v].
        seen: Bool, broadcastable to [b, h, s, keys].
        scale: None for ``1 / sqrt(d)``.
        sinks: [h], scores of one more key in each head, whose value is zero; None for none.

    Returns:
        [s, b, h * d_v], float64.
    """
    heads = query.size(2) // key.size(2)
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(heads, dim=2) for tensor in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * (scale or 1 / math.sqrt(query.size(-1)))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.size(0)]
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def causal(length: int) -> Tensor:
    """Return [length, length], True where a query sees a key: its own and those before."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def window(length: int, back: int, ahead: int) -> Tensor:
    """Return [length, length], True where a key is at most ``back`` tokens before and ``ahead`` after; -1: no limit."""
    rows = [
        [(back < 0 or query - key <= back) and (ahead < 0 or key - query <= ahead) for key in range(length)]
        for query in range(length)
    ]
    return torch.tensor(rows)


def chunks(length: int, size: int) -> Tensor:
    """Return [length, length], True where a query sees a key: its own and those before in its chunk of ``size``."""
    places = torch.arange(length) // size
    return causal(length) & (places[:, None] == places[None])


def naive_packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    offsets: Sequence[int],
    lengths: Sequence[int],
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention in a row of packed sequences, each of which sees itself alone.

    Args:
        query: [t, h, d].
        key: [t, groups, d].
        value: [t, groups, d_v].
        seen: Bool, [t, t], who sees whom where both are of one sequence.
        offsets: Where the sequences begin, padding included, and where the last one ends.
        lengths: How many of their tokens are real; the output of the others is zero.
        scale: None for ``1 / sqrt(d)``.
        sinks: As in :func:`naive_attention`.

    Returns:
        [t, h * d_v], float64.
    """
    together = torch.zeros(query.size(0), query.size(0), dtype=torch.bool)
    real = torch.zeros(query.size(0), 1, dtype=torch.float64)
    for start, length in zip(offsets, lengths, strict=False):
        together[start : start + length, start : start + length] = True
        real[start : start + length] = 1
    nothing = torch.eye(query.size(0), dtype=torch.bool) & (real == 0)  # a softmax over no keys would be nan
    rows = (tensor[:, None] for tensor in (query, key, value))
    return naive_attention(*rows, seen & together | nothing, scale, sinks)[:, 0] * real


def split_packed(tensor: Tensor, offsets: Sequence[int], rank: int, size: int, dim: int = 1) -> Tensor:
    """Return a context-parallel rank's share of each packed sequence, cut one by one."""
    parts = [tensor.narrow(dim, start, end - start) for start, end in pairwise(offsets)]
    return torch.cat([split_for_context_parallel(part, rank, size, dim) for part in parts], dim)


def unsplit_packed(shares: Sequence[Tensor], offsets: Sequence[int], dim: int = 1) -> Tensor:
    """Put packed sequences together from the shares of all ranks, one by one."""
    lengths = [(end - start) // len(shares) for start, end in pairwise(offsets)]
    parts = zip(*(share.split(lengths, dim) for share in shares), strict=True)
    return torch.cat([unsplit_from_context_parallel(part, dim) for part in parts], dim)
