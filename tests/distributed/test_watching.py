# SPDX-License-Identifier: Apache-2.0
"""Callbacks that watch a run: statistics of one rank on every layout, traces, stragglers, and the time to a step."""

import json
import logging.handlers
import math
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_mcore.callbacks import (
    LayerStatistics,
    MemorySnapshot,
    OpenTelemetryProfiler,
    ProfilerTrace,
    StragglerMonitor,
    TimeToFirstStep,
)
from tests.distributed.test_weight_averaging import data_of, gpt, save_starts
from tests.support.ranks import run_ranks
from tests.support.sentences import refuses
from tests.support.toy import OVERLAPPED, Memory, PlainNet, StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2-sharded": OVERLAPPED,
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
}


class Outputs(pl.Callback):
    """Keeps what each layer returns in the first step of one rank."""

    def __init__(self) -> None:
        self.kept: dict[int, list[torch.Tensor]] = defaultdict(list)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for number, layer in enumerate(pl_module.model.chunks[0].decoder.layers):
            layer.register_forward_hook(partial(self.keep, trainer, number))

    def keep(self, trainer: pl.Trainer, number: int, layer: Any, inputs: Any, output: Any) -> None:
        if trainer.global_step == 0:
            self.kept[number].append(output[0].detach().flatten())


def statistics(layout: str, folder: str, *callbacks: pl.Callback) -> list[dict[str, float]]:
    """Train for three steps; return what the loggers get."""
    memory = Memory()
    arguments: dict[str, Any] = {"max_steps": 3, "logger": memory, "use_distributed_sampler": False}
    watching = [LayerStatistics(every_n_steps=2), *callbacks]
    trainer = make_trainer(LAYOUTS.get(layout, {}), callbacks=watching, **arguments)
    trainer.fit(gpt(folder, layout), data_of(layout)[0])
    return memory.rows


