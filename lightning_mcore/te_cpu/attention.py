# SPDX-License-Identifier: Apache-2.0
"""Fused attention, forward and backward, and what context parallelism does with packed rows.

TransformerEngine's own code chooses the attention and runs context parallelism; this file has the kernels. The softmax
is computed in fp32 from all scores, one sequence at a time.

*Bounds* are cumulative lengths, [sequences + 1] int32. Packed rows may have padding after each sequence: then one pair
of bounds counts the tokens, and another, "padded", says where each sequence starts.

Source: ``fused_attn.py`` and ``context_parallel.cu`` of TransformerEngine (2.11.0 and 2.20.2).
"""

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.te_cpu.enums import TORCH_DTYPES, DType


def get_fused_attn_backend(*args: Any) -> Any:
    """Return the fused attention for a call: this file's without a bias and with the plain softmax, otherwise none.

    NotImplementedError for FP8 attention.
    """
    kinds = importlib.import_module("transformer_engine_torch").NVTE_Fused_Attn_Backend
    if len(args) == 1:  # in 2.20
        dtype, bias, softmax = args[0].qkv_dtype, args[0].bias_type, args[0].softmax_type
    else:
        dtype, bias, softmax = args[1], args[4], args[6]
    if TORCH_DTYPES[DType(int(dtype))].itemsize == 1:
        raise NotImplementedError("fp8_dot_product_attention=True is not available on the CPU; leave it out")
    plain = bias.name == "NVTE_NO_BIAS" and softmax.name == "NVTE_VANILLA_SOFTMAX"
    kind = kinds.NVTE_F16_arbitrary_seqlen if plain else kinds.NVTE_No_Backend
    return (kind, "" if plain else "a bias or another softmax") if len(args) == 1 else kind


