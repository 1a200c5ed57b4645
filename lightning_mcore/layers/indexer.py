# SPDX-License-Identifier: Apache-2.0
"""Latent attention that carries an indexer; DeepSeek-V3.2 and GLM-5.

An indexer selects the ``index_topk`` tokens that each query attends to. In a sequence of at most that many tokens it
selects all of them and changes nothing. Here it is never computed: attention is DeepSeek-V3's, and longer sequences are
rejected. With ``index_topk=2048``, a row of 2,048 tokens is exact, and one of 2,049 is an error.

The loss of a language model does not train an indexer, neither here nor in transformers. So its weights are buffers:
they are loaded, saved and exported with the model, but no optimizer changes them.

Source: ``DeepseekV32Indexer`` and ``DeepseekV32Attention`` (transformers 5.24).
"""

import functools
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.packed_sequences import boundaries_of


class Indexer(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """The weights of an indexer, the same on all tensor-parallel ranks; in a new model they prefer no token."""

    takes_fp32 = True

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        given = architecture_of(config).indexer
        assert given is not None
        heads, size, dtype = given["index_n_heads"], given["index_head_dim"], config.params_dtype
        self.wq_b = nn.Buffer(torch.zeros(heads * size, config.q_lora_rank, dtype=dtype))
        self.wk = nn.Buffer(torch.zeros(size, config.hidden_size, dtype=dtype))
        self.k_norm_weight = nn.Buffer(torch.ones(size, dtype=dtype))
        self.k_norm_bias = nn.Buffer(torch.zeros(size, dtype=dtype))
        self.weights_proj = nn.Buffer(torch.zeros(heads, config.hidden_size, dtype=dtype))


class _Indexed(nn.Module):
    """What :func:`with_indexer` adds to a class of latent attention."""

    config: TransformerConfig
    core_attention: Any
    has_indexer: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.indexer = Indexer(self.config) if self.has_indexer else None

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute attention of [s / cp / tp, b, h], / tp only with sequence parallelism; ValueError for longer ones."""
        longest = hidden_states.size(0) * self.config.context_parallel_size
        longest *= self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        if packed_seq_params is not None:
            longest = max(boundaries_of(packed_seq_params).lengths, default=0)
        cache: Any = self.core_attention.cache
        if cache is not None and not cache.is_prompt:
            longest = cache.length
        architecture_of(self.config).check_length(f"a sequence of {longest} tokens", longest)
        context = {"inference_context": inference_context, "packed_seq_params": packed_seq_params}
        return super().forward(hidden_states, *args, **context, **kwargs)


@functools.cache
def with_indexer(attention: type[nn.Module], has_indexer: bool) -> type[nn.Module]:
    """Return a subclass of one of Megatron's latent attentions that carries an :class:`Indexer`.

    Without one, it belongs to a layer that uses the choice of a layer before.
    """
    return type(attention.__name__, (_Indexed, attention), {"has_indexer": has_indexer})
