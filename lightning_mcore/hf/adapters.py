# SPDX-License-Identifier: Apache-2.0
"""Put LoRA adapters on a model, by the Hugging Face names of its projections.

The rules for exchanging weights (``weight_map.py``) say which rows of Megatron's tensors belong to which Hugging Face
projection. Megatron's modules say which rectangle of a tensor a rank holds. So nothing here knows a family or a layout.
``layers/lora.py`` has the adapters, ``layers/adapted_layers.py`` puts them on layers, ``peft_folder.py`` reads them;
``MCoreGPT`` calls both.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor, nn

from lightning_mcore.checkpoint.model_state import TRAINED_ONLY, sharded_tensors
from lightning_mcore.checkpoint.optimizer_state import pieces_of
from lightning_mcore.config.lora import (
    ALL_LINEAR,
    EMBEDDING,
    EXPERTS,
    ROUTERS,
    TRIPLES,
    AdaptedModel,
    LoRA,
    Pair,
    Trained,
)
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.pretrained import ModelPiece, pieces_of_module
from lightning_mcore.hf.source import HFSource, is_own_checkpoint
from lightning_mcore.hf.weight_map import TOWER, WeightMap, held_rectangle, whole_names
from lightning_mcore.hf.weight_rules import Block, Experts, Shape
from lightning_mcore.layers.adapted_layers import ADAPTABLE, ADAPTERS, LINEAR, adapt, freeze, merge, share_a
from lightning_mcore.layers.lora import Projection, Rows
from lightning_mcore.layers.quantized import quantize
from lightning_mcore.layers.score import ScoreLayer
from lightning_mcore.parallel.chunks import ModelChunks
from lightning_mcore.parallel.consensus import all_gather_object

_DIGESTED = 1 << 17  # values digested at once, few enough for a processor's cache
EACH_EXPERT = re.compile(r"\.experts\.\d")
_TRANSLATED = """
    afmoe deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe glm4_moe glm4_moe_lite glm_moe_dsa hunyuan_v1_moe
    minimax_m2 mixtral olmoe qwen3_moe qwen3_next solar_open
"""
_GATES = tuple(gate for gate, _, _ in TRIPLES)
_NOT_IN_PEFT = {"nemotron_h": ("out_proj",)}  # PEFT 0.21 refuses them, because a fast path there reads the weight
# Megatron's modules that may have adapters, besides linear_*
_ADAPTED_OUTSIDE = ("router", "shared_experts", "fc1_latent_proj", "fc2_latent_proj", "word_embeddings", "output_layer")
NEVER_TRAINED = "self_attention.indexer."
"""Prefix of a layer's weights that are buffers: neither are they trained, nor do they have adapters."""
_OF_LATENTS = ("mlp.fc1_latent_proj.", "mlp.fc2_latent_proj.")
_OF_EXPERTS = ("mlp.experts.", "mlp.router.", "mlp.shared_experts.", *_OF_LATENTS)
_OF_DENSE_LAYERS = ("mlp.linear_fc",)
_ADAPTED = (".weight", ".gate_weight")


@dataclass(frozen=True)
class ChunkWeight:
    """A parameter of this rank and the Hugging Face tensors that it holds rows of."""

    name: str
    module: nn.Module
    parameter: nn.Parameter
    whole: Shape  # of the whole model's tensor, without leading axes of experts
    # What it holds: a block within this rank's rectangle, and the block's first row in the parameter
    parts: list[tuple[Block, int]]
    shapes: Mapping[str, Shape]
    # In the whole weight, in order; for experts, in the parameter. A tensor-parallel rank may hold no row of some.
    names: list[str]

    @property
    def modules(self) -> dict[str, None]:
        """Hugging Face names of these tensors' modules, in order, the same on each rank."""
        return dict.fromkeys(name.rpartition(".")[0] for name in self.names)


