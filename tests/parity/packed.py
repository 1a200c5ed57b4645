# SPDX-License-Identifier: Apache-2.0
"""Documents of uneven lengths, packed for every layout and run one by one: what packed training is compared with.

The documents, and how they are put into rows, do not depend on the layout. :func:`one_by_one` knows nothing of packing:
it runs each document by itself, without padding, through a bare model on one rank, and sums weighted losses in plain
torch. The weights say what the loss is the mean of.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreModule, MCoreStrategy
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from tests.parity.bare_loop import Trace, process_groups
from tests.parity.global_tensors import Slice, assemble, fill_weights, plain_gradient_slices, whole_gradients
from tests.parity.lightning_loop import TinyGPT, make_trainer
from tests.parity.linear import START, WIDTH, Linear
from tests.support import tiny
from tests.support.layouts import Layout
from tests.support.tiny import Batch, Recipe

Mean = Literal["tokens", "samples", "microbatches"]

MULTIPLE = 8  # what cp4 asks of a sub-sequence
ROWS: tuple[tuple[int, tuple[int, ...]], ...] = (  # (length of a row, lengths of its documents)
    (32, (5, 13, 3)),
    (32, (32,)),
    (32, (9, 9)),
    (32, (1, 16, 7)),
)
LONGER_ROWS = ((32, (5, 13, 3)), (48, (32, 4)), (16, (9,)), (64, (1, 16, 7, 22)))
TWO_LAYERS = (("num_layers", 2),)
RECIPE = Recipe(token_weighted=True, steps=1, global_batch_size=4, micro_batch_size=1, options=TWO_LAYERS)

Rows = tuple[tuple[int, tuple[int, ...]], ...]


def documents(lengths: tuple[int, ...], first_id: int) -> list[TokenSample]:
    """Return documents that occupy so many places; of each a prompt of another length counts for nothing."""
    samples = []
    for number, length in enumerate(lengths, start=first_id):
        generator = torch.Generator().manual_seed(50 + number)
        tokens = torch.randint(0, tiny.VOCAB_SIZE, (length + 1,), generator=generator).numpy()
        targets = np.arange(length + 1) > number % max(1, length)
        samples.append(TokenSample(tokens, targets, number))
    return samples


def all_documents(rows: Rows) -> list[list[TokenSample]]:
    """Return the documents of every row."""
    starts = [sum(len(lengths) for _, lengths in rows[:row]) for row in range(len(rows))]
    return [documents(lengths, start) for (_, lengths), start in zip(rows, starts, strict=True)]


def packed_microbatches(rows: Rows, micro_batch_size: int, pad_token: int = 0) -> list[Batch]:
    """Return the rows as packed batches."""
    built = [
        build_row(samples, length, MULTIPLE, pad_token=pad_token)
        for samples, (length, _) in zip(all_documents(rows), rows, strict=True)
    ]
    return [collate_rows(built[start : start + micro_batch_size]) for start in range(0, len(built), micro_batch_size)]


def token_weights(rows: Rows, mean: Mean, micro_batch_size: int) -> list[Tensor]:
    """Return for each document the weight of each of its losses, from the meaning of the loss alone."""
    by_row = [[torch.tensor(s.loss_mask[1:], dtype=torch.float) for s in samples] for samples in all_documents(rows)]
    masks = [mask for row in by_row for mask in row]
    if mean == "tokens":
        total = sum(mask.sum() for mask in masks)
        return [mask / total for mask in masks]
    if mean == "samples":
        return [mask / mask.sum() / len(masks) for mask in masks]
    weights = []
    groups = [by_row[start : start + micro_batch_size] for start in range(0, len(by_row), micro_batch_size)]
    for group in groups:
        here = [mask for row in group for mask in row]
        weights += [mask / sum(m.sum() for m in here) / len(groups) for mask in here]
    return weights


@dataclass(frozen=True)
class Result:
    """A loss and its gradient, in global terms."""

    loss: float
    gradients: dict[str, Tensor]


def one_by_one(layout: Layout, recipe: Recipe, rows: Rows, means: tuple[Mean, ...], size: int) -> dict[Mean, Result]:
    """Run every document by itself through a bare model; on one rank."""
    results: dict[Mean, Result] = {}
    with process_groups(layout.one_rank):
        config = tiny.make_config(tiny.transformer_fields(layout, recipe))
        model = tiny.build_gpt(config, layout, recipe, True, True, None)
        fill_weights([model])
        samples = [sample for row in all_documents(rows) for sample in row]
        for mean in means:
            model.zero_grad()
            total = 0.0
            for sample, weights in zip(samples, token_weights(rows, mean, size), strict=True):
                tokens = torch.from_numpy(sample.tokens)[None]
                positions = torch.arange(tokens.size(1) - 1)[None]
                losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
                loss = (losses * weights).sum()
                loss.backward()
                total += loss.item()
            results[mean] = Result(total, assemble(plain_gradient_slices(model)))
    return results


class PackedGPT(TinyGPT):
    """The tiny GPT on packed rows, as a user would write it.

    Args:
        layout: As for :class:`TinyGPT`.
        recipe: As for :class:`TinyGPT`.
        rows: What it is trained on.
        mean: What its loss is the mean of.
        pad_token: What stands in padding.
    """

    def __init__(self, layout: Layout, recipe: Recipe, rows: Rows, mean: Mean, pad_token: int = 0) -> None:
        super().__init__(layout, recipe, keep_gradients=True)
        self.rows = rows
        self.mean = mean
        self.pad_token = pad_token

    def train_dataloader(self) -> DataLoader[Batch]:
        rank = parallel_state.get_data_parallel_rank()
        batches = packed_microbatches(self.rows, self.recipe.micro_batch_size, self.pad_token)
        return DataLoader(batches[rank :: self.layout.dp], batch_size=None)  # type: ignore[arg-type]

    def microbatch_shape(self, batch: Batch) -> tuple[int, int] | None:
        return super(TinyGPT, self).microbatch_shape(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.forward_step(batch, "samples" if self.mean == "samples" else "tokens")


def train_packed(
    layout: Layout, recipe: Recipe, rows: Rows, means: tuple[Mean, ...], pad: int = 0
) -> dict[Mean, Trace]:
    """Train on the packed rows on this rank of ``layout``, for one step, once for each meaning of the loss."""
    traces: dict[Mean, Trace] = {}
    for mean in means:
        of_mean = replace(recipe, token_weighted=mean != "microbatches")
        module = PackedGPT(layout, of_mean, rows, mean, pad)
        strategy = MCoreStrategy(**layout.strategy_arguments)
        accumulate = len(rows) // recipe.micro_batch_size // layout.dp
        make_trainer(layout.world_size, strategy, accumulate).fit(module)
        assert module.trace is not None
        traces[mean] = module.trace
    return traces


class LinearTokens(Linear):
    """A chunk with one weight, called as ``GPTModel`` is: half the squared error of a line through fixed points."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, position_ids: Tensor, attention_mask: None, labels: Tensor, packed_seq_params: Any
    ) -> Tensor:
        """Return the error of each token."""
        x, y = points()
        return (x[tokens] @ self.weight - y[labels]) ** 2 / 2


