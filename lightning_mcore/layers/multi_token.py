# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: layers after the last one that predict the tokens after the next one.

Megatron builds them from their own spec and computes their losses inside ``GPTModel``, with the loss mask of the call.
They are on the last pipeline stage, which then has a copy of the embedding. :func:`gpt_mtp_block_spec` is Megatron's
spec with our norms, as ``spec.gpt_block_spec`` is for the other layers. :class:`MultiTokenGPT` is a ``GPTModel`` that
also runs without labels. ``MCoreGPT`` uses both, and your own module may. ``strategy/logs/auxiliary.py`` logs the
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

from lightning_mcore.layers.packed_sequences import all_real
from lightning_mcore.layers.router import scale_gradient
from lightning_mcore.layers.score import HiddenStates
from lightning_mcore.layers.spec import TorchNorm, last_layer_spec

_MEGATRON = __version__.partition("+")[0]  # 0.19 adds the commit of the folder that it runs in
_COUNTS_OWN_TOKENS = hasattr(multi_token_prediction, "process_mtp_loss")  # since 0.17
_RECORDED = "loss_values" if _COUNTS_OWN_TOKENS else "values"
_SAVES_ALL_ARGUMENTS = "forward_func" in inspect.signature(MultiTokenPredictionLayer._checkpointed_forward).parameters


class MultiTokenGPT(GPTModel):  # type: ignore[misc]  # megatron-core has no type information
    """A ``GPTModel`` that skips multi-token prediction without labels, so that it can also predict.

    With packed sequences these layers treat padding as real tokens. Megatron shifts tokens, labels and the loss mask by
    the boundaries of the real tokens, as if there were no padding in between. Shifted by the padded boundaries, the
    last real token of a sequence gets the padding after it, which the loss mask hides.

    Weighted by tokens, a loss of these layers is divided by the tokens of the whole step, as the main loss is. Since
    0.17 Megatron multiplies it by the microbatch's tokens over those that are left after the shift. How the gradients
    weigh would then depend on how rows are cut into microbatches, so that factor is taken out of them again.

    The rows that pad the vocabulary are not tokens and have no part in the loss. So the loss does not depend on the
    padding, which follows from parallel sizes, and equals that of a model without padding.

    Attributes:
        existing_tokens: Size of the vocabulary without padding; None if it has no padding.

    Source: ``GPTModel._postprocess`` (0.16.1 needs labels with ``mtp_num_layers``; 0.19.2 makes some up);
    ``_roll_tensor_packed_seq`` (megatron.core.transformer.multi_token_prediction, both) reads ``cu_seqlens_q``;
    ``process_mtp_loss`` (megatron.core.transformer.multi_token_prediction, 0.19.2) has the factor.
    """

    existing_tokens: int | None = None
    _shares_left: Iterator[Tensor] = iter(())  # for the next losses of multi-token prediction

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each token, [b, s] fp32, without a sum or mean.

        Args:
            labels: [b, s] int64.
            logits: [s, b, v / tp], any float dtype; the columns of vocabulary padding are overwritten.
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
            if self.config.mtp_num_layers and kwargs.get("packed_seq_params") is not None:
                kwargs["packed_seq_params"] = all_real(kwargs["packed_seq_params"])
            padding = kwargs.get("padding_mask")
            if padding is not None and padding.size(1) != kwargs["input_ids"].size(1):
                kwargs["padding_mask"] = self._whole_padding(padding)
            before = mtp_tracker().pop(_RECORDED, None)
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
        logits, _ = self.output_layer(hidden_states, weight=weight)  # [s, b, v / tp]
        transposed: Tensor = logits.transpose(0, 1).contiguous()
        return transposed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return Megatron's sharded state; for a model without an output layer, whose weight Megatron looks up, too.

        Args:
            prefix: The beginning of the names.
            sharded_offsets: Must be empty, as in Megatron.
            metadata: As in Megatron.
        """
        if isinstance(getattr(self, "output_layer", None), HiddenStates):
            return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    def _whole_padding(self, share: Tensor) -> Tensor:
        """Return the mask of padding, [b, s / cp] bool, from the shares of sequence parallelism, [b, s / cp / tp].

        Megatron 0.19.2 would shift a share by the boundaries of the whole row. The router takes its part of the mask.
        """
        tokens_first = share.t().contiguous().to(torch.uint8)
        whole = tensor_parallel.gather_from_sequence_parallel_region(tokens_first, group=self.pg_collection.tp)
        padding: Tensor = whole.t().contiguous().bool()
        return padding

    def _shares(self, mask: Tensor, packed: PackedSeqParams | None) -> Iterator[Tensor]:
        """Yield for each layer which share of a microbatch's tokens it has, by whose inverse Megatron multiplies.

        Of the tokens of a row 0 1 1 1, shifted once to 1 1 1 0, all are left; of 1 1 1 1, which becomes 1 1 1 0, 3/4.

        Args:
            mask: [b, s], 1 where a token counts.
            packed: The boundaries of a packed batch; None for a dense one.
        """
        if not self.config.calculate_per_token_loss:
            return
        whole = mask.sum().clamp(min=1)
        for _ in range(self.config.mtp_num_layers):
            mask, count = roll_tensor(mask, cp_group=self.cp_group, packed_seq_params=packed)
            yield count / whole

    def _weigh_recorded(self, before: Tensor | None, mask: Tensor | None, packed: PackedSeqParams | None) -> None:
        """Turn the losses just recorded for the logs into means over the tokens of all ranks that share a sequence.

        Megatron records the mean over the tokens of this rank, which is nan if it has none (0.16.1).

        Args:
            before: [layers] fp32, the record of earlier microbatches; None for the first one.
            mask: [b, s / cp], 1 where a token counts; None if all do.
            packed: The boundaries of a packed batch; None for a dense one.
        """
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
    """Megatron's layer, with a recomputation that also supports packed sequences.

    Source: ``MultiTokenPredictionLayer._checkpointed_forward`` (0.16.1 saves every argument as if it were a tensor).
    """

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        packed, names = kwargs["packed_seq_params"], list(kwargs)

        def forward(*values: Any, **named: Any) -> Tensor:
            given = {**dict(zip(names, values, strict=False)), **named}  # by position, or by name if not recomputed
            return forward_func(**{**given, "packed_seq_params": packed})

        return super()._checkpointed_forward(forward, *args, **{**kwargs, "packed_seq_params": None})


def mtp_tracker() -> dict[str, Any]:
    """Return the dict in which Megatron records the losses of multi-token prediction for the logs, in training."""
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
    """Return the layers of multi-token prediction in one chunk, for ``GPTModel(mtp_block_spec=...)``.

    Each of them is like the last layer of the model.

    Args:
        config: The transformer's config.
        transformer_impl: Which modules to use, as in ``gpt_block_spec``.
        vp_stage: Virtual stage of this rank; None without an interleaved pipeline.

    Returns:
        The layers; None if the config has none, or this chunk does not hold them.

    Raises:
        ValueError: :func:`check_multi_token` refuses the config.
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
    """Refuse layouts on which Megatron's loss of multi-token prediction is not that of the whole batch.

    Args:
        config: The transformer's config.
        tied: Whether the output layer is the embedding's transpose.
        learned_positions: Whether the embedding holds a table of positions.

    Raises:
        ValueError: A rank would divide by its own number of tokens, which differs between the ranks that share a
            sequence, or by zero; or another option does not work with these layers.
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
