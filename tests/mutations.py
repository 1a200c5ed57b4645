# SPDX-License-Identifier: Apache-2.0
"""Damage one file that a run reads, at random, and see that the run says so.

A :class:`Sample` writes everything that a reader needs and reads it back as a text of numbers. Each trial copies what
was written, changes one file (:func:`mutate`) and reads again, in a process of its own with a limit of time and memory.
It must end in one of these ways:

* ``same``: the numbers are what they were;
* ``refused``: an exception that this package raised, in one sentence;
* ``seen``: the numbers differ, and a log line or a warning names the file;
* ``other``: the numbers differ and nobody said so. Only for a file whose text is its own meaning, such as a config.

Whatever else happens is a fault: a traceback out of another package, a crash, a hang, more memory than a reader may
take, code that ran. ``tests/unit`` runs a few trials of each sample, ``python -m tests.mutations`` as many as you like.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.ranks import start_context

MEMORY = 4 << 30  # bytes of address space that a reader may take above what the process has at its start
SECONDS = 60.0  # until a reader that has not ended is said to hang
READERS = [  # what readers import; once for all trials
    "datasets",
    "pandas",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
    "tests.support.mutation_samples",
    "tests.support.chats",
    "tests.support.factory_files",
    "tests.support.hf_models",
    "lightning_mcore.arguments.llamafactory.run",
    "lightning_mcore.cli.plan",
    "lightning_mcore.cli.preprocess",
    "lightning_mcore.interop.importing",
]
GOOD = {"same", "refused", "seen", "other"}


@dataclass(frozen=True)
class Sample:
    """A kind of file that is read.

    Attributes:
        name: Of the sample.
        write: Fills an empty folder with all that a reader needs.
        file: The files to damage, as a pattern below the folder; each trial draws one of the matches.
        read: Reads it as a user would and returns the numbers that came of it, as text.
        sealed: Whether a change of the numbers must be noticed, because a checksum was written beside the file.
    """

    name: str
    write: Callable[[Path], None]
    file: str
    read: Callable[[Path], str]
    sealed: bool = False


@dataclass
class Tally:
    """What came of many trials of one sample.

    Attributes:
        outcomes: How many ended in which way.
        faults: What must not happen, with the number of the trial that shows it again.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class RefusedError(Exception):
    """A command of ours ended with one sentence."""


