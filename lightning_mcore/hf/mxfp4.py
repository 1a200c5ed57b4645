# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4, as in the published gpt-oss: four bits per value, and one exponent per 32 values of a row.

On disk, a matrix is two tensors of bytes. ``<name>_blocks`` [..., rows, channels / 32, 16] has two values in each byte,
the first in the lower half. ``<name>_scales`` [..., rows, channels / 32] has the exponents, plus 127.
``safetensors.py`` reads them as transformers dequantises them: a tensor ``<name>`` [..., channels, rows] in bf16, which
holds every product exactly.
"""

import torch
from torch import Tensor

from lightning_mcore.hf.weight_rules import Shape

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors' names."""

_BYTES, _VALUES = 16, 32  # per block
_BIAS = 127
# The values of the 4-bit codes 0 to 7; codes 8 to 15 are the same with a minus sign
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised_shape(blocks: Shape, scales: Shape) -> Shape | None:
    """Return the shape of the dequantised tensor; None if the two shapes do not match.

    gpt-oss-20b: blocks [32, 5760, 90, 16] and scales [32, 5760, 90] are [32, 2880, 5760].
    """
    if len(blocks) < 3 or blocks[-1] != _BYTES or blocks[:-1] != scales:
        return None
    return (*blocks[:-3], blocks[-2] * _VALUES, blocks[-3])


def dequantise(blocks: Tensor, scales: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Return a rectangle of the dequantised tensor, in bf16, of the shape that ``index`` gives it.

    ``blocks`` are [..., rows, channels / 32, 16] uint8, ``scales`` [..., rows, channels / 32] uint8; ``index`` refers
    to the dequantised tensor, [..., channels, rows].
    """
    *outer, channels, rows = index
    first = channels.start // _VALUES
    # Whole blocks of 32 channels are unpacked; the last line cuts off what lies outside the rectangle
    groups = slice(first, -(-channels.stop // _VALUES))
    packed, exponents = blocks[(*outer, rows, groups)], scales[(*outer, rows, groups)].int() - _BIAS
    table = torch.tensor((*_POSITIVE, *(-value for value in _POSITIVE)), dtype=torch.bfloat16)
    # Byte 0x2A with scale 128: code 0xA is -1.0, code 2 is 1.0, and 2 ** (128 - 127) makes them -2.0 and 2.0
    values = torch.stack((table[(packed & 0xF).int()], table[(packed >> 4).int()]), dim=-1).flatten(-2)
    whole = torch.ldexp(values, exponents[..., None]).flatten(-2)
    return whole[..., channels.start - first * _VALUES : channels.stop - first * _VALUES : channels.step].mT
