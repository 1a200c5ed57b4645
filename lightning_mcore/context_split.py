# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sequence a context-parallel rank holds, and back.

Under causal attention the last tokens of a sequence have the most keys to look at. A plain cut would leave the first
rank almost idle, so Megatron and TransformerEngine cut the sequence into ``2 * size`` slices and give rank ``r`` the
slices ``r`` and ``2 * size - 1 - r``: one cheap, one expensive, the same work for everyone. With two ranks::

    sequence   0 1 | 2 3 | 4 5 | 6 7
    rank 0     0 1                6 7
    rank 1           2 3   4 5

The batch is cut this way before the step (``MCoreModule.shard_context``), rotary embeddings by Megatron, and keys and
values are put back in order by the core attention (``attention.py``). These are functions of tensors only; nothing here
communicates.

Source: ``get_batch_on_this_cp_rank`` (megatron.core.utils, 0.16.1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def split_for_context_parallel(tensor: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Return the two slices of a sequence that a context-parallel rank holds, in the order of the sequence.

    Args:
        tensor: Whole sequences along ``dim``, for example [b, s].
        rank: Rank in the context-parallel group.
        size: Ranks of that group.
        dim: The dimension of the sequence.

    Returns:
        The share of this rank, for example [b, s / size]; the tensor itself where ``size`` is 1.

    Raises:
        ValueError: The sequence does not divide into ``2 * size`` slices, or there is no such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is not in a context-parallel group of {size}; choose 0 to {size - 1}")
    if size == 1:
        return tensor
    length = tensor.size(dim)
    if length % (2 * size):
        padded = -(-length // (2 * size)) * 2 * size
        raise ValueError(
            f"a sequence of {length} tokens does not divide into 2 * context_parallel_size={2 * size} slices; "
            f"pad it to {padded} tokens"
        )
    slices = tensor.chunk(2 * size, dim)
    return torch.cat([slices[index] for index in slices_of_rank(rank, size)], dim)


def unsplit_from_context_parallel(shares: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Put whole sequences together from the shares of all ranks: the inverse of :func:`split_for_context_parallel`.

    Args:
        shares: One tensor for each context-parallel rank, in rank order, for example [b, s / size].
        dim: The dimension of the sequence.

    Returns:
        The sequences in their own order, for example [b, s]; differentiable.

    Raises:
        ValueError: There is no share, or a share does not divide into two slices.
    """
    size = len(shares)
    if size == 0:
        raise ValueError("no shares were given; give one tensor for each context-parallel rank")
    if size == 1:
        return shares[0]
    slices = [shares[0]] * (2 * size)
    for rank, share in enumerate(shares):
        if share.size(dim) % 2:
            raise ValueError(
                f"the share of rank {rank} has {share.size(dim)} tokens; a share is two slices of equal length"
            )
        for index, part in zip(slices_of_rank(rank, size), share.chunk(2, dim), strict=True):
            slices[index] = part
    return torch.cat(slices, dim)


def slices_of_rank(rank: int, size: int) -> tuple[int, int]:
    """Return which two of the ``2 * size`` slices of a sequence a context-parallel rank holds."""
    return rank, 2 * size - 1 - rank
