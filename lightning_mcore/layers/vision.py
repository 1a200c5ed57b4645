# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: transformers' own tower on the first pipeline stage, before Megatron's layers.

Every rank of the first stage has the whole tower and projector, and runs them on all images of a microbatch. Their
outputs replace the embeddings of image and video tokens (``vision_rows``). Each rank does this for its own tokens, so
forward needs no communication here. The gradients are summed as follows:

* Under context parallelism each rank has the gradient of its own tokens. The data-parallel reduction sums it, as for
  all other weights.
* Under sequence parallelism each rank has the gradient of its own tokens too. The attribute ``sequence_parallel`` of a
  weight makes Megatron sum it over the tensor-parallel ranks (``finalize_model_grads``). Without sequence parallelism
  these ranks have the same tokens and the same gradient.

A microbatch without images gives the tower zero gradients, because a reduction that overlaps with backward waits for
the gradient of every weight. In some families, outputs from inside the tower are added after the first layers of the
language model (*deepstack*). These layers must be on the first stage. Megatron hands the outputs from layer to layer.
"""

import importlib
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lightning_mcore.config.vision import Vision
from lightning_mcore.layers.inputs import ModelInputs
from lightning_mcore.layers.multi_token import MultiTokenGPT
from lightning_mcore.layers.multimodal_rotary import MultimodalRotary, positions_in_row
from lightning_mcore.parallel.groups import process_group


@dataclass(frozen=True)
class VisionInputs(ModelInputs):
    """A rank's share of a batch with images.

    Attributes:
        rope_positions: [3, b, s / cp] int64: time, height and width of each token.
        vision_rows: [b, s / cp] int64: the row of the tower's outputs that replaces the token; -1 for text.
        patches: [n, values of a patch], any float dtype; None without images, and on stages without the tower.
        vision_grids: [images and videos, 3] int64: their sizes in patches; None without patches.
        cp: Rank and size of the context-parallel group.
    """

    rope_positions: Tensor
    vision_rows: Tensor
    patches: Tensor | None
    vision_grids: Tensor | None
    cp: tuple[int, int]

    @classmethod
    def of_batch(cls, inputs: ModelInputs, batch: dict[str, Tensor], cp_rank: int, cp_size: int) -> "VisionInputs":
        """Add the entries of ``data/multimodal.py`` to the other inputs; without them, all tokens are text.

        Args:
            inputs: The other inputs, of the same batch.
            batch: The batch, split for this context-parallel rank.
            cp_rank: Rank in the context-parallel group.
            cp_size: Number of ranks in that group.
        """
        shape = inputs.tokens.shape
        positions, rows = batch.get("rope_positions"), batch.get("vision_rows")
        if positions is None:
            positions = inputs.position_ids[..., None].expand(-1, -1, 3)
        return cls(
            **{each.name: getattr(inputs, each.name) for each in fields(inputs)},
            rope_positions=positions.reshape(*shape, 3).permute(2, 0, 1),
            vision_rows=torch.full_like(inputs.tokens, -1) if rows is None else rows.reshape(shape),
            patches=batch.get("patches"),
            vision_grids=batch.get("vision_grids"),
            cp=(cp_rank, cp_size),
        )

    def arguments(self, config: TransformerConfig, boundaries_on_host: bool = False) -> dict[str, Any]:
        """Return the arguments of :class:`VisionGPT` except tokens, positions, mask and labels.

        Args:
            config: The config of the model.
            boundaries_on_host: As in :meth:`ModelInputs.arguments`.

        Raises:
            ValueError: Megatron's fused rotary embedding would use the positions of the first row for all rows.
        """
        if config.apply_rope_fusion and (self.packed is not None or len(self.tokens) > 1):
            rows = "packed rows" if self.packed is not None else f"{len(self.tokens)} rows"
            raise ValueError(
                f"apply_rope_fusion=True with {rows} would ignore positions in images; set apply_rope_fusion=False, or"
                " give one row that is not packed"
            )
        positions = self.rope_positions
        if self.packed is not None:
            positions = positions_in_row(positions, self.packed, *self.cp)
        seen = {"patches": self.patches, "vision_grids": self.vision_grids} if self.patches is not None else {}
        of_text = super().arguments(config, boundaries_on_host)
        return {**of_text, "rope_positions": positions, "vision_rows": self.vision_rows, **seen}


class VisionTower(nn.Module):
    """transformers' tower with its projector, unchanged.

    Rotary tables of the tower stay fp32, whatever dtype the model is cast to.

    Args:
        vision: The settings of the tower.
        config: The config of the language model; its ``params_dtype`` is that of the weights.
    """

    def __init__(self, vision: Vision, config: TransformerConfig) -> None:
        super().__init__()
        tower: Any = getattr(importlib.import_module(vision.family.package), vision.family.tower)
        self.tower: nn.Module = tower(tower.config_class(**vision.config))
        self.to(config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, patches: Tensor, grids: Tensor) -> list[Tensor]:
        """Return the outputs of the tower for images and videos.

        Args:
            patches: [n, values of a patch], any float dtype.
            grids: [images and videos, 3] int64, their sizes in patches: time, height and width.

        Returns:
            The projector's outputs, and then those from inside the tower that are added after the first layers; each
            [n / patches of a token, h] in the dtype of the weights.
        """
        trains = any(parameter.requires_grad for parameter in self.parameters())
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            output = self.tower(patches, grid_thw=grids, return_dict=True)
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]

    def takes_part(self, hidden: Tensor) -> Tensor:
        """Return a tensor unchanged, and give each trained weight a gradient of zero in backward."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return hidden
        return cast(Tensor, _TakesPart.apply(hidden, *trained))  # type: ignore[no-untyped-call]

    def _apply(self, fn: Any, recurse: bool = True) -> "VisionTower":
        tables = {name: table.clone() for name, table in self.named_buffers()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in self.named_buffers():
            table.data = tables[name].to(table.device)
        return self


class _TakesPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.dtype) for weight in weights]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        [gradient] = gradients
        zeros = (gradient.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.like)
        return (gradient, *zeros)


