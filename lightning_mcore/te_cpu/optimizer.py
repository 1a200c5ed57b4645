# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's operations on lists of tensors, by which its optimizers and Megatron's clipping work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_Lists = Sequence[Sequence[Tensor]]


def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: _Lists, lr: float, beta1: float, beta2: float, eps: float, step: int, mode: int,
    bias_correction: int, weight_decay: float, *rest: Any,
) -> None:  # fmt: skip
    """Take a step of Adam, in place.

    Args:
        chunk: Not used.
        noop: Not used.
        lists: Gradients, parameters, both moments and, for parameters of fewer bits, their fp32 copies; any shape.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        step: The number of this step, from 1 on.
        mode: 1 for AdamW; 0 adds weight decay to the gradient.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        weight_decay: Weight decay.
        rest: Not used.
    """
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    copies = lists[4] if len(lists) > 4 else lists[1]
    for grad, parameter, average, square, weight in zip(*lists[:4], copies, strict=True):
        value, gradient = weight.float(), grad.float()
        if mode == 0:
            gradient = gradient + weight_decay * value
        new_average = average.float() * beta1 + (1 - beta1) * gradient
        new_square = square.float() * beta2 + (1 - beta2) * gradient.square()
        average.copy_(new_average)
        square.copy_(new_square)
        update = (new_average / first) / ((new_square / second).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * value
        weight.copy_(value - lr * update)
        if weight is not parameter:
            parameter.copy_(weight)


def multi_tensor_sgd(
    chunk: int, noop: Tensor, lists: _Lists, weight_decay: float, momentum: float, dampening: float, lr: float,
    nesterov: bool, first_run: bool, decay_after_momentum: bool, scale: float,
) -> None:  # fmt: skip
    """Take a step of SGD in place; ``lists``: gradients, parameters, momenta, perhaps 16-bit copies, of any shape."""
    copies = lists[3] if len(lists) > 3 else lists[1]
    for grad, parameter, velocity, copy in zip(*lists[:3], copies, strict=True):
        gradient = grad.float() * scale
        if not decay_after_momentum:
            gradient = gradient + weight_decay * parameter
        if momentum != 0:
            velocity.copy_(gradient if first_run else velocity * momentum + (1 - dampening) * gradient)
            gradient = gradient + momentum * velocity if nesterov else velocity.clone()
        if decay_after_momentum:
            gradient = gradient + weight_decay * parameter
        parameter.sub_(lr * gradient)
        if copy is not parameter:
            copy.copy_(parameter)


def multi_tensor_scale(chunk: int, noop: Tensor, lists: _Lists, scale: float) -> None:
    """Write ``lists[0]`` times a scale into ``lists[1]``, and 1 into ``noop`` if a value is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
        if not torch.isfinite(target).all():
            noop.fill_(1)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_l2norm(chunk: int, noop: Tensor, lists: _Lists, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Return the norm [1] of all values together and, if asked for, those [tensors] of each; both fp32."""
    return multi_tensor_unscale_l2norm(chunk, noop, lists, None, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk: int, noop: Tensor, lists: _Lists, inverse_scale: Any, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return norms of the values times ``inverse_scale``, with the shapes of :func:`multi_tensor_l2norm`."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    if inverse_scale is not None:
        norms = norms * inverse_scale
    return norms.norm().view(1), norms if per_tensor else torch.zeros(0)
