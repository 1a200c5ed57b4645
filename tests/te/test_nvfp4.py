# SPDX-License-Identifier: Apache-2.0
"""NVFP4: the sixteen values of E2M1, the scales of blocks, TransformerEngine's own reference, and training."""

import importlib
import math
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformer_engine as te
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.te_cpu import casts, gemm
from lightning_mcore.te_cpu import quantize as kernels
from lightning_mcore.te_cpu.enums import DType
from tests.support.ranks import run_ranks
from tests.te.runs import Counting, Numbers, Run, make_model, make_trainer

# E2M1 of "OCP Microscaling Formats (MX) v1.0", table 5: bits of sign, exponent and mantissa, and the value.
PUBLISHED = {
    0b0000: 0.0, 0b0001: 0.5, 0b0010: 1.0, 0b0011: 1.5, 0b0100: 2.0, 0b0101: 3.0, 0b0110: 4.0, 0b0111: 6.0,
    0b1000: -0.0, 0b1001: -0.5, 0b1010: -1.0, 0b1011: -1.5, 0b1100: -2.0, 0b1101: -3.0, 0b1110: -4.0, 0b1111: -6.0,
}  # fmt: skip


def meaning(code: int) -> float:
    """Return what a code means, by the definition of the format: exponent of two bits, bias 1, mantissa of one bit."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def nearest(number: float) -> int:
    """Return the code of the nearest value, the even one of two; saturated."""
    best = min(range(8), key=lambda code: (abs(PUBLISHED[code] - min(abs(number), 6.0)), code & 1))
    return best | 8 if math.copysign(1, number) < 0 else best


def test_the_sixteen_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = casts.fp4_values((codes[::2] | codes[1::2] << 4)[None])[0]
    assert values.tolist() == list(PUBLISHED.values()) == [meaning(code) for code in PUBLISHED]
    assert math.copysign(1, float(values[8])) == -1
    assert casts.cast_to_fp4(values[None])[0].tolist() == (codes[::2] | codes[1::2] << 4).tolist()


def test_a_cast_is_the_nearest_value() -> None:
    exact = torch.tensor(list(PUBLISHED.values())[:8])
    ties = (exact[1:] + exact[:-1]) / 2
    random = 3 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    numbers = torch.cat((random, exact, -exact, ties, -ties, torch.tensor([1e9, -1e9, math.inf, -math.inf])))
    data = casts.cast_to_fp4(numbers[None])[0]
    codes = torch.stack((data & 15, data >> 4), -1).flatten().tolist()
    assert codes == [nearest(number) for number in numbers.tolist()]


def test_random_rounding_takes_one_of_the_two_nearest_values_and_is_right_on_average() -> None:
    torch.manual_seed(0)
    numbers = torch.tensor([0.1, 0.5, 0.7, 1.9, 2.25, 3.5, 5.5, -0.2, -4.5, 7.0])
    rounded = casts.fp4_values(casts.cast_to_fp4(numbers.expand(20_000, -1), stochastic=True))
    table = sorted(set(PUBLISHED.values()))
    for number, column in zip(numbers.tolist(), rounded.t(), strict=True):
        number = min(number, 6.0)
        below = max(value for value in table if value <= number)
        above = min(value for value in table if value >= number)
        assert set(column.tolist()) <= {below, above}
        assert float(column.mean()) == pytest.approx(number, abs=0.03)


def sample(rows: int = 64, columns: int = 96) -> Tensor:
    """Numbers of many sizes in bf16, with blocks of zeros and outliers."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.randint(-4, 4, (rows, 1), generator=generator))
    values = torch.randn(rows, columns, generator=generator) * sizes
    values[:16, :16] = 0
    values[20, 30] = 300
    return values.bfloat16()


