# SPDX-License-Identifier: Apache-2.0
"""Mamba 2, attention's substitute in Granite 4 H and Nemotron-H, in plain PyTorch.

Each head has a memory, a matrix of ``mamba_state_dim`` rows. At each token it decays, and the token's value is written
along the vector B and read along the vector C, which all heads of a group share. A head's step, one number for each
token, says how much it writes and how much it forgets. A short causal convolution mixes values, B and C with earlier
tokens; a gate and a norm over each group's channels follow. The memory is fp32, as in transformers, and recomputing
``core_attn`` recomputes it. ``spec.gpt_block_spec`` puts :class:`Mamba2` in place of attention; megatron-core's module
needs ``mamba_ssm``, Triton and CUDA.

``recurrent.py`` shares heads out to ranks. A *unit*, which it calls a head, is an equal part of the heads and of all
groups' B and C. If their number does not divide the groups, they gather B, C and the sums of the norm.

Source: ``MambaMixer`` (megatron.core.ssm.mamba_mixer, 0.16.1) for initial values, and the modules of ``bamba`` and
``nemotron_h`` (transformers 5.24) for the numbers.
"""

import math
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_mcore.config.architecture import architecture_of, mamba_units
from lightning_mcore.layers.recurrent import OfHeads, RecurrentLayer, RecurrentState
from lightning_mcore.parallel.groups import generator_of

_CHUNK = 64
_DECAYS = (1.0, 16.0)  # at the start of training, in units of the step
_STEPS = (1e-3, 0.1)  # at the start of training, from the smallest to the largest
_NO_STEP = -1e4  # its softplus is 0


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

    def _mix(self, mixed: Tensor, state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Compute sequences that follow ``state``: [s, b, units, c] to [s, b, units, heads of a unit * size]."""
        weights = {name: getattr(self, name)(self.cp_group) for name in ("conv1d_bias", "A_log", "dt_bias", "D")}
        gate, inputs, step = torch.split(mixed, [self.values, self.values + 2 * self.states, self.steps], dim=-1)
        inputs, last = self._convolve(inputs, None if state is None else state.inputs, weights["conv1d_bias"])
        value, *vectors = torch.split(inputs, [self.values, self.states, self.states], dim=-1)
        # [b, groups, s, rows], [b, groups, heads, s, d] and [b, groups, heads, s]
        write, read = (self._of_own_groups(part.flatten(2)).float().permute(1, 2, 0, 3) for part in vectors)
        groups = len(self.own_groups)
        value = value.float().reshape(*value.shape[:2], groups, -1, self.size).permute(1, 2, 3, 0, 4)
        step = functional.softplus(step.flatten(2).float() + weights["dt_bias"].float())
        step = torch.unflatten(step, -1, (groups, -1)).permute(1, 2, 3, 0)
        decay, skip = (weights[name].float().view(groups, -1, 1) for name in ("A_log", "D"))
        tokens = (write, read, value, step, -decay.exp() * step)
        if self.is_recomputed and state is None:
            output, memory = checkpoint(state_space, *tokens, use_reentrant=False, preserve_rng_state=False)
        else:
            output, memory = state_space(*tokens, None if state is None else state.memory)
        output = (output + value * skip[..., None]).permute(3, 0, 1, 2, 4)
        gated = output.flatten(3) * functional.silu(gate.float()).reshape(*gate.shape[:2], groups, -1)
        normed = self._norm(gated).to(mixed.dtype) * self.out_norm(self.cp_group)
        return normed.to(mixed.dtype).reshape(gate.shape), RecurrentState(last, memory)

    def _of_own_groups(self, part: Tensor) -> Tensor:
        """Return [s, b, groups of this rank, rows] from this rank's part of all groups, [s, b, c]."""
        if not self.is_gathered:
            return torch.unflatten(part, -1, (-1, self.rows))
        whole = self._of_all_ranks(part).permute(1, 2, 0, 3).flatten(2)
        return torch.unflatten(whole, -1, (-1, self.rows))[:, :, self.own_groups]

    def _of_all_ranks(self, part: Tensor) -> Tensor:
        """Return the parts of the tensor- and context-parallel ranks, [tp * cp, ...], in the order of heads."""
        whole = part[None]
        for group in (self.cp_group, self.tp_group):
            whole = gather_from_sequence_parallel_region(whole, group=group) if group.size() > 1 else whole
        return whole

    def _norm(self, values: Tensor) -> Tensor:
        """Return [s, b, parts of groups, channels] fp32 divided by the root mean square of their whole groups."""
        squares = values.square().sum(-1)
        if self.is_gathered:
            squares = self._of_all_ranks(squares).permute(1, 2, 0, 3).flatten(2)
            squares = torch.unflatten(squares, -1, (self.groups, -1)).sum(-1)[:, :, self.own_groups]
        size = self.sizes["mamba_num_heads"] * self.size // self.groups
        return (values * torch.rsqrt(squares / size + self.eps)[..., None]).flatten(2)


def state_space(
    write: Tensor, read: Tensor, value: Tensor, step: Tensor, decay: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write a sequence's tokens into a memory one after another, and read it after each; all tensors fp32.

    ``write`` and ``read`` are [b, g, s, rows], for all heads of a group; ``value`` is [b, g, h, s, d] for each head.
    ``step`` [b, g, h, s] scales what a token writes, ``decay`` [b, g, h, s] is the logarithm of what it leaves of the
    memory, at most 0. ``memory`` is [b, g, h, rows, d], None for zeros. Returns what is read, [b, g, h, s, d], and the
    memory after the last token.
    """
    # With one row and d = 1, reads and writes 1, and steps 0.5: the value 4 leaves 2 in an empty memory, which is read.
    # The next token halves it to 1 and adds half of its value 8, so 5 is read.
    length = value.size(3)
    size = min(_CHUNK, length)
    missing = -length % size
    if missing:
        write, read, value = (functional.pad(part, (0, 0, 0, missing)) for part in (write, read, value))
        step, decay = (functional.pad(part, (0, missing)) for part in (step, decay))
    write, read = (torch.unflatten(part, 2, (-1, size))[:, :, None] for part in (write, read))  # [b, g, 1, n, q, rows]
    value, step, decay = (torch.unflatten(part, 3, (-1, size)) for part in (value, step, decay))
    decay, written = decay.cumsum(-1)[..., None], value * step[..., None]
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    between = (decay - decay.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
    inside = (read @ write.transpose(-1, -2) * between) @ written
    last = decay[..., -1:, :]
    added = write.transpose(-1, -2) @ (written * (last - decay).exp())  # [b, g, h, n, rows, d]
    if memory is None:
        memory = torch.zeros_like(added[:, :, :, 0])
    before = []
    for added_of, left_of in zip(added.unbind(3), last.exp().unbind(3), strict=True):
        before.append(memory)
        memory = memory * left_of + added_of
    output = inside + (read @ torch.stack(before, dim=3)) * decay.exp()
    return output.flatten(3, 4)[:, :, :, :length], memory
