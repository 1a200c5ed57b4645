# SPDX-License-Identifier: Apache-2.0
"""Megatron's process groups: opened and closed here, nowhere else.

megatron-core keeps its groups in module globals (``megatron.core.parallel_state``). This file is the one place that
calls ``initialize_model_parallel`` and ``destroy_model_parallel``, so that a second ``fit`` with another layout never
meets the groups of the first. The default process group must exist already: Lightning makes it, or
:func:`open_single_process` does for a module that runs Megatron layers in one process without it.

Ranks are laid out in Megatron's default order ``tp-cp-ep-dp-pp``: tensor-parallel ranks are neighbours, pipeline stages
farthest apart.
"""

import contextlib
import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from lightning_mcore.config.layout import ParallelLayout

Axis = Literal["tp", "pp", "cp", "dp", "dp_cp", "ep", "expert_dp", "model"]

_GROUP_OF_AXIS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "ep": parallel_state.get_expert_model_parallel_group,
    "expert_dp": parallel_state.get_expert_data_parallel_group,
    "model": parallel_state.get_model_parallel_group,
}


@dataclass
class _Opened:
    """What the open groups were made for; None while there are none.

    Attributes:
        layout: The parallel sizes.
        arguments: Those of ``initialize_model_parallel`` besides.
        world: Returns the default group, while it exists.
        groups: All of them that this rank is in.
        users: What holds some of them, and may be used again.
    """

    layout: ParallelLayout | None = None
    arguments: Mapping[str, Any] | None = None
    world: Callable[[], Any] = lambda: None
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


_opened = _Opened()
_replaced: list[_Opened] = []  # whose groups a living model may still use


def open_process_groups(
    layout: ParallelLayout, seed: int, timeout: timedelta, options: Mapping[str, Any] | None = None
) -> None:
    """Open Megatron's groups for ``layout`` over the whole world and seed its random number tracker.

    Collective: every rank of the default group calls it with the same arguments. Like the default group, the groups
    outlive the run: a second run with the same layout and options takes them over, another one replaces them. The state
    of the CPU's own generator is left as it was.

    Args:
        layout: Sizes of the parallel axes; must divide the world (``layout.validate_world``).
        seed: Seed of Megatron's tracker, which draws the weights of tensor-parallel layers and their dropout.
        timeout: How long a collective of these groups may wait, in whole minutes, rounded up.
        options: More arguments of ``initialize_model_parallel``.

    Raises:
        RuntimeError: The default process group is not initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError("the default process group of torch.distributed must be open before Megatron's groups")
    arguments = {
        "create_gloo_process_groups": False,
        "distributed_timeout_minutes": max(1, math.ceil(timeout.total_seconds() / 60)),
        **(options or {}),
    }
    ours = _opened.layout == layout and _opened.arguments == arguments and _opened.world() is dist.group.WORLD
    if not (process_groups_are_open() and ours):
        if _opened.users or _replaced:
            gc.collect()  # a trainer and its model, which refer to each other, keep their groups
        close_process_groups()
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
    _seed_tracker(seed)


def close_process_groups() -> None:
    """Forget Megatron's groups; nothing happens where there are none. The default process group stays.

    They are closed, but for those that a model was built with: it may be used again, and they go when it is gone.
    """
    global _opened
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if _opened.groups:
        _replaced.append(_opened)
        for kind in (RotaryEmbedding, YarnRotaryEmbedding):  # Megatron keeps the last 32 of them, and so their groups
            kind.forward.cache_clear()
    _opened = _Opened()
    for opened in list(_replaced):
        exists = opened.world() is not None and opened.world() is dist.group.WORLD  # else they went with it
        if not (exists and opened.users):
            _replaced.remove(opened)
            for group in opened.groups if exists else ():
                with contextlib.suppress(ValueError):  # Megatron has destroyed the gloo groups among them itself
                    dist.destroy_process_group(group)


def used_by(model: object) -> None:
    """Keep the groups that are open now as long as ``model`` lives, which was built with them."""
    _opened.users.add(model)


def process_groups_are_open() -> bool:
    """Whether Megatron's groups exist and belong to the default process group of this moment."""
    return dist.is_available() and dist.is_initialized() and parallel_state.is_initialized()


def open_single_process() -> bool:
    """Make a default process group of one rank where none exists, so that Megatron layers run in a plain process.

    Returns:
        Whether one was made; the caller then closes it with ``torch.distributed.destroy_process_group``.
    """
    if dist.is_initialized():
        return False
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True


def process_group(axis: Axis) -> dist.ProcessGroup:
    """Return this rank's group along ``axis``.

    Args:
        axis: ``dp_cp`` joins data and context parallelism, ``model`` tensor and pipeline parallelism; ``expert_dp`` are
            the ranks that hold the same experts.

    Raises:
        RuntimeError: The groups are not open.
    """
    if not process_groups_are_open():
        raise RuntimeError("Megatron's process groups are not open; they exist only while the trainer runs")
    group: dist.ProcessGroup = _GROUP_OF_AXIS[axis]()
    return group


def collectives_issued() -> dict[str, int]:
    """Return how many collectives this rank has issued in its groups of several ranks, by the name of the group.

    Not in those of a pipeline, whose stages send to each other besides.
    """
    if not process_groups_are_open():
        return {}
    axes: tuple[Axis, ...] = ("tp", "cp", "dp", "dp_cp", "ep", "expert_dp")
    groups = [group for group in map(process_group, axes) if group.size() > 1 and group is not dist.group.WORLD]
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}  # type: ignore[attr-defined]


def pipeline_stage(vp_stage: int | None) -> tuple[bool, bool]:
    """Return ``(is_first, is_last)`` of the chunk ``vp_stage`` that this rank owns."""
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )


def _seed_tracker(seed: int) -> None:
    state = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.set_rng_state(state)


def align_random_state() -> None:
    """Give every rank of one model copy the random state of its first rank: python, numpy and torch.

    Pipeline stages that have drawn different numbers of initial weights would otherwise draw different random numbers
    in a dataset or a sampler, and see different batches. Collective over the model-parallel ranks.
    """
    for axis in ("tp", "cp", "pp"):
        group = process_group(axis)
        if group.size() == 1:
            continue
        state = [_random_state()]
        dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
        _set_random_state(state[0])


def from_last_stage(value: Any, device: torch.device) -> Any:
    """Return what the last pipeline stage has, on every stage; collective over the pipeline.

    Its tensors travel and arrive on the CPU: unpickled as they are, they would lie on the device of the sender.

    Args:
        value: Anything that pickles; it counts on the last stage only.
        device: Device of this rank, for the transport.
    """
    group = process_group("pp")
    box = [apply_to_collection(value, torch.Tensor, lambda tensor: tensor.detach().cpu())]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, group.size() - 1), group=group, device=device)
    return box[0]


@contextlib.contextmanager
def random_state_of_stage() -> Iterator[None]:
    """Let each pipeline stage draw random numbers of its own inside the ``with`` block, without lasting effect.

    A stage draws as often as its part of the model asks for it (dropout on the CPU, what stands behind ``self.model``
    in a step). If that moved the common state, datasets and samplers of the stages would soon draw different numbers,
    and inputs and labels belong to different samples. CUDA's generators are left as they are: data is not drawn there.
    """
    group = process_group("pp")
    if group.size() == 1:
        yield
        return
    seed = int(torch.randint(2**31, ())) + group.rank()  # the one draw from the common state, the same on every stage
    common = _random_state()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        _set_random_state(common)


def _random_state() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _set_random_state(state: tuple[Any, Any, torch.Tensor]) -> None:
    python_state, numpy_state, torch_state = state
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
