# SPDX-License-Identifier: Apache-2.0
"""What a layer with a memory keeps for backward, measured on tensors that have shapes and no values.

Such layers (``layers/recurrent.py``) are plain PyTorch on every device, also their norms, for which a GPU has no kernel
of its own, and ranks divide their heads. So one layer, run forward on the meta device, says what any rank keeps.
Attention and feed-forward parts are listed tensor by tensor instead (``activation_memory.py``), because those of
TransformerEngine cannot run without a GPU.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from lightning_mcore.layers.packed_sequences import packed_sequences
from lightning_mcore.planning.built import alone, built_model, kinds
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.model import FP32, GPTFields

_MOST_TOKENS = 2048
"""Tokens of the run. Longer sequences keep as much for each token, because a layer computes 64 tokens at once."""
SEQUENCES = 4
"""Sequences of a packed row, which are taken to be of equal length."""


def kept_by_memory(
    fields: GPTFields, layer: int, seq_length: int, form: Formats, trained: Collection[str] | None
) -> tuple[float, float]:
    """Return the bytes that a layer with a memory keeps for each token, as it is and with its memory recomputed.

    Those of its input are left out. ``trained`` are the names of the weights that are trained or have adapters, in a
    checkpoint; None for all.
    """
    place = kinds(fields).index(fields.kind(layer))
    mixer: Any = built_model(fields).chunk.get_submodule(f"decoder.layers.{place}.self_attention")
    prefix = f"decoder.layers.{layer}.self_attention."
    names = frozenset(name for name, _ in mixer.named_parameters() if trained is None or prefix + name in trained)
    return _kept(mixer, names, form.parameter == FP32, min(seq_length, _MOST_TOKENS), form.packed)


@lru_cache(maxsize=64)
def _kept(mixer: Any, trained: frozenset[str], is_fp32: bool, length: int, is_packed: bool) -> tuple[float, float]:
    packed = None
    if is_packed:
        offsets = torch.arange(SEQUENCES + 1)[None] * length // SEQUENCES
        packed = packed_sequences(offsets, offsets, length)
    was_recomputed, kept = mixer.is_recomputed, []
    try:
        for mixer.is_recomputed in (False, True):
            kept.append(_bytes_kept(mixer, trained, torch.float32 if is_fp32 else torch.bfloat16, length, packed))
    finally:
        mixer.is_recomputed = was_recomputed
    return kept[0] / length, kept[1] / length


def _bytes_kept(mixer: Any, trained: frozenset[str], dtype: torch.dtype, length: int, packed: Any) -> int:
    weights = {
        name: weight.detach().to(dtype).requires_grad_(name in trained) for name, weight in mixer.named_parameters()
    }
    hidden = torch.empty(length, 1, mixer.config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
    not_kept = {tensor.untyped_storage()._cdata for tensor in (hidden, *weights.values())}
    kept: dict[int, Tensor] = {}  # by storage; the tensors stay alive, so that no two storages have one address

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    # What is not a tensor's own device is the host, as in a run.
    with alone(), torch.device("cpu"), saved_tensors_hooks(keep, lambda tensor: tensor):
        functional_call(mixer, weights, (hidden,), {"packed_seq_params": packed})
    return sum(
        tensor.untyped_storage().nbytes()
        for place, tensor in kept.items()
        if place not in not_kept and tensor.device.type == "meta"
    )
