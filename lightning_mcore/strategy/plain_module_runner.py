# SPDX-License-Identifier: Apache-2.0
"""Steps of a plain LightningModule, in Lightning's own loop.

Lightning's accumulation is Megatron's schedule without pipelining, so each step is called directly.
:class:`PlainModuleRunner` keeps gradients on the rank while Lightning accumulates. After the last batch of a window it
reduces them over the ranks and shows them to hooks. The strategy uses it where ``pipeline_runner.py`` does not apply.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

from lightning_mcore.optimizer.rules import check_not_summed
from lightning_mcore.parallel.chunks import (
    ModelChunks,
    broadcast_buffers,
    check_gradients,
    check_overlapped_sums,
    plain_config,
    wrap_chunks,
)
from lightning_mcore.strategy.checks import check_plain

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy


class PlainModuleRunner:
    """Runs the steps of a module that did not use ``pipeline()``, and of any module after a run."""

    inline = True

    def __init__(self, strategy: "MCoreStrategy") -> None:
        self._strategy = strategy
        self._sync_blocked = False
        self._gradients_are_shown = False
        self._buffers_may_differ = False

    @property
    def root_device(self) -> torch.device:
        """The device that the module runs on."""
        return self._strategy.root_device

    def wrap(
        self,
        module: pl.LightningModule,
        ddp_config: DistributedDataParallelConfig | None,
        restores: contextlib.ExitStack,
    ) -> ModelChunks:
        """Wrap a module, on its device, as one chunk; without ``ddp_config`` only for evaluation.

        Closing ``restores`` undoes ``Trainer(sync_batchnorm=True)``.
        """
        strategy = self._strategy
        check_plain(strategy, module)
        if ddp_config is not None and strategy._layer_sync is not None:
            strategy._layer_sync.apply(module)
            restores.callback(strategy._layer_sync.revert, module)
        precision = strategy.precision_plugin
        precision.convert_module(module)
        return wrap_chunks([module], plain_config(precision.dtype), None, ddp_config)

    def training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step forward; Lightning runs backward."""
        module = self._strategy.lightning_module
        assert module is not None
        self._share_buffers()
        self._strategy.chunks.wait_for_uncalled(self._strategy.chunks.wrapped[0])
        with self._strategy.precision_plugin.train_step_context():
            output = module.training_step(*args, **kwargs)
        self._strategy.logs.end_plain_step()
        self._buffers_may_differ = not self._sync_blocked
        return output

    def evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any], shares_output: bool) -> Any:
        """Run a step forward only."""
        self._share_buffers()
        with self._strategy.precision_plugin.forward_context():
            return getattr(self._strategy.lightning_module, step)(*args, **kwargs)

    def _share_buffers(self) -> None:
        """Take rank 0's running statistics after a window's last batch, when torch's DDP does."""
        # With accumulate_grad_batches=2, batches 0 and 1 move each rank's own statistics. Before batch 2, or before a
        # validation, all ranks take those of rank 0, which are also the ones that a checkpoint holds.
        if self._buffers_may_differ:
            broadcast_buffers(self._strategy.chunks.wrapped[0], stored_only=True)
            self._buffers_may_differ = False

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on this rank while Lightning accumulates."""
        self._sync_blocked = True
        try:
            yield
        finally:
            self._sync_blocked = False

    @contextlib.contextmanager
    def backward_context(self) -> Iterator[None]:
        """Reduce the gradients after the last batch of a window, and show them to hooks if they are complete."""
        # With accumulate_grad_batches=4, three backward passes add to the buffers in no_sync(); the fourth one's
        # gradients are summed over the ranks during it (overlap_grad_reduce) or in finalize_model_grads.
        gradients, chunks = self._strategy.gradients, self._strategy.chunks
        optimizers = self._strategy.megatron_optimizers
        if gradients.reduces_only_once:
            check_not_summed(optimizers)
        # Sharded gradients are not complete on this rank.
        parameters = [] if gradients.distributed else _parameters_with_visible_gradients(chunks)
        # Hooks' changes of .grad go back into the buffers. Then .grad is emptied, or autograd would add to it too.
        _copy_user_grads_to_main_grad(parameters, self._gradients_are_shown)
        with contextlib.ExitStack() as stack:
            if self._sync_blocked:  # not earlier, because zeroing the buffers would undo it
                for chunk in chunks.ddp:
                    stack.enter_context(chunk.no_sync())
            yield
        for optimizer in optimizers:
            optimizer.gradients_changed(are_summed=not self._sync_blocked)
        if not self._sync_blocked:
            check_overlapped_sums(chunks.ddp)
            finalize_model_grads(chunks.ddp, None)
        if gradients.check_nan:
            check_gradients(chunks)
        # For on_after_backward, on_before_optimizer_step and gradient clipping.
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        self._gradients_are_shown = True


def _parameters_with_visible_gradients(chunks: ModelChunks) -> list[Any]:
    """Return the parameters whose gradient buffer can serve as ``grad``, because it has their dtype."""
    parameters = [p for chunk in chunks.ddp for p in chunk.parameters() if hasattr(p, "main_grad")]
    return [p for p in parameters if p.main_grad.dtype == p.dtype]


def _copy_user_grads_to_main_grad(parameters: Sequence[Any], were_shown: bool) -> None:
    """Copy a user's changes of visible gradients into the gradient buffers, before autograd adds to these.

    ``were_shown`` says whether the buffers were visible as ``grad`` before. Called before each backward.
    """
    for parameter in parameters:
        if parameter.grad is None and were_shown:
            parameter.main_grad.zero_()  # module.zero_grad() does not reach the buffer
        elif parameter.grad is not None and parameter.grad is not parameter.main_grad:
            parameter.main_grad.copy_(parameter.grad)  # a hook has replaced it
        parameter.grad = None
