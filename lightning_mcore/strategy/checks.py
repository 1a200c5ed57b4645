# SPDX-License-Identifier: Apache-2.0
"""Reject settings, modules, machines and callbacks that do not fit the strategy, before anything is allocated.

The constructor calls :func:`check_arguments` and :func:`check_against_layout`; :func:`validate_module` has the checks
that the strategy makes when it gets the module. The rules themselves are in ``config/rules``, as plain data.
"""

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.loss_chunks import check_chunked_loss
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.strategy import expert_faults, precision_faults, schedule_faults, sharding_faults
from lightning_mcore.config.value_checks import require_flag, require_instance, require_size
from lightning_mcore.optimizer.rules import optimizer_device_faults
from lightning_mcore.parallel.consensus import all_gather_object
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.strategy.fp8_checks import FP8Machine, check_fp8
from lightning_mcore.strategy.module import MCoreModule
from lightning_mcore.strategy.overlap import queue_hint

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lightning_mcore.strategy.strategy import MCoreStrategy

P = ParamSpec("P")
T = TypeVar("T")


def check_arguments(
    *,
    communication: object,
    cluster_environment: object,
    checkpoint_io: object,
    process_group_backend: str | None,
    timeout: object,
    micro_batch_size: int | None,
) -> None:
    """Reject a wrong type, size or backend among those of the strategy's arguments that no other object checks."""
    require_instance("communication", communication, CommunicationOptions)
    require_instance("cluster_environment", cluster_environment, ClusterEnvironment)
    require_instance("checkpoint_io", checkpoint_io, CheckpointIO)
    require_instance("process_group_backend", process_group_backend, str)
    require_instance("timeout", timeout, timedelta)
    if micro_batch_size is not None:
        require_size("micro_batch_size", micro_batch_size)
    for part in (process_group_backend or "gloo").split(","):  # such as "gloo" or "cpu:gloo,cuda:nccl"
        backend = part.rpartition(":")[2].lower()
        if backend not in dist.Backend.backend_list or backend == dist.Backend.UNDEFINED:
            known = [known for known in dist.Backend.backend_list if known != dist.Backend.UNDEFINED]
            raise ValueError(
                f"process_group_backend={process_group_backend!r} has the unknown backend {backend!r}; choose from"
                f" {', '.join(known)}"
            )


def check_against_layout(strategy: "MCoreStrategy", asked_overlap_p2p_comm: bool | None) -> None:
    """Reject settings of schedule and groups that are wrong, or useless on the layout; None is not asked for."""
    layout, gradients, group_size = strategy.layout, strategy.gradients, strategy.microbatch_group_size
    require_flag("overlap_p2p_comm", asked_overlap_p2p_comm, or_none=True)
    if group_size is not None:
        require_size("microbatch_group_size_per_vp_stage", group_size)
    asked = {
        "overlap_p2p_comm": asked_overlap_p2p_comm,
        "microbatch_group_size_per_vp_stage": group_size,
        "align_grad_reduce": gradients.align_grad_reduce,
        "data_parallel_sharding": gradients.data_parallel_sharding,
    }
    raise_first(schedule_faults(asked, gradients.changed, layout))
    if group_size is not None:
        layout.validate_microbatches(group_size, group_size)
    raise_first(strategy.communication.layout_faults(layout, strategy.overlap_p2p_comm, gradients.num_instances))


def planned_world_size(strategy: "MCoreStrategy") -> int:
    """Return a run's number of ranks before its process group is open."""
    environment = strategy.cluster_environment
    # Ray may put 3 workers on one machine and 1 on another, so the environment's number counts, not the product.
    started = environment is not None and environment.creates_processes_externally
    return max(strategy.num_nodes * strategy.num_processes, environment.world_size() if started and environment else 1)


