# SPDX-License-Identifier: Apache-2.0
"""Functions whose backward is not what autograd would derive from their forward.

=================  ======================  ===================================================
function           result                  gradient
=================  ======================  ===================================================
sum_over_ranks     the sum over the ranks  summed over the ranks
sum_for_one_loss   the sum over the ranks  this rank's, times the number of ranks
gather_over_ranks  the parts of all ranks  this rank's part, summed over the ranks
scale_gradient     the tensor              times the factor
attach             the first tensor        for the first tensor unchanged, for the second zero
=================  ======================  ===================================================

The two sums differ in what the ranks do next. After :func:`sum_over_ranks` each rank computes something else with the
sum, as the norm over all heads does, so all of them have a part of the gradient. After :func:`sum_for_one_loss` they
all compute the same loss. Each has the whole gradient already, and context-parallel gradients are averaged later:
with 2 ranks a gradient g becomes 2g on each, and the mean over ranks of what reaches the weights is right again.

:func:`made_again` is for memory: autograd keeps a tensor's place instead of the tensor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, one_loss: bool) -> Tensor:
        ctx.group, ctx.one_loss = group, one_loss
        return _all_reduced(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole = gradients[0] * ctx.group.size() if ctx.one_loss else _all_reduced(gradients[0], ctx.group)
        return whole, None, None


def _all_reduced(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.clone()
    dist.all_reduce(whole, group=group)
    return whole


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks that each use it for something else; collective, in backward too."""
    whole: Tensor = _Sum.apply(part, group, False)  # type: ignore[no-untyped-call]
    return whole


def sum_for_one_loss(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks that all compute the same loss from it; collective in forward alone."""
    if group.size() == 1:
        return part
    whole: Tensor = _Sum.apply(part, group, True)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty(group.size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous()
        own = whole.new_empty(len(whole) // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=ctx.group)
        return own, None


def gather_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return equal parts of all ranks, in turn, for losses that differ by rank; collective, in backward too.

    ``part`` is [n, ...], the result [n * ranks, ...].
    """
    whole: Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Tensor | float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def scale_gradient(tensor: Tensor, factor: Tensor | float) -> Tensor:
    """Return ``tensor`` unchanged; its gradient is multiplied by ``factor``."""
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, aside: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.zeros_like(gradients[0])


def attach(tensor: Tensor, aside: Tensor) -> Tensor:
    """Return ``tensor``; backward also goes through ``aside`` of the same shape, so losses attached to it act."""
    joined: Tensor = _Attach.apply(tensor, aside)  # type: ignore[no-untyped-call]
    return joined


class _Place(NamedTuple):
    """Where a view lies in a tensor's memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def made_again(tensor: Tensor, make: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Return a context in which autograd keeps no view of ``tensor``; backward takes the view of ``make()``.

    ``make`` must return the same numbers in the same memory format, from the first element of its memory on.
    """
    address = tensor.untyped_storage().data_ptr()

    def pack(kept: Tensor) -> Tensor | _Place:
        if kept.untyped_storage().data_ptr() != address:
            return kept
        return _Place(kept.size(), kept.stride(), int(kept.storage_offset()))

    def unpack(kept: Tensor | _Place) -> Tensor:
        return make().as_strided(*kept) if isinstance(kept, _Place) else kept

    return saved_tensors_hooks(pack, unpack)
