# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT to answer questions, with packed rows and tensor and context parallelism on four CPU processes.

Run it with ``make demo-finetune`` or ``python examples/finetune_gpt.py``; ``--help`` lists the options. The answers
are docstrings from the standard library, three words to several pages long. With packing, several samples share a row,
and each attends only to itself. For a speed comparison, ``--no-packing`` gives each sample its own row, padded to the
longest in its batch. ``examples/configs/finetune_gpt.yaml`` is the same run for LightningCLI.

The metrics, the loss curve and an answer go to ``outputs/finetune_gpt``.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from lightning_mcore import MCoreGPT, MCoreProgressBar, MCoreStrategy, Recipe, RunReport
from stdlib_dialogues import StdlibDialogues

QUESTION = "What does shutil.copytree(src, dst, symlinks=False) do?"
WARM_UP = 3  # steps before the measurement starts


class RealTokens(pl.Callback):
    """Measures the share of tokens that are not padding, and the number of such tokens trained per second."""

    def __init__(self) -> None:
        self.places = 0
        self.tokens = 0
        self.seconds = 0.0
        self._started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step <= WARM_UP:
            return
        self.seconds += time.perf_counter() - self._started
        real = batch["cu_seqlens"][:, -1] if "cu_seqlens" in batch else batch["lengths"]
        self.tokens += int(real.sum())
        self.places += batch["tokens"].numel()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Print both on the first rank."""
        if not self.tokens or not trainer.is_global_zero:
            return
        copies = trainer.strategy.layout.data_parallel_size(trainer.world_size)
        print(
            f"\nbatches filled to {self.tokens / self.places:.1%}; {copies * self.tokens / self.seconds:,.0f} tokens/s"
            f" without padding, {copies * self.places / self.seconds:,.0f} with it",
            flush=True,
        )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about two minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layout = parser.add_argument_group("layout")
    layout.add_argument("--devices", type=int, default=4, help="ranks, one process each (4)")
    layout.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size (2)")
    layout.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (1)")
    layout.add_argument("--cp", type=int, default=2, help="context_parallel_size (2)")
    layout.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or bf16-true (32-true)")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--num-layers", type=int, default=4)
    sizes.add_argument("--hidden-size", type=int, default=128)
    sizes.add_argument("--num-heads", type=int, default=4)
    sizes.add_argument("--seq-length", type=int, default=512, help="tokens in a row (512)")
    sizes.add_argument("--vocab-size", type=int, default=1024, help="tokens of the BPE that is trained (1024)")
    sizes.add_argument("--max-bytes", type=int, default=5_000_000, help="how much of the library to read (5000000)")
    run = parser.add_argument_group("run")
    run.add_argument("--no-packing", action="store_true", help="one sample in a row, padded, for comparison")
    run.add_argument("--max-steps", type=int, default=120)
    run.add_argument("--batch-size", type=int, default=8, help="rows in a step, for each data-parallel rank (8)")
    run.add_argument("--micro-batch-size", type=int, default=4, help="rows in one pass through the model (4)")
    run.add_argument("--learning-rate", type=float, default=3e-3)
    run.add_argument("--val-every", type=int, default=60, help="steps between two validations (60)")
    run.add_argument("--sample-tokens", type=int, default=60, help="tokens of an answer at the end (60)")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--output", type=Path, default=Path("outputs/finetune_gpt"), help="folder for the files")
    return parser.parse_args(arguments)


def build_model(options: argparse.Namespace) -> MCoreGPT:
    """Build the model: a Llama-like GPT with rotary positions, RMS norms and gated MLPs."""
    return MCoreGPT(
        vocab_size=options.vocab_size,
        seq_length=options.seq_length,
        transformer={
            "num_layers": options.num_layers,
            "hidden_size": options.hidden_size,
            "num_attention_heads": options.num_heads,
            "ffn_hidden_size": 3 * options.hidden_size,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
        },
        recipe=Recipe(learning_rate=options.learning_rate, warmup_steps=options.max_steps // 10),
    )


def build_trainer(options: argparse.Namespace) -> pl.Trainer:
    """Build the trainer; the strategy says how model and rows are split."""
    strategy = MCoreStrategy(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        context_parallel_size=options.cp,
        sequence_parallel=options.tp > 1,
        micro_batch_size=options.micro_batch_size,
    )
    return pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=strategy,
        precision=options.precision,
        max_steps=options.max_steps,
        max_epochs=-1,
        val_check_interval=min(options.val_every, options.max_steps),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(options.output.parent, name=options.output.name, version=""),
        callbacks=[
            MCoreProgressBar(),
            RealTokens(),
            RunReport(str(options.output), prompt=QUESTION, max_new_tokens=options.sample_tokens),
        ],
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def build_data(options: argparse.Namespace) -> StdlibDialogues:
    """Build the data module."""
    return StdlibDialogues(
        options.seq_length, options.batch_size, options.vocab_size, not options.no_packing, options.max_bytes
    )


def main() -> None:
    """Train and validate, plot the losses, and answer a question."""
    options = parse_arguments()
    pl.seed_everything(options.seed, verbose=False)
    build_trainer(options).fit(build_model(options), datamodule=build_data(options))


if __name__ == "__main__":
    main()
