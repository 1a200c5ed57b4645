# SPDX-License-Identifier: Apache-2.0
"""Keys and values of whole sequences under context parallelism: gathered when needed, not kept until backward.

A rank has the queries of its own tokens, which read the keys of all ranks. So keys and values are gathered over the
context-parallel ranks in one collective, and put in the order of the sequence. Autograd would keep them until backward:
on each rank, for each layer, as much as without context parallelism. Here a rank keeps only its own share and gathers
the rest again when backward reaches the layer, as TransformerEngine does.

``core_attention.py`` calls :func:`over_whole_sequences`. It puts two nodes of the autograd graph around the attention.
The node after it, which backward reaches first, gathers again. The node before it drops the gathered tensor and gives
each rank the gradients of its own tokens, summed over the ranks that read them. Both run on every rank that has a
query, even if all its queries are padding, so that every rank takes part in every collective.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lightning_mcore.parallel.context import check_packed_offsets, packed_order, packed_positions


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
        query: [s / cp, b, h, d].
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
    whole = _Whole(group, *_orders(offsets, group.size(), share.device), 2 * width)
    gathered: Tensor = _Gather.apply(share, whole)  # type: ignore[no-untyped-call]
    with whole.kept_elsewhere(gathered):
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

    def kept_elsewhere(self, gathered: Tensor) -> AbstractContextManager[None]:
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
def _orders(offsets: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``order`` and ``positions`` of :class:`_Whole`, [s] int64 each."""
    with torch.inference_mode(False):  # made in validation, they may be kept for backward in training
        boundaries = torch.tensor(offsets).to(device, non_blocking=True)
        positions = [packed_positions(boundaries, offsets[-1], rank, size) for rank in range(size)]
        return packed_order(boundaries, offsets[-1], size), torch.cat(positions)
