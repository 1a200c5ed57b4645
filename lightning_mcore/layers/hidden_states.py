# SPDX-License-Identifier: Apache-2.0
"""Hidden states of some layers of a chunk, and their distance from a teacher's.

:func:`keeping` collects what layers return, with hooks. :class:`HiddenDistance` compares a student's states of some
layers with a teacher's. If the models have different hidden sizes, it also has a projection for each pair of layers, as
in TinyBERT. A projection is trained, and stored in checkpoints; it is not a weight of the model that is exported. All
tensor-parallel ranks hold it whole.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.config.distillation import HiddenLoss, PairPlaces, StatesOf
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.parallel.groups import generator_of

PROJECTIONS = "teacher_projections"
"""Attribute of a student's chunk with its projections; their names in a checkpoint begin with it."""

Pair = tuple[int, int]  # a layer of the student and one of the teacher, counted from 1


def is_projection(name: str) -> bool:
    """Return whether a stored tensor is a projection to a teacher's hidden size."""
    return name.startswith(f"{PROJECTIONS}.")


def layers_of(chunk: GPTChunk) -> dict[int, nn.Module]:
    """Return a chunk's modules that return hidden states, by the layer, counted from 1 in the whole model."""
    found: dict[int, nn.Module] = {layer.layer_number: layer for layer in chunk.decoder.layers}
    found.pop(chunk.config.num_layers, None)
    if chunk.decoder.final_layernorm is not None:
        found[chunk.config.num_layers] = chunk.decoder.final_layernorm
    return found


@contextlib.contextmanager
def keeping(chunk: GPTChunk, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states of some of a chunk's layers, [s, b, h] or a sequence-parallel share, by the layer."""
    kept: dict[int, Tensor] = {}
    modules = layers_of(chunk)
    with contextlib.ExitStack() as stack:
        for layer in layers:

            def keep(_: nn.Module, __: Any, found: Any, layer: int = layer) -> None:
                kept[layer] = found[0] if isinstance(found, tuple) else found

            stack.enter_context(modules[layer].register_forward_hook(keep))
        yield kept


class Projection(nn.Linear):
    """A linear layer without bias to a teacher's hidden size; its first values depend only on the run's seed."""

    def __init__(self, config: TransformerConfig, size: int, pair: Pair) -> None:
        super().__init__(config.hidden_size, size, bias=False, device="meta")
        drawn = torch.randn(size, config.hidden_size, generator=generator_of(f"projection {pair}"))
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter((drawn / config.hidden_size**0.5).to(device, config.params_dtype))
        # With sequence parallelism, each rank has the gradient of its tokens, and Megatron sums them
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class HiddenDistance:
    """The mean distance over pairs of layers, of which one chunk compares some."""

    def __init__(self, chunk: GPTChunk, teacher: GPTChunk, places: PairPlaces, number: int, loss: HiddenLoss) -> None:
        self.pairs, self.of_pairs, self.loss = places.compared_in(number), len(places.pairs), loss
        self.kept, self.sent = places.kept_in(number), places.sent_by(number)
        self.received = places.sent_by(number - 1)
        self.projections: Mapping[str, nn.Module] = {}
        size = teacher.config.hidden_size
        if not self.pairs or chunk.config.hidden_size == size:
            return
        known: Any = getattr(chunk, PROJECTIONS, None)  # of an earlier run
        if known is None:
            known = nn.ModuleDict({_name(pair): Projection(chunk.config, size, pair) for pair in self.pairs})
            chunk.add_module(PROJECTIONS, known)
        self.projections = known

    def __call__(self, states: Mapping[StatesOf, Tensor], like: Tensor) -> Tensor:
        """Return this chunk's part of the distance of each token, [s, b, 1] fp32; ``like`` is [s, b, ...]."""
        total = torch.zeros(like.shape[:2], dtype=torch.float32, device=like.device)
        for pair in self.pairs:
            own, wanted = states[StatesOf(False, pair[0])], states[StatesOf(True, pair[1])].float()
            if self.projections:
                project = self.projections[_name(pair)]
                own = project(own.to(next(project.parameters()).dtype))
            if self.loss == "mse":
                total = total + (own.float() - wanted).square().mean(-1)
            else:
                total = total + 1 - functional.cosine_similarity(own.float(), wanted, dim=-1)
        return total[..., None] / self.of_pairs


def _name(pair: Pair) -> str:
    return f"{pair[0]}-{pair[1]}"
