# SPDX-License-Identifier: Apache-2.0
"""Quantizers give the bits of an independent cast, and the scales that the recipes define."""

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.te_cpu import quantize as kernels
from lightning_mcore.te_cpu.enums import DType

FORMATS = {DType.kFloat8E4M3: (4, 3, 7), DType.kFloat8E5M2: (5, 2, 15)}  # bits of exponent and mantissa, bias
LARGEST = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}


def value(code: int, dtype: DType) -> float:
    """Return what the bits of an FP8 number mean, by the definition of the format; NaN beyond the largest."""
    _, mantissa_bits, bias = FORMATS[dtype]
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (1 << mantissa_bits) - 1
    fraction = mantissa / (1 << mantissa_bits)
    size = math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias)
    if size > LARGEST[dtype]:
        size = math.nan
    return -size if code & 0x80 else size


def nearest(number: float, dtype: DType) -> int:
    """Return the code of the nearest FP8 number, the even one of two; saturated."""
    number = max(-LARGEST[dtype], min(LARGEST[dtype], number))
    codes = [code for code in range(128) if not math.isnan(value(code, dtype))]
    best = min(codes, key=lambda code: (abs(value(code, dtype) - abs(number)), code & 1))
    return best | 0x80 if math.copysign(1, number) < 0 else best


@pytest.mark.parametrize(
    ("dtype", "code", "meaning"),
    [
        (DType.kFloat8E4M3, 0x7E, 448.0),
        (DType.kFloat8E4M3, 0x08, 2.0**-6),
        (DType.kFloat8E4M3, 0x07, 0.875 * 2.0**-6),
        (DType.kFloat8E4M3, 0x01, 2.0**-9),
        (DType.kFloat8E5M2, 0x7B, 57344.0),
        (DType.kFloat8E5M2, 0x04, 2.0**-14),
        (DType.kFloat8E5M2, 0x03, 0.75 * 2.0**-14),
        (DType.kFloat8E5M2, 0x01, 2.0**-16),
    ],
)
def test_published_numbers_of_the_formats(dtype: DType, code: int, meaning: float) -> None:
    """Table 1 of "FP8 Formats for Deep Learning": largest, least normal, largest and least subnormal numbers."""
    assert value(code, dtype) == meaning
    assert kernels.cast(torch.tensor([meaning, -meaning]), dtype).tolist() == [code, code | 0x80]


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_cast_is_the_nearest_number(dtype: DType) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2000, generator=generator) * torch.exp2(torch.randint(-20, 18, (2000,), generator=generator))
    exact = torch.tensor([value(code, dtype) for code in range(128) if not math.isnan(value(code, dtype))])
    ties = (exact[1:] + exact[:-1]) / 2
    numbers = torch.cat((numbers, exact, ties, -ties, torch.tensor([1e9, -1e9, math.inf, -math.inf, 0.0])))
    expected = [nearest(number, dtype) for number in numbers.tolist()]
    assert kernels.cast(numbers, dtype).tolist() == expected


def te() -> Any:
    import transformer_engine.pytorch.tensor as tensors

    return tensors


