# SPDX-License-Identifier: Apache-2.0
"""Start from a Hugging Face model: its config becomes settings, its weights fill the chunks of the running layout.

:func:`pretrained_settings` makes the arguments of ``MCoreGPT`` from a ``config.json``; :func:`load_pretrained` reads
into each chunk that a rank has built the rectangles that belong there. No rank reads more of a tensor than it holds.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from lightning_mcore.agreement import on_all
from lightning_mcore.checkpoint_format import some_of
from lightning_mcore.hf.family import Family, split_fields
from lightning_mcore.hf.hf_config import family_of, local_folder, read_config, read_generation_config, read_json
from lightning_mcore.hf.model_pieces import ModelPiece, ModelPieces, pieces_of_module
from lightning_mcore.hf.safetensors_folder import SafetensorsFolder
from lightning_mcore.hf.weight_map import WeightMap

_SHOWN = 5  # names in an error
_SILENT_SECONDS = 2.0  # reading that takes no longer shows no progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HFSource:
    """The Hugging Face model that a model was made from.

    Args:
        folder: Where it lies.
        family: What is known of its kind.
        config: Its config with all defaults.
        fields: The same as settings of Megatron and of ``MCoreGPT``.
    """

    folder: str
    family: Family
    config: dict[str, Any]
    fields: dict[str, Any]

    @classmethod
    def open(cls, path: str, family: str | None = None) -> "HFSource":
        """Read the config of a model.

        Args:
            path: Its folder, or its name on the Hugging Face hub.
            family: Name or path of its family; None for what its config says.

        Raises:
            FileNotFoundError: There is no such model.
            ValueError: It is of no known family, or its config asks for something that is not supported.
        """
        folder = local_folder(path)
        config = read_config(folder)
        known = family_of(config, family)
        try:
            fields = known.read_config(config)
        except ValueError as error:
            raise ValueError(f"{folder}/config.json: {error}") from error
        return cls(folder, known, config, fields)


def pretrained_settings(
    path: str,
    family: str | None = None,
    seq_length: int | None = None,
    transformer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT`` that a Hugging Face model is made with.

    Args:
        path: Its folder, or its name on the Hugging Face hub.
        family: Name or path of its family; None for what its config says.
        seq_length: Tokens of a sequence in training; None for as many as the model was made for.
        transformer: Fields of ``TransformerConfig`` to use instead of those that follow from the config.

    Returns:
        ``vocab_size``, ``seq_length``, ``transformer`` and the settings of positions; ``hf`` says where they come from,
        as plain data.
    """
    source = HFSource.open(path, family)
    module, fields = split_fields(source.fields)
    if fields.get("mtp_num_layers") and not _has_multi_token_layers(source):
        _log.info("%s has no weights for multi-token prediction, so the model is made without", source.folder)
        del fields["mtp_num_layers"]
    return {
        **module,
        "seq_length": seq_length or int(source.config["max_position_embeddings"]),
        "transformer": {**fields, **(transformer or {})},
        "hf": {
            "path": path,
            "family": family or source.family.model_type,
            "config": read_json(source.folder, "config.json"),
            "generation_config": read_generation_config(source.folder),
        },
    }


def load_pretrained(module: pl.LightningModule, path: str, family: str | None = None) -> None:
    """Fill the chunks that ``pipeline()`` has built from a Hugging Face model; collective over the world.

    Args:
        module: A module whose model is built and not wrapped yet, as at the end of ``configure_model``.
        path: The model's folder, or its name on the Hugging Face hub.
        family: Name or path of its family; None for what its config says.

    Raises:
        FileNotFoundError: There is no such model, or a file of it is missing.
        RuntimeError: The module has no model yet.
        ValueError: The weights are not those of this model, or damaged; the same on every rank.
    """
    source = on_all(lambda: HFSource.open(path, family))
    pieces = pieces_of_module(module)
    on_all(lambda: _fill(source, pieces))


