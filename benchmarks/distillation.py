# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a step of distillation, against two whole models in plain PyTorch.

A student learns from a teacher with twice its width and twice its layers, on one row of tokens, in one process:

* ``two models``: both models of transformers, their whole logits, and the loss as torch's ``kl_div`` computes it;
* ``teacher``: ``MCoreDistillation``, whose loss goes through chunks of 256 tokens;
* ``stored``: the same with the teacher's 64 most likely tokens from a file.

Forward and backward run in turn each way. Memory is the peak of what lives beside the weights.

    python -m benchmarks.distillation

With ``--answers`` it measures how long the student takes to answer four prompts itself, with a cache of keys and values
and without, in training steps on the rows that come of it. Time is then CPU time on one core.

    python -m benchmarks.distillation --answers

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import Distillation, MCoreDistillation, MCoreGPT, single_process
from lightning_mcore.models.distillation import Teacher
from lightning_mcore.models.generation import continue_rows
from tests.support.live_memory import LiveBytes

VOCABULARY, CHUNK, TOP_K = 16_384, 256, 64
PROMPT, NEW = 384, 128
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
        with chunk.learning({}, stored):
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


class WithoutCache(MCoreGPT):
    """A student with its own ``next_logits``, which computes each token from whole rows."""

    def next_logits(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the logits of :meth:`MCoreGPT.next_logits`."""
        return super().next_logits(batch, batch_idx)


def measure_answers(turns: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each turn: of a training step, and of answers with and without the cache."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    rows = [row.tolist() for row in torch.randint(0, VOCABULARY, (4, PROMPT))]
    drawn = torch.randint(0, VOCABULARY, (2, 4, PROMPT + NEW))
    one_rank: Any = SimpleNamespace(
        strategy=SimpleNamespace(reduce=lambda value, reduce_op: value), state=SimpleNamespace(status=None)
    )
    with tempfile.TemporaryDirectory() as folder, single_process():
        path = save(Path(folder))["student"]
        students: dict[str, MCoreGPT] = {}
        for kind in (MCoreGPT, WithoutCache):
            student = kind.from_pretrained(path, seq_length=PROMPT + NEW)
            student.configure_model()
            student._trainer = one_rank
            students["with the cache" if kind is MCoreGPT else "without the cache"] = student

        def step() -> None:
            losses, _ = students["with the cache"].token_losses({"tokens": drawn[0], "labels": drawn[1]})
            losses.mean().backward()

        ways: dict[str, Callable[[], Any]] = {"training step": step}
        for name, student in students.items():
            ways[name] = lambda student=student: continue_rows(student, rows, NEW, 1.0, None, torch.Generator())
        for turn in range(turns + 1):
            for name, way in ways.items():
                start = time.process_time()
                way()
                if turn:  # the first one is for warm-up
                    found.setdefault(name, []).append(time.process_time() - start)
    return found


def table_of_answers(found: dict[str, list[float]]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"Four prompts of {PROMPT} tokens, {NEW} new tokens each.",
        "",
        "| | CPU seconds | steps |",
        "|---|---|---|",
    ]
    for name, seconds in found.items():
        pairs = zip(seconds, found["training step"], strict=True)
        ratio = statistics.median(own / step for own, step in pairs)
        lines.append(f"| {name} | {statistics.median(seconds):.2f} | {ratio:.1f} |")
    return "\n".join(lines)


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
    parser.add_argument("--answers", action="store_true", help="measure the student's own answers")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    if options.answers:
        times = measure_answers(options.turns)
        title = "A student's own answers"
        write_results(options.output, "distillation-answers", title, facts, times, table_of_answers(times))
        return
    found = measure(options.tokens, options.turns)
    write_results(options.output, "distillation", "A step of distillation", facts, found, table(found))


if __name__ == "__main__":
    main()