def outputs_and_statistics(folder: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the root mean squares of all outputs of each layer in the first step, and what was logged of it."""
    outputs = Outputs()
    logged = next(row for row in statistics("one", folder, outputs) if "activation_rms/decoder.layers.1" in row)
    expected = {
        f"activation_rms/decoder.layers.{number}": float(torch.cat(parts).square().mean().sqrt())
        for number, parts in outputs.kept.items()
    }
    return expected, {name: value for name, value in logged.items() if name.startswith("activation_rms/")}


def test_the_size_of_outputs_is_their_root_mean_square(tmp_path: Path) -> None:
    run_ranks(1, save_starts, str(tmp_path), timeout=60)
    [(expected, logged)] = run_ranks(1, outputs_and_statistics, str(tmp_path), timeout=60)
    assert len(expected) > 1
    assert logged == pytest.approx(expected, rel=1e-5)


def statistics_of_each(folder: str, layouts: list[str]) -> dict[str, list[dict[str, float]]]:
    """Train on each layout."""
    return {layout: statistics(layout, folder) for layout in layouts}


def test_statistics_of_layers_are_those_of_one_rank_and_sum_up_to_the_whole_gradient(tmp_path: Path) -> None:
    run_ranks(1, save_starts, str(tmp_path), timeout=60)
    [alone] = run_ranks(1, statistics_of_each, str(tmp_path), ["one", "one-ep2"], timeout=60)
    ranks = run_ranks(2, statistics_of_each, str(tmp_path), list(LAYOUTS), timeout=120)
    for layout in LAYOUTS:
        expected = alone["one-ep2" if layout == "ep2" else "one"]
        found = ranks[0][layout]
        assert not any("grad_norm/" in name for row in ranks[1][layout] for name in row)
        measured = [row for row in found if "activation_rms/decoder.layers.1" in row]
        assert len(measured) == 2  # steps 0 and 2
        wanted = [row for row in expected if "activation_rms/decoder.layers.1" in row]
        assert measured == [pytest.approx(row, rel=1e-4) for row in wanted], layout
        norms = [row["grad_norm"] for row in found if "grad_norm" in row]
        for row, norm in zip(measured, norms[::2], strict=True):
            whole = math.sqrt(sum(value**2 for name, value in row.items() if name.startswith("grad_norm/")))
            assert whole == pytest.approx(norm, rel=1e-5), layout


class Slow(PlainNet):
    """Computes more on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            for _ in range(20):
                torch.randn(300, 300) @ torch.randn(300, 300)
        return super().training_step(batch, batch_idx)


def watch(folder: str) -> tuple[list[list[float]], list[dict[str, float]], list[str]]:
    """Train with the other callbacks; return the seconds of each rank, what the loggers get, and the warnings."""
    seconds, warned = [], logging.handlers.BufferingHandler(10)
    logging.getLogger("lightning_mcore.callbacks.stragglers").addHandler(warned)
    memory = Memory()
    for strategy, module in (({}, Slow), ({"pipeline_model_parallel_size": 2}, StagedNet)):
        stragglers, name = StragglerMonitor(every_n_steps=2), module.__name__
        traces = ProfilerTrace(step=1, ranks=[1], folder=f"{folder}/{name}")
        watching: list[pl.Callback] = [stragglers, traces, TimeToFirstStep()]
        make_trainer(strategy, callbacks=watching, max_steps=4, logger=memory).fit(module(), loader(16, 2))
        seconds.append(stragglers.seconds)
    return seconds, memory.rows, [record.getMessage() for record in warned.buffer]


def test_a_rank_that_computes_more_is_found_and_chosen_ranks_write_traces(tmp_path: Path) -> None:
    ranks = run_ranks(2, watch, str(tmp_path), timeout=120)
    for (fast, slow), staged in (rank[0] for rank in ranks):
        assert slow > 1.2 * fast > 0
        assert len(staged) == 2
        assert min(staged) > 0
    [warning] = ranks[0][2]
    assert warning.startswith("step 2: rank1-tp0.pp0.cp0.dp1 computes for ")
    assert ranks[1][2] == []
    rows = [row for row in ranks[0][1] if "first_step/total" in row]
    assert len(rows) == 2
    for row in rows:
        parts = [row[f"first_step/{name}"] for name in ("before_fit", "setup", "step")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(row["first_step/total"])
    for name, place in (("Slow", "tp0.pp0.cp0.dp1"), ("StagedNet", "tp0.pp1.cp0.dp0")):
        [path] = (tmp_path / name).iterdir()
        assert path.name == f"step1-rank1-{place}.json"
        events = json.loads(path.read_text())["traceEvents"]
        assert any(event.get("name") == "aten::addmm" for event in events)


def test_memory_is_recorded_for_the_chosen_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=2, global_rank=1, global_step=0)
    snapshot, module = MemorySnapshot(step=1, ranks=[1], folder=str(tmp_path)), pl.LightningModule()
    snapshot.setup(trainer, module, "fit")
    for step in range(3):
        trainer.global_step = step
        snapshot.on_train_batch_start(trainer, module)
        trainer.global_step = step + 1
        snapshot.on_train_batch_end(trainer, module)
    assert calls == [{"max_entries": 100_000}, f"{tmp_path}/step1-rank1.pickle", {"enabled": None}]


def test_what_a_callback_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    trainer = make_trainer({}, devices=1)
    module = pl.LightningModule()
    with refuses(ValueError, "MemorySnapshot"):
        MemorySnapshot(step=1).setup(trainer, module, "fit")
    with refuses(ValueError, "ranks=[0, 4]"):
        ProfilerTrace(step=1, ranks=[0, 4]).setup(trainer, module, "fit")
    with refuses(ValueError, "num_steps=0"):
        ProfilerTrace(step=1, num_steps=0)
    with refuses(ValueError, "threshold=1.0"):
        StragglerMonitor(threshold=1.0)
    with refuses(TypeError, "LayerStatistics"):
        LayerStatistics().setup(make_trainer("auto", devices=1), module, "fit")
    with refuses(ValueError, "precision='16-true'"):
        LayerStatistics().setup(make_trainer({}, devices=1, precision="16-true"), module, "fit")
    with refuses(ModuleNotFoundError, "opentelemetry-api"):
        OpenTelemetryProfiler()
