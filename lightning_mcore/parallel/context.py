# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sequence a context-parallel rank holds, and back.

Under causal attention the last tokens of a sequence have the most keys to look at. A plain cut would leave the first
rank almost idle, so Megatron and TransformerEngine cut the sequence into ``2 * size`` slices and give rank ``r`` the
slices ``r`` and ``2 * size - 1 - r``: one cheap, one expensive, the same work for everyone. Each packed sequence is cut
like a separate one, so every rank has the same work whatever the lengths, and the boundaries on a rank are the row's,
divided by ``size``.

With ``hybrid_context_parallel``, fewer ranks may share a packed row's documents. Each rank still has ``length / size``
tokens of every row. If a document begins in the middle of a row, each half of the ranks shares the documents in its
half of the row, and exchanges nothing with the other half. Halves are halved the same way, down to single ranks, which
have whole documents (:func:`segments_of`).

``MCoreModule.shard_context`` cuts the batch this way before the step, Megatron cuts rotary embeddings, and
``layers/core_attention.py`` puts keys and values back in order. Nothing here communicates.

Source: ``get_batch_on_this_cp_rank`` (megatron.core.utils, 0.16.1); for packed sequences
``_get_thd_freqs_on_this_cp_rank`` (megatron.core.models.common.embeddings.rope_utils, 0.16.1), which follows
TransformerEngine's ``thd`` layout.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def split_for_context_parallel(tensor: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Return a context-parallel rank's two slices of whole sequences, for example [b, s] to [b, s / size]."""
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
    """Join all ranks' shares, in rank order: the inverse of :func:`split_for_context_parallel`, differentiable."""
    size = len(shares)
    if size == 0:
        raise ValueError("no shares were given; give one tensor for each context-parallel rank")
    if size == 1:
        return shares[0]
    slices = [shares[0]] * (2 * size)
    for rank, share in enumerate(shares):
        if share.size(dim) % 2:
            raise ValueError(
                f"the share of rank {rank} has {share.size(dim)} tokens; give an even number, for two equal slices"
            )
        for index, part in zip(slices_of_rank(rank, size), share.chunk(2, dim), strict=True):
            slices[index] = part
    return torch.cat(slices, dim)


def slices_of_rank(rank: int, size: int) -> tuple[int, int]:
    """Return which two of a sequence's ``2 * size`` slices a context-parallel rank holds."""
    # A sequence of 8 tokens on two ranks:
    #     sequence   0 1 | 2 3 | 4 5 | 6 7
    #     rank 0     0 1                6 7
    #     rank 1           2 3   4 5
    return rank, 2 * size - 1 - rank


def packed_positions(offsets: Tensor, length: int, rank: int, size: int, hybrid: bool = False) -> Tensor:
    """Return the positions of a rank's tokens in their row, [..., length / size]; no value leaves the device.

    ``offsets`` is [..., n + 1], where each row's sequences begin, padding included, up to ``length``. Equal neighbours
    mean an empty sequence. If ``hybrid``, only the ranks of a segment share its sequences (:func:`segments_of`).
    """
    positions = _positions(offsets, length, rank, size)
    part, is_divided = length // size, torch.ones((), dtype=torch.bool, device=offsets.device)
    for width, narrower in pairwise(segment_widths(size) if hybrid else ()):
        first = rank // width * width
        edges = torch.arange(first, first + width, narrower, device=offsets.device) * part
        is_divided = is_divided & (offsets[..., None, :] == edges[:, None]).any(-1).all()
        # Sequences of other segments become empty ones: of 0 4 6 16, the second half of a row has 8 8 8 16
        first = rank // narrower * narrower
        start, end = first * part, (first + narrower) * part
        own = _positions(offsets.clamp(start, end) - start, end - start, rank - first, narrower) + start
        positions = torch.where(is_divided, own, positions)
    return positions


