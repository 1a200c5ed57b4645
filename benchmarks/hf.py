# SPDX-License-Identifier: Apache-2.0
"""Cost of importing and exporting a Hugging Face model, compared with a plain copy of its files.

A bf16 Llama with a few GB of random weights is written in Hugging Face format. The following run in turn, in one
process and on the same disk:

* **Copy.** The model's files are copied one after the other (``shutil.copyfile`` and fsync).
* **Import.** ``lightning-mcore import`` reads the model and writes a sharded checkpoint, with checksums and fsync.
* **Export.** ``lightning-mcore export`` turns that checkpoint into a Hugging Face folder again, with fsync.
* **Load.** ``MCoreGPT.from_pretrained`` loads the model in one process, compared with a plain read of the files.

Files are dropped from the page cache before they are read, as far as ``posix_fadvise`` does so. The time to start
Python and import packages is not counted. Each figure is compared with the copy in the same round. At the end, the
exported files are compared with the model's, tensor by tensor.

* **Memory.** One more import and export, each in a fresh process: the peak memory minus the memory after all Python
  imports. Mapped files do not count, because the system can reclaim their pages when it needs them.

    python -m benchmarks.hf
    python -m benchmarks.hf --gigabytes 4 --rounds 3 --disk /path/on/another/disk

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.hf.safetensors import SafetensorsFolder
from lightning_mcore.interop.export import export_checkpoint
from lightning_mcore.interop.importing import import_checkpoint
from tests.support.hf_folders import LlamaSizes, peak_memory, write_llama

HIDDEN_SIZE = 2048
VOCAB_SIZE = 32_000
TARGETS = {"import": 0.8, "export": 0.8}


def sizes_of(gigabytes: float) -> LlamaSizes:
    """Return model sizes for about this many GB of bf16 weights."""
    of_layer = 2 * (2 * HIDDEN_SIZE**2 + HIDDEN_SIZE**2 + 9 * HIDDEN_SIZE**2)
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCAB_SIZE * HIDDEN_SIZE) / of_layer))
    return LlamaSizes(HIDDEN_SIZE, layers, VOCAB_SIZE, heads=16, groups=8)


def forget(folder: Path) -> None:
    """Drop files from the page cache."""
    os.sync()
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> None:
    """Copy the files of a folder to disk."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb+") as file:
            os.fsync(file.fileno())


def read(source: Path) -> None:
    """Read the files of a folder."""
    memory = memoryview(bytearray(4 << 20))
    for path in sorted(source.iterdir()):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def load(source: Path) -> None:
    """Load a model in this process."""
    with single_process():
        module = MCoreGPT.from_pretrained(str(source), transformer={"perform_initialization": False})
        module.configure_model()


def timed(action: Callable[[], None], source: Path, target: Path | None = None) -> float:
    """Return the seconds of an action on files that are not in memory, then delete what it wrote."""
    forget(source)
    gc.collect()  # free the model of an earlier turn before the next one is built
    began = time.perf_counter()
    action()
    seconds = time.perf_counter() - began
    if target is not None:
        shutil.rmtree(target)
    return seconds


def one_round(folder: Path, first: bool) -> dict[str, float]:
    """Return the seconds of each action; their order changes from round to round."""
    model, imported, out = folder / "model", folder / "imported.ckpt", folder / "out"
    actions: dict[str, Callable[[], float]] = {
        "copy": lambda: timed(lambda: copy(model, out), model, out),
        "import": lambda: timed(lambda: import_checkpoint(str(model), str(out)), model, out),
        "export": lambda: timed(lambda: export_checkpoint(str(imported), str(out)), imported, out),
        "read": lambda: timed(lambda: read(model), model),
        "load": lambda: timed(lambda: load(model), model),
    }
    return {name: actions[name]() for name in (actions if first else reversed(actions))}


