# SPDX-License-Identifier: Apache-2.0
"""Decide which rank writes which piece of a sharded checkpoint; all ranks agree on the plan.

Megatron plans a save well: data-parallel copies share the work, and ``.metadata`` says where every piece belongs. But
it checks the plan only on rank 0, and after an error there the other ranks wait for ever. So :class:`ShardPlanner`
calls Megatron's functions in an order in which a failure on one rank is raised on all. To plan, all ranks exchange
descriptions of all their pieces, which takes longer than copying the pieces. Only the values change from one save of a
run to the next, so the planner keeps the last plan and only checks that it is still valid on every rank.

``save.py`` calls it, and ``writer.py`` writes the pieces.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from lightning_mcore.parallel.consensus import all_true, collect, on_all


@dataclass(frozen=True)
class Piece:
    """A part of one tensor or object that this rank writes.

    Args:
        index: Its name and place, as in the metadata.
        content: A tensor on any device, or the bytes of an object.
    """

    index: MetadataIndex
    content: Tensor | bytes


@dataclass(frozen=True)
class ShardPlan:
    """The pieces that one rank writes.

    Args:
        pieces: The pieces that this rank writes; a piece may be built only when it is accessed.
        metadata: The metadata of all ranks' pieces; on rank 0 only.
    """

    pieces: Sequence[Piece]
    metadata: Metadata | None


@dataclass(frozen=True)
class _Outline:
    """A plan without values.

    Args:
        groups: The groups of ranks that it was made for: the world, and the copies that divide the writing.
        described: All pieces that this rank holds.
        written: The pieces that it writes, as indices into ``described``: one for a tensor, several for an object.
        metadata: The metadata of all ranks' pieces; on rank 0 only.
    """

    groups: tuple[Any, Any]
    described: list[Any]
    written: list[tuple[MetadataIndex, list[int]]]
    metadata: Metadata | None


class ShardPlanner:
    """Plans saves, and keeps the last plan."""

    def __init__(self) -> None:
        self._kept: _Outline | None = None

    def plan(self, sharded_state: dict[str, Any], copies: dist.ProcessGroup) -> ShardPlan:
        """Agree with all ranks on who writes what; collective over the world.

        Source: megatron-core 0.16.1 to 0.19.2, ``dist_checkpointing.save`` through ``FullyParallelSaveStrategyWrapper``
        and ``TorchDistSaveShardedStrategy``.

        Args:
            sharded_state: This rank's sharded tensors and objects, nested in any way; factories in it are applied.
            copies: The group of ranks that hold copies of each other's tensors and divide the writing.

        Raises:
            ValueError: The pieces of all ranks do not form whole tensors.
        """
        own, described = on_all(lambda: _describe(sharded_state))
        held: list[Any] = list(nested_values(own))  # before the calls below change which copy is the main one
        groups, kept = (dist.group.WORLD, copies), self._kept
        if not all_true(kept is not None and kept.groups == groups and kept.described == described):
            kept = _Outline(groups, described, *_agree(own, held, described, copies))
        assert kept is not None
        outline = kept
        pieces = on_all(
            lambda: [Piece(index, _content([held[place] for place in places])) for index, places in outline.written]
        )
        self._kept = outline
        return ShardPlan(pieces, outline.metadata)


def _describe(sharded_state: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    own: dict[str, Any] = save_preprocess(sharded_state, False)[0]
    return own, [piece.without_data() for piece in nested_values(own)]


def _agree(
    own: dict[str, Any], held: list[Any], described: list[Any], copies: dist.ProcessGroup
) -> tuple[list[tuple[MetadataIndex, list[int]]], Metadata | None]:
    """Return the pieces that this rank writes, and on rank 0 the metadata of all pieces; collective over the world."""
    collect(lambda: described, _validate)
    shares = determine_main_replica_uniform_distribution(own, copies)
    distribute_main_replicas_with_precomputed_distribution(own, copies, shares)
    planner: Any = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    written: list[tuple[MetadataIndex, list[int]]] = []

    def plan_own() -> SavePlan:
        places = {id(piece): place for place, piece in enumerate(held)}
        by_name = _replace_state_dict_keys_with_sharded_keys(own, True)[0]
        left = {name: [places[id(piece)] for piece in pieces] for name, pieces in by_name.items()}
        try:
            state = mcore_to_pyt_state_dict(by_name, False)
        except CheckpointingException as error:
            raise ValueError(f"a piece of this rank cannot be saved: {error}") from error
        planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
        plan: SavePlan = planner.create_local_plan()
        for item in plan.items:
            places_of_name = left[item.index.fqn]
            count = len(places_of_name) if item.type == WriteItemType.BYTE_IO else 1
            written.append((item.index, places_of_name[:count]))
            del places_of_name[:count]
        return plan

    def plan_all(plans: list[SavePlan]) -> Metadata:
        try:
            metadata: Metadata = planner.create_global_plan(plans)[1]
        except (ValueError, AssertionError) as error:
            raise _not_whole(error) from error
        return metadata

    metadata = collect(plan_own, plan_all)
    return written, metadata


def _content(pieces: Sequence[Any]) -> Tensor | bytes:
    """Return the tensor of a piece, or the bytes of objects.

    Source: megatron-core 0.16.1, ``mcore_to_pyt_state_dict``.
    """
    first = pieces[0]
    if isinstance(first, ShardedTensor):
        if first.data is None:
            raise ValueError(f"a piece of this rank cannot be saved: {first.key} has no data")
        tensor: Tensor = first.data.detach()
        return tensor.reshape((1,) * first.prepend_axis_num + tuple(first.local_shape))
    stream = io.BytesIO()
    torch.save([piece.data for piece in pieces], stream)
    return stream.getvalue()


def _validate(all_pieces: list[list[Any]]) -> None:
    try:
        validate_sharding_integrity(all_pieces)
    except Exception as error:
        raise _not_whole(error) from error


def _not_whole(error: Exception) -> ValueError:
    return ValueError(f"the pieces of all ranks do not form whole tensors: {error}")
