# SPDX-License-Identifier: Apache-2.0
"""A whole run as plain data, whatever kind of file describes it.

A LightningCLI file, arguments in the style of Hugging Face and a LLaMA-Factory file all become :class:`RunSettings`;
``lightning-mcore plan`` reads them, and the commands build Lightning's objects from them. No torch, no megatron-core.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_mcore.config.ray import RaySettings


@dataclass(frozen=True)
class RunSettings:
    """The arguments of a run by name, as plain data (numbers, strings, lists, dicts); absent ones have their defaults.

    Args:
        strategy: Arguments of ``MCoreStrategy``; ``ddp_config``, ``optimizer_config`` and ``communication`` as dicts of
            their fields.
        precision: Arguments of ``MCorePrecision``; ``"precision"`` is the name of the number format.
        model: Arguments of ``MCoreGPT``, or, with ``"path"``, those of ``MCoreGPT.from_pretrained``; with
            ``"preference"``, those of ``MCorePreference``.
        trainer: Arguments of ``Trainer`` except strategy, precision, callbacks and loggers: ``devices``, ``num_nodes``,
            ``accelerator``, ``accumulate_grad_batches``, ``max_steps``, ...
        data: ``batch_size`` (rows of a DataLoader batch on one data-parallel rank), ``seq_length`` (tokens), and other
            arguments of the data.
        notes: A line for each key that the run treats differently from what the file says.
        ray: How Ray starts the run; None without Ray.
        image_tokens: Tokens of images in a row, for which ``plan`` counts the vision tower; None if unknown.
    """

    strategy: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ray: RaySettings | None = None
    image_tokens: int | None = None


def number_of_devices(given: Any) -> int | None:
    """Return how many devices ``Trainer(devices=...)`` names on each machine; None if it means all there are.

    Args:
        given: A number, a list of indices, or text with one of them, such as ``"0,1"``.

    Raises:
        ValueError: It is none of these.
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
    """Return the name of a class and its arguments, from the form that YAML files use.

    Source: the form ``{class_path: ..., init_args: ...}`` of jsonargparse.

    Args:
        given: That form; a class path alone; or a mapping of arguments, for which the name is empty.
    """
    if isinstance(given, str):
        return given.rpartition(".")[2], {}
    if "class_path" not in given:
        return "", dict(given)
    arguments = {**(given.get("init_args") or {}), **(given.get("dict_kwargs") or {})}
    return str(given["class_path"]).rpartition(".")[2], arguments


def rows_of_pairs(model: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of data with batch sizes in rows; given for padded pairs, they count pairs of two rows each.

    Args:
        model: ``RunSettings.model``; with ``"preference"``, the data holds pairs.
        data: Arguments of the data.
    """
    if "preference" not in model or data.get("packing"):
        return dict(data)
    sizes = {name: data[name] for name in ("batch_size", "eval_batch_size") if isinstance(data.get(name), int)}
    return {**data, **{name: 2 * size for name, size in sizes.items()}}
