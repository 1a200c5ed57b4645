# SPDX-License-Identifier: Apache-2.0
"""Cost of checkpoints: saves and loads against plain copies, asynchronous saves, and resharding.

* **Throughput.** One run alternates between a save, a plain copy of the files that it wrote (``shutil.copyfile`` and
  fsync, with one process per rank at the same time), a load into the running model and optimizer, and a plain read. All
  files are on the same disk. Before a load, a read, and the copy that loads are compared with, files are dropped from
  the page cache, as far as ``posix_fadvise`` does so. The copy that saves are compared with finds its source in the
  cache, just as a save finds its state in memory.
* **Stall.** Blocks of training steps alternate: without a save, with a synchronous save, and with an asynchronous one.
  The stall is the time that a save adds to its block: in the call, in later steps, or in waiting for it at the end of
  the block. CPU ranks compute on the same cores that the writers need, so it matters whether a rank has a spare core.
* **Memory.** A checkpoint of one layout is loaded on another, with each rank in a fresh process. The figure is the peak
  resident memory added by loading, relative to the size of the rank's parameters and optimizer state.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --parts throughput --layouts tp2 --rounds 11

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from benchmarks.overhead import REPOSITORY, RandomTokens, circumstances, transformer_fields, write_results
from lightning_mcore import MCoreCheckpointIO, MCoreGPT, MCoreStrategy, Recipe
from lightning_mcore.checkpoint.files import verify
from tests.support.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2-do": (2, {"use_distributed_optimizer": True}),
}
RESHARDS = [("tp2", "pp2"), ("pp2", "tp2"), ("dp2-do", "tp2"), ("tp2", "one"), ("one", "dp2-do")]
VOCAB_SIZE = 8192
LEARNING_RATE = 1e-4


def fit(
    options: argparse.Namespace, layout: str, steps: int, callback: pl.Callback, asynchronous: bool = False
) -> None:
    """Train on this rank with a callback that does the measuring."""
    warnings.filterwarnings("ignore")
    world_size, parallel = LAYOUTS[layout]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=MCoreStrategy(**parallel, checkpoint_io=MCoreCheckpointIO(async_save=asynchronous)),
        plugins=[LightningEnvironment()],
        max_steps=steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = MCoreGPT(
        VOCAB_SIZE, options.seq_length, transformer_fields(options), recipe=Recipe(learning_rate=LEARNING_RATE)
    )
    trainer.fit(model, DataLoader(RandomTokens(2 * steps, options.seq_length), batch_size=1))


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have finished an action."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def share(folder: Path) -> list[Path]:
    """Return the checkpoint files that this rank copies, balanced by bytes across ranks."""
    files = sorted((path for path in folder.iterdir()), key=lambda path: (-path.stat().st_size, path.name))
    return files[dist.get_rank() :: dist.get_world_size()]


def copy(source: Path, target: Path) -> None:
    """Copy this rank's share of the files to disk."""
    for path in share(source):
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb+") as file:
            os.fsync(file.fileno())


def read(source: Path) -> None:
    """Read this rank's share of the files into memory."""
    for path in share(source):
        with open(path, "rb", buffering=0) as file:
            memory = memoryview(bytearray(4 << 20))
            while file.readinto(memory):
                pass


def forget(folder: Path) -> None:
    """Drop this rank's share of the files from the page cache."""
    for path in share(folder):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


class Throughput(pl.Callback):
    """At the end of a run, saves, copies, loads and reads in turn.

    Args:
        folder: Folder to write to.
        rounds: Number of rounds, after one warm-up round.
    """

    def __init__(self, folder: str, rounds: int) -> None:
        self.folder = Path(folder)
        self.rounds = rounds
        self.num_bytes = 0
        self.seconds: list[dict[str, float]] = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for number in range(self.rounds + 1):
            row = self.one_round(trainer, self.folder / f"{number}.ckpt", self.folder / f"{number}.copy")
            if number:
                self.seconds.append(row)

    def one_round(self, trainer: pl.Trainer, saved: Path, copied: Path) -> dict[str, float]:
        """Return the seconds of each action; their order changes from round to round."""
        first = len(self.seconds) % 2 == 0
        row = {"save": timed(lambda: trainer.save_checkpoint(saved))}
        self.num_bytes = sum(path.stat().st_size for path in saved.iterdir())
        row["copy"] = self.timed_copy(saved, copied)
        actions: dict[str, Callable[[], float]] = {
            "load": lambda: timed(lambda: self.load(trainer, saved)),
            "cold copy": lambda: self.timed_copy(saved, copied),
            "read": lambda: timed(lambda: read(saved)),
        }
        for name in actions if first else reversed(actions):
            forget(saved)
            row[name] = actions[name]()
        row["warm load"] = timed(lambda: self.load(trainer, saved))
        if trainer.is_global_zero:
            shutil.rmtree(saved)
            os.sync()
        dist.barrier()
        return row

    @staticmethod
    def timed_copy(saved: Path, copied: Path) -> float:
        """Copy the files, time it, and delete the copy."""
        copied.mkdir(exist_ok=True, parents=True)
        seconds = timed(lambda: copy(saved, copied))
        if dist.get_rank() == 0:
            shutil.rmtree(copied)
            os.sync()
        dist.barrier()
        return seconds

    @staticmethod
    def load(trainer: pl.Trainer, path: Path) -> None:
        """Read a checkpoint into the existing model and optimizer."""
        checkpoint = trainer.strategy.load_checkpoint(path)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)


