# SPDX-License-Identifier: Apache-2.0
"""The torch backend's core attention: what Megatron's attention layers call between their projections.

Megatron's own ``DotProductAttention`` holds the whole ``[s, s]`` scores and rejects context parallelism;
TransformerEngine's needs CUDA. ``spec.gpt_block_spec`` puts :class:`TorchAttention` in their place. It translates
Megatron's arguments for ``attention.py``.

Packed sequences come as one row, with ``PackedSeqParams`` that say where each one lies (``packed_sequences.py``). They
are computed one by one, so memory does not grow with the square of the row, and no bit of one depends on another.

Under context parallelism :func:`over_whole_sequences` gathers keys and values. :func:`completed` corrects
TransformerEngine's core attention.

Source: ``DotProductAttention`` (megatron.core.transformer.dot_product_attention, 0.16.1 and 0.19.2).
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.config.rules.model import check_attention
from lightning_mcore.layers.attention import (
    Reach,
    Softmax,
    attend,
    attend_once,
    packed_runs,
    positions_in,
    query_growth,
    sequence_runs,
    visible,
    with_sinks,
)
from lightning_mcore.layers.autograd import made_again
from lightning_mcore.layers.norms import RotatedHeadNorm, unweighted_norm
from lightning_mcore.layers.packed_sequences import Boundaries, boundaries_of, ranks_that_share
from lightning_mcore.parallel.context import check_packed_offsets, packed_order, packed_positions

if TYPE_CHECKING:
    from lightning_mcore.layers.token_cache import TokenCache

logger = logging.getLogger(__name__)

_CAUSAL = {AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right}


class TorchAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """Softmax attention with grouped heads, context parallelism and sliding windows, in plain PyTorch.

    Megatron's attention layers construct it, so they decide its signature. Its only parameters are norms after the
    rotation and learned sinks: one number per head in the softmax's denominator. Under context parallelism autograd
    keeps copies of the gathered keys and values if there are sinks. Raises ValueError if the config asks for attention
    that this backend does not support.

    ``apply_query_key_layer_scaling`` protects fp16 scores from overflow and cancels out. Scores are fp32 here, so it
    has no effect. ``v_channels`` is not used, because the tensors have it, and keys are always gathered, whatever
    ``cp_comm_type`` says.
    """

    boundaries_on_host = True  # on the device, Megatron's code before attention would wait for it in every layer
    cache: "TokenCache | None" = None  # lent to it for generation

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # Multi-latent attention passes its head size as k_channels.
        self.softmax_scale = 1 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        self.window_size = _window_of_layer(config, self.layer_number)
        check_attention(config, attn_mask_type in _CAUSAL)
        architecture = architecture_of(config)
        self.cap = architecture.attention_cap
        self.is_rotated = not (config.no_rope_freq and config.no_rope_freq[self.layer_number - 1])
        self.chunk = architecture.attention_chunk if self.is_rotated else None
        self.query_growth = architecture.query_growth
        if self.is_rotated and (architecture.query_growth or {}).get("unrotated_only"):
            self.query_growth = None
        self.softmax_offset = _sinks(config)
        self.q_layernorm: RotatedHeadNorm | None = None
        self.k_layernorm: RotatedHeadNorm | None = None
        if architecture.head_norms == "after_rotation":
            self.q_layernorm, self.k_layernorm = (
                RotatedHeadNorm(config, config.kv_channels, config.layernorm_epsilon) for _ in range(2)
            )
        self.cp_group = _context_parallel_group(config, pg_collection)
        self.shared_key_group = _shared_key_group(config, pg_collection)
        if self.cp_group is not None and cp_comm_type not in (None, "all_gather") and self.layer_number == 1:
            logger.warning(
                "cp_comm_type=%r is TransformerEngine's; the torch backend gathers keys and values", cp_comm_type
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention of this rank's queries over whole sequences; ValueError if an argument is not supported.

        ``query`` is [s / cp, b, h / tp, d], ``key`` [s / cp, b, groups / tp, d], ``value`` [s / cp, b, groups / tp,
        d_v]; the result is [s / cp, b, h / tp * d_v]. Packed tensors lack the dimension b, and the result is zero on
        padding. ``attention_mask`` is bool, broadcastable to [b, 1, s, s], True where a query must not look; it hides
        keys in addition to the mask type and the window, and must be None under context parallelism. Megatron passes
        ``attn_mask_type`` while it decodes.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        elif self.is_rotated and architecture_of(self.config).head_norms == "unweighted":
            query, key = (unweighted_norm(heads, self.config.layernorm_epsilon) for heads in (query, key))
        self._check_call(query, key, mask_type, attention_mask, attention_bias)
        if packed_seq_params is None:
            return self._attend(query, key, value, mask_type, attention_mask, None)
        boundaries = self._check_packed(query, attention_mask, packed_seq_params)
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return self._attend(query, key, value, mask_type, None, boundaries).squeeze(1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask_type: AttnMaskType,
        attention_mask: Tensor | None,
        boundaries: Boundaries | None,
    ) -> Tensor:
        """Compute attention of [s / cp, b, h / tp, d]; with boundaries, b is 1 and the row holds packed sequences."""
        if self.shared_key_group is not None:
            width = self.config.qk_pos_emb_head_dim
            key = _CompleteSharedGradient.apply(key, width, self.shared_key_group)  # type: ignore[no-untyped-call]
        if self.cache is not None:
            if not self.cache.is_prompt:
                return self._attend_next(query, key, value, self.cache)
            self.cache.keep(self, key, value)
        group = ranks_that_share(boundaries, self.cp_group)
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        if boundaries is None:
            offsets: tuple[int, ...] = (0, key.size(0) * size)
            runs = sequence_runs(query.size(0), offsets[-1], rank, size)
        else:
            offsets = boundaries.offsets
            runs = packed_runs(offsets, boundaries.lengths, rank, size)
        if self.query_growth is not None:
            query = query * self._growth(positions_in(runs, query.device)).to(query.dtype)[:, None, None, None]
        reach = self._reach(mask_type)
        sinks, scale, dropout = self.softmax_offset, self.softmax_scale, self.attention_dropout
        softmax = Softmax(scale, dropout if self.training else 0.0, self.cap, sinks is not None)

        def over(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            if sinks is not None:
                query = with_sinks(query, sinks, scale)
            if attention_mask is None:
                context = attend(query, key, value, runs, reach, softmax)
            else:
                seen = visible(runs[0], reach, query.device) & ~attention_mask
                context = attend_once(query, key, value, softmax, seen)
            return context.permute(2, 0, 1, 3)

        with self._dropout_state(softmax.dropout):
            if group is None:
                return over(query, key, value).flatten(2)
            return over_whole_sequences(query, key, value, over, offsets, group).flatten(2)

    def _attend_next(self, query: Tensor, key: Tensor, value: Tensor, cache: "TokenCache") -> Tensor:
        """Compute attention of the next token of each row, [1, b, h / tp, d], to all tokens."""
        if self.query_growth is not None:
            assert cache.positions is not None
            query = query * self._growth(cache.positions).to(query.dtype)[None, :, None, None]
        softmax = Softmax(self.softmax_scale, cap=self.cap)
        return cache.attend(self, query, key, value, self._reach(AttnMaskType.causal), softmax, self.softmax_offset)

    def _growth(self, positions: Tensor) -> Tensor:
        """Return the factors of queries at these positions of their sequences, in fp32."""
        growth = self.query_growth
        assert growth is not None
        length, first = growth["original_max_position_embeddings"], growth.get("first_position", 0)
        return query_growth(positions, growth["beta"], length, first)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the parameters for a checkpoint; each tensor-parallel rank has the sinks of its heads."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if isinstance(self.softmax_offset, nn.Parameter):
            own, axes = {"softmax_offset": self.softmax_offset}, {"softmax_offset": 0}
            state |= make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets)
        return state

    def _reach(self, mask_type: AttnMaskType) -> Reach:
        back, ahead = (None if side < 0 else side for side in self.window_size)
        return Reach(back, 0 if mask_type in _CAUSAL else ahead, self.chunk)

    def _dropout_state(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        """Return a context in which each tensor-parallel rank draws its own dropout, because heads differ."""
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        fork: contextlib.AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        mask_type: AttnMaskType,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None,
    ) -> None:
        if attention_bias is not None:
            raise ValueError("attention_bias is given, but the torch backend does not support it; pass None")
        if attention_mask is not None and self.cp_group is not None:
            raise ValueError(
                f"attention_mask is given with context_parallel_size={self.cp_group.size()}, where a rank holds only "
                "parts of it; pass None, and use attn_mask_type and window_size instead"
            )
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise ValueError(f"attention_mask is {attention_mask.dtype}; give torch.bool, True where a key is hidden")
        if mask_type in _CAUSAL - {AttnMaskType.causal_bottom_right} and query.size(0) != key.size(0):
            raise ValueError(
                f"causal attention has {query.size(0)} queries and {key.size(0)} keys; give as many of each, or "
                "attn_mask_type=AttnMaskType.causal_bottom_right where the queries are the last of the sequence"
            )

    def _check_packed(self, query: Tensor, attention_mask: Tensor | None, params: PackedSeqParams) -> Boundaries:
        """Return the boundaries of packed sequences; raises if other arguments do not fit them."""
        boundaries = boundaries_of(params)
        if query.dim() != 3:
            raise ValueError(
                f"packed_seq_params is given with queries of shape {list(query.shape)}; give [tokens, heads, head size]"
            )
        if attention_mask is not None:
            raise ValueError("attention_mask is given with packed sequences, whose boundaries replace it; pass None")
        if params.cp_group is not None or params.local_cp_size is not None:
            raise ValueError(
                "packed_seq_params has its own context-parallel group, but the torch backend uses one group for all "
                "batches; leave out cp_group and local_cp_size"
            )
        group = ranks_that_share(boundaries, self.cp_group)
        boundaries.check_row(query.size(0) * (1 if group is None else group.size()))
        return boundaries


class _CompleteSharedGradient(torch.autograd.Function):
    """Returns keys unchanged; in backward sums the gradient of their shared part over all heads of all ranks.

    Multi-latent attention rotates one key head that all heads share, also across tensor-parallel ranks. Megatron's
    local layers leave its gradient as a partial sum on each rank, and so do its TransformerEngine layers without
    sequence parallelism.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
        """Return keys, [s, b, h / tp, d], whose last ``width`` columns are one head, repeated."""
        ctx.width, ctx.group = width, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Give the whole sum to the first head and zero to the others, because Megatron then adds the heads up."""
        gradient = gradients[0].clone()
        shared = gradient[..., -ctx.width :].sum(dim=-2)
        dist.all_reduce(shared, group=ctx.group)
        gradient[..., -ctx.width :] = 0
        gradient[..., 0, -ctx.width :] = shared
        return gradient, None, None


@functools.cache
def completed(attention: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``TEDotProductAttention`` that corrects two omissions.

    TransformerEngine does not initialise learned sinks, so a run begins with whatever was in that memory; here they
    begin at 0, as in :class:`TorchAttention`. Without sequence parallelism Megatron also leaves the gradient of the
    shared rotated key as a partial sum on each tensor-parallel rank.

    Source: ``DotProductAttention.__init__`` of TransformerEngine (2.11), and ``get_query_key_value_tensors``
    (megatron.core.transformer.multi_latent_attention, 0.16.1 and 0.19.2), which gathers and sums the rotated key only
    with sequence parallelism.
    """

    class Completed(attention):  # type: ignore[misc, valid-type]
        cache: "TokenCache | None" = None  # lent to it for generation

        def __init__(
            self,
            config: TransformerConfig,
            layer_number: int,
            *args: Any,
            softmax_scale: float | None = None,
            k_channels: int | None = None,
            pg_collection: ProcessGroupCollection | None = None,
            **kwargs: Any,
        ) -> None:
            more = {"softmax_scale": softmax_scale, "k_channels": k_channels, "pg_collection": pg_collection}
            super().__init__(config, layer_number, *args, **more, **kwargs)
            scale = 1 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
            back, _ = _window_of_layer(config, max(1, layer_number))
            self.of_next = Reach(None if back < 0 else back, 0), Softmax(scale)
            if isinstance(self.softmax_offset, nn.Parameter):
                nn.init.zeros_(self.softmax_offset)
            self.shared_key_group = None if config.sequence_parallel else _shared_key_group(config, pg_collection)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            """Compute attention; ``key`` is [s / cp, b, groups / tp, d], packed [t / cp, groups / tp, d]."""
            if self.shared_key_group is not None:
                width = self.config.qk_pos_emb_head_dim
                key = _CompleteSharedGradient.apply(key, width, self.shared_key_group)  # type: ignore[no-untyped-call]
            if self.cache is not None:
                if not self.cache.is_prompt:
                    return self.cache.attend(self, query, key, value, *self.of_next, self.softmax_offset)
                self.cache.keep(self, key, value)
            return super().forward(query, key, value, *args, **kwargs)

    return Completed


