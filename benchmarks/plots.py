# SPDX-License-Identifier: Apache-2.0
"""Draw the committed results as SVG files for ``docs/status/benchmarks.md``.

Each figure has one panel for each file in ``benchmarks/results/`` that it shows; of several files of one kind it shows
the newest. Bars are medians; the dots on a GPU's are its single steps. Each bar is labelled with its number,
so that a test can compare the figures with the results.

    python -m benchmarks.plots                # writes docs/images/benchmark-*.svg
"""

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
IMAGES = REPOSITORY / "docs" / "images"
OURS, OTHER = "#3f51b5", "#616161"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lightning_mcore",  # the same ids in each run
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
LAYOUTS = {"one": "one rank", "tp2-sp": "TP=2, SP", "pp2": "PP=2", "dp2-do": "DP=2, sharded"}
PEERS = {
    "ddp": "Lightning DDP",
    "fsdp2": "Lightning FSDP2",
    "transformers": "transformers",
    "megatron": "bare Megatron",
    "ours dp2": "ours, DP=2",
    "ours dp2 sharded": "ours, DP=2, sharded",
    "ours tp2-sp": "ours, TP=2, SP",
    "ours pp2": "ours, PP=2",
}

PADDED = {
    "padded": "padded\nto the row",
    "padded to the row": "padded\nto the row",
    "padded to the longest of a batch": "padded to\nthe longest",
}


@dataclass(frozen=True)
class Bars:
    """One series of a panel.

    Attributes:
        name: In the legend; empty for a panel with one series.
        values: The height of each bar.
        color: Of the bars, or of each.
        single: The measurements behind each bar, if any.
    """

    name: str
    values: Sequence[float]
    color: str | Sequence[str] = OURS
    single: Sequence[Sequence[float]] = ()


