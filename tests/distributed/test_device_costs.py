# SPDX-License-Identifier: Apache-2.0
"""What would cost a GPU time or memory, counted on the CPU: reads of tensors in a step, and buffers after a run."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.ranks import on_ranks
from tests.te.runs import Run, make_loader, make_model, make_trainer

pytestmark = pytest.mark.distributed

READS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.nonzero, torch.equal}
RUN = Run(impl="local", steps=3)


ON_THE_HOST = ("torch/optim", "layers/inputs.py")  # counters of steps, and batches before they are moved
OF_LIGHTNING = ("lightning/fabric", "lightning/pytorch")  # a progress bar's numbers, of each batch


class Reads(TorchFunctionMode):
    """Counts calls that need the value of a tensor, for which the host would wait, by the package and Megatron."""

    count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS:
            frame: Any = sys._getframe(1)
            while "torch/overrides" in frame.f_code.co_filename:
                frame = frame.f_back
            self.count += not any(part in frame.f_code.co_filename for part in (*ON_THE_HOST, *OF_LIGHTNING))
        return func(*args, **(kwargs or {}))


class InTheLastStep(pl.Callback):
    """Counts the reads of the last step, from its first batch to the end of its last."""

    def __init__(self) -> None:
        self.reads = Reads()
        self.open = False

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == RUN.steps - 1 and not self.open:
            self.reads.__enter__()
            self.open = True

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == RUN.steps:
            self.reads.__exit__(None, None, None)


def reads_of_a_step(microbatches: int) -> int:
    """Return the reads of an optimizer step."""
    seen = InTheLastStep()
    trainer = make_trainer(replace(RUN, layout={"micro_batch_size": 2}), 1, seen, accumulate_grad_batches=microbatches)
    trainer.fit(make_model(RUN), make_loader(RUN))
    return seen.reads.count


@on_ranks(1, timeout=90)
def test_reads_of_the_device_do_not_grow_with_the_microbatches() -> None:
    few, many = reads_of_a_step(1), reads_of_a_step(4)
    assert few == many == 3  # the gradient norm, twice on a CPU, and what was logged


@on_ranks(1, timeout=90)
def test_a_run_leaves_no_gradient_buffers_and_can_still_be_saved(tmp_path: Path) -> None:
    buffers: list[Tensor] = []

    def keep(trainer: Any, _: Any) -> None:
        buffers.extend(buffer.grad_data for chunk in trainer.strategy.chunks.ddp for buffer in chunk.buffers)

    run = replace(RUN, precision="bf16-mixed", layout={"use_distributed_optimizer": True})
    trainer = make_trainer(run, 1, pl.callbacks.LambdaCallback(on_train_start=keep))
    trainer.fit(make_model(run), make_loader(run))
    assert buffers
    assert not any(buffer.untyped_storage().nbytes() for buffer in buffers)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    again = make_trainer(replace(run, steps=5), 1)
    again.fit(make_model(run), make_loader(run), ckpt_path=tmp_path / "after.ckpt")
    assert again.global_step == 5