def _sinks(config: TransformerConfig) -> Tensor | None:
    """Return the sinks of this rank's heads, [h / tp], which begin at 0, or None for a plain softmax.

    Source: ``DotProductAttention.__init__`` (megatron.core.transformer.dot_product_attention, 0.16.1 and 0.19.2).
    """
    if config.softmax_type == "vanilla":
        return None
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    sinks = torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
    if config.softmax_type == "off-by-one":
        return sinks  # exp(0) = 1 is added to the denominator
    return nn.Parameter(sinks)


def _window_of_layer(config: TransformerConfig, layer_number: int) -> tuple[int, int]:
    """Return how many tokens a layer sees back and ahead; -1 for no limit, as in Megatron and TransformerEngine."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return -1, -1
    back, ahead = config.window_size
    return back, ahead


def _context_parallel_group(
    config: TransformerConfig, pg_collection: ProcessGroupCollection | None
) -> dist.ProcessGroup | None:
    """Return the context-parallel group, or None if it has only one rank."""
    if config.context_parallel_size == 1:
        return None
    group: dist.ProcessGroup
    group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
    return group


def _shared_key_group(
    config: TransformerConfig, pg_collection: ProcessGroupCollection | None
) -> dist.ProcessGroup | None:
    """Return the ranks that share multi-latent attention's rotated key, or None if no other rank has it."""
    if not config.multi_latent_attention or config.tensor_model_parallel_size == 1:
        return None
    group: dist.ProcessGroup
    group = parallel_state.get_tensor_model_parallel_group() if pg_collection is None else pg_collection.tp
    return group


