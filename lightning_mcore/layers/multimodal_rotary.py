# SPDX-License-Identifier: Apache-2.0
"""Rotary angles of tokens that have three positions: time, height and width, as in Qwen2-VL and Qwen3-VL.

Each pair of channels of a head is rotated by one of the three positions. For text the three are equal, and the angles
are those of ordinary rotary embeddings.

Under context parallelism, positions are split together with the tokens before they get here. Megatron's own class takes
the positions of all ranks and splits them itself, and does not support interleaved channels (0.16.1 and 0.19.2).
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mcore.layers.packed_sequences import PackedSequences
from lightning_mcore.parallel.context import packed_positions


class MultimodalRotary(nn.Module):
    """Replaces ``GPTModel.rotary_pos_emb``: returns the angles of ``positions``, which are set before the model runs.

    The frequencies are not a buffer, so that they stay fp32 whatever the dtype of the model.

    Args:
        head_size: Channels of a head.
        base: Base of the wavelengths.
        sections: How many pairs of channels time, height and width rotate.
        interleaved: Whether the three alternate over the channels, or have sections one after another.

    Attributes:
        positions: [3, b, s] int64: time, height and width of each token.

    Raises:
        ValueError: The sections do not add up to half a head.
    """

    positions: Tensor

    def __init__(self, head_size: int, base: float, sections: tuple[int, int, int], interleaved: bool) -> None:
        super().__init__()
        if 2 * sum(sections) != head_size:
            raise ValueError(
                f"mrope_section={list(sections)} adds up to {sum(sections)}, and a head of {head_size} channels has"
                f" {head_size // 2} pairs; give three numbers that add up to it"
            )
        self._axes = torch.tensor(channel_axes(sections, interleaved), device="cpu")
        places = torch.arange(0, head_size, 2, dtype=torch.float, device="cpu")
        self._frequencies = 1.0 / (base ** (places / head_size))

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Return 0: the angles do not depend on a length."""
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the angles of ``positions``; the arguments are not used.

        Returns:
            [s, b, 1, head_size] fp32.
        """
        device = self.positions.device
        if self._axes.device != device:
            self._axes, self._frequencies = self._axes.to(device), self._frequencies.to(device)
        angles = self.positions[self._axes].permute(2, 1, 0).float() * self._frequencies  # [s, b, head_size / 2]
        return torch.cat((angles, angles), dim=-1)[:, :, None]


def channel_axes(sections: tuple[int, int, int], interleaved: bool) -> list[int]:
    """Return the position that rotates each pair of channels: 0 for time, 1 for height, 2 for width.

    Source: ``recomposition_frequencies`` in transformers' ``modeling_qwen2_vl.py`` and ``modeling_qwen3_vl.py`` (5.23).

    Args:
        sections: How many pairs each of them rotates.
        interleaved: Whether they alternate, each until it has its number of pairs, or lie one after another.
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    return [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections))]


def positions_in_row(positions: Tensor, packed: PackedSequences, rank: int, size: int) -> Tensor:
    """Return positions of packed sequences as Megatron's rotation takes them: those of a whole row.

    Megatron takes this rank's part out of them. The places of other ranks' tokens are zeros.

    Source: ``_apply_rotary_pos_emb_thd`` (megatron.core.models.common.embeddings.rope_utils, 0.16.1 and 0.19.2).

    Args:
        positions: [3, 1, s / cp] int64, those of this rank's tokens.
        packed: The boundaries of the row.
        rank: Rank in the context-parallel group.
        size: Number of ranks in that group.

    Returns:
        [3, 1, s] int64.
    """
    if size == 1:
        return positions
    assert packed.boundaries is not None
    length = positions.size(2) * size
    offsets = torch.tensor(packed.boundaries.offsets, device=positions.device)
    whole = positions.new_zeros(3, 1, length)
    whole[:, :, packed_positions(offsets, length, rank, size)] = positions
    return whole
