# SPDX-License-Identifier: Apache-2.0
"""``hybrid_context_parallel``: layers that exchange only with the ranks that share documents.

The documents of a row may be shared by some ranks of a context-parallel group, or be whole on one
(``parallel/context.py``). Layers see from a microbatch's boundaries how many ranks share this rank's documents
(``Boundaries.shared_by``). The torch backend's attention reads them itself. Megatron's attention rotates positions by
the group that it was built with, TransformerEngine exchanges keys within it, and multi-token prediction the first
tokens of each slice: hooks lend them the group of the ranks that share the documents. Other layers look at each token
alone.

Source: ``Attention.forward``, ``MLASelfAttention.get_query_key_value_tensors``, ``TEDotProductAttention.forward`` and
``MultiTokenPredictionLayer.forward`` (megatron.core, 0.16.1 and 0.19.2).
"""

import copy
from typing import Any

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.core_attention import TorchAttention
from lightning_mcore.layers.packed_sequences import boundaries_of, ranks_that_share


class _Alone:
    """A group of one rank, for code that asks a group for its size and rank only."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def check_hybrid(config: TransformerConfig, kind: str | None = None) -> None:
    """Raise ValueError for a model that needs every row split; ``kind`` is the name of one that its config hides."""
    recomputed = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
    unsupported = {
        kind: kind is not None,
        "layers with a memory, whose heads are split over the context-parallel ranks": (
            architecture_of(config).has_memories
        ),
        "recompute_modules=['mla_up_proj']": "mla_up_proj" in recomputed,
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise ValueError(f"hybrid_context_parallel=True does not support {name}; set hybrid_context_parallel=False")


def keep_documents_whole(chunk: nn.Module) -> None:
    """Let a chunk's attention and multi-token prediction exchange only with the ranks that share documents."""
    for module in chunk.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            module.register_forward_pre_hook(_lend_to_prediction, with_kwargs=True)
            module.register_forward_hook(_take_from_prediction, always_call=True)
        if isinstance(module, Attention):
            module.register_forward_pre_hook(_lend, with_kwargs=True)
            module.register_forward_hook(_give_back, always_call=True)
            core = module.core_attention
            if not isinstance(core, TorchAttention):
                core.register_forward_pre_hook(_set_group, with_kwargs=True)


def _sharing(packed: PackedSeqParams | None, group: Any) -> Any:
    """Return the ranks of ``group`` that share the documents of a microbatch."""
    return group if packed is None else ranks_that_share(boundaries_of(packed), group) or _Alone()


def _lend(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    groups = attention.pg_collection
    if (group := _sharing(kwargs.get("packed_seq_params"), groups.cp)) is not groups.cp:
        attention.shared_groups, attention.pg_collection = groups, copy.copy(groups)
        attention.pg_collection.cp = group


def _give_back(attention: Any, args: tuple[Any, ...], output: Any) -> None:
    if (groups := vars(attention).pop("shared_groups", None)) is not None:
        attention.pg_collection = groups


def _lend_to_prediction(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (group := _sharing(kwargs.get("packed_seq_params"), layer.cp_group)) is not layer.cp_group:
        layer.shared_group, layer.cp_group = layer.cp_group, group


def _take_from_prediction(layer: Any, args: tuple[Any, ...], output: Any) -> None:
    if (group := vars(layer).pop("shared_group", None)) is not None:
        layer.cp_group = group


def _set_group(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set the ranks with which TransformerEngine's attention exchanges keys, because it keeps those of the last row."""
    if "shared_group" not in vars(core):
        core.shared_group = core.cp_group
    group = _sharing(kwargs.get("packed_seq_params"), core.shared_group)
    group = None if isinstance(group, _Alone) else group
    ranks, stream = (None, None) if group is None else (dist.get_process_group_ranks(group), type(core).cp_stream)
    core.set_context_parallel_group(group, ranks, stream, core.cp_comm_type)
