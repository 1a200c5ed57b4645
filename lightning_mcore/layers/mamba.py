# SPDX-License-Identifier: Apache-2.0
"""Mamba 2, attention's substitute in Granite 4 H and Nemotron-H, in plain PyTorch.

Each head keeps a memory, a matrix with ``mamba_state_dim`` rows. At each token the memory decays; then the token's
value is added along the vector B, and the result is read along the vector C. The heads of a group share B and C. A
head's step, one number per token, sets both how much it writes and how much it forgets. Before that, a short causal
convolution mixes values, B and C with earlier tokens; after it come a gate and a norm over each group's channels. The
memory is fp32, as in transformers. With ``core_attn`` in ``recompute_modules``, the memory is recomputed.

``spec.gpt_block_spec`` puts :class:`Mamba2` in place of attention; megatron-core's module needs ``mamba_ssm``, Triton
and CUDA. Where ``mamba_ssm`` is installed, 16-bit runs on CUDA use its kernel for the memory alone (:func:`scan`).

``recurrent.py`` distributes heads over ranks. Here its unit of distribution (its "head") is an equal part of all heads
and of all groups' B and C. If the ranks do not divide the groups, they gather B, C and the sums of the norm.

Source: ``MambaMixer`` (megatron.core.ssm.mamba_mixer, 0.16.1) for initial values, and the modules of ``bamba`` and
``nemotron_h`` (transformers 5.24) for the numbers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from lightning_mcore.config.architecture import architecture_of, mamba_units
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

_DECAYS = (1.0, 16.0)  # at the start of training, in units of the step
_STEPS = (1e-3, 0.1)  # at the start of training, from the smallest to the largest
_NO_STEP = -1e4  # its softplus is 0
_KERNEL = ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
_KERNEL_CHUNK = 128  # tokens that the kernel computes at once, as in Megatron


class Mamba2(RecurrentLayer):
    """A Mamba 2 layer in place of attention, with the constructor arguments that Megatron gives to attention."""

    kind = "Mamba 2 layer"

    def __init__(self, config: TransformerConfig, layer_number: int, **unused: Any) -> None:
        sizes = architecture_of(config).mamba
        assert sizes is not None
        self.sizes, units = sizes, mamba_units(sizes)
        self.groups, self.rows = sizes["mamba_num_groups"], sizes["mamba_state_dim"]
        self.size, self.steps = sizes["mamba_head_dim"], sizes["mamba_num_heads"] // units
        self.values, self.states = self.steps * self.size, self.groups * self.rows // units
        width = 2 * self.values + 2 * self.states + self.steps
        super().__init__(config, layer_number, units, (width, self.values))
        self.eps = config.layernorm_epsilon
        ranks = self.tp_group.size() * self.cp_group.size()
        # 4 ranks with 2 groups: 4 parts of groups, and rank 3 has a part of group 1. With 4 groups on 2 ranks there
        # are 4 parts, and rank 1 has groups 2 and 3.
        parts = math.lcm(self.groups, ranks)
        place = self.tp_group.rank() * self.cp_group.size() + self.cp_group.rank()
        own = range(place * parts // ranks, (place + 1) * parts // ranks)
        self.own_groups = [part * self.groups // parts for part in own]
        self.is_gathered = parts != self.groups

    def _build(self, config: TransformerConfig) -> None:
        generator = generator_of(f"Mamba 2 of layer {self.layer_number}")
        heads, kernel = self.sizes["mamba_num_heads"], self.sizes["mamba_conv_kernel_dim"]
        channels = heads * self.size + 2 * self.groups * self.rows
        bound = kernel**-0.5  # as in torch
        convolution, bias = torch.empty(channels, 1, kernel), torch.empty(channels)
        decay, step = torch.empty(heads).uniform_(*_DECAYS, generator=generator), torch.empty(heads)
        step.uniform_(*map(math.log, _STEPS), generator=generator).exp_()
        initial = {
            "conv1d": convolution.uniform_(-bound, bound, generator=generator),
            "conv1d_bias": bias.uniform_(-bound, bound, generator=generator),
            "A_log": decay.log(),
            "dt_bias": step.expm1().log(),  # of which softplus gives the step
            "D": torch.ones(heads),
            "out_norm": torch.ones(heads * self.size),
        }
        for name, whole in initial.items():
            setattr(self, name, OfHeads(self.tp_group, whole, config))

    def _hide(self, mixed: Tensor, padding: Tensor) -> Tensor:
        # A step of 0, because the convolution has a bias
        hidden = super()._hide(mixed, padding)
        hidden[..., -self.steps :].masked_fill_(padding, _NO_STEP)
        return hidden

    def _mix(
        self, mixed: Tensor, lengths: Sequence[int], state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """Compute sequences, [s, b, units, c] to [s, b, units, heads of a unit * size]."""
        weights = {name: getattr(self, name)(self.cp_group) for name in ("conv1d_bias", "A_log", "dt_bias", "D")}
        gate, inputs, step = torch.split(mixed, [self.values, self.values + 2 * self.states, self.steps], dim=-1)
        inputs, last = self._convolve(inputs, lengths, state, weights["conv1d_bias"])
        value, *vectors = torch.split(inputs, [self.values, self.states, self.states], dim=-1)
        # [b, groups, s, rows], [b, groups, s, heads, d] and [b, groups, s, heads]
        groups = len(self.own_groups)
        write, read = (self._of_own_groups(part.flatten(2)).float().permute(1, 2, 0, 3) for part in vectors)
        value = value.float().reshape(*value.shape[:2], groups, -1, self.size).permute(1, 2, 0, 3, 4)
        step = functional.softplus(step.flatten(2).float() + weights["dt_bias"].float())
        step = torch.unflatten(step, -1, (groups, -1)).permute(1, 2, 0, 3)
        write, read, value = write.contiguous(), read.contiguous(), value.contiguous()  # products would copy them
        decay, skip = (weights[name].float().view(groups, 1, -1) for name in ("A_log", "D"))
        rule = functools.partial(scan, mixed.dtype, -decay.exp())
        output, memory = of_sequences(rule, (write, read, value, step), lengths, state, self.is_recomputed)
        output = (output + value * skip[..., None]).permute(2, 0, 1, 3, 4)
        gated = output.flatten(3) * functional.silu(gate.float()).reshape(*gate.shape[:2], groups, -1)
        normed = self._norm(gated).to(mixed.dtype) * self.out_norm(self.cp_group)
        return normed.to(mixed.dtype).reshape(gate.shape), RecurrentState(last, memory)

    def _of_own_groups(self, part: Tensor) -> Tensor:
        """Return [s, b, groups of this rank, rows] from this rank's part of all groups, [s, b, c]."""
        if not self.is_gathered:
            return torch.unflatten(part, -1, (-1, self.rows))
        return torch.unflatten(self._of_all_ranks(part), -1, (-1, self.rows))[:, :, self.own_groups]

    def _of_all_ranks(self, part: Tensor) -> Tensor:
        """Return the parts, [s, b, c], of all tensor- and context-parallel ranks, [s, b, tp * cp * c], by head."""
        whole = part[None]
        for group in (self.cp_group, self.tp_group):
            whole = gather_from_sequence_parallel_region(whole, group=group) if group.size() > 1 else whole
        return whole.permute(1, 2, 0, 3).flatten(2)

    def _norm(self, values: Tensor) -> Tensor:
        """Return [s, b, parts of groups, channels] fp32 divided by the root mean square of their whole groups."""
        squares = values.square().sum(-1)
        if self.is_gathered:
            squares = torch.unflatten(self._of_all_ranks(squares), -1, (self.groups, -1)).sum(-1)[:, :, self.own_groups]
        size = self.sizes["mamba_num_heads"] * self.size // self.groups
        return (values * torch.rsqrt(squares / size + self.eps)[..., None]).flatten(2)