class VisionGPT(MultiTokenGPT):
    """One chunk of a vision-language model: ``GPTModel``, and the tower if the chunk has the embedding.

    Args:
        config: The config of the language model.
        spec: Its layers.
        vision: The settings of the tower.
        rotary_base: Base of the rotary wavelengths.
        pre_process: Whether it has the embedding and the tower.
        arguments: Other arguments of ``GPTModel``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        *,
        vision: Vision,
        rotary_base: int,
        pre_process: bool,
        **arguments: Any,
    ) -> None:
        super().__init__(config, spec, pre_process=pre_process, rotary_base=rotary_base, **arguments)
        interleaved = vision.family.interleaved
        self.rotary_pos_emb = MultimodalRotary(config.kv_channels, rotary_base, vision.sections, interleaved)
        self._seen: tuple[Tensor, Tensor] | None = None  # places and outputs of the projector, during a forward pass
        if not pre_process:
            return
        self.vision = VisionTower(vision, config)
        self.embedding.register_forward_hook(self._see)
        for number in range(vision.deepstack):
            self.decoder.layers[number].register_forward_hook(
                _adds(number, is_last=number + 1 == vision.deepstack), with_kwargs=True
            )

    def forward(
        self,
        *args: Any,
        rope_positions: Tensor,
        vision_rows: Tensor,
        patches: Tensor | None = None,
        vision_grids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the chunk.

        Args:
            args: As in ``GPTModel``.
            rope_positions: [3, b, s / cp] int64; for packed rows [3, 1, b * s] (``positions_in_row``).
            vision_rows: [b, s / cp] int64: the row of the tower's outputs that replaces the token; -1 for text.
            patches: [n, values of a patch], any float dtype; None without images.
            vision_grids: [images and videos, 3] int64; None without images.
            kwargs: As in ``GPTModel``.

        Returns:
            As in ``GPTModel``.
        """
        self.rotary_pos_emb.positions = rope_positions
        if patches is not None and self.pre_process:
            rows = self._own_rows(vision_rows).flatten()
            places = (rows >= 0).nonzero().flatten()
            seen = torch.stack(self.vision(patches, vision_grids), dim=1)[rows[places]]
            self._seen = places, seen[:, 0]
            if seen.size(1) > 1:
                kwargs["extra_block_kwargs"] = {"context": seen[:, 1:], "context_mask": places}
        try:
            output: Tensor = super().forward(*args, **kwargs)
        finally:
            self._seen = None
        return output

    def _own_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's tokens as its hidden states have them, [s / cp / tp, b]."""
        rows = rows.t()
        if not self.config.sequence_parallel:
            return rows
        group = process_group("tp")
        return rows.chunk(group.size())[group.rank()]

    def _see(self, module: nn.Module, inputs: Any, embeddings: Tensor) -> Tensor:
        """Replace the embeddings of images, [s / cp / tp, b, h], by the projector's outputs."""
        if self._seen is None:
            return self.vision.takes_part(embeddings)
        places, seen = self._seen
        tokens = embeddings.flatten(0, 1)
        return tokens.index_copy(0, places, seen.to(tokens.dtype)).view_as(embeddings)


def _adds(number: int, is_last: bool) -> Any:
    """Return a hook that adds outputs from inside the tower to those of a layer.

    Megatron hands ``context`` and ``context_mask`` from layer to layer, for models with cross-attention. Here they are
    these outputs, [images' tokens of this rank, number of layers that add them, h], and their places among the tokens.
    Recomputed layers get those of their own microbatch.
    """

    def add(
        module: nn.Module, args: Any, kwargs: dict[str, Any], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        hidden, context = output
        if context is None:
            return output
        tokens, seen = hidden.flatten(0, 1), context[:, number].to(hidden.dtype)
        added = tokens.index_add(0, kwargs["context_mask"], seen).view_as(hidden)
        return added, None if is_last else context

    return add
