# SPDX-License-Identifier: Apache-2.0
"""A process that believes it is one CUDA rank of a large run.

:func:`fake_cuda` replaces the names of ``torch.cuda`` that a run asks, opens PyTorch's *fake* process group, whose
collectives send nothing, and makes CUDA tensors fake (``counts.py``). PyTorch asks only once whether CUDA is there, so
``processes.py`` loads the library of ``library.py`` before PyTorch.
"""

import contextlib
import ctypes
import importlib
import itertools
import math
import os
import pickle
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from megatron.core import parallel_state
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional
from torch.nn.attention.bias import CausalBias
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mcore.parallel import consensus, groups, stage_shapes
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.planning.machines import Machine
from lightning_mcore.rehearsal.counts import Counts
from lightning_mcore.rehearsal.engine import of_engine

_OPTIONS: Any = FakeProcessGroup.Options


@contextlib.contextmanager
def fake_cuda(
    library: Path,
    rank: int,
    world_size: int,
    devices_per_node: int,
    machine: Machine,
    answers: "Answers",
    assume: Mapping[str, float] | None = None,
) -> Iterator[Counts]:
    """Play a rank inside the ``with`` block, and count what it does.

    ``machine`` is what a device seems to be; ``answers`` are the objects that other ranks send; ``assume`` is as in
    :class:`Counts`.
    """
    local = rank % devices_per_node
    ctypes.CDLL(str(library)).fake_cuda_guard(local)
    counts = Counts(assume=assume)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(devices_per_node),
        "GROUP_RANK": str(rank // devices_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "rehearsal",  # Lightning takes ranks from the variables above
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    }
    os.environ.update(environment)
    with contextlib.ExitStack() as stack:
        table = [
            *_of_cuda(counts, local, devices_per_node, machine),
            *_of_tensors(counts),
            *_of_experts(counts),
            *_of_groups(answers),
            *_of_stages(counts, answers),
            *of_engine(counts),
        ]
        for owner, name, replacement in table:
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        options = _OPTIONS()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size, pg_options=options)
        stack.callback(dist.destroy_process_group)
        # PyTorch asks whether a GPU has these kernels. Without them, it keeps more for the backward pass of a norm, and
        # that of SwiGLU takes seven operators. Fake tensors call none of them.
        kernels = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
        for name in ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward", "mish_backward"):
            kernels.impl(name, _returns(None))  # type: ignore[no-untyped-call]
        with counts:
            yield counts


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _Stream:
    """A stream or an event: what fake tensors are asked to do is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = wait_stream = wait_event = _nothing

    def record_event(self, *args: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Stream") -> float:
        return 0.0


def _of_cuda(counts: Counts, local: int, devices: int, machine: Machine) -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` for the names of ``torch.cuda`` that a run asks."""
    cuda, state = torch.cuda, torch.get_rng_state()
    memory, (major, minor) = int(machine.memory), machine.capability
    device = SimpleNamespace(
        name=f"NVIDIA {machine.name.upper()}", major=major, minor=minor, multi_processor_count=132, total_memory=memory,
        uuid="0",
    )  # fmt: skip

    def synchronize(*args: Any, **kwargs: Any) -> None:
        counts.wait("synchronizes")

    class Stream(_Stream):
        def synchronize(self) -> None:
            synchronize()

    return [
        (cuda, "is_available", _returns(True)),
        (cuda, "is_initialized", _returns(True)),
        (cuda, "init", _returns(None)),
        (cuda, "_lazy_init", _returns(None)),
        (cuda, "device_count", _returns(devices)),
        (cuda, "current_device", _returns(local)),
        (cuda, "set_device", _returns(None)),
        (cuda, "get_device_properties", _returns(device)),
        (cuda, "get_device_capability", _returns(machine.capability)),
        (cuda, "get_device_name", _returns(device.name)),
        (cuda, "is_bf16_supported", _returns(True)),
        (cuda, "synchronize", synchronize),
        (cuda, "empty_cache", _returns(None)),
        (cuda, "Stream", Stream),
        (cuda, "Event", Stream),
        (cuda, "current_stream", lambda *args, **kwargs: Stream()),
        (cuda, "default_stream", lambda *args, **kwargs: Stream()),
        (cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext()),
        (cuda, "is_current_stream_capturing", _returns(False)),
        (cuda, "manual_seed", _returns(None)),
        (cuda, "manual_seed_all", _returns(None)),
        (cuda, "seed_all", _returns(None)),
        (cuda, "default_generators", defaultdict(_returns(torch.default_generator))),
        *((owner, "get_rng_state", _returns(state)) for owner in (cuda, cuda.random)),
        *((owner, "set_rng_state", _returns(None)) for owner in (cuda, cuda.random)),
        *((owner, "get_rng_state_all", _returns([state])) for owner in (cuda, cuda.random)),
        *((owner, "set_rng_state_all", _returns(None)) for owner in (cuda, cuda.random)),
        *((cuda, f"{most}memory_{which}", lambda *args: counts.memory.now) for most, which in _MEMORY),
        (cuda, "memory_stats", _returns({})),
        (cuda, "mem_get_info", lambda *args: (memory - counts.memory.now, memory)),
        (cuda, "reset_peak_memory_stats", _returns(None)),
        (cuda.nvtx, "range_push", _returns(None)),
        (cuda.nvtx, "range_pop", _returns(None)),
        (TorchElasticEnvironment, "validate_settings", _returns(None)),
        (torch._C, "_cuda_isInBadFork", _returns(False)),
        (torch._C, "_cuda_getDevice", _returns(local)),
        (torch._C, "_cuda_getCurrentRawStream", _returns(0)),
        # Megatron's tracker of random states, on the CPU's generator
        (importlib.import_module("megatron.core.tensor_parallel.random"), "_lazy_call", lambda call, **kwargs: call()),
    ]


