# SPDX-License-Identifier: Apache-2.0
"""Every parallel axis and kind of model is rehearsed, except those in ``CANNOT``, which has their reasons."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.rehearsal import RankReport
from lightning_mcore.rehearsal.processes import Failure, Played
from tests.distributed.test_plan_memory import RUNS as PLANNED
from tests.parity import hf_modules
from tests.support import toy
from tests.support.hf_models import tiny_folder
from tests.support.rehearsed import (
    EXPERTS,
    GATED,
    LATENT,
    LENGTH,
    RECOMPUTE,
    SIZES,
    VOCABULARY,
    WithMuon,
    Writing,
    embedding_run,
    file_run,
    gpt_run,
    hf_run,
    job,
    live_run,
    net_run,
    offloading_trainer,
    play,
    reranking_run,
    selected,
    taught_run,
    undigested_run,
)
from tests.support.thorough import thorough_but
from tests.support.vision_models import CONFIGS, vision_folder

ALLTOALL: dict[str, Any] = {"transformer": {"moe_token_dispatcher_type": "alltoall"}}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
OVERLAPS = dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True)
# arguments of gpt_run
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "32-true"},
    "fp16": {"precision": "16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "recompute": {"transformer": RECOMPUTE},
    "tp2-sp": {"world": 2, **TP2},
    "cp2": {"world": 2, "context_parallel_size": 2},
    "dp2-overlaps": {"world": 2, **OVERLAPS},
    "dp2-fully-sharded": {"world": 2, "data_parallel_sharding": "optim_grads_params"},
    "pp2-vp2": {"world": 2, **PP2, "virtual_pipeline_model_parallel_size": 2},
    "experts-ep2-tp2": {"world": 4, **TP2, "expert_model_parallel_size": 2, "transformer": EXPERTS},
    "tp2-pp2-dp4-overlaps": {"world": 16, **TP2, **PP2, **OVERLAPS},
    "latent-attention": {"transformer": LATENT},
    "multi-token": {"transformer": {"mtp_num_layers": 1}},
    "packed": {"packed": True},
    "chunks-tp2-sp": {"world": 2, **TP2, "loss_chunk_size": 16},
    "lora": {"model": {"lora": {"r": 4}}, "transformer": GATED},
    "preference": {"model": {"preference": {"loss": "orpo"}}, "transformer": GATED},
}
# Runs of other modules; paths in braces are folders of tiny Hugging Face models.
OTHERS: dict[str, Callable[..., Any]] = {
    "muon": partial(gpt_run, kind=WithMuon),
    "tp2-dp2-layer-wise-muon": partial(gpt_run, 4, kind=WithMuon, **TP2, use_layer_wise_distributed_optimizer=True),
    "reference-model": partial(
        file_run,
        {
            "vocab_size": VOCABULARY,
            "seq_length": LENGTH,
            "transformer": {**SIZES, **GATED},
            "preference": {"loss": "sigmoid"},
        },
    ),
    "cp2-packed": partial(gpt_run, 2, packed=True, context_parallel_size=2),
    "cp2-packed-hybrid": partial(gpt_run, 2, packed=True, context_parallel_size=2, hybrid_context_parallel=True),
    "cp4-packed-hybrid": partial(gpt_run, 4, packed=True, context_parallel_size=4, hybrid_context_parallel=True),
    "gpt-oss": partial(gpt_run, folder="{gpt_oss}", model=ALLTOALL),
    "delta-nets-tp2": partial(gpt_run, 2, folder="{qwen3_next}", model=ALLTOALL, **TP2),
    "kimi-tp2": partial(gpt_run, 2, folder="{kimi_linear}", model=ALLTOALL, **TP2),
    "quantized": partial(gpt_run, folder="{llama, rows of 128}", model={"lora": {"r": 4, "quantization": "nf4"}}),
    "hf_model": partial(hf_run, "{llama}"),
    "hf_model-tp2": partial(hf_run, "{llama}", 2, tensor_model_parallel_size=2),
    "plain-dp2-metrics": partial(net_run, toy.PlainNet, 2),
    "pp2-metrics": partial(net_run, toy.StagedNet, 2, **PP2),
    "generation-tp2-pp2": partial(gpt_run, 4, kind=Writing, **TP2, **PP2),
    "generation-cp2": partial(gpt_run, 2, kind=Writing, context_parallel_size=2),
    "hf_model-generation": partial(hf_run, "{llama}", kind=hf_modules.Writer),
    "lora-undigested": partial(undigested_run, model={"lora": {"r": 4}}, transformer=GATED),
    "embedding-tp2-pp2": partial(embedding_run, "{llama}", 8, **TP2, **PP2),
    "reranking-tp2-pp2": partial(reranking_run, "{qwen2}", 8, **TP2, **PP2),
    "taught-tp2-pp2": partial(taught_run, "{llama}", "{llama}", 4, **TP2, **PP2),
    "taught-images-pp2": partial(taught_run, "{qwen2_vl}", "{qwen2_vl}", 2, image_tokens=16, **PP2),
    "offloaded": partial(gpt_run, trainer=offloading_trainer, transformer=RECOMPUTE),
    "images-of-a-file": partial(file_run, PLANNED["images-qwen3_5-tp2-sp-bf16"].arguments, 2, image_tokens=192, **TP2),
    "images": partial(live_run, PLANNED["images-qwen2_5-bf16"]),
    "images-tp2": partial(live_run, PLANNED["images-qwen3-tp2-sp-bf16"]),
}
CANNOT: dict[str, tuple[dict[str, Any], str]] = {
    # A mask selects as many tokens as routing gives it, and no count of them is passed on.
    "experts-allgather": (
        {"transformer": {**EXPERTS, "moe_token_dispatcher_type": "allgather"}},
        "needs the values of a tensor",
    ),
}
# Other tests of ``make test`` rehearse the context, the recomputation and the images of the rows that do not stay.
SOON = ("dp2-overlaps", "experts-ep2-tp2", "fp16")
OTHERS_SOON = ("tp2-dp2-layer-wise-muon", "cp2-packed-hybrid", "delta-nets-tp2", "quantized", "hf_model-tp2")
OTHERS_SOON += ("plain-dp2-metrics", "pp2-metrics", "generation-tp2-pp2", "lora-undigested", "embedding-tp2-pp2")
OTHERS_SOON += ("taught-images-pp2", "images-of-a-file", "reference-model")


# Beginnings of the options of docs/status/support.md that are rehearsed, with the runs that show it
OPTIONS = {
    "tensor, sequence, pipeline (": ("tp2-sp", "cp2", "pp2-vp2", "experts-ep2-tp2"),
    "distributed optimizer, overlap": ("dp2-overlaps", "tp2-pp2-dp4-overlaps"),
    "`data_parallel_sharding` (Megatron": ("dp2-fully-sharded",),
    "`32-true`, `bf16-mixed`": ("fp32", "bf16-true"),
    "`16-mixed`, `16-true`": ("fp16",),
    "other torch optimizers, `Muon": ("muon", "tp2-dp2-layer-wise-muon"),
    "modules that wrap a Hugging": ("hf_model", "hf_model-tp2", "hf_model-generation"),
    "multi-latent attention": ("latent-attention",),
    "multi-token prediction": ("multi-token",),
    "packed sequences (": ("packed", "cp2-packed"),
    "packed documents on as few": ("cp2-packed-hybrid", "cp4-packed-hybrid"),
    "attention sinks": ("gpt-oss",),
    "full (uniform, block) and": ("recompute",),
    "activations in host memory": ("offloaded",),
    "loss in chunks of tokens": ("chunks-tp2-sp",),
    "all uses of `self.log`": ("plain-dp2-metrics", "pp2-metrics"),
    "LoRA, rsLoRA, LoRA+": ("lora",),
    "QLoRA in fp32": ("quantized",),
    "DPO, cDPO, robust": ("preference", "reference-model"),
    "distillation from a teacher": ("taught-tp2-pp2",),
    "text embeddings (`MCoreEmbedding`": ("embedding-tp2-pp2",),
    "rerankers (`MCoreReranker`": ("reranking-tp2-pp2",),
    "gated delta nets": ("delta-nets-tp2",),
    "Kimi delta attention": ("kimi-tp2",),
    "vision-language students": ("taught-images-pp2",),
    "images and video, distributed": ("images", "images-tp2", "images-of-a-file"),
}


def with_folders(build: Any) -> Any:
    """Return a partial function with the paths of folders in place of their names."""
    return partial(
        build.func, *map(_folder, build.args), **{key: _folder(value) for key, value in build.keywords.items()}
    )


def _folder(given: Any) -> Any:
    if not isinstance(given, str) or not given.startswith("{"):
        return given
    name = given[1:-1]
    return str(vision_folder(name) if name in CONFIGS else tiny_folder(name))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Played | Failure]:
    known = {**RUNS, **{name: arguments for name, (arguments, _) in CANNOT.items()}}
    builds = {**{name: partial(gpt_run, **arguments) for name, arguments in known.items()}, **OTHERS}
    return play({name: job(with_folders(builds[name])) for name in selected(request)})


def ranks_of(found: Played | Failure) -> tuple[RankReport, ...]:
    assert isinstance(found, Played), found.trace
    return found.ranks


@pytest.mark.parametrize("name", thorough_but(RUNS, *SOON))
def test_two_steps_a_validation_and_a_save_are_played(found: dict[str, Played | Failure], name: str) -> None:
    arguments = RUNS[name]
    stages = arguments.get("pipeline_model_parallel_size", 1)
    reports = ranks_of(found[name])
    assert [report.stage for report in reports] == list(range(stages))
    for report in reports:
        held: dict[str, int] = {}
        for holder in report.holders:
            held[holder.kind] = held.get(holder.kind, 0) + holder.bytes
        trained = report.parameters if name != "lora" else 0
        shares = arguments["world"] if "data_parallel_sharding" in arguments else 1
        assert held["weights"] >= (4 if name == "fp32" else 2) * report.parameters / shares
        of_state = 4 if name == "bf16-true" else 8
        assert held["optimizer"] >= of_state * trained / arguments.get("world", 1)
        assert held["activations"] > 0
        assert report.operators > 300
        # A step reads logs, the gradient norm and the like, none of them for each parameter.
        assert sum(wait.times for wait in report.waits if "moe" not in wait.where) <= 20


@pytest.mark.parametrize("name", thorough_but(OTHERS, *OTHERS_SOON))
def test_other_modules_are_played(found: dict[str, Played | Failure], name: str) -> None:
    for report in ranks_of(found[name]):
        assert report.parameters > 0
        assert report.operators > 10
        least = 0.5 if name == "quantized" else 4  # bytes of a parameter
        assert report.peak_bytes >= report.step_peak_bytes > least * report.parameters
        assert report.reads == {}


def test_the_status_page_says_what_is_rehearsed() -> None:
    page = Path("docs/status/support.md").read_text(encoding="utf-8")
    rows = [line[2:].split(" | ") for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 4]
    marked = [cells[0] for cells in rows if "rehearsed" in cells[2]]
    assert [option for option in marked if not option.startswith(tuple(OPTIONS))] == []
    assert [start for start in OPTIONS if not any(option.startswith(start) for option in marked)] == []
    assert {run for runs in OPTIONS.values() for run in runs} <= {*RUNS, *OTHERS}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_played_says_why(found: dict[str, Played | Failure], name: str) -> None:
    failure = found[name]
    assert isinstance(failure, Failure)
    assert CANNOT[name][1] in failure.sentence


@pytest.mark.parametrize("name", ["experts-ep2-tp2"])
def test_even_loads_of_experts_are_said(found: dict[str, Played | Failure], name: str) -> None:
    [report] = ranks_of(found[name])
    assert report.notes == ("each expert gets as many tokens as any other",)
    # 2 microbatches x 4 layers; tokens and probabilities there, tokens back, and the gradients of all three
    moved = {item.kind: item.calls for item in report.traffic if item.group == "ep"}
    assert moved == {"all-to-all": 2 * 4 * 6}
