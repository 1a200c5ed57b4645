# SPDX-License-Identifier: Apache-2.0
"""The gated delta net of Qwen3-Next and Qwen3.5: attention with a memory of fixed size, in plain PyTorch.

Each value head has a memory, a matrix from keys to values. At each token it decays, its value for the token's key moves
towards the token's value, and the token's query reads it. A short causal convolution mixes queries, keys and values
with earlier tokens; a norm and a gate follow. The memory is fp32, as in transformers, and recomputing ``core_attn``
recomputes it. ``spec.gpt_block_spec`` puts :class:`GatedDeltaNet` in place of attention; megatron-core's module needs
Triton, CUDA and whole unpacked sequences on each rank. Where ``flash-linear-attention`` is installed, 16-bit runs on
CUDA use its kernels for the memory alone (:func:`remembered`).

Weights are ordered by key head, each with its value heads. ``recurrent.py`` has what the layer shares with others, and
``kimi_delta.py`` the layer whose channels each decay by themselves.

Source: ``GatedDeltaNet`` (megatron.core.ssm.gated_delta_net, 0.16.1) for the module's place in a layer, and the modules
of ``qwen3_next`` (transformers 5.23) for the numbers.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.autograd import scale_gradient
from lightning_mcore.layers.recurrent import (
    OfHeads,
    RecurrentLayer,
    RecurrentState,
    in_chunks,
    kernels_for,
    later_tokens,
    of_sequences,
)
from lightning_mcore.parallel.groups import generator_of

_SHORTEST = 1e-6
_LARGEST_DECAY = 16.0  # at the start of training, in units of the step
_SMALLEST_DECAY = 0.01
_KERNELS = {  # for whole sequences and for one token that follows others, by the dimensions of decays
    3: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    4: ("fla.ops.kda", "chunk_kda", "fused_recurrent_kda"),
}
_LARGEST_KERNEL_KEY = 256  # channels


class GatedDeltaNet(RecurrentLayer):
    """A gated delta net in place of attention, with the constructor arguments that Megatron gives to attention."""

    kind = "gated delta net"

    def __init__(self, config: TransformerConfig, layer_number: int, **unused: Any) -> None:
        sizes = architecture_of(config).delta_net
        assert sizes is not None
        self.sizes, heads = sizes, sizes["linear_num_key_heads"]
        self.key_size, self.value_size = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
        self.values_per_head = sizes["linear_num_value_heads"] // heads
        values = self.values_per_head * self.value_size
        self.mixed_width = 2 * self.key_size + values
        super().__init__(config, layer_number, heads, (self.mixed_width + values + 2 * self.values_per_head, values))

    def _build(self, config: TransformerConfig) -> None:
        generator = generator_of(f"delta net of layer {self.layer_number}")
        heads, kernel = self.sizes["linear_num_key_heads"], self.sizes["linear_conv_kernel_dim"]
        convolution = torch.empty(heads * self.mixed_width, 1, kernel)
        convolution.uniform_(-(kernel**-0.5), kernel**-0.5, generator=generator)  # as in torch
        values = heads * self.values_per_head
        decay = torch.empty(values).uniform_(_SMALLEST_DECAY, _LARGEST_DECAY, generator=generator)
        self.conv1d = OfHeads(self.tp_group, convolution, config)
        self.A_log = OfHeads(self.tp_group, decay.log(), config)
        self.dt_bias = OfHeads(self.tp_group, torch.ones(values), config)
        self.out_norm = GatedNorm(config, self.value_size)

    def _mix(
        self, mixed: Tensor, lengths: Sequence[int], state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """Compute sequences, [s, b, heads, c] to [s, b, heads, values_per_head * value_size]."""
        values, gates = self.values_per_head, self.values_per_head * self.value_size
        inputs, gate, beta, step = torch.split(mixed, [self.mixed_width, gates, values, values], dim=-1)
        inputs, last = self._convolve(inputs, lengths, state)
        parts = torch.split(inputs, [self.key_size, self.key_size, gates], dim=-1)
        query, key, value = (part.permute(1, 2, 0, 3) for part in parts)
        value = torch.unflatten(value, -1, (values, -1)).transpose(2, 3).flatten(1, 2)  # [b, value heads, s, d]
        beta, step = (part.flatten(2).permute(1, 2, 0) for part in (beta, step))  # [b, value heads, s]
        rate, bias = self.A_log(self.cp_group).float().exp(), self.dt_bias(self.cp_group)
        decay = -rate[:, None] * functional.softplus(step.float() + bias[:, None])
        output, memory = remembered((query, key, value, decay, beta.sigmoid()), lengths, state, self.is_recomputed)
        output = torch.unflatten(output.permute(2, 0, 1, 3).to(mixed.dtype), 2, (-1, values))
        gated = self.out_norm(output, torch.unflatten(gate, -1, (values, -1)))
        return gated.flatten(3), RecurrentState(last, memory)


class GatedNorm(nn.Module):
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
        return self._opened(weight, values, gate.float(), heads.dtype).to(heads.dtype)

    def _opened(self, weight: Tensor, values: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """Return normalised heads, fp32, through their gate, fp32."""
        return weight * values.to(dtype) * functional.silu(gate)


def remembered(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    lengths: Sequence[int],
    state: RecurrentState | None,
    is_recomputed: bool,
) -> tuple[Tensor, Tensor]:
    """Return what sequences read from their memories, [b, h, s, d_v], and the last memory.

    ``tokens`` are query, key, value, decay and beta as in :func:`gated_delta_rule`, but in the layer's dtype except for
    decays, without a scale or norm, and with fewer key heads than value heads where these share them.
    """
    query, _, value, decay, _ = tokens
    kernels = kernels_for(value, value.dtype, *_KERNELS[decay.dim()])
    if kernels is None or query.size(-1) > _LARGEST_KERNEL_KEY:
        return of_sequences(_in_torch, tokens, lengths, state, is_recomputed)
    rule = functools.partial(remembered_by_kernels, kernels, lengths)
    return of_sequences(rule, tokens, [value.size(2)], state, is_recomputed)


def _in_torch(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run :func:`gated_delta_rule` for the tokens of :func:`remembered`."""
    query, key = (_normalised(part.float(), value.size(1)) for part in (query, key))
    return gated_delta_rule(query * query.size(-1) ** -0.5, key, value.float(), decay, beta.float(), memory)