def add_adapters(chunks: ModelChunks, family: Family, fields: Mapping[str, Any], lora: LoRA) -> None:
    """Freeze a model that has its weights, and put adapters on it; with DoRA collective over the TP ranks."""
    for chunk in chunks.bare:
        # With a base on disk, checkpoints hold the adapters alone
        setattr(chunk, TRAINED_ONLY, lora.base_model_name_or_path is not None)
        freeze(chunk)
    _put_on(chunks, family, fields, lora)


def _put_on(chunks: ModelChunks, family: Family, fields: Mapping[str, Any], lora: LoRA) -> None:
    check_held(family, fields, lora)
    differs = lora.differs_among_experts(projection_names(family, fields))
    family = family.in_adapters()
    for index, chunk in enumerate(chunks.bare):
        found = [each for each in weights_of_chunk(chunks, index, family, fields) if not each.name.startswith(TOWER)]
        chunk.requires_grad_(False)
        for weight in found:
            _train(weight, lora, differs)
        for weight in found if lora.quantization else ():
            # Only after adapters are on: a weight in modules_to_save is not frozen, and is not quantized
            is_linear = isinstance(weight.module, LINEAR) and weight.name.startswith("decoder.")
            if is_linear and weight.name.endswith(".weight") and not weight.parameter.requires_grad:
                projections = [_projection(weight, name) for name in weight.modules]
                quantize(weight.module, projections, _split(weight), lora.double_quantization)


def merge_adapters(
    chunks: ModelChunks, family: Family, fields: Mapping[str, Any], lora: LoRA, fill: Callable[[], None]
) -> None:
    """Merge adapters into a model that has none; ``fill`` gives them their values; collective over the world."""
    trained = [(p, p.requires_grad) for chunk in chunks.bare for p in chunk.parameters()]
    _put_on(chunks, family, fields, lora)
    fill()
    for layer in [layer for chunk in chunks.bare for layer in chunk.modules() if hasattr(layer, ADAPTERS)]:
        merge(layer)
    for parameter, was_trained in trained:
        parameter.requires_grad_(was_trained)


