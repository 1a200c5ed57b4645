# SPDX-License-Identifier: Apache-2.0
"""Activations that neither ``torch.nn.functional`` nor megatron-core names."""

from torch import Tensor
from torch.nn import functional


def gelu_tanh(values: Tensor) -> Tensor:
    """Return GELU in its approximation by tanh, of any shape and float dtype."""
    return functional.gelu(values, approximate="tanh")