def measure_throughput(options: argparse.Namespace, layout: str, folder: str) -> tuple[int, list[dict[str, float]]]:
    """Rank function: return the size of a checkpoint in bytes, and the seconds of each round."""
    measured = Throughput(folder, options.rounds)
    fit(options, layout, 1, measured)
    return measured.num_bytes, measured.seconds


class Stall(pl.Callback):
    """Times blocks of steps without a save, with a synchronous save and with an asynchronous save.

    Args:
        folder: Folder for the checkpoints.
        rounds: Blocks of each kind, after one warm-up block of each.
        steps: Optimizer steps per block.
    """

    kinds = ("none", "sync", "async")

    def __init__(self, folder: str, rounds: int, steps: int) -> None:
        self.folder = Path(folder)
        self.steps = steps
        orders = [[self.kinds[(number + shift) % 3] for shift in range(3)] for number in range(rounds + 1)]
        self.plan = [kind for order in orders for kind in order]
        self.blocks: list[tuple[str, float]] = []
        self.calls: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        self.since = 0.0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, including one for warm-up."""
        return 1 + len(self.plan) * self.steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.global_step - 1
        if done % self.steps:
            return
        plugin: Any = trainer.strategy.checkpoint_io
        if done:
            plugin.drain()
            dist.barrier()
            self.blocks.append((self.plan[done // self.steps - 1], time.perf_counter() - self.since))
            if trainer.is_global_zero:
                shutil.rmtree(self.folder / "stall.ckpt", ignore_errors=True)
                os.sync()
        if done == len(self.plan) * self.steps:
            return
        kind = self.plan[done // self.steps]
        dist.barrier()
        self.since = time.perf_counter()
        if kind != "none":
            plugin.async_save = kind == "async"
            trainer.save_checkpoint(self.folder / "stall.ckpt")
            self.calls[kind].append(time.perf_counter() - self.since)


def measure_stall(options: argparse.Namespace, layout: str, folder: str) -> dict[str, Any]:
    """Rank function: return the seconds of each kind of block and of the save calls."""
    measured = Stall(folder, options.blocks, options.block_steps)
    fit(options, layout, measured.total_steps, measured, asynchronous=True)
    counted = measured.blocks[len(measured.kinds) :]
    blocks = {kind: [seconds for name, seconds in counted if name == kind] for kind in measured.kinds}
    calls = {kind: seconds[1:] for kind, seconds in measured.calls.items()}
    first_call = measured.calls["async"][0]
    return {"blocks": blocks, "calls": calls, "first_async_call": first_call}


class Saved(pl.Callback):
    """Saves at the end of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def write_checkpoint(options: argparse.Namespace, layout: str, path: Path) -> None:
    """Rank function: train for one step and save."""
    fit(options, layout, 1, Saved(path))


def memory(field: str) -> int:
    """Return this process's memory in bytes: ``VmRSS`` (current) or ``VmHWM`` (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


class Peak(pl.Callback):
    """Loads a checkpoint into a model after one training step, and records this process's peak memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.added = 0
        self.state = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parts = [part.optimizer for part in trainer.optimizers[0].megatron.chained_optimizers]  # type: ignore[attr-defined]
        values = [value for part in parts for state in part.state.values() for value in state.values()]
        tensors = [*pl_module.parameters(), *(value for value in values if isinstance(value, torch.Tensor))]
        self.state = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dist.barrier()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        Throughput.load(trainer, self.path)
        self.added = memory("VmHWM") - before


def measure_memory(options: argparse.Namespace, layout: str, path: Path) -> tuple[int, int]:
    """Rank function: return the peak bytes that loading adds, and the bytes of the rank's parameters and optimizer."""
    measured = Peak(path)
    fit(options, layout, 1, measured)
    return measured.added, measured.state


