# SPDX-License-Identifier: Apache-2.0
"""The config of a Hugging Face model: read with the defaults that transformers fills in, refused where it must be.

transformers completes a ``config.json`` and brings old spellings into one form, so the rules of a family meet every key
under one name. It is imported here alone, when it is needed, for that takes two seconds.
"""

import copy
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from lightning_mcore.hf.family import Family
from lightning_mcore.hf.known_families import find_family, registered_family

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

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
    if os.path.exists(where) or where.count("/") != 1 or where.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{where} is no folder of a Hugging Face model; give one with a {CONFIG_FILE}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(where, allow_patterns=list(_DOWNLOADED if weights else _DESCRIPTIONS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{where} is no folder, and no model of that name could be downloaded; give a folder with a {CONFIG_FILE}"
        ) from error


def read_config(folder: str) -> dict[str, Any]:
    """Return a model's config with all defaults.

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
    if content.get("quantization_config") or content.get("compression_config"):
        method = (content.get("quantization_config") or {}).get("quant_method", "some method")
        raise ValueError(
            f"the weights in {folder} are quantised with {method}, and training needs whole ones; give the"
            " model in bf16, fp16 or fp32"
        )
    return complete_config(content)


def complete_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` with the defaults of transformers, where it knows the model.

    Raises:
        ValueError: Transformers refuses it.
    """
    return copy.deepcopy(_completed(json.dumps(dict(content))))


@functools.lru_cache(maxsize=16)  # a run asks several times, and transformers warns each time
def _completed(text: str) -> dict[str, Any]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    given: dict[str, Any] = json.loads(text)
    try:
        config = AutoConfig.for_model(given.pop("model_type"), **given)
    except (StrictDataclassError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        if "Unrecognized model identifier" in str(error):
            found: dict[str, Any] = json.loads(text)
            return found
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of it has quotes
        raise ValueError(f"transformers refuses {CONFIG_FILE}: {' '.join(str(reason).split())}") from error
    whole: dict[str, Any] = config.to_dict()
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
        ValueError: It holds something else than a JSON object.
    """
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{folder} has no {name}; give the folder of a Hugging Face model")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, or only a part of it ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; download it again")
    return content
