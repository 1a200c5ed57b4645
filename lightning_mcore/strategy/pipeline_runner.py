# SPDX-License-Identifier: Apache-2.0
"""Steps of a model built with ``pipeline()``, on Megatron's pipeline schedules.

Each rank is a pipeline *stage* and has one *chunk* of the model's layers, or several in the interleaved schedule. The
schedule runs the user's complete ``training_step`` for each *microbatch* and chunk. On all stages but the last,
``self.model(...)`` does not return: it raises :class:`StageOutput`, which carries the chunk's activations out of the
step. An error of the step ends its rank, and with it all ranks (``parallel/rank_watch.py``). Two stages and the
microbatches a and b, from left to right in time::

    stage 0   step(a) raises   step(b) raises                            backward(a)                   backward(b)
                      send a ->        send b ->           <- gradient of a              <- gradient of b
    stage 1                    step(a) returns, backward(a)              step(b) returns, backward(b)

A DataLoader batch is one microbatch, or several with ``MCoreStrategy(micro_batch_size=...)``. The *window* is the
``accumulate_grad_batches`` batches of an optimizer step: with 4, ``PipelineRunner.training_step`` only keeps batches 0
to 2, and runs the schedule over all four at batch 3. Lightning's loops are unchanged, so ``global_step``, ``max_steps``
and the rest mean what they do in Lightning. The user's ``training_step`` returns one of two things:

==================================  =================================================  ============================
returned                            loss of the optimizer step                         ``calculate_per_token_loss``
==================================  =================================================  ============================
a scalar: mean over the microbatch  mean over microbatches, data and context ranks     False
``{"loss": m, "num_tokens": n}``    sum over all tokens, divided by their number       True
==================================  =================================================  ============================

The last column is a field of ``TransformerConfig``, which Megatron's wrappers and routers read when they are created.
Two microbatches with means 2.0 and 4.0 over 100 and 300 tokens give 3.0 in the first way and 3.5 in the second.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from lightning_mcore.config.fp8 import check_microbatch, without_shape
from lightning_mcore.config.layout import ModelShape
from lightning_mcore.config.loss_chunks import check_chunked_loss
from lightning_mcore.config.rules.strategy import NO_SYNC_BATCHNORM
from lightning_mcore.config.text import counted
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.multi_token import check_multi_token
from lightning_mcore.layers.spec import set_attention_environment
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.chunks import ModelChunks, check_gradients, pipeline_config, wrap_chunks
from lightning_mcore.parallel.consensus import run_on_all_ranks
from lightning_mcore.parallel.groups import process_group, random_state_of_stage
from lightning_mcore.parallel.pipeline import Pipeline, StageOutput
from lightning_mcore.parallel.stage_shapes import shapes_sent_between_hosts
from lightning_mcore.strategy.checks import (
    check_backward_is_free,
    check_dispatched_shapes,
    check_not_compiled,
    check_steps_take_batches,
)
from lightning_mcore.strategy.fp8_checks import check_chunks
from lightning_mcore.strategy.module import MCoreModule, split_rows
from lightning_mcore.strategy.pipeline_evaluation import PipelineEvaluation

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy

_Shape = tuple[int, int] | None  # (sequence length, rows) of a microbatch; None if stages exchange it
_LossFunction = Callable[[Tensor], tuple[Any, ...]]  # Megatron's: scales the loss, and adds a report
_GetLoss = Callable[[Any, Any], tuple[Tensor, _LossFunction]]  # for a microbatch and the output of its step


@dataclass(frozen=True)
class Microbatch:
    """The arguments of one call of a step, and how much it counts."""

    batch: Any  # on the device
    step_arguments: tuple[Any, ...]  # those after the batch: batch_idx and dataloader_idx
    shape: _Shape = None
    weight: float = 1.0  # its share of the rows of a DataLoader batch
    is_padding: bool = False  # runs only because the schedule, or another rank, needs one more

    def as_padding(self) -> "Microbatch":
        """Return a repetition of this microbatch that counts nothing."""
        return replace(self, weight=0.0, is_padding=True)


def wrap_pipeline(
    strategy: "MCoreStrategy",
    module: pl.LightningModule,
    pipeline: Pipeline,
    ddp_config: DistributedDataParallelConfig | None,
) -> ModelChunks:
    """Wrap the chunks of a model that was built with ``pipeline()``; without ``ddp_config`` only for evaluation."""
    if strategy._layer_sync is not None:  # Lightning's plugin for Trainer(sync_batchnorm=True)
        raise ValueError(NO_SYNC_BATCHNORM)
    if ddp_config is not None:
        check_backward_is_free(module)
    check_not_compiled(module)
    check_steps_take_batches(module)
    config = pipeline_config(pipeline, strategy.megatron_fields())
    strategy.layout.validate_model(ModelShape.from_config(config))
    is_ours = all(isinstance(chunk, GPTChunk) for chunk in pipeline.chunks)
    if config.mtp_num_layers:
        # Only stages with an embedding know whether positions are learned; all of them raise the error.
        learned_positions = any(getattr(layer, "add_position_embedding", False) for layer in pipeline.modules())
        run_on_all_ranks(lambda: check_multi_token(config, learned_positions=learned_positions, is_ours=is_ours))
    check_chunked_loss(strategy.loss_chunk_size, config.defer_embedding_wgrad_compute, is_ours)
    for chunk in pipeline.chunks:
        if isinstance(chunk, GPTChunk):
            chunk.loss_chunk_size = strategy.loss_chunk_size
    return wrap_chunks(list(pipeline.chunks), config, pipeline, ddp_config, strategy.gradients.align_grad_reduce)


class PipelineRunner:
    """The ``StepRunner`` of a module whose chunks :func:`wrap_pipeline` has wrapped.

    The strategy drops it at the end of a run, with all that a failed step has left. Raises ``ValueError`` if no layer
    of the model could use FP8.
    """

    inline = False  # the schedule runs backward, not Lightning's loop

    def __init__(self, strategy: "MCoreStrategy", module: pl.LightningModule, chunks: ModelChunks) -> None:
        assert chunks.pipeline is not None
        check_chunks(strategy.precision_plugin.fp8, chunks.bare)
        for chunk in chunks.bare:
            set_attention_environment(chunk)  # which the end of an earlier run may have restored
        self._strategy = strategy
        self._module = module
        self._chunks = chunks
        self._pipeline = chunks.pipeline
        self._layout = strategy.layout
        self.root_device = strategy.root_device
        self.recorder = strategy.logs.setup_pipeline(chunks.config, self._pipeline.takes_whole_batches)
        self._evaluation = PipelineEvaluation(self, strategy, module, chunks)
        self._window: list[Microbatch] = []
        self._has_checked_window = False
        self._last_loss: Tensor | None = None

    def training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the batch until the window is full, then run forward and backward; return what :meth:`train` returns.

        While the window fills, this returns the previous loss. ``kwargs`` are empty for a step of (batch, batch_idx).
        """
        strategy = self._strategy
        trainer = self._module.trainer
        accumulate_grad_batches = trainer.accumulate_grad_batches
        if trainer.fit_loop.epoch_loop.batch_idx % accumulate_grad_batches == 0:
            self._window = []  # an epoch may have ended in the middle of a window
        self._window += self.cut(args[0], args[1:], strategy.micro_batch_size)
        # Private, but Lightning's own rule: whether no optimizer step follows this batch.
        if trainer.fit_loop._should_accumulate():
            return self._last_loss if self._last_loss is not None else torch.zeros((), device=self.root_device)
        self._check_first_window()
        window = self._window
        self._window = []
        self._zero_gradients()
        output = self.train(window, accumulate_grad_batches)
        for optimizer in strategy.megatron_optimizers:
            optimizer.gradients_changed()
        if strategy.gradients.check_nan:
            check_gradients(self._chunks)
        self._last_loss = output["loss"] if isinstance(output, dict) else output
        return output

    def cut(self, batch: Any, step_arguments: tuple[Any, ...], rows: int | None) -> list[Microbatch]:
        """Cut a DataLoader batch into microbatches of this many rows; with None it is one microbatch."""
        parts = [(batch, 1.0)] if rows is None else self.split_rows(batch, rows)
        return [self._microbatch(part, step_arguments, weight) for part, weight in parts]

    def split_rows(self, batch: Any, rows: int) -> Iterator[tuple[Any, float]]:
        """Return parts of a batch and their shares of its rows, as the module cuts it."""
        if isinstance(self._module, MCoreModule):
            return self._module.split_rows(batch, rows)
        return split_rows(batch, rows)

    def _microbatch(self, batch: Any, step_arguments: tuple[Any, ...], weight: float) -> Microbatch:
        """Return a microbatch with this context-parallel rank's part of the sequences; a HF model cuts them itself."""
        module = self._module
        if not isinstance(module, MCoreModule) or self._pipeline.takes_whole_batches:
            return Microbatch(batch, step_arguments, weight=weight)
        shape = module.microbatch_shape(batch)  # before context parallelism cuts the sequences
        if shape is not None:
            self._layout.validate_rows(shape[0])
        if self._layout.context_parallel_size > 1:
            batch = module.shard_context(batch)
        return Microbatch(batch, step_arguments, shape, weight)

    def _check_first_window(self) -> None:
        """Once in a run, check that the interleaved schedule can group a full window, and say what a step reads."""
        trainer = self._module.trainer
        epoch = trainer.fit_loop.epoch_loop
        is_full = (epoch.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        # The last batch of an epoch may have fewer rows, so its window is checked only if the epoch has no other.
        is_first = epoch.batch_idx < trainer.accumulate_grad_batches
        is_typical = is_first or not epoch.batch_progress.is_last_batch
        if is_full and is_typical and not self._has_checked_window:
            self._layout.validate_microbatches(len(self._window), self._strategy.microbatch_group_size)
            self._has_checked_window = True
            self._show_batch()

    def _show_batch(self) -> None:
        """Say what an optimizer step reads, if batches have ``tokens``, [rows, tokens]."""
        batches = [microbatch.batch for microbatch in self._window]
        if not all(isinstance(batch, dict) and isinstance(batch.get("tokens"), Tensor) for batch in batches):
            return
        rows = [len(batch["tokens"]) for batch in batches]
        copies = process_group("dp").size()
        each = f" of {counted(rows[0], 'row')}" if len(set(rows)) == 1 else ""
        rank_zero_info(
            f"MCoreStrategy: an optimizer step reads {counted(sum(rows) * copies, 'row')}:"
            f" {counted(len(rows), 'microbatch', 'microbatches')}{each} x data parallel {copies:,}"
        )

    def _zero_gradients(self) -> None:
        """Zero the gradients before the schedule runs backward; Lightning's zero_grad comes after training_step."""
        for chunk in self._chunks.ddp:
            chunk.zero_grad_buffer()
        for optimizer in self._strategy.megatron_optimizers:
            optimizer.megatron.zero_grad()

    def train(self, microbatches: Sequence[Microbatch], accumulate_grad_batches: int) -> Any:
        """Run forward and backward over the microbatches of an optimizer step; gradients are final afterwards.

        Returns the loss of the step on every rank, detached, [] fp32: a mean over microbatches or tokens; on the last
        stage also the other values that ``training_step`` returned for the last microbatch.
        """
        for microbatch in microbatches:
            check_microbatch(self._strategy.precision_plugin.fp8, microbatch.shape, self._layout)
        num_batches = round(sum(microbatch.weight for microbatch in microbatches))
        padded = self._pad(microbatches)
        check_dispatched_shapes(self._chunks.config, [microbatch.shape for microbatch in padded])
        get_loss = partial(
            self._loss_and_function,
            factor=_mean_loss_factor(len(padded), num_batches, self._layout.context_parallel_size),
            last=microbatches[-1],
        )
        share_of_window = num_batches / accumulate_grad_batches  # below 1 at the end of an epoch
        with self._strategy.logs.layer_losses(len(microbatches)), self._losses_multiplied_by(share_of_window):
            reports, loss = self.run_step("training_step", padded, get_loss)
        assert loss is not None
        last_output = reports[len(microbatches) - 1] if reports else None  # padding comes after it
        return loss if last_output is None else {**last_output, "loss": loss}

    def _pad(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Repeat the last microbatch, with weight zero, until an interleaved schedule has complete groups."""
        missing = -len(microbatches) % self.microbatch_multiple
        config = self._chunks.config
        if missing and (config.num_moe_experts or config.mtp_num_layers):
            raise RuntimeError(
                f"{len(microbatches)} microbatches are left at the end of the epoch, but the interleaved schedule "
                f"needs a multiple of pipeline_model_parallel_size={self._layout.pipeline_model_parallel_size} with "
                "experts or multi-token prediction; set limit_train_batches or drop_last so that "
                "accumulate_grad_batches divides the epoch"
            )
        return [*microbatches, *[microbatches[-1].as_padding()] * missing]

    def _losses_multiplied_by(self, share: float) -> AbstractContextManager[None]:
        """Scale all losses of a window with fewer batches than ``accumulate_grad_batches``, as Lightning does.

        Megatron's config scales the layers' own losses too. Losses weighted by tokens need no scale.
        """
        config = self._chunks.config
        if share == 1 or config.calculate_per_token_loss:
            return nullcontext()
        scale_fp16 = config.grad_scale_func or (lambda loss: loss)
        return attributes_set([config], {"grad_scale_func": lambda loss: scale_fp16(loss) * share})

    def run_step(
        self, step: str, microbatches: Sequence[Microbatch], get_loss: _GetLoss | None = None
    ) -> tuple[list[Any], Tensor | None]:
        """Run a step of the module as :meth:`run_schedule` does, and log; return the reports and the recorded loss."""
        shapes = {microbatch.shape for microbatch in microbatches}
        shape = shapes.pop() if len(shapes) == 1 else None
        self._strategy.tensor_overlap.open(shape, self._chunks.config)  # the strategy's teardown closes it
        loop = self._strategy.lightning_module.trainer.fit_loop.epoch_loop  # type: ignore[union-attr]
        number = loop.total_batch_idx if step == "training_step" else None  # evaluation has a state of its own
        with self.recorder.recording(), random_state_of_stage(number):
            reports = self.run_schedule(partial(self._call_step, step), microbatches, shape, get_loss)
        return reports, self.recorder.finish(step, over_copies=get_loss is not None)

    def run_schedule(
        self,
        forward_chunk: Callable[[Any, nn.Module], Any],
        microbatches: Sequence[Any],
        shape: _Shape = None,
        get_loss: _GetLoss | None = None,
    ) -> list[Any]:
        """Run all microbatches through all stages: forward and backward, or without ``get_loss`` forward only.

        ``forward_chunk`` returns a microbatch's output on the last stage, and raises StageOutput on the others. Returns
        the outputs, or what the loss functions report, in order; an empty list on all stages but the last.
        """

        def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Tensor, _LossFunction | None]:
            """Return what Megatron expects of ``forward_step_func``: activations to send, or loss and loss function."""
            microbatch = next(iterator)
            try:
                output = forward_chunk(microbatch, chunk)
            except StageOutput as stage:  # no error: this stage's part of the step is done
                # No view of another tensor, because Megatron frees the memory once it has sent the activations.
                needs_grad = stage.value.requires_grad
                sent = stage.value.contiguous()  # gloo and NCCL send nothing else
                return make_viewless_tensor(sent, needs_grad, keep_graph=needs_grad), None
            if get_loss is not None:
                return get_loss(microbatch, output)
            # Forward only, but Megatron still calls a loss function, and keeps what it reports: here the output.
            return torch.zeros((), device=self.root_device), lambda zero: (zero, output)

        config = self._chunks.config
        chunks = self._chunks.wrapped
        config.variable_seq_lengths = shape is None  # not restored, because each run sets it
        seq_length, rows = shape or (1, 1)  # ignored where stages exchange shapes
        group_size = self._layout.microbatch_group_size(len(microbatches), config.microbatch_group_size_per_vp_stage)
        iterators = [iter(microbatches) for _ in chunks]  # each chunk runs all of them
        with (
            attributes_set([config], {"microbatch_group_size_per_vp_stage": group_size}),
            shapes_sent_between_hosts(),
        ):
            reports: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if self._layout.is_interleaved else iterators[0],
                model=chunks if self._layout.is_interleaved else chunks[0],
                num_microbatches=len(microbatches),
                seq_length=seq_length,
                micro_batch_size=rows,
                forward_only=get_loss is None,
            )
        return reports

    def _call_step(self, step: str, microbatch: Microbatch, chunk: nn.Module) -> Any:
        """Call the module's step with ``chunk`` as its model; raises StageOutput on all stages but the last."""
        is_last = self.is_last(chunk)
        calls_before = self._pipeline.num_calls
        # With overlap_param_gather, a module waits for its parameters when it is called. Some are used without a call.
        self._chunks.wait_for_uncalled(chunk)
        muted = microbatch.is_padding or not is_last
        with self.recorder.microbatch(microbatch.batch, muted), self._pipeline.activate(chunk, is_last):
            batch = copy.copy(microbatch.batch)  # a step may take entries out of it, and runs for every chunk
            try:
                output = getattr(self._module, step)(batch, *microbatch.step_arguments)
            except (AssertionError, ValueError) as error:  # TransformerEngine's: the latter in 2.20
                # A microbatch of known shape was checked before, in train().
                if microbatch.shape is None and str(error).startswith("FP8 execution requires"):
                    raise ValueError(without_shape(self._strategy.precision_plugin.fp8, str(error))) from error
                raise
        calls = self._pipeline.num_calls - calls_before
        may_call_again = self._pipeline.takes_whole_batches and not self._pipeline.is_staged  # a HF model, on one stage
        if calls != 1 and not may_call_again:
            name = f"{type(self._module).__name__}.{step}"
            if calls == 0 and output is None:
                raise RuntimeError(
                    f"{name} returned None without calling the model built with pipeline(), whose stages all run every"
                    " microbatch; to skip a batch, leave it out of the data, or call the model and return its loss"
                    " times 0"
                )
            raise RuntimeError(
                f"{name} called the model built with pipeline() {calls} times; a step must call it exactly once"
            )
        return output

    def _loss_and_function(
        self, microbatch: Microbatch, output: Any, factor: float, last: Microbatch
    ) -> tuple[Tensor, _LossFunction]:
        """Return a training step's loss, and Megatron's loss function for it, which also reports the last output."""
        loss, num_tokens = self._read_loss(output)
        if not microbatch.is_padding:
            self.recorder.add_loss(loss, microbatch.weight if num_tokens is None else num_tokens)
        # Only the last one, because Megatron keeps reports until the step ends.
        is_reported = microbatch is last and isinstance(output, dict)
        report = apply_to_collection(output, Tensor, Tensor.detach) if is_reported else None
        # Both functions return a new tensor, because Megatron changes it in place.
        if num_tokens is None:
            weight = microbatch.weight * factor
            return loss, lambda mean: (mean * weight, report)
        tokens = torch.zeros_like(num_tokens) if microbatch.is_padding else num_tokens
        return loss, lambda mean: (mean * tokens, tokens, report)

    def _read_loss(self, output: Any) -> tuple[Tensor, Tensor | None]:
        """Return the loss and, if losses are weighted by tokens, the number of tokens."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return a loss tensor or a dict with one under 'loss', got {type(output).__name__}"
            )
        num_tokens = output.get("num_tokens") if isinstance(output, dict) else None
        per_token = self._chunks.config.calculate_per_token_loss
        if per_token != (num_tokens is not None):
            returned = "without 'num_tokens'" if num_tokens is None else "with 'num_tokens'"
            change = (
                "return {'loss': mean, 'num_tokens': number of tokens}, as self.normalized_loss(losses, inputs) does,"
                " or to average microbatches, set calculate_per_token_loss=False (MCoreGPT: in transformer)"
                if per_token
                else "return only the loss, or to weight by tokens, set calculate_per_token_loss=True"
            )
            raise ValueError(
                f"training_step returned a loss {returned}, but the model's TransformerConfig has "
                f"calculate_per_token_loss={per_token}; {change}"
            )
        if num_tokens is None:
            return loss, None
        if isinstance(num_tokens, int | float):  # written by a kernel; as_tensor() would copy it, and wait for the GPU
            return loss, torch.full((), num_tokens, device=self.root_device).int()
        return loss, torch.as_tensor(num_tokens, device=self.root_device).detach().int()

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches in a run of the schedule must be a multiple of this."""
        return self._layout.pipeline_model_parallel_size if self._layout.is_interleaved else 1

    def is_last(self, chunk: nn.Module) -> bool:
        """Return whether a wrapped chunk holds the end of the model."""
        return self._chunks.is_last[self._chunks.wrapped.index(chunk)]

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Do nothing: the schedule reduces gradients itself."""
        return nullcontext()

    def backward_context(self) -> AbstractContextManager[None]:
        """Do nothing: the schedule has run backward."""
        return nullcontext()

    def evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any], shares_output: bool) -> Any:
        """Run a step forward only; with ``shares_output`` every rank of the pipeline returns its output."""
        return self._evaluation.evaluate(step, args, shares_output)

    def model_calls(self) -> AbstractContextManager[None]:
        """Let calls of the model outside a schedule run all stages inside the ``with`` block."""
        return self._evaluation.model_calls()


def _mean_loss_factor(num_microbatches: int, num_batches: int, context_parallel_size: int) -> float:
    """Return the factor of a microbatch's mean loss that makes up for what Megatron multiplies it by.

    Two batches are left of ``accumulate_grad_batches=4``, each cut into two microbatches, on two context ranks::

        weight                   share of the rows of a batch                                = 1/2
        this factor              num_microbatches / (num_batches * cp)    4 / (2 * 2)        = 1
        Megatron's schedule      cp / num_microbatches                    2 / 4              = 1/2
        _losses_multiplied_by    num_batches / accumulate_grad_batches    2 / 4              = 1/2
        the product              weight / accumulate_grad_batches         1/2 / 4            = 1/8

    Then gradients are averaged over data- and context-parallel ranks. A loss weighted by tokens is multiplied by their
    number only, and ``finalize_model_grads`` divides the gradients by the number of all tokens. Source:
    ``forward_step_calc_loss`` and ``backward_step`` (pipeline_parallel/schedules.py, 0.16).
    """
    return num_microbatches / (num_batches * context_parallel_size)
