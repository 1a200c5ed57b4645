# SPDX-License-Identifier: Apache-2.0
"""What the examples add to ``lightning_mcore.RunReport``: the trained model in transformers, and plots of several runs.

``InTransformers`` is an ordinary Lightning callback, used by the scripts and the YAML files alike. All it knows about
the strategy is that a model may be split: whatever needs the whole model is called on every rank, and only rank 0
prints and writes.
"""

import csv
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib

from lightning_mcore.hf import export_model

matplotlib.use("Agg")  # plots to files; needs no display
from matplotlib import pyplot

Curve = list[tuple[int, float]]


class InTransformers(pl.Callback):
    """Writes the trained model in Hugging Face format, and continues a prompt with it in ``transformers``.

    The printed text is sampled as in :class:`TextSample`. Both models then generate greedily, and must agree. Needs a
    data module with ``encode``, ``decode`` and ``save_tokenizer``.

    Args:
        folder: Folder for the model; that of an earlier run is replaced.
        prompt: What the text starts with.
        max_new_tokens: Tokens to generate; fewer if the sequence would be too long.
    """

    def __init__(
        self, folder: str = "outputs/pretrain_gpt/hf", prompt: str = "import os\n\n\ndef ", max_new_tokens: int = 60
    ) -> None:
        self.folder = Path(folder)
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write and generate on every rank; load, print and compare on rank 0."""
        data: Any = trainer.datamodule
        export_model(pl_module, str(self.folder), replace=True)
        prompt = data.encode(self.prompt)
        count = min(self.max_new_tokens, pl_module.seq_length - len(prompt))
        ours = pl_module.generate(prompt, count, temperature=0)
        if not trainer.is_global_zero:
            return
        data.save_tokenizer(self.folder)
        theirs, text = continue_with_transformers(self.folder, self.prompt, count)
        same = sum(1 for _ in takewhile(bool, map(eq, ours[len(prompt) :], theirs)))
        _print(
            trainer,
            "\ntransformers, with the exported model:",
            *(f"  | {line}" for line in text.splitlines()),
            f"most probable tokens: {same} of {count} are the same in transformers and here",
            f"model:      {self.folder}",
        )


def continue_with_transformers(folder: Path, prompt: str, count: int) -> tuple[list[int], str]:
    """Return the ``count`` most probable tokens after a prompt, and a sampled text, from the model in a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    best = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0].tolist()
    drawn = model.generate(**inputs, max_new_tokens=count, do_sample=True, temperature=0.7, top_k=40)[0].tolist()
    return best[inputs["input_ids"].shape[1] :], tokenizer.decode(drawn)


def read_curve(metrics: Path, name: str) -> Curve:
    """Return ``(optimizer steps done, value)`` of every row of the CSV file that has the metric ``name``."""
    with metrics.open(newline="", encoding="utf-8") as rows:
        return [(int(row["step"]) + 1, float(row[name])) for row in csv.DictReader(rows) if row.get(name)]


def draw_side_by_side(file: Path, metrics: dict[str, Path], names: dict[str, str]) -> None:
    """Plot metrics of several runs in one image.

    Args:
        file: Image file to write; its suffix selects the format.
        metrics: The CSV file of each run, by run name.
        names: The label of each metric, by metric name; each has its own axes.
    """
    figure, all_axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 4.5), dpi=120, squeeze=False)
    for axes, (name, label) in zip(all_axes[0], names.items(), strict=True):
        for run, rows in metrics.items():
            axes.plot(*zip(*read_curve(rows, name), strict=True), linewidth=1, label=run)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _print(trainer: pl.Trainer, *lines: str) -> None:
    if trainer.is_global_zero:
        print(*lines, sep="\n", flush=True)
