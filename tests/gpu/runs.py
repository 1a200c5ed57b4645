# SPDX-License-Identifier: Apache-2.0
"""Trainings of a tiny GPT on one device, all from the same weights."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_mcore import MCoreGPT, Recipe
from lightning_mcore.parallel.groups import close_process_groups
from tests.parity.global_tensors import fill_weights
from tests.te.runs import LENGTH, TRANSFORMER, VOCABULARY, Numbers, Run, make_loader, make_trainer

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
"""What the tests of this folder run on."""

TRAINER_OF = {"cuda": "gpu", "cpu": "cpu"}
"""``Trainer(accelerator=...)`` of each device."""


class FilledGPT(MCoreGPT):
    """A GPT whose first weights do not depend on the device's random numbers."""

    def configure_model(self) -> None:
        first = not hasattr(self, "model")
        super().configure_model()
        if first:
            fill_weights(self.model.chunks)


def make_filled(run: Run) -> FilledGPT:
    """Return the model of a run."""
    recipe = Recipe(learning_rate=1e-3, warmup_steps=0)
    fields = TRANSFORMER | run.transformer
    impl: Any = run.impl
    return FilledGPT(VOCABULARY, LENGTH, fields, recipe=recipe, transformer_impl=impl, **run.model)


@contextmanager
def one_process() -> Iterator[None]:
    """Close the process groups of a run, so that the next may have another device."""
    try:
        yield
    finally:
        close_process_groups()
        if dist.is_initialized():
            dist.destroy_process_group()


def train_on(
    device: str, run: Run, *callbacks: pl.Callback, ckpt_path: Any = None, ranks: int = 1, **options: Any
) -> Numbers:
    """Train on one device, or under torchrun on several; return losses and gradient norms."""
    pl.seed_everything(1, verbose=False)
    numbers = Numbers()
    with one_process():
        trainer = make_trainer(run, ranks, numbers, *callbacks, accelerator=TRAINER_OF[device], **options)
        trainer.fit(make_filled(run), make_loader(run), ckpt_path=ckpt_path)
    return numbers


def main() -> None:
    """Under torchrun: train with the layers and the layout in the arguments, and print the losses on rank 0."""
    impl, layout, transformer = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    run = Run(impl=impl, layout=layout, transformer=transformer)
    losses = train_on(DEVICE, run, ranks=int(os.environ["WORLD_SIZE"])).losses
    if os.environ["RANK"] == "0":
        print(f"losses {json.dumps(losses)}", flush=True)


if __name__ == "__main__":
    main()
