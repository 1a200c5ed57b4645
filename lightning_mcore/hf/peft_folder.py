# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's format, in and out, at any layout: ``adapter_config.json`` and ``adapter_model.safetensors``.

:func:`read_lora` reads the settings, :func:`load_adapter` the weights into a running model: each key of the file is
used and each adapter filled, or it is an error. :func:`save_adapter` writes a folder that ``peft`` and vLLM read.
``peft_tensors.py`` knows the two layouts of experts.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_mcore.checkpoint.manifest import saving, some_of
from lightning_mcore.config.lora import ALL_LINEAR, LoRA
from lightning_mcore.hf.adapters import projection_names
from lightning_mcore.hf.export import new_folder, require_free
from lightning_mcore.hf.export_config import write_json
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE, read_json
from lightning_mcore.hf.peft_tensors import (
    ExpertLayout,
    Piece,
    adapter_pieces,
    described_targets,
    require_stackable,
)
from lightning_mcore.hf.safetensors import write_safetensors
from lightning_mcore.hf.source import local_folder
from lightning_mcore.parallel.consensus import collect, control_group, decide, gather, on_all

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_SHOWN = 5  # names in an error
_BATCH = 1 << 26  # bytes that ranks send to rank 0 at a time
_SETTINGS = frozenset(field.name for field in fields(LoRA))
_WITHOUT_EFFECT = """
    auto_mapping inference_mode peft_version revision task_type runtime_config eva_config corda_config loftq_config
    lora_ga_config megatron_config megatron_core layers_pattern qalora_group_size ensure_weight_tying
"""
_INDIFFERENT = frozenset(_WITHOUT_EFFECT.split())
_ONLY: Mapping[str, Any] = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False}


def read_lora(path: str) -> LoRA:
    """Return the settings of a PEFT adapter.

    Args:
        path: Its folder, or its name on the Hugging Face hub.

    Raises:
        FileNotFoundError: There is no such folder, or it has no ``adapter_config.json``.
        ValueError: It is another kind of adapter, or it has a setting that is not supported.
    """
    folder = local_folder(path)
    config = read_json(folder, ADAPTER_CONFIG_FILE)
    for key, only in _ONLY.items():
        if config.get(key, only) != only:
            raise ValueError(
                f"{folder}/{ADAPTER_CONFIG_FILE} has {key}={config[key]!r}, and only {only!r} is supported"
            )
    for key, value in config.items():
        if key not in _SETTINGS and key not in _INDIFFERENT and key not in _ONLY and value:
            raise ValueError(f"{folder}/{ADAPTER_CONFIG_FILE} has {key}={value!r}, which is not supported; remove it")
    given = {key: value for key, value in config.items() if key in _SETTINGS and value not in (None, {}, [])}
    if "target_modules" not in given and "target_parameters" in given:
        given["target_modules"] = []
    if given.get("init_lora_weights") != "gaussian":
        given.pop("init_lora_weights", None)  # its weights are read
    each = any(re.search(r"\.experts\.\d", key) for key in _keys(folder))
    if not each:  # endings such as gate_proj mean dense layers alone there
        excluded = given.get("exclude_modules", [])
        is_pattern = isinstance(excluded, str)
        given["exclude_modules"] = rf"(?:{excluded})|.*\.experts\..*" if is_pattern else [*excluded, "experts"]
    try:
        return LoRA.of(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}/{ADAPTER_CONFIG_FILE}: {error}") from error


def _keys(folder: str) -> list[str]:
    path = os.path.join(_folder_with_weights(folder), WEIGHTS_FILE)
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again") from error


def load_adapter(module: pl.LightningModule, path: str) -> None:
    """Fill the adapters of a model from a PEFT folder; collective over the world.

    Args:
        module: A module whose adapters are on its model.
        path: The folder, or a name on the Hugging Face hub.

    Raises:
        FileNotFoundError: There is no such adapter.
        ValueError: It does not fit this model: a tensor is missing, unknown, or of another shape.
    """
    folder = on_all(lambda: _folder_with_weights(path))
    pieces = list(adapter_pieces(module, require_adapters(module)))
    shapes = _shapes(pieces)
    on_all(lambda: _fill(folder, pieces, shapes))


def _folder_with_weights(path: str) -> str:
    folder = local_folder(path)
    if os.path.exists(os.path.join(folder, WEIGHTS_FILE)):
        return folder
    if os.path.exists(os.path.join(folder, _PICKLED)):
        raise ValueError(
            f"{folder} has {_PICKLED}, which may run code when it is read; save it with PEFT as {WEIGHTS_FILE}"
        )
    raise FileNotFoundError(f"{folder} has no {WEIGHTS_FILE}; give the folder of a PEFT adapter")


