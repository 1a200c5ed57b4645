# SPDX-License-Identifier: Apache-2.0
"""The config of a Hugging Face model: read with the defaults that transformers fills in, refused where it must be.

transformers completes a ``config.json`` and brings old spellings into one form, so the rules of a family meet every key
under one name. It is imported here alone, when it is needed, for that takes two seconds.
"""

import copy
import functools
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from lightning_mcore.hf.config_rules import refuse_outside, refuse_unless
from lightning_mcore.hf.download_checksums import check_download
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.known_families import find_family, registered_family

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

LONGEST_JSON = 100 << 20
"""Bytes of a JSON file or a header that are read, as the library of safetensors has it; more is damage."""

_LENGTH = 8  # bytes in front of the header of a safetensors file, with its length
_DEEPEST = 64  # levels of JSON
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MOST_LABELS = 1_000_000

_DESCRIPTIONS = ("*.json",)
_DOWNLOADED = (*_DESCRIPTIONS, "*.safetensors", "*.model", "*.jinja", "*.txt", "tokenizer*")


def local_folder(path: str | os.PathLike[str], weights: bool = True) -> str:
    """Return the folder of a model; that of a name on the Hugging Face hub, such as ``"org/model"``, after a download.

    Args:
        path: Folder or name.
        weights: Whether to download them too, or config and index alone.

    Raises:
        FileNotFoundError: There is no such folder, and no such name.
    """
    where = os.fspath(path)
    if os.path.isdir(where):
        return where
    if not is_hub_name(where):
        raise FileNotFoundError(f"{where} is no folder of a Hugging Face model; give one with a {CONFIG_FILE}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(where, allow_patterns=list(_DOWNLOADED if weights else _DESCRIPTIONS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{where} is no folder, and no model of that name could be downloaded; give a folder with a {CONFIG_FILE}"
        ) from error


def is_hub_name(path: str) -> bool:
    """Return whether a path, where nothing is, has the form of a name on the Hugging Face hub: ``"org/model"``."""
    return not os.path.exists(path) and path.count("/") == 1 and not path.startswith((".", "/", "~"))


def is_unknown_on_hub(path: str) -> bool:
    """Return whether a path is a name on the Hugging Face hub, and its config has not been downloaded."""
    if not is_hub_name(path):
        return False
    from huggingface_hub import try_to_load_from_cache

    return not isinstance(try_to_load_from_cache(path, CONFIG_FILE), str)


def read_config(folder: str) -> dict[str, Any]:
    """Return a model's config as it stands in the file.

    Args:
        folder: Where its ``config.json`` lies.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: It is no config of a model, or of one whose weights are quantised.
    """
    content = read_json(folder, CONFIG_FILE)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{folder}/{CONFIG_FILE} has no model_type; give the folder of a Hugging Face model")
    quantised = content.get("quantization_config") or content.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "some method") if isinstance(quantised, dict) else "some method"
        raise ValueError(
            f"the weights in {folder} are quantised with {method}, and training needs whole ones; give the"
            " model in bf16, fp16 or fp32"
        )
    return content


def complete_config(family: Family, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` with the defaults of transformers, where it knows the model.

    transformers makes lists as long as the numbers say and looks names up in torch, so these are checked before.

    Args:
        family: Its family.
        content: What stands in it.

    Raises:
        ValueError: A value is out of its range, or transformers refuses it.
    """
    family.check_sizes(content)
    for key in ("dtype", "torch_dtype"):
        refuse_unless(key, content.get(key), (None, *_DTYPES), "weights are trained in one of these")
    if content.get("num_labels") is not None:
        refuse_outside("num_labels", content["num_labels"], 0, _MOST_LABELS)
    return copy.deepcopy(_completed(json.dumps(dict(content))))


@functools.lru_cache(maxsize=16)  # a run asks several times, and transformers warns each time
def _completed(text: str) -> dict[str, Any]:
    from transformers import AutoConfig

    given: dict[str, Any] = json.loads(text)
    try:
        config = AutoConfig.for_model(given.pop("model_type"), **given)
        whole: dict[str, Any] = config.to_dict()
    except Exception as error:  # keys are set as attributes, so any may take the place of anything
        if "Unrecognized model identifier" in str(error):
            found: dict[str, Any] = json.loads(text)
            return found
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of it has quotes
        raise ValueError(f"transformers refuses {CONFIG_FILE}: {' '.join(str(reason).split())}") from error
    return whole


def family_of(config: Mapping[str, Any], family: str | None) -> Family:
    """Return the family of a config.

    Args:
        config: As :func:`read_config` returns it.
        family: Name or path of the family, as the user has given it; None for what the config says, which is a name.

    Raises:
        ValueError: There is no such family.
    """
    return find_family(family) if family else registered_family(str(config["model_type"]))


def read_generation_config(folder: str) -> dict[str, Any] | None:
    """Return the content of ``generation_config.json``; None where there is none."""
    return read_json(folder, GENERATION_FILE) if os.path.exists(os.path.join(folder, GENERATION_FILE)) else None


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a model.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds something else than a JSON object, or is not the file that was downloaded.
    """
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{folder} has no {name}; give the folder of a Hugging Face model")
    size = os.path.getsize(path)
    if size > LONGEST_JSON:
        raise ValueError(f"{path} has {size} bytes, and no more than {LONGEST_JSON} are read; download it again")
    check_download(path)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        _check_plain(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON, or only a part of it ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; download it again")
    return content


def _check_plain(content: Any) -> None:
    """Refuse what JSON has no word for, and what is nested so deep that nobody could go through it.

    Raises:
        ValueError: There is such a thing.
    """
    level = [("", content)]
    for _ in range(_DEEPEST):
        deeper: list[tuple[Any, Any]] = []
        for key, value in level:
            if isinstance(value, dict):
                deeper += value.items()
            elif isinstance(value, list):
                deeper += [(key, item) for item in value]
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} is {value}, which is not a number of JSON")
        level = deeper
    if level:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


def read_header(path: str) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where the tensors begin.

    Args:
        path: The file.

    Raises:
        ValueError: It is damaged.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 0 < length <= min(size - _LENGTH, LONGEST_JSON):
            raise ValueError(
                f"{path} is damaged, for it has {size} bytes and announces a header of {length}; download it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        _check_plain(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, for its header is no JSON; download it again") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is damaged, for its header lists no tensors; download it again")
    header.pop("__metadata__", None)
    return header, _LENGTH + length
