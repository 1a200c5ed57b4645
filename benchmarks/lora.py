# SPDX-License-Identifier: Apache-2.0
"""Cost of adapters: step time and per-rank peak memory, compared with two other ways to train.

The same tiny Llama is trained on the same rows on two data-parallel CPU ranks in three ways: all weights under
``MCoreStrategy``, adapters on all linear layers under ``MCoreStrategy``, and the same adapters made by ``peft`` under
Lightning's ``ddp``. The three run in turn, each in its own processes, so that all of them see the same load on a shared
machine. Each turn gives the median time of its steps after warm-up. The figures are medians over rounds, and ratios are
medians of the ratios within each round. Memory is a rank's peak resident size minus its size before the model is built.

    python -m benchmarks.lora
    python -m benchmarks.lora --rounds 3 --hidden 256

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import LoRA, MCoreGPT, MCoreStrategy, Recipe
from tests.support.hf_models import VOCAB_SIZE, save_tiny
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

RANKS = 2
WARM_UP = 3  # warm-up steps of a turn
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FULL, ADAPTERS, PEFT = "all weights", "adapters", "peft with ddp"
FORMS = (FULL, ADAPTERS, PEFT)


class Clock(pl.Callback):
    """Records the seconds from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.ends):
            self.ends.append(time.perf_counter())

    @property
    def median(self) -> float:
        """Median step time in seconds, without warm-up."""
        return median_step(self.ends)


def median_step(ends: list[float]) -> float:
    """Return the median step time in seconds from the ends of all steps, without the first ``WARM_UP`` steps."""
    return statistics.median([b - a for a, b in pairwise(ends)][WARM_UP - 1 :])


class PeftModule(pl.LightningModule):
    """A Hugging Face model with PEFT adapters."""

    def __init__(self, folder: str, rank: int) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=TARGETS)
        self.model = get_peft_model(base, config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["tokens"]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        recipe = Recipe()
        return torch.optim.AdamW(trained, recipe.learning_rate, recipe.betas, recipe.eps, recipe.weight_decay)


def train(form: str, folder: str, options: dict[str, Any]) -> dict[str, float]:
    """Train in one way on this rank; return the step time in seconds and the peak memory in bytes."""
    torch.set_num_threads(1)
    before = _peak()
    text = torch.randint(VOCAB_SIZE, (64, options["length"] + 1), generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(text), batch_size=options["rows"], collate_fn=_batch)
    clock = Clock()
    strategy: Any = "ddp" if form == PEFT else MCoreStrategy()
    module: pl.LightningModule
    if form == PEFT:
        module = PeftModule(folder, options["rank"])
    else:
        lora = LoRA(r=options["rank"], lora_alpha=2 * options["rank"], target_modules=TARGETS)
        recipe = Recipe(min_learning_rate=Recipe().learning_rate)
        given = {"lora": lora} if form == ADAPTERS else {}
        module = MCoreGPT.from_pretrained(folder, seq_length=options["length"], recipe=recipe, **given)
    make_trainer(strategy, max_steps=options["steps"] + WARM_UP, max_epochs=-1, callbacks=[clock]).fit(module, data)
    return {"seconds": clock.median, "peak": _peak() - before}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _batch(rows: list[tuple[Tensor]]) -> dict[str, Tensor]:
    text = torch.stack([row for (row,) in rows])
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train in all ways in turn; the slowest rank and the rank with the most memory count."""
    turns: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="lora_") as folder:
        sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden}
        save_tiny("llama", folder, num_hidden_layers=options.layers, **sizes)
        for turn in range(options.rounds):
            turns.append({})
            for form in FORMS:
                ranks = run_ranks(RANKS, train, form, folder, vars(options), timeout=600)
                turns[-1][form] = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
            print(turn + 1, turns[-1], flush=True)
    return {
        "median_seconds": {form: statistics.median(turn[form]["seconds"] for turn in turns) for form in FORMS},
        "median_peak_bytes": {form: statistics.median(turn[form]["peak"] for turn in turns) for form in FORMS},
        "adapters_over": {
            other: {
                name: statistics.median(turn[ADAPTERS][name] / turn[other][name] for turn in turns)
                for name in ("seconds", "peak")
            }
            for other in (FULL, PEFT)
        },
        "turns": turns,
    }


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [
        f"| {form} | {found['median_seconds'][form]:.3f} | {found['median_peak_bytes'][form] / 2**20:,.0f} |"
        for form in FORMS
    ]
    ratios = [
        f"Adapters take {ratio['seconds']:.2f} of the time and {ratio['peak']:.2f} of the memory of {other}."
        for other, ratio in found["adapters_over"].items()
    ]
    return "\n".join(["| form | median step, s | peak of a rank, MiB |", "|---|---|---|", *rows, "", *ratios])


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Time adapters beside full training and beside peft.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all forms")
    parser.add_argument("--steps", type=int, default=12, help="steps of a turn that count")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=2, help="rows of a rank")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    found = measure(options)
    write_results(options.output, "lora", "Adapters beside full training and beside peft", facts, found, table(found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