class Canary:
    """A pickle of this makes a folder where it is read, which shows that code of a file ran."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


# ---- damage


def mutate(path: Path, chance: random.Random, canary: str) -> str:
    """Change a file in one way and say which.

    Args:
        path: The file.
        chance: What draws.
        canary: A folder that code in the file would make.
    """
    content = path.read_bytes()
    kinds = [_flip_bit, _flip_bit, _flip_byte, _zero, _cut_end, _cut_out, _insert, _repeat, _swap]
    if path.suffix in (".json", ".jsonl", ".yaml"):
        kinds += [_absurd_value] * 8
    kinds = kinds * 3 + [_empty, _remove, _pickle, _text]
    kind = chance.choice(kinds)
    changed = kind(content, chance, canary)
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    return kind.__name__.strip("_")


def _flip_bit(content: bytes, chance: random.Random, _: str) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]


def _flip_byte(content: bytes, chance: random.Random, _: str) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]


def _span(content: bytes, chance: random.Random) -> tuple[int, int]:
    length = min(len(content), chance.choice([1, 2, 4, 8, 64, 512, 4096]))
    start = chance.randrange(len(content) - length + 1)
    return start, start + length


def _zero(content: bytes, chance: random.Random, _: str) -> bytes:
    start, end = _span(content, chance)
    return content[:start] + bytes(end - start) + content[end:]


def _cut_end(content: bytes, chance: random.Random, _: str) -> bytes:
    return content[: -chance.choice([1, 1, 2, 8, 64, max(1, len(content) // 2)])]


def _cut_out(content: bytes, chance: random.Random, _: str) -> bytes:
    start, end = _span(content, chance)
    return content[:start] + content[end:]


def _insert(content: bytes, chance: random.Random, _: str) -> bytes:
    place = chance.randrange(len(content) + 1)
    return content[:place] + chance.randbytes(chance.choice([1, 1, 8, 64])) + content[place:]


def _repeat(content: bytes, chance: random.Random, _: str) -> bytes:
    start, end = _span(content, chance)
    return content[:end] + content[start:end] + content[end:]


def _swap(content: bytes, chance: random.Random, _: str) -> bytes:
    length = min(len(content) // 2, chance.choice([1, 8, 64]))
    a, b = sorted(chance.sample(range(0, len(content) - length + 1), 2))
    if a + length > b:
        return content[::-1]
    return (
        content[:a]
        + content[b : b + length]
        + content[a + length : b]
        + content[a : a + length]
        + content[b + length :]
    )


def _empty(*_: Any) -> bytes:
    return b""


def _remove(*_: Any) -> None:
    return None


def _pickle(_: bytes, __: random.Random, canary: str) -> bytes:
    return pickle.dumps(Canary(canary))


def _text(*_: Any) -> bytes:
    return b"<html>404 Not Found</html>\n"


ABSURD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 10**9, 10**13, 10**30, -(10**9), 0.5, 1e308, float("nan"), float("inf")),
    *("", "no", "os.system", "../../etc/passwd", "/", "a" * 100_000, "\x00", [], [1], [[[]]], {}, {"a": {}}),
    "builtins.exec",
]


def _absurd_value(content: bytes, chance: random.Random, canary: str) -> bytes:
    """Change, remove or rename one value of a JSON or YAML text."""
    try:
        lines = content.decode().splitlines()
        number = None
        try:
            tree = json.loads(content)
        except ValueError:
            number = chance.randrange(len(lines))
            tree = json.loads(lines[number])
    except (ValueError, UnicodeDecodeError):
        return _flip_byte(content, chance, canary)
    places = list(_places(tree))
    if not places:
        return _flip_byte(content, chance, canary)
    owner, key = chance.choice(places)
    act = chance.random()
    if act < 0.15:
        del owner[key]
    elif act < 0.25 and isinstance(owner, dict):
        owner[f"{key}_"] = owner.pop(key)
    elif act < 0.35 and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
        owner[key] = owner[key] * chance.choice([-1, 2, 1000, 0.5])
    else:
        owner[key] = chance.choice(ABSURD)
    text = json.dumps(tree)
    if number is None:
        return text.encode()
    lines[number] = text
    return "\n".join(lines).encode() + b"\n"


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []:
        yield tree, key
        yield from _places(tree[key])


# ---- trials


def trials(sample: Sample, count: int, seed: int = 0, say: Callable[[str], None] = lambda text: None) -> Tally:
    """Damage the sample's file ``count`` times and tell what came of it."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="mutations_") as name:
        whole = Path(name) / "whole"
        whole.mkdir()
        outcome, expected, _ = _in_process(_write, sample, whole, "")
        if outcome != "read":
            raise RuntimeError(f"{sample.name} could not be written: {outcome} {expected}")
        outcome, expected, _ = _in_process(_read, sample, _copy(whole), "")
        if outcome != "read":
            raise RuntimeError(f"{sample.name} could not be read: {outcome} {expected}")
        for number in range(seed, seed + count):
            chance = random.Random(f"{sample.name} {number}")
            work = _copy(whole)
            path = chance.choice(sorted(work.glob(sample.file)))
            before, canary = path.read_bytes(), str(Path(name) / "canary")
            kind = mutate(path, chance, canary)
            if path.exists() and path.read_bytes() == before:
                continue
            outcome, text, said = _in_process(_read, sample, work, path.name)
            if outcome == "read":
                outcome = "same" if text == expected else "seen" if said else "other"
            if os.path.exists(canary):
                os.rmdir(canary)
                outcome = "ran code"
            tally.outcomes[outcome] += 1
            if outcome not in GOOD or (outcome == "other" and sample.sealed):
                tally.faults.append(f"{sample.name} #{number} ({path.name}, {kind}): {outcome}: {text[-2000:]}")
                say(tally.faults[-1])
            else:
                end = text[-300:] if outcome == "refused" else ""
                say(f"{sample.name} #{number} ({path.name}, {kind}): {outcome}: {end}")
    return tally


