# SPDX-License-Identifier: Apache-2.0
"""Fill a running model from a Hugging Face model; every rank reads only the rectangles that it holds.

:func:`load_pretrained` fills the chunks that a rank has built. ``source.py`` has already read the config, before there
were ranks. One of this package's checkpoint directories, from ``lightning-mcore import`` or from a run of ``MCoreGPT``,
holds both settings and weights, so the Hugging Face folder is not needed then.

:func:`pieces_of_module` returns a running model's weights as rectangles of the whole model's tensors. Megatron's
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
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor
from tqdm import tqdm

from lightning_mcore.checkpoint.fp8_weights import fp8_weights_as_plain
from lightning_mcore.checkpoint.manifest import some_of
from lightning_mcore.checkpoint.model_state import sharded_tensors
from lightning_mcore.checkpoint.optimizer_state import pieces_of
from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes
from lightning_mcore.checkpoint.weights import load_weights
from lightning_mcore.hf.family import Family, complete_fields
from lightning_mcore.hf.files import check_download
from lightning_mcore.hf.source import HFSource, is_own_checkpoint
from lightning_mcore.hf.weight_map import WeightMap, held_rectangle, whole_names
from lightning_mcore.hf.weight_rules import Shape
from lightning_mcore.hf.weights import HFWeights
from lightning_mcore.layers.adapted_layers import ADAPTERS, adapted_weight, merging
from lightning_mcore.parallel.chunks import TAKES_FP32, ModelChunks, built_chunks, find_pipeline
from lightning_mcore.parallel.consensus import all_gather_object, combine_on_rank0, run_on_all_ranks
from lightning_mcore.parallel.fully_sharded import is_fully_sharded

_FILLED = "_filled_from_hugging_face"
_HASHED = 4
_SHOWN = 2
_SILENT_SECONDS = 2.0


@dataclass(frozen=True)
class ModelPiece:
    """A rectangle of a tensor of the whole model that this rank holds."""

    name: str  # whole name, as in weight_map.py
    start: Shape
    shape: Shape  # may have leading axes of size 1 that ``data`` lacks
    read: Callable[[], Tensor]
    dtype: torch.dtype
    is_main: bool

    @property
    def data(self) -> Tensor:
        """The values, of shape ``shape`` (perhaps without leading axes of size 1) and dtype ``dtype``."""
        return self.read()


@dataclass(frozen=True)
class ModelPieces:
    """The pieces of a model that this rank holds, and the shapes of all of the model's tensors."""

    own: list[ModelPiece]
    shapes: dict[str, Shape]  # of the whole model, by whole name


def load_pretrained(module: pl.LightningModule, path: str, family: str | None = None) -> None:
    """Fill the chunks that ``pipeline()`` has built from a Hugging Face model; collective over the world.

    The weights are read once per model: if ``validate`` follows ``fit``, the trained weights stay. Padding rows of the
    embedding become zero. ``MCoreGPT`` excludes them from the loss. Give another model the exact vocabulary
    size.

    Args:
        module: A module whose model is built and not wrapped yet, as at the end of ``configure_model``.
        path: The model's folder, its name on the Hugging Face hub, or a checkpoint of a model made from a Hugging Face
            model.
        family: Name or path of its family; None for the one in its config.

    Raises:
        FileNotFoundError: There is no such model, or one of its files is missing.
        RuntimeError: The module has no model yet, or it is being trained.
        ValueError: The weights belong to another model or are damaged; the same on every rank.
    """
    pipeline = find_pipeline(module)
    if pipeline is not None and pipeline.__dict__.get(_FILLED):
        return
    # Megatron's DDP sets main_grad; after that, the optimizer has its own copies of the weights
    if any(hasattr(parameter, "main_grad") or is_fully_sharded(parameter) for parameter in module.parameters()):
        raise RuntimeError("load_pretrained() was called after training began; call it in configure_model()")
    fill_weights(module, path, family)
    if pipeline is not None:
        object.__setattr__(pipeline, _FILLED, True)


def fill_weights(module: pl.LightningModule, path: str, family: str | None = None) -> None:
    """Fill chunks as :func:`load_pretrained` does, but not adapters that are off; collective over the world."""
    if is_own_checkpoint(path):
        load_weights(module, path)
    else:
        source = run_on_all_ranks(lambda: HFSource.open(path, family))
        with fp8_weights_as_plain([module]):
            _fill_from(source, module)


def _fill_from(source: HFSource, module: pl.LightningModule) -> None:
    pieces = pieces_of_module(module)
    fields, multi_token = running_fields(source, module), source.fields.get("mtp_num_layers") or 0
    weights = run_on_all_ranks(
        lambda: HFWeights(source.open_tensors(), source.family, fields, pieces.shapes, multi_token)
    )
    # Check the files before reading them: the checksum pass also brings them into the page cache
    read = {file for piece in pieces.own for file in weights.files(piece.name, piece.start, piece.shape)}
    check_downloads(source.folder, read)
    run_on_all_ranks(lambda: _fill(source.folder, weights, pieces))


