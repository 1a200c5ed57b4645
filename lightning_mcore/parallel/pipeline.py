# SPDX-License-Identifier: Apache-2.0
"""The chunks of a model that a rank owns, callable like the whole model.

``MCoreModule.pipeline()`` builds a :class:`Pipeline`, and the schedule runs it. How an ordinary ``training_step``
becomes a pipeline stage:

* the schedule activates one chunk and calls ``training_step``;
* on a chunk that is not the last stage, ``self.model(...)`` raises :class:`StageOutput`, which carries the chunk's
  output and unwinds ``training_step``; the schedule catches it and sends the output to the next stage;
* on the last stage ``self.model(...)`` returns, and ``training_step`` continues to its loss.

So ``training_step`` calls ``self.model(...)`` exactly once. Code before the call runs on every stage, code after it on
the last one. ``StageOutput`` derives from ``BaseException``, so ``except Exception`` does not catch it.
"""

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol, runtime_checkable

from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from lightning_mcore.config.layout import ParallelLayout


class ChunkFactory(Protocol):
    """Builds one chunk of the model: with the embedding if ``pre_process``, with the head if ``post_process``."""

    def __call__(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """Return the Megatron module of this virtual stage."""
        ...


@runtime_checkable
class PipelineHost(Protocol):
    """The strategy as a module sees it; :class:`~lightning_mcore.MCoreStrategy` implements it."""

    layout: ParallelLayout

    def megatron_fields(self) -> dict[str, Any]:
        """Return the TransformerConfig fields that the strategy and its precision own."""
        ...

    def run_forward(self, step: str, batch: Any) -> Any:
        """Run a method of the module through the pipeline without gradients."""
        ...

    def model_calls(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which calls of the module's pipeline run all stages, outside of steps."""
        ...


class StageOutput(BaseException):
    """Carries a chunk's output, [s, b, h], out of the user's step on all stages but the last."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class Pipeline(nn.Module):
    """This rank's chunks of the model, callable like the whole model.

    There is one chunk for each virtual stage of this rank. ``prepare`` is called before the whole model runs outside a
    schedule. ``boundaries_on_host`` tells whether the layers take packed boundaries in host tensors.
    """

    # Whether the caller splits batches for context-parallel ranks; then it may be called anywhere, and several times in
    # a step, except in training as a pipeline.
    takes_whole_batches = False
    # Set by pipeline_evaluation.py for a model that takes whole batches, and kept after the run: calls all stages, and
    # returns the output on the last one, else None.
    call_outside_schedule: Callable[..., Any] | None = None
    # Lent by layers/token_cache.py during generation: keys and values of all rows of a call, which must stay together.
    cache: Any = None

    def __init__(
        self,
        chunks: list[nn.Module],
        is_last: list[bool],
        layout: ParallelLayout,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._prepare = prepare
        self.chunks = nn.ModuleList(chunks)
        self.is_last = is_last
        self.layout = layout
        self._active: tuple[nn.Module, bool] | None = None
        self.num_calls = 0
        self._was_called = False
        layers = (layer for chunk in chunks for layer in chunk.modules())
        self.boundaries_on_host = any(getattr(layer, "boundaries_on_host", False) for layer in layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the active chunk; return its output on the last stage, and raise StageOutput on every other one.

        The schedule catches it. Raises RuntimeError if a part of a model is called outside the schedule, or twice in a
        training step.
        """
        self.num_calls += 1
        if self._active is None:
            self._renew_quantized_weights()
            call = self._whole_model() if self.call_outside_schedule is None else self.call_outside_schedule
            return call(*args, **kwargs)
        chunk, is_last = self._active
        if self.takes_whole_batches and self.is_staged:
            self._refuse_second_call()
        output = chunk(*args, **kwargs)
        if not is_last:
            raise StageOutput(output)
        return output

    @contextlib.contextmanager
    def activate(self, chunk: nn.Module, is_last: bool) -> Iterator[None]:
        """Make calls run ``chunk``, in the strategy's wrappers, inside the ``with`` block."""
        object.__setattr__(self, "_active", (chunk, is_last))  # not a submodule: the chunk contains ours
        self._was_called = False
        try:
            yield
        finally:
            self._active = None

    @property
    def last_chunk(self) -> nn.Module | None:
        """The chunk with the output layer, if this rank has it."""
        return self.chunks[self.is_last.index(True)] if True in self.is_last else None

    @property
    def is_active(self) -> bool:
        """Whether the schedule runs a chunk."""
        return self._active is not None

    @property
    def is_staged(self) -> bool:
        """Whether several pipeline stages share the model."""
        return self.layout.pipeline_model_parallel_size > 1

    def _renew_quantized_weights(self) -> None:
        """Let layers quantize their weights again: outside a schedule nothing else tells them of an optimizer step.

        Source: ``set_is_first_microbatch`` of ``MegatronModule``, which only Megatron's schedules call (0.16 to 0.19).
        """
        for chunk in self.chunks:
            if isinstance(chunk, MegatronModule):
                chunk.set_is_first_microbatch()

    def _refuse_second_call(self) -> None:
        if self._was_called:
            raise RuntimeError(
                "self.model(...) was called twice in training_step under pipeline_model_parallel_size="
                f"{self.layout.pipeline_model_parallel_size}, where all stages but the last leave the step at the first"
                " call; join the batches with torch.cat and call it once, or set pipeline_model_parallel_size=1"
            )
        self._was_called = True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the chunks when pickled for another process, such as a DataLoader worker.

        Their process groups belong to this process. A module is sent to a worker if a dataset or a collate function
        refers to it. Other copies are complete.
        """
        if get_spawning_popen() is None:
            return vars(self)
        return {
            **vars(self),
            "_modules": {"chunks": nn.ModuleList()},
            "is_last": [],
            "_prepare": None,
            "_active": None,
            "call_outside_schedule": None,
        }

    def _whole_model(self) -> nn.Module:
        if not self.chunks:
            raise RuntimeError(
                "self.model(...) was called in a DataLoader worker, which does not have the model; call it in a step"
            )
        if len(self.chunks) == 1 and self.is_last[0] and self.layout.pipeline_model_parallel_size == 1:
            if self._prepare is not None:
                self._prepare()
            return self.chunks[0]
        raise RuntimeError(
            "self.model(...) was called outside a step, but this rank holds only a part of the model; "
            "run it with self.run_forward('method', batch)"
        )
