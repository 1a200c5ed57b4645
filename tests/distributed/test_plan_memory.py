# SPDX-License-Identifier: Apache-2.0
"""The memory that ``planning`` foretells is what live runs take, rank by rank.

Measured over these runs: weights, gradients and optimizer state agree to 0.2 % (the counters of Adam), and what is
planned of activations is between 9 % less and 8 % more than what is there.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest

from lightning_mcore.config.vision import PROJECTOR, TOWER
from tests.support.live_memory import LiveRun, measured
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

STATE = 0.02
ACTIVATIONS = 0.15

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 192,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
BIASED: dict[str, Any] = {  # Megatron's defaults
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "ffn_hidden_size": 192,
}
MOE: dict[str, Any] = DENSE | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_token_dispatcher_type": "alltoall",
}
SHARED: dict[str, Any] = MOE | {
    "moe_shared_expert_intermediate_size": 80,
    "moe_shared_expert_gate": True,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_aux_loss_coeff": 0.01,
}
LATENT: dict[str, Any] = DENSE | {
    "multi_latent_attention": True,
    "num_query_groups": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
}
KIMI = LATENT | {"q_lora_rank": None, "rope_type": "rope"}
DELTA_NET: dict[str, Any] = {
    "delta_net": {
        "linear_attention_freq": [1, 0, 1, 1],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4,
    }
}
KIMI_DELTA: dict[str, Any] = {
    "kimi_delta": {
        "linear_attention_freq": [1, 0, 1, 1],
        "linear_num_heads": 8,
        "linear_head_dim": 20,
        "linear_conv_kernel_dim": 4,
    }
}
HYBRID: dict[str, Any] = {
    "layer_pattern": "[M-][*-][M-][M-]",
    "mamba": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 20,
        "mamba_num_groups": 2,
        "mamba_state_dim": 24,
        "mamba_conv_kernel_dim": 4,
    },
}
PARTS = HYBRID | {"layer_pattern": "M-*M"}
SINKS = DENSE | {"softmax_type": "learnable"}
CLAMPED: dict[str, Any] = {
    "activation_func": "gelu_sigmoid",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
}
AHEAD = DENSE | {"mtp_num_layers": 1}
DEEP = DENSE | {"num_layers": 8}

TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VP = PP | {"virtual_pipeline_model_parallel_size": 2}
CP: dict[str, Any] = {"context_parallel_size": 2}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
LAYER_WISE: dict[str, Any] = {"use_layer_wise_distributed_optimizer": True}
OVERLAPPED = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
EP: dict[str, Any] = {"expert_model_parallel_size": 2}


def run(
    transformer: dict[str, Any] = DENSE,
    world: int = 1,
    strategy: dict[str, Any] | None = None,
    *,
    precision: str = "32-true",
    rows: int = 1,
    microbatches: int = 1,
    packed: bool = False,
    seq_length: int = 256,
    **model: Any,
) -> LiveRun:
    arguments = {"vocab_size": 500, "seq_length": seq_length, "transformer": transformer, **model}
    return LiveRun(
        world=world,
        strategy=strategy or {},
        precision=precision,
        model=arguments,
        rows=rows,
        microbatches=microbatches,
        packed=packed,
    )


def seeing(family: str, *arguments: Any, **more: Any) -> LiveRun:
    """Return a run on rows with four images, which have three quarters of the tokens."""
    return replace(run(*arguments, **more), family=family, images=((1, 12, 16),) * 4)


def full(transformer: dict[str, Any], method: str, num_layers: int) -> dict[str, Any]:
    return transformer | {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def selective(transformer: dict[str, Any], *modules: str) -> dict[str, Any]:
    return transformer | {"recompute_granularity": "selective", "recompute_modules": list(modules)}


RUNS: dict[str, LiveRun] = {
    "dense": run(),
    "dense-bf16": run(precision="bf16-mixed"),
    "dense-bf16-true-two-rows": run(precision="bf16-true", rows=2),
    "dense-16": run(precision="16-mixed"),
    "sgd": run(precision="bf16-true", recipe={"optimizer": "sgd"}),
    "dp2-layer-wise-muon-bf16": run(
        world=2, strategy=LAYER_WISE, precision="bf16-mixed", recipe={"optimizer": "muon"}, microbatches=2
    ),
    "ep2-layer-wise-muon": run(MOE, 2, EP | LAYER_WISE, recipe={"optimizer": "muon"}, microbatches=2),
    "wide-and-long": run(DENSE | {"hidden_size": 128, "ffn_hidden_size": 320, "num_layers": 6}, seq_length=512),
    "large-vocabulary": run(precision="bf16-mixed", vocab_size=8000),
    "chunks": run(vocab_size=8000, strategy={"loss_chunk_size": 64}),
    "chunks-tp2-sp-bf16": run(
        vocab_size=8000, world=2, strategy=SP | {"loss_chunk_size": 100}, precision="bf16-mixed", rows=2
    ),
    "small-chunks": run(vocab_size=8000, strategy={"loss_chunk_size": 8}),
    "small-chunks-bf16": run(vocab_size=8000, strategy={"loss_chunk_size": 8}, precision="bf16-mixed"),
    "small-chunks-bf16-true": run(vocab_size=8000, strategy={"loss_chunk_size": 8}, precision="bf16-true"),
    "chunks-pp2-ahead": run(AHEAD, 2, PP | {"loss_chunk_size": 64}, vocab_size=4000, microbatches=2),
    "biased-learned-tied": run(
        BIASED,
        rows=2,
        microbatches=2,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    ),
    "biased-bf16": run(BIASED, precision="bf16-mixed"),
    "dropout": run(BIASED | {"hidden_dropout": 0.1}),
    "attention-dropout": run(DENSE | {"attention_dropout": 0.1}),
    "head-norms-and-gate-bf16": run(
        DENSE | {"qk_layernorm": True, "attention_output_gate": True}, precision="bf16-mixed"
    ),
    "fusions": run(DENSE | {"bias_activation_fusion": True, "cross_entropy_loss_fusion": True}),
    "window": run(DENSE | {"window_size": [64, 0]}),
    "packed-two-rows": run(rows=2, packed=True),
    "moe": run(MOE),
    "moe-allgather": run(MOE | {"moe_token_dispatcher_type": "allgather"}),
    "moe-capacity": run(MOE | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
    "shared-experts-bf16": run(SHARED, precision="bf16-mixed"),
    "narrow-experts": run(SHARED | {"moe_latent_size": 40}),
    "narrow-experts-bf16": run(SHARED | {"moe_latent_size": 40}, precision="bf16-mixed"),
    "recompute-narrow-experts": run(selective(SHARED | {"moe_latent_size": 40}, "moe")),
    "latent": run(LATENT),
    "latent-bf16": run(LATENT, precision="bf16-mixed"),
    "latent-without-norms": run(LATENT | {"qk_layernorm": False, "q_lora_rank": None}),
    "ahead": run(AHEAD),
    "recompute-each-layer": run(full(DENSE, "uniform", 1)),
    "recompute-each-layer-bf16": run(full(DENSE, "uniform", 1), precision="bf16-mixed"),
    "recompute-two-layers": run(full(DENSE, "uniform", 2)),
    "recompute-block": run(full(DENSE, "block", 2)),
    "recompute-attention": run(selective(DENSE, "core_attn")),
    "recompute-mlp": run(selective(DENSE, "mlp")),
    "recompute-experts": run(selective(SHARED, "moe")),
    "recompute-shared-experts": run(selective(SHARED, "shared_experts")),
    "delta-net": run(architecture=DELTA_NET),
    "delta-net-bf16-two-rows": run(precision="bf16-mixed", rows=2, architecture=DELTA_NET),
    "recompute-delta-net": run(selective(DENSE, "core_attn"), architecture=DELTA_NET),
    "tp2-sp-delta-net": run(world=2, strategy=SP, architecture=DELTA_NET),
    "kimi-delta": run(architecture=KIMI_DELTA),
    "kimi-delta-bf16-two-rows": run(precision="bf16-mixed", rows=2, architecture=KIMI_DELTA),
    "kimi-delta-latent-tp2-sp": run(KIMI, 2, SP, architecture=KIMI_DELTA, position_embedding_type="none"),
    "adapters-kimi-delta-tp2-sp": run(
        KIMI, 2, SP, architecture=KIMI_DELTA, position_embedding_type="none", lora={"r": 8}
    ),
    "recompute-kimi-delta": run(selective(DENSE, "core_attn"), architecture=KIMI_DELTA),
    "mamba": run(architecture=HYBRID),
    "mamba-bf16-two-rows": run(precision="bf16-mixed", rows=2, architecture=HYBRID),
    "mamba-one-part-a-layer": run(architecture=PARTS),
    "recompute-mamba": run(selective(DENSE, "core_attn"), architecture=HYBRID),
    "packed-delta-net": run(rows=2, packed=True, architecture=DELTA_NET),
    "recompute-packed-delta-net": run(selective(DENSE, "core_attn"), rows=2, packed=True, architecture=DELTA_NET),
    "recompute-packed-kimi-delta": run(selective(DENSE, "core_attn"), packed=True, architecture=KIMI_DELTA),
    "recompute-packed-mamba": run(selective(DENSE, "core_attn"), packed=True, architecture=HYBRID),
    "tp2-sp-mamba": run(world=2, strategy=SP, architecture=HYBRID),
    "norms-around": run(architecture={"layer_norms": "around"}),
    "norms-around-bf16": run(precision="bf16-mixed", architecture={"layer_norms": "around"}),
    "norms-parallel": run(
        DENSE | {"normalization": "LayerNorm"}, architecture={"layer_norms": "parallel", "norm_bias": False}
    ),
    "learned-activation-bf16": run(
        DENSE | {"gated_linear_unit": False, "activation_func": "xielu"}, precision="bf16-mixed"
    ),
    "norms-of-all-heads-bf16": run(precision="bf16-mixed", architecture={"head_norms": "all_heads"}),
    "norms-after-rotation-bf16": run(precision="bf16-mixed", architecture={"head_norms": "after_rotation"}),
    "norms-without-weights": run(architecture={"head_norms": "unweighted"}),
    "norms-without-weights-bf16": run(precision="bf16-mixed", architecture={"head_norms": "unweighted"}),
    "attention-in-chunks-bf16": run(precision="bf16-mixed", architecture={"attention_chunk": 24}),
    "capped-scores": run(architecture={"attention_cap": 30.0}),
    "capped-scores-bf16": run(precision="bf16-mixed", architecture={"attention_cap": 30.0}),
    "sinks": run(SINKS),
    "sinks-clamped-experts-bf16": run(
        MOE | SINKS | CLAMPED, precision="bf16-mixed", architecture={"expert_bias": True}
    ),
    "dp2-do": run(world=2, strategy=SHARDED),
    "dp2-do-bf16-overlap": run(world=2, strategy=OVERLAPPED, precision="bf16-mixed"),
    "tp2": run(world=2, strategy=TP),
    "tp2-sp-bf16": run(world=2, strategy=SP, precision="bf16-mixed"),
    "tp2-recompute": run(full(DENSE, "uniform", 1), 2, TP),
    "tp2-sp-latent": run(LATENT, 2, SP),
    "tp2-sp-ep2-etp1": run(SHARED, 2, SP | EP | {"expert_tensor_parallel_size": 1}),
    "tp2-sp-moe": run(SHARED, 2, SP),
    "cp2-two-rows": run(world=2, strategy=CP, rows=2),
    "cp2-packed": run(world=2, strategy=CP, packed=True),
    "pp2": run(world=2, strategy=PP, microbatches=4),
    "pp2-one-microbatch": run(world=2, strategy=PP),
    "pp2-recompute": run(full(DENSE, "uniform", 1), 2, PP, microbatches=2),
    "pp2-tied-do-bf16": run(
        world=2, strategy=PP | SHARDED, microbatches=2, precision="bf16-mixed", share_embeddings_and_output_weights=True
    ),
    "pp2-ahead": run(AHEAD, 2, PP, microbatches=2),
    "pp2-split": run(world=2, strategy=PP | {"pipeline_model_parallel_layout": "Ettt|tL"}, microbatches=2),
    "pp2-vp2": run(world=2, strategy=VP, microbatches=4),
    "pp2-vp2-group4": run(world=2, strategy=VP | {"microbatch_group_size_per_vp_stage": 4}, microbatches=8),
    "pp4": run(DEEP, 4, {"pipeline_model_parallel_size": 4}, microbatches=16),
    "pp4-vp2": run(DEEP, 4, VP | {"pipeline_model_parallel_size": 4}, microbatches=4),
    "tp2-sp-pp2-do-bf16": run(world=4, strategy=SP | PP | SHARDED, microbatches=4, precision="bf16-mixed"),
    "moe-dp4-ep2-do": run(MOE, 4, EP | SHARDED, precision="bf16-mixed"),
    "tp2-sp-cp2": run(world=4, strategy=SP | CP),
    "reward": run(rows=2, preference={"loss": "reward"}),
    "reward-bf16": run(rows=2, precision="bf16-mixed", preference={"loss": "reward"}),
    "embedding": run(rows=4, embedding={}),
    "embedding-mean-bf16": run(rows=4, precision="bf16-mixed", embedding={"pooling": "mean"}),
    "embedding-tp2-sp-bf16": run(world=2, strategy=SP, rows=4, precision="bf16-mixed", embedding={}),
    "reranker-tokens": run(rows=2, reranker={"tokens": [3, 5]}),
    "reranker-tokens-tp2-sp-bf16": run(
        world=2, strategy=SP, rows=2, precision="bf16-mixed", reranker={"tokens": [3, 5]}
    ),
    "reranker-bf16": run(rows=2, precision="bf16-mixed", reranker={}),
    "reward-tp2-sp-bf16": run(world=2, strategy=SP, rows=2, precision="bf16-mixed", preference={"loss": "reward"}),
    "adapters": run(lora={"r": 8}),
    "adapters-bf16-query-and-value": run(precision="bf16-mixed", lora={"target_modules": ["q_proj", "v_proj"]}),
    "adapters-lengths": run(lora={"use_dora": True, "modules_to_save": ["lm_head"]}),
    "adapters-dropout": run(lora={"lora_dropout": 0.1, "target_modules": ["o_proj", "gate_proj", "up_proj"]}),
    "adapters-recompute": run(full(DENSE, "uniform", 1), lora={"r": 8}),
    "adapters-latent": run(LATENT, lora={"r": 8}),
    "adapters-moe-bf16": run(MOE, precision="bf16-mixed", lora={"r": 8}),
    "adapters-tp2": run(world=2, strategy=TP, lora={"r": 8}),
    "adapters-tp2-sp-bf16": run(world=2, strategy=SP, precision="bf16-mixed", lora={"r": 8}),
    "adapters-pp2": run(world=2, strategy=PP, microbatches=4, lora={"r": 8}),
    "adapters-ends": run(lora={"r": 64, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "adapters-routers": run(MOE, lora={"r": 8, "target_modules": ["q_proj", "gate"]}),
    "frozen": run(train_only=["layers.3.", "lm_head"]),
    "adapters-ep2-moe": run(MOE, 2, EP, lora={"r": 8}),
    "adapters-dp2-do-bf16": run(world=2, strategy=SHARDED, precision="bf16-mixed", lora={"r": 8}),
    "images-qwen2": seeing("qwen2_vl"),
    "images-qwen2-frozen": seeing("qwen2_vl", freeze=[TOWER, PROJECTOR]),
    "images-qwen2-frozen-recompute": seeing("qwen2_vl", full(DENSE, "uniform", 1), freeze=[TOWER, PROJECTOR]),
    "images-qwen2-bf16": seeing("qwen2_vl", precision="bf16-mixed"),
    "images-qwen2_5": seeing("qwen2_5_vl"),
    "images-qwen2_5-bf16": seeing("qwen2_5_vl", precision="bf16-mixed"),
    "images-qwen3": seeing("qwen3_vl"),
    "images-qwen3-bf16-two-rows": seeing("qwen3_vl", precision="bf16-mixed", rows=2),
    "images-qwen3-tower-frozen": seeing("qwen3_vl", freeze=[TOWER]),
    "images-qwen3-projector-frozen-bf16": seeing("qwen3_vl", freeze=[PROJECTOR], precision="bf16-mixed"),
    "images-qwen3-recompute": seeing("qwen3_vl", full(DENSE, "uniform", 1)),
    "images-qwen2-tp2": seeing("qwen2_vl", world=2, strategy=TP),
    "images-qwen2-tp2-frozen": seeing("qwen2_vl", world=2, strategy=TP, freeze=[TOWER, PROJECTOR]),
    "images-qwen3-tp2-sp-bf16": seeing("qwen3_vl", world=2, strategy=SP, precision="bf16-mixed"),
    "images-qwen3-tp2-sp-frozen": seeing("qwen3_vl", world=2, strategy=SP, freeze=[TOWER]),
    "images-qwen3-cp2-recompute": seeing("qwen3_vl", full(DENSE, "uniform", 1), world=2, strategy=CP),
    "images-qwen3-pp2": seeing("qwen3_vl", DEEP, 2, PP, microbatches=4),
    "images-qwen3_5": seeing("qwen3_5", architecture=DELTA_NET),
    "images-qwen3_5-tp2-sp-bf16": seeing(
        "qwen3_5", world=2, strategy=SP, precision="bf16-mixed", architecture=DELTA_NET
    ),
    "tp2-sp-pp2-vp2-dp2-do": run(world=8, strategy=SP | VP | OVERLAPPED, microbatches=4),
}

THOROUGH = (
    *("small-chunks", "small-chunks-bf16-true"),
    *("wide-and-long", "large-vocabulary", "biased-bf16", "fusions", "moe-capacity", "latent-bf16", "pp4-vp2"),
    *("latent-without-norms", "recompute-each-layer-bf16", "recompute-two-layers", "recompute-shared-experts"),
    *("tp2-recompute", "tp2-sp-moe", "cp2-packed", "pp2-one-microbatch", "pp2-recompute", "pp2-vp2-group4"),
    *("pp2-split", "tp2-sp-cp2", "tp2-sp-pp2-vp2-dp2-do", "reward-bf16", "embedding-mean-bf16"),
    *("embedding-tp2-sp-bf16", "adapters-bf16-query-and-value", "reranker-bf16", "reranker-tokens-tp2-sp-bf16"),
    *("adapters-dropout", "adapters-latent", "adapters-tp2", "adapters-pp2", "adapters-ep2-moe"),
    *("adapters-dp2-do-bf16", "norms-around", "capped-scores", "images-qwen2-frozen-recompute", "images-qwen2-bf16"),
    *("images-qwen2_5", "images-qwen3-bf16-two-rows", "images-qwen3-projector-frozen-bf16"),
    *("images-qwen3-cp2-recompute", "images-qwen3_5-tp2-sp-bf16", "delta-net", "kimi-delta", "mamba"),
    *("recompute-packed-delta-net", "recompute-packed-mamba", "norms-without-weights", "narrow-experts", "dp2-do"),
    *("adapters", "adapters-recompute", "images-qwen2-tp2", "images-qwen2-tp2-frozen", "images-qwen3-tower-frozen"),
)
"""Runs that differ from one that stays in what another run that stays differs in."""


def _chosen(name: str) -> Any:
    """Return the parameter of a run; runs of as many ranks are trained together, in one process."""
    kind = [pytest.mark.thorough] if name in THOROUGH else []
    return pytest.param(name, marks=[pytest.mark.xdist_group(f"plan_memory-{RUNS[name].world}"), *kind])


@functools.cache
def found(world: int, thorough: bool) -> list[dict[str, dict[str, int]]]:
    """Return what each rank measured in the runs of that many ranks, those of one mark, which are trained once."""
    runs = {name: run for name, run in RUNS.items() if run.world == world and (name in THOROUGH) == thorough}
    ranks: list[dict[str, dict[str, int]]] = run_ranks(world, measured, runs, timeout=300)
    return ranks


def test_runs_are_known() -> None:
    assert set(THOROUGH) <= set(RUNS)


@pytest.mark.parametrize("name", [_chosen(name) for name in RUNS])
def test_memory_is_as_planned(name: str) -> None:
    run = RUNS[name]

    for rank, kinds in enumerate(found(run.world, name in THOROUGH)):
        planned = run.planned(rank)
        for kind in ("weights", "gradients", "optimizer"):
            assert getattr(planned, kind) == pytest.approx(kinds[name][kind], rel=STATE), (rank, kind)
        assert planned.activations == pytest.approx(kinds[name]["activations"], rel=ACTIVATIONS), rank
