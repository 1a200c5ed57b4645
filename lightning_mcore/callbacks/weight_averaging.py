# SPDX-License-Identifier: Apache-2.0
"""Lightning's weight averaging, for split models and sharded optimizers.

Lightning copies the whole module before its model is built, and puts the average into a checkpoint of one file. Here
each rank averages its own part of the model, and checkpoints hold the average in shards, next to the weights. An
average is computed element by element, so it matches a one-rank run.
"""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn

from lightning_mcore.checkpoint.model_state import place_weights, read_into
from lightning_mcore.strategy.checkpointing import MORE_SHARDS, WEIGHT_AVERAGE
from lightning_mcore.strategy.strategy import MCoreStrategy

_KEY = "optimizer_average.{}"  # of a weight's average in shards: an optimizer's, so that other readers skip it


@dataclass
class _Averaged:
    """A parameter or buffer of this rank, its average in fp32 or more, and its value while it holds the average."""

    name: str
    live: Tensor
    average: Tensor
    kept: Tensor | None = None

    @torch.no_grad()
    def show_average(self, keep: bool) -> None:
        """Put the average into the model."""
        self.kept = self.live.detach().clone() if keep else None
        self.live.copy_(self.average)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the model's own value back."""
        assert self.kept is not None
        self.live.copy_(self.kept)
        self.kept = None


