# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 and FP4, and the scales that TransformerEngine's recipes choose for them; ``quantize.py`` calls it.

FP8 is E4M3 or E5M2, rounded to nearest even and saturated. FP4 is E2M1: sixteen values, two in a byte, the first in the
lower half. Sources: ``recipe_common.cuh``, ``ptx.cuh`` (``float_to_e8m0``) and
``quantize_transpose_vector_blockwise_fp4.cu`` of TransformerEngine 2.11, ``reference_nvfp4.py`` of 2.20.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_mcore.te_cpu.enums import TORCH_DTYPES, DType

LARGEST_FP32 = torch.finfo(torch.float32).max
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The values of FP4 without their sign, which is bit 3 of a code."""
_BETWEEN = (E2M1[1:] + E2M1[:-1]) / 2
_BETWEEN[1::2] = torch.nextafter(_BETWEEN[1::2], torch.zeros(()))  # halfway between two values: the even code
LARGEST_NVFP4 = 6.0 * 448.0  # the largest FP4 value times the largest scale in E4M3


def fp8_format(dtype: Any) -> tuple[torch.dtype, float]:
    """Return torch's dtype for one of the two FP8 formats, and its largest value."""
    kind = TORCH_DTYPES[DType(int(dtype))]
    return kind, torch.finfo(kind).max


def cast(values: Tensor, dtype: Any) -> Tensor:
    """Round fp32 values to the bits of FP8 values, uint8; values out of range become the largest one."""
    kind, top = fp8_format(dtype)
    return values.clamp(-top, top).to(kind).view(torch.uint8)


def scale_of(
    amax: Tensor, top: float, epsilon: float = 0.0, power_of_two: bool = False, limit: float = LARGEST_FP32
) -> Tensor:
    """Return the factor, fp32, by which ``amax`` or ``epsilon`` becomes ``top``; 1 where amax is 0, infinite or NaN."""
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    ratio = torch.full_like(amax, top) / amax  # a Python number divided by a tensor is rounded twice
    scale = torch.where(amax.isfinite() & (amax != 0), ratio, torch.ones_like(amax))
    scale = torch.where(scale.isinf(), torch.full_like(scale, limit), scale)
    if power_of_two:
        scale = (scale.contiguous().view(torch.int32) & -0x800000).view(torch.float32)  # sign and exponent
    return scale


def exponent_of(amax: Tensor, top: float) -> Tensor:
    """Return the exponents of ``mxfp8``, int32: the smallest powers of two that are at least ``amax / top``.

    They are E8M0 numbers, which mean ``2 ** (number - 127)``; 255 is NaN.
    """
    # A mantissa rounds up; only a subnormal up to half of the smallest normal number keeps exponent 0.
    value = (amax.float() * (torch.ones(()) / top)).contiguous()
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = torch.where(value.isinf(), torch.full_like(exponent, 0xFE), exponent + up.int())
    return torch.where(value.isnan(), torch.full_like(exponent, 0xFF), exponent)


def reciprocal_of(exponent: Tensor) -> Tensor:
    """Return ``2 ** (127 - exponent)``, the factor of ``mxfp8``, fp32; 1 for exponent 0."""
    return power(torch.where(exponent == 0, 0, 127 - exponent.int()))


def power(exponent: Tensor) -> Tensor:
    """Return 2 to the power of each integer, fp32."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def tiles(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Cut a matrix [m, n] into blocks [m / rows, rows, n / columns, columns], rounded up and padded with zeros."""
    m, n = matrix.shape
    padded = functional.pad(matrix, (0, -n % columns, 0, -m % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def spread(scale: Tensor, shape: torch.Size | tuple[int, int], rows: int, columns: int) -> Tensor:
    """Return each element's scale in a matrix [m, n] from its block's; blocks outside the matrix are ignored."""
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def cast_to_fp4(values: Tensor, stochastic: bool = False) -> Tensor:
    """Round fp32 values [m, n] to FP4, [m, n / 2] uint8; n is even. Values out of range become 6 or -6.

    ``stochastic`` rounds up or down at random, so that the mean is right; otherwise to nearest even.
    """
    size = values.abs().contiguous()
    if stochastic:
        below = torch.bucketize(size.clamp(max=6.0), E2M1, right=True) - 1
        above = (below + 1).clamp(max=7)
        share = (size - E2M1[below]) / (E2M1[above] - E2M1[below]).clamp(min=0.5)
        codes = torch.where(torch.rand(size.shape) < share, above, below)
    else:
        codes = torch.bucketize(size, _BETWEEN)
    codes = codes.to(torch.uint8) | values.signbit().to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def fp4_values(data: Tensor) -> Tensor:
    """Return the values [m, n] fp32 of FP4 bytes [m, n / 2]."""
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).int()
    return torch.cat((E2M1, -E2M1))[codes]


@functools.cache
def _divides_blocks() -> bool:
    """Whether a block's largest value is divided by 6, as in TransformerEngine 2.11; 2.20 divides the shared scale."""
    return bool(importlib.import_module("transformer_engine").__version__.startswith("2.11."))


def quantize_nvfp4(matrix: Tensor, amax: Tensor, rows: int, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Round a matrix [m, n] fp32, n a multiple of 16, to FP4 with the scales of ``nvfp4``.

    Blocks are ``rows`` (1 or 16) by 16. Returns bytes [m, n / 2], and E4M3 scales [m, n / 16] as uint8; the scale of a
    block of 16 rows is in each of its rows. :func:`nvfp4_values` reads them.
    """
    # A value is its code times its block's scale, divided by the fp32 scale that all blocks share. With amax 12 the
    # shared scale is 6 * 448 / 12 = 224. A block with 12 and 1.3 has the scale 12 / 6 * 224 = 448, so its values are
    # multiplied by 224 / 448 = 0.5: 6 and 0.65, which rounds to 0.5. Read back, that is 12 and 1.
    shared = (torch.full_like(amax, LARGEST_NVFP4) / amax).clamp(max=LARGEST_FP32)
    shared = torch.where((amax == 0) | (shared == 0), 1.0, shared)
    largest = tiles(matrix, rows, 16).abs().amax(dim=(1, 3))
    scale = largest / 6.0 * shared if _divides_blocks() else largest * (shared * (1 / E2M1[-1]))
    scales = cast(scale, DType.kFloat8E4M3)
    inverse = (1.0 / (scales.view(torch.float8_e4m3fn).float() * (1.0 / shared))).clamp(max=LARGEST_FP32)
    codes = cast_to_fp4(matrix * spread(inverse, matrix.shape, rows, 16), stochastic)
    return codes, spread(scales, (matrix.shape[0], scales.shape[1]), rows, 1)


def nvfp4_values(data: Tensor, scales: Tensor, amax: Tensor | float) -> Tensor:
    """Return the values [m, n] fp32 of bytes [m, n / 2], with scales [m or more, n / 16 or more] and amax [1]."""
    values = fp4_values(data)
    factor = scales.view(torch.float8_e4m3fn).float() * (amax / LARGEST_NVFP4)
    return values * spread(factor, values.shape, 1, 16)