class LinearPacked(MCoreModule):
    """A user's module over it, on packed rows.

    Args:
        mean: What its loss is the mean of.
        copies: Data-parallel ranks.
    """

    def __init__(self, mean: Mean, copies: int) -> None:
        super().__init__()
        self.mean = mean
        self.copies = copies
        self.gradient: Tensor | None = None

    def configure_model(self) -> None:
        fields = self.megatron_fields() | {"calculate_per_token_loss": self.mean != "microbatches"}
        config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, **fields)
        self.model = self.pipeline(lambda *, pre_process, post_process, vp_stage: LinearTokens(config))

    def train_dataloader(self) -> DataLoader[Batch]:
        batches = packed_microbatches(ROWS, 1)[parallel_state.get_data_parallel_rank() :: self.copies]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.forward_step(batch, "samples" if self.mean == "samples" else "tokens")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        (chunk,) = self.trainer.strategy._chunks.ddp
        (gradient,) = whole_gradients(chunk).values()
        self.gradient = gradient.detach().double().clone()


def points() -> tuple[Tensor, Tensor]:
    """Return for each token where it stands, [v, 5], and for each label its height, [v]."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(tiny.VOCAB_SIZE, WIDTH, generator=generator), torch.randn(tiny.VOCAB_SIZE, generator=generator)


def analytic_gradient(mean: Mean) -> Tensor:
    """Return the gradient of :class:`LinearPacked` in fp64, from the formula."""
    x, y = (values.double() for values in points())
    total = torch.zeros(WIDTH, dtype=torch.float64)
    samples = [sample for row in all_documents(ROWS) for sample in row]
    for sample, weights in zip(samples, token_weights(ROWS, mean, 1), strict=True):
        at, height = x[sample.tokens[:-1]], y[sample.tokens[1:]]
        error = at @ torch.tensor(START, dtype=torch.float64) - height
        total += ((weights.double() * error)[:, None] * at).sum(0)
    return total


def linear_gradients(layout: Layout, means: tuple[Mean, ...]) -> dict[Mean, Tensor]:
    """Return the gradient of one step for each meaning of the loss, on this rank of ``layout``."""
    gradients: dict[Mean, Tensor] = {}
    for mean in means:
        module = LinearPacked(mean, layout.dp)
        make_trainer(layout.world_size, MCoreStrategy(**layout.strategy_arguments), len(ROWS) // layout.dp).fit(module)
        assert module.gradient is not None
        gradients[mean] = module.gradient
    return gradients


class OneByOneGPT(PackedGPT):
    """The same module on a microbatch for each document, which is not packed."""

    def train_dataloader(self) -> DataLoader[Batch]:
        samples = [sample for row in all_documents(self.rows) for sample in row]
        return DataLoader([collate_padded([sample]) for sample in samples], batch_size=None)  # type: ignore[arg-type]


def train_one_by_one(layout: Layout, recipe: Recipe, rows: Rows) -> Trace:
    """Train on the documents, each a microbatch, for one step."""
    module = OneByOneGPT(layout, recipe, rows, "tokens")
    accumulate = sum(len(lengths) for _, lengths in rows)
    make_trainer(layout.world_size, MCoreStrategy(**layout.strategy_arguments), accumulate).fit(module)
    assert module.trace is not None
    return module.trace


class Losses(PackedGPT):
    """Says the loss of each token of the packed rows, and to which document it belongs."""

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.train_dataloader()

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        losses, inputs = self.token_losses(batch)
        return losses, inputs.samples


def token_losses(layout: Layout, rows: Rows, changed: int | None) -> list[tuple[Tensor, Tensor]]:
    """Return the losses of this rank's tokens in each row; the document of this number has other tokens."""
    module = Losses(layout, RECIPE, rows, "tokens")
    batches = packed_microbatches(rows, 1)
    if changed is not None:
        batch = batches[0]
        start, end = batch["cu_seqlens_padded"][0, changed : changed + 2].tolist()
        batch["tokens"][0, start:end] = (batch["tokens"][0, start:end] + 1) % tiny.VOCAB_SIZE
    trainer = make_trainer(layout.world_size, MCoreStrategy(**layout.strategy_arguments), 1)
    predicted: Any = trainer.predict(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return predicted


def loss_of_copies(traces: list[Trace], layout: Layout, batches: list[Batch], mean: Mean) -> float:
    """Return the loss of a step on these batches over all model copies; a rank knows that of its own."""
    total = weight = 0.0
    for trace in traces:
        mine = batches[trace.dp_rank :: layout.dp]
        tokens = sum(batch["loss_mask"].sum().item() for batch in mine)
        samples = sum((batch["sample_ids"] >= 0).sum().item() for batch in mine)
        share = {"tokens": tokens, "samples": samples, "microbatches": 1}[mean]
        total, weight = total + trace.losses[0] * share, weight + share
    return total / weight


def slices_of(traces: list[Trace]) -> list[Slice]:
    """Return the gradients of all ranks."""
    return [part for trace in traces for part in trace.gradients[0]]
