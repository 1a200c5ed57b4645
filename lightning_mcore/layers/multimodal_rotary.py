# SPDX-License-Identifier: Apache-2.0
"""Rotary angles of tokens that have three positions: time, height and width, as in Qwen2-VL and Qwen3-VL.

One of the three positions rotates each pair of a head's channels. For text the three are equal, and the angles are
the ordinary rotary ones. ``vision.py`` puts :class:`MultimodalRotary` into the model.

Under context parallelism, positions are split together with the tokens before they get here. Megatron's own class takes
the positions of all ranks and splits them itself, and does not support interleaved channels (0.16.1 and 0.19.2).
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mcore.layers.packed_sequences import PackedSequences
from lightning_mcore.parallel.context import packed_positions


class MultimodalRotary(nn.Module):
    """Replaces ``GPTChunk.rotary_pos_emb``: returns the angles of ``positions``, which are set before the model runs.

    The first ``channels`` of a head are rotated. ``sections`` counts the pairs of them that time, height and width
    rotate; ValueError if they do not add up to half of them. ``interleaved`` says that the three alternate.
    """

    positions: Tensor  # [3, b, s] int64: time, height and width of each token

    def __init__(self, channels: int, base: float, sections: tuple[int, int, int], interleaved: bool) -> None:
        super().__init__()
        if 2 * sum(sections) != channels:
            raise ValueError(
                f"mrope_section={list(sections)} adds up to {sum(sections)}, and the {channels} rotated channels of a"
                f" head are {channels // 2} pairs; give three numbers that add up to it"
            )
        # Not buffers, so that the frequencies stay fp32 whatever the model's dtype.
        self._axes = torch.tensor(channel_axes(sections, interleaved), device="cpu")
        places = torch.arange(0, channels, 2, dtype=torch.float, device="cpu")
        self._frequencies = 1.0 / (base ** (places / channels))

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Return 0: the angles do not depend on a length."""
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the angles of ``positions``, [s, b, 1, channels] fp32; the arguments are not used."""
        device = self.positions.device
        if self._axes.device != device:
            self._axes, self._frequencies = self._axes.to(device), self._frequencies.to(device)
        angles = self.positions[self._axes].permute(2, 1, 0).float() * self._frequencies
        return torch.cat((angles, angles), dim=-1)[:, :, None]  # pairs are i and i + channels / 2


def channel_axes(sections: tuple[int, int, int], interleaved: bool) -> list[int]:
    """Return the position that rotates each pair of channels: 0 for time, 1 for height, 2 for width.

    Source: ``recomposition_frequencies`` in transformers' ``modeling_qwen2_vl.py`` and ``modeling_qwen3_vl.py`` (5.23).
    """
    # Sections (3, 2, 1): 0 0 0 1 1 2; interleaved 0 1 2 0 1 0, where time takes the turns that an axis has left.
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    return [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections))]


def positions_in_row(positions: Tensor, packed: PackedSequences, rank: int, size: int) -> Tensor:
    """Return positions of packed sequences as Megatron's rotation takes them: [3, 1, s], a whole row.

    Megatron takes this rank's part out of the row, so the places of other ranks' tokens are zeros. Source:
    ``_apply_rotary_pos_emb_thd`` (megatron.core.models.common.embeddings.rope_utils, 0.16.1 and 0.19.2).
    """
    if size == 1:
        return positions
    assert packed.boundaries is not None
    length = positions.size(2) * size
    offsets = torch.tensor(packed.boundaries.offsets).to(positions.device, non_blocking=True)
    whole = positions.new_zeros(3, 1, length)
    whole[:, :, packed_positions(offsets, length, rank, size)] = positions
    return whole
