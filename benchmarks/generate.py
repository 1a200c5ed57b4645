# SPDX-License-Identifier: Apache-2.0
"""Throughput of ``hf_model(...).generate`` on one CPU core, compared with transformers.

A random fp32 Llama continues the same prompts greedily, in one process that alternates between transformers with its
cache, ours with the cache, and ours without. All three must generate the same tokens. Time is CPU time of the process,
so that other programs on the machine have little effect.

    python -m benchmarks.generate
    python -m benchmarks.generate --hidden 1024 --layers 16 --rounds 5

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import hf_model, single_process

VOCAB_SIZE = 32_000


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the tokens per CPU second of each turn."""
    other: Any = make_model(options)
    other.save_pretrained(folder)
    prompts = torch.randint(1, VOCAB_SIZE, (options.rows, options.prompt))
    speeds: dict[str, list[float]] = {}
    with single_process():
        model = hf_model(pl.LightningModule(), str(folder))
        settings = {"max_new_tokens": options.new, "do_sample": False}
        writers: dict[str, Callable[[], Tensor]] = {
            "transformers": lambda: other.generate(prompts, **settings),
            "with the cache": lambda: model.generate(prompts, **settings),
            "without the cache": lambda: model.generate(prompts, use_cache=False, **settings),
        }
        for number in range(options.rounds + 1):
            written = []
            for name, write in writers.items():
                began = time.process_time()
                written.append(write())
                if number:  # the first one is for warm-up
                    seconds = time.process_time() - began
                    speeds.setdefault(name, []).append(options.rows * options.new / seconds)
            if not all(torch.equal(tokens, written[0]) for tokens in written):
                raise RuntimeError("the tokens differ from those of transformers")
    return speeds


def table(options: argparse.Namespace, speeds: dict[str, list[float]]) -> str:
    """Return the results as Markdown."""
    plain = speeds["transformers"]
    return "\n".join(
        [
            f"A Llama of {options.layers} layers of {options.hidden} in fp32; {options.rows} prompts of"
            f" {options.prompt} tokens, {options.new} new tokens each; medians of {options.rounds} turns. All write the"
            " same tokens.",
            "",
            "| | tokens in a CPU second | of transformers, in pairs |",
            "|---|---|---|",
            *(
                f"| {name} | {statistics.median(found):.1f} |"
                f" {statistics.median(own / other for own, other in zip(found, plain, strict=True)):.2f} |"
                for name, found in speeds.items()
            ),
        ]
    )


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Time generation beside transformers on one CPU rank.")
    parser.add_argument("--hidden", type=int, default=512, help="size of a token, a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="prompts")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to write")
    parser.add_argument("--rounds", type=int, default=3, help="turns that count")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    facts = circumstances(options)
    facts["device"] = f"CPU, {os.cpu_count()} cores, one thread"
    with tempfile.TemporaryDirectory(prefix="generate_") as folder:
        speeds = measure(options, Path(folder))
    write_results(options.output, "generate", "Generation beside transformers", facts, speeds, table(options, speeds))


if __name__ == "__main__":
    main()
