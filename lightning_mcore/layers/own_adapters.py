# SPDX-License-Identifier: Apache-2.0
"""Adapters on your own model, by Megatron's layer names; ``lora.py`` has the adapters themselves."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import nn

from lightning_mcore.config.lora import LoRA
from lightning_mcore.layers.adapted_layers import LINEAR, adapt, freeze
from lightning_mcore.layers.latent_experts import WholeLinear
from lightning_mcore.layers.lora import Adapters, Projection, Rows, group_of
from lightning_mcore.parallel.consensus import all_gather_object


def add_lora(model: nn.Module, lora: LoRA) -> None:
    """Freeze the model of your own module, and put adapters on its linear layers; collective over the world.

    Call it at the end of ``configure_model``, on what ``pipeline()`` returned, with the weights in it. Names of targets
    are Megatron's layer names, such as ``"linear_qkv"``. A layer has one adapter; ``linear_fc1`` of a gated MLP has
    two, ``linear_fc1.gate`` and ``linear_fc1.up`` to patterns of ranks. Called again, it does nothing.

    Args:
        model: The model.
        lora: The settings.

    Raises:
        ValueError: A target matches nothing, or something is asked for that these adapters cannot do.

    Examples:
        >>> from lightning_mcore import LoRA, MCoreModule, add_lora
        >>> class Adapted(MCoreModule):  # with a build_chunk of its own
        ...     def configure_model(self):
        ...         self.model = self.pipeline(self.build_chunk)
        ...         self.load_weights("base.ckpt")
        ...         add_lora(self.model, LoRA(r=16, target_modules=["linear_qkv", "linear_proj"]))
    """
    if any(isinstance(child, Adapters) for child in model.modules()):
        return
    chunks: Any = getattr(model, "chunks", [model])
    named = [(_global_name(chunk, path), child) for chunk in chunks for path, child in chunk.named_modules()]
    # A pipeline stage knows only its own layers, so ranks exchange names before targets are checked.
    own = {
        n: isinstance(child, LINEAR) for n, child in named if next(child.parameters(recurse=False), None) is not None
    }
    is_linear = {name: kind for of_rank in all_gather_object(own) for name, kind in of_rank.items()}
    names = sorted(is_linear)
    lora.check_targets(names)
    for name in names if not isinstance(lora.target_modules, str) else ():
        if lora.adapts(name) and not is_linear[name]:
            raise ValueError(
                f"target_modules has {name}, and add_lora() puts adapters on linear layers only; train it whole with"
                " modules_to_save, or leave it out"
            )
    lora.check_layers(getattr(chunks[0], "config", None), names)
    gated: set[nn.Module] = set()
    for chunk in chunks:
        freeze(chunk)
        gated |= {x.linear_fc1 for x in chunk.modules() if isinstance(x, MLP) and x.config.gated_linear_unit}
    for name, child in named:
        if lora.saves(name):
            child.requires_grad_(True)
        elif isinstance(child, LINEAR) and lora.adapts(name):
            layer: Any = child
            lora.check_adapted([name])
            group = group_of(layer)
            is_split = group is not None and group.size() > 1 and not isinstance(layer, WholeLinear)
            split = layer.weight.partition_dim if is_split else None
            halves = [f"{name}.gate", f"{name}.up"] if layer in gated else [name]
            adapt(layer, list(_projections(halves, layer, split)), lora, split)


def _global_name(chunk: nn.Module, path: str) -> str:
    """Return a layer's path with transformer layers numbered as in the whole model."""
    parts = path.split(".")
    whole = list(parts)
    for index, part in enumerate(parts):
        number = getattr(chunk.get_submodule(".".join(parts[: index + 1])), "layer_number", None)
        if part.isdigit() and isinstance(number, int):
            whole[index] = str(number - 1)
    return ".".join(whole)


def _projections(names: Sequence[str], layer: Any, split: int | None) -> Iterator[Projection]:
    """Yield a layer's projections, which have equally many of its rows."""
    # A gated linear_fc1 of 16 rows on each of 2 ranks: rank 1 has Rows(0, 8, 8) of .gate and Rows(8, 8, 8) of .up.
    rows, columns = layer.weight.shape[0] // len(names), layer.weight.shape[1]
    group = group_of(layer)
    ranks, rank = (1, 0) if split is None else (group.size(), group.rank())
    sizes = (rows * (ranks if split == 0 else 1), columns * (ranks if split == 1 else 1))
    for index, name in enumerate(names):
        own = Rows(index * rows, rows * rank if split == 0 else 0, rows)
        yield Projection(name, (own,), *sizes, columns * rank if split == 1 else 0)
