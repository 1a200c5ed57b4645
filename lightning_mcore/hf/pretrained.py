# SPDX-License-Identifier: Apache-2.0
"""Start from a Hugging Face model: its weights fill the chunks of the running layout.

:func:`load_pretrained` reads into each chunk that a rank has built the rectangles that belong there. No rank reads more
of a tensor than it holds. What the model is, its config says, before there are ranks: ``hf_source.py``.

It takes a checkpoint directory as well, which ``lightning-mcore import`` or a run of ``MCoreGPT`` wrote: it has the
settings and the weights, and the Hugging Face folder is not needed any more.
"""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from tqdm import tqdm

from lightning_mcore.agreement import on_all
from lightning_mcore.chunks import find_pipeline
from lightning_mcore.hf.family import complete_fields
from lightning_mcore.hf.hf_source import HFSource, absolute, is_own_checkpoint, pretrained_settings
from lightning_mcore.hf.hf_weights import HFWeights
from lightning_mcore.hf.model_pieces import ModelPieces, pieces_of_module
from lightning_mcore.weights import load_weights

__all__ = ["absolute", "load_pretrained", "pretrained_settings", "running_fields"]

_FILLED = "_filled_from_hugging_face"  # set on a model that load_pretrained has filled
_SILENT_SECONDS = 2.0  # reading that takes no longer shows no progress


def load_pretrained(module: pl.LightningModule, path: str, family: str | None = None) -> None:
    """Fill the chunks that ``pipeline()`` has built from a Hugging Face model; collective over the world.

    Once for each model: where ``fit`` is followed by ``validate``, what was trained stays. Rows of the
    embedding that stand for no token become zero; ``MCoreGPT`` keeps them out of the loss, a plain ``GPTModel`` does
    not, so give that one the vocabulary's own size.

    Args:
        module: A module whose model is built and not wrapped yet, as at the end of ``configure_model``.
        path: The model's folder, its name on the Hugging Face hub, or a checkpoint of a model made from one.
        family: Name or path of its family; None for what its config says.

    Raises:
        FileNotFoundError: There is no such model, or a file of it is missing.
        RuntimeError: The module has no model yet, or it is being trained.
        ValueError: The weights are not those of this model, or damaged; the same on every rank.
    """
    pipeline = find_pipeline(module)
    if pipeline is not None and pipeline.__dict__.get(_FILLED):
        return
    if any(hasattr(parameter, "main_grad") for parameter in module.parameters()):
        raise RuntimeError("load_pretrained() was called while the model is trained; call it in configure_model()")
    if is_own_checkpoint(path):
        load_weights(module, path)
    else:
        source = on_all(lambda: HFSource.open(path, family))
        pieces = pieces_of_module(module)
        on_all(lambda: _fill(source, pieces, running_fields(source, module)))
    if pipeline is not None:
        object.__setattr__(pipeline, _FILLED, True)


def running_fields(source: HFSource, module: pl.LightningModule) -> dict[str, Any]:
    """Return the settings of a model that is built: what its config says of itself, and the rest from its source.

    Args:
        source: What it is to be filled from.
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


def _fill(source: HFSource, pieces: ModelPieces, fields: Mapping[str, Any]) -> None:
    multi_token = source.fields.get("mtp_num_layers") or 0
    weights = HFWeights(source.open_tensors(), source.family, fields, pieces.shapes, multi_token)
    own = tqdm(
        pieces.own,
        desc=f"reading {source.folder}",
        unit=" tensors",
        disable=dist.get_rank() != 0,
        delay=_SILENT_SECONDS,
        leave=False,
    )
    with torch.no_grad():
        for piece in own:
            weights.fill(piece.data, piece.name, piece.start, piece.shape)
