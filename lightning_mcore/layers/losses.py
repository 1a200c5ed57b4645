# SPDX-License-Identifier: Apache-2.0
"""The losses of a batch, out of the loss of each token: a mean over tokens, or over samples.

Both functions return a loss and a weight. The sum of the weighted losses over microbatches, data- and context-parallel
ranks, divided by the sum of the weights, is the exact mean on every layout.
"""

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
