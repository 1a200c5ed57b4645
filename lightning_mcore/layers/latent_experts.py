# SPDX-License-Identifier: Apache-2.0
"""Experts that work in a narrower space (``moe_latent_size``), as in Nemotron 3 Super, in plain PyTorch.

A projection narrows each token before it is sent to its experts, and another widens the sum of their outputs. The
router and the shared expert read the token as it is. Each tensor-parallel rank has both projections whole, and applies
them to its own tokens. megatron-core takes these two layers from TransformerEngine even on its local backend, so
``spec.gpt_block_spec`` puts :func:`latent_layer` in the place of its layer of experts.

Source: ``MoELayer`` (megatron.core.transformer.moe.moe_layer, 0.16.1 and 0.19.2).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class WholeLinear(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """A linear layer whose weight, [rows, columns], each tensor-parallel rank has whole, for its own tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        rows: int,
        columns: int,
        init_method: Callable[[Tensor], Any],
        tp_group: dist.ProcessGroup,
        bias: bool,
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=config.params_dtype)) if bias else None
        if config.perform_initialization:
            init_method(self.weight)
        for parameter in self.parameters():
            # Megatron then sums its gradients over the ranks, which have different tokens
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """Return the output, [..., rows], with its bias, and None, as Megatron's layers do without a bias."""
        return functional.linear(inputs, self.weight, self.bias), None


class LatentExperts(MoELayer):  # type: ignore[misc]  # megatron-core has no type information
    """Megatron's layer of experts with projections of our own; :func:`latent_layer` makes a subclass to build."""

    spec: MoESubmodules

    def __init__(self, config: TransformerConfig, **given: Any) -> None:
        latent, config.moe_latent_size = config.moe_latent_size, None
        try:  # Megatron builds neither projections nor experts here
            super().__init__(config, dataclasses.replace(self.spec, experts=IdentityOp), **given)
        finally:
            config.moe_latent_size = latent
        groups = given.get("pg_collection") or get_default_pg_collection()
        self.experts = self.spec.experts(self.num_local_experts, config, pg_collection=groups)
        hidden, inner, outer = config.hidden_size, config.init_method, config.output_layer_init_method
        group, bias = self.tp_group, config.add_bias_linear
        self.fc1_latent_proj = WholeLinear(config, latent, hidden, inner, group, bias)
        self.fc2_latent_proj = WholeLinear(config, hidden, latent, outer, group, bias)


def latent_layer(submodules: MoESubmodules) -> type[LatentExperts]:
    """Return the layer with these experts, router and shared experts.

    A class rather than a ``ModuleSpec``, in which Megatron 0.16 warns of classes that it does not know.
    """
    return type(LatentExperts.__name__, (LatentExperts,), {"spec": submodules})
