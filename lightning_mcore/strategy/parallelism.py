# SPDX-License-Identifier: Apache-2.0
"""The ranks of ``MCoreStrategy``: settings, process groups and collectives.

:class:`MCoreParallelism` is the half of the strategy that knows nothing of steps: it takes the settings and refuses
wrong ones before anything is allocated, opens and closes the process groups, tells samplers which ranks read the same
data, and says over which ranks a metric is averaged and a decision is taken. ``strategy.py`` builds the other half on
it.
"""

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore.config.checks import require_flag, require_size
from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.spec import choice_of_attention_restored
from lightning_mcore.optimizer.rules import check_optimizer_config, check_optimizer_device
from lightning_mcore.parallel import rank_watch
from lightning_mcore.parallel.consensus import all_true
from lightning_mcore.parallel.cpu_runtime import absent_names_bound, cpu_runtime
from lightning_mcore.parallel.groups import (
    align_random_state,
    collectives_issued,
    open_process_groups,
    process_group,
    process_groups_are_open,
)
from lightning_mcore.parallel.rank_connections import check_rendezvous
from lightning_mcore.strategy.averaging import check_averaging
from lightning_mcore.strategy.fp8_checks import FP8Machine
from lightning_mcore.strategy.fp8_checks import check_run as check_fp8
from lightning_mcore.strategy.gradients import GradientSettings, reduce_scatter_restored
from lightning_mcore.strategy.logs.step import ALREADY_MERGED
from lightning_mcore.strategy.module import MCoreModule
from lightning_mcore.strategy.overlap import TensorParallelOverlap, queue_hint
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.resume import ExactResume


class _WatchingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, with a watch over the runs that go through it."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        with rank_watch.run(lambda: self.procs):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[rank_watch.LAUNCHED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[rank_watch.LAUNCHED_BY]