_MEMORY = [(most, which) for most in ("", "max_") for which in ("allocated", "reserved")]


def _of_tensors(counts: Counts) -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` for what fake tensors cannot do."""
    return [
        (FakeTensorMode, "avoid_device_init", property(_returns(True))),
        (FakeTensor, "__deepcopy__", lambda tensor, memo: tensor.clone()),
        (FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),  # at once, and not number by number
        (nn.Module, "_apply", _apply),
        (functional, "scaled_dot_product_attention", _attention),
        (CausalBias, "__new__", _without_modes),
        (torch, "tensor", _unpinned(torch.tensor)),
        (Tensor, "pin_memory", lambda tensor, *args: tensor),
        (Tensor, "is_pinned", _returns(False)),
        (Tensor, "record_stream", _returns(None)),
        # A digest of weights; without values it says nothing, and takes minutes for billions of them.
        (importlib.import_module("lightning_mcore.hf.adapters"), "_weighted_sum", _returns(0)),
        (torch.UntypedStorage, "data_ptr", _address),
        (FakeTensor, "data_ptr", lambda it: _address(it.untyped_storage()) + it.storage_offset() * it.element_size()),
        # DTensor runs each operator on fake tensors of the global shape first, to learn the shape of its result.
        (
            ShardingPropagator,
            "_propagate_tensor_meta_non_cached",
            counts.aside(ShardingPropagator._propagate_tensor_meta_non_cached),
        ),
        (torch.UntypedStorage, "resize_", counts.resize_storage(torch.UntypedStorage.resize_)),
    ]


_real_address = torch.UntypedStorage.data_ptr


def _address(storage: Any) -> int:
    """Return where a storage begins; fake ones all begin at 0, so theirs is a number that no other has."""
    return _real_address(storage) or storage._cdata


def _without_modes(kind: type[Tensor], *args: Any) -> Tensor:
    """Make a tensor of a subclass; it has no elements, and a mode would make an ordinary one."""
    with _disable_current_modes():
        return Tensor.__new__(kind)


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **{**kwargs, "pin_memory": False})


_attend = functional.scaled_dot_product_attention
_FLASH_HEAD_SIZE = 256


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that PyTorch has for a GPU; without one, it computes all scores.

    Source: ``sdp_utils.cpp`` (PyTorch 2.13): flash for half precision without a mask, else the memory-efficient one.
    """
    rest: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if not query.is_cuda:
        return _attend(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **rest)
    if isinstance(attn_mask, CausalBias):
        attn_mask, rest["is_causal"] = None, True
    half, width = query.dtype in (torch.float16, torch.bfloat16), query.size(-1)
    if attn_mask is None and half and width == value.size(-1) and width <= _FLASH_HEAD_SIZE:
        flash: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **rest)[0]
        return flash
    if key.size(1) == query.size(1):
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.size(2))
        keeps = query.requires_grad or key.requires_grad or value.requires_grad
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        efficient: Tensor = kernel(query, key, value, attn_mask, keeps, **rest)[0]
        return efficient
    return _attend(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **rest)


def _of_experts(counts: Counts) -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` with which each expert gets as many tokens as any other."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatchers = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher, permute = dispatchers.MoEAlltoAllTokenDispatcher, moe_utils.permute
    preprocess = dispatcher.preprocess

    def permute_evenly(tokens: Tensor, routing_map: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = kwargs.get("num_out_tokens")
        counts.selected = int(count) if count is not None else tokens.size(0)
        try:
            return permute(tokens, routing_map, *args, **kwargs)
        finally:
            counts.selected = None

    def preprocess_evenly(self: Any, routing_map: Tensor) -> Tensor:
        tokens_per_expert: Tensor = preprocess(self, routing_map)
        if self.drop_and_pad:
            return tokens_per_expert
        counts.notes.add("each expert gets as many tokens as any other")
        # 10 tokens for 4 experts on 2 ranks: 3 3 2 2. A rank sends 6 and 4; the first one gets 6 from each, 12 in all.
        total = routing_map.size(0) * self.config.moe_router_topk
        experts = torch.arange(self.num_experts)
        own = total // self.num_experts + (experts < total % self.num_experts).long()
        local = own[self.local_expert_indices]
        values = {
            "input_splits": own.view(self.ep_size, -1).sum(1),
            "output_splits": local.sum().expand(self.ep_size),
            "output_splits_tp": (local.sum() * self.ep_size).expand(self.tp_size),
            "num_global_tokens_per_local_expert": local.expand(self.tp_size * self.ep_size, -1),
            "num_out_tokens": torch.tensor(total),
        }
        counts.known[tokens_per_expert] = local * self.tp_size * self.ep_size
        for name, value in values.items():
            if isinstance(tensor := getattr(self, name, None), FakeTensor):
                counts.known[tensor] = value.reshape(tensor.shape).contiguous()
        return tokens_per_expert

    return [
        (dispatcher, "preprocess", preprocess_evenly),
        *((module, "permute", permute_evenly) for module in (moe_utils, dispatchers)),
    ]


_moved: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters, to what they became; tied ones stay tied


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace ``Module._apply``, which writes into parameters; a fake one must be another object."""
    for child in module.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter not in _moved:
            with torch.no_grad():
                moved = function(parameter)
            if moved is parameter or (moved.dtype, moved.device) == (parameter.dtype, parameter.device):
                continue
            made = nn.Parameter(moved, requires_grad=parameter.requires_grad)
            # Megatron marks parameters, for example as tensor-parallel; the new object needs the same marks.
            made.__dict__.update({key: value for key, value in vars(parameter).items() if key not in vars(made)})
            _moved[parameter] = made
        module._parameters[name] = _moved[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def rank_groups(world_size: int, parallel_size: list[int], mask: list[bool]) -> list[list[int]]:
    """Return the groups of ranks that differ only on the masked axes, as Megatron does, in a hundredth of the time.

    8 ranks with TP=2, DP=2 and PP=2: ``rank_groups(8, [2, 2, 2], [False, True, False])`` returns ``[[0, 2], [1, 3],
    [4, 6], [5, 7]]``.
    """
    # Megatron's first axis varies fastest, which is the last one of an array.
    places, masked = np.arange(world_size).reshape(parallel_size[::-1]), mask[::-1]
    inside = [axis for axis, is_masked in enumerate(masked) if is_masked]
    outside = [axis for axis, is_masked in enumerate(masked) if not is_masked]
    size = math.prod(places.shape[axis] for axis in inside)
    groups: list[list[int]] = places.transpose(outside + inside).reshape(-1, size).tolist()
    return groups


class Answers:
    """The objects that a rank broadcasts: what ranks that are rehearsed together really send each other.

    A rank that is not rehearsed sends what this one has. ``store`` is common to the ranks in ``played``.
    """

    def __init__(self, store: Any = None, rank: int = 0, played: tuple[int, ...] = ()) -> None:
        self._store, self._rank, self._played = store, rank, played
        if store is not None:  # a busy machine may need longer than the default of 5 minutes; failures end all ranks
            store.set_timeout(timedelta(days=1))
        self._sent: Counter[str] = Counter()

    def post(self, name: str, value: Any) -> None:
        """Tell ranks that are played at the same time."""
        if self._store is not None:
            self._store.set(name, pickle.dumps(value))

    def posted(self, name: str) -> Any:
        """Return what another rank posts; wait for it."""
        return pickle.loads(self._store.get(name))

    def broadcast(self, objects: list[Any], source: int, ranks: tuple[int, ...]) -> None:
        """Send a list of objects if this rank is the source; otherwise replace its items by the source's."""
        others = [rank for rank in self._played if rank in ranks]
        if self._store is None or source not in others or len(others) < 2:
            return
        key = f"{source} {hash(ranks)}"  # numbers hash alike in every process
        self._sent[key] += 1
        key = f"{key} {self._sent[key]}"
        if source == self._rank:
            self._store.set(key, pickle.dumps(objects))
        else:
            objects[:] = pickle.loads(self._store.get(key))


def _of_stages(counts: Counts, answers: Answers) -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` with which stages know what their neighbors send, if shapes vary.

    Every stage sends as much as the first one, which is played at the same time.
    """
    sent: list[list[int]] = []
    received = itertools.count(1)
    gradients = itertools.count()

    def exchange_shapes(
        communicator: Any,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> list[list[int]]:
        counts.notes.add("each pipeline stage sends as much as the first one")
        if tensor_send_next is not None:
            sent.append(list(tensor_send_next.shape))
            if process_group("pp").rank() == 0:
                answers.post(f"shape {len(sent)}", sent[-1])
        shapes = [[1, 1, 1], [1, 1, 1]]
        if recv_prev:
            shapes[0] = answers.posted(f"shape {next(received)}")
        if recv_next:  # the gradient of what this stage has sent
            shapes[1] = sent[next(gradients)]
        return shapes

    return [(stage_shapes, "exchange_shapes", exchange_shapes)]


def _of_groups(answers: Answers) -> list[tuple[Any, str, Any]]:
    """Return ``(owner, attribute, replacement)`` for groups and for collectives of objects."""
    new_group = dist.new_group

    def fake_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and dist.get_rank() not in ranks:  # of 16,384 ranks' 45,000 groups, a rank is in 15
            return dist.GroupMember.NON_GROUP_MEMBER
        options: Mapping[str, Any] = {**kwargs, "backend": "fake", "pg_options": _OPTIONS()}
        return new_group(ranks, **options)

    def broadcast(objects: list[Any], src: int | None = None, group: Any = None, **kwargs: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        source = kwargs.get("group_src")
        answers.broadcast(objects, ranks[source] if source is not None else src or 0, ranks)

    def all_gather(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    def gather(own: Any, objects: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if objects is not None:
            objects[:] = [own] * len(objects)

    def scatter(output: list[Any], objects: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        output[0] = objects[0] if objects else None

    def tell_stages(value: Any) -> Any:
        ranks, box = tuple(dist.get_process_group_ranks(process_group("pp"))), [value]
        answers.broadcast(box, ranks[-1], ranks)
        return box[0]

    def combine_on_rank0(function: Callable[[], Any], combine: Callable[[list[Any]], Any], group: Any = None) -> Any:
        return combine([function()] * dist.get_world_size(group))

    # Modules that have imported them by name keep the originals, so they are replaced in each of them.
    users = [module for name, module in list(sys.modules.items()) if name.startswith("lightning_mcore.")]
    replaced = [
        (consensus.combine_on_rank0, combine_on_rank0),
        (groups.any_of_copy, tell_stages),  # what the last stage says; the others log nothing
        (groups.tell_stages, tell_stages),
    ]
    return [
        *(
            (module, original.__name__, replacement)
            for original, replacement in replaced
            for module in users
            if vars(module).get(original.__name__) is original
        ),
        (dist, "new_group", fake_group),
        (parallel_state, "generate_masked_orthogonal_rank_groups", rank_groups),
        (dist, "broadcast_object_list", broadcast),
        (dist, "all_gather_object", all_gather),
        (dist, "gather_object", gather),
        (dist, "scatter_object_list", scatter),
    ]
