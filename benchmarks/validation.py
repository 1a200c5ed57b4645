# SPDX-License-Identifier: Apache-2.0
"""Validation speed of a pipeline: whole batches against batches split by ``micro_batch_size``.

A whole batch is one microbatch, so all stages but one are idle. Both run in turn, in the same processes and with the
same weights. Only the validation loop is timed, not the setup of the run. The speed-up is the ratio of the medians.

    python -m benchmarks.validation --stages 2 --rows 16 --micro-batch-size 2
"""

import argparse
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer


class Loop(pl.Callback):
    """Times the validation loop in seconds."""

    def on_validation_epoch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._start


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Validate both ways in turn on this rank; return the seconds of each."""
    torch.set_num_threads(1)
    rows = torch.randint(0, 1024, (options.batches * options.rows, options.seq_length + 1))
    data = DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=options.rows)
    transformer = {"num_layers": 8, "hidden_size": options.hidden_size, "num_attention_heads": 8}
    modules = {way: MCoreGPT(1024, options.seq_length, transformer) for way in ("whole", "cut")}
    seconds: dict[str, list[float]] = {"whole": [], "cut": []}
    for turn in range(options.turns + 1):
        for way in ("whole", "cut") if turn % 2 else ("cut", "whole"):
            strategy = {"pipeline_model_parallel_size": options.stages}
            strategy |= {"micro_batch_size": options.micro_batch_size} if way == "cut" else {}
            loop = Loop()
            make_trainer(strategy, callbacks=[loop]).validate(modules[way], data, verbose=False)
            if turn:  # the first one is for warm-up
                seconds[way].append(loop.seconds)
    return seconds


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser()
    sizes = {"stages": 2, "rows": 16, "micro-batch-size": 2, "batches": 4, "seq-length": 128, "hidden-size": 256}
    for name, default in {**sizes, "turns": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    seconds = run_ranks(options.stages, measure, options, timeout=900)[0]
    whole, cut = (statistics.median(seconds[way]) for way in ("whole", "cut"))
    ratios = sorted(one / other for one, other in zip(seconds["whole"], seconds["cut"], strict=True))
    print(f"{options.stages} stages, {options.rows} rows in parts of {options.micro_batch_size}:")
    print(f"whole {whole:.3f} s, cut {cut:.3f} s, {statistics.median(ratios):.2f} times as fast", end="")
    print(f" ({ratios[0]:.2f} to {ratios[-1]:.2f} over {options.turns} pairs)")


if __name__ == "__main__":
    main()
