# SPDX-License-Identifier: Apache-2.0
"""Runs of real sizes, planned and rehearsed: memory of each stage, collectives of a step, and what a rehearsal takes.

``plan`` computes memory by formulas, and ``rehearse`` plays the real model on fake GPUs, so that each checks the
other. Stages are the first, the middle and the last one of a pipeline. The time is CPU time of one process, so that
other work on the machine changes little; all stages of a run are played at the same time.

    python -m benchmarks.rehearse
    python -m benchmarks.rehearse --models llama3-8b --variants full lora
    python -m benchmarks.rehearse --plan-again

The results go to benchmarks/results/. Runs that are already in the file are kept, each with its own commit, load of
the machine and microbatches.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.vision import Vision
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.rehearsal import Rehearsal, rehearse
from lightning_mcore.rehearsal.settings import build_of

_GIB = 2**30
_NODE = 8
_LLAMA: dict[str, Any] = {
    "num_query_groups": 8,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
_EXPERTS: dict[str, Any] = {
    "moe_router_topk": 8,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.001,
}
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_TOWER: dict[str, Any] = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}


@dataclass(frozen=True)
class Model:
    """A model and how it is split; a microbatch has one row, or the two answers of a pair."""

    devices: int
    microbatches: int
    vocab_size: int
    transformer: Mapping[str, Any]
    strategy: Mapping[str, Any]
    seq_length: int = 8192
    model: Mapping[str, Any] = field(default_factory=dict)
    image_tokens: int | None = None

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants that this model has; there is no preference training with images."""
        return tuple(name for name in VARIANTS if name != "dpo" or self.image_tokens is None)


def _split(tensor: int, pipeline: int, **more: Any) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, **more}
    return {**sizes, "sequence_parallel": tensor > 1, "use_distributed_optimizer": True}


