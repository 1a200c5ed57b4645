# SPDX-License-Identifier: Apache-2.0
"""The core attention of the torch backend: what Megatron's attention layers call between their projections.

Megatron's own ``DotProductAttention`` holds the whole ``[s, s]`` matrix of scores and refuses context parallelism.
TransformerEngine's needs CUDA. :class:`TorchAttention` replaces them in ``spec.gpt_block_spec``, and translates
Megatron's arguments into those of ``attention.py``.

Packed sequences come as one row, with ``PackedSeqParams`` that say where each of them lies (``packed_sequences.py``).
They are computed one by one, so that no memory grows with the square of the row, and no bit of one depends on another.

Under context parallelism a rank holds two slices of each sequence (``parallel/context.py``). Its queries stay on the
rank; the keys and values of all ranks are gathered in one collective, and put in the order of the sequence. Autograd
would keep them until backward: on each rank, for each layer, as much as without context parallelism. Here a rank keeps
only its own share and gathers the rest again when backward reaches the layer, as TransformerEngine does.
:func:`over_whole_sequences` puts two nodes of the autograd graph around the attention. The node after it, which
backward reaches first, gathers again. The node before it drops the gathered tensor and gives each rank the gradients of
its own tokens, summed over the ranks that read them. Both run on every rank that has a query, even if all its queries
are padding, so that every rank takes part in every collective.

Multi-latent attention rotates one key head that all heads share, also those on other tensor-parallel ranks. Megatron's
local layers leave its gradient as a partial sum on each rank, and so do its layers on TransformerEngine without
sequence parallelism; :class:`_CompleteSharedGradient` adds up these sums. :func:`completed` puts it into
TransformerEngine's core attention.

Source: ``DotProductAttention`` (megatron.core.transformer.dot_product_attention, 0.16.1 and 0.19.2).
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

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
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.config.rules.model import check_attention
from lightning_mcore.layers.attention import (
    Reach,
    Softmax,
    attend,
    attend_once,
    packed_runs,
    query_growth,
    sequence_runs,
    visible,
    with_sinks,
)
from lightning_mcore.layers.norms import RotatedHeadNorm
from lightning_mcore.layers.packed_sequences import Boundaries, boundaries_of
from lightning_mcore.parallel.context import check_packed_offsets, packed_order, packed_positions

logger = logging.getLogger(__name__)

_CAUSAL = {AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right}


class TorchAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """Softmax attention with grouped heads, context parallelism and sliding windows, in plain PyTorch.

    Megatron's attention layers construct it, so they decide its signature. It has parameters only for norms after the
    rotation, and for sinks: numbers in the denominator of a softmax, one for each head. Under context parallelism
    autograd keeps copies of the gathered keys and values where there are sinks.

    Args:
        config: Reads ``kv_channels``, ``attention_dropout``, ``window_size``, ``window_attn_skip_freq``,
            ``softmax_type``, ``sequence_parallel`` and ``context_parallel_size``. ``apply_query_key_layer_scaling``
            protects fp16 scores from overflow and cancels out; here scores are fp32, so it has no effect.
        layer_number: Number of the layer in the whole model, from 1.
        attn_mask_type: Which keys a query sees, unless a call says otherwise.
        attention_type: ``"self"`` or ``"cross"``.
        attention_dropout: Probability that a weight is dropped in training; None for the config's.
        softmax_scale: Factor of the scores; None for ``1 / sqrt(head size)``.
        k_channels: Head size of queries and keys if it is not ``kv_channels`` (multi-latent attention).
        v_channels: Head size of values; not used, because the tensors have it.
        cp_comm_type: How TransformerEngine moves keys and values; here they are always gathered.
        pg_collection: Process groups of the model; None for Megatron's global ones.

    Raises:
        ValueError: The config asks for attention that this backend does not support.
    """

    boundaries_on_host = True  # on the device, Megatron's code before attention would wait for it in every layer

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
        self.softmax_scale = 1 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        self.window_size = _window_of_layer(config, self.layer_number)
        check_attention(config, attn_mask_type in _CAUSAL)
        self.cap = architecture_of(config).attention_cap
        self.softmax_offset = _sinks(config)
        self.q_layernorm: RotatedHeadNorm | None = None
        self.k_layernorm: RotatedHeadNorm | None = None
        if architecture_of(config).head_norms == "after_rotation":
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
        """Compute attention of this rank's queries over whole sequences.

        Args:
            query: [s / cp, b, h / tp, d], any float dtype; keys and values have the same.
            key: [s / cp, b, groups / tp, d].
            value: [s / cp, b, groups / tp, d_v].
            attention_mask: Bool, broadcastable to [b, 1, s, s], True where a query must not look. What is hidden by it
                is hidden in addition to what the mask type and the window hide. None under context parallelism.
            attn_mask_type: Overrides the layer's, as Megatron does while it decodes.
            attention_bias: Must be None.
            packed_seq_params: Where packed sequences lie in a row of t tokens. The tensors then have no dimension b:
                query is [t / cp, h / tp, d]. Each sequence sees itself alone, and padding is not seen.

        Returns:
            [s / cp, b, h / tp * d_v] in the dtype of ``query``; for packed sequences [t / cp, h / tp * d_v], zero for
            padding.

        Raises:
            ValueError: Something is given that this layout or backend cannot honour.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
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
        rank, size = (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())
        if boundaries is None:
            offsets: tuple[int, ...] = (0, key.size(0) * size)
            runs = sequence_runs(query.size(0), offsets[-1], rank, size)
        else:
            offsets = boundaries.offsets
            runs = packed_runs(offsets, boundaries.lengths, rank, size)
        growth = architecture_of(self.config).query_growth
        if growth is not None:
            factors = query_growth(runs, growth["beta"], growth["original_max_position_embeddings"], query.device)
            query = query * factors.to(query.dtype)[:, None, None, None]
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
            if self.cp_group is None:
                return over(query, key, value).flatten(2)
            return over_whole_sequences(query, key, value, over, offsets, self.cp_group).flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the parameters for a checkpoint; each tensor-parallel rank has the sinks of its heads."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if isinstance(self.softmax_offset, nn.Parameter):
            own, axes = {"softmax_offset": self.softmax_offset}, {"softmax_offset": 0}
            state |= make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets)
        return state

    def _reach(self, mask_type: AttnMaskType) -> Reach:
        back, ahead = (None if side < 0 else side for side in self.window_size)
        return Reach(back, 0 if mask_type in _CAUSAL else ahead)

    def _dropout_state(self, dropout: float) -> AbstractContextManager[None]:
        """Return the context for dropout: another random stream on each tensor-parallel rank.

        With sequence parallelism the whole block already runs in that stream.
        """
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        fork: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
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
        """Return the boundaries of packed sequences; refuse arguments that do not fit them."""
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
        size = 1 if self.cp_group is None else self.cp_group.size()
        if query.size(0) * size != boundaries.offsets[-1]:
            raise ValueError(
                f"packed sequences of {boundaries.offsets[-1]} tokens, padding included, do not make up a row of "
                f"{query.size(0) * size}; let cu_seqlens_q_padded end with the row"
            )
        return boundaries


