# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: attention that rotates queries and keys with cosines and sines that all layers share.

Megatron's attention computes the same cosines and sines twice in each layer. For packed rows it first puts together the
angles of each sequence, also twice. It splits each head into channels that are rotated and channels that are not, and
joins them again, even if all are rotated: that is a copy in forward and two in backward. :class:`RotatedAttention`
computes the cosines and sines once for all layers, and splits a head only if some channels are not rotated. Numbers
are the same, bit for bit. Both backends use it; with ``apply_rope_fusion``, a fused kernel rotates instead.
"""

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from lightning_mcore.layers.packed_sequences import Boundaries, boundaries_of
from lightning_mcore.parallel.context import packed_positions, sequence_at

_KEPT = "_cosines_and_sines"


class Tables(NamedTuple):
    """What :func:`rotate` multiplies the rotated channels by, each [s, b or 1, 1, channels] in the dtype of the heads.

    Channels ``i`` and ``i + channels / 2`` are a pair; if interleaved, ``2 i`` and ``2 i + 1``.
    """

    cosines: Tensor
    sines: Tensor  # negative for the first channel of each pair

    @classmethod
    def of(cls, angles: Tensor, scale: float, dtype: torch.dtype, interleaved: bool) -> "Tables":
        """Return the tables of angles, which are equal for the channels of a pair, times ``scale``."""
        cosines, sines = ((each(angles) * scale).to(dtype) for each in (torch.cos, torch.sin))
        first = sines[..., ::2] if interleaved else sines[..., : sines.size(-1) // 2]
        first.neg_()
        return cls(cosines, sines)


class RotatedAttention(SelfAttention):  # type: ignore[misc]  # megatron-core has no type information
    """Megatron's attention, which rotates queries and keys by :func:`rotate`.

    Source: ``apply_rotary_pos_emb`` (megatron.core.models.common.embeddings.rope_utils, 0.16.1 and 0.19.2).
    """

    _rotation: tuple[Tensor, Boundaries | None] | None = None  # of the current call

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self._scale: float = _yarn_get_concentration_factor_from_config(config)
        is_rotated = not (config.no_rope_freq and config.no_rope_freq[self.layer_number - 1])
        self._rotates = is_rotated and not config.apply_rope_fusion and not config.fused_single_qkv_rope

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute attention; with Megatron's own cache (``inference_context``), Megatron rotates.

        ``rotary_pos_emb`` has angles, [s / cp, b or 1, 1, channels] fp32. For packed rows, it has the angles of one
        sequence, [s, 1, 1, channels], or of all places in the row, on all context-parallel ranks together.
        """
        kwargs |= {"inference_context": inference_context, "packed_seq_params": packed_seq_params}
        if rotary_pos_emb is None or inference_context is not None or not self._rotates:
            return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        # Not with setattr(), which takes longer in a module than a rotation of one token
        self.__dict__["_rotation"] = rotary_pos_emb, boundaries_of(packed_seq_params) if is_packed else None
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__["_rotation"]

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return queries and keys, rotated, with what else Megatron's method returns."""
        found = super().get_query_key_value_tensors(*args, **kwargs)
        if self._rotation is None:
            return found
        query, key, *others = found
        tables = self._tables(query, *self._rotation)
        interleaved = self.config.rotary_interleaved
        return rotate(query, tables, interleaved), rotate(key, tables, interleaved), *others

    def _tables(self, query: Tensor, angles: Tensor, boundaries: Boundaries | None) -> Tables:
        """Return the tables of these angles; the next layer gets the same.

        Tables of dense rows live as long as the angles. Megatron keeps the angles of the last 32 lengths, so tables of
        packed rows live only as long as the boundaries.
        """
        key = (self._scale, query.dtype)
        kept: MutableMapping[Any, tuple[Any, Tables]] = vars(angles) if boundaries is None else boundaries.rotations
        name = _KEPT if boundaries is None else angles
        if name in kept and kept[name][0] == key:
            return kept[name][1]
        group = self.pg_collection.cp
        with torch.inference_mode(False), torch.no_grad():  # angles of a validation are those of training
            turns = angles
            if boundaries is not None:
                turns = _of_packed(angles, group.rank(), group.size(), query.size(0), boundaries)
            tables = Tables.of(turns, self._scale, query.dtype, self.config.rotary_interleaved)
        kept[name] = key, tables
        return tables


def _of_packed(angles: Tensor, rank: int, size: int, tokens: int, boundaries: Boundaries) -> Tensor:
    """Return the angles of a context-parallel rank's tokens of a packed row, [t, 1, 1, channels].

    ``angles`` are of a sequence, or of all places of the row. Raises ValueError if a sequence is longer than
    the angles reach, or the sequences do not make up the row.
    """
    boundaries.check_row(tokens * size)
    offsets = torch.tensor(boundaries.offsets).to(angles.device, non_blocking=True)
    places = packed_positions(offsets, tokens * size, rank, size)
    if angles.size(0) != boundaries.offsets[-1]:
        longest = max(boundaries.padded_lengths)
        if longest > angles.size(0):
            raise ValueError(
                f"packed_seq_params has a max_seqlen of {angles.size(0)}, but its longest sequence has {longest} "
                f"tokens, padding included; set max_seqlen_q and max_seqlen_kv to {longest}"
            )
        places = places - offsets[sequence_at(offsets, places)]
    return angles.index_select(0, places)


def rotate(heads: Tensor, tables: Tables, interleaved: bool) -> Tensor:
    """Return queries or keys, [s, b, h, d], with their first channels rotated; differentiable."""
    if not (torch.is_grad_enabled() and heads.requires_grad):
        return _rotated(heads, tables, interleaved)
    rotated: Tensor = _Rotation.apply(heads, *tables, interleaved)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, so autograd keeps nothing of the heads."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        return _rotated(heads, Tables(cosines, sines), interleaved)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotated(gradients[0], Tables(*ctx.saved_tensors), ctx.interleaved, back=True), None, None, None


def _rotated(heads: Tensor, tables: Tables, interleaved: bool, back: bool = False) -> Tensor:
    """Return (x cos - y sin, y cos + x sin) for each pair (x, y) of channels; ``back`` turns the other way."""
    cosines, sines = tables
    width = cosines.size(-1)
    if width < heads.size(-1):
        turned, others = torch.split(heads, [width, heads.size(-1) - width], dim=-1)
        return torch.cat((_rotated(turned, tables, interleaved, back), others), dim=-1)
    # -y sin is y times -sin, bit for bit
    added = _exchanged(heads * sines, interleaved) if back else _exchanged(heads, interleaved).mul_(sines)
    return (heads * cosines).add_(added)


def _exchanged(channels: Tensor, interleaved: bool) -> Tensor:
    """Return a copy in which the two channels of each pair have changed places."""
    if interleaved:
        return channels.view(*channels.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return channels.roll(channels.size(-1) // 2, -1)
