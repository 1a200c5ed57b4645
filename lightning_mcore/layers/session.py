# SPDX-License-Identifier: Apache-2.0
"""Megatron layers under another strategy than ours, and outside a run.

A module built with ``pipeline()`` may run under ``strategy="auto"`` or ``"ddp"``. Its layers still need Megatron's
process groups and, on the CPU, ``torch.cuda``. :class:`SingleModelSession` is a callback that the module adds to the
trainer for that run. It opens groups in which nothing is split, and closes them when the run ends, also by an
exception. :func:`single_process` does the same without a trainer.
"""

import contextlib
import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.spec import attention_environment_restored
from lightning_mcore.parallel.cpu_runtime import cpu_runtime, gpu_runtime
from lightning_mcore.parallel.groups import (
    close_process_groups,
    open_process_groups,
    open_single_process,
    process_groups_are_open,
)
from lightning_mcore.parallel.random_state import new_seed


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Let Megatron's layers run in this process without a trainer: build a module, load weights, call it.

    On a machine without CUDA the layers run on the CPU.

    Raises:
        RuntimeError: This process is one of several connected ranks, for example after a run on them.

    Examples:
        A trained model comes from ``MCoreGPT.load_from_checkpoint("last.ckpt")`` inside the block; this one is new.

        >>> from lightning_mcore import MCoreGPT, single_process
        >>> sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 64}
        >>> with single_process():
        ...     module = MCoreGPT(vocab_size=100, seq_length=8, transformer=sizes)
        ...     module.configure_model()
        ...     tokens = module.generate([1, 2, 3], max_new_tokens=4)
        >>> len(tokens)
        7
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this process is one of {dist.get_world_size()} connected ranks, but the whole model needs a process of"
            " its own; use another script, or start a run from the weights with load_weights(path)"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(attention_environment_restored())
        stack.enter_context(gpu_runtime() if torch.cuda.is_available() else cpu_runtime())
        if not process_groups_are_open():
            if open_single_process():
                stack.callback(dist.destroy_process_group)
            stack.callback(close_process_groups)
            open_process_groups(ParallelLayout(), seed=new_seed(), timeout=timedelta(minutes=30))
        yield


class SingleModelSession(Callback):
    """Keeps the CPU runtime and single-rank process groups open while another strategy runs a Megatron model."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._auxiliary_scale = torch.ones(())
        self._mtp_tokens: int | torch.Tensor = 1

    @classmethod
    def attach(cls, trainer: "pl.Trainer") -> None:
        """Open a session for the trainer's current run, unless one is open."""
        if any(isinstance(callback, cls) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return
        session = cls()
        session._enter(trainer)
        trainer.callbacks.append(session)  # type: ignore[attr-defined]

    def _enter(self, trainer: "pl.Trainer") -> None:
        self._open.enter_context(attention_environment_restored())
        on_cpu = trainer.strategy.root_device.type == "cpu"
        self._open.enter_context(cpu_runtime() if on_cpu else gpu_runtime())
        if open_single_process():
            self._open.callback(dist.destroy_process_group)
        self._open.callback(close_process_groups)
        open_process_groups(ParallelLayout(), seed=new_seed(), timeout=timedelta(minutes=30))

    def _leave(self, trainer: "pl.Trainer") -> None:
        self._open.close()
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Turn the layers' own losses into means over a batch; undone when the run ends."""
        # Losses of experts and multi-token prediction expect Megatron's loop. Here they follow Lightning's, whatever
        # calculate_per_token_loss says: with accumulate_grad_batches=4 their scale is 0.25. They are not logged.
        for child in pl_module.modules():
            if isinstance(child, TopKRouter):
                for name in ("weighs_tokens", "calculate_per_token_loss"):
                    if getattr(child, name, False):
                        setattr(child, name, False)
                        self._open.callback(setattr, child, name, True)
            if (
                isinstance(child, LanguageModule)
                and getattr(child, "mtp_process", False)
                and child.config.calculate_per_token_loss
            ):
                self._open.callback(child.register_forward_pre_hook(self._count, with_kwargs=True).remove)
        self._auxiliary_scale = torch.tensor(1 / trainer.accumulate_grad_batches, device=pl_module.device)

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens by which Megatron's loop would divide the loss of multi-token prediction."""
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        counted = given.get("loss_mask", given.get("labels"))
        if counted is not None:
            self._mtp_tokens = counted.sum().clamp(min=1) if "loss_mask" in given else counted.numel()

    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: torch.Tensor) -> None:
        """Scale the layers' own losses as Lightning has scaled ``loss``, the mean over a batch."""
        MoEAuxLossAutoScaler.set_loss_scale(self._auxiliary_scale)
        MTPLossAutoScaler.set_loss_scale(self._auxiliary_scale / self._mtp_tokens)

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Close what was opened, at the end of ``fit``, ``validate``, ``test`` or ``predict``."""
        self._leave(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Close what was opened when the run ends in an exception."""
        self._leave(trainer)