def _normalised(heads: Tensor, values: int) -> Tensor:
    """Return queries or keys, [b, h, s, d] fp32, scaled to length 1, for each of the value heads that share them."""
    scaled = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _SHORTEST)
    return scaled if heads.size(1) == values else scaled.repeat_interleave(values // heads.size(1), 1)


def remembered_by_kernels(
    kernels: Sequence[Callable[..., Any]],
    lengths: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run :func:`remembered` with kernels, which take [b, s, h, d], scale and norm, and keep memories as we do.

    Source: ``chunk_gated_delta_rule``, ``chunk_kda`` and their ``fused_recurrent`` forms (fla.ops, 0.6).
    """
    in_chunks_of_tokens, token_by_token = kernels
    shared = value.size(1) // query.size(1)
    query, key = (part.repeat_interleave(shared, 1) for part in (query, key))  # earlier releases need as many
    offsets: dict[str, Tensor] = {}
    if len(lengths) > 1:
        on_cpu = torch.tensor([0, *itertools.accumulate(lengths)])
        offsets = {"cu_seqlens": on_cpu.to(value.device), "cu_seqlens_cpu": on_cpu}
    query, key, value, decay, beta = (part.transpose(1, 2) for part in (query, key, value, decay, beta))
    is_next = memory is not None and value.size(1) == 1  # this kernel has no backward
    output, last = (token_by_token if is_next else in_chunks_of_tokens)(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        initial_state=memory,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **offsets,
    )
    return output.transpose(1, 2), last


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write a sequence's tokens into a memory one after another, and read it after each; all tensors fp32.

    ``query`` [b, h, s, d] reads, ``key`` [b, h, s, d] (length 1) is where a token writes, ``value`` [b, h, s, d_v] what
    it writes. ``decay`` is the logarithm of what a token leaves of the memory before it writes, at most 0: [b, h, s],
    or [b, h, s, d] with a number for each key channel. ``beta`` [b, h, s], 0 to 1, is how far the memory moves towards
    the value. ``memory`` is [b, h, d, d_v], None for zeros. Returns what is read, [b, h, s, d_v], and the memory after
    the last token.
    """
    # With d = d_v = 1, keys and queries 1, and beta 0.5: the value 4 moves an empty memory to 2, which is read. The
    # next token halves it to 1, and its value 8 moves it to 1 + 0.5 * (8 - 1) = 4.5.
    length, of_channels = query.size(2), decay.dim() == 4
    query, key, value, decay, beta = in_chunks(query, key, value, decay, beta, can_be_halved=of_channels)
    beta = beta[..., None]
    scaled = beta * key
    # How far the memory from before the chunk has decayed at each token, and each token's key at the chunk's end
    seen, system, since, until = (_channel_scores if of_channels else _scores)(query, scaled, key, decay)
    # A token writes what the memory lacks after the tokens before it: within a chunk, a triangular system.
    wanted = torch.cat((beta * value, since.exp() * scaled), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, reads = torch.split(solved, [value.size(-1), key.size(-1)], dim=-1)
    query, keys = query * since.exp(), (key * until.exp()).transpose(-1, -2)
    left = since[..., -1:, :].exp().transpose(-1, -2)
    if memory is None:
        memory = query.new_zeros(*query.shape[:2], query.size(-1), value.size(-1))
    outputs = []
    chunks = (part.unbind(2) for part in (query, keys, written, reads, seen, left))
    for query_of, keys_of, written_of, reads_of, seen_of, left_of in zip(*chunks, strict=True):
        new = written_of - reads_of @ memory
        outputs.append(query_of @ memory + seen_of @ new)
        memory = memory * left_of + keys_of @ new
    return torch.cat(outputs, dim=2)[:, :, :length], memory


def _scores(query: Tensor, scaled: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the products of queries, and of scaled keys, with keys after decay, and two sums of decays.

    The first three are [..., size, d], ``decay`` is [..., size]. Products are [..., size, size], where a column is an
    earlier token. The sums are of each token and those before it, and of those after it, [..., size, 1].
    """
    decay, keys = decay.cumsum(-1)[..., None], key.transpose(-1, -2)
    between = (decay - decay.transpose(-1, -2)).masked_fill(later_tokens(query), float("-inf")).exp()
    return (query @ keys) * between, (scaled @ keys) * between, decay, decay[..., -1:, :] - decay


def _channel_scores(query: Tensor, scaled: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what :func:`_scores` does if each channel has its own ``decay``, [..., size, d]; so have the sums.

    ``size`` is a power of two. Blocks of 1, 2, 4, ... tokens are joined in pairs. A query of the second block decays
    from the first block's end, a key of the first block until then. Both exponents are sums of decays, none of which
    is above 0, so nothing overflows, and a small decay after a large one is not rounded away.
    """
    # With decays -1 -2 -3 -4 in one channel: tokens 2 and 3 have -3 and -7 since the end of the first pair, tokens 0
    # and 1 have -2 and 0 until then. Query 3 sees key 0 through exp(-7 - 2), the decays of tokens 1, 2 and 3.
    rows = torch.stack((query, scaled), dim=-2)  # [..., size, 2, d]
    scores = (rows * key[..., None, :]).sum(-1)[..., None, :, None]  # [..., blocks, tokens, 2, tokens]
    since, until = decay[..., None, :], torch.zeros_like(decay[..., None, :])  # [..., blocks, tokens, d]
    while since.size(-3) > 1:
        tokens = since.size(-2)
        of_first, of_second = torch.unflatten(scores, -4, (-1, 2)).unbind(-4)
        since_first, since_second = torch.unflatten(since, -3, (-1, 2)).unbind(-3)
        until_first, until_second = torch.unflatten(until, -3, (-1, 2)).unbind(-3)
        later = torch.unflatten(rows, -3, (-1, 2, tokens))[..., 1, :, :, :] * since_second[..., None, :].exp()
        earlier = torch.unflatten(key, -2, (-1, 2, tokens))[..., 0, :, :] * until_first.exp()
        across = torch.unflatten(later.flatten(-3, -2) @ earlier.transpose(-1, -2), -2, (tokens, 2))
        upper = torch.cat((of_first, torch.zeros_like(across)), dim=-1)
        scores = torch.cat((upper, torch.cat((across, of_second), dim=-1)), dim=-3)
        since = torch.cat((since_first, since_second + since_first[..., -1:, :]), dim=-2)
        until = torch.cat((until_first + since_second[..., -1:, :], until_second), dim=-2)
    seen, system = scores.squeeze(-4).unbind(-2)
    return seen, system, since.squeeze(-3), until.squeeze(-3)
