# SPDX-License-Identifier: Apache-2.0
"""Matrix products of tensors that may be quantized, computed in fp32 from the values that they hold.

cuBLAS also sums in fp32 or wider, but in another order. The scale that all blocks of ``nvfp4`` share is applied to the
sum, as on a GPU: the terms have few bits without it, so their sum is seldom rounded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_mcore.te_cpu.casts import LARGEST_NVFP4
from lightning_mcore.te_cpu.enums import TORCH_DTYPES, DType
from lightning_mcore.te_cpu.quantize import quantize, shared_amax, to_float


def generic_gemm(
    a: Any,
    transpose_a: bool,
    b: Any,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Multiply matrices as a linear layer does: ``op(b) @ op(a)``, where ``op`` may transpose.

    Args:
        a: The weight [n, k] of a forward pass; its leading dimensions count as one.
        transpose_a: Multiply by ``a`` transposed.
        b: The input [..., k] of a forward pass, the gradient [..., n] of a backward pass.
        transpose_b: Multiply ``b`` transposed, for the gradient of a weight.
        out: Where the product is written; None makes a new tensor.
        quantizer: Quantizes the product.
        output_dtype: TransformerEngine's dtype of a new tensor; bf16 if None.
        bias: [n]; in a backward pass, given if its gradient is wanted.
        bias_type: Not used.
        gelu: Apply GELU, or in a backward pass multiply by its derivative.
        gelu_in: The input of GELU, in a backward pass.
        grad: This is a backward pass.
        workspace: Not used.
        workspace_size: Not used.
        accumulate: Add to ``out``.
        use_split_accumulator: Not used; sums are fp32.
        comm_overlap: Must be None; a NotImplementedError otherwise.
        comm_type: Not used.
        extra_output: Returned unchanged.
        bulk_overlap: Not used.
        alpha: Multiplies the product.
        beta: Multiplies ``out`` where ``accumulate`` is set; 1 if None.

    Returns:
        The product, the gradient of the bias, the input of GELU, and ``extra_output``; None for what there is not.
    """
    if comm_overlap is not None:
        raise NotImplementedError("tp_comm_overlap=True needs a CUDA device; leave it out on the CPU")
    left, right = to_float(b, transpose_b, shared_scale=False), to_float(a, not transpose_a, shared_scale=False)
    leading = left.shape[:-1]
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    alpha = alpha * (shared_amax(b, transpose_b) * shared_amax(a, not transpose_a) / LARGEST_NVFP4**2)
    product = (left.t() if transpose_b else left) @ (right.t() if transpose_a else right) * alpha
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = left.sum(0).to(bias.dtype)
    elif bias is not None and bias.numel() > 0:
        product = product + bias.float()
    before_gelu = None
    if gelu and grad and gelu_in is not None:
        product = torch.ops.aten.gelu_backward(product, gelu_in.float().view_as(product), approximate="tanh")
    elif gelu:
        before_gelu = product.to(torch.bfloat16 if bias is None else bias.dtype)
        product = functional.gelu(product, approximate="tanh")
    if not transpose_b:
        product = product.view(*leading, product.shape[-1])
    if out is not None:
        product = product.view(out.shape)
        if accumulate:
            product = product + out.float() * (1.0 if beta is None else beta)
        return out.copy_(product), bias_gradient, before_gelu, extra_output
    product = product.to(torch.bfloat16 if output_dtype is None else TORCH_DTYPES[DType(int(output_dtype))])
    return quantize(product, quantizer), bias_gradient, before_gelu, extra_output


def te_general_grouped_gemm(
    a: Sequence[Any],
    transpose_a: bool,
    b: Sequence[Any],
    transpose_b: bool,
    out: Sequence[Tensor],
    output_dtype: Any,
    splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    before_gelu: Sequence[Tensor],
    grad: bool,
    *rest: Any,
) -> Sequence[Tensor]:
    """Multiply pairs of matrices, one pair for each expert, as :func:`generic_gemm` does.

    Args:
        a: A weight [n, k] for each expert.
        transpose_a: Multiply by the weights transposed.
        b: The tokens [m, k] of each expert; m may be 0.
        transpose_b: Multiply the tokens transposed.
        out: A tensor for each expert, or with ``single_output`` one [sum of m, n].
        output_dtype: Not used; ``out`` has a dtype.
        splits: The m of each expert.
        bias: [n] for each expert, empty without bias; in a backward pass its gradient is written here.
        bias_dtype: Not used.
        single_output: ``out`` is one tensor.
        before_gelu: Not used.
        grad: This is a backward pass.
        rest: Workspaces, their size, ``accumulate``, and settings; only ``accumulate`` is used.

    Returns:
        ``bias``.
    """
    accumulate = rest[2]
    outputs = torch.split(out[0], list(splits)) if single_output else out
    for index, (weight, tokens, output) in enumerate(zip(a, b, outputs, strict=True)):
        if output is None or output.numel() == 0:
            continue
        own = bias[index] if index < len(bias) and bias[index].numel() > 0 else None
        gradient = generic_gemm(
            weight, transpose_a, tokens, transpose_b, output, None, None, own, None, False, None, grad, None, 0,
            accumulate, True,
        )[1]  # fmt: skip
        if own is not None and gradient is not None:
            own.copy_(gradient)
    return bias
