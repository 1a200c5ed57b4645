# SPDX-License-Identifier: Apache-2.0
"""Train some of a model's weights and freeze the others, chosen by parts of their Hugging Face names.

A Megatron weight that holds several Hugging Face tensors, such as queries, keys and values, is trained as a whole.
Frozen weights have no gradients and no optimizer state; gradients flow through them. Checkpoints hold all weights.
``MCoreGPT(train_only=...)`` uses this; its check runs before anything is built.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mcore.checkpoint.model_state import TRAINED_ONLY
from lightning_mcore.config.lora import EMBEDDING, OUTPUT, AdaptedModel, Trained
from lightning_mcore.hf.adapters import NEVER_TRAINED, tensor_names, weights_of_chunk
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.weight_map import WeightMap
from lightning_mcore.hf.weight_rules import Shape
from lightning_mcore.layers.adapted_layers import add_bias_apart, freeze
from lightning_mcore.parallel.chunks import ModelChunks


def check_trained(family: Family, fields: Mapping[str, Any], train_only: Sequence[str]) -> None:
    """Raise ValueError if a part of a name chooses nothing, or only part of one Megatron weight; builds nothing."""
    weights = tensor_names(family, fields).values()
    known = [name for names in weights for name in names]
    for part in train_only:
        if not any(part in name for name in known):
            if part.strip(".").startswith(OUTPUT) and any(EMBEDDING in name for name in known):
                raise ValueError(
                    f"train_only has {part!r}, and the output layer of this model is its embedding; name {EMBEDDING!r},"
                    " which trains both"
                )
            # "layers.9.mlp" is given, and the weights are "model.layers.0.mlp.up_proj.weight" to "model.layers.3...."
            prefix = family.layer_prefix.partition("{layer}")[0]
            layers = {int(name.removeprefix(prefix).split(".")[0]) for name in known if name.startswith(prefix)}
            number = re.search(rf"\b{prefix.split('.')[-2]}\.(\d+)\b", part)
            if number is not None and int(number[1]) not in layers:
                raise ValueError(
                    f"train_only has {part!r}, but the model's layers have the numbers {min(layers)} to {max(layers)};"
                    " choose from these"
                )
            words = sorted({word for name in known for word in name.split(".") if not word.isdigit()})
            near = difflib.get_close_matches(part.strip(".").rpartition(".")[2], words, 3) or words
            raise ValueError(
                f"train_only has {part!r}, and no weight has that in its name; did you mean {', '.join(near)}?"
            )
    for names in weights:
        # q_proj is a part of linear_qkv: with train_only=["q_proj"], k_proj and v_proj are left over, which is an error
        left = [name for name in names if not _is_trained(name, train_only)]
        if 0 < len(left) < len(names):
            chosen = next(name for name in names if name not in left)
            raise ValueError(
                f"train_only chooses {chosen}, which Megatron keeps in one weight with {left[0]}; choose all of them,"
                " or none"
            )


def train_only(
    chunks: ModelChunks,
    tensors: Mapping[str, Shape],
    family: Family,
    fields: Mapping[str, Any],
    parts: Sequence[str],
) -> AdaptedModel:
    """Train only the weights with one of ``parts`` in their names, freeze the others, and return the trained ones."""
    trained = trained_model(tensors, family, fields, parts)
    for index, chunk in enumerate(chunks.bare):
        # Checkpoints hold the frozen weights too, unlike with LoRA
        setattr(chunk, TRAINED_ONLY, False)
        weights = list(weights_of_chunk(chunks, index, family, fields))
        freeze(chunk)
        for weight in weights:
            weight.parameter.requires_grad_(weight.name in trained.of)
        add_bias_apart(chunk)
    return trained


def trained_model(
    tensors: Mapping[str, Shape], family: Family, fields: Mapping[str, Any], parts: Sequence[str]
) -> AdaptedModel:
    """Return what :func:`train_only` makes of a model, which need not be built."""
    found = {
        name: Trained(True, tensors[name], ())
        for name, blocks in WeightMap(family, fields, tensors).blocks.items()
        if NEVER_TRAINED not in name and any(_is_trained(block.hf, parts) for block in blocks)
    }
    return AdaptedModel(None, found, is_tied="output_layer.weight" not in tensors)


def _is_trained(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)
