# SPDX-License-Identifier: Apache-2.0
"""Megatron's linear layers during generation, and below adapters: the product alone, which is all that they compute.

Megatron runs each product in an autograd function, between two more for the communication of tensor-parallel ranks,
even with one rank and no gradient. For a single token they take longer than the product. Below adapters
(``adapted_layers.py``) there are gradients, but not of the frozen weight.
"""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn


@contextlib.contextmanager
def direct_products(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let Megatron's own linear layers with whole weights only multiply, inside the ``with`` block.

    Nothing in it may need gradients. Results are the same bit for bit.
    """
    layers = [module for module in modules if is_plain(module)]
    for layer in layers:
        vars(layer)["forward"] = partial(multiply, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def is_plain(layer: Any) -> bool:
    """Return whether a layer computes what Megatron's class does, with a weight that is not split."""
    kind = next((kind for kind in (ColumnParallelLinear, RowParallelLinear) if isinstance(layer, kind)), None)
    if kind is None or "forward" in vars(layer):
        return False
    own = (type(layer).forward, type(layer)._forward_impl)
    return own == (kind.forward, kind._forward_impl) and layer.tp_group.size() == 1 and not layer.sequence_parallel


def multiply(
    layer: Any, inputs: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the output and the bias that is left to add, as Megatron's ``forward``; there is nothing to gather.

    For a plain layer. A trained weight needs Megatron's, which adds its gradient to Megatron's buffer.
    """
    own = layer._parameters  # faster than attributes, which torch looks up here
    if isinstance(layer, ColumnParallelLinear):
        # Megatron multiplies a view of the inputs. torch chooses the kernel by the strides, which differ: a single
        # sequence of 32 tokens may have (32, 1024, 1), but its view has (32, 32, 1).
        inputs = inputs.view(inputs.shape)
    output = inputs.matmul((own["weight"] if weight is None else weight).t())
    bias: Tensor | None = own["bias"]
    if bias is None or layer.skip_bias_add:
        return output, bias
    return output + bias, None
