# SPDX-License-Identifier: Apache-2.0
"""Weights that are kept in FP8 (``fp8_param``), filled with values that are read.

A part of such a weight cannot be written, because a block of values shares a scale. And Megatron makes the fp32 copies
that its optimizer steps from the values that TransformerEngine keeps of the initialisation.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor, nn

_KEPT = "_high_precision_init_val"  # TransformerEngine's name, also of the methods that Megatron calls


@contextlib.contextmanager
def filled_as_plain(modules: Iterable[nn.Module]) -> Iterator[dict[Tensor, Tensor]]:
    """Let FP8 weights be plain parameters inside the block, and quantize what was written into them at its end.

    Args:
        modules: The chunks of this rank, wrapped or not.

    Yields:
        A dictionary that has each FP8 weight and the values written into it, of its shape and dtype, after the block.
    """
    written: dict[Tensor, Tensor] = {}
    plain: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (owner, name, parameter)
        for module in modules
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and is_float8tensor(parameter)
    ]
    try:
        for owner, name, parameter in places:
            if parameter not in plain:
                values = parameter.dequantize().detach()
                plain[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            owner._parameters[name] = plain[parameter]
        yield written
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter
    with torch.no_grad():
        for parameter, values in plain.items():
            parameter.copy_(values)
            written[parameter] = values.detach()
            if hasattr(parameter, _KEPT):  # no optimizer has been made yet
                setattr(parameter, _KEPT, values.detach().cpu())
