# SPDX-License-Identifier: Apache-2.0
"""Log a language model's training speed and its gradient norm at each optimizer step.

``MCoreGPT`` derives from :class:`SpeedLogs`, and your own module may too. ``config/flops.py`` says what is counted,
``strategy/progress.py`` has the clock. A step of 8,192 tokens in 2 s over all model copies is 4,096 tokens per second;
at 6 GFLOP per token on 4 devices, ``model_tflops`` is 4096 * 6e9 / 4 / 1e12 = 6.1.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mcore.config.flops import training_flops_per_token
from lightning_mcore.layers.inputs import num_tokens, tokens_of
from lightning_mcore.strategy.logs.pipeline import PipelineLogs
from lightning_mcore.strategy.module import MCoreModule
from lightning_mcore.strategy.progress import StepClock, model_copies
from lightning_mcore.strategy.strategy import MCoreStrategy


class SpeedLogs(MCoreModule):
    """An ``MCoreModule`` that logs ``tokens_per_second``, ``model_tflops`` and ``grad_norm``.

    Attributes:
        transformer: Fields of ``TransformerConfig``. The module must set this attribute and the next two.
        padded_vocab_size: Rows of the embedding.
        seq_length: Tokens per sequence.
        trained_products: With frozen weights, the multiplications per token with adapters and with the matrices that
            are still trained; None if all weights are trained.
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
        self._row_length = tokens_of(batch).size(1) if "tokens" in batch else None
        if self._counter is not None:
            self._counter.count_tokens(num_tokens(batch), self.image_tokens(batch))

    def on_validation_start(self) -> None:
        """Exclude validation from the measurement."""
        self._clock.pause()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Measure the gradients if no MCoreStrategy does."""
        if self._host() is None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self._local_grad_norm = torch.nn.utils.get_total_norm(grads)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the gradient norm and the speed, once per optimizer step."""
        if self._counter is None:
            self._clock.add(num_tokens(batch))
        if self.trainer.global_step == self._stepped:
            return
        self._stepped = self.trainer.global_step
        if self._counter is not None:
            self._clock.add(self._counter.tokens)
        tokens_per_second = self._clock.step(float if self._counter is not None else self._over_copies)
        flops = tokens_per_second * self.flops_per_token() / self.trainer.world_size
        # Tensors on the host, because Lightning would copy numbers to the device, and that copy waits for it.
        self.log("tokens_per_second", torch.tensor(tokens_per_second), prog_bar=True)
        self.log("model_tflops", torch.tensor(flops / 1e12))
        optimizer = self.trainer.optimizers[0]
        grad_norm = getattr(optimizer, "grad_norm", self._local_grad_norm)
        if getattr(optimizer, "step_skipped", False):
            grad_norm = math.inf  # not measured, and Lightning would repeat the last one
        if grad_norm is not None:
            self.log("grad_norm", torch.as_tensor(grad_norm, dtype=torch.float32))

    @property
    def _counter(self) -> PipelineLogs | None:
        """What sums a step's tokens over the model copies, with its logs; None without MCoreStrategy."""
        strategy = self.trainer.strategy
        return strategy.logs.pipeline if isinstance(strategy, MCoreStrategy) else None

    def _over_copies(self, tokens: Any) -> Tensor:
        """Return the tokens of all model copies, which may differ between copies, a scalar ``[]``; collective."""
        counted = tokens if isinstance(tokens, Tensor) else torch.full((), tokens, device=self.device)
        mean: Tensor = self.trainer.strategy.reduce(counted.float(), reduce_op="mean")
        # A mean over ranks is also the mean over copies, because the ranks of a copy have the same tokens
        return mean * model_copies(self.trainer.strategy)

    def image_tokens(self, batch: Any) -> Tensor | None:
        """Return the number of image tokens in a batch, a scalar ``[]``; None for a text-only model."""
        return None

    def flops_per_token(self) -> float:
        """Return the floating-point operations per token of the last step, forward and backward."""
        architecture: Any = self.architecture
        fields = {**self.transformer, **architecture.sizes}
        # Attention over a padded batch is as long as its rows, not as seq_length
        length = self.seq_length if self._row_length is None else self._row_length
        return training_flops_per_token(fields, self.output_size, length, self.trained_products)
