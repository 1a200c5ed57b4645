# SPDX-License-Identifier: Apache-2.0
"""Start the processes of rehearsals, and collect their reports.

One fresh process loads the library of ``library.py`` before PyTorch and imports everything once; it forks a process
for each rank. So the process that asks for a rehearsal is not changed, and may have used a real GPU before::

    rehearse()                      rank 0's Trainer is made, for the layout and the number of ranks
      spawned: library, imports  →  forked: ranks 0, 8 and 24 of 32, one for each stage to show, all at once
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from lightning_mcore.parallel.megatron_import import import_megatron
from lightning_mcore.parallel.rank_watch import SET_PARENT_DEATH_SIGNAL
from lightning_mcore.planning.machines import Machine
from lightning_mcore.rehearsal.counts import is_of_torch, short
from lightning_mcore.rehearsal.library import fake_cuda_library
from lightning_mcore.rehearsal.rank import Build, RankReport, World, play, world_of

Progress = Callable[[int, str], None]  # of a rank, and what it begins
_OTHERS = "another rank failed"


@dataclass(frozen=True)
class Job:
    """A run to rehearse.

    ``ranks`` is None for the first, middle and last stage of rank 0's pipeline. ``assume`` says what a line reads from
    the device, or how many elements it selects, by ``file:line``.
    """

    build: Build
    ranks: tuple[int, ...] | None
    devices_per_node: int
    machine: Machine  # what a device seems to be
    assume: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a rank could not be rehearsed."""

    sentence: str
    trace: str
    is_wrong_input: bool = False  # of the run's settings


@dataclass(frozen=True)
class Played:
    """A run that was rehearsed."""

    world: World
    ranks: tuple[RankReport, ...]


def run_jobs(jobs: Sequence[Job], progress: Progress) -> list[Played | Failure]:
    """Rehearse runs, one after the other; RuntimeError if the library cannot be built, or the process dies."""
    library = fake_cuda_library()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(list(jobs), library, sender))
    # The library must be there before PyTorch is, which asks once for CUDA's hooks, while it is imported.
    variables = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with mock.patch.dict(os.environ, variables, PYTHONWARNINGS="ignore"):
        process.start()
    sender.close()
    found: list[Played | Failure] = []
    try:
        while len(found) < len(jobs):
            what = receiver.recv()
            if isinstance(what, Played | Failure):
                found.append(what)
            else:
                progress(*what)
    except EOFError as error:
        process.join()
        raise RuntimeError(f"the process of the rehearsal died with exit code {process.exitcode}") from error
    finally:
        receiver.close()
        process.terminate()
        process.join()
    return found


def _serve(jobs: Sequence[Job], library: Path, sender: Connection) -> None:
    _end_with_parent()
    del os.environ["LD_PRELOAD"]  # of this process only
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]  # Lightning would take its ranks from them
    warnings.simplefilter("ignore")
    import_megatron()
    logging.disable(logging.WARNING)  # a run's first lines would name sizes that are read from the device
    for job in jobs:
        sender.send(_rehearsed(job, library, lambda rank, what: sender.send((rank, what))))


def _rehearsed(job: Job, library: Path, progress: Progress) -> Played | Failure:
    with tempfile.TemporaryDirectory() as folder:
        [world] = _forked({0: lambda _: world_of(job.build, library, job.devices_per_node, job.machine)}, progress)
        if isinstance(world, Failure):
            return world
        try:
            ranks = world.chosen(job.ranks)
        except ValueError as error:
            return Failure(str(error), "", is_wrong_input=True)
        together = world.with_ends(ranks)

        def played(rank: int) -> Callable[[Callable[[str], None]], RankReport]:
            store = dist.FileStore(os.path.join(folder, "store"), -1)  # type: ignore[attr-defined]
            return lambda say: play(job.build, world, rank, together, store, library, job.machine, job.assume, say)

        reports = _forked({rank: played(rank) for rank in together}, progress)
    failures = [report for report in reports if isinstance(report, Failure)]
    if failures:
        return next((failure for failure in failures if failure.sentence != _OTHERS), failures[0])
    read = {f"/{place}" for report in reports for place in report.reads}
    for place in job.assume:
        if not any(where.endswith(f"/{place}") for where in read):
            return Failure(f"{place} reads no value; {_lines(read)}", "", is_wrong_input=True)
    return Played(world, tuple(report for report in reports if report.rank in ranks))


def _forked(functions: Mapping[int, Callable[[Callable[[str], None]], Any]], progress: Progress) -> list[Any]:
    """Call functions in forks of this process, all at once, and return their results or failures in order."""
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[int, Any]] = {}
    found: dict[int, Any] = {}
    for rank, function in functions.items():
        own, sender = context.Pipe(duplex=False)
        process = context.Process(target=_call, args=(function, sender))
        process.start()
        sender.close()
        running[own] = rank, process
    while running:
        ready: Any
        for ready in wait(running):
            rank, process = running[ready]
            try:
                what = ready.recv()
            except EOFError:
                process.join()
                what = Failure(f"the process of rank {rank} died with exit code {process.exitcode}", "")
            if isinstance(what, str):
                progress(rank, what)
                continue
            found[rank] = what
            del running[ready]
            if isinstance(what, Failure):  # others may wait for an object that it would have sent
                for other, stopped in running.values():  # a waiting rank would never end
                    stopped.kill()
                    found[other] = Failure(_OTHERS, "")
                running.clear()
                break
    return [found[rank] for rank in functions]


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _call(function: Callable[[Callable[[str], None]], Any], sender: Connection) -> None:
    _end_with_parent()
    try:
        sender.send(function(sender.send))
    except Exception as error:
        trace = traceback.format_exc()
        wrong = isinstance(error, ValueError | TypeError | FileNotFoundError | ModuleNotFoundError)
        sender.send(Failure(_sentence(error), trace, wrong))
    finally:
        sys.stdout.flush()
        sender.close()
        os._exit(0)  # not the exit handlers of the process that was forked


def _sentence(error: Exception) -> str:
    """Return one line about an error, with the line that causes it, and what was assumed of values."""
    text = " ".join(str(error).split()) or type(error).__name__
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not is_of_torch(frame.filename)]
    where = f"{short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return f"{where}: {text} needs the values of a tensor, which a rehearsal does not have; {_ASSUME % where}"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{where}: {error.filename} does not exist; a rehearsal builds the run's own module and data, so add it"
    lacks_kernel = isinstance(error, UnsupportedOperatorException | NotImplementedError) or "no fake impl" in text
    if lacks_kernel and is_of_torch(stack[-1].filename):
        return (
            f"{where}: {text.partition('. ')[0]}: an operator has no fake kernel, which a rehearsal needs; add one with"
            " torch.library.register_fake"
        )
    if reads := getattr(error, "reads", {}):
        places = ", ".join(f"{value:g} for {place}" for place, value in reads.items())
        text += f" (a rehearsal assumed {places}; --assume FILE:LINE=VALUE assumes another value)"
    return f"{where}: {text}" if frames and is_of_torch(stack[-1].filename) else text


_ASSUME = "say how many elements it selects with --assume %s=COUNT"


def _lines(read: Iterable[str]) -> str:
    places = ", ".join(sorted(where[1:] for where in read))
    return f"lines that do: {places}" if read else "no line of the module does, so leave --assume out"
