# SPDX-License-Identifier: Apache-2.0
"""Fused kernels that a model of TransformerEngine's layers gets on a GPU unless it says otherwise.

Megatron's config has all of them off. Those below compute what the plain kernels do, with fewer passes over memory.
Each is left out where Megatron has no kernel for the model, or one that would ignore a setting. Fused cross entropy
stays off, because TransformerEngine's writes gradients over the logits, which metrics read.

``MCoreGPT`` and ``lightning-mcore plan`` call :func:`fusion_defaults`.

Sources: ``TransformerConfig.__post_init__``, ``apply_rotary_pos_emb`` and ``TEGroupedMLP`` of megatron-core 0.16.1 and
0.19.2.
"""

from collections.abc import Mapping
from typing import Any

_SILU = ("silu", "torch.nn.functional.silu")


def fusion_defaults(
    transformer: Mapping[str, Any], position_embedding_type: str = "rope", has_adapters: bool = False
) -> dict[str, bool]:
    """Return the fusions that a model gets, without those that it sets itself.

    Args:
        transformer: The model's fields of ``TransformerConfig``, as plain data.
        position_embedding_type: Argument of ``MCoreGPT``.
        has_adapters: Whether adapters are trained beside the weights.

    Returns:
        Field names of ``TransformerConfig``, all with the value True.
    """
    get = transformer.get
    has_bias, has_experts = get("add_bias_linear", True), bool(get("num_moe_experts"))
    wanted = {
        # of packed rows, Megatron's fused kernel ignores the scale of YaRN and rotary_interleaved
        "apply_rope_fusion": position_embedding_type == "rope"
        and not get("multi_latent_attention")
        and not get("rotary_interleaved"),
        "bias_activation_fusion": bool(get("gated_linear_unit"))
        and get("activation_func") in _SILU
        and not get("use_te_activation_func")
        and not get("activation_func_clamp_value")
        and not get("glu_linear_offset")
        and not (has_experts and has_bias),
        "bias_dropout_fusion": not get("hidden_dropout") and not (has_experts and has_bias),
        "moe_grouped_gemm": has_experts and not has_adapters,
        "moe_permute_fusion": has_experts and get("moe_expert_capacity_factor") is None,
    }
    return {name: True for name, is_wanted in wanted.items() if is_wanted and name not in transformer}
