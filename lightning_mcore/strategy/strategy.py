# SPDX-License-Identifier: Apache-2.0
"""``MCoreStrategy``: Lightning's hooks on megatron-core, in the order in which the trainer calls them.

Each hook is a few lines that delegate to another file. The words that they share:

* *run*: one call of ``fit``, ``validate``, ``test`` or ``predict``, from ``setup_environment`` to ``teardown``.
* *chunk*: the layers of one virtual pipeline stage. Between ``setup`` and ``teardown``, chunks are in Megatron's
  wrappers. A *plain module*, which does not use ``pipeline()``, is a single chunk.
* *runner*: what runs the module's steps. :class:`PipelineRunner` runs them on Megatron's schedules, which include the
  backward pass; :class:`PlainModuleRunner` runs a plain module *inline*, in Lightning's own loop.
* *shards*: the files of a checkpoint directory, for a model built with ``pipeline()`` or a sharded optimizer. Any other
  run saves one file.
* *scattered parameters*: with ``overlap_param_gather``, each rank has a part of the updated parameters until the next
  forward pass gathers them.
* *CPU runtime*: replaces the CUDA functions that Megatron calls (``parallel/cpu_runtime.py``).

The base class, ``DDPStrategy``, opens torch's process group and knows ranks and devices. Its ``setup`` and ``teardown``
are not called, because they would wrap the module in torch's DDP, and move it to the CPU. Everything that a run changes
outside the strategy (metrics, callbacks, loaders, settings of torch and Megatron) is restored in ``teardown``.
"""

