# SPDX-License-Identifier: Apache-2.0
"""Activations that ``torch.nn.functional`` does not name; unlike megatron-core's, they need no compiler."""

import torch
from torch import Tensor
from torch.nn import functional


def gelu_tanh(values: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    return functional.gelu(values, approximate="tanh")


def gelu_sigmoid(values: Tensor) -> Tensor:
    """Return the sigmoid approximation of GELU."""
    return values * torch.sigmoid(1.702 * values)


def relu_squared(values: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return functional.relu(values).square()
