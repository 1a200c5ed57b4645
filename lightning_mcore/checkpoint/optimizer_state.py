# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state as sharded tensors, named and placed like the weights that it belongs to.

The state that an optimizer keeps for a parameter (``exp_avg``, a momentum, an fp32 copy) has the parameter's shape. So
it is stored like the parameter: as a part of one global tensor, ``optimizer.state.<name>.<name of the weight>``. All of
Megatron's optimizers share this format, so each reads what another wrote. State of another shape, such as Adam's
``step`` or Adafactor's rows and columns, is stored separately (:func:`gather_numbers`). An optimizer with such rows and
columns needs complete matrices, so it is rejected where tensors are split.

``model_state.py`` calls this with the sharded state of the model, in which the tensors are the parameters themselves.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mcore.checkpoint.rectangles import rectangles
from lightning_mcore.optimizer.megatron import MCoreOptimizer
from lightning_mcore.optimizer.parts import optimizer_parts
from lightning_mcore.parallel.consensus import combine_on_rank0

# Megatron's optimizers hold the state in three ways:
#   FP32Optimizer                       steps the parameters themselves
#   Float16OptimizerWithFloat16Params   steps complete fp32 copies
#   DistributedOptimizer                steps flat ranges of the parameters, one share on each data-parallel rank;
#                                       in fully sharded chunks as DTensors that hold only this range
# A flat range of a matrix is at most three rectangles, so each rank writes its share in place; Megatron gathers first.
Numbers = dict[str, Any]
_STEP = "step"
MAIN_NAMES = ("fp32_param", "param")  # of the fp32 copies in Megatron's unsharded and distributed optimizers


@dataclass(frozen=True)
class Piece:
    """A stored part of a parameter on this rank, and its place in the global tensor."""

    place: ShardedTensor  # the weight, or the part of it that Megatron stores separately
    start: int  # in the flattened parameter, in elements