class WeightAveraging(callbacks.WeightAveraging):
    """Lightning's ``WeightAveraging`` on any layout: averages the weights, and validates with the average.

    Arguments, ``should_update`` and the timing of updates are Lightning's. Each rank averages its own part of the
    model, so the result matches a one-rank run. Averages of 16-bit weights are kept in fp32. After ``fit``, the model
    holds the average, and :class:`SaveHFModel` writes it. Under another strategy this is Lightning's callback.

    Unlike with Lightning's callback, a checkpoint holds the training weights under their own names, and the average
    separately. If a run with this callback reads it, ``fit`` continues both exactly, on any layout, and ``validate``,
    ``test`` and ``predict`` use the average.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore.callbacks import WeightAveraging
        >>> class FromStep1000(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return step_idx is not None and step_idx >= 1000
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[FromStep1000()])
    """

    averages_shards = True
    """Tells the strategy's checks that this callback works where Lightning's does not."""

    _averaged: tuple[_Averaged, ...] = ()
    _updates = 0  # averaged values of each weight

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the copy of the module to Lightning under another strategy.

        Raises:
            ValueError: The weights are kept in FP8, which cannot be averaged.
        """
        if not isinstance(trainer.strategy, MCoreStrategy):
            super().setup(trainer, pl_module, stage)
        elif trainer.strategy.precision_plugin.fp8.fp8_param:
            raise ValueError(
                f"{type(self).__name__} cannot average weights in FP8; set MCorePrecision(fp8_param=False)"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the model's weights, or from the averages of the checkpoint."""
        if isinstance(trainer.strategy, MCoreStrategy) and not self._start(trainer.strategy) and trainer.ckpt_path:
            rank_zero_warn(f"{trainer.ckpt_path} holds no average of weights; it starts from the weights there")

    def _start(self, strategy: MCoreStrategy) -> bool:
        """Make the averages, and return whether a checkpoint has filled them; collective if it is in shards."""
        found: dict[int, _Averaged] = {}  # by address, because tied weights are one tensor
        for chunk in strategy.chunks.bare:
            for path, layer in chunk.named_modules():
                for name, tensor in _values(layer, self._use_buffers):
                    dtype = torch.promote_types(tensor.dtype, torch.float32)
                    average = tensor.detach().to(self._device or tensor.device, dtype, copy=True).contiguous()
                    found.setdefault(tensor.data_ptr(), _Averaged(f"{path}.{name}", tensor, average))
        self._averaged = tuple(found.values())
        stored, one_file = strategy.checkpoints.resumed_from, strategy.checkpoints.average_in_file
        if stored is not None and any(name.startswith(_KEY.format("")) for name in stored.contents.shapes):
            averages = {averaged.live.data_ptr(): averaged.average for averaged in self._averaged}
            read_into(stored, place_weights(_KEY, strategy.chunks, lambda weight: averages.get(weight.data_ptr())))
        elif one_file is not None:
            for averaged in self._averaged:
                averaged.average.copy_(one_file[averaged.name])
        else:
            self._updates = 0
            return False
        return True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average if an optimizer step has ended."""
        if not self._averaged:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif trainer.global_step > self._latest_update_step and self.should_update(step_idx=trainer.global_step - 1):
            self._update(trainer)
            self._latest_update_step = trainer.global_step

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Update the average if ``should_update`` selects the epoch."""
        if not self._averaged:
            super().on_train_epoch_end(trainer, pl_module)
        elif trainer.current_epoch > self._latest_update_epoch and self.should_update(epoch_idx=trainer.current_epoch):
            self._update(trainer)
            self._latest_update_epoch = trainer.current_epoch

    @torch.no_grad()
    def _update(self, trainer: pl.Trainer) -> None:
        """Source: ``AveragedModel.update_parameters`` (torch.optim.swa_utils, 2.13)."""
        _complete(trainer)
        of_many, of_one = self._kwargs.get("multi_avg_fn"), self._kwargs.get("avg_fn")
        of_one = of_one or get_swa_avg_fn()  # type: ignore[no-untyped-call]
        for averaged in self._averaged:
            average, count = averaged.average, torch.tensor(self._updates, device=averaged.average.device)
            value = averaged.live.detach().to(average)
            if self._updates == 0:
                average.copy_(value)
            elif of_many is not None:
                of_many([average], [value], count)
            else:
                average.copy_(of_one(average, value, count))
        self._updates += 1

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate with the average."""
        if not self._averaged:
            super().on_validation_epoch_start(trainer, pl_module)
            return
        _complete(trainer)
        for averaged in self._averaged:
            averaged.show_average(keep=True)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue with the training weights."""
        if not self._averaged:
            super().on_validation_epoch_end(trainer, pl_module)
        for averaged in self._averaged:
            averaged.restore()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the model."""
        if not self._averaged:
            super().on_train_end(trainer, pl_module)
            return
        _complete(trainer)
        for averaged in self._averaged:
            averaged.show_average(keep=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Use the average of the checkpoint, if this is not a validation of ``fit``."""
        self._evaluate(trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Use the average of the checkpoint."""
        self._evaluate(trainer)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Use the average of the checkpoint."""
        self._evaluate(trainer)

    def _evaluate(self, trainer: pl.Trainer) -> None:
        if isinstance(trainer.strategy, MCoreStrategy) and trainer.state.fn != "fit":
            if self._start(trainer.strategy):
                for averaged in self._averaged:
                    averaged.show_average(keep=False)
            self._averaged = ()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the averages of this run; after ``fit`` they are in the model."""
        self._averaged = ()

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning keeps, the last epoch with an update, and the number of updates."""
        return {**super().state_dict(), "updates": self._updates, "latest_update_epoch": self._latest_update_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; checkpoints of Lightning's own callback lack the last epoch and the number of updates."""
        super().load_state_dict(state_dict)
        self._updates = state_dict.get("updates", 0)
        self._latest_update_epoch = state_dict.get("latest_update_epoch", self._latest_update_epoch)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the averages next to the weights."""
        strategy = trainer.strategy
        if not isinstance(strategy, MCoreStrategy):
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
        elif not self._averaged:
            return
        elif strategy.checkpoints.saves_one_file:
            checkpoint[WEIGHT_AVERAGE] = {averaged.name: averaged.average for averaged in self._averaged}
        else:
            averages = {averaged.live.data_ptr(): averaged.average for averaged in self._averaged}
            # All layers of a stacked tensor must be there: those that are not averaged are their own average.
            checkpoint[MORE_SHARDS] = place_weights(
                _KEY, strategy.chunks, lambda weight: averages.get(weight.data_ptr(), weight.detach().float())
            )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Reject a file of Lightning's callback, whose weights are the average.

        Raises:
            ValueError: The checkpoint is such a file.
        """
        if not isinstance(trainer.strategy, MCoreStrategy):
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
        elif "current_model_state" in checkpoint:
            raise ValueError(
                f"{trainer.ckpt_path} was saved with Lightning's own callback for averages; resume with that callback"
            )


class EMAWeightAveraging(WeightAveraging, callbacks.EMAWeightAveraging):
    """Lightning's ``EMAWeightAveraging`` on any layout, with its arguments; see :class:`WeightAveraging`.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore.callbacks import EMAWeightAveraging
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[EMAWeightAveraging(decay=0.999)])
    """


def _values(layer: nn.Module, with_buffers: bool) -> list[tuple[str, Tensor]]:
    """Return a layer's own trained parameters, and its floating-point buffers that checkpoints hold."""
    parameters = [(name, value) for name, value in layer.named_parameters(recurse=False) if value.requires_grad]
    buffers = [
        (name, value)
        for name, value in layer.named_buffers(recurse=False)
        if with_buffers and name not in layer._non_persistent_buffers_set
    ]
    return [(name, value) for name, value in (*parameters, *buffers) if value.numel() and value.is_floating_point()]


def _complete(trainer: pl.Trainer) -> None:
    """Gather scattered parameters, which are about to be read or written."""
    strategy = trainer.strategy
    assert isinstance(strategy, MCoreStrategy)
    strategy.complete_parameters()
