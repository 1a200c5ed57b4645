# SPDX-License-Identifier: Apache-2.0
"""Move tokens to experts and back, pad them, and compute the cross entropy.

Most of these are Triton kernels in TransformerEngine; :data:`TRITON` has them by module. A *map* says where tokens go,
[tokens, 2 * experts + 1] int32: column ``e`` of a token's row is the row that the token takes for expert ``e``, or -1.
The columns from ``experts`` on are not used. The first expert's rows come first, in token order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def make_row_id_map(routing_map: Tensor, tokens: int, experts: int) -> Tensor:
    """Return the map of a routing mask [tokens, experts], bool or 0 and 1."""
    # Mask 1 1 | 0 1 | 1 0: the first expert takes tokens 0 and 2 in rows 0 and 1, the second tokens 0 and 1 in rows 2
    # and 3. The map begins 0 2 | -1 3 | 1 -1.
    chosen = routing_map.bool()
    places = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int32)
    order = chosen.t().flatten().cumsum(0).view(experts, tokens).t() - 1
    places[:, :experts] = torch.where(chosen, order, -1)
    return places


def _pairs(row_map: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each routed token's number, expert and row, int64 [rows] each, in the order of rows."""
    # Unlike nonzero(), a sort does not need values to know its shape, so that it can be rehearsed. The -1 come first.
    row, place = row_map[:, :experts].flatten().sort(stable=True)
    place = place[place.numel() - rows :]
    return place // experts, place % experts, row[row.numel() - rows :].long()


