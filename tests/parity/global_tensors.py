# SPDX-License-Identifier: Apache-2.0
"""The tensors of the whole model, seen from one rank of any layout.

Megatron's ``sharded_state_dict()`` says of each local tensor which slice of which global tensor it is: that is what
lets a checkpoint be read by another layout. Here the same metadata serves to give every layout equal weights
([fill_weights][]: a global tensor is drawn from its name, and each rank copies its slice) and to bring weights and
gradients of every layout back to the same terms ([weight_slices][], [gradient_slices][]), so that they can be compared
with those of one rank, slice by slice, replicas included.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_mcore.parallel.fully_sharded import FullyShardedChunk
from lightning_mcore.parallel.groups import process_group

Index = tuple[int | tuple[int, int], ...]


@dataclass(frozen=True)
class Slice:
    """A part of a global tensor.

    Attributes:
        key: Name of the global tensor; the layers of a model share names, the layer is its first axis.
        shape: Shape of the global tensor.
        index: For each global axis the position, or the range of positions.
        data: The values, as fp32.
    """

    key: str
    shape: tuple[int, ...]
    index: Index
    data: torch.Tensor

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same part of ``whole``."""
        return whole[tuple(slice(*axis) if isinstance(axis, tuple) else axis for axis in self.index)]


def fill_weights(modules: Iterable[nn.Module]) -> None:
    """Overwrite every parameter with values that do not depend on the layout.

    Args:
        modules: Megatron modules, one for each chunk of this rank, not yet wrapped; their process groups are open.

    Raises:
        AssertionError: A parameter has no entry in the sharded state dict, or only a copy of it has.
    """
    with torch.no_grad():
        for module in modules:
            missing = {parameter.data_ptr(): name for name, parameter in module.named_parameters()}
            for owner, part in _sharded_tensors(module):
                part.data.copy_(_draw(part)[_global_slice(part)])
                missing.pop(owner.data_ptr(), None)
            assert not missing, f"left as they were: {sorted(missing.values())}"


def weight_slices(modules: Iterable[nn.Module]) -> list[Slice]:
    """Return a copy of this rank's weights; wrapped modules will do."""
    return [_as_slice(part, part.data) for module in modules for _, part in _sharded_tensors(_without_wrappers(module))]


