# SPDX-License-Identifier: Apache-2.0
"""Log the losses that Megatron's layers compute, for expert routers and multi-token prediction.

They never pass through ``training_step``. Megatron's layers add them up, layer by layer, in trackers of the process,
over the microbatches of a step. ``step.py`` empties the trackers before a training step and logs what
:class:`AuxiliaryLogs` has read from them after it, for any model built with ``pipeline()``.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_mcore.config.architecture import moe_layers
from lightning_mcore.layers.multi_token import mtp_tracker, recorded_mtp_losses
from lightning_mcore.layers.router import GLOBAL_BALANCING_LOSS, Z_LOSS, recorded_values, router_tracker
from lightning_mcore.parallel.groups import process_group

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": GLOBAL_BALANCING_LOSS,
}


class AuxiliaryLogs:
    """Reads the losses of Megatron's layers, one training step at a time; nothing is recorded in evaluation.

    * ``load_balancing_loss``, ``seq_load_balancing_loss``, ``global_load_balancing_loss`` and ``z_loss``: the mean over
      the layers with experts, without the coefficients. With ``TransformerConfig(moe_per_layer_logging=True)`` also
      each layer's value, as ``moe/z_loss_layer_0``, counted from 0 as Megatron does.
    * ``mtp_loss_1``, ``mtp_loss_2``, ...: the loss of the first, second, ... token after the next one: the mean over
      microbatches of each one's mean over tokens. Under context parallelism, a plain ``GPTModel`` averages the ranks'
      means; ``gpt.GPTChunk`` weights them by their tokens.

    Source: ``track_moe_metrics`` (megatron.core.transformer.moe.moe_utils, 0.16.1), ``MoEMetricsTracker.report``
    (moe_logging.py, 0.19.2) and ``MTPLossLoggingHelper`` (multi_token_prediction.py, both).
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        self._device = device
        self._router_losses = router_losses(config)
        self._mtp_layers: int = config.mtp_num_layers or 0
        self._layers_with_experts = layers_with_experts(config)
        self._num_rows = config.num_layers + self._mtp_layers
        self._each_layer: bool = getattr(config, "moe_per_layer_logging", False)

    def start(self) -> None:
        """Empty the trackers, including values from another model's layers."""
        router_tracker().clear()
        mtp_tracker().clear()

    def finish(self, num_microbatches: int) -> dict[str, Tensor]:
        """Return the losses of a step by name, ``[]`` fp32, and empty the trackers; collective over all ranks."""
        values: dict[str, Tensor] = {}
        if self._router_losses or self._mtp_layers:
            rows = self._reduced() / num_microbatches
            for name, row in zip(self._router_losses, rows, strict=False):
                # One by one: a list as an index is copied to the device, and the copy waits for it.
                of_layers = {layer: row[layer] for layer in self._layers_with_experts}
                values[name] = torch.stack(list(of_layers.values())).mean()
                if self._each_layer:
                    values |= {f"moe/{name}_layer_{layer}": value for layer, value in of_layers.items()}
            values |= {f"mtp_loss_{index + 1}": rows[-1, index] for index in range(self._mtp_layers)}
        self.start()
        return values

    def _reduced(self) -> Tensor:
        """Return sums over microbatches, [losses, layers] fp32: router losses, then multi-token prediction."""
        rows = torch.zeros(len(self._router_losses) + 1, self._num_rows, device=self._device)
        tracker = router_tracker()
        for index, name in enumerate(self._router_losses):
            if name in tracker:
                rows[index] = recorded_values(tracker[name])
        values = recorded_mtp_losses()
        if values is not None:
            rows[-1, : self._mtp_layers] = values
        # The same layer on other data, then the layers of other stages, whose rows are zero here.
        for axis in ("dp_cp", "model"):
            dist.all_reduce(rows, group=process_group(axis))
        names = (*self._router_losses, "")
        return rows / torch.stack([torch.full((1,), self._copies(name), device=self._device) for name in names])

    def _copies(self, name: str) -> float:
        """Return what the sum of a loss over all ranks is divided by."""
        # With DP=2, CP=2, TP=2 (8 ranks): global balancing losses are the plain sum. Each rank holds a part of its
        # copy's other balancing losses, so their sum is divided by 2. Other losses, by 4 * 2 = 8.
        data_and_context = process_group("dp_cp").size()
        if name == GLOBAL_BALANCING_LOSS:
            return 1.0
        if name in _BALANCING.values():
            return data_and_context / process_group("cp").size()
        return float(data_and_context * process_group("tp").size())


def router_losses(config: TransformerConfig) -> list[str]:
    """Return the names of the losses that a model's routers record."""
    if not config.num_moe_experts:
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, weights = [kinds], [weights]
    names = [_BALANCING[kind] for kind, weight in zip(kinds, weights, strict=True) if kind in _BALANCING and weight > 0]
    return [*names, Z_LOSS] if config.moe_z_loss_coeff is not None else names


def layers_with_experts(config: TransformerConfig) -> list[int]:
    """Return the indices of the layers with experts, from 0; multi-token prediction comes last."""
    pattern = moe_layers(vars(config))
    pattern += [pattern[-1]] * (config.mtp_num_layers or 0)
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]