def fingerprint(module: pl.LightningModule, of_adapters: bool = False) -> str:
    """Return what identifies a model's weights, the same on any layout; collective over the world.

    It is a digest of the names and shapes of all tensors and of every value in bf16, without the values of a score
    layer. The digest of a tensor is the sum of its values, each times a number that depends on its place, so ranks sum
    what they hold. ``of_adapters`` identifies the adapters' weights instead; otherwise the module has no adapters yet.
    An adapter's checkpoint records it, to detect another base.
    """
    pieces = pieces_of_module(module, of_adapters)
    scores = any(isinstance(layer, ScoreLayer) for layer in module.modules())  # random for each run, and trained
    own: dict[str, int] = {}
    for piece in pieces.own:
        if piece.is_main and not (scores and piece.name == "output_layer.weight"):
            own[piece.name] = own.get(piece.name, 0) + _weighted_sum(piece, pieces.shapes[piece.name])
    of_ranks = all_gather_object(own)
    sums = {name: sum(of_rank.get(name, 0) for of_rank in of_ranks) % 2**64 for name in pieces.shapes}
    whole = [(name, shape, sums[name]) for name, shape in sorted(pieces.shapes.items())]
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _weighted_sum(piece: ModelPiece, whole: Shape) -> int:
    """Return the sum of a piece's bits, as integers, times weights of their rows and columns, modulo 2**64.

    Each weight is odd, so one changed value changes the sum. Rows are counted through all axes but the last.
    """
    data = piece.data.dequantize() if is_float8tensor(piece.data) else piece.data
    width = piece.shape[-1] if piece.shape else 1
    # Each row's place in the whole tensor. With 4 rows per expert, rows 2 and 3 of expert 1 are at 6 and 7.
    rows = torch.zeros((), dtype=torch.int64, device=data.device)
    for start, length, size in zip(piece.start[:-1], piece.shape[:-1], whole[:-1], strict=True):
        rows = rows[..., None] * size + torch.arange(start, start + length, device=data.device)
    first = piece.start[-1] if piece.start else 0
    of_columns = _odd(torch.arange(first, first + width, device=data.device)).int()
    at_once = max(1, _DIGESTED // max(1, width))
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    parts = (torch.split(each, at_once) for each in (data.reshape(-1, width), rows.reshape(-1)))
    for values, own in zip(*parts, strict=True):
        bits = values.to(torch.bfloat16).contiguous().view(torch.int16).int()
        total += ((bits * of_columns).sum(-1) * _odd(own)).sum()  # integers wrap around
    return int(total)


def _odd(places: Tensor) -> Tensor:
    """Return odd numbers below 2**31 that look random, from places, [n] int64."""
    for factor, shift in ((0x2545F4914F6CDD1D, 29), (0x369DEA0F31A53F85, 32)):
        places = (places + 1) * factor
        places = places ^ (places >> shift)
    return places & 0x7FFFFFFF | 1


def check_held(family: Family, fields: Mapping[str, Any], lora: LoRA) -> None:
    """Raise ValueError for adapters without a place, and weights not trainable as a whole; builds nothing."""
    weights = tensor_names(family.in_adapters(), fields)
    _check_experts(weights, lora)
    refused = _NOT_IN_PEFT.get(family.model_type, ())
    is_biased = any(weight.endswith(("router.expert_bias", "router.choice_bias")) for weight in weights)
    for weight, tensors in weights.items():
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
        saved = [name for name in modules if lora.saves(name)]
        others = [name for name in modules if name not in saved]
        if saved and weight.endswith(".router.weight") and (is_biased or modules[0].rpartition(".")[2] not in ROUTERS):
            raise ValueError(
                f"modules_to_save has {saved[0]}, a router that PEFT keeps in another module, with its bias; leave it"
                " out"
            )
        if saved and others:
            raise ValueError(
                f"modules_to_save has {saved[0]}, which Megatron keeps in one weight with {', '.join(others)}; name"
                " all of them, or none"
            )
        adapted = [name for name in modules if lora.adapts(name)] if weight.endswith(_ADAPTED) else []
        if adapted and adapted[0].endswith(refused):
            last = adapted[0].rpartition(".")[2]
            raise ValueError(
                f"target_modules={lora.target_modules!r} means {adapted[0]}, and PEFT loads no adapters on {last} of"
                f" {family.model_type}; leave it out (exclude_modules={[last]})"
            )
        if adapted and is_translated(family):
            lora.check_parameters(adapted[0])
        if adapted:
            _check_place(weight, adapted[0], lora)


def _check_experts(weights: Mapping[str, Sequence[str]], lora: LoRA) -> None:
    """Raise ValueError for training experts that are one tensor; ``weights`` has each Megatron weight's tensors."""
    names = [name for weight, tensors in weights.items() if _of_all_experts(weight, tensors) for name in tensors]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names if not name.endswith("_bias")))
    saved, adapted = ([name for name in modules if chosen(name)] for chosen in (lora.saves, lora.adapts))
    if saved:
        raise ValueError(
            f"modules_to_save has {saved[0]}, and one tensor for all experts cannot be saved; leave it out"
        )
    if adapted:
        last = list(dict.fromkeys(name.rpartition(".")[2] for name in adapted))
        raise ValueError(
            f"target_modules={lora.target_modules!r} means {adapted[0]}, and one tensor for all experts cannot have"
            f" adapters in this family; leave the experts out (exclude_modules={last})"
        )
    for weight, tensors in weights.items():
        if not weight.endswith(".experts.experts.linear_fc1.weight"):
            continue
        modules = [name.rpartition(".")[0] for name in tensors]
        adapted = [module for module in modules if lora.adapts(module)]
        if adapted and not any(module.endswith(_GATES) for module in modules):
            raise ValueError(
                f"target_modules={lora.target_modules!r} means {adapted[0]}, and experts without a gate projection"
                " cannot have adapters; leave them out (exclude_modules=['experts'])"
            )


