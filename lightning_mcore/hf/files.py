# SPDX-License-Identifier: Apache-2.0
"""Single files of a Hugging Face model: JSON, and the hub's checksums.

A model's files contain no checksums, so a flipped bit on disk goes unnoticed: it only changes a weight. A file from the
hub does have a checksum nearby. In the cache, the file is a link to a blob named after its checksum; a download into a
folder keeps the checksum in ``.cache/huggingface/download``. Large files have a SHA-256, small ones git's SHA-1. Copies
of such a folder and models from other sources have no checksums.

Source: "Understand caching" and ``_local_folder.py`` (huggingface_hub 1 and 2).
"""

import hashlib
import json
import math
import os
import re
from typing import Any

CONFIG_FILE, ADAPTER_CONFIG_FILE = "config.json", "adapter_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE, PICKLED_INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"

_LONGEST_JSON = 100 << 20  # bytes
_DEEPEST = 64
_GIT, _SHA256 = 40, 64  # hexadecimal digits
_ETAG = re.compile(rf"[0-9a-f]{{{_GIT}}}|[0-9a-f]{{{_SHA256}}}")
_CHUNK = 8 << 20  # bytes
_LATER = 1.0  # seconds by which a file may be newer than its metadata, because file times are coarse


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a model; ValueError if it is not an object, or not what was downloaded."""
    content = read_json_value(folder, name)
    if not isinstance(content, dict):
        path = os.path.join(folder, name)
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; download it again")
    return content


def read_json_value(folder: str, name: str) -> Any:
    """Return the content of a JSON file, also if it is not an object; raises like :func:`read_json`."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{folder} has no {name}; give the folder of a Hugging Face model")
    size = os.path.getsize(path)
    if size > _LONGEST_JSON:
        raise ValueError(f"{path} has {size} bytes, more than the {_LONGEST_JSON} that are read; download it again")
    check_download(path)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read().decode())
        _check_plain(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or only part of it ({error}); download it again") from error
    return content


_WITHOUT_END = "time_step_limit"  # published configs of Nemotron-H have [0.0, Infinity]


def _check_plain(content: Any) -> None:
    """Raise ValueError for NaN and infinity, which are not JSON, and for values that are nested too deeply."""
    # Level by level instead of by recursion, which a deeply nested file would exhaust
    level = [("", content)]
    for _ in range(_DEEPEST):
        deeper: list[tuple[Any, Any]] = []
        for key, value in level:
            if isinstance(value, dict):
                deeper += value.items()
            elif isinstance(value, list):
                deeper += [(key, item) for item in value]
            elif isinstance(value, float) and not math.isfinite(value) and key != _WITHOUT_END:
                raise ValueError(f"{key} is {value}, which is not a JSON number")
        level = deeper
    if level:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


def check_download(path: str) -> bool:
    """Compare a file with the hub's checksum, and return whether there is one; ValueError if it differs."""
    told = _of_cache(path) or _of_folder(path)
    if told is None:
        return False
    digest = hashlib.sha256() if len(told) == _SHA256 else hashlib.sha1(usedforsecurity=False)
    with open(path, "rb") as file:
        if len(told) == _GIT:
            # git hashes "blob <size>\0" before the content
            digest.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != told:
        raise ValueError(
            f"{path} differs from the hub's file of that name: its checksum is {digest.hexdigest()[:12]}, and the"
            f" hub's is {told[:12]}; download it again, or copy the folder to another place if the change is yours"
        )
    return True


def _of_cache(path: str) -> str | None:
    """Return the checksum in the name of the blob that a link points to; None if there is none."""
    if not os.path.islink(path):
        return None
    folder, name = os.path.split(os.readlink(path))
    return name if os.path.basename(folder) == "blobs" and _ETAG.fullmatch(name) else None


def _of_folder(path: str) -> str | None:
    """Return the checksum that a download saved; None if the file was changed later, on purpose."""
    folder, name = os.path.split(path)
    try:
        with open(
            os.path.join(folder, ".cache", "huggingface", "download", f"{name}.metadata"), encoding="utf-8"
        ) as file:
            # Three lines: the commit, the checksum (ETag), and the time of the download
            _, told, time = (line.strip() for line in file.read(1000).splitlines()[:3])
        if os.path.getmtime(path) - _LATER > float(time):
            return None
    except (OSError, ValueError):
        return None
    return told if _ETAG.fullmatch(told) else None
