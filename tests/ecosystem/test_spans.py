# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: each rank's spans of a run are complete, nested as its parts are, and named by its coordinates."""

from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.callbacks import OpenTelemetryProfiler
from tests.support.ranks import run_ranks
from tests.support.toy import StagedNet, loader, make_trainer

LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "pp2": {"pipeline_model_parallel_size": 2}}


def spans(folder: str) -> dict[str, list[tuple[str, str | None, str, int]]]:
    """Train an epoch of four steps; return name, parent, rank and step of each span in the order of their ends."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    found = {}
    for name, layout in LAYOUTS.items():
        profiler: Any = OpenTelemetryProfiler()
        arguments: dict[str, Any] = {"default_root_dir": folder, "enable_checkpointing": True, "max_steps": 4}
        arguments["val_check_interval"] = 2
        make_trainer(layout, profiler=profiler, **arguments).fit(StagedNet(), loader(16, 2), loader(4, 2))
        ended = exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in ended}
        found[name] = [
            (span.name, span.parent and names[span.parent.span_id], span.attributes["rank"], span.attributes["step"])
            for span in ended
        ]
        exporter.clear()
    return found


@pytest.mark.works_with(
    "opentelemetry-sdk", "spans of epochs, batches, validations and saves, of each rank on DP and PP"
)
def test_spans_of_each_rank_are_complete_and_nested(tmp_path: Path) -> None:
    for number, rank in enumerate(run_ranks(2, spans, str(tmp_path), timeout=120)):
        for layout, place in (
            ("dp2", f"rank{number}-tp0.pp0.cp0.dp{number}"),
            ("pp2", f"rank{number}-tp0.pp{number}.cp0.dp0"),
        ):
            found = rank[layout]
            assert {each[2] for each in found} == {place}
            assert [step for name, parent, _, step in found if (name, parent) == ("batch", "epoch")][:4] == [0, 1, 2, 3]
            pairs = {(name, parent) for name, parent, *_ in found}
            assert pairs == {("epoch", None), ("batch", "epoch"), ("validation", "epoch"), ("save", "validation")}
