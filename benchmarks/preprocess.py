# SPDX-License-Identifier: Apache-2.0
"""Cost of ``lightning-mcore preprocess`` compared with the tokenizer alone.

The text is the source of the Python standard library, repeated, as one jsonl file with one document per module. The
tokenizer is a byte-level BPE with 32,000 tokens that is trained on it. The following run in turn on the same text:

* **The tokenizer alone.** As many processes as the command has workers. Each has its share of the documents in memory
  as strings, and calls ``encode_batch_fast`` of the tokenizers package on about 1 MiB at a time, in one thread. The
  output is dropped: nothing is read or written, and no list of ids is built. Starting the processes and loading the
  tokenizer and the text are not counted. The slowest process counts.
* **One process.** For comparison, the same in one process, with as many threads of the tokenizers package.
* **The command.** ``python -m lightning_mcore.cli preprocess`` from start to end: importing the package, reading and
  parsing the file, tokenising, building arrays, writing, fsync and the index. *Tokenising* is the same without starting
  Python, as the command itself measures it.
* **Side by side.** The tokenizer alone in one process, and at the same time a command with one worker, so that both see
  the same load on a shared machine; without starting Python.

    python -m benchmarks.preprocess
    python -m benchmarks.preprocess --megabytes 500 --rounds 5 --workers 2

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import __version__ as tokenizers_version

from benchmarks.overhead import REPOSITORY, circumstances, write_results

EOD = "<|endoftext|>"
ALONE = """
import json, os, sys, time
from tokenizers import Tokenizer
tokenizer_path, text_path, number, count, stop = sys.argv[1:]
batches, size = [[]], 0
with open(text_path, encoding="utf-8") as file:
    for index, line in enumerate(file):
        if index % int(count) == int(number):
            batches[-1].append(json.loads(line)["text"])
            size += len(batches[-1][-1])
            if size >= 1 << 20:
                batches.append([])
                size = 0
tokenizer = Tokenizer.from_file(tokenizer_path)
encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
print("ready", flush=True)
sys.stdin.readline()
begin, processor = time.perf_counter(), time.process_time()
done = 0
while True:
    for batch in batches:
        if batch:
            encode(batch, add_special_tokens=False)
            done += sum(len(text.encode()) for text in batch)
            if stop and os.path.exists(stop):
                break
    if not stop or os.path.exists(stop):
        break
print(time.perf_counter() - begin, time.process_time() - processor, done, flush=True)
"""


def write_text(path: Path, size: int) -> int:
    """Write the library's modules as lines of JSON, repeatedly, and return the bytes of text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = [file for file in sorted(folder.rglob("*.py")) if not {"site-packages", "dist-packages"} & {*file.parts}]
    sources = [text for text in (file.read_bytes().decode("utf-8", "ignore") for file in modules) if text]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for text in sources:
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= size:
                    break
    return written


def write_tokenizer(path: Path, text: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on the first documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with text.open(encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for _, line in zip(range(1000), file, strict=False)]
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(path))


def tokenizer_alone(tokenizer: Path, text: Path, processes: int, threads: int) -> tuple[float, float]:
    """Run processes that only tokenise; return the seconds of the slowest one and the CPU seconds of all."""
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "RAYON_NUM_THREADS": str(threads),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, str(tokenizer), str(text), str(number), str(processes), ""],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    seconds = []
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        answer, _ = process.communicate()
        seconds.append([float(value) for value in answer.split()])
    return max(wall for wall, _, _ in seconds), sum(processor for _, processor, _ in seconds)


def whole_command(tokenizer: Path, text: Path, output: Path, workers: int) -> tuple[float, float, float]:
    """Return the seconds of the command, its CPU seconds, and the MB/s that it reports."""
    command = [sys.executable, "-m", "lightning_mcore.cli", "preprocess", str(text), "--output", str(output)]
    options = ["--tokenizer", str(tokenizer), "--eod-token", EOD, "--workers", str(workers), "--overwrite"]
    begin, before = time.perf_counter(), os.times()
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    seconds, after = time.perf_counter() - begin, os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    [speed] = re.findall(r"([\d.]+) MB/s", done.stdout)
    return seconds, processor, float(speed)


