# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank of a pipeline stage: weights, gradients, optimizer state, activations.

The one entry for ``lightning-mcore plan``: it takes a run as the arguments that its parts are made with. What a process
takes beside these (libraries, communication buffers, a fragmented allocator, the work space of kernels) is not counted;
on a GPU leave some gigabytes for it. Pure arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.activation_memory import ActivationSetting, activation_memory
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import rank_tensors
from lightning_mcore.planning.saved_tensors import NumberFormat
from lightning_mcore.planning.state_memory import StateFormats, state_memory

_BACKENDS = ("local", "transformer_engine")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, at the moment of a step when most is held.

    Args:
        weights: Of parameters, padding included.
        gradients: Of the buffers in which gradients are summed.
        optimizer: Of fp32 copies and moments, on the device.
        activations: Of what forward keeps for backward, of all microbatches in flight.
        host: Optimizer state that is kept in the memory of the host; not in the total.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations


def rank_memory(
    fields: GPTFields,
    layout: ParallelLayout,
    pipeline_rank: int,
    *,
    world_size: int,
    precision: Mapping[str, Any] = _NOTHING,
    strategy: Mapping[str, Any] = _NOTHING,
    optimizer: str = "adamw",
    micro_batch_size: int = 1,
    num_microbatches: int = 1,
    seq_length: int | None = None,
    packed: bool = False,
    backend: str = "local",
) -> RankMemory:
    """Return the bytes that a rank of a pipeline stage holds; all ranks of a stage are alike but for padding.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model and the world.
        pipeline_rank: The stage, from 0.
        world_size: Ranks of the run.
        precision: Arguments of ``MCorePrecision``; the name of the format under ``"precision"``.
        strategy: Arguments of ``MCoreStrategy``; ``ddp_config`` and ``optimizer_config`` as dicts of their fields.
        optimizer: ``"adam"``, ``"adamw"``, ``"sgd"`` (with momentum), ``"sgd_without_momentum"`` or
            ``"muonwithadamw"``.
        micro_batch_size: Rows of a microbatch on one data-parallel rank.
        num_microbatches: Microbatches of a step on one data-parallel rank.
        seq_length: Tokens of a row; None for the model's.
        packed: Whether rows hold several sequences each.
        backend: Whose layers: ``"local"`` or ``"transformer_engine"``.

    Raises:
        ValueError: The precision, the optimizer or the backend is unknown.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose one of {_BACKENDS}")
    formats = StateFormats.of(precision, strategy, optimizer)
    tensors = rank_tensors(fields, layout, pipeline_rank, backend)
    state = state_memory(tensors, layout, formats, world_size, pipeline_rank)
    setting = ActivationSetting(
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        seq_length=fields.seq_length if seq_length is None else seq_length,
        form=NumberFormat(formats.parameter, backend, formats.fp8 and backend == "transformer_engine", packed),
        group_size=strategy.get("microbatch_group_size_per_vp_stage"),
    )
    activations = activation_memory(fields, layout, pipeline_rank, setting)
    return RankMemory(state.weights, state.gradients, state.optimizer, activations, state.host)