def quantized_by_blocks(values: Tensor, square: bool) -> tuple[Tensor, Tensor]:
    """Return values and scales of 16 or 16x16 values, block by block, from the recipe's definition."""
    values, amax = values.float(), float(values.abs().max())
    result, scales = torch.zeros_like(values), torch.zeros(values.shape[0], values.shape[1] // 16)
    height = 16 if square else 1
    for row in range(0, values.shape[0], height):
        for column in range(0, values.shape[1], 16):
            place = (slice(row, row + height), slice(column, column + 16))
            wanted = float(values[place].abs().max()) / 6 * (2688 / amax)  # the largest becomes 448
            scale = float(torch.tensor(min(wanted, 448.0)).to(torch.float8_e4m3fn))
            scales[row : row + height, column // 16] = scale
            step = scale * amax / 2688
            codes = [nearest(number / step) if step else 0 for number in values[place].flatten().tolist()]
            result[place] = torch.tensor([PUBLISHED[code] for code in codes]).view_as(values[place]) * step
    return result, scales


def nvfp4(**settings: Any) -> Any:
    import transformer_engine.pytorch.tensor as tensors

    with cpu_runtime():
        return tensors.NVFP4Quantizer(**settings)


def quantized_by(quantizer: Any, values: Tensor) -> Any:
    with cpu_runtime():
        return kernels.quantize(values, quantizer)


@pytest.mark.parametrize("square", [False, True])
def test_a_block_has_a_scale_in_e4m3_and_the_tensor_one_in_fp32(square: bool) -> None:
    values = sample()
    quantized = quantized_by(nvfp4(with_2d_quantization=square), values)
    for matrix, found, scales in (
        (values, kernels.to_float(quantized), quantized._rowwise_scale_inv),
        (values.t(), kernels.to_float(quantized, columnwise=True).t(), quantized._columnwise_scale_inv),
    ):
        expected, expected_scales = quantized_by_blocks(matrix, square)
        distances = [(one - matrix.float()).abs() for one in (found, expected)]  # equal in the middle of two values
        assert torch.allclose(*distances, rtol=1e-5, atol=1e-5)
        own = scales.view(torch.float8_e4m3fn).float()[: matrix.shape[0], : matrix.shape[1] // 16]
        assert torch.equal(own, expected_scales)
    assert float(quantized._amax_rowwise) == float(quantized._amax_columnwise) == 300


def reference_quantizer(square: bool, transformed: bool) -> Any:
    """TransformerEngine's own, in plain PyTorch, with which its tests compare the kernels of a GPU."""
    names = (
        ("quantization_nvfp4", "utils") if te.__version__.startswith("2.11") else ("reference_nvfp4", "reference_utils")
    )
    recipes, formats = (importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{name}") for name in names)
    shape = (16, 16) if square else (1, 16)
    return recipes.NVFP4QuantizerRef(formats.Fp4Formats.E2M1, quant_tile_shape=shape, with_rht=transformed)


@pytest.mark.parametrize(("square", "transformed"), [(False, False), (False, True), (True, False)])
def test_the_bits_are_those_of_transformer_engines_reference(square: bool, transformed: bool) -> None:
    values = sample()
    quantizer = nvfp4(with_2d_quantization=square, with_rht=transformed, with_post_rht_amax=transformed)
    ours = quantized_by(quantizer, values)
    reference = reference_quantizer(square, transformed).quantize(values)
    for data, scale, amax, codes, scales, largest in (
        (ours._rowwise_data, ours._rowwise_scale_inv, ours._amax_rowwise, reference.data, reference.scale,
         reference.global_amax_row),
        (ours._columnwise_data, ours._columnwise_scale_inv, ours._amax_columnwise, reference.data_t, reference.scale_t,
         reference.global_amax_col),
    ):  # fmt: skip
        assert torch.equal(data, codes)
        assert torch.equal(scale[: scales.shape[0], : scales.shape[1]], scales.view(torch.uint8))
        assert torch.equal(amax, largest)


@pytest.mark.parametrize("dtype", [DType.kFloat32, DType.kBFloat16])
@pytest.mark.parametrize(("square", "transformed"), [(False, True), (True, False)])
def test_products_have_the_bits_of_transformer_engines_reference(square: bool, transformed: bool, dtype: DType) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in ((512, 96), (64, 96), (512, 64)))
    of_weight = nvfp4(with_2d_quantization=square), reference_quantizer(square, False)
    of_others = nvfp4(with_rht=transformed, with_post_rht_amax=transformed), reference_quantizer(False, transformed)
    ours, references = {}, {}
    for name, values, (quantizer, reference) in (("x", x, of_others), ("w", w, of_weight), ("dy", dy, of_others)):
        ours[name], references[name] = quantized_by(quantizer, values), reference.quantize(values)
    of_kinds = "quantization" if te.__version__.startswith("2.11") else "gemm"
    kinds = importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{of_kinds}").GEMMType
    for a, transpose_a, b, transpose_b, kind in (
        ("w", True, "x", False, kinds.FPROP),
        ("w", False, "dy", False, kinds.DGRAD),
        ("x", False, "dy", True, kinds.WGRAD),
    ):
        found = gemm.generic_gemm(
            ours[a], transpose_a, ours[b], transpose_b, None, None, dtype, None, None, False, None, False, None, 0,
            False, False,
        )[0]  # fmt: skip
        left, right = references[b], references[a]
        data = (left.data_t, left.scale_t) if transpose_b else (left.data, left.scale)
        others = (right.data, right.scale) if transpose_a else (right.data_t, right.scale_t)
        expected = of_others[1].qgemm(
            data[0], others[0], None, found.dtype, data[1], others[1], gemm_type=kind, qresult_x=left, qresult_w=right
        )
        assert torch.equal(found, expected)


def test_the_transform_cancels_out_in_the_gradient_of_a_weight() -> None:
    """Signs and a Hadamard matrix, written out: ``(-1) ** popcount(i & j) / 4``."""
    quantizer = nvfp4(with_rht=True, with_post_rht_amax=True)
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)])
    signs = quantizer.rht_matrix.float() @ hadamard  # the matrix is its own inverse
    assert torch.equal(signs.abs(), torch.eye(16))
    assert {1.0, -1.0} == set(signs.diagonal().tolist())
    x, dy = sample(), sample(64, 32)
    x[20, 30] = dy[20] = 1.0
    quantized = [quantized_by(quantizer, tensor) for tensor in (x, dy)]
    found = gemm.generic_gemm(
        quantized[0], False, quantized[1], True, None, None, DType.kFloat32, None, None, False, None, True, None, 0,
        False, False,
    )[0]  # fmt: skip
    exact = dy.double().t() @ x.double()
    assert (found - exact).norm() < 0.15 * exact.norm()
    mixed = [kernels.to_float(one, columnwise=True).double() for one in quantized]
    assert torch.allclose(found.double(), mixed[1].t() @ mixed[0], rtol=1e-4, atol=1e-3)