def over_whole_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    offsets: tuple[int, ...],
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute attention of this rank's queries over the keys of whole sequences; collective.

    Shapes: query [s / cp, b, h, d], key [s / cp, b, groups, d], value [s / cp, b, groups, d_v] with ``d_v <= d``,
    result [s / cp, b, h, d_v]. ``attend`` gets the whole keys and values in sequence order, the values padded to d
    columns. ``offsets`` is where packed sequences begin, padding included, and (0, s) for one sequence. Raises
    ValueError if the ranks' shares do not make up these sequences.
    """
    # Autograd would keep the gathered tensor until backward: on each rank, for each layer, as much as without context
    # parallelism. So a rank keeps its share and gathers again in backward, as TransformerEngine does: _GatherAgain,
    # which backward reaches first, gathers, and _Gather drops the tensor. Both run even on a rank whose queries are all
    # padding, so that every rank takes part in every collective.
    check_packed_offsets(offsets, key.size(0) * group.size(), group.size())
    share = torch.cat((key, value), dim=-1)
    width = key.size(-1)
    whole = _Whole(group, *token_orders(offsets, group.size(), share.device), 2 * width)
    gathered: Tensor = _Gather.apply(share, whole)  # type: ignore[no-untyped-call]
    with made_again(gathered, whole.gathered_again) if gathered.requires_grad else contextlib.nullcontext():
        context = attend(query, gathered[..., :width], gathered[..., width:])
    if gathered.requires_grad:
        context = _GatherAgain.apply(context, gathered, share, whole)  # type: ignore[no-untyped-call]
    return context[..., : value.size(-1)]


class _Whole:
    """Gathers shares, in forward and again in backward.

    ``order`` and ``positions`` come from :func:`token_orders`. ``width`` is the gathered tensor's number of columns;
    columns that the shares lack are zero.
    """

    def __init__(self, group: dist.ProcessGroup, order: Tensor, positions: Tensor, width: int) -> None:
        self.group, self.positions = group, positions
        self.again: Tensor | None = None
        self._order, self._width = order, width

    def gather(self, share: Tensor) -> Tensor:
        """Return whole sequences, [s, b, groups, width], in order, from a share [s / cp, b, groups, d + d_v]."""
        with torch.no_grad():
            shares = tensor_parallel.gather_from_sequence_parallel_region(share, group=self.group)
            whole = shares.index_select(0, self._order)
            missing = self._width - share.size(-1)
            return functional.pad(whole, (0, missing)) if missing > 0 else whole

    def gathered_again(self) -> Tensor:
        """Return what backward has gathered."""
        assert self.again is not None
        return self.again


class _Gather(torch.autograd.Function):
    """Gathers the shares of all ranks; in backward sums their gradients and gives each rank its own."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, whole: _Whole) -> Tensor:
        ctx.whole, ctx.width = whole, share.size(-1)
        return whole.gather(share)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.whole.again = None
        gradient = gradients[0][..., : ctx.width].index_select(0, ctx.whole.positions)
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(gradient, group=ctx.whole.group), None


