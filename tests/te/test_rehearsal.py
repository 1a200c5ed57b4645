# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's layers are rehearsed: what they keep, send and wait for is what its own Python code decides."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from megatron.core.optimizer import clip_grads

from lightning_mcore import MCoreGPT
from lightning_mcore.cli import main
from lightning_mcore.config.field_homes import fusion_defaults
from lightning_mcore.rehearsal import RankReport
from lightning_mcore.rehearsal.engine import WORKSPACE
from lightning_mcore.rehearsal.processes import Failure, Played, run_jobs
from tests.support.live_memory import LiveBytes
from tests.support.ranks import run_ranks
from tests.support.rehearsed import job
from tests.te.runs import TRANSFORMER, Run, make_loader, make_model, make_trainer
from tests.te.test_features import EXPERTS, RECIPES, TP2, with_fp8

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("te-rehearsal")]

FUSED = Run(precision="bf16-mixed", transformer=fusion_defaults(TRANSFORMER))  # on a CPU, they are off by default
KEPT = {"bf16": FUSED, **{recipe: with_fp8(FUSED, recipe) for recipe in RECIPES}}
SHARDED = {"use_distributed_optimizer": True}
OTHERS = {  # with the number of ranks
    "tp2-sp": (Run(layout=TP2, precision="bf16-mixed"), 2),
    "auto": (Run(impl="auto", precision="bf16-mixed"), 1),
    "pp2-cp2": (
        Run(precision="bf16-mixed", layout={"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
        4,
    ),
    "packed": (Run(precision="bf16-mixed", packed=True), 1),
    "experts": (Run(precision="bf16-mixed", transformer=EXPERTS, layout={"expert_model_parallel_size": 2}), 2),
    "fp8-weights": (with_fp8(Run(layout=SHARDED), "tensorwise", fp8_param=True), 2),
}
# Beginnings of the options of docs/status/support.md that are rehearsed with these layers, with the runs that show it
OPTIONS = {
    "tensor, sequence, pipeline (": ("tp2-sp", "pp2-cp2", "experts"),
    "distributed optimizer, overlap": ("fp8-weights",),
    "`32-true`, `bf16-mixed`": ("bf16",),
    "FP8 `delayed`, `tensorwise`": ("delayed", "tensorwise"),
    "FP8 `blockwise`": ("blockwise",),
    "FP8 `mxfp8`": ("mxfp8",),
    "FP8 weights": ("fp8-weights",),
    "grouped GEMM": ("experts",),
    "packed sequences": ("packed",),
    "fusions that are on": ("auto", "experts"),
}
ALLOCATED = 512  # bytes of which a GPU's memory is given out


def weigh(model: MCoreGPT, allocated: Callable[[], int], record: Callable[[int], Any]) -> MCoreGPT:
    """Record the bytes that each forward pass leaves behind."""
    step = model.training_step

    def weighed(*args: Any, **kwargs: Any) -> Any:
        before = allocated()
        loss = step(*args, **kwargs)
        record(allocated() - before)
        return loss

    model.training_step = weighed  # type: ignore[method-assign]
    return model


def gpu_run(run: Run, world: int, record: Path | None = None) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return the parts of a run on GPUs; the bytes of its last forward pass are written to a file."""
    trainer, model = make_trainer(run, world, accelerator="gpu", gradient_clip_val=1.0), make_model(run)
    if record is not None:
        weigh(model, torch.cuda.memory_allocated, lambda size: record.write_text(str(size)))
    return trainer, model, (make_loader(run),)


def kept_on_cpu(runs: dict[str, Run]) -> dict[str, int]:
    """Train on the CPU, with real numbers; return the bytes that each run's last forward pass leaves behind."""
    torch.set_num_threads(1)
    kept: dict[str, int] = {}
    for name, run in runs.items():
        with LiveBytes(ALLOCATED) as live:
            model = weigh(
                make_model(run), lambda live=live: live.now, lambda size, name=name: kept.update({name: size})
            )
            make_trainer(run, 1).fit(model, make_loader(run))
    return kept


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Played | Failure]:
    jobs = {name: job(partial(gpu_run, run, 1, folder / name), device="b200") for name, run in KEPT.items()}
    jobs |= {name: job(partial(gpu_run, run, world)) for name, (run, world) in OTHERS.items()}
    return dict(zip(jobs, run_jobs(list(jobs.values()), lambda rank, what: None), strict=True))


def report_of(found: Played | Failure) -> RankReport:
    assert isinstance(found, Played), found.trace
    return found.ranks[0]


def test_a_forward_pass_keeps_as_many_bytes_as_with_real_numbers(
    found: dict[str, Played | Failure], folder: Path
) -> None:
    for name in KEPT:
        report_of(found[name])
    rehearsed = {name: int((folder / name).read_text()) for name in KEPT}
    assert [rehearsed] == run_ranks(1, kept_on_cpu, KEPT)


@pytest.mark.parametrize("name", ["bf16", *RECIPES, *OTHERS])
def test_a_step_waits_only_for_its_norm_and_its_logs(found: dict[str, Played | Failure], name: str) -> None:
    lines = {wait.where.split(":")[0] for wait in report_of(found[name]).waits}
    expected = {"lightning_mcore/strategy/logs/pipeline.py"}
    if not hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):  # megatron-core 0.19 clips without reading the norm
        expected.add("megatron/core/optimizer/clip_grads.py")
    if name == "experts":
        expected.add("megatron/core/transformer/moe/token_dispatcher.py")
        if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):  # the norms of two optimizers are put together
            expected.add("megatron/core/optimizer/optimizer.py")
    assert lines == expected