def newest(kind: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the newest results of a kind, such as ``gpu-recipes-1b``; None if there are none.

    Args:
        kind: Start of the file names, before the device and the date.
        folder: Where the results are.
    """
    files = [file for file in folder.glob("*.json") if re.fullmatch(rf"{kind}_[a-z]+_[\w-]+", file.stem)]
    read = [(json.loads(file.read_text()), file.stem) for file in files]
    return max(read, key=lambda each: (each[0]["date"], each[1]))[0] if read else None


def panel(
    axes: Axes, title: str, labels: Sequence[str], series: Sequence[Bars], unit: str, form: str, flat: bool = False
) -> None:
    """Draw groups of bars: upright, or flat where their names are long.

    Args:
        axes: Where.
        title: Above it.
        labels: Of the groups.
        series: One or two bars for each group.
        unit: Along the axis of values.
        form: Format of the numbers.
        flat: Whether the bars are horizontal.
    """
    thickness = 0.8 / len(series)
    largest = max(value for bars in series for value in bars.values)
    for number, bars in enumerate(series):
        places = [group + (number - (len(series) - 1) / 2) * thickness for group in range(len(labels))]
        draw = axes.barh if flat else axes.bar
        drawn = draw(places, bars.values, thickness * 0.92, color=bars.color, label=bars.name or None)
        numbers = [format(value, form) for value in bars.values]
        is_short = [value < 0.08 * largest for value in bars.values]  # has no room for its number
        inside, outside = (
            [number * (short == wanted) for number, short in zip(numbers, is_short, strict=True)]
            for wanted in (False, True)
        )
        axes.bar_label(drawn, inside, label_type="center", color="white", fontsize=8)
        axes.bar_label(drawn, outside, padding=2, fontsize=8)
        for place, values in zip(places, bars.single, strict=False):
            axes.plot([place] * len(values), values, ".", color="#1a1a2e", markersize=2.5, alpha=0.45)
    ticks = (axes.set_yticks, axes.set_xticks)[not flat]
    ticks(range(len(labels)), labels)
    (axes.set_xlabel if flat else axes.set_ylabel)(unit)
    axes.set_title(title, loc="left")
    if flat and not axes.yaxis_inverted():
        axes.invert_yaxis()
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def about(results: dict[str, Any]) -> str:
    """Return what a panel was measured on."""
    device = results["device"].replace("NVIDIA ", "").partition(" (")[0]
    return f"{device}, {results['date']}"


def overhead(gpu: dict[str, Any], cpu: dict[str, Any]) -> Figure:
    """Draw a step of the strategy next to one of a bare Megatron loop."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    (row,) = gpu["results"]
    panel(
        left,
        f"1.6B on {about(gpu)}",
        ["one GPU"],
        [
            Bars("MCoreStrategy", [row["median_seconds"]], OURS, [row["seconds"]]),
            Bars("bare loop", [row["bare_median_seconds"]], OTHER, [row["bare_seconds"]]),
        ],
        "seconds per step",
        ".3f",
    )
    rows = [row for row in cpu["results"]["beside a bare loop"] if row["model"] == "large"]
    panel(
        right,
        f"4 layers on {about(cpu)}",
        [LAYOUTS[row["layout"]] for row in rows],
        [
            Bars(name, [row["median_seconds"][which] for row in rows], color)
            for name, which, color in (("MCoreStrategy", "ours", OURS), ("bare loop", "bare", OTHER))
        ],
        "seconds per step",
        ".3f",
    )
    return figure


def packing(gpu: dict[str, Any], cpu: dict[str, Any]) -> Figure:
    """Draw the real tokens that packed and padded batches train per second."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    on_gpu = {row["case"]: row["tokens_per_second"] for row in gpu["results"]}
    on_cpu = {row["form"]: row["median_tokens_per_second"] for row in cpu["results"]["training"]}
    for axes, title, speeds in ((left, f"1.6B on {about(gpu)}", on_gpu), (right, f"2 layers on {about(cpu)}", on_cpu)):
        names = [PADDED.get(name, name) for name in speeds]
        panel(axes, title, names, [Bars("", list(speeds.values()))], "tokens/s", ",.0f")
    return figure


def context(results: dict[str, Any]) -> Figure:
    """Draw what four context-parallel ranks send and pad with every document split, and with short ones whole."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in results["results"]["context"] if row["ranks"] == 4]
    lengths = [row["lengths"] for row in rows]
    for axes, title, name, scale, unit in (
        (left, "sent by a rank for a row", "sent", 1, "GiB"),
        (right, "padding", "padding", 100, "% of positions"),
    ):
        series = [
            Bars("hybrid_context_parallel", [scale * row[name] for row in rows], OURS),
            Bars("every document split", [scale * row[f"{name}_before"] for row in rows], OTHER),
        ]
        panel(axes, title, lengths, series, unit, ".2f")
    return figure


def ran(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the recipes that the device could run."""
    return [row for row in results["results"] if "seconds" in row]


def memory(gpu: dict[str, Any]) -> Figure:
    """Draw the peak memory of each recipe next to plan's estimate."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    rows = ran(gpu)
    series = [
        Bars("measured", [row["peak_mebibytes"] / 1024 for row in rows], OURS),
        Bars("lightning-mcore plan", [row["planned_mebibytes"] / 1024 for row in rows], OTHER),
    ]
    panel(figure.subplots(), f"1.6B on {about(gpu)}", [row["case"] for row in rows], series, "GiB at the peak", ".1f")
    return figure


def recipes(gpu: dict[str, Any]) -> Figure:
    """Draw the time of a step in each recipe."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    rows = ran(gpu)
    series = [Bars("", [row["median_seconds"] for row in rows], OURS, [row["seconds"] for row in rows])]
    panel(figure.subplots(), f"1.6B on {about(gpu)}", [row["case"] for row in rows], series, "seconds per step", ".3f")
    return figure


def peers(small: dict[str, Any], large: dict[str, Any]) -> Figure:
    """Draw the speed of each trainer, relative to Lightning's DDP."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    for axes, results in zip(figure.subplots(1, 2, sharey=True), (small, large), strict=True):
        (found,) = results["results"] if isinstance(results["results"], list) else [results["results"]]
        speeds = [1 / found["over_ddp"][name]["seconds"] for name in PEERS]
        bars = Bars("", speeds, [OURS if name.startswith("ours") else OTHER for name in PEERS])
        title = f"{found['size'].upper()} on {about(results)}"
        panel(axes, title, list(PEERS.values()), [bars], "tokens/s, relative to DDP", ".2f", flat=True)
    return figure


def loss_in_chunks(results: dict[str, Any]) -> Figure:
    """Draw the memory of the output layer and the loss, and the time of chunks relative to all logits at once."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = [row for row in results["results"] if "whole" in row["ways"]]
    labels = [f"{row['tokens']:,} tokens" for row in rows]
    series = [
        Bars(name, [row["ways"][way]["peak"] / 2**20 for row in rows], color)
        for name, way, color in (("in chunks", "chunks", OURS), ("at once", "whole", OTHER))
    ]
    panel(left, f"output layer and loss, {about(results)}", labels, series, "MiB at the peak", ",.0f")
    ratios = [
        statistics.median(
            chunks / whole
            for chunks, whole in zip(row["ways"]["chunks"]["seconds"], row["ways"]["whole"]["seconds"], strict=True)
        )
        for row in rows
    ]
    panel(right, "in chunks / at once", labels, [Bars("", ratios)], "ratio of times", ".2f")
    return figure


def distillation(results: dict[str, Any]) -> Figure:
    """Draw the memory and time of a step of distillation, next to two whole models in plain PyTorch."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    found, whole = results["results"], results["results"]["two models"]
    names = {"two models": "two whole\nmodels", "teacher": "teacher,\nin chunks", "stored": "stored\nlogits"}
    colors = [OTHER, OURS, OURS]
    memory = [found[way]["peak"] / 2**20 for way in names]
    panel(left, f"on {about(results)}", [*names.values()], [Bars("", memory, colors)], "MiB beside the weights", ",.0f")
    times = [
        statistics.median(one / other for one, other in zip(found[way]["seconds"], whole["seconds"], strict=True))
        for way in names
    ]
    panel(right, "relative to two models", [*names.values()], [Bars("", times, colors)], "ratio of times", ".2f")
    return figure


FIGURES = {
    "overhead": (overhead, ("gpu-overhead-1b", "overhead")),
    "packing": (packing, ("gpu-packing-1b", "packing")),
    "context": (context, ("packing-context",)),
    "memory": (memory, ("gpu-recipes-1b",)),
    "recipes": (recipes, ("gpu-recipes-1b",)),
    "peers": (peers, ("peers_20m", "peers_120m")),
    "loss": (loss_in_chunks, ("chunked-loss",)),
    "distillation": (distillation, ("distillation",)),
}
"""For each figure: what draws it, and the kinds of results in it."""


def draw(folder: Path, results: Path = RESULTS) -> list[Path]:
    """Draw all figures, and return their files.

    Args:
        folder: Where to write them.
        results: The folder of the results.
    """
    files = []
    with mpl.rc_context(STYLE):
        for name, (function, kinds) in FIGURES.items():
            found = [newest(kind, results) for kind in kinds]
            missing = [kind for kind, each in zip(kinds, found, strict=True) if each is None]
            if missing:
                raise ValueError(f"{results} has no results of {', '.join(missing)}; run that benchmark first")
            files.append(folder / f"benchmark-{name}.svg")
            figure: Figure = function(*found)
            figure.savefig(files[-1], metadata={"Date": None}, facecolor="white")
    return files


def main() -> None:
    """Draw all figures into the documentation."""
    parser = argparse.ArgumentParser(description="Draw the committed results.")
    parser.add_argument("--output", type=Path, default=IMAGES)
    for file in draw(parser.parse_args().output):
        print(file)


if __name__ == "__main__":
    main()