def differences(first: Path, second: Path) -> list[str]:
    """Return the tensors in which two Hugging Face folders differ."""
    one, other = SafetensorsFolder(str(first)), SafetensorsFolder(str(second))
    wrong = list(one.shapes.keys() ^ other.shapes.keys())
    for name in one.shapes.keys() & other.shapes.keys():
        shape = one.shapes[name]
        start = (0,) * len(shape)
        same = shape == other.shapes[name] and one.dtypes[name] == other.dtypes[name]
        if not same or not torch.equal(
            one.read(name, start, shape).view(torch.int16), other.read(name, start, shape).view(torch.int16)
        ):
            wrong.append(name)
    return sorted(wrong)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all rounds."""
    model, imported = folder / "model", folder / "imported.ckpt"
    size = write_llama(model, sizes_of(options.gigabytes), options.shard_bytes)
    import_checkpoint(str(model), str(imported))
    rows = []
    for number in range(options.rounds + 1):
        row = one_round(folder, number % 2 == 0)
        if number:  # the first one is for warm-up
            rows.append(row)
            print({name: f"{size / seconds / 1e9:.2f} GB/s" for name, seconds in row.items()}, flush=True)
    jobs = {
        "import": _call("import_checkpoint", model, folder / "again.ckpt"),
        "export": _call("export_checkpoint", imported, folder / "exported", options.shard_bytes),
    }
    memory = dict(zip(jobs, peak_memory(*jobs.values()), strict=True))
    wrong = differences(model, folder / "exported")
    if wrong:
        raise RuntimeError(f"the export differs from the model in {wrong[:5]}")
    pairs = {"import": "copy", "export": "copy", "load": "read"}
    return {
        "bytes": size,
        "shard_bytes": options.shard_bytes,
        "gigabytes_per_second": {
            name: size / 1e9 / statistics.median(row[name] for row in rows) for name in ("copy", "read", *pairs)
        },
        "of_plain": {name: statistics.median(row[plain] / row[name] for row in rows) for name, plain in pairs.items()},
        "peak_bytes": memory,
        "seconds": rows,
    }


def _call(function: str, source: Path, target: Path, shard_bytes: int | None = None) -> str:
    more = "" if shard_bytes is None else f", max_shard_size={shard_bytes}"
    return f"lightning_mcore.hf.{function}({str(source)!r}, {str(target)!r}{more})"


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    speed, ratio, peak = found["gigabytes_per_second"], found["of_plain"], found["peak_bytes"]
    return "\n".join(
        [
            f"A Llama of {found['bytes'] / 1e9:.2f} GB in bf16, files of at most {found['shard_bytes'] / 1e9:.2f} GB;"
            f" medians of {len(found['seconds'])} turns.",
            "",
            "| | GB/s | of a plain copy, in pairs | target | most memory of its own |",
            "|---|---|---|---|---|",
            f"| plain copy with fsync | {speed['copy']:.2f} | 1 | | |",
            *(
                f"| {name} | {speed[name]:.2f} | {ratio[name]:.2f} | {TARGETS[name]} | {peak[name] / 1e9:.2f} GB |"
                for name in ("import", "export")
            ),
            "",
            f"A model in one process is filled at {speed['load']:.2f} GB/s, {ratio['load']:.2f} of a plain read"
            f" ({speed['read']:.2f} GB/s). The export is equal to the model, bit for bit.",
        ]
    )


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Time Hugging Face models in and out against a plain copy.")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of weights")
    parser.add_argument("--shard-bytes", type=int, default=250_000_000, help="of a file of the model at most")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count")
    parser.add_argument("--disk", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    facts = circumstances(options)
    facts["device"] = f"CPU, {os.cpu_count()} cores"
    with tempfile.TemporaryDirectory(prefix="hf_", dir=options.disk) as folder:
        found = measure(options, Path(folder))
    write_results(options.output, "hf", "Hugging Face models in and out", facts, found, table(found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
