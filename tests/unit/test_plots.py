# SPDX-License-Identifier: Apache-2.0
"""The charts of the documentation show the committed results, and the newest of each kind."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import plots


def labels(file: Path) -> list[str]:
    """Return the texts of a chart; among them is the number of each bar."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text())


def test_the_committed_charts_show_the_committed_results(tmp_path: Path) -> None:
    drawn = plots.draw(tmp_path)
    assert sorted(file.name for file in plots.IMAGES.glob("benchmark-*.svg")) == sorted(file.name for file in drawn)
    for file in drawn:
        assert len(labels(file)) > 10
        assert labels(plots.IMAGES / file.name) == labels(file), "run make plots, and commit docs/images"


def test_a_chart_shows_the_newest_results_of_its_kind(tmp_path: Path) -> None:
    results = Path(shutil.copytree(plots.RESULTS, tmp_path / "results"))
    (old,) = [plots.newest("gpu-recipes-1b", results)]
    assert old is not None
    old["results"][0] |= {"median_seconds": 0.125}
    for name, date in (("gpu-recipes-1b_cuda_20991231", "2099-12-31"), ("gpu-recipes-3b_cuda_20991231", "2099-12-31")):
        (results / f"{name}.json").write_text(json.dumps({**old, "date": date}))
        old["results"][0] |= {"median_seconds": 0.25}  # another size is another kind
    plots.draw(tmp_path, results)
    shown = labels(tmp_path / "benchmark-recipes.svg")
    assert {"0.125", "1.6B on H200, 2099-12-31"} <= set(shown)
    assert "0.250" not in shown


def test_a_missing_kind_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no results of gpu-overhead-1b, overhead; run that benchmark first"):
        plots.draw(tmp_path, tmp_path)
