# SPDX-License-Identifier: Apache-2.0
"""The losses of a batch, out of the loss of each token: a mean over tokens or samples, or a sum for each sample.

:func:`token_mean` and :func:`sample_mean` return a loss and a weight. The sum of the weighted losses over microbatches,
data- and context-parallel ranks, divided by the sum of the weights, is the exact mean on every layout. A loss that is
computed from :func:`sample_sums` follows the same rule, with all samples as the weight on each context-parallel rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.layers.inputs import ModelInputs


def token_mean(losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the tokens of this rank that count, and their number.

    Args:
        losses: [b, s / cp] (packed [1, t]) fp32, the loss of each token of this rank.
        loss_mask: The same shape, any number type; 0 where a token does not count. The loss of a token that counts is
            multiplied by its value, so a fraction lets it weigh less.

    Returns:
        The mean, a scalar of the dtype of ``losses`` to differentiate, and the number of tokens that count, an int32
        scalar.
    """
    count = (loss_mask != 0).sum()
    return (losses * loss_mask.to(losses.dtype)).sum() / count.clamp(min=1), count.int()


def sample_mean(losses: Tensor, inputs: ModelInputs, cp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the mean over samples of the mean loss over the tokens of each sample, and the number of samples.

    A context-parallel rank has some tokens of each sample, so the ranks add up their counts first. Each rank then
    returns its own part of the mean, multiplied by the number of ranks, with all samples as its weight: the weighted
    mean over ranks is the mean again.

    Args:
        losses: [b, s / cp] (packed [1, t]) fp32, the loss of each token of this rank.
        inputs: The batch that the losses belong to.
        cp_group: The ranks that share the sequences; None for this rank alone.

    Returns:
        The mean, a scalar of the dtype of ``losses`` to differentiate, and the number of samples with at least one
        token that counts, an int32 scalar.
    """
    assert inputs.loss_mask is not None
    mask = inputs.loss_mask
    counting = (mask != 0).to(mask.dtype).reshape(-1)
    counts = mask.new_zeros(inputs.num_samples).index_add_(0, inputs.samples.reshape(-1), counting)
    size = 1 if cp_group is None else cp_group.size()
    if cp_group is not None and size > 1:
        dist.all_reduce(counts, group=cp_group)
    weights = mask / counts.clamp(min=1)[inputs.samples]  # the share of each token in its sample
    num_samples = (counts > 0).sum().int()
    return (losses * weights).sum() * size / num_samples.clamp(min=1), num_samples


def sample_sums(values: Tensor, inputs: ModelInputs, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the tokens of each sample, the same on every context-parallel rank.

    The gradient of a rank reaches its own tokens, multiplied by the number of ranks: a loss computed from the sums on
    every rank, weighted alike, then has the gradient of its mean over the ranks.

    Args:
        values: [b, s / cp] (packed [1, t]) floats, one for each token of this rank.
        inputs: The batch that the values belong to.
        cp_group: The ranks that share the sequences; None for this rank alone.

    Returns:
        [samples] fp64: rows, or the sub-sequences of packed rows, row after row; 0 for an empty one.
    """
    zeros = torch.zeros(inputs.num_samples, dtype=torch.float64, device=values.device)
    sums = zeros.index_add(0, inputs.samples.reshape(-1), values.double().reshape(-1))
    return sums if cp_group is None else sum_over(sums, cp_group)


def sum_over(total: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over ranks that then all compute the same loss, with gradients as in `sample_sums`.

    Args:
        total: Any shape, any float dtype, this rank's part.
        cp_group: The ranks that share the sequences.
    """
    if cp_group.size() == 1:
        return total
    whole: Tensor = _SumOverRanks.apply(total, cp_group)  # type: ignore[no-untyped-call]
    return whole


class _SumOverRanks(torch.autograd.Function):
    """Adds up a tensor over ranks which then all compute the same loss; its gradient is therefore known here."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size = group.size()
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.size, None


def tail_weights(inputs: ModelInputs, lengths: Tensor, alpha: float, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return ``alpha`` for the tokens of an answer beyond the length of the other answer of its pair, 1 for all others.

    Args:
        inputs: A batch of pairs: samples 2i and 2i + 1 belong together. The tokens that count in a sample, its answer,
            are consecutive.
        lengths: [samples] number of tokens that count.
        alpha: The weight.
        cp_group: The ranks that share the sequences; None for this rank alone.

    Returns:
        [b, s / cp] (packed [1, t]) fp32.
    """
    assert inputs.loss_mask is not None
    samples, places = inputs.samples.reshape(-1), inputs.position_ids.reshape(-1)
    far = torch.iinfo(places.dtype).max
    counted = places.masked_fill(inputs.loss_mask.reshape(-1) == 0, far)
    first = places.new_full((inputs.num_samples,), far).scatter_reduce(0, samples, counted, "amin")
    if cp_group is not None and cp_group.size() > 1:
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=cp_group)
    shared = lengths.view(-1, 2).amin(dim=1).repeat_interleave(2)
    beyond = places - first[samples] >= shared[samples]
    return torch.where(beyond, alpha, 1.0).view_as(inputs.loss_mask)