@dataclass(frozen=True)
class Share:
    """The share of one parameter that this rank steps."""

    part: MegatronOptimizer
    stepped: Tensor  # the parameter, a copy, or a flat range of either
    parameter: Tensor
    group: dict[str, Any]
    sharded: ShardedTensor | ShardedTensorFactory
    begin: int  # of the range in the flattened parameter, in elements
    is_owned: bool = False  # by this rank alone among the data-parallel ranks

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer steps a copy instead of the parameter's own memory."""
        if is_float8tensor(self.parameter):  # has no memory of its own
            return True
        # A slice of the parameter has the parameter's storage, a copy its own.
        return self.stepped.untyped_storage().data_ptr() != self.parameter.untyped_storage().data_ptr()

    @property
    def gradient(self) -> Tensor:
        """The summed gradient of the share, flat."""
        parameter: Any = self.parameter
        gradient: Tensor = parameter.main_grad.view(-1)[self.begin : self.begin + self.stepped.numel()]
        return gradient

    @property
    def state(self) -> dict[str, Any]:
        """The state of the parameter, as the optimizer holds it."""
        state: dict[str, Any] = self.part.optimizer.state[self.stepped]
        return state

    def tensors(self) -> dict[str, Tensor]:
        """The state tensors that have the shape of the stepped tensor, each in its own dtype."""
        return {name: value for name, value in self.state.items() if self._has_its_shape(name, value)}

    def numbers(self) -> Numbers:
        """The rest of the state, including the step if the optimizer counts it per group."""
        rest = {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in self.state.items()
            if value is not None and not self._has_its_shape(name, value)
        }
        return {_STEP: self.group[_STEP], **rest} if _counts_groups(self.part) and _STEP in self.group else rest

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has any state for the parameter; usually from the first step on."""
        return any(value is not None for value in self.state.values())

    def set_numbers(self, numbers: Numbers) -> None:
        """Restore the result of :meth:`numbers`, even from an optimizer that counts steps elsewhere."""
        for name, value in numbers.items():
            if name == _STEP and _counts_groups(self.part):
                self.group[_STEP] = int(value)
            elif name == _STEP:
                on_device = self.group.get("capturable") or self.group.get("fused")
                self.state[_STEP] = torch.tensor(float(value), device=self.stepped.device if on_device else "cpu")
            else:
                # Each parameter has its own copy. Arrays belong on its device; torch keeps counts on the CPU.
                device = self.stepped.device if isinstance(value, Tensor) and value.dim() > 0 else "cpu"
                self.state[name] = value.to(device, copy=True) if isinstance(value, Tensor) else copy(value)

    def _has_its_shape(self, name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and name != _STEP and value.shape == self.stepped.shape

    @property
    def name_of_copy(self) -> str:
        """Megatron's name for the copy."""
        return "param" if isinstance(self.part, DistributedOptimizer) else "fp32_param"

    def copy(self) -> Tensor:
        """Return the fp32 copy that is stepped, of the shape of ``stepped``."""
        return self.stepped.detach()

    def targets(self, names: Collection[str], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Return tensors to read these parts into, by name, and drop the other state.

        Each has the shape of ``stepped``. Its dtype is that in the optimizer or, if it has no such state yet, that in
        ``dtypes`` or else of ``stepped``.
        """
        for name in [name for name in self.state if name not in names]:
            del self.state[name]
        for name in names:
            if not isinstance(self.state.get(name), Tensor):
                self.state[name] = torch.empty_like(self.stepped, dtype=dtypes.get(name))
        return {name: self.state[name] for name in names}

    def target_of_copy(self) -> Tensor:
        """Return the tensor to read the fp32 copy into, of the shape of ``stepped``."""
        return self.copy()

    def accept(self, tensors: dict[str, Tensor]) -> None:
        """Copy targets that lie outside the optimizer's memory into it (fp32)."""


@dataclass(frozen=True)
class FullyShardedShare(Share):
    """A share of a parameter in a fully sharded chunk; ``stepped`` is the part of the shard on this rank."""

    shard: Any = None  # which the optimizer steps; a DTensor, like its state

    @property
    def has_copy(self) -> bool:
        """Whether the shard is in fp32 and the parameter is not."""
        return self.stepped.dtype != self.parameter.dtype

    @property
    def gradient(self) -> Tensor:
        """The summed gradient of the share, of the shape of ``stepped``."""
        gradient: Tensor = self.shard.grad.to_local()
        return gradient

    @property
    def state(self) -> dict[str, Any]:
        """The state of the shard; its tensors as DTensors."""
        state: dict[str, Any] = self.part.optimizer.state[self.shard]
        return state

    def tensors(self) -> dict[str, Tensor]:
        """The parts on this rank of the state tensors."""
        return {name: value.to_local() for name, value in self.state.items() if self._has_its_shape(name, value)}

    def _has_its_shape(self, name: str, value: Any) -> bool:
        return isinstance(value, DTensor)

    def targets(self, names: Collection[str], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Return the parts on this rank of the state tensors, which are made if the optimizer has none yet."""
        for name in [name for name in self.state if name not in names]:
            del self.state[name]
        for name in names:
            if not isinstance(self.state.get(name), DTensor):
                self.state[name] = torch.empty_like(self.shard, requires_grad=False)
        return self.tensors()


class PrecisionAwareShare(Share):
    """A share of Megatron's precision-aware optimizer, which scales its state, and keeps the fp32 copy in it."""

    @property
    def has_copy(self) -> bool:
        """Always."""
        return True

    def _unscaled(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.part._get_main_param_and_optimizer_states(self.parameter)
        return state

    def tensors(self) -> dict[str, Tensor]:
        """The unscaled state tensors, in fp32."""
        return {name: value for name, value in self._unscaled().items() if name != "param" and value.dim() > 0}

    def copy(self) -> Tensor:
        """Return the fp32 copy."""
        return self._unscaled()["param"]

    def targets(self, names: Collection[str], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Return new tensors, because the optimizer's memory holds scaled values."""
        return {name: self.target_of_copy() for name in names}

    def target_of_copy(self) -> Tensor:
        """Return a new tensor, as for the other state."""
        return torch.empty_like(self.stepped, dtype=torch.float32)

    def accept(self, tensors: dict[str, Tensor]) -> None:
        """Scale the tensors, and copy them into the optimizer's memory."""
        self.part._set_main_param_and_optimizer_states(self.parameter, tensors)


def identity_of(sharded: ShardedTensor | ShardedTensorFactory) -> str:
    """Return a parameter's name on every layout; stacked layers share their weight's name, so their number is added."""
    # Expert 5 of layer 3 ends in "@3,5" if both are stacked.
    place = pieces_of(sharded)[0].place
    offset = place.global_offset[: place.prepend_axis_num]
    return f"{sharded.key}@{','.join(map(str, offset))}" if offset else sharded.key


def shares_of(optimizer: MCoreOptimizer, model_state: Mapping[str, Any]) -> list[Share]:
    """Return the share of every parameter that this rank steps; ``ValueError`` if the model's state lacks one."""
    entries = {id(entry.data): entry for entry in tensors_in(model_state)}
    stepped_here = []
    for part in optimizer_parts(optimizer.megatron):
        stepped_here += [] if part.is_stub_optimizer else [(part, *found) for found in _ranges(part)]
    lost = [list(parameter.shape) for _, parameter, *_ in stepped_here if id(parameter) not in entries]
    if lost:
        raise ValueError(
            f"{len(lost)} parameters are trained but not in state_dict(), the first of shape {lost[0]}, so their "
            "optimizer state cannot be saved; keep them in state_dict(), or save only weights"
        )
    groups = [
        group for part in optimizer_parts(optimizer.megatron) if _is_fully_sharded(part) for group in part.param_groups
    ]
    shards = {id(shard.orig_param): shard for group in groups for shard in group["params"]}
    shares: list[Share] = []
    for part, parameter, stepped, group, begin in stepped_here:
        is_owned = optimizer.is_shared_out and parameter.requires_grad
        place = (part, stepped, parameter, group, entries[id(parameter)], begin, is_owned)
        if _is_fully_sharded(part):
            shares.append(FullyShardedShare(*place, shards[id(parameter)]))
        else:
            shares.append(PrecisionAwareShare(*place) if _is_aware_of_precision(part) else Share(*place))
    return shares


def reload_weights(optimizer: MCoreOptimizer, of_fp8: Mapping[Tensor, Tensor]) -> None:
    """Copy the weights, or ``of_fp8`` their values before rounding, into the fp32 copies that an optimizer steps."""
    if any(_is_fully_sharded(part) for part in optimizer_parts(optimizer.megatron)):
        return  # whoever wrote the weights has scattered them
    optimizer.megatron.reload_model_params()
    for part in optimizer_parts(optimizer.megatron) if of_fp8 else ():
        for parameter, stepped, _, begin in _ranges(part):
            if parameter in of_fp8:
                stepped.detach().copy_(of_fp8[parameter].view(-1)[begin : begin + stepped.numel()].view_as(stepped))


def tensors_in(state: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    """Yield the sharded tensors in a nested state."""
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            yield entry


def _is_aware_of_precision(part: MegatronOptimizer) -> bool:
    return isinstance(part, DistributedOptimizer) and bool(part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


def _is_fully_sharded(part: MegatronOptimizer) -> bool:
    return isinstance(part, DistributedOptimizer) and bool(part.ddp_config.use_megatron_fsdp)


def _counts_groups(part: MegatronOptimizer) -> bool:
    return type(part.optimizer).__name__ == "FusedAdam"  # TransformerEngine's and Apex's


def _ranges(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], int]]:
    """Yield each parameter, the tensor stepped for it, the group, and where that tensor begins in the parameter."""
    if _is_fully_sharded(part):
        yield from _ranges_of_shards(part)
        return
    if isinstance(part, DistributedOptimizer):
        for parameter, (index, position) in part.model_param_group_index_map.items():
            group = part.optimizer.param_groups[index]
            own = part._get_model_param_range_map(parameter)["param"]
            yield parameter, group["params"][position], group, own.start
        return
    copied: dict[int, Tensor] = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for models, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            copied |= {id(copy): model for model, copy in zip(models, copies, strict=True)}
    for group in part.optimizer.param_groups:
        for stepped in group["params"]:
            yield copied.get(id(stepped), stepped), stepped, group, 0


def _ranges_of_shards(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], int]]:
    """Do the same as :func:`_ranges` for Megatron's FSDP, without shards that are empty on this rank."""
    for group in part.optimizer.param_groups:
        for shard in group["params"]:
            if shard.to_local().numel():
                yield shard.orig_param, shard.detach().to_local(), group, shard.megatron_fsdp_slice.start


def pieces_of(sharded: ShardedTensor | ShardedTensorFactory) -> list[Piece]:
    """Return a parameter's stored tensors and where each begins in it; ``RuntimeError`` if one is not a flat range."""
    if isinstance(sharded, ShardedTensor):
        return [Piece(sharded, 0)]
    # Called with a tensor without memory, a factory returns views that show where its parts lie: gate and up of [8, 6]
    # together are two parts [4, 6] that begin at elements 0 and 24.
    template = torch.empty(sharded.data.shape, dtype=sharded.data.dtype, device="meta")
    built = replace(sharded, data=template).build()
    parts: list[ShardedTensor] = [built] if isinstance(built, ShardedTensor) else list(nested_values(built))
    if any(part.data is None or part.data._base is not template or not part.data.is_contiguous() for part in parts):
        raise RuntimeError(
            f"{sharded.key} is stored in parts that are not ranges of its elements, which optimizer checkpoints do "
            "not support; save only weights (ModelCheckpoint(save_weights_only=True))"
        )
    return [Piece(part, part.data.storage_offset()) for part in parts]


def place_range(
    key: str, flat: Tensor, sharded: ShardedTensor | ShardedTensorFactory, begin: int
) -> list[ShardedTensor]:
    """Return elements ``begin`` and up of a flattened parameter, ``flat`` [n], as blocks of global tensors.

    The blocks share the memory of ``flat``, whatever its dtype. ``key`` has ``{}`` in place of the weight's name.
    """
    blocks = []
    for piece in pieces_of(sharded):
        place = piece.place
        first = max(begin, piece.start)
        last = min(begin + flat.numel(), piece.start + prod(place.local_shape))
        position = first - begin
        for offsets, sizes in rectangles(place.local_shape, first - piece.start, last - piece.start):
            block = flat[position : position + prod(sizes)]
            blocks.append(_block(key.format(place.key), block, place, offsets, sizes))
            position += prod(sizes)
    return blocks


def _block(
    key: str, flat: Tensor, place: ShardedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> ShardedTensor:
    stacked = place.global_offset[: place.prepend_axis_num]
    within = place.global_offset[place.prepend_axis_num :]
    local_shape = (*(1,) * len(stacked), *sizes)
    return ShardedTensor(
        key=key,
        data=flat.view(local_shape),
        dtype=flat.dtype,
        local_shape=local_shape,
        global_shape=place.global_shape,
        global_offset=(*stacked, *(start + offset for start, offset in zip(within, offsets, strict=True))),
        axis_fragmentations=None,  # blocks may have any size
        replica_id=place.replica_id,
        allow_shape_mismatch=place.allow_shape_mismatch,
    )


def place_share(key: str, tensor: Tensor, share: Share) -> list[ShardedTensor]:
    """Return a tensor of the stepped tensor's shape, in any dtype, as blocks of global tensors."""
    blocks = place_range(key, tensor.reshape(-1), share.sharded, share.begin)
    if share.is_owned:
        return [replace(block, replica_id=(*block.replica_id[:-1], 0)) for block in blocks]
    if not isinstance(share.part, DistributedOptimizer):
        return blocks
    # Ranges of data-parallel ranks are not replicas of each other, except between instances of the optimizer.
    instance = share.part.distributed_optimizer_instance_id
    return [replace(block, replica_id=(*block.replica_id[:-1], instance)) for block in blocks]


def numbers_of(shares: Iterable[Share]) -> dict[str, Numbers | None]:
    """Return, by parameter, the state of another shape; None for a parameter without state."""
    return {identity_of(share.sharded): share.numbers() if share.has_state else None for share in shares}


def gather_numbers(numbers: Mapping[str, Numbers | None]) -> dict[str, Any]:
    """Combine the numbers of all ranks; parameters that agree share one entry. Collective over the world.

    Returns ``{"common": {name: value}, "own": {parameter: {name: value}}}``; ``own`` has only what differs. For
    example, if ``a`` and ``b`` are at step 400, and ``c`` at step 100: ``{"common": {"step": 400}, "own": {"c":
    {"step": 100}}}``.
    """

    def combine(of_ranks: list[tuple[list[str], dict[str, Any]]]) -> dict[str, Any]:
        merged: dict[str, Numbers | None] = {}
        for names, split in of_ranks:
            merged |= {**dict.fromkeys(names, split["common"]), **split["own"]}
        return _split(merged)

    return combine_on_rank0(lambda: (list(numbers), _split(numbers)), combine)


def _split(numbers: Mapping[str, Numbers | None]) -> dict[str, Any]:
    common = _most_frequent(list(numbers.values()))
    return {"common": common, "own": {name: value for name, value in numbers.items() if not _same(value, common)}}


def _most_frequent(values: list[Numbers | None]) -> Numbers | None:
    groups: list[tuple[Numbers | None, int]] = []
    # Arrays, such as the means of a matrix's rows, belong to one parameter: with them, each count would be 1.
    for value in (value for value in values if value is None or not _has_arrays(value)):
        for index, (known, count) in enumerate(groups):
            if _same(known, value):
                groups[index] = (known, count + 1)
                break
        else:
            groups.append((value, 1))
    return max(groups, key=lambda group: group[1])[0] if groups else None


def _has_arrays(numbers: Numbers) -> bool:
    return any(isinstance(value, Tensor) and value.dim() > 0 for value in numbers.values())


def _same(one: Numbers | None, other: Numbers | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)


def _is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


def load_whole_state(optimizer: MCoreOptimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's share of an unsharded ``torch.optim.Optimizer.state_dict()``, from a single-file checkpoint.

    The module is complete on every rank. Raises ``ValueError`` if the parameter groups differ in number or size.
    """
    saved_sizes = [len(group["params"]) for group in state["param_groups"]]
    groups = optimizer.whole_groups
    sizes = list(map(len, groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {saved_sizes} tensors, but the one from"
            f" configure_optimizers has {sizes}; resume with the groups of the run that saved it"
        )
    saved: dict[int, dict[str, Any]] = {}
    for parameters, saved_group in zip(groups, state["param_groups"], strict=True):
        for parameter, index in zip(parameters, saved_group["params"], strict=True):
            saved[id(parameter)] = state["state"].get(index) or {}
    for part in optimizer_parts(optimizer.megatron):
        for parameter, stepped, _, begin in () if part.is_stub_optimizer else _ranges(part):
            own = {}
            for name, value in saved[id(parameter)].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and name != _STEP:
                    value = value.reshape(-1)[begin : begin + stepped.numel()].view_as(stepped).to(stepped, copy=True)
                own[name] = value
            part.optimizer.state[stepped] = own
    for group, values in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in values.items() if name != "params"})
