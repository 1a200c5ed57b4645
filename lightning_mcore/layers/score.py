# SPDX-License-Identifier: Apache-2.0
"""Layers that replace ``GPTChunk.output_layer``, and are called like it.

:class:`ScoreLayer` is for reward models and classifiers: one or more scores per token instead of logits over the
vocabulary. All tensor-parallel ranks hold the whole layer and compute the same scores, in fp32. :class:`TokenLogits` is
a language model's own output layer that computes the logits of a few tokens. :class:`HiddenStates` has no weights and
returns what it gets.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.layers.inputs import ModelInputs
from lightning_mcore.layers.losses import sample_sums
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


class TokenLogits(tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no type information
    """The output layer of a language model that computes the logits of a few tokens, the same on every rank, in fp32.

    Made by :meth:`of` from the layer of a model, so that its weight keeps its name and its place.
    """

    @classmethod
    def of(cls, layer: Any, tokens: Sequence[int]) -> Any:
        """Turn an output layer, with its hooks, into one for these tokens; ValueError for TransformerEngine's."""
        if type(layer) is not tensor_parallel.ColumnParallelLinear:
            raise ValueError(
                f"the output layer is a {type(layer).__name__}, which computes all logits; leave fp8_output_proj out"
            )
        layer.__class__ = cls
        # Example: tokens 9 and 2 of 12, on two ranks. The second rank has the rows 6 to 11, so the tokens are at its
        # places 3 and -4: it contributes its row 3 for the first token, and zeros for the second.
        rows = layer.output_size_per_partition
        places = torch.tensor(tokens) - layer.tp_group.rank() * rows
        device = None if layer.config.use_cpu_initialization else torch.cuda.current_device()
        is_own = ((places >= 0) & (places < rows))[:, None]
        layer.register_buffer("places", places.clamp(0, rows - 1).to(device), persistent=False)
        layer.register_buffer("is_own", is_own.to(device), persistent=False)
        return layer

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return the logits, [s / cp, b, tokens] fp32, and None for the bias; ``hidden`` as for :class:`ScoreLayer`.

        ``weight``, [v / tp, h], is the embedding's if the two are tied.
        """
        weight = self.weight if weight is None else weight
        # The sum over ranks has all rows. Every rank gets the full gradient, and keeps the part of its own rows.
        own = torch.where(self.is_own, weight[self.places].float(), 0.0)
        rows = tensor_parallel.reduce_from_tensor_model_parallel_region(own, group=self.tp_group)
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return functional.linear(hidden.float(), rows), None


def last_scores(scores: Tensor, inputs: ModelInputs, lengths: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return the score of each sequence's last token, [sequences] fp64, with gradients as those of ``sample_sums``.

    ``scores`` are [b, s / cp], packed [1, t]; ``lengths`` [sequences] counts each sequence's tokens.
    """
    is_last = inputs.position_ids == lengths[inputs.samples] - 1
    return sample_sums(scores * is_last, inputs, cp_group)


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
