# SPDX-License-Identifier: Apache-2.0
"""Attention of this rank's queries over whole sequences, in plain PyTorch, without an ``[s, s]`` mask.

There is no Megatron and no communication here: ``core_attention.py`` gathers the keys and calls :func:`attend`. A
:class:`QueryRun` names neighbouring queries and the keys of their sequence; a :class:`Reach` says how far a query sees.

A run that starts with its sequence is what PyTorch's kernels call causal, and needs no mask. On CUDA in half precision
the flash kernel also supports causal attention that ends at the last key. Any other run is cut into blocks of queries
that read only the keys within reach, with a mask that all blocks, runs and layers share.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right

from lightning_mcore.layers.autograd import made_again
from lightning_mcore.parallel.context import slices_of_rank

_LARGEST_BLOCK = 1024  # queries per mask: larger blocks read fewer keys twice, smaller blocks have smaller masks
_SMALLEST_BLOCK = 128  # with fewer queries, the calls cost more than the skipped keys save
_LARGEST_MASK = 2**21  # queries times keys, unless a smallest block needs more: 8 MiB in fp32
_FLASH_HEAD_SIZE = 256


@dataclass(frozen=True)
class Reach:
    """How far a query sees, in tokens; None for the whole sequence on that side."""

    back: int | None = None
    ahead: int | None = None  # 0 is causal
    chunk: int | None = None  # the sequence is cut into chunks of this length, and a query sees its own chunk

    @property
    def is_everything(self) -> bool:
        """Whether every query sees every key of its sequence or, in :func:`chunked_runs`, of its chunk."""
        return self.back is None and self.ahead is None

    @property
    def is_causal(self) -> bool:
        """Whether a query sees every key up to its own."""
        return self.back is None and self.ahead == 0


@dataclass(frozen=True)
class QueryRun:
    """Neighbouring queries of one sequence, and the keys of that sequence.

    There is one run per sequence, or one for each of a rank's two slices under context parallelism. Padding is a run
    without keys.
    """

    rows: range  # among the queries of this rank
    position: int  # index of the first query's own key among all keys
    keys: range


@dataclass(frozen=True)
class Softmax:
    """Settings of the softmax; with ``has_sinks``, queries come from :func:`with_sinks`."""

    scale: float
    dropout: float = 0.0
    cap: float | None = None  # a score x becomes cap * tanh(x / cap)
    has_sinks: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether PyTorch's kernels compute it; otherwise all scores of a block are in memory."""
        return self.cap is None


def sequence_runs(num_queries: int, num_keys: int, rank: int = 0, size: int = 1) -> list[QueryRun]:
    """Return the runs of unpacked sequences: one, or two for a context-parallel rank, whose slices lie apart.

    While decoding there are more keys than queries, and the queries are the last tokens of the sequence.
    """
    keys = range(num_keys)
    if size == 1:
        return [QueryRun(range(num_queries), num_keys - num_queries, keys)]
    length = num_queries // 2
    return [
        QueryRun(range(half * length, (half + 1) * length), index * length, keys)
        for half, index in enumerate(slices_of_rank(rank, size))
    ]


