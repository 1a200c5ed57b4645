# SPDX-License-Identifier: Apache-2.0
"""Activations that ``torch.nn.functional`` does not name, and that need no compiler as megatron-core's do."""

from torch import Tensor
from torch.nn import functional


def gelu_tanh(values: Tensor) -> Tensor:
    """Return GELU in its approximation by tanh, of any shape and float dtype."""
    return functional.gelu(values, approximate="tanh")


def relu_squared(values: Tensor) -> Tensor:
    """Return the square of ReLU, of any shape and float dtype."""
    return functional.relu(values).square()
