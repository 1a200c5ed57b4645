# SPDX-License-Identifier: Apache-2.0
"""A model of five numbers behind ``pipeline()``: its gradient is known in closed form, its training in plain torch."""

from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreModule
from tests.parity.global_tensors import whole_gradients

Kind = Literal["mean of full masks", "masked mean", "token weighted"]
Batch = dict[str, Tensor]

SEQ_LENGTH, WIDTH, MICRO_BATCH_SIZE = 16, 5, 2
LENGTHS = (3, 2, 16, 7, 1, 12, 9, 5)  # tokens that count, of each sequence
START = (0.3, -0.2, 0.1, 0.4, -0.5)


class Linear(MegatronModule):
    """A chunk with one weight; returns the error of each token, [b, s / cp]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = False
        self.weight = torch.nn.Parameter(torch.tensor(START))

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing: there is no stage before."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return half the squared error."""
        return (x @ self.weight - y) ** 2 / 2


class LinearModule(MCoreModule):
    """A user's module over it.

    Args:
        kind: What its loss is the mean of.
        epochs: How often the loader goes through the data.

    Attributes:
        gradient: [5], of the last step, before clipping.
        weight: [5], after the last step.
    """

    def __init__(self, kind: Kind, epochs: int = 1) -> None:
        super().__init__()
        self.kind = kind
        self.epochs = epochs
        self.gradient: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.model.chunks[0].weight.detach()

    def configure_model(self) -> None:
        per_token = self.kind == "token weighted"
        fields = self.megatron_fields() | {"calculate_per_token_loss": per_token}
        config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, **fields)
        self.model = self.pipeline(lambda *, pre_process, post_process, vp_stage: Linear(config))

    def train_dataloader(self) -> DataLoader[Batch]:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return DataLoader(microbatches(self.kind)[rank::size] * self.epochs, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        losses, mask = self.model(batch["x"], batch["y"]), batch["loss_mask"]
        if self.kind == "mean of full masks":
            return losses.mean()
        if self.kind == "masked mean":
            return self.masked_mean(losses, mask)
        return {"loss": (losses * mask).sum() / mask.sum().clamp(min=1), "num_tokens": mask.sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        (chunk,) = self.trainer.strategy._chunks.ddp
        (gradient,) = whole_gradients(chunk).values()
        self.gradient = gradient.detach().double().clone()


def data(kind: Kind) -> Batch:
    """Return all sequences: x [8, 16, 5], y [8, 16], loss_mask [8, 16]."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), SEQ_LENGTH)
    lengths = torch.tensor(LENGTHS)[:, None] if kind != "mean of full masks" else SEQ_LENGTH
    return {
        "x": torch.randn(*shape, WIDTH, generator=generator),
        "y": torch.randn(*shape, generator=generator),
        "loss_mask": (torch.arange(SEQ_LENGTH) < lengths).float().expand(shape).contiguous(),
    }


def microbatches(kind: Kind) -> list[Batch]:
    """Return the microbatches of an epoch, of all data-parallel ranks."""
    whole, size = data(kind), MICRO_BATCH_SIZE
    return [{name: tensor[i : i + size] for name, tensor in whole.items()} for i in range(0, len(LENGTHS), size)]