def sample(rows: int = 256, columns: int = 384, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers of many sizes, with a block of zeros."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator))
    values = torch.randn(rows, columns, generator=generator) * sizes
    values[:128, :128] = 0
    return values.to(dtype)


def power_below(number: float) -> float:
    """Round down to a power of two."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1, exponent - 1) if mantissa > 0 else number


def as_fp32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def factor(block: Tensor, dtype: DType, power_of_two: bool) -> float:
    amax = float(block.abs().max())
    if amax == 0:
        return 1.0
    scale = as_fp32(LARGEST[dtype] / amax)
    return power_below(scale) if power_of_two else scale


def quantized_by_blocks(values: Tensor, rows: int, columns: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales, block by block."""
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    scales = torch.zeros(values.shape[0] // rows, values.shape[1] // columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = factor(values[place], DType.kFloat8E4M3, power_of_two)
            codes[place] = (values[place].float() * scales[i, j]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales


def current_scaling(values: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return the E4M3 codes of a tensor and its inverse scale, [1]."""
    scale = factor(values, DType.kFloat8E4M3, power_of_two)
    codes = (values.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.tensor([as_fp32(1 / scale)])


def blockwise_scaling(values: Tensor, square: bool, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return the E4M3 codes of a matrix and the inverse scales of its blocks, as TransformerEngine lays them out."""
    codes, scales = quantized_by_blocks(values, 128 if square else 1, 128, power_of_two)
    return codes, scales.reciprocal() if square else scales.reciprocal().t()


def delayed_scaling(values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the E5M2 codes of a tensor with a given scale, and its inverse, [1]."""
    codes = (values.float() * scale).clamp(-57344, 57344).to(torch.float8_e5m2).view(torch.uint8)
    return codes, torch.tensor([1 / scale])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling_takes_the_scale_of_the_whole_tensor(power_of_two: bool, dtype: torch.dtype) -> None:
    values = sample(dtype=dtype)
    quantizer = te().Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu", force_pow_2_scales=power_of_two)
    quantized = kernels.quantize(values, quantizer)
    codes, inverse = current_scaling(values, power_of_two)
    assert torch.equal(quantized._data, codes)
    assert torch.equal(quantized._transpose, codes.t())
    assert torch.equal(quantized._scale_inv, inverse)
    assert torch.equal(kernels.to_float(quantized), codes.view(torch.float8_e4m3fn).float() * quantized._scale_inv)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blockwise_scaling_takes_the_scale_of_each_block(power_of_two: bool, square: bool) -> None:
    values = sample()
    quantizer = te().Float8BlockQuantizer(
        DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=power_of_two,
        block_scaling_dim=2 if square else 1,
    )  # fmt: skip
    quantized = kernels.quantize(values, quantizer)
    codes, rowwise = blockwise_scaling(values, square, power_of_two)
    turned_codes, columnwise = blockwise_scaling(values.t(), square, power_of_two)
    assert torch.equal(quantized._rowwise_data, codes)
    assert torch.equal(quantized._columnwise_data, turned_codes)
    for stored, expected in ((quantized._rowwise_scale_inv, rowwise), (quantized._columnwise_scale_inv, columnwise)):
        assert stored.shape[1] % 4 == 0
        assert torch.equal(stored[: expected.shape[0], : expected.shape[1]], expected)
    near = values.float().abs().max() / 16
    assert torch.allclose(kernels.to_float(quantized), kernels.to_float(quantized, columnwise=True), atol=float(near))


def test_mxfp8_takes_the_power_of_two_not_below() -> None:
    values = sample()
    quantizer = te().MXFP8Quantizer(DType.kFloat8E4M3)
    quantized = kernels.quantize(values, quantizer)
    for matrix, data, scales in (
        (values, quantized._rowwise_data, quantized._rowwise_scale_inv),
        (values.t(), quantized._columnwise_data.t(), quantized._columnwise_scale_inv.t()),
    ):
        for row in range(0, matrix.shape[0], 37):
            for start in range(0, matrix.shape[1], 32):
                block = matrix[row, start : start + 32].float()
                ratio = as_fp32(float(block.abs().max()) * as_fp32(1 / 448))
                exponent = math.ceil(math.log2(ratio)) + 127 if ratio else 0
                assert int(scales[row, start // 32]) == exponent
                factor_of_block = 2.0 ** (127 - exponent) if exponent else 1.0
                codes = (block * factor_of_block).to(torch.float8_e4m3fn).view(torch.uint8)
                assert torch.equal(data[row, start : start + 32], codes)


def test_delayed_scaling_uses_the_scale_that_it_has_and_keeps_the_amax() -> None:
    values, scale, amax = sample(), torch.tensor([3.0]), torch.tensor([0.5])
    quantized = kernels.quantize(values, te().Float8Quantizer(scale, amax, DType.kFloat8E5M2))
    codes, inverse = delayed_scaling(values, 3.0)
    assert torch.equal(quantized._data, codes)
    assert float(amax) == float(values.abs().max())
    assert torch.equal(quantized._scale_inv, inverse)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scales_follow_from_the_history(algorithm: str) -> None:
    history = torch.tensor([[5.0, 0.0, 1.0], [2.0, 4.0, 0.0], [9.0, 1.0, 0.0]])
    scales = torch.tensor([7.0, 7.0, 7.0])
    reduced = torch.tensor([6.0, 3.0, 0.0])  # 0: what this rank has is taken
    kernels.fused_amax_and_scale_update_after_reduction(reduced, [history], [scales], algorithm, DType.kFloat8E4M3, 1)
    assert history.tolist() == [[0.0, 0.0, 0.0], [9.0, 1.0, 0.0], [6.0, 3.0, 1.0]]
    amax = [9.0, 4.0, 1.0] if algorithm == "max" else [6.0, 3.0, 1.0]
    assert scales.tolist() == pytest.approx([224 / number for number in amax])


def test_a_tensor_without_values_keeps_its_scale() -> None:
    history, scales = torch.zeros(2, 1), torch.tensor([5.0])
    kernels.fused_amax_and_scale_update_after_reduction(
        torch.zeros(1), [history], [scales], "max", DType.kFloat8E4M3, 0
    )
    assert scales.tolist() == [5.0]


@pytest.mark.parametrize(
    ("amax", "epsilon", "expected"),
    [(0.0, 0.0, 1.0), (math.inf, 0.0, 1.0), (math.nan, 0.0, 1.0), (0.5, 2.0, 224.0), (1e-44, 0.0, 3.0)],
)
def test_scales_where_there_is_no_ratio(amax: float, epsilon: float, expected: float) -> None:
    assert float(kernels.scale_of(torch.tensor(amax), 448.0, epsilon, limit=3.0)) == expected


def test_a_weight_in_pieces_is_quantized_as_a_whole_one() -> None:
    weight = sample(dtype=torch.float32)
    pieces = [(0, 10_000), (10_000, 70_000), (70_000, weight.numel())]
    amax = torch.zeros(2, 3)
    for start, end in pieces:
        own = torch.zeros(2, 3)
        kernels.fp8_block_scaling_compute_partial_amax(weight.view(-1)[start:end], own, 256, 384, start, 128)
        amax = torch.maximum(amax, own)
    scale = kernels.scale_of(amax, 448.0, power_of_two=True)
    data = torch.zeros(weight.numel(), dtype=torch.uint8)
    for start, end in pieces:
        part = weight.view(-1)[start:end]
        kernels.fp8_block_scaling_partial_cast(part, data[start:end], scale, 256, 384, start, 128, DType.kFloat8E4M3)
    whole = kernels.quantize(weight, te().Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False))
    assert torch.equal(data.view(256, 384), whole._rowwise_data)


def test_mxfp8_weights_in_pieces_are_quantized_as_whole_ones() -> None:
    weight = sample(dtype=torch.float32)
    whole = kernels.quantize(weight, te().MXFP8Quantizer(DType.kFloat8E4M3))
    amaxes = [torch.zeros_like(whole._rowwise_scale_inv.float()), torch.zeros_like(whole._columnwise_scale_inv.float())]
    for start, end in ((0, 50_000), (50_000, weight.numel())):
        own = [torch.zeros_like(amax) for amax in amaxes]
        kernels.mxfp8_scaling_compute_partial_amax(weight.view(-1)[start:end], own[0], own[1], 256, 384, start)
        amaxes = [torch.maximum(*pair) for pair in zip(amaxes, own, strict=True)]
    exponents = [torch.zeros_like(amax, dtype=torch.uint8) for amax in amaxes]
    kernels.multi_tensor_compute_scale_inv_e8m0(0, None, [amaxes, exponents])
    data = [torch.zeros(weight.numel(), dtype=torch.uint8) for _ in range(2)]
    for start, end in ((0, 50_000), (50_000, weight.numel())):
        kernels.mxfp8_scaling_partial_cast(
            weight.view(-1)[start:end], data[0][start:end], data[1][start:end], *exponents, 256, 384, start
        )
    assert torch.equal(data[0].view(256, 384), whole._rowwise_data)
    assert torch.equal(data[1].view(256, 384), whole._columnwise_data)


def test_transformer_engines_own_tensors_come_back() -> None:
    """A tensor that its quantizer makes on what it calls a CUDA device, and what ``dequantize`` returns."""
    with cpu_runtime():
        quantizer = te().Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")
        quantized = quantizer(sample(dtype=torch.float32))
        assert quantized.dequantize().shape == (256, 384)
        assert (quantized.dequantize() - sample(dtype=torch.float32)).abs().max() <= sample().abs().max() / 14
        again = quantizer.make_empty((256, 384), dtype=torch.float32, device=torch.device("cpu"))
        again.copy_(sample(dtype=torch.float32))
        assert torch.equal(again.dequantize(), quantized.dequantize())


def test_a_quantized_tensor_moves_to_the_meta_device_as_a_plain_one() -> None:
    with cpu_runtime():
        quantized = te().MXFP8Quantizer(DType.kFloat8E4M3)(sample())
        for moved in (quantized.to(device="meta"), quantized.to("meta")):
            plain = sample().to(device="meta")
            assert (moved.device, moved.dtype, moved.shape) == (plain.device, plain.dtype, plain.shape)
        for here in ("cuda", "cpu", 0, torch.device("cuda", 0), None):
            assert quantized.to(device=here) is quantized
