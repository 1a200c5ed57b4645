# SPDX-License-Identifier: Apache-2.0
"""Teach a tiny model to prefer one of two answers, with DPO on two CPU processes.

Run it with ``make demo-dpo`` or ``python examples/prefer_answers.py``; ``--help`` lists the options.

1. A small byte-level GPT learns to greet people by name. Half of the answers are polite, half are rude.
2. It is saved as a Hugging Face model, and ``MCorePreference`` starts from that folder. The polite answer of each pair
   is the chosen one. Before the first step, both ranks compute the reference log-probabilities of all answers once.
3. Before and after DPO, the model greets people it has never seen in training.

The metrics, a plot of margins and losses, and the answers go to ``outputs/prefer_answers``.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_mcore import (
    MCoreGPT,
    MCorePreference,
    MCoreProgressBar,
    MCoreStrategy,
    Preference,
    Recipe,
    RunReport,
    SaveHFModel,
)
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import collate_padded
from lightning_mcore.data.preference.pairs import Pair, PairDataset, collate_padded_pairs
from lightning_mcore.data.sampling import training_loader
from run_report import draw_side_by_side

PLACES = ("here", "at home", "in Rome", "in Oslo", "at sea", "in town", "at work", "in bed")
_PEOPLE = (
    "Ada Alan Anna Ben Carl Clara Dan Edith Emil Emma Eva Finn Frida Greta Hans Hugo Ida Ines Iris Ivan Jan Jane "
    "Jill Joan Jon Judith Karl Kate Kim Klara Lars Lea Lena Leo Lina Lisa Lou Luis Maja Marc Maria Max Mia Mila "
    "Nils Nina Nora Olaf Olga Omar Oscar Otto Pablo Paul Pia Rita Rosa Ruth Sara Sven Tara Theo Tim Tina Tom Uma "
    "Vera Yara Zoe"
)
NAMES = _PEOPLE.split()
STRANGERS = ("Bert", "Gina", "Ilan", "Mona", "Ravi", "Sofia")
END = b"\n"
LENGTH = 64  # bytes of a question and its answer, at most


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about two minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="ranks, one process each (2)")
    parser.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size (2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (1)")
    parser.add_argument("--first-steps", type=int, default=300, help="steps in which it learns to greet (300)")
    parser.add_argument("--max-steps", type=int, default=40, help="steps of DPO (40)")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs in a step, for each data-parallel rank (16)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of DPO (1e-4)")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--sft-weight", type=float, default=1.0, help="weight of imitating the chosen answers (1.0)")
    parser.add_argument("--output", type=Path, default=Path("outputs/prefer_answers"), help="folder for the files")
    return parser.parse_args(arguments)


def question(name: str, place: str) -> bytes:
    """Return the prompt."""
    return f"{name} is {place}: ".encode()


def polite(name: str, place: str) -> bytes:
    """Return the chosen answer."""
    return f"good day, {name}!".encode() + END


def rude(name: str, place: str) -> bytes:
    """Return the rejected answer."""
    return f"WHAT NOW, {name.upper()}?".encode() + END


def sample(prompt: bytes, answer: bytes, number: int) -> TokenSample:
    """Return a prompt with an answer to learn."""
    tokens = np.frombuffer(prompt + answer, np.uint8).astype(np.int64)
    return TokenSample(tokens, np.arange(len(tokens)) >= len(prompt), number)


def make_pairs() -> list[Pair]:
    """Return one pair for each person at each place."""
    asked = [(name, place) for name in NAMES for place in PLACES]
    return [
        Pair(sample(question(*one), polite(*one), number), sample(question(*one), rude(*one), number))
        for number, one in enumerate(asked)
    ]


class GreetingsData(pl.LightningDataModule):
    """Both answers as examples to imitate, or as pairs.

    Args:
        folder: Folder for the reference log-probabilities.
        batch_size: Pairs per batch on each data-parallel rank.
        as_pairs: Whether to return pairs instead of single answers.
    """

    def __init__(self, folder: str, batch_size: int, as_pairs: bool) -> None:
        super().__init__()
        self.greetings = PairDataset(make_pairs(), folder, batch_size)
        self.batch_size, self.as_pairs = batch_size, as_pairs

    def pair_sources(self) -> dict[str, PairDataset]:
        """Return the pairs that need reference log-probabilities."""
        return {"train": self.greetings}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader, shuffled in the same order on every layout."""
        collate = collate_padded_pairs if self.as_pairs else collate_both
        return training_loader(self.trainer, self.greetings, self.batch_size, collate_fn=collate, of="pairs")


