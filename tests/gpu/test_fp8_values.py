# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's kernels on a GPU give the FP8 numbers and scales of the formulas that our own are held to.

So both compute the same bits, though no test can run both in one process.
"""

from typing import Any

import pytest
import torch

from lightning_mcore.te_cpu.enums import DType
from tests.gpu.runs import DEVICE
from tests.te.test_quantize import blockwise_scaling, current_scaling, delayed_scaling, sample, te

pytestmark = [pytest.mark.gpus(te=True), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def on_device(kind: Any) -> Any:
    """Return TransformerEngine's own name of an FP8 format."""
    import transformer_engine_torch

    return getattr(transformer_engine_torch.DType, kind.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling(power_of_two: bool, dtype: torch.dtype) -> None:
    values = sample(dtype=dtype)
    quantizer = te().Float8CurrentScalingQuantizer(
        on_device(DType.kFloat8E4M3), DEVICE, force_pow_2_scales=power_of_two
    )
    quantized = quantizer(values.to(DEVICE))
    codes, inverse = current_scaling(values, power_of_two)
    assert torch.equal(quantized._data.cpu(), codes)
    assert torch.equal(quantized._scale_inv.cpu(), inverse)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blockwise_scaling(power_of_two: bool, square: bool) -> None:
    values = sample()
    quantizer = te().Float8BlockQuantizer(
        on_device(DType.kFloat8E4M3), rowwise=True, columnwise=True, force_pow_2_scales=power_of_two,
        block_scaling_dim=2 if square else 1,
    )  # fmt: skip
    quantized = quantizer(values.to(DEVICE))
    for source, data, scales in (
        (values, quantized._rowwise_data, quantized._rowwise_scale_inv),
        (values.t(), quantized._columnwise_data, quantized._columnwise_scale_inv),
    ):
        codes, inverse = blockwise_scaling(source, square, power_of_two)
        assert torch.equal(data.cpu(), codes)
        assert torch.equal(scales.cpu()[: inverse.shape[0], : inverse.shape[1]], inverse)


def test_delayed_scaling() -> None:
    values, scale, amax = sample(), torch.tensor([3.0], device=DEVICE), torch.zeros(1, device=DEVICE)
    quantized = te().Float8Quantizer(scale, amax, on_device(DType.kFloat8E5M2))(values.to(DEVICE))
    codes, inverse = delayed_scaling(values, 3.0)
    assert torch.equal(quantized._data.cpu(), codes)
    assert float(amax) == float(values.abs().max())
    assert torch.equal(quantized._scale_inv.cpu(), inverse)