def validate_module(strategy: "MCoreStrategy", module: pl.LightningModule) -> None:
    """Check the module's shape and settings against layout, world and machine, before process groups form."""
    layout, precision = strategy.layout, strategy.precision_plugin
    sharding = strategy.gradients.data_parallel_sharding
    _check_module(module, layout, sharding)
    # Before the number of ranks: 3 stages of 4 layers on 4 ranks would not fit on 6 either.
    shape = module.model_shape() if isinstance(module, MCoreModule) else None
    if shape is not None:
        layout.validate_model(shape)
    world_size = planned_world_size(strategy)
    layout.validate_world(world_size)
    ddp_config = strategy.gradients.megatron_config(precision.ddp_fields())
    machine = FP8Machine.of(strategy.root_device)
    hint = queue_hint(layout, machine.capability, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    if hint is not None and machine.type == "cuda":
        rank_zero_warn(hint)
    check_fp8(precision.fp8, module, layout, ddp_config, strategy.optimizer_config, machine, strategy.micro_batch_size)
    if isinstance(module, MCoreModule):
        module.check_settings()
    raise_first(expert_faults(layout, strategy.root_device.type))
    options = vars(strategy.optimizer_config) if strategy.optimizer_config is not None else {}
    raise_first(sharding_faults(sharding, precision.precision, precision.fp8.is_on, options))
    check_device(strategy, world_size)
    if strategy._layer_sync is not None and machine.type == "cpu" and not isinstance(module, MCoreModule):
        raise ValueError(
            "sync_batchnorm=True needs GPUs, because torch's SyncBatchNorm runs only there; set it to False"
        )
    if module._trainer is not None:  # None with Trainer(...).strategy.connect(model)
        asked = module.trainer._accelerator_connector._precision_flag
        raise_first(precision_faults(asked, precision.precision))
        if module.trainer.state.fn == TrainerFn.FITTING:
            require_size("accumulate_grad_batches", module.trainer.accumulate_grad_batches)
            _check_validation_time(module.trainer, world_size)
            if strategy.micro_batch_size is None:
                layout.validate_microbatches(module.trainer.accumulate_grad_batches, strategy.microbatch_group_size)
            check_callbacks(module, strategy.gradients.distributed, isinstance(module, MCoreModule), sharding)


def _check_validation_time(trainer: pl.Trainer, world_size: int) -> None:
    """Reject validation at a time, which Lightning lets each rank measure by its own clock."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    if seconds is not None and world_size > 1 and trainer.enable_validation:
        raise ValueError(
            f"val_check_interval={timedelta(seconds=seconds)} is a time, which each of {world_size} ranks measures by"
            " its own clock, so they would validate after different batches; give a number of batches"
        )


def _check_module(module: pl.LightningModule, layout: ParallelLayout, sharding: str | None) -> None:
    """Reject splitting a module that builds no split model: not an ``MCoreModule``, without ``configure_model``."""
    if isinstance(module, MCoreModule) or _builds_later(module):
        return
    if sharding is not None:
        raise TypeError(_no_layers(module, sharding))
    if sizes := _sizes_that_split(layout):
        raise TypeError(
            f"{sizes} cannot split {type(module).__name__}: in configure_model, build a Hugging Face model with"
            " hf_model(self, path), or derive it from MCoreModule and build another with self.pipeline(...); or set"
            " every model-parallel size to 1"
        )


def check_device(strategy: "MCoreStrategy", world_size: int) -> None:
    """Reject settings that the device or the number of ranks cannot support."""
    device = strategy.root_device
    strategy.gradients.check_run(strategy.layout, world_size, device)
    raise_first(strategy.communication.device_faults(device.type))
    strategy.tensor_overlap.check_device(device)
    if strategy.optimizer_config is not None:
        sums_in_fp32 = bool(strategy.precision_plugin.ddp_fields().get("grad_reduce_in_fp32"))
        raise_first(optimizer_device_faults(vars(strategy.optimizer_config), device.type, sums_in_fp32))


def check_plain(strategy: "MCoreStrategy", module: pl.LightningModule) -> None:
    """Reject splitting a module by stages or rows if it did not use ``pipeline()``."""
    name, sharding = type(module).__name__, strategy.gradients.data_parallel_sharding
    if sharding is not None:
        raise ValueError(_no_layers(module, sharding))
    if sizes := _sizes_that_split(strategy.layout):
        raise ValueError(
            f"{name} did not build its model with self.pipeline(...), or with hf_model(self, path) for a Hugging Face"
            f" model, so {sizes} cannot split it; call one of these in configure_model, or set every model-parallel"
            " size to 1"
        )
    if strategy.micro_batch_size is not None:
        raise ValueError(
            f"micro_batch_size={strategy.micro_batch_size} needs a model built with self.pipeline(...), but {name} has "
            "none; use a smaller DataLoader batch with accumulate_grad_batches"
        )
    if strategy.gradients.use_layer_wise_distributed_optimizer:
        raise ValueError(
            f"use_layer_wise_distributed_optimizer=True needs a model built with self.pipeline(...), but {name} has"
            " none; set it to False, or use AdamW with use_distributed_optimizer=True"
        )
    check_chunked_loss(strategy.loss_chunk_size, defers_gradient=False, is_ours=False)


def _no_layers(module: pl.LightningModule, sharding: str) -> str:
    return (
        f"data_parallel_sharding={sharding!r} gathers Megatron's transformer layers one by one, and"
        f" {type(module).__name__} did not build its model with self.pipeline(...); derive it from MCoreModule and"
        " build the model there, or set use_distributed_optimizer=True instead"
    )


def _sizes_that_split(layout: ParallelLayout) -> str:
    axes = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel")
    sizes = {f"{axis}_size": getattr(layout, f"{axis}_size") for axis in axes}
    return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def check_backward_is_free(module: pl.LightningModule) -> None:
    """Raise ``ValueError`` for a module that optimizes manually or overrides ``backward``."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"manual optimization is not supported for a model built with pipeline(), as Megatron runs its backward;"
            f" set automatic_optimization = True in {name}"
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{name} overrides backward(), but Megatron runs the backward pass of a model built with pipeline() and"
            " never calls it; remove it, and scale the loss in training_step"
        )


