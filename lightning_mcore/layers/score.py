# SPDX-License-Identifier: Apache-2.0
"""Layers that replace ``GPTChunk.output_layer``, and are called like it.

:class:`ScoreLayer` is for reward models and classifiers: one or more scores per token instead of logits over the
vocabulary. All tensor-parallel ranks hold the whole layer and compute the same scores, in fp32. :class:`HiddenStates`
has no weights and returns what it gets.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.parallel.groups import generator_of


class ScoreLayer(nn.Module):
    """A linear layer without bias from hidden states to scores; its initial values depend only on the run's seed."""

    def __init__(self, config: TransformerConfig, num_scores: int = 1) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        drawn = torch.randn(num_scores, config.hidden_size, generator=generator_of("score"))
        drawn *= config.init_method_std
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(drawn.to(device, config.params_dtype))
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return the scores, [s / cp, b, num_scores] fp32, and None for the bias.

        ``hidden`` is [s / cp, b, h], with sequence parallelism [s / cp / tp, b, h]. ``weight`` must be None: Megatron
        passes the embedding's here if the two are tied.
        """
        assert weight is None
        if self.sequence_parallel:
            # All ranks have the same gradients, so backward takes its part instead of summing.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return functional.linear(hidden.float(), self.weight.float()), None


class HiddenStates(nn.Module):
    """Returns the hidden states after the last norm, whole on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return the hidden states, [s / cp, b, h], and None for the bias; arguments as for :class:`ScoreLayer`."""
        assert weight is None
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden, None
