# SPDX-License-Identifier: Apache-2.0
"""The vision tower of a planned model: its weights, and what a plan does not count of it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.vision import Vision
from lightning_mcore.layers.vision_weights import tower_weights
from lightning_mcore.models.vision import check_parts
from lightning_mcore.planning.model import GPTFields, stage_layers


def with_tower(fields: GPTFields, model: Mapping[str, Any]) -> GPTFields:
    """Return a model with the weights of its tower, and with the parts that are frozen.

    Args:
        fields: The model.
        model: The arguments of ``MCoreVisionGPT``, or of ``MCoreGPT``.
    """
    if model.get("vision") is None:
        return fields
    vision = Vision.of(model["vision"])
    weights = {f"vision.tower.{name}": (shape, vision.part_of(name)) for name, shape in tower_weights(vision).items()}
    return replace(fields, tower=weights, frozen=frozenset(model.get("freeze") or ()), deepstack=vision.deepstack)


def check_freezing(model: Mapping[str, Any]) -> None:
    """Refuse adapters of a language model that is frozen.

    Args:
        model: The arguments of ``MCoreVisionGPT``, or of ``MCoreGPT``.

    Raises:
        ValueError: There are such adapters, or a part is unknown.
    """
    check_parts(model.get("freeze") or (), model.get("lora"))


def check_first_stage(fields: GPTFields, layout: ParallelLayout) -> None:
    """Refuse a first pipeline stage with too few layers for the outputs from inside the tower.

    Args:
        fields: The model.
        layout: The parallel sizes, which fit the model.

    Raises:
        ValueError: It has too few.
    """
    Vision.check_first_stage(fields.deepstack, len(stage_layers(fields, layout)[0][0].layers))


def assumptions_of_vision(fields: GPTFields | None) -> Iterator[str]:
    """Yield what is not counted, as part of a sentence.

    Args:
        fields: The model; None if unknown.
    """
    if fields is not None and fields.tower:
        yield "activations, operations and time of the vision tower depend on the images, and are not counted"
