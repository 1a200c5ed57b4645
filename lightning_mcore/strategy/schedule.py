# SPDX-License-Identifier: Apache-2.0
"""Lightning's steps on Megatron's forward-backward schedules.

The strategy hands :class:`Schedule` the microbatches of one optimizer step (or one evaluation batch) and the name of
the step. Megatron's schedule asks for one microbatch and one chunk at a time; the answer here is to activate the
chunk in the user's pipeline and to call the user's step (``module.py`` tells how the step becomes a stage).

What a loss means. The step returns

* a scalar: the mean over the microbatch on this rank. The loss of the optimizer step is the mean over its microbatches,
  data-parallel and context-parallel ranks. Megatron multiplies such a loss by the context-parallel size and divides it
  by the number of microbatches; what it is given makes up for both where they differ from Lightning's meaning.
* ``{"loss": mean, "num_tokens": n}``: the same mean, to be weighted by tokens. The loss of the optimizer step is the
  sum over all tokens divided by their number over all microbatches, data- and context-parallel ranks. It needs
  ``TransformerConfig(calculate_per_token_loss=True)``, which Megatron's wrappers and routers read when they are built.

The value that is differentiated is always this rank's own part; only detached copies are reduced, for the logs.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.packed_sequences import rows_between
from lightning_mcore.parallel.chunks import ModelChunks
from lightning_mcore.parallel.groups import from_last_stage, process_group, random_state_of_stage
from lightning_mcore.parallel.pipeline import StageOutput
from lightning_mcore.strategy.logs.auxiliary import AuxiliaryLogs
from lightning_mcore.strategy.logs.step import StepLogs
from lightning_mcore.strategy.module import MCoreModule


@dataclass(frozen=True)
class Microbatch:
    """One unit of the schedule.

    Args:
        batch: What the step takes, on the device.
        arguments: What the step takes after the batch.
        shape: (sequence length, rows), None if the stages are to exchange it.
        weight: Its share of a DataLoader batch: 1 for a whole one.
        filler: Whether it only fills up an interleaved schedule and counts for nothing.
    """

    batch: Any
    arguments: tuple[Any, ...]
    shape: tuple[int, int] | None = None
    weight: float = 1.0
    filler: bool = False


class Schedule:
    """Runs the module's steps over its chunks.

    Args:
        module: The user's module.
        chunks: Its wrapped chunks.
        layout: The parallel layout.
        device: This rank's device.
        prepare: Called before each run with the shape (sequence length, rows) of its microbatches, None where they
            differ, and the model's config.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        chunks: ModelChunks,
        layout: ParallelLayout,
        device: torch.device,
        prepare: Callable[[tuple[int, int] | None, TransformerConfig], None] | None = None,
    ) -> None:
        assert chunks.pipeline is not None
        _check_steps_take_batches(module)
        self._module = module
        self._chunks = chunks
        self._pipeline = chunks.pipeline
        self._layout = layout
        self._device = device
        self._prepare = prepare
        self._last_output: dict[str, Any] = {}
        self._logs = StepLogs(module, device)
        self._auxiliary_logs = AuxiliaryLogs(module, chunks.config, device)

    def split(self, batch: Any, arguments: tuple[Any, ...], micro_batch_size: int | None) -> list[Microbatch]:
        """Cut a DataLoader batch into microbatches and take this context-parallel rank's share of each.

        Args:
            batch: A DataLoader batch, on the device.
            arguments: What the step takes after the batch.
            micro_batch_size: Rows in a microbatch; None for the batch as it is.

        Returns:
            One or more microbatches; the last may have fewer rows.
        """
        if micro_batch_size is None:
            return [self._microbatch(batch, arguments, 1.0)]
        rows = extract_batch_size(batch)
        microbatches = []
        for start in range(0, rows, micro_batch_size):
            stop = min(start + micro_batch_size, rows)
            part = apply_to_collection(batch, Tensor, _rows_of(rows, start, stop))
            microbatches.append(self._microbatch(part, arguments, (stop - start) / rows))
        return microbatches

    def train(self, microbatches: Sequence[Microbatch], num_batches: int) -> Any:
        """Run forward and backward over the microbatches of an optimizer step; gradients are final afterwards.

        Args:
            microbatches: All microbatches of the step.
            num_batches: What the sum of the losses is divided by: ``accumulate_grad_batches``, also in the last,
                shorter window of an epoch, as in Lightning.

        Returns:
            The loss of the step on every rank, detached; on the last stage with what else ``training_step`` returned
            for the last microbatch.
        """
        self._auxiliary_logs.start()
        with self._short_window(microbatches, num_batches) as divisor:
            _, loss = self._run("training_step", microbatches, forward_only=False, num_batches=divisor)
        self._auxiliary_logs.finish(len(microbatches))
        assert loss is not None
        last, self._last_output = self._last_output, {}
        return {**last, "loss": loss} if last else loss

    @contextlib.contextmanager
    def _short_window(self, microbatches: Sequence[Microbatch], num_batches: int) -> Iterator[int]:
        """Let the losses that layers compute by themselves weigh as little as the step's own in a short last window.

        Megatron divides these by the microbatches that there are. Where an epoch ends with fewer batches than
        ``accumulate_grad_batches``, the share that is there scales both kinds of losses instead of the step's alone.

        Yields:
            What the sum of the step's losses is divided by.

        Source: ``forward_step_calc_loss`` and ``backward_step`` in megatron/core/pipeline_parallel/schedules.py (0.16).
        """
        config = self._chunks.config
        num_here = round(sum(microbatch.weight for microbatch in microbatches))
        if num_here == num_batches or config.calculate_per_token_loss:
            yield num_batches
            return
        scale, share = config.grad_scale_func, num_here / num_batches
        config.grad_scale_func = lambda loss: (loss if scale is None else scale(loss)) * share
        try:
            yield num_here
        finally:
            config.grad_scale_func = scale

    def evaluate(self, step: str, batch: Any, arguments: tuple[Any, ...], shares_output: bool = True) -> Any:
        """Run a step forward only.

        Args:
            step: Name of the module's method.
            batch: What it takes, on the device.
            arguments: What it takes after the batch.
            shares_output: Whether any rank of the pipeline reads what the step returns; the same on all of them.

        Returns:
            What the step returned, on every rank of the pipeline; None but on its last stage where nobody reads it.
        """
        outputs, _ = self._run(step, [self._microbatch(batch, arguments, 1.0)], forward_only=True, num_batches=1)
        output = outputs[0] if outputs else None
        return self._send_output(output) if shares_output else output

    def _microbatch(self, batch: Any, arguments: tuple[Any, ...], weight: float) -> Microbatch:
        module = self._module
        shape = None
        if isinstance(module, MCoreModule):
            shape = module.microbatch_shape(batch)
            if self._layout.context_parallel_size > 1:
                batch = module.shard_context(batch)
        return Microbatch(batch, arguments, shape, weight)

    def _run(
        self, step: str, microbatches: Sequence[Microbatch], forward_only: bool, num_batches: int
    ) -> tuple[list[Any], Tensor | None]:
        filled = self._fill_up(microbatches)
        config = self._chunks.config
        shapes = {microbatch.shape for microbatch in filled}
        shape = shapes.pop() if len(shapes) == 1 else None
        if self._prepare is not None:
            self._prepare(shape, config)
        config.variable_seq_lengths = shape is None
        seq_length, micro_batch_size = shape or (1, 1)
        interleaved = self._layout.virtual_pipeline_model_parallel_size is not None
        iterators = [iter(filled) for _ in self._chunks.wrapped]
        with self._logs.recording(), random_state_of_stage(), self._groups_of(len(filled)):
            outputs = get_forward_backward_func()(
                forward_step_func=self._forward_step(step, len(filled), forward_only, num_batches),
                data_iterator=iterators if interleaved else iterators[0],
                model=self._chunks.wrapped if interleaved else self._chunks.wrapped[0],
                num_microbatches=len(filled),
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
            )
        return outputs, self._logs.finish(step, over_copies=not forward_only)

    @contextlib.contextmanager
    def _groups_of(self, num_microbatches: int) -> Iterator[None]:
        """Let the interleaved schedule have groups that these microbatches fill."""
        config = self._chunks.config
        wanted = config.microbatch_group_size_per_vp_stage
        config.microbatch_group_size_per_vp_stage = self._layout.microbatch_group_size(num_microbatches, wanted)
        try:
            yield
        finally:
            config.microbatch_group_size_per_vp_stage = wanted

    def _fill_up(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Repeat the last microbatch, counting for nothing, until an interleaved schedule has whole groups.

        Raises:
            RuntimeError: The model has experts or predicts more tokens; a repeated microbatch would change that loss.
        """
        missing = 0
        if self._layout.virtual_pipeline_model_parallel_size is not None:
            missing = -len(microbatches) % self._layout.pipeline_model_parallel_size
        config = self._chunks.config
        if missing and (config.num_moe_experts or config.mtp_num_layers) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{len(microbatches)} microbatches are left at the end of the epoch, the interleaved schedule needs a"
                f" multiple of pipeline_model_parallel_size={self._layout.pipeline_model_parallel_size} with experts or"
                " multi-token prediction;"
                " set limit_train_batches or drop_last so that accumulate_grad_batches divides the epoch"
            )
        last = microbatches[-1]
        filler = Microbatch(last.batch, last.arguments, last.shape, weight=0.0, filler=True)
        return [*microbatches, *[filler] * missing]

    def _forward_step(
        self, step: str, num_microbatches: int, forward_only: bool, num_batches: int
    ) -> Callable[[Iterator[Microbatch], Any], tuple[Tensor, Callable[[Tensor], Any] | None]]:
        """Return Megatron's ``forward_step_func`` for one run of the schedule."""
        factor = num_microbatches / (num_batches * self._layout.context_parallel_size)

        def forward_step(iterator: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
            microbatch = next(iterator)
            try:
                output = self._call(step, microbatch, chunk)
            except StageOutput as stage:
                return make_viewless_tensor(stage.value, stage.value.requires_grad, keep_graph=True), None
            if forward_only:
                nothing = torch.zeros((), device=self._device)
                return nothing, lambda tensor: (tensor.clone(), output)
            loss, num_tokens = self._read_loss(output)
            self._record_loss(loss, num_tokens, microbatch)
            if isinstance(output, dict) and not microbatch.filler:
                self._last_output = apply_to_collection(output, Tensor, Tensor.detach)
            return loss, self._loss_function(num_tokens, microbatch, factor)

        return forward_step

    def _call(self, step: str, microbatch: Microbatch, chunk: Any) -> Any:
        is_last = self._chunks.is_last[self._chunks.wrapped.index(chunk)]
        calls = self._pipeline.num_calls
        muted = microbatch.filler or not is_last
        with self._logs.microbatch(microbatch.batch, muted), self._pipeline.activate(chunk, is_last):
            output = getattr(self._module, step)(microbatch.batch, *microbatch.arguments)
        if self._pipeline.num_calls != calls + 1:
            raise RuntimeError(
                f"{type(self._module).__name__}.{step} called the model built with pipeline() "
                f"{self._pipeline.num_calls - calls} times; a step must call it exactly once"
            )
        return output

    def _read_loss(self, output: Any) -> tuple[Tensor, Tensor | None]:
        """Return the loss and, where losses are weighted by tokens, their number."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return a loss tensor or a dict with one under 'loss', got {type(output).__name__}"
            )
        num_tokens = output.get("num_tokens") if isinstance(output, dict) else None
        per_token = self._chunks.config.calculate_per_token_loss
        if per_token != (num_tokens is not None):
            returned = "without 'num_tokens'" if num_tokens is None else "with 'num_tokens'"
            raise ValueError(
                f"training_step returned a loss {returned}, the model's TransformerConfig has "
                f"calculate_per_token_loss={per_token}; weighting by tokens needs both, averaging neither"
            )
        if num_tokens is None:
            return loss, None
        if isinstance(num_tokens, int | float):  # written by a kernel, for a copy would wait for a GPU
            return loss, torch.full((), num_tokens, device=self._device).int()
        return loss, torch.as_tensor(num_tokens, device=self._device).detach().int()

    def _record_loss(self, loss: Tensor, num_tokens: Tensor | None, microbatch: Microbatch) -> None:
        if not microbatch.filler:
            self._logs.add_loss(loss, microbatch.weight if num_tokens is None else num_tokens)

    @staticmethod
    def _loss_function(num_tokens: Tensor | None, microbatch: Microbatch, factor: float) -> Callable[[Tensor], Any]:
        """Return Megatron's ``loss_func``; it must make a new tensor, for Megatron scales the result in place.

        Megatron keeps its last result for every microbatch until the step ends: what ``training_step`` returned would
        hold on to the received activations of all of them.
        """
        if num_tokens is None:
            return lambda loss: (loss * (microbatch.weight * factor), None)
        counted = num_tokens * 0 if microbatch.filler else num_tokens
        return lambda loss: (loss * counted, counted, None)

    def _send_output(self, output: Any) -> Any:
        """Broadcast what the last stage returned to the other stages."""
        group = process_group("pp")
        if group.size() == 1:
            return output
        sent = from_last_stage(output, self._device)
        if group.rank() == group.size() - 1:
            return output
        return apply_to_collection(sent, Tensor, lambda tensor: tensor.to(self._device))


def _rows_of(rows: int, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    def take(tensor: Tensor) -> Tensor:
        return rows_between(tensor, start, stop) if tensor.dim() > 0 and tensor.shape[0] == rows else tensor

    return take


def _check_steps_take_batches(module: pl.LightningModule) -> None:
    """Refuse steps that draw their batches themselves: every chunk's call would draw another one.

    Raises:
        TypeError: A step takes ``dataloader_iter``.
    """
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise TypeError(
                f"{type(module).__name__}.{step}(dataloader_iter) is not available for a model built with pipeline(),"
                f" whose schedule hands out the batches; define {step}(batch, batch_idx)"
            )


def check_backward_is_free(module: pl.LightningModule) -> None:
    """Refuse a module that wants to run backward, or a part of it, itself.

    Raises:
        ValueError: It optimizes manually, or overrides ``backward``.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"manual optimization is not available for a model built with pipeline(), whose backward is Megatron's; "
            f"set automatic_optimization = True in {name}"
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{name} overrides backward(), but that of a model built with pipeline() is Megatron's and would not call "
            "it; remove it, and scale the loss in training_step"
        )