MODELS: dict[str, Model] = {
    "llama3-8b": Model(
        devices=8,
        microbatches=4,
        vocab_size=128_256,
        seq_length=4096,
        transformer={
            **_LLAMA,
            "num_layers": 32,
            "hidden_size": 4096,
            "ffn_hidden_size": 14_336,
            "num_attention_heads": 32,
        },
        strategy=_split(2, 2),
    ),
    "llama3-70b": Model(
        devices=512,
        microbatches=8,
        vocab_size=128_256,
        transformer={
            **_LLAMA,
            "num_layers": 80,
            "hidden_size": 8192,
            "ffn_hidden_size": 28_672,
            "num_attention_heads": 64,
        },
        strategy=_split(8, 8),
    ),
    "llama3-405b": Model(
        devices=16_384,
        microbatches=16,
        vocab_size=128_256,
        transformer={
            **_LLAMA,
            "num_layers": 126,
            "hidden_size": 16_384,
            "ffn_hidden_size": 53_248,
            "num_attention_heads": 128,
            "num_layers_in_first_pipeline_stage": 7,
            "num_layers_in_last_pipeline_stage": 7,
        },
        strategy=_split(8, 16),
    ),
    "qwen3-30b-a3b": Model(
        devices=32,
        microbatches=4,
        vocab_size=151_936,
        seq_length=4096,
        transformer={
            **_LLAMA,
            **_EXPERTS,
            "num_layers": 48,
            "hidden_size": 2048,
            "ffn_hidden_size": 6144,
            "num_attention_heads": 32,
            "num_query_groups": 4,
            "kv_channels": 128,
            "qk_layernorm": True,
            "num_moe_experts": 128,
            "moe_ffn_hidden_size": 768,
        },
        strategy=_split(1, 4, expert_model_parallel_size=8),
    ),
    "deepseek-v3": Model(
        devices=2048,
        microbatches=16,
        vocab_size=129_280,
        seq_length=4096,
        transformer={
            **_LLAMA,
            **_EXPERTS,
            "num_layers": 61,
            "hidden_size": 7168,
            "ffn_hidden_size": 18_432,
            "num_attention_heads": 128,
            "num_query_groups": 128,
            "multi_latent_attention": True,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "qk_layernorm": True,
            "num_moe_experts": 256,
            "moe_ffn_hidden_size": 2048,
            "moe_shared_expert_intermediate_size": 2048,
            "moe_layer_freq": [0] * 3 + [1] * 58,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "num_layers_in_first_pipeline_stage": 4,
            "num_layers_in_last_pipeline_stage": 1,
        },
        strategy=_split(1, 16, expert_model_parallel_size=64),
    ),
    "qwen2.5-vl-7b": Model(
        devices=8,
        microbatches=4,
        vocab_size=152_064,
        seq_length=4096,
        transformer={
            **_LLAMA,
            "num_layers": 28,
            "hidden_size": 3584,
            "ffn_hidden_size": 18_944,
            "num_attention_heads": 28,
            "num_query_groups": 4,
            "add_qkv_bias": True,
        },
        strategy=_split(2, 2),
        model={
            "vision": Vision("qwen2_5_vl", _TOWER, 151_655, 151_656, (16, 24, 24)).plain(),
            "hf": {"family": "qwen2_5_vl"},  # its names of matrices are those that adapters look for
        },
        image_tokens=1024,
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "recompute": {"transformer": _RECOMPUTE},
    "lora": {"lora": {"r": 16}},
    "dpo": {"preference": {"loss": "sigmoid"}},
}


def settings_of(model: Model, variant: str) -> RunSettings:
    """Return a run as ``plan`` and ``rehearse`` read it from a file."""
    changes = VARIANTS[variant]
    return RunSettings(
        strategy=model.strategy,
        precision={"precision": "bf16-mixed"},
        model={
            "vocab_size": model.vocab_size,
            "seq_length": model.seq_length,
            "transformer_impl": "local",
            **model.model,
            **changes,
            "transformer": {**model.transformer, **changes.get("transformer", {})},
        },
        trainer={"accumulate_grad_batches": model.microbatches, "max_steps": 1000, "gradient_clip_val": 1.0},
        data={"batch_size": 2 if "preference" in changes else 1, "seq_length": model.seq_length},
        image_tokens=model.image_tokens,
    )


def measure(model: Model, variant: str) -> dict[str, Any]:
    """Plan and rehearse a run; return what both say."""
    settings = settings_of(model, variant)
    build, _ = build_of(settings, model.devices, _NODE)
    found: Rehearsal = rehearse(build, progress=lambda rank, what: print(f"  rank {rank}: {what}", flush=True))
    ranks = [{**asdict(rank), "holders": [asdict(holder) for holder in rank.holders[:8]]} for rank in found.ranks]
    row = {"layout": found.layout, "devices": model.devices, "microbatches": model.microbatches}
    return {**row, "seconds": found.seconds, "ranks": planned(model, variant, ranks)}


def planned(model: Model, variant: str, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rehearsed ranks with what the plan says of their memory."""
    stages = make_plan(settings_of(model, variant), model.devices, _NODE).stages
    totals = {stage.stage: stage.memory.total for stage in stages}
    return [
        {**rank, "planned_bytes": totals[rank["stage"]], "ratio": rank["peak_bytes"] / totals[rank["stage"]]}
        for rank in ranks
    ]


def table(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown: memory and time, and then collectives."""
    lines = [
        "| run | ranks | stage | planned, GiB | rehearsed, GiB | rehearsed / planned | CPU, s | host memory, GiB "
        "| commit | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in results.items():
        for rank in run["ranks"]:
            lines.append(
                f"| {name} | {run['devices']:,} | {rank['stage']} | {rank['planned_bytes'] / _GIB:.2f} "
                f"| {rank['peak_bytes'] / _GIB:.2f} | {rank['ratio']:.3f} "
                f"| {rank['cpu_seconds']:.0f} | {rank['host_bytes'] / _GIB:.2f} | {run['commit']} | {run['load']} |"
            )
    lines += ["", "| run | stage | collectives of a step: calls, GiB |", "|---|---|---|"]
    for name, run in results.items():
        for rank in run["ranks"]:
            moved = [
                f"{item['kind']} {item['group']} {item['calls']:,}, {item['bytes'] / _GIB:.2f}"
                for item in rank["traffic"]
                if item["bytes"] >= 0.01 * _GIB
            ]
            lines.append(f"| {name} | {rank['stage']} | {'; '.join(moved)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the selected rehearsals and write the results."""
    parser = argparse.ArgumentParser(description="Compare plans with rehearsals of runs of real sizes.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--microbatches", type=int, help="of a step, instead of the table's")
    parser.add_argument("--plan-again", action="store_true", help="only plan the day's runs again, at this commit")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    for name in options.models:
        model = MODELS[name]
        if options.microbatches is not None:
            model = replace(model, microbatches=options.microbatches)
        for variant in (each for each in model.variants if each in options.variants):
            print(f"rehearsing {name} {variant} ...", flush=True)
            facts = circumstances(options)
            own = {"commit": facts.pop("commit"), "load": round(os.getloadavg()[0], 1)}
            facts.pop("options")  # of this call; rows of others are in the file too
            if not options.plan_again:
                keep(options.output, facts, f"{name} {variant}", {**measure(model, variant), **own})
            elif row := known_rows(options.output, facts["date"]).get(f"{name} {variant}"):
                again = replace(model, microbatches=row.get("microbatches", model.microbatches))  # older rows lack it
                commits = f"{row['commit'].partition(';')[0]}; planned {own['commit']}"
                ranks = planned(again, variant, row["ranks"])
                keep(options.output, facts, f"{name} {variant}", {**row, "ranks": ranks, "commit": commits})


def known_rows(output: Path, date: str) -> dict[str, Any]:
    """Return the day's runs by name."""
    known = output / f"rehearse_cpu_{date.replace('-', '')}.json"
    found: dict[str, Any] = json.loads(known.read_text())["results"] if known.is_file() else {}
    return found


def keep(output: Path, facts: dict[str, Any], run: str, row: Mapping[str, Any]) -> None:
    """Put a run into the day's results, beside those that are already there."""
    results = {**known_rows(output, facts["date"]), run: row}
    order = [f"{name} {variant}" for name in MODELS for variant in VARIANTS]
    results = {name: results[name] for name in order if name in results}
    title = "Runs of real sizes, planned and rehearsed"
    write_results(output, "rehearse", title, facts, results, table(results))


if __name__ == "__main__":
    main()
