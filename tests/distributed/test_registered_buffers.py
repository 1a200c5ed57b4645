# SPDX-License-Identifier: Apache-2.0
"""After a run, gradient buffers are emptied, but not those that NCCL has registered."""

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_mcore import MCoreStrategy
from tests.support.ranks import run_ranks
from tests.support.toy import StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed


class Registering(pl.Callback):
    """Marks the buffers as ``nccl_ub=True`` does on a GPU."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.buffers = [buffer for chunk in strategy.chunks.ddp for buffer in chunk.buffers]
        for buffer in self.buffers:
            buffer.nccl_ub = self.registers

    def __init__(self, registers: bool) -> None:
        self.registers = registers


def sizes(registers: bool) -> list[int]:
    callback = Registering(registers)
    make_trainer(MCoreStrategy(), max_steps=1, callbacks=[callback]).fit(StagedNet(), loader(8, 4))
    return [buffer.grad_data.untyped_storage().size() for buffer in callback.buffers]


def test_memory_that_nccl_has_registered_stays() -> None:
    [emptied], [kept] = run_ranks(1, sizes, False), run_ranks(1, sizes, True)
    assert emptied == [0]
    assert kept > [0]
