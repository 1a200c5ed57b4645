# SPDX-License-Identifier: Apache-2.0
"""Move tokens to experts and back, pad them, and compute the cross entropy.

Most of these are Triton kernels in TransformerEngine; :data:`TRITON` has them by module.

A *map*, [tokens, 2 * experts + 1] int32, says where tokens go: column ``e`` of a token's row is the row that the token
takes for expert ``e``, or -1. The columns from ``experts`` on are not used. Rows for the first expert come first, in
the order of the tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def make_row_id_map(routing_map: Tensor, tokens: int, experts: int) -> Tensor:
    """Return the map of a routing mask [tokens, experts], bool or 0 and 1."""
    chosen = routing_map.bool()
    places = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int32)
    order = chosen.t().flatten().cumsum(0).view(experts, tokens).t() - 1
    places[:, :experts] = torch.where(chosen, order, -1)
    return places


def _pairs(row_map: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token, the expert and the row of each routed token, each int64 [rows]."""
    token, expert = (row_map[:, :experts] >= 0).nonzero(as_tuple=True)
    return token, expert, row_map[token, expert].long()


def permute_with_mask_map(
    x: Tensor, row_map: Tensor, probs: Tensor | None, scale: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copy tokens to the rows of their experts.

    Args:
        x: [tokens, h], any dtype.
        row_map: The map.
        probs: [tokens, experts], any float dtype; None without probabilities.
        scale: [tokens, s], the scales of quantized tokens; None without them.
        sizes: Tokens, experts and rows, then sizes that are not used.

    Returns:
        The tokens [rows, h], the scales [rows, s] and the probabilities [rows], in their dtypes.

    Raises:
        NotImplementedError: Padded rows are asked for.
    """
    _, experts, rows = _without_padding(sizes, 5)[:3]
    token, expert, row = _pairs(row_map, experts)

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
    """Sum the rows of each token.

    Args:
        x: [rows, h], any float dtype.
        row_map: The map.
        merging_probs: [tokens, experts], the weights of the sum; None for 1.
        permuted_probs: [rows], probabilities to move back to their tokens; None without them.
        sizes: Tokens and experts, then sizes that are not used.

    Returns:
        The sums [tokens, h] in the dtype of ``x``, and the probabilities [tokens, experts].

    Raises:
        NotImplementedError: Padded rows are asked for.
    """
    tokens, experts = _without_padding(sizes, 3)[:2]
    token, expert, row = _pairs(row_map, experts)
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
    """Return the gradients of rows [rows, h] and weights [tokens, experts] from that of the sums [tokens, h]."""
    _, experts, rows, hidden = _without_padding(sizes, 4)
    token, expert, row = _pairs(row_map, experts)
    dx, dprobs = grad.new_zeros(rows, hidden), torch.zeros_like(merging_probs)
    dx[row] = (grad[token].float() * merging_probs[token, expert].float()[:, None]).to(grad.dtype)
    dprobs[token, expert] = (grad[token].float() * x[row].float()).sum(-1).to(dprobs.dtype)
    return dx, dprobs


def make_chunk_sort_map(sizes: Tensor, order: Tensor, tokens: int, splits: int) -> Tensor:
    """Return the new place of each row, [tokens] int32, when chunks of these sizes [splits] are put into this order."""
    places = torch.empty(tokens, dtype=torch.int32)
    rows = torch.split(torch.arange(tokens), sizes.tolist())
    sources = torch.cat([rows[index] for index in order.tolist()])
    places[sources] = torch.arange(tokens, dtype=torch.int32)
    return places


def sort_chunks_by_map(
    x: Tensor, row_map: Tensor, probs: Tensor | None, tokens: int, hidden: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Move rows [tokens, h] and probabilities [tokens] to their new places, or back; dtypes do not change."""
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
    """Compute the cross entropy of each token.

    Args:
        logits: [b, s, v], any float dtype.
        target: [b, s] int64.
        smoothing: Label smoothing, 0 to 1.
        reduce_loss: Return the mean over all b * s tokens instead of the losses.
        group: The tensor-parallel group, of one rank; None is the same.
        ignored: The target of tokens without a loss.

    Returns:
        The losses [b, s] in fp32, or their mean, and the gradient of their sum or mean, [b, s, v] in the dtype of the
        logits.

    Raises:
        NotImplementedError: The vocabulary is split over ranks.
    """
    if group is not None and torch.distributed.get_world_size(group) > 1:
        raise NotImplementedError(
            "cross_entropy_fusion_impl='te' is not available on the CPU with tensor parallelism; choose 'native'"
        )
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
    """Multiply the gradient [b, s, v] that the forward pass returned by that of the losses, [b, s] or one number."""
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
"""The kernels of each module of ``transformer_engine.pytorch.triton``; others are refused when they are called."""
