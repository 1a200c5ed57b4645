# SPDX-License-Identifier: Apache-2.0
"""Fill a running model from a Hugging Face model; every rank reads only the rectangles that it holds.

:func:`load_pretrained` fills the chunks that a rank has built. ``source.py`` has already read the config, before there
were ranks. A checkpoint directory of this package, from ``lightning-mcore import`` or from a run of ``MCoreGPT``, holds
the settings and the weights; then the Hugging Face folder is not needed.

:func:`pieces_of_module` returns the weights of a running model as rectangles of the whole model's tensors. Megatron's
modules know which part of which tensor they hold (``sharded_state_dict``). Exports use this function too.
"""

import os
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor
from tqdm import tqdm

from lightning_mcore.checkpoint.manifest import some_of
from lightning_mcore.checkpoint.model_state import sharded_chunk
from lightning_mcore.checkpoint.optimizer_state import pieces_of
from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes
from lightning_mcore.checkpoint.weights import load_weights
from lightning_mcore.hf.family import Family, complete_fields
from lightning_mcore.hf.files import check_download
from lightning_mcore.hf.source import HFSource, absolute, is_own_checkpoint, pretrained_settings
from lightning_mcore.hf.weight_map import WeightMap, held_rectangle, whole_names
from lightning_mcore.hf.weight_rules import Shape
from lightning_mcore.hf.weights import HFWeights
from lightning_mcore.layers.lora import ADAPTERS, adapted_weight, merging
from lightning_mcore.parallel.chunks import TAKES_FP32, ModelChunks, built_chunks, filled_as_plain, find_pipeline
from lightning_mcore.parallel.consensus import collect, gather, on_all

__all__ = ["absolute", "load_pretrained", "pretrained_settings", "running_fields"]

_FILLED = "_filled_from_hugging_face"  # set on a model that load_pretrained has filled
_HASHED = 4  # files that a rank checks at the same time
_SHOWN = 2  # names of files in a line of the log
_SILENT_SECONDS = 2.0  # shorter reads show no progress


@dataclass(frozen=True)
class ModelPiece:
    """A rectangle of a tensor of the whole model that this rank holds.

    Args:
        name: The whole name of the tensor, as in ``weight_map.py``.
        start: The index at which the rectangle begins in the tensor.
        shape: The shape of the rectangle; it may have leading axes of size 1 that ``data`` lacks.
        read: Returns the values: those in the model's memory, or merged with adapters.
        dtype: The dtype of the values.
        is_main: Whether this rank is the main one of the ranks with the same values.
    """

    name: str
    start: Shape
    shape: Shape
    read: Callable[[], Tensor]
    dtype: torch.dtype
    is_main: bool

    @property
    def data(self) -> Tensor:
        """The values, of shape ``shape`` (perhaps without leading axes of size 1) and dtype ``dtype``."""
        return self.read()


@dataclass(frozen=True)
class ModelPieces:
    """The pieces of a model that this rank holds, and the shapes of all tensors of the model.

    Args:
        own: The rectangles on this rank.
        shapes: Shapes of the tensors of the whole model, by whole name.
    """

    own: list[ModelPiece]
    shapes: dict[str, Shape]


def load_pretrained(module: pl.LightningModule, path: str, family: str | None = None) -> None:
    """Fill the chunks that ``pipeline()`` has built from a Hugging Face model; collective over the world.

    The weights are read once for each model: if ``validate`` follows ``fit``, the trained weights stay. Padding rows of
    the embedding become zero. ``MCoreGPT`` excludes them from the loss. A plain ``GPTModel`` does not, so give it the
    exact size of the vocabulary.

    Args:
        module: A module whose model is built and not wrapped yet, as at the end of ``configure_model``.
        path: The model's folder, its name on the Hugging Face hub, or a checkpoint of a model made from a Hugging Face
            model.
        family: Name or path of its family; None for the one in its config.

    Raises:
        FileNotFoundError: There is no such model, or one of its files is missing.
        RuntimeError: The module has no model yet, or it is being trained.
        ValueError: The weights are not those of this model or are damaged; the same on every rank.
    """
    pipeline = find_pipeline(module)
    if pipeline is not None and pipeline.__dict__.get(_FILLED):
        return
    if any(hasattr(parameter, "main_grad") for parameter in module.parameters()):
        raise RuntimeError("load_pretrained() was called after training began; call it in configure_model()")
    fill_weights(module, path, family)
    if pipeline is not None:
        object.__setattr__(pipeline, _FILLED, True)