def _positions(offsets: Tensor, length: int, rank: int, size: int) -> Tensor:
    """Return the positions of a rank's tokens if all ranks share every sequence."""
    # `within` counts a rank's tokens of the sequence: in the second half one slice more, hence late - 1.
    index = sequence_of_tokens(offsets, length, size)
    starts = offsets.long().gather(-1, index)
    slices = (offsets.long().gather(-1, index + 1) - starts) // (2 * size)
    within = torch.arange(length // size, device=offsets.device) - starts // size
    early, late = slices_of_rank(rank, size)
    return starts + within + torch.where(within < slices, early * slices, (late - 1) * slices)


def segment_widths(size: int) -> list[int]:
    """Return how many neighbouring ranks may share sequences, from all ranks to one: 8 4 2 1, or 6 3 1."""
    widths = [size]
    while widths[-1] > 1:
        widths.append(1 if widths[-1] % 2 else widths[-1] // 2)
    return widths


def segments_of(rows: Sequence[Sequence[int]], length: int, size: int) -> list[range]:
    """Return the ranks that share sequences of rows with these boundaries, with ``hybrid_context_parallel``.

    :func:`packed_positions` finds them on the device.
    """
    # Rows of 16 on four ranks. With sequences at 0 5 8 12, the first half has two sequences of 5 and 3, which ranks 0
    # and 1 share. In the second half one begins at 12, so rank 2 has 8 to 11, and rank 3 has 12 to 15.
    begins, part = set.intersection(*map(set, rows)), length // size
    segments = [range(size)]
    for width, narrower in pairwise(segment_widths(size)):
        whole, segments = segments, []
        for ranks in whole:
            halves = [ranks[first : first + narrower] for first in range(0, width, narrower)]
            is_divided = len(ranks) == width and all(half.start * part in begins for half in halves)
            segments += halves if is_divided else [ranks]
    return segments


def packed_order(offsets: Tensor, length: int, size: int) -> Tensor:
    """Return the index of each token of a row in the joined shares of all ranks, [length]."""
    positions = torch.cat([packed_positions(offsets, length, rank, size) for rank in range(size)])
    return torch.empty_like(positions).scatter_(0, positions, torch.arange(length, device=offsets.device))


def sequence_at(offsets: Tensor, positions: Tensor) -> Tensor:
    """Return the packed sequence at each position of its row, both [..., t]."""
    found = torch.searchsorted(offsets[..., 1:].long().contiguous(), positions.contiguous(), right=True)
    return found.clamp(max=offsets.size(-1) - 2)  # wrong boundaries raise later


def sequence_of_tokens(offsets: Tensor, length: int, size: int = 1) -> Tensor:
    """Return the packed sequence that each token of a rank belongs to, [..., length / size]; the same on every rank."""
    # With right=True, a token at an end belongs to the next sequence that has tokens.
    tokens = torch.arange(length // size, device=offsets.device, dtype=offsets.dtype)
    ends = (offsets[..., 1:] // size).contiguous()
    found = torch.searchsorted(ends, tokens.expand(*ends.shape[:-1], -1).contiguous(), right=True)
    return found.clamp(max=ends.size(-1) - 1)  # wrong boundaries raise later


def check_packed_offsets(
    offsets: Sequence[int], length: int, size: int, segments: Sequence[range] | None = None
) -> None:
    """Raise ValueError if boundaries do not rise from 0 to ``length``, or the ranks cannot divide a sequence.

    ``segments`` are the ranks that share sequences; None if all ranks share each.
    """
    widths = [size] * size if segments is None else [len(ranks) for ranks in segments for _ in ranks]
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != length:
        ends = f"run from {offsets[0]} to {offsets[-1]}" if len(offsets) > 0 else "are missing"
        raise ValueError(f"the boundaries of packed sequences {ends}; give them from 0 to the row's {length} tokens")
    for index in range(len(offsets) - 1):
        tokens = offsets[index + 1] - offsets[index]
        if tokens < 0:
            raise ValueError(
                f"the boundaries of packed sequences decrease from {offsets[index]} to {offsets[index + 1]}; "
                "give them in increasing order"
            )
        width = widths[min(offsets[index] * size // length, size - 1)] if tokens else 1
        if width > 1 and tokens % (2 * width):
            padded = -(-tokens // (2 * width)) * 2 * width
            slices = f"2 * context_parallel_size={2 * size} slices"
            if width < size:
                slices = f"{2 * width} slices, for the {width} context-parallel ranks that share it"
            raise ValueError(
                f"packed sequence {index} has {tokens} tokens, padding included, which do not divide into {slices}; "
                f"pad it to {padded} tokens"
            )
