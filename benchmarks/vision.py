# SPDX-License-Identifier: Apache-2.0
"""Cost of a vision tower: memory when trained or frozen, and time with images sharded or replicated.

A small random Qwen2-VL learns from images of several sizes. On one CPU rank, it is trained in full, with its tower
frozen, with tower and projector frozen, and with full recomputation. On two ranks with sequence parallelism, the images
of a microbatch are sharded across the ranks, or every rank computes all of them. The tower time covers the forward and
backward pass, including the exchange of outputs and gradients; for a frozen tower, only the forward pass. The variants
run in turn, each in its own processes. Each turn gives the median over its steps after warm-up. The figures are medians
over rounds, and ratios are medians of the ratios within each round. Memory is the rank's peak resident size minus its
size before the model is built. The slower rank counts.

    python -m benchmarks.vision
    python -m benchmarks.vision --rounds 3 --depth 12

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.lora import WARM_UP, Clock, _peak
from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import MCoreStrategy, MCoreVisionGPT
from lightning_mcore.config.vision import PROJECTOR, TOWER
from lightning_mcore.layers.vision import VisionTower
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer
from tests.support.vision_models import CONFIGS, save_vision, vision_batch

FAMILY = "qwen2_vl"
IMAGES = [(1, 24, 24), (1, 16, 16), (1, 12, 20), (1, 8, 8)]


@dataclass(frozen=True)
class Form:
    """One variant of the training."""

    name: str
    ranks: int = 1
    freeze: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    shares_out: bool = True


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WHOLE, SHARED, ALONE = (
    Form("all trained"),
    Form("images shared out", 2),
    Form("all images on each rank", 2, shares_out=False),
)
ON_ONE = (
    WHOLE,
    Form("tower frozen", freeze=(TOWER,)),
    Form("tower and projector frozen", freeze=(TOWER, PROJECTOR)),
    Form("all trained, all recomputed", fields=RECOMPUTE),
)
FORMS = (*ON_ONE, SHARED, ALONE)


class Timed(MCoreVisionGPT):
    """Records the seconds of each forward and backward pass of the tower."""

    def configure_model(self) -> None:
        """Build the model, and time its tower."""
        super().configure_model()
        self.forward_seconds: list[float] = []
        self.backward_seconds: list[float] = []
        self.begun = 0.0
        tower = next(part for part in self.modules() if isinstance(part, VisionTower))
        tower.register_forward_pre_hook(self._begins)
        tower.register_forward_hook(self._is_seen)
        first: Any = tower.tower.patch_embed
        if first.proj.weight.requires_grad:
            first.proj.weight.register_hook(self._has_gradient)

    def _begins(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def _is_seen(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.forward_seconds.append(time.perf_counter() - self.begun)
        if output.requires_grad:
            output.register_hook(self._begins)

    def _has_gradient(self, _: Tensor) -> None:
        self.backward_seconds.append(time.perf_counter() - self.begun)

    @property
    def tower_seconds(self) -> float:
        """Seconds per step in the tower, without warm-up."""
        parts = (self.forward_seconds, self.backward_seconds)
        return sum(statistics.median(part[WARM_UP:]) for part in parts if part)


def train(form: Form, folder: str, options: dict[str, Any]) -> dict[str, float]:
    """Train one variant; return the seconds per step and in the tower, and the peak memory in bytes."""
    torch.set_num_threads(1)
    if not form.shares_out:
        VisionTower.forward = VisionTower._see  # type: ignore[method-assign, assignment]
    count = options["steps"] + WARM_UP
    batches = [vision_batch(FAMILY, options["length"], [IMAGES], [[]], seed=number) for number in range(count)]
    before, clock = _peak(), Clock()
    module = Timed.from_pretrained(folder, options["length"], form.fields, freeze=form.freeze)
    strategy = MCoreStrategy(tensor_model_parallel_size=form.ranks, sequence_parallel=form.ranks > 1)
    trainer = make_trainer(strategy, max_steps=count, callbacks=[clock], use_distributed_sampler=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {"seconds": clock.median, "tower": module.tower_seconds, "peak": _peak() - before}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turn."""
    turns: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="vision_") as name:
        folder = save_model(Path(name) / "model", options)
        for turn in range(options.rounds):
            turns.append({})
            for form in FORMS:
                ranks = run_ranks(form.ranks, train, form, str(folder), vars(options), timeout=600)
                turns[-1][form.name] = max(ranks, key=lambda rank: rank["tower"])
            print(turn + 1, turns[-1], flush=True)
    return {
        "median_step_seconds": _medians(turns, "seconds"),
        "median_peak_bytes": _medians(turns, "peak"),
        "share_of_step_in_tower": {
            form.name: statistics.median(turn[form.name]["tower"] / turn[form.name]["seconds"] for turn in turns)
            for form in FORMS
        },
        "peak_over_all_trained": {form.name: _ratio(turns, form, WHOLE, "peak") for form in ON_ONE[1:]},
        "shared_out_over_not": {name: _ratio(turns, SHARED, ALONE, name) for name in ("seconds", "tower")},
        "turns": turns,
    }


def _medians(turns: list[dict[str, dict[str, float]]], figure: str) -> dict[str, float]:
    return {form.name: statistics.median(turn[form.name][figure] for turn in turns) for form in FORMS}


def _ratio(turns: list[dict[str, dict[str, float]]], form: Form, other: Form, figure: str) -> float:
    return statistics.median(turn[form.name][figure] / turn[other.name][figure] for turn in turns)


def save_model(folder: Path, options: argparse.Namespace) -> Path:
    """Write the model in Hugging Face format."""
    config, width = CONFIGS[FAMILY], options.hidden
    text = {
        **config["text_config"],
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": width // 48,
        "num_key_value_heads": width // 96,
        "max_position_embeddings": options.length,
    }
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [6, 9, 9]}
    tower = {
        **config["vision_config"],
        "depth": options.depth,
        "embed_dim": options.width,
        "num_heads": options.width // 48,
        "mlp_ratio": 4,
        "hidden_size": width,
    }
    return save_vision(FAMILY, folder, text_config=text, vision_config=tower)


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [
        f"| {form.name} | {form.ranks} | {1e3 * found['median_step_seconds'][form.name]:,.0f} ms |"
        f" {found['share_of_step_in_tower'][form.name]:.2f} |"
        f" {found['median_peak_bytes'][form.name] / 2**20:.0f} MiB |"
        for form in FORMS
    ]
    peaks = [
        f"{name} / all trained: peak memory {ratio:.2f}." for name, ratio in found["peak_over_all_trained"].items()
    ]
    ratio = found["shared_out_over_not"]
    head = ["| form | ranks | step | share of it in the tower | peak memory |", "|---|---|---|---|---|"]
    shared = f"{SHARED.name} / {ALONE.name}: time of the tower {ratio['tower']:.2f}, of a step {ratio['seconds']:.2f}."
    return "\n".join([*head, *rows, "", *peaks, shared])


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Memory and time of a vision tower: trained, frozen, shared out.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all forms")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn that count")
    parser.add_argument("--layers", type=int, default=6, help="layers of the language model")
    parser.add_argument("--hidden", type=int, default=384, help="its width, a multiple of 96")
    parser.add_argument("--depth", type=int, default=6, help="blocks of the tower")
    parser.add_argument("--width", type=int, default=192, help="its width, a multiple of 48")
    parser.add_argument("--length", type=int, default=384, help="tokens of a row, including those of images")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    found = measure(options)
    write_results(options.output, "vision", "A vision tower: memory and time", facts, found, table(found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
