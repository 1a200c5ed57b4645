# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: transformers' own tower on the first pipeline stage, before Megatron's layers.

Every rank of the first stage has the whole tower and projector. A microbatch's frames (images, and parts of videos) are
distributed over the tensor- and context-parallel ranks to balance the load, and an all-gather gives every rank all
outputs. They replace the embeddings of image and video tokens (``vision_rows``); each rank does this for its own
tokens. In some families, outputs from inside the tower are also added after the first layers of the language model
(*deepstack*). These layers must be on the first stage; Megatron passes the outputs from layer to layer.

A trainable tower runs in every microbatch on every rank of the first stage, if need be on a blank image whose outputs
are not used. All ranks then take part in the same collectives, and a reduction that overlaps with backward gets the
gradient of every weight: zero without an image. ``models/vision.py`` builds :class:`VisionGPT`.
"""

import functools
import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_mcore.config.vision import Vision
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.host_values import host_values, known_values, send
from lightning_mcore.layers.inputs import ModelInputs
from lightning_mcore.layers.multimodal_rotary import MultimodalRotary, positions_in_row
from lightning_mcore.parallel.groups import process_group


@dataclass(frozen=True)
class VisionInputs(ModelInputs):
    """A rank's share of a batch with images; ``cp`` is rank and size of the context-parallel group."""

    rope_positions: Tensor  # [3, b, s / cp] int64: time, height and width of each token
    # [b, s / cp], on the host if it knows them: the row of the tower's outputs that replaces the token; -1 for text
    vision_rows: Tensor
    patches: Tensor | None  # [n, values of a patch]; None without images, and on stages without the tower
    vision_grids: Tensor | None  # [images and videos, 3], in patches
    cp: tuple[int, int]

    @classmethod
    def of_batch(cls, inputs: ModelInputs, batch: dict[str, Tensor], cp_rank: int, cp_size: int) -> "VisionInputs":
        """Add the entries of ``data/multimodal.py``, split for this rank; without them, all tokens are text."""
        shape = inputs.tokens.shape
        positions, rows = batch.get("rope_positions"), batch.get("vision_rows", torch.full(shape, -1))
        known = known_values(rows)
        if positions is None:
            positions = inputs.position_ids[..., None].expand(-1, -1, 3)
        return cls(
            **{each.name: getattr(inputs, each.name) for each in fields(inputs)},
            rope_positions=positions.reshape(*shape, 3).permute(2, 0, 1),
            vision_rows=(rows if known is None else known).reshape(shape),
            patches=batch.get("patches"),
            vision_grids=batch.get("vision_grids"),
            cp=(cp_rank, cp_size),
        )

    def arguments(self, config: TransformerConfig, boundaries_on_host: bool = False) -> dict[str, Any]:
        """Return :class:`VisionGPT`'s arguments except tokens, positions, mask and labels."""
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


def with_own_images(part: dict[str, Tensor], seen: dict[str, Tensor], vision: Vision) -> dict[str, Tensor]:
    """Return some rows of a batch, ``part``, with their own images and videos from the whole batch, ``seen``."""
    grids, rows = host_values(seen["vision_grids"]), host_values(part["vision_rows"])
    device = part["vision_rows"].device
    tokens = torch.tensor([vision.tokens_of((time, height, width)) for time, height, width in grids.tolist()])
    image = torch.arange(len(tokens)).repeat_interleave(tokens)
    is_here = torch.zeros(len(tokens), dtype=torch.bool)
    is_here[image[rows[rows >= 0]]] = True
    if not is_here.any():
        return part
    numbers = is_here[image].cumsum(0) - 1
    patches = is_here.repeat_interleave(grids.prod(1)).nonzero().flatten()
    return {
        **part,
        "vision_rows": send(torch.where(rows >= 0, numbers[rows.clamp(min=0)], -1), device),
        "vision_grids": send(grids[is_here], device),
        "patches": seen["patches"].index_select(0, send(patches, device)),
    }


