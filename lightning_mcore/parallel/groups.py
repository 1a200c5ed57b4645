# SPDX-License-Identifier: Apache-2.0
"""Megatron's process groups: opened and closed here, nowhere else.

megatron-core keeps its groups in module globals (``megatron.core.parallel_state``). Only this file calls
``initialize_model_parallel`` and ``destroy_model_parallel``, so that a second ``fit`` with another layout never uses
the groups of the first. The default process group must already exist: Lightning makes it, or
:func:`open_single_process` for a module that runs Megatron layers in one process without it.
"""

import contextlib
import gc
import hashlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.parallel.consensus import all_gather_object, all_true, control_group, default_timeout
from lightning_mcore.parallel.context import segment_widths
from lightning_mcore.parallel.random_state import (
    RandomState,
    put_common,
    seed_common,
    seed_of_stage,
    seed_stage,
    take_common,
)

Axis = Literal["tp", "pp", "cp", "tp_cp", "dp", "dp_cp", "ep", "experts", "expert_tp", "expert_dp", "model"]

# In Megatron's default order tp-cp-ep-dp-pp, 8 ranks with TP=2 and PP=2: rank 0 shares "tp" with rank 1, "dp" with rank
# 2, "pp" with rank 4, and "model" with ranks 1, 4 and 5.
_GROUP_OF_AXIS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "tp_cp": parallel_state.get_tensor_and_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "ep": parallel_state.get_expert_model_parallel_group,
    "experts": parallel_state.get_expert_tensor_and_model_parallel_group,
    "expert_tp": parallel_state.get_expert_tensor_parallel_group,
    "expert_dp": parallel_state.get_expert_data_parallel_group,
    "model": parallel_state.get_model_parallel_group,
}


@dataclass
class _Opened:
    """What the open groups were made for; ``layout`` and ``arguments`` are None without open groups."""

    layout: ParallelLayout | None = None
    arguments: Mapping[str, Any] | None = None  # of initialize_model_parallel
    world: Callable[[], Any] = lambda: None  # returns the default group while it exists
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # models that may run again
    seed: int = 0
    building: RandomState | None = None  # for the run's next model; None before the first one
    segments: dict[int, dist.ProcessGroup] = field(default_factory=dict)  # of context-parallel ranks, by size
    copy: dist.ProcessGroup | None = None  # gloo group of this model copy; None for one rank, or the whole world
    peers: dist.ProcessGroup | None = None  # gloo group of the data-parallel group; None until it is asked for


_opened = _Opened()
_replaced: list[_Opened] = []


def open_process_groups(
    layout: ParallelLayout, seed: int, timeout: timedelta, options: Mapping[str, Any] | None = None
) -> None:
    """Open Megatron's groups for ``layout`` over the whole world, and seed its random number tracker.

    Collective: every rank of the default group calls it with the same arguments. Like the default group, the groups
    outlive the run. A second run with the same layout and options reuses them; any other run replaces them. The state
    of the CPU's generator does not change. ``seed`` is for weights and for dropout in tensor-parallel layers,
    ``timeout`` for these groups' collectives, ``options`` for ``initialize_model_parallel``. RuntimeError without a
    default group.
    """
    if not dist.is_initialized():
        raise RuntimeError("Megatron's process groups need that of torch.distributed; call init_process_group() first")
    arguments = {
        "create_gloo_process_groups": False,
        "distributed_timeout_minutes": max(1, math.ceil(timeout.total_seconds() / 60)),
        **(options or {}),
    }
    ours = _opened.layout == layout and _opened.arguments == arguments and _opened.world() is dist.group.WORLD
    if not (process_groups_are_open() and ours):
        if _opened.users or _replaced:
            gc.collect()  # a trainer and its model refer to each other
        close_process_groups()
        _destroy_unused_groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
            **arguments,
        )
        world: Any = dist.group.WORLD
        _opened.layout, _opened.arguments, _opened.world = layout, arguments, weakref.ref(world)
        _opened.groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
        _opened.copy = _open_copy_group(layout, timeout)
        _opened.segments = _open_context_segments(layout, timeout)
        _opened.groups += [*([] if _opened.copy is None else [_opened.copy]), *_opened.segments.values()]
    _opened.seed, _opened.building = seed, None
    seed_stage(seed)


def close_process_groups() -> None:
    """Let go of Megatron's groups, which the next :func:`open_process_groups` destroys."""
    global _opened
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if _opened.groups:
        _replaced.append(_opened)
        for kind in (RotaryEmbedding, YarnRotaryEmbedding):
            kind.forward.cache_clear()  # of the last 32 embeddings, which keep their groups
    _opened = _Opened()


def _destroy_unused_groups() -> None:
    """Destroy replaced groups that no existing model of any rank was built with; collective."""
    # NCCL destroys a communicator on all its ranks or waits for them, so all ranks must agree.
    for opened in list(_replaced):
        exists = opened.world() is not None and opened.world() is dist.group.WORLD
        if not exists or all_true(not opened.users):
            _replaced.remove(opened)
            for group in opened.groups if exists else ():
                with contextlib.suppress(ValueError):  # Megatron has already destroyed gloo groups
                    dist.destroy_process_group(group)


