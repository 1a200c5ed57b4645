# SPDX-License-Identifier: Apache-2.0
"""A chunk in Megatron's FSDP, whose data-parallel ranks share parameters, gradients and optimizer state (ZeRO-3).

Megatron replaces the parameters of the wrapped module by *shards*, which are DTensors, whenever an optimizer or a
``state_dict()`` may look. Here the module always shows its own parameters, with whole shapes, and only Megatron's
optimizer holds shards. What a parameter of [4, 6] is on the first of two ranks, whose shard has the rows 0 and 1::

    the module's parameter   [4, 6] in memory that exists only while a *unit*, a transformer layer, computes
    model weights            [12]   the shard in the parameter's dtype, from which units are gathered
    main weights             [12]   the shard in fp32, which is stepped; fp32 parameters have none
    gradients                [12]   the shard of the sum over the ranks

Parameters outside the units (embedding, output layer, last norm) stay whole from their first use to the step.

Source: ``FullyShardedDataParallel``, ``MegatronFSDP`` and ``ParamAndGradBuffer`` in megatron/core/distributed/fsdp
(0.16.1 and 0.19.2).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_OF_STATE = _HOOKS[2:]
_IN_0_19 = hasattr(DistributedDataParallelConfig, "megatron_fsdp_main_params_dtype")
_Parameter = Any  # with attributes of Megatron's


class FullyShardedChunk(FullyShardedDataParallel):  # type: ignore[misc]  # megatron-core has no type information
    """A chunk whose parameters, gradients and optimizer state are sharded over the data-parallel ranks."""

    def __init__(self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> None:
        if not any(isinstance(layer, TransformerLayer) for layer in module.modules()):
            raise ValueError(
                f"data_parallel_sharding={ddp_config.data_parallel_sharding_strategy!r} gathers one of Megatron's"
                " transformer layers at a time, and this model has none; leave it out, or set"
                " use_distributed_optimizer=True"
            )
        frozen = sum(not parameter.requires_grad for parameter in module.parameters())
        if frozen and not _IN_0_19:
            raise ValueError(
                f"data_parallel_sharding={ddp_config.data_parallel_sharding_strategy!r} cannot hold the {frozen} frozen"
                " parameters of this model before megatron-core 0.19; install that, train them all, or set"
                " use_distributed_optimizer=True instead"
            )
        device = next(module.parameters()).device
        own_hooks = _hooks_of(module)
        own_attributes = {parameter: set(vars(parameter)) for parameter in module.parameters()}
        tracker = get_cuda_rng_tracker()
        random_states = tracker.get_states()
        super().__init__(config, _completed(ddp_config, module), module, [TransformerLayer], device=device)
        tracker.set_states(random_states)  # Megatron gives all tensor-parallel ranks those of the first
        self._is_gathered = False
        self._own_attributes = own_attributes
        self._added_hooks = [(table, key) for table, key in _hooks_of(self) if (table, key) not in own_hooks]
        self._remove_hooks(_OF_STATE)  # with them, state_dict() returns shards
        self.show_parameters()

    def show_parameters(self) -> None:
        """Show the module's own parameters, of which those in units may have no memory."""
        self.module._replace_param_with_raw_if_needed()

    @property
    def shards(self) -> list[tuple[_Parameter, _Parameter]]:
        """Each of the module's parameters, and this rank's shard of it, which the optimizer steps."""
        return [(shard.orig_param, shard) for _, shard in self.param_and_grad_buffer.optimizer_named_parameters]

    @property
    def weights(self) -> list[Tensor]:
        """This rank's shards of the parameters, in their own dtype."""
        return [group.model_weight_buffer.data for group in self._groups]

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's shards of the summed gradients."""
        return [group.main_grad_buffer.data for group in self._groups if group.main_grad_buffer is not None]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each parameter with this rank's shard of its summed gradient."""
        for name, shard in self.param_and_grad_buffer.optimizer_named_parameters:
            if shard.grad is not None:
                yield name, shard.grad.to_local()

    @property
    def _groups(self) -> list[Any]:
        """Megatron's groups of parameters that are gathered together."""
        groups: list[Any] = self.param_and_grad_buffer.parameter_groups
        return groups

    def show_shards(self) -> None:
        """Show shards, for the construction of Megatron's optimizer."""
        self.module._replace_param_with_distributed_if_needed()

    def gather_outside_units(self) -> None:
        """Gather the parameters that no unit gathers, some of which are used without a call of their module."""
        outside = [parameter for group in self._groups if group.fsdp_unit_id is None for parameter in group.params]
        self.show_parameters()
        self.module.all_gather_and_wait_parameters_ready(outside, prefetch=False)

    def gather(self) -> None:
        """Gather all parameters; each unit that computes frees its own again. Collective over data-parallel ranks."""
        self._wait()
        self.module.start_param_sync(force_sync=True)
        self.show_parameters()
        self._is_gathered = True

    def forget_gathered(self) -> None:
        """Free what :meth:`gather` has gathered, because a step has changed the shards."""
        if self._is_gathered:
            self._wait()
            self.module.synchronize_param_gather()
            self.show_parameters()
            self._is_gathered = False

    def _wait(self) -> None:
        """Wait for what the last step has begun to gather, and free what is not gathered but has memory."""
        pipeline = self.module.all_gather_pipeline
        for bucket in list(pipeline.param_gather_event_map):
            pipeline.wait_bucket_ready(*bucket)
        for (index, _), status in pipeline.bucket_status.items():
            if status.name == "EMPTY":  # but fake tensors get memory again when they are looked at
                self._groups[index].model_weight_buffer.free_bucket_storage()

    @torch.no_grad()
    def scatter(self, with_main: bool) -> None:
        """Copy the gathered parameters into this rank's shards, ``with_main`` also into fp32 ones of 16-bit weights."""
        for group in self._groups:
            for buffer in filter(None, (group.model_weight_buffer, group.main_weight_buffer)):
                for index, parameter in enumerate(group.params):
                    if with_main or buffer.dtype == parameter.dtype:
                        buffer.set_item(index, parameter.detach())

    def close(self) -> bool:
        """Give the module memory of its own again, and free the gradients; not collective.

        Returns whether the parameters were gathered. If not, as after an error, they are NaN.
        """
        self.show_parameters()
        self._remove_hooks(_HOOKS)
        for handle in self.module.grad_acc_hooks.values():
            handle.remove()
        whole = self._is_gathered and all(_has_memory(parameter) for parameter, _ in self.shards)
        for parameter, shard in self.shards:
            values = parameter.detach().clone() if whole else torch.full((), torch.nan).expand(parameter.shape)
            parameter.data = values.to(parameter)
            shard.grad = parameter.grad = None
            for name in vars(parameter).keys() - self._own_attributes[parameter]:
                delattr(parameter, name)
        for data in self.gradients:
            data.untyped_storage().resize_(0)
        return whole

    def _remove_hooks(self, names: Iterable[str]) -> None:
        tables = {id(getattr(layer, name)): getattr(layer, name) for layer in self.modules() for name in names}
        for table, key in self._added_hooks:
            if table in tables:
                tables[table].pop(key, None)