def side_by_side(tokenizer: Path, text: Path, folder: Path) -> float:
    """Return the speed of a command with one worker relative to the tokenizer alone, running at the same time."""
    stop, output = folder / "stop", folder / "beside"
    stop.unlink(missing_ok=True)
    alone = subprocess.Popen(
        [sys.executable, "-c", ALONE, str(tokenizer), str(text), "0", "1", str(stop)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert alone.stdout is not None
    assert alone.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(whole_command, tokenizer, text, output, 1)
        while not Path(f"{output}.unfinished").exists() and not running.done():
            time.sleep(0.02)
        assert alone.stdin is not None
        alone.stdin.write("\n")
        alone.stdin.flush()
        _, _, own = running.result()
    stop.touch()
    wall, _, done = (float(value) for value in alone.communicate()[0].split())
    return own / (done / 1e6 / wall)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything in turn."""
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
    size = write_text(text, int(options.megabytes * 1e6)) / 1e6
    write_tokenizer(tokenizer, text, options.vocab_size)
    speeds: dict[str, list[float]] = {"alone": [], "threads": [], "command": [], "tokenising": []}
    shares: list[float] = []
    beside: list[float] = []
    for turn in range(options.rounds):
        alone, alone_processor = tokenizer_alone(tokenizer, text, options.workers, 1)
        speeds["alone"].append(size / alone)
        if turn == 0:
            speeds["threads"].append(size / tokenizer_alone(tokenizer, text, 1, options.workers)[0])
        seconds, processor, own = whole_command(tokenizer, text, folder / "data", options.workers)
        speeds["command"].append(size / seconds)
        speeds["tokenising"].append(own)
        shares.append(alone_processor / processor)
        beside.append(side_by_side(tokenizer, text, folder))
        print({name: round(values[-1], 2) for name, values in speeds.items()}, "MB/s;", beside[-1], flush=True)
    pairs = list(zip(speeds["command"], speeds["alone"], speeds["tokenising"], strict=True))
    return {
        "megabytes": size,
        "megabytes_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "command_over_alone": statistics.median(command / alone for command, alone, _ in pairs),
        "tokenising_over_alone": statistics.median(own / alone for _, alone, own in pairs),
        "seconds_beyond_tokenising": statistics.median(size / command - size / own for command, _, own in pairs),
        "processor_share": statistics.median(shares),
        "side_by_side": statistics.median(beside),
        "all": {**speeds, "processor_shares": shares, "side_by_side": beside},
    }


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    speed = found["megabytes_per_second"]
    return "\n".join(
        [
            f"{found['megabytes']:.0f} MB of text; medians of {len(found['all']['alone'])} turns.",
            "",
            "| | MB/s | of the tokenizer alone, in pairs |",
            "|---|---|---|",
            f"| the tokenizer alone, processes | {speed['alone']:.2f} | 1 |",
            f"| the tokenizer alone, one process with threads | {speed['threads']:.2f}"
            f" | {speed['threads'] / speed['alone']:.3f} |",
            f"| the command, from start to end | {speed['command']:.2f} | {found['command_over_alone']:.3f} |",
            f"| the command without the start of Python | {speed['tokenising']:.2f}"
            f" | {found['tokenising_over_alone']:.3f} |",
            "",
            "Side by side, a command of one worker without its start has"
            f" {found['side_by_side']:.3f} of the speed of the tokenizer alone.",
            f"Of the processor time of the command, {found['processor_share']:.3f} is what the tokenizer alone takes.",
            f"Starting Python and importing the package take {found['seconds_beyond_tokenising']:.1f} s of the command,"
            " whatever the size of the text.",
        ]
    )


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Time lightning-mcore preprocess against its tokenizer alone.")
    parser.add_argument("--megabytes", type=float, default=60.0, help="of text")
    parser.add_argument("--rounds", type=int, default=7, help="turns of both")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that tokenise")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = {**circumstances(options), "tokenizers": tokenizers_version}
    facts["device"] = f"CPU, {os.cpu_count()} cores"
    with tempfile.TemporaryDirectory(prefix="preprocess_") as folder:
        found = measure(options, Path(folder))
    write_results(
        options.output, "preprocess", "What preprocessing costs beyond the tokenizer", facts, found, table(found)
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
