# SPDX-License-Identifier: Apache-2.0
"""Preview FP8 before renting a GPU: train a model in bf16 and with each FP8 recipe, and plot the curves.

Run it with ``make demo-fp8``, or with ``python examples/preview_fp8.py`` where ``lightning-mcore[te-cpu]`` is
installed; ``--help`` lists the options. TransformerEngine's own Python code runs on the CPU: FP8 values and scales
match those of a GPU, and sums are in fp32. Every run starts from the same weights and reads the same batches. For
your own model, use ``plugins=MCorePrecision("bf16-mixed", fp8_recipe="blockwise")`` and ``callbacks=[FP8Monitor()]``.

The metrics of each run and a plot of losses and gradient norms go to ``outputs/preview_fp8``.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import mean

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from lightning_mcore import FP8Monitor, MCorePrecision, MCoreProgressBar, MCoreStrategy
from pretrain_gpt import build_data, build_model
from run_report import Curve, draw_side_by_side, read_curve

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
LAST = 20  # the mean over these last steps is printed


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about five minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, help="FP8 recipes (all four)")
    sizes = parser.add_argument_group("sizes; those of FP8 are multiples of 16, of blockwise multiples of 128")
    sizes.add_argument("--num-layers", type=int, default=2)
    sizes.add_argument("--hidden-size", type=int, default=256)
    sizes.add_argument("--num-heads", type=int, default=4)
    sizes.add_argument("--seq-length", type=int, default=128, help="tokens in a window (128)")
    sizes.add_argument("--vocab-size", type=int, default=1024, help="tokens of the BPE that is trained (1024)")
    sizes.add_argument("--max-bytes", type=int, default=5_000_000, help="how much of the library to read (5000000)")
    run = parser.add_argument_group("run")
    run.add_argument("--max-steps", type=int, default=200)
    run.add_argument("--batch-size", type=int, default=8, help="windows in a step (8)")
    run.add_argument("--learning-rate", type=float, default=2e-3)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--output", type=Path, default=Path("outputs/preview_fp8"), help="folder for the files")
    return parser.parse_args(arguments)


def train(options: argparse.Namespace, recipe: str | None) -> Path:
    """Train once, in bf16 or with an FP8 recipe, and return the metrics file."""
    name = recipe or "bf16"
    print(f"\n{name}", flush=True)
    pl.seed_everything(options.seed, verbose=False)
    logger = CSVLogger(options.output, name=name, version="")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MCoreStrategy(micro_batch_size=options.batch_size),
        plugins=[MCorePrecision("bf16-mixed", fp8_recipe=recipe)],
        max_steps=options.max_steps,
        max_epochs=-1,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[MCoreProgressBar(), *([FP8Monitor()] if recipe else [])],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = build_model(options, transformer_impl="transformer_engine")
    trainer.fit(model, datamodule=build_data(options))
    return Path(logger.log_dir) / "metrics.csv"


def last(curve: Curve) -> float:
    """Return the mean of the last values of a curve."""
    return mean(value for _, value in curve[-LAST:])


def report(files: dict[str, Path]) -> None:
    """Print a line for each run: its loss, the difference from bf16, and the share of values that FP8 lost."""
    losses = {name: read_curve(file, "train_loss") for name, file in files.items()}
    base = losses["bf16"]
    noise = mean(abs(after - before) for (_, before), (_, after) in pairwise(base[-LAST:]))
    print(f"\nmean loss of the last {LAST} steps (from one step to the next the loss in bf16 moves by {noise:.3f})")
    print(f"{'':12}{'loss':>8}{'- bf16':>9}   underflows to 0: inputs, weights, gradients   saturates (inputs)")
    for name, curve in losses.items():
        line = f"{name:12}{last(curve):8.4f}"
        if name != "bf16":
            line += f"{last(curve) - last(base):+9.4f}   {'':16}"
            for kind in ("inputs", "weights", "gradients"):
                line += f"{last(read_curve(files[name], f'fp8/{kind}_underflowed')):10.3%}"
            line += f"{last(read_curve(files[name], 'fp8/inputs_saturated')):19.4%}"
        print(line)


def main() -> None:
    """Train in bf16 and with each recipe, and compare."""
    options = parse_arguments()
    files = {recipe or "bf16": train(options, recipe) for recipe in (None, *options.recipes)}
    report(files)
    picture = options.output / "curves.png"
    names = {"train_loss": "cross entropy per token [nats]", "grad_norm": "gradient norm"}
    draw_side_by_side(picture, files, names)
    print(f"\nmetrics: {options.output}/<run>/metrics.csv\ncurves:  {picture}")


if __name__ == "__main__":
    main()
