# SPDX-License-Identifier: Apache-2.0
"""A callback that logs how large gradients and activations are in each layer."""

import re
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mcore.checkpoint.model_state import shares_of_optimizers
from lightning_mcore.checkpoint.optimizer_state import identity_of, pieces_of
from lightning_mcore.config.value_checks import require_size
from lightning_mcore.parallel.consensus import all_gather_object
from lightning_mcore.strategy.strategy import MCoreStrategy

_LAYER = re.compile(r"(?:chunk\d+\.)?(.*\blayers)\.(?:(\d+)\b|.*@(\d+))")


class LayerStatistics(pl.Callback):
    """Logs the gradient norm and the root mean square of the output of each layer, over all ranks.

    The loggers get ``grad_norm/<layer>`` before clipping, such as ``grad_norm/decoder.layers.3``, for each layer and
    each parameter outside the layers, and ``activation_rms/<layer>`` for each layer. Both cover all ranks and
    microbatches of an optimizer step, so they do not depend on the layout. A layer is a member of a list named
    ``layers``.

    Args:
        every_n_steps: Optimizer steps between two measurements; all others cost nothing.

    Raises:
        TypeError: ``every_n_steps`` is not an int.
        ValueError: ``every_n_steps`` is below 1.

    Examples:
        >>> from lightning_mcore.callbacks import LayerStatistics
        >>> callback = LayerStatistics(every_n_steps=100)
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        require_size("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._hooks: list[RemovableHandle] = []
        self._outputs: dict[str, Tensor] = {}  # sum of squares and number of elements of each layer, [2]
        self._values: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reject a run whose gradients cannot be read.

        Raises:
            TypeError: The strategy is not ``MCoreStrategy``.
            ValueError: The precision is fp16, whose gradients are multiplied by the loss scale.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, MCoreStrategy):
            raise TypeError(f"LayerStatistics needs MCoreStrategy, not {type(strategy).__name__}; remove it")
        precision = strategy.precision_plugin.precision
        if str(precision).startswith("16"):
            raise ValueError(f"LayerStatistics does not support precision={precision!r}; choose bf16 or fp32")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Look at outputs if the step is due."""
        if trainer.global_step % self.every_n_steps or self._hooks:
            return
        for path, module in pl_module.named_modules():
            parent, _, index = path.rpartition(".")
            if index.isdigit() and parent.rpartition(".")[2] == "layers":
                number = getattr(module, "layer_number", int(index) + 1) - 1  # of the whole model, from 0
                name = re.sub(r"^.*?chunks\.\d+\.|^model\.", "", f"{parent}.{number}")
                self._hooks.append(module.register_forward_hook(self._watch(name)))

    def _watch(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if module.training and isinstance(value, Tensor):
                square = value.detach().float().square().sum()
                seen = torch.stack([square, torch.full_like(square, value.numel())]).double()
                self._outputs[name] = self._outputs.get(name, 0) + seen

        return hook

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Measure; collective over the world."""
        if not self._hooks and trainer.global_step % self.every_n_steps:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, MCoreStrategy)
        squares: dict[str, Tensor] = {}
        for share in shares_of_optimizers(strategy.chunks, strategy.megatron_optimizers):
            # Of copies, the main one counts. Data-parallel ranks of a sharded optimizer each have another part.
            copy: Any = pieces_of(share.sharded)[0].place.replica_id
            if any(copy[:-1] if strategy.gradients.distributed else copy):
                continue
            gradient = share.gradient
            name = _layer_of(identity_of(share.sharded))
            squares[name] = squares.get(name, 0) + gradient.double().square().sum() / strategy.gradients.num_instances
        device = strategy.root_device
        norms = {f"grad_norm/{name}": torch.stack([value, value.new_ones(())]) for name, value in squares.items()}
        outputs = {f"activation_rms/{name}": value for name, value in self._outputs.items()}
        for name, (total, count) in _sum_over_ranks({**norms, **outputs}, device).items():
            self._values[name] = (total / (count if name.startswith("activation") else 1)) ** 0.5

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log what was measured, and stop looking."""
        if self._values:
            for hook in self._hooks:
                hook.remove()
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(self._values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
            self._hooks, self._outputs, self._values = [], {}, {}


def _layer_of(name: str) -> str:
    """Return the layer of a stored weight, or its own name: ``decoder.layers.mlp.weight@3`` is in layer 3."""
    found = _LAYER.match(name)
    return f"{found[1]}.{found[2] or found[3]}" if found else re.sub(r"^chunk\d+\.", "", name)


def _sum_over_ranks(values: dict[str, Tensor], device: torch.device) -> dict[str, tuple[float, float]]:
    """Return the sums of pairs [2] over all ranks, of which each has some; collective over the world."""
    names = sorted({name for of_rank in all_gather_object(list(values)) for name in of_rank})
    absent = torch.zeros(2, dtype=torch.float64, device=device)
    sums = torch.stack([values.get(name, absent).to(device) for name in names]) if names else absent.view(1, 2)
    dist.all_reduce(sums)
    return {name: (float(total), float(count)) for name, (total, count) in zip(names, sums.tolist(), strict=False)}
