# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a step of distillation, against two whole models in plain PyTorch.

A student learns from a teacher with twice its width and twice its layers, on one row of tokens, in one process:

* ``two models``: both models of transformers, their whole logits, and the loss as torch's ``kl_div`` computes it;
* ``teacher``: ``MCoreDistillation``, whose loss goes through chunks of 256 tokens;
* ``stored``: the same with the teacher's 64 most likely tokens from a file.

Forward and backward run in turn each way. Memory is the peak of what lives beside the weights.

    python -m benchmarks.distillation

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import Distillation, MCoreDistillation, single_process
from lightning_mcore.models.distillation import Teacher
from tests.support.live_memory import LiveBytes

VOCABULARY, CHUNK, TOP_K = 16_384, 256, 64
SIZES = {"student": (256, 4), "teacher": (512, 8)}  # width and layers
SETTING: dict[str, Any] = {"kd_ratio": 0.5}


def save(folder: Path) -> dict[str, str]:
    """Write both models as Hugging Face folders, and return these."""
    for name, (width, layers) in SIZES.items():
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in SIZES}


def two_models(folders: dict[str, str], batch: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, Callable[[], float]]:
    """Return the student of transformers, and a function that runs a step and returns its loss."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(folders[name]) for name in SIZES)

    def step() -> float:
        logits = student(batch["tokens"]).logits
        with torch.no_grad():
            taught = teacher(batch["tokens"]).logits
        token_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        both = (values.flatten(0, 1).log_softmax(-1) for values in (logits, taught))
        divergence = torch.nn.functional.kl_div(*both, reduction="batchmean", log_target=True)
        loss = (1 - SETTING["kd_ratio"]) * token_loss + SETTING["kd_ratio"] * divergence
        loss.backward()
        return loss.item()

    return student, step


def ours(
    folders: dict[str, str], batch: dict[str, torch.Tensor], stored: torch.Tensor | None
) -> tuple[torch.nn.Module, Callable[[], float]]:
    """Return our student, and a function that runs a step and returns its loss."""
    setting = Distillation(folders["teacher"], **SETTING, top_k=None if stored is None else TOP_K)
    module = MCoreDistillation.from_pretrained(folders["student"], setting)
    module.configure_model()
    chunk: Any = module.model.chunks[0]
    chunk.loss_chunk_size = CHUNK
    if stored is None:
        teacher = Teacher.of_student(folders["teacher"], module)
        teacher.configure_model()
        teacher.freeze()
        chunk.learn_from(teacher.model.chunks[0], setting, VOCABULARY)
    else:
        chunk.learn_from(None, setting, VOCABULARY)

    def step() -> float:
        with chunk.learning(stored):
            found, _ = module.token_losses(batch)
        loss = (1 - SETTING["kd_ratio"]) * found[0].mean() + SETTING["kd_ratio"] * found[1].mean()
        loss.backward()
        return loss.item()

    return module, step


def measure(tokens: int, turns: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of each turn, the peak in bytes and the loss, for each way."""
    drawn = torch.randint(0, VOCABULARY, (2, 1, tokens))
    batch = {"tokens": drawn[0], "labels": drawn[1]}
    top_k = torch.rand(1, tokens, VOCABULARY).topk(TOP_K).indices.float()
    stored = torch.cat([top_k, torch.rand(1, tokens, TOP_K + 1).log_softmax(-1)], dim=-1)
    with tempfile.TemporaryDirectory() as folder, single_process():
        folders = save(Path(folder))
        ways = {
            "two models": two_models(folders, batch),
            "teacher": ours(folders, batch, None),
            "stored": ours(folders, batch, stored),
        }
        found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in ways}
        for turn in range(turns + 1):
            for way in ways if turn % 2 else reversed(ways):
                model, step = ways[way]
                model.zero_grad(set_to_none=True)
                if turn == 0:  # counting takes time, and warms up
                    with LiveBytes() as live:
                        found[way]["loss"] = step()
                    found[way]["peak"] = live.peak
                    continue
                start = time.perf_counter()
                step()
                found[way]["seconds"].append(time.perf_counter() - start)
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| way | memory beside the weights | of two models' | time of two models' | loss |",
        "|---|---|---|---|---|",
    ]
    whole = found["two models"]
    for way, row in found.items():
        pairs = zip(row["seconds"], whole["seconds"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        lines.append(
            f"| {way} | {row['peak'] / 2**20:,.0f} MiB | {row['peak'] / whole['peak']:.2f} | {ratio:.2f} "
            f"| {row['loss']:.5f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Measure a step of distillation.")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    found = measure(options.tokens, options.turns)
    write_results(options.output, "distillation", "A step of distillation", facts, found, table(found))


if __name__ == "__main__":
    main()
