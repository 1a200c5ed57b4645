# SPDX-License-Identifier: Apache-2.0
"""Log the training speed of a language model and the norm of its gradients at each optimizer step.

``MCoreGPT`` derives from :class:`SpeedLogs`, and your own module may too. ``config/flops.py`` says what is counted.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mcore.config.flops import training_flops_per_token
from lightning_mcore.layers.inputs import num_tokens
from lightning_mcore.strategy.logs.pipeline import PipelineLogs
from lightning_mcore.strategy.module import MCoreModule
from lightning_mcore.strategy.progress import StepClock, model_copies
from lightning_mcore.strategy.strategy import MCoreStrategy


class SpeedLogs(MCoreModule):
    """An ``MCoreModule`` that logs ``tokens_per_second``, ``model_tflops`` and ``grad_norm``.

    Attributes:
        transformer: Fields of ``TransformerConfig``. The module must set this attribute and the two below.
        padded_vocab_size: Rows of the embedding.
        seq_length: Tokens of a sequence.
        trained_products: Where weights are frozen: multiplications of one token with matrices that are trained all the
            same, and with those of adapters.
    """

    transformer: dict[str, Any]
    padded_vocab_size: int
    seq_length: int
    trained_products: tuple[float, float] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._clock = StepClock()
        self._stepped = 0
        self._row_length: int | None = None
        self._local_grad_norm: Tensor | None = None

    @property
    def output_size(self) -> int:
        """Columns of the output layer."""
        return self.padded_vocab_size

    def on_train_start(self) -> None:
        """Start measuring."""
        self._clock = StepClock()
        self._stepped = self.trainer.global_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Continue measuring after validation."""
        self._clock.start()
        self._row_length = batch["tokens"].size(1) if "tokens" in batch else None
        if self._counter is not None:
            self._counter.count_tokens(num_tokens(batch), self.image_tokens(batch))

    def on_validation_start(self) -> None:
        """Leave validation out of the measurement."""
        self._clock.pause()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Measure the gradients if no MCoreStrategy does."""
        if self._host() is None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self._local_grad_norm = torch.nn.utils.get_total_norm(grads)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the gradient norm and the speed, once for each optimizer step."""
        if self._counter is None:
            self._clock.add(num_tokens(batch))
        if self.trainer.global_step == self._stepped:
            return
        self._stepped = self.trainer.global_step
        if self._counter is not None:
            self._clock.add(self._counter.tokens)
        tokens_per_second = self._clock.step(float if self._counter is not None else self._over_copies)
        flops = tokens_per_second * self.flops_per_token() / self.trainer.world_size
        self.log("tokens_per_second", tokens_per_second, prog_bar=True)
        self.log("model_tflops", flops / 1e12)
        optimizer = self.trainer.optimizers[0]
        grad_norm = getattr(optimizer, "grad_norm", self._local_grad_norm)  # Megatron's own, or ours
        if getattr(optimizer, "step_skipped", False):
            grad_norm = math.inf  # Megatron does not measure it, and Lightning would repeat that of the step before
        if grad_norm is not None:
            self.log("grad_norm", grad_norm)

    @property
    def _counter(self) -> PipelineLogs | None:
        """What sums the tokens of a step over the model copies, with its logs."""
        strategy = self.trainer.strategy
        return strategy.logs.counter if isinstance(strategy, MCoreStrategy) else None

    def _over_copies(self, tokens: Any) -> Tensor:
        """Return the tokens of all model copies, which may differ between copies, a scalar ``[]``; collective."""
        counted = tokens if isinstance(tokens, Tensor) else torch.full((), tokens, device=self.device)
        mean: Tensor = self.trainer.strategy.reduce(counted.float(), reduce_op="mean")
        return mean * model_copies(self.trainer.strategy)

    def image_tokens(self, batch: Any) -> Tensor | None:
        """Return the number of tokens of images in a batch, a scalar ``[]``; None for a text-only model."""
        return None

    def flops_per_token(self) -> float:
        """Return the floating-point operations for one token of the last step, forward and backward."""
        architecture: Any = self.architecture
        fields = {**self.transformer, **(architecture.delta_net or {})}
        length = self.seq_length if self._row_length is None else self._row_length
        return training_flops_per_token(fields, self.output_size, length, self.trained_products)
