# SPDX-License-Identifier: Apache-2.0
"""Lightning's steps on Megatron's forward-backward schedules.

A DataLoader batch is one microbatch, and ``Trainer(accumulate_grad_batches=N)`` is Megatron's ``num_microbatches``: for
the first N-1 batches ``training_step`` only keeps the batch, and at the N-th it runs Megatron's schedule over all of
them. Lightning's loops are unchanged, so ``global_step``, ``max_steps`` and the rest mean what they do in Lightning.

The schedule asks :class:`PipelineRunner` for one microbatch and one chunk at a time; for each, it activates the chunk
in the user's pipeline and calls the user's step (``parallel/pipeline.py`` explains how the step becomes a stage).
``training_step`` returns one of two things:

==================================  =================================================  ============================
returned                            loss of the optimizer step                         ``calculate_per_token_loss``
==================================  =================================================  ============================
a scalar: mean over the microbatch  mean over microbatches, data and context ranks     False
``{"loss": m, "num_tokens": n}``    sum over all tokens, divided by their number       True
==================================  =================================================  ============================

The last column is a field of ``TransformerConfig``, which Megatron's wrappers and routers read when they are created.
Two microbatches with means 2.0 and 4.0 over 100 and 300 tokens give 3.0 in the first way and 3.5 in the second.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from lightning_mcore.config.fp8 import check_microbatch
from lightning_mcore.config.layout import ModelShape
from lightning_mcore.config.rules.strategy import NO_SYNC_BATCHNORM
from lightning_mcore.layers.multi_token import check_multi_token
from lightning_mcore.layers.spec import choose_attention
from lightning_mcore.parallel.chunks import ModelChunks, check_gradients, pipeline_config, wrap_chunks
from lightning_mcore.parallel.consensus import run_on_all_ranks
from lightning_mcore.parallel.groups import from_last_stage, process_group, random_state_of_stage
from lightning_mcore.parallel.pipeline import Pipeline, StageOutput
from lightning_mcore.strategy.checks import check_backward_is_free
from lightning_mcore.strategy.fp8_checks import check_chunks
from lightning_mcore.strategy.module import MCoreModule, rows_of, split_rows

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy

_Shape = tuple[int, int] | None  # (sequence length, rows); None if stages exchange it
_ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, Callable[[Tensor], Any] | None]]  # Megatron's


@dataclass(frozen=True)
class Microbatch:
    """One unit of the schedule."""

    batch: Any  # on the device
    arguments: tuple[Any, ...]  # after the batch
    shape: _Shape = None
    weight: float = 1.0  # share of a DataLoader batch
    is_padding: bool = False  # completes a group of the interleaved schedule, with weight zero


def wrap_pipeline(
    strategy: "MCoreStrategy",
    module: pl.LightningModule,
    pipeline: Pipeline,
    ddp_config: DistributedDataParallelConfig | None,
) -> ModelChunks:
    """Wrap the chunks of a model that was built with ``pipeline()``; without ``ddp_config`` only for evaluation.

    Raises ``ValueError`` if the model does not fit the layout, or the module runs backward itself.
    """
    if strategy._layer_sync is not None:
        raise ValueError(NO_SYNC_BATCHNORM)
    if ddp_config is not None:
        check_backward_is_free(module)
    config = pipeline_config(pipeline, strategy.megatron_fields())
    strategy.layout.validate_model(ModelShape.from_config(config))
    if config.mtp_num_layers and strategy.layout.pipeline_model_parallel_size > 1:  # only some stages have the table
        embeddings = [module for module in pipeline.modules() if getattr(module, "add_position_embedding", False)]
        run_on_all_ranks(lambda: check_multi_token(config, learned_positions=bool(embeddings)))
    return wrap_chunks(list(pipeline.chunks), config, pipeline, ddp_config, strategy.gradients.align_grad_reduce)


class PipelineRunner:
    """Runs the module's steps over its chunks, from :func:`wrap_pipeline`.

    Raises ``TypeError`` if a step draws its batches itself, ``ValueError`` if no layer of the model could use FP8.
    """

    inline = False

    def __init__(self, strategy: "MCoreStrategy", module: pl.LightningModule, chunks: ModelChunks) -> None:
        assert chunks.pipeline is not None
        check_chunks(strategy.precision_plugin.fp8, chunks.bare)
        for chunk in chunks.bare:
            choose_attention(chunk)
        _check_steps_take_batches(module)
        self._strategy = strategy
        self._module = module
        self._chunks = chunks
        self._pipeline = chunks.pipeline
        self._layout = strategy.layout
        self._is_interleaved = self._layout.virtual_pipeline_model_parallel_size is not None
        self.root_device = strategy.root_device
        self._logs = strategy.logs
        self._recorder = self._logs.setup_pipeline(chunks.config, chunks.pipeline.takes_whole_batches)
        if self._pipeline.takes_whole_batches:
            self._pipeline.run_stages = self._run_stages
        self._last_output: dict[str, Any] = {}  # of training_step, for the last microbatch on the last stage
        self._last_loss: Tensor | None = None
        self._window: list[Microbatch] = []
        self._seen_full_window = False

    def training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the batch until the window of ``accumulate_grad_batches`` is full, then run the step.

        Returns the step's loss, as from :meth:`train`. While the window fills, this returns the previous step's loss.
        Lightning gives no ``kwargs`` to a step of ``(batch, batch_idx)``.
        """
        strategy, trainer = self._strategy, self._module.trainer
        loop, num_batches = trainer.fit_loop, trainer.accumulate_grad_batches
        batch_idx, progress = loop.epoch_loop.batch_idx, loop.epoch_loop.batch_progress
        if batch_idx % num_batches == 0:
            self._window = []
        self._window += self.split(args[0], args[1:], strategy.micro_batch_size)
        # With accumulate_grad_batches=4, batches 0 to 2 end here.
        if loop._should_accumulate():
            return self._last_loss if self._last_loss is not None else torch.zeros((), device=self.root_device)
        # A window at the end of an epoch may include a short last batch; a resumed run may begin with that one.
        is_last_of_several = progress.is_last_batch and batch_idx >= num_batches
        if not (self._seen_full_window or is_last_of_several) and (batch_idx + 1) % num_batches == 0:
            self._layout.validate_microbatches(len(self._window), strategy.microbatch_group_size)
            self._seen_full_window = True
        window, self._window = self._window, []
        # Lightning zeroes gradients after training_step, which here has run backward by then.
        for chunk in self._chunks.ddp:
            chunk.zero_grad_buffer()
        for optimizer in strategy.megatron_optimizers:
            optimizer.megatron.zero_grad()
            optimizer.gradients_changed()
        output = self.train(window, num_batches)
        if strategy.gradients.check_nan:
            check_gradients(self._chunks)
        self._last_loss = output["loss"] if isinstance(output, dict) else output
        return output

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Do nothing: the schedule reduces gradients itself."""
        return nullcontext()

    def backward_context(self) -> AbstractContextManager[None]:
        """Do nothing: the schedule has run backward."""
        return nullcontext()

    def split(self, batch: Any, arguments: tuple[Any, ...], micro_batch_size: int | None) -> list[Microbatch]:
        """Cut a DataLoader batch into microbatches and take this context-parallel rank's share of each."""
        if micro_batch_size is None:
            return [self._microbatch(batch, arguments)]
        return [self._microbatch(part, arguments, share) for part, share in self._split_rows(batch, micro_batch_size)]

    def _split_rows(self, batch: Any, rows: int) -> Iterator[tuple[Any, float]]:
        """Cut a batch into parts with their shares of it, before context parallelism."""
        module = self._module
        return module.split_rows(batch, rows) if isinstance(module, MCoreModule) else split_rows(batch, rows)

    def train(self, microbatches: Sequence[Microbatch], num_batches: int) -> Any:
        """Run forward and backward over the microbatches of an optimizer step; gradients are final afterwards.

        The sum of the losses is divided by ``num_batches``: ``accumulate_grad_batches``, even in the shorter last
        window of an epoch, as in Lightning. Returns the loss of the step on every rank, detached, [] fp32: a mean over
        microbatches or tokens; on the last stage also the other values that ``training_step`` returned for the last
        microbatch.
        """
        config, divisor, changes = self._chunks.config, num_batches, {}
        here = round(sum(microbatch.weight for microbatch in microbatches))
        if here != num_batches and not config.calculate_per_token_loss:
            # Megatron divides the layers' own losses by the microbatches that there are. With 2 batches left of
            # accumulate_grad_batches=4, all losses are scaled by 2 / 4, as in Lightning. Source: forward_step_calc_loss
            # and backward_step (pipeline_parallel/schedules.py, 0.16).
            scale, share = config.grad_scale_func, here / num_batches
            changes["grad_scale_func"] = lambda loss: (loss if scale is None else scale(loss)) * share
            divisor = here
        with self._logs.layer_losses(len(microbatches)), _changed([config], **changes):
            _, loss = self._run("training_step", microbatches, forward_only=False, num_batches=divisor)
        assert loss is not None
        last, self._last_output = self._last_output, {}
        return {**last, "loss": loss} if last else loss

    def evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any], shares_output: bool) -> Any:
        """Run a step forward only; return its output for the complete batch, on every rank of the pipeline.

        An evaluation batch runs alone, in the parts into which ``micro_batch_size`` cuts it; their outputs are joined.
        Returns None unless ``shares_output``, which says that some rank of the pipeline reads the output; all its ranks
        agree.
        """
        if self._pipeline.takes_whole_batches:
            return self._evaluate_everywhere(step, args)
        size = self._part_size(args)
        parts = self.split(args[0], args[1:], size)
        is_counted = step in ("validation_step", "test_step")
        num_parts = self._num_parts(len(parts), size, self._logs.rows_of_others if is_counted else 0)
        padded = [*parts, *[_padding(parts[-1])] * (num_parts - len(parts))]
        outputs, _ = self._run(step, padded, forward_only=True, num_batches=1)
        return self._whole_output(step, parts, outputs[: len(parts)], size or 1) if shares_output else None

    def _part_size(self, args: tuple[Any, ...]) -> int | None:
        """Return the rows of a part of an evaluation batch; None for the complete batch."""
        # Some dispatchers need the same number of tokens on all ranks that share experts. Batches of 3 rows on one rank
        # and 2 on another run as 3 parts of one row on both ranks; the second rank pads.
        size, config, group = self._strategy.micro_batch_size, self._chunks.config, process_group("experts")
        takes_any = config.moe_token_dispatcher_type != "allgather" and not config.moe_pad_expert_input_to_capacity
        if not config.num_moe_experts or takes_any or group.size() == 1:
            return size
        rows = sum(1 for _ in self._split_rows(args[0], 1))
        extremes = torch.tensor([rows, -rows], device=self.root_device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        most, least = extremes.tolist()
        return size if most == -least else 1

    def _num_parts(self, own: int, size: int | None, rows_of_others: int = 0) -> int:
        """Return the number of parts that an evaluation batch has on the rank where it has most.

        ``own`` is the number of parts here, ``rows_of_others`` the rows on ranks without repeated samples (0: none
        here).
        """
        # Ranks that share experts need the same number. So do model copies if a step communicates with the others.
        if size is None:
            return own
        # With size 2, a batch of 5 rows is three parts, even where 3 of them are repeated and 2 rows are left.
        own = max(own, -(-rows_of_others // size))
        group = process_group("experts")
        if group.size() == 1:
            return own
        most = torch.tensor(own, device=self.root_device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return int(most)

    def _whole_output(self, step: str, parts: Sequence[Microbatch], outputs: Sequence[Any], size: int) -> Any:
        """Return a step's output for a batch on every stage; ``outputs`` is empty on all stages but the last.

        Raises ``ValueError``, on every stage, if the outputs for the parts cannot be joined.
        """
        output: Any = outputs[0] if outputs else None
        if len(outputs) > 1:
            assert isinstance(self._module, MCoreModule)  # other modules' steps see complete batches
            try:
                output = self._module.join_rows(outputs, [round(size * p.weight / parts[0].weight) for p in parts])
            except ValueError as error:
                # Sent like an output, so that the other stages do not wait for one.
                output = ValueError(
                    f"micro_batch_size={size} splits batches, and for the parts {step} returned {error}"
                )
        group = process_group("pp")
        if group.size() > 1:
            sent = from_last_stage(output, self.root_device)
            if group.rank() < group.size() - 1:
                output = apply_to_collection(sent, Tensor, lambda tensor: tensor.to(self.root_device))
        if isinstance(output, ValueError):
            raise output
        return output

    def _evaluate_everywhere(self, step: str, args: tuple[Any, ...]) -> Any:
        """Run a step on every stage; each call of the model in it runs all stages and gives each of them the result."""
        group, logs = process_group("pp"), self._recorder
        with logs.recording(), logs.microbatch(args[0], muted=group.rank() < group.size() - 1):
            output = getattr(self._module, step)(*args)
        logs.finish(step, over_copies=False)
        return output

    def _run_stages(self, *args: Any, **kwargs: Any) -> Any:
        """Run the complete model on the arguments of every chunk, outside a step; None on all stages but the last.

        Without gradients if it has several stages.
        """
        wrapped, rows = self._chunks.wrapped, len(args[0])
        size, parts = self._strategy.micro_batch_size or rows, [(args, kwargs)]
        has_memory = kwargs.get("inference_context") is not None  # of all rows
        calls = parts
        if not has_memory and (self._pipeline.is_staged or not torch.is_grad_enabled()):
            parts = [rows_of((args, kwargs), rows, start, start + size) for start in range(0, rows, size)]
            calls = [*parts, *parts[-1:] * (self._num_parts(len(parts), self._strategy.micro_batch_size) - len(parts))]
        if self._pipeline.is_staged:
            outputs = self._run_calls(calls)[: len(parts)]
        else:
            outputs = [wrapped[0](*own_args, **own_kwargs) for own_args, own_kwargs in calls][: len(parts)]
        if len(outputs) > 1:
            return torch.cat(outputs)
        return outputs[0] if outputs else None

    def _run_calls(self, calls: list[tuple[Any, Any]]) -> list[Any]:
        """Run calls of the model through all stages without gradients; return their outputs on the last stage."""

        def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
            args, kwargs = next(iterator)
            output = chunk(*args, **kwargs)
            return self._to_caller(output) if self._is_last(chunk) else (_to_send(output, requires_grad=False), None)

        missing = -len(calls) % self._microbatch_multiple
        with torch.no_grad():
            return self._pass_through(forward_step, [*calls, *calls[-1:] * missing], None, forward_only=True)

    @property
    def _microbatch_multiple(self) -> int:
        """The number of which the schedule needs a multiple of microbatches."""
        return self._layout.pipeline_model_parallel_size if self._is_interleaved else 1

    def _pass_through(
        self, forward_step: _ForwardStep, microbatches: Sequence[Any], shape: _Shape, forward_only: bool
    ) -> list[Any]:
        """Run Megatron's schedule over microbatches; ``shape`` is None if their shapes differ or are not known."""
        config, count, wrapped = self._chunks.config, len(microbatches), self._chunks.wrapped
        group = self._layout.microbatch_group_size(count, config.microbatch_group_size_per_vp_stage)
        config.variable_seq_lengths = shape is None  # not restored, because each run sets it
        seq_length, micro_batch_size = shape or (1, 1)
        # One iterator per chunk: the interleaved schedule reads every microbatch once for each.
        iterators = [iter(microbatches) for _ in wrapped]
        with _changed([config], microbatch_group_size_per_vp_stage=group):
            outputs: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if self._is_interleaved else iterators[0],
                model=wrapped if self._is_interleaved else wrapped[0],
                num_microbatches=count,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
            )
        return outputs

    def _microbatch(self, batch: Any, arguments: tuple[Any, ...], weight: float = 1.0) -> Microbatch:
        module, shape = self._module, None
        if isinstance(module, MCoreModule) and not self._pipeline.takes_whole_batches:
            shape = module.microbatch_shape(batch)
            if self._layout.context_parallel_size > 1:
                batch = module.shard_context(batch)
        return Microbatch(batch, arguments, shape, weight)

    def _run(
        self, step: str, microbatches: Sequence[Microbatch], forward_only: bool, num_batches: int
    ) -> tuple[list[Any], Tensor | None]:
        """Run a step of the module over microbatches; return its outputs on the last stage, and the loss."""
        padded = self._pad_microbatches(microbatches)
        shapes = list(dict.fromkeys(microbatch.shape for microbatch in padded))
        shape = shapes[0] if len(shapes) == 1 else None
        self._strategy.tensor_overlap.open(shape, self._chunks.config)
        with self._fp8_of(shapes, forward_only), self._recorder.recording(), random_state_of_stage():
            forward_step = self._forward_step(step, len(padded), forward_only, num_batches)
            outputs = self._pass_through(forward_step, padded, shape, forward_only)
        return outputs, self._recorder.finish(step, over_copies=not forward_only)

    def _fp8_of(self, shapes: Sequence[_Shape], forward_only: bool) -> AbstractContextManager[None]:
        """Reject training microbatches that FP8 cannot divide into blocks; compute such evaluation batches in bf16."""
        try:
            for shape in shapes:
                check_microbatch(self._strategy.precision_plugin.fp8, shape, self._layout)
        except ValueError:
            if not forward_only:
                raise
            configs = [chunk.config for chunk in self._chunks.bare if hasattr(chunk, "config")]
            return _changed(configs, fp8=None, fp4=None)
        return nullcontext()

    def _pad_microbatches(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Repeat the last microbatch, with weight zero, until an interleaved schedule has complete groups.

        Raises ``RuntimeError`` in training with experts or multi-token prediction, whose losses a repeated microbatch
        changes.
        """
        missing = -len(microbatches) % self._microbatch_multiple
        config = self._chunks.config
        if missing and (config.num_moe_experts or config.mtp_num_layers) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{len(microbatches)} microbatches are left at the end of the epoch, but the interleaved schedule "
                f"needs a multiple of pipeline_model_parallel_size={self._layout.pipeline_model_parallel_size} with "
                "experts or multi-token prediction; set limit_train_batches or drop_last so that "
                "accumulate_grad_batches divides the epoch"
            )
        return [*microbatches, *[_padding(microbatches[-1])] * missing]

    def _forward_step(self, step: str, num_microbatches: int, forward_only: bool, num_batches: int) -> _ForwardStep:
        """Return Megatron's ``forward_step_func`` for one run of the schedule."""
        # Megatron's factor for 4 microbatches on 2 context-parallel ranks is 2 / 4; 4 / (4 * 2) makes it 1 / 4.
        factor = num_microbatches / (num_batches * self._layout.context_parallel_size)

        def forward_step(iterator: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
            microbatch = next(iterator)
            try:
                output = self._call(step, microbatch, chunk)
            except StageOutput as stage:
                return _to_send(stage.value, stage.value.requires_grad), None
            if forward_only:
                return self._to_caller(output)
            loss, num_tokens = self._read_loss(output)
            if not microbatch.is_padding:
                self._recorder.add_loss(loss, microbatch.weight if num_tokens is None else num_tokens)
                if isinstance(output, dict):
                    self._last_output = apply_to_collection(output, Tensor, Tensor.detach)
            # A new tensor, because Megatron scales it in place. The last value is None: Megatron keeps it until the
            # step ends, and an output would keep its activations alive.
            if num_tokens is None:
                weight = microbatch.weight * factor
                return loss, lambda loss: (loss * weight, None)
            counted = num_tokens * 0 if microbatch.is_padding else num_tokens
            return loss, lambda loss: (loss * counted, counted, None)

        return forward_step

    def _is_last(self, chunk: Any) -> bool:
        return self._chunks.is_last[self._chunks.wrapped.index(chunk)]

    def _to_caller(self, output: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Return what makes Megatron hand ``output`` on to the caller of a schedule that runs only forward."""
        return torch.zeros((), device=self.root_device), lambda nothing: (nothing.clone(), output)

    def _call(self, step: str, microbatch: Microbatch, chunk: Any) -> Any:
        """Call the module's step for one chunk and return what it returned; other stages leave it by StageOutput."""
        is_last, before = self._is_last(chunk), self._pipeline.num_calls
        muted = microbatch.is_padding or not is_last
        self._chunks.wait_for_uncalled(chunk)
        with self._recorder.microbatch(microbatch.batch, muted), self._pipeline.activate(chunk, is_last):
            batch = copy.copy(microbatch.batch)  # a step may take entries out of it, and runs for every chunk
            output = getattr(self._module, step)(batch, *microbatch.arguments)
        calls = self._pipeline.num_calls - before
        may_repeat = self._pipeline.takes_whole_batches and not self._pipeline.is_staged
        if calls != 1 and not may_repeat:
            raise RuntimeError(
                f"{type(self._module).__name__}.{step} called the model built with pipeline() {calls} times; a step"
                " must call it exactly once"
            )
        return output

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
            raise ValueError(
                f"training_step returned a loss {returned}, but the model's TransformerConfig has "
                f"calculate_per_token_loss={per_token}; to weight by tokens use both, to average use neither"
            )
        if num_tokens is None:
            return loss, None
        if isinstance(num_tokens, int | float):  # a kernel writes it, because a copy would wait for the GPU
            return loss, torch.full((), num_tokens, device=self.root_device).int()
        return loss, torch.as_tensor(num_tokens, device=self.root_device).detach().int()


@contextlib.contextmanager
def _changed(configs: Iterable[Any], **values: Any) -> Iterator[None]:
    """Set these fields of Megatron's configs inside the ``with`` block."""
    before = [(config, name, getattr(config, name)) for config in configs for name in values]
    for config, name, _ in before:
        setattr(config, name, values[name])
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def _to_send(output: Tensor, requires_grad: bool) -> Tensor:
    """Return a stage's output as no view of another tensor, because Megatron frees it once it is sent."""
    viewless: Tensor = make_viewless_tensor(output, requires_grad, keep_graph=requires_grad)
    return viewless


def _padding(microbatch: Microbatch) -> Microbatch:
    """Return a microbatch that runs only because the schedule or other ranks need one more."""
    return replace(microbatch, weight=0.0, is_padding=True)


def _check_steps_take_batches(module: pl.LightningModule) -> None:
    """Raise ``TypeError`` for ``dataloader_iter``: a step that draws its batches would draw another for every chunk."""
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise TypeError(
                f"{type(module).__name__}.{step}(dataloader_iter) is not supported for a model built with pipeline(),"
                f" whose schedule fetches the batches; define {step}(batch, batch_idx)"
            )
