# SPDX-License-Identifier: Apache-2.0
"""Packed sequences as Megatron's layers take them: which tokens of a row belong together.

A packed batch has b rows of s tokens. Its ``cu_seqlens`` and ``cu_seqlens_padded`` say where each row's sequences lie
(``data/packing/rows.py`` makes such rows). A model sees one row of b * s tokens, ``[1, b * s]``, in Megatron's ``thd``
format: :func:`packed_sequences` turns the boundaries into that row's ``PackedSeqParams``.

The torch backend, the checks here, Megatron's rotary embeddings and multi-token prediction need the boundaries as plain
numbers, in every layer. They are read where the host has them (``host_values.py``), and the torch backend's layers get
a :class:`PackedSequences` of numbers and host tensors. TransformerEngine's kernels take device tensors
(:meth:`PackedSequences.on`).

Source: ``PackedSeqParams`` (megatron.core.packed_seq_params, 0.16.1 and 0.19.2); TransformerEngine's meaning of
``cu_seqlens_q_padded``: sequence ``i`` starts at ``padded[i]``, and its first ``cu[i + 1] - cu[i]`` tokens are real.
"""

from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_mcore.layers.host_values import known_values
from lightning_mcore.parallel.context import check_packed_offsets, packed_positions, segments_of
from lightning_mcore.parallel.groups import context_segment

_BOUNDARIES = "_boundaries_on_the_host"
OF_ROWS = ("cu_seqlens", "cu_seqlens_padded")
"""The boundaries in a packed batch."""
_HAS_PAD_BETWEEN_SEQS = "pad_between_seqs" in {each.name for each in fields(PackedSeqParams)}  # 0.16 lacks it


@dataclass(frozen=True)
class Boundaries:
    """Where a row's packed sequences lie, in tokens."""

    offsets: tuple[int, ...]  # where the sequences begin, padding included, and where the last one ends: n + 1
    lengths: tuple[int, ...]  # real tokens
    shared_by: int | None = None  # neighbouring context-parallel ranks that share these sequences; None for all ranks
    # What attention keeps of these offsets' rotary positions, by angles (rotation.py); it ends with the microbatch
    rotations: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, compare=False, repr=False)

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, padding included."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @property
    def has_padding(self) -> bool:
        """Whether any token is padding."""
        return sum(self.lengths) != self.offsets[-1]

    def check_row(self, tokens: int) -> None:
        """Raise ValueError if the sequences do not make up a row of ``tokens``."""
        if tokens != self.offsets[-1]:
            raise ValueError(
                f"packed sequences of {self.offsets[-1]} tokens, padding included, do not make up a row of {tokens}; "
                "make cu_seqlens_q_padded end with the row"
            )


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no type information
    """Megatron's description of packed sequences, and the same boundaries as numbers on the host."""

    boundaries: Boundaries | None = None

    def on(self, device: torch.device) -> "PackedSequences":
        """Return the description for TransformerEngine's kernels, with its tensors on ``device``."""
        assert self.boundaries is not None
        # Padding counts as real: causal attention does not see it, and the loss leaves it out. All boundaries are one
        # tensor: TransformerEngine has only fused attention for padding, and before 2.18 compares them in each layer.
        padded = torch.tensor(self.boundaries.offsets, dtype=torch.int32).to(device, non_blocking=True)
        return _of_tensors(padded, padded, self.boundaries)


