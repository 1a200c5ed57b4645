# SPDX-License-Identifier: Apache-2.0
"""Memory and time of the output layer and the loss: all logits at once against chunks of 1,024 tokens.

The vocabulary is a tensor-parallel rank's share of 131,072 tokens on 8 ranks. Forward and backward run in turn both
ways, in one process, from the same hidden states. Memory is the peak of what lives beside the hidden states and the
weights. Rows whose logits do not fit are measured in chunks only.

    python -m benchmarks.chunked_loss

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import MCoreGPT, single_process
from tests.support.live_memory import LiveBytes

CHUNK = 1024
VOCABULARY = 131_072 // 8
_WAYS: dict[str, int | None] = {"whole": None, "chunks": CHUNK}
_FITS = 2**29  # logits; 2 GiB in fp32


def measure(tokens: int, hidden_size: int, turns: int) -> dict[str, Any]:
    """Return the seconds of each turn, and the peak in bytes, for both ways."""
    sizes = {"num_layers": 1, "hidden_size": hidden_size, "num_attention_heads": 4, "ffn_hidden_size": hidden_size}
    with single_process():
        module = MCoreGPT(VOCABULARY, 8, sizes)
        module.configure_model()
        chunk: Any = module.model.chunks[0]
        hidden = torch.randn(tokens, 1, hidden_size, requires_grad=True)
        labels = torch.randint(0, VOCABULARY, (1, tokens))
        ways = [way for way in _WAYS if way == "chunks" or tokens * VOCABULARY <= _FITS]
        found: dict[str, Any] = {way: {"seconds": [], "peak": 0} for way in ways}
        for turn in range(turns + 2):
            for way in ways if turn % 2 else reversed(ways):
                chunk.loss_chunk_size = _WAYS[way]
                if turn == 0:  # counting takes time
                    with LiveBytes() as live:
                        step(chunk, hidden, labels)
                    found[way]["peak"] = live.peak
                    continue
                start = time.perf_counter()
                step(chunk, hidden, labels)
                if turn > 1:  # the one before warms up
                    found[way]["seconds"].append(time.perf_counter() - start)
    return {"tokens": tokens, "hidden_size": hidden_size, "vocabulary": VOCABULARY, "ways": found}


def step(chunk: Any, hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Run the output layer and the loss, forward and backward."""
    chunk.zero_grad()
    hidden.grad = None
    chunk.losses_of_hidden(hidden, labels).sum().backward()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| tokens | memory at once | in chunks | seconds at once | in chunks | time ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        chunks, whole = row["ways"]["chunks"], row["ways"].get("whole")
        cells = [f"{row['tokens']:,}", "-", f"{chunks['peak'] / 2**20:,.0f} MiB"]
        cells += ["-", f"{statistics.median(chunks['seconds']):.2f}", "-"]
        if whole is not None:
            cells[1] = f"{whole['peak'] / 2**20:,.0f} MiB"
            cells[3] = f"{statistics.median(whole['seconds']):.2f}"
            pairs = zip(chunks["seconds"], whole["seconds"], strict=True)
            cells[5] = f"{statistics.median(one / other for one, other in pairs):.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Measure the loss in chunks.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32_768, 131_072])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    rows = []
    for tokens in options.tokens:
        rows.append(measure(tokens, options.hidden_size, options.turns))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    write_results(options.output, "chunked-loss", "Output layer and loss in chunks of tokens", facts, rows, table(rows))


if __name__ == "__main__":
    main()