def check_steps_take_batches(module: pl.LightningModule) -> None:
    """Raise ``TypeError`` for ``dataloader_iter``: a step that draws its batches would draw another for every chunk."""
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        function = getattr(module, step)  # None switches a loop off
        if function is not None and is_param_in_hook_signature(function, "dataloader_iter", explicit=True):
            raise TypeError(
                f"{type(module).__name__}.{step}(dataloader_iter) is not supported for a model built with pipeline(),"
                f" whose schedule fetches the batches; define {step}(batch, batch_idx)"
            )


def check_not_compiled(module: pl.LightningModule) -> None:
    """Raise ``ValueError`` for ``torch.compile(module)``, which compiles steps; stages leave theirs in the middle."""
    if module._compiler_ctx is not None:
        name = type(module).__name__
        raise ValueError(
            f"torch.compile({name}(...)) is not supported for a model built with pipeline(), as it compiles"
            f" training_step, which stages leave where the model is called; pass {name}(...) itself to the Trainer"
        )


def check_callbacks(module: pl.LightningModule, distributed: bool, is_split: bool, sharding: str | None = None) -> None:
    """Raise ``ValueError`` for Lightning's callbacks that average or prune weights where they would miss some."""
    # WeightAveraging copies the module when a run begins, StochasticWeightAveraging before configure_model: too early
    # for pipeline(). WeightAveraging also reads parameters that the sharded optimizer may have scattered, and puts the
    # average into the checkpoint, where shards have no place for it.
    kind = type(module).__name__
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if getattr(callback, "averages_shards", False) and sharding is None:
            continue
        if isinstance(callback, WeightAveraging) and sharding is not None:
            raise ValueError(
                f"{name} is not available with data_parallel_sharding={sharding!r}, which frees parameters after each"
                " layer; remove it, or set use_distributed_optimizer=True instead"
            )
        ours = "EMAWeightAveraging" if isinstance(callback, EMAWeightAveraging) else "WeightAveraging"
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging) and is_split:
            what = "an MCoreModule" if isinstance(module, MCoreModule) else f"{kind}, which builds it with hf_model()"
            is_swa = isinstance(callback, StochasticWeightAveraging)
            same = "whose should_update() picks the epochs" if is_swa else "which has the same arguments"
            raise ValueError(
                f"{name} copies the whole module before its model is built, so it does not support {what}; use"
                f" lightning_mcore.callbacks.{ours}, {same}"
            )
        if isinstance(callback, StochasticWeightAveraging) and _builds_later(module):
            raise ValueError(
                f"{name} copies {kind} before configure_model() builds its model, so it would average nothing; build"
                " the model in __init__, or use lightning_mcore.callbacks.WeightAveraging"
            )
        if isinstance(callback, ModelPruning) and _builds_later(module):
            raise ValueError(
                f"{name} looks for weights before configure_model() builds the model of {kind}, so it would find none;"
                " build the model in __init__, or prune saved weights after the run"
            )
        if isinstance(callback, WeightAveraging) and distributed:
            raise ValueError(
                f"{name} writes its average to single-file checkpoints and reads parameters after every step, but"
                " use_distributed_optimizer=True writes shards and may leave parameters scattered; use"
                f" lightning_mcore.callbacks.{ours}, or set it to False"
            )