def keep_wide(
    module: pl.LightningModule, names: Callable[[], tuple[Family, Mapping[str, Any]]], hf: Mapping[str, Any]
) -> None:
    """Turn weights into fp32 that are stored in a wider dtype than most weights, where their layers accept that.

    Called when ``module``'s model has just been built. ``names`` returns the family and fields (only when needed), and
    ``hf`` is the module's record of the model that it will be filled from.
    """
    stored = StoredDtypes.recorded(hf)
    if stored is None or not any(map(stored.is_wide, stored.others.values())):
        return
    chunks, (family, fields) = built_chunks(module), names()
    for index, chunk in enumerate(chunks.bare):
        # Our routers and delta nets set takes_fp32
        layers = [layer for layer in chunk.modules() if getattr(layer, TAKES_FP32, False)]
        tables = [table for layer in layers for table in (layer._parameters, layer._buffers)]
        taking = {id(tensor) for table in tables for tensor in table.values()}
        for entry in sharded_tensors(chunks, index):
            if id(entry.data) not in taking:
                continue
            place = pieces_of(entry)[0].place
            name, *_ = held_rectangle(place)
            size = whole_names(place.key, tuple(place.global_shape))[name][1]
            blocks = WeightMap(family, fields, {name: size}).blocks[name]
            if any(stored.is_wide(stored.of(block.hf)) for block in blocks):
                entry.data.data = entry.data.float()


def running_fields(source: HFSource, module: pl.LightningModule) -> dict[str, Any]:
    """Return a built model's settings, from its own config if that has them, and otherwise from its source."""
    pipeline = find_pipeline(module)
    config = getattr(pipeline.chunks[0], "config", None) if pipeline is not None else None
    fields = complete_fields(source.fields)
    # Only plain values: a user's transformer may replace functions, which rules cannot compare
    plain = (bool, int, float, str, type(None))
    return fields | {
        name: getattr(config, name)
        for name, value in fields.items()
        if isinstance(value, plain) and isinstance(getattr(config, name, object()), plain)
    }


def check_downloads(folder: str, files: Collection[str]) -> None:
    """Compare files with the hub's checksums, and report files without one; collective over the world.

    ``files`` are the paths that this rank reads. Every machine reads all files that its ranks need, because each
    machine may have its own disk; a machine's ranks share the work. The files are then in the page cache, from which
    the weights are read. Raises ValueError, the same on every rank, if a checksum differs.
    """
    host = socket.gethostname()
    readers = [
        (rank, read) for rank, (name, read) in enumerate(all_gather_object((host, sorted(files)))) if name == host
    ]
    shared = sorted({file for _, read in readers for file in read})
    # With 7 files and ranks 4, 5 and 6 on this machine, rank 5 is second of 3 and checks files 1 and 4
    mine = shared[[rank for rank, _ in readers].index(dist.get_rank()) :: len(readers)]

    def unchecked() -> list[str]:
        with ThreadPoolExecutor(_HASHED) as pool:
            return [file for file, checked in zip(mine, pool.map(check_download, mine), strict=True) if not checked]

    def tell(found: list[list[str]]) -> None:
        if names := sorted({os.path.basename(file) for files in found for file in files}):
            rank_zero_info(
                f"{folder}: there is no checksum from the hub for {some_of(names, _SHOWN)}, so a damaged bit is noticed"
                " only if a weight becomes infinite or NaN"
            )

    combine_on_rank0(unchecked, tell)


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
    """Return the pieces of a module's model, or its adapters, that this rank holds; collective over the world."""
    chunks = built_chunks(module)
    if chunks.pipeline is None:
        raise RuntimeError(
            f"{type(module).__name__} has no model that is built with pipeline(), so it cannot exchange weights with"
            " Hugging Face models; build the model in configure_model()"
        )
    own, stored = run_on_all_ranks(lambda: _own_pieces(chunks, of_adapters))
    shapes: dict[str, Shape] = {}
    # A rank knows only the tensors of its own pipeline stages and experts
    for of_rank in all_gather_object(stored):
        for key, shape in of_rank.items():
            shapes |= {name: inner for name, (_, inner) in whole_names(key, shape).items()}
    return ModelPieces(own, shapes)


def _own_pieces(chunks: ModelChunks, of_adapters: bool) -> tuple[list[ModelPiece], dict[str, Shape]]:
    """Return the pieces that this rank holds, and the shapes of their stored tensors."""
    own, stored = [], {}
    latest = lru_cache(maxsize=1)(lambda read: read())  # a merged weight is read for each of its projections
    for index, chunk in enumerate(chunks.bare):
        merged = {id(adapted_weight(layer)): read for layer in chunk.modules() if (read := merging(layer)) is not None}
        for entry in sharded_tensors(chunks, index):
            if (f".{ADAPTERS}." in entry.key) != of_adapters:
                continue
            for piece in pieces_of(entry):
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
        # A gated MLP's weight [2f, h] is stored as two tensors of f rows: the second starts at element f*h
        return data.view(-1)[start : start + prod(place.local_shape)].view(place.local_shape)

    return ModelPiece(
        *held_rectangle(place),
        read=part,
        dtype=entry.data.dtype,
        is_main=is_main_replica(place.replica_id),
    )
