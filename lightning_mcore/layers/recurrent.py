# SPDX-License-Identifier: Apache-2.0
"""The common parts of layers with a memory of fixed size: ``delta_net.py``, ``kimi_delta.py`` and ``mamba.py``.

They replace attention. A first projection computes the inputs of all heads, a short causal convolution mixes some of
them with earlier tokens, each head's memory is updated and read token by token, and a last projection follows. Weights
are ordered by head (:attr:`RecurrentLayer.heads`), so that tensor-parallel ranks can split the heads. Context-parallel
ranks split them too, because each token needs all tokens before it. Packed sequences share no state. In generation, a
:class:`~lightning_mcore.layers.token_cache.TokenCache` keeps the memories. :func:`kernels_for` finds kernels of other
packages for the memories.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_mcore.layers.core_attention import token_orders
from lightning_mcore.layers.packed_sequences import boundaries_of

if TYPE_CHECKING:
    from lightning_mcore.layers.token_cache import TokenCache

CHUNK = 64
"""Tokens that a layer computes at once; memories pass from one chunk to the next."""


class RecurrentState(NamedTuple):
    """A layer's state after the tokens it has processed, for generation."""

    inputs: Tensor  # [b, channels, kernel - 1], the convolution's last inputs, in its dtype
    memory: Tensor  # [b, heads / tp, ...] fp32


