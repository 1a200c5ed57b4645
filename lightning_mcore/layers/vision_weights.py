# SPDX-License-Identifier: Apache-2.0
"""The shapes of a vision tower's weights, without memory for them, and the operations of its matrix products.

Plans of a run use both: ``planning`` counts bytes and floating-point operations before anything is built.
"""

import functools
import importlib
import json
from collections.abc import Collection
from math import prod
from typing import Any

import torch

from lightning_mcore.config.vision import PROJECTOR, TOWER, Vision

_LAST = ("fc2.weight", "down_proj.weight")
"""Ends of the names of a block's last matrix."""


def tower_weights(vision: Vision) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a tower and its projector, by their names in transformers' class."""
    return _weights(vision.family.package, vision.family.tower, json.dumps(vision.config, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _weights(package: str, name: str, config: str) -> dict[str, tuple[int, ...]]:
    kind: Any = getattr(importlib.import_module(package), name)
    with torch.device("meta"):
        tower = kind(kind.config_class(**json.loads(config)))
    return {name: tuple(weight.shape) for name, weight in tower.named_parameters()}


def tower_flops_per_token(vision: Vision, frozen: Collection[str] = (), recomputes: bool = False) -> int:
    """Return the floating-point operations of training a tower on one image token, forward and backward.

    Only products with weights count, not attention scores. ``frozen`` names the parts that are not trained,
    ``recomputes`` counts the second forward pass of recomputed blocks.
    """
    patches = vision.patches_of_token
    learns = {part: part not in frozen for part in (TOWER, PROJECTOR)}
    found = 0
    for name, shape in tower_weights(vision).items():
        if len(shape) < 2 or name.startswith("pos_embed."):
            continue
        part = vision.part_of(name)
        forward = 2 * prod(shape) * (patches if part == TOWER else 1)
        # Pixels need no gradient; the projector's inputs do, for its norms.
        has_input_gradient = (learns[TOWER] or learns[part]) and not name.startswith("patch_embed.")
        # PyTorch recomputes a block up to the inputs of its last matrix.
        again = recomputes and learns[part] and name.startswith("blocks.") and not name.endswith(_LAST)
        found += (1 + learns[part] + has_input_gradient + again) * forward
    return found
