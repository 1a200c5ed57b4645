# SPDX-License-Identifier: Apache-2.0
"""The vision tower of a planned model: its weights, and for a number of image tokens its activations and operations.

The images of a microbatch are taken to be shared out evenly over the tensor- and context-parallel ranks of the first
stage (``layers/vision.py``). Scores of the tower's attention are not counted, because they depend on the sizes of the
images; nor are small tensors: statistics of norms, tables of positions, the tower's outputs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.vision import PARTS, PROJECTOR, TOWER, Vision
from lightning_mcore.layers.vision_weights import tower_flops_per_token, tower_weights
from lightning_mcore.planning.model import FP32, GPTFields, stage_layers

_NAME = "vision.tower."


def with_tower(fields: GPTFields, model: Mapping[str, Any]) -> GPTFields:
    """Return a model with the weights of its tower, and with the parts that are frozen."""
    if model.get("vision") is None:
        return fields
    vision = Vision.of(model["vision"])
    weights = {_NAME + name: (shape, vision.part_of(name)) for name, shape in tower_weights(vision).items()}
    return replace(fields, tower=weights, frozen=frozenset(model.get("freeze") or ()), vision=vision)


def with_images(fields: GPTFields, image_tokens: int | None, seq_length: int) -> GPTFields:
    """Return a model whose rows have this many tokens of images.

    Raises ValueError if the model has no tower, or a row does not have as many tokens.
    """
    if image_tokens is None:
        return fields
    if fields.vision is None:
        raise ValueError(f"image_tokens={image_tokens} is given, but the model has no vision tower; leave it out")
    if not 1 <= image_tokens <= seq_length:
        raise ValueError(
            f"image_tokens={image_tokens} does not fit a row of {seq_length} tokens; choose 1 to {seq_length}"
        )
    teacher = None if fields.teacher is None else replace(fields.teacher, image_tokens=image_tokens)
    return replace(fields, image_tokens=image_tokens, teacher=teacher)


def check_first_stage(fields: GPTFields, layout: ParallelLayout, teacher: str | None = None) -> None:
    """Refuse a first pipeline stage with too few layers for the outputs from inside the tower.

    ``teacher`` is the path of the model if it is a teacher.
    """
    if fields.vision is not None:
        Vision.check_first_stage(fields.vision.deepstack, len(stage_layers(fields, layout)[0][0].layers), teacher)


def assumptions_of_vision(fields: GPTFields | None) -> Iterator[str]:
    """Yield what is assumed or not counted, as part of a sentence."""
    if fields is None or fields.vision is None:
        return
    if fields.image_tokens:
        yield (
            f"{fields.image_tokens:,} tokens of images in each row, shared out evenly over the ranks of the first stage"
            " that have the same rows; the scores of the vision tower's attention are not counted"
        )
    else:
        yield (
            "activations, operations and time of the vision tower depend on the images, and are not counted (or give"
            " --image-tokens)"
        )


def trained_parameters(fields: GPTFields) -> int:
    """Return how many parameters of the tower and its projector are trained."""
    frozen = _frozen(fields)
    return sum(prod(shape) for shape, part in fields.tower.values() if part not in frozen)


def _frozen(fields: GPTFields) -> Collection[str]:
    return PARTS if fields.adapters is not None else fields.frozen


def tower_flops(fields: GPTFields) -> tuple[float, float]:
    """Return the operations of the tower for the images of a row, without and with those of recomputation."""
    if fields.vision is None or not fields.image_tokens:
        return 0.0, 0.0
    recomputes = (False, fields.recompute_granularity == "full")
    once, again = (tower_flops_per_token(fields.vision, _frozen(fields), each) for each in recomputes)
    return fields.image_tokens * once, fields.image_tokens * again


def patch_bytes(fields: GPTFields, rows: int) -> int:
    """Return the bytes of the patches of some rows, which every rank of the first stage has, in fp32."""
    if fields.vision is None:
        return 0
    return rows * fields.image_tokens * fields.vision.patches_of_token * _pixels(fields) * FP32


def _pixels(fields: GPTFields) -> int:
    return prod(fields.tower[f"{_NAME}patch_embed.proj.weight"][0][1:])


def tower_bytes(fields: GPTFields, layout: ParallelLayout, rows: int, element: int) -> tuple[float, float]:
    """Return the bytes of the tower's activations on one rank of the first stage, without the patches of the batch.

    Returns the bytes that it keeps of a microbatch for backward; and those that its worst moment takes beside them,
    while the layers of the language model keep nothing of this microbatch.
    """
    vision, frozen = fields.vision, _frozen(fields)
    if vision is None or not fields.image_tokens:
        return 0.0, 0.0
    shapes = {name.removeprefix(_NAME): shape for name, (shape, _) in fields.tower.items()}
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    tokens = rows * fields.image_tokens
    own = tokens * vision.patches_of_token / (tp * cp)
    width = vision.width * element
    norm, inner, of_inner = _of_parts(vision, shapes, element)
    block = 2 * norm + 9 * width + of_inner * inner  # 2 outputs of norms, 3 + 2 of attention before and 2 after it
    projector = norm + width * (1 if PROJECTOR in frozen else 3)
    recomputes = fields.recompute_granularity == "full"
    kept, beside = 0.0, of_inner * inner + 2 * width
    if TOWER not in frozen:
        kept += _pixels(fields) * element + int(vision.config["depth"]) * (width if recomputes else block)
        kept += projector + vision.deepstack * (projector - norm)  # inputs of further projectors are those of blocks
        if recomputes:  # the last block, when what the projector kept is free again
            beside = max(beside, block + inner - projector)
    elif PROJECTOR not in frozen:
        kept += (1 + vision.deepstack) * projector
    kept *= own
    if recomputes:  # a recomputed layer keeps its inputs, and the outputs from inside the tower are among them
        ranks = cp * (tp if layout.sequence_parallel else 1)
        kept += bool(vision.deepstack) * (1 + vision.deepstack) * fields.hidden_size * element * tokens / ranks
    return kept, beside * own


def _of_parts(vision: Vision, shapes: Mapping[str, tuple[int, ...]], element: int) -> tuple[float, float, int]:
    """Return bytes for a patch: of what a norm keeps of its input, and of the inner width; and how often it is kept."""
    inner = next(shape[0] for name, shape in shapes.items() if name.startswith("blocks.0.mlp."))
    # RMSNorm keeps its input in fp32, and once more before the weight.
    norm = vision.width * (element if "blocks.0.norm1.bias" in shapes else element + FP32)
    # Before and after an activation, and its sigmoid; a gate also keeps what it opens, and their product.
    of_activation = {"quick_gelu": 3}.get(vision.config["hidden_act"], 2)
    return norm, inner * element, 4 if "blocks.0.mlp.gate_proj.weight" in shapes else of_activation