def is_translated(family: Family) -> bool:
    """Return whether PEFT reads ``gate_proj`` and the like in ``target_modules`` as a family's routed experts.

    It then takes all other projections of these names for parameters, which can have neither dropout nor DoRA.

    Source: ``_convert_peft_config_moe`` (PEFT 0.21.2).
    """
    return (family.config_class or family.model_type) in _TRANSLATED.split()


def _check_place(weight: str, module: str, lora: LoRA) -> None:
    """Raise ValueError if a Hugging Face module cannot have an adapter, because of what it is in Megatron."""
    last = module.rpartition(".")[2]
    if lora.target_modules == ALL_LINEAR and not lora.targets_parameter(module):
        return
    if ".router." in weight and last not in ROUTERS:
        raise ValueError(f"target_modules has {module}, a router for which PEFT has no adapters; leave it out")
    if not _may_be_adapted(weight):
        raise ValueError(
            f"target_modules has {module}, which is not a linear layer, and cannot have adapters; train it whole with"
            " modules_to_save, or leave it out"
        )


def _may_be_adapted(weight: str) -> bool:
    """Return whether a Megatron weight, by its name, belongs to a module that may have adapters."""
    kind = weight.rpartition(".")[0].rpartition(".")[2]
    return kind.startswith("linear_") or kind in _ADAPTED_OUTSIDE


def _of_all_experts(weight: str, tensors: Sequence[str]) -> bool:
    """Return whether both Megatron and Hugging Face keep all experts of a layer in one tensor."""
    return ".experts.experts." in weight and not all(map(EACH_EXPERT.search, tensors))


def _train(weight: ChunkWeight, lora: LoRA, experts_differ: bool) -> None:
    """Put a weight's adapters on its layer, or let the weight be trained whole."""
    if any(map(lora.saves, weight.modules)):
        weight.parameter.requires_grad_(True)
        return
    if weight.name.startswith("mtp.") or not weight.name.endswith(_ADAPTED):
        return
    adapted = [name for name in weight.modules if lora.adapts(name)]
    if not adapted:
        return
    if not isinstance(weight.module, ADAPTABLE):
        if lora.target_modules == ALL_LINEAR:
            return
        raise ValueError(
            f"target_modules has {adapted[0]}, and a {type(weight.module).__name__} cannot have adapters; train it"
            " whole with modules_to_save, or leave it out"
        )
    lora.check_adapted(adapted)
    projections = [_projection(weight, name) for name in adapted]
    split = _split(weight)
    if projections[0].is_embedding:  # whose weight counts as transposed
        split = None if split is None else 1 - split
    adapt(weight.module, projections, lora, split, experts_differ and EXPERTS in adapted[0])
    # PEFT has one A for gate and up of the experts' parameter, so they share one here
    if EXPERTS in adapted[0] and lora.targets_parameter(adapted[0]):
        share_a(weight.module)


def _split(weight: ChunkWeight) -> int | None:
    """Return the axis of a weight that is split over tensor-parallel ranks; None if it is not split."""
    axes = [axis for axis in (0, 1) if weight.parameter.shape[axis] < weight.whole[axis]]
    return axes[0] if axes else None


