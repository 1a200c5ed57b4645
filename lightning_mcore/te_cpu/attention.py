# SPDX-License-Identifier: Apache-2.0
"""Attention: what TransformerEngine's own attention in PyTorch needs, and packed rows."""

import importlib
import itertools
from typing import Any

from torch import Tensor


def get_fused_attn_backend(*args: Any) -> Any:
    """Return which fused attention there is."""
    extension = importlib.import_module("transformer_engine_torch")
    none = extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    return none if hasattr(extension.NVTE_Fused_Attn_Backend, "NVTE_F16_max512_seqlen") else (none, "")


def convert_thd_to_bshd(tensor: Tensor, bounds: Tensor, batch: int, length: int) -> Tensor:
    """Return packed sequences [t, ...] as rows [b, s, ...], with zeros behind them."""
    edges = bounds.tolist()
    rows = tensor.new_zeros(batch, length, *tensor.shape[1:])
    for row, (start, end) in enumerate(itertools.pairwise(edges)):
        rows[row, : end - start] = tensor[start:end]
    return rows


def convert_bshd_to_thd(tensor: Tensor, bounds: Tensor, tokens: int) -> Tensor:
    """Return rows [b, s, ...] as packed sequences [t, ...]."""
    edges = bounds.tolist()
    packed = tensor.new_zeros(tokens, *tensor.shape[2:])
    for row, (start, end) in enumerate(itertools.pairwise(edges)):
        packed[start:end] = tensor[row, : end - start]
    return packed
