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
    return run_ranks(ranks, train, run, ranks, timeout=60)[0]


CP2: dict[str, Any] = {"context_parallel_size": 2}
SHARDED = {"ddp_config": DistributedDataParallelConfig(use_distributed_optimizer=True)}


@pytest.mark.parametrize("kind", [None, "all_gather", "a2a"])
def test_context_parallelism_computes_the_same(kind: str | None) -> None:
    # bf16, because fused attention has no fp32; measured: losses 1.3e-4, gradient norms 3e-4
    run = Run(precision="bf16-mixed", layout=CP2, transformer={} if kind is None else {"cp_comm_type": kind})
    losses, norms = numbers(run, 2)
    local_losses, local_norms = numbers(replace(run, impl="local", transformer={}), 2)
    assert losses == pytest.approx(local_losses, rel=1e-3)
    assert norms == pytest.approx(local_norms, rel=3e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_packed_rows_compute_the_same_in_bf16(size: int) -> None:
    run = Run(precision="bf16-mixed", layout={"context_parallel_size": size}, packed=True)
    losses, norms = numbers(run, size)
    local_losses, local_norms = numbers(replace(run, impl="local"), size)
    assert losses == pytest.approx(local_losses, rel=2e-3)
    assert norms == pytest.approx(local_norms, rel=1e-2)


TRAINS = {
    "experts-grouped": (Run(transformer=EXPERTS | {"moe_grouped_gemm": True}), 1),
    "experts-grouped-ep2": (
        Run(transformer=EXPERTS | {"moe_grouped_gemm": True}, layout={"expert_model_parallel_size": 2}),
        2,
    ),
    "experts-sequential": (Run(transformer=EXPERTS), 1),
    "latent": (Run(transformer=LATENT), 1),
    "multi-token": (Run(transformer={"mtp_num_layers": 1}), 1),
    "cp2": (Run(layout=CP2), 2),
    "recompute": (
        Run(transformer={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        1,
    ),
    "pp2": (Run(layout={"pipeline_model_parallel_size": 2}), 2),
}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("case", TRAINS)
def test_a_recipe_trains_close_to_bf16(case: str, recipe: str) -> None:
    run, ranks = TRAINS[case]
    run = replace(run, precision="bf16-mixed", fp8={"fp8_recipe": recipe})
    losses, _ = numbers(run, ranks)
    in_bf16, _ = numbers(replace(run, fp8={}), ranks)
    assert losses != in_bf16
    assert losses == pytest.approx(in_bf16, rel=0.01)


def test_fused_permutation_moves_tokens_as_the_plain_one_does() -> None:
    run = Run(transformer=EXPERTS | {"moe_grouped_gemm": True})
    fused = replace(run, transformer=run.transformer | {"moe_permute_fusion": True})
    assert numbers(fused, 1)[0] == pytest.approx(numbers(run, 1)[0], rel=1e-6)


def test_first_and_last_layers_stay_in_bf16() -> None:
    run = Run(precision="bf16-mixed", fp8={"fp8_recipe": "tensorwise"}, transformer={"num_layers": 3})
    outer = replace(run, fp8=run.fp8 | {"first_last_layers_bf16": True})
    losses = {tuple(numbers(one, 1)[0]) for one in (run, outer, replace(run, fp8={}))}
    assert len(losses) == 3


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_weights_are_gathered(recipe: str, ranks: int) -> None:
    """The layers get the FP8 numbers that they get from bf16 weights, so that nothing changes but for ``delayed``."""
    run = Run(precision="bf16-mixed", fp8={"fp8_recipe": recipe}, layout=SHARDED)
    more = {"fp8_param": True} | ({"reuse_grad_buf_for_mxfp8_param_ag": True} if recipe == "mxfp8" else {})
    losses, _ = numbers(replace(run, fp8=run.fp8 | more), ranks)
    plain, _ = numbers(run, ranks)
    assert losses == pytest.approx(plain, rel=0.01 if recipe == "delayed" else 1e-3)
