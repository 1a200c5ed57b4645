# SPDX-License-Identifier: Apache-2.0
"""After a step with ``overlap_param_gather``, parameters are gathered once for all that read them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from tests.support.ranks import on_ranks
from tests.support.toy import OVERLAPPED, StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed


class Watched(pl.Callback):
    """Adds a forward hook when training starts, and keeps the order of hooks after the first step and at the end."""

    def __init__(self) -> None:
        self.orders: list[list[int]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.layer: Any = next(module for module in pl_module.modules() if isinstance(module, torch.nn.Linear))
        self.layer.register_forward_pre_hook(lambda *_: None)

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == 1:  # a checkpoint follows
            self.orders.append([id(hook) for hook in self.layer._forward_pre_hooks.values()])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.orders.append([id(hook) for hook in self.layer._forward_pre_hooks.values()])


@on_ranks(2)
def test_a_step_is_gathered_once_and_hooks_keep_their_order(tmp_path: Any) -> None:
    watched, gathers = Watched(), []
    start = _ParamAndGradBucketGroup.start_param_sync

    def counted(group: Any, force_sync: bool = False) -> None:
        if force_sync and group.param_gather_handle is None:
            gathers.append(group)
        start(group, force_sync)

    _ParamAndGradBucketGroup.start_param_sync = counted
    callbacks = [watched, ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)]
    trainer = make_trainer(OVERLAPPED, max_steps=3, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(StagedNet(), loader(32, 4))
    _ParamAndGradBucketGroup.start_param_sync = start
    before, after = watched.orders
    assert len(before) == 2
    assert before == after
    assert len(gathers) // len({id(group) for group in gathers}) == 3  # in each step, after which it is saved
