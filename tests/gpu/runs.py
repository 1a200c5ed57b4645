# SPDX-License-Identifier: Apache-2.0
"""Trainings of a tiny GPT on one device, all from the same weights."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
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
    """Close the process groups of a run, so that the next may have another device.

    Under torchrun the world stays: the store of its agent opens a world only once.
    """
    try:
        yield
    finally:
        close_process_groups()
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()


def train_on(
    device: str, run: Run, *callbacks: pl.Callback, ckpt_path: Any = None, rows: int = 4, ranks: int = 1, **options: Any
) -> Numbers:
    """Train on one device, or under torchrun on several; return losses and gradient norms."""
    pl.seed_everything(1, verbose=False)
    numbers = Numbers()
    with one_process():
        trainer = make_trainer(run, ranks, numbers, *callbacks, accelerator=TRAINER_OF[device], **options)
        trainer.fit(make_filled(run), make_loader(run, rows), ckpt_path=ckpt_path)
    return numbers


def share_one_gpu() -> int:
    """Make this process of torchrun a node of its own, on GPU 0; return the number of nodes.

    NCCL refuses two ranks of one host on one GPU, and takes ``NCCL_HOSTID`` for the host's name.
    """
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank, "NCCL_HOSTID": f"rank{rank}"}
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    return int(os.environ["WORLD_SIZE"])


def main() -> None:
    """Under torchrun: train each run in the argument, and print its losses on rank 0."""
    runs = {name: Run(**fields) for name, fields in json.loads(sys.argv[1]).items()}
    torch.set_float32_matmul_precision("highest")
    world_size = int(os.environ["WORLD_SIZE"])
    ranks: dict[str, Any] = {"ranks": world_size}
    if DEVICE == "cuda" and torch.cuda.device_count() < world_size:
        ranks = {"num_nodes": share_one_gpu()}
    for name, run in runs.items():
        losses = train_on(DEVICE, run, **ranks).losses
        if os.environ["RANK"] == "0":
            print(f"losses {name} {json.dumps(losses)}", flush=True)


if __name__ == "__main__":
    main()
