# SPDX-License-Identifier: Apache-2.0
"""What models of TransformerEngine's layers can have: experts, compressed attention, recomputation, FP8 weights."""

from dataclasses import replace
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig

from tests.ranks import run_ranks
from tests.te.runs import Run, train

pytestmark = pytest.mark.distributed

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "rope_type": "rope",
    "qk_layernorm": True,
}


def numbers(run: Run, ranks: int) -> tuple[list[float], list[float]]:
    return run_ranks(ranks, train, run, ranks, timeout=180)[0]


def same_as_the_torch_backend(run: Run, ranks: int, **of_local: Any) -> None:
    losses, norms = numbers(run, ranks)
    local_losses, local_norms = numbers(replace(run, impl="local", transformer=run.transformer | of_local), ranks)
    assert losses == pytest.approx(local_losses, rel=1e-5)
    assert norms == pytest.approx(local_norms, rel=1e-5, nan_ok=True)


SAME = {
    "experts": (Run(transformer=EXPERTS), 1),
    "experts-grouped": (Run(transformer=EXPERTS | {"moe_grouped_gemm": True}), 1),
    "experts-ep2": (
        Run(transformer=EXPERTS | {"moe_grouped_gemm": True}, layout={"expert_model_parallel_size": 2}),
        2,
    ),
    "experts-fused-permutation": (
        Run(transformer=EXPERTS | {"moe_grouped_gemm": True, "moe_permute_fusion": True}),
        1,
    ),
    "latent": (Run(transformer=LATENT), 1),
    "multi-token": (Run(transformer={"mtp_num_layers": 1}), 1),
    "fused-rotary": (Run(transformer={"apply_rope_fusion": True}), 1),
    "layer-norm": (Run(transformer={"normalization": "LayerNorm", "add_bias_linear": True}), 1),
    "full-recompute": (
        Run(transformer={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        1,
    ),
    "selective-recompute": (Run(transformer={"recompute_granularity": "selective"}), 1),
    "pp2": (Run(layout={"pipeline_model_parallel_size": 2}), 2),
    "dp2-sharded": (
        Run(layout={"ddp_config": DistributedDataParallelConfig(use_distributed_optimizer=True)}),
        2,
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_both_kinds_of_layers_compute_the_same(case: str) -> None:
    run, ranks = SAME[case]
    only = {"moe_grouped_gemm": False, "moe_permute_fusion": False, "apply_rope_fusion": False}
    same_as_the_torch_backend(run, ranks, **{name: value for name, value in only.items() if name in run.transformer})
