# SPDX-License-Identifier: Apache-2.0
"""``ReduceLROnPlateau`` decides alike on every rank, whatever each of them measured.

Lightning hands a plateau scheduler the monitored value of its own rank. Logged without ``sync_dist=True`` that value
differs from one model copy to the next; the copies would lower the learning rate at different steps, and their weights
drift apart. So the scheduler steps on the mean over the ranks. The strategy calls :func:`agree_on_plateaus` when
it has the schedulers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_mcore.process_groups import process_group


def agree_on_plateaus(configs: Sequence[LRSchedulerConfig], device: torch.device) -> None:
    """Make each plateau scheduler step on the mean over the ranks; it stays an instance of its class.

    Args:
        configs: What ``configure_optimizers`` returned.
        device: Of the strategy.
    """
    if process_group("dp_cp").size() == 1:
        return
    for config in configs:
        scheduler = config.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            kind = type(scheduler)
            # In a subclass, not on the instance, whose attributes are what a checkpoint holds.
            scheduler.__class__ = type(kind.__name__, (kind,), {"step": _step_on_mean(kind, device)})


def _step_on_mean(kind: type[ReduceLROnPlateau], device: torch.device) -> Callable[..., None]:
    def step(self: ReduceLROnPlateau, metrics: Any, epoch: int | None = None) -> None:
        group = process_group("dp_cp")
        mean = torch.as_tensor(metrics, dtype=torch.float64, device=device).clone()
        dist.all_reduce(mean, group=group)
        kind.step(self, (mean / group.size()).item(), epoch)

    return step
