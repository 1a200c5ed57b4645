# SPDX-License-Identifier: Apache-2.0
"""The gated delta net of Qwen3-Next and Qwen3.5: attention with a memory of fixed size, in plain PyTorch.

Each value head has a memory, a matrix from keys to values. At each token it decays, its value for the token's key moves
towards the token's value, and the token's query reads it. A short causal convolution mixes queries, keys and values
with earlier tokens; a norm and a gate follow. The memory is fp32, as in transformers, and recomputing ``core_attn``
recomputes it. ``spec.gpt_block_spec`` puts :class:`GatedDeltaNet` in place of attention; megatron-core's module needs
Triton, CUDA and whole unpacked sequences on each rank.

Weights are ordered by key head, each with its value heads, so tensor-parallel ranks share heads. Packed sequences are
computed one by one, and nothing passes from one to the next.

Source: ``GatedDeltaNet`` (megatron.core.ssm.gated_delta_net, 0.16.1) for the module's place in a layer, and the modules
of ``qwen3_next`` (transformers 5.23) for the numbers.
"""

import itertools
from typing import Any, NamedTuple

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

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.autograd import scale_gradient
from lightning_mcore.layers.core_attention import token_orders
from lightning_mcore.layers.packed_sequences import boundaries_of
from lightning_mcore.parallel.groups import generator_of

_CHUNK = 64
_SHORTEST = 1e-6
_LARGEST_DECAY = 16.0  # at the start of training, in units of the step
_SMALLEST_DECAY = 0.01
_STATES = "delta_net_states"


class DeltaNetState(NamedTuple):
    """What a layer keeps of the tokens that it has processed, for generation."""

    inputs: Tensor  # [b, channels, linear_conv_kernel_dim - 1], the convolution's last inputs, in its dtype
    memory: Tensor  # [b, value heads / tp, d, d_v] fp32