def _builds_later(module: pl.LightningModule) -> bool:
    """Whether the module's class has a ``configure_model``, which may build its model."""
    return type(module).configure_model is not pl.LightningModule.configure_model


def fixed_dispatch(config: "TransformerConfig") -> str | None:
    """Return the setting that makes ranks with shared experts send equal numbers of tokens; None if there is none."""
    if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
        return "moe_token_dispatcher_type='allgather'"
    if config.num_moe_experts and config.moe_pad_expert_input_to_capacity:
        return "moe_pad_expert_input_to_capacity=True"
    return None


def check_dispatched_shapes(
    config: "TransformerConfig", shapes: Sequence[tuple[int, int] | None], group: dist.ProcessGroup | None = None
) -> None:
    """Raise ``ValueError`` on all ranks if ranks that share experts have microbatches of unequal shapes (a hang).

    ``shapes`` are (sequence length, rows) of this rank's microbatches. If a setting requires equal ones, collective
    over ``group``, which holds the ranks that share experts; None for all ranks, without waiting for the device.
    """
    setting, experts = fixed_dispatch(config), process_group("experts")
    if setting is None or experts.size() == 1:
        return
    found: dict[int, list[Any]] = {}  # of each group that shares experts, by its first rank
    for first, of_rank in all_gather_object((dist.get_process_group_ranks(experts)[0], list(shapes)), group):
        found.setdefault(first, []).append(of_rank)
    for of_group in found.values():
        for microbatch in zip(*of_group, strict=False):
            sizes = sorted({shape for shape in microbatch if shape is not None})
            if len(sizes) > 1:
                shown = " and ".join(f"{rows} x {length}" for length, rows in sizes)
                raise ValueError(
                    f"{setting} sends equal numbers of tokens from all ranks that share experts, but their microbatches"
                    f" have {shown} tokens; choose moe_token_dispatcher_type='alltoall' without padding to capacity, or"
                    " pad all batches to one length"
                )


def stop_iteration_is_an_error(hook: Callable[P, T]) -> Callable[P, T]:
    """Turn the user's StopIteration into a RuntimeError, which loops do not take for the end of data."""

    @functools.wraps(hook)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return hook(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(
                "StopIteration was raised in a step or a hook around it, where it would end the epoch only on this "
                "rank; catch it there, as next(iterator, default) does"
            ) from error

    return run
