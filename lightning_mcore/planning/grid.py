# SPDX-License-Identifier: Apache-2.0
"""Compute which ranks share which group, and how a global batch is divided among them.

Megatron lays ranks out on two grids over the same pipeline stages. The dense grid has the axes tp, cp, dp, pp, the grid
of the experts etp, ep, edp, pp; the first axis varies fastest. A group along some axes holds the ranks that differ only
in these axes. ``plan`` shows the groups; none is opened here (``parallel/groups.py`` does that).

``parallel_state.RankGenerator`` of megatron-core 0.16.1 and 0.19.2, with the default order ``tp-cp-ep-dp-pp``, lists
all groups of a world to find one, which takes a second for 16,384 ranks; here one is computed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.text import counted
from lightning_mcore.config.value_checks import require_size

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
GROUPS: dict[str, tuple[str, ...]] = {
    name: tuple(name.split("_"))
    for name in (
        *("tp", "pp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_pp"),
        *("ep", "etp", "edp", "etp_ep", "etp_ep_pp"),
    )
}
"""The axes of each group; ``tp_pp`` is Megatron's model-parallel group."""


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a world, divided by a layout; ValueError if it does not divide the world."""

    layout: ParallelLayout  # sizes of the parallel axes
    world_size: int  # number of ranks

    def __post_init__(self) -> None:
        """Refuse a world that the layout does not divide."""
        self.layout.validate_world(self.world_size)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis of both grids."""
        layout = self.layout
        return {
            "tp": layout.tensor_model_parallel_size,
            "cp": layout.context_parallel_size,
            "dp": layout.data_parallel_size(self.world_size),
            "pp": layout.pipeline_model_parallel_size,
            "etp": layout.expert_tensor_size,
            "ep": layout.expert_model_parallel_size,
            "edp": layout.expert_data_parallel_size(self.world_size),
        }

    def size(self, group: str) -> int:
        """Return how many ranks a group has."""
        return math.prod(self.sizes[axis] for axis in GROUPS[group])

    def ranks(self, group: str, rank: int) -> list[int]:
        """Return the group of a rank, in ascending order, which is Megatron's.

        With tp=2 and dp=2, ranks 1 and 3 are a ``dp`` group: a step along dp is 2 ranks.
        """
        found, step = [rank], 1
        for axis in EXPERT if set(GROUPS[group]) & set(EXPERT[:3]) else DENSE:
            size = self.sizes[axis]
            if axis in GROUPS[group]:
                place = rank // step % size
                found = [other + (to - place) * step for other in found for to in range(size)]
            step *= size
        return sorted(found)

    def to_dict(self, rank: int = 0) -> dict[str, Any]:
        """Return sizes, and for each group its size, the number of such groups and the ranks of one, as plain data."""
        groups = {
            name: {
                "size": self.size(name),
                "groups": self.world_size // self.size(name),
                "ranks": ranks_text(self.ranks(name, rank)),
            }
            for name in GROUPS
        }
        return {"world_size": self.world_size, "sizes": dict(self.sizes), "groups_of_rank": rank, "groups": groups}


def ranks_text(ranks: list[int]) -> str:
    """Return ranks as short text: ``0 1 2 3``, or ``0 8 16 ... 16376`` for many."""
    shown = " ".join(map(str, ranks if len(ranks) <= 8 else ranks[:3]))
    return shown if len(ranks) <= 8 else f"{shown} ... {ranks[-1]}"


@dataclass(frozen=True)
class GlobalBatch:
    """The rows and tokens that one optimizer step reads."""

    micro_batch_size: int  # rows of a microbatch; the last of a DataLoader batch may be shorter
    num_microbatches: int  # microbatches of a step on each data-parallel rank
    data_parallel_size: int  # model copies that read different rows
    rows: int  # rows of a step on all ranks together
    seq_length: int  # tokens of a row
    expert_model_parallel_size: int = 1  # used only in the sentence
    is_assumed: bool = False  # whether the settings do not give the rows of a DataLoader batch

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.rows * self.seq_length

    @property
    def sentence(self) -> str:
        """How the batch is computed, such as ``micro batch 4 x 2 microbatches x data parallel 4 = 32 rows``."""
        product = self.micro_batch_size * self.num_microbatches * self.data_parallel_size
        shorter = "" if product == self.rows else " (the last microbatch of a DataLoader batch is shorter)"
        assumed = " (assumed: data.batch_size is not given)" if self.is_assumed else ""
        experts = "; experts do not lower dp" if self.expert_model_parallel_size > 1 else ""
        microbatches = counted(self.num_microbatches, "microbatch", "microbatches")
        return (
            f"micro batch {self.micro_batch_size} x {microbatches} x data parallel {self.data_parallel_size}"
            f" = {counted(self.rows, 'row')}{shorter}{assumed}{experts}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = ("micro_batch_size", "num_microbatches", "data_parallel_size", "rows", "seq_length", "tokens")
        return {**{name: getattr(self, name) for name in names}, "sentence": self.sentence}


def global_batch(
    strategy: Mapping[str, Any], trainer: Mapping[str, Any], batch_size: int, seq_length: int, dp: int
) -> GlobalBatch:
    """Compute the batch of a step as the strategy will split it.

    Raises TypeError or ValueError for a size that is not a positive int.
    """
    accumulated, micro = trainer.get("accumulate_grad_batches", 1), strategy.get("micro_batch_size")
    micro = batch_size if micro is None else micro
    sizes = {"batch_size": batch_size, "accumulate_grad_batches": accumulated, "micro_batch_size": micro}
    for name, size in sizes.items():
        require_size(name, size)
    micro = min(micro, batch_size)
    return GlobalBatch(
        micro_batch_size=micro,
        num_microbatches=accumulated * -(-batch_size // micro),
        data_parallel_size=dp,
        rows=batch_size * accumulated * dp,
        seq_length=seq_length,
        expert_model_parallel_size=strategy.get("expert_model_parallel_size") or 1,
    )
