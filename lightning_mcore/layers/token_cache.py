# SPDX-License-Identifier: Apache-2.0
"""What a model remembers of earlier tokens, so that only the next token runs through its layers.

A prompt runs as in validation, also with context parallelism. Meanwhile, each attention layer stores its keys and
values, and each recurrent layer its state. After that, every call has one token for each row, and all context-parallel
ranks compute it. A rank stores the keys of its share of the prompt, and of every ``context_parallel_size``-th new
token. It attends only to these, and the ranks join their softmaxes, so no keys are sent. On two ranks, a prompt of 10
tokens is padded to 12 places, 6 on each rank. The ranks store the keys of these tokens, of the prompt and new ones::

    rank 0   0 1 2 9 (not the padding)      10 12 ...
    rank 1   3 4 5 6 7 8                     11 13 ...

Rows begin at position 0 and may have different lengths. New tokens do not see the padding at the end of a shorter row:
their positions follow its last token.

:class:`TokenCache` is lent to the layers by :meth:`~TokenCache.attached`. The layers are those that have a ``cache``;
Megatron's rotary embeddings give the angles of the next token by a hook.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from lightning_mcore.layers.attention import Reach, Softmax, attend_once
from lightning_mcore.layers.direct_linear import direct_products
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.multimodal_rotary import MultimodalRotary
from lightning_mcore.layers.padded_rows import PaddedRows
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.context import split_for_context_parallel
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.parallel.pipeline import Pipeline

_ROOM = 64  # keys and values grow by at least this many tokens
_NOWHERE = 2**62  # the position of a place without a token: after every query
_LOWEST = torch.finfo(torch.float32).min
_WHOLE = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
_UNFUSED = ("apply_rope_fusion", "fused_single_qkv_rope")  # these kernels rotate all rows by the same angles


class TokenCache:
    """The keys and values of each attention layer, and the states of other layers, for one batch of rows.

    A row of ``longest`` tokens has ended, and what the model still computes for it has no meaning.

    Attributes:
        positions: Of the next token in each row, [b] int64; None while the prompt runs.
        lengths: Tokens of each row of the prompt, [b] int64; None if the rows are full.
    """

    def __init__(self, pipeline: Pipeline, longest: int | None = None) -> None:
        self._longest = longest
        size = pipeline.layout.context_parallel_size
        self.group: dist.ProcessGroup | None = process_group("cp") if size > 1 else None
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank(), size)
        self.positions: Tensor | None = None
        self.lengths: Tensor | None = None
        self._pipeline = pipeline
        self._layers = [layer for chunk in pipeline.chunks for layer in chunk.modules() if hasattr(layer, "cache")]
        self._whole: list[tuple[Any, str]] = []  # where to turn sequence parallelism off for one token
        configs = {id(config): config for layer in pipeline.modules() if (config := getattr(layer, "config", None))}
        self._configs = list(configs.values())
        if pipeline.layout.sequence_parallel:
            owners = (*pipeline.modules(), *self._configs)
            self._whole = [(owner, name) for owner in owners for name in _WHOLE if getattr(owner, name, False) is True]

    @staticmethod
    def fits(pipeline: Pipeline) -> bool:
        """Return whether all layers of a model can use a cache; the same on all ranks."""
        for chunk in pipeline.chunks:
            if not isinstance(chunk, GPTChunk) or isinstance(chunk.rotary_pos_emb, MultimodalRotary):
                return False
            if chunk.config.tp_comm_overlap:  # TransformerEngine's buffers are for rows of one length
                return False
            mixers = (layer.self_attention for layer in chunk.decoder.layers)
            attentions = (getattr(mixer, "core_attention", mixer) for mixer in mixers)
            if not all(hasattr(part, "cache") or not list(part.parameters()) for part in attentions):
                return False
        return True

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Lend the cache to the layers inside the ``with`` block."""
        unfused = [config for config in self._configs if all(hasattr(config, name) for name in _UNFUSED)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(attributes_set([self._pipeline, *self._layers], {"cache": self}))
            stack.enter_context(attributes_set(unfused, dict.fromkeys(_UNFUSED, False)))
            stack.enter_context(direct_products(self._pipeline.modules()))
            for layer in self._pipeline.modules():
                if isinstance(layer, RotaryEmbedding):
                    stack.callback(layer.register_forward_pre_hook(self._ask_for_next, with_kwargs=True).remove)
                    stack.callback(layer.register_forward_hook(self._take_next).remove)
            yield

    # ---- the rows

    def begin(self, rows: PaddedRows, device: torch.device) -> None:
        """Expect a prompt, and forget everything else."""
        count, width = rows.shape
        places = split_for_context_parallel(torch.arange(rows.length)[None], self.rank, self.size)[0]
        own = int((places < width).sum())
        kept = places[: max(1, own)].to(device).expand(count, -1)  # at least one, so that no tensor is empty
        lengths = torch.full((count,), width, device=device) if rows.lengths is None else rows.lengths
        self._lengths, self._new = lengths, 0
        self.lengths = lengths if rows.lengths is not None or rows.length > width else None
        self._is_full = rows.lengths is None
        self._hides = own == 0 or not self._is_full
        self._width = width
        self._places = kept.masked_fill(kept >= lengths[:, None], _NOWHERE)  # positions of this rank's keys, [b, n]
        self._memories: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._states: dict[nn.Module, Any] = {}
        self._next_states: dict[nn.Module, Any] = {}
        self.positions = None

    @contextlib.contextmanager
    def next_token(self) -> Iterator[Tensor]:
        """Yield the positions of the next token, [b] int64, which the model computes inside the ``with`` block."""
        self._states = self._next_states.copy()  # an interleaved pipeline computes a token more than once
        self.positions = self._lengths + self._new
        if self._longest is not None:
            self.positions = self.positions.clamp(max=self._longest - 1)  # learned positions end there
        self._is_own = (self._width + self._new) % self.size == self.rank
        if self._is_own:
            self._places = torch.cat((self._places, self.positions[:, None]), dim=1)
        self._new += 1
        self._seen: dict[Reach, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for owner, name in self._whole:
                stack.callback(setattr, owner, name, True)
                setattr(owner, name, False)
            yield self.positions

    def reorder(self, order: Tensor) -> None:
        """Put the rows into an order, [b] int64, in which rows may be missing or repeated."""
        self._lengths, self._places = self._lengths[order], self._places[order]
        for layer, (keys, values) in self._memories.items():
            self._memories[layer] = keys[order], values[order]
        for layer, state in self._next_states.items():
            self._next_states[layer] = type(state)(*(part[order] for part in state))

    # ---- for the layers

    @property
    def is_prompt(self) -> bool:
        """Whether the model computes a prompt."""
        return self.positions is None

    @property
    def length(self) -> int:
        """Tokens of the longest row, with the next one."""
        length = self._width + self._new
        return length if self._longest is None else min(length, self._longest)

    def keep(self, layer: nn.Module, key: Tensor, value: Tensor) -> None:
        """Keep a rank's share of a prompt's keys, [s / cp, b, groups, d], and values, [s / cp, b, groups, d_v]."""
        self._memories[layer] = self._with_room(key.permute(1, 2, 0, 3)), self._with_room(value.permute(1, 2, 0, 3))

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, reach: Reach, softmax: Softmax, sinks: Any
    ) -> Tensor:
        """Return the attention of the next token to all tokens, [1, b, h * d_v]; collective over the context ranks.

        ``query`` is [1, b, h, d], ``key`` [1, b, groups, d], ``value`` [1, b, groups, d_v]; ``sinks`` [h] or None.
        """
        number = self._places.size(1)
        keys, values = self._memories[layer]
        if self._is_own:
            if number > keys.size(2):
                keys, values = self._memories[layer] = self._with_room(keys), self._with_room(values)
            keys[:, :, number - 1], values[:, :, number - 1] = key[0], value[0]
        keys, values = keys[:, :, :number], values[:, :, :number]
        rows, heads = query.shape[1:3]
        # Query heads that share keys become queries of one head, so that no kernel copies the keys
        query = query.view(rows, keys.size(1), -1, query.size(-1))
        seen = self._visible(reach)
        if self.size == 1 and sinks is None and softmax.is_fused:
            found = attend_once(query, keys, values, softmax, seen)
        else:
            found = self._joined(query, keys, values, seen, softmax, sinks).to(query.dtype)
        return found.reshape(1, rows, heads * value.size(-1))

    def state(self, layer: nn.Module) -> Any:
        """Return a layer's state before the token; None before a prompt."""
        return None if self.is_prompt else self._states[layer]

    def keep_state(self, layer: nn.Module, state: Any) -> None:
        """Keep a layer's state after the token, or the prompt: a named tuple of tensors, [b, ...] each."""
        self._next_states[layer] = state

    # ----

    def _with_room(self, kept: Tensor) -> Tensor:
        """Return a copy of [b, groups, n, d] with room for more tokens after those of this rank."""
        number = min(kept.size(2), self._places.size(1))
        made = kept.new_empty(*kept.shape[:2], number + max(number, _ROOM), kept.size(3))
        made[:, :, :number] = kept[:, :, :number]
        return made

    def _visible(self, reach: Reach) -> Tensor | None:
        """Return which of this rank's keys the next token sees, [b, 1, 1, n] bool; None for all."""
        if not self._hides and reach.back is None and reach.chunk is None:
            return None
        if reach not in self._seen:
            assert self.positions is not None
            places, here = self._places, self.positions[:, None]
            seen = places <= here
            if reach.back is not None:
                seen &= places >= here - reach.back
            if reach.chunk is not None:
                seen &= places // reach.chunk == here // reach.chunk
            self._seen[reach] = seen[:, None, None]
        return self._seen[reach]

    def _joined(
        self, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, softmax: Softmax, sinks: Tensor | None
    ) -> Tensor:
        """Return attention of [b, groups, n, d] to the keys of all ranks, [b, groups, n, d_v] fp32; collective."""
        scores = query.float() @ keys.float().transpose(2, 3) * softmax.scale
        if softmax.cap is not None:
            scores = torch.tanh(scores / softmax.cap) * softmax.cap
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        highest = scores.amax(-1, keepdim=True).clamp(min=_LOWEST)
        weights = (scores - highest).exp()
        own = torch.cat((weights @ values.float(), weights.sum(-1, keepdim=True), highest), dim=-1)[None]
        parts = own
        if self.group is not None:
            parts = own.new_empty(self.size, *own.shape[1:])
            dist.all_gather_into_tensor(parts, own, group=self.group)
        # Each rank has the sum of exp(score - highest) * value, the sum of exp(score - highest), and highest. Two ranks
        # with one score each, 2 and 3, have (v, 1, 2) and (w, 1, 3), which join to (v / e + w) / (1 / e + 1).
        sums, highests = parts[..., :-1], parts[..., -1:]
        top = highests.amax(0)
        if sinks is not None:
            sinks = sinks.float().view(1, *query.shape[1:3], 1)
            top = torch.maximum(top, sinks)
        total = (sums * (highests - top).exp()).sum(0)
        under = total[..., -1:] if sinks is None else total[..., -1:] + (sinks - top).exp()
        return total[..., :-1] / under

    def _ask_for_next(self, rotary: Any, given: Any, named: Any) -> Any:
        """Make a rotary embedding return the angles of the next token, or of all positions if the rows differ."""
        if self.positions is None:
            return given, named
        if self._is_full:
            return (1,), {"offset": self.length - 1, "packed_seq": True}
        # A longer table begins with the same angles, unless they depend on its length
        length = self.length if hasattr(rotary, "stretch") else -(-self.length // 1024) * 1024
        return (length,), {"packed_seq": True}

    def _take_next(self, rotary: Any, given: Any, found: Any) -> Any:
        """Return the angles of the next token of each row, [1, b, 1, channels] fp32; YaRN also returns its scale."""
        if self.positions is None or self._is_full:
            return found
        table, *more = found if isinstance(found, tuple) else (found,)
        angles = table[:, 0].index_select(0, self.positions)[None]
        return (angles, *more) if more else angles
