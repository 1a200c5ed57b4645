# SPDX-License-Identifier: Apache-2.0
"""How long a user waits for the import, for ``--help``, for a plan and for the first step.

Each figure is the time of a whole process. The processes run in turn, so that a busy moment of the machine affects all
of them. There is one warm-up turn, so files are in memory ("warm").

* **import**: ``lightning.pytorch`` and ``megatron.core``, and in the same turn both with every public name of
  ``lightning_mcore``; the difference is what the package adds.
* **help**: ``lightning-mcore --help``.
* **plan**: ``lightning-mcore plan`` for an 8B Llama on several numbers of devices, from a LightningCLI file, from
  Hugging Face-style arguments and from a LLaMA-Factory file.
* **first step**: training a tiny model on four ranks, from ``python train.py`` to the end of the first step, by phase,
  with ``MCoreStrategy`` (TP=2, PP=2) and with Lightning's ``"ddp"``. Imports appear twice, because Lightning's launcher
  starts the other ranks only after rank 0 has finished importing.

    python -m benchmarks.startup
    python -m benchmarks.startup --rounds 9

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead import REPOSITORY, circumstances, write_results

BOTH = "import lightning.pytorch, megatron.core"
OURS = f"{BOTH}, lightning_mcore; [getattr(lightning_mcore, name) for name in lightning_mcore.__all__]"
DEVICES = (8, 1024, 16384)
STRATEGIES = {"ddp": '`"ddp"`, a model of torch', "mcore": "`MCoreStrategy`, tp2 pp2"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
MEGATRON = {
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "bf16": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-5,
    "output_dir": "out",
}


def write_files(folder: Path) -> dict[str, list[str]]:
    """Write a run in each supported file format, and return the arguments of ``lightning-mcore plan`` for each."""
    model = folder / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (folder / "arguments.json").write_text(json.dumps(MEGATRON))
    factory = {"model_name_or_path": str(model), "stage": "sft", "do_train": True, "finetuning_type": "full"} | {
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "llama3",
        "cutoff_len": 4096,
        **MEGATRON,
    }
    (folder / "rows.json").write_text(json.dumps([{"instruction": "count", "output": "one"}]))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    (folder / "factory.yaml").write_text(json.dumps(factory))  # JSON is also valid YAML
    style = [str(folder / "arguments.json"), "--model", str(model), "--seq-length", "4096"]
    return {
        "LightningCLI file": [str(REPOSITORY / "examples" / "configs" / "llama3_8b_bf16.yaml")],
        "file in the style of Hugging Face": style,
        "LLaMA-Factory file": [str(folder / "factory.yaml")],
    }


def seconds(command: list[str]) -> float:
    """Return how long a process takes; it must succeed."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    taken = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return taken


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands to time, by name."""
    program = str(Path(sys.executable).parent / "lightning-mcore")
    found = {
        "lightning.pytorch and megatron.core": [sys.executable, "-W", "ignore", "-c", BOTH],
        "the same and all of lightning_mcore": [sys.executable, "-W", "ignore", "-c", OURS],
        "lightning-mcore --help": [program, "--help"],
    }
    for door, arguments in write_files(folder).items():
        for devices in DEVICES:
            found[f"plan of a {door}, {devices:,} devices"] = [program, "plan", *arguments, "--devices", str(devices)]
    return found


def first_step(strategy: str, file: Path) -> dict[str, float]:
    """Return the seconds of each phase up to the first step."""
    seconds([sys.executable, "-W", "ignore", "benchmarks/first_step.py", strategy, str(file)])
    reached = json.loads(file.read_text())
    begins = [0.0, *reached.values()]
    return {phase: end - begin for (phase, end), begin in zip(reached.items(), begins, strict=False)}


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """Time all commands in turn; the first turn is for warm-up."""
    timed = commands(folder)
    found: dict[str, list[float]] = {name: [] for name in timed}
    phases: dict[str, list[dict[str, float]]] = {name: [] for name in STRATEGIES}
    for turn in range(rounds + 1):
        for name, command in timed.items():
            taken = seconds(command)
            if turn:
                found[name].append(taken)
        for name, of_strategy in phases.items():
            split = first_step(name, folder / "reached.json")
            if turn:
                of_strategy.append(split)
        print(f"turn {turn} of {rounds}", flush=True)
    alone, ours = list(found.values())[:2]
    return {
        "seconds": {name: statistics.median(values) for name, values in found.items()},
        "added_by_the_import": statistics.median(b - a for a, b in zip(alone, ours, strict=True)),
        "first_step": {
            name: {phase: statistics.median(row[phase] for row in rows) for phase in rows[0]}
            for name, rows in phases.items()
        },
        "all": found,
        "all_first_steps": phases,
    }


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [f"| {name} | {median:.2f} |" for name, median in found["seconds"].items()]
    added = f"The import adds {found['added_by_the_import']:.2f} s, in pairs."
    splits = found["first_step"]
    names = list(next(iter(splits.values())))
    steps = [f"| {' | '.join(['to the first step, s', *names, 'together'])} |", "|---" * (len(names) + 2) + "|"]
    for strategy, of_phase in splits.items():
        values = [*of_phase.values(), sum(of_phase.values())]
        steps.append(f"| {' | '.join([STRATEGIES[strategy], *(f'{value:.2f}' for value in values)])} |")
    return "\n".join(["| process | median, s |", "|---|---|", *rows, "", added, "", *steps])


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Time the import, --help and plan.")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = {**circumstances(options), "device": f"CPU, {os.cpu_count()} cores"}
    with tempfile.TemporaryDirectory(prefix="startup_") as folder:
        found = measure(options.rounds, Path(folder))
    write_results(
        options.output, "startup", "How long a user waits before anything happens", facts, found, table(found)
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