def collate_both(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return a batch of all answers, each as an example to imitate."""
    return collate_padded([sequence for pair in pairs for sequence in pair.sequences])


class Greets(pl.Callback):
    """Has the model greet strangers before and after training, and counts the polite answers.

    Args:
        file: Where to write the answers.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Greet before the first step."""
        self.file.unlink(missing_ok=True)
        self._greet(trainer, pl_module, "before")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Greet after the last step."""
        self._greet(trainer, pl_module, "after")

    def _greet(self, trainer: pl.Trainer, module: Any, when: str) -> None:
        lines, count = [], 0
        for seed, name in enumerate(STRANGERS * 2):
            prompt = question(name, PLACES[seed % len(PLACES)])
            said = bytes(module.generate(list(prompt), 24, seed=seed)).partition(END)[0]
            count += said[len(prompt) :].startswith(b"good day")
            lines.append("  | " + said.decode(errors="replace"))
        if trainer.is_global_zero:
            text = "\n".join([f"\n{when} DPO: {count} of {len(lines)} answers are polite", *lines])
            print(text, flush=True)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def build_trainer(options: argparse.Namespace, max_steps: int, name: str, *callbacks: pl.Callback) -> pl.Trainer:
    """Build the trainer for one of the two runs."""
    return pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MCoreStrategy(
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            sequence_parallel=False,  # the lengths of prompts have no common divisor
        ),
        max_steps=max_steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(options.output, name=name, version=""),
        callbacks=[MCoreProgressBar(), RunReport(), *callbacks],
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def build_model(options: argparse.Namespace) -> MCoreGPT:
    """Build the model that learns to greet."""
    return MCoreGPT(
        vocab_size=256,
        seq_length=LENGTH,
        transformer={
            "num_layers": 2,
            "hidden_size": 96,
            "num_attention_heads": 4,
            "ffn_hidden_size": 256,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
        },
        recipe=Recipe(learning_rate=3e-3, warmup_steps=10),
    )


def main() -> None:
    """Train the model to greet, then with DPO, and plot the metrics."""
    options = parse_arguments()
    pl.seed_everything(1, verbose=False)
    if "LOCAL_RANK" not in os.environ:  # the first process, which starts the others
        shutil.rmtree(options.output, ignore_errors=True)
    start = options.output / "start"
    data = str(options.output / "data")

    print("learning to greet, politely or rudely", flush=True)
    first = build_trainer(options, options.first_steps, "greet", SaveHFModel(str(start)))
    first.fit(build_model(options), datamodule=GreetingsData(data, options.batch_size, as_pairs=False))

    module = MCorePreference.from_pretrained(
        str(start),
        seq_length=LENGTH,
        preference=Preference("sigmoid", beta=options.beta, sft_weight=options.sft_weight),
        recipe=Recipe(learning_rate=options.learning_rate, warmup_steps=min(5, options.max_steps // 2)),
    )
    greets = Greets(options.output / "answers.txt")
    second = build_trainer(options, options.max_steps, "dpo", greets, SaveHFModel(str(options.output / "tuned")))
    second.fit(module, datamodule=GreetingsData(data, options.batch_size, as_pairs=True))
    if second.is_global_zero:
        picture = options.output / "margins.png"
        names = {
            "rewards/margins": "reward of the chosen less the rejected answer",
            "train_loss": "loss: DPO + imitation of the chosen answer",
        }
        draw_side_by_side(picture, {"DPO": options.output / "dpo" / "metrics.csv"}, names)
        print(f"\nanswers: {greets.file}\nmargins: {picture}\nmodel:   {options.output / 'tuned'}")


if __name__ == "__main__":
    main()
