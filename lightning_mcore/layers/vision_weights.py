# SPDX-License-Identifier: Apache-2.0
"""The weights of a vision tower without their memory, and the operations of its matrix products."""

import importlib
from collections.abc import Collection
from math import prod
from typing import Any

import torch

from lightning_mcore.config.vision import PROJECTOR, TOWER, Vision


def tower_weights(vision: Vision) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a tower and its projector, by their names in transformers' class.

    Args:
        vision: Its settings.
    """
    kind: Any = getattr(importlib.import_module(vision.family.package), vision.family.tower)
    with torch.device("meta"):
        tower = kind(kind.config_class(**vision.config))
    return {name: tuple(weight.shape) for name, weight in tower.named_parameters()}


def tower_flops_per_token(vision: Vision, frozen: Collection[str] = ()) -> int:
    """Return the floating-point operations of training a tower on one token of an image, forward and backward.

    Only products with weights count. The scores of its attention are left out.

    Args:
        vision: The settings of the tower.
        frozen: The parts of the model that are not trained.
    """
    patches = int(vision.config["spatial_merge_size"]) ** 2
    learns = {part: part not in frozen for part in (TOWER, PROJECTOR)}
    found = 0
    for name, shape in tower_weights(vision).items():
        if len(shape) < 2 or name.startswith("pos_embed."):  # a table, which is looked up
            continue
        part = vision.part_of(name)
        forward = 2 * prod(shape) * (patches if part == TOWER else 1)
        # No gradient of pixels; that of the projector's inputs also reaches its norms.
        has_input_gradient = (learns[TOWER] or learns[part]) and not name.startswith("patch_embed.")
        found += (1 + learns[part] + has_input_gradient) * forward
    return found
