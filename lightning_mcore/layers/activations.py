# SPDX-License-Identifier: Apache-2.0
"""Activations that ``torch.nn.functional`` does not name, and that need no compiler as megatron-core's do."""

import torch
from torch import Tensor
from torch.nn import functional


def gelu_tanh(values: Tensor) -> Tensor:
    """Return GELU in its approximation by tanh, of any shape and float dtype."""
    return functional.gelu(values, approximate="tanh")


def gelu_sigmoid(values: Tensor) -> Tensor:
    """Return GELU in its approximation by a sigmoid, of any shape and float dtype."""
    return values * torch.sigmoid(1.702 * values)


def relu_squared(values: Tensor) -> Tensor:
    """Return the square of ReLU, of any shape and float dtype."""
    return functional.relu(values).square()
