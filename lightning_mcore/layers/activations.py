# SPDX-License-Identifier: Apache-2.0
"""Activations that ``torch.nn.functional`` does not name; unlike megatron-core's, they need no compiler."""

import math
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.layers.autograd import scale_gradient


def gelu_tanh(values: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    return functional.gelu(values, approximate="tanh")


def gelu_sigmoid(values: Tensor) -> Tensor:
    """Return the sigmoid approximation of GELU."""
    return values * torch.sigmoid(1.702 * values)


def relu_squared(values: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return functional.relu(values).square()


def xielu(values: Tensor) -> Tensor:
    """Return xIELU with the numbers that it starts from; :func:`learn_activations` has them trained."""
    return xielu_of(values, *(values.new_tensor(number) for number in XIELU))


XIELU = (math.log(math.expm1(0.8)), math.log(math.expm1(0.3)), 0.5, -1e-6)
"""``alpha_p``, ``alpha_n``, ``beta`` and ``eps`` of xIELU; both slopes begin at 0.8, as softplus(0.203) = 0.8."""


def xielu_of(values: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return xIELU: ``a * x**2 + beta * x`` above 0, ``b * (exp(x) - 1 - x) + beta * x`` below.

    ``a`` is ``softplus(alpha_p)`` and ``b`` is ``beta + softplus(alpha_n)``, so that neither can become negative.
    """
    above, below = functional.softplus(alpha_p), beta + functional.softplus(alpha_n)
    bent = torch.where(values > 0, above * values * values, (torch.expm1(torch.min(values, eps)) - values) * below)
    return bent + beta * values


class _Xielu(torch.autograd.Function):
    """xIELU that keeps its input alone, and computes the rest again in backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return xielu_of(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            found = iter(torch.autograd.grad(xielu_of(*inputs), wanted, gradients[0]))
        return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)


class LearnedXielu(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """xIELU with two trained numbers, the same on all tensor-parallel ranks; Apertus.

    ``beta`` and ``eps`` are buffers, because models have them on disk.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        alpha_p, alpha_n, beta, eps = (torch.tensor(number, dtype=config.params_dtype) for number in XIELU)
        self.alpha_p, self.alpha_n = nn.Parameter(alpha_p[None]), nn.Parameter(alpha_n[None])
        self.beta, self.eps = nn.Buffer(beta), nn.Buffer(eps)
        # Gradients are partial sums over a rank's channels. Megatron averages them because of this mark, so forward()
        # multiplies them by the number of ranks.
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True

    def forward(self, values: Tensor) -> Tensor:
        """Return the activation of [s, b, ffn / tp]."""
        ranks = self.config.tensor_model_parallel_size
        alphas = (scale_gradient(alpha, ranks) if ranks > 1 else alpha for alpha in (self.alpha_p, self.alpha_n))
        numbers = (number.to(values.dtype) for number in (*alphas, self.beta, self.eps))
        activated: Tensor = _Xielu.apply(values, *numbers)  # type: ignore[no-untyped-call]
        return activated


def learn_activations(chunk: nn.Module) -> None:
    """Make xIELU a trained module in every MLP of a chunk that has it."""
    for module in chunk.modules():
        if isinstance(module, MLP) and module.activation_func is xielu:
            module.activation_func = LearnedXielu(module.config)