def _projection(weight: ChunkWeight, name: str) -> Projection:
    """Return the rows of a parameter that belong to a Hugging Face module."""
    hf = f"{name}.weight"
    own = [(block, row) for block, row in weight.parts if block.hf == hf]
    if isinstance(weight.module, VocabParallelEmbedding):
        tokens, width = weight.shapes[hf]
        return Projection(name, (Rows(0, 0, width),), width, tokens, own[0][0].hf_start[0], is_embedding=True)
    rows, columns = [], set()
    # Rank 1 of TP=2 with 4 heads in 2 groups and 2 channels: q_proj's rows 4-7 are rows 0-3 of its linear_qkv weight,
    # k_proj's rows 2-3 are rows 4-5, and v_proj's rows 2-3 are rows 6-7
    for block, row in own:
        out_start, in_start = block.hf_start[::-1] if block.transposed else block.hf_start
        rows.append(Rows(row, out_start, block.shape[-2]))
        columns.add(in_start)
    is_transposed = any(block.transposed for block, _ in own)
    out_features, in_features = weight.shapes[hf][::-1] if is_transposed else weight.shapes[hf]
    is_alone = len(weight.modules) == 1  # then what is left of the weight is padding
    padding = weight.parameter.shape[0] - sum(part.count for part in rows) if is_alone else 0
    return Projection(
        name,
        tuple(rows),
        out_features,
        in_features,
        min(columns, default=0),
        padding,
        is_cut_unevenly=not weight.name.startswith("output_layer."),
    )


def weights_of_chunk(
    chunks: ModelChunks, index: int, family: Family, fields: Mapping[str, Any]
) -> Iterator[ChunkWeight]:
    """Yield a chunk's parameters with what each holds, without adapters."""
    maps: dict[str, WeightMap] = {}
    owners = {id(p): module for module in chunks.bare[index].modules() for p in module.parameters(recurse=False)}
    for entry in sharded_tensors(chunks, index):
        if not isinstance(entry.data, nn.Parameter) or f".{ADAPTERS}." in entry.key:
            continue
        parts: list[tuple[Block, int]] = []
        name, whole, shapes = entry.key, (), {}  # type: str, Shape, Mapping[str, Shape]
        # Usually one piece; two for a gated MLP's first weight, whose gate and up halves are stored apart
        for piece in pieces_of(entry):
            place = piece.place
            name, start, size = held_rectangle(place)
            whole = whole_names(place.key, tuple(place.global_shape))[name][1]
            known = maps[name] = maps.get(name) or WeightMap(family, fields, {name: whole})
            shapes = known.shapes
            row = piece.start // (entry.data.shape[-1] if entry.data.dim() > 1 else 1)
            for block in known.blocks[name]:
                part = block.within(start, size)
                if part is not None:
                    axis = len(start) - entry.data.dim()
                    parts.append((part, row + part.start[axis] - start[axis]))
        blocks = maps[name].blocks[name] if len(whole) == entry.data.dim() else [block for block, _ in parts]
        names = [block.hf for block in blocks]
        yield ChunkWeight(name, owners[id(entry.data)], entry.data, whole[-2:], parts, shapes, names)


def weights_trained_whole(
    chunks: ModelChunks, family: Family, fields: Mapping[str, Any]
) -> Iterator[tuple[Block, Tensor]]:
    """Yield the parts of whole weights that this rank trains: each block, and its values in Hugging Face's shape."""
    for index in range(len(chunks.bare)):
        for weight in weights_of_chunk(chunks, index, family, fields):
            if weight.parameter.requires_grad:
                for block, row in weight.parts:
                    count = block.shape[-weight.parameter.dim()]
                    rows = weight.parameter[row : row + count]
                    yield block, rows.t() if block.transposed else rows