def fill_weights(module: pl.LightningModule, path: str, family: str | None = None) -> None:
    """Fill the chunks of a module at any time, unlike :func:`load_pretrained`; collective over the world.

    Args:
        module: A module whose model is built. Adapters that are switched off are left alone.
        path: As in :func:`load_pretrained`.
        family: As in :func:`load_pretrained`.

    Raises:
        FileNotFoundError: As :func:`load_pretrained`.
        ValueError: As :func:`load_pretrained`.
    """
    if is_own_checkpoint(path):
        load_weights(module, path)
    else:
        source = on_all(lambda: HFSource.open(path, family))
        with filled_as_plain([module]):
            _fill_from(source, module)


def _fill_from(source: HFSource, module: pl.LightningModule) -> None:
    pieces = pieces_of_module(module)
    fields, multi_token = running_fields(source, module), source.fields.get("mtp_num_layers") or 0
    weights = on_all(lambda: HFWeights(source.open_tensors(), source.family, fields, pieces.shapes, multi_token))
    read = {file for piece in pieces.own for file in weights.files(piece.name, piece.start, piece.shape)}
    check_downloads(source.folder, read)
    on_all(lambda: _fill(source.folder, weights, pieces))


def keep_wide(
    module: pl.LightningModule, names: Callable[[], tuple[Family, Mapping[str, Any]]], hf: Mapping[str, Any]
) -> None:
    """Put parameters into fp32 that a model has in a wider dtype than most, where their layers take that.

    Args:
        module: A module whose model has just been built.
        names: Returns the rules of its Hugging Face names and the settings of the model.
        hf: What the module knows of the model that it will be filled from.
    """
    stored = StoredDtypes.recorded(hf)
    if stored is None or not any(map(stored.is_wide, stored.others.values())):
        return
    chunks, (family, fields) = built_chunks(module), names()
    for index, chunk in enumerate(chunks.bare):
        layers = [layer for layer in chunk.modules() if getattr(layer, TAKES_FP32, False)]
        taking = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        for entry in nested_values(sharded_chunk(chunks, index, whole=True)):
            if id(getattr(entry, "data", None)) not in taking:
                continue
            place = pieces_of(entry)[0].place
            name, *_ = held_rectangle(place)
            size = whole_names(place.key, tuple(place.global_shape))[name][1]
            blocks = WeightMap(family, fields, {name: size}).blocks[name]
            if any(stored.is_wide(stored.of(block.hf)) for block in blocks):
                entry.data.data = entry.data.float()


def running_fields(source: HFSource, module: pl.LightningModule) -> dict[str, Any]:
    """Return the settings of a built model: those in its own config, and the others from its source.

    Args:
        source: The model that it will be filled from.
        module: A module whose model is built.
    """
    pipeline = find_pipeline(module)
    config = getattr(pipeline.chunks[0], "config", None) if pipeline is not None else None
    fields = complete_fields(source.fields)
    plain = (bool, int, float, str, type(None))
    return fields | {
        name: getattr(config, name)
        for name, value in fields.items()
        if isinstance(value, plain) and isinstance(getattr(config, name, object()), plain)
    }


