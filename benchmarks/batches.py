# SPDX-License-Identifier: Apache-2.0
"""Cost of comparing batches between the ranks of a model copy, and of sending the batches instead.

As at the end of a training step, each rank of the model copy has its batch in memory. Every round times each of the
following once, after a barrier, so that all of them see the same load on a shared machine:

* nothing: the next batch is taken from a list;
* the batch number is compared, as for every batch of a stream;
* the contents are compared too, as for one batch in a hundred;
* the first rank sends the batch to the others, as with ``broadcast_batches=True``.

The result is the time of the slowest rank minus that of "nothing", as the median over all rounds. A loader that reads
by index compares contents every ``EVERY_BATCHES`` batches and nothing in between; a stream also compares every batch
number. The mean cost per batch is given as a share of a half-second step that takes one batch.

    python -m benchmarks.batches

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import MCoreStrategy
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.data.batches import batch_facts
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import model_copy_group, open_process_groups
from lightning_mcore.strategy.same_batches import EVERY_BATCHES, SameBatches
from tests.support.ranks import run_ranks

STEP = 0.5  # seconds
WARM_UP = 5  # warm-up rounds
_BATCHES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "tokens [8, 4096]": lambda: {
        "tokens": torch.randint(0, 50_000, (8, 4096)),
        "labels": torch.randint(0, 50_000, (8, 4096)),
        "loss_mask": torch.ones(8, 4096),
    },
    "images [16, 3, 336, 336]": lambda: {
        "pixel_values": torch.randn(16, 3, 336, 336),
        "tokens": torch.randint(0, 50_000, (16, 1024)),
        "labels": torch.randint(0, 50_000, (16, 1024)),
    },
}


def measure(kind: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round on this rank, by action."""
    torch.manual_seed(0)
    layout = ParallelLayout(tensor_model_parallel_size=dist.get_world_size())
    with cpu_runtime():
        open_process_groups(layout, 0, timedelta(minutes=5))
        batch, group = _BATCHES[kind](), model_copy_group()
        same = SameBatches(MCoreStrategy(tensor_model_parallel_size=dist.get_world_size()), sends=True)
        batches = iter([batch] * (rounds + WARM_UP))

        ways: dict[str, Callable[[], Any]] = {
            "nothing": lambda: next(batches),
            "number": lambda: same.compare("train_dataloader gives batch 7", []),
            "contents": lambda: same.compare("train_dataloader gives batch 7", batch_facts(batch)),
            "sent": lambda: same.send(batches, lambda: batch),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + WARM_UP):
            for way, do in ways.items():
                dist.barrier(group=group)
                before = time.perf_counter()
                do()
                seconds[way].append(time.perf_counter() - before)
    return {way: times[WARM_UP:] for way, times in seconds.items()}


def summary(kind: str, ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the medians in seconds, and their shares of a step."""
    slowest = {way: [max(times) for times in zip(*(rank[way] for rank in ranks), strict=True)] for way in ranks[0]}
    pairs = {
        way: statistics.median(time - nothing for time, nothing in zip(times, slowest["nothing"], strict=True))
        for way, times in slowest.items()
        if way != "nothing"
    }
    by_index = pairs["contents"] / EVERY_BATCHES
    stream = by_index + pairs["number"] * (1 - 1 / EVERY_BATCHES)
    return {
        "batch": kind,
        "ranks": len(ranks),
        "rounds": len(slowest["nothing"]),
        "bytes": sum(tensor.nbytes for tensor in _BATCHES[kind]().values()),
        "median_seconds": pairs,
        "step_ratio": {
            "read by index": 1 + by_index / STEP,
            "stream": 1 + stream / STEP,
            "sent": 1 + pairs["sent"] / STEP,
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| batch | MB | ranks | number, ms | contents, ms | sent, ms | step, by index | step, stream | step, sent |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        number, contents, sent = (1e3 * row["median_seconds"][way] for way in ("number", "contents", "sent"))
        ratios = " | ".join(f"{ratio:.4f}" for ratio in row["step_ratio"].values())
        lines.append(
            f"| {row['batch']} | {row['bytes'] / 1e6:.1f} | {row['ranks']} | {number:.2f} | {contents:.2f} | {sent:.2f}"
            f" | {ratios} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Time the comparison of batches.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    rows = []
    for world_size in options.ranks:
        for kind in _BATCHES:
            rows.append(summary(kind, run_ranks(world_size, measure, kind, options.rounds, timeout=500)))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    write_results(options.output, "batches", "Comparing the batches of a model copy", facts, rows, table(rows))


if __name__ == "__main__":
    main()