@dataclass(frozen=True)
class _Call:
    """The arguments that the calls of both releases have, wherever they are in the list."""

    scale: float  # multiplies the scores
    dropout: float
    layout: str  # of the queries: "SBHD", "BSHD" or "THD"
    mask: str
    window: Sequence[int]  # tokens before and after itself that a query sees; -1 for all
    rest: Sequence[Any]  # the arguments after the window, from the bounds on

    @classmethod
    def of(cls, args: Sequence[Any], scale_at: int) -> "_Call":
        # The releases differ in the arguments before and after the window, which is the first list or tuple.
        window_at = next(index for index, value in enumerate(args) if isinstance(value, list | tuple))
        first = {type(value).__name__: value.name for value in reversed(args[:window_at]) if hasattr(value, "name")}
        rest = list(itertools.dropwhile(lambda value: isinstance(value, bool), args[window_at + 1 :]))
        layout = first["NVTE_QKV_Layout"].removeprefix("NVTE_").replace("3", "").replace("2", "").split("_")[0]
        return cls(args[scale_at], args[scale_at + 1], layout, first["NVTE_Mask_Type"], args[window_at], rest)

    def sequences(self, q: Tensor, k: Tensor, bounds: Sequence[Tensor | None]) -> Iterator[tuple[Any, Any, Any]]:
        """Yield the indices of each sequence's queries, keys and statistics."""
        q_bounds, k_bounds, q_starts, k_starts = (None if one is None else one.tolist() for one in bounds)
        assert q_bounds is not None
        assert k_bounds is not None
        q_starts, k_starts = q_starts or q_bounds, k_starts or k_bounds
        # Two packed sequences of 3 and 2 tokens, each padded to 4: bounds 0 3 5 and padded bounds 0 4 8 yield rows 0 to
        # 2 and rows 4 to 5.
        batch = len(q_bounds) - 1 if self.layout == "THD" else q.shape[self.layout.index("B")]
        for row in range(batch):
            if self.layout == "THD" or "PADDING" in self.mask:
                lengths = (q_bounds[row + 1] - q_bounds[row], k_bounds[row + 1] - k_bounds[row])
            else:
                lengths = (q.shape[self.layout.index("S")], k.shape[self.layout.index("S")])
            if self.layout == "THD":
                of_q = slice(q_starts[row], q_starts[row] + lengths[0])
                yield of_q, slice(k_starts[row], k_starts[row] + lengths[1]), of_q
                continue
            parts: list[Any] = [
                (slice(length), row) if self.layout == "SBHD" else (row, slice(length)) for length in lengths
            ]
            yield parts[0], parts[1], (row, slice(None), slice(lengths[0]))

    def visible(self, queries: int, keys: int) -> Tensor:
        """Return which keys each query sees, [queries, keys] bool."""
        ahead = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        if "CAUSAL" not in self.mask or "BOTTOM_RIGHT" in self.mask:
            ahead = ahead - (keys - queries)  # the last query and the last key have the same position
        before, after = self.window
        seen = torch.ones(queries, keys, dtype=torch.bool) if "CAUSAL" not in self.mask else ahead <= 0
        seen = seen & (ahead >= -before) if before >= 0 else seen
        return seen & (ahead <= after) if after >= 0 else seen

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return scaled scores [h, queries, keys] of [queries, h, d] and [keys, h, d], fp32; -inf for hidden keys."""
        products = q.transpose(0, 1).float() @ k.permute(1, 2, 0).float() * self.scale
        return products.masked_fill(~self.visible(q.shape[0], k.shape[0]), -math.inf)

    def kept(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor | float:
        """Return the factors by which dropout multiplies probabilities, fp32; 1 without dropout."""
        if generator is None:
            return 1.0
        return (torch.rand(tuple(shape), generator=generator) >= self.dropout).float() / (1 - self.dropout)

    def generator(self, state: Tensor) -> torch.Generator | None:
        return torch.Generator().manual_seed(int(state[0])) if self.dropout > 0 else None


def _repeated(keys: Tensor, heads: int) -> Tensor:
    """Return each query head's key or value: [s, groups, d] as [s, heads, d]."""
    return keys.repeat_interleave(heads // keys.shape[1], 1)


def fused_attn_fwd(*args: Any) -> list[Any]:
    """Compute attention of queries, keys and values, each [s, b, h, d], [b, s, h, d] or [t, h, d].

    Keys and values may have fewer heads than queries. Returns the result in the queries' layout; the statistics,
    logarithms of the softmax's denominators, [b, h, s, 1] or [t, h, 1] fp32; and the random state of dropout, [2]
    int64.
    """
    call = _Call.of(args, 3)
    q_bounds, k_bounds, q, k, v, dtype, q_padded, k_padded = call.rest[:8]
    result = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    if call.layout == "THD":
        statistics = torch.zeros(q.shape[0], q.shape[1])
    else:
        batch, length = q.shape[call.layout.index("B")], q.shape[call.layout.index("S")]
        statistics = torch.zeros(batch, q.shape[2], length)
    state = torch.randint(2**62, (2,)) if call.dropout > 0 else torch.zeros(2, dtype=torch.int64)
    generator = call.generator(state)
    for of_q, of_k, of_statistics in call.sequences(q, k, (q_bounds, k_bounds, q_padded, k_padded)):
        queries = q[of_q]
        heads = queries.shape[1]
        scores = call.scores(queries, _repeated(k[of_k], heads))
        sums = torch.logsumexp(scores, -1)
        # A query without visible keys has a sum of -inf, and nan here: its probabilities are zero.
        probabilities = torch.exp(scores - sums[..., None]).nan_to_num(0.0) * call.kept(scores.shape, generator)
        values = probabilities @ _repeated(v[of_k], heads).transpose(0, 1).float()
        result[of_q] = values.transpose(0, 1).to(dtype)
        statistics[of_statistics] = sums.t() if call.layout == "THD" else sums
    return [result, statistics[..., None], state]


def fused_attn_bwd(*args: Any) -> list[Any]:
    """Return the gradients of queries, keys and values, and None for a bias and for sinks.

    Arguments are as for :func:`fused_attn_fwd`, with the result, its gradient, and a list of the statistics and the
    state of dropout.
    """
    call = _Call.of(args, 2)
    q_bounds, k_bounds, q, k, v, out, dout, dtype = call.rest[:8]
    kept_at = next(index for index, value in enumerate(call.rest) if isinstance(value, list | tuple))
    (statistics, state), padded = call.rest[kept_at][:2], call.rest[kept_at + 1 : kept_at + 3]
    gradients = [torch.zeros(tensor.shape, dtype=dtype) for tensor in (q, k, v)]
    # Under context parallelism a step has only some of the keys, but the result and the statistics cover all keys.
    statistics = statistics.reshape(statistics.shape[:3] if call.layout != "THD" else statistics.shape[:2])
    generator = call.generator(state)
    for of_q, of_k, of_statistics in call.sequences(q, k, (q_bounds, k_bounds, *padded)):
        queries, heads = q[of_q], q[of_q].shape[1]
        keys, values = _repeated(k[of_k], heads), _repeated(v[of_k], heads)
        scores, sums = call.scores(queries, keys), statistics[of_statistics]
        sums = sums.t() if call.layout == "THD" else sums
        probabilities = torch.exp(scores - sums[..., None]).nan_to_num(0.0)
        kept = call.kept(scores.shape, generator)
        grad = dout[of_q].transpose(0, 1).float()
        dvalues = (probabilities * kept).transpose(1, 2) @ grad
        dprobabilities = grad @ values.permute(1, 2, 0).float() * kept
        shared = (grad * out[of_q].transpose(0, 1).float()).sum(-1, keepdim=True)
        dscores = probabilities * (dprobabilities - shared) * call.scale
        found = (
            dscores @ keys.transpose(0, 1).float(),
            dscores.transpose(1, 2) @ queries.transpose(0, 1).float(),
            dvalues,
        )
        for gradient, index, value in zip(gradients, (of_q, of_k, of_k), found, strict=True):
            own = gradient[index]
            by_head = value.transpose(0, 1).reshape(*own.shape[:2], value.shape[0] // own.shape[1], own.shape[2])
            own.copy_(by_head.sum(2))
    return [*gradients, None, None]


def convert_thd_to_bshd(tensor: Tensor, bounds: Tensor, batch: int, length: int) -> Tensor:
    """Return packed sequences [t, ...] as rows [b, s, ...], each followed by zeros."""
    rows = tensor.new_zeros(batch, length, *tensor.shape[1:])
    for row, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        rows[row, : end - start] = tensor[start:end]
    return rows


def convert_bshd_to_thd(tensor: Tensor, bounds: Tensor, tokens: int) -> Tensor:
    """Return rows [b, s, ...] as packed sequences [t, ...]."""
    packed = tensor.new_zeros(tokens, *tensor.shape[2:])
    for row, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        packed[start:end] = tensor[row, : end - start]
    return packed


# Under context parallelism a rank has two chunks of each packed sequence, called its halves below. With bounds 0 4 8
# the first halves are tokens 0 1 4 5, the second 2 3 6 7.


def _half(bounds: Tensor, which: int) -> Tensor:
    """Return the indices of the first (0) or second (1) halves' tokens, int64."""
    # The edges 0 2 4 count one half of each sequence. A first half starts at a + a in the row, a second at a + b.
    edges = (bounds // 2).tolist()
    parts = [torch.arange(a, b) + (b if which else a) for a, b in itertools.pairwise(edges)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def thd_read_half_tensor(tensor: Tensor, bounds: Tensor, half: int) -> Tensor:
    """Return the first (0) or second (1) half of each sequence of [t, h, d] or [2, t, h, d]."""
    axis = tensor.dim() - 3
    index = _half(bounds, half)
    shape = list(tensor.shape)
    shape[axis] //= 2
    result = tensor.new_zeros(shape)
    result.narrow(axis, 0, len(index)).copy_(tensor.index_select(axis, index))
    return result


def thd_second_half_lse_correction(statistics: Tensor, of_step: Tensor, bounds: Tensor, packed: bool) -> None:
    """Add a step's denominators, [h, t / 2], to the second halves of [h, t] in place; all as logarithms."""
    _check_packed(packed)
    index = _half(bounds, 1)
    statistics[:, index] = torch.logaddexp(statistics[:, index], of_step[:, : len(index)])


def _check_packed(packed: bool) -> None:
    if not packed:
        raise NotImplementedError("statistics of packed rows in the form of older cuDNN are not available on the CPU")


def thd_read_second_half_lse(statistics: Tensor, bounds: Tensor, packed: bool, length: int) -> Tensor:
    """Return the second halves' statistics, [h, length], from the statistics of all tokens, [h, t]."""
    _check_packed(packed)
    index = _half(bounds, 1)
    result = statistics.new_zeros(statistics.shape[0], length)
    result[:, : len(index)] = statistics[:, index]
    return result


def thd_out_correction(out: Tensor, of_step: Tensor, *args: Any) -> None:
    """Add a step's result to ``out`` [t, h, d] in place, weighted by its share of the sum of all denominators.

    ``of_step`` is [t, h, d], or [t / 2, h, d] for second halves only. ``args`` are the statistics [h, t] of all steps,
    this step's, the bounds, whether the step has only second halves, and whether the statistics are packed.
    """
    # 2.20 also passes, first, the statistics by which `out` is weighted so far.
    before, (statistics, statistics_of_step, bounds, second, packed) = args[:-5], args[-5:]
    _check_packed(packed)
    index = _half(bounds, 1) if second else torch.arange(int(bounds[-1]))
    heads = statistics.shape[0]
    target, step = out.view(-1, heads, out.shape[-1]), of_step.view(-1, heads, out.shape[-1])[: len(index)]
    weight = torch.exp(statistics_of_step[:, : len(index)] - statistics[:, index]).t()[..., None]
    part = torch.where(step == 0, torch.zeros_like(step), (step.float() * weight).to(step.dtype)).to(out.dtype)
    if before:
        again = torch.exp(before[0][:, index] - statistics[:, index]).t()[..., None]
        target[index] = torch.where(target[index] == 0, 0.0, target[index].float() * again).to(out.dtype) + part
    else:
        target[index] += part


def thd_grad_correction(grad: Tensor, of_step: Tensor, bounds: Tensor, first: str, second: str) -> None:
    """Put a step's gradient into the whole gradient, [t, h, d] or [2, t, h, d], in place.

    ``first`` and ``second`` say what to do with each half: ``"copy"``, ``"add"``, ``"zero"`` or ``"none"``. ``of_step``
    has all tokens, or only the halves that are not ``"none"``.
    """
    axis = grad.dim() - 3
    both = "none" not in (first, second) and of_step.shape[axis] == grad.shape[axis]
    for which, how in enumerate((first, second)):
        if how == "none":
            continue
        index = _half(bounds, which)
        step = of_step.index_select(axis, index) if both else of_step.narrow(axis, 0, len(index))
        if how == "zero":
            grad.index_fill_(axis, index, 0)
        elif how == "copy":
            grad.index_copy_(axis, index, step)
        else:
            grad.index_add_(axis, index, step)


def thd_get_partitioned_indices(bounds: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    """Return which tokens of packed rows a context-parallel rank has, [tokens / size] int32."""
    parts = []
    for start, end in itertools.pairwise(bounds.tolist()):
        chunk = (end - start) // (2 * size)
        for place in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + place * chunk, start + (place + 1) * chunk))
    return torch.cat(parts).to(torch.int32)
