# SPDX-License-Identifier: Apache-2.0
"""The parameters of one chunk on one rank, tensor by tensor, and their number.

The tensors are those of the real layers (``built.py``); here they are laid out: a layer is repeated, tensor-parallel
ranks share what Megatron marks as shared, and experts are divided over their ranks. So any layout costs microseconds.

The single tensors matter to ``state_memory.py`` because the distributed optimizer pads each of them; their sums are the
parameters of a rank and of the whole model. All ranks of a stage hold the same number, because axes divide evenly
(``config/layout.py`` refuses other cases). The sum over ranks is larger than the model: some parameters are whole on
every rank, a tied embedding is on the first and the last stage, and multi-token prediction has an embedding on its
stage.

With adapters (``arguments.py``), each weight is followed by its adapters, and frozen tensors are marked.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.lora import LoRA, Pair
from lightning_mcore.config.vision import LANGUAGE_MODEL
from lightning_mcore.planning.built import ParameterTensor, built_model, kinds
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers

Tensors = list[list[ParameterTensor]]
"""The parameters of a rank, chunk by chunk."""


def chunk_tensors(
    fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backend: str = "local"
) -> list[ParameterTensor]:
    """Return the parameters of a chunk on one rank of a layout that fits the model."""
    own = [
        trained
        for prefix, tensor in _of_chunk(fields, layout, chunk, backend)
        for trained in _with_adapters(fields, layout, prefix, tensor)
    ]
    width = fields.projected_width
    shape = (width, fields.hidden_size)
    return own + [ParameterTensor("projection", prod(shape), is_matrix=True, shape=shape)] * (chunk.pairs * (width > 0))


def whole_shapes(fields: GPTFields) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of the model by their names in a checkpoint; experts are stacked."""
    return {
        prefix + tensor.name: (tensor.copies,) * tensor.expert + tensor.shape
        for prefix, tensor in _of_chunk(fields, ParallelLayout(), _whole(fields), "local")
    }


