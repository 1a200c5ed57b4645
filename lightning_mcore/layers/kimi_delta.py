# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: a gated delta net in which each key channel of a memory decays by itself.

A token's decays and output gates are products of two narrow matrices, of which all heads share the first. What else
differs from ``delta_net.py``: each head has a query, a key and a value of one size, and the gate is a sigmoid.

Source: the modules of ``kimi_linear`` (transformers 5.24), for the numbers and initial values.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.delta_net import GatedNorm, remembered
from lightning_mcore.layers.latent_experts import WholeLinear
from lightning_mcore.layers.recurrent import OfHeads, RecurrentLayer, RecurrentState
from lightning_mcore.parallel.groups import generator_of

_DECAYS = (1.0, 16.0)  # at the start of training, in units of the step
_STEPS = (1e-3, 0.1)  # at the start of training, from the smallest to the largest


class KimiDeltaAttention(RecurrentLayer):
    """Kimi delta attention in place of attention, with the constructor arguments that Megatron gives to attention."""

    kind = "Kimi delta attention layer"

    def __init__(self, config: TransformerConfig, layer_number: int, **unused: Any) -> None:
        sizes = architecture_of(config).kimi_delta
        assert sizes is not None
        self.sizes, self.size = sizes, sizes["linear_head_dim"]
        super().__init__(config, layer_number, sizes["linear_num_heads"], (3 * self.size + 1, self.size))

    def _build(self, config: TransformerConfig) -> None:
        generator = generator_of(f"Kimi delta attention of layer {self.layer_number}")
        heads, kernel = self.sizes["linear_num_heads"], self.sizes["linear_conv_kernel_dim"]
        convolution = torch.empty(3 * heads * self.size, 1, kernel)
        convolution.uniform_(-(kernel**-0.5), kernel**-0.5, generator=generator)  # as in torch
        rate = torch.empty(1, 1, heads, 1).uniform_(*_DECAYS, generator=generator)
        step = torch.empty(heads * self.size).uniform_(*map(math.log, _STEPS), generator=generator).exp_()
        self.conv1d = OfHeads(self.tp_group, convolution, config)
        self.A_log = OfHeads(self.tp_group, rate.log(), config, axis=2)
        self.dt_bias = OfHeads(self.tp_group, step.expm1().log(), config)  # of which softplus gives the step
        self.out_norm = _SigmoidNorm(config, self.size)
        self.linear_low = WholeLinear(
            config, 2 * self.size, config.hidden_size, config.init_method, self.tp_group, bias=False
        )
        self.linear_decay, self.linear_gate = (
            ColumnParallelLinear(
                self.size,
                heads * self.size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_bias_add=False,
                tp_group=self.tp_group,
            )
            for _ in range(2)
        )

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Return each head's query, key, value, beta, decays and gates, [s / cp, b, heads / tp, 5 * size + 1]."""
        low, _ = self.linear_low(hidden_states)
        raised = zip((self.linear_decay, self.linear_gate), low.chunk(2, dim=-1), strict=True)
        more = [torch.unflatten(linear(part)[0], -1, (self.heads, -1)) for linear, part in raised]
        return torch.cat((super()._project(hidden_states), *more), dim=-1)

    def _mix(
        self, mixed: Tensor, lengths: Sequence[int], state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """Compute sequences, [s, b, heads, c] to [s, b, heads, size]."""
        inputs, beta, step, gate = torch.split(mixed, [3 * self.size, 1, self.size, self.size], dim=-1)
        inputs, last = self._convolve(inputs, lengths, state)
        query, key, value = (part.permute(1, 2, 0, 3) for part in inputs.chunk(3, dim=-1))
        rate, bias = self.A_log(self.cp_group).float().exp(), self.dt_bias(self.cp_group).float()
        step = functional.softplus(step.permute(1, 2, 0, 3).float() + bias.view(-1, 1, self.size))
        beta = beta.squeeze(-1).permute(1, 2, 0).sigmoid()
        tokens = (query, key, value, -rate.view(-1, 1, 1) * step, beta)
        output, memory = remembered(tokens, lengths, state, self.is_recomputed)
        return self.out_norm(output.permute(2, 0, 1, 3).to(mixed.dtype), gate), RecurrentState(last, memory)


class _SigmoidNorm(GatedNorm):
    """The norm with a sigmoid as its gate, in fp32 throughout."""

    def _opened(self, weight: Tensor, values: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.float() * values * gate.sigmoid()