def packed_sequences(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor,
    row_length: int,
    context_parallel_size: int = 1,
    hybrid_rank: int | None = None,
) -> PackedSequences:
    """Describe a packed batch's sequences to Megatron's layers, its rows joined into one.

    ``hybrid_rank`` is this rank, with ``hybrid_context_parallel``: only the sequences that it shares are described.

    Both boundaries are [b, n + 1]; a row with fewer sequences repeats its last values. The result has int32 tensors on
    the host and leaves out empty sequences. Raises ValueError if the two do not fit together or do not fill the rows,
    or if the ranks cannot share a sequence. Waits for the device, unless numbers are kept on the host.
    """
    # Two rows of 8: the first has sequences of 3 and 2 tokens, each padded to 4, the second one of 7, padded to 8.
    #     cu_seqlens         0 3 5 | 0 7 7    joined: 0 3 5 12
    #     cu_seqlens_padded  0 4 8 | 0 8 8    joined: 0 4 8 16
    if cu_seqlens.dim() != 2 or cu_seqlens.shape != cu_seqlens_padded.shape or cu_seqlens.size(1) < 2:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and cu_seqlens_padded {list(cu_seqlens_padded.shape)}; "
            "give both as [rows, sequences + 1]"
        )
    known_real, known_padded = known_values(cu_seqlens), known_values(cu_seqlens_padded)
    if known_real is None or known_padded is None:
        real_rows, padded_rows = torch.stack((cu_seqlens, cu_seqlens_padded)).tolist()
    else:
        real_rows, padded_rows = known_real.tolist(), known_padded.tolist()
    segments, own, shared_by = [range(context_parallel_size)], range(row_length), None
    if hybrid_rank is not None:
        segments = segments_of(padded_rows, row_length, context_parallel_size)
        [ranks] = (each for each in segments if hybrid_rank in each)
        if len(segments) > 1:
            part = row_length // context_parallel_size
            own, shared_by = range(ranks.start * part, ranks.stop * part), len(ranks)
    offsets, lengths = [0], []
    for row, (real, padded) in enumerate(zip(real_rows, padded_rows, strict=True)):
        _check_row(row, real, padded, row_length, context_parallel_size, segments, hybrid_rank is not None)
        for index, end in enumerate(padded[1:]):
            if end > padded[index] and padded[index] in own:
                offsets.append(row * len(own) + end - own.start)
                lengths.append(real[index + 1] - real[index])
    return _described(Boundaries(tuple(offsets), tuple(lengths), shared_by), torch.device("cpu"))


def all_real(params: PackedSeqParams) -> PackedSequences:
    """Return a description in which padding counts as real tokens, for code that reads only ``cu_seqlens_q``."""
    boundaries = boundaries_of(params)
    tensor = params.cu_seqlens_q if params.cu_seqlens_q is not None else params.cu_seqlens_q_padded
    return _described(replace(boundaries, lengths=boundaries.padded_lengths), tensor.device)


def boundaries_of(params: PackedSeqParams) -> Boundaries:
    """Return the boundaries as numbers, read from the device at most once.

    Layers call it with descriptions made here or elsewhere. If real or padded boundaries are absent, there is no
    padding. Raises ValueError if the format is not ``thd``, keys and queries differ, or the tensors do not fit
    together.
    """
    if isinstance(params, PackedSequences) and params.boundaries is not None:
        return params.boundaries
    known: Boundaries | None = getattr(params, _BOUNDARIES, None)
    if known is None:
        known = _read(params)
        setattr(params, _BOUNDARIES, known)
    return known


def ranks_that_share(packed: Boundaries | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the ranks of a context-parallel ``group`` that share packed sequences; None for one rank."""
    return group if packed is None or packed.shared_by is None else context_segment(packed.shared_by)


def split_packed_rows(tensor: Tensor, cu_seqlens_padded: Tensor, rank: int, size: int, hybrid: bool = False) -> Tensor:
    """Return the slices of each packed sequence that a context-parallel rank holds: [b, s, ...] to [b, s / size, ...].

    If ``hybrid``, fewer ranks may share a sequence.
    Reads nothing from the device, so it does not notice wrong boundaries; :func:`packed_sequences` does, later.
    """
    if size == 1:
        return tensor
    # Clamped, because wrong boundaries would otherwise be an assertion in a CUDA kernel.
    positions = packed_positions(cu_seqlens_padded, tensor.size(1), rank, size, hybrid).clamp(0, tensor.size(1) - 1)
    index = positions.view(*positions.shape, *[1] * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:])
    return tensor.gather(1, index)


def _described(boundaries: Boundaries, device: torch.device) -> PackedSequences:
    """Return Megatron's form of the boundaries, with int32 tensors [n + 1] on ``device``."""
    real = list(accumulate(boundaries.lengths, initial=0))
    both = torch.tensor([real, list(boundaries.offsets)], dtype=torch.int32).to(device, non_blocking=True)
    return _of_tensors(both[0], both[1], boundaries)


def _of_tensors(real: Tensor, padded: Tensor, boundaries: Boundaries) -> PackedSequences:
    longest = max(boundaries.padded_lengths, default=0)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        boundaries=boundaries,
    )
    if _HAS_PAD_BETWEEN_SEQS:
        packed.pad_between_seqs = real is not padded and boundaries.has_padding
    return packed