def keep_groups_for(model: object) -> None:
    """Keep the open groups as long as ``model`` exists, which was built with them."""
    _opened.users.add(model)


def process_groups_are_open() -> bool:
    """Return whether Megatron's groups exist and belong to the current default process group."""
    return dist.is_available() and dist.is_initialized() and parallel_state.is_initialized()


def open_single_process() -> bool:
    """Make a process group of one rank if there is none, and return whether; the caller must close it."""
    if dist.is_initialized():
        return False
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True


def is_spread_expert(parameter: Tensor) -> bool:
    """Return whether a parameter is of experts that ranks share; Megatron marks it with ``allreduce=False``."""
    return not getattr(parameter, "allreduce", True)


def replicas_of(parameter: Tensor) -> dist.ProcessGroup:
    """Return the group of ranks that hold the same parameter."""
    return process_group("expert_dp" if is_spread_expert(parameter) else "dp_cp")


def copies_share_experts() -> bool:
    """Return whether ranks that share experts belong to different model copies, which read different batches."""
    return process_group("tp_cp").size() % process_group("experts").size() != 0


def process_group(axis: Axis) -> dist.ProcessGroup:
    """Return this rank's group along ``axis``; RuntimeError if the groups are not open.

    ``dp_cp`` joins data and context parallelism, ``model`` tensor and pipeline parallelism. ``experts`` has the ranks
    that share a stage's experts, ``expert_dp`` those that hold the same ones.
    """
    if not process_groups_are_open():
        raise RuntimeError(
            "Megatron's process groups are not open; they exist only while the trainer runs or inside"
            " `with single_process():`"
        )
    group: dist.ProcessGroup = _GROUP_OF_AXIS[axis]()
    return group


def _open_copy_group(layout: ParallelLayout, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a gloo group of this model copy's ranks; None if the copy is one rank, or the whole world."""
    world_size = dist.get_world_size()
    if layout.model_parallel_size in (1, world_size):
        return None
    copies: list[list[int]] = [[] for _ in range(layout.data_parallel_size(world_size))]
    for rank in range(world_size):
        copies[layout.coordinates(rank, world_size).data_parallel_rank].append(rank)
    mine = None
    # Every rank takes part in making every group, because torch numbers them.
    for ranks in copies:
        group = dist.new_group(ranks, timeout, "fake" if dist.get_backend() == "fake" else "gloo")
        mine = group if dist.get_rank() in ranks else mine
    return mine


def _open_context_segments(layout: ParallelLayout, timeout: timedelta) -> dict[int, dist.ProcessGroup]:
    """Return this rank's groups of some neighbouring context-parallel ranks, by size, with ``hybrid_context_parallel``.

    With eight ranks, rank 5 belongs to the groups 4 5 6 7 and 4 5.
    """
    widths = segment_widths(layout.context_parallel_size)[1:-1] if layout.hybrid_context_parallel else []
    world_size, mine, lines = dist.get_world_size(), {}, defaultdict[tuple[int, ...], list[int]](list)
    for rank in range(world_size if widths else 0):
        place = layout.coordinates(rank, world_size)
        others = (place.tensor_model_parallel_rank, place.pipeline_model_parallel_rank, place.data_parallel_rank)
        lines[others].append(rank)
    # Every rank takes part in making every group, because torch numbers them.
    for width, line in product(widths, lines.values()):
        for first in range(0, len(line), width):
            ranks = line[first : first + width]
            group = dist.new_group(ranks, timeout)
            if dist.get_rank() in ranks:
                mine[width] = group
    return mine


def context_segment(size: int) -> dist.ProcessGroup | None:
    """Return the group of ``size`` neighbouring context-parallel ranks that this rank is in; None for one."""
    return None if size == 1 else _opened.segments[size]


def model_copy_group() -> dist.ProcessGroup:
    """Return a gloo group of this model copy's ranks, which read the same batches; RuntimeError if it is not open."""
    is_world = process_group("dp").size() == 1
    group = control_group() if is_world else _opened.copy
    assert group is not None
    return group


def data_parallel_hosts() -> dist.ProcessGroup:
    """Return a gloo group of this rank's data-parallel ranks, for numbers on their hosts; collective over the world.

    Only the first call makes a group, and only if the data-parallel group is not of gloo itself.
    """
    group = process_group("dp")
    if dist.get_backend(group) == "gloo":
        return group
    if _opened.peers is None:
        # Every rank takes part in making every group, because torch numbers them.
        for ranks in sorted({tuple(each) for each in all_gather_object(dist.get_process_group_ranks(group))}):
            made = dist.new_group(list(ranks), default_timeout(), backend="gloo")
            _opened.peers = made if dist.get_rank() in ranks else _opened.peers
        assert _opened.peers is not None
        _opened.groups.append(_opened.peers)
    return _opened.peers


def any_of_copy(own: bool) -> bool:
    """Return whether ``own`` is true on some rank of this model copy; collective over them, on the host."""
    if process_group("dp").size() == dist.get_world_size():
        return own
    flag = torch.tensor([int(own)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=model_copy_group())
    return bool(flag.item())


def collectives_issued() -> dict[str, int]:
    """Return how many collectives this rank has issued in each of its groups of several ranks, by group name.

    Pipeline groups are not counted, because their stages also send to each other. ``rank_watch`` compares the counts.
    """
    if not process_groups_are_open():
        return {}
    axes: tuple[Axis, ...] = ("tp", "cp", "dp", "dp_cp", "ep", "expert_dp")
    found = [*map(process_group, axes), *([] if _opened.copy is None else [_opened.copy]), *_opened.segments.values()]
    groups = [group for group in found if group.size() > 1 and group is not dist.group.WORLD]
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}  # type: ignore[attr-defined]


def pipeline_stage(vp_stage: int | None) -> tuple[bool, bool]:
    """Return ``(is_first, is_last)`` for this rank's chunk ``vp_stage``."""
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )


