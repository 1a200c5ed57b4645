# SPDX-License-Identifier: Apache-2.0
"""Tokens and logits from logits that are distributed over ranks.

A tensor-parallel rank holds logits for a slice of the vocabulary, a context-parallel rank for some of the positions.
To choose tokens, whole logits are gathered for at most one position; for all positions only the best value and its
index are sent. :func:`whole_logits` gathers everything, for custom losses. The vocabulary is padded, and padding is
never chosen. Metrics, generation and ``interop/auto_model.py`` call this file.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import functional

from lightning_mcore.parallel.context import (
    packed_positions,
    split_for_context_parallel,
    unsplit_from_context_parallel,
)


def vocab_parallel_argmax(logits: Tensor, vocab_size: int, tp_group: dist.ProcessGroup) -> Tensor:
    """Return the most probable token at each position, [b, s] int64 on every rank; among equals, the lowest id.

    ``logits`` is [b, s, v / tp], a slice of the padded vocabulary; ``vocab_size`` is without padding.
    """
    first = tp_group.rank() * logits.size(-1)
    real = min(max(vocab_size - first, 0), logits.size(-1))
    if real:
        value, index = logits[..., :real].max(dim=-1)  # no copy of the logits
        value = value.float()
    else:  # this rank has only padding
        value = logits.new_full(logits.shape[:-1], float("-inf"), dtype=torch.float32)
        index = torch.zeros_like(value, dtype=torch.int64)
    values, indices = _gather(value, tp_group), _gather(index + first, tp_group)
    return indices.gather(0, values.argmax(dim=0, keepdim=True))[0]


def vocab_parallel_top_k(logits: Tensor, first: int, real: int, tp_group: dist.ProcessGroup, k: int) -> Tensor:
    """Return the ``k`` most probable tokens at each position, [s, b, k] int64 on every rank, from the likeliest on.

    ``logits`` is [s, b, v / tp]: ``real`` tokens from ``first`` on, then padding. All ranks together have k or more.
    """
    values, columns = logits[..., :real].float().topk(min(k, real), dim=-1)
    missing = min(k, logits.size(-1)) - values.size(-1)  # all ranks send equally many, also one with padding
    values = functional.pad(values, (0, missing), value=float("-inf"))
    columns = functional.pad(columns, (0, missing))
    both = (_gather(values, tp_group), _gather(columns + first, tp_group))  # [tp, s, b, k] each
    values, tokens = (each.permute(1, 2, 0, 3).flatten(2) for each in both)
    return tokens.gather(-1, values.topk(k, dim=-1).indices)


def logits_at(
    logits: Tensor, asked: Tensor, vocab_size: int, tp_group: dist.ProcessGroup, cp_group: dist.ProcessGroup
) -> Tensor:
    """Return the whole vocabulary's logits at one position of each sequence, [b, vocab_size] fp32 on every rank.

    ``asked``, [b, s / cp] bool, is True there. ``logits`` is [b, n, v / tp]; each of the ``n`` stands for an equal part
    of the positions, in order: for a single one, or for all those that a rank has.
    """
    if logits.size(1) == cp_group.size() == 1:  # no other one, here or on another rank
        found = logits[:, 0].float()
    else:
        asked = asked.reshape(*logits.shape[:2], -1).any(dim=-1)
        found = torch.where(asked[..., None], logits.float(), 0.0).sum(dim=1)
    if cp_group.size() > 1:
        dist.all_reduce(found, group=cp_group)
    slices = _gather(found, tp_group)
    return slices.transpose(0, 1).flatten(1)[:, :vocab_size]


def gather_sequence(
    shares: Tensor, cp_group: dist.ProcessGroup, cu_seqlens_padded: Tensor | None = None, hybrid: bool = False
) -> Tensor:
    """Return whole sequences in order, [b, s], from the context-parallel ranks' shares, [b, s / cp]; collective.

    ``cu_seqlens_padded`` says where packed rows' sub-sequences begin; None for dense rows. ``hybrid`` is the layout's
    ``hybrid_context_parallel``.
    """
    gathered = list(_gather(shares, cp_group))
    if cu_seqlens_padded is None or cp_group.size() == 1:
        return unsplit_from_context_parallel(gathered)
    size = cp_group.size()
    places = [packed_positions(cu_seqlens_padded, shares.size(1) * size, rank, size, hybrid) for rank in range(size)]
    joined = torch.cat(gathered, dim=1)
    return torch.empty_like(joined).scatter_(1, torch.cat(places, dim=1), joined)


def whole_logits(logits: Tensor, vocab_size: int, tp_group: dist.ProcessGroup, cp_group: dist.ProcessGroup) -> Tensor:
    """Return all logits, [b, s, vocab_size] on every rank, from [b, s / cp, v / tp], with gradients; collective.

    All ranks must compute the same loss from it. Its gradient is then the gradient of the mean loss over the
    context-parallel ranks.
    """
    sequence = whole_sequence(logits, cp_group)
    if tp_group.size() > 1:
        sequence = tensor_parallel.gather_from_tensor_model_parallel_region(sequence, group=tp_group)
    return sequence[..., :vocab_size]


def whole_sequence(shares: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
    """Return :func:`gather_sequence` of floats, [b, s / cp, ...], with gradients as in :func:`whole_logits`."""
    if cp_group.size() == 1:
        return shares
    whole: Tensor = _WholeSequence.apply(shares, cp_group)  # type: ignore[no-untyped-call]
    return whole


class _WholeSequence(torch.autograd.Function):
    """Gathers sequences on ranks which then all compute the same loss; so backward needs no communication."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_sequence(shares, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return this rank's part, times the number of ranks, over which gradients are averaged."""
        group = ctx.group
        return split_for_context_parallel(gradients[0], group.rank(), group.size()) * group.size(), None


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stack a tensor of all ranks of a group along a new first dimension."""
    if group.size() == 1:
        return tensor[None]
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)