def _check_row(
    row: int,
    real: list[int],
    padded: list[int],
    row_length: int,
    context_parallel_size: int,
    segments: list[range],
    is_hybrid: bool,
) -> None:
    try:
        check_packed_offsets(padded, row_length, context_parallel_size, segments)
        _check_lengths(real, padded)
    except ValueError as error:
        # The segments of a microbatch with this row only
        alone = segments_of([padded], row_length, context_parallel_size) if is_hybrid else segments
        advice = ", or set micro_batch_size=1 in MCoreStrategy, because rows of one microbatch are split alike"
        raise ValueError(f"row {row} of the packed batch: {error}{advice if alone != segments else ''}") from None


def _check_lengths(real: list[int], padded: list[int]) -> None:
    """Reject real lengths that are negative or exceed the padded ones."""
    if real[0] != 0:
        raise ValueError(f"cu_seqlens begins with {real[0]}; give boundaries that begin with 0")
    for index in range(len(real) - 1):
        length, space = real[index + 1] - real[index], padded[index + 1] - padded[index]
        if not 0 <= length <= space:
            raise ValueError(
                f"packed sequence {index} has {length} tokens, and cu_seqlens_padded leaves room for {space}; "
                "give 0 tokens or more, and at most that many"
            )


def _read(params: PackedSeqParams) -> Boundaries:
    """Read and check the tensors of a description."""
    if params.qkv_format != "thd":
        raise ValueError(f"packed_seq_params has qkv_format={params.qkv_format!r}; the torch backend takes 'thd'")
    real, padded = _of_queries_or_keys(params.cu_seqlens_q, params.cu_seqlens_q_padded)
    if params.cu_seqlens_kv is not params.cu_seqlens_q or params.cu_seqlens_kv_padded is not params.cu_seqlens_q_padded:
        keys = _of_queries_or_keys(params.cu_seqlens_kv, params.cu_seqlens_kv_padded)
        if keys != (real, padded):
            raise ValueError(
                "packed_seq_params has different boundaries for keys and queries, but the torch backend supports only "
                "self-attention for packed sequences; give cu_seqlens_kv equal to cu_seqlens_q"
            )
    check_packed_offsets(padded, padded[-1], 1)
    _check_lengths(real, padded)
    return Boundaries(tuple(padded), tuple(end - start for start, end in pairwise(real)))


def _of_queries_or_keys(real: Tensor | None, padded: Tensor | None) -> tuple[list[int], list[int]]:
    """Return real and padded boundaries; if one is absent, the other is used for both."""
    real, padded = (padded if real is None else real), (real if padded is None else padded)
    if real is None or padded is None:
        raise ValueError("packed_seq_params has neither cu_seqlens nor padded ones; give at least one of them")
    if real.dim() != 1 or real.shape != padded.shape or len(real) < 2:
        raise ValueError(
            f"cu_seqlens has shape {list(real.shape)} and its padded form {list(padded.shape)}; "
            "give both as [sequences + 1]"
        )
    if real is padded:
        numbers: list[int] = real.tolist()
        return numbers, numbers
    both: tuple[list[int], list[int]] = tuple(torch.stack((real, padded)).tolist())
    return both
