# SPDX-License-Identifier: Apache-2.0
"""Overhead of the strategy: our step against a bare Megatron loop with the same model, layout and process.

Time is measured in pairs. During one ``Trainer.fit``, a callback runs one step of a bare Megatron loop, on a second
copy of the model, after each optimizer step. Our step time covers everything from the end of one bare step to the
beginning of the next: data loading, Lightning's loops and hooks, logging, Megatron's schedule and the optimizer. Both
loops therefore see the same load on a shared machine, and the ratio of the two medians shows what the strategy adds.

Memory is measured separately, with each loop alone in fresh processes: the peak of the largest rank.

The bare loop does not use Lightning, whose loops, hooks and logging account for most of the difference. Two modules
therefore also train in turn under Lightning's own ``"ddp"`` and under ``MCoreStrategy``: the smaller model, with the
same logs, and a plain LightningModule with a few parameters, whose step is little more than Lightning's loop.

A step takes about half a second with the larger model and about 20 ms with the smaller one, where the fixed cost per
step shows.

    python -m benchmarks.overhead                      # one rank, tp2 with sequence parallelism, pp2, dp2 sharded
    python -m benchmarks.overhead --layouts pp2 --models small

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import megatron.core
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader, Dataset

from lightning_mcore import MCoreGPT, MCoreStrategy, Recipe
from lightning_mcore.layers.spec import gpt_block_spec
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import open_process_groups, pipeline_stage
from tests.support.ranks import run_ranks
from tests.support.toy import PlainNet, loader, make_trainer

REPOSITORY = Path(__file__).resolve().parent.parent
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2-do": (2, {"use_distributed_optimizer": True}),
}
MODELS: dict[str, dict[str, int]] = {  # and the measured pairs of steps
    "large": {"layers": 4, "hidden": 512, "seq_length": 128, "rows": 1, "microbatches": 4, "rounds": 80},
    "small": {"layers": 2, "hidden": 128, "seq_length": 64, "rows": 1, "microbatches": 2, "rounds": 200},
}
VOCAB_SIZE = 1024
LEARNING_RATE = 1e-4
WARM_UP = 3  # warm-up pairs
LOOPS = ("ddp", "MCoreStrategy")
TURNS, LOOP_STEPS = 7, 150  # for each module and strategy
_FOLDERS = ("output", "disk")  # options that affect no figure
_LOAD = "load of the machine"


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, the same in every process."""

    def __init__(self, size: int, seq_length: int) -> None:
        self.size = size
        self.seq_length = seq_length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB_SIZE, (self.seq_length + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def data(options: argparse.Namespace) -> DataLoader[dict[str, torch.Tensor]]:
    """Return enough microbatches for every step of a run."""
    steps = WARM_UP + options.rounds + 1
    samples = RandomTokens(2 * steps * options.microbatches * options.rows, options.seq_length)
    return DataLoader(samples, batch_size=options.rows)


def transformer_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the model's own TransformerConfig fields for both loops."""
    return {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": options.hidden // 64,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
    }


class BareLoop:
    """A Megatron training loop as a Megatron user writes it, one step at a time.

    Args:
        model: The model in Megatron's DistributedDataParallel.
        optimizer: Megatron's optimizer.
        batches: The batches of all steps: ``tokens`` and ``labels``, [b, s] int64.
        sizes: Has ``microbatches``, ``seq_length`` and ``rows`` (per microbatch).
        device: The device of the model.
    """

    def __init__(
        self, model: Any, optimizer: Any, batches: Iterable[dict[str, torch.Tensor]], sizes: Any, device: str = "cpu"
    ) -> None:
        model.config.finalize_model_grads_func = finalize_model_grads
        self.model = model
        self.optimizer = optimizer
        self.batches = iter(batches)
        self.sizes = sizes
        self.device = device

    def step(self) -> None:
        """Run one optimizer step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.batches,
            model=self.model,
            num_microbatches=self.sizes.microbatches,
            seq_length=self.sizes.seq_length,
            micro_batch_size=self.sizes.rows,
            forward_only=False,
        )
        self.optimizer.step()

    def forward_step(self, batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        """Run one microbatch."""
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in next(batches).items()}
        tokens = batch["tokens"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        output = model(tokens, positions, None, labels=batch["labels"])

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total = losses.sum()
            count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
            return total, count, {"loss": total.detach() / losses.numel()}

        return output, loss_function


def bare_loop(options: argparse.Namespace, parallel: dict[str, Any]) -> BareLoop:
    """Return a bare loop for the same model and layout as ours."""
    return megatron_loop(transformer_fields(options), VOCAB_SIZE, parallel, data(options), options)


def megatron_loop(
    fields: dict[str, Any],
    vocab_size: int,
    parallel: dict[str, Any],
    batches: Iterable[dict[str, torch.Tensor]],
    sizes: Any,
) -> BareLoop:
    """Return a bare loop that uses the existing process groups.

    Args:
        fields: The model's ``TransformerConfig`` fields.
        vocab_size: Vocabulary size.
        parallel: The ``MCoreStrategy`` arguments that the groups were created with.
        batches: See :class:`BareLoop`.
        sizes: See :class:`BareLoop`.
    """
    sharded = parallel.get("use_distributed_optimizer", False)
    config = TransformerConfig(
        **fields,
        **{name: value for name, value in parallel.items() if name != "use_distributed_optimizer"},
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        pipeline_dtype=torch.float32,
    )
    first, last = pipeline_stage(None)
    model = GPTModel(
        config,
        gpt_block_spec(config, "local"),
        vocab_size=vocab_size,
        max_sequence_length=sizes.seq_length,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
    )
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded), model
    )
    wrapped.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=LEARNING_RATE, clip_grad=1.0, use_distributed_optimizer=sharded),
        [wrapped],
        use_gloo_process_groups=False,
    )
    return BareLoop(wrapped, optimizer, batches, sizes)


class PairedSteps(pl.Callback):
    """Runs one step of the bare loop after each trainer step, and times both."""

    def __init__(self, options: argparse.Namespace, bare: BareLoop | None) -> None:
        self.options = options
        self.bare = bare
        self.ours_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.since = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.options.microbatches:
            return
        trainer.strategy.barrier()
        between = time.perf_counter()
        self.ours_seconds.append(between - self.since)
        if self.bare is not None:
            self.bare.step()
            trainer.strategy.barrier()
        self.since = time.perf_counter()
        self.bare_seconds.append(self.since - between)


def fit(options: argparse.Namespace, parallel: dict[str, Any], world_size: int, with_bare: bool) -> PairedSteps:
    """Run the trainer on this rank, with or without the bare loop."""
    strategy = MCoreStrategy(**parallel)
    with cpu_runtime():
        bare = None
        if with_bare:
            open_process_groups(strategy.layout, seed=1, timeout=timedelta(minutes=5))
            bare = bare_loop(options, parallel)
        pairs = PairedSteps(options, bare)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            plugins=[LightningEnvironment()],
            max_steps=WARM_UP + options.rounds,
            accumulate_grad_batches=options.microbatches,
            gradient_clip_val=1.0,
            callbacks=[pairs],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(gpt(options), data(options))
    return pairs


def gpt(options: argparse.Namespace) -> MCoreGPT:
    """Return the model as a LightningModule."""
    recipe = Recipe(learning_rate=LEARNING_RATE)
    return MCoreGPT(VOCAB_SIZE, options.seq_length, transformer_fields(options), recipe=recipe)


def measure_time(options: argparse.Namespace, parallel: dict[str, Any], world_size: int) -> dict[str, list[float]]:
    """Rank function: return the seconds of our steps and of the bare steps, in pairs."""
    warnings.filterwarnings("ignore")
    pairs = fit(options, parallel, world_size, with_bare=True)
    return {"ours": pairs.ours_seconds[WARM_UP:], "bare": pairs.bare_seconds[WARM_UP:]}


def measure_memory(options: argparse.Namespace, parallel: dict[str, Any], world_size: int, ours: bool) -> int:
    """Rank function: run one of the loops, and return the peak resident memory of this process in KiB."""
    warnings.filterwarnings("ignore")
    if ours:
        fit(options, parallel, world_size, with_bare=False)
    else:
        with cpu_runtime():
            open_process_groups(MCoreStrategy(**parallel).layout, seed=1, timeout=timedelta(minutes=5))
            loop = bare_loop(options, parallel)
            for _ in range(WARM_UP + options.rounds):
                loop.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name: str, model: str) -> dict[str, Any]:
    """Measure a model on one layout."""
    options = argparse.Namespace(**MODELS[model])
    world_size, parallel = LAYOUTS[name]
    seconds = run_ranks(world_size, measure_time, options, parallel, world_size, timeout=1800)[0]
    short = argparse.Namespace(**{**vars(options), "rounds": 5})
    peak = {
        kind: max(run_ranks(world_size, measure_memory, short, parallel, world_size, kind == "ours", timeout=900))
        for kind in ("ours", "bare")
    }
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    ratios = [ours / bare for ours, bare in zip(seconds["ours"], seconds["bare"], strict=True)]
    return {
        "model": model,
        "layout": name,
        "ranks": world_size,
        "pairs": len(ratios),
        "median_seconds": medians,
        "ratio_of_medians": medians["ours"] / medians["bare"],
        "median_of_ratios": statistics.median(ratios),
        "peak_mebibytes": {kind: kib / 1024 for kind, kib in peak.items()},
        "ratio_of_peak_memory": peak["ours"] / peak["bare"],
        "seconds": seconds,
    }


def measure_loops() -> list[dict[str, Any]]:
    """Rank function: return the step time in seconds of each module under each strategy."""
    warnings.filterwarnings("ignore")
    options = argparse.Namespace(**{**MODELS["small"], "rounds": LOOP_STEPS})
    modules: dict[str, tuple[int, Callable[[], tuple[Any, Any]]]] = {
        "the smaller GPT": (options.microbatches, lambda: (gpt(options), data(options))),
        "a plain module of a few parameters": (1, lambda: (PlainNet(), loader(128, 2))),
    }
    rows = []
    for module, (microbatches, make) in modules.items():
        seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
        for turn in range(TURNS + 1):
            for name in LOOPS:
                steps = PairedSteps(argparse.Namespace(microbatches=microbatches), None)
                trainer = make_trainer(
                    "ddp" if name == "ddp" else MCoreStrategy(),
                    max_steps=LOOP_STEPS,
                    max_epochs=-1,
                    accumulate_grad_batches=microbatches,
                    gradient_clip_val=1.0,
                    callbacks=[steps],
                )
                trainer.fit(*make())
                if turn:  # the first one is for warm-up
                    seconds[name].append(statistics.median(steps.ours_seconds[WARM_UP:]))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        rows.append({"module": module, "ranks": dist.get_world_size(), "median_seconds": medians, "seconds": seconds})
    return rows


def commit() -> str:
    """Return the commit of the repository; "unknown" in a copy without its history, or without git, and say why."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        found, reason = "", "git is not installed"
    else:
        found, reason = described.stdout.strip(), described.stderr.strip()
    if not found:
        print(f"the commit of {REPOSITORY} is unknown ({reason}); run from a clone to record it", file=sys.stderr)
    return found or "unknown"


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions that affect the figures; call it before the benchmark."""
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "device": f"CPU ({platform.machine()}, {os.cpu_count()} cores), gloo, one thread for each rank",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "megatron-core": megatron.core.__version__,
        "options": {name: value for name, value in vars(options).items() if name not in _FOLDERS},
        _LOAD: f"{os.getloadavg()[0]:.1f} before",
    }


def table(rows: list[dict[str, Any]], loops: Sequence[dict[str, Any]] = ()) -> str:
    """Return the results as Markdown."""
    lines = [
        "| model | layout | pairs | bare, median s | ours, median s | ratio of medians | peak memory ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        medians = row["median_seconds"]
        lines.append(
            f"| {row['model']} | {row['layout']} | {row['pairs']} | {medians['bare']:.4f} | {medians['ours']:.4f} "
            f"| {row['ratio_of_medians']:.3f} | {row['ratio_of_peak_memory']:.3f} |"
        )
    if loops:
        lines += ["", '| module | data-parallel ranks | "ddp", ms | MCoreStrategy, ms |', "|---|---|---|---|"]
    for row in loops:
        ddp, ours = (1e3 * row["median_seconds"][name] for name in LOOPS)
        lines.append(f"| {row['module']} | {row['ranks']} | {ddp:.2f} | {ours:.2f} |")
    return "\n".join(lines)


def write_results(
    output: Path, name: str, title: str, facts: dict[str, Any], results: Any, text: str, device: str = "cpu"
) -> None:
    """Write the results as JSON and as Markdown, and print them.

    Args:
        output: The folder to write to.
        name: Start of the file names, before the date.
        title: Title of the Markdown file.
        facts: Output of :func:`circumstances`; the load of the machine at the end is added.
        results: The results, JSON-compatible.
        text: The results as Markdown.
        device: The kind of device used.
    """
    facts = {**facts, _LOAD: f"{facts[_LOAD]}, {os.getloadavg()[0]:.1f} at the end (averages of a minute)"}
    output.mkdir(parents=True, exist_ok=True)
    stem = output / f"{name}_{device}_{facts['date'].replace('-', '')}"
    stem.with_suffix(".json").write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    settings = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    stem.with_suffix(".md").write_text(f"# {title}\n\n{text}\n\n{settings}\n")
    print(f"\n{text}\n\nwritten to {stem}.json and .md")


def main() -> None:
    """Run the selected layouts and write the results."""
    parser = argparse.ArgumentParser(description="Time our step against a bare Megatron loop.")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = {**circumstances(options), "sizes": {name: MODELS[name] for name in options.models}}
    rows = []
    for model in options.models:
        for name in options.layouts:
            print(f"measuring {model} on {name} ...", flush=True)
            rows.append(measure(name, model))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("measuring under Lightning's ddp ...", flush=True)
    loops = [row for world_size in (1, 2) for row in run_ranks(world_size, measure_loops, timeout=1200)[0]]
    results = {"beside a bare loop": rows, "loops": loops}
    text = table(rows, loops)
    write_results(options.output, "overhead", "Our step against a bare Megatron loop", facts, results, text)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
