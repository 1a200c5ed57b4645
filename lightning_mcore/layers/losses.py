# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch, computed from the loss of each token: a mean over tokens or samples, or a sum per sample.

:func:`token_mean` and :func:`sample_mean` return a loss and a weight. The sum of weighted losses over microbatches,
data- and context-parallel ranks, divided by the sum of the weights, is the exact mean on every layout. A loss computed
from :func:`sample_sums` follows the same rule, with all samples as the weight on each context-parallel rank. The
models' training steps call these functions.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.layers.autograd import sum_for_one_loss
from lightning_mcore.layers.inputs import ModelInputs


def token_mean(losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss over this rank's tokens that count (to differentiate), and their number, an int32 scalar.

    Both tensors are [b, s / cp], packed [1, t]. A token counts unless its mask is 0; its loss is multiplied by the
    mask, so a fraction lets it weigh less.
    """
    count = (loss_mask != 0).sum()
    return (losses * loss_mask.to(losses.dtype)).sum() / count.clamp(min=1), count.int()


def source_means(losses: Tensor, inputs: ModelInputs, num_sources: int) -> tuple[Tensor, Tensor]:
    """Return each source's mean loss over this rank's tokens that count, and their number, both [sources].

    Shapes and masks as in :func:`token_mean`. A source without tokens has mean 0 and number 0.
    """
    # Losses 1 2 | 3 8 of rows from sources 1 and 0, mask 1 1 | 1 0: sums [3, 3], numbers [1, 2], means [3, 1.5].
    assert inputs.loss_mask is not None
    assert inputs.sources is not None
    mask = inputs.loss_mask.reshape(-1)
    # Padding of a row without sub-sequences has source -1, and mask 0
    sources = inputs.sources.reshape(-1).clamp(min=0)
    zeros = torch.zeros(num_sources, dtype=torch.float64, device=losses.device)
    sums = zeros.index_add(0, sources, (losses.detach().reshape(-1) * mask).double())
    counts = zeros.index_add(0, sources, (mask != 0).double())
    return sums / counts.clamp(min=1), counts


def sample_mean(losses: Tensor, inputs: ModelInputs, cp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the mean over samples of each sample's mean loss, and the number of samples with a token that counts.

    Shapes as in :func:`token_mean`. ``cp_group`` None means that this rank has whole sequences.
    """
    # Losses 1 2 3 4 | 10 0 0 0 with mask 1 1 1 1 | 1 0 0 0: (2.5 + 10) / 2 = 6.25, weight 2.
    # A context-parallel rank's part of the mean, times the number of ranks: the mean over ranks is the mean again.
    assert inputs.loss_mask is not None
    mask = inputs.loss_mask
    counting = (mask != 0).to(mask.dtype).reshape(-1)
    counts = mask.new_zeros(inputs.num_samples).index_add_(0, inputs.samples.reshape(-1), counting)
    size = 1 if cp_group is None else cp_group.size()
    if cp_group is not None and size > 1:
        dist.all_reduce(counts, group=cp_group)
    weights = mask / counts.clamp(min=1)[inputs.samples]
    num_samples = (counts > 0).sum().int()
    return (losses * weights).sum() * size / num_samples.clamp(min=1), num_samples


def sample_sums(values: Tensor, inputs: ModelInputs, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the tokens of each sample, [samples] fp64, the same on every context-parallel rank.

    A rank's gradient reaches its own tokens, multiplied by the number of ranks: a loss computed from the sums on every
    rank, with equal weights, then has the gradient of its mean over the ranks.
    """
    zeros = torch.zeros(inputs.num_samples, dtype=torch.float64, device=values.device)
    sums = zeros.index_add(0, inputs.samples.reshape(-1), values.double().reshape(-1))
    return sums if cp_group is None else sum_for_one_loss(sums, cp_group)


def tail_weights(inputs: ModelInputs, lengths: Tensor, alpha: float, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return LD-DPO's ``alpha`` for an answer's tokens beyond the length of the other answer of its pair, 1 before.

    Samples 2i and 2i + 1 are a pair. The tokens that count in a sample, its answer, must be consecutive; ``lengths``
    [samples] counts them over all context-parallel ranks. The result is [b, s / cp], packed [1, t].
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
