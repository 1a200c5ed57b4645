# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's *extra state*, saved as tensors and read without running code.

With delayed scaling, a TransformerEngine layer keeps scales and the largest values of earlier steps (amax history); the
other recipes keep nothing from step to step. TransformerEngine returns this state as a pickle in a uint8 tensor. Our
checkpoints contain no pickle: :func:`as_tensors` reads the tensors from the layers, :func:`restored` writes them back.

Megatron-LM's checkpoints do contain the pickle. TransformerEngine up to 2.17.0 unpickles whatever it finds; later
versions raise, unless an environment variable allows everything. :func:`checked_extra_state` reads the pickle first,
accepts only tensors, plain values and recipes, and then lets the layers load it. ``model_state.py`` calls this file.

Sources: ``TransformerEngineBaseModule.get_extra_state`` (2.11.0 and 2.20.2), ``_extra_state.py`` (2.20.2).
"""

import contextlib
import importlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

_NAME = "_extra_state"
_HISTORY = "amax_history"
_DIRECTIONS = ("fwd", "bwd")
_ALLOWS_ALL = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_RECIPES = "transformer_engine.common.recipe"
_STORAGES = {
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # what 0.19 puts in its place
}
_KNOWN = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
}


class _Reader(pickle.Unpickler):
    """Reads tensors, plain values and recipes; rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a pickle names, if it is an accepted one."""
        if (module, name) in _STORAGES:  # torch's would read any pickle
            return lambda content: torch.load(io.BytesIO(content), weights_only=True)
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == _RECIPES and name.isidentifier():
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name}")


@contextlib.contextmanager
def checked_extra_state(state: Mapping[str, Any]) -> Iterator[None]:
    """Let TransformerEngine's layers load ``state`` inside the ``with`` block; ``ValueError`` if it could run code."""
    found = False
    for name, value in state.items():
        if name.rpartition(".")[2].startswith(_NAME) and isinstance(value, Tensor) and value.numel() > 0:
            found = True
            _check(name, value)
    # All of ``state`` has been checked, so the layers may unpickle it.
    before = os.environ.get(_ALLOWS_ALL)
    if found:
        os.environ[_ALLOWS_ALL] = "1"
    try:
        yield
    finally:
        if found:
            os.environ.pop(_ALLOWS_ALL)
            if before is not None:
                os.environ[_ALLOWS_ALL] = before


def _check(name: str, value: Tensor) -> None:
    try:
        _Reader(io.BytesIO(value.detach().cpu().numpy().tobytes())).load()
    except Exception as error:
        raise ValueError(
            f"{name} of the checkpoint contains something other than TransformerEngine's scales and recipe, and"
            " reading it could run code; use a checkpoint that you trust"
        ) from error


def as_tensors(chunk: nn.Module, config: TransformerConfig, state: dict[str, Any]) -> None:
    """Replace the pickles in a chunk's sharded ``state`` by the tensors in them; collective over the amax group.

    A layer without a history keeps an empty tensor.
    """
    # With FP8 weights, the first row of a history may hold the maximum of this rank's part of a weight. Only one rank
    # saves it, so all get the group's maximum first, as TransformerEngine does in the next step: [1.5, 0.2] and [0.7,
    # 0.9] are both saved as [1.5, 0.9].
    found = {name: _tensors(layer, number) for name, layer, number in _layers(chunk, state)}
    rows = [tensors[name][0] for tensors in found.values() for name in tensors if name.startswith(_HISTORY)]
    if rows:
        latest = torch.cat(rows)
        only_tensor_parallel = getattr(config, "tp_only_amax_red", False)
        group = parallel_state.get_amax_reduction_group(True, only_tensor_parallel)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
        for row, reduced in zip(rows, torch.split(latest, [len(row) for row in rows]), strict=True):
            row.copy_(reduced)
        if only_tensor_parallel:
            found = _of_data_parallel_ranks(found)
    for name, tensors in found.items():
        if isinstance(state[name], ShardedObject):
            data = {key: tensor.cpu() for key, tensor in tensors.items()}
            state[name].data = data or torch.empty(0, dtype=torch.uint8)