def states_of(context: Any) -> dict[int, DeltaNetState]:
    """Return the states in Megatron's inference context, by layer number."""
    states: dict[int, DeltaNetState] = vars(context).setdefault(_STATES, {})
    return states


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """A gated delta net in place of attention, with the constructor arguments that Megatron gives to attention."""

    def __init__(self, config: TransformerConfig, layer_number: int, **unused: Any) -> None:
        super().__init__(config=config)
        sizes = architecture_of(config).delta_net
        assert sizes is not None
        self.layer_number = layer_number
        selected = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
        self.is_recomputed = "core_attn" in selected
        tp_group = parallel_state.get_tensor_model_parallel_group()
        self.cp_group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        self.key_size, self.value_size = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
        heads, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
        self.heads = heads // tp_group.size()
        self.values_per_head = values // heads
        self.mixed_width = 2 * self.key_size + self.values_per_head * self.value_size
        width = self.mixed_width + self.values_per_head * (self.value_size + 2)
        common = {"config": config, "bias": False, "skip_bias_add": False, "tp_group": tp_group}
        self.linear_in = ColumnParallelLinear(
            config.hidden_size, heads * width, init_method=config.init_method, gather_output=False, **common
        )
        generator = generator_of(f"delta net of layer {layer_number}")
        kernel = sizes["linear_conv_kernel_dim"]
        convolution = torch.empty(heads * self.mixed_width, 1, kernel)
        convolution.uniform_(-(kernel**-0.5), kernel**-0.5, generator=generator)  # as in torch
        decay = torch.empty(values).uniform_(_SMALLEST_DECAY, _LARGEST_DECAY, generator=generator)
        self.conv1d = _OfHeads(tp_group, convolution, config)
        self.A_log = _OfHeads(tp_group, decay.log(), config)
        self.dt_bias = _OfHeads(tp_group, torch.ones(values), config)
        self.out_norm = _GatedNorm(config, self.value_size)
        self.linear_out = RowParallelLinear(
            values * self.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **{**common, "skip_bias_add": True},
        )

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
        ``attention_mask`` is [b, 1, queries, keys] bool, True for padding on the left; only with an inference context,
        else ValueError.
        """
        if attention_mask is not None and inference_context is None:
            raise ValueError("attention_mask is given to a gated delta net, which has no scores to mask; pass None")
        mixed, _ = self.linear_in(hidden_states)
        mixed = mixed.view(*mixed.shape[:2], self.heads, -1)
        ranks = self.cp_group.size()
        length = mixed.size(0) * ranks
        offsets = (0, length) if packed_seq_params is None else boundaries_of(packed_seq_params).offsets
        # Each token needs all tokens before it, so context-parallel ranks exchange: whole sequences of some heads here,
        # and after the norm all heads of a rank's own tokens again.
        if ranks > 1:
            order, positions = token_orders(offsets, ranks, mixed.device)
            mixed = self._whole_sequences(mixed).index_select(0, order)
        if inference_context is None:
            lengths = [end - start for start, end in itertools.pairwise(offsets) if end > start]
            found = [self._mix(sequence, None)[0] for sequence in torch.split(mixed, lengths)]
            output = found[0] if len(found) == 1 else torch.cat(found)
        else:
            output = self._continue(mixed, attention_mask, inference_context)
        if ranks > 1:
            output = self._all_heads(output.index_select(0, positions))
        projected: tuple[Tensor, Tensor | None] = self.linear_out(output.flatten(2))
        return projected

    def _whole_sequences(self, mixed: Tensor) -> Tensor:
        """Return [s, b, heads / tp / cp, c] from [s / cp, b, heads / tp, c], the ranks' shares one after another."""
        parts = torch.stack(mixed.chunk(self.cp_group.size(), dim=2))
        whole: Tensor = tensor_parallel.all_to_all(self.cp_group, parts).flatten(0, 1)
        return whole

    def _all_heads(self, output: Tensor) -> Tensor:
        """Return [s / cp, b, heads / tp, c] from [s, b, heads / tp / cp, c], whose tokens are in share order."""
        parts = torch.unflatten(output, 0, (self.cp_group.size(), -1))
        return torch.cat(tensor_parallel.all_to_all(self.cp_group, parts).unbind(), dim=2)

    def _continue(self, mixed: Tensor, attention_mask: Tensor | None, context: Any) -> Tensor:
        """Return the output for the next tokens, [n, b, heads / tp, c], and update the layer's state."""
        if attention_mask is not None:
            first = context.sequence_len_offset
            padding = attention_mask[:, 0, -1, first : first + mixed.size(0)]
            mixed = mixed.masked_fill(padding.t()[..., None, None], 0.0)
        states = states_of(context)
        output, states[self.layer_number] = self._mix(mixed, states.get(self.layer_number))
        return output

    def _mix(self, mixed: Tensor, state: DeltaNetState | None) -> tuple[Tensor, DeltaNetState]:
        """Compute sequences that follow ``state``: [s, b, heads, c] to [s, b, heads, values_per_head * value_size]."""
        values, gates = self.values_per_head, self.values_per_head * self.value_size
        inputs, gate, beta, step = torch.split(mixed, [self.mixed_width, gates, values, values], dim=-1)
        inputs, last = self._convolve(inputs, None if state is None else state.inputs)
        query, key, value = (
            part.permute(1, 2, 0, 3).float()
            for part in torch.split(inputs, [self.key_size, self.key_size, gates], dim=-1)
        )
        query, key = (_normalised(part).repeat_interleave(values, 1) for part in (query, key))
        value = torch.unflatten(value, -1, (values, -1)).transpose(2, 3).flatten(1, 2)  # [b, value heads, s, d]
        beta, step = (part.flatten(2).permute(1, 2, 0) for part in (beta, step))  # [b, value heads, s]
        rate, bias = self.A_log(self.cp_group).float().exp(), self.dt_bias(self.cp_group)
        decay = -rate[:, None] * functional.softplus(step.float() + bias[:, None])
        tokens = (query * self.key_size**-0.5, key, value, decay, beta.sigmoid().float())
        if self.is_recomputed and state is None:
            # Megatron's checkpoint may change the gradients' layout, and with it the rounding of sums.
            output, memory = checkpoint(gated_delta_rule, *tokens, use_reentrant=False, preserve_rng_state=False)
        else:
            output, memory = gated_delta_rule(*tokens, None if state is None else state.memory)
        output = torch.unflatten(output.permute(2, 0, 1, 3).to(mixed.dtype), 2, (-1, values))
        gated = self.out_norm(output, torch.unflatten(gate, -1, (values, -1)))
        return gated.flatten(3), DeltaNetState(last, memory)

    def _convolve(self, inputs: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mix each channel of [s, b, heads, c] with its values at earlier tokens; also return the last inputs.

        ``last`` is [b, heads * c, linear_conv_kernel_dim - 1], the inputs before; None for none.
        """
        weight = self.conv1d(self.cp_group)
        channels = inputs.flatten(2).permute(1, 2, 0).to(weight.dtype)
        before = weight.size(-1) - 1
        channels = functional.pad(channels, (before, 0)) if last is None else torch.cat((last, channels), dim=-1)
        mixed = functional.silu(functional.conv1d(channels, weight, groups=len(weight)))
        last = channels[..., channels.size(-1) - before :]
        return mixed.permute(2, 0, 1).reshape(inputs.shape).to(inputs.dtype), last


class _OfHeads(nn.Module):
    """Per-head weights, split over the tensor-parallel ranks; ``whole`` has initial values for all heads, [n, ...]."""

    takes_fp32 = True

    def __init__(self, group: dist.ProcessGroup, whole: Tensor, config: TransformerConfig) -> None:
        super().__init__()
        own = whole.chunk(group.size())[group.rank()]
        self.weight = nn.Parameter(own.to(config.params_dtype, copy=True))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, cp_group: dist.ProcessGroup) -> Tensor:
        """Return the weights of this context-parallel rank's heads, [n / tp / cp, ...].

        A call, because ``overlap_param_gather`` gathers weights when their module is called.
        """
        return self.weight.chunk(cp_group.size())[cp_group.rank()]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the weights for a checkpoint."""
        own = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, {"weight": 0}, sharded_offsets)
        return found


