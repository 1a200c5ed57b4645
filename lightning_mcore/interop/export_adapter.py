# SPDX-License-Identifier: Apache-2.0
"""Write a model's LoRA adapters as a PEFT folder, at any layout.

:func:`save_adapter` writes ``adapter_config.json`` and ``adapter_model.safetensors``, which ``peft`` and vLLM read: the
ranks send what they hold of each tensor to rank 0, which writes. ``hf/peft_tensors.py`` knows the names and the two
layouts of experts. ``export.py`` and ``callback.py`` call these functions.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.checkpoint.manifest import saving
from lightning_mcore.config.lora import EMBEDDING, LoRA
from lightning_mcore.hf.adapters import is_translated, projection_names
from lightning_mcore.hf.family import SCORE, Family
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE
from lightning_mcore.hf.peft_folder import SCORES, SETTINGS, TIED, WEIGHTS_FILE, has_tower, whole_shapes
from lightning_mcore.hf.peft_tensors import (
    ExpertLayout,
    Piece,
    adapter_pieces,
    described_targets,
    is_stacked,
    require_stackable,
)
from lightning_mcore.hf.safetensors import write_safetensors
from lightning_mcore.hf.weight_rules import Stack
from lightning_mcore.interop.export_config import copy_tokenizer, write_json, write_value_head
from lightning_mcore.interop.export_folder import new_folder, require_free
from lightning_mcore.interop.export_tensors import ready_to_read
from lightning_mcore.layers.lora import Adapter
from lightning_mcore.parallel.consensus import all_gather_object, control_group, run_on_rank0

_BATCH = 1 << 26  # bytes that ranks send to rank 0 at a time
_TOWER = r".*\b(visual|vision_model)\b.*"


def require_adapters(module: pl.LightningModule) -> LoRA:
    """Return a module's LoRA settings; ValueError if it has none."""
    lora = getattr(module, "lora", None)
    if not isinstance(lora, LoRA):
        raise ValueError(f"{type(module).__name__} has no adapters to write; give it lora=LoRA(...), or adapter=False")
    return lora


def check_adapter_export(module: pl.LightningModule, experts: ExpertLayout = "stacked") -> LoRA:
    """Raise the errors of :func:`save_adapter` in advance, except for a non-empty folder; return the LoRA settings."""
    names: Any = module
    lora = require_adapters(module)
    if experts not in get_args(ExpertLayout):
        raise ValueError(f"experts={experts!r} is not a layout of experts; choose 'stacked' or 'each'")
    family, fields = names.hf_names()
    projections = projection_names(family, fields)
    if experts == "stacked":
        require_stackable(lora, projections)
    elif _is_read_stacked(family) and any(is_stacked(name) and lora.adapts(name) for name in projections):
        raise ValueError(
            "experts='each' is not supported for models of this family, which PEFT reads stacked; leave it out"
        )
    return lora


def _is_read_stacked(family: Family) -> bool:
    """Return whether PEFT knows no pairs for each expert of a family."""
    is_stack = any(isinstance(rule, Stack) for rule in family.layer)
    return has_tower(family) or is_stack or bool(family.moved_in_memory)


def save_adapter(
    module: pl.LightningModule, out: str, replace: bool = False, experts: ExpertLayout = "stacked"
) -> None:
    """Write a model's adapters as a PEFT folder, which appears complete or not at all; collective over the world.

    ``replace`` allows replacing a Hugging Face folder at ``out`` once the new one is complete. ``experts`` is the
    layout of routed experts: ``"stacked"``, a tensor for all experts of a layer, as PEFT with transformers 5 and vLLM
    from 0.23 read; ``"each"``, a pair for each projection of each expert.
    """
    names: Any = module
    lora = check_adapter_export(module, experts)
    out = run_on_rank0(partial(require_free, out, replace))
    tensors = collect_adapter(module, experts)
    family, fields = names.hf_names()
    projections = projection_names(family, fields)
    # A pipeline stage knows the adapters of its own layers only
    own = [child.projection.name for child in module.modules() if isinstance(child, Adapter)]
    adapted = dict.fromkeys(name for of_rank in all_gather_object(own) for name in of_rank)
    config = _config(lora, tensors)
    config |= described_targets(lora, list(adapted), projections, experts, is_translated(family))
    if has_tower(family):
        config["exclude_modules"] = _TOWER
        config["modules_to_save"] = [name for name in projections if lora.saves(name)] or None
    base = (names.hparams.get("hf") or {}).get("path")
    run_on_rank0(lambda: _write(out, tensors, config, base))


def collect_adapter(module: pl.LightningModule, experts: ExpertLayout) -> dict[str, Tensor]:
    """Return the tensors of a model's adapters by PEFT's names, on rank 0; an empty dict elsewhere; collective."""
    names: Any = module
    tensors: dict[str, Tensor] = {}
    with ready_to_read(module):
        pieces = list(adapter_pieces(module, require_adapters(module), experts))
        shapes = whole_shapes(pieces)
        for batch in _batches(_owned(pieces)):
            _collect(batch, tensors, shapes)
    embedding = next((key for key in tensors if key.endswith(f".{EMBEDDING}.weight")), None)
    if embedding is not None and names.hf_names()[1].get("share_embeddings_and_output_weights"):
        tensors[TIED] = tensors[embedding]  # PEFT writes both names
    return tensors


def _owned(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces that this rank sends: of ranks with the same piece, the first sends it."""
    # q_proj's A is the same on all tensor-parallel ranks: equal key and start, so only the first of them sends it
    own = [(piece.key, piece.start) for piece in pieces]
    first: dict[Any, int] = {}
    for rank, known in enumerate(all_gather_object(own)):
        for place in known:
            first.setdefault(place, rank)
    return [piece for piece in pieces if first[piece.key, piece.start] == dist.get_rank()]


def _batches(pieces: list[Piece]) -> list[list[Piece]]:
    """Return the pieces in batches of limited size, the same number of batches on every rank."""
    batches: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if size > _BATCH:
            batches.append([])
            size = 0
        batches[-1].append(piece)
        size += piece.data.numel() * piece.data.element_size()
    # Gathering is collective: ranks with fewer batches take part with empty ones
    return batches + [[]] * (max(all_gather_object(len(batches))) - len(batches))


def _collect(batch: list[Piece], tensors: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Copy the pieces of all ranks into whole tensors on rank 0."""
    own = [dataclasses.replace(piece, data=piece.data.detach().cpu()) for piece in batch]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts, dst=0, group=control_group())
    for piece in (piece for of_rank in parts or () for piece in of_rank):
        if piece.key not in tensors:
            # Zeros, because gate and up with an A each leave parts of the stacked B empty
            tensors[piece.key] = torch.zeros(shapes[piece.key], dtype=piece.data.dtype)
        whole = tensors[piece.key]
        whole.view(piece.view or whole.shape)[piece.place] = piece.data


def _write(out: str, tensors: dict[str, Tensor], config: Mapping[str, Any], base: str | None) -> None:
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with new_folder(out) as folder, saving(out):
        write_safetensors(os.path.join(folder, WEIGHTS_FILE), described, tensors.__getitem__)
        write_json(os.path.join(folder, ADAPTER_CONFIG_FILE), config)
        if SCORES in tensors:
            write_value_head(folder, tensors[SCORES])
        copy_tokenizer(base, folder)


def _config(lora: LoRA, names: Iterable[str]) -> dict[str, Any]:
    """Return ``adapter_config.json`` without the names of the modules that have adapters."""
    scores = any(name.endswith(f".{SCORE}") for name in names)
    return {
        **{name: value for name, value in lora.plain().items() if name in SETTINGS},
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
