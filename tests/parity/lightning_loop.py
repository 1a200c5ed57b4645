# SPDX-License-Identifier: Apache-2.0
"""The run of ``bare_loop.py`` through Lightning: a user's module, ``MCoreStrategy`` and a real ``Trainer``."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.utils.data import DataLoader

from lightning_mcore import MCoreModule, MCoreStrategy
from lightning_mcore.strategy.precision import MCorePrecision
from tests.parity.bare_loop import Trace, process_groups
from tests.parity.global_tensors import fill_weights, gradient_slices, weight_slices
from tests.support import tiny, toy
from tests.support.layouts import Layout
from tests.support.tiny import Batch, Recipe


def train(
    layout: Layout, recipe: Recipe, keep_gradients: bool = False, split_rows: bool = False, **options: Any
) -> Trace:
    """Train the tiny GPT on this rank of ``layout``.

    Args:
        layout: Size and shape of the world; the default process group is open, and Lightning adopts it.
        recipe: What to compute.
        keep_gradients: Whether the trace holds the gradients of every step.
        split_rows: A DataLoader batch holds all microbatches of a step, and the strategy cuts it
            (``micro_batch_size``), instead of ``accumulate_grad_batches`` of one microbatch each.
        options: More arguments of the strategy.
    """
    module = TinyGPT(layout, recipe, keep_gradients, split_rows)
    micro_batch_size = recipe.micro_batch_size if split_rows else None
    strategy = MCoreStrategy(
        **layout.strategy_arguments, micro_batch_size=micro_batch_size, precision_plugin=precision_of(recipe), **options
    )
    accumulate = 1 if split_rows else recipe.num_microbatches(layout)
    trainer = make_trainer(layout.world_size, strategy, accumulate, recipe.precision, recipe.clip)
    trainer.fit(module)
    assert trainer.global_step == recipe.steps
    assert module.trace is not None
    with process_groups(layout):  # to say what is a slice of what; those of another run may be open by then
        module.trace.weights = weight_slices(module.model.chunks)
    return module.trace


def make_trainer(
    world_size: int,
    strategy: Strategy | str,
    accumulate: int,
    precision: Any = "32-true",
    clip: float | None = None,
    limit_train_batches: int | None = None,
) -> pl.Trainer:
    """Return a quiet Trainer for one epoch on the CPU ranks that are already running."""
    return toy.make_trainer(
        strategy,
        devices=world_size,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        limit_train_batches=limit_train_batches,
        use_distributed_sampler=False,  # the module's loader reads its data-parallel rank's part
    )


class TinyGPT(MCoreModule):
    """The tiny GPT as a Lightning user would write it; the hooks at the end only look.

    Args:
        layout: Says what the model is (experts, tied embeddings) and how the global batch is dealt out.
        recipe: What the run computes.
        keep_gradients: Whether to gather the gradients of every step.
        whole_steps: Whether a batch of the loader holds all microbatches of a step.
    """

    def __init__(self, layout: Layout, recipe: Recipe, keep_gradients: bool = False, whole_steps: bool = False) -> None:
        super().__init__()
        self.layout = layout
        self.recipe = recipe
        self.keep_gradients = keep_gradients
        self.whole_steps = whole_steps
        self.trace: Trace | None = None

    def configure_model(self) -> None:
        """Build the chunks of this rank and give them the weights that every layout starts from."""
        fields = tiny.transformer_fields(self.layout, self.recipe)
        self.config = tiny.make_config({**fields, **self.megatron_fields()})
        self.model = self.pipeline(self.build_chunk)
        fill_weights(self.model.chunks)

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> LanguageModule:
        """Build one chunk."""
        return tiny.build_gpt(self.config, self.layout, self.recipe, pre_process, post_process, vp_stage)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Read this data-parallel rank's microbatches of all steps."""
        rank = parallel_state.get_data_parallel_rank()
        steps = [tiny.microbatches(self.recipe, self.layout, rank, step) for step in range(self.recipe.steps)]
        batches = [_join(step) for step in steps] if self.whole_steps else [batch for step in steps for batch in step]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def microbatch_shape(self, batch: Batch) -> tuple[int, int]:
        """Spare the pipeline stages the exchange of shapes."""
        return tiny.SEQ_LENGTH, self.recipe.micro_batch_size

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean, or the mean and the number of its tokens."""
        losses = self.model(**tiny.model_arguments(batch, self.config))
        if not self.recipe.token_weighted:
            return self.masked_mean(losses, batch["loss_mask"])
        count = batch["loss_mask"].sum()
        mean = (losses * batch["loss_mask"]).sum() / count.clamp(min=1)
        return {"loss": mean, "num_tokens": count}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return torch's AdamW."""
        recipe = self.recipe
        return torch.optim.AdamW(
            self.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )

    def on_train_start(self) -> None:
        """Start the trace."""
        self.trace = Trace(parallel_state.get_data_parallel_rank())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the finished gradients, before clipping."""
        if self.keep_gradients:
            self.trace.gradients.append(gradient_slices(self.trainer.strategy._chunks.ddp))

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Keep loss and gradient norm of a step; Lightning divides the loss it shows by the accumulation."""
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.trace.losses.append(outputs["loss"].item() * self.trainer.accumulate_grad_batches)
            self.trace.grad_norms.append(getattr(self.trainer.optimizers[0], "grad_norm", None))
            self.trace.loss_scales.append(getattr(self.trainer.optimizers[0], "loss_scale", 1.0))


def precision_of(recipe: Recipe) -> MCorePrecision | None:
    """Return the precision plugin of a recipe in fp16; None leaves it to ``Trainer(precision=)``."""
    if recipe.precision.startswith("16-"):
        return MCorePrecision(
            recipe.precision,
            initial_loss_scale=recipe.initial_loss_scale,
            loss_scale_window=recipe.loss_scale_window,
        )
    return None


def _join(batches: list[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