def state_slices(sharded_state: Any) -> list[Slice]:
    """Return a copy of the tensors of a sharded state, such as Megatron's optimizers return."""
    slices = []
    for entry in _leaves(sharded_state):
        parts = _leaves(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        slices += [_as_slice(part, part.data) for part in parts]
    return slices


def gradient_slices(modules: Iterable[DistributedDataParallel]) -> list[Slice]:
    """Return a copy of this rank's finished gradients, before clipping.

    With the distributed optimizer a data-parallel rank holds the sum of its shard of each bucket alone, so the shards
    are gathered first. Collective over the data-parallel groups.
    """
    slices = []
    for module in modules:
        gradients = whole_gradients(module)
        for part in _sharded_tensors_of(_without_wrappers(module), gradients):
            slices.append(_as_slice(part, part.data))
    return slices


def plain_gradient_slices(module: nn.Module) -> list[Slice]:
    """Return a copy of the gradients of a module that is not wrapped."""
    gradients = {p.data_ptr(): p.grad for p in module.parameters() if p.grad is not None}
    return [_as_slice(part, part.data) for part in _sharded_tensors_of(module, gradients)]


def whole_gradients(module: DistributedDataParallel) -> dict[int, torch.Tensor]:
    """Return the finished gradient of each parameter, by the parameter's address; collective as above."""
    gradients = {}
    if isinstance(module, FullyShardedChunk):
        return whole_of_shards(module, lambda shard: shard.grad)
    for buffer in [*module.buffers, *module.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            data = bucket.grad_data
            if module.ddp_config.use_distributed_optimizer:
                data = _gather_shards(data, buffer.data_parallel_group)
            for parameter in bucket.params_list:
                start = buffer.param_index_map[parameter][0] - bucket.offset
                whole = data[start : start + parameter.numel()].view(parameter.shape)
                gradients[parameter.data_ptr()] = whole
    return gradients


def whole_of_shards(module: FullyShardedChunk, value: Callable[[Any], DTensor | None]) -> dict[int, torch.Tensor]:
    """Return what ``value`` says of all shards of each parameter, by the parameter's address; collective as above."""
    module.gather()  # parameters have an address only then
    values = {}
    for parameter, shard in module.shards:
        whole, own = torch.zeros(parameter.numel()), value(shard)
        if own is not None:
            whole[shard.megatron_fsdp_slice] = own.to_local().view(-1).float()
        dist.all_reduce(whole, group=process_group("dp_cp" if getattr(parameter, "allreduce", True) else "expert_dp"))
        values[parameter.data_ptr()] = whole.view(parameter.shape)
    return values


def moments_of_shards(module: FullyShardedChunk, optimizer: torch.optim.Optimizer) -> list[Slice]:
    """Return a copy of the moments, and the copies in fp32, of a chunk that Adam steps; collective as above."""
    slices = []
    for name in ("exp_avg", "exp_avg_sq", "param"):
        of_shards = {s: s if name == "param" else optimizer.state[s].get(name) for _, s in module.shards}
        of_name = whole_of_shards(module, of_shards.__getitem__)
        for part in _sharded_tensors_of(_without_wrappers(module), of_name):
            slices.append(_as_slice(replace(part, key=f"optimizer.state.{name}.{part.key}"), part.data))
    return slices


def assemble(slices: Iterable[Slice]) -> dict[str, torch.Tensor]:
    """Return the global tensors, from slices that cover them.

    Raises:
        AssertionError: Something is not covered.
    """
    whole: dict[str, torch.Tensor] = {}
    for part in slices:
        target = whole.setdefault(part.key, torch.full(part.shape, torch.nan))
        part.of(target).copy_(part.data)
    uncovered = [key for key, tensor in whole.items() if tensor.isnan().any()]
    assert not uncovered, f"not covered, or not a number: {uncovered}"
    return whole


def spread(slices: Iterable[Slice], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return ``max|x - ref| / max|ref|`` of each global tensor, over all slices given.

    Raises:
        AssertionError: The slices and the reference are not of the same tensors, or something is not a number.
    """
    worst = dict.fromkeys(reference, 0.0)
    seen = set()
    for part in slices:
        whole = reference[part.key]
        assert whole.shape == part.shape, f"{part.key} has shape {part.shape}, the reference {tuple(whole.shape)}"
        difference = (part.data - part.of(whole)).abs().max().item()
        assert difference == difference, f"{part.key} is not a number"
        worst[part.key] = max(worst[part.key], difference / whole.abs().max().item())
        seen.add(part.key)
    assert seen == set(reference), f"not compared: {sorted(set(reference) - seen)}"
    return worst


def _draw(part: ShardedTensor) -> torch.Tensor:
    """Return the global tensor that ``part`` is a slice of: around 1 for norms, else normal with a small deviation."""
    seed = int.from_bytes(hashlib.sha256(part.key.encode()).digest()[:7], "big")
    noise = torch.randn(part.global_shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return 1 + 0.1 * noise if "norm" in part.key else 0.1 * noise


def _global_slice(part: ShardedTensor) -> tuple[int | slice, ...]:
    """Return which part of the global tensor this is, as megatron-core before 0.20 does (``global_slice``)."""
    # Layer 3 of 4, rows 8 to 16 of 32: offsets (3, 8), local shape [8], one prepended axis give (3, slice(8, 16))
    prepended = part.prepend_axis_num
    ranges = zip(part.global_offset[prepended:], part.local_shape, strict=True)
    return (*part.global_offset[:prepended], *(slice(start, start + length) for start, length in ranges))


def _as_slice(part: ShardedTensor, data: torch.Tensor) -> Slice:
    index = tuple(axis if isinstance(axis, int) else (axis.start, axis.stop) for axis in _global_slice(part))
    return Slice(part.key, tuple(part.global_shape), index, data.detach().float().clone())


def _sharded_tensors(module: nn.Module) -> Iterator[tuple[torch.Tensor, ShardedTensor]]:
    """Yield ``(whole local tensor, a part of it)``; the parts of a gated layer's weight are its two halves."""
    for entry in module.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None)).values():
        if isinstance(entry, ShardedTensor):
            yield entry.data, entry
        elif isinstance(entry, ShardedTensorFactory):
            for part in _leaves(entry.build()):
                yield entry.data, part


def _sharded_tensors_of(module: nn.Module, values: Mapping[int, torch.Tensor]) -> Iterator[ShardedTensor]:
    """Yield the parts with the data of another tensor of the same shape, looked up by the parameter's address."""
    for entry in module.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None)).values():
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data.data_ptr() in values:
            value = values[entry.data.data_ptr()]
            if isinstance(entry, ShardedTensor):
                yield replace(entry, data=value, dtype=value.dtype)
            else:
                yield from _leaves(replace(entry, data=value).build())


def _leaves(built: Any) -> Iterator[Any]:
    if isinstance(built, ShardedTensor | ShardedTensorFactory):
        yield built
    elif isinstance(built, Mapping):
        for item in built.values():
            yield from _leaves(item)
    elif isinstance(built, list | tuple):
        for item in built:
            yield from _leaves(item)


def _without_wrappers(module: nn.Module) -> nn.Module:
    """Return the model inside Megatron's DDP and Float16Module, whose names it must not carry."""
    while hasattr(module, "module"):
        module = module.module
    return module


def _gather_shards(data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    shards = [shard.clone() for shard in data.chunk(group.size())]
    dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    return torch.cat(shards)
