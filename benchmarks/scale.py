# SPDX-License-Identifier: Apache-2.0
"""What grows with the number of ranks: counts of collectives and file operations in start, step, save and load.

Timings on two cores say nothing about a thousand machines, but counts do. A tiny model is trained, saved and resumed on
2, 4, 8 and 16 data-parallel CPU ranks with the distributed optimizer. Each rank counts

* the collectives that it takes part in, and the bytes that it sends and receives;
* the files that it opens, and its other file-system calls, in the checkpoint folder.

``largest`` is the highest count of any rank; ``all`` is the sum over the ranks, which is the load on the file system.
``grows as`` says whether a count is constant, linear or quadratic in the number of ranks: the simplest of the three
that fits the counts of all runs except the smallest within 0.1 %. It is extrapolated to 1,024 and 16,384 ranks.

    python -m benchmarks.scale
    python -m benchmarks.scale --worlds 2 4

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import collections
import contextlib
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.overhead import REPOSITORY, RandomTokens, circumstances, write_results
from lightning_mcore import MCoreGPT, MCoreStrategy
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group"),
    *("reduce_scatter_tensor", "scatter"),
)
FILE_CALLS = (
    *("link", "listdir", "lstat", "makedirs", "mkdir", "remove", "rename", "replace", "rmdir", "scandir", "stat"),
    *("symlink", "unlink"),
)
PHASES = ("start", "step", "first save", "later save", "load")
WHAT = ("collectives", "groups", "bytes", "opened", "file calls")
EXTRAPOLATED = (1024, 16_384)
GROWTHS = ("1", "N", "N²")
TOLERANCE = 0.001  # a large constant part hides the growth at first


class Counter:
    """Counts the collectives and the file operations of this process, phase by phase.

    Args:
        folder: Only file operations below this folder count.
    """

    def __init__(self, folder: str) -> None:
        self.counts: dict[str, collections.Counter[str]] = {phase: collections.Counter() for phase in PHASES}
        self.phase: str | None = None
        self._folder = folder
        self._inside = False  # a collective that calls another one counts once
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(getattr(dist, name)))
        for name in FILE_CALLS:
            setattr(os, name, self._noted(getattr(os, name)))
        sys.addaudithook(self._audit)

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.phase is None or self._inside:
                return collective(*args, **kwargs)
            self._inside = True
            try:
                result = collective(*args, **kwargs)
            finally:
                self._inside = False
            is_group = collective.__name__ == "new_group"
            self._add("groups" if is_group else "collectives", 1)
            self._add("bytes", 0 if is_group else _bytes([*args, *kwargs.values()]))
            return result

        return call

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and self._is_below(args[0]):
                self._add("file calls", 1)
            return function(*args, **kwargs)

        return call

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self._is_below(args[0]):
            self._add("opened", 1)

    def _is_below(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._folder)

    def _add(self, what: str, count: int) -> None:
        if self.phase is not None:
            self.counts[self.phase][what] += count

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count for a phase inside the ``with`` block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def _bytes(values: list[Any]) -> int:
    """Return the bytes of a collective's arguments: of tensors, and of other objects as they are sent."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, list | tuple | dict):
            tensors = [part for part in value if isinstance(part, Tensor)]
            total += _bytes(tensors) if tensors else len(pickle.dumps(value))
    return total


class Steps(pl.Callback):
    """Switches the counter from the start phase to the steps; the first steps do not count.

    Args:
        counter: The counter of this rank.
        counted: Number of steps that count, at the end of the run.
    """

    def __init__(self, counter: Counter, counted: int) -> None:
        self.counter, self.counted = counter, counted

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.counter.phase = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.max_steps - trainer.global_step <= self.counted:
            self.counter.phase = "step"

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter.phase = None