@contextlib.contextmanager
def restored(chunk: nn.Module, config: TransformerConfig, state: dict[str, Any]) -> Iterator[None]:
    """Take what :func:`as_tensors` saved out of ``state`` and write it into the layers, before and after the block.

    The caller fills FP8 weights inside the block. Nothing is written unless ``config`` has delayed scaling.
    """
    recipe = get_fp8_recipe(config) if getattr(config, "fp8", None) else None
    found: dict[nn.Module, list[Mapping[str, Tensor]]] = {}
    for name, layer, _ in _layers(chunk, state):
        value = state[name]
        if isinstance(value, Mapping):
            found.setdefault(layer, []).append(value)
            state[name] = torch.empty(0, dtype=torch.uint8)
    if recipe is None or not recipe.delayed():
        found = {}
    found = {layer: [_of_this_rank(part, config) for part in parts] for layer, parts in found.items()}
    for layer, parts in found.items():
        # Twice: weights filled inside the block are cast with these scales, which records their maxima in the history.
        _write(layer, recipe, parts)
    yield
    for layer, parts in found.items():
        _write(layer, recipe, parts)


def _layers(chunk: nn.Module, state: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of each extra state, its layer, and the expert's number in the layer (0 without experts)."""
    for name in list(state):
        path, found, number = name.rpartition(_NAME)
        if found and (not number or number.isdigit()):
            layer = chunk.get_submodule(path.removesuffix("."))
            if hasattr(layer, "fp8_meta"):
                yield name, layer, int(number or 0)


def _tensors(layer: Any, number: int) -> dict[str, Tensor]:
    """Return a layer's (or one expert's) scales [kinds] and histories [steps, kinds]; empty without delayed scaling."""
    count = getattr(layer, "num_gemms", 1)
    tensors = {}
    for direction in _DIRECTIONS:
        scaling = layer.fp8_meta.get(f"scaling_{direction}")
        if hasattr(scaling, "amax_history"):
            history = scaling.amax_history
            # TransformerEngine keeps each expert's kinds together: [in0, weight0, out0, in1, weight1, out1]. Megatron's
            # TEGroupedLinear._split_extra_state cuts them as if sorted by kind: expert 0 gets [in0, out0, weight1].
            tensors[f"scale_{direction}"] = scaling.scale.view(count, -1)[number]
            tensors[f"{_HISTORY}_{direction}"] = history.view(len(history), count, -1)[:, number]
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _of_data_parallel_ranks(found: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Stack each tensor with the other data-parallel ranks' [ranks, ...]; under ``tp_only_amax_red`` they differ."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return found
    flat = torch.cat([tensor.flatten() for tensors in found.values() for tensor in tensors.values()])
    gathered = flat.new_empty(group.size() * flat.numel())
    dist.all_gather_into_tensor(gathered, flat, group=group)
    rows = gathered.view(group.size(), -1)
    start = 0
    stacked: dict[str, dict[str, Tensor]] = {name: {} for name in found}
    for name, tensors in found.items():
        for key, tensor in tensors.items():
            end = start + tensor.numel()
            stacked[name][key] = rows[:, start:end].reshape(-1, *tensor.shape)
            start = end
    return stacked


def _of_this_rank(tensors: Mapping[str, Tensor], config: TransformerConfig) -> Mapping[str, Tensor]:
    """Return this data-parallel rank's tensors; for another rank count, the largest histories and smallest scales."""
    if tensors["scale_fwd"].dim() == 1:
        return tensors
    group = parallel_state.get_data_parallel_group()
    if getattr(config, "tp_only_amax_red", False) and len(tensors["scale_fwd"]) == group.size():
        return {name: tensor[group.rank()] for name, tensor in tensors.items()}
    # The safe choice: a scale that is too small loses some precision, one that is too large overflows.
    return {name: tensor.amax(0) if name.startswith(_HISTORY) else tensor.amin(0) for name, tensor in tensors.items()}


def _write(layer: Any, recipe: Any, parts: list[Mapping[str, Tensor]]) -> None:
    """Write a layer's tensors, one mapping per expert, into the layer.

    Source: ``TransformerEngineBaseModule.set_extra_state`` (TransformerEngine 2.11.0 and 2.20.2).
    """
    whole = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    layer.fp8_meta["recipe"] = recipe
    # Three forward kinds for each matrix product: input, weight, output.
    layer.fp8_meta["num_gemms"] = whole["scale_fwd"].numel() // 3
    layer.init_fp8_meta_tensors(recipe)
    for direction in _DIRECTIONS:
        scaling = layer.fp8_meta[f"scaling_{direction}"]
        saved = whole[f"{_HISTORY}_{direction}"]
        kept = min(len(saved), len(scaling.amax_history))  # the recipe may have another amax_history_len now
        scaling.scale.copy_(whole[f"scale_{direction}"])
        scaling.amax_history.zero_()
        scaling.amax_history[:kept].copy_(saved[:kept])