def _copy(whole: Path) -> Path:
    """Copy a folder under the name that every reader sees, since names are part of what caches and checkpoints keep."""
    work = whole.with_name("work")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work, symlinks=True)
    return work


def _in_process(function: Callable[..., str], sample: Sample, folder: Path, file: str) -> tuple[str, str, bool]:
    """Call a function in a process of its own.

    Returns:
        How it ended, what it returned or raised, and whether a warning names the file.
    """
    ours, theirs = multiprocessing.Pipe()
    process = start_context("gloo", *READERS).Process(target=_guarded, args=(theirs, function, sample, folder, file))
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS * float(os.environ.get("RANKS_TIMEOUT_SCALE", "1"))):
            return "hangs", f"after {SECONDS} s", False
        outcome: tuple[str, str, bool] = ours.recv()
    except EOFError:
        process.join()
        outcome = "crashes", f"exit code {process.exitcode}", False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    return outcome


def _guarded(connection: Connection, function: Callable[..., str], sample: Sample, folder: Path, file: str) -> None:
    import torch

    os.setsid()
    torch.set_num_threads(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logging.getLogger().addHandler(Keep())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            answer = "read", function(sample, folder)
        except BaseException as error:
            answer = _judge(error)
    said += [str(warning.message) for warning in warned]
    connection.send((*answer, bool(file) and any(file in text for text in said)))


def _judge(error: BaseException) -> tuple[str, str]:
    """Say whether an exception is a sentence of this package or whatever a library said."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and "lightning_mcore" in frames[-1].filename and (frames[-1].line or "").startswith("raise ")
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RefusedError):
        return "refused", text
    kinds = (ValueError, TypeError, RuntimeError, ModuleNotFoundError, OSError)
    if isinstance(error, SystemExit | MemoryError | KeyboardInterrupt) or not isinstance(error, kinds) or not ours:
        return "foreign traceback", text[:500] + "\n" + "".join(traceback.format_tb(error.__traceback__)[-4:])
    return "refused", text


def _write(sample: Sample, folder: Path) -> str:
    sample.write(folder)
    return ""


def _read(sample: Sample, folder: Path) -> str:
    return sample.read(folder)


def digest(*parts: Any) -> str:
    """Return a short text that depends on every number of the tensors and texts."""
    import torch

    made = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            whole = part.detach().contiguous().cpu()
            made.update(f"{whole.dtype}{tuple(whole.shape)}".encode() + whole.view(torch.uint8).numpy().tobytes())
        else:
            made.update(repr(part).encode())
    return made.hexdigest()


def main() -> None:
    """Run trials of all samples, or of those that are named, and print a table."""
    from tests.support.mutation_samples import SAMPLES

    parser = argparse.ArgumentParser(description="Damage the files that a run reads.")
    parser.add_argument("--trials", type=int, default=500, help="of each sample")
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--only", help="samples whose names contain this")
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    options = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the processes that are started
    faults = 0
    for sample in SAMPLES:
        if options.only and options.only not in sample.name:
            continue
        began = time.monotonic()
        tally = trials(sample, options.trials, options.seed, print if options.verbose else lambda text: None)
        faults += len(tally.faults)
        print(f"{sample.name:32} {time.monotonic() - began:5.0f} s  {dict(tally.outcomes)}", flush=True)
        for fault in tally.faults:
            print(f"  FAULT {fault}", flush=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    from tests import mutations  # whose classes are those that the samples raise

    mutations.main()