def adapted_model(tensors: Mapping[str, Shape], family: Family, fields: Mapping[str, Any], lora: LoRA) -> AdaptedModel:
    """Return what :func:`add_adapters` makes of a model, which need not be built; ``lightning-mcore plan`` counts it.

    ``tensors`` are the shapes of its weights by their names in a checkpoint; experts are stacked. Raises ValueError if
    the family has no rule for a weight.
    """
    found: dict[str, Trained] = {}
    for name, blocks in WeightMap(family.in_adapters(), fields, tensors).blocks.items():
        if name.startswith(TOWER):
            continue
        shape = tensors[name]
        sizes: dict[str, tuple[int, int, int]] = {}  # rows, columns and the expert
        for block in blocks:
            module, size = block.hf.rpartition(".")[0], block.shape or (1,)  # a buffer may be a single number
            expert = block.start[0] if len(shape) > 2 else 0
            sizes[module] = (sizes.get(module, (0,))[0] + size[-2:][0], size[-1], expert)
        looks_up = name.startswith("embedding.")
        if len(sizes) == 1 and len(shape) == 2:  # with the padding of a vocabulary
            rows, columns = shape[::-1] if looks_up else shape
            sizes = dict.fromkeys(sizes, (rows, columns, 0))
        is_saved = any(lora.saves(module) for module in sizes)
        # The first module of each expert: with a shared A, only that one counts it
        first = {expert: module for module, (*_, expert) in reversed(sizes.items())}
        pairs = [
            Pair(
                lora.rank(module),
                *size,
                has_a=first[size[2]] == module or EXPERTS not in module or not lora.targets_parameter(module),
                has_lengths=lora.use_dora,
                looks_up=looks_up,
            )
            for module, size in sizes.items()
            if name.endswith(_ADAPTED) and _may_be_adapted(name) and not name.startswith("mtp.")
            if not is_saved and (not looks_up or module.endswith(EMBEDDING)) and lora.adapts(module)
        ]
        if is_saved or pairs:
            found[name] = Trained(is_saved, shape, tuple(sorted(pairs, key=lambda pair: pair.expert)))
    return AdaptedModel(lora, found, is_tied="output_layer.weight" not in tensors)


def frozen_columns(base: str, named: str | None, fields: Mapping[str, Any], lora: LoRA) -> dict[str, int]:
    """Return the columns of a folder's or hub model's frozen weights by Megatron's names; none for a checkpoint."""
    if is_own_checkpoint(base):
        return {}
    source = HFSource.open(base, named)
    family, shapes = source.family, source.open_tensors().shapes
    return {
        weight: shapes[names[0]][-1]
        for weight, names in tensor_names(family, fields).items()
        if names[0] in shapes and not lora.saves(names[0].rpartition(".")[0])
    }


def projection_names(family: Family, fields: Mapping[str, Any]) -> list[str]:
    """Return the Hugging Face names of all modules with a weight that a model may have; it need not be built."""
    found: dict[str, None] = {}
    for weight, names in tensor_names(family.in_adapters(), fields).items():
        for name in names:
            module, _, last = name.rpartition(".")
            if last in ("weight", "bias") or (_of_all_experts(weight, names) and weight.endswith(".weight")):
                found[module] = None  # others, such as the sinks of attention, are in no module of their own
    return list(found)


def tensor_names(family: Family, fields: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the Hugging Face tensors in each Megatron weight that may be trained, by whole name; builds nothing."""
    size, experts = 12, int(fields.get("num_moe_experts") or 0)  # names do not depend on the size
    every = fields.get("moe_layer_freq", 1) if experts else 0
    has_experts = [bool(every)] * int(fields["num_layers"]) if isinstance(every, int) else list(map(bool, every))
    found = {}
    for rule in family.outside:
        if rule.megatron == "output_layer.weight" and fields.get("share_embeddings_and_output_weights"):
            continue
        blocks = rule.blocks((size, size), {**fields, "vocab_size": size})
        found[rule.megatron] = [block.hf for block in blocks]
    for layer in range(int(fields["num_layers"])):
        prefix = family.layer_prefix.replace("{layer}", str(layer))
        for rule in family.layer:
            is_stack = isinstance(rule, Experts)
            if rule.megatron.startswith(_OF_DENSE_LAYERS if has_experts[layer] else _OF_EXPERTS):
                continue
            if rule.megatron.startswith(_OF_LATENTS) and not fields.get("moe_latent_size"):
                continue
            if rule.megatron.startswith(NEVER_TRAINED):
                continue
            blocks = rule.blocks((experts, size, size) if is_stack else (size, size), fields)
            found[f"decoder.layers.{layer}.{rule.megatron}"] = [prefix + block.hf for block in blocks]
    return found
