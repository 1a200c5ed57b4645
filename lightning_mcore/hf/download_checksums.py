# SPDX-License-Identifier: Apache-2.0
"""Whether a file of a Hugging Face model is still the one that was downloaded, where the hub's checksum lies beside it.

A file of a model has no checksum in it, so a bit that flips on the disk is another weight and nobody sees it. What came
from the hub has one: in the cache the file is a link to a blob that is named by it, and a download into a folder keeps
it in ``.cache/huggingface/download``. Large files have their SHA-256, small ones git's SHA-1. A copy of such a folder,
and a model of one's own, have none.

Source: "Understand caching" and ``_local_folder.py`` (huggingface_hub 1 and 2).
"""

import hashlib
import os
import re

_GIT, _SHA256 = 40, 64  # hexadecimal digits
_ETAG = re.compile(rf"[0-9a-f]{{{_GIT}}}|[0-9a-f]{{{_SHA256}}}")
_CHUNK = 8 << 20  # bytes
_LATER = 1.0  # seconds by which a file may be younger than what is said of it; clocks of disks are coarse


def check_download(path: str) -> bool:
    """Compare a file with the hub's checksum of it.

    Args:
        path: The file.

    Returns:
        Whether there is one to compare with.

    Raises:
        ValueError: It differs.
    """
    told = _of_cache(path) or _of_folder(path)
    if told is None:
        return False
    digest = hashlib.sha256() if len(told) == _SHA256 else hashlib.sha1(usedforsecurity=False)
    with open(path, "rb") as file:
        if len(told) == _GIT:
            digest.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != told:
        raise ValueError(
            f"{path} is not what the hub has under that name, for its checksum is {digest.hexdigest()[:12]} and the"
            f" hub's {told[:12]}; download it again, or copy the folder elsewhere if the change is yours"
        )
    return True


def _of_cache(path: str) -> str | None:
    """Return the checksum that the blob behind a link is named by."""
    if not os.path.islink(path):
        return None
    folder, name = os.path.split(os.readlink(path))
    return name if os.path.basename(folder) == "blobs" and _ETAG.fullmatch(name) else None


def _of_folder(path: str) -> str | None:
    """Return the checksum that a download left; None where the file was changed since, on purpose."""
    folder, name = os.path.split(path)
    try:
        with open(
            os.path.join(folder, ".cache", "huggingface", "download", f"{name}.metadata"), encoding="utf-8"
        ) as file:
            _, told, time = (line.strip() for line in file.read(1000).splitlines()[:3])
        if os.path.getmtime(path) - _LATER > float(time):
            return None
    except (OSError, ValueError):
        return None
    return told if _ETAG.fullmatch(told) else None
