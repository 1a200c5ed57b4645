# SPDX-License-Identifier: Apache-2.0
"""The sizes of a run: what its memory, traffic and operations are computed from."""

from dataclasses import dataclass
from functools import cached_property

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.loss_chunks import LossChunkSize, tokens_of_chunk
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.parameters import Tensors, rank_tensors
from lightning_mcore.planning.schedule import PipelineTimeline

OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_comm", "tp_comm_overlap")
"""The settings that hide communication: during the backward pass of the last microbatch, during the forward pass of the
first, between stages, and half of the tensor-parallel ranks'."""


@dataclass(frozen=True)
class Sizes:
    """A model on a layout that fits it, with its batch and number formats."""

    fields: GPTFields
    layout: ParallelLayout
    world_size: int
    batch: GlobalBatch
    formats: Formats
    loss_chunk_size: LossChunkSize = "auto"
    group_size: int | None = None  # ``microbatch_group_size_per_vp_stage``
    overlaps: frozenset[str] = frozenset()  # those of :data:`OVERLAPS` that are on

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context-parallel rank."""
        return self.batch.micro_batch_size * self.batch.seq_length // self.layout.context_parallel_size

    @property
    def tokens_of_loss(self) -> int | None:
        """How many of these go through the loss at once; None for all."""
        columns = self.fields.padded_vocab_size // self.layout.tensor_model_parallel_size
        defers = bool(self.fields.transformer.get("defer_embedding_wgrad_compute"))
        size = self.loss_chunk_size if self.fields.has_logits else None
        return tokens_of_chunk(size, self.tokens, columns, defers_gradient=defers)

    @cached_property
    def stages(self) -> list[list[ChunkLayers]]:
        """The chunks of every pipeline rank."""
        return stage_layers(self.fields, self.layout)

    @cached_property
    def _known_tensors(self) -> dict[int, Tensors]:
        return {}

    def tensors(self, stage: int) -> Tensors:
        """Return the parameters of a rank of a pipeline stage, chunk by chunk."""
        known = self._known_tensors
        known[stage] = known.get(stage) or rank_tensors(self.fields, self.layout, stage, self.formats.backend)
        return known[stage]

    @cached_property
    def timeline(self) -> PipelineTimeline:
        """The pipeline schedule of a step."""
        return PipelineTimeline.of(self.layout, self.batch.num_microbatches, self.group_size)
