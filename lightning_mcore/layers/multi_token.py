# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: layers after the last one that predict the tokens after the next one.

Megatron builds them from their own spec and computes their losses inside ``GPTModel``, with the loss mask of the call.
They are on the last pipeline stage, which then has a copy of the embedding. :func:`gpt_mtp_block_spec` is Megatron's
spec with our norms, as ``spec.gpt_block_spec`` is for the other layers. :class:`MultiTokenGPT` is a ``GPTModel`` that
also runs without labels. ``MCoreGPT`` uses both, and your own module may too. ``strategy/logs/auxiliary.py`` logs the
losses.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import __version__, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    roll_tensor,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_mcore.layers.autograd import scale_gradient
from lightning_mcore.layers.packed_sequences import all_real
from lightning_mcore.layers.score import HiddenStates
from lightning_mcore.layers.spec import TorchNorm, last_layer_spec

_MEGATRON = __version__.partition("+")[0]  # 0.19 appends a commit hash
_COUNTS_OWN_TOKENS = hasattr(multi_token_prediction, "process_mtp_loss")  # since 0.17
_RECORDED = "loss_values" if _COUNTS_OWN_TOKENS else "values"
# 0.16 has this argument; its recomputation saves every other argument as if it were a tensor.
_SAVES_ALL_ARGUMENTS = "forward_func" in inspect.signature(MultiTokenPredictionLayer._checkpointed_forward).parameters


class MultiTokenGPT(GPTModel):  # type: ignore[misc]  # megatron-core has no type information
    """A ``GPTModel`` that skips multi-token prediction without labels, so that it can also predict.

    ``existing_tokens`` is the vocabulary's size without padding, None without padding.

    Source: ``GPTModel._postprocess`` (0.16.1 needs labels with ``mtp_num_layers``; 0.19.2 makes some up).
    """

    existing_tokens: int | None = None
    _shares_left: Iterator[Tensor] = iter(())

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each token, [b, s] fp32, from ``labels`` [b, s] and ``logits`` [s, b, v / tp].

        The logits' padding columns are overwritten.
        """
        if self.existing_tokens is not None and self.existing_tokens < self.vocab_size:
            first = logits.size(-1) * self.pg_collection.tp.rank() if self.parallel_output else 0
            padding = logits.detach()[..., max(0, self.existing_tokens - first) :]
            padding.fill_(torch.finfo(logits.dtype).min)  # their gradients are then zero without autograd
        losses: Tensor = super().compute_language_model_loss(labels, logits)
        share = next(self._shares_left, None)  # Megatron computes the main loss after the others
        return losses if share is None else scale_gradient(losses, share)

    def _postprocess(self, hidden_states: Tensor, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        if labels is not None or not self.config.mtp_num_layers or not self.post_process:
            # Megatron would shift tokens, labels and the loss mask by the boundaries of the real tokens
            # (`_roll_tensor_packed_seq` reads `cu_seqlens_q`, 0.16.1 and 0.19.2), as if there were no padding. With
            # padded boundaries, a sequence's last real token gets padding, which the loss mask hides.
            if self.config.mtp_num_layers and kwargs.get("packed_seq_params") is not None:
                kwargs["packed_seq_params"] = all_real(kwargs["packed_seq_params"])
            padding = kwargs.get("padding_mask")
            if padding is not None and padding.size(1) != kwargs["input_ids"].size(1):
                kwargs["padding_mask"] = self._whole_padding(padding)
            before = mtp_tracker().pop(_RECORDED, None)  # already weighed
            if _COUNTS_OWN_TOKENS and labels is not None and self.config.mtp_num_layers and self.post_process:
                mask = kwargs.get("loss_mask")
                self._shares_left = self._shares(
                    torch.ones_like(labels) if mask is None else mask, kwargs.get("packed_seq_params")
                )
            result: Tensor = super()._postprocess(hidden_states, *args, labels=labels, **kwargs)
            if _RECORDED in mtp_tracker():
                self._weigh_recorded(before, kwargs.get("loss_mask"), kwargs.get("packed_seq_params"))
            return result
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states, weight=weight)
        transposed: Tensor = logits.transpose(0, 1).contiguous()
        return transposed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return Megatron's sharded state; without an output layer, skip the output weight that Megatron looks up."""
        if isinstance(getattr(self, "output_layer", None), HiddenStates):
            return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    def _whole_padding(self, share: Tensor) -> Tensor:
        """Return the padding mask, [b, s / cp] bool, from sequence-parallel shares, [b, s / cp / tp].

        Megatron 0.19.2 would shift a share by the boundaries of the whole row. The router takes its part of the mask.
        """
        tokens_first = share.t().contiguous().to(torch.uint8)
        whole = tensor_parallel.gather_from_sequence_parallel_region(tokens_first, group=self.pg_collection.tp)
        padding: Tensor = whole.t().contiguous().bool()
        return padding

    def _shares(self, mask: Tensor, packed: PackedSeqParams | None) -> Iterator[Tensor]:
        """Yield for each layer the share of a microbatch's tokens that is left after its shift; ``mask`` is [b, s]."""
        # Mask 0 1 1 1, shifted once to 1 1 1 0, keeps all its tokens: share 1. Mask 1 1 1 1 becomes 1 1 1 0: share 3/4.
        # Since 0.17 Megatron divides these losses by the share (`process_mtp_loss`, 0.19.2), which would make gradients
        # depend on how rows are cut into microbatches. So compute_language_model_loss() multiplies by it again.
        if not self.config.calculate_per_token_loss:
            return
        whole = mask.sum().clamp(min=1)
        for _ in range(self.config.mtp_num_layers):
            mask, count = roll_tensor(mask, cp_group=self.cp_group, packed_seq_params=packed)
            yield count / whole

    def _weigh_recorded(self, before: Tensor | None, mask: Tensor | None, packed: PackedSeqParams | None) -> None:
        """Turn the losses just recorded for the logs into means over the tokens of all ranks that share a sequence.

        ``before`` is the record of earlier microbatches, [layers]; ``mask`` is [b, s / cp], None if all tokens count.
        """
        # Megatron records each rank's mean, nan without tokens (0.16.1), and the logs average over ranks.
        recorded = mtp_tracker()[_RECORDED]
        if mask is not None:
            counts = []
            for _ in range(self.config.mtp_num_layers):
                mask, count = roll_tensor(mask, cp_group=self.cp_group, packed_seq_params=packed)
                counts.append(count)
            own = torch.stack(counts)
            total = own.clone()
            if self.cp_group.size() > 1:
                dist.all_reduce(total, group=self.cp_group)
            recorded = torch.where(own > 0, recorded * (own * self.cp_group.size() / total), 0)
        mtp_tracker()[_RECORDED] = recorded if before is None else before + recorded