def test_what_nvfp4_cannot_quantize_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nvfp4 quantizes bf16 alone, and this tensor is torch\.float32; train in"):
        quantized_by(nvfp4(with_rht=True, with_post_rht_amax=True), sample().float())


NVFP4 = Run(precision="bf16-mixed", fp8={"fp4_recipe": "nvfp4"}, steps=4)
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}


def train_all(folder: str, layout: dict[str, Any], ranks: int) -> dict[str, tuple[list[float], list[float]]]:
    """Train with nvfp4 and in bf16, and go on from a checkpoint in the middle; return losses and gradient norms."""
    torch.set_num_threads(1)
    run = replace(NVFP4, layout=layout)
    runs = {"nvfp4": run, "bf16": replace(run, fp8={}), "resumed": run}
    if ranks == 1:
        experts = {"num_moe_experts": 2, "moe_ffn_hidden_size": 256, "moe_grouped_gemm": True}
        runs["experts"] = replace(run, transformer=experts, steps=2)
        runs["outer layers in bf16"] = replace(
            run, fp8=run.fp8 | {"first_last_layers_bf16": True}, transformer={"num_layers": 3}, steps=1
        )
    found = {}
    for name, one in runs.items():
        pl.seed_everything(1, verbose=False)
        numbers = Numbers()
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [numbers, saving] if name == "nvfp4" else [numbers]
        trainer = make_trainer(one, ranks, *callbacks, enable_checkpointing=name == "nvfp4")
        path = f"{folder}/step=2.ckpt" if name == "resumed" else None
        trainer.fit(make_model(one), DataLoader(Counting(), batch_size=4), ckpt_path=path)
        found[name] = numbers.losses, numbers.norms
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "ranks"), [(SHARDED, 1), (TP2 | SHARDED, 2)], ids=["one-rank", "tp2-sp"])
def test_nvfp4_trains_near_bf16_and_goes_on_bit_for_bit(layout: dict[str, Any], ranks: int, tmp_path: Any) -> None:
    found = run_ranks(ranks, train_all, str(tmp_path), layout, ranks, timeout=120)[0]
    (losses, norms), in_bf16 = found["nvfp4"], found["bf16"]
    assert losses != in_bf16[0]
    assert losses == pytest.approx(in_bf16[0], rel=0.01)  # measured: 4.7e-3
    assert norms == pytest.approx(in_bf16[1], rel=0.1)  # measured: 5.3e-2
    assert losses[-1] < losses[0]
    assert found["resumed"] == (losses[2:], norms[2:])