def permute_with_mask_map(
    x: Tensor, row_map: Tensor, probs: Tensor | None, scale: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copy tokens [tokens, h] to the rows of their experts: tokens [rows, h], scales [rows, s], probabilities [rows].

    ``probs`` is [tokens, experts], ``scale`` [tokens, s] of quantized tokens; ``sizes`` begins with tokens, experts and
    rows. NotImplementedError for padded rows.
    """
    _, experts, rows = _without_padding(sizes, 5)[:3]
    token, expert, row = _pairs(row_map, experts, rows)

    def moved(values: Tensor, target: Tensor) -> Tensor:
        target[row] = values
        return target

    permuted = moved(x[token], x.new_zeros(rows, x.shape[1]))
    scales = None if scale is None else moved(scale[token], scale.new_zeros(rows, scale.shape[1]))
    return permuted, scales, None if probs is None else moved(probs[token, expert], probs.new_zeros(rows))


def _without_padding(sizes: Sequence[Any], count: int) -> Sequence[Any]:
    """Drop the first argument that later releases pass before the sizes: the offsets of padded rows, here None."""
    if len(sizes) > count:
        if sizes[0] is not None:
            raise NotImplementedError("padded permutation of tokens is not available on the CPU")
        return sizes[1:]
    return sizes


def unpermute_with_mask_map(
    x: Tensor, row_map: Tensor, merging_probs: Tensor | None, permuted_probs: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor | None]:
    """Sum each token's rows [rows, h] to [tokens, h], and move ``permuted_probs`` [rows] back to [tokens, experts].

    ``merging_probs`` [tokens, experts] are the weights of the sum; None for 1. NotImplementedError for padded rows.
    """
    tokens, experts = _without_padding(sizes, 3)[:2]
    token, expert, row = _pairs(row_map, experts, x.shape[0])
    values = x[row].float()
    if merging_probs is not None:
        values = values * merging_probs[token, expert].float()[:, None]
    summed = torch.zeros(tokens, x.shape[1]).index_add_(0, token, values).to(x.dtype)
    if permuted_probs is None:
        return summed, None
    probs = permuted_probs.new_zeros(tokens, experts)
    probs[token, expert] = permuted_probs[row]
    return summed, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    grad: Tensor, row_map: Tensor, x: Tensor, merging_probs: Tensor, *sizes: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [rows, h] and weights [tokens, experts] from the sums' gradient [tokens, h]."""
    _, experts, rows, hidden = _without_padding(sizes, 4)
    token, expert, row = _pairs(row_map, experts, rows)
    dx, dprobs = grad.new_zeros(rows, hidden), torch.zeros_like(merging_probs)
    dx[row] = (grad[token].float() * merging_probs[token, expert].float()[:, None]).to(grad.dtype)
    dprobs[token, expert] = (grad[token].float() * x[row].float()).sum(-1).to(dprobs.dtype)
    return dx, dprobs


def make_chunk_sort_map(sizes: Tensor, order: Tensor, tokens: int, splits: int) -> Tensor:
    """Return the new place of each row, [tokens] int32, when chunks of these sizes [splits] are put into this order."""
    # Chunks of 2, 1 and 3 rows in the order 2 0 1 begin at 3, 5 and 0, instead of at 0, 2 and 3: rows move by 3, 3, -3.
    moved_sizes = sizes[order]
    new_starts = torch.empty_like(sizes).index_copy_(0, order.long(), moved_sizes.cumsum(0) - moved_sizes)
    moves = new_starts - (sizes.cumsum(0) - sizes)
    return (torch.arange(tokens) + moves.repeat_interleave(sizes.long(), output_size=tokens)).int()


def sort_chunks_by_map(
    x: Tensor, row_map: Tensor, probs: Tensor | None, tokens: int, hidden: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Move rows [tokens, h] and probabilities [tokens] to their new places, or back."""
    source = row_map.argsort() if is_forward else row_map.long()
    return x[source], None if probs is None else probs[source]


def fused_multi_row_padding(x: Tensor, out: Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    """Copy each expert's rows of [rows, h] into ``out`` [padded rows, h], followed by zeros."""
    out.zero_()
    _copy_rows(x, rows, out, padded, rows)


def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: Sequence[int], rows: Sequence[int]) -> None:
    """Copy each expert's rows of [padded rows, h] back into ``out`` [rows, h], without the padding."""
    _copy_rows(x, padded, out, rows, rows)


def _copy_rows(x: Tensor, of_x: Sequence[int], out: Tensor, of_out: Sequence[int], counts: Sequence[int]) -> None:
    sources, targets = torch.split(x, list(of_x)), torch.split(out, list(of_out))
    for source, target, count in zip(sources, targets, counts, strict=True):
        target[:count] = source[:count]


def cross_entropy_forward(
    logits: Tensor, target: Tensor, smoothing: float, reduce_loss: bool, group: Any, ignored: int
) -> tuple[Tensor, Tensor]:
    """Compute each token's cross entropy from logits [b, s, v], and the gradient of the sum or mean.

    Returns fp32 losses [b, s], or with ``reduce_loss`` their mean over all b * s tokens; the gradient has the logits'
    dtype. ``ignored`` is the target of tokens without a loss. NotImplementedError if the vocabulary is split over
    ranks.
    """
    if group is not None and torch.distributed.get_world_size(group) > 1:
        raise NotImplementedError(
            "cross_entropy_fusion_impl='te' is not available on the CPU with tensor parallelism; choose 'native'"
        )
    # The kernel returns the gradient with the loss, and backward only multiplies it: TransformerEngine keeps no logits.
    with torch.enable_grad():
        leaf = logits.detach().float().requires_grad_()
        losses = functional.cross_entropy(
            leaf.flatten(0, 1), target.flatten(), reduction="none", ignore_index=ignored, label_smoothing=smoothing
        )
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    if reduce_loss:
        return losses.detach().mean(), (gradient / losses.numel()).to(logits.dtype)
    return losses.detach().view(logits.shape[:2]), gradient.to(logits.dtype)


def cross_entropy_backward(gradient: Tensor, grad: Tensor, is_captured: bool = False) -> Tensor:
    """Multiply the gradient [b, s, v] from the forward pass by the losses' gradient, [b, s] or one number."""
    return gradient * (grad if grad.dim() == 0 else grad[..., None]).to(gradient.dtype)


def pad_columnwise_scale_inv(scales: Tensor) -> Tensor:
    """Pad scales [m, n] with zeros, m to a multiple of 128 and n to a multiple of 4."""
    return functional.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))


TRITON: dict[str, dict[str, Callable[..., Any]]] = {
    "permutation": {
        "make_row_id_map": make_row_id_map,
        "permute_with_mask_map": permute_with_mask_map,
        "unpermute_with_mask_map": unpermute_with_mask_map,
        "unpermute_with_mask_map_bwd_with_merging_probs": unpermute_with_mask_map_bwd_with_merging_probs,
        "make_chunk_sort_map": make_chunk_sort_map,
        "sort_chunks_by_map": sort_chunks_by_map,
    },
    "cross_entropy": {
        "cross_entropy_forward": cross_entropy_forward,
        "cross_entropy_backward": cross_entropy_backward,
    },
    "pad": {"pad_columnwise_scale_inv": pad_columnwise_scale_inv},
    "grouped_dbias_dscales": {},
    "mhc": {},
}
"""The kernels of each module of ``transformer_engine.pytorch.triton``; others raise when they are called."""
