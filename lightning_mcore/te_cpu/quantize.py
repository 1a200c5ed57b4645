# SPDX-License-Identifier: Apache-2.0
"""Quantize to FP8 and FP4, with the scales of TransformerEngine's five recipes.

A value ``x`` is stored as ``cast(x * scale)`` next to ``1 / scale``. The recipes differ in how many values share a
scale: a whole tensor (``delayed`` and ``tensorwise``), 1x128 or 128x128 values (``blockwise``), 32 values whose scale
is a power of two (``mxfp8``), 16 or 16x16 values (``nvfp4``). ``casts.py`` has the casts; this file writes the results
into TransformerEngine's tensors. Data and scales are padded and oriented as its Python code expects from its own
kernels on compute capability 9.0.

Sources: ``delayed_scaling.cu`` and ``quantizer.cpp`` of TransformerEngine 2.11.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.te_cpu.casts import (
    LARGEST_FP32,
    LARGEST_NVFP4,
    cast,
    exponent_of,
    fp8_format,
    nvfp4_values,
    power,
    quantize_nvfp4,
    reciprocal_of,
    scale_of,
    spread,
    tiles,
)
from lightning_mcore.te_cpu.enums import TORCH_DTYPES, DType

_BLOCK = 32  # values of mxfp8 that share a scale
observer: Callable[[Any, Tensor, Any], None] | None = None
"""If set: called after each cast, with the quantizer, the fp32 values and the quantized tensor."""
_BUFFERS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
_CLASSES = {
    "Float8Quantizer": "Float8Tensor",
    "Float8CurrentScalingQuantizer": "Float8Tensor",
    "Float8BlockQuantizer": "Float8BlockwiseQTensor",
    "MXFP8Quantizer": "MXFP8Tensor",
    "NVFP4Quantizer": "NVFP4Tensor",
}
"""The class of the tensors that each of TransformerEngine's quantizers makes."""


def _transposed(data: Tensor) -> Tensor:
    """Move the last dimension to the front, as TransformerEngine keeps columnwise data."""
    return data.movedim(-1, 0).contiguous() if data.dim() else data


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _kind(quantizer: Any) -> str:
    """Return the class name of the tensors that a quantizer makes."""
    name = type(quantizer).__name__
    if name not in _CLASSES:
        raise NotImplementedError(f"{name} is not available on the CPU; choose one of TransformerEngine's recipes")
    if getattr(quantizer, "row_scaled_nvfp4", False) or getattr(quantizer, "nvfp4_use_4over6", False):
        raise NotImplementedError(
            "NVTE_NVFP4_ROW_SCALED_ACTIVATION and NVTE_NVFP4_4OVER6 are not available on the CPU; unset them"
        )
    return _CLASSES[name]


def _is_compact(quantizer: Any) -> bool:
    # Tensors that will be gathered keep their scales row by row, because a gather joins rows.
    return quantizer.block_scaling_dim == 1 and getattr(quantizer, "all_gather_usage", False)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None, pin_memory: bool = False
) -> Any:
    """Return a quantized tensor of zeros, with the orientations that the quantizer asks for."""
    return _empty(quantizer, tuple(shape), dtype, internal=False)