class _GatherAgain(torch.autograd.Function):
    """Returns the output unchanged; in backward gathers again, for the layers before it."""

    @staticmethod
    def forward(ctx: Any, context: Tensor, gathered: Tensor, share: Tensor, whole: _Whole) -> Tensor:
        """Return ``context``; the gathered tensor is an input so that backward reaches ``_Gather`` after this node."""
        ctx.whole = whole
        ctx.save_for_backward(share)
        return context.view_as(context)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.whole.again = ctx.whole.gather(ctx.saved_tensors[0])
        return gradients[0], None, None, None


@functools.lru_cache(maxsize=2)
def token_orders(offsets: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's index among the joined shares of the ranks, and each joined token's position; both [s]."""
    with torch.inference_mode(False):  # made in validation, they may be kept for backward in training
        # One sequence of 8 tokens on 2 ranks: the joined shares hold positions 0 1 6 7 | 2 3 4 5. So token 2 is at
        # index 4 of them (order = 0 1 4 5 6 7 2 3), and index 2 is token 6 (positions = 0 1 6 7 2 3 4 5).
        boundaries = torch.tensor(offsets).to(device, non_blocking=True)
        positions = [packed_positions(boundaries, offsets[-1], rank, size) for rank in range(size)]
        return packed_order(boundaries, offsets[-1], size), torch.cat(positions)