def _fill(source: HFSource, pieces: ModelPieces) -> None:
    weights = WeightMap(source.family, source.fields, pieces.shapes)
    folder = SafetensorsFolder(source.folder)
    check_tensors(source, folder, weights)
    own = tqdm(
        pieces.own,
        desc=f"reading {source.folder}",
        unit=" tensors",
        disable=dist.get_rank() != 0,
        delay=_SILENT_SECONDS,
        leave=False,
    )
    aliases: dict[str, list[str]] = {}
    for name, other in weights.repeated.items():
        aliases.setdefault(other, []).append(name)
    with torch.no_grad():
        for piece in own:
            _read_piece(piece, folder, weights, aliases)


def check_tensors(source: HFSource, folder: SafetensorsFolder, weights: WeightMap) -> None:
    """Refuse a folder whose tensors are not those of the model.

    Raises:
        ValueError: Tensors are missing, are not known, or have other shapes.
    """
    wanted, found = weights.shapes, folder.shapes
    missing = sorted(wanted.keys() - found.keys())
    extra = sorted(name for name in found.keys() - wanted.keys() if not _is_left_out(source, name))
    shapes = [
        f"{name} ({list(found[name])})" for name in sorted(wanted.keys() & found.keys()) if wanted[name] != found[name]
    ]
    parts = []
    if missing:
        parts.append(f"it lacks {some_of(missing, _SHOWN)}")
    if extra:
        parts.append(f"it has {some_of(extra, _SHOWN)}, which the model has no place for")
    if shapes:
        first = next(name for name in sorted(wanted) if name in found and wanted[name] != found[name])
        parts.append(f"shapes differ: {some_of(shapes, _SHOWN)}, where {list(wanted[first])} belongs")
    if parts:
        raise ValueError(
            f"the weights in {source.folder} do not fit its config: {'; '.join(parts)}; give config and weights of one"
            " model"
        )


def _is_left_out(source: HFSource, name: str) -> bool:
    """Whether a tensor has no place in the model for a good reason."""
    if name.endswith(source.family.unread):
        return True
    if name == "lm_head.weight":
        return bool(source.fields.get("share_embeddings_and_output_weights"))
    layers = source.fields["num_layers"]
    last = source.family.layer_prefix.partition("{layer}")[0]
    number = name.removeprefix(last).partition(".")[0]
    return bool(source.family.multi_token) and name.startswith(last) and number.isdigit() and int(number) >= layers


def _has_multi_token_layers(source: HFSource) -> bool:
    start = source.family.layer_prefix.replace("{layer}", str(source.fields["num_layers"]))
    return any(name.startswith(start) for name in SafetensorsFolder(source.folder).shapes)


def _read_piece(
    piece: ModelPiece, folder: SafetensorsFolder, weights: WeightMap, aliases: Mapping[str, list[str]]
) -> None:
    """Read a rectangle into its place; what stands for no token becomes zero."""
    parts = [part for block in weights.blocks[piece.name] if (part := block.within(piece.start, piece.shape))]
    target = piece.data.view(piece.shape) if piece.data.shape != piece.shape else piece.data
    if sum(torch.Size(part.shape).numel() for part in parts) < target.numel():
        target.zero_()
    for part in parts:
        values = folder.read(part.hf, part.hf_start, part.hf_shape)
        for alias in aliases.get(part.hf, ()):
            _check_equal(folder, part.hf, alias, values, part.hf_start, part.hf_shape)
        place = tuple(slice(a - b, a - b + n) for a, b, n in zip(part.start, piece.start, part.shape, strict=True))
        target[place].copy_((values.t() if part.transposed else values).view_as(target[place]))


def _check_equal(
    folder: SafetensorsFolder, name: str, alias: str, values: Tensor, start: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    if not torch.equal(values, folder.read(alias, start, shape)):
        raise ValueError(
            f"{alias} in {folder.folder} differs from {name}, and Megatron's model has one of them for both; set"
            " mtp_num_layers=None in transformer to leave multi-token prediction out"
        )
