# SPDX-License-Identifier: Apache-2.0
"""A whole run as plain data, whatever kind of file describes it.

LightningCLI files, Hugging Face style arguments and LLaMA-Factory files all become :class:`RunSettings`.
``lightning-mcore plan`` reads them, and the commands build Lightning's objects from them. No torch, no megatron-core.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_mcore.config.embedding import Embedding
from lightning_mcore.config.ray import RaySettings
from lightning_mcore.config.reranking import Reranker


@dataclass(frozen=True)
class RunSettings:
    """The arguments of a run by name, as plain data; absent ones have their defaults."""

    # Arguments of MCoreStrategy; ddp_config, optimizer_config and communication are dicts of their fields.
    strategy: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    # Arguments of MCoreGPT; with "path", of MCoreGPT.from_pretrained; with "preference", of MCorePreference; with
    # "distillation", of MCoreDistillation; with "embedding", of MCoreEmbedding; with "reranker", of MCoreReranker.
    model: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    # batch_size (rows of a DataLoader batch on one data-parallel rank), seq_length (tokens), and other arguments
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # a line for each key that the run treats differently
    ray: RaySettings | None = None
    image_tokens: int | None = None  # per row, so that plan counts the vision tower


def number_of_devices(given: Any) -> int | None:
    """Return how many devices ``Trainer(devices=...)`` names on each machine; None if it means all there are.

    It may be a number, a list of indices, or text: ``"0,1"`` is 2. Raises ValueError for anything else.
    """
    if isinstance(given, list | tuple):
        return len(given)
    if given in (None, "auto", -1, "-1"):
        return None
    if isinstance(given, str) and "," in given:
        return len([index for index in given.split(",") if index.strip()])
    if isinstance(given, bool) or not str(given).strip().isdigit():
        raise ValueError(f"devices={given!r} is not a number of devices; give a number, or indices such as '0,1'")
    return int(given)


def class_and_arguments(given: Any) -> tuple[str, dict[str, Any]]:
    """Return a class name and its arguments, from the form that YAML files use.

    ``{"class_path": "lightning_mcore.MCoreGPT", "init_args": {"vocab_size": 8}}`` gives
    ``("MCoreGPT", {"vocab_size": 8})``. ``given`` may also be a class path alone, or a mapping of arguments, for which
    the name is empty. Source: jsonargparse.
    """
    if isinstance(given, str):
        return given.rpartition(".")[2], {}
    if "class_path" not in given:
        return "", dict(given)
    arguments = {**(given.get("init_args") or {}), **(given.get("dict_kwargs") or {})}
    return str(given["class_path"]).rpartition(".")[2], arguments


def rows_of_pairs(model: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data arguments with batch sizes in rows; a padded pair, or the texts of a query, have a row each.

    The data holds pairs if ``model`` has a ``"preference"``, and queries if it has an ``"embedding"`` or a
    ``"reranker"``. A batch size of 4 pairs becomes 8 rows.
    """
    rows = 2 if "preference" in model else 1
    if "embedding" in model:
        rows = Embedding.of(model["embedding"]).texts
    if "reranker" in model:
        rows = Reranker.of(model["reranker"]).texts
    if rows == 1 or data.get("packing"):
        return dict(data)
    sizes = {name: data[name] for name in ("batch_size", "eval_batch_size") if isinstance(data.get(name), int)}
    return {**data, **{name: rows * size for name, size in sizes.items()}}
