# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: layers after the last one that predict the tokens after the next one.

Megatron builds them from their own spec. They are on the last pipeline stage, which then has a copy of the embedding.
:func:`gpt_mtp_block_spec` is Megatron's spec with our norms, as ``spec.gpt_block_spec`` is for the other layers.
``gpt.GPTChunk`` runs them, and :func:`add_losses_ahead` computes their losses, with the loss mask of the call.
``MCoreGPT`` uses all of these, and your own module may too. ``strategy/logs/auxiliary.py`` logs the losses.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import __version__
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    roll_tensor,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_mcore.layers.packed_sequences import boundaries_of, ranks_that_share
from lightning_mcore.layers.spec import TorchNorm, last_layer_spec

_MEGATRON = __version__.partition("+")[0]  # 0.19 appends a commit hash
_COUNTS_OWN_TOKENS = hasattr(multi_token_prediction, "process_mtp_loss")  # since 0.17
_RECORDED = "loss_values" if _COUNTS_OWN_TOKENS else "values"
# 0.16 has this argument; its recomputation saves every other argument as if it were a tensor.
_SAVES_ALL_ARGUMENTS = "forward_func" in inspect.signature(MultiTokenPredictionLayer._checkpointed_forward).parameters


def add_losses_ahead(
    chunk: Any,
    hidden: Tensor,
    labels: Tensor | None,
    weight: Tensor | None,
    mask: Tensor | None,
    packed: PackedSeqParams | None,
    gathered: bool | None,
) -> Tensor:
    """Return the main layers' states, [s, b, h], with the losses of multi-token prediction added to their gradient.

    ``hidden`` has the states of the ``1 + mtp_num_layers`` predictions one after the other. ``labels`` [b, s] are None
    in prediction; ``mask`` [b, s] is None if all tokens count. ``weight`` and ``gathered`` are the output layer's.

    Source: ``GPTModel._postprocess`` (0.16.1). Since 0.17, ``process_mtp_loss`` also multiplies losses that are weighed
    by tokens by a ratio of the microbatch's tokens, so that gradients would depend on how rows are cut.
    """
    config, group = chunk.config, chunk.cp_group
    layers = config.mtp_num_layers
    hidden, *ahead = torch.chunk(hidden, 1 + layers, dim=0)
    if labels is None:
        return hidden
    if getattr(config, "mtp_detach_heads", False):
        weight = (chunk.output_layer.weight if weight is None else weight).detach()
    mask = torch.ones_like(labels) if mask is None else mask
    shared = group if packed is None else ranks_that_share(boundaries_of(packed), group)
    for number, states in enumerate(ahead):
        # Mask 0 1 1 1, shifted once: 1 1 1 0
        labels, _ = roll_tensor(labels, cp_group=shared, packed_seq_params=packed)
        mask, count = roll_tensor(mask, cp_group=shared, packed_seq_params=packed)
        losses = mask * chunk.losses_of_hidden(states, labels, weight, gathered)
        if chunk.training:
            _record(losses, count, number, layers, group)
        losses = config.mtp_loss_scaling_factor / layers * losses
        if not config.calculate_per_token_loss:
            losses = losses / count.clamp(min=1)
        hidden = MTPLossAutoScaler.apply(hidden, losses)
    return hidden


def _record(losses: Tensor, count: Tensor, number: int, layers: int, group: dist.ProcessGroup) -> None:
    """Add the mean of a microbatch's ``losses``, [b, s / cp], to the record: over the tokens of all ranks of ``group``.

    The ranks share the sequences, and the logs average over ranks: with sums 6 and 2 of 3 and 1 tokens, they record
    6 * 2 / 4 = 3 and 2 * 2 / 4 = 1, whose mean is that of all four tokens.
    """
    total = count.clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    values = mtp_tracker().setdefault(_RECORDED, torch.zeros(layers, device=losses.device))
    values[number] += losses.detach().sum() * group.size() / total.clamp(min=1)


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
    """Return the multi-token prediction layers of one chunk, for ``GPTChunk(mtp_block_spec=...)``; None if it has none.

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


def check_multi_token(
    config: TransformerConfig, tied: bool = False, learned_positions: bool = False, is_ours: bool = True
) -> None:
    """Raise ValueError for layouts on which the loss of multi-token prediction is not the whole batch's.

    On these a rank would divide by its own number of tokens, which differs between ranks that share a sequence, or by
    zero; or another option does not work with these layers. ``tied`` says that the output layer is the embedding's
    transpose, and ``is_ours`` that :func:`add_losses_ahead` computes the loss, not Megatron's ``GPTModel``.
    """
    layers = config.mtp_num_layers
    if not layers:
        return
    if config.context_parallel_size > 1 and not config.calculate_per_token_loss:
        raise ValueError(
            f"mtp_num_layers={layers} with context_parallel_size={config.context_parallel_size} and"
            " calculate_per_token_loss=False: each rank divides that loss by its own tokens; set"
            " calculate_per_token_loss=True or choose context_parallel_size=1"
        )
    if config.context_parallel_size > 1 and _COUNTS_OWN_TOKENS and not is_ours:
        raise ValueError(
            f"mtp_num_layers={layers} with context_parallel_size={config.context_parallel_size}: in megatron-core "
            f"{_MEGATRON} each rank divides that loss by its own tokens; choose context_parallel_size=1, or build"
            " GPTChunk from lightning_mcore.layers.gpt"
        )
    if not _COUNTS_OWN_TOKENS and not config.calculate_per_token_loss and not is_ours:
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
