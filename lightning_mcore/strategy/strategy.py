# SPDX-License-Identifier: Apache-2.0
"""``MCoreStrategy``: Lightning's hooks, in the order in which the trainer calls them, carried out with megatron-core.

Each hook is a few lines that delegate: settings to ``gradients.py``, groups to ``parallel/groups.py``, wrapping to
``parallel/chunks.py``, steps to ``schedule.py``, the optimizer to ``optimizer/megatron.py``, number formats to
``precision.py``, checkpoints to ``checkpointing.py``.

Two ways to run a step:

* **schedule**, for a model built with ``pipeline()``. A DataLoader batch is one microbatch and
  ``Trainer(accumulate_grad_batches=N)`` is Megatron's ``num_microbatches``: for the first N-1 batches
  ``training_step`` only keeps the batch, at the N-th it runs Megatron's schedule over all of them. Lightning's loops
  stay as they are, so ``global_step``, ``max_steps``, ``val_check_interval`` and the rest mean what they do in
  Lightning.
* **inline**, for a plain LightningModule: Lightning's own accumulation is Megatron's schedule without pipelining, so
  the step is called directly, and the strategy blocks, reduces and finishes the gradients around it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torchmetrics import Metric

from lightning_mcore.config.layout import ModelShape
from lightning_mcore.layers.packed_sequences import keep_numbers
from lightning_mcore.layers.spec import choose_attention
from lightning_mcore.optimizer.factory import OptimizerSetting, configure_optimizers, make_optimizer
from lightning_mcore.optimizer.megatron import optimizer_after_run
from lightning_mcore.optimizer.plateau import agree_on_plateaus
from lightning_mcore.optimizer.rules import check_not_summed, check_number
from lightning_mcore.parallel import rank_watch
from lightning_mcore.parallel.chunks import (
    check_gradients,
    check_parameters_are_called,
    find_pipeline,
    parameters_with_visible_gradients,
    pipeline_config,
    plain_config,
    take_gradients_back,
    unwrap_chunks,
    wrap_chunks,
)
from lightning_mcore.parallel.consensus import all_true, gather, on_all
from lightning_mcore.parallel.groups import align_random_state, process_group
from lightning_mcore.strategy import fp8_checks
from lightning_mcore.strategy.checkpointing import MCorePersistence
from lightning_mcore.strategy.logs.names import EvaluationNames, agree_on_names, ends_the_epoch
from lightning_mcore.strategy.logs.repeated_rows import RepeatedRows, nothing_counts, reads_outputs
from lightning_mcore.strategy.preemption import end_on_sigterm
from lightning_mcore.strategy.schedule import Microbatch, Schedule, check_backward_is_free

P = ParamSpec("P")
T = TypeVar("T")


def _refuse_to_stop_iterating(hook: Callable[P, T]) -> Callable[P, T]:
    """Make another error of a StopIteration of the user's code, as Python does for generators.

    Lightning's loops take it for the end of the data, and end the epoch on this rank alone.
    """

    @functools.wraps(hook)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return hook(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(
                "StopIteration was raised in a step or a hook around it, where it would end the epoch on this rank"
                " alone; catch it there, as next(iterator, default) does"
            ) from error

    return run


class MCoreStrategy(MCorePersistence):
    """Train a LightningModule on every parallel axis of megatron-core.

    :class:`~lightning_mcore.strategy.parallelism.MCoreParallelism` has the arguments.

    Use it as ``Trainer(strategy=MCoreStrategy(tensor_model_parallel_size=2))`` or, with every size 1, as
    ``Trainer(strategy="mcore")``.
    """

    _schedule: Schedule | None = None
    _last_loss: Tensor | None = None
    _sync_blocked = False
    _shares_outputs = True  # of validation and test steps, with the other stages

    # ---- building

    @property
    def inline(self) -> bool:
        """Whether steps run in Lightning's own loop instead of Megatron's schedule."""
        return self._schedule is None

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model, make the optimizers and read the checkpoint that is waiting."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.prepare_links(trainer)
        self.resume.setup()
        self._window: list[Microbatch] = []
        self._seen_full_window = False
        self._gradients_are_shown = False
        self._repeated_rows = RepeatedRows()
        self._evaluation_names = EvaluationNames()
        self._setup_chunks(module, fitting)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._load_pending(fitting)
        if process_group("dp_cp").size() < dist.get_world_size():  # else it is the same, and a group cannot be copied
            for metric in module.modules():
                if isinstance(metric, Metric):
                    metric.process_group = process_group("dp_cp")
        fit_validate = trainer.fit_loop.epoch_loop.val_loop
        for loop in (fit_validate, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # Megatron caches tensors; made under inference mode, they break training
        align_random_state()

    def _setup_chunks(self, module: pl.LightningModule, fitting: bool) -> None:
        precision = self.precision_plugin
        pipeline = find_pipeline(module)
        precision.runner = self
        self._schedule = None
        module.to(self.root_device)
        ddp_config = self.gradients.resolve(precision.ddp_fields()) if fitting else None
        if pipeline is None:
            self._check_plain(module)
            if fitting and self._layer_sync is not None:
                self._layer_sync.apply(module)
            if ddp_config is not None and ddp_config.overlap_param_gather:
                check_parameters_are_called(module)
            precision.convert_module(module)
            self._chunks = wrap_chunks([module], plain_config(precision.dtype), None, ddp_config)
            return
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True is not available for a model built with pipeline(); set it to False")
        if fitting:
            check_backward_is_free(module)
        config = pipeline_config(pipeline, self.megatron_fields())
        self.layout.validate_model(ModelShape.from_config(config))
        aligned = self.gradients.align_grad_reduce
        self._chunks = wrap_chunks(list(pipeline.chunks), config, pipeline, ddp_config, aligned)
        fp8_checks.check_chunks(precision.fp8, self._chunks.bare)
        for chunk in self._chunks.bare:
            choose_attention(chunk)
        self._schedule = Schedule(module, self._chunks, self.layout, self.root_device, self._prepare_schedule)

    def _prepare_schedule(self, shape: tuple[int, int] | None, config: TransformerConfig) -> None:
        fp8_checks.check_microbatch(self.precision_plugin.fp8, shape, self.layout)
        self.tensor_overlap.open(shape, config)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Put Megatron's step behind the optimizers of ``configure_optimizers``."""
        assert self._chunks is not None
        self._reset_optimizers_and_schedulers()
        assert self.lightning_module is not None
        optimizers, self.lr_scheduler_configs = on_all(partial(configure_optimizers, self.lightning_module))
        agree_on_plateaus(self.lr_scheduler_configs, self.root_device)
        resolved = self.gradients.resolve()
        check_number(optimizers, self.inline, resolved.use_distributed_optimizer, resolved.overlap_grad_reduce)
        setting = OptimizerSetting(
            inline=self.inline,
            precision=self.precision_plugin.optimizer_fields(self.inline),
            distributed=resolved.use_distributed_optimizer,
            overlap_param_gather=resolved.overlap_param_gather,
            tensor_parallel_size=max(self.layout.tensor_model_parallel_size, self.layout.expert_tensor_size),
            expert_model_parallel_size=self.layout.expert_model_parallel_size,
            config=self.optimizer_config,
            scaler=self.precision_plugin.make_scaler(),
        )
        self.optimizers = [make_optimizer(optimizer, self._chunks.ddp, setting) for optimizer in optimizers]
        if setting.scaler is not None and not self.inline:
            self._chunks.config.grad_scale_func = self._megatron_optimizers()[0].megatron.scale_loss

    # ---- steps

    @_refuse_to_stop_iterating
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, or keep the batch until the window of ``accumulate_grad_batches`` is full.

        Returns:
            The loss of this step; while the window fills, that of the step before.
        """
        module = self.lightning_module
        assert module is not None
        if self._schedule is None:
            with self.precision_plugin.train_step_context():
                output = module.training_step(*args, **kwargs)
            if ends_the_epoch(module.trainer):
                agree_on_names(module)
            return output
        loop = module.trainer.fit_loop
        num_batches = module.trainer.accumulate_grad_batches
        if loop.epoch_loop.batch_idx % num_batches == 0:
            self._window = []
        self._window += self._schedule.split(args[0], args[1:], self.micro_batch_size)
        if loop._should_accumulate():
            return self._last_loss if self._last_loss is not None else torch.zeros((), device=self.root_device)
        if not self._seen_full_window and (loop.epoch_loop.batch_idx + 1) % num_batches == 0:
            # Only the first: later ones may end with a short batch of the loader.
            self.layout.validate_microbatches(len(self._window), self.microbatch_group_size)
            self._seen_full_window = True
        return self._run_window(num_batches)

    def _run_window(self, num_batches: int) -> Any:
        assert self._schedule is not None
        assert self._chunks is not None
        window, self._window = self._window, []
        for chunk in self._chunks.ddp:
            chunk.zero_grad_buffer()
        for optimizer in self._megatron_optimizers():
            optimizer.megatron.zero_grad()
            optimizer.gradients_changed()
        output = self._schedule.train(window, num_batches)
        self._check_gradients()
        self._last_loss = output["loss"] if isinstance(output, dict) else output
        return output

    @_refuse_to_stop_iterating
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step; after the last step of an epoch or of the run make the parameters whole, for hooks may read them."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._chunks is not None and ends_the_epoch(trainer):  # None after a run
            self.complete_parameters()
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward only; its result is on the other stages of a pipeline too where a hook may read it."""
        return self._evaluate_and_log("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward only, as :meth:`validation_step` does."""
        return self._evaluate_and_log("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward only; its result is on every rank of the pipeline."""
        return self._evaluate("predict_step", *args, **kwargs)

    def run_forward(self, step: str, batch: Any) -> Any:
        """Run a method of the module on a batch without gradients, through the pipeline if there is one."""
        with torch.no_grad():
            return self._evaluate(step, self._moved(batch, self.root_device, 0), 0)

    def _evaluate_and_log(self, step: str, *args: Any, **kwargs: Any) -> Any:
        output = self._evaluate(step, *args, shares_output=self._shares_outputs, **kwargs)
        module = self.lightning_module
        assert module is not None
        self._evaluation_names.end_of_batch(module, *self._repeated_rows.place)
        return output

    def _start_evaluation(self) -> None:
        module = self.lightning_module
        assert module is not None
        end_on_sigterm(module.trainer)
        self._repeated_rows.start()
        loop = module.trainer._evaluation_loop
        self._evaluation_names.start(loop.max_batches if loop._is_sequential else [], self.root_device)
        if self.layout.pipeline_model_parallel_size > 1:  # callbacks may differ from rank to rank
            self._shares_outputs = not all_true(not reads_outputs(module.trainer))

    @_refuse_to_stop_iterating
    def _evaluate(self, step: str, *args: Any, shares_output: bool = True, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        rows = self._repeated_rows
        with nothing_counts(module, rows.only_batch) if rows.whole_batch else contextlib.nullcontext():
            if self._schedule is not None:
                return self._schedule.evaluate(step, args[0], args[1:], shares_output)
            with self.precision_plugin.forward_context():
                return getattr(module, step)(*args, **kwargs)

    @_refuse_to_stop_iterating
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; while evaluating, without samples that the sampler repeats."""
        batch = self._moved(batch, device, dataloader_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self.resume.batch_arrives()
        if trainer.validating or trainer.sanity_checking or trainer.testing:
            batch = self._repeated_rows.cut(batch, trainer._evaluation_loop._combined_loader, dataloader_idx)
        return batch

    def _moved(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """Move a batch; what is known of it on the host stays known unless a hook of the user may have changed it."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        module = self.lightning_module
        assert module is not None
        hooks = module.trainer._data_connector._datahook_selector
        changing = ("transfer_batch_to_device", "on_after_batch_transfer")
        if hooks is not None and not any(is_overridden(name, hooks.get_instance(name)) for name in changing):
            keep_numbers(moved, batch)
        return moved

    def on_validation_start(self) -> None:
        """Count batches anew."""
        self.resume.on_validation_start()
        self._start_evaluation()

    def on_test_start(self) -> None:
        """Count batches anew."""
        self._start_evaluation()

    def on_predict_start(self) -> None:
        """Refuse a set that leaves ranks which share experts with different numbers of batches: they would hang."""
        end_on_sigterm(self.lightning_module.trainer)  # type: ignore[union-attr]
        if self.layout.expert_model_parallel_size == 1:
            return
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        counts = gather(trainer.predict_loop.max_batches)
        if any(count != counts[0] for count in counts):
            raise RuntimeError(
                f"the data-parallel ranks have {sorted(map(str, counts))} batches to predict, and with"
                f" expert_model_parallel_size={self.layout.expert_model_parallel_size} they need the same number;"
                " make the number of samples a multiple of the batch size times the data-parallel size"
            )

    def on_validation_end(self) -> None:
        """Let later steps count again."""
        self.resume.on_validation_end()
        self._repeated_rows.start()

    def on_test_end(self) -> None:
        """Let later steps count again."""
        self._repeated_rows.start()

    # ---- gradients of a plain module; the schedule does all of this itself

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on this rank while Lightning accumulates."""
        self._sync_blocked = True
        try:
            yield
        finally:
            self._sync_blocked = False

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        """Reduce the gradients after the last batch of a window, and show them to hooks where they are whole."""
        assert self._chunks is not None
        optimizers = self._megatron_optimizers()
        if self.gradients.sums_once:
            check_not_summed(optimizers)
        # Shards are not whole on this rank.
        parameters = [] if self.gradients.distributed else parameters_with_visible_gradients(self._chunks)
        take_gradients_back(parameters, self._gradients_are_shown)
        with contextlib.ExitStack() as stack:
            if self._sync_blocked:  # entered here, not earlier: zeroing the buffers in between would undo it
                for chunk in self._chunks.ddp:
                    stack.enter_context(chunk.no_sync())
            yield
        for optimizer in optimizers:
            optimizer.gradients_changed(are_summed=not self._sync_blocked)
        if not self._sync_blocked:
            finalize_model_grads(self._chunks.ddp, None)
        self._check_gradients()
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        self._gradients_are_shown = True

    def _check_gradients(self) -> None:
        if self.gradients.check_nan:
            assert self._chunks is not None
            check_gradients(self._chunks)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: there is no torch DDP to prepare."""

    # ---- the end

    def on_train_start(self) -> None:
        """Forget batches that an interrupted run has kept."""
        end_on_sigterm(self.lightning_module.trainer)  # type: ignore[union-attr]
        self._window = []
        self._last_loss = None
        self.resume.on_train_start()

    def on_train_end(self) -> None:
        """Make the parameters whole, for a run may end in the middle of an epoch, and wait for what is being saved."""
        super().on_train_end()
        self.complete_parameters()

    def teardown(self) -> None:
        """Take the wrappers off and leave nothing patched, whichever part of it fails; the weights stay as they are."""
        with contextlib.ExitStack() as stack:  # the last one is called first
            stack.callback(rank_watch.cleared_up)
            stack.push(self._restore_signal_handlers)
            stack.callback(self._runtime.close)
            stack.callback(self.resume.teardown)
            stack.callback(self.checkpoint_io.teardown)
            if self.accelerator is not None:
                stack.callback(self.accelerator.teardown)
            stack.callback(self.precision_plugin.teardown)
            assert self.cluster_environment is not None
            stack.callback(self.cluster_environment.teardown)
            stack.callback(setattr, self.precision_plugin, "runner", None)
            stack.callback(self.tensor_overlap.close)
            stack.callback(self._take_chunks_off)

    def _restore_signal_handlers(self, kind: type[BaseException] | None, *_: object) -> None:
        """Do what the trainer does after this teardown, and does not if it raises."""
        if kind is not None and self.lightning_module is not None and self.lightning_module._trainer is not None:
            self.lightning_module.trainer._signal_connector.teardown()

    def _take_chunks_off(self) -> None:
        chunks, self._chunks = self._chunks, None
        self._schedule = self._pending = None
        self._window = []
        if chunks is None:
            return
        self._finished_chunks = chunks
        if self._saves_one_file:  # shards are written through Megatron's optimizers, also after the run
            self.optimizers = [optimizer_after_run(optimizer) for optimizer in self.optimizers]
        self._finished_chunks = unwrap_chunks(chunks)
        if self._layer_sync is not None and self.lightning_module is not None:
            self._layer_sync.revert(self.lightning_module)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: wrappers, groups and Megatron's optimizers."""
        state = super().__getstate__()
        optimizers = [getattr(optimizer, "user", optimizer) for optimizer in state["_optimizers"]]
        own: dict[str, Any] = {
            "_chunks": None,
            "_finished_chunks": None,
            "_schedule": None,
            "_window": [],
            "_runtime": None,
        }
        return {**state, **own, "_optimizers": optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without what belonged to the other process."""
        super().__setstate__({**state, "_runtime": contextlib.ExitStack()})

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name ``"mcore"``."""
        if "mcore" not in strategy_registry.available_strategies():
            strategy_registry.register("mcore", cls, description=f"Class: {cls.__name__}")


MCoreStrategy.register_strategies(StrategyRegistry)
