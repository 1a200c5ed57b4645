# SPDX-License-Identifier: Apache-2.0
"""Megatron's router of experts, with auxiliary losses that have the same weight on every layout.

A router adds balancing losses and a z-loss to the gradient. With ``calculate_per_token_loss`` Megatron finally divides
every gradient by the tokens of the whole step, so these losses must first be multiplied by their microbatch's tokens.
megatron-core 0.16 multiplies by this rank's tokens only: with sequence or context parallelism the losses weigh too
little, by the number of ranks that share a sequence, and the sequence loss also by a microbatch's rows. 0.19 has fixed
that. :class:`ExactRouter` multiplies itself, so it is right in every version. Padding in packed rows counts neither in
a loss nor in the token counts that move the experts' bias. ``spec.gpt_block_spec`` puts the router into every layer
with experts.

Source: ``TopKRouter`` (megatron.core.transformer.moe.router, 0.16.1 and 0.19.2).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.autograd import attach, scale_gradient
from lightning_mcore.layers.host_values import version_of

GLOBAL_BALANCING_LOSS = "global_load_balancing_loss"
Z_LOSS = "z_loss"
"""Names under which Megatron's routers record these losses."""

_COUNTED = "_real_tokens"
_FEW = 1e-9  # a count too small to change any other, whose square is not zero in fp32
# Buffers that a cast of the model would make bf16, in which a count stops at 256.
_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


class ExactRouter(TopKRouter):  # type: ignore[misc]  # megatron-core has no type information
    """Routes tokens to experts; it takes the arguments of ``TopKRouter``."""

    takes_fp32 = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighs_tokens: bool = self.config.calculate_per_token_loss
        self.calculate_per_token_loss = False
        if architecture_of(self.config).expert_bias:
            self.bias = nn.Parameter(torch.zeros_like(self.weight[:, 0]))
            self.bias.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        self.balancing_scale: Tensor | int = 1
        self.z_scale: Tensor | int = 1
        self.z_share: Tensor | int = 1
        self.is_empty: Tensor | None = None

    def gating(self, input: Tensor) -> Tensor:
        """Return the experts' scores, in fp32 if the weights are, else in the router's dtype.

        ``input`` is [s / cp / tp, b, h]; / tp only with sequence parallelism.
        """
        scores: Tensor = super().gating(input.to(torch.promote_types(input.dtype, self.weight.dtype)))
        return scores

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """Return the input with noise in training only; Megatron also adds it in evaluation."""
        if not self.training:
            return input
        noisy: Tensor = super().apply_input_jitter(input)
        return noisy

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token: weights and a bool choice, both [tokens, experts].

        ``logits`` is [s / cp / tp, b, experts], ``padding_mask`` [s / cp / tp, b], True for tokens that do not count.
        The / tp is for sequence parallelism; on later pipeline stages Megatron passes a mask of [s / cp, b] even then.
        """
        if padding_mask is not None and padding_mask.size(0) != logits.size(0):
            padding_mask = padding_mask.chunk(self.tp_group.size())[self.tp_group.rank()]
        self._set_scales(logits, padding_mask)
        routed: tuple[Tensor, Tensor] = super().routing(logits, padding_mask=padding_mask)
        return routed

    def _set_scales(self, logits: Tensor, padding_mask: Tensor | None) -> None:
        """Compute the factors of this microbatch's losses."""
        # A balancing loss is a mean over all tokens of these ranks, the z-loss the mean over ranks of each rank's mean.
        # Two ranks with 60 and 40 real tokens have the shares 60 * 2 / 100 = 1.2 and 0.8: the z-loss becomes
        # (1.2 a + 0.8 b) / 2 = 0.6 a + 0.4 b, and with weighs_tokens both are multiplied by 100.
        ranks = self.tp_cp_group.size()
        own: Tensor | int = logits.shape[0] * logits.shape[1]
        total: Tensor | int = own * ranks
        self.z_share, self.is_empty = 1, None
        if padding_mask is not None:
            own, total = _real_tokens(padding_mask, self.tp_cp_group)
            if ranks > 1:
                self.z_share = own * ranks / total.clamp(min=1)
            self.is_empty = total == 0
        self.balancing_scale = total if self.weighs_tokens else 1
        self.z_scale = own * ranks if self.weighs_tokens else self.z_share

    def _apply_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **kwargs: Any) -> Tensor:
        routing_map = self._never_empty(routing_map)
        applied: Tensor = super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map, **kwargs)
        return applied

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        routing_map = self._never_empty(routing_map)
        applied: Tensor = super()._apply_seq_aux_loss(probs, scores_for_aux_loss, routing_map, *args, **kwargs)
        return applied

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **kwargs: Any
    ) -> Tensor:
        routing_map = self._never_empty(routing_map)
        applied: Tensor = super()._apply_global_aux_loss(probs, scores_for_aux_loss, routing_map, **kwargs)
        return applied

    def _never_empty(self, routing_map: Tensor) -> Tensor:
        """Add a tiny count if a microbatch has no tokens, because Megatron divides by their number.

        The probabilities of padding are zero, so the loss is zero too.
        """
        return routing_map if self.is_empty is None else routing_map + self.is_empty * _FEW

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Add a balancing loss to the gradient of ``activation`` [tokens, experts], and log it.

        ``aux_loss`` is a scalar: a mean over the tokens of all ranks that share a sequence, or of a row.
        """
        # The global loss is a sum over model copies, but every version of Megatron averages its gradients over them.
        if aux_loss_name == GLOBAL_BALANCING_LOSS:
            aux_loss = scale_gradient(aux_loss, self.tp_dp_cp_group.size() / self.tp_cp_group.size())
        aux_loss = scale_gradient(aux_loss, self.balancing_scale)
        attached: Tensor = super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, aux_loss_name, *args, **kwargs
        )
        return attached

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the z-loss, a mean over tokens, to the gradient of ``logits`` and log it; shapes as in ``routing``."""
        if isinstance(self.z_scale, int) and self.z_scale == 1:
            attached: Tensor = super().apply_z_loss(logits, padding_mask=padding_mask)
            return attached
        # attach() gives `aside` no gradient but the z-loss's, so the logits' own gradient is not scaled.
        with _recorded_as(Z_LOSS, self.z_share):
            aside = super().apply_z_loss(scale_gradient(logits, self.z_scale), padding_mask=padding_mask)
        return attach(logits, aside)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert for its bias; ``routing_map`` is [tokens, experts] bool.

        The bias of a frozen router stays as it is: without counts, it is not moved.

        Source: Megatron applies a mask of [tokens] to [tokens, experts] (0.16.1 and 0.19.2).
        """
        if not self.weight.requires_grad:
            return
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])

    def _maintain_float32_expert_bias(self) -> None:
        super()._maintain_float32_expert_bias()
        for name in _COUNTERS:
            counter = getattr(self, name, None)
            if counter is not None and counter.dtype != torch.float32:
                counter.data = counter.data.float()


def _real_tokens(padding_mask: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the numbers of tokens without padding, on this rank and on all of ``group``; collective.

    All layers of a microbatch get views of one mask, also when they are recomputed. The first layer counts, and leaves
    the numbers on the mask's storage, which they share.
    """
    view = (version_of(padding_mask), padding_mask.shape, padding_mask.stride(), padding_mask.storage_offset())
    counted: dict[Any, tuple[Tensor, Tensor]] = vars(padding_mask.untyped_storage()).setdefault(_COUNTED, {})
    if view not in counted:
        own = (~padding_mask).sum()
        total = own.clone()
        if group.size() > 1:
            dist.all_reduce(total, group=group)
        counted[view] = own, total
    return counted[view]