class MCoreParallelism(DDPStrategy):
    """Settings, process groups and collectives of :class:`~lightning_mcore.MCoreStrategy`.

    Args:
        tensor_model_parallel_size: Ranks that share each matrix.
        pipeline_model_parallel_size: Ranks that share the layers, each a stage.
        virtual_pipeline_model_parallel_size: Chunks of layers on each stage (interleaved schedule); None for one.
        pipeline_model_parallel_layout: Which layers each stage holds, as Megatron writes it, such as ``"E,t*3|t*5,L"``.
        context_parallel_size: Ranks that share each sequence.
        expert_model_parallel_size: Ranks that share the experts of a mixture-of-experts model.
        expert_tensor_parallel_size: Ranks that share each expert's matrices; None for the tensor-parallel size.
        sequence_parallel: Share the activations between tensor-parallel regions over the same ranks.
        use_distributed_optimizer: Shard the optimizer state over the data-parallel ranks.
        overlap_grad_reduce: Reduce gradients while backward still runs.
        overlap_param_gather: Gather updated parameters while the next forward runs; needs both of the above.
        align_grad_reduce: With ``overlap_grad_reduce`` in a pipeline: let all stages reduce at the same time.
        overlap_p2p_comm: Send between stages while computing; None turns it on for the interleaved schedule.
        microbatch_group_size_per_vp_stage: Microbatches that the interleaved schedule runs through one chunk before it
            turns to the next; None for the pipeline size.
        tp_comm_overlap: Send parts of a tensor-parallel layer's result while it computes the next; needs CUDA,
            TransformerEngine and sequence parallelism.
        tp_comm_overlap_cfg: A YAML file that says how each layer does it; None for TransformerEngine's defaults.
        micro_batch_size: Rows of a microbatch; cuts each DataLoader batch. None: a DataLoader batch is one microbatch.
        ddp_config: Megatron's config for gradients, for what has no argument here.
        optimizer_config: Megatron's config for its optimizers, for what has no other home: offload to the host, types
            of the optimizer's state, counting zeros. Learning rates and the like are the torch optimizer's.
        communication: Rarely used options of process groups and of the traffic between pipeline stages.
        cluster_environment: Where ranks and addresses come from; None lets Lightning find out.
        checkpoint_io: How one-file checkpoints are written.
        precision_plugin: An :class:`MCorePrecision`; usually ``Trainer(precision=...)`` says it.
        process_group_backend: Backend of torch.distributed; None for nccl on CUDA and gloo on the CPU.
        timeout: How long a collective may wait before the run fails.

    Raises:
        ValueError: Settings that contradict each other, as soon as they are known: here, when the trainer meets the
            model, or when the model is built; always before process groups or parameters that they would spoil.
    """

    def __init__(
        self,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        pipeline_model_parallel_layout: str | list[list[str]] | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        sequence_parallel: bool = False,
        use_distributed_optimizer: bool | None = None,
        overlap_grad_reduce: bool | None = None,
        overlap_param_gather: bool | None = None,
        align_grad_reduce: bool = False,
        overlap_p2p_comm: bool | None = None,
        microbatch_group_size_per_vp_stage: int | None = None,
        tp_comm_overlap: bool = False,
        tp_comm_overlap_cfg: str | None = None,
        micro_batch_size: int | None = None,
        ddp_config: DistributedDataParallelConfig | None = None,
        optimizer_config: OptimizerConfig | None = None,
        communication: CommunicationOptions | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.layout = ParallelLayout(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            pipeline_model_parallel_layout=pipeline_model_parallel_layout,
            context_parallel_size=context_parallel_size,
            expert_model_parallel_size=expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            sequence_parallel=sequence_parallel,
        )
        self.gradients = GradientSettings(
            use_distributed_optimizer, overlap_grad_reduce, overlap_param_gather, ddp_config, align_grad_reduce
        )
        check_optimizer_config(optimizer_config, self.gradients.distributed)
        self.optimizer_config = optimizer_config
        self.overlap_p2p_comm = _resolve_overlap_p2p(overlap_p2p_comm, self.layout)
        self.microbatch_group_size = _checked_group_size(microbatch_group_size_per_vp_stage, self.layout)
        self.communication = communication or CommunicationOptions()
        self.communication.check_layout(self.layout, self.overlap_p2p_comm, self.gradients.num_instances)
        self.tensor_overlap = TensorParallelOverlap(tp_comm_overlap, tp_comm_overlap_cfg, self.layout)
        _check_alignment(self.gradients, self.layout)
        self.micro_batch_size = _checked_micro_batch_size(micro_batch_size)
        self._runtime = contextlib.ExitStack()
        self.resume = ExactResume(self, self.layout)
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    # ---- before anything is allocated

    @property
    def precision_plugin(self) -> MCorePrecision:
        """The number formats; ``32-true`` if nothing else was asked for."""
        if self._precision_plugin is None:
            self._precision_plugin = MCorePrecision()
        assert isinstance(self._precision_plugin, MCorePrecision)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = MCorePrecision.from_lightning(plugin) if plugin is not None else None
        if self._precision_plugin is not None:
            self.gradients.resolve(self._precision_plugin.ddp_fields())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one model copy read the same samples; model copies read different ones."""
        world_size = self.num_nodes * self.num_processes
        rank = self.layout.coordinates(self.global_rank, world_size).data_parallel_rank
        return {"num_replicas": self.layout.data_parallel_size(world_size), "rank": rank}

    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes > 1:  # nothing to launch for one process
            assert self.cluster_environment is not None
            self._launcher = _WatchingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def connect(self, model: pl.LightningModule) -> None:
        """Meet the model: check its shape against the layout and the world, before process groups form."""
        world_size = self.num_nodes * self.num_processes
        self.layout.validate_world(world_size)
        _check_module(model, self.layout)
        self.precision_plugin.builds_plain_module = not isinstance(model, MCoreModule)
        ddp_config = self.gradients.resolve(self.precision_plugin.ddp_fields())
        machine = FP8Machine.of(self.root_device)
        hint = queue_hint(self.layout, machine.capability, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        if hint is not None and machine.type == "cuda":
            rank_zero_warn(hint)
        settings = (self.layout, ddp_config, self.optimizer_config, machine, self.micro_batch_size)
        check_fp8(self.precision_plugin.fp8, model, *settings)
        if isinstance(model, MCoreModule):
            shape = model.model_shape()
            if shape is not None:
                self.layout.validate_model(shape)
            model.check_settings()
        _check_expert_tensor_parallel(self.layout, self.root_device)
        self._check_device(world_size)
        if self._layer_sync is not None and self.root_device.type == "cpu" and not isinstance(model, MCoreModule):
            raise ValueError(
                "sync_batchnorm=True needs GPUs, which torch's SyncBatchNorm runs on alone; set it to False"
            )
        if model._trainer is not None:  # Trainer(...).strategy.connect(model) is a way to save a model before any run
            _check_one_precision(model.trainer, self.precision_plugin)
            if model.trainer.state.fn == TrainerFn.FITTING:
                self._check_fit(model)
        super().connect(model)

    def _check_device(self, world_size: int) -> None:
        self.gradients.check_run(self.layout, world_size, self.root_device)
        self.communication.check_device(self.root_device)
        self.tensor_overlap.check_device(self.root_device)
        check_optimizer_device(self.optimizer_config, self.root_device, self.precision_plugin.ddp_fields())

    def _check_fit(self, model: pl.LightningModule) -> None:
        if self.micro_batch_size is None:
            self.layout.validate_microbatches(model.trainer.accumulate_grad_batches, self.microbatch_group_size)
        check_averaging(model, self.gradients.distributed)

    def setup_environment(self) -> None:
        """Open the process groups, on the CPU inside the CPU runtime."""
        self._runtime.enter_context(self.runtime())
        self._runtime.enter_context(reduce_scatter_restored())
        self._runtime.enter_context(choice_of_attention_restored())
        super().setup_environment()

    def runtime(self) -> contextlib.AbstractContextManager[None]:
        """Return what Megatron's code runs in: the CPU runtime on the CPU. It may be entered again inside itself."""
        return cpu_runtime() if self.root_device.type == "cpu" else absent_names_bound()

    def setup_distributed(self) -> None:
        """Let Lightning open the default group, then open Megatron's and make random states agree."""
        timeout = self._timeout or timedelta(minutes=30)
        if self.global_rank and not dist.is_initialized():
            place = self.cluster_environment
            assert place is not None  # for mypy
            check_rendezvous(place.main_address, place.main_port, timeout.total_seconds())
        super().setup_distributed()
        rank_watch.begin(collectives_issued(), timeout.total_seconds())
        seed = os.environ.get("PL_GLOBAL_SEED") or self.broadcast(torch.initial_seed())
        options = {
            "num_distributed_optimizer_instances": self.gradients.num_instances,
            **self.communication.group_arguments(),
        }
        open_process_groups(self.layout, int(seed) % 2**31, timeout, options)
        align_random_state()
        world_size = dist.get_world_size()
        rank_zero_info(f"MCoreStrategy: {self.layout.describe(world_size)}")

    def process_dataloader(self, dataloader: object) -> object:
        """Seed dataloader workers by data-parallel rank, so that ranks of one model copy augment alike."""
        self.resume.process_dataloader(dataloader)
        seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
        if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=process_group("dp").rank())
        return dataloader

    def megatron_fields(self) -> dict[str, Any]:
        """Return the ``TransformerConfig`` fields that this strategy and its precision own."""
        layout = self.layout
        return {
            "tensor_model_parallel_size": layout.tensor_model_parallel_size,
            "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
            "pipeline_model_parallel_layout": layout.pipeline_model_parallel_layout,
            "context_parallel_size": layout.context_parallel_size,
            "expert_model_parallel_size": layout.expert_model_parallel_size,
            "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
            "sequence_parallel": layout.sequence_parallel,
            "overlap_p2p_comm": self.overlap_p2p_comm,
            "microbatch_group_size_per_vp_stage": self.microbatch_group_size or layout.pipeline_model_parallel_size,
            "tp_comm_overlap": self.tensor_overlap.enabled,
            **self.communication.megatron_fields(layout, self.overlap_p2p_comm, self.root_device),
            **self.precision_plugin.megatron_fields(),
        }

    def _check_plain(self, module: pl.LightningModule) -> None:
        """Refuse to split, by stages or by rows, a module that built nothing with ``pipeline()``."""
        name = type(module).__name__
        if sizes := _sizes_that_split(self.layout):
            raise ValueError(
                f"{name} did not build its model with self.pipeline(...), so {sizes} cannot split it; "
                "call it in configure_model, or set every model-parallel size to 1"
            )
        if self.micro_batch_size is not None:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} needs a model built with self.pipeline(...), {name} has "
                "none; use a smaller DataLoader batch with accumulate_grad_batches"
            )

    # ---- collectives: metrics over the data-parallel ranks, decisions over the world

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks; ranks of one model copy hold the same value already."""
        if group == ALREADY_MERGED:
            return tensor
        if isinstance(tensor, Tensor):
            if str(reduce_op).lower() in ("mean", "avg") and not tensor.is_floating_point():
                tensor = tensor.double()  # Lightning would cut off the fraction of a mean, as of a number of rows
            return _sync_ddp_if_available(tensor, self._or_data_parallel(group), reduce_op=reduce_op)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data-parallel ranks."""
        return super().all_gather(tensor, self._or_data_parallel(group), sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree with every rank of the world: on yes if all say so, or with ``all=False`` if any does."""
        if not dist.is_initialized():
            return decision
        return all_true(decision) if all else not all_true(not decision)  # without waiting for a GPU

    @staticmethod
    def _or_data_parallel(group: Any) -> Any:
        return process_group("dp") if group is None and process_groups_are_open() else group


def _resolve_overlap_p2p(given: bool | None, layout: ParallelLayout) -> bool:
    require_flag("overlap_p2p_comm", given, or_none=True)
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    if given and not interleaved:
        raise ValueError(
            "overlap_p2p_comm=True needs the interleaved schedule; set virtual_pipeline_model_parallel_size=2 or more"
        )
    return interleaved if given is None else given


def _checked_group_size(given: int | None, layout: ParallelLayout) -> int | None:
    if given is None:
        return None
    require_size("microbatch_group_size_per_vp_stage", given)
    if layout.virtual_pipeline_model_parallel_size is None:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage={given} needs the interleaved schedule; set"
            " virtual_pipeline_model_parallel_size=2 or more, or leave it None"
        )
    layout.validate_microbatches(given, given)
    return given


def _check_alignment(gradients: GradientSettings, layout: ParallelLayout) -> None:
    if gradients.align_grad_reduce and layout.pipeline_model_parallel_size == 1:
        raise ValueError(
            "align_grad_reduce=True acts between pipeline stages alone; set pipeline_model_parallel_size=2 or more, or"
            " leave it out"
        )
    if gradients.resolve().align_param_gather and layout.virtual_pipeline_model_parallel_size is None:
        raise ValueError(
            "ddp_config.align_param_gather=True acts in the interleaved schedule alone; set"
            " virtual_pipeline_model_parallel_size=2 or more, or leave it out"
        )


def _checked_micro_batch_size(micro_batch_size: int | None) -> int | None:
    if micro_batch_size is not None:
        require_size("micro_batch_size", micro_batch_size)
    return micro_batch_size


def _check_module(module: pl.LightningModule, layout: ParallelLayout) -> None:
    """Refuse to split a module that does not say how."""
    sizes = _sizes_that_split(layout)
    if sizes and not isinstance(module, MCoreModule):
        raise TypeError(
            f"{sizes} cannot split {type(module).__name__}: derive it from MCoreModule and build its model with"
            " self.pipeline(...) in configure_model, or set every model-parallel size to 1"
        )


def _check_one_precision(trainer: pl.Trainer, plugin: MCorePrecision) -> None:
    """Refuse two precisions: Lightning takes the strategy's and forgets the trainer's."""
    asked = trainer._accelerator_connector._precision_flag
    if asked not in ("32-true", plugin.precision):  # "32-true" also stands where nothing was asked for
        raise ValueError(
            f"Trainer(precision={asked!r}) contradicts the precision_plugin of MCoreStrategy, which has"
            f" {plugin.precision!r}; set it in one place"
        )


def _sizes_that_split(layout: ParallelLayout) -> str:
    axes = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel")
    sizes = {f"{axis}_size": getattr(layout, f"{axis}_size") for axis in axes}
    return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def _check_expert_tensor_parallel(layout: ParallelLayout, device: torch.device) -> None:
    if device.type == "cpu" and layout.expert_model_parallel_size > 1 and layout.expert_tensor_size > 1:
        raise ValueError(
            f"expert_tensor_parallel_size={layout.expert_tensor_size} with "
            f"expert_model_parallel_size={layout.expert_model_parallel_size} needs collectives of uneven sizes, which"
            " gloo does not have on the CPU; set expert_tensor_parallel_size=1"
        )


# A command line reads the help of an option off the constructor, or the class that is named: not off a base of it.
MCoreParallelism.__init__.__doc__ = MCoreParallelism.__doc__