def generator_of(name: str) -> torch.Generator:
    """Return a CPU generator that depends on the run's seed and on ``name``, and not on the layout."""
    digest = hashlib.sha256(f"{_opened.seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


def align_random_state() -> None:
    """Give every rank of a model copy its first rank's random state: python, numpy and torch; collective."""
    # Pipeline stages draw different numbers of initial weights, but samplers must draw the same ones on all of them.
    for axis in ("tp", "cp", "pp"):
        group = process_group(axis)
        if group.size() == 1:
            continue
        state = [take_common()]
        dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
        put_common(state[0])


class _OnDevice(NamedTuple):
    """A tensor that is sent from device to device."""

    shape: torch.Size
    dtype: torch.dtype


def from_last_stage(value: Any, device: torch.device) -> Any:
    """Return the last pipeline stage's value on every stage; collective over the pipeline.

    Tensors on ``device``, which is this rank's, are sent from device to device, and everything else is pickled and sent
    from host to host. So no host waits for its device.
    """
    # {"sum": two fp32 numbers, "count": 3} is sent as {"sum": _OnDevice([2], fp32), "count": 3} and 8 bytes.
    group = process_group("pp")
    source = dist.get_global_rank(group, group.size() - 1)
    is_source = dist.get_rank() == source
    tensors: list[Tensor] = []

    def take_out(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        if tensor.device.type != device.type or tensor.layout != torch.strided:
            return tensor.cpu()
        tensors.append(tensor.contiguous())
        return _OnDevice(tensor.shape, tensor.dtype)

    def put_in(sent: _OnDevice) -> Tensor:
        tensors.append(torch.empty(sent.shape, dtype=sent.dtype, device=device))
        return tensors[-1]

    outline = tell_stages(apply_to_collection(value, Tensor, take_out) if is_source else None)
    received = value if is_source else apply_to_collection(outline, _OnDevice, put_in)
    for tensor in tensors:
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=source, group=group)  # gloo does not send every dtype
    return received


def tell_stages(value: Any) -> Any:
    """Return the last pipeline stage's value, which is pickled, on every stage; collective, from host to host."""
    group, box = process_group("pp"), [value]
    *others, source = dist.get_process_group_ranks(group)
    if dist.get_rank() == source:
        for rank in others:
            dist.send_object_list(box, rank, control_group())
    else:
        dist.recv_object_list(box, source, control_group())
    return box[0]


@contextlib.contextmanager
def random_state_of_build() -> Iterator[None]:
    """Let the common generators belong to this pipeline stage inside the ``with`` block, without lasting effect."""
    # Routers and the user's own layers draw weights from the default generator, which Megatron-LM seeds for each stage.
    # On the CPU it is also the generator of the data, which must be equal on all stages, so the state is kept apart.
    common = take_common()
    if _opened.building is None:
        seed_common(seed_of_stage(_opened.seed))
    else:
        put_common(_opened.building)
    try:
        yield
    finally:
        _opened.building = take_common()
        put_common(common)


@contextlib.contextmanager
def random_state_of_stage(number: int | None) -> Iterator[None]:
    """Let each pipeline stage draw its own random numbers inside the ``with`` block, without lasting effect.

    ``number`` tells apart blocks that begin with the same common state; None changes the state, which does it too.
    """
    # Stages draw different numbers (dropout on the CPU, code after self.model). If that changed the common state,
    # inputs and labels would soon come from different samples, or from others than without stages. Data does not use
    # CUDA's generators.
    group = process_group("pp")
    if group.size() == 1:
        yield
        return
    if number is None:
        number = int(torch.randint(2**31, ()))
    common = take_common()
    seed_common((int(torch.randint(2**31, ())) + number * group.size() + group.rank()) % 2**31)
    try:
        yield
    finally:
        put_common(common)