def test_the_status_page_says_what_is_rehearsed() -> None:
    page = Path("docs/status/support.md").read_text(encoding="utf-8")
    rows = [line[2:].split(" | ") for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 4]
    marked = [cells[0] for cells in rows if "rehearsed" in cells[3]]
    assert [option for option in marked if not option.startswith(tuple(OPTIONS))] == []
    assert [start for start in OPTIONS if not any(option.startswith(start) for option in marked)] == []
    assert {run for runs in OPTIONS.values() for run in runs} <= {*KEPT, *OTHERS}


@pytest.mark.parametrize(
    ("precision", "more", "layout", "workspaces"),
    [
        ({"precision": "bf16-mixed"}, {}, {}, 1),
        # Adapters read inputs in 16 bits.
        ({"precision": "bf16-mixed", "fp8_recipe": "tensorwise"}, {"lora": {"r": 8}}, {}, 1),
        # Products of several experts run on four streams.
        ({"precision": "bf16-mixed"}, {"transformer": EXPERTS}, TP2 | {"expert_model_parallel_size": 2}, 5),
    ],
    ids=["bf16", "fp8-lora", "experts"],
)
def test_a_file_without_a_choice_is_rehearsed_with_these_layers_and_needs_the_planned_memory(
    precision: dict[str, Any],
    more: dict[str, Any],
    layout: dict[str, Any],
    workspaces: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The scores of the rows' attention, which only a kernel sees, would add 40 % to the peak.
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 3584}
    transformer = TRANSFORMER | sizes | more.get("transformer", {})
    model = {"vocab_size": 8192, "seq_length": 2048, **more, "transformer": transformer}
    strategy = {"class_path": "lightning_mcore.MCoreStrategy", "init_args": layout}
    plugins = {"class_path": "lightning_mcore.MCorePrecision", "init_args": precision}
    devices = 4 if layout else 1
    trainer = {"accelerator": "gpu", "devices": devices, "plugins": plugins, "max_steps": 9, "strategy": strategy}
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps({"trainer": trainer, "model": {"class_path": "lightning_mcore.MCoreGPT", "init_args": model}})
    )
    assert main(["rehearse", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    holders = found["ranks"][0]["holders"]
    assert any("fused_attention" in holder["module"] for holder in holders)
    [workspace] = [holder["bytes"] for holder in holders if holder["kind"] == WORKSPACE]
    assert workspace == workspaces * (32 * 2**20 + 1024)  # on an H100; not planned
    assert found["ranks"][0]["peak_bytes"] - workspace == pytest.approx(found["planned_bytes"]["0"], rel=0.03)
