# SPDX-License-Identifier: Apache-2.0
"""Norms, activations, softmax and rotary positions, with their gradients, all computed in fp32.

``extension.py`` offers them to TransformerEngine under the names and signatures of its compiled kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_mcore.te_cpu.enums import TORCH_DTYPES, DType
from lightning_mcore.te_cpu.quantize import quantize, to_float


def _scaled(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _normed(values: Tensor, dtype: Any, out: Any, quantizer: Any) -> Any:
    values = values.to(TORCH_DTYPES[DType(int(dtype))])
    if quantizer is not None:
        return quantize(values, quantizer, out)
    return values if out is None else out.copy_(values)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Any, None, Tensor]:
    """Apply RMSNorm over the last dimension of [..., n].

    Returns the result in the dtype ``otype``, quantized if there is a quantizer; None, where LayerNorm has the mean;
    and ``1 / rms`` [...] fp32.
    """
    rsigma = torch.rsqrt(x.float().square().mean(-1) + eps)
    values = x.float() * rsigma[..., None] * _scaled(weight, zero_centered)
    return _normed(values, otype, ln_out, quantizer), None, rsigma


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input [..., n] and of the weight [n], in their dtypes."""
    grad, normed = dz.float(), x.float() * rsigma[..., None]
    inner = grad * _scaled(weight, zero_centered)
    # normed has length sqrt(n) whatever the input's length, so the part of the gradient along it vanishes.
    dx = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * rsigma[..., None]
    return dx.to(x.dtype), _rows_summed(grad * normed, weight)


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`rmsnorm_bwd`, with ``add`` [..., n] added to the input's."""
    dx, dweight = rmsnorm_bwd(dz, x.float(), rsigma, weight, sm_margin, zero_centered)
    return (dx + add.float()).to(x.dtype), dweight


def _rows_summed(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0).to(like.dtype)


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
    """Apply LayerNorm over the last dimension of [..., n].

    Returns the result in the dtype ``otype``, quantized if there is a quantizer; the mean and ``1 / std``, each [...]
    fp32.
    """
    scale = _scaled(weight, zero_centered)
    values, mean, rsigma = torch.native_layer_norm(x.float(), x.shape[-1:], scale, bias.float(), eps)
    return _normed(values, otype, ln_out, quantizer), mean[..., 0], rsigma[..., 0]