class PackedMultiTokenLayer(MultiTokenPredictionLayer):  # type: ignore[misc]  # megatron-core has no type information
    """Megatron's layer, with recomputation that also supports packed sequences.

    Source: ``MultiTokenPredictionLayer._checkpointed_forward`` (0.16.1 saves every argument as if it were a tensor).
    """

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        packed, names = kwargs["packed_seq_params"], list(kwargs)

        def forward(*values: Any, **named: Any) -> Tensor:
            given = {**dict(zip(names, values, strict=False)), **named}
            return forward_func(**{**given, "packed_seq_params": packed})

        return super()._checkpointed_forward(forward, *args, **{**kwargs, "packed_seq_params": None})


def mtp_tracker() -> dict[str, Any]:
    """Return the dict in which Megatron records multi-token prediction's losses for the logs, in training."""
    tracker: dict[str, Any] = multi_token_prediction.MTPLossLoggingHelper.tracker
    return tracker


def recorded_mtp_losses() -> Tensor | None:
    """Return the recorded losses, [layers] fp32: sums over microbatches of means over tokens; None without a record."""
    return mtp_tracker().get(_RECORDED)


def gpt_mtp_block_spec(
    config: TransformerConfig,
    transformer_impl: Literal["local", "transformer_engine"],
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the multi-token prediction layers of one chunk, for ``GPTModel(mtp_block_spec=...)``; None if it has none.

    Each of them is like the model's last layer. ``vp_stage`` is as in ``gpt_block_spec``. Raises ValueError if
    :func:`check_multi_token` does.
    """
    if not config.mtp_num_layers:
        return None
    check_multi_token(config)
    block = get_gpt_mtp_block_spec(
        config,
        last_layer_spec(config, transformer_impl),
        use_transformer_engine=transformer_impl == "transformer_engine",
        vp_stage=vp_stage,
    )
    for layer in block.layer_specs if block is not None else ():
        if _SAVES_ALL_ARGUMENTS:
            layer.module = PackedMultiTokenLayer
        for name in ("enorm", "hnorm", "layer_norm") if transformer_impl == "local" else ():
            setattr(layer.submodules, name, TorchNorm)
    return block


def check_multi_token(config: TransformerConfig, tied: bool = False, learned_positions: bool = False) -> None:
    """Raise ValueError for layouts on which Megatron's multi-token prediction loss is not the whole batch's.

    On these a rank would divide by its own number of tokens, which differs between ranks that share a sequence, or by
    zero; or another option does not work with these layers. ``tied`` says that the output layer is the embedding's
    transpose.
    """
    layers = config.mtp_num_layers
    if not layers:
        return
    if config.context_parallel_size > 1 and (_COUNTS_OWN_TOKENS or not config.calculate_per_token_loss):
        raise ValueError(
            f"mtp_num_layers={layers} with context_parallel_size={config.context_parallel_size}: in megatron-core "
            f"{_MEGATRON} each rank divides that loss by its own tokens; choose context_parallel_size=1"
        )
    if not _COUNTS_OWN_TOKENS and not config.calculate_per_token_loss:
        raise ValueError(
            f"mtp_num_layers={layers} with calculate_per_token_loss=False: megatron-core {_MEGATRON} divides by "
            "zero if the mask hides all tokens of a microbatch; set calculate_per_token_loss=True"
        )
    for name in ("no_rope_freq", "window_attn_skip_freq"):
        if isinstance(getattr(config, name), list):
            raise ValueError(
                f"mtp_num_layers={layers} with {name}: megatron-core looks up the layers of multi-token prediction in "
                "that pattern, which has only num_layers entries; leave out one of the two"
            )
    group = config.recompute_num_layers if config.recompute_granularity == "full" else None
    if config.recompute_method == "uniform" and (group or 1) > 1:
        raise ValueError(
            f"recompute_num_layers={group} with mtp_num_layers={layers} and recompute_method='uniform': megatron-core"
            " recomputes each layer of multi-token prediction as a group of its own; choose recompute_num_layers=1"
        )
    if tied and config.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"share_embeddings_and_output_weights=True with mtp_num_layers={layers} and "
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size}: megatron-core {_MEGATRON} "
            "gives the last stage an output weight that it neither uses nor saves; choose one of the three"
        )
    if learned_positions and config.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"learned positions with mtp_num_layers={layers} and"
            f" pipeline_model_parallel_size={config.pipeline_model_parallel_size}: the last stage has a copy of the"
            " position table for multi-token prediction, and megatron-core does not add up the gradients of the copies;"
            " choose position_embedding_type='rope', one stage, or mtp_num_layers=None"
        )