def count(folder: str) -> dict[str, dict[str, int]]:
    """Train, save and resume on this rank; return its counts of each phase."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counter = Counter(folder)
    data = DataLoader(RandomTokens(64 * dist.get_world_size(), 16), batch_size=1)
    for phase, ckpt_path, max_steps in (("start", None, 4), ("load", f"{folder}/run.ckpt", 5)):
        fields = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        trainer = make_trainer(
            MCoreStrategy(use_distributed_optimizer=True),
            max_steps=max_steps,
            max_epochs=-1,
            callbacks=[Steps(counter, 1 if phase == "start" else 0)],
        )
        with counter.during(phase):
            trainer.fit(MCoreGPT(1024, 16, fields), data, ckpt_path=ckpt_path)
        if phase == "start":
            for phase_of_save in ("first save", "later save"):  # ranks agree only once on who writes what
                with counter.during(phase_of_save):
                    trainer.save_checkpoint(f"{folder}/run.ckpt")
    return {phase: dict(counts) for phase, counts in counter.counts.items()}


def measure(worlds: list[int]) -> list[dict[str, Any]]:
    """Run on each number of ranks; return rows with the counts and their extrapolation."""
    counted: dict[int, list[dict[str, dict[str, int]]]] = {}
    for world in worlds:
        with tempfile.TemporaryDirectory(prefix="scale_") as folder:
            counted[world] = run_ranks(world, count, folder, timeout=900)
        print(f"counted on {world} ranks", flush=True)
    rows = []
    for phase in PHASES:
        for what in WHAT:
            for of, joined in (("largest", max), ("all", sum)):
                counts = {n: joined(rank[phase].get(what, 0) for rank in ranks) for n, ranks in counted.items()}
                if any(counts.values()):
                    rows.append({"phase": phase, "what": what, "of": of, "counts": counts, **growth(counts)})
    return rows


def growth(counts: dict[int, int]) -> dict[str, Any]:
    """Return how counts grow with the number of ranks.

    A count is modelled as a constant, a part per other rank, and a part per pair of ranks; none is negative.

    Args:
        counts: The count for each number of ranks, two or more.

    Returns:
        ``grows as``: ``"1"``, ``"N"`` or ``"N²"``: the first that fits the counts within 0.1 %, or else the closest.
        With more than two counts, that of the smallest number of ranks is ignored. ``grows to``: the counts on far more
        ranks.
    """
    worlds = sorted(counts)[-max(2, len(counts) - 1) :]
    found = []
    weights = numpy.array([1 / max(1, counts[n]) for n in worlds])  # use relative errors
    wanted = weights * [counts[n] for n in worlds]
    for terms in ([0], [1], [0, 1], [2], [0, 2], [1, 2], [0, 1, 2]):
        if terms[-1] < len(worlds):
            curves = weights[:, None] * _curves(worlds)[:, terms]
            parts = numpy.linalg.lstsq(curves, wanted)[0]
            if parts.min() > -1e-9:
                error = float(abs(curves @ parts - wanted).max())
                far = (_curves(EXTRAPOLATED)[:, terms] @ parts).round().astype(int).tolist()
                found.append(((max(error, TOLERANCE), terms[-1], error), dict(zip(EXTRAPOLATED, far, strict=True))))
    (_, degree, _), far_counts = min(found, key=lambda one: one[0])
    return {"grows as": GROWTHS[degree], "grows to": far_counts}


def _curves(worlds: Sequence[int]) -> Any:
    """Return a row for each number of ranks: 1, the number of other ranks, and the number of pairs."""
    return numpy.array([[1, n - 1, n * (n - 1)] for n in worlds])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    worlds = list(rows[0]["counts"])
    lines = [
        f"| phase | what | of | grows as | {' | '.join(f'{n:,} ranks' for n in (*worlds, *EXTRAPOLATED))} |",
        f"|{'---|' * (4 + len(worlds) + len(EXTRAPOLATED))}",
    ]
    for row in rows:
        numbers = [*row["counts"].values(), *row["grows to"].values()]
        names = [row[name] for name in ("phase", "what", "of", "grows as")]
        lines.append(f"| {' | '.join([*names, *(f'{n:,}' for n in numbers)])} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Count collectives and file operations over the number of ranks.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of ranks, two or more")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    rows = measure(sorted(options.worlds))
    write_results(
        options.output, "scale", "Collectives and file operations over the number of ranks", facts, rows, table(rows)
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
