# SPDX-License-Identifier: Apache-2.0
"""Cost of a DPO step: its time compared with ``trl``, and its peak memory compared with full logits.

The same tiny Llama with a large vocabulary learns from the same pairs on one CPU rank in three ways:
``MCorePreference``; the same with full fp32 logits of all tokens and a log-softmax over them, as in trainers built on
transformers; and ``trl.DPOTrainer``, if ``trl`` is installed. Reference log-probabilities are computed beforehand. The
three run in turn, each in its own process. Each turn gives the median time of its steps after warm-up. The figures are
medians over rounds, and ratios are medians of the ratios within each round. Memory is the rank's peak resident size
minus its size before the model is built.

    python -m benchmarks.preference
    python -m benchmarks.preference --rounds 3 --vocab 64000

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.lora import WARM_UP, Clock, _peak, median_step
from benchmarks.overhead import REPOSITORY, circumstances, write_results
from lightning_mcore import MCorePreference, MCoreStrategy, Preference, Recipe
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.preference.pairs import Pair, collate_padded_pairs
from lightning_mcore.layers.inputs import ModelInputs
from tests.support.hf_models import save_tiny
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

OURS, WHOLE, TRL = "MCorePreference", "with whole logits", "trl.DPOTrainer"
FORMS = (OURS, WHOLE, *((TRL,) if importlib.util.find_spec("trl") else ()))


class WithWholeLogits(MCorePreference):
    """Builds the full fp32 logits of all tokens, as trainers built on transformers do."""

    def token_losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, ModelInputs]:
        logits, inputs = self.token_logits(batch)
        assert inputs.labels is not None
        logps = logits.float().log_softmax(-1)
        return -logps.gather(-1, inputs.labels[..., None]).squeeze(-1), inputs


def words(options: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    """Return prompts with two answers each, as word numbers; all have the same length."""
    random = np.random.default_rng(1)
    half = options["length"] // 2
    numbers = random.integers(30, 100, (options["pairs"], 3, half))  # the tokenizer finds w1 and w2 even inside a word
    return [(prompt.tolist(), chosen.tolist(), rejected.tolist()) for prompt, chosen, rejected in numbers]


def train(form: str, folder: str, options: dict[str, Any]) -> dict[str, float]:
    """Train in one way; return the step time in seconds and the peak memory in bytes."""
    torch.set_num_threads(1)
    if form == TRL:
        from trl import DPOTrainer  # noqa: F401  # what it imports is not memory of a step
    before, given = _peak(), words(options)
    if form == TRL:
        return {"seconds": _train_with_trl(folder, given, options), "peak": _peak() - before}
    pairs = []
    for number, (prompt, *answers) in enumerate(given):
        tokens = [np.array([*prompt, *answer]) for answer in answers]
        masks = [np.arange(len(t)) >= len(prompt) for t in tokens]
        chosen, rejected = (TokenSample(t, mask, number) for t, mask in zip(tokens, masks, strict=True))
        pairs.append(Pair(chosen, rejected, reference=(-100.0, -100.0)))
    clock = Clock()
    module = (MCorePreference if form == OURS else WithWholeLogits).from_pretrained(
        folder, seq_length=options["length"], preference=Preference(), recipe=Recipe(min_learning_rate=3e-4)
    )
    data: DataLoader[Any] = DataLoader([collate_padded_pairs(pairs)] * (options["steps"] + WARM_UP), batch_size=None)  # type: ignore[arg-type]
    make_trainer(MCoreStrategy(), callbacks=[clock]).fit(module, data)
    return {"seconds": clock.median, "peak": _peak() - before}


def _train_with_trl(folder: str, given: list[tuple[list[int], list[int], list[int]]], options: dict[str, Any]) -> float:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def text(numbers: list[int]) -> str:
        return "".join(f" w{number}" for number in numbers)

    rows = [  # trl adds an EOS token to each answer
        {"prompt": text(prompt), "chosen": text(chosen[:-1]), "rejected": text(rejected[:-1])}
        for prompt, chosen, rejected in given
    ]
    count = options["steps"] + WARM_UP
    config = DPOConfig(
        output_dir=f"{folder}-trl",
        per_device_train_batch_size=len(rows),
        max_steps=count,
        precompute_ref_log_probs=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = DPOTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Ends()]
    )
    trainer.train()
    return median_step(ends)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train in all ways in turn."""
    turns: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="preference_") as folder:
        sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "vocab_size": options.vocab}
        save_tiny("llama", folder, num_hidden_layers=options.layers, tokenizer=True, **sizes)
        for turn in range(options.rounds):
            turns.append({})
            for form in FORMS:
                [turns[-1][form]] = run_ranks(
                    1, train, form, folder, vars(options), timeout=600, open_group=form != TRL
                )
            print(turn + 1, turns[-1], flush=True)
    tokens = 2 * options.pairs * options.length
    return {
        "tokens_per_second": {form: tokens / statistics.median(t[form]["seconds"] for t in turns) for form in FORMS},
        "median_peak_bytes": {form: statistics.median(turn[form]["peak"] for turn in turns) for form in FORMS},
        "ours_over": {
            other: {
                name: statistics.median(turn[OURS][name] / turn[other][name] for turn in turns)
                for name in ("seconds", "peak")
            }
            for other in FORMS[1:]
        },
        "turns": turns,
    }


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [
        f"| {form} | {speed:,.0f} | {found['median_peak_bytes'][form] / 2**20:.0f} MiB |"
        for form, speed in found["tokens_per_second"].items()
    ]
    ratios = [
        f"MCorePreference / {other}: time of a step {ratio['seconds']:.2f}, peak memory {ratio['peak']:.2f}."
        for other, ratio in found["ours_over"].items()
    ]
    head = ["| form | tokens/s | peak memory |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", *ratios])


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description="Time a step of DPO beside trl, and its memory beside whole logits.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all forms")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn that count")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a step")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    facts["trl"] = importlib.metadata.version("trl") if TRL in FORMS else "not installed"
    found = measure(options)
    write_results(options.output, "preference", "A step of DPO beside whole logits and trl", facts, found, table(found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