def is_fully_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is in a :class:`FullyShardedChunk`, which gives it ``main_grad`` only in backward."""
    return hasattr(parameter, "get_main_grad")


def _completed(config: DistributedDataParallelConfig, module: nn.Module) -> DistributedDataParallelConfig:
    """Return Megatron's config with what its FSDP does not read from other fields, or gloo does not have."""
    fields: dict[str, Any] = {}
    if next(module.parameters()).device.type != "cuda":
        fields["gradient_reduce_div_fusion"] = False  # needs NCCL's multiplying sum
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        # No second copy in fp32
        fields |= {"megatron_fsdp_main_params_dtype": None} if _IN_0_19 else {"preserve_fp32_weights": False}
    if _IN_0_19 and config.grad_reduce_in_fp32:  # which 0.16 reads itself
        dtypes = ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")
        fields |= dict.fromkeys(dtypes, torch.float32)
    return dataclasses.replace(config, **fields)


def _hooks_of(module: nn.Module) -> set[tuple[int, int]]:
    """Return the address of the table and the key of each hook of a module and of those in it."""
    layers: Iterator[nn.Module] = module.modules()
    tables = [getattr(layer, name) for layer in layers for name in _HOOKS]
    return {(id(table), key) for table in tables for key in table}


def _has_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()
