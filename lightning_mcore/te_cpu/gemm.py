# SPDX-License-Identifier: Apache-2.0
"""Matrix products of tensors that may be quantized, computed in fp32 from the values that they hold.

cuBLAS also sums in fp32 or wider, but in another order. TransformerEngine's linear layers call :func:`generic_gemm`,
its experts :func:`te_general_grouped_gemm`.
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
    """Multiply matrices as a linear layer does: ``op(b) @ op(a)``, where ``op`` transposes if ``transpose_`` says so.

    ``a`` is the weight [n, k] of a forward pass; ``b`` is its input [..., k], or the gradient [..., n] of a backward
    pass. ``bias`` [n] is added; in a backward pass (``grad``) it asks for its gradient instead. ``gelu`` applies
    GELU, or multiplies by its derivative at ``gelu_in``. The product is added to ``out`` with ``accumulate``, and
    quantized with ``quantizer``; a new tensor is bf16 without ``output_dtype``. Returns the product, the gradient of
    the bias, the input of GELU, and ``extra_output``, each None if absent. Other arguments have no effect;
    NotImplementedError with ``comm_overlap``.
    """
    if comm_overlap is not None:
        raise NotImplementedError("tp_comm_overlap=True needs a CUDA device; leave it out on the CPU")
    # A forward pass with a [n, k], b [s, batch, k] and transpose_a: [s * batch, k] @ [k, n]. For the weight's gradient,
    # a is the input, b the output's gradient and transpose_b is set: [n, tokens] @ [tokens, k].
    left, right = to_float(b, transpose_b, shared_scale=False), to_float(a, not transpose_a, shared_scale=False)
    leading = left.shape[:-1]
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    # The scale that all nvfp4 blocks share is applied to the sum, as on a GPU: without it the terms have few bits, so
    # their sum is seldom rounded.
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
    """Multiply pairs of matrices, one pair for each expert, as :func:`generic_gemm` does; return ``bias``.

    ``a`` holds a weight [n, k] for each expert, ``b`` its tokens [m, k], where m (``splits``) may be 0. ``out`` holds a
    tensor for each expert, or with ``single_output`` one [sum of m, n]. ``bias`` is [n] for each, empty without bias;
    in a backward pass its gradient is written there. In ``rest`` only ``accumulate`` is used.
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