def scan(
    dtype: torch.dtype,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    value: Tensor,
    step: Tensor,
    memory: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run :func:`state_space` for a layer that computes in ``dtype``, by the kernel of ``mamba_ssm`` if there is one.

    ``rate`` is [g, 1, h], below 0: a token's decay is ``rate`` times its step.
    """
    kernels = kernels_for(value, dtype, *_KERNEL)
    if kernels is None:
        return state_space(write, read, value, step, rate * step, memory)
    (kernel,) = kernels
    return scan_by_kernel(kernel, dtype, rate, write, read, value, step, memory)


def scan_by_kernel(
    kernel: Callable[..., Any],
    dtype: torch.dtype,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    value: Tensor,
    step: Tensor,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run :func:`scan` with ``kernel``, which takes the heads of all groups together, [b, s, g * h, d].

    A memory there is [b, g * h, d, rows].

    Source: ``mamba_chunk_scan_combined`` (mamba_ssm.ops.triton.ssd_combined, 2.2).
    """
    groups, heads = value.size(1), value.size(3)
    output, last = kernel(
        value.transpose(1, 2).flatten(2, 3).to(dtype),
        step.transpose(1, 2).flatten(2),
        rate.flatten(),
        write.transpose(1, 2).to(dtype),
        read.transpose(1, 2).to(dtype),
        _KERNEL_CHUNK,
        initial_states=None if memory is None else memory.permute(0, 1, 3, 4, 2).flatten(1, 2),
        return_final_states=True,
    )
    output = torch.unflatten(output, 2, (groups, heads)).transpose(1, 2)
    return output.float(), torch.unflatten(last, 1, (groups, heads)).permute(0, 1, 4, 2, 3).float()


def state_space(
    write: Tensor, read: Tensor, value: Tensor, step: Tensor, decay: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write a sequence's tokens into a memory one after another, and read it after each; all tensors fp32.

    Args:
        write: What a token writes along, [b, g, s, rows], for all heads of a group.
        read: What a token reads along, [b, g, s, rows].
        value: What each head writes, [b, g, s, h, d].
        step: The factor of what a token writes, [b, g, s, h].
        decay: The logarithm of what a token leaves of the memory before it writes, [b, g, s, h], at most 0.
        memory: The memory before the first token, [b, g, rows, h, d]; None for zeros.

    Returns:
        What is read, [b, g, s, h, d], and the memory after the last token.
    """
    # With one row and d = 1, reads and writes 1, and steps 0.5: the value 4 leaves 2 in an empty memory, which is read.
    # The next token halves it to 1 and adds half of its value 8, so 5 is read.
    length, heads = value.shape[2:4]
    write, read, value, step, decay = in_chunks(write, read, value, step, decay)  # [b, g, n, q, ...]
    decay, written = decay.cumsum(3), value * step[..., None]
    of_head = decay.transpose(3, 4)[..., None]  # [b, g, n, h, q, 1]
    between = (of_head - of_head.transpose(-1, -2)).masked_fill(later_tokens(write), float("-inf")).exp()
    scores = (read @ write.transpose(-1, -2))[:, :, :, None] * between  # [b, g, n, h, q, q]
    inside = (scores @ written.transpose(3, 4)).transpose(3, 4)
    last = decay[:, :, :, -1:]
    # The heads are columns of one product for each group: with a head at a time, torch would copy write and read
    left = (written * (last - decay).exp()[..., None]).flatten(4)
    added = torch.unflatten(write.transpose(-1, -2) @ left, -1, (heads, -1))  # [b, g, n, rows, h, d]
    if memory is None:
        memory = torch.zeros_like(added[:, :, 0])
    before = []
    for added_of, left_of in zip(added.unbind(2), last.exp()[..., None].unbind(2), strict=True):
        before.append(memory)
        memory = memory * left_of + added_of
    seen = torch.unflatten(read @ torch.stack(before, dim=2).flatten(4), -1, (heads, -1))  # [b, g, n, q, h, d]
    output = inside + seen * decay.exp()[..., None]
    return output.flatten(2, 3)[:, :, :length], memory