def layernorm_bwd(
    dz: Tensor, x: Tensor, mean: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input [..., n], of the weight [n] and of the bias [n], in their dtypes."""
    scale, size = _scaled(weight, zero_centered), x.shape[-1:]
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dz.float(), x.float(), size, mean[..., None], rsigma[..., None], scale, scale, [True, True, True]
    )
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


# Activations. A gated one takes [..., 2n], the gate first, and returns [..., n].


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return function(gate) * linear

    return gated


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": functional.relu,
    "srelu": _squared_relu,
    "silu": functional.silu,
    "glu": _gated(torch.sigmoid),
    "geglu": _gated(_gelu),
    "qgeglu": _gated(_quick_gelu),
    "reglu": _gated(functional.relu),
    "sreglu": _gated(_squared_relu),
    "swiglu": _gated(functional.silu),
}


def _forward(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda x, quantizer=None: quantize(function(to_float(x)).to(x.dtype), quantizer)


def _backward(function: Callable[[Tensor], Tensor], with_bias: bool = False) -> Callable[..., Any]:
    def backward(grad: Any, x: Any, quantizer: Any = None) -> Any:
        with torch.enable_grad():
            leaf = to_float(x).requires_grad_()
            (result,) = torch.autograd.grad(function(leaf), leaf, to_float(grad))
        result = result.to(x.dtype)
        if with_bias:
            return _rows_summed(result.float(), result), quantize(result, quantizer)
        return quantize(result, quantizer)

    return backward


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    **{name: _forward(function) for name, function in _ACTIVATIONS.items()},
    **{f"d{name}": _backward(function) for name, function in _ACTIVATIONS.items()},
    **{f"dbias_d{name}": _backward(_ACTIVATIONS[name], True) for name in ("gelu", "qgelu", "relu", "srelu", "silu")},
}
"""``name(x, quantizer)``, its gradient ``dname(grad, x, quantizer)``, and ``dbias_dname`` with a sum over rows."""


# Softmax of attention scores [..., q, k] times a scale. A mask is True where a key is hidden.


def _softmax(scores: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    values = scores.float() * float(scale)
    if mask is None:
        return torch.softmax(values, -1).to(scores.dtype)
    # A row whose keys are all hidden becomes 0, not a uniform distribution.
    result = torch.softmax(values.masked_fill(mask, -10000.0), -1)
    return result.masked_fill(mask.expand_as(result).all(-1, keepdim=True), 0.0).to(scores.dtype)


def _later(scores: Tensor) -> Tensor:
    """Return a mask [q, k] of the keys after each query; the last query and the last key have the same position."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)


def _softmax_gradient(grads: Tensor, results: Tensor, scale: float) -> Tensor:
    product = grads.float() * results.float()
    return ((product - results.float() * product.sum(-1, keepdim=True)) * float(scale)).to(grads.dtype)


_CAUSAL = ("scaled_upper_triang_masked_softmax", "scaled_aligned_causal_masked_softmax")

SOFTMAX: dict[str, Callable[..., Tensor]] = {
    "scaled_softmax_forward": lambda scores, scale: _softmax(scores, scale, None),
    "scaled_masked_softmax_forward": lambda scores, mask, scale: _softmax(scores, scale, mask.bool()),
    **{f"{name}_forward": lambda scores, scale: _softmax(scores, scale, _later(scores)) for name in _CAUSAL},
    **{f"{name}_backward": _softmax_gradient for name in ("scaled_softmax", "scaled_masked_softmax", *_CAUSAL)},
}
"""TransformerEngine's four softmax kernels and their gradients."""


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    # Channels a b c d become -b a -d c if pairs are neighbours, else -c -d a b.
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate(x: Tensor, angles: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """Rotate [..., h, d] by angles [..., 1, r]; the last d - r values do not change."""
    size = angles.shape[-1]
    part = x[..., :size].float()
    if backward:
        part = part * angles.cos() - _turned(part * angles.sin(), interleaved)
    else:
        part = part * angles.cos() + _turned(part, interleaved) * angles.sin()
    return torch.cat((part.to(x.dtype), x[..., size:]), -1)


def _positions(length: int, size: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens, [length]: chunks ``rank`` and ``2 * size - 1 - rank`` of a sequence."""
    if size == 1:
        return torch.arange(length)
    # 4 tokens on each of 2 ranks: rank 0 has positions 0 1 6 7, rank 1 has 2 3 4 5.
    half = length // 2
    first, last = rank * half, (2 * size - 1 - rank) * half
    return torch.cat((torch.arange(first, first + half), torch.arange(last, last + half)))


def _rope(
    x: Tensor, freqs: Tensor, starts: Tensor | None, form: Any, interleaved: bool, bounds: Tensor | None, size: int,
    rank: int, backward: bool,
) -> Tensor:  # fmt: skip
    freqs = freqs.float().reshape(freqs.shape[0], freqs.shape[-1])
    if form.name == "NVTE_THD":
        if bounds is None:
            raise ValueError("rotary positions of packed rows need their boundaries")
        lengths = (bounds[1:] // size - bounds[:-1] // size).tolist()
        begin = [0] * len(lengths) if starts is None else starts.tolist()
        rows = torch.cat([_positions(n, size, rank) + s for n, s in zip(lengths, begin, strict=True)])
        result = x.clone()
        result[: len(rows)] = _rotate(x[: len(rows)], freqs[rows][:, None], interleaved, backward)
        return result
    by_batch = x.transpose(0, 1) if form.name == "NVTE_SBHD" else x
    rows = _positions(by_batch.shape[1], size, rank).expand(by_batch.shape[0], -1)
    if starts is not None:
        rows = rows + starts[:, None]
    result = _rotate(by_batch, freqs[rows][:, :, None], interleaved, backward)
    return result.transpose(0, 1).clone(memory_format=torch.contiguous_format) if form.name == "NVTE_SBHD" else result


def fused_rope_forward(
    x: Tensor, freqs: Tensor, starts: Tensor | None, form: Any, interleaved: bool, bounds: Tensor | None,
    cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Rotate queries or keys, [s, b, h, d], [b, s, h, d] or packed [t, h, d], as ``form`` says.

    ``freqs`` is [positions, 1, 1, r], the angles of the whole sequence; ``starts`` [b] is the position of each
    sequence's first token, None for 0. ``interleaved`` pairs neighbouring channels, otherwise pairs are r / 2 apart.
    ``bounds`` covers packed sequences on all context-parallel ranks.
    """
    return _rope(x, freqs, starts, form, interleaved, bounds, cp_size, cp_rank, backward=False)


def fused_rope_backward(
    grad: Tensor, freqs: Tensor, starts: Tensor | None, form: Any, interleaved: bool, bounds: Tensor | None,
    cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of the input of :func:`fused_rope_forward`."""
    return _rope(grad, freqs, starts, form, interleaved, bounds, cp_size, cp_rank, backward=True)


def fused_qkv_rope_forward(
    qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, starts: Tensor | None, widths: Sequence[int], form: Any,
    interleaved: bool, cp_size: int, cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split [s, b, groups, sum of widths] into queries, keys and values [s, b, heads, d], and rotate the first two."""
    q, k, v = torch.split(qkv, list(widths), dim=-1)
    q = q.reshape(*q.shape[:2], -1, widths[1])
    rope = (starts, form, interleaved, None, cp_size, cp_rank, False)
    return _rope(q, q_freqs, *rope), _rope(k, k_freqs, *rope), v.contiguous()


def fused_qkv_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q_freqs: Tensor, k_freqs: Tensor, widths: Sequence[int], form: Any,
    interleaved: bool, cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of the input of :func:`fused_qkv_rope_forward`."""
    rope = (None, form, interleaved, None, cp_size, cp_rank, True)
    dq = _rope(dq, q_freqs, *rope).reshape(*dk.shape[:3], -1)
    return torch.cat((dq, _rope(dk, k_freqs, *rope), dv), -1)
