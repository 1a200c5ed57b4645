# SPDX-License-Identifier: Apache-2.0
"""The LightningModule mixin: one module, unchanged, on every layout.

:class:`MCoreModule` adds to a LightningModule what a split model needs. Its core is :meth:`MCoreModule.pipeline`:
``configure_model`` passes it a factory, and it builds the chunks of the model that this rank owns. The result is called
like the complete model. ``parallel/pipeline.py`` explains how an ordinary ``training_step`` becomes a pipeline stage.
Under other strategies the complete model is built, and the class runs unchanged.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.checkpoint.single_file import checked_file
from lightning_mcore.checkpoint.weights import build_from_checkpoint, hyper_parameters_of, load_weights, refuse_code
from lightning_mcore.config.layout import ModelShape, ParallelLayout
from lightning_mcore.config.rules.model import LossNormalization, check_normalization
from lightning_mcore.layers.host_values import rows_between
from lightning_mcore.layers.inputs import (
    ModelInputs,
    is_packed,
    microbatch_shape,
    split_packed_batch,
)
from lightning_mcore.layers.losses import sample_mean, token_mean
from lightning_mcore.layers.session import SingleModelSession, single_process
from lightning_mcore.layers.whole_documents import check_hybrid, keep_documents_whole
from lightning_mcore.parallel.context import split_for_context_parallel
from lightning_mcore.parallel.fully_sharded import is_fully_sharded
from lightning_mcore.parallel.groups import (
    keep_groups_for,
    pipeline_stage,
    process_group,
    process_groups_are_open,
    random_state_of_build,
)
from lightning_mcore.parallel.pipeline import ChunkFactory, Pipeline, PipelineHost
from lightning_mcore.strategy.outputs import join_outputs

_LOGITS_AT_ONCE = 2**24


class MCoreModule(pl.LightningModule):
    """A LightningModule whose model may be split over ranks.

    Build the model in ``configure_model`` with ``self.model = self.pipeline(self.build_chunk)``; everything else is
    plain Lightning. Works under :class:`~lightning_mcore.MCoreStrategy`, ``"auto"`` and ``"ddp"``.

    Examples:
        >>> from megatron.core.transformer import TransformerConfig
        >>> from lightning_mcore import MCoreModule
        >>> from lightning_mcore.layers.gpt import GPTChunk
        >>> from lightning_mcore.layers.spec import gpt_block_spec
        >>> class Net(MCoreModule):
        ...     def configure_model(self):
        ...         sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
        ...         self.config = TransformerConfig(**sizes, **self.megatron_fields())
        ...         self.model = self.pipeline(self.build_chunk)
        ...
        ...     def build_chunk(self, **stage):  # pre_process, post_process and vp_stage
        ...         layers = gpt_block_spec(self.config, "local", stage["vp_stage"])
        ...         return GPTChunk(self.config, layers, vocab_size=256, max_sequence_length=64, **stage)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self.forward_step(batch)
    """

    def pipeline(self, factory: ChunkFactory) -> Pipeline:
        """Build the chunks of the model that this rank owns; call it in ``configure_model``.

        A second call with the same layout (``fit`` and then ``validate``) returns the existing model.

        Args:
            factory: Called as ``factory(pre_process=..., post_process=..., vp_stage=...)`` once for each chunk.

        Returns:
            A module that is called like the complete model.

        Raises:
            RuntimeError: No trainer is attached, or the model was built for another layout.
        """
        host = self._host()
        built: Pipeline | None = self.__dict__.get("_built_pipeline")
        layout = host.layout if host is not None else ParallelLayout()
        # Under another strategy, Megatron's layers still need process groups, of one rank.
        if host is None:
            self._open_session()
        if built is not None:
            if built.layout != layout:
                raise RuntimeError(
                    f"this module was built for the layout {built.layout} and cannot run on {layout}; "
                    "create a new module and load its weights from a checkpoint"
                )
            return built
        with random_state_of_build():
            pipeline = self._build(factory, layout, whole=host is None)
        if layout.hybrid_context_parallel:
            for chunk in pipeline.chunks:
                check_hybrid(chunk.config)
                keep_documents_whole(chunk)
        keep_groups_for(pipeline)
        object.__setattr__(self, "_built_pipeline", pipeline)  # the user's attribute registers it as a submodule
        return pipeline

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Start from the weights of a checkpoint; call it at the end of ``configure_model``.

        Every rank reads the parts that it holds. The optimizer, the steps and the epochs start from the beginning; to
        continue a run, pass its checkpoint to ``trainer.fit(ckpt_path=...)`` instead.

        Args:
            path: A directory that ``MCoreStrategy`` or Megatron-LM wrote, on any layout.
            strict: Raise for missing and unexpected names instead of warning.

        Raises:
            FileNotFoundError: There is nothing at ``path``.
            RuntimeError: The model is not built yet, or training has begun.
            ValueError: ``path`` is not such a checkpoint, or belongs to another model.
        """
        if self.__dict__.get("_built_pipeline") is None:
            raise RuntimeError("there is no model to load weights into; call load_weights() after self.pipeline(...)")
        if any(hasattr(parameter, "main_grad") or is_fully_sharded(parameter) for parameter in self.parameters()):
            raise RuntimeError("load_weights() was called during training; call it in configure_model()")
        load_weights(self, path, strict)

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Build a module from a checkpoint of any layout, with the complete model in this process.

        This extends Lightning's method to directories. To train on several ranks from its weights, use
        :meth:`load_weights`.

        Args:
            checkpoint_path: A file, or a directory of shards.
            map_location: For a file, as in Lightning.
            hparams_file: For a file, as in Lightning.
            strict: Whether names must agree; the module's ``strict_loading`` by default.
            weights_only: As in ``torch.load``.
            kwargs: Hyper-parameters to use instead of the recorded ones.
        """
        cls._check_given(kwargs)
        is_path = isinstance(checkpoint_path, str | Path)
        if is_path and MCoreCheckpointIO.is_directory(checkpoint_path):
            return build_from_checkpoint(cls, checkpoint_path, strict, weights_only, kwargs, cls._check_recorded)
        lightning_loader = super().load_from_checkpoint
        checked = checked_file(str(checkpoint_path)) if is_path else contextlib.nullcontext(checkpoint_path)
        with single_process(), checked as file:
            if is_path and Path(file).is_file():
                # Before Lightning unpickles and instantiates anything: a file must not choose which code runs.
                recorded = hyper_parameters_of(file, weights_only, kwargs)
                refuse_code(checkpoint_path, recorded)
                cls._check_recorded(str(checkpoint_path), recorded)
            return lightning_loader(file, map_location, hparams_file, strict, weights_only, **kwargs)

    @classmethod
    def _check_given(cls, given: Mapping[str, Any]) -> None:
        """Reject hyper-parameters for :meth:`load_from_checkpoint` that Lightning would drop silently."""

    @classmethod
    def _check_recorded(cls, path: str, recorded: Mapping[str, Any]) -> None:
        """Reject hyper-parameters in a checkpoint that the constructor does not accept."""

    def megatron_fields(self) -> dict[str, Any]:
        """Return the ``TransformerConfig`` fields that belong to the strategy and the precision.

        Unpack them into the config: ``TransformerConfig(num_layers=4, ..., **self.megatron_fields())``. A field given
        twice is then a TypeError, and Megatron's own validation sees the final values.
        """
        host = self._host()
        return host.megatron_fields() if host is not None else {}

    def model_shape(self) -> ModelShape | None:
        """Return the sizes that the layout must divide, to check them before process groups form; None if unknown."""
        return None

    def check_settings(self) -> None:
        """Raise for model settings that contradict each other or the strategy; runs before process groups form."""

    def microbatch_shape(self, batch: Any) -> tuple[int, int] | None:
        """Return ``(sequence length, rows)`` of a microbatch; None lets pipeline stages exchange the shapes.

        Stages exchange a shape for each microbatch over the hosts' network, which costs about a tenth of a millisecond.
        To save that, override this method if your chunks send activations [s, b, h], as Megatron's ``GPTModel`` does:
        return ``(s, b)`` of the complete sequences, such as ``(tokens.size(1), tokens.size(0))``.
        """
        return microbatch_shape(batch) if is_packed(batch) else None

    def split_rows(self, batch: Any, rows: int) -> Iterator[tuple[Any, float]]:
        """Cut a batch into microbatches, for ``MCoreStrategy(micro_batch_size=...)``.

        Every tensor whose first dimension is the batch size is cut along it: 5 rows with ``rows=2`` give parts of 2, 2
        and 1 rows, with shares 0.4, 0.4 and 0.2. Override this method if a tensor of your batch does not have the rows
        in dimension 0.

        Args:
            batch: A batch: any nesting of dicts, lists and tuples of tensors, [b, ...].
            rows: Rows of a microbatch; the last one may have fewer.

        Yields:
            The same structure, [rows, ...], and its share of the batch's rows.
        """
        yield from split_rows(batch, rows)

    def join_rows(self, outputs: Sequence[Any], rows: Sequence[int]) -> Any:
        """Join an evaluation step's outputs for the parts of a batch, which :meth:`split_rows` cut, into one output.

        Tensors are concatenated along dimension 0, floating-point scalars averaged, integers added, and dicts, tuples
        and lists joined entry by entry (``strategy/outputs.py`` has the rules). Override this method if a step returns
        something else.

        Args:
            outputs: What the step returned for each part, in the order of the rows.
            rows: The number of rows of each part.

        Returns:
            What the step would have returned for the complete batch.

        Raises:
            ValueError: The outputs have no common form.
        """
        return join_outputs(outputs, rows)

    def shard_context(self, batch: Any) -> Any:
        """Return this context-parallel rank's share of a batch; called before the step when cp > 1.

        Every tensor with at least two dimensions is cut along dimension 1 in TransformerEngine's zigzag order: of 8
        tokens, rank 0 of 2 gets tokens 0, 1, 6 and 7, rank 1 gets tokens 2 to 5. In a packed batch, tensors with a
        value for each token are cut this way within each sub-sequence; with ``hybrid_context_parallel``, only for the
        ranks that share it. Override this method if a tensor of your batch does not have the sequence in dimension 1.

        Args:
            batch: A batch: any nesting of dicts, lists and tuples of tensors, [b, s, ...].

        Returns:
            The same structure, [b, s / cp, ...].
        """
        group = process_group("cp")
        if is_packed(batch):
            return split_packed_batch(batch, group.rank(), group.size(), self._hybrid)

        def shard(tensor: Tensor) -> Tensor:
            return split_for_context_parallel(tensor, group.rank(), group.size()) if tensor.dim() > 1 else tensor

        return apply_to_collection(batch, Tensor, shard)

    def forward_step(self, batch: dict[str, Tensor], normalization: LossNormalization = "tokens") -> Any:
        """Run a batch through the model and return its loss in the form that ``training_step`` returns.

        The model must be called like Megatron's ``GPTModel``. Under ``MCoreStrategy`` the losses of microbatches are
        weighted so that the loss of the optimizer step is the mean over all its tokens, or samples, on every layout;
        Lightning's own strategies average microbatches and ranks.

        Args:
            batch: ``tokens`` and ``labels``, [b, s] int64, dense or packed; ``layers/inputs.py`` lists the optional
                entries.
            normalization: ``"tokens"`` for the mean over tokens, ``"samples"`` for the mean over samples of each
                sample's mean.

        Returns:
            ``{"loss": mean, "num_tokens": its weight}``, scalars, fp32 and int32; only the mean if the model's
            ``TransformerConfig`` has ``calculate_per_token_loss=False``, which averages microbatches.

        Raises:
            ValueError: Entries of the batch contradict each other, or router losses would have wrong weights.
        """
        losses, inputs = self.token_losses(batch)
        return self.normalized_loss(losses, inputs, normalization)

    def token_losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, ModelInputs]:
        """Run a batch through the model and return the loss of each of this rank's tokens, and the model's inputs.

        Args:
            batch: As in :meth:`forward_step`.

        Returns:
            Losses, [b, s / cp] fp32, or [1, b * s / cp] for a packed batch, neither summed nor averaged; and the
            model's inputs, of the same shape.

        Raises:
            ValueError: The batch has no labels, or its entries contradict each other.
        """
        pipeline = self._pipeline_of_step()
        inputs = self.model_inputs(batch)
        if inputs.labels is None:
            raise ValueError(f"a batch with {', '.join(batch)} has no labels, which the losses need; add them")
        losses: Tensor = pipeline(
            inputs.tokens, inputs.position_ids, None, labels=inputs.labels, **self._more_arguments(inputs)
        )
        return losses, inputs

    def token_logits(self, batch: dict[str, Tensor]) -> tuple[Tensor, ModelInputs]:
        """Run a batch through the model and return this rank's logits, and the model's inputs.

        Args:
            batch: As in :meth:`forward_step`; labels are not needed.

        Returns:
            Logits, [b, s / cp, padded v / tp] in the dtype of the model, or [1, b * s / cp, padded v / tp] for a packed
            batch, and the model's inputs. The vocabulary is padded so that ranks can divide it: leave out the columns
            from ``vocab_size`` on.
        """
        inputs = self.model_inputs(batch)
        arguments = self._more_arguments(inputs)
        arguments.pop("loss_mask", None)
        logits: Tensor = self._pipeline_of_step()(inputs.tokens, inputs.position_ids, None, **arguments)
        return logits, inputs

    def losses_of_logits(self, logits: Tensor, inputs: ModelInputs) -> Tensor:
        """Compute the loss of each token from the logits of :meth:`token_logits`, as the model does; on the last stage.

        Args:
            logits: The logits of this rank, [b, s / cp, v / tp], any float dtype.
            inputs: The model's inputs, including labels.

        Returns:
            Losses, [b, s / cp] fp32, neither summed nor averaged.
        """
        pipeline = self._pipeline_of_step()
        chunk: Any = pipeline.chunks[pipeline.is_last.index(True)]
        assert inputs.labels is not None, "losses need labels"
        # Without gradients, positions go through it in groups, because it needs a copy of their logits. Of 4096
        # positions with 16384 logits each (128k / tp=8), 1024 go at once: 64 MiB in fp32 instead of 256.
        rows, length, columns = logits.shape
        group = length if torch.is_grad_enabled() else max(_LOGITS_AT_ONCE // (rows * columns), 1)
        found: list[Tensor] = []
        for start in range(0, length, group):
            part = logits[:, start : start + group]
            # Megatron's loss takes [s, b, v]. With b = 1, the transposed logits are contiguous, so this does not copy.
            turned = part.transpose(0, 1).contiguous()
            if turned.data_ptr() == part.data_ptr() and chunk.config.cross_entropy_loss_fusion:
                turned = turned.clone()  # TransformerEngine's fused loss writes gradients over it
            found.append(chunk.compute_language_model_loss(inputs.labels[:, start : start + group], turned))
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]

    @property
    def _hybrid(self) -> bool:
        host = self._host()
        return host is not None and host.layout.hybrid_context_parallel

    def model_inputs(self, batch: dict[str, Tensor]) -> ModelInputs:
        """Return the model's inputs for a batch, or for this context-parallel rank's share of one.

        Args:
            batch: As in :meth:`forward_step`, [b, s] or [b, s / cp]; token ids are int64.
        """
        group = self._cp_group
        return ModelInputs.of(batch, *(() if group is None else (group.rank(), group.size(), self._hybrid)))

    @property
    def _cp_group(self) -> dist.ProcessGroup | None:
        return process_group("cp") if self._host() is not None else None

    def normalized_loss(self, losses: Tensor, inputs: ModelInputs, normalization: LossNormalization = "tokens") -> Any:
        """Return the result of :meth:`forward_step` for token losses that you have computed or changed yourself.

        Args:
            losses: The loss of each token of this rank, [b, s / cp] fp32.
            inputs: The inputs that the losses belong to.
            normalization: As in :meth:`forward_step`.
        """
        config = self._config_of_chunks()
        check_normalization(normalization, config)
        assert inputs.loss_mask is not None, "losses need labels"
        if normalization == "samples":
            mean, weight = sample_mean(losses, inputs, self._cp_group)
        elif config.calculate_per_token_loss:
            mean, weight = token_mean(losses, inputs.loss_mask)
        else:
            return self.masked_mean(losses, inputs.loss_mask)
        return {"loss": mean, "num_tokens": weight} if config.calculate_per_token_loss else mean

    def masked_mean(self, losses: Tensor, loss_mask: Tensor) -> Tensor:
        """Return the mean of ``losses`` over the tokens where the mask is 1, exact under context parallelism.

        The mean of the results over the context-parallel ranks is the mean over the complete sequence. A mean over each
        rank's share would give a rank with few tokens as much weight as one with many.

        Args:
            losses: The loss of each token of this rank, [b, s / cp], any float dtype.
            loss_mask: [b, s / cp], any number dtype, 1 where a token counts, 0 elsewhere.

        Returns:
            A scalar, ``[]``, in the dtype of ``losses``, that can be differentiated.
        """
        # Two ranks with losses [1, 3] and [5, 9], masks [1, 1] and [1, 0]: totals 4 and 5, and 3 tokens in all. They
        # return 4 * 2 / 3 and 5 * 2 / 3, with mean 9 / 3 = 3.0; the mean of their own means would be 3.5.
        mask = loss_mask.to(losses.dtype)
        total = (losses * mask).sum()
        count = mask.sum()
        size = 1
        if (group := self._cp_group) is not None and group.size() > 1:
            size = group.size()
            dist.all_reduce(count, group=group)
        return total * size / count.clamp(min=1)

    def run_forward(self, step: str, batch: Any) -> Any:
        """Run the method ``step(batch, batch_idx)`` of this module without gradients, through its pipeline if any.

        Collective: every rank calls it with its data-parallel group's batch.

        Args:
            step: Name of a method that calls ``self.model(...)`` once, such as ``"predict_step"``.
            batch: The method's batch.

        Returns:
            The last stage's result, on every rank of the pipeline.
        """
        host = self._host()
        if host is not None:
            return host.run_forward(step, batch)
        with torch.no_grad():
            return getattr(self, step)(batch, 0)

    def _pipeline_of_step(self) -> Pipeline:
        built: Pipeline | None = self.__dict__.get("_built_pipeline")
        if built is None:
            raise RuntimeError(
                f"{type(self).__name__} has no model to run; without a trainer, call configure_model() first, and in a"
                " module of your own, let it build the model with self.pipeline(...)"
            )
        return built

    def _more_arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        return inputs.arguments(self._config_of_chunks(), self._pipeline_of_step().boundaries_on_host)

    def _config_of_chunks(self) -> Any:
        return self._pipeline_of_step().chunks[0].config

    def _host(self) -> PipelineHost | None:
        strategy = self._trainer.strategy if self._trainer is not None else None
        return strategy if isinstance(strategy, PipelineHost) else None

    def _build(self, factory: ChunkFactory, layout: ParallelLayout, whole: bool) -> Pipeline:
        if whole:
            with _device_of_layers():
                chunk = factory(pre_process=True, post_process=True, vp_stage=None)
            return Pipeline([chunk], [True], layout, prepare=self._open_session)
        chunks, is_last = [], []
        for index in range(layout.num_chunks):
            vp_stage = None if layout.virtual_pipeline_model_parallel_size is None else index
            # On 2 stages with 2 chunks each, stage 0 builds chunks 0 and 2, stage 1 chunks 1 and 3.
            first, last = pipeline_stage(vp_stage)
            chunks.append(factory(pre_process=first, post_process=last, vp_stage=vp_stage))
            is_last.append(last)
        return Pipeline(chunks, is_last, layout)

    def _open_session(self) -> None:
        if self._host() is not None:
            return
        runs = self._trainer is not None and self._trainer.state.status == TrainerStatus.RUNNING
        if self._trainer is not None and (runs or not process_groups_are_open()):
            SingleModelSession.attach(self._trainer)
        elif not process_groups_are_open():
            raise RuntimeError(
                "pipeline() builds Megatron layers, which need process groups; call it in configure_model(), "
                "which the Trainer runs, or inside `with single_process():`"
            )


def split_rows(batch: Any, rows: int) -> Iterator[tuple[Any, float]]:
    """Cut a batch into microbatches, as :meth:`MCoreModule.split_rows` does."""
    total = extract_batch_size(batch)
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        yield rows_of(batch, total, start, stop), (stop - start) / total


def rows_of(batch: Any, total: int, start: int, stop: int) -> Any:
    """Return rows ``start`` to ``stop - 1`` of every tensor of a batch that has ``total`` rows."""

    def take(tensor: Tensor) -> Tensor:
        return rows_between(tensor, start, stop) if tensor.dim() > 0 and tensor.shape[0] == total else tensor

    return apply_to_collection(batch, Tensor, take)


def _device_of_layers() -> AbstractContextManager[Any]:
    """Return the context in which a complete model is built on one device."""
    # Megatron puts projections on the current CUDA device, but norms and routers on torch's default device.
    if torch.get_default_device().type != "cpu":
        return contextlib.nullcontext()  # Lightning or the user has chosen the device
    return torch.device(torch.cuda.current_device())
