# SPDX-License-Identifier: Apache-2.0
"""Make ``ReduceLROnPlateau`` decide alike on every rank, whatever value each rank measured.

Lightning gives a plateau scheduler its own rank's monitored value. Without ``sync_dist=True`` that value differs
between model copies: they would lower the learning rate at different steps, and their weights would drift apart. So the
scheduler steps on the mean over the ranks. The strategy calls :func:`agree_on_plateaus` once it has the schedulers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_mcore.parallel.groups import process_group


def agree_on_plateaus(configs: Sequence[LRSchedulerConfig], device: torch.device) -> None:
    """Make each plateau scheduler step on the mean over the ranks; it stays an instance of its class."""
    for config in configs:
        scheduler = config.scheduler
        if not isinstance(scheduler, ReduceLROnPlateau):
            continue
        # The same scheduler comes again if a module is fitted twice.
        kind = vars(type(scheduler)).get("kind_of_the_user", type(scheduler))
        scheduler.__class__ = kind
        if process_group("dp_cp").size() > 1:
            # In a subclass, because a checkpoint saves the attributes of the instance.
            scheduler.__class__ = _stepping_on_mean(kind, bool(config.strict), config.monitor, device)
            config.strict = _Strict(config.strict, device)  # type: ignore[assignment]


class _Strict:
    """The ``strict`` of a scheduler's config; reading it on a rank without a value tells the other ranks.

    Source: ``_TrainingEpochLoop._update_learning_rates`` in lightning/pytorch/loops (2.6), the only place that reads
    it.
    """

    def __init__(self, strict: bool, device: torch.device) -> None:
        self._strict = bool(strict)
        self._device = device

    def __bool__(self) -> bool:
        # Lightning reads strict where the value is missing, and goes on; the other ranks wait in step() for this sum.
        _sum_over_ranks([0.0, 0.0], self._device)
        return self._strict

    def __eq__(self, other: object) -> bool:
        return self._strict == (other._strict if isinstance(other, _Strict) else other)

    def __repr__(self) -> str:
        return repr(self._strict)

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (self._strict,)  # a copy may be used in a process without other ranks


def _sum_over_ranks(numbers: list[float], device: torch.device) -> list[float]:
    total = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=process_group("dp_cp"))
    return list(total.tolist())


def _rebuilt(rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return rebuild(*arguments)  # pickle itself would compare this class with the saved object's


def _stepping_on_mean(
    kind: type[ReduceLROnPlateau], strict: bool, monitor: str | None, device: torch.device
) -> type[ReduceLROnPlateau]:
    """Return a subclass of the same name that steps on the mean over the ranks."""

    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        num_ranks = process_group("dp_cp").size()
        # Values 1.0, 2.0 and 6.0 on three ranks: the sum is [9.0, 3], and all step on 3.0. If the third logged nothing,
        # the sum is [3.0, 2], and no rank steps.
        total, num_values = _sum_over_ranks([float(metrics), 1.0], device)
        if num_values == num_ranks:
            kind.step(self, total / num_ranks, *args, **kwargs)
            return
        missing = f"{monitor!r}, which ReduceLROnPlateau monitors, was logged on {num_values:.0f} of {num_ranks} ranks"
        if strict:
            raise RuntimeError(f"{missing}; log it on every rank, or set strict=False to skip such a step")
        rank_zero_warn(f"{missing}; the learning rate does not change", category=RuntimeWarning)

    def reduce_ex(self: ReduceLROnPlateau, protocol: Any) -> Any:
        reduced: Any = kind.__reduce_ex__(self, protocol)
        rebuild, arguments, *state = reduced
        arguments = tuple(kind if argument is type(self) else argument for argument in arguments)
        return _rebuilt, (rebuild, arguments), *state

    return type(kind.__name__, (kind,), {"step": step, "__reduce_ex__": reduce_ex, "kind_of_the_user": kind})
