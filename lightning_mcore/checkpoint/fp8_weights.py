# SPDX-License-Identifier: Apache-2.0
"""Load values into weights that are kept in FP8, from a checkpoint or from a Hugging Face model."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor, nn

_KEPT_IN_FULL = "_high_precision_init_val"  # TransformerEngine's name, also of the methods that Megatron calls


@contextlib.contextmanager
def fp8_weights_as_plain(modules: Iterable[nn.Module]) -> Iterator[dict[Tensor, Tensor]]:
    """Let FP8 weights be plain parameters inside the block, and quantize what was written into them at its end.

    Yields a dict that maps each FP8 weight to the values written into it; it is filled when the block ends.
    """
    # A part of an FP8 weight cannot be written, because blocks of values share a scale. Megatron's optimizer makes its
    # fp32 copies from the initial values that TransformerEngine keeps, so these are replaced too.
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
            if hasattr(parameter, _KEPT_IN_FULL):  # no optimizer has been made yet
                setattr(parameter, _KEPT_IN_FULL, values.detach().cpu())