class VisionTower(nn.Module):
    """transformers' tower with its projector, unchanged, in the config's ``params_dtype``.

    If the language model's layers are recomputed in full, then so are all blocks of the tower.
    """

    def __init__(self, vision: Vision, config: TransformerConfig) -> None:
        super().__init__()
        tower: Any = getattr(importlib.import_module(vision.family.package), vision.family.tower)
        self.tower: nn.Module = tower(tower.config_class(**vision.config))
        self.to(config.params_dtype)
        self._vision = vision
        # Backward of the all-gather sums the gradients of a rank's frames over the ranks. Without sequence parallelism
        # tensor-parallel ranks have the same tokens, which the sum counts once per rank, so weights' gradients are
        # averaged over them. With it each rank has its own tokens, so they are summed.
        flag = "sequence_parallel" if config.sequence_parallel else "average_gradients_across_tp_domain"
        for parameter in self.parameters():
            setattr(parameter, flag, True)
        if config.recompute_granularity == "full":
            for block in self.tower.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    @property
    def learns(self) -> bool:
        """Whether a forward pass is followed by a backward pass that reaches its weights."""
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, patches: Tensor | None, grids: Tensor | None) -> Tensor:
        """Return the tower's outputs for images and videos, [n / patches of a token, 1 + deepstack, h]; collective.

        The tensor- and context-parallel ranks have the same images, and each computes its share of the frames.
        ``grids`` are sizes in patches: time, height, width. Without patches the tower sees a blank image. The second
        dimension holds the projector's output first, then what is added after the first layers.
        """
        if patches is None or grids is None:
            return self._see(*self._blank())
        group, grids = process_group("tp_cp"), host_values(grids)
        if group.size() == 1:
            return self._see(patches, grids)
        frames = [(1, height, width) for count, height, width in grids.tolist() for _ in range(count)]
        sizes = [prod(frame) for frame in frames]
        shares = share_out([self._vision.load_of(size) for size in sizes], group.size())
        own, parts = shares[group.rank()], torch.split(patches, sizes)
        if own:
            own_grids = torch.tensor([frames[frame] for frame in own])
            seen = self._see(torch.cat([parts[frame] for frame in own]), own_grids)
        else:
            seen = self._see(*self._blank())
        tokens = [self._vision.tokens_of(frame) for frame in frames]
        most = max(sum(tokens[frame] for frame in share) for share in shares)
        padded = functional.pad(seen, (0, 0, 0, 0, 0, most - len(seen)))
        gathered: Tensor = tensor_parallel.gather_from_sequence_parallel_region(padded, group=group)
        return gathered.index_select(0, send(_places(shares, tokens, most), gathered.device))

    def _see(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Return the tower's outputs; ``grids`` are on the host, where the tower reads them."""
        with torch.set_grad_enabled(self.learns):
            known = _known_indices(self.tower, grids, patches.device)
            output = self.tower(patches, grid_thw=grids, return_dict=True, **known)
            return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=1)

    def _blank(self) -> tuple[Tensor, Tensor]:
        """Return the smallest image's patches and size."""
        weight: Tensor = self.tower.patch_embed.proj.weight  # type: ignore[union-attr, assignment]
        side = self._vision.config["spatial_merge_size"]
        grids = torch.tensor([[1, side, side]])
        return weight.new_zeros(side * side, weight[0].numel()), grids

    def _apply(self, fn: Any, recurse: bool = True) -> "VisionTower":
        # Rotary tables stay fp32; only their device changes.
        tables = {name: table.clone() for name, table in self.named_buffers()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in self.named_buffers():
            table.data = tables[name].to(table.device)
        return self


def _known_indices(tower: Any, grids: Tensor, device: torch.device) -> dict[str, Any]:
    """Return what a tower would compute from the sizes of images, on the device where its layers need it there.

    On the device it would wait for each image. Source: the towers' ``forward`` and ``vision_utils`` (transformers 5.19
    and 5.24), which take these tensors as arguments.
    """
    from transformers import vision_utils
    from transformers.utils.generic import is_flash_attention_requested

    merge: int = tower.spatial_merge_size
    sent = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    kept: dict[str, Any] = {}
    if hasattr(tower, "num_grid_per_side"):  # Qwen3-VL, Qwen3.5
        sent["interp_indices"], sent["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    if hasattr(tower, "window_size"):  # Qwen2.5-VL
        sent["window_index"], kept["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            grids, merge, tower.window_size, tower.patch_size
        )
    if is_flash_attention_requested(tower.config):  # other attention splits the sequences on the host
        sent["cu_seqlens"], kept["max_seqlen"] = vision_utils.get_vision_attention_seqlens(grids, tower.config)
        if "cu_window_seqlens" in kept:
            sent["cu_window_seqlens"] = kept.pop("cu_window_seqlens")
            kept["max_window_seqlen"] = int(sent["cu_window_seqlens"].diff().max())
    return {**{name: send(values, device) for name, values in sent.items()}, **kept}


def share_out(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Return each rank's frames, in order, so that the greatest load is small."""
    # Heaviest first, each to the rank with least so far. Loads 6 16 4 4 on 2 ranks: [1] and [0, 2, 3], 16 and 14.
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for frame in sorted(range(len(loads)), key=lambda frame: -loads[frame]):
        rank = totals.index(min(totals))
        shares[rank].append(frame)
        totals[rank] += loads[frame]
    return [sorted(share) for share in shares]


def _places(shares: list[list[int]], tokens: list[int], most: int) -> Tensor:
    """Return where the outputs of all frames, in order, lie in all ranks' outputs, each padded to ``most`` tokens."""
    places = {}
    for rank, share in enumerate(shares):
        ends = itertools.accumulate((tokens[frame] for frame in share), initial=rank * most)
        for frame, (start, end) in zip(share, itertools.pairwise(ends), strict=True):
            places[frame] = torch.arange(start, end)
    return torch.cat([places[frame] for frame in range(len(tokens))])


class VisionGPT(GPTChunk):
    """One chunk of a vision-language model: a ``GPTChunk``, and the tower if the chunk has the embedding."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        *,
        vision: Vision,
        rotary_base: int,
        rotary_percent: float = 1.0,
        pre_process: bool,
        **arguments: Any,
    ) -> None:
        arguments |= {"rotary_base": rotary_base, "rotary_percent": rotary_percent}
        super().__init__(config, spec, pre_process=pre_process, **arguments)
        interleaved, channels = vision.family.interleaved, int(config.kv_channels * rotary_percent)
        self.rotary_pos_emb = MultimodalRotary(channels, rotary_base, vision.sections, interleaved)
        self._seen: tuple[Tensor, Tensor] | None = None
        if not pre_process:
            return
        self.vision = VisionTower(vision, config)
        # Megatron gathers weights in the order of modules, and the tower runs first.
        self.__dict__["_modules"] = {"vision": self.vision, **self.__dict__["_modules"]}
        self.embedding.register_forward_hook(self._see)
        for number in range(vision.deepstack):
            self.decoder.layers[number].register_forward_hook(
                _adds(number, is_last=number + 1 == vision.deepstack), with_kwargs=True
            )

    def forward(  # type: ignore[override]  # three more arguments, and the rest by position or name
        self,
        *args: Any,
        rope_positions: Tensor,
        vision_rows: Tensor,
        patches: Tensor | None = None,
        vision_grids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the chunk; other arguments and the result are as in ``GPTChunk``.

        ``rope_positions`` is [3, b, s / cp], for packed rows [3, 1, b * s] (``positions_in_row``). The others are as in
        :class:`VisionInputs`.
        """
        self.rotary_pos_emb.positions = rope_positions
        if self.pre_process and (patches is not None or self.vision.learns):
            rows, device = self._own_rows(vision_rows).flatten(), args[0].device
            places = (rows >= 0).nonzero().flatten()
            seen = self.vision(patches, vision_grids).index_select(0, send(rows[places], device))
            places = send(places, device)
            self._seen = places, seen[:, 0]
            if seen.size(1) > 1:
                kwargs["extra_block_kwargs"] = {"context": seen[:, 1:], "context_mask": places}
        try:
            output: Tensor = super().forward(*args, **kwargs)
        finally:
            self._seen = None
        return output

    def _own_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's tokens in the order of its hidden states, [s / cp / tp, b]."""
        rows = rows.t()
        if not self.config.sequence_parallel:
            return rows
        group = process_group("tp")
        return rows.chunk(group.size())[group.rank()]

    def _see(self, module: nn.Module, inputs: Any, embeddings: Tensor) -> Tensor:
        """Replace the embeddings of images, [s / cp / tp, b, h], by the projector's outputs."""
        if self._seen is None:
            return embeddings
        places, seen = self._seen
        tokens = embeddings.flatten(0, 1)
        return tokens.index_copy(0, places, seen.to(tokens.dtype)).view_as(embeddings)


def _adds(number: int, is_last: bool) -> Any:
    """Return a hook that adds outputs from inside the tower to a layer's output."""

    # Megatron passes `context` and `context_mask` from layer to layer for cross-attention. Here they are these outputs,
    # [images' tokens of this rank, number of layers that add them, h], and their places among the tokens.
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
