# SPDX-License-Identifier: Apache-2.0
"""The LightningModule mixin: one module, unchanged, on every layout.

:class:`MCoreModule` adds to a LightningModule what a split model needs. The heart of it is
:meth:`MCoreModule.pipeline`: ``configure_model`` hands it a factory, and it builds the chunks of the model that this
rank owns. The result is called like the whole model. How an ordinary ``training_step`` becomes a pipeline stage:

* the schedule activates one chunk and calls ``training_step``;
* on a chunk that is not the last stage, ``self.model(...)`` raises :class:`StageOutput`, which carries the chunk's
  output and unwinds ``training_step``; the schedule catches it and sends the output to the next stage;
* on the last stage ``self.model(...)`` returns, and ``training_step`` goes on to its loss.

So ``training_step`` calls ``self.model(...)`` exactly once; what stands before the call runs on every stage, what
stands after it on the last one. ``StageOutput`` derives from ``BaseException``, so ``except Exception`` does not
swallow it.

Under a strategy that is not ours the model is built whole, and the class runs as it is.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_mcore.layout import ModelShape, ParallelLayout
from lightning_mcore.packing import split_for_context_parallel
from lightning_mcore.process_groups import pipeline_stage, process_group, process_groups_are_open
from lightning_mcore.session import SingleModelSession


class ChunkFactory(Protocol):
    """Builds one chunk of the model: the embedding where ``pre_process``, the head where ``post_process``."""

    def __call__(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """Return the Megatron module of this virtual stage."""
        ...


@runtime_checkable
class PipelineHost(Protocol):
    """What a module needs to know of the strategy that runs it; :class:`~lightning_mcore.MCoreStrategy` is one."""

    layout: ParallelLayout

    def megatron_fields(self) -> dict[str, Any]:
        """Return the TransformerConfig fields that the strategy and its precision own."""
        ...

    def run_forward(self, step: str, batch: Any) -> Any:
        """Run a method of the module through the pipeline without gradients."""
        ...


class StageOutput(BaseException):
    """Carries a chunk's output out of the user's step on every stage but the last."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class Pipeline(nn.Module):
    """The chunks of the model that this rank owns; callable like the whole model.

    Args:
        chunks: One Megatron module for each virtual stage of this rank.
        is_last: For each chunk, whether it holds the end of the model.
        layout: The layout that the chunks were built for.
        prepare: Called before the whole model runs outside a schedule, None where nothing is to be prepared.
    """

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the active chunk; return its output on the last stage.

        Raises:
            StageOutput: On every other stage; for the schedule, not for users.
            RuntimeError: A part of a model is called outside the schedule.
        """
        self.num_calls += 1
        if self._active is None:
            return self._whole_model()(*args, **kwargs)
        chunk, is_last = self._active
        output = chunk(*args, **kwargs)
        if not is_last:
            raise StageOutput(output)
        return output

    @contextlib.contextmanager
    def activate(self, chunk: nn.Module, is_last: bool) -> Iterator[None]:
        """Let calls run ``chunk`` (as the strategy wrapped it) inside the ``with`` block."""
        object.__setattr__(self, "_active", (chunk, is_last))  # not a submodule: the wrapped chunk contains ours
        try:
            yield
        finally:
            self._active = None

    def _whole_model(self) -> nn.Module:
        if len(self.chunks) == 1 and self.is_last[0] and self.layout.pipeline_model_parallel_size == 1:
            if self._prepare is not None:
                self._prepare()
            return self.chunks[0]
        raise RuntimeError(
            "self.model(...) was called outside a step, where this rank holds only a part of the model; "
            "run it with self.run_forward('method', batch)"
        )


class MCoreModule(pl.LightningModule):
    """A LightningModule whose model may be split over ranks.

    Build the model in ``configure_model`` with ``self.model = self.pipeline(self.build_chunk)``; all else is plain
    Lightning. Works under :class:`~lightning_mcore.MCoreStrategy`, ``"auto"`` and ``"ddp"``.
    """

    def pipeline(self, factory: ChunkFactory) -> Pipeline:
        """Build the chunks of the model that this rank owns; call it in ``configure_model``.

        Called again with the same layout (``fit`` and then ``validate``), it returns the model that is there.

        Args:
            factory: Called as ``factory(pre_process=..., post_process=..., vp_stage=...)`` once for each chunk.

        Returns:
            A module that is called like the whole model.

        Raises:
            RuntimeError: No trainer is attached, or the model was built for another layout.
        """
        host = self._host()
        built: Pipeline | None = self.__dict__.get("_built_pipeline")
        layout = host.layout if host is not None else ParallelLayout()
        if host is None:
            self._open_session()
        if built is not None:
            if built.layout != layout:
                raise RuntimeError(
                    f"this module was built for the layout {built.layout} and cannot run on {layout}; "
                    "make a new module and load a checkpoint to carry the weights over"
                )
            return built
        pipeline = self._build(factory, layout, whole=host is None)
        object.__setattr__(self, "_built_pipeline", pipeline)  # the user's attribute registers it as a submodule
        return pipeline

    def megatron_fields(self) -> dict[str, Any]:
        """Return the ``TransformerConfig`` fields that belong to the strategy and the precision.

        Splat them into the config: ``TransformerConfig(num_layers=4, ..., **self.megatron_fields())``. A field given
        twice is then a TypeError, and Megatron's own validation sees the final values.
        """
        host = self._host()
        return host.megatron_fields() if host is not None else {}

    def model_shape(self) -> ModelShape | None:
        """Return what the layout must divide, so that it is checked before process groups form; None: unknown."""
        return None

    def check_settings(self) -> None:
        """Refuse settings of the model that contradict each other or the strategy; runs before process groups form."""

    def microbatch_shape(self, batch: Any) -> tuple[int, int] | None:
        """Return ``(sequence length, rows)`` of a microbatch, so that pipeline stages need not exchange shapes."""
        return None

    def shard_context(self, batch: Any) -> Any:
        """Return this context-parallel rank's share of a batch; called before the step when cp > 1.

        Every tensor with at least two dimensions is cut along dimension 1 in the zigzag order of TransformerEngine.
        Override it where a tensor of your batch has no sequence in dimension 1.

        Args:
            batch: A batch, any nesting of dicts, lists and tuples of tensors, [b, s, ...].

        Returns:
            The same structure, [b, s / cp, ...].
        """
        group = process_group("cp")

        def shard(tensor: Tensor) -> Tensor:
            return split_for_context_parallel(tensor, group.rank(), group.size()) if tensor.dim() > 1 else tensor

        return apply_to_collection(batch, Tensor, shard)

    def masked_mean(self, losses: Tensor, loss_mask: Tensor) -> Tensor:
        """Return the mean of ``losses`` where the mask is set, exact under context parallelism with ragged masks.

        The mean over the context-parallel ranks of what this returns is the mean over the whole sequence; a mean over
        this rank's share alone would weigh a rank with few tokens as much as one with many.

        Args:
            losses: [b, s / cp], a loss for each token of this rank.
            loss_mask: [b, s / cp], 1 where a token counts, 0 elsewhere.

        Returns:
            A scalar, to be differentiated.
        """
        mask = loss_mask.to(losses.dtype)
        total = (losses * mask).sum()
        count = mask.sum()
        size = 1
        if self._host() is not None and process_group("cp").size() > 1:
            group = process_group("cp")
            size = group.size()
            dist.all_reduce(count, group=group)
        return total * size / count.clamp(min=1)

    def run_forward(self, step: str, batch: Any) -> Any:
        """Run the method ``step(batch, batch_idx)`` of this module without gradients, through the pipeline if any.

        Collective: every rank calls it with the batch of its data-parallel group.

        Args:
            step: Name of a method that calls ``self.model(...)`` once, such as ``"predict_step"``.
            batch: What the method takes.

        Returns:
            What the method returns on the last stage, on every rank of the pipeline.
        """
        host = self._host()
        if host is not None:
            return host.run_forward(step, batch)
        with torch.no_grad():
            return getattr(self, step)(batch, 0)

    def _host(self) -> PipelineHost | None:
        strategy = self._trainer.strategy if self._trainer is not None else None
        return strategy if isinstance(strategy, PipelineHost) else None

    def _build(self, factory: ChunkFactory, layout: ParallelLayout, whole: bool) -> Pipeline:
        if whole:
            chunk = factory(pre_process=True, post_process=True, vp_stage=None)
            return Pipeline([chunk], [True], layout, prepare=self._open_session)
        chunks, is_last = [], []
        for index in range(layout.num_chunks):
            vp_stage = None if layout.virtual_pipeline_model_parallel_size is None else index
            first, last = pipeline_stage(vp_stage)
            chunks.append(factory(pre_process=first, post_process=last, vp_stage=vp_stage))
            is_last.append(last)
        return Pipeline(chunks, is_last, layout)

    def _open_session(self) -> None:
        if self._host() is not None:
            return
        if self._trainer is not None:
            SingleModelSession.attach(self._trainer)
        elif not process_groups_are_open():
            raise RuntimeError(
                "pipeline() builds Megatron layers, which need process groups: call it in configure_model(), "
                "which the Trainer runs, or open Megatron's process groups yourself"
            )