class ChoiceBiasRouter(ExactRouter):
    """A softmax router with a fixed bias that affects only which experts are chosen, as in ERNIE 4.5."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choice_bias = nn.Buffer(torch.zeros(1, self.config.num_moe_experts, dtype=torch.float32))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token, as in :class:`ExactRouter`."""
        # The weights are a softmax over the chosen experts alone, so the others are hidden from Megatron's router.
        with torch.no_grad():
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32) + self.choice_bias
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(
                -1, scores.topk(self.topk, dim=-1).indices, True
            )
        return super().routing(logits.masked_fill(~chosen, torch.finfo(logits.dtype).min), padding_mask)

    def _maintain_float32_expert_bias(self) -> None:
        super()._maintain_float32_expert_bias()
        self.choice_bias.data = self.choice_bias.data.float()


def router_tracker() -> Any:
    """Return the dict in which Megatron's routers record losses by name; values are dicts in 0.16, objects later."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        return moe_utils.get_moe_metrics_tracker()._metrics
    return moe_utils.get_moe_layer_wise_logging_tracker()


def recorded_values(entry: Any) -> Tensor:
    """Return the values in a tracker entry, [layers] fp32: sums over microbatches."""
    values: Tensor = entry["values"] if isinstance(entry, dict) else entry.values
    return values


@contextmanager
def _recorded_as(name: str, share: Tensor | int) -> Iterator[None]:
    """Multiply by ``share`` what is recorded under ``name`` inside the ``with`` block, and only that."""
    tracker = router_tracker()
    before = tracker.pop(name, None)
    yield
    if name in tracker:
        values = recorded_values(tracker[name])
        values *= share
        if before is not None:
            values += recorded_values(before)
    elif before is not None:
        tracker[name] = before