def _fill(folder: str, pieces: list[Piece], shapes: Mapping[str, tuple[int, ...]]) -> None:
    path = os.path.join(folder, WEIGHTS_FILE)
    try:
        with safe_open(path, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
            _check(path, shapes, found)
            whole = lru_cache(maxsize=1)(file.get_tensor)  # each expert takes its part of the same tensor
            with torch.no_grad():
                for piece in sorted(pieces, key=lambda piece: piece.key):
                    part = whole(piece.key).view(piece.view) if piece.view else file.get_slice(piece.key)
                    piece.data.copy_(part[piece.place])
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again") from error


def _check(path: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    other = [
        f"{key} ({list(found[key])} in it, {list(wanted[key])} in the model)"
        for key in sorted(wanted.keys() & found.keys())
        if found[key] != wanted[key]
    ]
    kinds = (("lacks", missing), ("has what the model does not:", extra), ("has other shapes:", other))
    parts = [f"{text} {some_of(names, _SHOWN)}" for text, names in kinds if names]
    if parts:
        raise ValueError(
            f"{path} does not fit this model and its LoRA settings: it {'; it '.join(parts)}; give the base that it was"
            " trained on, and the settings of its own adapter_config.json"
        )


def require_adapters(module: pl.LightningModule) -> LoRA:
    """Return the LoRA settings of a module.

    Raises:
        ValueError: It has none.
    """
    lora = getattr(module, "lora", None)
    if not isinstance(lora, LoRA):
        raise ValueError(f"{type(module).__name__} has no adapters to write; give it lora=LoRA(...), or adapter=False")
    return lora


def check_adapter_export(module: pl.LightningModule, experts: ExpertLayout = "stacked") -> LoRA:
    """Refuse now what :func:`save_adapter` would refuse, except for a taken folder; return the LoRA settings.

    Args:
        module: As in :func:`save_adapter`.
        experts: As in :func:`save_adapter`.

    Raises:
        ValueError: The module has no adapters, or the layout of experts cannot hold them.
    """
    names: Any = module
    lora = require_adapters(module)
    if experts not in get_args(ExpertLayout):
        raise ValueError(f"experts={experts!r} is not a layout of experts; choose 'stacked' or 'each'")
    if experts == "stacked":
        require_stackable(lora, projection_names(*names.hf_names()))
    return lora


def save_adapter(
    module: pl.LightningModule, out: str, replace: bool = False, experts: ExpertLayout = "stacked"
) -> None:
    """Write the adapters of a model as a PEFT folder, which appears whole or not at all; collective over the world.

    Args:
        module: A module whose adapters are on its model.
        out: The folder.
        replace: Whether to replace a Hugging Face folder at ``out``, when the new one is whole.
        experts: The layout of routed experts: ``"stacked"``, a tensor for all experts of a layer, as PEFT with
            transformers 5 and vLLM from 0.23 read; ``"each"``, a pair for each projection of each expert.

    Raises:
        OSError: The disk refuses.
        ValueError: The module has no adapters, the layout of experts cannot hold them, or ``out`` is taken.
    """
    names: Any = module
    lora = check_adapter_export(module, experts)
    out = decide(partial(require_free, out, replace))
    pieces = list(adapter_pieces(module, lora, experts))
    shapes = _shapes(pieces)
    tensors: dict[str, Tensor] = {}
    for batch in _batches(_owned(pieces)):
        _collect(batch, tensors, shapes)
    family, fields = names.hf_names()
    config = _config(lora, tensors)
    if fields.get("num_moe_experts"):
        config |= described_targets(lora, projection_names(family, fields), experts)
    collect(lambda: None, lambda _: _write(out, tensors, config))


def _shapes(pieces: list[Piece]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the file; collective over the world."""
    shapes: dict[str, tuple[int, ...]] = {}
    for of_rank in gather([(piece.key, piece.shape) for piece in pieces]):
        for key, whole in of_rank:
            shapes[key] = tuple(map(max, shapes.get(key, whole), whole))
    return shapes


def _owned(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces that this rank sends: the first of the ranks with the same one does."""
    own = [(piece.key, piece.start) for piece in pieces]
    first: dict[Any, int] = {}
    for rank, known in enumerate(gather(own)):
        for place in known:
            first.setdefault(place, rank)
    return [piece for piece in pieces if first[piece.key, piece.start] == dist.get_rank()]


def _batches(pieces: list[Piece]) -> list[list[Piece]]:
    """Return the pieces in batches of limited size, as many on every rank."""
    batches: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if size > _BATCH:
            batches.append([])
            size = 0
        batches[-1].append(piece)
        size += piece.data.numel() * piece.data.element_size()
    return batches + [[]] * (max(gather(len(batches))) - len(batches))


def _collect(batch: list[Piece], tensors: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Bring the pieces of all ranks into whole tensors on rank 0."""
    own = [dataclasses.replace(piece, data=piece.data.detach().cpu()) for piece in batch]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts, dst=0, group=control_group())
    for piece in (piece for of_rank in parts or () for piece in of_rank):
        if piece.key not in tensors:
            tensors[piece.key] = torch.zeros(shapes[piece.key], dtype=piece.data.dtype)
        whole = tensors[piece.key]
        whole.view(piece.view or whole.shape)[piece.place] = piece.data


def _write(out: str, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with new_folder(out) as folder, saving(out):
        write_safetensors(os.path.join(folder, WEIGHTS_FILE), described, tensors.__getitem__)
        write_json(os.path.join(folder, ADAPTER_CONFIG_FILE), config)


def _config(lora: LoRA, names: Iterable[str]) -> dict[str, Any]:
    """Return ``adapter_config.json`` of a model without experts."""
    targets: Any = lora.target_modules
    if targets == ALL_LINEAR:  # PEFT counts neither experts nor those of other libraries among them
        targets = sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in names if ".lora_A." in key})
    return {
        **lora.plain(),
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "target_modules": targets,
        "exclude_modules": _without_experts(lora.exclude_modules),
        "rank_pattern": lora.rank_pattern or {},
        "alpha_pattern": lora.alpha_pattern or {},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _without_experts(excluded: Any) -> Any:
    """Leave out what :func:`read_lora` adds: in PEFT, endings mean no routed experts anyway."""
    return [entry for entry in excluded if entry != "experts"] or None if isinstance(excluded, list) else excluded