@functools.lru_cache(maxsize=64)
def packed_runs(offsets: tuple[int, ...], lengths: tuple[int, ...], rank: int = 0, size: int = 1) -> list[QueryRun]:
    """Return the runs of a row of packed sequences; padding neither sees nor is seen.

    ``offsets`` counts padding and has one entry more than there are sequences; ``lengths`` counts real tokens only.
    """
    # Offsets (0, 8, 16) with lengths (7, 4) on rank 1 of 2, which holds slices 1 and 2 of each sequence:
    #     rows 0-1, 2-3   positions 2 and 4 of the first sequence, keys 0-6
    #     rows 4-5        position 10 of the row, so 2 of the second sequence, keys 8-11
    #     rows 6-7        positions 12-13, which are padding: no keys
    runs = []
    row = 0
    for (start, end), length in zip(itertools.pairwise(offsets), lengths, strict=True):
        tokens, parts = (end - start, (0,)) if size == 1 else ((end - start) // (2 * size), slices_of_rank(rank, size))
        for part in parts:
            first = start + part * tokens
            real = min(max(start + length - first, 0), tokens)
            for count, keys in ((real, range(start, start + length)), (tokens - real, range(0))):
                if count > 0:
                    runs.append(QueryRun(range(row, row + count), first, keys))
                    row += count
    return runs


def chunked_runs(runs: list[QueryRun], length: int) -> list[QueryRun]:
    """Cut runs where a chunk of their sequence ends, every ``length`` tokens; a part has the keys of its chunk."""
    # Chunks of 4 in a sequence with keys 20-29, and a run of positions 22-29 in rows 0-7:
    #     rows 0-1   positions 22-23, keys 20-23
    #     rows 2-5   positions 24-27, keys 24-27
    #     rows 6-7   positions 28-29, keys 28-29
    found = []
    for run in runs:
        if len(run.keys) == 0:
            found.append(run)
            continue
        first = run.position - run.keys.start
        end = first + len(run.rows)
        for chunk in range(first // length, (end - 1) // length + 1):
            start = max(first, chunk * length)
            rows = run.rows[start - first : (chunk + 1) * length - first]
            keys = run.keys[chunk * length : (chunk + 1) * length]
            found.append(QueryRun(rows, run.keys.start + start, keys))
    return found


def with_sinks(query: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Return queries with one more channel, [b, h, queries, d + 1], which adds a term to the softmax's denominator.

    Every query then also sees a key that is 1 in this channel and 0 in all others, so that its score is the sink of the
    head ([h], a logarithm), and whose value is zero. No kernel needs to know about it.
    """
    column = (sinks / scale).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    return torch.cat((query, column), dim=-1)


def positions_in(runs: list[QueryRun], device: torch.device) -> Tensor:
    """Return each query's position in its sequence, [queries] int64."""
    return torch.cat([torch.arange(len(run.rows), device=device) + run.position - run.keys.start for run in runs])


def query_growth(positions: Tensor, beta: float, length: int, first_position: int = 0) -> Tensor:
    """Return ``1 + beta * log(1 + position // length)`` for queries at these positions, in fp32.

    With beta 0.1 and length 2, positions 0 to 3 have the factors 1, 1, 1.069, 1.069; counted from 1, they have 1,
    1.069, 1.069, 1.110.
    """
    return 1 + beta * torch.log1p(((positions + first_position) // length).float())


def attend(query: Tensor, key: Tensor, value: Tensor, runs: list[QueryRun], reach: Reach, softmax: Softmax) -> Tensor:
    """Compute attention run by run, [b, h, queries, d_v]; zero for a run without keys.

    Keys and values have ``groups`` heads, a divisor of ``h``, in sequence order; a query has d + 1 channels with sinks.
    Runs cover the queries without gaps, and two of them have either the same keys or none in common.
    """
    width = value.size(-1)
    value = _widen(value, query.size(-1))
    if reach.chunk is not None:
        runs = chunked_runs(runs, reach.chunk)
    mask = _SharedMask(runs, reach)
    # Split once: a slice's gradient is as large as the whole tensor, for each slice.
    queries = _split(query, [len(run.rows) for run in runs])
    keys, values = _pieces(key, runs), _pieces(value, runs)
    parts: list[Tensor] = []
    for run, rows in zip(runs, queries, strict=True):
        if len(run.keys) > 0:
            parts += _attend_run(rows, keys[run.keys.start], values[run.keys.start], run, reach, softmax, mask)
        else:
            parts.append(_NoKeys.apply(rows, value.size(-1)))  # type: ignore[no-untyped-call]
    return _joined(parts)[..., :width]


class _NoKeys(torch.autograd.Function):
    """The output of queries that see nothing: zeros, with zero gradients, so that every parameter gets a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, width: int) -> Tensor:
        ctx.shape = rows.shape
        return rows.new_zeros(*rows.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].new_zeros(ctx.shape), None


def _widen(value: Tensor, width: int) -> Tensor:
    """Pad values with zero columns up to ``width``, as the fused kernels require; the result does not change."""
    missing = width - value.size(-1)
    return functional.pad(value, (0, missing)) if missing > 0 else value


def _pieces(tensor: Tensor, runs: list[QueryRun]) -> dict[int, Tensor]:
    """Return each sequence's keys (or values), by the index of the first."""
    ends = {run.keys.start: run.keys.stop for run in runs if len(run.keys) > 0}
    cuts = sorted({0, tensor.size(2), *ends, *ends.values()})
    pieces = _split(tensor, [end - start for start, end in itertools.pairwise(cuts)])
    return dict(zip(cuts, pieces, strict=False))


def _split(tensor: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """Split [b, h, tokens, d] into pieces of these lengths; torch would also copy the gradient of a single piece."""
    return (tensor,) if len(lengths) == 1 else torch.split(tensor, lengths, dim=2)


def _joined(parts: list[Tensor]) -> Tensor:
    """Join outputs into [b, h, queries, d]; in memory as [queries, b, h, d], the order needed next."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.permute(2, 0, 1, 3) for part in parts]).permute(1, 2, 0, 3)


def visible(run: QueryRun, reach: Reach, device: torch.device) -> Tensor:
    """Return which keys a run's queries see, [queries, keys] bool, for a caller that has a mask of this size anyway."""
    queries = run.position + torch.arange(len(run.rows), device=device)[:, None]
    keys = run.keys.start + torch.arange(len(run.keys), device=device)[None]
    seen = _within(keys - queries, reach)
    if reach.chunk is not None:
        seen &= (keys - run.keys.start) // reach.chunk == (queries - run.keys.start) // reach.chunk
    return seen


def _attend_run(
    rows: Tensor, key: Tensor, value: Tensor, run: QueryRun, reach: Reach, softmax: Softmax, shared: "_SharedMask"
) -> Iterator[Tensor]:
    """Yield the outputs of a run in order, [b, h, block, d] each; ``key`` and ``value`` hold its sequence only."""
    reach = _within_sequence(run, reach)
    count, position = len(run.rows), run.position - run.keys.start
    if reach.is_everything:
        yield attend_once(rows, key, value, softmax)
    elif reach.is_causal and position == 0 and not softmax.has_sinks:  # a sink comes before the first query
        yield attend_once(rows, key[:, :, :count], value[:, :, :count], softmax, is_causal=True)
    elif reach.is_causal and softmax.is_fused and _flash_ends_at_the_last_key(rows, value):
        last = position + count
        yield attend_once(rows, key[:, :, :last], value[:, :, :last], softmax, causal_lower_right(count, last))
    else:
        size = shared.block_size(run, reach)
        mask, nearest = shared.take(rows.dtype, rows.device)
        for start in range(0, count, size):
            block = rows[:, :, start : start + size]
            first, last = _keys_in_reach(len(run.keys), position + start, block.size(2), reach)
            columns = mask[: block.size(2), first - position - start - nearest : last - position - start - nearest]
            yield attend_once(block, key[:, :, first:last], value[:, :, first:last], softmax, columns)


def _within_sequence(run: QueryRun, reach: Reach) -> Reach:
    """Drop the limits of a reach that lie beyond the run's sequence, so that a kernel without a mask can serve it."""
    farthest = len(run.keys) - 1
    back, ahead = (None if side is None or side >= farthest else side for side in (reach.back, reach.ahead))
    return Reach(back, ahead)


def _keys_in_reach(num_keys: int, position: int, count: int, reach: Reach) -> tuple[int, int]:
    """Return the first key, and the one after the last, that ``count`` queries from ``position`` on can see."""
    first = 0 if reach.back is None else max(0, position - reach.back)
    last = num_keys if reach.ahead is None else min(num_keys, position + count + reach.ahead)
    return first, last


class _SharedMask:
    """The mask that the blocks of all runs share, made when the first block needs it.

    Whether a query sees a key depends only on their distance, so a block's mask is a range of its columns.
    """

    def __init__(self, runs: list[QueryRun], reach: Reach) -> None:
        self._runs, self._reach = runs, reach
        # A power of two, so that other rows have the same mask.
        self._longest = 1 << max(len(run.keys) - 1 for run in runs).bit_length()
        self._made: tuple[Tensor, int] | None = None

    def block_size(self, run: QueryRun, reach: Reach) -> int:
        """Return how many queries of a run share the mask: about as many as a window is wide.

        Without a window, fewer the more keys there are, because the mask has a column for each: 256 queries for 8192
        keys, 128 for 65536.
        """
        sides = [side for side in (reach.back, reach.ahead) if side is not None]
        wanted = sum(sides) if len(sides) == 2 else _LARGEST_MASK // self._longest
        return min(len(run.rows), _LARGEST_BLOCK, max(_SMALLEST_BLOCK, wanted))

    def take(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
        """Return the mask, and the distance from a block's first query to the key of its first column."""
        if self._made is None:
            self._made = self._make(dtype, device)
        return self._made

    def _make(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
        reach, longest = self._reach, self._longest
        size = max(self.block_size(run, _within_sequence(run, reach)) for run in self._runs if len(run.keys) > 0)
        nearest = -longest if reach.back is None else -min(reach.back, longest)
        farthest = longest if reach.ahead is None else size + min(reach.ahead, longest)
        return _distance_mask(size, nearest, farthest, reach, dtype, device), nearest


@functools.lru_cache(maxsize=4)
def _distance_mask(
    size: int, nearest: int, farthest: int, reach: Reach, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the shared mask to add to scores, [size, farthest - nearest]: 0 where a query sees a key, else -inf.

    Column ``x`` is the key ``nearest + x`` tokens after the block's first query.
    """
    with torch.inference_mode(False):  # a mask first made in validation is kept for backward in training
        columns = torch.arange(nearest, farthest, dtype=torch.int32, device=device)
        distance = columns[None] - torch.arange(size, dtype=torch.int32, device=device)[:, None]
        mask = torch.zeros(distance.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~_within(distance, reach), float("-inf"))


def _within(distance: Tensor, reach: Reach) -> Tensor:
    """Return which distances from query to key are within reach."""
    seen = torch.ones_like(distance, dtype=torch.bool)
    if reach.back is not None:
        seen &= distance >= -reach.back
    if reach.ahead is not None:
        seen &= distance <= reach.ahead
    return seen


def _flash_ends_at_the_last_key(query: Tensor, value: Tensor) -> bool:
    """Return whether the flash kernel runs causal attention of fewer queries than keys, which needs no full mask."""
    head_size = query.size(-1)
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and head_size == value.size(-1) and head_size <= _FLASH_HEAD_SIZE


def attend_once(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Call PyTorch's attention, or compute what its kernels lack; shapes as in :func:`attend`.

    A mask is broadcastable to [b, h, queries, keys]: added to the scores or, if boolean, True where a query sees a key.
    """
    if softmax.has_sinks:
        return _attend_with_first_key(query, key, value, softmax, mask)
    if not softmax.is_fused:
        return _attend_unfused(query, key, value, softmax, mask, is_causal)
    grouped = key.size(1) != query.size(1)
    if mask is not None and query.is_cuda and not isinstance(mask, CausalBias):
        mask = mask.contiguous()  # CUDA's kernel for masks needs an aligned address, and no grouped heads
        if grouped:
            heads = query.size(1) // key.size(1)
            key, value, grouped = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1), False
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=softmax.dropout,
        is_causal=is_causal,
        scale=softmax.scale,
        enable_gqa=grouped,
    )


def _attend_with_first_key(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, mask: Tensor | None) -> Tensor:
    """Prepend the key that :func:`with_sinks` describes, and call :func:`attend_once`."""
    key, value = functional.pad(key, (0, 1, 1, 0)), functional.pad(value, (0, 0, 1, 0))
    key[:, :, 0, -1] = 1
    plain = replace(softmax, has_sinks=False)
    if mask is None:
        return attend_once(query, key, value, plain)
    if isinstance(mask, CausalBias):
        return attend_once(query, key, value, plain, causal_lower_right(mask.seq_len_q, mask.seq_len_kv + 1))
    # With a column for the new key the shared mask becomes a copy, which autograd would keep for every block.
    widened = functools.partial(functional.pad, mask, (1, 0), value=mask.dtype == torch.bool)
    whole = widened()
    with made_again(whole, widened):
        return attend_once(query, key, value, plain, whole)


def _attend_unfused(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Compute attention step by step, with a softmax in fp32; arguments and result as in :func:`attend_once`."""
    heads = query.size(1) // key.size(1)
    if heads > 1:
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = query @ key.transpose(2, 3) * softmax.scale
    if softmax.cap is not None:
        scores = torch.tanh(scores / softmax.cap) * softmax.cap
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return functional.dropout(weights, softmax.dropout) @ value