class RecurrentLayer(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """A layer with memories in place of attention, with the constructor arguments that Megatron gives to attention."""

    kind: str  # what error messages call it
    cache: "TokenCache | None" = None  # lent to it for generation

    def __init__(self, config: TransformerConfig, layer_number: int, heads: int, widths: tuple[int, int]) -> None:
        """Build the projections for ``heads`` heads in all, whose inputs and outputs have these widths."""
        super().__init__(config=config)
        self.layer_number = layer_number
        selected = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
        self.is_recomputed = "core_attn" in selected
        self.tp_group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self.cp_group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        self.heads = heads // self.tp_group.size()
        common = {"config": config, "bias": False, "tp_group": self.tp_group}
        self.linear_in = ColumnParallelLinear(
            config.hidden_size,
            heads * widths[0],
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self._build(config)
        self.linear_out = RowParallelLinear(
            heads * widths[1],
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )

    def _build(self, config: TransformerConfig) -> None:
        """Build what is between the projections: ``conv1d``, and a subclass's own."""
        raise NotImplementedError

    def _mix(
        self, mixed: Tensor, lengths: Sequence[int], state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """Compute sequences of these lengths, [s, b, heads, c] as the first projection gives them.

        A state is of what came before, and only given if there is one sequence.
        """
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output, shaped like ``hidden_states``, and None for its bias.

        ``hidden_states`` is [s / cp / tp, b, h], packed [t / cp / tp, 1, h]; / tp only with sequence parallelism.
        Raises ValueError if there is an attention mask or one of Megatron's inference contexts.
        """
        if attention_mask is not None:
            raise ValueError(f"a {self.kind} has no scores that attention_mask could mask; pass None")
        if inference_context is not None:
            raise ValueError(
                f"inference_context cannot store the memory of a {self.kind}; pass None, and generate with MCoreGPT or"
                " hf_model()"
            )
        mixed = self._project(hidden_states)
        ranks = self.cp_group.size()
        if self.cache is not None and not self.cache.is_prompt:
            if ranks > 1:
                mixed = mixed.chunk(ranks, dim=2)[self.cp_group.rank()]
            output = self._next(mixed, self.cache)
            if ranks > 1:
                output = self._all_heads(output.repeat(ranks, 1, 1, 1))
            next_token: tuple[Tensor, Tensor | None] = self.linear_out(output.flatten(2))
            return next_token
        length = mixed.size(0) * ranks
        offsets = (0, length) if packed_seq_params is None else boundaries_of(packed_seq_params).offsets
        # Each token needs all tokens before it, so context-parallel ranks exchange: whole sequences of some heads here,
        # and after the norm all heads of a rank's own tokens again.
        if ranks > 1:
            order, positions = token_orders(offsets, ranks, mixed.device)
            mixed = self._whole_sequences(mixed).index_select(0, order)
        if self.cache is None:
            lengths = [end - start for start, end in itertools.pairwise(offsets) if end > start]
            output, _ = self._mix(mixed, lengths, None)
        else:
            output = self._prompt(mixed, self.cache)
        if ranks > 1:
            output = self._all_heads(output.index_select(0, positions))
        projected: tuple[Tensor, Tensor | None] = self.linear_out(output.flatten(2))
        return projected

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Return the inputs of this rank's heads, [s / cp, b, heads / tp, c], from [s / cp / tp, b, h]."""
        mixed, _ = self.linear_in(hidden_states)
        return torch.unflatten(mixed, -1, (self.heads, -1))

    def _whole_sequences(self, mixed: Tensor) -> Tensor:
        """Return [s, b, heads / tp / cp, c] from [s / cp, b, heads / tp, c], the ranks' shares one after another."""
        parts = torch.stack(mixed.chunk(self.cp_group.size(), dim=2))
        whole: Tensor = tensor_parallel.all_to_all(self.cp_group, parts).flatten(0, 1)
        return whole

    def _all_heads(self, output: Tensor) -> Tensor:
        """Return [s / cp, b, heads / tp, c] from [s, b, heads / tp / cp, c], whose tokens are in share order."""
        parts = torch.unflatten(output, 0, (self.cp_group.size(), -1))
        return torch.cat(tensor_parallel.all_to_all(self.cp_group, parts).unbind(), dim=2)

    def _next(self, mixed: Tensor, cache: "TokenCache") -> Tensor:
        """Return the output for the next token, [1, b, heads / tp / cp, c], and keep the layer's state after it."""
        output, state = self._mix(mixed, [1], cache.state(self))
        cache.keep_state(self, state)
        return output

    def _prompt(self, mixed: Tensor, cache: "TokenCache") -> Tensor:
        """Return the output for prompts, [s, b, heads / tp / cp, c], and keep the state after the last of each row."""
        if cache.lengths is None:
            output, state = self._mix(mixed, [mixed.size(0)], None)
            cache.keep_state(self, state)
            return output
        # The row 7 8 9 . . becomes . . 7 8 9, where padding comes before the memory has begun
        places = torch.arange(mixed.size(0), device=mixed.device)[:, None]
        missing = mixed.size(0) - cache.lengths
        rows = torch.arange(mixed.size(1), device=mixed.device)
        turned = mixed[(places - missing) % mixed.size(0), rows]
        output, state = self._mix(self._hide(turned, (places < missing)[..., None, None]), [mixed.size(0)], None)
        cache.keep_state(self, state)
        return output[(places + missing) % mixed.size(0), rows]

    def _hide(self, mixed: Tensor, padding: Tensor) -> Tensor:
        """Return [n, b, heads / tp, c] in which padding, [n, b, 1, 1] bool, does not change the memory."""
        return mixed.masked_fill(padding, 0.0)

    def _convolve(
        self, inputs: Tensor, lengths: Sequence[int], state: RecurrentState | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mix each channel of [s, b, heads, c] with its values at earlier tokens of its sequence.

        Also returns the last inputs, [b, heads * c, kernel - 1].
        """
        weight = self.conv1d(self.cp_group)
        channels = inputs.flatten(2).permute(1, 2, 0).to(weight.dtype)
        before = weight.size(-1) - 1
        places = None
        if state is not None:
            channels = torch.cat((state.inputs, channels), dim=-1)
        elif len(lengths) == 1:
            channels = functional.pad(channels, (before, 0))
        else:
            # Lengths 2 and 1 with a kernel of 3: the tokens are at 2 3 and 6, and zeros before them at 0 1 and 4 5.
            order = torch.repeat_interleave(torch.arange(1, 1 + len(lengths)), torch.tensor(lengths))
            places = (torch.arange(len(order)) + before * order).to(channels.device)
            apart = channels.new_zeros(*channels.shape[:2], len(order) + before * len(lengths))
            channels = apart.index_copy(-1, places, channels)
        mixed = functional.conv1d(channels, weight, bias, groups=len(weight))
        mixed = functional.silu(mixed if places is None else mixed.index_select(-1, places - before))
        last = channels[..., channels.size(-1) - before :]
        return mixed.permute(2, 0, 1).reshape(inputs.shape).to(inputs.dtype), last


class OfHeads(nn.Module):
    """Per-head weights, split over the tensor-parallel ranks along ``axis``, which counts heads or their channels.

    ``whole`` has initial values for all heads, [n, ...].
    """

    takes_fp32 = True

    def __init__(self, group: dist.ProcessGroup, whole: Tensor, config: TransformerConfig, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis
        own = whole.chunk(group.size(), axis)[group.rank()]
        self.weight = nn.Parameter(own.to(config.params_dtype, copy=True))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=axis, stride=1)

    def forward(self, cp_group: dist.ProcessGroup) -> Tensor:
        """Return the weights of this context-parallel rank's heads, [n / tp / cp, ...].

        A call, because ``overlap_param_gather`` gathers weights when their module is called.
        """
        return self.weight.chunk(cp_group.size(), self.axis)[cp_group.rank()]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the weights for a checkpoint."""
        own = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, {"weight": self.axis}, sharded_offsets)
        return found


def of_sequences(
    rule: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor],
    lengths: Sequence[int],
    state: RecurrentState | None,
    is_recomputed: bool,
) -> tuple[Tensor, Tensor]:
    """Return what a rule reads from the memory of each sequence, and the last memory.

    ``rule`` takes the tokens of a sequence, tensors [b, heads, s, ...], and the memory before them. Backward computes
    it again if so asked.
    """
    if is_recomputed and state is None:
        # Megatron's checkpoint may change the gradients' layout, and with it the rounding of sums.
        rule = functools.partial(checkpoint, rule, use_reentrant=False, preserve_rng_state=False)
    memory = None if state is None else state.memory
    sequences = zip(*(torch.split(part, list(lengths), dim=2) for part in tokens), strict=True)
    found = [rule(*sequence, memory) for sequence in sequences]
    return found[0] if len(found) == 1 else (torch.cat([read for read, _ in found], dim=2), found[-1][1])


def kernels_for(value: Tensor, dtype: torch.dtype, module: str, *names: str) -> tuple[Callable[..., Any], ...] | None:
    """Return functions of another package's module; None if it is not installed, or cannot be used.

    They need CUDA. In fp32 their products would be in TF32. The tensors of a rehearsal, a class of their own, have no
    values that they could read.
    """
    is_usable = value.device.type == "cuda" and type(value) is Tensor and dtype in (torch.bfloat16, torch.float16)
    return _installed(module, names) if is_usable else None


@functools.cache
def _installed(module: str, names: tuple[str, ...]) -> tuple[Callable[..., Any], ...] | None:
    """Return functions of a module; None if it cannot be imported."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return tuple(getattr(found, name) for name in names)


def in_chunks(*parts: Tensor, can_be_halved: bool = False) -> list[Tensor]:
    """Return tensors of a sequence, [b, heads, s, ...], as chunks, [b, heads, n, q, ...], padded with zeros at the end.

    Sequences of up to 64 tokens are one chunk of their own length, or of the next power of two if it ``can_be_halved``;
    150 tokens become three chunks of 64, and 42 zeros.
    """
    length = parts[0].size(2)
    size = min(CHUNK, 1 << (length - 1).bit_length() if can_be_halved else length)
    missing = -length % size
    padded = [functional.pad(part, (0, 0) * (part.dim() - 3) + (0, missing)) if missing else part for part in parts]
    return [torch.unflatten(part, 2, (-1, size)) for part in padded]


def later_tokens(chunks: Tensor) -> Tensor:
    """Return which tokens of a chunk come after each, [q, q] bool; ``chunks`` is [b, heads, n, q, ...]."""
    size = chunks.size(3)
    return torch.ones(size, size, dtype=torch.bool, device=chunks.device).triu(1)