def _with_adapters(
    fields: GPTFields, layout: ParallelLayout, prefix: str, tensor: ParameterTensor
) -> Iterator[ParameterTensor]:
    """Yield a tensor, and the adapters that are on it."""
    if fields.adapters is None:
        _, part = fields.tower.get(prefix + tensor.name, ((), LANGUAGE_MODEL))
        yield tensor._replace(is_trained=part not in fields.frozen) if fields.frozen else tensor
        return
    own = fields.adapters.of.get(prefix + tensor.name)
    is_saved = own is not None and own.is_saved
    is_quantized = tensor.is_linear and prefix.startswith("decoder.") and not is_saved
    yield tensor._replace(is_trained=is_saved, bits=_bits(fields.adapters.lora) if is_quantized else None)
    pairs = own.pairs if own is not None else ()
    if not tensor.expert:
        for pair in pairs:
            yield from _pair(pair, layout.tensor_model_parallel_size, tensor)
        return
    # Experts may differ in rank by a pattern; the rank with most adapters counts.
    of_ranks: dict[int, list[Pair]] = {}
    for pair in pairs:
        of_ranks.setdefault(pair.expert // tensor.copies, []).append(pair)
    most = max(of_ranks.values(), key=lambda of_rank: sum(pair.rank for pair in of_rank), default=[])
    for pair in most:
        yield from _pair(pair, layout.expert_tensor_size, tensor)


def _bits(lora: LoRA | None) -> float | None:
    """Return the bits of an element in blocks of 64, whose lengths have 32 bits, or 8 in blocks of 256."""
    if lora is None or lora.quantization is None:
        return None
    return 4 + (8 / 64 + 32 / 64 / 256 if lora.double_quantization else 32 / 64)


def _pair(pair: Pair, ranks: int, tensor: ParameterTensor) -> Iterator[ParameterTensor]:
    """Yield A, B, and with DoRA the lengths, as tensor-parallel ranks share them."""
    axis_of_a = 0 if pair.looks_up else 1  # of the weight
    of_a, of_b = (ranks if tensor.split == axis else 1 for axis in (axis_of_a, 1 - axis_of_a))
    if pair.has_a:
        yield ParameterTensor("lora_A", pair.rank * pair.columns // of_a, expert=tensor.expert, is_matrix=True)
    yield ParameterTensor("lora_B", pair.rows * pair.rank // of_b, expert=tensor.expert, is_matrix=True)
    if pair.has_lengths:
        yield ParameterTensor("lora_magnitude_vector", pair.rows // of_b)


_Placed = Iterator[tuple[str, ParameterTensor]]  # a prefix of the name, and the tensor


def _of_chunk(fields: GPTFields, layout: ParallelLayout, chunk: ChunkLayers, backend: str) -> _Placed:
    staged = layout.pipeline_model_parallel_size > 1
    parts: dict[str, list[ParameterTensor]] = {}
    for prefix, tensor in built_model(fields).tensors:
        parts.setdefault(prefix, []).append(_on_rank(layout, tensor, backend))
    if chunk.embedding or chunk.mtp:
        shared = staged and (fields.tied or fields.mtp_num_layers > 0)
        yield from (
            ("embedding.", tensor._replace(is_shared=shared and tensor.name.startswith("word_")))
            for tensor in parts["embedding."]
        )
    places = {kind: f"decoder.layers.{place}." for place, kind in enumerate(kinds(fields))}
    for layer in chunk.layers:
        place = places[fields.kind(layer)]
        yield from ((f"decoder.layers.{layer}.", tensor) for tensor in parts[place])
    # Without multi-token prediction the final norm comes before the output layer, with it after the last layer.
    if (fields.num_layers - 1 in chunk.layers) if fields.mtp_num_layers else chunk.output:
        yield from (("decoder.", tensor) for tensor in parts["decoder."])
    for ahead in range(chunk.mtp):
        yield from ((f"mtp.layers.{ahead}.", tensor) for tensor in parts["mtp.layers.0."])
    if chunk.output and not fields.tied:
        yield from (("", tensor) for tensor in parts.get("", ()))  # a model of vectors has none
    elif chunk.output and not chunk.embedding:
        yield "embedding.", parts["embedding."][0]._replace(is_shared=staged)
    for name, (shape, _) in fields.tower.items() if chunk.embedding else ():
        yield "", ParameterTensor(name, prod(shape), is_matrix=len(shape) == 2, shape=shape)


_WHOLE = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")
"""Weights that each rank has whole with TransformerEngine's layers, and shares with the torch backend's."""


def _on_rank(layout: ParallelLayout, tensor: ParameterTensor, backend: str) -> ParameterTensor:
    """Return a tensor as a rank holds it."""
    ranks = layout.expert_tensor_size if tensor.expert else layout.tensor_model_parallel_size
    if tensor.split is None or ranks == 1 or (tensor.name in _WHOLE and backend == "transformer_engine"):
        tensor = tensor._replace(split=None)
    else:
        tensor = tensor._replace(size=tensor.size // ranks)
    copies = tensor.copies // layout.expert_model_parallel_size if tensor.expert else 1
    return tensor._replace(copies=copies)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank, in elements: outside routed experts, of routed experts, and of each the trained ones."""

    dense: int
    expert: int
    trained_dense: int
    trained_expert: int

    @property
    def total(self) -> int:
        """All that the rank holds."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of a whole model, in elements, adapters included; a tied embedding is counted once."""

    total: int
    active: int  # what one token uses: of a layer's routed experts, only ``moe_router_topk``
    trained: int


def count_of(chunks: Iterable[Iterable[ParameterTensor]]) -> ParameterCount:
    """Return how many parameters the chunks of a rank have."""
    counts = dict.fromkeys(((expert, trained) for expert in (False, True) for trained in (False, True)), 0)
    for tensor in chain.from_iterable(chunks):
        counts[tensor.expert, tensor.is_trained] += tensor.elements
    dense, expert = counts[False, True], counts[True, True]
    return ParameterCount(dense + counts[False, False], expert + counts[True, False], dense, expert)


def rank_tensors(fields: GPTFields, layout: ParallelLayout, pipeline_rank: int, backend: str = "local") -> Tensors:
    """Return the parameter tensors of each rank of a pipeline stage, chunk by chunk."""
    chunks = stage_layers(fields, layout)[pipeline_rank]
    return [chunk_tensors(fields, layout, chunk, backend) for chunk in chunks]


def model_parameters(fields: GPTFields) -> ModelParameters:
    """Return the number of parameters of the model, which does not depend on the ranks."""
    tensors = chunk_tensors(fields, ParallelLayout(), _whole(fields))
    total = sum(tensor.elements for tensor in tensors)
    trained = sum(tensor.elements for tensor in tensors if tensor.is_trained)
    idle = 1 - fields.moe_router_topk / fields.num_moe_experts if fields.num_moe_experts else 0
    return ModelParameters(total, total - round(idle * sum(t.elements for t in tensors if t.expert)), trained)


def _whole(fields: GPTFields) -> ChunkLayers:
    return ChunkLayers(tuple(range(fields.num_layers)), embedding=True, output=True, mtp=fields.mtp_num_layers)