def check_downloads(folder: str, files: Collection[str]) -> None:
    """Compare files with the hub's checksums, and report files without one; collective over the world.

    Every machine reads all files that its ranks need, because each machine may have its own disk; the ranks of a
    machine share the work. The files are then in the page cache, from which the weights are read.

    Args:
        folder: The model's folder.
        files: Paths of the files that this rank reads.

    Raises:
        ValueError: A checksum differs; the same on every rank.
    """
    host = socket.gethostname()
    readers = [(rank, read) for rank, (name, read) in enumerate(gather((host, sorted(files)))) if name == host]
    shared = sorted({file for _, read in readers for file in read})
    mine = shared[[rank for rank, _ in readers].index(dist.get_rank()) :: len(readers)]

    def unchecked() -> list[str]:
        with ThreadPoolExecutor(_HASHED) as pool:
            return [file for file, checked in zip(mine, pool.map(check_download, mine), strict=True) if not checked]

    def tell(found: list[list[str]]) -> None:
        if names := sorted({os.path.basename(file) for files in found for file in files}):
            rank_zero_info(
                f"{folder}: the hub has no checksum to compare {some_of(names, _SHOWN)} with, so a changed bit in"
                " them is noticed only if a weight becomes infinite or NaN"
            )

    collect(unchecked, tell)


def _fill(folder: str, weights: HFWeights, pieces: ModelPieces) -> None:
    own = tqdm(
        pieces.own,
        desc=f"reading {folder}",
        unit=" tensors",
        disable=dist.get_rank() != 0,
        delay=_SILENT_SECONDS,
        leave=False,
    )
    with torch.no_grad():
        for piece in own:
            weights.fill(piece.data, piece.name, piece.start, piece.shape)


def pieces_of_module(module: pl.LightningModule, of_adapters: bool = False) -> ModelPieces:
    """Return the pieces of a module's model that this rank holds; collective over the world.

    Args:
        module: A module whose model is built with ``pipeline()``, wrapped or not.
        of_adapters: Return those of LoRA adapters instead.

    Raises:
        RuntimeError: The module has no such model yet.
    """
    chunks = built_chunks(module)
    if chunks.pipeline is None:
        raise RuntimeError(
            f"{type(module).__name__} has no model that is built with pipeline(), so it cannot exchange weights with"
            " Hugging Face models; build the model in configure_model()"
        )
    own, stored = on_all(lambda: _own_pieces(chunks, of_adapters))
    shapes: dict[str, Shape] = {}
    for of_rank in gather(stored):
        for key, shape in of_rank.items():
            shapes |= {name: inner for name, (_, inner) in whole_names(key, shape).items()}
    return ModelPieces(own, shapes)


def _own_pieces(chunks: ModelChunks, of_adapters: bool) -> tuple[list[ModelPiece], dict[str, Shape]]:
    """Return the pieces that this rank holds, and the shapes of their stored tensors."""
    own, stored = [], {}
    latest = lru_cache(maxsize=1)(lambda read: read())  # a merged weight is read for each of its projections
    for index, chunk in enumerate(chunks.bare):
        merged = {id(adapted_weight(layer)): read for layer in chunk.modules() if (read := merging(layer)) is not None}
        for entry in nested_values(sharded_chunk(chunks, index, whole=True)):
            if (f".{ADAPTERS}." in entry.key) != of_adapters:
                continue
            for piece in pieces_of(entry) if isinstance(entry, ShardedTensor | ShardedTensorFactory) else ():
                stored[piece.place.key] = tuple(piece.place.global_shape)
                merge = merged.get(id(entry.data))
                read = entry.data.detach if merge is None else partial(latest, merge)
                own.append(_piece(read, entry, piece.place, piece.start))
    return own, stored


def _piece(
    whole: Callable[[], Tensor], entry: ShardedTensor | ShardedTensorFactory, place: ShardedTensor, start: int
) -> ModelPiece:
    def part() -> Tensor:
        data = whole()
        if prod(place.local_shape) == data.numel():
            return data
        return data.view(-1)[start : start + prod(place.local_shape)].view(place.local_shape)

    return ModelPiece(
        *held_rectangle(place),
        read=part,
        dtype=entry.data.dtype,
        is_main=is_main_replica(place.replica_id),
    )
