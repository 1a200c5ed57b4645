# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4, as in the published gpt-oss: four bits for a value, and one exponent for 32 values of a row.

A matrix is two tensors of bytes on the disk. ``<name>_blocks`` [..., rows, channels / 32, 16] has two values in each
byte, the first in the lower half. ``<name>_scales`` [..., rows, channels / 32] has the exponents, plus 127.
``safetensors.py`` reads them as transformers dequantises them: a tensor ``<name>`` [..., channels, rows] in bf16, which
holds every product exactly.
"""

import torch
from torch import Tensor

from lightning_mcore.hf.weight_rules import Shape

BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of the two tensors."""

_BYTES, _VALUES = 16, 32  # of a block
_BIAS = 127  # of the exponents
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised_shape(blocks: Shape, scales: Shape) -> Shape | None:
    """Return the shape of the dequantised tensor; None if the shapes of the two tensors do not fit together."""
    if len(blocks) < 3 or blocks[-1] != _BYTES or blocks[:-1] != scales:
        return None
    return (*blocks[:-3], blocks[-2] * _VALUES, blocks[-3])


def dequantise(blocks: Tensor, scales: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Return a rectangle of the dequantised tensor.

    Args:
        blocks: [..., rows, channels / 32, 16] uint8.
        scales: [..., rows, channels / 32] uint8.
        index: The rectangle in the dequantised tensor, [..., channels, rows].

    Returns:
        The rectangle in bf16, of the shape that ``index`` gives it.
    """
    *outer, channels, rows = index
    first = channels.start // _VALUES
    groups = slice(first, -(-channels.stop // _VALUES))
    packed, exponents = blocks[(*outer, rows, groups)], scales[(*outer, rows, groups)].int() - _BIAS
    table = torch.tensor((*_POSITIVE, *(-value for value in _POSITIVE)), dtype=torch.bfloat16)
    values = torch.stack((table[(packed & 0xF).int()], table[(packed >> 4).int()]), dim=-1).flatten(-2)
    whole = torch.ldexp(values, exponents[..., None]).flatten(-2)
    return whole[..., channels.start - first * _VALUES : channels.stop - first * _VALUES : channels.step].mT
