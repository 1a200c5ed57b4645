# SPDX-License-Identifier: Apache-2.0
"""Who writes what: the plan that all ranks agree on before they write a sharded checkpoint.

A *shard* is what a rank holds: its part of a tensor, or an object (Megatron's ShardedTensor and ShardedObject). A
*description* is a shard without its data. *Replicas* are equal shards on several ranks. A *piece* is what a rank
writes: one tensor shard, or all objects of one name. Example: two data-parallel ranks hold the weights ``a`` and ``b``,
one half each of the optimizer's ``m``, and a state of their own.

    rank 0 holds  a, b, m[0:4], rank_state 0     and writes  a, m[0:4], rank_state 0
    rank 1 holds  a, b, m[4:8], rank_state 1     and writes  b, m[4:8], rank_state 1

The plan refers to shards by their position in the rank's list, so the next save can use it with new values.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from lightning_mcore.checkpoint.writer import Piece, object_bytes
from lightning_mcore.parallel.consensus import all_true, combine_on_rank0, run_on_all_ranks


@dataclass(frozen=True)
class _Plan:
    """Who writes what, without the values."""

    made_for: tuple[Any, ...]  # the groups, and this rank's shards without their data
    assignments: dict[MetadataIndex, list[int]]  # for each piece that this rank writes, the positions of its shards
    metadata: Metadata | None  # of all ranks' pieces; on rank 0 only


class ShardPlanner:
    """Plans saves, and keeps the last plan.

    Megatron plans well, but checks the plan only on rank 0, and after an error there the other ranks wait forever. So
    this calls Megatron's functions in an order in which one rank's failure is raised on all.
    """

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def plan(
        self, sharded_state: dict[str, Any], replica_group: dist.ProcessGroup
    ) -> tuple[Sequence[Piece], Metadata | None]:
        """Agree with all ranks on who writes what; collective over the world.

        The ranks of ``replica_group`` hold replicas of each other's tensors and divide the writing. Returns the pieces
        that this rank writes (in ``interop/importing.py`` each is built when it is accessed), and on rank 0 the
        metadata of all ranks' pieces. Raises ``ValueError`` if the shards of all ranks do not form complete tensors.
        """
        shards, descriptions = run_on_all_ranks(lambda: _list_shards(sharded_state))
        made_for = (dist.group.WORLD, replica_group, descriptions)
        # Planning takes longer than copying the pieces, because all ranks exchange descriptions. Within a run only the
        # values change, so the last plan nearly always fits. If it fits on some ranks only, all plan again.
        still_fits = self._plan is not None and self._plan.made_for == made_for
        if not all_true(still_fits):
            assignments, metadata = _agree(shards, descriptions, replica_group)
            self._plan = _Plan(made_for, assignments, metadata)
        plan = self._plan
        assert plan is not None
        pieces = run_on_all_ranks(
            lambda: [_piece(index, shards, positions) for index, positions in plan.assignments.items()]
        )
        return pieces, plan.metadata


def _list_shards(sharded_state: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return this rank's shards, and their descriptions: the same without data."""
    shards = list(nested_values(save_preprocess(sharded_state, validate_access_integrity=False)[0]))
    return shards, [shard.without_data() for shard in shards]


def _agree(
    shards: list[Any], descriptions: list[Any], replica_group: dist.ProcessGroup
) -> tuple[dict[MetadataIndex, list[int]], Metadata | None]:
    """Return the assignments of this rank, and on rank 0 the metadata; collective over the world.

    Source: megatron-core 0.16.1 to 0.19.2, ``dist_checkpointing.save`` through ``FullyParallelSaveStrategyWrapper`` and
    ``TorchDistSaveShardedStrategy``.
    """
    combine_on_rank0(lambda: descriptions, _require_complete)
    # These set replica_id in ``shards``: 0, the main replica, on the rank that writes the tensor. Example: of four 1 GB
    # tensors that two ranks hold, each rank writes two.
    main_ranks = determine_main_replica_uniform_distribution(shards, replica_group)
    distribute_main_replicas_with_precomputed_distribution(shards, replica_group, main_ranks)
    positions = _main_positions(shards)
    # The planner keeps this rank's plan, and on rank 0 the metadata. That is not sent to the other ranks, because it
    # grows with their number.
    planner: Any = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    combine_on_rank0(lambda: _plan_locally(planner, shards, positions), lambda plans: _plan_globally(planner, plans))
    assignments = run_on_all_ranks(lambda: _assignments(planner.plan, positions))
    metadata = planner.metadata if dist.get_rank() == 0 else None
    return assignments, metadata


def _require_complete(descriptions_by_rank: list[list[Any]]) -> None:
    """Raise ``ValueError`` if shards are missing or overlap."""
    try:
        validate_sharding_integrity(descriptions_by_rank)
    except Exception as error:
        raise _incomplete(error) from error


def _main_positions(shards: list[Any]) -> dict[str, list[int]]:
    """Return the positions of the shards that this rank writes, by their name in the checkpoint."""
    positions: dict[str, list[int]] = defaultdict(list)
    for position, shard in enumerate(shards):
        if is_main_replica(shard.replica_id):
            name = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
            positions[name].append(position)
    return positions


def _plan_locally(planner: Any, shards: list[Any], positions: dict[str, list[int]]) -> SavePlan:
    """Return the plan of this rank's pieces, as torch describes them."""
    shards_by_name = {name: [shards[position] for position in found] for name, found in positions.items()}
    try:
        torch_state = mcore_to_pyt_state_dict(shards_by_name, is_loading=False)
    except CheckpointingException as error:
        raise ValueError(f"a piece of this rank cannot be saved: {error}") from error
    planner.set_up_planner(torch_state, is_coordinator=dist.get_rank() == 0)
    plan: SavePlan = planner.create_local_plan()
    return plan


def _plan_globally(planner: Any, local_plans: list[SavePlan]) -> None:
    """Check the plans of all ranks, and describe their pieces in ``planner.metadata``; on rank 0."""
    try:
        planner.create_global_plan(local_plans)
    except (ValueError, AssertionError) as error:
        raise _incomplete(error) from error


def _assignments(plan: SavePlan, positions: dict[str, list[int]]) -> dict[MetadataIndex, list[int]]:
    """Return the positions of the shards in each piece of this rank's plan."""
    # A tensor has an item for each shard, in the order of the positions. All objects of one name are one item.
    remaining = {name: iter(found) for name, found in positions.items()}
    assignments = {}
    for item in plan.items:
        left = remaining[item.index.fqn]
        assignments[item.index] = list(left) if item.type == WriteItemType.BYTE_IO else [next(left)]
    return assignments


def _piece(index: MetadataIndex, shards: list[Any], positions: list[int]) -> Piece:
    """Return the piece of the shards at these positions, with the values that they have now.

    Source: megatron-core 0.16.1 to 0.19.2, ``mcore_to_pyt_state_dict``, which also builds what only planning needs.
    """
    first = shards[positions[0]]
    if not isinstance(first, ShardedTensor):
        return Piece(index, object_bytes([shards[position].data for position in positions]))
    if first.data is None:
        raise ValueError(f"a piece of this rank cannot be saved: {first.key} has no data")
    shape = (1,) * first.prepend_axis_num + tuple(first.local_shape)
    return Piece(index, first.data.detach().reshape(shape))


def _incomplete(error: Exception) -> ValueError:
    return ValueError(f"the shards of all ranks do not form complete tensors: {error}")
