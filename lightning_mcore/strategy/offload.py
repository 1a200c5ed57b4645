# SPDX-License-Identifier: Apache-2.0
"""A callback that keeps activations in host memory between forward and backward."""

import contextlib
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_mcore.config.value_checks import require_size
from lightning_mcore.parallel.chunks import built_chunks

_Packed = Tensor | tuple[torch.device, Tensor]


class OffloadActivations(pl.Callback):
    """Moves what the forward pass keeps for the backward pass to host memory, and back when it is needed.

    A GPU then holds the activations of one layer at a time instead of all, and the numbers of the run stay the same,
    bit for bit. Each tensor is copied over the bus twice, between the kernels that need it, so a step takes longer.
    With full recompute, only each layer's input is copied, which costs little. Use both for rows so long that even
    these inputs do not fit.

    Weights, gradients and the optimizer's state stay on the GPU, and tensors on a CPU stay where they are.
    ``lightning-mcore rehearse`` shows the effect on memory; ``plan`` does not include it.

    Args:
        min_bytes: Smaller tensors stay on the GPU.

    Raises:
        TypeError: ``min_bytes`` is not an int.
        ValueError: ``min_bytes`` is below 1.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore.callbacks import OffloadActivations
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[OffloadActivations()])
    """

    def __init__(self, min_bytes: int = 1 << 20) -> None:
        require_size("min_bytes", min_bytes)
        self.min_bytes = min_bytes
        self._hooks = contextlib.ExitStack()
        self._kept: set[int] = set()  # storages of parameters and buffers

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reject a run whose weights cannot be told from activations.

        Raises ``ValueError`` with ``data_parallel_sharding``, which gathers weights into memory of its own.
        """
        gradients = getattr(trainer.strategy, "gradients", None)  # of MCoreStrategy
        if gradients is not None and gradients.data_parallel_sharding is not None:
            raise ValueError(
                "OffloadActivations cannot tell activations from the weights that"
                f" data_parallel_sharding={gradients.data_parallel_sharding!r} gathers; leave one of them out"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note which memory belongs to the model.

        Raises ``ValueError`` with ``gradient_accumulation_fusion``, whose kernels save a weight and read its attributes
        in the backward pass; PyTorch's hooks do not keep attributes.
        """
        if getattr(built_chunks(pl_module).config, "gradient_accumulation_fusion", False):
            raise ValueError(
                "OffloadActivations hides the gradients of weights from the kernels of"
                " gradient_accumulation_fusion=True; leave one of them out"
            )
        tensors = [*pl_module.parameters(), *pl_module.buffers()]
        self._kept = {tensor.untyped_storage()._cdata for tensor in tensors}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Start to move what the forward pass keeps."""
        self._hooks.close()  # if another callback has skipped the rest of the last batch
        self._hooks.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Stop, so that nothing is moved in validation."""
        self._hooks.close()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop, in case another callback has skipped the last batch."""
        self._hooks.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave no hook behind."""
        self._hooks.close()

    def _pack(self, tensor: Tensor) -> _Packed:
        # What a backward pass computes again, it needs at once. Sparse tensors have no storage.
        is_recomputed = torch._C._current_graph_task_id() >= 0
        if is_recomputed or tensor.layout is not torch.strided or not self._moves(tensor):
            return tensor
        if tensor.untyped_storage()._cdata in self._kept:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        # Both copies run in the order of the stream: the memory is free for what is computed after the first, and the
        # second comes after the first. PyTorch keeps pinned memory until copies from it are done.
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def _moves(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu" and tensor.numel() * tensor.element_size() >= self.min_bytes


def _unpack(packed: _Packed) -> Any:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
