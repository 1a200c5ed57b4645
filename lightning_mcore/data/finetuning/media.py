# SPDX-License-Identifier: Apache-2.0
"""Image and video files as rows have them: paths within ``media_dir``, or the bytes of files.

``images.py`` and ``videos.py`` open them twice: when rows are tokenised, to count tokens, and when batches are made. In
errors, ``name`` is the row and ``kind`` is ``"an image"`` or ``"a video"``.
"""

import os
from collections.abc import Mapping
from io import BytesIO
from typing import Any

Stored = dict[str, Any]
"""A file: its ``path`` within ``media_dir``, or its ``bytes``; the other is None."""


class UnusableFileError(ValueError):
    """An image or a video does not exist, or cannot be read or used; with ``broken="drop"`` its row is left out."""


def stored(given: Any, kind: str, name: str) -> Stored:
    """Return a file as its path or its bytes, given one of these or a mapping of both; raise TypeError otherwise."""
    if isinstance(given, str) and given:
        return {"path": given, "bytes": None}
    if isinstance(given, bytes):
        return {"path": None, "bytes": given}
    # As ``datasets`` stores images and videos. The bytes win; the path may then be only a name.
    if isinstance(given, Mapping):
        path, content = given.get("path"), given.get("bytes")
        if (isinstance(content, bytes) and content) or (content is None and isinstance(path, str) and path):
            return {"path": path, "bytes": content}
    raise TypeError(f"{name} has {kind} of type {type(given).__name__}; give its path, or the bytes of its file")


def called(file: Stored, media_dir: str) -> str:
    """Return a name for a file in errors."""
    return os.path.join(media_dir, file["path"]) if file["path"] else f"one of {len(file['bytes'])} bytes"


def source(file: Stored, media_dir: str, kind: str, name: str) -> str | BytesIO:
    """Return the path of a file, or its bytes as a file object. Raises UnusableFileError if there is no such file."""
    if file["bytes"] is not None:
        return BytesIO(file["bytes"])
    path = os.path.join(media_dir, file["path"])
    if not os.path.isfile(path):
        # Instead of a path, some datasets have a whole file in base64.
        shown = os.path.join(media_dir, file["path"][:300])
        raise UnusableFileError(f"{shown}, {kind} of {name}, does not exist; give its path, relative to media_dir")
    return path


def opened_image(file: Stored, media_dir: str, name: str) -> Any:
    """Open an image of a row, of which only the header is read; UnusableFileError if it is not one."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "images need Pillow, which is not installed; install lightning-mcore[vision]"
        ) from error
    try:
        return Image.open(source(file, media_dir, "an image", name))
    except (OSError, Image.DecompressionBombError) as error:  # too many pixels to be safe
        raise UnusableFileError(
            f"{called(file, media_dir)}, an image of {name}, is not an image that can be read; give its path, relative"
            " to media_dir"
        ) from error


def loaded_image(file: Stored, media_dir: str, name: str) -> Any:
    """Read an image of a row; raises like :func:`opened_image`, and also for damage beyond the header."""
    with opened_image(file, media_dir, name) as image:
        try:
            image.load()
        except (OSError, SyntaxError, ValueError) as error:
            what = called(file, media_dir)
            raise UnusableFileError(f"{what} is damaged: {error}; replace the file, or remove its row") from error
        return image