class _CompleteSharedGradient(torch.autograd.Function):
    """Returns keys unchanged; in backward sums the gradient of their shared part over all heads of all ranks."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
        """Return keys, [s, b, h / tp, d], whose last ``width`` columns are one head, repeated."""
        ctx.width, ctx.group = width, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Give the whole sum to the first head and zero to the others, because Megatron then adds them up."""
        gradient = gradients[0].clone()
        shared = gradient[..., -ctx.width :].sum(dim=-2)
        dist.all_reduce(shared, group=ctx.group)
        gradient[..., -ctx.width :] = 0
        gradient[..., 0, -ctx.width :] = shared
        return gradient, None, None


@functools.cache
def completed(attention: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of TransformerEngine's core attention that makes up for two omissions.

    TransformerEngine leaves the memory of learned sinks as it is, so that a run begins with whatever was there; here
    they begin at 0, as in :class:`TorchAttention`. And without sequence parallelism Megatron leaves the gradient of the
    rotated key that all heads share as a partial sum on each tensor-parallel rank.

    Args:
        attention: ``TEDotProductAttention``.

    Source: ``DotProductAttention.__init__`` of TransformerEngine (2.11), and ``get_query_key_value_tensors``
    (megatron.core.transformer.multi_latent_attention, 0.16.1 and 0.19.2), which gathers and sums the rotated key only
    with sequence parallelism.
    """

    class Completed(attention):  # type: ignore[misc, valid-type]
        def __init__(
            self,
            config: TransformerConfig,
            *args: Any,
            pg_collection: ProcessGroupCollection | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
            if isinstance(self.softmax_offset, nn.Parameter):
                nn.init.zeros_(self.softmax_offset)
            self.shared_key_group = None if config.sequence_parallel else _shared_key_group(config, pg_collection)

        def forward(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            """Compute attention; ``key`` is [s / cp, b, groups / tp, d], packed [t / cp, groups / tp, d]."""
            if self.shared_key_group is not None:
                width = self.config.qk_pos_emb_head_dim
                key = _CompleteSharedGradient.apply(key, width, self.shared_key_group)  # type: ignore[no-untyped-call]
            return super().forward(query, key, *args, **kwargs)

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
        return sinks
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
    """Return the ranks that share the rotated key of multi-latent attention, or None if no other rank does."""
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

    Args:
        query: [s / cp, b, h, d], any float dtype; keys and values have the same.
        key: [s / cp, b, groups, d].
        value: [s / cp, b, groups, d_v]; ``d_v`` is at most ``d``.
        attend: A function of the query, keys [s, b, groups, d] and values [s, b, groups, d], both in the order of the
            sequence, the values padded with columns of zeros. It returns [s / cp, b, h, d].
        offsets: Where packed sequences begin, padding included, and where the last one ends; (0, s) for one sequence.
        group: The context-parallel ranks.

    Returns:
        [s / cp, b, h, d_v] in the dtype of ``query``.

    Raises:
        ValueError: The shares of the ranks do not make up these sequences.
    """
    check_packed_offsets(offsets, key.size(0) * group.size(), group.size())
    share = torch.cat((key, value), dim=-1)
    width = key.size(-1)
    whole = _Whole(group, *token_orders(offsets, group.size(), share.device), 2 * width)
    gathered: Tensor = _Gather.apply(share, whole)  # type: ignore[no-untyped-call]
    with whole.only_views_kept(gathered):
        context = attend(query, gathered[..., :width], gathered[..., width:])
    if gathered.requires_grad:
        context = _GatherAgain.apply(context, gathered, share, whole)  # type: ignore[no-untyped-call]
    return context[..., : value.size(-1)]


class _Place(NamedTuple):
    """The place of a view in the gathered tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Whole:
    """Gathers shares, and replaces views of the gathered tensor between forward and backward.

    Args:
        group: The context-parallel ranks.
        order: [s] int64, the index of each token of the sequence among the gathered shares.
        positions: [s] int64, the position of each token of the gathered shares in the sequence.
        width: Columns of the gathered tensor; missing columns of the shares are zero.
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

    def only_views_kept(self, gathered: Tensor) -> AbstractContextManager[None]:
        """Return a context in which autograd keeps only the places of views of the gathered tensor."""
        if not gathered.requires_grad:
            return nullcontext()
        address = gathered.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Tensor | _Place:
            if tensor.untyped_storage().data_ptr() != address:
                return tensor
            return _Place(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        return saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, kept: Tensor | _Place) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        assert self.again is not None
        return self.again.as_strided(*kept)


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


@functools.lru_cache(maxsize=2)  # the layers of a microbatch share them; other rows differ
def token_orders(offsets: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where tokens are in the joined shares of the context-parallel ranks, and which tokens those are.

    Args:
        offsets: Where packed sequences begin, padding included, and where the last one ends; (0, s) for one sequence.
        size: The number of ranks.
        device: Of the result.

    Returns:
        The index of each token of the sequence among the shares, and the position in the sequence of each token of the
        shares; [s] int64 each.
    """
    with torch.inference_mode(False):  # made in validation, they may be kept for backward in training
        boundaries = torch.tensor(offsets).to(device, non_blocking=True)
        positions = [packed_positions(boundaries, offsets[-1], rank, size) for rank in range(size)]
        return packed_order(boundaries, offsets[-1], size), torch.cat(positions)