def _empty(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, internal: bool) -> Any:
    kind, module = _kind(quantizer), importlib.import_module("transformer_engine.pytorch.tensor")
    storage = getattr(module, f"{kind}Storage")
    fields: dict[str, Any] = {"quantizer": quantizer}
    fields["fp4_dtype" if kind == "NVFP4Tensor" else "fp8_dtype"] = quantizer.dtype
    if kind == "Float8Tensor":
        fields |= {"data": None, "data_transpose": None, "fp8_scale_inv": torch.ones(1)}
    else:
        fields |= dict.fromkeys(name[1:] for name in _BUFFERS)
    if kind == "Float8BlockwiseQTensor":
        fields["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    if kind == "NVFP4Tensor":
        fields |= {"amax_rowwise": None, "amax_columnwise": None}
    accepted = inspect.signature(storage.__new__).parameters
    if "data_format" in accepted:  # until 2.11
        formats = importlib.import_module("transformer_engine_torch").Float8BlockScaleTensorFormat
        fields["data_format"] = formats.COMPACT if _is_compact(quantizer) else formats.GEMM_READY
    if "with_gemm_swizzled_scales" in accepted:
        fields["with_gemm_swizzled_scales"] = False
    if internal:
        tensor = storage(**fields, **({"fake_dtype": dtype} if "fake_dtype" in accepted else {}))
    else:
        tensor = getattr(module, kind)(shape=shape, dtype=dtype, device=torch.get_default_device(), **fields)
    _allocate(tensor, quantizer, shape)
    return tensor


def _allocate(tensor: Any, quantizer: Any, shape: Sequence[int]) -> None:
    """Allocate the buffers of a tensor that its quantizer asks for, and drop the others."""
    rowwise, columnwise, kind = quantizer.rowwise_usage, quantizer.columnwise_usage, _kind(quantizer)
    shape = tuple(shape)
    if kind == "Float8Tensor":
        if not rowwise or tensor._data is None:
            tensor._data = torch.zeros(shape, dtype=torch.uint8) if rowwise else None
        if not columnwise or tensor._transpose is None:
            tensor._transpose = torch.zeros(shape[-1:] + shape[:-1], dtype=torch.uint8) if columnwise else None
        tensor._transpose_invalid = tensor._transpose is None
        return
    for wanted, side in ((rowwise, "rowwise"), (columnwise, "columnwise")):
        if wanted and getattr(tensor, f"_{side}_data") is not None:
            continue
        scales, data = _shapes(quantizer, shape, columnwise=side == "columnwise")
        of_scales = torch.float32 if kind == "Float8BlockwiseQTensor" else torch.uint8
        setattr(tensor, f"_{side}_data", torch.zeros(data, dtype=torch.uint8) if wanted else None)
        setattr(tensor, f"_{side}_scale_inv", torch.zeros(scales, dtype=of_scales) if wanted else None)
        if kind == "NVFP4Tensor":
            setattr(tensor, f"_amax_{side}", torch.zeros(1) if wanted else None)


def _shapes(quantizer: Any, shape: tuple[int, ...], columnwise: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shapes of the scales and of the data."""
    rows, columns = _matrix(torch.empty(shape, device="meta")).shape
    if _kind(quantizer) == "NVFP4Tensor":
        data = (columns, rows // 2) if columnwise else (*shape[:-1], columns // 2)
        return quantizer.get_scale_shape(shape, columnwise), data
    if _kind(quantizer) == "Float8BlockwiseQTensor":
        data = quantizer.get_columnwise_shape(shape) if columnwise else shape
        return quantizer.get_scale_shape(shape, columnwise), data

    # mxfp8: a tensor [200, 96] has 200 x 3 scales rowwise, padded to 256 x 4, and 7 x 96 columnwise, padded to 8 x 128.
    def up(number: int, multiple: int) -> int:
        return -(-number // multiple) * multiple

    if columnwise:
        return (up(-(-rows // _BLOCK), 4), up(columns, 128)), shape
    return (up(rows, 128), up(-(-columns // _BLOCK), 4)), shape


def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantize a tensor of two dimensions or more; without a quantizer, return it.

    ``output`` is the quantized tensor to write, None for a new one; it does not change if ``noop`` [1] is not zero.
    Raises NotImplementedError for a quantizer that is not available on the CPU, and ValueError if ``nvfp4`` gets
    another dtype than bf16.
    """
    if quantizer is None:
        return tensor
    if output is not None and noop is not None and bool(noop):
        return output
    values = to_float(tensor) if is_quantized(tensor) else tensor.detach().float()
    dtype = tensor.dtype if isinstance(tensor, Tensor) else torch.float32
    if output is None:
        output = _empty(quantizer, tuple(values.shape), dtype, bool(getattr(quantizer, "internal", False)))
    else:
        _allocate(output, quantizer, tuple(values.shape))
    if values.numel() > 0 or _kind(quantizer) == "Float8Tensor":
        _FILL[_kind(quantizer)](output, values, quantizer, dtype)
        if observer is not None and getattr(output, "_rowwise_data", output) is not None:
            observer(quantizer, values, output)
    return output


def lost(values: Tensor, output: Any) -> tuple[int, int]:
    """Count the values that a cast lost: beyond the range of their scale, and not zero but cast to zero."""
    saturated = 0
    if hasattr(output, "_scale_inv"):  # only a scale of earlier steps can be too small
        limit = fp8_format(output._fp8_dtype)[1] * output._scale_inv * (1 + 2**-20)  # for its rounding
        saturated = int((values.abs() > limit).sum())
    return saturated, int(((to_float(output) == 0) & (values != 0)).sum())


def _fill_tensor(output: Any, values: Tensor, quantizer: Any, dtype: torch.dtype) -> None:
    """Quantize with one scale: from earlier steps (``delayed``), or from these values (``tensorwise``)."""
    amax = values.abs().max() if values.numel() else values.new_zeros(())
    # delayed only records the largest value here; fused_amax_and_scale_update_after_reduction() uses it after the step.
    if type(quantizer).__name__ == "Float8Quantizer":
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
        scale = quantizer.scale.reshape(1).clone()
    else:
        if quantizer.with_amax_reduction:
            group = quantizer._canonicalized_amax_reduction_group()
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        top = fp8_format(quantizer.dtype)[1]
        scale = scale_of(amax.view(1), top, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    data = cast(values * scale, quantizer.dtype)
    output._scale_inv.copy_(scale.reciprocal().view_as(output._scale_inv))
    if output._data is not None:
        output._data.copy_(data.view_as(output._data))
    if output._transpose is not None:
        output._transpose.copy_(_transposed(data).view_as(output._transpose))
        output._transpose_invalid = False


def _write(into: Tensor, value: Tensor) -> None:
    """Write a matrix of scales into a larger buffer, followed by zeros."""
    into.zero_()
    into[: value.shape[0], : value.shape[1]] = value


def _fill_block(output: Any, values: Tensor, quantizer: Any, dtype: torch.dtype) -> None:
    matrix, size = _matrix(values), quantizer.block_len
    square, compact = quantizer.block_scaling_dim == 2, _is_compact(quantizer)
    top, limit = fp8_format(quantizer.dtype)[1], torch.finfo(dtype).max

    # Weights have 128 x 128 blocks. Other tensors have 1 x 128 blocks along the rows and 128 x 1 along the columns, so
    # their two orientations hold different FP8 values.
    def filled(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        amax = tiles(matrix, rows, columns).abs().amax(dim=(1, 3))
        scale = scale_of(amax, top, quantizer.amax_epsilon, quantizer.force_pow_2_scales, limit)
        return cast(matrix * spread(scale, matrix.shape, rows, columns), quantizer.dtype), scale.reciprocal()

    if output._rowwise_data is not None:
        data, inverse = filled(size if square else 1, size)
        output._rowwise_data.copy_(data.view_as(output._rowwise_data))
        _write(output._rowwise_scale_inv, inverse if square or compact else inverse.t())
    if output._columnwise_data is not None:
        data, inverse = filled(size, size if square else 1)
        output._columnwise_data.copy_((data if compact else data.t()).reshape(output._columnwise_data.shape))
        _write(output._columnwise_scale_inv, inverse.t() if square else inverse)


def _fill_mxfp8(output: Any, values: Tensor, quantizer: Any, dtype: torch.dtype) -> None:
    matrix = _matrix(values)
    for prefix, rows, columns in (("_rowwise", 1, _BLOCK), ("_columnwise", _BLOCK, 1)):
        data = getattr(output, f"{prefix}_data")
        if data is None:
            continue
        exponent = exponent_of(tiles(matrix, rows, columns).abs().amax(dim=(1, 3)), fp8_format(quantizer.dtype)[1])
        factor = spread(reciprocal_of(exponent), matrix.shape, rows, columns)
        data.copy_(cast(matrix * factor, quantizer.dtype).view_as(data))
        _write(getattr(output, f"{prefix}_scale_inv"), exponent.to(torch.uint8))


def _fill_nvfp4(output: Any, values: Tensor, quantizer: Any, dtype: torch.dtype) -> None:
    """Quantize the rows as they are, and the columns after the random Hadamard transform if the quantizer has it."""
    # The transform of inputs and gradients is orthogonal, so it cancels out in a weight's gradient.
    matrix = _matrix(values)
    columns = matrix.t()
    if quantizer.with_rht:
        if dtype != torch.bfloat16:
            raise ValueError(f"nvfp4 quantizes bf16 alone, and this tensor is {dtype}; train in bf16")
        mixed = columns.reshape(-1, 16) @ quantizer.rht_matrix.float()
        columns = mixed.to(torch.bfloat16).float().view_as(columns)
    for side, part in (("rowwise", matrix), ("columnwise", columns)):
        data, amax = getattr(output, f"_{side}_data"), part.abs().amax().view(1)
        if data is None:
            continue
        if quantizer.with_amax_reduction:
            group = quantizer._canonicalized_amax_reduction_group()
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        rows = 16 if quantizer.with_2d_quantization else 1
        codes, scales = quantize_nvfp4(part, amax, rows, quantizer.stochastic_rounding)
        data.copy_(codes.view_as(data))
        _write(getattr(output, f"_{side}_scale_inv"), scales)
        getattr(output, f"_amax_{side}").copy_(amax)


_FILL = {
    "Float8Tensor": _fill_tensor,
    "Float8BlockwiseQTensor": _fill_block,
    "MXFP8Tensor": _fill_mxfp8,
    "NVFP4Tensor": _fill_nvfp4,
}


def is_quantized(tensor: Any) -> bool:
    """Return whether this is one of TransformerEngine's quantized tensors."""
    return hasattr(tensor, "_fp8_dtype") or hasattr(tensor, "_fp4_dtype")


def shared_amax(tensor: Any, columnwise: bool = False) -> Any:
    """Return the amax [1] that decides ``nvfp4``'s shared scale; for other tensors, the amax of a scale of 1."""
    if not hasattr(tensor, "_fp4_dtype"):
        return LARGEST_NVFP4
    return tensor._amax_columnwise if _takes_columns(tensor, columnwise) else tensor._amax_rowwise


def to_float(tensor: Any, columnwise: bool = False, shared_scale: bool = True) -> Any:
    """Return the values of a tensor, quantized or not, as fp32 in its shape.

    ``columnwise`` reads the values that were quantized along the columns, if the tensor has both. With ``nvfp4``,
    ``shared_scale`` also applies the scale that blocks share, and columnwise values are a matrix, still transformed.
    """
    if not is_quantized(tensor):
        return tensor.detach().float()
    if hasattr(tensor, "_fp4_dtype"):
        return _fp4_to_float(tensor, columnwise, shared_scale)
    kind = TORCH_DTYPES[DType(int(tensor._fp8_dtype))]
    if hasattr(tensor, "_scale_inv"):
        if tensor._data is not None:
            return tensor._data.view(kind).float() * tensor._scale_inv.view(())
        return tensor._transpose.view(kind).movedim(0, -1).float() * tensor._scale_inv.view(())
    columnwise = columnwise if tensor._columnwise_data is not None else False
    columnwise = columnwise or tensor._rowwise_data is None
    data = (tensor._columnwise_data if columnwise else tensor._rowwise_data).view(kind).float()
    scales = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    if hasattr(tensor, "_is_2D_scaled"):
        return _block_to_float(tensor, data, scales, columnwise)
    rows, columns = (_BLOCK, 1) if columnwise else (1, _BLOCK)
    factor = power(scales.int() - 127)  # E8M0
    matrix = _matrix(data)
    return (matrix * spread(factor, matrix.shape, rows, columns)).view_as(data)


def _takes_columns(tensor: Any, columnwise: bool) -> bool:
    return tensor._rowwise_data is None or (columnwise and tensor._columnwise_data is not None)


def _fp4_to_float(tensor: Any, columnwise: bool, shared_scale: bool) -> Tensor:
    amax = shared_amax(tensor, columnwise) if shared_scale else LARGEST_NVFP4
    if _takes_columns(tensor, columnwise):
        return nvfp4_values(_matrix(tensor._columnwise_data), tensor._columnwise_scale_inv, amax).t()
    data = tensor._rowwise_data
    return nvfp4_values(_matrix(data), tensor._rowwise_scale_inv, amax).view(*data.shape[:-1], -1)


def _block_to_float(tensor: Any, data: Tensor, scales: Tensor, columnwise: bool) -> Tensor:
    square = tensor._is_2D_scaled
    data_format = getattr(tensor, "_data_format", None)
    compact = data_format is not None and data_format.name == "COMPACT" and not square
    if columnwise and not compact:
        data = data.movedim(0, -1)
    matrix = _matrix(data)
    if (columnwise and square) or not (columnwise or square or compact):
        scales = scales.t()
    size = 128
    rows, columns = (size, size) if square else (size, 1) if columnwise else (1, size)
    return (matrix * spread(scales, matrix.shape, rows, columns)).view(data.shape)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """Return a quantized tensor's values in its shape; ``dtype`` is TransformerEngine's ``DType``."""
    values: Tensor = to_float(tensor).to(TORCH_DTYPES[DType(int(dtype))])
    return values


def bgrad_quantize(tensor: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the sum [n] over the rows of a tensor [..., n], and the quantized tensor."""
    return _matrix(tensor).float().sum(0).to(tensor.dtype), quantize(tensor, quantizer)


def split_quantize(
    tensor: Tensor, sections: Sequence[int], quantizers: Sequence[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Cut a tensor [m, n] into pieces with these row counts, and quantize each."""
    parts = torch.split(tensor, list(sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def multi_tensor_quantize(tensors: Sequence[Tensor], quantizers: Sequence[Any]) -> list[Any]:
    """Quantize each tensor [..., k]."""
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensors, quantizers, strict=True)]


def fp8_transpose(tensor: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return FP8 data [..., n], uint8, as [n, ...], in ``out`` if given."""
    result = _transposed(tensor)
    return result if out is None else out.copy_(result.view_as(out))


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a tensor [a, b, ...] as contiguous [b, a, ...], in ``out`` if given."""
    result = tensor.transpose(0, 1).contiguous()
    return result if out is None else out.copy_(result)


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """Write a tensor's largest absolute value into ``amax`` [1]."""
    amax.copy_(tensor.abs().max().view_as(amax))


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, dtype: Any, margin: float
) -> None:
    """Update delayed scaling's scales, in place, from the amax of this step and of earlier steps.

    ``reduced`` [sum of tensors] is this step's amax over all ranks, module after module. ``histories`` are [length,
    tensors] for each module, ``scales`` [tensors]. ``algorithm`` is ``"max"`` or ``"most_recent"``; ``margin`` leaves
    powers of two free below the format's largest value.
    """
    # A history 0 2 7 and a new amax of 3.5 become 0 7 3.5: row 0 is for the next step. The largest is 7, so the scale
    # of E4M3 is 448 / 7 = 64; with "most_recent" 448 / 3.5 = 128. Without an amax, scale and history stay.
    top, start = fp8_format(dtype)[1] * 2.0**-margin, 0
    for history, scale in zip(histories, scales, strict=True):
        count = history.shape[1]
        new = reduced[start : start + count]
        start += count
        last = torch.where(new != 0, new, history[0])
        rolled = torch.cat([history[1:], last[None]])
        amax = rolled.nan_to_num(0.0, torch.inf).amax(0) if algorithm == "max" else last
        amax = torch.where(last != 0, amax, torch.zeros_like(amax))
        rolled[0] = 0
        history.copy_(torch.where(last != 0, rolled, history))
        updated = torch.where(amax.isfinite() & (amax > 0), torch.full_like(amax, top) / amax, scale)
        scale.copy_(updated.clamp(max=LARGEST_FP32))


# The weights of a distributed optimizer. A rank has a range of the flat weight [h, w], which begins at ``start``, so a
# block may be on two ranks: each writes its part of the amax, the ranks take the maximum, and each casts its range.


def _placed(fragment: Tensor, rows: int, columns: int, start: int) -> Tensor:
    whole = torch.zeros(rows * columns)
    whole[start : start + fragment.numel()] = fragment.float().reshape(-1)
    return whole.view(rows, columns)


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the amax of each block of a weight, over this rank's values, into ``amax`` [blocks, blocks]."""
    _write(amax, tiles(_placed(tensor, h, w, start_offset), block_len, block_len).abs().amax(dim=(1, 3)))


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: Any
) -> None:
    """Cast this rank's values of a weight to FP8, with the whole weight's scales [blocks, blocks]."""
    factor = spread(scale, (h, w), block_len, block_len).reshape(-1)[start_offset : start_offset + inp.numel()]
    out.view(-1)[: inp.numel()].copy_(cast(inp.float().view(-1) * factor, out_dtype))


def mxfp8_scaling_compute_partial_amax(
    tensor: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: int, cols: int, start_offset: int
) -> None:
    """Write the amax of each 32 values of a weight [rows, cols] in both directions, over this rank's values."""
    matrix = _placed(tensor, rows, cols, start_offset)
    for amax, (height, width) in ((amax_rowwise, (1, _BLOCK)), (amax_colwise, (_BLOCK, 1))):
        _write(amax, tiles(matrix, height, width).abs().amax(dim=(1, 3)))


def mxfp8_scaling_partial_cast(
    tensor: Tensor,
    output_rowwise: Tensor,
    output_colwise: Tensor,
    scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Cast this rank's values of a weight [rows, cols] to E4M3 in both directions, with the weight's exponents."""
    count = tensor.numel()
    for output, scales, (height, width) in (
        (output_rowwise, scale_inv_rowwise, (1, _BLOCK)),
        (output_colwise, scale_inv_colwise, (_BLOCK, 1)),
    ):
        factor = spread(reciprocal_of(scales), (rows, cols), height, width)
        factor = factor.reshape(-1)[start_offset : start_offset + count]
        output.view(-1)[:count].copy_(cast(tensor.float().view(-1) * factor, DType.kFloat8E4M3))


def multi_tensor_scale(chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Write ``lists[0]`` times a scale into ``lists[1]``, and 1 into ``noop`` if a result is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
        if not torch.isfinite(target).all():
            noop.fill_(1)


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], top: float, power_of_two: bool, epsilon: float
) -> None:
    """Write scales and their inverses; ``lists`` has the amax, the scales and the inverses."""
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, top, epsilon, power_of_two))
        inverse.copy_(scale.reciprocal())


def multi_tensor_compute_scale_inv_e8m0(chunk: int, noop: Any, lists: Sequence[Sequence[Tensor]], *rest: Any) -> None:
    """Write exponents for E4M3; ``lists`` has the amax and the exponents, uint8."""
    for amax, exponents in zip(*lists, strict=True):
        exponents.copy_(exponent_of(amax, 448.0).to(torch.uint8).view_as(exponents))
