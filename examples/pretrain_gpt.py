# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on real text with tensor, sequence and pipeline parallelism on four CPU processes.

Run it with ``make demo`` or ``python examples/pretrain_gpt.py``; ``--help`` lists the options. Lightning starts one
process per rank. Everything is plain Lightning except two objects: ``MCoreGPT``, a LightningModule around Megatron's
GPT, and ``MCoreStrategy``, which says how the model is split. Both run unchanged on GPUs with
``Trainer(accelerator="gpu")``. ``examples/configs/pretrain_gpt.yaml`` is the same run for LightningCLI.

The metrics, the loss curve and generated text go to ``outputs/pretrain_gpt``. The model is also saved in Hugging Face
format in its subfolder ``hf``; at the end, ``transformers`` loads it and continues the same prompt.
"""

import argparse
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from lightning_mcore import MCoreGPT, MCoreProgressBar, MCoreStrategy, Recipe, RunReport
from run_report import InTransformers
from stdlib_text import StdlibText

PROMPT = "import os\n\n\ndef "


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about two minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layout = parser.add_argument_group("layout")
    layout.add_argument("--devices", type=int, default=4, help="ranks, one process each (4)")
    layout.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size (2)")
    layout.add_argument("--pp", type=int, default=2, help="pipeline_model_parallel_size (2)")
    layout.add_argument("--vp", type=int, help="virtual_pipeline_model_parallel_size (none)")
    layout.add_argument("--cp", type=int, default=1, help="context_parallel_size (1)")
    layout.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or bf16-true (32-true)")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--num-layers", type=int, default=4)
    sizes.add_argument("--hidden-size", type=int, default=128)
    sizes.add_argument("--num-heads", type=int, default=4)
    sizes.add_argument("--seq-length", type=int, default=128, help="tokens in a window (128)")
    sizes.add_argument(
        "--vocab-size", type=int, default=1024, help="256 for plain bytes; above 256 a BPE is trained (1024)"
    )
    sizes.add_argument("--max-bytes", type=int, default=5_000_000, help="how much of the library to read (5000000)")
    run = parser.add_argument_group("run")
    run.add_argument("--max-steps", type=int, default=400)
    run.add_argument("--batch-size", type=int, default=8, help="windows in a step, for each data-parallel rank (8)")
    run.add_argument("--micro-batch-size", type=int, default=4, help="windows in one pass through the pipeline (4)")
    run.add_argument("--learning-rate", type=float, default=2e-3)
    run.add_argument("--val-every", type=int, default=100, help="steps between two validations (100)")
    run.add_argument("--sample-tokens", type=int, default=120, help="tokens to generate at the end (120)")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--output", type=Path, default=Path("outputs/pretrain_gpt"), help="folder for the files")
    return parser.parse_args(arguments)


def build_model(
    options: argparse.Namespace, transformer_impl: Literal["auto", "transformer_engine"] = "auto"
) -> MCoreGPT:
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
        transformer_impl=transformer_impl,
        recipe=Recipe(learning_rate=options.learning_rate, warmup_steps=options.max_steps // 10),
    )


def build_trainer(options: argparse.Namespace) -> pl.Trainer:
    """Build the trainer; the strategy says how the model is split."""
    strategy = MCoreStrategy(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vp,
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
            RunReport(str(options.output), prompt=PROMPT, max_new_tokens=options.sample_tokens),
            InTransformers(str(options.output / "hf"), PROMPT),
        ],
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def build_data(options: argparse.Namespace) -> StdlibText:
    """Build the data module."""
    return StdlibText(options.seq_length, options.batch_size, options.vocab_size, options.max_bytes)


def main() -> None:
    """Train and validate, plot the losses, and generate text."""
    options = parse_arguments()
    pl.seed_everything(options.seed, verbose=False)
    build_trainer(options).fit(build_model(options), datamodule=build_data(options))


if __name__ == "__main__":
    main()