import contextlib
import copy
import os
from collections import UserDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.loss_chunks import LossChunkSize, checked_chunk_size
from lightning_mcore.config.text import human
from lightning_mcore.layers.host_values import keep_on_host
from lightning_mcore.layers.metrics import sum_tokens_seen
from lightning_mcore.layers.spec import attention_environment_restored
from lightning_mcore.optimizer.factory import check_groups, configure_optimizers, describe_groups, make_optimizer
from lightning_mcore.optimizer.megatron import MCoreOptimizer, optimizer_after_run
from lightning_mcore.optimizer.plateau import agree_on_plateaus
from lightning_mcore.optimizer.rules import check_optimizer_config, what_needs_one_optimizer
from lightning_mcore.parallel import rank_watch
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.chunks import (
    ModelChunks,
    count_parameters,
    find_pipeline,
    synchronize_parameters,
    unwrap_chunks,
)
from lightning_mcore.parallel.consensus import all_true, any_true, combine_on_rank0, run_on_all_ranks
from lightning_mcore.parallel.cpu_runtime import cpu_runtime, gpu_runtime
from lightning_mcore.parallel.groups import (
    align_random_state,
    collectives_issued,
    open_process_groups,
    process_group,
    process_groups_are_open,
)
from lightning_mcore.parallel.known_warnings import ignore_known_warnings
from lightning_mcore.parallel.random_state import new_seed
from lightning_mcore.parallel.rank_connections import rendezvous
from lightning_mcore.strategy.checkpointing import EXCEPTION_TIMEOUT, Checkpoints, last_checkpoint
from lightning_mcore.strategy.checks import (
    check_against_layout,
    check_arguments,
    planned_world_size,
    stop_iteration_is_an_error,
    validate_module,
)
from lightning_mcore.strategy.gradient_settings import GradientSettings, reduce_scatter_restored
from lightning_mcore.strategy.logs.pipeline import ALREADY_MERGED
from lightning_mcore.strategy.logs.step import StepLogger
from lightning_mcore.strategy.notebook import NotebookLauncher
from lightning_mcore.strategy.overlap import TensorParallelOverlap
from lightning_mcore.strategy.pipeline_runner import PipelineRunner, wrap_pipeline
from lightning_mcore.strategy.plain_module_runner import PlainModuleRunner
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.preemption import install_sigterm_handler, prepare_signals
from lightning_mcore.strategy.resume import ExactResume
from lightning_mcore.strategy.same_batches import SameBatches
from lightning_mcore.strategy.step_runner import StepRunner
from lightning_mcore.strategy.summary import summaries_of_the_whole

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class MCoreStrategy(DDPStrategy):
    """Train a LightningModule on every parallel axis of megatron-core.

    Use ``Trainer(strategy=MCoreStrategy(tensor_model_parallel_size=2))``; ``Trainer(strategy="mcore")`` sets every
    parallel size to 1.

    Args:
        tensor_model_parallel_size: Number of ranks across which each weight matrix is split.
        pipeline_model_parallel_size: Number of pipeline stages across which the layers are split.
        virtual_pipeline_model_parallel_size: Chunks of layers on each stage (interleaved schedule); None for one.
        pipeline_model_parallel_layout: Which layers each stage holds, as Megatron writes it, such as ``"E,t*3|t*5,L"``;
            None splits them evenly.
        context_parallel_size: Number of ranks across which each sequence is split.
        expert_model_parallel_size: Number of ranks across which the experts of a mixture-of-experts model are
            distributed.
        expert_tensor_parallel_size: Number of ranks across which each expert's matrices are split; None for the
            tensor-parallel size.
        sequence_parallel: Split the activations between matrix multiplications across the tensor-parallel ranks.
        hybrid_context_parallel: Split each packed document across as few context-parallel ranks as have room for it:
            one, all, or a half, a quarter and so on of them. Microbatches then have one row.
        use_distributed_optimizer: Shard the optimizer state over the data-parallel ranks; None for the value in
            ``ddp_config``, False by default.
        use_layer_wise_distributed_optimizer: Shard the state of any torch optimizer, such as ``MuonWithAdamW``, by
            whole parameters over the data-parallel ranks; instead of ``use_distributed_optimizer``.
        data_parallel_sharding: What Megatron's FSDP shards across the data-parallel ranks: with
            ``"optim_grads_params"``, optimizer state, gradients and parameters, which are gathered one layer at a time
            (ZeRO-3); with ``"optim_grads"``, all but the parameters (ZeRO-2). None for no FSDP.
        overlap_grad_reduce: Reduce gradients while backward still runs; None for the value in ``ddp_config``, False by
            default.
        overlap_param_gather: Gather updated parameters while the next forward runs; needs ``use_distributed_optimizer``
            and ``overlap_grad_reduce``. None for the value in ``ddp_config``, False by default.
        align_grad_reduce: With ``overlap_grad_reduce`` in a pipeline: reduce on all stages at the same time.
        overlap_p2p_comm: Send between stages while computing; None turns it on for the interleaved schedule.
        microbatch_group_size_per_vp_stage: Microbatches that the interleaved schedule runs through one chunk before the
            next; None for the pipeline size.
        tp_comm_overlap: Send parts of a tensor-parallel layer's result while it computes the next; needs CUDA,
            TransformerEngine and sequence parallelism.
        tp_comm_overlap_cfg: A YAML file with the overlap settings of each layer; None for TransformerEngine's defaults.
        micro_batch_size: Split each DataLoader batch into microbatches of this many rows, also in evaluation; None
            makes each batch one microbatch.
        loss_chunk_size: Tokens that go through the output layer and the loss at once, so that a whole row's logits are
            never in memory; backward computes them again. ``"auto"``: 1,024 if a microbatch has at least 2,048 tokens
            and more than 2**26 logits on a rank, and the model is built of GPTChunk; None: all tokens in training,
            1,024 in evaluation.
        broadcast_batches: Let one rank of each model copy read the batches and send them to the others, for data that
            costs more to read than to send. By default all ranks of a copy read, and their batches are compared.
        ddp_config: Megatron's config for gradients, for settings that have no argument here; None for its
            defaults.
        optimizer_config: Megatron's config for its optimizers: offload to the host, dtypes of the optimizer's state,
            counting zeros; None for its defaults. Learning rates and similar settings belong to the torch optimizer.
        communication: Rarely used options of process groups and of the traffic between pipeline stages; None
            for their defaults.
        cluster_environment: Where ranks and addresses come from; None lets Lightning detect it.
        checkpoint_io: The plugin that writes and reads checkpoints; None for an :class:`MCoreCheckpointIO`, which split
            models need.
        precision_plugin: An :class:`MCorePrecision`; usually set through ``Trainer(precision=...)``; None for
            ``"32-true"``.
        process_group_backend: Backend of torch.distributed; None for nccl on CUDA and gloo on the CPU.
        timeout: How long a collective may wait before the run fails.

    Raises:
        TypeError: An argument is an object of another class.
        ValueError: Settings contradict each other. Raised as soon as the conflict is known: here, when the trainer gets
            the model, or when the model is built; always before the affected process groups or parameters exist.

    Examples:
        >>> from lightning_mcore import MCoreStrategy
        >>> strategy = MCoreStrategy(tensor_model_parallel_size=2, sequence_parallel=True)
        >>> strategy.layout.in_words(world_size=8)
        'tensor 2, data 4, sequence parallel'
    """

    # Defaults on the class, because a pickled copy of the strategy has no such attributes of its own (__getstate__).
    _chunks: ModelChunks | None = None  # of this run
    _finished_chunks: ModelChunks | None = None  # of the last run, unwrapped; trainer.save_checkpoint() saves them

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
        hybrid_context_parallel: bool = False,
        use_distributed_optimizer: bool | None = None,
        use_layer_wise_distributed_optimizer: bool = False,
        data_parallel_sharding: str | None = None,
        overlap_grad_reduce: bool | None = None,
        overlap_param_gather: bool | None = None,
        align_grad_reduce: bool = False,
        overlap_p2p_comm: bool | None = None,
        microbatch_group_size_per_vp_stage: int | None = None,
        tp_comm_overlap: bool = False,
        tp_comm_overlap_cfg: str | None = None,
        micro_batch_size: int | None = None,
        loss_chunk_size: LossChunkSize = "auto",
        broadcast_batches: bool = False,
        ddp_config: DistributedDataParallelConfig | None = None,
        optimizer_config: OptimizerConfig | None = None,
        communication: CommunicationOptions | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
    ) -> None:
        check_arguments(  # the others are checked by the classes below
            communication=communication,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            micro_batch_size=micro_batch_size,
        )
        self.layout = ParallelLayout(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            pipeline_model_parallel_layout=pipeline_model_parallel_layout,
            context_parallel_size=context_parallel_size,
            expert_model_parallel_size=expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            sequence_parallel=sequence_parallel,
            hybrid_context_parallel=hybrid_context_parallel,
        )
        kinds = (use_layer_wise_distributed_optimizer, data_parallel_sharding)
        self.gradients = GradientSettings(
            *(use_distributed_optimizer, overlap_grad_reduce, overlap_param_gather, ddp_config),
            *(*kinds, align_grad_reduce),
        )
        self.tensor_overlap = TensorParallelOverlap(tp_comm_overlap, tp_comm_overlap_cfg, self.layout)
        self.communication = communication or CommunicationOptions()
        self.overlap_p2p_comm = self.layout.is_interleaved if overlap_p2p_comm is None else overlap_p2p_comm
        self.microbatch_group_size = microbatch_group_size_per_vp_stage
        check_against_layout(self, asked_overlap_p2p_comm=overlap_p2p_comm)
        check_optimizer_config(optimizer_config, self.gradients.distributed)
        self.micro_batch_size = micro_batch_size
        self.loss_chunk_size = checked_chunk_size(loss_chunk_size)
        self.optimizer_config = optimizer_config
        self.checkpoints = Checkpoints(self)
        self.resume = ExactResume(self, self.layout)
        self.batches = SameBatches(self, broadcast_batches)
        self.logs = StepLogger(self)
        self._runner: StepRunner = PlainModuleRunner(self)
        self._restores = contextlib.ExitStack()  # undoes what the run changes outside; teardown, after an error too
        super().__init__(  # last, because it sets precision_plugin, whose setter reads self.gradients
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    # ---- the trainer is created

    @property
    def precision_plugin(self) -> MCorePrecision:
        """The number formats; ``32-true`` by default."""
        if self._precision_plugin is None:  # Lightning sets its own after __init__, if it has one
            self._precision_plugin = MCorePrecision()
        assert isinstance(self._precision_plugin, MCorePrecision)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = MCorePrecision.from_lightning(plugin) if plugin is not None else None
        if self._precision_plugin is not None:
            self.gradients.check_precision(self._precision_plugin.ddp_fields())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments that make ranks of one model copy read the same samples, and model copies read different ones."""
        world_size = planned_world_size(self)
        rank = self.layout.coordinates(self.global_rank, world_size).data_parallel_rank
        return {"num_replicas": self.layout.data_parallel_size(world_size), "rank": rank}

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes and reads checkpoints; :class:`~lightning_mcore.MCoreCheckpointIO` by default."""
        # Not in __init__, after which Lightning may set a plugin of the user's, also one that wraps the default.
        self._checkpoint_io = self.checkpoints.resolve_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def _configure_launcher(self) -> None:
        """Start other ranks as Lightning does, but end all ranks if one fails; a single rank needs no launcher.

        In a notebook all ranks are new processes.
        """
        if self.num_processes * self.num_nodes > 1:
            assert self.cluster_environment is not None
            if _IS_INTERACTIVE and not self.cluster_environment.creates_processes_externally:
                self._launcher = NotebookLauncher(self, self._restores)
                return
            self._launcher = rank_watch.Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    # ---- a run starts

    def connect(self, model: pl.LightningModule) -> None:
        """Attach the model and check it against the settings, before process groups form."""
        ignore_known_warnings()
        validate_module(self, model)
        self.precision_plugin.prepare_to_build(model)
        super().connect(model)

    def setup_environment(self) -> None:
        """Open the process groups; on the CPU, inside the CPU runtime."""
        self._restores.enter_context(self.runtime())
        self._restores.enter_context(reduce_scatter_restored())  # Megatron's DistributedDataParallel may replace it
        self._restores.enter_context(attention_environment_restored())  # Megatron's models set its variables
        super().setup_environment()  # calls setup_distributed
        if self.lightning_module is not None:
            prepare_signals(self.lightning_module.trainer, self._restores)

    def setup_distributed(self) -> None:
        """Let Lightning open the default group, then open Megatron's and make random states agree."""
        timeout = self._timeout or _DEFAULT_TIMEOUT
        assert self.cluster_environment is not None
        # The ranks meet before torch's group opens, so that a rank that never comes is named in the error.
        meeting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not dist.is_initialized():
            meeting = rendezvous(self.cluster_environment, timeout.total_seconds())
        with meeting:
            super().setup_distributed()
        rank_watch.begin(collectives_issued(), timeout.total_seconds())  # from now on, a failed rank ends the others
        # All ranks use rank 0's seed: that of seed_everything, or else a new one for each run.
        seed = int(self.broadcast(os.environ.get("PL_GLOBAL_SEED") or new_seed()))
        options: dict[str, Any] = {"num_distributed_optimizer_instances": self.gradients.num_instances}
        options |= self.communication.group_arguments()
        # Below 2**31, because Megatron adds up to some thousands for each stage, and numpy takes seeds below 2**32.
        open_process_groups(self.layout, seed % 2**31, timeout, options)
        align_random_state()  # for hooks, configure_model and samplers
        ranks = dist.get_world_size()
        number = "1 rank" if ranks == 1 else f"{ranks} ranks"
        rank_zero_info(f"MCoreStrategy: {self.layout.describe(ranks)} ({number}: {self.layout.in_words(ranks)})")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning reads a checkpoint only after ``setup``: no.

        Lightning's own part and single-file weights are read before ``setup``. Shards are read during ``setup``, into
        the wrapped model, and single-file optimizer state after it.
        """
        return False

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, or Lightning's part of a directory; the shards are read in ``setup``."""
        return self.checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a single-file checkpoint; with shards, only module state outside the chunks."""
        self.checkpoints.load_model(checkpoint, strict)

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model, create the optimizers and read the shards of the checkpoint to resume from."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.checkpoints.prepare_links(trainer, self._restores)  # of ModelCheckpoint(save_last="link")
        self.resume.setup()
        self.batches.counts.setup(trainer)
        self.logs.setup(self._restores)
        # Optimizers need the gradient buffers of the wrapped model, and shards fill both.
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._wrap_model(self._module, fitting)
        if fitting:
            self._show_size()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.checkpoints.load_pending(fitting)
        # Megatron caches tensors, which could not be used in training if inference mode had created them.
        of_fit = trainer.fit_loop.epoch_loop.val_loop
        loops = [of_fit, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
        self._restores.enter_context(attributes_set(loops, {"inference_mode": False}))
        align_random_state()  # again, because stages may have drawn different numbers for their weights

    def _wrap_model(self, module: pl.LightningModule, fitting: bool) -> None:
        """Put the model into Megatron's wrappers and choose the runner of its steps, until :meth:`_unwrap_model`."""
        module.to(self.root_device)
        ddp_config = self.gradients.megatron_config(self.precision_plugin.ddp_fields()) if fitting else None
        pipeline = find_pipeline(module)
        if pipeline is not None:
            self._chunks = wrap_pipeline(self, module, pipeline, ddp_config)
            self._runner = PipelineRunner(self, module, self._chunks)
            self.precision_plugin.attach_runner(self._runner)
        else:
            runner = PlainModuleRunner(self)
            self._runner = runner
            self.precision_plugin.attach_runner(runner)
            # Wrapped last, because wrap() lets the plugin cast the module.
            self._chunks = runner.wrap(module, ddp_config, self._restores)

    def _show_size(self) -> None:
        """Say how large a split model is, and let Lightning's summary count all of it."""
        if self.layout.model_parallel_size > 1 or self.layout.expert_model_parallel_size > 1:
            self._restores.enter_context(summaries_of_the_whole(self._module.trainer, self.layout))
            whole = human(count_parameters(self.chunks, self.layout))
            own = human(sum(parameter.numel() for chunk in self.chunks.bare for parameter in chunk.parameters()))
            rank_zero_info(f"MCoreStrategy: the model has {whole} parameters; rank 0 holds {own}")

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers of ``configure_optimizers`` so that ``step`` runs Megatron's optimizer step."""
        self._reset_optimizers_and_schedulers()
        ddp_config = self.gradients.megatron_config()
        needs_one = what_needs_one_optimizer(
            self.inline, ddp_config.use_distributed_optimizer, ddp_config.overlap_grad_reduce
        )
        optimizers, self.lr_scheduler_configs = run_on_all_ranks(lambda: configure_optimizers(self._module, needs_one))
        combine_on_rank0(lambda: describe_groups(optimizers), check_groups)
        agree_on_plateaus(self.lr_scheduler_configs, self.root_device)
        setting = self.precision_plugin.optimizer_setting(
            self.layout,
            ddp_config,
            self.optimizer_config,
            self.inline,
            layer_wise=self.gradients.use_layer_wise_distributed_optimizer,
        )
        self.optimizers = [make_optimizer(optimizer, self.chunks.ddp, setting) for optimizer in optimizers]
        if setting.scaler is not None and not self.inline:
            (optimizer,) = self.megatron_optimizers  # not several, as checked above
            self.chunks.scale_losses(optimizer.megatron.scale_loss)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state; state in shards is already loaded."""
        self.checkpoints.load_optimizers(checkpoint)

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by data-parallel rank, track the position in the data, and compare the batches of the ranks."""
        self.resume.process_dataloader(dataloader)
        return self.batches.follow(dataloader)

    # ---- training

    def on_train_start(self) -> None:
        """Continue from the checkpoint."""
        self.batches.counts.check_training()
        install_sigterm_handler(self._module.trainer)
        self.resume.on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Complete an asynchronous save if all its files are written."""
        self.checkpoints.poll()

    @stop_iteration_is_an_error
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; in evaluation, without samples that the sampler repeats."""
        batch = self._move_to_device(batch, device, dataloader_idx)
        trainer = self._module.trainer
        self.resume.batch_arrives()
        if trainer.validating or trainer.sanity_checking or trainer.testing:
            batch = self.logs.drop_repeated_rows(batch, dataloader_idx)
        return batch

    def _move_to_device(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """Move a batch as Lightning does; its integers stay readable on the host, without waiting for the device."""
        # Lightning's selector finds the owner of a hook: the module or datamodule.
        hooks = self._module.trainer._data_connector._datahook_selector

        def overrides(name: str) -> bool:
            return hooks is not None and is_overridden(name, hooks.get_instance(name))

        # Only these two of the user's hooks may make the moved batch differ from the batch on the host.
        may_change = overrides("transfer_batch_to_device") or overrides("on_after_batch_transfer")
        if isinstance(batch, UserDict) and not may_change and not overrides("on_before_batch_transfer"):
            # A BatchEncoding of transformers. Its own to(), which Lightning would call, changes the batch, and waits
            # for the device with each tensor.
            moved = copy.copy(batch)
            moved.data = super().batch_to_device(batch.data, device, dataloader_idx)
        else:
            moved = super().batch_to_device(batch, device, dataloader_idx)
        if hooks is not None and not may_change:
            keep_on_host(moved, batch)
        return moved

    @stop_iteration_is_an_error
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; with a pipeline, keep the batch until the window of ``accumulate_grad_batches`` is full."""
        return self._runner.training_step(args, kwargs)

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Keep gradients on this rank while Lightning accumulates."""
        return self._runner.block_backward_sync()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: unlike torch's DDP, Megatron needs no preparation for the loss, a scalar ``[]``."""

    @stop_iteration_is_an_error
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, and log; then gather scattered parameters if something other than the next step may read them.

        Hooks may read them at the end of an epoch or run. In manual optimization, the rest of the training step may
        too.
        """
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.logs.complete_training_step()
        if self.is_set_up and (self.ends_epoch or not self._module.automatic_optimization):
            self.complete_parameters()
        return result

    def on_train_end(self) -> None:
        """Wait for saves in flight, and gather parameters, because a run may end in the middle of an epoch."""
        self.resume.on_train_end()
        self.checkpoints.finish()
        self.complete_parameters()

    # ---- evaluation

    def on_validation_start(self) -> None:
        """Count batches from the start; inside ``fit``, keep the random state of training."""
        self.resume.on_validation_start()
        self._start_evaluation()

    def on_test_start(self) -> None:
        """Count batches from the start."""
        self._start_evaluation()

    def _start_evaluation(self) -> None:
        install_sigterm_handler(self._module.trainer)
        self.batches.counts.check_evaluation()
        self.logs.start_evaluation()

    def on_predict_start(self) -> None:
        """Prepare for SIGTERM."""
        install_sigterm_handler(self._module.trainer)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward only; every stage of a pipeline gets the result if a hook may read it."""
        return self._evaluate_and_log("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward only, as :meth:`validation_step` does."""
        return self._evaluate_and_log("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward only; every rank of the pipeline gets the result."""

        def run_step() -> Any:
            return self._evaluate("predict_step", args, kwargs, shares_output=True)

        def repeat_step() -> None:
            with self.logs.repeated():
                run_step()

        return self.batches.counts.predict(run_step, repeat_step)

    def _evaluate_and_log(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._evaluate(step, args, kwargs, self.logs.shares_outputs)
        self.logs.end_evaluation_step()
        return output

    @stop_iteration_is_an_error
    def _evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any], shares_output: bool) -> Any:
        with self.logs.evaluation_step():
            return self._runner.evaluate(step, args, kwargs, shares_output)

    def on_validation_end(self) -> None:
        """Restore the random state of training, and let later steps log normally again."""
        self.resume.on_validation_end()
        self.logs.end_evaluation()

    def on_test_end(self) -> None:
        """Let later steps log normally again."""
        self.logs.end_evaluation()

    def on_predict_end(self) -> None:
        """Take part in the last steps of other ranks, if neither a step nor a stream showed that it was the last."""
        self.batches.counts.end_predicting()

    # ---- collectives: metrics over the data-parallel ranks, decisions over the world

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; after an exception on only some ranks, return at once, because the others do not come."""
        if rank_watch.collectives_usable():
            super().barrier(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks; ranks of one model copy already hold the same value."""
        # PipelineLogs logs merged values with ALREADY_MERGED, a string, as their group.
        if group == ALREADY_MERGED or not isinstance(tensor, Tensor):
            return tensor
        if str(reduce_op).lower() in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning would truncate the mean of integers, such as numbers of rows
        return _sync_ddp_if_available(tensor, self._or_data_parallel(group), reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from the data-parallel ranks, stacked along a new first dimension.

        Args:
            tensor: The tensor of this rank, [...] in any dtype; the shape is the same on all ranks.
            group: The ranks to gather from. The world means the data-parallel ranks, because
                ``LightningModule.all_gather`` passes it if the user names no group.
            sync_grads: Send gradients back to the rank that each part came from, summed over the ranks.
        """
        group = self._or_data_parallel(None if group is dist.group.WORLD else group)
        if not (sync_grads and process_groups_are_open()):
            return super().all_gather(tensor, group)
        # Megatron's all-gather along the first dimension, which can be differentiated.
        return gather_from_sequence_parallel_region(tensor.unsqueeze(0), group=group)  # type: ignore[no-any-return]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether the decision is true on all ranks of the world; with ``all=False``, on any."""
        return all_true(decision) if all else any_true(decision)  # on the host, where DDPStrategy would use the GPU

    @staticmethod
    def _or_data_parallel(group: Any) -> Any:
        return process_group("dp") if group is None and process_groups_are_open() else group

    # ---- saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a single-file checkpoint; with shards, only module state outside the chunks."""
        sum_tokens_seen(self._module)  # over all ranks, because the metric's state is about to be saved
        return self.checkpoints.module_state(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state; with shards, only the part that LR schedulers read back."""
        return self.checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write one file, or a directory if the model is split; collective over the world.

        Works during a run and after it, as ``trainer.save_checkpoint`` does.
        """
        self.checkpoints.save(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint of this run; others stay, with a warning."""
        self.checkpoints.remove(filepath)

    # ---- the end

    def on_exception(self, exception: BaseException) -> None:
        """Finish the saves in flight if the other ranks arrive here too, and say how to continue."""
        self.checkpoints.finish(EXCEPTION_TIMEOUT)
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        if isinstance(exception, KeyboardInterrupt) and trainer is not None:
            path = last_checkpoint(trainer)
            further = f"go on with ckpt_path={path!r}" if path is not None else "there is no checkpoint to go on from"
            rank_zero_info(f"MCoreStrategy: interrupted at step {trainer.global_step:,}; {further}")

    def teardown(self) -> None:
        """Unwrap the model, keeping its weights, and restore everything that the run has changed.

        All parts run, even if some raise an error.
        """
        plugins = (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io)
        try:
            _call_all(
                self.checkpoints.forget_pending,
                self.logs.teardown,
                self._unwrap_model,
                self.tensor_overlap.close,
                self.precision_plugin.detach_runner,
                *(plugin.teardown for plugin in plugins if plugin is not None),
                self.batches.teardown,
                self.resume.teardown,
                self._restores.close,
            )
        except BaseException:
            self._restore_signal_handlers()
            raise
        finally:
            rank_watch.mark_cleanup_done()

    def _unwrap_model(self) -> None:
        chunks = self._chunks
        self._runner = PlainModuleRunner(self)
        if chunks is None:
            return
        self._chunks = None
        self._finished_chunks = chunks  # saves_one_file reads them
        if self.checkpoints.saves_one_file:  # shards are written through Megatron's optimizers, even after the run
            self.optimizers = [optimizer_after_run(optimizer) for optimizer in self.optimizers]
        self._finished_chunks = unwrap_chunks(chunks)

    def _restore_signal_handlers(self) -> None:
        """Do what the trainer does after teardown, but not if teardown raises."""
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            self.lightning_module.trainer._signal_connector.teardown()

    # ---- for the rest of the package

    @property
    def inline(self) -> bool:
        """Whether steps run in Lightning's own loop instead of Megatron's schedule."""
        return self._runner.inline

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def is_set_up(self) -> bool:
        """Whether the model is wrapped: from ``setup`` to ``teardown``."""
        return self._chunks is not None

    @property
    def ends_epoch(self) -> bool:
        """Whether this batch is the last one of a training epoch or of the run."""
        trainer = self._module.trainer
        is_last_step = trainer.global_step + 1 == trainer.max_steps and not trainer.fit_loop._should_accumulate()
        return trainer.is_last_batch or is_last_step

    @property
    def chunks(self) -> ModelChunks:
        """The wrapped chunks of the model on this rank, during a run."""
        assert self._chunks is not None
        return self._chunks

    @property
    def megatron_optimizers(self) -> list[MCoreOptimizer]:
        """The optimizers whose step is Megatron's."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, MCoreOptimizer)]

    def runtime(self) -> contextlib.AbstractContextManager[None]:
        """Return the reentrant context in which Megatron's code runs."""
        return cpu_runtime() if self.root_device.type == "cpu" else gpu_runtime()

    def megatron_fields(self) -> dict[str, Any]:
        """Return the ``TransformerConfig`` fields that this strategy and its precision own."""
        layout = self.layout
        return {
            **vars(layout),
            "hybrid_context_parallel": False,  # Megatron's schedule for it takes the batches of Megatron-LM's loader
            "overlap_p2p_comm": self.overlap_p2p_comm,
            "microbatch_group_size_per_vp_stage": self.microbatch_group_size or layout.pipeline_model_parallel_size,
            "tp_comm_overlap": self.tensor_overlap.enabled,
            **self.communication.megatron_fields(layout, self.overlap_p2p_comm, self.root_device),
            **self.precision_plugin.megatron_fields(),
        }

    def run_forward(self, step: str, batch: Any) -> Any:
        """Run a method of the module on a batch without gradients, through the pipeline if there is one."""
        with torch.no_grad():
            batch = self._move_to_device(batch, self.root_device, dataloader_idx=0)
            return self._evaluate(step, (batch, 0), {}, shares_output=True)

    def model_calls(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which ``self.model(...)`` of an ``MCoreModule`` runs all stages, outside of steps."""
        assert isinstance(self._runner, PipelineRunner)
        return self._runner.model_calls()

    def complete_parameters(self) -> None:
        """Gather scattered parameters before the next step does; collective over the data-parallel ranks."""
        if self._chunks is not None:
            synchronize_parameters(self._chunks)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """Drop the state of this process: wrappers, groups and Megatron's optimizers."""
        dropped = ("logs", "_runner", "_restores", "_chunks", "_finished_chunks")
        state = {name: value for name, value in super().__getstate__().items() if name not in dropped}
        state["_optimizers"] = [
            optimizer.user if isinstance(optimizer, MCoreOptimizer) else optimizer for optimizer in state["_optimizers"]
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without the state of the other process."""
        fresh = {"logs": StepLogger(self), "_runner": PlainModuleRunner(self), "_restores": contextlib.ExitStack()}
        super().__setstate__({**state, **fresh})

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name ``"mcore"``."""
        if "mcore" not in strategy_registry.available_strategies():
            strategy_registry.register("mcore", cls, description=f"Class: {cls.__name__}")


def _call_all(*functions: Callable[[], object]) -> None:
    """Call all functions in order; then raise the last error of any of them."""
    with contextlib.ExitStack() as stack:  # calls what is pushed last first
        for function in reversed(functions):
            stack.callback(function)


MCoreStrategy.register_strategies(StrategyRegistry)