def throughput(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Time saves, loads and copies on one layout."""
    with tempfile.TemporaryDirectory(dir=options.disk, prefix="checkpoint_") as folder:
        num_bytes, rows = run_ranks(LAYOUTS[layout][0], measure_throughput, options, layout, folder, timeout=1800)[0]
    speed = {name: num_bytes / statistics.median(row[name] for row in rows) / 1e9 for name in rows[0]}
    pairs = {"save": "copy", "load": "cold copy"}
    ratios = {name: statistics.median(row[other] / row[name] for row in rows) for name, other in pairs.items()}
    return {"layout": layout, "bytes": num_bytes, "gigabytes_per_second": speed, "of_a_copy": ratios, "seconds": rows}


def stall(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Measure the time that saves add to training on one layout."""
    with tempfile.TemporaryDirectory(dir=options.disk, prefix="checkpoint_") as folder:
        result = run_ranks(LAYOUTS[layout][0], measure_stall, options, layout, folder, timeout=1800)[0]
    blocks = result["blocks"]
    added = {
        kind: statistics.median(saving - calm for saving, calm in zip(blocks[kind], blocks["none"], strict=True))
        for kind in ("sync", "async")
    }
    return {
        "layout": layout,
        "cores_of_a_rank": (os.cpu_count() or 1) / LAYOUTS[layout][0],
        "added_seconds": added,
        "of_a_synchronous_save": added["async"] / added["sync"],
        "call_seconds": {kind: statistics.median(result["calls"][kind]) for kind in added},
        **result,
    }


def reshards(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the memory of loading on another layout."""
    results = []
    with tempfile.TemporaryDirectory(dir=options.disk, prefix="checkpoint_") as folder:
        for source, target in RESHARDS:
            path = Path(folder) / f"{source}.ckpt"
            if not path.exists():
                run_ranks(LAYOUTS[source][0], write_checkpoint, options, source, path, timeout=900)
                verify(str(path))
            ranks = run_ranks(LAYOUTS[target][0], measure_memory, options, target, path, timeout=900)
            added, state = max(ranks, key=lambda rank: rank[0] / rank[1])
            row = {"from": source, "to": target, "added_mebibytes": added / 2**20, "state_mebibytes": state / 2**20}
            results.append({**row, "ratio": added / state})
            print(f"{source} to {target}: {added / state:.3f} of {state / 2**20:.0f} MiB", flush=True)
    return results


def tables(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as Markdown tables."""
    lines = []
    if rows := results.get("throughput"):
        names = list(rows[0]["gigabytes_per_second"])
        lines += ["| layout | MB | " + " | ".join(f"{name}, GB/s" for name in names) + " | save / copy | load / copy |"]
        lines += ["|---" * (len(names) + 4) + "|"]
        for row in rows:
            speeds = " | ".join(f"{row['gigabytes_per_second'][name]:.2f}" for name in names)
            ratios = " | ".join(f"{row['of_a_copy'][name]:.2f}" for name in ("save", "load"))
            lines.append(f"| {row['layout']} | {row['bytes'] / 1e6:.0f} | {speeds} | {ratios} |")
    if rows := results.get("stall"):
        lines += ["", "| layout | cores of a rank | added by a save, s | added by an asynchronous one, s | ratio |"]
        lines += ["|---" * 5 + "|"]
        for row in rows:
            added = row["added_seconds"]
            lines.append(
                f"| {row['layout']} | {row['cores_of_a_rank']:g} | {added['sync']:.3f} | {added['async']:.3f} "
                f"| {row['of_a_synchronous_save']:.2f} |"
            )
    if rows := results.get("memory"):
        lines += [
            "",
            "| saved on | loaded on | state of a rank, MiB | added at the peak, MiB | ratio |",
            "|---" * 5 + "|",
        ]
        for row in rows:
            lines.append(
                f"| {row['from']} | {row['to']} | {row['state_mebibytes']:.0f} | {row['added_mebibytes']:.0f} "
                f"| {row['ratio']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run the selected parts and write the results."""
    parser = argparse.ArgumentParser(description="Time saves and loads of checkpoints against plain copies.")
    parser.add_argument("--parts", nargs="+", choices=["throughput", "stall", "memory"], default=None)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["one", "tp2", "dp2-do"])
    parser.add_argument("--rounds", type=int, default=7, help="saves, copies and loads that count")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of steps of each kind that count")
    parser.add_argument("--block-steps", type=int, default=4, help="optimizer steps of a block")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--seq-length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--disk", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    parts = options.parts or ["throughput", "stall", "memory"]
    facts = circumstances(options)
    results: dict[str, list[dict[str, Any]]] = {}
    for part, measure in {"throughput": throughput, "stall": stall}.items():
        for layout in options.layouts if part in parts else []:
            print(f"measuring the {part} of {layout} ...", flush=True)
            results.setdefault(part, []).append(measure(options, layout))
            print(tables({part: results[part][-1:]}).splitlines()[-1], flush=True)
    if "memory" in parts:
        results["memory"] = reshards(options)
    write_results(options.output, "checkpoint", "What checkpoints cost", facts, results, tables(results))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