class _GatedNorm(nn.Module):
    """RMSNorm of each value head, with the same weights for all heads, and a gate."""

    takes_fp32 = True

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps, self.ranks = config.layernorm_epsilon, config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        # Gradients are partial sums over a rank's heads. Megatron averages them because of this mark, so forward
        # multiplies them by the number of ranks.
        self.weight.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    def forward(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Return normalised heads, [..., size], times the SiLU of the gate, in the dtype of the heads."""
        values = heads.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        weight = scale_gradient(self.weight, self.ranks)
        return (weight * values.to(heads.dtype) * functional.silu(gate.float())).to(heads.dtype)


def _normalised(heads: Tensor) -> Tensor:
    """Return queries or keys, [..., d] fp32, scaled to length 1."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _SHORTEST)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write a sequence's tokens into a memory one after another, and read it after each; all tensors fp32.

    ``query`` [b, h, s, d] reads, ``key`` [b, h, s, d] (length 1) is where a token writes, ``value`` [b, h, s, d_v] what
    it writes. ``decay`` [b, h, s] is the logarithm of what a token leaves of the memory before it writes, at most 0.
    ``beta`` [b, h, s], 0 to 1, is how far the memory moves towards the value. ``memory`` is [b, h, d, d_v], None for
    zeros. Returns what is read, [b, h, s, d_v], and the memory after the last token.
    """
    # With d = d_v = 1, keys and queries 1, and beta 0.5: the value 4 moves an empty memory to 2, which is read. The
    # next token halves it to 1, and its value 8 moves it to 1 + 0.5 * (8 - 1) = 4.5.
    length = query.size(2)
    size = min(_CHUNK, length)
    missing = -length % size
    if missing:
        query, key, value = (functional.pad(part, (0, 0, 0, missing)) for part in (query, key, value))
        decay, beta = (functional.pad(part, (0, missing)) for part in (decay, beta))
    query, key, value, decay, beta = (torch.unflatten(part, 2, (-1, size)) for part in (query, key, value, decay, beta))
    decay, beta = decay.cumsum(-1)[..., None], beta[..., None]
    scaled = beta * key
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (decay - decay.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
    keys = key.transpose(-1, -2)
    # A token writes what the memory lacks after the tokens before it: within a chunk, a triangular system.
    system = (scaled @ keys) * between
    wanted = torch.cat((beta * value, decay.exp() * scaled), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, reads = torch.split(solved, [value.size(-1), key.size(-1)], dim=-1)
    seen = (query @ keys) * between
    last = decay[..., -1:, :]
    query, keys = query * decay.exp(), (key * (last - decay).exp()).transpose(-1, -2)
    left = last.exp()
    if memory is None:
        memory = query.new_zeros(*query.shape[:2], query.size(-1), value.size(-1))
    outputs = []
    chunks = (part.unbind(2) for part in (query, keys, written, reads, seen, left))
    for query_of, keys_of, written_of, reads_of, seen_of, left_of in zip(*chunks, strict=True):
        new = written_of - reads_of @ memory
        outputs.append(query_of @ memory + seen_of @ new)
        memory = memory * left_of + keys_of @ new
    return torch.cat(outputs, dim=2)[:, :, :length], memory
