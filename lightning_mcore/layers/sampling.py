# SPDX-License-Identifier: Apache-2.0
"""Tokens and logits out of logits that are spread over ranks.

Under tensor parallelism a rank holds the logits of a slice of the vocabulary, under context parallelism those of a
share of the positions. Whole logits are gathered for one position at most; for all positions only the best value and
its index travel. The vocabulary is padded, and padding is never chosen.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.parallel.context import packed_positions, unsplit_from_context_parallel


def vocab_parallel_argmax(logits: Tensor, vocab_size: int, tp_group: dist.ProcessGroup) -> Tensor:
    """Return the most probable token at each position; the lowest id among equals.

    Args:
        logits: [b, s, v / tp], this rank's slice of the padded vocabulary.
        vocab_size: Tokens that exist; ids from here on are padding.
        tp_group: The tensor-parallel ranks.

    Returns:
        [b, s] int64, the same on every rank of the group.
    """
    first = tp_group.rank() * logits.size(-1)
    real = min(max(vocab_size - first, 0), logits.size(-1))
    padding = torch.arange(logits.size(-1), device=logits.device) >= real
    value, index = logits.float().masked_fill(padding, float("-inf")).max(dim=-1)
    values, indices = _gather(value, tp_group), _gather(index + first, tp_group)
    return indices.gather(0, values.argmax(dim=0, keepdim=True))[0]


def logits_at(
    logits: Tensor,
    position_ids: Tensor,
    position: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
) -> Tensor:
    """Return the whole vocabulary's logits at one position of each sequence.

    Args:
        logits: [b, s / cp, v / tp], this rank's share.
        position_ids: [b, s / cp], where in the sequence the share's tokens stand.
        position: [b], the position that is asked for.
        vocab_size: Tokens that exist; the padding is cut off.
        tp_group: The tensor-parallel ranks.
        cp_group: The context-parallel ranks.

    Returns:
        [b, vocab_size] fp32, the same on every rank of both groups.
    """
    asked = (position_ids == position[:, None])[..., None]
    found = torch.where(asked, logits.float(), 0.0).sum(dim=1)
    if cp_group.size() > 1:  # one rank holds the position, the others add zeros
        dist.all_reduce(found, group=cp_group)
    slices = _gather(found, tp_group)
    return slices.transpose(0, 1).flatten(1)[:, :vocab_size]


def gather_sequence(shares: Tensor, cp_group: dist.ProcessGroup, cu_seqlens_padded: Tensor | None = None) -> Tensor:
    """Return whole sequences in their own order.

    Args:
        shares: [b, s / cp], those of this context-parallel rank.
        cp_group: The context-parallel ranks.
        cu_seqlens_padded: [b, n + 1], where the sub-sequences of packed rows begin; None where they are not packed.

    Returns:
        [b, s], the same on every rank of the group.
    """
    gathered = list(_gather(shares, cp_group))
    if cu_seqlens_padded is None or cp_group.size() == 1:
        return unsplit_from_context_parallel(gathered)
    size = cp_group.size()
    places = [packed_positions(cu_seqlens_padded, shares.size(1) * size, rank, size) for rank in range(size)]
    joined = torch.cat(gathered, dim=1)
    return torch.empty_like(joined).scatter_(1, torch.cat(places, dim=1), joined)


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stack a tensor of all ranks of a group along a new first dimension."""
    if group.size() == 1:
        return tensor[None]
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)
